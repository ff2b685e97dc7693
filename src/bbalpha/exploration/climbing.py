"""Where a function promises most: expected improvement, of many candidates, and uphill from the best of them.

A row x improves on what is known by max(b - f(x), 0), with b the least value that the function has at rows already
measured, or chosen before in the same batch. The score is the logarithm of its mean. Under passes that know mean and
variance (`Expected`) it has a closed form,

    std h((b - mean) / std),     h(z) = pdf(z) + z cdf(z)

averaged over passes. Under functions of the caller's (`Drawn`) it is averaged over these. There it can be 0, and there
is no way up, so each improvement is rounded off at a scale far below the spread of the functions.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bbalpha.exploration.ascent import ascend
from bbalpha.exploration.surrogate import Draws, Passes

_BLOCK = 2**10  # rows looked at together
_ROUND = 1e-3  # of the spread at the rows that are measured
_REFINED = 3  # of every set of candidates, those that are climbed from


def promise(known: Draws | Passes, seen: Tensor, generator: torch.Generator) -> "Promise":
    """Of passes, or of functions given the rows that are measured (N, F)."""
    return Expected(known, generator) if isinstance(known, Passes) else Drawn(known, seen)


class Promise(ABC):
    """What is expected of a row, and of further ones when it is taken."""

    @abstractmethod
    def score(self, x: Tensor) -> Tensor:
        """Of rows (N, F), the logarithm of the improvement (N,)."""

    @abstractmethod
    def take(self, x: Tensor) -> None:
        """A row (F,) is chosen: further ones must improve on it."""

    def scores(self, x: Tensor) -> Tensor:
        """Of many rows, without gradients."""
        with torch.no_grad():
            return torch.cat([self.score(part) for part in x.split(_BLOCK)])

    def refine(self, *candidates: Tensor) -> Tensor:
        """The best row uphill from the best of each set of candidates (N, F) in the unit cube (F,)."""
        best = [x[self.scores(x).topk(min(_REFINED, len(x))).indices] for x in candidates]
        return ascend(self.score, torch.cat(best))


class Expected(Promise):
    """The choice of rows one after the other, by what passes know.

    Args:
        passes: They know mean and variance at any row.
        generator: Of what is seen at the rows that are taken.
    """

    def __init__(self, passes: Passes, generator: torch.Generator) -> None:
        self.generator = generator
        self._know(passes)

    def _know(self, passes: Passes) -> None:
        self.passes = passes
        self.best = passes.moments(passes.x)[0].amin(1, keepdim=True)  # (K, 1)

    def score(self, x: Tensor) -> Tensor:
        """Of rows (N, F)."""
        mean, std = self.passes.moments(x)
        logs = std.log() + log_h((self.best - mean) / std)
        return logs.logsumexp(0) - math.log(len(mean))

    def take(self, x: Tensor) -> None:
        """A row (F,) is chosen, and each pass draws what is seen there."""
        self._know(self.passes.joined(x, self.generator))


class Drawn(Promise):
    """The choice of rows one after the other, as functions see them.

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

    def take(self, x: Tensor) -> None:
        """A row (F,) is chosen: further ones must improve on it."""
        self.best = torch.minimum(self.best, self.draws(x[None])[:, 0])


def log_h(z: Tensor) -> Tensor:
    """Logarithm of pdf(z) + z cdf(z) of the normal distribution, also far below 0.

    There it is log pdf(z) + log(1 + z cdf(z) / pdf(z)), and 1 / z^2 is what the last term comes to.
    """
    log_pdf = -0.5 * z.square() - 0.5 * math.log(2 * math.pi)
    near, low, far = z.clamp_min(-1), z.clamp(-1e3, -1), z.clamp_max(-1e3)
    body = (near * torch.special.ndtr(near) + (-0.5 * near.square()).exp() / math.sqrt(2 * math.pi)).log()
    tail = torch.log1p(low * math.sqrt(math.pi / 2) * torch.special.erfcx(-low / math.sqrt(2)))
    return torch.where(z > -1, body, log_pdf + torch.where(z > -1e3, tail, -2 * (-far).log()))


def log_improvement(values: Tensor, best: Tensor, width: float) -> Tensor:
    """Log of the mean over functions of max(best - value, 0), rounded off: (K, N), (K,) -> (N,)."""
    apart = (best[:, None] - values) / width
    # softplus(z) = exp(z) far below 0, where its own digits are lost
    logs = torch.where(apart > -15, softplus(apart.clamp_min(-15)).log(), apart)
    return logs.logsumexp(0)
