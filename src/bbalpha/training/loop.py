"""The loop of `fit`: steps and epochs, the state of a run as a folder, and what is wrong where a loss is no number."""

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import Masks
from bbalpha._engine.selection import Sites
from bbalpha._kernels import step_seed
from bbalpha._torch import tree_leaves, tree_map
from bbalpha.checkpoint import CorruptModelError, check_state, write_state
from bbalpha.sampling import sample
from bbalpha.training import fingerprint
from bbalpha.training.feed import Batch, Source, rng_state, set_rng_state
from bbalpha.training.resuming import KIND, check_same

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
            x, target, weight = on_device(batch, device)
            own = step_seed(seed + 1, i)
            outputs = sample(model, x, n_passes, masks=masks, balanced=balanced, sites=sites, seed=own)
            n = float(Inputs.of(x, 0).rows or 0) if weight is None else float(weight.sum())
            total += n * float(scored(outputs, target) if weight is None else scored(outputs, target, weight))
            rows += n
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
        self.fingerprint = self._fingerprint() if self.folder else {}

    def __call__(self, bar: Any, state: Mapping[str, Any] | None) -> History:
        """Train to the end, from `state` on if there is one."""
        start = time.perf_counter()
        resumed = state is not None and self._resume(state)
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
        self._check_weights()
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
        batches = self.train.epoch(self.seed, self.epoch)
        if resumed:
            for _ in range(self.batch):  # what the crashed run had seen, drawn again in its order
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

    def _step(self, batch: Batch) -> None:
        share = (self.epoch + self.batch / (self.steps_an_epoch or self.batch + 1)) / self.epochs
        if self.schedule is not None and not isinstance(self.schedule, LRScheduler):
            factor = self.schedule(share)
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
        x, target, weight = on_device(batch, self.device)
        passes = self.n_passes(share) if callable(self.n_passes) else self.n_passes
        mixed = nullcontext() if self.amp is None else torch.autocast(self.device.type, dtype=self.amp)
        with mixed:
            own = step_seed(self.seed, self.step)
            outputs = sample(self.model, x, passes, seed=own, **self._drawn())
        rows = float((Inputs.of(x, 0).rows or 0) if weight is None else weight.numel())
        loss = self._loss(outputs, target, weight)
        total = loss if self.penalty is None else loss + self.penalty()
        for p in self.parameters:
            p.grad = None
        self.scaler.scale(total).backward()
        value = loss.item()
        if not math.isfinite(value):
            where = f"epoch {self.epoch + 1}, step {self.step + 1}"
            raise ValueError(f"The loss of {where} is {value}: {self._cause(x, target)}")
        if self.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
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

    def _drawn(self) -> dict[str, Any]:
        """How passes are drawn, in training and in validation."""
        return {"masks": self.masks, "balanced": self.balanced, "sites": self.sites}

    def _loss(self, outputs: Any, target: Any, weight: Tensor | None) -> Tensor:
        try:
            if weight is None:
                return self.objective(outputs, target)
            # the mean of weight times loss: weights of arrays have mean 1 over the data
            return self.objective(outputs, target, weight) * weight.mean()
        except ValueError as error:
            self._explain(error)
            raise

    def _tell(self, bar: Any) -> None:
        """Validate, keep the best weights, show and call back."""
        nll = None
        if self.held is not None:
            passes = self.n_passes(1.0) if callable(self.n_passes) else self.n_passes
            many = None if passes is None else max(passes, 20)
            options: dict[str, Any] = {"n_passes": many, "seed": self.seed, **self._drawn()}
            try:
                nll = predictive_nll(self.model, self.held, self.objective, **options)
            except ValueError as error:
                self._explain(error)
                raise
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
        if self.callback is not None and self.callback(Progress(self.epoch, self.step, self.loss[-1], nll)):
            self.halted = True

    # ---- numbers that are none

    def _explain(self, error: ValueError) -> None:
        """An error about a precision that nobody gave: it was learned or predicted."""
        if self.step and "`precision`" in str(error):
            raise ValueError(f"The precision is no number after step {self.step}: {_PRECISION}") from error

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
            module.load_state_dict(weights[part])

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

    def _save(self) -> None:
        if self.folder is None:
            return
        self._check_weights()
        scheduler = self.schedule.state_dict() if isinstance(self.schedule, LRScheduler) else None
        content = {
            "kind": KIND, "fingerprint": self.fingerprint, "weights": self._weights(), "best": self.best,
            "optimizer": self.optimizer.state_dict(), "schedule": scheduler, "scaler": self.scaler.state_dict(),
            "rng": rng_state(), "epoch_rng": self.epoch_rng, "seed": self.seed, "epoch": self.epoch,
            "batch": self.batch, "step": self.step, "sums": self.sums, "halted": self.halted,
            "loss": torch.tensor(self.loss, dtype=torch.float64), "nll": torch.tensor(self.nll, dtype=torch.float64),
            "rates": self.rates, "steps_an_epoch": self.steps_an_epoch,
        }  # fmt: skip
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
            self.optimizer.load_state_dict(content["optimizer"])
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
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, value)


def _finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(value.isfinite().all())
