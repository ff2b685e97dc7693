"""What a function may look like between few measurements: draws from small dropout networks with exact readouts.

A few small networks are trained with dropout and the alpha objective. Each pass of each of them under shared masks is a
set of features (K, N, H), and what it reads out of them is linear. So the readouts are not left as trained: those of
every pass are drawn from their exact posterior,

    y = phi w + noise,   w ~ N(0, s^2 / H I),   w | y = w_0 + phi' (phi phi' + r I)^-1 (y - phi w_0 - noise)

with s^2 and r by the evidence of all passes together. Where there are measurements the functions meet them, which
passes of dropout do not, and away from them they part. It costs some tenths of a second for a hundred rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from bbalpha.objectives import alpha_loss

Draws = Callable[[Tensor], Tensor]  # x (N, F) -> values of K functions (K, N)


@dataclass(frozen=True)
class Settings:
    """How the networks look and are trained; benchmarks/explore_choice.py has what was tried.

    Attributes:
        networks: How many.
        passes: Of each.
        width: Units of each of the two hidden layers.
        dropout: The rate at hidden units.
        alpha: Of the objective.
        steps: Of Adam, over all rows at once.
        learning_rate: Of Adam.
        spread: The first weights and biases start out so many times as large: functions then begin with more bends.
    """

    networks: int = 4
    passes: int = 16
    width: int = 64
    dropout: float = 0.05
    alpha: float = 0.5
    steps: int = 50
    learning_rate: float = 0.02
    spread: float = 2.0


def fit_draws(x: Tensor, y: Tensor, *, seed: int, settings: Settings | None = None) -> "DropoutDraws":
    """Functions that agree with the measurements, drawn: x (N, F) in [0, 1], y (N,) -> (x (n, F) -> (K, n)).

    >>> x = torch.linspace(0, 1, 8)[:, None]
    >>> draws = fit_draws(x, (6 * x[:, 0]).sin(), seed=0, settings=Settings(spread=1.0))
    >>> draws(x).shape, bool(((draws(x) - (6 * x[:, 0]).sin()).abs() < 0.1).all())
    (torch.Size([64, 8]), True)
    """
    made = settings or Settings()
    generator = torch.Generator().manual_seed(seed)
    centre, scale = y.mean(), y.std(correction=0).clamp_min(1e-12)
    net = _Networks(made, x.shape[1], generator)
    target = (y - centre) / scale
    net.train(_inputs(x), target.float(), generator)
    masks = net.masks(made.passes, generator)
    readout = _Readout(net.features(_inputs(x), masks).double(), target.double(), generator)
    return DropoutDraws(net, masks, readout, centre, scale)


@dataclass(frozen=True, eq=False)
class DropoutDraws:
    """Functions of `fit_draws`: x (n, F) -> (K, n).

    Attributes:
        networks: What their features come from.
        masks: Of the passes.
        readout: What is read out of the features.
        centre: Of the values.
        scale: Of the values.
    """

    networks: "_Networks"
    masks: Tensor
    readout: "_Readout"
    centre: Tensor
    scale: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Their values at rows in [0, 1]."""
        return self.readout(self.networks.features(_inputs(x), self.masks).double()) * self.scale + self.centre

    @property
    def precision(self) -> Tensor:
        """One over the variance of the noise that the measurements seem to have ()."""
        return 1 / (self.readout.noise * self.readout.size * self.scale.square())


def _inputs(x: Tensor) -> Tensor:
    return 2 * x.float() - 1


class _Networks:
    """M networks of two hidden layers side by side."""

    def __init__(self, made: Settings, inputs: int, generator: torch.Generator) -> None:
        self.made = made
        sizes = [inputs, made.width, made.width, 1]
        self.weights: list[tuple[Tensor, Tensor]] = []
        for i, (n_in, n_out) in enumerate(pairwise(sizes)):
            size = made.spread if i == 0 else 1.0
            weight = size * torch.randn(made.networks, n_in, n_out, generator=generator) / math.sqrt(n_in)
            bias = size * torch.randn(made.networks, 1, n_out, generator=generator)
            self.weights.append((weight.requires_grad_(), bias.requires_grad_()))
        self.log_precision = torch.zeros(made.networks, 1, 1).requires_grad_()

    def masks(self, passes: int, generator: torch.Generator) -> Tensor:
        """What each pass multiplies the units of both layers by (2, M, K, 1, H)."""
        keep = 1 - self.made.dropout
        shape = (2, self.made.networks, passes, 1, self.made.width)
        return (torch.rand(shape, generator=generator) < keep) / keep

    def features(self, x: Tensor, masks: Tensor) -> Tensor:
        """What the readout of each pass reads: (N, F) -> (M K, N, H)."""
        (first, bias), (second, after), _ = self.weights
        M, K = masks.shape[1:3]
        h = silu(torch.baddbmm(bias, x.expand(M, *x.shape), first)).unsqueeze(1)
        h = (h * masks[0]).flatten(1, 2)  # (M, K N, H)
        h = silu(torch.baddbmm(after, h, second)).view(M, K, len(x), -1)
        return (h * masks[1]).flatten(0, 1)

    def train(self, x: Tensor, target: Tensor, generator: torch.Generator) -> None:
        """Adam on the alpha objective under shared masks, all rows at a time."""
        made, parameters = self.made, [p for layer in self.weights for p in layer] + [self.log_precision]
        optimizer = torch.optim.Adam(parameters, lr=made.learning_rate, fused=True)
        passes = 4 if made.dropout else 1
        weight, bias = self.weights[2]
        for step in range(made.steps):
            for group in optimizer.param_groups:
                group["lr"] = made.learning_rate * 0.5 * (1 + math.cos(math.pi * step / made.steps))
            features = self.features(x, self.masks(passes, generator)).unflatten(0, (made.networks, passes))
            outputs = (features * weight.unsqueeze(1).mT).sum(-1) + bias  # (M, K, N)
            losses = 0.5 * (self.log_precision.exp() * (outputs - target).square() - self.log_precision)
            loss = alpha_loss(losses.transpose(0, 1).flatten(1), made.alpha) * made.networks
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for p in parameters:
            p.requires_grad_(False)


class _Readout:
    """The readouts of the passes, drawn from their posterior."""

    def __init__(self, features: Tensor, target: Tensor, generator: torch.Generator) -> None:
        K, N, H = features.shape
        phi = _with_bias(features)
        noise, size = _evidence(phi, target)
        prior = size.sqrt() * torch.randn(K, H + 1, 1, generator=generator, dtype=torch.float64)
        error = (noise * size).sqrt() * torch.randn(K, N, 1, generator=generator, dtype=torch.float64)
        kernel = phi @ phi.mT + noise * torch.eye(N, dtype=torch.float64)
        left = target[:, None] - phi @ prior - error
        self.weight = prior + phi.mT @ torch.cholesky_solve(left, torch.linalg.cholesky(kernel))
        self.noise, self.size = noise, size

    def __call__(self, features: Tensor) -> Tensor:
        return (_with_bias(features) @ self.weight).squeeze(-1)


def _with_bias(features: Tensor) -> Tensor:
    """Features with a constant one, of length about 1."""
    return torch.cat((features, torch.ones_like(features[..., :1])), -1) / math.sqrt(features.shape[-1])


def _evidence(phi: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The noise in units of the weights' variance, and that variance, under which the measurements are likeliest."""
    values, vectors = torch.linalg.eigh(phi @ phi.mT)
    along = (vectors.mT @ target).square()  # (K, N)
    ratios = torch.logspace(-6, 1, 22, dtype=torch.float64)
    spread = values.clamp_min(0)[:, None] + ratios[:, None]  # (K, R, N)
    size = (along[:, None] / spread).mean(-1).mean(0)  # (R,)
    log_evidence = -0.5 * (len(target) * size.log() + spread.log().sum(-1).mean(0))
    best = log_evidence.argmax()
    return ratios[best], size[best]
