"""The problems of the Neural Testbed: classes made by a random network in two dimensions, and groups of test labels.

Osband et al., "The Neural Testbed" (2022), the sweep classification_2d: 7 numbers of training points, 3 temperatures
and 10 seeds make 210 problems. Inputs are standard normal, the true logits a network with two hidden layers of 50
units divided by the temperature. Our instances are others of the same law: compare means and ratios, no single ones.

    problem = Problem.make(n_data=10, temperature=0.1, seed=76)
    tests = Exam.of(problem)                  # .x (N, 2); groups of 1, 10, 10 dyadic and 100 with labels of their own
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bbalpha.metrics.joint import dyadic_rows

N_DATA = (1, 3, 10, 30, 100, 300, 1000)
TEMPERATURES = (0.01, 0.1, 0.5)
N_SEEDS = 10
DIMENSION = 2
HIDDEN = 50
_VALIDATION = 1000  # seeds of problems that settings are chosen on are so much larger
_TEST = 2**40  # test inputs have seeds of their own


def seed_of(n_data: int, temperature: float, number: int, *, validation: bool = False) -> int:
    """The seed of a problem of the sweep, 1 to 210; problems for choosing have others.

    >>> seed_of(10, 0.1, 5), seed_of(10, 0.1, 5, validation=True)
    (76, 1076)
    """
    cell = N_DATA.index(n_data) * len(TEMPERATURES) + TEMPERATURES.index(temperature)
    return cell * N_SEEDS + number + 1 + _VALIDATION * validation


def truncated(shape: Sequence[int], fan_in: int, generator: torch.Generator) -> Tensor:
    """Normal numbers cut at two deviations, not rescaled afterwards, over the root of `fan_in`."""
    t = torch.nn.init.trunc_normal_(torch.empty(*shape), 0.0, 1.0, -2.0, 2.0, generator=generator)
    return t / math.sqrt(fan_in)


@dataclass(frozen=True)
class Problem:
    """One problem; an agent sees `x`, `y` and the temperature.

    Attributes:
        temperature: What the true logits are divided by.
        seed: Of everything in it.
        weights: Of the true network, (2, 50), (50, 50), (50, 2).
        bias: Of its first layer (50,).
        x: Training inputs (N, 2).
        y: Training labels (N,).
    """

    temperature: float
    seed: int
    weights: tuple[Tensor, Tensor, Tensor]
    bias: Tensor
    x: Tensor
    y: Tensor

    @classmethod
    def make(cls, n_data: int, temperature: float, seed: int) -> "Problem":
        """The problem of a seed."""
        g = torch.Generator().manual_seed(seed)
        shapes = (DIMENSION, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2)
        first, second, third = (truncated(shape, shape[0], g) for shape in shapes)
        bias = torch.randn(HIDDEN, generator=g) / math.sqrt(DIMENSION)
        x = torch.randn(n_data, DIMENSION, generator=g)
        blank = cls(temperature, seed, (first, second, third), bias, x, torch.empty(0))
        y = torch.multinomial(blank.log_probs(x).exp(), 1, generator=g)[:, 0]
        return cls(temperature, seed, blank.weights, bias, x, y)

    def log_probs(self, x: Tensor) -> Tensor:
        """What is true: log-probabilities of both classes, (N, 2) -> (N, 2)."""
        h = torch.relu(x @ self.weights[0] + self.bias)
        h = torch.relu(h @ self.weights[1])
        return (h @ self.weights[2] / self.temperature).log_softmax(-1)


@dataclass(frozen=True)
class Exam:
    """Groups of test inputs with labels drawn from the true network.

    Attributes:
        x: All inputs (N, 2).
        true: Their true log-probabilities (N, 2).
        groups: {name: (rows, labels)}, both (G, T); names are "1", "10", "10_dyadic" and "100".
    """

    x: Tensor
    true: Tensor
    groups: dict[str, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, problem: Problem, *, n_hundreds: int = 40, n_pairs: int = 500) -> "Exam":
        """The exam of a problem, always the same.

        Args:
            problem: Whose.
            n_hundreds: Groups of 100 inputs; the same inputs are also taken in tens and one by one.
            n_pairs: Dyadic groups of 10, each of two inputs of its own.
        """
        g = torch.Generator().manual_seed(_TEST + problem.seed)
        single, n = 100 * n_hundreds, 100 * n_hundreds + 2 * n_pairs
        x = torch.randn(n, DIMENSION, generator=g)
        true = problem.log_probs(x)
        labels = torch.multinomial(true.exp(), 1, generator=g)[:, 0]
        groups = {}
        for size in (1, 10, 100):
            rows = torch.arange(single).view(-1, size)
            groups[str(size)] = rows, labels[rows]
        dyadic = single + dyadic_rows(2 * n_pairs, n_pairs, 10, seed=problem.seed)
        chance = true.exp()[dyadic.flatten()]
        groups["10_dyadic"] = dyadic, torch.multinomial(chance, 1, generator=g).view_as(dyadic)
        return cls(x, true, groups)

    def true_log_likelihood(self, name: str) -> Tensor:
        """Log-likelihood of each group under the true network (G,)."""
        rows, labels = self.groups[name]
        return self.true[rows, labels].double().sum(1)
