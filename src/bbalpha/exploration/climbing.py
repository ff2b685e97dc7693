"""Where functions promise most: many candidates, and gradients through the functions for the best of them.

Under function k a row x improves on what is known by max(b_k - f_k(x), 0), with b_k the least value that the function
has at rows already measured, or chosen before in the same batch. The score is the mean over functions. Where it is 0
there is no way up, so each improvement is rounded off at a scale far below the spread of the functions.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bbalpha.exploration.surrogate import Draws

_BLOCK = 2**12  # rows looked at together
_ROUND = 1e-3  # of the spread at the rows that are measured
_REFINED, _STEPS = 4, 25  # candidates that are moved by gradients, and how often


def log_improvement(values: Tensor, best: Tensor, width: float) -> Tensor:
    """Log of the mean over functions of max(best - value, 0), rounded off: (K, N), (K,) -> (N,)."""
    apart = (best[:, None] - values) / width
    # softplus(z) = exp(z) far below 0, where its own digits are lost
    logs = torch.where(apart > -15, softplus(apart.clamp_min(-15)).log(), apart)
    return logs.logsumexp(0)


class Climb:
    """The choice of rows one after the other, as the functions see them.

    Args:
        draws: The functions, x (N, F) -> (K, N).
        seen: Rows that are measured (N, F).
    """

    def __init__(self, draws: Draws, seen: Tensor) -> None:
        self.draws = draws
        values = draws(seen)
        self.best = values.amin(1)  # (K,)
        self.width = _ROUND * max(float(values.std(1).mean()) if len(seen) > 1 else 1.0, 1e-9)

    def score(self, x: Tensor) -> Tensor:
        """Of rows (N, F)."""
        return log_improvement(self.draws(x), self.best, self.width)

    def scores(self, x: Tensor) -> Tensor:
        """Of many rows, without gradients."""
        with torch.no_grad():
            return torch.cat([self.score(part) for part in x.split(_BLOCK)])

    def take(self, x: Tensor) -> None:
        """A row (F,) is chosen: further ones must improve on it."""
        self.best = torch.minimum(self.best, self.draws(x[None])[:, 0])

    def refine(self, x: Tensor) -> Tensor:
        """The best of candidates (N, F) in the unit cube, after steps uphill (F,)."""
        start = x[self.scores(x).topk(min(_REFINED, len(x))).indices]
        return ascend(self.score, start)


def ascend(score: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The best row met on steps uphill from `start` (N, F), each with a step length of its own; kept in [0, 1]."""
    x, length = start, torch.full((len(start), 1), 0.05, dtype=start.dtype)
    value, slope = _value_and_slope(score, x)
    for _ in range(_STEPS):
        way = slope / slope.abs().amax(1, keepdim=True).clamp_min(1e-30)
        further = (x + length * way).clamp(0, 1)
        reached, its_slope = _value_and_slope(score, further)
        better = (reached > value)[:, None]
        x, slope = torch.where(better, further, x), torch.where(better, its_slope, slope)
        value = torch.where(better[:, 0], reached, value)
        length = torch.where(better, 1.5 * length, 0.35 * length)
    return x[int(value.argmax())]


def _value_and_slope(score: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    at = x.detach().requires_grad_()
    values = score(at)
    (slope,) = torch.autograd.grad(values.sum(), at)
    return values.detach(), slope
