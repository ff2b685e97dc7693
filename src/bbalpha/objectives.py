"""The paper in one file: the alpha objective and the likelihoods that feed it.

Li & Gal (2017), Eq. 7. Run a dropout network K times on a data point, collect the K losses
l_k = -log p(y_n | x_n, w_k), and minimise, instead of their mean,

    L_n(alpha) = -1/alpha * log( 1/K * sum_k exp(-alpha * l_k) )

alpha -> 0 is the mean of the losses (variational inference, MC dropout as everybody knows it),
alpha = 0.5 the Hellinger value (our default), alpha = 1 minus the log of the mean likelihood (what the
prediction is scored by). Add the prior (`bbalpha.prior_kl`) and that is the whole method.

Axes: K passes first, then N data points: outputs are (K, N, ...), targets (N, ...).

    loss = cross_entropy(outputs, target, alpha=0.5)   # (K, N, C), (N,) -> ()

Beyond the paper: with `groups`, the losses of the rows of a group are summed inside the log-sum-exp, so that the passes
are weighed by how well they do on the group together. That asks for passes that are functions, ``masks="shared"``.
Groups of one row are the paper; alpha = 0 and K = 1 give the same for every grouping.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bbalpha._join import Join, joined_now
from bbalpha._torch import apply_function
from bbalpha.checks import (
    check_alpha,
    check_call,
    check_class_axis,
    check_count,
    check_floating,
    check_number,
    check_outputs,
    check_passes,
    check_precision,
    check_real,
    check_row_groups,
    check_same_shape,
    check_weight,
    check_whole,
    readable,
)

Reduction = Literal["mean", "sum", "none"]
Positions = Literal["independent", "joint"]


# ------------------------------------------------------------------------------ the objective


def alpha_loss(
    losses: Tensor,
    alpha: float,
    *,
    groups: Tensor | None = None,
    sample_weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The alpha objective of per-pass losses, Eq. 7 without the prior term.

    Args:
        losses: l(y_n, f_k), minus the log-likelihood of data point n in pass k, up to a constant (K, N).
        alpha: Any finite number; 0 is the mean over passes, 1 the log of the mean likelihood.
        groups: The group of each data point, whole numbers (N,): the losses of a group are summed inside the log, which
            means something where the passes share their masks. None takes each point by itself, as the paper does.
        sample_weight: A weight per data point, applied outside the log (N,), and so the same for all points of a group.
            "mean" is then the weighted mean.
        reduction: "mean" or "sum" over data points, or "none" for (N,), with `groups` (G,) in ascending order of these.
            "mean" divides by the number of data points, not of groups.

    Returns:
        () or (N,). The gradient with respect to `losses` is softmax(-alpha * losses) over the passes.

    >>> losses = torch.tensor([[1.0, 0.0], [3.0, 0.0]])                # K = 2 passes, N = 2 points
    >>> alpha_loss(losses, 0.0, reduction="none"), alpha_loss(losses, 1.0, reduction="none")
    (tensor([2., 0.]), tensor([1.5662, 0.0000]))
    """
    alpha = check_alpha(alpha)
    check_floating("losses", losses)
    if losses.ndim != 2:
        raise ValueError(f"`losses` must have shape (K, N): passes first, then data points; got {tuple(losses.shape)}.")
    check_passes("losses", losses)
    return _reduce(losses, alpha, sample_weight, reduction, groups=groups)


# ------------------------------------------------------------------------------ the likelihoods


def cross_entropy(
    outputs: Tensor,
    target: Tensor,
    alpha: float = 0.5,
    *,
    class_axis: int | None = None,
    positions: Positions = "independent",
    ignore_index: int = -100,
    groups: Tensor | None = None,
    sample_weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The alpha objective for classification, from the logits of K passes.

    Args:
        outputs: Logits (K, N, C), pixels (K, N, C, H, W), or tokens (K, N, T, C) with ``class_axis=-1``.
        target: Class indices, of the shape of `outputs` without K and the class axis; or one-hot or soft
            targets of the shape of ``outputs[0]``.
        alpha: Any finite number; 0 is MC dropout as usual.
        class_axis: The axis of `outputs` that holds the C classes; None is 2, as in torch, but must be given where
            (K, N, A, B) could be either.
        positions: With pixels or tokens: "independent" puts every position through its own log-sum-exp,
            "joint" first sums the log-likelihood over a data point's positions.
        ignore_index: Positions with this class index do not count.
        groups: The group of each data point (N,), as in `alpha_loss`; pixels and tokens need ``positions="joint"``.
        sample_weight: A weight per data point (N,), outside the log.
        reduction: "mean" (over data points, or over positions that count), "sum" or "none".

    Returns:
        (), or with "none" (N,) for joint and (N, ...) for independent positions.

    >>> logits = torch.zeros(10, 3, 4)                                 # K = 10, N = 3, C = 4
    >>> cross_entropy(logits, torch.tensor([0, 1, 3]))                 # log 4
    tensor(1.3863)
    """
    alpha = check_alpha(alpha)
    check_outputs(outputs, least=3)
    ignore_index = check_whole("ignore_index", ignore_index)
    check_real("target", target)
    class_axis = _class_axis(outputs, target) if class_axis is None else check_class_axis(class_axis, outputs)
    log_probs = F.log_softmax(_wide(outputs), dim=class_axis).movedim(class_axis, -1)  # (K, N, ..., C)
    index_shape = outputs.shape[1:class_axis] + outputs.shape[class_axis + 1 :]  # (N, ...)
    if target.shape == index_shape:
        losses, counts = _index_losses(log_probs, target, ignore_index)
    elif target.shape == outputs.shape[1:]:
        check_real("target", target)
        soft = target.to(log_probs.dtype).movedim(class_axis - 1, -1)  # (N, ..., C)
        losses, counts = -(soft * log_probs).sum(-1), None  # the paper's code: y_c log p_c inside the log-sum-exp
    else:
        hint = " Are the classes on the last axis? Use class_axis=-1." if target.shape == outputs.shape[1:-1] else ""
        raise ValueError(
            f"`target` must hold class indices {tuple(index_shape)} or class weights "
            f"{tuple(outputs.shape[1:])} for `outputs` {tuple(outputs.shape)}; got {tuple(target.shape)}.{hint}"
        )
    return _over_positions(losses, counts, alpha, positions, sample_weight, reduction, groups)


def binary_cross_entropy(
    outputs: Tensor,
    target: Tensor,
    alpha: float = 0.5,
    *,
    positions: Positions = "independent",
    groups: Tensor | None = None,
    sample_weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The alpha objective for yes/no targets, from the logits of K passes.

    Args:
        outputs: Logits (K, N, ...).
        target: 0 or 1, or a probability between, of the shape of ``outputs[0]`` (N, ...).
        alpha: Any finite number; 0 is MC dropout as usual.
        positions: With more axes than N (several labels, pixels): as in `cross_entropy`.
        groups: The group of each data point (N,), as in `cross_entropy`.
        sample_weight: A weight per data point (N,), outside the log.
        reduction: "mean", "sum" or "none".

    Returns:
        (), or with "none" (N,) for joint and (N, ...) for independent positions.

    >>> binary_cross_entropy(torch.zeros(5, 3), torch.tensor([0.0, 1.0, 1.0]))   # log 2
    tensor(0.6931)
    """
    alpha = check_alpha(alpha)
    check_outputs(outputs, least=2)
    check_same_shape(outputs, target)
    check_real("target", target)
    if target.numel() and readable(target) and not bool(((target >= 0) & (target <= 1)).all()):
        raise ValueError(f"`target` must lie in [0, 1]; got values from {target.min()} to {target.max()}.")
    logits = _wide(outputs)
    losses = F.binary_cross_entropy_with_logits(
        logits, target.to(logits.dtype).expand_as(logits), reduction="none"
    )  # (K, N, ...)
    return _over_positions(losses, None, alpha, positions, sample_weight, reduction, groups)


def gaussian_nll(
    outputs: Tensor,
    target: Tensor,
    alpha: float = 0.5,
    *,
    precision: float | Tensor,
    groups: Tensor | None = None,
    sample_weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The alpha objective for regression with Gaussian noise, normalising constant included.

    l = 1/2 sum_d [ tau (y_d - f_d)^2 - log tau + log 2 pi ]. The paper prints the term in log tau with the
    wrong sign; with it a learned tau would run to 0.

    Args:
        outputs: Predicted means (K, N, D) or (K, N).
        target: Of the shape of ``outputs[0]``; never broadcast.
        alpha: Any finite number; 0 is MC dropout as usual.
        precision: tau, one over the noise variance: a number, or a tensor (learned, or predicted per point)
            that broadcasts to the shape of `outputs`.
        groups: The group of each data point (N,), as in `alpha_loss`.
        sample_weight: A weight per data point (N,), outside the log.
        reduction: "mean", "sum" or "none" over data points; output dimensions are always summed.

    Returns:
        () or (N,).

    >>> gaussian_nll(torch.zeros(10, 3, 1), torch.zeros(3, 1), precision=1.0)    # log(2 pi) / 2
    tensor(0.9189)
    """
    alpha = check_alpha(alpha)
    check_outputs(outputs, least=2)
    check_same_shape(outputs, target)
    check_real("target", target)
    outputs = _wide(outputs)
    tau = check_precision(precision, outputs)
    log_tau = tau.log() if isinstance(tau, Tensor) else math.log(tau)
    losses = gaussian_losses(outputs, target.to(outputs.dtype), tau, log_tau)  # (K, N, D)
    losses = losses.flatten(2).sum(2) if losses.ndim > 2 else losses  # (K, N)
    return _reduce(losses, alpha, sample_weight, reduction, groups=groups)


def gaussian_losses(outputs: Tensor, target: Tensor, tau: float | Tensor, log_tau: float | Tensor) -> Tensor:
    """Minus the log-density of every target by itself under Gaussian noise; shapes broadcast to that of `outputs`."""
    return 0.5 * (tau * (target - outputs).square() - log_tau + math.log(2 * math.pi))


def class_losses(log_probs: Tensor, index: Tensor) -> Tensor:
    """Minus the log-probability of the classes `index`, which broadcasts to (...): (..., C) -> (...)."""
    return -log_probs.gather(-1, index.unsqueeze(-1).expand(*log_probs.shape[:-1], 1)).squeeze(-1)


# ------------------------------------------------------------------------------ the same as modules


class AlphaLoss(nn.Module):
    """The alpha objective around any torch loss made with ``reduction="none"``.

    The loss sees the K passes as one batch of K * N rows, and what it returns is summed to one number a row. A loss
    that mixes rows, as one does by broadcasting (R, 1) against (R,), is refused. It should be minus a log-likelihood:
    the objective is not scale-invariant (nn.MSELoss stands for a noise precision of 2).

    With a `group_size`, so many rows of the batch, as they come, are a group (`alpha_loss`); the last may be smaller.

    >>> objective = AlphaLoss(nn.SmoothL1Loss(reduction="none"), alpha=0.5)
    >>> objective(torch.zeros(10, 3, 2), torch.ones(3, 2))             # two outputs, 0.5 each
    tensor(1.)
    """

    group_size = 1

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], alpha: float = 0.5, *, group_size: int = 1) -> None:
        super().__init__()
        check_call("loss", loss)
        if getattr(loss, "reduction", "none") != "none":
            raise ValueError(
                f'`loss` must keep one value per data point; got reduction="{loss.reduction}". '  # type: ignore[attr-defined]
                'Build it with reduction="none".'
            )
        self.loss = loss
        self.alpha = check_alpha(alpha)
        if check_count("group_size", group_size) > 1:  # else told by `fit` as it was before there were groups
            self.group_size = group_size
        self._tried: set[tuple[torch.Size, torch.Size]] = set()  # shapes of a row for which rows do not mix

    def forward(self, outputs: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Mean alpha loss of `outputs` (K, N, ...) against `target` (N, ...)."""
        check_outputs(outputs, least=2)
        K, N = outputs.shape[:2]
        if target.shape[:1] != (N,):
            raise ValueError(
                f"`target` must have the {N} rows of `outputs` {tuple(outputs.shape)}; got {tuple(target.shape)}."
            )
        rows = outputs.flatten(0, 1), target.expand(K, *target.shape).flatten(0, 1)  # (K * N, ...)
        losses = self.loss(*rows)
        if losses.shape[:1] != (K * N,):
            raise ValueError(
                f"`loss` must return one value per row, ({K * N}, ...); got {tuple(losses.shape)}. "
                'Build it with reduction="none".'
            )
        self._check_rows(*rows, losses)
        groups = _in_a_row(target, self.group_size)
        return alpha_loss(losses.reshape(K, N, -1).sum(2), self.alpha, groups=groups, sample_weight=sample_weight)

    @torch.no_grad()
    def _check_rows(self, outputs: Tensor, target: Tensor, losses: Tensor) -> None:
        """Refuse a loss that gives a row another value beside other rows; looked at once for each shape of a row."""
        shapes = outputs.shape[1:], target.shape[1:]
        if shapes in self._tried or len(losses) < 2 or not losses.numel() or not readable(losses):
            return

        def twice(i: int, j: int) -> Tensor:
            return self.loss(outputs[[i, i]], target[[j, j]])  # two rows: some losses squeeze one away

        own = twice(0, 0)
        if not _close(own, losses[[0, 0]]):
            raise ValueError(
                f"`loss` must give each row a value of its own; got {tuple(losses.shape)} that mixes rows, as by "
                f"broadcasting, from outputs {tuple(outputs.shape)} and target {tuple(target.shape)}. "
                "Give `target` the axes of one pass, or reshape it in `loss`."
            )
        # where a mixture of rows would not have shown (equal targets, equal outputs), look again next time
        if not _close(twice(_unlike_first(outputs), 0), own) and not _close(twice(0, _unlike_first(target)), own):
            self._tried.add(shapes)

    def extra_repr(self) -> str:
        """The alpha shown by print."""
        return f"alpha={self.alpha}{_told(self.group_size)}"


class CrossEntropy(nn.Module):
    """`cross_entropy` as a callable (outputs, target) -> (), with its options held.

    Outputs are logits, or a mapping with "logits" as the models of transformers return. With a `group_size`, so many
    rows of the batch, as they come, are a group (`alpha_loss`); the last may be smaller.

    >>> CrossEntropy(alpha=1.0)(torch.zeros(10, 3, 4), torch.tensor([0, 1, 3]))
    tensor(1.3863)
    """

    group_size = 1

    def __init__(
        self,
        alpha: float = 0.5,
        *,
        class_axis: int | None = None,
        positions: Positions = "independent",
        ignore_index: int = -100,
        group_size: int = 1,
    ) -> None:
        super().__init__()
        self.alpha = check_alpha(alpha)
        if check_count("group_size", group_size) > 1:  # else told by `fit` as it was before there were groups
            self.group_size = group_size
        if class_axis is not None:
            check_whole("class_axis", class_axis)
        _check_positions(positions)
        self.class_axis = class_axis
        self.positions: Positions = positions
        self.ignore_index = check_whole("ignore_index", ignore_index)

    def forward(
        self, outputs: Tensor | Mapping[str, Tensor], target: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        """Mean alpha loss of the logits `outputs` (K, N, C)."""
        return cross_entropy(
            logits_of(outputs), target, self.alpha, class_axis=self.class_axis, positions=self.positions,
            ignore_index=self.ignore_index, groups=_in_a_row(target, self.group_size), sample_weight=sample_weight,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The alpha shown by print."""
        return f"alpha={self.alpha}{_told(self.group_size)}"


class GaussianNLL(nn.Module):
    """`gaussian_nll` as a callable (outputs, target) -> () that knows where its precision comes from.

    Args:
        alpha: As in `gaussian_nll`.
        precision: "learned" holds log tau as a parameter (give `objective.parameters()` to the optimiser too, at a
            larger rate: log tau begins at 0), a number fixes it, "predicted" expects outputs = (mean, log_precision),
            each (K, N, D), or a mapping with "loc" and "scale", the standard deviation of the noise.
        group_size: So many rows of the batch, as they come, are a group (`alpha_loss`); the last may be smaller.

    >>> objective = GaussianNLL(alpha=0.5)                             # learned
    >>> [name for name, _ in objective.named_parameters()], objective.precision.item()
    (['log_precision'], 1.0)
    """

    log_precision: Tensor | None
    group_size = 1

    def __init__(
        self,
        alpha: float = 0.5,
        precision: float | Literal["learned", "predicted"] = "learned",
        *,
        group_size: int = 1,
    ) -> None:
        super().__init__()
        self.alpha = check_alpha(alpha)
        if check_count("group_size", group_size) > 1:  # else told by `fit` as it was before there were groups
            self.group_size = group_size
        self.source: Literal["learned", "fixed", "predicted"]
        if precision == "learned":
            self.source, self.log_precision = "learned", nn.Parameter(torch.zeros(()))
        elif precision == "predicted":
            self.source, self.log_precision = "predicted", None
        elif isinstance(precision, str):
            raise ValueError(f'`precision` must be "learned", "predicted" or a positive number; got {precision!r}.')
        else:
            self.source = "fixed"
            tau = check_number("precision", precision, above=0)
            self.register_buffer("log_precision", torch.tensor(math.log(tau)))

    @property
    def precision(self) -> Tensor:
        """Tau as it stands (); "predicted" has none."""
        if self.log_precision is None:
            raise ValueError("`precision` is predicted by the model: it is part of the outputs, not of the loss.")
        return self.log_precision.exp()

    def forward(
        self,
        outputs: Tensor | tuple[Tensor, Tensor] | Mapping[str, Tensor],
        target: Tensor,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Mean alpha loss of the means `outputs` (K, N, D), or of means and precisions when these are predicted."""
        if self.source == "predicted":
            mean, log_precision = mean_and_log_precision("`outputs` must be", outputs)
            precision = _wide(log_precision).exp()
        elif isinstance(outputs, Tensor):
            mean, precision = outputs, self.precision
        else:
            raise TypeError(f"`outputs` must be a tensor (K, N, D); got {type(outputs).__name__}.")
        groups = _in_a_row(target, self.group_size)
        return gaussian_nll(mean, target, self.alpha, precision=precision, groups=groups, sample_weight=sample_weight)

    def extra_repr(self) -> str:
        """The alpha and the source of the precision shown by print."""
        return f"alpha={self.alpha}, precision={self.source}{_told(self.group_size)}"


# ------------------------------------------------------------------------------ the log-sum-exp


def _log_mean_exp(losses: Tensor, alpha: float) -> Tensor:
    """-1/alpha log mean_k exp(-alpha l_k) over the first axis, for every alpha: (K, ...) -> (...).

    Finite wherever the truth is, and off by a few eps of |L| + sum_k w_k |l_k|, with w the weights of the passes:
    no more than the rounding of the losses costs. One pass, or equal passes, give the loss itself (a mean of equal
    numbers at alpha = 0).
    """
    losses = _wide(losses)
    limit = torch.finfo(losses.dtype)
    if losses.shape[0] == 1:
        return losses[0]
    if alpha == 0:
        return (losses / losses.shape[0]).sum(0)  # the sum may overflow where the mean does not
    if abs(alpha) > limit.eps:
        return apply_function(_AlphaLoss, losses, max(-limit.max, min(limit.max, alpha)))
    # nearly the mean, to which losses of any size count: in units in which the sum of K cannot overflow
    unit = 0.5 ** losses.shape[0].bit_length()
    return apply_function(_AlphaLoss, losses * unit, alpha / unit) / unit


_LEAST = torch.tensor(-0.5, device="cpu")


class _AlphaLoss(torch.autograd.Function):
    """The value found roughly and then around itself, its gradient as the softmax it is (autograd's is not)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(losses: Tensor, alpha: float) -> Tensor:
        low, high = losses.amin(0), losses.amax(0)
        spread, size, limit = high - low, abs(alpha), torch.finfo(losses.dtype)
        # around the pass that dominates nothing overflows, but digits cancel where the passes hardly differ
        peak = (low if alpha > 0 else high).clamp(limit.min, limit.max)
        rough = peak - (peak - losses).mul_(alpha).exp_().mean(0).log_().div_(alpha)
        centre = torch.where(spread >= 1 / size, rough, losses.mean(0)).clamp(low, high)
        # around the value itself nothing cancels; below -1/2 (or nan) only the rounding of `centre` times alpha is seen
        excess = (centre - losses).mul_(alpha).expm1_().mean(0)
        value = centre - torch.fmax(excess, _LEAST).log1p_().div_(alpha)
        if size > 1e-3:
            return value
        return torch.where(spread > limit.eps / size, value, centre)  # else alpha * spread is lost, and may underflow

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        losses, ctx.alpha = inputs
        ctx.save_for_backward(losses, output)
        ctx.save_for_forward(losses, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * _pass_weights(ctx.alpha, *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return (tangent * _pass_weights(ctx.alpha, *ctx.saved_tensors)).sum(0)


def _pass_weights(alpha: float, losses: Tensor, value: Tensor) -> Tensor:
    """softmax(-alpha l) over the passes, of the differences to the value: alpha times a loss may overflow."""
    return torch.softmax((value - losses).mul_(alpha), 0)


# ------------------------------------------------------------------------------ helpers


def mean_and_log_precision(rule: str, outputs: Any) -> tuple[Tensor, Tensor]:
    """(mean, log_precision) as they are, or of a mapping with the names of torch.distributions, "loc" and "scale"."""
    if isinstance(outputs, Mapping) and {"loc", "scale"} <= set(outputs):
        mean, scale = outputs["loc"], outputs["scale"]
        check_floating("scale", scale)
        if readable(scale) and not bool(((scale > 0) & scale.isfinite()).all()):
            wrong = float(scale[~((scale > 0) & scale.isfinite())][0])
            raise ValueError(f"`scale` must be positive and finite; got {wrong}. Use softplus or exp.")
        return mean, -2 * _wide(scale).log()
    if not isinstance(outputs, (tuple, list)) or len(outputs) != 2:
        raise TypeError(
            f'{rule} (mean, log_precision), or a mapping with "loc" and "scale", when precision="predicted"; '
            f"got {type(outputs).__name__}."
        )
    return outputs[0], outputs[1]


def logits_of(outputs: Any) -> Any:
    """The logits of a mapping that has them (a ModelOutput); anything else as it is."""
    return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs


def _class_axis(outputs: Tensor, target: Tensor) -> int:
    """2, as in torch, unless the outputs are (K, N, A, B) and the target leaves open which of these it is."""
    if outputs.ndim == 4 and target.shape in (outputs.shape[1:], outputs.shape[1:3]):
        raise ValueError(
            f"`class_axis` must be given for `outputs` {tuple(outputs.shape)} and `target` {tuple(target.shape)}; "
            "got None. Use class_axis=-1 for tokens (K, N, T, C), class_axis=2 for (K, N, C, L)."
        )
    return 2


def _index_losses(log_probs: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Minus the log-probability of the target class, and which positions count: (K, N, ..., C) -> (K, N, ...)."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"`target` of shape {tuple(target.shape)} must hold integer class indices; got {target.dtype}.")
    C = log_probs.shape[-1]
    target = target.long()
    ignored = target == ignore_index
    if readable(target) and bool((((target < 0) | (target >= C)) & ~ignored).any()):
        wrong = target[((target < 0) | (target >= C)) & ~ignored][0].item()
        raise ValueError(f"`target` must hold class indices from 0 to {C - 1}; got {wrong}.")
    losses = class_losses(log_probs, target.masked_fill(ignored, 0))
    if readable(target) and not bool(ignored.any()):
        return losses, None
    return losses.masked_fill(ignored, 0.0), ~ignored


def _check_positions(positions: Any) -> None:
    if positions not in ("independent", "joint"):
        raise ValueError(f'`positions` must be "independent" or "joint"; got {positions!r}.')


def _over_positions(
    losses: Tensor,
    counts: Tensor | None,
    alpha: float,
    positions: Positions,
    sample_weight: Tensor | None,
    reduction: Reduction,
    groups: Tensor | None,
) -> Tensor:
    """The alpha objective of (K, N, ...) losses whose trailing axes are positions of a data point."""
    _check_positions(positions)
    if positions == "joint" and losses.ndim > 2:
        losses = losses.flatten(2).sum(2)  # (K, N): one likelihood a data point
        counts = None if counts is None else counts.flatten(1).any(1)
    if groups is not None and losses.ndim > 2:
        raise ValueError(
            f"`groups` needs one likelihood a data point; got {tuple(losses.shape[2:])} positions of each. "
            'Use positions="joint".'
        )
    return _reduce(losses, alpha, sample_weight, reduction, counts, groups)


def _reduce(
    losses: Tensor,
    alpha: float,
    sample_weight: Tensor | None,
    reduction: Reduction,
    counts: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """The alpha objective of (K, N, ...) losses, summed, averaged or neither; `counts` says which of them are real."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'`reduction` must be "mean", "sum" or "none"; got {reduction!r}.')
    losses = _wide(losses)
    total: Tensor | int = math.prod(losses.shape[1:]) if counts is None else counts.sum()
    weight = None
    if sample_weight is not None:
        weight = check_weight(sample_weight, losses[0]).expand_as(losses[0])
        total = (weight if counts is None else weight * counts).sum()
    if groups is not None:
        losses, weight = _grouped(losses, groups, weight)
    values, join = _log_mean_exp(losses, alpha), joined_now()
    if join is not None:
        values = join.passes(values, lambda several: _log_mean_exp(several, alpha))
        total = join.total(total) if reduction == "mean" else total
    if reduction != "mean":
        values = values if weight is None else values * weight
        return values if reduction == "none" else _sum(values, join)
    if (not isinstance(total, Tensor) or readable(total)) and not total > 0:
        raise ValueError(
            'reduction="mean" needs at least one data point that counts, with a positive weight; got none. '
            'Skip the empty batch, or use "sum".'
        )
    return _sum(values / total if weight is None else values * (weight / total), join)  # the sum itself may overflow


def _sum(values: Tensor, join: Join | None) -> Tensor:
    return values.sum() if join is None else join.sum(values.sum())


def _grouped(losses: Tensor, groups: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The losses of each group (K, G), and the weight that its data points have in common (G,)."""
    place, count = check_row_groups(groups, losses.shape[1])
    place = place.to(losses.device)
    joint = losses.new_zeros((losses.shape[0], count)).index_add(1, place, losses)
    if weight is None:
        return joint, None
    shared = weight.new_zeros(count).scatter(0, place, weight)  # that of any of them
    if readable(weight) and not bool((shared[place] == weight).all()):
        raise ValueError(
            "`sample_weight` must be the same for all data points of a group, as it stands outside the log; got some "
            "that differ. Put points of other weights into other groups."
        )
    return joint, shared


def _in_a_row(target: Tensor, size: int) -> Tensor | None:
    """Groups of `size` consecutive rows (N,); None for groups of one."""
    return None if size == 1 else torch.arange(len(target), device=target.device) // size


def _told(group_size: int) -> str:
    return f", group_size={group_size}" if group_size > 1 else ""


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two results are of one shape and differ by no more than another order of operations explains."""
    near = math.sqrt(torch.finfo(b.dtype).eps)
    slack = near * float(b.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return a.shape == b.shape and torch.allclose(a, b, near, slack, equal_nan=True)


def _unlike_first(rows: Tensor) -> int:
    """The row that differs most from the first one."""
    return int((rows - rows[0]).abs().reshape(len(rows), -1).float().sum(1).argmax())


def _wide(t: Tensor) -> Tensor:
    """Half precision is reduced in float32."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
