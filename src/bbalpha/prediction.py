"""Predict with K passes of any model, over any number of rows: `predict_classification`, `predict_regression`.

p = predict_regression(net, x, precision=4.0)
p.mean, p.epistemic_std, p.interval(0.9)            # what comes back is in predictive.py
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bbalpha._engine.batches import PassOptions, collect
from bbalpha._engine.inputs import BatchDim
from bbalpha._engine.planning import Masks
from bbalpha._engine.selection import Sites
from bbalpha._engine.settling import Settling, State, Where, classes_settled, mixture_settled
from bbalpha.checks import check_class_axis, check_flag, check_number, check_precision
from bbalpha.objectives import logits_of, mean_and_log_precision
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction

_BLOCK = 2**22  # numbers worked on at a time

Output = int | str | Callable[[Any], Any] | None


def predict_classification(
    model: nn.Module,
    x: Any,
    *,
    n_passes: int | None = 100,
    tolerance: float | None = None,
    batch_size: int | None = None,
    masks: Masks = "per_example",
    balanced: bool = True,
    sites: Sites | None = None,
    seed: int | None = None,
    temperature: float = 1.0,
    keep_passes: bool = False,
    class_axis: int | None = None,
    output: Output = None,
    batch_dim: BatchDim = 0,
    progress: bool | None = None,
) -> ClassificationPrediction:
    """The predictive distribution over classes, from the logits of `n_passes` stochastic passes.

    Runs in evaluation mode, without gradients, in bounded memory: passes are reduced as they come.

    Args:
        model: Returns logits (N, C), pixels (N, C, H, W) or tokens (N, T, C), or a mapping with "logits"; a
            single logit (N,) or (N, 1) means yes or no and gives the classes 0 and 1.
        x: A tensor, a tuple (``model(*x)``), a mapping (``model(**x)``), or an iterable of these (a DataLoader).
        n_passes: K; None asks for no passes: the network as it is, random sites off, whose mutual information is 0.
        tolerance: None runs all passes. A number, such as 0.1, runs at most `n_passes`: a row is done as soon as its
            probabilities are known to about the tolerance and its label is clear of chance; `passes_used` says when.
            Rows may be done at numbers that divide `n_passes`, from 8 on: after 10, 20, 50 or all of 100.
        batch_size: Rows at a time; None chooses by memory.
        masks: "per_example", or "shared" by all rows: then one `seed` gives the same for every `batch_size`.
        balanced: As in `bbalpha.sample`: masks drawn together, for less noise at equal K; False draws each by itself.
        sites: The random sites that draw, the others off; as in `bbalpha.sample`.
        seed: None draws from torch's global generator; an int leaves it untouched.
        temperature: Divides the logits of every pass; see `bbalpha.calibration.fit_temperature`.
        keep_passes: Also keep the log-probabilities of each pass, K * N * C numbers: `pass_log_probs`. Of shared masks
            they say what rows do together (`bbalpha.joint_log_prob`, `bbalpha.acquisition`).
        class_axis: The axis of the outputs (K, N, ...) that holds the classes: -1 for tokens (N, T, C), 2 for
            (N, C, L); None is 2 where it is no choice, and must be given for these.
        output: What to read of a model that returns several things: an int for a tuple, a str for a mapping or an
            attribute, or a function of all of it, with tensors (K, N, ...), that gives the logits.
        batch_dim: The axis of `x` that counts rows, as in `bbalpha.sample`; results have the rows first.
        progress: True or False; None shows a bar on a terminal when it takes more than a few seconds.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    >>> p = predict_classification(net, torch.zeros(4, 2), n_passes=20)
    >>> p.probs.shape, p.label.shape, bool((p.mutual_information >= 0).all())
    (torch.Size([4, 3]), torch.Size([4]), True)
    """
    temperature = check_number("temperature", temperature, above=0)
    passes = PassOptions(n_passes, batch_size, masks, seed, balanced, batch_dim, progress, sites)

    settling = _settling_classes(tolerance, passes, class_axis)
    if check_flag("keep_passes", keep_passes) and settling is not None:
        raise ValueError(
            f"`keep_passes` needs the same passes for all rows; got tolerance={tolerance!r}. Leave `tolerance` out."
        )

    def reduce(groups: Iterator[Any], where: Where) -> State:
        logits = (as_logits(pick(g, output), class_axis) / temperature for g in groups)
        axis = 2 if class_axis is None else class_axis
        kept: list[Tensor] | None = [] if keep_passes else None
        sums = _sum_logits(logits, axis, where, with_squares=settling is not None, kept=kept)
        if kept is not None:  # rows first, as all that is collected
            return *_divided(sums, passes.count), torch.cat(kept).transpose(0, 1)
        return _divided(sums, passes.count) if settling is None else sums

    log_probs, expected_entropy, votes, *more = collect(model, x, passes, reduce, row_axis=0, settling=settling)
    axis, drawn = _class_axis_of_rows(class_axis, log_probs), n_passes is not None
    used = more[0] if settling is not None else None
    each = more[0].transpose(0, 1) if keep_passes else None
    return ClassificationPrediction(log_probs, expected_entropy, votes, passes.count, axis, drawn, used, masks, each)


def classification_of(outputs: Any, *, class_axis: int | None = None) -> ClassificationPrediction:
    """The predictive distribution over classes of passes that were run already.

    Args:
        outputs: Logits (K, N, C), pixels or tokens, as `bbalpha.sample` gives them, or a mapping with "logits".
        class_axis: As in `predict_classification`.

    >>> classification_of(torch.zeros(10, 3, 4)).probs[0]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    logits = as_logits(outputs, class_axis)
    axis = 2 if class_axis is None else class_axis
    sums = _sum_logits(iter((logits,)), axis, Where(0), with_squares=False)
    log_probs, expected_entropy, votes = _divided(sums, len(logits))
    axis = _class_axis_of_rows(class_axis, log_probs)
    return ClassificationPrediction(log_probs, expected_entropy, votes, len(logits), axis)


def predict_regression(
    model: nn.Module,
    x: Any,
    *,
    n_passes: int | None = 100,
    precision: float | Tensor | Literal["predicted"] | None = None,
    tolerance: float | None = None,
    threshold: float | None = None,
    batch_size: int | None = None,
    masks: Masks = "per_example",
    balanced: bool = True,
    sites: Sites | None = None,
    seed: int | None = None,
    output: Output = None,
    batch_dim: BatchDim = 0,
    progress: bool | None = None,
) -> RegressionPrediction:
    """The predictive distribution of a real target: a mixture over `n_passes` stochastic passes.

    Runs in evaluation mode, without gradients, a batch at a time; keeps the K means of every row.

    Args:
        model: Returns means (N, D) or (N,); with ``precision="predicted"`` (mean, log_precision), or a mapping with
            "loc" and "scale", the standard deviation of the noise.
        x: As in `predict_classification`.
        n_passes: K; None asks for no passes: the network as it is, random sites off, whose epistemic part is 0.
        precision: tau, one over the noise variance: a number or a tensor that broadcasts to (K, N, D) (such as
            `GaussianNLL.precision`); "predicted" by the model; None knows no noise: aleatoric 0, no density.
        tolerance: As in `predict_classification`, such as 0.2: a row is done as soon as its mean and the ends of its
            90 % interval are known to about so many of its standard deviations.
        threshold: With a tolerance: the number that decides, such as a limit that the target must not pass. A row whose
            mean could as well be on its other side goes on, as a row between two classes does.
        batch_size: Rows at a time; None chooses by memory.
        masks: "per_example", or "shared" by all rows: then one `seed` gives the same for every `batch_size`.
        balanced: As in `bbalpha.sample`: masks drawn together, for less noise at equal K; False draws each by itself.
        sites: The random sites that draw, the others off; as in `bbalpha.sample`.
        seed: None draws from torch's global generator; an int leaves it untouched.
        output: As in `predict_classification`.
        batch_dim: The axis of `x` that counts rows, as in `bbalpha.sample`; results have the rows first.
        progress: True or False; None shows a bar on a terminal when it takes more than a few seconds.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    >>> p = predict_regression(net, torch.ones(4, 2), precision=4.0)
    >>> low, high = p.interval(0.9)
    >>> p.mean.shape, low.shape, p.aleatoric_std[0]
    (torch.Size([4, 1]), torch.Size([4, 1]), tensor([0.5000]))
    """
    if isinstance(precision, str) and precision != "predicted":
        raise ValueError(f'`precision` must be None, a number, a tensor or "predicted"; got {precision!r}.')
    if precision is not None and not isinstance(precision, (str, Tensor)):
        precision = check_number("precision", precision, above=0)
    predicted = isinstance(precision, str)
    passes = PassOptions(n_passes, batch_size, masks, seed, balanced, batch_dim, progress, sites)

    settling = _settling_mixture(tolerance, threshold, passes, precision)

    def reduce(groups: Iterator[Any], where: Where) -> State:
        parts = [as_means(pick(g, output), predicted=predicted) for g in groups]
        joined = tuple(torch.cat(ts) if len(ts) > 1 else ts[0] for ts in zip(*parts, strict=True))
        _check_finite(joined, where)
        return joined

    collected = collect(model, x, passes, reduce, row_axis=1, settling=settling)
    tau: Tensor | None
    if predicted:
        tau = collected[1].exp()
    elif isinstance(precision, Tensor):
        tau = precision.detach().to(collected[0].device)
    else:
        tau = None if precision is None else collected[0].new_tensor(precision)
    used = None if settling is None else collected[-1][0]
    return RegressionPrediction(collected[0], tau, n_passes is not None, used, masks=masks)


# ------------------------------------------------------------------------------ helpers


def _sum_logits(
    groups: Iterator[Tensor], class_axis: int, where: Where, *, with_squares: bool, kept: list[Tensor] | None = None
) -> State:
    """Log of the summed probabilities, summed entropies and votes of (K, n, C, ...) logits that come in groups.

    With the squares, as the last: how far the probabilities of the passes are from their mean, squared and summed.
    Log-probabilities are put into `kept`, part by part (k, n, C, ...).
    Classes are moved in front of the rows: operations over a short last axis are ten times slower.
    """
    log_sum, entropy, votes, squares = torch.tensor(-math.inf), *(torch.zeros(()) for _ in range(3))
    first = axis = 0
    for group in groups:
        axis = class_axis % group.ndim
        for logits in group.split(max(1, _BLOCK // max(1, group[0].numel()))):
            log_p = F.log_softmax(logits.movedim(axis, 1).contiguous(), 1)  # (k, C, n, ...)
            p = log_p.exp()
            if kept is not None:
                kept.append(log_p.movedim(1, axis))
            total = p.sum(0)
            if bool(total.isnan().any()):
                _check_finite((log_p.movedim(1, axis),), replace(where, first=where.first + first), infinite=True)
            if with_squares:
                own = (p - total / len(p)).square_().sum(0)
                squares = own if not first else _joined_squares((squares, log_sum.exp(), first), (own, total, len(p)))
            # where all passes are near 0 the sum has lost its digits; log-sum-exp has not
            log_sum = torch.logaddexp(log_sum, total.log() if bool((total > 1e-30).all()) else log_p.logsumexp(0))
            entropy = entropy - p.mul_(log_p.clamp_min(-1e30)).sum(0).sum(0)  # 0 log 0 = 0
            label = log_p.max(1).indices.movedim(0, -1)  # (n, ..., k)
            counts = torch.zeros((*label.shape[:-1], log_p.shape[1]), dtype=log_p.dtype, device=log_p.device)
            votes = votes + counts.scatter_add_(-1, label, torch.ones_like(label, dtype=log_p.dtype))
            first += len(logits)
    sums = (log_sum.movedim(0, axis - 1), entropy, votes.movedim(-1, axis - 1))
    return (*sums, squares.movedim(0, axis - 1)) if with_squares else sums


def _divided(sums: State, n_passes: int) -> State:
    """Log of the mean probability, mean entropy and share of the votes."""
    log_sum, entropy, votes = sums[:3]
    return log_sum - math.log(n_passes), entropy / n_passes, votes / n_passes


def _joined_squares(a: tuple[Tensor, Tensor, int], b: tuple[Tensor, Tensor, int]) -> Tensor:
    """Squared distances from the mean of all, of two parts: those from their own means, their sums and numbers."""
    apart = a[1] / a[2] - b[1] / b[2]
    return a[0] + b[0] + apart.square() * (a[2] * b[2] / (a[2] + b[2]))


# ------------------------------------------------------------------------------ fewer passes


def _settling_classes(tolerance: float | None, passes: PassOptions, class_axis: int | None) -> Settling | None:
    """When the rows of a classification are settled; None without a tolerance."""
    if tolerance is None:
        return None
    bound = _check_tolerance(tolerance, passes)

    def joined(a: State, b: State, n: int, more: int) -> State:
        squares = _joined_squares((a[3], a[0].exp(), n), (b[3], b[0].exp(), more))
        return torch.logaddexp(a[0], b[0]), a[1] + b[1], a[2] + b[2], squares

    def settled(sums: State, k: int, where: Where) -> Tensor:
        mean, error = _divided(sums, k)[0].exp(), (sums[3] / (k * (k - 1))).sqrt()
        axis = _class_axis_of_rows(class_axis, mean)
        return classes_settled(mean, error, axis, tolerance=bound, balanced=passes.balanced)

    return Settling(passes.count, joined, settled, _divided)


def _settling_mixture(
    tolerance: float | None, threshold: float | None, passes: PassOptions, precision: float | Tensor | str | None
) -> Settling | None:
    """When the rows of a regression are settled; None without a tolerance."""
    limit = None if threshold is None else check_number("threshold", threshold)
    if tolerance is None:
        if limit is not None:
            raise ValueError(f"`threshold` goes with `tolerance`; got {limit} without one. Give `tolerance=0.2`, say.")
        return None
    bound = _check_tolerance(tolerance, passes)

    def joined(a: State, b: State, n: int, more: int) -> State:
        return tuple(torch.cat(pair) for pair in zip(a, b, strict=True))

    def settled(parts: State, k: int, where: Where) -> Tensor:
        outputs = parts[0]
        variance = parts[1].neg().exp() if len(parts) > 1 else _noise_of_rows(precision, outputs, where)
        return mixture_settled(outputs, variance, tolerance=bound, balanced=passes.balanced, threshold=limit)

    def finished(parts: State, k: int) -> State:  # k passes, each K / k times: the same mixture
        return tuple(t.repeat(passes.count // k, *[1] * (t.ndim - 1)) if k < passes.count else t for t in parts)

    return Settling(passes.count, joined, settled, finished)


def _noise_of_rows(precision: float | Tensor | str | None, outputs: Tensor, where: Where) -> Tensor:
    """The variance of the noise of these rows, broadcasting to `outputs` (k, n, ...)."""
    if not isinstance(precision, Tensor):
        return outputs.new_tensor(0.0 if precision is None else 1 / float(precision))
    tau = precision.detach().to(outputs)
    axis = tau.ndim - outputs.ndim + 1
    if axis == 1 and len(tau) > 1:
        raise ValueError(
            f"`precision` must not differ from pass to pass where `tolerance` is given; got {tuple(tau.shape)}. "
            "Leave `tolerance` out."
        )
    if axis >= 0 and tau.shape[axis] > 1:  # one for every row
        rows = where.rows(outputs.shape[1]).to(tau.device)
        if int(rows[-1]) >= tau.shape[axis]:
            raise ValueError(f"`precision` must have one value a row; got {tuple(tau.shape)} for row {int(rows[-1])}.")
        tau = tau.index_select(axis, rows)
    return torch.as_tensor(check_precision(tau, outputs)).reciprocal()


def _check_tolerance(tolerance: float, passes: PassOptions) -> float:
    if passes.n_passes is None:
        raise ValueError(
            f"`tolerance` needs passes to look at; got tolerance={tolerance!r} with n_passes=None. Give a number of "
            "passes, or leave `tolerance` out."
        )
    return check_number("tolerance", tolerance, above=0)


# ------------------------------------------------------------------------------ what a model returns


def _class_axis_of_rows(class_axis: int | None, t: Tensor) -> int:
    """The axis of the classes in (N, ...), where `class_axis` counts the passes too."""
    return 1 if class_axis is None else class_axis % (t.ndim + 1) - 1


def pick(outputs: Any, output: Output) -> Any:
    """What `output` names of the outputs of the passes: by place, by name, or by a function; all of it for None."""
    if output is None:
        return outputs
    if callable(output):
        return output(outputs)
    if isinstance(output, bool) or not isinstance(output, (int, str)):
        raise TypeError(f"`output` must be a number, a name, a function or None; got {output!r}.")
    if isinstance(output, int) and isinstance(outputs, (tuple, list)) and -len(outputs) <= output < len(outputs):
        return outputs[output]
    if isinstance(output, str) and isinstance(outputs, Mapping) and output in outputs:
        return outputs[output]
    if isinstance(output, str) and not isinstance(outputs, (Mapping, Tensor)) and hasattr(outputs, output):
        return getattr(outputs, output)  # a named tuple
    raise ValueError(f"`output` must name a part of what the model returns; got {output!r} for {_described(outputs)}.")


def _described(outputs: Any) -> str:
    """What a model returned, in a few words."""
    if isinstance(outputs, Mapping):
        return f"a mapping with {', '.join(repr(k) for k in outputs)}"
    if isinstance(outputs, (tuple, list)):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return "a tensor" if isinstance(outputs, Tensor) else type(outputs).__name__


def as_logits(outputs: Any, class_axis: int | None) -> Tensor:
    """Logits (G, n, C, ...), rows behind the passes; a single logit as the two classes it stands for."""
    logits = _real("logits (N, C)", logits_of(outputs))
    if logits.ndim == 2:
        logits = logits.unsqueeze(2)
    if class_axis is None:
        if logits.ndim == 4:
            raise ValueError(
                f"`class_axis` must be given for logits {tuple(logits.shape[1:])} of the rows; got None. Use "
                "class_axis=-1 for tokens (N, T, C), class_axis=2 for (N, C, L)."
            )
        class_axis = 2
    class_axis = check_class_axis(class_axis, logits)
    if logits.shape[class_axis] == 1:
        return torch.cat((torch.zeros_like(logits), logits), class_axis)
    return logits


def as_means(outputs: Any, *, predicted: bool) -> tuple[Tensor, ...]:
    """Means (G, n, ...), and log precisions if these are predicted too."""
    if not predicted:
        pair = isinstance(outputs, (tuple, list)) and len(outputs) == 2
        named = isinstance(outputs, Mapping) and {"loc", "scale"} <= set(outputs)
        what = "(mean, log_precision)" if pair else 'the "loc" and "scale" of the noise'
        hint = f' Is this {what}? Use precision="predicted".' if pair or named else ""
        return (_real("means (N, D)", outputs, hint),)
    parts = mean_and_log_precision("`model` must return", outputs)
    mean, log_precision = (_real("means (N, D)", part) for part in parts)
    if mean.shape != log_precision.shape:
        raise ValueError(
            f"`model` must return a precision for every mean, {tuple(mean.shape[1:])}; "
            f"got {tuple(log_precision.shape[1:])}."
        )
    return mean, log_precision


def _real(what: str, outputs: Any, hint: str = "") -> Tensor:
    """A floating-point tensor (G, n, ...), at least float32."""
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        several = isinstance(outputs, (tuple, list, Mapping))
        got = outputs.dtype if isinstance(outputs, Tensor) else _described(outputs)
        hint += " Say with `output` which part to read: output=0, a name, or a function of it." if several else ""
        raise TypeError(f"`model` must return a tensor of {what}; got {got}.{hint}")
    if outputs.ndim < 2:
        raise ValueError(f"`model` must return one output a row; got {tuple(outputs.shape[1:])} from each pass.")
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def _check_finite(outputs: tuple[Tensor, ...], where: Where, *, infinite: bool = False) -> None:
    """Report the pass and row in which the model returned what is no number."""
    for t in outputs:
        bad = t.isnan() if infinite else ~t.isfinite()
        if bool(bad.any()):
            place = bad.nonzero()[0].tolist()
            value, k, n = float(t[tuple(place)]), place[0] + where.first, where.row(place[1])
            raise ValueError(f"`model` must return finite numbers; got {value} in pass {k}, row {n}.")
