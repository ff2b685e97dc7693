"""The paper in one file: the alpha objective and the likelihoods that feed it.

Li & Gal (2017), Eq. 7. Run a dropout network K times on a data point, collect the K losses
l_k = -log p(y_n | x_n, w_k), and minimise, instead of their mean,

    L_n(alpha) = -1/alpha * log( 1/K * sum_k exp(-alpha * l_k) )

alpha -> 0 is the mean of the losses (variational inference, MC dropout as everybody knows it),
alpha = 0.5 the Hellinger value (our default), alpha = 1 minus the log of the mean likelihood (what the
prediction is scored by). Add the prior (`bbalpha.prior_kl`) and that is the whole method.

Axes: K passes first, then N data points: outputs are (K, N, ...), targets (N, ...).

    loss = cross_entropy(outputs, target, alpha=0.5)   # (K, N, C), (N,) -> ()
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bbalpha.checks import (
    check_alpha,
    check_floating,
    check_outputs,
    check_passes,
    check_precision,
    check_real,
    check_same_shape,
    check_weight,
    readable,
)

Reduction = Literal["mean", "sum", "none"]
Positions = Literal["independent", "joint"]


# ------------------------------------------------------------------------------ the objective


def alpha_loss(
    losses: Tensor, alpha: float, *, sample_weight: Tensor | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """The alpha objective of per-pass losses, Eq. 7 without the prior term.

    Args:
        losses: l(y_n, f_k), minus the log-likelihood of data point n in pass k, up to a constant (K, N).
        alpha: Any finite number; 0 is the mean over passes, 1 the log of the mean likelihood.
        sample_weight: A weight per data point, applied outside the log (N,). "mean" is then the weighted mean.
        reduction: "mean" or "sum" over data points, or "none" for (N,).

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
    return _reduce(_log_mean_exp(losses, alpha), sample_weight, reduction)


# ------------------------------------------------------------------------------ the likelihoods


def cross_entropy(
    outputs: Tensor,
    target: Tensor,
    alpha: float = 0.5,
    *,
    class_axis: int = 2,
    positions: Positions = "independent",
    ignore_index: int = -100,
    sample_weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The alpha objective for classification, from the logits of K passes.

    Args:
        outputs: Logits (K, N, C), pixels (K, N, C, H, W), or tokens (K, N, T, C) with ``class_axis=-1``.
        target: Class indices, of the shape of `outputs` without K and the class axis; or one-hot or soft
            targets of the shape of ``outputs[0]``.
        alpha: Any finite number; 0 is MC dropout as usual.
        class_axis: The axis of `outputs` that holds the C classes.
        positions: With pixels or tokens: "independent" puts every position through its own log-sum-exp,
            "joint" first sums the log-likelihood over a data point's positions.
        ignore_index: Positions with this class index do not count.
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
    if not -outputs.ndim <= class_axis < outputs.ndim or class_axis % outputs.ndim < 2:
        raise ValueError(
            f"`class_axis` must name an axis of `outputs` after K and N; got {class_axis} "
            f"for shape {tuple(outputs.shape)}."
        )
    log_probs = F.log_softmax(_wide(outputs), dim=class_axis).movedim(class_axis, -1)  # (K, N, ..., C)
    class_axis %= outputs.ndim
    index_shape = outputs.shape[1:class_axis] + outputs.shape[class_axis + 1 :]  # (N, ...)
    if target.shape == index_shape:
        losses, counts = _index_losses(log_probs, target, ignore_index)
    elif target.shape == outputs.shape[1:]:
        check_real("target", target)
        soft = target.to(log_probs.dtype).movedim(class_axis - 1, -1)  # (N, ..., C)
        losses, counts = (
            -(soft * log_probs).sum(-1),
            None,
        )  # the paper's code: y_c log p_c inside the log-sum-exp
    else:
        raise ValueError(
            f"`target` must hold class indices {tuple(index_shape)} or class weights "
            f"{tuple(outputs.shape[1:])} for `outputs` {tuple(outputs.shape)}; got {tuple(target.shape)}."
        )
    return _over_positions(losses, counts, alpha, positions, sample_weight, reduction)


def binary_cross_entropy(
    outputs: Tensor,
    target: Tensor,
    alpha: float = 0.5,
    *,
    positions: Positions = "independent",
    sample_weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The alpha objective for yes/no targets, from the logits of K passes.

    Args:
        outputs: Logits (K, N, ...).
        target: 0 or 1, or a probability between, of the shape of ``outputs[0]`` (N, ...).
        alpha: Any finite number; 0 is MC dropout as usual.
        positions: With more axes than N (several labels, pixels): as in `cross_entropy`.
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
    return _over_positions(losses, None, alpha, positions, sample_weight, reduction)


def gaussian_nll(
    outputs: Tensor,
    target: Tensor,
    alpha: float = 0.5,
    *,
    precision: float | Tensor,
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
    residual = target.to(outputs.dtype) - outputs  # (K, N, D)
    log_tau = tau.log() if isinstance(tau, Tensor) else math.log(tau)
    losses = 0.5 * (tau * residual.square() - log_tau + math.log(2 * math.pi))  # (K, N, D)
    return _reduce(
        _log_mean_exp(losses.flatten(2).sum(2) if losses.ndim > 2 else losses, alpha),
        sample_weight,
        reduction,
    )


# ------------------------------------------------------------------------------ the same as modules


class AlphaLoss(nn.Module):
    """The alpha objective around any torch loss made with ``reduction="none"``.

    The loss sees the K passes as one batch of K * N rows, and what it returns is summed to one number a row.
    It should be minus a log-likelihood: the objective is not scale-invariant (nn.MSELoss stands for a noise
    precision of 2).

    >>> objective = AlphaLoss(nn.SmoothL1Loss(reduction="none"), alpha=0.5)
    >>> objective(torch.zeros(10, 3, 2), torch.ones(3, 2))             # two outputs, 0.5 each
    tensor(1.)
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], alpha: float = 0.5) -> None:
        super().__init__()
        if getattr(loss, "reduction", "none") != "none":
            raise ValueError(
                f'`loss` must keep one value per data point; got reduction="{loss.reduction}". '  # type: ignore[attr-defined]
                'Build it with reduction="none".'
            )
        self.loss = loss
        self.alpha = check_alpha(alpha)

    def forward(self, outputs: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Mean alpha loss of `outputs` (K, N, ...) against `target` (N, ...)."""
        check_outputs(outputs, least=2)
        K, N = outputs.shape[:2]
        if target.shape[:1] != (N,):
            raise ValueError(
                f"`target` must have the {N} rows of `outputs` {tuple(outputs.shape)}; got {tuple(target.shape)}."
            )
        rows = target.expand(K, *target.shape).flatten(0, 1)  # (K * N, ...)
        losses = self.loss(outputs.flatten(0, 1), rows)
        if losses.shape[:1] != (K * N,):
            raise ValueError(
                f"`loss` must return one value per row, ({K * N}, ...); got {tuple(losses.shape)}. "
                'Build it with reduction="none".'
            )
        return alpha_loss(losses.reshape(K, N, -1).sum(2), self.alpha, sample_weight=sample_weight)

    def extra_repr(self) -> str:
        """The alpha shown by print."""
        return f"alpha={self.alpha}"


class CrossEntropy(nn.Module):
    """`cross_entropy` as a callable (outputs, target) -> (), with its options held.

    >>> CrossEntropy(alpha=1.0)(torch.zeros(10, 3, 4), torch.tensor([0, 1, 3]))
    tensor(1.3863)
    """

    def __init__(
        self,
        alpha: float = 0.5,
        *,
        class_axis: int = 2,
        positions: Positions = "independent",
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        self.alpha = check_alpha(alpha)
        self.class_axis = class_axis
        self.positions: Positions = positions
        self.ignore_index = ignore_index

    def forward(self, outputs: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Mean alpha loss of the logits `outputs` (K, N, C)."""
        return cross_entropy(
            outputs,
            target,
            self.alpha,
            class_axis=self.class_axis,
            positions=self.positions,
            ignore_index=self.ignore_index,
            sample_weight=sample_weight,
        )

    def extra_repr(self) -> str:
        """The alpha shown by print."""
        return f"alpha={self.alpha}"


class GaussianNLL(nn.Module):
    """`gaussian_nll` as a callable (outputs, target) -> () that knows where its precision comes from.

    Args:
        alpha: As in `gaussian_nll`.
        precision: "learned" holds log tau as a parameter (give `objective.parameters()` to the optimiser
            too), a number fixes it, "predicted" expects outputs = (mean, log_precision), each (K, N, D).

    >>> objective = GaussianNLL(alpha=0.5)                             # learned
    >>> [name for name, _ in objective.named_parameters()], objective.precision.item()
    (['log_precision'], 1.0)
    """

    log_precision: Tensor | None

    def __init__(self, alpha: float = 0.5, precision: float | Literal["learned", "predicted"] = "learned") -> None:
        super().__init__()
        self.alpha = check_alpha(alpha)
        self.source: Literal["learned", "fixed", "predicted"]
        if precision == "learned":
            self.source, self.log_precision = "learned", nn.Parameter(torch.zeros(()))
        elif precision == "predicted":
            self.source, self.log_precision = "predicted", None
        elif isinstance(precision, (int, float)) and math.isfinite(precision) and precision > 0:
            self.source = "fixed"
            self.register_buffer("log_precision", torch.tensor(math.log(precision)))
        else:
            raise ValueError(f'`precision` must be "learned", "predicted" or a positive number; got {precision!r}.')

    @property
    def precision(self) -> Tensor:
        """Tau as it stands (); "predicted" has none."""
        if self.log_precision is None:
            raise ValueError("`precision` is predicted by the model: it is part of the outputs, not of the loss.")
        return self.log_precision.exp()

    def forward(
        self,
        outputs: Tensor | tuple[Tensor, Tensor],
        target: Tensor,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Mean alpha loss of the means `outputs` (K, N, D), or of (mean, log_precision) when predicted."""
        if self.source == "predicted":
            if not isinstance(outputs, (tuple, list)) or len(outputs) != 2:
                raise TypeError(
                    f'`outputs` must be (mean, log_precision) when precision="predicted"; got {type(outputs).__name__}.'
                )
            mean, precision = outputs[0], _wide(outputs[1]).exp()
        elif isinstance(outputs, Tensor):
            mean, precision = outputs, self.precision
        else:
            raise TypeError(f"`outputs` must be a tensor (K, N, D); got {type(outputs).__name__}.")
        return gaussian_nll(mean, target, self.alpha, precision=precision, sample_weight=sample_weight)

    def extra_repr(self) -> str:
        """The alpha and the source of the precision shown by print."""
        return f"alpha={self.alpha}, precision={self.source}"


# ------------------------------------------------------------------------------ the log-sum-exp


def _log_mean_exp(losses: Tensor, alpha: float) -> Tensor:
    """-1/alpha log mean_k exp(-alpha l_k) over the first axis, exact for every alpha: (K, ...) -> (...)."""
    losses = _wide(losses)
    # |alpha| below 1e-30 moves nothing that a float can hold, but 1/alpha would overflow.
    if abs(alpha) < 1e-30 or losses.shape[0] == 1:
        return losses.mean(0)
    return apply_function(_AlphaLoss, losses, max(-1e30, min(1e30, alpha)))


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """function.apply(*args); outside of torch.func transforms without the binding of default arguments.

    That binding costs 0.1 ms a call, more than a small network takes.
    """
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        out: Tensor = function.apply(*args)
    else:
        out = super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    return out


class _AlphaLoss(torch.autograd.Function):
    """Value in the stable one of two forms, gradient as the softmax it is (autograd through either is not)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(losses: Tensor, alpha: float) -> Tensor:
        low, high = losses.amin(0), losses.amax(0)
        # log-sum-exp around the pass that dominates: for large alpha * spread
        peak = low if alpha > 0 else high
        peak = torch.where(peak.isinf(), 0.0, peak)
        far = peak - ((peak - losses) * alpha).exp().mean(0).log() / alpha
        # around the mean: for alpha * spread near 0, where log-sum-exp cancels
        mean = losses.mean(0)
        near = mean - ((mean - losses) * alpha).expm1().mean(0).log1p() / alpha
        return torch.where((high - low) * abs(alpha) < 1.0, near, far)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        losses, ctx.alpha = inputs
        ctx.save_for_backward(losses)
        ctx.save_for_forward(losses)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (losses,) = ctx.saved_tensors
        return grad * torch.softmax(losses * -ctx.alpha, 0), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (losses,) = ctx.saved_tensors
        return (tangent * torch.softmax(losses * -ctx.alpha, 0)).sum(0)


# ------------------------------------------------------------------------------ helpers


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
    index = target.masked_fill(ignored, 0).unsqueeze(-1)  # (N, ..., 1)
    losses = -log_probs.gather(-1, index.expand(*log_probs.shape[:-1], 1)).squeeze(-1)
    if readable(target) and not bool(ignored.any()):
        return losses, None
    return losses.masked_fill(ignored, 0.0), ~ignored


def _over_positions(
    losses: Tensor,
    counts: Tensor | None,
    alpha: float,
    positions: Positions,
    sample_weight: Tensor | None,
    reduction: Reduction,
) -> Tensor:
    """The alpha objective of (K, N, ...) losses whose trailing axes are positions of a data point."""
    if positions not in ("independent", "joint"):
        raise ValueError(f'`positions` must be "independent" or "joint"; got {positions!r}.')
    if positions == "joint" and losses.ndim > 2:
        losses = losses.flatten(2).sum(2)  # (K, N): one likelihood a data point
        counts = None if counts is None else counts.flatten(1).any(1)
    return _reduce(_log_mean_exp(losses, alpha), sample_weight, reduction, counts)


def _reduce(values: Tensor, sample_weight: Tensor | None, reduction: Reduction, counts: Tensor | None = None) -> Tensor:
    """Sum, mean or nothing over (N, ...) values; `counts` says which of them are real."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'`reduction` must be "mean", "sum" or "none"; got {reduction!r}.')
    total: Tensor | int = values.numel() if counts is None else counts.sum()
    if sample_weight is not None:
        weight = check_weight(sample_weight, values).expand_as(values)
        values = values * weight
        total = (weight if counts is None else weight * counts).sum()
    if reduction == "none":
        return values
    if reduction == "sum":
        return values.sum()
    if (not isinstance(total, Tensor) or readable(total)) and not total > 0:
        raise ValueError(
            'reduction="mean" needs at least one data point that counts, with a positive weight; got none. '
            'Skip the empty batch, or use "sum".'
        )
    return values.sum() / total


def _wide(t: Tensor) -> Tensor:
    """Half precision is reduced in float32."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
