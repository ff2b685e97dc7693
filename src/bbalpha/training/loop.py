"""The loop of `fit`: steps and epochs, the state of a run as a folder, and what is wrong where a loss is no number."""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import Masks
from bbalpha._engine.selection import Sites
from bbalpha._kernels import held_out_seed, step_seed
from bbalpha._torch import tree_leaves, tree_map
from bbalpha.checkpoint import CorruptModelError, check_state, write_state
from bbalpha.distributed.joining import on_main
from bbalpha.sampling import sample
from bbalpha.training import fingerprint
from bbalpha.training.feed import Source, rng_state, set_rng_state
from bbalpha.training.resuming import KIND, check_same
from bbalpha.training.spreading import Together, clip, local, whole

Objective = Callable[..., Tensor]


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
        best_epoch: The epoch (from 1) whose weights the model has now; None without validation, or where no epoch
            had a finite likelihood.
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


def predictive_objective(objective: Objective) -> Objective:
    """The objective at alpha = 1, minus the log of the predictive likelihood; itself where it has no `alpha`.

    >>> from bbalpha.objectives import CrossEntropy
    >>> predictive_objective(CrossEntropy(alpha=0.5))
    CrossEntropy(alpha=1.0)
    """
    if not hasattr(objective, "alpha"):
        return objective
    scored = copy.copy(objective)
    scored.alpha = 1.0
    return scored


def predictive_nll(
    model: nn.Module,
    data: Source,
    objective: Objective,
    *,
    n_passes: int | None,
    masks: Masks,
    balanced: bool,
    sites: Sites | None,
    seed: int,
    together: Together | None = None,
) -> float:
    """Negative log-likelihood a data point of the predictive distribution: the objective at alpha = 1.

    Ranks that work `together` each take some of the batches.
    """
    scored = predictive_objective(objective)
    device = next(model.parameters()).device
    total, rows = 0.0, 0.0
    model.eval()
    with torch.no_grad():
        for i, batch in enumerate(data.epoch(seed, 0)):
            if together is not None and not together.has(i):
                continue
            x, target, weight = on_device(batch, device)
            own = held_out_seed(seed, i)
            outputs = sample(model, x, n_passes, masks=masks, balanced=balanced, sites=sites, seed=own)
            n = float(Inputs.of(x, 0).rows or 0) if weight is None else float(weight.sum())
            total += n * float(scored(outputs, target) if weight is None else scored(outputs, target, weight))
            rows += n
    if together is not None:
        total, rows = together.total(total, rows)
    if not rows:
        raise ValueError("`validation` must give at least one row a time it is gone through; got none.")
    return total / rows


@dataclass
class Training:
    """The state of a run and the loop over it."""

    model: nn.Module
    objective: Objective
    train: Source
    held: Source | None
    optimizer: Optimizer
    penalty: Callable[[], Tensor] | None  # the prior, where it is not in the weight decay
    seed: int
    epochs: int
    n_passes: int | Callable[[float], int] | None
    schedule: Callable[[float], float] | LRScheduler | None
    patience: int | None
    masks: Masks
    balanced: bool
    sites: Sites | None
    max_grad_norm: float | None
    amp: torch.dtype | None
    callback: Callable[[Progress], bool | None] | None
    folder: Path | None
    every: int | None
    facts: dict[str, Any]
    together: Together | None = None  # the other ranks of the job
    # what moves
    epoch: int = 0
    batch: int = 0
    step: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])  # loss, rows of this epoch
    loss: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    best: dict[str, Any] | None = None
    halted: bool = False  # by patience or the callback
    target: Any = None  # of the last batch
    held_at: float | None = None  # the precision, where it would run away

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp is torch.float16)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.steps_an_epoch = self.train.n_batches  # else learnt in the first epoch
        self.epoch_rng: dict[str, Any] = {}
        self.fingerprint = self._fingerprint() if self.folder or self.together else {}
        if self.together is not None:
            self.together.ranks.agree(self._told_alike(), "data")

    def __call__(self, bar: Any, state: Mapping[str, Any] | None) -> History:
        """Train to the end, from `state` on if there is one."""
        start = time.perf_counter()
        resumed = state is not None and self._resume(state)
        bar.update(self.epoch)
        while not self.done:
            if not resumed:
                if self.together is not None:
                    self.together.same_generators()
                self.epoch_rng = {"process": self._rng(), "data": self.train.rng()} if self.folder else {}
            self._epoch(resumed)
            self._hold_precision()
            resumed = False
            self._tell(bar)
            if self.folder and (self.done or self.every is None or self.step % self.every == 0):
                self._save()
        if self.best is not None:
            self._restore(self.best)
        self._check_weights()
        if self.held_at is not None:
            warnings.warn(
                f"The learned precision was held at {self.held_at:.2g}, beyond which `target` has no digits: "
                f"{_PRECISION}",
                stacklevel=5,
            )
        stopped = self.epoch < self.epochs
        seconds = time.perf_counter() - start
        return History(tuple(self.loss), tuple(self.nll), self._best_epoch(), self.step, stopped, seconds)

    def put_back(self) -> None:
        """The learning rates as they were given, after a schedule has moved them."""
        if not isinstance(self.schedule, LRScheduler):
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate

    @property
    def done(self) -> bool:
        """Whether no epoch is to come."""
        return self.halted or self.epoch >= self.epochs

    def _best_epoch(self) -> int | None:
        """The epoch, from 1, with the best finite likelihood."""
        finite = [(nll, i + 1) for i, nll in enumerate(self.nll) if math.isfinite(nll)]
        return min(finite)[1] if finite else None

    # ---- steps and epochs

    def _epoch(self, resumed: bool) -> None:
        """The batches of an epoch, or those that are left of it."""
        self.model.train()
        deal = self.train.epoch if self.together is None else partial(self.together.epoch, self.train)
        begin = getattr(self.train, "epoch_from", None) if resumed and self.together is None else None
        batches: Iterator[Any] = (
            deal(self.seed, self.epoch) if begin is None else begin(self.seed, self.epoch, self.batch)
        )
        if resumed:
            for _ in range(self.batch if begin is None else 0):  # what was seen, drawn again in its order
                next(batches, None)
            set_rng_state(self.resume_rng)
        for batch in batches:
            self._step(batch)
        if not self.sums[1]:
            raise ValueError(
                f"`data` must give at least one row an epoch; epoch {self.epoch + 1} had none. An iterable that is "
                "used up after one time must be made anew for the next."
            )
        self.steps_an_epoch = self.batch
        self.loss.append(self.sums[0] / self.sums[1])
        self.epoch, self.batch, self.sums = self.epoch + 1, 0, [0.0, 0.0]

    def _step(self, batch: Any) -> None:
        share = (self.epoch + self.batch / (self.steps_an_epoch or self.batch + 1)) / self.epochs
        if self.schedule is not None and not isinstance(self.schedule, LRScheduler):
            factor = self.schedule(share)
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
        passes = self.n_passes(share) if callable(self.n_passes) else self.n_passes
        loss, rows, x, target = self._forward(batch, passes)
        self.target = target
        total = loss if self.penalty is None else loss + whole(self.penalty())
        for p in self.parameters:
            p.grad = None
        self.scaler.scale(total).backward()
        value = loss.item()
        if not math.isfinite(value):
            where = f"epoch {self.epoch + 1}, step {self.step + 1}"
            raise ValueError(f"The loss of {where} is {value}: {self._cause(x, target)}")
        if self.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip(self.parameters, self.max_grad_norm)
        self.scaler.step(self.optimizer)  # a plain step unless in float16
        self.scaler.update()
        if isinstance(self.schedule, LRScheduler):
            self.schedule.step()
        self.sums[0] += rows * value
        self.sums[1] += rows
        self.batch += 1
        self.step += 1
        if self.folder and self.every and self.step % self.every == 0 and self.batch != self.steps_an_epoch:
            self._save()

    def _forward(self, batch: Any, passes: int | None) -> tuple[Tensor, float, Any, Any]:
        """The loss of a batch, its rows, those of all ranks, and what is here of x and target."""
        x, target, weight = on_device(batch if self.together is None else batch.here, self.device)
        own = step_seed(self.seed, self.step)
        if self.together is not None:
            with self._explained():
                loss = self.together.step(x, target, weight, n_passes=passes, seed=own, counts=batch.counts)
            return loss, float(batch.rows), x, target
        with nullcontext() if self.amp is None else torch.autocast(self.device.type, dtype=self.amp):
            outputs = sample(self.model, x, passes, seed=own, **self._drawn())
        rows = float((Inputs.of(x, 0).rows or 0) if weight is None else weight.numel())
        with self._explained():
            if weight is None:
                return self.objective(outputs, target), rows, x, target
            # the mean of weight times loss: weights of arrays have mean 1 over the data
            return self.objective(outputs, target, weight) * weight.mean(), rows, x, target

    def _drawn(self) -> dict[str, Any]:
        """How passes are drawn, in training and in validation."""
        return {"masks": self.masks, "balanced": self.balanced, "sites": self.sites}

    def _tell(self, bar: Any) -> None:
        """Validate, keep the best weights, show and call back."""
        nll = None
        if self.held is not None:
            passes = self.n_passes(1.0) if callable(self.n_passes) else self.n_passes
            many = None if passes is None else max(passes, 20)
            options: dict[str, Any] = {"n_passes": many, "seed": self.seed, **self._drawn()}
            seen = nullcontext() if self.together is None else self.together.step.whole()
            with self._explained(), seen:
                nll = predictive_nll(self.model, self.held, self.objective, together=self.together, **options)
            if math.isnan(nll) or nll == -math.inf:
                raise ValueError(
                    f"The validation likelihood after epoch {self.epoch} is {-nll}, and no epoch can be chosen by it: "
                    f"{self._cause()}"
                )
            self.nll.append(nll)
            best = self._best_epoch()
            if best == len(self.nll):
                self.best = self._weights()
            self.halted = self.patience is not None and len(self.nll) - (best or 1) >= self.patience
        bar.set_postfix(
            {"loss": f"{self.loss[-1]:.4g}"} | ({} if nll is None else {"nll": f"{nll:.4g}"}), refresh=False
        )
        bar.update()
        if self.callback is not None and self._called(
            self.callback, Progress(self.epoch, self.step, self.loss[-1], nll)
        ):
            self.halted = True

    def _called(self, callback: Callable[[Progress], bool | None], told: Progress) -> bool:
        """Whether the callback ends the run; of many ranks the first one asks it."""
        return bool(callback(told)) if self.together is None else on_main(lambda: bool(callback(told)))

    # ---- numbers that are none

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A context for errors about a precision that nobody gave: it was learned or predicted."""
        try:
            yield
        except ValueError as error:
            if self.step and "`precision`" in str(error):
                raise ValueError(f"The precision is no number after step {self.step}: {_PRECISION}") from error
            raise

    def _hold_precision(self) -> None:
        """Hold a learned precision where the noise would be less than the last digit of the target."""
        log_precision, target, self.target = getattr(self.objective, "log_precision", None), self.target, None
        if not isinstance(log_precision, nn.Parameter) or not isinstance(target, Tensor):
            return
        squares, count = float(target.detach().double().square().sum()), float(target.numel())
        if self.together is not None:
            squares, count = self.together.total(squares, count)
        wide = torch.float64 if target.dtype == torch.float64 else torch.float32  # what losses are reduced in
        digit = torch.finfo(wide).eps * math.sqrt(squares / count) if count else 0.0
        if digit and bool((log_precision.detach() > -2 * math.log(digit)).any()):
            with torch.no_grad():
                log_precision.clamp_(max=-2 * math.log(digit))
            self.held_at = digit**-2

    def _cause(self, x: Any = None, target: Any = None) -> str:
        """Why a loss may not be a number, the surest first."""
        for name, value in (("x", x), ("target", target)):
            if not all(_finite(t) for t in tree_leaves(value)):
                return f"{name} of this batch holds numbers that are not finite. Leave such rows out, or fill them in."
        if not all(_finite(p) for p in self.parameters):
            return "the weights are no longer finite. Lower the learning rate, or set `max_grad_norm`."
        log_precision = getattr(self.objective, "log_precision", None)
        if isinstance(log_precision, nn.Parameter) and float(log_precision.detach().max()) > 60:
            return _PRECISION
        return "outputs or losses overflow. Scale x and target to about 1, or lower the learning rate."

    def _check_weights(self) -> None:
        if not all(_finite(p) for p in self.parameters):
            raise ValueError(f"After step {self.step} {self._cause()}")

    # ---- the state as a folder

    def _weights(self) -> dict[str, Any]:
        """Copies of the state of the model and of the objective."""
        return {
            part: {name: v.clone() if isinstance(v, Tensor) else v for name, v in module.state_dict().items()}
            for part, module in self._modules().items()
        }

    def _restore(self, weights: Mapping[str, Any]) -> None:
        for part, module in self._modules().items():
            state = weights[part]
            module.load_state_dict(state if self.together is None else self.together.like(state, module.state_dict()))

    def _modules(self) -> dict[str, nn.Module]:
        objective = {"objective": self.objective} if isinstance(self.objective, nn.Module) else {}
        return {"model": self.model, **objective}

    def _fingerprint(self) -> dict[str, Any]:
        """What must not change between a run and its continuation; longer runs are other runs if their steps are."""
        by_share = callable(self.n_passes) or (self.schedule is not None and not isinstance(self.schedule, LRScheduler))
        return self.facts | {
            # beside the masks, so that a run without `sites` is told as it was before there were any
            "masks": self.masks if self.sites is None else f"{self.masks} at {fingerprint.told(self.sites)}",
            "balanced": self.balanced,
            "n_passes": fingerprint.told(self.n_passes),
            "schedule": fingerprint.told(self.schedule),
            "epochs": self.epochs if by_share else None,
            "patience": self.patience,
            "max_grad_norm": self.max_grad_norm,
            "amp": str(self.amp),
            "parameters": fingerprint.parameters(self.model),
            "model": fingerprint.structure(self.model),
            "objective": fingerprint.objective(self.objective),
            "optimizer": fingerprint.optimizer(self.optimizer, self.schedule),
            "data": self.train.fingerprint(),
            "validation": None if self.held is None else self.held.fingerprint(),
        }

    def _rng(self) -> dict[str, Any]:
        return rng_state() if self.together is None else self.together.generators()

    def _told_alike(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        held = self.fingerprint["validation"] or {}
        return {**self.fingerprint["data"], **{f"validation {k}": v for k, v in held.items()}}

    def _save(self) -> None:
        if self.folder is None:
            return
        self._check_weights()
        scheduler = self.schedule.state_dict() if isinstance(self.schedule, LRScheduler) else None
        content = {
            "kind": KIND, "fingerprint": self.fingerprint, "weights": self._weights(), "best": self.best,
            "optimizer": self.optimizer.state_dict(), "schedule": scheduler, "scaler": self.scaler.state_dict(),
            "rng": self._rng(), "epoch_rng": self.epoch_rng, "seed": self.seed, "epoch": self.epoch,
            "batch": self.batch, "step": self.step, "sums": self.sums, "halted": self.halted,
            "loss": torch.tensor(self.loss, dtype=torch.float64), "nll": torch.tensor(self.nll, dtype=torch.float64),
            "rates": self.rates, "steps_an_epoch": self.steps_an_epoch,
        }  # fmt: skip
        if self.together is not None:
            content = self.together.gathered(content)
        if self.together is None or self.together.main:
            write_state(self.folder, self.step, content)

    def _resume(self, content: Mapping[str, Any]) -> bool:
        """Take up a state; whether it is one from within an epoch."""
        check_same(content["fingerprint"], self.fingerprint, self.folder)
        if content["epoch"] > self.epochs:
            raise ValueError(
                f"`epochs` must be at least {content['epoch']}, as many as the run in `checkpoint` has done; "
                f"got {self.epochs}."
            )
        try:
            for part, module in self._modules().items():
                check_state(module, content["weights"][part])
            held = content["optimizer"]
            self.optimizer.load_state_dict(
                held if self.together is None else self.together.optimizer_like(held, self.parameters)
            )
            if isinstance(self.schedule, LRScheduler):
                self.schedule.load_state_dict(content["schedule"])
            if content["scaler"]:
                self.scaler.load_state_dict(content["scaler"])
            for name in ("best", "epoch", "batch", "step", "sums", "halted", "rates", "steps_an_epoch"):
                setattr(self, name, content[name])
            self.loss, self.nll = content["loss"].tolist(), content["nll"].tolist()
            self.resume_rng, self.epoch_rng = content["rng"], content["epoch_rng"]
            set_rng_state(self.epoch_rng["process"] if self.batch else self.resume_rng)
            if self.batch:
                self.train.set_rng(self.epoch_rng["data"])
        except (AttributeError, KeyError, TypeError, RuntimeError) as error:
            raise CorruptModelError(f"{str(self.folder)!r} is not of the form that `fit` writes: {error!r}.") from error
        self._restore(content["weights"])
        return bool(self.batch)


# ------------------------------------------------------------------------------ helpers

_PRECISION = (
    "the learned precision grows without bound, because `target` is constant or fitted exactly. "
    "Fix it, as in GaussianNLL(precision=100.0), or train for fewer epochs."
)


def on_device(value: Any, device: torch.device) -> Any:
    """Nested tensors on a device."""
    if device.type == "cpu":
        return value
    # from pinned memory, as a DataLoader with pin_memory=True gives it, while the device is at work
    return tree_map(lambda t: t.to(device, non_blocking=t.is_pinned()) if isinstance(t, Tensor) else t, value)


def _finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(local(value).isfinite().all())
