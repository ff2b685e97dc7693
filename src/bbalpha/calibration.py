"""Make the numbers true on held-out data: temperature, noise precision, conformal intervals and sets.

`fit_temperature` and `fit_precision` choose one number by the likelihood of the MC predictive on validation data.
The conformal ones, of `bbalpha.conformal`, turn a prediction into intervals or sets with a guarantee.

    temperature = fit_temperature(net, x_held_out, y_held_out)          # predict_classification(..., temperature=)
    calibrated = fit_temperature(model, X_held_out, y_held_out)         # an estimator or a pipeline: one more of them
    calibrated.predict_proba(X_new); calibrated.save("temperature")
    guard = conformal_sets(calibrated, X_more, y_more, coverage=0.9)    # rows that neither has seen: `conformal.py`
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bbalpha._engine.batches import PassOptions, collect
from bbalpha._engine.inputs import BatchDim
from bbalpha._engine.planning import Masks
from bbalpha._reach import predictive, reach
from bbalpha.checkpoint import read_kind, write_kind
from bbalpha.checks import check_number, check_same_shape, check_targets
from bbalpha.conformal import ConformalIntervals as ConformalIntervals
from bbalpha.conformal import ConformalSets as ConformalSets
from bbalpha.conformal import class_index
from bbalpha.conformal import conformal_intervals as conformal_intervals
from bbalpha.conformal import conformal_sets as conformal_sets
from bbalpha.objectives import cross_entropy, gaussian_nll
from bbalpha.prediction import as_logits, predict_regression
from bbalpha.predictive import ClassificationPrediction

# ------------------------------------------------------------------------------ one number


@overload
def fit_temperature(
    model: nn.Module,
    x: Any,
    target: Any,
    *,
    n_passes: int = ...,
    batch_size: int | None = ...,
    masks: Masks = ...,
    seed: int | None = ...,
    class_axis: int | None = ...,
    batch_dim: BatchDim = ...,
    progress: bool | None = ...,
) -> float: ...


@overload
def fit_temperature(model: Any, x: Any, target: Any) -> "TemperedClassifier": ...


def fit_temperature(
    model: Any,
    x: Any,
    target: Any,
    *,
    n_passes: int = 100,
    batch_size: int | None = None,
    masks: Masks = "per_example",
    seed: int | None = None,
    class_axis: int | None = None,
    batch_dim: BatchDim = 0,
    progress: bool | None = None,
) -> "float | TemperedClassifier":
    """The temperature, from 1/20 to 20, under which held-out labels are likeliest: above 1 for an overconfident model.

    Of a network it is a number: the likelihood is that of the mean over passes, mean_k softmax(f_k / T), which is what
    is predicted with. All logits of the held-out rows are kept for it (K, N, C).

    Of a fitted classifier, also in a pipeline or a search, it comes with the classifier, as a `TemperedClassifier`,
    and `x` and `target` are in its own units and labels. Its networks and passes are a mixture, which has no one set of
    logits: the logarithms of the mean probabilities are tempered, softmax(log p / T).

    Args:
        model: As in `predict_classification`; so are the options. A classifier has its own passes, and takes none.
        x: Held-out inputs, not trained on.
        target: Their classes (N, ...), as tensor, array, Series or list.
        n_passes: K.
        batch_size: Rows at a time.
        masks: "per_example" or "shared".
        seed: None draws from torch's global generator.
        class_axis: As in `predict_classification`.
        batch_dim: The axis of `x` that counts rows.
        progress: As in `predict_classification`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    >>> x, y = 50 * torch.randn(90, 2), torch.randint(3, (90,))        # labels that x says nothing about
    >>> fit_temperature(net, x, y, n_passes=20) > 1
    True
    """
    if not isinstance(model, nn.Module):
        if (n_passes, batch_size, masks, seed, class_axis, batch_dim, progress) != _NO_OPTIONS:
            raise ValueError(
                "`fit_temperature` of a classifier takes no options: its passes are those of the classifier."
            )
        return _temper(model, x, target)
    target = check_targets(target)
    passes = PassOptions(n_passes, batch_size, masks, seed, batch_dim=batch_dim, progress=progress)

    def keep(groups: Iterator[Any], _: Any) -> tuple[Tensor]:
        return (torch.cat([as_logits(g, class_axis) for g in groups]),)

    (logits,) = collect(model, x, passes, keep, row_axis=1)
    check_targets(target, logits.shape[1])
    return _best_temperature(logits, target, class_axis)


@dataclass(frozen=True, eq=False)
class TemperedClassifier:
    """A fitted classifier whose mean probabilities are made true by a temperature; made by `fit_temperature`.

    Attributes:
        model: The classifier, or the pipeline or search that holds it.
        temperature: T of softmax(log p / T).
    """

    model: Any
    temperature: float

    def __post_init__(self) -> None:
        """Refuse what cannot be tempered."""
        if not hasattr(self.model, "classes_"):
            raise TypeError(f"`model` must be a fitted classifier; got {type(self.model).__name__}.")
        check_number("temperature", self.temperature, above=0)

    @property
    def classes_(self) -> NDArray[Any]:
        """The labels (C,)."""
        classes: NDArray[Any] = np.asarray(self.model.classes_)
        return classes

    def predictive(self, X: Any) -> ClassificationPrediction:
        """The distribution over classes; how much its passes disagree is not known under a temperature, and nan."""
        found = _classes(self.model, X)
        return replace(
            found,
            log_probs=(found.log_probs / self.temperature).log_softmax(1),
            expected_entropy=torch.full_like(found.expected_entropy, math.nan),
        )

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Tempered probabilities, in the order of `classes_` (N, C)."""
        return self.predictive(X).probs.numpy()

    def predict_log_proba(self, X: Any) -> NDArray[Any]:
        """Their logarithm (N, C)."""
        return self.predictive(X).log_probs.numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """The likeliest class (N,), which no temperature changes."""
        label: NDArray[Any] = self.classes_[self.predictive(X).label.numpy()]
        return label

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the temperature as a folder; the classifier is saved by itself, under another name."""
        write_kind(path, type(self).__name__, {"temperature": self.temperature, "n_classes": len(self.classes_)})

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any) -> "TemperedClassifier":
        """What `save` wrote, for the classifier `model` that it was fitted to."""
        content = read_kind(path, cls.__name__)
        found = cls(model, check_number("temperature", content.get("temperature"), above=0))
        if content.get("n_classes") != len(found.classes_):
            raise ValueError(
                f"`model` must have the {content.get('n_classes')} classes of the temperature in {str(path)!r}; "
                f"got {len(found.classes_)}."
            )
        return found


def fit_precision(
    model: nn.Module,
    x: Any,
    target: Any,
    *,
    n_passes: int = 100,
    batch_size: int | None = None,
    masks: Masks = "per_example",
    seed: int | None = None,
    batch_dim: int = 0,
    progress: bool | None = None,
) -> float:
    """The noise precision tau under which held-out targets are likeliest in the mixture over passes.

    Looked for between 1/10 and 100,000 times one over the mean squared error of the passes.

    Args:
        model: As in `predict_regression`, returning means; so are the options.
        x: Held-out inputs, not trained on.
        target: Their targets, of the shape of the model's output (N, ...), as tensor, array, Series or list.
        n_passes: K.
        batch_size: Rows at a time.
        masks: "per_example" or "shared".
        seed: None draws from torch's global generator.
        batch_dim: The axis of `x` that counts rows.
        progress: As in `predict_classification`.

    >>> net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
    >>> x = torch.randn(50, 1)
    >>> fit_precision(net, x, net(x).detach() + 10) < 0.1              # errors of 10: variance 100
    True
    """
    target = check_targets(target)
    prediction = predict_regression(
        model,
        x,
        n_passes=n_passes,
        batch_size=batch_size,
        masks=masks,
        seed=seed,
        batch_dim=batch_dim,
        progress=progress,
    )
    outputs = prediction.outputs.double()
    check_targets(target, outputs.shape[1])
    check_same_shape(outputs, target)
    error = float((outputs - target).square().mean())
    if not 0 < error < math.inf:
        raise ValueError(f"`target` must be finite and not predicted exactly; got a mean squared error of {error}.")

    def nll(log_ratio: float) -> float:
        return gaussian_nll(outputs, target, 1.0, precision=math.exp(log_ratio) / error).item()

    return math.exp(_minimum(nll, math.log(0.1), math.log(1e5))) / error


# ------------------------------------------------------------------------------ helpers

_NO_OPTIONS = (100, None, "per_example", None, None, 0, None)


def _temper(model: Any, x: Any, target: Any) -> TemperedClassifier:
    """`fit_temperature` of an estimator."""
    estimator, rows = reach(model, x)
    found = _classes(estimator, rows)
    index = class_index(estimator.classes_, target)
    check_targets(index, len(found.log_probs))
    return TemperedClassifier(model, _best_temperature(found.log_probs[None], index, 2))


def _classes(model: Any, x: Any) -> ClassificationPrediction:
    """What the classifier inside `model` predicts."""
    found = predictive(model, x)
    if not isinstance(found, ClassificationPrediction):
        raise TypeError(f"`model` must be a classifier; {type(model).__name__} predicts a {type(found).__name__}.")
    return found


def _best_temperature(logits: Tensor, target: Tensor, class_axis: int | None) -> float:
    """Under which the classes are likeliest in the mean over passes (K, N, C, ...)."""

    def nll(log_temperature: float) -> float:
        return cross_entropy(logits / math.exp(log_temperature), target, 1.0, class_axis=class_axis).item()

    return math.exp(_minimum(nll, -math.log(20), math.log(20)))


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Where `function` is smallest: the best of a grid, made precise by golden section between its neighbours."""
    grid = [low + (high - low) * i / 40 for i in range(41)]
    best = min(range(41), key=lambda i: function(grid[i]))
    low, high = grid[max(0, best - 1)], grid[min(40, best + 1)]
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > 1e-4:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return (low + high) / 2
