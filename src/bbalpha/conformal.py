"""Intervals and sets that hold the truth as often as asked, whatever the model.

Held-out rows say how far a prediction is off; the ceil((n + 1) coverage)-th smallest of these scores is the threshold
for new rows. The promise holds as long as calibration rows and new rows come from the same place, on average over both;
the model decides how wide each interval is. A prediction is calibrated, or a fitted estimator (a pipeline that ends in
one, a search over one) with its rows; targets are tensors, arrays, Series or lists.

    guard = conformal_intervals(predict_regression(net, x_held_out, precision=4.0), y_held_out, coverage=0.9)
    low, high = guard.interval(predict_regression(net, x_new, precision=4.0))

    guard = conformal_intervals(model, X_held_out, y_held_out, coverage=0.9)
    low, high = guard.interval(model, X_new)                            # arrays of the shape of y
    guard.save("guard"); ConformalIntervals.load("guard")
"""

import math
import os
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bbalpha._reach import predictive, reach
from bbalpha.checkpoint import CorruptModelError, read_kind, write_kind
from bbalpha.checks import check_inner_share, check_targets
from bbalpha.lognormal import LogPrediction
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction

IntervalScore = Literal["quantile", "std", "absolute"]
SetScore = Literal["probability", "cumulative"]
Regression = RegressionPrediction | LogPrediction
_PREDICTIONS = (ClassificationPrediction, RegressionPrediction, LogPrediction)
_CLASSES, _REGRESSION = (ClassificationPrediction,), (RegressionPrediction, LogPrediction)
_INTERVAL_SCORES, _SET_SCORES = ("quantile", "std", "absolute"), ("probability", "cumulative")


# ------------------------------------------------------------------------------ intervals


@dataclass(frozen=True, eq=False)
class ConformalIntervals:
    """Intervals that hold the truth with the asked frequency; made by `conformal_intervals`.

    Attributes:
        threshold: What the score of a new row stays below with frequency `coverage`, one an output (...).
        coverage: The frequency.
        score: What is thresholded.
        column: Whether the targets were (N,) for a prediction of one output (N, 1): intervals are (N,) then too.
    """

    threshold: Tensor
    coverage: float
    score: IntervalScore
    column: bool = False

    @overload
    def interval(self, prediction: Regression) -> tuple[Tensor, Tensor]: ...

    @overload
    def interval(self, prediction: Any, X: Any) -> tuple[NDArray[Any], NDArray[Any]]: ...

    def interval(self, prediction: Any, X: Any = None) -> tuple[Any, Any]:
        """(low, high) of new rows, each of the shape of the targets in calibration (N, ...).

        Args:
            prediction: Of the new rows; or, with `X`, the estimator that was calibrated, for arrays.
            X: The rows of an estimator.
        """
        low, high = self._ends(_predicted(_REGRESSION, prediction, X))
        return (low, high) if X is None else (low.numpy(), high.numpy())

    def _ends(self, prediction: Regression) -> tuple[Tensor, Tensor]:
        expected = (1,) if self.column else tuple(self.threshold.shape)
        if prediction.outputs.shape[2:] != expected:
            raise ValueError(
                f"`prediction` must have outputs {expected} as in calibration; "
                f"got {tuple(prediction.outputs.shape[2:])}."
            )
        prediction = _only_output(prediction) if self.column else prediction
        if self.score == "quantile":
            low, high = prediction.interval(self.coverage)
            middle = (low + high) / 2
            return torch.minimum(low - self.threshold, middle), torch.maximum(high + self.threshold, middle)
        half = self.threshold * (prediction.std if self.score == "std" else 1.0)
        mean = prediction.mean
        return mean - half, mean + half

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a folder, like those of models; a folder of another kind is not replaced."""
        write_kind(path, type(self).__name__, vars(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ConformalIntervals":
        """What `save` wrote."""
        content = read_kind(path, cls.__name__)
        _check_folder(path, content, _INTERVAL_SCORES)
        if not isinstance(content.get("column"), bool):
            raise CorruptModelError(
                f"{str(path)!r} is not of the form that bbalpha writes: `column` is odd or missing."
            )
        return cls(content["threshold"], content["coverage"], content["score"], content["column"])


def conformal_intervals(
    prediction: Any, target: Any, y: Any = None, *, coverage: float = 0.9, score: IntervalScore = "quantile"
) -> ConformalIntervals:
    """Split-conformal intervals, calibrated on held-out rows: each output holds the truth with `coverage` or more.

    The guarantee is for a new row from where the calibration rows come from, on average over both. Either of

        conformal_intervals(prediction, target)
        conformal_intervals(model, X, y)

    Args:
        prediction: Of the calibration rows, by the model and with the options of later predictions; or a fitted
            regressor, alone, at the end of a pipeline or in a search.
        target: Their targets (N, ...); (N,) will do for one output (N, 1). After an estimator, its rows X.
        y: The targets of an estimator's rows.
        coverage: Between 0 and 1.
        score: "quantile" widens or narrows the mixture's own interval by one amount; "std" divides the error by
            the predicted deviation; both give unsure rows wider intervals. "absolute" gives all rows one width.

    >>> p = RegressionPrediction(torch.randn(20, 99), torch.tensor(1.0))
    >>> low, high = conformal_intervals(p, torch.zeros(99), coverage=0.9).interval(p)
    >>> ((low <= 0) & (high >= 0)).sum()
    tensor(90)
    """
    check_inner_share("coverage", coverage)
    if score not in _INTERVAL_SCORES:
        raise ValueError(f'`score` must be "quantile", "std" or "absolute"; got {score!r}.')
    found, truth = _calibration(_REGRESSION, prediction, target, y)
    values = check_targets(truth, found.outputs.shape[1])
    if not isinstance(truth, Tensor):
        values = values.to(found.outputs)
    column = values.ndim == 1 and found.outputs.shape[2:] == (1,)
    found = _only_output(found) if column else found
    if values.shape != found.outputs.shape[1:] or not bool(values.isfinite().all()):
        shape = tuple(found.outputs.shape[1:])
        raise ValueError(f"`target` must be finite, of the shape {shape}; got shape {tuple(values.shape)}.")
    scores = _interval_scores(found, values, coverage, score)
    return ConformalIntervals(_finite_sample_quantile(scores, coverage), float(coverage), score, column)


def _interval_scores(prediction: Regression, target: Tensor, coverage: float, score: IntervalScore) -> Tensor:
    """How far each target is outside of what was predicted (N, ...)."""
    if score == "quantile":
        low, high = prediction.interval(coverage)
        return torch.maximum(low - target, target - high)
    error = (target - prediction.mean).abs()
    if score == "absolute":
        return error
    std = prediction.std
    if not bool((std > 0).all()):
        raise ValueError('`score="std"` needs a deviation above 0 in every row; got 0. Give a precision.')
    return error / std


def _only_output(prediction: Regression) -> Regression:
    """The one output of (K, N, 1) without its axis (K, N)."""
    if isinstance(prediction, LogPrediction):
        return LogPrediction(_without_axis(prediction.log))
    return _without_axis(prediction)


def _without_axis(prediction: RegressionPrediction) -> RegressionPrediction:
    outputs, tau = prediction.outputs, prediction.precision
    tau = None if tau is None else tau.expand_as(outputs)[..., 0]
    return replace(prediction, outputs=outputs[..., 0], precision=tau)


# ------------------------------------------------------------------------------ sets


@dataclass(frozen=True, eq=False)
class ConformalSets:
    """Sets of classes that hold the truth with the asked frequency; made by `conformal_sets`.

    Attributes:
        threshold: What the score of a new row stays below with frequency `coverage` ().
        coverage: The frequency.
        score: What is thresholded.
    """

    threshold: Tensor
    coverage: float
    score: SetScore

    @overload
    def prediction_set(self, prediction: ClassificationPrediction) -> Tensor: ...

    @overload
    def prediction_set(self, prediction: Any, X: Any) -> NDArray[Any]: ...

    def prediction_set(self, prediction: Any, X: Any = None) -> Any:
        """Which classes are in the set of each new row, as bool (N, C); never empty.

        Args:
            prediction: Of the new rows; or, with `X`, the classifier that was calibrated, for an array in the order
                of its `classes_`.
            X: The rows of an estimator.
        """
        found = _predicted(_CLASSES, prediction, X)
        inside = _set_scores(found, self.score) <= self.threshold
        inside = inside.scatter(1, found.label[:, None], True)
        return inside if X is None else inside.numpy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a folder, like those of models; a folder of another kind is not replaced."""
        write_kind(path, type(self).__name__, vars(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ConformalSets":
        """What `save` wrote."""
        content = read_kind(path, cls.__name__)
        _check_folder(path, content, _SET_SCORES)
        return cls(content["threshold"], content["coverage"], content["score"])


def conformal_sets(
    prediction: Any, target: Any, y: Any = None, *, coverage: float = 0.9, score: SetScore = "probability"
) -> ConformalSets:
    """Split-conformal sets of classes, calibrated on held-out rows: they hold the truth with `coverage` or more.

    Either of

        conformal_sets(prediction, target)
        conformal_sets(model, X, y)

    Args:
        prediction: Of the calibration rows (N, C), by the model and with the options of later predictions; or a fitted
            classifier, alone, at the end of a pipeline, in a search or with a temperature.
        target: Their classes as indices (N,). After an estimator, its rows X.
        y: The labels of an estimator's rows, as in its `classes_` (N,).
        coverage: Between 0 and 1.
        score: "probability" takes all classes above one probability, the smallest sets on average;
            "cumulative" takes classes from the top until enough is held, larger but fairer to hard rows.

    >>> p = ClassificationPrediction(torch.randn(99, 3).log_softmax(1), torch.zeros(99), torch.zeros(99, 3), 10)
    >>> inside = conformal_sets(p, torch.zeros(99).long(), coverage=0.9).prediction_set(p)
    >>> bool(inside[:, 0].sum() >= 90)
    True
    """
    check_inner_share("coverage", coverage)
    if score not in _SET_SCORES:
        raise ValueError(f'`score` must be "probability" or "cumulative"; got {score!r}.')
    found, truth = _calibration(_CLASSES, prediction, target, y)
    index = check_targets(truth)
    found.log_prob(index)  # checks the classes
    check_targets(index, len(found.log_probs))
    scores = _set_scores(found, score).gather(1, index.long()[:, None]).squeeze(1)
    return ConformalSets(_finite_sample_quantile(scores, coverage), float(coverage), score)


def class_index(classes: Any, target: Any) -> Tensor:
    """Which of `classes` (C,) each label is (N,).

    >>> class_index(["no", "yes"], ["yes", "no", "yes"])
    tensor([1, 0, 1])
    """
    known, labels = np.asarray(classes), np.asarray(target)
    if labels.ndim != 1:
        raise ValueError(f"`y` must hold one label a row, (N,); got shape {labels.shape}.")
    if known.dtype.kind == labels.dtype.kind == "M":
        labels = labels.astype(known.dtype)  # the same days in other units
    place = {label: i for i, label in enumerate(known.tolist())}
    odd = [label for label in labels.tolist() if label not in place]
    if odd:
        raise ValueError(f"`y` must hold labels that the model was fitted with; got {odd[0]!r}.")
    return torch.tensor([place[label] for label in labels.tolist()], dtype=torch.long)


# ------------------------------------------------------------------------------ helpers


def _calibration(kinds: tuple[type, ...], prediction: Any, target: Any, y: Any) -> tuple[Any, Any]:
    """The prediction and the truth out of (prediction, target) or (model, X, y)."""
    if isinstance(prediction, _PREDICTIONS):
        if y is not None:
            raise ValueError("`y` must be left out after a prediction: its targets come second.")
        return _predicted(kinds, prediction, None), target
    if y is None:
        reach_by = "bbalpha.predict_*(net, x)" if isinstance(prediction, nn.Module) else "(model, X, y)"
        raise TypeError(
            f"`prediction` must be a prediction, or a fitted estimator with its rows and targets; got "
            f"{type(prediction).__name__} and one argument more. Use {reach_by}."
        )
    estimator, rows = reach(prediction, target)
    found = _predicted(kinds, estimator, rows)
    return found, class_index(estimator.classes_, y) if kinds is _CLASSES else y


def _predicted(kinds: tuple[type, ...], prediction: Any, X: Any) -> Any:
    """The prediction itself, or that of an estimator at the rows `X`, if it is of the kind that is wanted."""
    given, kind = isinstance(prediction, _PREDICTIONS), kinds[0]
    if given and X is not None:
        raise ValueError("`X` must be left out where a prediction is given: it has its rows.")
    if not given and X is None:
        raise TypeError(
            f"`prediction` must be a {kind.__name__}, or an estimator with its rows; got {type(prediction).__name__}."
        )
    found = prediction if given else predictive(prediction, X)
    if not isinstance(found, kinds):
        raise TypeError(f"`prediction` must be a {kind.__name__}; got a {type(found).__name__}.")
    return found


def _set_scores(prediction: ClassificationPrediction, score: SetScore) -> Tensor:
    """How far a class is from the top of its row (N, C)."""
    probs = prediction.probs
    if probs.ndim != 2:
        raise ValueError(f"`prediction` must be of one label a row, (N, C); got {tuple(probs.shape)}.")
    if score == "probability":
        return 1 - probs
    ordered, index = probs.sort(dim=1, descending=True, stable=True)
    return torch.zeros_like(probs).scatter(1, index, ordered.cumsum(1))


def _finite_sample_quantile(scores: Tensor, coverage: float) -> Tensor:
    """The ceil((n + 1) coverage)-th smallest score: a new one is not above it with that frequency (n, ...) -> (...)."""
    n = len(scores)
    k = math.ceil((n + 1) * coverage - 1e-9)
    if k > n:
        least = math.ceil(coverage / (1 - coverage) - 1e-9)
        raise ValueError(f"`target` must have at least {least} calibration rows for coverage {coverage}; got {n}.")
    return scores.sort(dim=0).values[k - 1]


def _check_folder(path: str | os.PathLike[str], content: dict[str, Any], scores: tuple[str, ...]) -> None:
    """Refuse what a folder says if no guard can be made of it."""
    threshold, coverage = content.get("threshold"), content.get("coverage")
    whole = isinstance(threshold, Tensor) and threshold.is_floating_point() and content.get("score") in scores
    if not whole or not isinstance(coverage, float) or not 0 < coverage < 1:
        raise CorruptModelError(f"{str(path)!r} is not of the form that bbalpha writes: a part is odd or missing.")
