"""The agents of the testbed: their settings, how they are trained, and what they say about test inputs.

networks = fit(AGENTS["alpha-0.5"], problems, seed=1)              # problems of equal N, side by side
log_probs(networks, x, n_draws=300, seed=1)                        # (Z, N, 2) -> (Z, K, N, 2)

All are told N and the temperature, as the testbed tells them. The loss is the mean over a batch, plus a decay of all
parameters of sqrt(temperature) * dimension / N. Up to 100 points are one batch, which is what the testbed's batches of
100 are where 100 divides by N; more are dealt a hundred at a time, reshuffled when all have been.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bbalpha.experiments.testbed_networks import Bayes, Blocks, Dropout, Ensemble, Networks
from bbalpha.experiments.testbed_problems import Problem
from bbalpha.objectives import alpha_loss

Kind = Literal["ensemble", "dropout", "blocks", "bayes"]
_BATCH = 100
_ROWS, _DRAWS = 100, 25  # worked on together in prediction: what fits a cache


@dataclass(frozen=True)
class Agent:
    """Settings of an agent.

    Attributes:
        kind: Its networks, see testbed_networks.py.
        members: Networks of an ensemble.
        blocks: Networks that are dropped as wholes.
        n_passes: K in training; an ensemble trains all its members.
        rate: Of dropout.
        alpha: Of the objective.
        group_size: Rows whose losses are summed inside the log-sum-exp, dealt anew in every step.
        prior: The scale of the prior function.
        decay: lambda.
        learning_rate: Of Adam.
        steps: Of training.
    """

    kind: Kind
    members: int = 1
    blocks: int = 16
    n_passes: int = 1
    rate: float = 0.1
    alpha: float = 0.0
    group_size: int = 1
    prior: float = 0.0
    decay: float = 1.0
    learning_rate: float = 1e-3
    steps: int = 1000

    def networks(self, problems: Sequence[Problem], generator: torch.Generator) -> Networks:
        """Untrained networks for problems of equal N."""
        temperature, n_data = torch.tensor([p.temperature for p in problems]), len(problems[0].x)
        if self.kind == "ensemble":
            return Ensemble(temperature, n_data, self.decay, generator, members=self.members, prior=self.prior)
        if self.kind == "dropout":
            return Dropout(temperature, n_data, self.decay, generator, rate=self.rate)
        if self.kind == "blocks":
            return Blocks(temperature, n_data, self.decay, generator, blocks=self.blocks, prior=self.prior)
        return Bayes(temperature, n_data, generator, prior=self.prior)


def fit(agent: Agent, problems: Sequence[Problem], *, seed: int) -> Networks:
    """Trained networks, of each problem as if it were alone.

    Args:
        agent: Its settings.
        problems: Of equal N.
        seed: Of first weights, order and draws.
    """
    weights, order, draws = (torch.Generator().manual_seed(3 * seed + i) for i in range(3))
    networks = agent.networks(problems, weights)
    optimizer = torch.optim.Adam(networks.parameters, lr=agent.learning_rate, fused=True)
    x, y = torch.stack([p.x for p in problems]), torch.stack([p.y for p in problems])
    for rows, _ in zip(_batches(len(problems[0].x), order), range(agent.steps), strict=False):
        logits = networks.logits(x[:, rows], networks.draw(agent.n_passes, draws))  # (Z, K, B, 2)
        loss = objective(agent, logits, y[:, rows]) + networks.penalty()
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
    return networks


def objective(agent: Agent, logits: Tensor, y: Tensor) -> Tensor:
    """The alpha objective of each problem, (Z, K, B, 2), (Z, B) -> (Z,); members of an ensemble have each their own."""
    Z, K, B, _ = logits.shape
    losses = -logits.log_softmax(-1).gather(3, y[:, None, :, None].expand(Z, K, B, 1))[..., 0]
    if agent.kind == "ensemble":
        return losses.mean(2).sum(1)
    if not agent.alpha or K == 1:
        return losses.mean((1, 2))
    n_groups = -(-B // agent.group_size)
    place = torch.arange(Z)[:, None] * n_groups + torch.arange(B) // agent.group_size  # rows come in random order
    passes_first = losses.transpose(0, 1).flatten(1)  # (K, Z * B)
    return alpha_loss(passes_first, agent.alpha, groups=place.flatten(), reduction="none").view(Z, -1).sum(1) / B


@torch.no_grad()
def log_probs(networks: Networks, x: Tensor, *, n_draws: int, seed: int) -> Tensor:
    """Log-probabilities under functions that all rows share, (Z, N, 2) -> (Z, K, N, 2).

    Args:
        networks: Trained.
        x: Test inputs of each problem.
        n_draws: Functions; those of an ensemble are its members.
        seed: Of the draws.
    """
    draws = networks.draw(n_draws, torch.Generator().manual_seed(seed))
    parts = [[d[:, i : i + _DRAWS] for d in draws] for i in range(0, n_draws if draws else 1, _DRAWS)]
    columns = [torch.cat([networks.logits(rows, part) for part in parts], 1) for rows in x.split(_ROWS, 1)]
    return torch.cat(columns, 2).log_softmax(-1)


def _batches(n: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows in random order, forever: all of them, or 100 at a time across the ends of rounds."""
    queue = torch.empty(0, dtype=torch.long)
    size = min(n, _BATCH)
    while True:
        if len(queue) < size:
            queue = torch.cat([queue, torch.randperm(n, generator=generator)])
        yield queue[:size]
        queue = queue[size:]
