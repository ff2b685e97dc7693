"""Small networks with dropout, trained side by side: what the passes of each make of a row is a set of features."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from bbalpha.objectives import alpha_loss


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
        share: What the features have of the variance of a function, the rest being a Gaussian process in the inputs;
            None is by the evidence, 1 features alone, 0 the process alone, without networks.
    """

    networks: int = 4
    passes: int = 4
    width: int = 64
    dropout: float = 0.05
    alpha: float = 0.5
    steps: int = 50
    learning_rate: float = 0.02
    spread: float = 2.0
    share: float | None = 0.0


class Networks:
    """M networks of two hidden layers side by side, for rows in [0, 1]."""

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
        """What the readout of each pass reads, in the precision of the rows: (N, F) -> (M K, N, H)."""
        (first, bias), (second, after), _ = [[part.to(x.dtype) for part in layer] for layer in self.weights]
        M, K = masks.shape[1:3]
        h = silu(torch.baddbmm(bias, (2 * x - 1).expand(M, *x.shape), first)).unsqueeze(1)
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
