"""One training loop for everybody: any torch model, any data, any objective; resumed bit for bit after a crash.

    history = fit(net, (x, y), objective=bbalpha.CrossEntropy(alpha=0.5), epochs=20, length_scale=1.0,
                  validation=0.1, patience=5, checkpoint="run")

Masks of step t and the order of epoch e follow from (seed, t) and (seed, e): a run can be taken up at any step.
"""

import math
import numbers
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bbalpha._engine.planning import Masks
from bbalpha._engine.selection import Sites
from bbalpha._files import FolderInUseError, Lock, Restoring
from bbalpha._kernels import draw_seed
from bbalpha.checks import check_any_seed, check_call, check_count, check_flag, check_model, check_number, check_path
from bbalpha.distributed.joining import on_main, processes
from bbalpha.distributed.ranks import Spread
from bbalpha.distributed.step import Step
from bbalpha.training.feed import Source, held_out, source
from bbalpha.training.loop import History as History
from bbalpha.training.loop import Objective, Training, on_device
from bbalpha.training.loop import Progress as Progress
from bbalpha.training.optimizers import Groups, make_optimizer
from bbalpha.training.resuming import state_in
from bbalpha.training.spreading import Together, check_spread


def fit(
    model: nn.Module,
    data: Any,
    *,
    objective: Objective,
    epochs: int,
    n_passes: int | Callable[[float], int] | None = 10,
    batch_size: int = 128,
    length_scale: float | None = None,
    optimizer: Optimizer | Callable[[Groups], Optimizer] | None = None,
    learning_rate: float = 1e-3,
    schedule: Callable[[float], float] | LRScheduler | None = None,
    validation: Any = None,
    patience: int | None = None,
    masks: Masks = "per_example",
    balanced: bool = True,
    sites: Sites | None = None,
    max_grad_norm: float | None = None,
    amp: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    callback: Callable[[Progress], bool | None] | None = None,
    progress: bool | None = None,
    seed: int | None = None,
    distributed: bool | Spread = False,
) -> History:
    """Train `model` in place on K passes a step, and tell how it went.

    Args:
        model: Any module with an active random site; with ``n_passes=None`` any module.
        data: (x, target) or (x, target, weight) of arrays or tensors; a Dataset or DataLoader of such pairs. A mapping
            with "labels", as Hugging Face has it, in place of a pair: the labels are the target, the rest is x. Or
            `bbalpha.training.Shards`, Parquet larger than memory.
        objective: (outputs, target) -> (), such as CrossEntropy or GaussianNLL; its parameters are trained too.
        epochs: Times through the data.
        n_passes: K, or a function of the share of training done, in [0, 1), for a rising K. None trains the network
            as it is, random sites off, everything else in training mode.
        batch_size: Rows a step; a DataLoader and `Shards` have their own.
        length_scale: l of the prior; None or 0 trains without one.
        optimizer: None is Adam. Or a function of parameter groups (the prior is in their weight decay), or an
            optimiser (the prior is added to the loss).
        learning_rate: Of the default Adam.
        schedule: A function of the share of training done that multiplies the learning rate (`cosine`), or a
            torch scheduler, stepped after every step.
        validation: Data as above, or the fraction of `data` to hold out. The weights of the epoch with the
            best validation log-likelihood are kept.
        patience: Stop after so many epochs without a better one.
        masks: As in `sample`.
        balanced: As in `sample`.
        sites: The random sites that draw, in training and in validation, the others off; as in `sample`.
        max_grad_norm: Gradients are clipped to this norm.
        amp: torch.bfloat16 or torch.float16 for automatic mixed precision.
        checkpoint: A folder for the state of the run, of one run at a time. If it holds the same run, that goes on, to
            the same bits; another run is refused: other data, model, objective, optimiser or options. More `epochs`
            are the same run unless `schedule` or `n_passes` is a function of the share done.
        checkpoint_every: Steps between checkpoints; None is every epoch.
        callback: Told of every epoch; training stops where it returns True.
        progress: None shows a bar on terminals and in notebooks; True also tells, where there is neither, in ten lines
            at most on the error stream; False shows nothing.
        seed: None draws one from torch's global generator; an int leaves that untouched.
        distributed: True for all processes that torchrun started, each with its rows of every batch; a
            `bbalpha.distributed.Spread` says more. `batch_size` is that of all ranks together, data and options are
            the same on all, rank 0 writes the checkpoint and calls back; a run goes on with any number of ranks.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
    >>> x = torch.randn(64, 2)
    >>> from bbalpha.objectives import GaussianNLL
    >>> history = fit(net, (x, x[:, :1]), objective=GaussianNLL(alpha=0.5), epochs=30, learning_rate=0.05, seed=0)
    >>> history.n_steps, history.loss[-1] < history.loss[0]
    (30, True)
    """
    _check(model, objective, amp, masks)
    if callback is not None:
        check_call("callback", callback)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        check_call("optimizer", optimizer)
    epochs, batch_size = check_count("epochs", epochs), check_count("batch_size", batch_size)
    n_passes = n_passes if n_passes is None or callable(n_passes) else check_count("n_passes", n_passes)
    patience = None if patience is None else check_count("patience", patience)
    every = None if checkpoint_every is None else check_count("checkpoint_every", checkpoint_every)
    learning_rate = check_number("learning_rate", learning_rate, least=0)
    length_scale = None if length_scale is None else check_number("length_scale", length_scale, least=0)
    max_grad_norm = None if max_grad_norm is None else check_number("max_grad_norm", max_grad_norm, above=0)
    seed = check_any_seed(seed)
    folder = None if checkpoint is None else Path(check_path("checkpoint", checkpoint))
    parameter = next(model.parameters())
    spread = _spread(distributed, optimizer, amp)
    before = _Before(model, seeded=seed is not None, mixed=amp is not None)
    with (
        Restoring(before.put_back), Restoring(before.put_back),
        nullcontext() if spread is None else processes(timeout=spread.timeout), _opened(folder, spread) as state,
    ):  # fmt: skip
        base = seed if seed is not None else state["seed"] if state else _drawn_seed(spread)
        train, held = _sources(data, validation, batch_size, parameter.dtype, base)
        if isinstance(objective, nn.Module):
            objective.to(parameter.device)
        made_for: list[Together] = []

        def prepare() -> None:
            if spread is not None:
                step = Step(
                    model, objective, spread=spread, masks=masks, balanced=balanced, sites=sites, amp=amp
                )  # fmt: skip
                made_for.append(Together(step, getattr(objective, "group_size", 1)))

        made, penalty = make_optimizer(
            model, objective, optimizer, learning_rate=learning_rate, length_scale=length_scale, n_data=train.n_data,
            example=lambda: on_device(train.example(), parameter.device), sites=None if n_passes is None else sites,
            prepare=prepare,
        )  # fmt: skip
        _check_schedule(schedule, made)
        together = made_for[0] if made_for else None
        run = Training(
            model, objective, train, held, made, penalty, base, epochs=epochs, n_passes=n_passes, schedule=schedule,
            patience=patience, masks=masks, balanced=check_flag("balanced", balanced), sites=sites,
            max_grad_norm=max_grad_norm, amp=amp, callback=callback, folder=folder, every=every, facts={
                "n_data": train.n_data, "batch_size": batch_size, "length_scale": length_scale, "seed": seed,
                "learning_rate": learning_rate if optimizer is None else None,
            }, together=together,
        )  # fmt: skip
        before.also(run.put_back)
        with epoch_bar(progress if together is None or together.main else False, epochs) as bar:
            if seed is not None or spread is not None:
                torch.manual_seed(base)  # for a DataLoader's order and what a model draws by itself
            history = run(bar, state)
        if together is not None:
            together.restore_whole()
        return history


def cosine(share: float) -> float:
    """A schedule that falls from 1 to 0 along half a cosine.

    >>> [round(cosine(s), 3) for s in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    return 0.5 * (1 + math.cos(math.pi * share))


# ------------------------------------------------------------------------------ helpers


def _spread(distributed: Any, optimizer: Any, amp: Any) -> Spread | None:
    """How ranks share the work; None where there are none."""
    if not isinstance(distributed, Spread):
        return Spread() if check_flag("distributed", distributed) else None
    check_spread(optimizer, amp, shard=distributed.shard)
    return distributed


def _drawn_seed(spread: Spread | None) -> int:
    """A seed from torch's global generator, that of rank 0."""
    return draw_seed(None) if spread is None else on_main(lambda: draw_seed(None))


@contextmanager
def _opened(folder: Path | None, spread: Spread | None) -> Iterator[dict[str, Any] | None]:
    """A context in which this run has the folder for itself, with the state in it; of many ranks the first has it."""
    if folder is None:
        yield None
    elif spread is None:
        with _alone(folder):
            yield state_in(folder)
    else:
        with ExitStack() as held:
            yield on_main(lambda: (held.enter_context(_alone(folder)), state_in(folder))[1])


def _sources(
    data: Any, validation: Any, batch_size: int, dtype: torch.dtype, seed: int
) -> tuple[Source, Source | None]:
    """Where batches come from, in training and, where it is asked for, in validation."""
    if isinstance(validation, numbers.Real) and not isinstance(validation, bool):
        data, validation = held_out(data, float(validation), seed)
    train = source(data, batch_size=batch_size, dtype=dtype)
    if validation is None:
        return train, None
    return train, source(validation, batch_size=256, dtype=dtype, shuffle=False, name="validation")


class _Before:
    """Modes, gradient mode, autocast and, for a seeded run, generators, as they were: put back however a run ends."""

    def __init__(self, model: nn.Module, *, seeded: bool, mixed: bool) -> None:
        device = next(model.parameters()).device.type
        modes = [(m, m.training) for m in model.modules()]
        grad = torch.is_grad_enabled()
        autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) if mixed else None
        generator = torch.get_rng_state() if seeded else None
        others = torch.cuda.get_rng_state_all() if seeded and torch.cuda.is_initialized() else []

        def put_back() -> None:
            torch.set_grad_enabled(grad)
            if autocast is not None:
                torch.set_autocast_enabled(device, autocast[0])
                torch.set_autocast_dtype(device, autocast[1])
            for module, mode in modes:
                module.training = mode
            if generator is not None:
                torch.set_rng_state(generator)
            if others:
                torch.cuda.set_rng_state_all(others)

        self._steps: list[Callable[[], None]] = [put_back]

    def also(self, step: Callable[[], None]) -> None:
        """Put this back too."""
        self._steps.append(step)

    def put_back(self) -> None:
        """Everything; any number of times."""
        for step in self._steps:
            step()


@contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """A context in which this run has the folder for itself; a process that is killed does not keep it."""
    if folder is None:
        yield
        return
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`checkpoint` must be a folder; {str(folder)!r} is a file. Choose another name.")
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder / "run")
    with Restoring(lock.release), Restoring(lock.release):
        if not lock.acquire():
            raise FolderInUseError(
                f"`checkpoint` must be a folder that no other run is using; {str(folder)!r} is in use now. Wait for "
                "that run to end, or choose another folder."
            )
        yield


def epoch_bar(progress: bool | None, epochs: int, unit: str = "epoch") -> Any:
    """A progress bar; in CI, in pipes and in files a few plain lines where `progress` is True, and else nothing."""
    notebook = "ipykernel" in sys.modules
    if progress is False:
        return _NoBar()
    if bool(os.environ.get("CI")) or not (notebook or sys.stderr.isatty()):
        return _Lines(epochs, unit) if progress else _NoBar()
    home = import_module("tqdm.auto" if notebook else "tqdm")
    return home.tqdm(total=epochs, unit=unit, leave=False)


class _NoBar:
    """Shows nothing. A bar of tqdm that is switched off takes its lock of all processes nevertheless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: int = 1) -> None:
        pass

    def set_postfix(self, *told: Any, **named: Any) -> None:
        pass


class _Lines(_NoBar):
    """A line of text after every tenth of the epochs, and after the last one."""

    def __init__(self, epochs: int, unit: str) -> None:
        self.epochs, self.unit, self.done, self.shown, self.facts = epochs, unit, 0, 0, ""

    def __exit__(self, *error: object) -> None:
        if self.done > self.shown:
            self._show()

    def update(self, n: int = 1) -> None:
        before, self.done = self.done, self.done + n
        if 10 * self.done // self.epochs > 10 * before // self.epochs:
            self._show()

    def set_postfix(self, told: Any = None, refresh: bool = True, **named: Any) -> None:
        self.facts = ", ".join(f"{name} {value}" for name, value in {**(told or {}), **named}.items())

    def _show(self) -> None:
        sys.stderr.write(f"{self.unit} {self.done}/{self.epochs}{': ' + self.facts if self.facts else ''}\n")
        sys.stderr.flush()
        self.shown = self.done


def _check(model: Any, objective: Any, amp: Any, masks: Any) -> None:
    check_model(model)
    if not callable(objective):
        raise TypeError(f"`objective` must be callable, (outputs, target) -> (); got {type(objective).__name__}.")
    group_size = getattr(objective, "group_size", 1)
    if group_size > 1 and masks == "per_example":
        raise ValueError(
            f"`objective` with group_size={group_size} needs passes that are one function for all rows of a group; got "
            'masks="per_example". Use masks="shared".'
        )
    if next(model.parameters(), None) is None:
        raise ValueError(f"`model` must have parameters to train; {type(model).__name__} has none.")
    if amp not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"`amp` must be None, torch.bfloat16 or torch.float16; got {amp!r}.")


def _check_schedule(schedule: Any, optimizer: Optimizer) -> None:
    """Refuse a scheduler of torch that moves the rates of another optimiser."""
    if isinstance(schedule, LRScheduler) and schedule.optimizer is not optimizer:
        raise ValueError("`schedule` must be made for the optimiser that is given as `optimizer`; got another one's.")
    if schedule is not None and not isinstance(schedule, LRScheduler) and not callable(schedule):
        raise TypeError(f"`schedule` must be a function or a scheduler of torch; got {type(schedule).__name__}.")
