"""How far, how much and how noisy: the scales of a function, by the evidence of what was measured.

Under pass k the measurements have the covariance

    C_k = s^2 (share phi_k phi_k' + (1 - share) M + 1 + ratio I)

with features phi_k of mean square 1, M a Matern 5/2 kernel with a length for every input, and a constant of any height.
The scales are shared by all passes, and those are taken under which the mean of the passes' log evidence, and a weak
prior, is largest. s^2 follows from the others in closed form.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bbalpha.exploration.ascent import ascend

RATIOS = 1e-10, 10.0  # least and largest; below it a covariance has no Cholesky factor in 16 digits
_LENGTHS, _ODDS = (0.01, 100.0), (1e-3, 1e3)
_STARTS = ((0.3, 1e-6), (1.0, 1e-6), (0.6, 1e-2))  # lengths for one input, ratio
_CALLS = 40


@dataclass(frozen=True, eq=False)
class Scales:
    """What `likeliest` finds.

    Attributes:
        lengths: Over which the process turns, of every input (F,).
        share: Of the variance, what the features have ().
        ratio: Noise in units of `size` ().
        size: The variance of a function, s^2 ().
    """

    lengths: Tensor
    share: Tensor
    ratio: Tensor
    size: Tensor

    def covariance(self, x: Tensor, other: Tensor, phi: Tensor, its_phi: Tensor) -> Tensor:
        """Of a function at rows (N, F) and others (n, F) with features (K, N, H), (K, n, H), over `size`: (K, N, n)."""
        rest = matern(x / self.lengths, other / self.lengths)
        return self.share * (phi @ its_phi.mT) + (1 - self.share) * rest + 1

    def variance(self, phi: Tensor) -> Tensor:
        """Of a function at rows with features (K, n, H), over `size`: (K, n)."""
        return self.share * phi.square().sum(-1) + (1 - self.share) + 1


def matern(x: Tensor, other: Tensor) -> Tensor:
    """Matern 5/2 of rows (..., N, F) and (..., n, F) in units of their lengths: (..., N, n)."""
    apart = math.sqrt(5) * torch.cdist(x, other, compute_mode="donot_use_mm_for_euclid_dist")
    return (1 + apart + apart.square() / 3) * (-apart).exp()


def likeliest(x: Tensor, phi: Tensor, target: Tensor, share: float | None) -> Scales:
    """The scales by the evidence, for rows (N, F), features (K, N, H) and values (N,); `share` where it is given."""
    F = x.shape[1]
    gram = phi @ phi.mT
    held = None if share is None else torch.tensor(share, dtype=x.dtype)

    def score(at: Tensor) -> Tensor:
        return log_evidence(gram, x, target, at, held)[0] + _log_prior(at, F)

    start = torch.tensor([[math.log(length * math.sqrt(F))] * F + [0.0, math.log(r)] for length, r in _STARTS])
    bounds = torch.tensor([_LENGTHS] * F + [_ODDS, RATIOS]).log().to(x.dtype)
    at = ascend(score, start.to(x.dtype), low=bounds[:, 0], high=bounds[:, 1], calls=_CALLS)
    size = log_evidence(gram, x, target, at[None], held)[1][0]
    return Scales(at[:F].exp(), at[F].sigmoid() if held is None else held, at[F + 1].exp(), size)


def log_evidence(gram: Tensor, x: Tensor, target: Tensor, at: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor]:
    """Its mean over passes, and s^2, at S places (S, F + 2): logarithms of lengths, logit of share, log of ratio."""
    N, F = x.shape
    here = at[:, :F, None].mT.exp()  # (S, 1, F)
    part = (at[:, F].sigmoid() if share is None else share.expand(len(at)))[:, None, None]
    rest = (1 - part) * matern(x / here, x / here) + 1 + at[:, F + 1, None, None].exp() * torch.eye(N, dtype=x.dtype)
    covariance = part[:, None] * gram + rest[:, None]  # (S, K, N, N)
    found, size, slope = _gaussian(covariance.detach(), target)
    along = (slope * covariance).sum((1, 2, 3))  # autograd's way through a Cholesky factor takes three times as long
    return found + along - along.detach(), size


def _gaussian(covariance: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log evidence and s^2 for covariances over s^2 (S, K, N, N), and the evidence's slope by them."""
    lower, failed = torch.linalg.cholesky_ex(covariance)
    inverse = torch.cholesky_inverse(lower)
    weight = inverse @ target[:, None]  # (S, K, N, 1)
    squares = (target @ weight)[..., 0].mean(1)
    size = (squares + 1) / (len(target) + 1)  # as if one more value had been as large as expected
    log_root = lower.diagonal(dim1=-2, dim2=-1).log().sum(-1).mean(1)
    found = -0.5 * (len(target) + 1) * size.log() - log_root
    slope = 0.5 * (weight * weight.mT / size[:, None, None, None] - inverse) / covariance.shape[1]
    return found.masked_fill((failed != 0).any(1), -math.inf), size, slope


def _log_prior(at: Tensor, F: int) -> Tensor:
    """Lengths of about the diagonal of the cube, shares of about a half, little noise: all of them weakly."""
    lengths = (at[:, :F] - math.log(math.sqrt(F))) / 1.5
    return -0.5 * (lengths.square().sum(1) + (at[:, F] / 3).square() + ((at[:, F + 1] + 20) / 6).square())
