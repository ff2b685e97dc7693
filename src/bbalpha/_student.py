"""Student's t of four degrees of freedom: noise with outliers, every formula of it closed.

Four is the fewest even number with a variance (2, at scale 1), and even numbers alone have an algebraic distribution
function: with s = t / sqrt(4 + t^2) it is (1 + s)^2 (2 - s) / 4.
"""

import math

import torch
from torch import Tensor

VARIANCE = 2.0
_LOG_DENSITY = math.log(3 / 8)  # at 0


def student_losses(outputs: Tensor, target: Tensor, tau: Tensor, log_tau: Tensor) -> Tensor:
    """Minus the log-density of every target by itself under noise of scale tau^-1/2; shapes broadcast."""
    return 2.5 * torch.log1p(0.25 * tau * (target - outputs).square()) - 0.5 * log_tau - _LOG_DENSITY


def density(t: Tensor) -> Tensor:
    """The density at `t`.

    >>> density(torch.tensor([0.0, 2.0]))
    tensor([0.3750, 0.0663])
    """
    return 0.375 * (1 + 0.25 * t.square()) ** -2.5


def cdf(t: Tensor) -> Tensor:
    """P(T <= t), with all its digits in the lower tail.

    >>> cdf(torch.tensor([-2.0, 0.0, 2.0]))
    tensor([0.0581, 0.5000, 0.9419])
    """
    root = (4 + t.square()).sqrt()
    # 1 + s; where t < 0 the sum would cancel
    rest = torch.where(t < 0, 4 / ((root - t) * root), 1 + t / root)
    return 0.25 * rest.square() * (3 - rest)


def quantile(q: Tensor) -> Tensor:
    """Where `cdf` is `q`, for q in (0, 1).

    >>> quantile(torch.tensor([0.0581, 0.5, 0.9419])).round(decimals=2).abs()
    tensor([2., 0., 2.])
    """
    root = (4 * q * (1 - q)).sqrt().clamp(max=1.0)
    inner = torch.cos(torch.acos(root) / 3) / root - 1
    return torch.sign(q - 0.5) * 2 * inner.clamp_min(0.0).sqrt()
