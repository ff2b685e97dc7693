"""What a function may look like between few measurements: a Gaussian process, and passes of dropout networks before it.

Every pass has its own features phi (N, H), what is read out of them is linear, and what they leave over is a Gaussian
process g in the inputs:

    y = phi w + g(x) + c + noise,     all Gaussian, with scales by the evidence (`scales.py`)

So each pass knows mean and variance of the function at any row exactly, and the passes are a mixture. Measurements
without noise are met, and away from them the functions part. With `share=0` there are no features and all passes are
the process alone: that is how `Settings` come, since on average networks before it gain nothing (they are surer of the
best row, and oftener misled; benchmarks/explore_choice.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bbalpha.exploration.networks import Networks, Settings
from bbalpha.exploration.scales import RATIOS, Scales, likeliest

Draws = Callable[[Tensor], Tensor]  # x (N, F) -> values of K functions (K, N)
_WAVES = 512  # that a drawn process is a sum of
_LEAST = 1e-14  # of a variance, where digits end


def fit_draws(x: Tensor, y: Tensor, *, seed: int, settings: Settings | None = None) -> "DropoutDraws":
    """Functions that agree with the measurements, drawn: x (N, F) in [0, 1], y (N,) -> (x (n, F) -> (K, n)).

    >>> x = torch.linspace(0, 1, 8)[:, None]
    >>> draws = fit_draws(x, (6 * x[:, 0]).sin(), seed=0)
    >>> draws(x).shape, bool(((draws(x) - (6 * x[:, 0]).sin()).abs() < 0.001).all())
    (torch.Size([16, 8]), True)
    """
    return DropoutDraws(fit_passes(x, y, seed=seed, settings=settings), torch.Generator().manual_seed(seed))


def fit_passes(x: Tensor, y: Tensor, *, seed: int, settings: Settings | None = None) -> "Passes":
    """What each pass knows of the function: x (N, F) in [0, 1], y (N,)."""
    made, generator = settings or Settings(), torch.Generator().manual_seed(seed)
    x, y = x.detach().double(), y.detach().double()
    centre, scale = y.mean(), y.std(correction=0).clamp_min(1e-12)
    target = (y - centre) / scale
    features = Features.fitted(made, x, target, generator)
    phi = features(x)
    scales = likeliest(x, phi, target, made.share)
    values = target.expand(made.networks * made.passes, -1)
    return Passes(features, scales, x, values, scales.ratio.expand(len(x)), centre, scale)


@dataclass(frozen=True, eq=False)
class Features:
    """Of trained networks under masks: rows in [0, 1] (n, F) -> (K, n, H), of mean square 1 at the measured rows.

    Attributes:
        networks: What the features come from; None for no networks: one feature that is 0, the same for all passes.
        masks: Of the passes.
        size: What the features are divided by.
    """

    networks: Networks | None
    masks: Tensor
    size: Tensor

    @classmethod
    def fitted(cls, made: Settings, x: Tensor, target: Tensor, generator: torch.Generator) -> "Features":
        """Those of networks trained on rows (N, F) and values (N,)."""
        if made.share == 0:
            return cls(None, torch.empty(0), torch.ones(()))
        networks = Networks(made, x.shape[1], generator)
        networks.train(x.float(), target.float(), generator)
        masks = networks.masks(made.passes, generator)
        return cls(networks, masks, networks.features(x, masks).square().sum(-1).mean().sqrt())

    def __call__(self, x: Tensor) -> Tensor:
        """At rows in [0, 1]."""
        if self.networks is None:
            return x.new_zeros(1, len(x), 1)
        return self.networks.features(x, self.masks) / self.size


class Passes:
    """Mean and variance of the function under each of K passes, given N values.

    Args:
        features: Of the passes, x (n, F) -> (K, n, H), or (1, n, H) for all of them.
        scales: Of all passes.
        x: Rows (N, F).
        target: Their values under each pass, less `centre`, over `scale` (K, N).
        noise: Of each, over `scales.size` (N,).
        centre: Of the values.
        scale: Of the values.
    """

    def __init__(
        self, features: Callable[[Tensor], Tensor], scales: Scales, x: Tensor, target: Tensor, noise: Tensor,
        centre: Tensor, scale: Tensor,
    ) -> None:  # fmt: skip
        self.features, self.scales = features, scales
        self.x, self.target, self.noise = x, target, noise
        self.centre, self.scale = centre, scale
        self.phi = features(x)
        self.lower = torch.linalg.cholesky(scales.covariance(x, x, self.phi, self.phi) + torch.diag(noise))
        self.weight = torch.cholesky_solve(target[..., None], self.lower)  # (K, N, 1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (K, n) and deviation (K, n), or (1, n) if it is the same for all, at rows (n, F), without noise."""
        phi = self.features(x)
        across = self.scales.covariance(self.x, x, self.phi, phi)  # (K, N, n)
        known = torch.linalg.solve_triangular(self.lower, across, upper=False).square().sum(1)
        left = (self.scales.variance(phi) - known).clamp_min(_LEAST)
        mean = (across.mT @ self.weight)[..., 0]
        return mean * self.scale + self.centre, (self.scales.size * left).sqrt() * self.scale

    def joined(self, x: Tensor, generator: torch.Generator) -> "Passes":
        """As if the function had been seen at a row (F,) without noise, and each pass had drawn what came out."""
        mean, std = self.moments(x[None])
        value = mean + std * torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
        return Passes(
            self.features, self.scales, torch.cat((self.x, x[None])),
            torch.cat((self.target, (value - self.centre) / self.scale), 1),
            torch.cat((self.noise, self.noise.new_full((1,), RATIOS[0]))), self.centre, self.scale,
        )  # fmt: skip

    @property
    def precision(self) -> Tensor:
        """One over the variance of the noise that the measurements seem to have ()."""
        return 1 / (self.scales.ratio * self.scales.size * self.scale.square())


class DropoutDraws:
    """A function of every pass: x (n, F) -> (K, n).

    A draw from before the measurements is moved to meet them (Matheron's rule): f + C (C + noise)^-1 (y - f - noise).

    Args:
        passes: What is known.
        generator: Of the draw.
    """

    def __init__(self, passes: Passes, generator: torch.Generator) -> None:
        self.passes = passes
        (K, N), F, H = passes.target.shape, passes.x.shape[1], passes.phi.shape[2]
        normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        thick = (5 / normal(5, _WAVES).square().sum(0)).sqrt()  # Matern 5/2: frequencies of Student's t, 5 degrees
        self.frequency = normal(F, _WAVES) * thick / passes.scales.lengths[:, None]
        self.phase = 2 * math.pi * torch.rand(_WAVES, generator=generator, dtype=torch.float64)
        size, share = passes.scales.size.sqrt(), passes.scales.share
        self.readout = size * share.sqrt() * normal(K, H, 1)
        self.height = size * (1 - share).sqrt() * math.sqrt(2 / _WAVES) * normal(K, _WAVES, 1)
        self.constant = size * normal(K, 1)
        noise = size * passes.noise.sqrt() * normal(K, N)
        left = passes.target - self._before(passes.x, passes.phi) - noise
        self.weight = torch.cholesky_solve(left[..., None], passes.lower)

    def __call__(self, x: Tensor) -> Tensor:
        """Their values at rows in [0, 1]."""
        known, x = self.passes, x.double()
        phi = known.features(x)
        across = known.scales.covariance(known.x, x, known.phi, phi)
        return (self._before(x, phi) + (across.mT @ self.weight)[..., 0]) * known.scale + known.centre

    def _before(self, x: Tensor, phi: Tensor) -> Tensor:
        waves = (x @ self.frequency + self.phase).cos()
        return (phi @ self.readout + waves @ self.height)[..., 0] + self.constant

    @property
    def precision(self) -> Tensor:
        """One over the variance of the noise that the measurements seem to have ()."""
        return self.passes.precision
