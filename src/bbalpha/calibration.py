"""Make the numbers true on held-out data: temperature, noise precision, conformal intervals and sets.

`fit_temperature` and `fit_precision` choose one number by the likelihood of the MC predictive on validation data.
The conformal ones turn a prediction into intervals or sets that hold the truth with the asked frequency, whatever
the model, as long as calibration rows and new rows come from the same place; the model decides how wide each is.

    guard = conformal_intervals(predict_regression(net, x_held_out, precision=4.0), y_held_out, coverage=0.9)
    low, high = guard.interval(predict_regression(net, x_new, precision=4.0))
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bbalpha._engine.batches import PassOptions, collect
from bbalpha._engine.inputs import BatchDim
from bbalpha._engine.planning import Masks
from bbalpha.checks import check_inner_share, check_real, check_same_shape
from bbalpha.objectives import cross_entropy, gaussian_nll
from bbalpha.prediction import as_logits, predict_regression
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction

IntervalScore = Literal["quantile", "std", "absolute"]
SetScore = Literal["probability", "cumulative"]


# ------------------------------------------------------------------------------ one number


def fit_temperature(
    model: nn.Module,
    x: Any,
    target: Tensor,
    *,
    n_passes: int = 100,
    batch_size: int | None = None,
    masks: Masks = "per_example",
    seed: int | None = None,
    class_axis: int | None = None,
    batch_dim: BatchDim = 0,
    progress: bool | None = None,
) -> float:
    """The temperature, from 1/20 to 20, under which held-out labels are likeliest: above 1 for an overconfident model.

    The likelihood is that of the mean over passes, mean_k softmax(f_k / T), which is what is predicted with. All
    logits of the held-out rows are kept for it (K, N, C).

    Args:
        model: As in `predict_classification`; so are the options.
        x: Held-out inputs, not trained on.
        target: Their classes (N, ...).
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
    _check_rows(target)
    passes = PassOptions(n_passes, batch_size, masks, seed, batch_dim=batch_dim, progress=progress)

    def keep(groups: Iterator[Any], _: Any) -> tuple[Tensor]:
        return (torch.cat([as_logits(g, class_axis) for g in groups]),)

    (logits,) = collect(model, x, passes, keep, row_axis=1)
    _check_rows(target, logits.shape[1])

    def nll(log_temperature: float) -> float:
        return cross_entropy(logits / math.exp(log_temperature), target, 1.0, class_axis=class_axis).item()

    return math.exp(_minimum(nll, -math.log(20), math.log(20)))


def fit_precision(
    model: nn.Module,
    x: Any,
    target: Tensor,
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
        target: Their targets, of the shape of the model's output (N, ...).
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
    _check_rows(target)
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
    _check_rows(target, outputs.shape[1])
    check_same_shape(outputs, target)
    error = float((outputs - target).square().mean())
    if not 0 < error < math.inf:
        raise ValueError(f"`target` must be finite and not predicted exactly; got a mean squared error of {error}.")

    def nll(log_ratio: float) -> float:
        return gaussian_nll(outputs, target, 1.0, precision=math.exp(log_ratio) / error).item()

    return math.exp(_minimum(nll, math.log(0.1), math.log(1e5))) / error


# ------------------------------------------------------------------------------ conformal


@dataclass(frozen=True, eq=False)
class ConformalIntervals:
    """Intervals that hold the truth with the asked frequency; made by `conformal_intervals`.

    Attributes:
        threshold: What the score of a new row stays below with frequency `coverage`, one an output (...).
        coverage: The frequency.
        score: What is thresholded.
    """

    threshold: Tensor
    coverage: float
    score: IntervalScore

    def interval(self, prediction: RegressionPrediction) -> tuple[Tensor, Tensor]:
        """(low, high) of new rows, each (N, ...)."""
        if prediction.outputs.shape[2:] != self.threshold.shape:
            raise ValueError(
                f"`prediction` must have outputs {tuple(self.threshold.shape)} as in calibration; "
                f"got {tuple(prediction.outputs.shape[2:])}."
            )
        if self.score == "quantile":
            low, high = prediction.interval(self.coverage)
            middle = (low + high) / 2
            return torch.minimum(low - self.threshold, middle), torch.maximum(high + self.threshold, middle)
        half = self.threshold * (prediction.std if self.score == "std" else 1.0)
        mean = prediction.mean
        return mean - half, mean + half


def conformal_intervals(
    prediction: RegressionPrediction, target: Tensor, *, coverage: float = 0.9, score: IntervalScore = "quantile"
) -> ConformalIntervals:
    """Split-conformal intervals, calibrated on held-out rows: each output holds the truth with `coverage` or more.

    The guarantee is for a new row from where the calibration rows come from, on average over both.

    Args:
        prediction: Of the calibration rows, by the model and with the options of later predictions.
        target: Their targets (N, ...).
        coverage: Between 0 and 1.
        score: "quantile" widens or narrows the mixture's own interval by one amount; "std" divides the error by
            the predicted deviation; both give unsure rows wider intervals. "absolute" gives all rows one width.

    >>> p = RegressionPrediction(torch.randn(20, 99), torch.tensor(1.0))
    >>> low, high = conformal_intervals(p, torch.zeros(99), coverage=0.9).interval(p)
    >>> ((low <= 0) & (high >= 0)).sum()
    tensor(90)
    """
    check_inner_share("coverage", coverage)
    mean = prediction.mean
    _check_rows(target, len(mean))
    if target.shape != mean.shape or not bool(target.isfinite().all()):
        raise ValueError(f"`target` must be finite, of the shape {tuple(mean.shape)}; got shape {tuple(target.shape)}.")
    if score == "std":
        std = prediction.std
        if not bool((std > 0).all()):
            raise ValueError('`score="std"` needs a deviation above 0 in every row; got 0. Give a precision.')
        scores = (target - mean).abs() / std
    elif score == "quantile":
        low, high = prediction.interval(coverage)
        scores = torch.maximum(low - target, target - high)
    elif score == "absolute":
        scores = (target - mean).abs()
    else:
        raise ValueError(f'`score` must be "quantile", "std" or "absolute"; got {score!r}.')
    return ConformalIntervals(_finite_sample_quantile(scores, coverage), coverage, score)


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

    def prediction_set(self, prediction: ClassificationPrediction) -> Tensor:
        """Which classes are in the set of each new row, as bool (N, C); never empty."""
        inside = _set_scores(prediction, self.score) <= self.threshold
        return inside.scatter(1, prediction.label[:, None], True)


def conformal_sets(
    prediction: ClassificationPrediction, target: Tensor, *, coverage: float = 0.9, score: SetScore = "probability"
) -> ConformalSets:
    """Split-conformal sets of classes, calibrated on held-out rows: they hold the truth with `coverage` or more.

    Args:
        prediction: Of the calibration rows (N, C), by the model and with the options of later predictions.
        target: Their classes (N,).
        coverage: Between 0 and 1.
        score: "probability" takes all classes above one probability, the smallest sets on average;
            "cumulative" takes classes from the top until enough is held, larger but fairer to hard rows.

    >>> p = ClassificationPrediction(torch.randn(99, 3).log_softmax(1), torch.zeros(99), torch.zeros(99, 3), 10)
    >>> inside = conformal_sets(p, torch.zeros(99).long(), coverage=0.9).prediction_set(p)
    >>> bool(inside[:, 0].sum() >= 90)
    True
    """
    check_inner_share("coverage", coverage)
    if score not in ("probability", "cumulative"):
        raise ValueError(f'`score` must be "probability" or "cumulative"; got {score!r}.')
    prediction.log_prob(target)  # checks the classes
    _check_rows(target, len(prediction.log_probs))
    scores = _set_scores(prediction, score).gather(1, target.long()[:, None]).squeeze(1)
    return ConformalSets(_finite_sample_quantile(scores, coverage), coverage, score)


# ------------------------------------------------------------------------------ helpers


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


def _check_rows(target: Tensor, rows: int | None = None) -> None:
    check_real("target", target)
    if target.ndim == 0 or len(target) == 0:
        raise ValueError("`target` must have calibration rows; got none. Hold some data out of training.")
    if rows is not None and len(target) != rows:
        raise ValueError(f"`target` must have one entry a row, {rows}; got {len(target)}.")
