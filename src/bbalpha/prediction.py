"""Predict with K passes of any model, over any number of rows: `predict_classification`, `predict_regression`.

p = predict_regression(net, x, precision=4.0)
p.mean, p.epistemic_std, p.interval(0.9)            # what comes back is in predictive.py
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bbalpha._engine.batches import PassOptions, collect
from bbalpha._engine.inputs import BatchDim
from bbalpha._engine.planning import Masks
from bbalpha._engine.selection import Sites
from bbalpha.checks import check_class_axis, check_number
from bbalpha.objectives import logits_of, mean_and_log_precision
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction

_BLOCK = 2**22  # numbers worked on at a time

Output = int | str | Callable[[Any], Any] | None


def predict_classification(
    model: nn.Module,
    x: Any,
    *,
    n_passes: int | None = 100,
    batch_size: int | None = None,
    masks: Masks = "per_example",
    balanced: bool = True,
    sites: Sites | None = None,
    seed: int | None = None,
    temperature: float = 1.0,
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
        batch_size: Rows at a time; None chooses by memory.
        masks: "per_example", or "shared" by all rows: then one `seed` gives the same for every `batch_size`.
        balanced: As in `bbalpha.sample`: masks drawn together, for less noise at equal K; False draws each by itself.
        sites: The random sites that draw, the others off; as in `bbalpha.sample`.
        seed: None draws from torch's global generator; an int leaves it untouched.
        temperature: Divides the logits of every pass; see `bbalpha.calibration.fit_temperature`.
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

    def reduce(groups: Iterator[Any], start: int) -> tuple[Tensor, ...]:
        logits = (as_logits(pick(g, output), class_axis) / temperature for g in groups)
        return _reduce_logits(logits, passes.count, 2 if class_axis is None else class_axis, start)

    log_probs, expected_entropy, votes = collect(model, x, passes, reduce, row_axis=0)
    axis = 1 if class_axis is None else class_axis % (log_probs.ndim + 1) - 1
    return ClassificationPrediction(log_probs, expected_entropy, votes, passes.count, axis, drawn=n_passes is not None)


def predict_regression(
    model: nn.Module,
    x: Any,
    *,
    n_passes: int | None = 100,
    precision: float | Tensor | Literal["predicted"] | None = None,
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
    predicted = isinstance(precision, str)
    passes = PassOptions(n_passes, batch_size, masks, seed, balanced, batch_dim, progress, sites)

    def reduce(groups: Iterator[Any], start: int) -> tuple[Tensor, ...]:
        parts = [_means(pick(g, output), predicted=predicted) for g in groups]
        joined = tuple(torch.cat(ts) if len(ts) > 1 else ts[0] for ts in zip(*parts, strict=True))
        _check_finite(joined, row=start)
        return joined

    collected = collect(model, x, passes, reduce, row_axis=1)
    tau: Tensor | None
    if predicted:
        tau = collected[1].exp()
    elif isinstance(precision, Tensor):
        tau = precision.detach().to(collected[0].device)
    else:
        tau = None if precision is None else collected[0].new_tensor(precision)
    return RegressionPrediction(collected[0], tau, drawn=n_passes is not None)


# ------------------------------------------------------------------------------ helpers


def _reduce_logits(
    groups: Iterator[Tensor], n_passes: int, class_axis: int, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log of the mean probability, mean entropy and votes of (K, n, C, ...) logits that come in groups.

    Classes are moved in front of the rows: operations over a short last axis are ten times slower.
    """
    log_sum, entropy, votes = torch.tensor(-math.inf), torch.zeros(()), torch.zeros(())
    first = axis = 0
    for group in groups:
        axis = class_axis % group.ndim
        for logits in group.split(max(1, _BLOCK // max(1, group[0].numel()))):
            log_p = F.log_softmax(logits.movedim(axis, 1).contiguous(), 1)  # (k, C, n, ...)
            p = log_p.exp()
            total = p.sum(0)
            if bool(total.isnan().any()):
                _check_finite((log_p.movedim(1, axis),), first, start, infinite=True)
            # where all passes are near 0 the sum has lost its digits; log-sum-exp has not
            log_sum = torch.logaddexp(log_sum, total.log() if bool((total > 1e-30).all()) else log_p.logsumexp(0))
            entropy = entropy - p.mul_(log_p.clamp_min(-1e30)).sum(0).sum(0)  # 0 log 0 = 0
            label = log_p.max(1).indices.movedim(0, -1)  # (n, ..., k)
            counts = torch.zeros((*label.shape[:-1], log_p.shape[1]), dtype=log_p.dtype, device=log_p.device)
            votes = votes + counts.scatter_add_(-1, label, torch.ones_like(label, dtype=log_p.dtype))
            first += len(logits)
    log_probs = (log_sum - math.log(n_passes)).movedim(0, axis - 1)
    return log_probs, entropy / n_passes, (votes / n_passes).movedim(-1, axis - 1)


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


def _means(outputs: Any, *, predicted: bool) -> tuple[Tensor, ...]:
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


def _check_finite(outputs: tuple[Tensor, ...], first: int = 0, row: int = 0, *, infinite: bool = False) -> None:
    """Report the pass and row in which the model returned what is no number."""
    for t in outputs:
        bad = t.isnan() if infinite else ~t.isfinite()
        if bool(bad.any()):
            place = bad.nonzero()[0].tolist()
            value, k, n = float(t[tuple(place)]), place[0] + first, place[1] + row
            raise ValueError(f"`model` must return finite numbers; got {value} in pass {k}, row {n}.")
