"""The noise of a regression head: a precision that is given, or that follows the residuals of training.

The alpha objective is stationary in the precision where 1/tau is the mean squared residual, each pass weighted as the
objective weights it, softmax(-alpha l_k). Learning rates of fine-tuning are far too small for a parameter that has to
move by orders of magnitude; so tau follows that fixed point instead, by a running mean over the last steps.

    noise = Noise("learned")
    noise.observe(outputs, target, alpha=0.5)            # (K, N, D), (N, D)
    noise.settle(); noise.precision
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from bbalpha.checks import check_number

_RATE = 0.05  # of the running mean: it forgets in about twenty steps
_LEAST = 1e-12  # a variance of residuals that are all 0


class Noise:
    """One over the variance of the noise.

    Args:
        precision: A positive number, or "learned".
        total: Sums a tensor over all processes.

    >>> noise = Noise("learned")
    >>> noise.observe(torch.zeros(4, 3, 1), torch.full((3, 1), 2.0), alpha=0.5)
    >>> noise.precision
    0.25
    """

    def __init__(
        self, precision: float | Literal["learned"] = "learned", total: Callable[[Tensor], Tensor] = lambda t: t
    ) -> None:
        if isinstance(precision, str) and precision != "learned":
            raise ValueError(f'`precision` must be "learned" or a positive number; got {precision!r}.')
        self.learned = isinstance(precision, str)
        self.precision = None if isinstance(precision, str) else check_number("precision", precision, above=0)
        self.total = total
        self._seen: Tensor | None = None  # squares and how many, since the last step

    @torch.no_grad()
    def observe(self, outputs: Tensor, target: Tensor, alpha: float) -> None:
        """See the residuals of a batch, (K, N, D) and (N, D); the first ones give the precision to begin with."""
        if not self.learned or not target.numel():
            return
        squares = (outputs.float() - target).square()
        squares = squares.reshape(*squares.shape[:2], -1)  # (K, N, D)
        if self.precision is None:
            start = self.total(torch.stack((squares.mean(0).sum(), squares.new_tensor(float(squares[0].numel())))))
            self.precision = 1 / max(float(start[0] / start[1]), _LEAST)
        weights = torch.softmax(-alpha * 0.5 * self.precision * squares.sum(2, keepdim=True), 0)  # (K, N, 1)
        seen = torch.stack(((weights * squares).sum(), squares.new_tensor(float(squares[0].numel()))))
        self._seen = seen if self._seen is None else self._seen + seen

    def settle(self) -> None:
        """After a step of the optimiser: move towards what was seen in it."""
        if self._seen is None or self.precision is None:
            return
        squares, count = self.total(self._seen).tolist()
        self._seen = None
        variance = 1 / self.precision
        self.precision = 1 / max(variance + _RATE * (squares / count - variance), _LEAST)
