"""The networks of the testbed's agents, those of several problems side by side.

Every class has its parameters with the Z problems as first axis, and

    draws = networks.draw(K, generator)            # what makes a function out of the networks: masks, signs, noise
    networks.logits(x, draws)                      # (Z, N, 2) -> (Z, K, N, 2)

One draw is one function: all rows share it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from bbalpha.experiments.testbed_problems import DIMENSION, truncated

Draws = list[Tensor]  # each (Z, K, ...)
Layers = list[tuple[Tensor, Tensor]]  # weights (Z, M, in, out) and biases (Z, M, 1, out)
_SIZES = (DIMENSION, 50, 50, 2)


def initial(
    n_problems: int, n_members: int, generator: torch.Generator, *, bias: bool, sizes: Sequence[int] = _SIZES
) -> Layers:
    """Weights as the testbed begins with them; `bias` says whether those of the first layer are drawn, else 0."""
    layers = []
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        weight = truncated((n_problems, n_members, inputs, outputs), inputs, generator)
        shape = (n_problems, n_members, 1, outputs)
        layers.append((weight, truncated(shape, inputs, generator) if bias and not i else torch.zeros(shape)))
    return layers


def through(layers: Layers, x: Tensor, masks: Draws | None = None) -> Tensor:
    """The outputs of ReLU networks, (Z, 1, N, D) -> (Z, M or K, N, out)."""
    for i, (weight, bias) in enumerate(layers):
        if i:
            x = torch.relu(x)
            if masks:
                x = x * masks[i - 1][:, :, None]
        x = x @ weight + bias
    return x


class Networks(ABC):
    """Networks of Z problems.

    Args:
        temperature: Of each problem (Z,).
        n_data: Training points of each.
        decay: lambda, of the sum of squares of all parameters.
    """

    def __init__(self, temperature: Tensor, n_data: int, decay: float) -> None:
        self.temperature, self.n_data = temperature, n_data
        self.strength = decay * temperature.sqrt() * DIMENSION / n_data  # "adaptive", (Z,)
        self.parameters: list[Tensor] = []

    def hold(self, layers: Layers) -> Layers:
        """These layers, to be trained."""
        self.parameters += [t.requires_grad_() for layer in layers for t in layer]
        return layers

    def penalty(self) -> Tensor:
        """What is added to the mean loss of every function of a problem (Z,)."""
        squares = [p.square().flatten(1).sum(1) for p in self.parameters]
        return self.strength * torch.stack(squares).sum(0)

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator) -> Draws:
        """What makes `n` functions."""

    @abstractmethod
    def logits(self, x: Tensor, draws: Draws) -> Tensor:
        """(Z, N, 2) -> (Z, K, N, 2)."""


class Ensemble(Networks):
    """M networks trained beside each other; with a prior, each with a fixed random network added to it.

    One of them is the testbed's mlp. Its functions are its members, however many are asked for.

    Args:
        temperature, n_data, decay: As in `Networks`.
        generator: Of the first weights.
        members: M.
        prior: The scale of the fixed networks at temperature 1; at others it is divided by the root of these.
    """

    def __init__(
        self,
        temperature: Tensor,
        n_data: int,
        decay: float,
        generator: torch.Generator,
        *,
        members: int = 1,
        prior: float = 0.0,
    ) -> None:
        super().__init__(temperature, n_data, decay)
        self.layers = self.hold(initial(len(temperature), members, generator, bias=prior > 0))
        self.fixed = initial(len(temperature), members, generator, bias=True) if prior else []
        self.scale = (prior / temperature.sqrt())[:, None, None, None]

    def draw(self, n: int, generator: torch.Generator) -> Draws:
        """Nothing: the members are all there is."""
        return []

    def logits(self, x: Tensor, draws: Draws) -> Tensor:
        """(Z, N, 2) -> (Z, M, N, 2)."""
        outputs = through(self.layers, x[:, None])
        return outputs + self.scale * through(self.fixed, x[:, None]) if self.fixed else outputs


class Dropout(Networks):
    """One network whose hidden units are dropped.

    Args:
        temperature, n_data, decay: As in `Networks`.
        generator: Of the first weights.
        rate: Of being dropped.
    """

    def __init__(
        self, temperature: Tensor, n_data: int, decay: float, generator: torch.Generator, *, rate: float = 0.1
    ) -> None:
        super().__init__(temperature, n_data, decay)
        self.rate = rate
        self.layers = self.hold(initial(len(temperature), 1, generator, bias=True))

    def draw(self, n: int, generator: torch.Generator) -> Draws:
        """A mask for each hidden layer (Z, K, H), kept units divided by the chance of being kept."""
        keep = 1 - self.rate
        shapes = [(len(self.temperature), n, width) for width in _SIZES[1:-1]]
        return [torch.bernoulli(torch.full(shape, keep), generator=generator) / keep for shape in shapes]

    def logits(self, x: Tensor, draws: Draws) -> Tensor:
        """(Z, N, 2) -> (Z, K, N, 2)."""
        return through(self.layers, x[:, None], draws)


class Blocks(Networks):
    """One network, and J further ones that are dropped as wholes, each with a fixed random network of its own.

    A function keeps every block with chance one half, the same for all rows; centred, these are signs s:

        f_s(x) = network(x) + sum_j s_j (block_j(x) + scale prior_j(x)) / root J

    Where there are data the blocks learn to take back what their priors add, and elsewhere functions differ. The
    decay of a block counts 1 / J, as its share in the variance of a function does: counted whole, J blocks would pay J
    times for what one network pays once, and would not take back enough.

    Args:
        temperature, n_data, decay: As in `Networks`.
        generator: Of the first weights.
        blocks: J.
        prior: The scale at temperature 1; at others it is divided by the root of these.
    """

    def __init__(
        self, temperature: Tensor, n_data: int, decay: float, generator: torch.Generator, *, blocks: int, prior: float
    ) -> None:
        super().__init__(temperature, n_data, decay)
        self.blocks, Z = blocks, len(temperature)
        self.layers = self.hold(initial(Z, 1 + blocks, generator, bias=True))
        self.fixed = initial(Z, blocks, generator, bias=True)
        self.scale = prior / temperature.sqrt()[:, None, None, None]

    def penalty(self) -> Tensor:
        """The decay, of which a block has a J-th (Z,)."""
        share = torch.tensor([1.0] + [1 / self.blocks] * self.blocks)
        squares = [(p.square().flatten(2).sum(2) * share).sum(1) for p in self.parameters]
        return self.strength * torch.stack(squares).sum(0)

    def draw(self, n: int, generator: torch.Generator) -> Draws:
        """J signs for every function (Z, K, J)."""
        half = torch.full((len(self.temperature), n, self.blocks), 0.5)
        return [torch.bernoulli(half, generator=generator) * 2 - 1]

    def logits(self, x: Tensor, draws: Draws) -> Tensor:
        """(Z, N, 2) -> (Z, K, N, 2)."""
        (signs,) = draws
        common, own = through(self.layers, x[:, None]).split((1, self.blocks), 1)
        own = own + self.scale * through(self.fixed, x[:, None])
        outputs: Tensor = common + torch.einsum("zkj,zjnc->zknc", signs, own) / math.sqrt(self.blocks)
        return outputs


class Bayes(Networks):
    """Bayes by backprop: every parameter has a mean and a deviation, and is drawn anew for every function.

    Args:
        temperature, n_data: As in `Networks`.
        generator: Of the first weights.
        prior: The deviation of the prior.
    """

    def __init__(self, temperature: Tensor, n_data: int, generator: torch.Generator, *, prior: float = 1.0) -> None:
        super().__init__(temperature, n_data, 1.0)
        self.prior = prior
        self.mean = self.hold(initial(len(temperature), 1, generator, bias=False))
        start = math.log(math.expm1(0.01))  # softplus of it is 0.01
        self.width = self.hold([(torch.full_like(w, start), torch.full_like(b, start)) for w, b in self.mean])

    def penalty(self) -> Tensor:
        """The divergence to the prior over N, times root temperature and dimension (Z,)."""
        parts = []
        for mean, width in zip(self._flat(self.mean), self._flat(self.width), strict=True):
            ratio = F.softplus(width) / self.prior
            parts.append((ratio.square() + (mean / self.prior).square() - 1 - 2 * ratio.log()).flatten(1).sum(1))
        return self.strength / 2 * torch.stack(parts).sum(0)

    def draw(self, n: int, generator: torch.Generator) -> Draws:
        """Standard normal numbers for every parameter."""
        return [torch.randn(len(t), n, *t.shape[2:], generator=generator) for t in self._flat(self.mean)]

    def logits(self, x: Tensor, draws: Draws) -> Tensor:
        """(Z, N, 2) -> (Z, K, N, 2)."""
        drawn = iter(draws)
        pairs = zip(self._flat(self.mean), self._flat(self.width), strict=True)
        flat = iter([mean + F.softplus(width) * next(drawn) for mean, width in pairs])
        return through(list(zip(flat, flat, strict=True)), x[:, None])

    @staticmethod
    def _flat(layers: Layers) -> list[Tensor]:
        return [t for layer in layers for t in layer]
