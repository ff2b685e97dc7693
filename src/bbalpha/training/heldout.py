"""Held-out rows, and how likely a network makes them: as a function of the one number that calibrates it.

Of a classifier the number is a temperature, of a network of means the precision of the noise, of one that predicts its
precision a factor on that. Likelihoods are those of the mixture over passes, as `predict_*` have it.

    held = HeldOut.of((x, y), torch.float32, torch.device("cpu"))
    kind = kind_of(GaussianNLL())
    rows_of, start = kind.likelihood(kind.passes(net, held.x, n_passes=50, seed=0), held)
    rows_of(start)                                                              # NLL of every row (N,)
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bbalpha._engine.batches import PassOptions, collect
from bbalpha._torch import tree_flatten, tree_unflatten
from bbalpha.objectives import CrossEntropy, GaussianNLL, Positions, cross_entropy, gaussian_nll
from bbalpha.prediction import as_logits, predict_regression
from bbalpha.training.crossfit import LEAST_ROWS
from bbalpha.training.feed import Batch, source
from bbalpha.training.loop import on_device

_BATCH = 1024  # items of a Dataset read together
Outputs = tuple[Tensor, ...]
RowsOf = Callable[[float], Tensor]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows that were not trained on, in one order whoever looks at them.

    Attributes:
        x: What the model is called with, batch by batch.
        target: Of all rows (N, ...).
        weight: Of every row, of mean 1 (N,); None for equal ones.
    """

    x: list[Any]
    target: Tensor
    weight: Tensor | None

    @classmethod
    def of(cls, data: Any, dtype: torch.dtype, device: torch.device) -> "HeldOut":
        """The rows of data as `fit` takes them, gone through once."""
        batches = list(source(data, batch_size=_BATCH, dtype=dtype, shuffle=False, name="held_out").epoch(0, 0))
        targets = [target for _, target, _ in batches]
        if not all(isinstance(t, Tensor) for t in targets):
            raise TypeError(f"`held_out` must have one tensor of targets; got {type(targets[0]).__name__}.")
        target = torch.cat(targets).cpu()
        if len(target) < LEAST_ROWS:
            raise ValueError(
                f"`held_out` must have at least {LEAST_ROWS} rows to tell a gain from noise; got {len(target)}."
            )
        given = [weight for _, _, weight in batches if weight is not None]
        weight = torch.cat(given).double().cpu() if given else None
        x = [on_device(x, device) for x in _joined(batches)]
        return cls(x, target, weight if weight is None else weight / weight.mean())


def kind_of(objective: Any) -> "Kind":
    """The kind of likelihood that an objective stands for."""
    if isinstance(objective, CrossEntropy):
        return Classes(objective)
    if isinstance(objective, GaussianNLL):
        return Noisy(objective) if objective.source == "predicted" else Means(objective)
    raise TypeError(
        "`objective` must be CrossEntropy(...) or GaussianNLL(...), which tell how likely a target is; "
        f"got {type(objective).__name__}."
    )


@dataclass(frozen=True)
class Classes:
    """Logits, and a temperature.

    Attributes:
        given: The caller's objective.
        number: What the number that is fitted is called.
        as_given: Whether the network says how likely a row is without it, at 1.
        reach: How far it is looked for, in factors of 1.65.
    """

    given: CrossEntropy
    number: Literal["temperature"] = "temperature"
    as_given: bool = True
    reach: int = 6

    def passes(self, model: nn.Module, x: Sequence[Any], *, n_passes: int | None, seed: int) -> Outputs:
        """Logits (K, N, C, ...)."""

        def keep(groups: Iterator[Any], _: Any) -> Outputs:
            return (torch.cat([as_logits(g, self.given.class_axis) for g in groups]),)

        options = PassOptions(n_passes, seed=seed, progress=False)
        return tuple(t.cpu() for t in collect(model, iter(x), options, keep, row_axis=1))

    def likelihood(self, outputs: Outputs, held: HeldOut) -> tuple[RowsOf, float]:
        """Of the mean over passes of softmax(f / T); the positions of a row are added up."""
        (logits,), target, given = outputs, held.target, self.given
        positions: Positions = given.positions

        def rows(temperature: float) -> Tensor:
            values = cross_entropy(
                logits / temperature, target, 1.0, class_axis=given.class_axis, positions=positions,
                ignore_index=given.ignore_index, reduction="none",
            )  # fmt: skip
            indices = not target.is_floating_point() and target.shape != logits.shape[1:]
            counts = (target != given.ignore_index) if indices else torch.ones_like(values, dtype=torch.bool)
            counts = counts.flatten(1).any(1) if values.ndim < counts.ndim else counts
            total = max(1, int(counts.sum()))
            return _weighted(values.double().reshape(len(values), -1).sum(1) * (len(values) / total), held)

        return rows, 1.0

    def objective(self, number: float) -> nn.Module:
        """What a network is fine-tuned by: the caller's as a copy, a single logit as the two classes it stands for."""
        return _OfLogits(copy.deepcopy(self.given))


@dataclass(frozen=True)
class Means:
    """Means, and the precision of their noise."""

    given: GaussianNLL
    number: Literal["precision"] = "precision"
    as_given: bool = False
    reach: int = 24

    def passes(self, model: nn.Module, x: Sequence[Any], *, n_passes: int | None, seed: int) -> Outputs:
        """Means (K, N, ...)."""
        return (predict_regression(model, iter(x), n_passes=n_passes, seed=seed, progress=False).outputs.cpu(),)

    def likelihood(self, outputs: Outputs, held: HeldOut) -> tuple[RowsOf, float]:
        """Of a mixture of Gaussians of one precision."""
        mean, target = outputs[0].double(), held.target

        def rows(precision: float) -> Tensor:
            return _weighted(gaussian_nll(mean, target, 1.0, precision=precision, reduction="none"), held)

        rows(1.0)  # refuses a target of another shape
        error = float((mean.mean(0) - target).square().mean())
        if not 0 < error < math.inf:
            raise ValueError(
                "The targets of `held_out` must be finite and not predicted exactly; got a mean squared error of "
                f"{error}."
            )
        return rows, 1 / error

    def objective(self, number: float) -> nn.Module:
        """The caller's, as a copy; a precision that is learned begins at what the held-out rows say."""
        objective = copy.deepcopy(self.given)
        if objective.source == "learned" and objective.log_precision is not None:
            objective.log_precision.data.fill_(math.log(number))
        return objective


@dataclass(frozen=True)
class Noisy:
    """Means and precisions, and a factor on these."""

    given: GaussianNLL
    number: Literal["factor"] = "factor"
    as_given: bool = True
    reach: int = 12

    def passes(self, model: nn.Module, x: Sequence[Any], *, n_passes: int | None, seed: int) -> Outputs:
        """Means and precisions (K, N, ...)."""
        p = predict_regression(model, iter(x), n_passes=n_passes, precision="predicted", seed=seed, progress=False)
        return tuple(t.cpu() for t in (p.outputs, p.precision) if t is not None)

    def likelihood(self, outputs: Outputs, held: HeldOut) -> tuple[RowsOf, float]:
        """Of a mixture of Gaussians, each of its own precision."""
        mean, precision = (t.double() for t in outputs)

        def rows(factor: float) -> Tensor:
            return _weighted(gaussian_nll(mean, held.target, 1.0, precision=factor * precision, reduction="none"), held)

        return rows, 1.0

    def objective(self, number: float) -> nn.Module:
        """The caller's, as a copy."""
        return copy.deepcopy(self.given)


Kind = Classes | Means | Noisy


class _OfLogits(nn.Module):
    """A CrossEntropy of outputs as `predict_classification` takes them."""

    def __init__(self, given: CrossEntropy) -> None:
        super().__init__()
        self.given = given

    def forward(self, outputs: Any, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """The mean alpha loss."""
        loss: Tensor = self.given(as_logits(outputs, self.given.class_axis), target, sample_weight)
        return loss


def _joined(batches: list[Batch]) -> list[Any]:
    """What the model is called with: all at once, if every tensor has a row for each target, all of one shape."""
    flat = [tree_flatten(x) for x, _, _ in batches]
    kinds = {(str(spec), *(t.shape[1:] for t in leaves if isinstance(t, Tensor))) for leaves, spec in flat}
    by_row = all(
        isinstance(t, Tensor) and t.ndim > 0 and len(t) == len(target)
        for (leaves, _), (_, target, _) in zip(flat, batches, strict=True)
        for t in leaves
    )
    if len(kinds) > 1 or not by_row:
        return [x for x, _, _ in batches]
    return [
        tree_unflatten([torch.cat(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1])
    ]


def _weighted(rows: Tensor, held: HeldOut) -> Tensor:
    return rows if held.weight is None else rows * held.weight
