"""Uphill in a box from several starts at once: quasi-Newton steps (BFGS), each start with a shape of its own.

The rows are one batch for the score, so that a hundred steps of five starts cost a hundred calls. Coordinates at a
bound that they would leave stay there; a step that gains too little is tried again shorter.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_FIRST, _SHORTER, _SHORTEST = 0.05, 0.3, 1e-3  # of the box; of a step that failed; then its shape is forgotten
_ENOUGH = 1e-4  # of the gain that the slope promises


def ascend(
    score: Callable[[Tensor], Tensor], start: Tensor, *, low: Tensor | float = 0.0, high: Tensor | float = 1.0,
    calls: int = 60,
) -> Tensor:  # fmt: skip
    """The best row found uphill from `start` (S, D), within low and high: score (S, D) -> (S,)."""
    low, high = (torch.as_tensor(bound, dtype=start.dtype).expand(start.shape[1]) for bound in (low, high))
    x, box = start.detach().clamp(low, high), high - low
    value, slope = _value_and_slope(score, x)
    length, part = torch.full_like(value, _FIRST), torch.ones_like(value)
    shape = _steepest(slope, box, length)
    for _ in range(calls):
        held = ((x <= low) & (slope < 0)) | ((x >= high) & (slope > 0))
        way = _times(shape, slope.masked_fill(held, 0.0)).masked_fill(held, 0.0)
        step = (x + part[:, None] * way).clamp(low, high) - x
        reached, its_slope = _value_and_slope(score, x + step)
        better = (reached > value) & (reached >= value + _ENOUGH * (slope * step).sum(1))
        bent = _bent(shape, step, slope - its_slope)
        shape = torch.where(better[:, None, None], bent, shape)
        x = torch.where(better[:, None], x + step, x)
        value, slope = torch.where(better, reached, value), torch.where(better[:, None], its_slope, slope)
        part = torch.where(better, torch.ones_like(part), _SHORTER * part)
        lost = part < _SHORTEST
        if bool(lost.any()):
            length = torch.where(lost, 0.1 * length, length)
            shape = torch.where(lost[:, None, None], _steepest(slope, box, length), shape)
            part = part.masked_fill(lost, 1.0)
            if bool((length < 1e-9).all()):
                break
    return x[int(value.argmax())]


def _value_and_slope(score: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    at = x.detach().requires_grad_()
    values = score(at)
    (slope,) = torch.autograd.grad(values.sum(), at)
    return values.detach().nan_to_num(nan=-torch.inf), slope.nan_to_num()


def _times(shape: Tensor, slope: Tensor) -> Tensor:
    return (shape @ slope[..., None])[..., 0]


def _steepest(slope: Tensor, box: Tensor, length: Tensor) -> Tensor:
    """Shapes (S, D, D) whose step is straight uphill, of this length in the largest coordinate."""
    largest = (slope * box).abs().amax(1).clamp_min(1e-30)
    return torch.diag_embed(box.square() * (length / largest)[:, None])


def _bent(shape: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """Shapes that know the change of slope (S, D) along the last step; twice as large where there was no bend down."""
    curve = (step * change).sum(1)
    down = curve > 1e-10 * step.norm(dim=1) * change.norm(dim=1)
    rate = torch.where(down, 1 / curve, 0.0)[:, None, None]
    off = torch.eye(step.shape[1], dtype=step.dtype) - rate * step[:, :, None] * change[:, None]
    bent = off @ shape @ off.mT + rate * step[:, :, None] * step[:, None]
    return torch.where(down[:, None, None], bent, 2 * shape)
