"""One training loop for everybody: any torch model, any data, any objective; resumed bit for bit after a crash.

    history = fit(net, (x, y), objective=bbalpha.CrossEntropy(alpha=0.5), epochs=20, length_scale=1.0,
                  validation=0.1, patience=5, checkpoint="run")

Masks of step t and the order of epoch e follow from (seed, t) and (seed, e): a run can be taken up at any step.
"""

import copy
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from bbalpha.checkpoint import describe, newest_state, write_state
from bbalpha.feed import Batch, Source, held_out, rng_state, set_rng_state, source, step_seed
from bbalpha.guards import draw_seed
from bbalpha.inputs import Inputs
from bbalpha.priors import has_quadratic_kl, param_groups, prior_kl
from bbalpha.sampling import Masks, sample
from bbalpha.tracing import trace

Objective = Callable[..., Tensor]
Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Progress:
    """Where a run stands after an epoch, as told to the callback.

    Attributes:
        epoch: Epochs done.
        n_steps: Optimiser steps done.
        loss: Mean training loss of the epoch, prior left out.
        nll: Validation negative log-likelihood a data point, None without validation.
    """

    epoch: int
    n_steps: int
    loss: float
    nll: float | None


@dataclass(frozen=True)
class History:
    """What happened in a run.

    Attributes:
        loss: Mean training loss of every epoch, prior left out.
        nll: Validation negative log-likelihood after every epoch; empty without validation.
        best_epoch: The epoch (from 1) whose weights the model has now; None without validation.
        n_steps: Optimiser steps taken.
        stopped: Whether it ended before the last epoch.
        seconds: Time taken, resumed parts not counted.
    """

    loss: tuple[float, ...]
    nll: tuple[float, ...]
    best_epoch: int | None
    n_steps: int
    stopped: bool
    seconds: float


def fit(
    model: nn.Module,
    data: Any,
    *,
    objective: Objective,
    epochs: int,
    n_passes: int | Callable[[float], int] = 10,
    batch_size: int = 128,
    length_scale: float | None = None,
    optimizer: Optimizer | Callable[[Groups], Optimizer] | None = None,
    learning_rate: float = 1e-3,
    schedule: Callable[[float], float] | LRScheduler | None = None,
    validation: Any = None,
    patience: int | None = None,
    masks: Masks = "per_example",
    max_grad_norm: float | None = None,
    amp: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    callback: Callable[[Progress], bool | None] | None = None,
    progress: bool = True,
    seed: int | None = None,
) -> History:
    """Train `model` in place on K passes a step, and tell how it went.

    Args:
        model: Any module with an active random site.
        data: (x, target) or (x, target, weight) of arrays or tensors; a Dataset or DataLoader of such pairs.
        objective: (outputs, target) -> (), such as CrossEntropy or GaussianNLL; its parameters are trained too.
        epochs: Times through the data.
        n_passes: K, or a function of the share of training done, in [0, 1), for a rising K.
        batch_size: Rows a step; a DataLoader has its own.
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
        max_grad_norm: Gradients are clipped to this norm.
        amp: torch.bfloat16 or torch.float16 for automatic mixed precision.
        checkpoint: A folder for the state of the run. If it holds one, the run goes on from there, to the same bits.
        checkpoint_every: Steps between checkpoints; None is every epoch.
        callback: Told of every epoch; training stops where it returns True.
        progress: Show a bar on terminals and in notebooks.
        seed: None draws one from torch's global generator; an int leaves that untouched.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
    >>> x = torch.randn(64, 2)
    >>> from bbalpha.objectives import GaussianNLL
    >>> history = fit(net, (x, x[:, :1]), objective=GaussianNLL(alpha=0.5), epochs=30, learning_rate=0.05, seed=0)
    >>> history.n_steps, history.loss[-1] < history.loss[0]
    (30, True)
    """
    _check(model, objective, epochs, batch_size, patience, amp, checkpoint_every)
    base = draw_seed(None) if seed is None else seed
    parameter = next(model.parameters())
    if isinstance(validation, (int, float)) and not isinstance(validation, bool):
        data, validation = held_out(data, validation, base)
    train = source(data, batch_size=batch_size, dtype=parameter.dtype)
    held = None
    if validation is not None:
        held = source(validation, batch_size=256, dtype=parameter.dtype, shuffle=False)
    if isinstance(objective, nn.Module):
        objective.to(parameter.device)
    made, penalty = _optimizer(model, objective, train, optimizer, learning_rate, length_scale)
    run = _Run(
        model, objective, train, held, made, penalty, base, epochs=epochs, n_passes=n_passes, schedule=schedule,
        patience=patience, masks=masks, max_grad_norm=max_grad_norm, amp=amp, callback=callback,
        folder=None if checkpoint is None else Path(checkpoint), every=checkpoint_every,
        facts={"n_data": train.n_data, "batch_size": batch_size, "length_scale": length_scale, "seed": seed},
    )  # fmt: skip
    modes = [(m, m.training) for m in model.modules()]
    with torch.random.fork_rng(enabled=seed is not None), epoch_bar(progress, epochs) as bar:
        if seed is not None:
            torch.manual_seed(seed)  # for a DataLoader's order and what a model draws by itself
        try:
            return run(bar)
        finally:
            for module, mode in modes:
                module.training = mode


def cosine(share: float) -> float:
    """A schedule that falls from 1 to 0 along half a cosine.

    >>> [round(cosine(s), 3) for s in (0.0, 0.5, 1.0)]
    [1.0, 0.5, 0.0]
    """
    return 0.5 * (1 + math.cos(math.pi * share))


def predictive_nll(
    model: nn.Module, data: Source, objective: Objective, *, n_passes: int, masks: Masks, seed: int
) -> float:
    """Negative log-likelihood a data point of the predictive distribution: the objective at alpha = 1."""
    scored = objective
    if hasattr(objective, "alpha"):
        scored = copy.copy(objective)
        scored.alpha = 1.0
    device = next(model.parameters()).device
    total, rows = 0.0, 0.0
    model.eval()
    with torch.no_grad():
        for i, batch in enumerate(data.epoch(seed, 0)):
            x, target, weight = _move(batch, device)
            outputs = sample(model, x, n_passes, masks=masks, seed=step_seed(seed + 1, i))
            n = float(Inputs.of(x, 0).rows or 0) if weight is None else float(weight.sum())
            total += n * float(scored(outputs, target) if weight is None else scored(outputs, target, weight))
            rows += n
    return total / rows


# ------------------------------------------------------------------------------ the run


@dataclass
class _Run:
    """The state of a run and the loop over it."""

    model: nn.Module
    objective: Objective
    train: Source
    held: Source | None
    optimizer: Optimizer
    penalty: Callable[[], Tensor] | None  # the prior, where it is not in the weight decay
    seed: int
    epochs: int
    n_passes: int | Callable[[float], int]
    schedule: Callable[[float], float] | LRScheduler | None
    patience: int | None
    masks: Masks
    max_grad_norm: float | None
    amp: torch.dtype | None
    callback: Callable[[Progress], bool | None] | None
    folder: Path | None
    every: int | None
    facts: dict[str, Any]
    # what moves
    epoch: int = 0
    batch: int = 0
    step: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])  # loss, rows of this epoch
    loss: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    best: dict[str, Any] | None = None
    halted: bool = False  # by patience or the callback

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp is torch.float16)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.steps_an_epoch = self.train.n_batches  # else learnt in the first epoch
        self.epoch_rng: dict[str, Any] = {}

    def __call__(self, bar: Any) -> History:
        start = time.perf_counter()
        resumed = self._resume()
        bar.update(self.epoch)
        while not self.done:
            if not resumed:
                self.epoch_rng = {"process": rng_state(), "data": self.train.rng()} if self.folder else {}
            self._epoch(resumed)
            resumed = False
            self._tell(bar)
            if self.folder and (self.done or self.every is None or self.step % self.every == 0):
                self._save()
        if self.best is not None:
            self._restore(self.best)
        best_epoch = None if not self.nll else min(range(len(self.nll)), key=self.nll.__getitem__) + 1
        stopped = self.epoch < self.epochs
        return History(tuple(self.loss), tuple(self.nll), best_epoch, self.step, stopped, time.perf_counter() - start)

    def _epoch(self, resumed: bool) -> None:
        """The batches of an epoch, or those that are left of it."""
        self.model.train()
        batches = self.train.epoch(self.seed, self.epoch)
        if resumed:
            for _ in range(self.batch):  # what the crashed run had seen, drawn again in its order
                next(batches)
            set_rng_state(self.resume_rng)
        for batch in batches:
            self._step(batch)
        self.steps_an_epoch = self.batch
        self.loss.append(self.sums[0] / max(self.sums[1], 1e-300))
        self.epoch, self.batch, self.sums = self.epoch + 1, 0, [0.0, 0.0]

    @property
    def done(self) -> bool:
        return self.halted or self.epoch >= self.epochs

    def _step(self, batch: Batch) -> None:
        share = (self.epoch + self.batch / (self.steps_an_epoch or self.batch + 1)) / self.epochs
        if self.schedule is not None and not isinstance(self.schedule, LRScheduler):
            factor = self.schedule(share)
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
        x, target, weight = _move(batch, self.device)
        passes = self.n_passes if isinstance(self.n_passes, int) else self.n_passes(share)
        mixed = nullcontext() if self.amp is None else torch.autocast(self.device.type, dtype=self.amp)
        with mixed:
            outputs = sample(self.model, x, passes, masks=self.masks, seed=step_seed(self.seed, self.step))
        if weight is None:
            rows, loss = float(Inputs.of(x, 0).rows or 0), self.objective(outputs, target)
        else:  # the mean of weight times loss: weights of arrays have mean 1 over the data
            rows, loss = float(weight.numel()), self.objective(outputs, target, weight) * weight.mean()
        total = loss if self.penalty is None else loss + self.penalty()
        for p in self.parameters:
            p.grad = None
        self.scaler.scale(total).backward()
        if self.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.scaler.step(self.optimizer)  # a plain step unless in float16
        self.scaler.update()
        if isinstance(self.schedule, LRScheduler):
            self.schedule.step()
        self.sums[0] += rows * loss.item()
        self.sums[1] += rows
        self.batch += 1
        self.step += 1
        if self.folder and self.every and self.step % self.every == 0 and self.batch != self.steps_an_epoch:
            self._save()

    def _tell(self, bar: Any) -> None:
        """Validate, keep the best weights, show and call back."""
        nll = None
        if self.held is not None:
            passes = self.n_passes if isinstance(self.n_passes, int) else self.n_passes(1.0)
            nll = predictive_nll(
                self.model, self.held, self.objective, n_passes=max(passes, 20), masks=self.masks, seed=self.seed
            )
            if not self.nll or nll < min(self.nll):
                self.best = self._weights()
            self.nll.append(nll)
            since = len(self.nll) - 1 - min(range(len(self.nll)), key=self.nll.__getitem__)
            self.halted = self.patience is not None and since >= self.patience
        bar.set_postfix(
            {"loss": f"{self.loss[-1]:.4g}"} | ({} if nll is None else {"nll": f"{nll:.4g}"}), refresh=False
        )
        bar.update()
        if self.callback is not None and self.callback(Progress(self.epoch, self.step, self.loss[-1], nll)):
            self.halted = True

    # ---- the state as a folder

    def _weights(self) -> dict[str, Any]:
        """Copies of the state of the model and of the objective."""
        parts = {"model": self.model.state_dict()}
        if isinstance(self.objective, nn.Module):
            parts["objective"] = self.objective.state_dict()
        return {part: {name: _copy(value) for name, value in state.items()} for part, state in parts.items()}

    def _restore(self, weights: Mapping[str, Any]) -> None:
        self.model.load_state_dict(weights["model"])
        if isinstance(self.objective, nn.Module):
            self.objective.load_state_dict(weights["objective"])

    def _fingerprint(self) -> dict[str, Any]:
        """What must not change between a run and its continuation."""
        shapes = {name: list(p.shape) for name, p in self.model.named_parameters()}
        passes = self.n_passes if isinstance(self.n_passes, int) else "a function"
        return self.facts | {"parameters": shapes, "objective": repr(self.objective), "n_passes": passes}

    def _save(self) -> None:
        if self.folder is None:
            return
        scheduler = self.schedule.state_dict() if isinstance(self.schedule, LRScheduler) else None
        content = {
            "kind": "training state", "fingerprint": self._fingerprint(), "weights": self._weights(), "best": self.best,
            "optimizer": self.optimizer.state_dict(), "schedule": scheduler, "scaler": self.scaler.state_dict(),
            "rng": rng_state(), "epoch_rng": self.epoch_rng, "seed": self.seed, "epoch": self.epoch,
            "batch": self.batch, "step": self.step, "sums": self.sums, "halted": self.halted,
            "loss": torch.tensor(self.loss, dtype=torch.float64), "nll": torch.tensor(self.nll, dtype=torch.float64),
            "rates": self.rates, "steps_an_epoch": self.steps_an_epoch,
        }  # fmt: skip
        write_state(self.folder, self.step, content)

    def _resume(self) -> bool:
        """Take up the newest whole state in the folder; False if there is none."""
        content = None if self.folder is None else newest_state(self.folder)
        if content is None:
            return False
        now = self._fingerprint()
        changed = [k for k, v in content["fingerprint"].items() if now.get(k) != v]
        if changed:
            raise ValueError(
                f"`checkpoint` holds a run with another `{changed[0]}` ({content['fingerprint'][changed[0]]!r}, now "
                f"{now.get(changed[0])!r}). Choose another folder, or delete {str(self.folder)!r}."
            )
        self._restore(content["weights"])
        self.optimizer.load_state_dict(content["optimizer"])
        if isinstance(self.schedule, LRScheduler):
            self.schedule.load_state_dict(content["schedule"])
        if content["scaler"]:
            self.scaler.load_state_dict(content["scaler"])
        for name in ("best", "seed", "epoch", "batch", "step", "sums", "halted", "rates", "steps_an_epoch"):
            setattr(self, name, content[name])
        self.loss, self.nll = content["loss"].tolist(), content["nll"].tolist()
        self.resume_rng, self.epoch_rng = content["rng"], content["epoch_rng"]
        if self.batch:
            set_rng_state(self.epoch_rng["process"])
            self.train.set_rng(self.epoch_rng["data"])
        else:
            set_rng_state(self.resume_rng)
        return bool(self.batch)


# ------------------------------------------------------------------------------ helpers


def _optimizer(
    model: nn.Module,
    objective: Objective,
    train: Source,
    optimizer: Optimizer | Callable[[Groups], Optimizer] | None,
    learning_rate: float,
    length_scale: float | None,
) -> tuple[Optimizer, Callable[[], Tensor] | None]:
    """The optimiser, and the prior as a term of the loss where it cannot be weight decay."""
    extra = [p for p in objective.parameters() if p.requires_grad] if isinstance(objective, nn.Module) else []
    given = isinstance(optimizer, Optimizer)
    quadratic = not given and has_quadratic_kl(model)
    penalty: Callable[[], Tensor] | None = None
    groups: Groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    if length_scale:
        if train.n_data is None:
            raise ValueError("`length_scale` needs data that tells its length; got an iterable data set. Leave it out.")
        # a network of plain layers tells by its structure which dropout feeds which weight; others are run once
        example = None if describe(model) else train.example()
        keep = None
        if example is not None:
            keep = trace(model, Inputs.of(_on(example, next(model.parameters()).device), 0)).keep
        prior = {"length_scale": length_scale, "n_data": train.n_data, "keep": keep}
        if quadratic:
            groups = param_groups(model, **prior)  # type: ignore[arg-type]
        else:
            penalty = lambda: prior_kl(model, **prior)  # type: ignore[arg-type]  # noqa: E731
    if extra:
        groups.append({"params": extra, "weight_decay": 0.0})
    if optimizer is None:
        return _Adam(groups, learning_rate), penalty
    if not isinstance(optimizer, Optimizer):
        return optimizer(groups), penalty
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(p) not in known for p in extra):
        raise ValueError("`optimizer` must hold the parameters of the objective too; add objective.parameters() to it.")
    return optimizer, penalty


class _Adam(torch.optim.Adam):
    """Adam with the coupled weight decay of every group, its parameters in one group: a group costs time a step."""

    def __init__(self, groups: Groups, learning_rate: float) -> None:
        super().__init__([p for group in groups for p in group["params"]], lr=learning_rate, fused=True)
        decays = [(p, group.get("weight_decay", 0.0)) for group in groups for p in group["params"]]
        self.decayed = [p for p, decay in decays if decay]
        self.decays = [decay for _, decay in decays if decay]
        self._step_supports_amp_scaling = False  # gradients come unscaled: the decay is added to them

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.decayed:
            terms = torch._foreach_mul(self.decayed, self.decays)
            for p, term in zip(self.decayed, terms, strict=True):
                if p.grad is not None:
                    p.grad.add_(term)
        return super().step(closure)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _move(batch: Batch, device: torch.device) -> Batch:
    return _on(batch, device) if device.type != "cpu" else batch


def _on(value: Any, device: torch.device) -> Any:
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, value)


def epoch_bar(progress: bool, epochs: int) -> Any:
    """A progress bar, silent in CI, in pipes and where not wanted."""
    notebook = "ipykernel" in sys.modules
    quiet = not progress or bool(os.environ.get("CI")) or not (notebook or sys.stderr.isatty())
    home = import_module("tqdm.auto" if notebook else "tqdm")
    return home.tqdm(total=epochs, unit="epoch", disable=quiet, leave=False)


def _check(
    model: Any, objective: Any, epochs: Any, batch_size: Any, patience: Any, amp: Any, checkpoint_every: Any
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module; got {type(model).__name__}.")
    if not callable(objective):
        raise TypeError(f"`objective` must be callable, (outputs, target) -> (); got {type(objective).__name__}.")
    if next(model.parameters(), None) is None:
        raise ValueError(f"`model` must have parameters to train; {type(model).__name__} has none.")
    named = {"epochs": epochs, "batch_size": batch_size, "patience": patience, "checkpoint_every": checkpoint_every}
    for name, value in named.items():
        if value is None and name in ("patience", "checkpoint_every"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1; got {value!r}.")
    if amp not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"`amp` must be None, torch.bfloat16 or torch.float16; got {amp!r}.")
