"""How good a prediction is, row by row: likelihood, errors, calibration, intervals, errors and strange inputs found.

Pure functions of tensors, computed in float64. `probs` are the mean over passes (N, C, ...), regression
passes are (K, N, ...), and uncertainties are one number a row, larger for the less sure.

    p = bbalpha.predict_classification(net, x)
    ece(p.probs, y), auroc(p.entropy, p.label != y)     # is 90% right nine times in ten; are errors the unsure ones
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bbalpha.checks import check_count, check_flag, check_number, check_precision, check_whole
from bbalpha.metrics.numbers import finite, one_axis, same_shape
from bbalpha.objectives import alpha_loss

_BLOCK = 2**22  # numbers held at a time by `crps`


# ------------------------------------------------------------------------------ likelihood and errors


def nll(log_likelihood: Tensor) -> Tensor:
    """Minus the mean log of the predictive density, (K, N) -> (): every point's mean over passes inside the log.

    Args:
        log_likelihood: log p(y_n | x_n, w_k) (K, N). Of a prediction `p`: ``-p.log_prob(y).mean()`` is the same.

    >>> nll(torch.tensor([[0.5], [0.1]]).log())                        # -log 0.3
    tensor(1.2040, dtype=torch.float64)
    """
    return alpha_loss(-finite("log_likelihood", log_likelihood, infinite=True), 1.0)


def rmse(mean: Tensor, target: Tensor) -> Tensor:
    """The root of the mean squared error, over all rows and outputs: (N, ...), (N, ...) -> ().

    >>> rmse(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0]))
    tensor(3.5355, dtype=torch.float64)
    """
    mean, target = finite("mean", mean), finite("target", target)
    same_shape("target", target, "mean", mean)
    return (mean - target).square().mean().sqrt()


def accuracy(probs: Tensor, target: Tensor, *, class_axis: int = 1) -> Tensor:
    """The share of rows (and pixels, tokens) whose likeliest class is the target: (N, C, ...), (N, ...) -> ().

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0.5000, dtype=torch.float64)
    """
    probs, target = _classified(probs, target, class_axis)
    return (probs.argmax(-1) == target).double().mean()


def brier(probs: Tensor, target: Tensor, *, class_axis: int = 1) -> Tensor:
    """The Brier score, squared distance to the one-hot target summed over classes: (N, C, ...), (N, ...) -> ().

    Args:
        probs: Probabilities of the classes (N, C, ...).
        target: Class indices (N, ...), or one-hot or soft targets of the shape of `probs`.
        class_axis: The axis of `probs` that holds the classes.

    >>> brier(torch.tensor([[0.8, 0.2]]), torch.tensor([0]))           # 0.2^2 + 0.2^2
    tensor(0.0800, dtype=torch.float64)
    """
    if isinstance(target, Tensor) and isinstance(probs, Tensor) and target.shape == probs.shape:
        probs, soft = _distributions("probs", probs, class_axis), _distributions("target", target, class_axis)
        return (probs - soft).square().sum(-1).mean()
    probs, target = _classified(probs, target, class_axis)
    true = probs.gather(-1, target[:, None]).squeeze(-1)
    return (probs.square().sum(-1) - 2 * true + 1).mean()


def crps(outputs: Tensor, target: Tensor, *, precision: float | Tensor | None = None) -> Tensor:
    """The continuous ranked probability score of every target: (K, N, ...), (N, ...) -> (N, ...).

    Of the mixture of K Gaussians itself, in closed form: E|X - y| - E|X - X'| / 2; in the units of the target.

    Args:
        outputs: Means of the passes (K, N, ...).
        target: (N, ...).
        precision: tau, a number or a tensor that broadcasts to `outputs`; None scores the K values as they are.

    >>> crps(torch.zeros(10, 1), torch.zeros(1), precision=1.0)        # of a standard normal at its mean
    tensor([0.2337], dtype=torch.float64)
    """
    outputs, target = finite("outputs", outputs), finite("target", target)
    same_shape("target", target, "one pass of `outputs`", outputs[0])
    K = outputs.shape[0]
    mean = outputs.reshape(K, -1)  # (K, P)
    if precision is None:
        std = torch.zeros_like(mean)
    else:
        if not isinstance(precision, Tensor):
            precision = torch.tensor(check_number("precision", precision, above=0), device=outputs.device)
        tau = finite("precision", precision)
        if bool((tau <= 0).any()):
            raise ValueError(f"`precision` must be positive; got {float(tau.min())}.")
        check_precision(tau, outputs)
        std = tau.rsqrt().expand_as(outputs).reshape(K, -1)
    blocks = zip(*(t.split(max(1, 2 * _BLOCK // K**2), -1) for t in (mean, std, target.flatten())), strict=True)
    return torch.cat([_crps_block(*block) for block in blocks]).reshape(target.shape)


def _crps_block(mean: Tensor, std: Tensor, target: Tensor) -> Tensor:
    """CRPS of the mixtures (K, P) at (P,)."""
    K = mean.shape[0]
    near = _mean_distance(mean - target, std).mean(0)
    j, k = torch.triu_indices(K, K, 1, device=mean.device)  # every pair once
    apart = 2 * _mean_distance(mean[j] - mean[k], (std[j].square() + std[k].square()).sqrt()).sum(0)
    itself = _mean_distance(torch.zeros_like(mean), std * math.sqrt(2)).sum(0)
    return near - 0.5 * (apart + itself) / K**2


def _mean_distance(mean: Tensor, std: Tensor) -> Tensor:
    """E|X| of X ~ N(mean, std^2); |mean| where std is 0."""
    z = mean / std.clamp_min(1e-300)
    return mean * torch.erf(z / math.sqrt(2)) + std * math.sqrt(2 / math.pi) * (-0.5 * z.square()).exp()


# ------------------------------------------------------------------------------ calibration


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence against accuracy, by bins of confidence that are not empty.

    Attributes:
        confidence: Mean probability of the predicted class (B,).
        accuracy: Share of right predictions (B,).
        count: How many predictions the bin holds (B,).
    """

    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    @property
    def error(self) -> Tensor:
        """The mean gap between confidence and accuracy, weighted by count: the expected calibration error ()."""
        gap = (self.confidence - self.accuracy).abs()
        return (gap * self.count).sum() / self.count.sum()


def reliability(
    probs: Tensor, target: Tensor, *, n_bins: int = 15, adaptive: bool = False, class_axis: int = 1
) -> Reliability:
    """How often predictions of each confidence are right; see `ece` for the options.

    >>> reliability(torch.tensor([[0.7, 0.3], [0.7, 0.3]]), torch.tensor([0, 1])).accuracy
    tensor([0.5000], dtype=torch.float64)
    """
    n_bins, adaptive = check_count("n_bins", n_bins), check_flag("adaptive", adaptive)
    probs, target = _classified(probs, target, class_axis)
    confidence, label = probs.max(-1)
    right = (label == target).double()
    if adaptive:
        order = confidence.argsort()
        right = _tie_mean(right, confidence)[order]
        confidence = confidence[order]
        bins = torch.arange(len(right), device=right.device) * n_bins // len(right)
    else:
        edges = torch.linspace(0, 1, n_bins + 1, dtype=torch.float64, device=right.device)
        bins = torch.bucketize(confidence, edges[1:-1])  # (low, high]
    count = torch.zeros(n_bins, dtype=torch.float64, device=right.device).index_add_(0, bins, torch.ones_like(right))
    sums = [torch.zeros_like(count).index_add_(0, bins, v)[count > 0] for v in (confidence, right)]
    count = count[count > 0]
    return Reliability(sums[0] / count, sums[1] / count, count)


def ece(probs: Tensor, target: Tensor, *, n_bins: int = 15, adaptive: bool = False, class_axis: int = 1) -> Tensor:
    """The expected calibration error of the predicted class: (N, C, ...), (N, ...) -> ().

    Args:
        probs: Probabilities of the classes.
        target: Class indices.
        n_bins: Bins of confidence.
        adaptive: Bins of equal count instead of equal width: no bin is nearly empty.
        class_axis: The axis of `probs` that holds the classes.

    >>> ece(torch.tensor([[0.7, 0.3], [0.7, 0.3]]), torch.tensor([0, 1]))        # says 0.7, is 0.5
    tensor(0.2000, dtype=torch.float64)
    """
    return reliability(probs, target, n_bins=n_bins, adaptive=adaptive, class_axis=class_axis).error


def interval_coverage(low: Tensor, high: Tensor, target: Tensor) -> Tensor:
    """The share of targets inside [low, high]: (N, ...) each -> ().

    >>> interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 2.0]))
    tensor(0.5000, dtype=torch.float64)
    """
    low, high = _interval(low, high)
    target = finite("target", target)
    same_shape("target", target, "low", low)
    return ((low <= target) & (target <= high)).double().mean()


def interval_width(low: Tensor, high: Tensor) -> Tensor:
    """The mean width of [low, high], in the units of the target: (N, ...), (N, ...) -> ().

    >>> interval_width(torch.zeros(2), torch.tensor([1.0, 3.0]))
    tensor(2., dtype=torch.float64)
    """
    low, high = _interval(low, high)
    return (high - low).mean()


# ------------------------------------------------------------------------------ detection


def auroc(scores: Tensor, positive: Tensor) -> Tensor:
    """The chance that a positive row scores higher than a negative one, ties half: (N,), (N,) -> ().

    Args:
        scores: Larger for what should be found: the entropy, the mutual information.
        positive: True for what should be found: wrong predictions, or inputs from elsewhere.

    >>> auroc(torch.tensor([0.1, 0.4, 0.3, 0.9]), torch.tensor([False, False, True, True]))
    tensor(0.7500, dtype=torch.float64)
    """
    true, false = _found(scores, positive)
    return torch.trapezoid(true, false)


def aupr(scores: Tensor, positive: Tensor) -> Tensor:
    """The area under precision against recall (average precision), for `auroc`'s arguments: (N,), (N,) -> ().

    >>> aupr(torch.tensor([0.1, 0.4, 0.3, 0.9]), torch.tensor([False, False, True, True]))
    tensor(0.8333, dtype=torch.float64)
    """
    true, false = _found(scores, positive)
    positives, negatives = positive.sum(), (~positive).sum()
    precision = true[1:] * positives / (true[1:] * positives + false[1:] * negatives)
    return (true.diff() * precision).sum()


def fpr95(scores: Tensor, positive: Tensor) -> Tensor:
    """The share of false alarms when 95% of the positives are found, for `auroc`'s arguments: (N,), (N,) -> ().

    >>> fpr95(torch.tensor([0.1, 0.4, 0.3, 0.9]), torch.tensor([False, False, True, True]))
    tensor(0.5000, dtype=torch.float64)
    """
    true, false = _found(scores, positive)
    return false[true >= 0.95 - 1e-12][0]


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The mean loss of the rows kept when the least sure are left to somebody else.

    Attributes:
        coverage: Share of rows kept, ascending to 1 (N,).
        risk: Their mean loss (N,).
    """

    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> Tensor:
        """The mean risk over all coverages; smaller is better ()."""
        return self.risk.mean()


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """Risk against coverage, the surest rows kept first; rows that tie share their mean loss.

    Args:
        uncertainty: One number a row (N,).
        loss: What a row costs when it is kept: wrong or not, squared error (N,).

    >>> risk_coverage(torch.tensor([0.9, 0.1]), torch.tensor([1.0, 0.0])).risk
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    uncertainty, loss = finite("uncertainty", uncertainty, infinite=True), finite("loss", loss)
    one_axis("uncertainty", uncertainty)
    same_shape("loss", loss, "uncertainty", uncertainty)
    kept = torch.arange(1, len(loss) + 1, dtype=torch.float64, device=loss.device)
    ordered = _tie_mean(loss, uncertainty)[uncertainty.argsort()]
    return RiskCoverage(kept / len(loss), ordered.cumsum(0) / kept)


# ------------------------------------------------------------------------------ helpers


def _found(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of positives and of negatives at or above every distinct score, from none to all (T,)."""
    scores = finite("scores", scores, infinite=True)
    one_axis("scores", scores)
    if not isinstance(positive, Tensor) or positive.dtype != torch.bool:
        raise TypeError(f"`positive` must be a bool tensor; got {getattr(positive, 'dtype', type(positive).__name__)}.")
    same_shape("positive", positive, "scores", scores)
    if bool(positive.all()) or not bool(positive.any()):
        raise ValueError(f"`positive` must have both kinds; got {len(positive)} rows, all {bool(positive[0])}.")
    values, place = torch.unique(scores, return_inverse=True)
    ends = []
    for rows in (positive, ~positive):
        count = torch.zeros(len(values) + 1, dtype=torch.float64, device=scores.device)
        count.index_add_(0, len(values) - place, rows.double())  # descending, behind a leading 0
        ends.append(count.cumsum(0) / rows.sum())
    return ends[0], ends[1]


def _tie_mean(values: Tensor, keys: Tensor) -> Tensor:
    """`values` with every row that shares its key replaced by their mean: the order of the rows drops out."""
    _, place, count = torch.unique(keys, return_inverse=True, return_counts=True)
    total = torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add_(0, place, values)
    mean: Tensor = total / count
    return mean[place]


def _distributions(name: str, probs: Tensor, class_axis: int) -> Tensor:
    """Probabilities with the classes last (N, ..., C), checked."""
    probs = finite(name, probs)
    check_whole("class_axis", class_axis)
    if probs.ndim < 2 or not -probs.ndim < class_axis < probs.ndim or class_axis == 0:
        raise ValueError(
            f"`class_axis` must name an axis of `{name}` after N; got {class_axis} for shape {tuple(probs.shape)}."
        )
    probs = probs.movedim(class_axis, -1)
    total = probs.sum(-1)
    if bool((probs < 0).any()) or bool(((total - 1).abs() > 1e-3).any()):
        raise ValueError(
            f"`{name}` must be probabilities that sum to 1 over the classes; got sums from {float(total.min()):.4g} to "
            f"{float(total.max()):.4g}. Are these logits? Use softmax."
        )
    return probs


def _classified(probs: Tensor, target: Tensor, class_axis: int) -> tuple[Tensor, Tensor]:
    """Probabilities (P, C) and classes (P,), positions as rows, checked."""
    probs = _distributions("probs", probs, class_axis)
    if (
        not isinstance(target, Tensor)
        or target.is_floating_point()
        or target.is_complex()
        or target.dtype == torch.bool
    ):
        raise TypeError(
            f"`target` must hold integer class indices; got {getattr(target, 'dtype', type(target).__name__)}."
        )
    same_shape("target", target, "`probs` without its class axis", probs[..., 0])
    unseen = target[(target < 0) | (target >= probs.shape[-1])]
    if len(unseen):
        raise ValueError(f"`target` must hold class indices from 0 to {probs.shape[-1] - 1}; got {int(unseen[0])}.")
    return probs.flatten(0, -2), target.flatten().long()


def _interval(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    low, high = finite("low", low, infinite=True), finite("high", high, infinite=True)
    same_shape("high", high, "low", low)
    if bool((low > high).any()):
        raise ValueError("`low` must not be above `high`; got an interval that is turned round.")
    return low, high
