"""The methods of the regression table that are populations of dropout networks: how each is trained and predicts.

jobs = [Job(split, alpha, choice) for ...]                      # of one method and data set
fit_and_score(data, VARIANTS["bbalpha"], jobs, config)          # a dict of scores for each, trained side by side
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bbalpha.data.sets import UCIData
from bbalpha.experiments.scoring import scores
from bbalpha.experiments.search import Choice, Config, member, plain
from bbalpha.prediction import predict_regression
from bbalpha.predictive import RegressionPrediction
from bbalpha.training.bank import Likelihood, split_heads
from bbalpha.training.population import Member, Population, fit_population

_APART = 1000  # seeds of the networks of an ensemble differ by this


@dataclass(frozen=True)
class Variant:
    """A method whose networks a population trains.

    Attributes:
        alphas: The only ones it is run with; empty takes those that are asked for.
        chosen: The method whose hyper-parameters it has at its alpha; empty searches by itself.
        n_passes: K in training; None is that of the config.
        n_networks: Averaged networks; None is the number of the config.
        dropout: Whether there is any.
        depth: Hidden layers.
        likelihood: As in `fit_population`.
        balanced: Whether passes are, in training and prediction; the paper's are independent.
        labelled: Whether its rows name the alpha.
    """

    alphas: tuple[float, ...] = ()
    chosen: str = ""
    n_passes: int | None = None
    n_networks: int | None = 1
    dropout: bool = True
    depth: int = 1
    likelihood: Likelihood = "gaussian"
    balanced: bool = False
    labelled: bool = True

    def config(self, config: Config) -> Config:
        """The data set's config as this method has it."""
        if not self.dropout:
            config = plain(config)
        return replace(
            config, hidden=config.hidden * self.depth, n_passes=self.n_passes or config.n_passes,
            n_ensemble=self.n_networks or config.n_ensemble,
        )  # fmt: skip


VARIANTS = {
    "bbalpha": Variant(),
    "mc-dropout": Variant(alphas=(0.0,), n_passes=1),
    "ensemble": Variant(alphas=(0.0,), n_networks=None, dropout=False, labelled=False),
    "bbalpha-het": Variant(alphas=(0.5,), chosen="bbalpha", likelihood="heteroscedastic"),
    "bbalpha-ens": Variant(alphas=(0.5,), chosen="bbalpha", n_networks=None),
    "bbalpha-2x": Variant(alphas=(0.5,), chosen="bbalpha", depth=2),
    "bbalpha-balanced": Variant(alphas=(0.5,), chosen="bbalpha", balanced=True),
}


@dataclass(frozen=True)
class Job:
    """A network, or an ensemble, to be trained on the whole training part of a split."""

    split: int
    alpha: float
    choice: Choice


def fit_and_score(data: UCIData, variant: Variant, jobs: Sequence[Job], config: Config) -> list[dict[str, float]]:
    """Test scores of each job; jobs of one group (`Choice.group`) are trained together."""
    config = variant.config(config)
    found: dict[Job, dict[str, float]] = {}
    for group in dict.fromkeys(job.choice.group for job in jobs):
        chosen = [job for job in jobs if job.choice.group == group]
        population, owners = fit_jobs(data, variant, chosen, config)
        for job in chosen:
            x, y = (torch.as_tensor(a[data.split(job.split)[1]]) for a in (data.X, data.y))
            p = mixture(population, [i for i, owner in enumerate(owners) if owner == job], x, config)
            low, high = p.interval(0.9)
            found[job] = scores(p.log_prob(y[:, None]), p.mean[:, 0], low[:, 0], high[:, 0], y)
    return [found[job] for job in jobs]


def fit_jobs(data: UCIData, variant: Variant, jobs: Sequence[Job], config: Config) -> tuple[Population, list[Job]]:
    """The trained networks of jobs of one group, and the job of each; `config` is the variant's."""
    pairs: list[tuple[Member, Job]] = []
    for job in sorted(jobs, key=lambda job: (job.split, job.choice.dropout, job.choice.input_dropout)):
        for i in range(config.n_ensemble):
            rows = data.split(job.split)[0]
            pairs.append((member(job.choice, rows, job.alpha, job.split + _APART * i), job))
    population = fit_population(
        data.X, data.y, [network for network, _ in pairs], epochs=jobs[0].choice.epochs,
        hidden_layer_sizes=config.hidden, likelihood=variant.likelihood, n_passes=config.n_passes,
        batch_size=config.batch_size, balanced=variant.balanced,
    )  # fmt: skip
    return population, [job for _, job in pairs]


def mixture(population: Population, indices: Sequence[int], x: Tensor, config: Config) -> RegressionPrediction:
    """The predictive distribution of these networks together at `x` (N, F), in double precision and units of y."""
    parts = [_prediction(population, i, x, config) for i in indices]
    outputs = torch.cat([p.outputs for p in parts])
    return RegressionPrediction(outputs, torch.cat([_precision(p).expand_as(p.outputs) for p in parts]))


def _prediction(population: Population, index: int, x: Tensor, plan: Config) -> RegressionPrediction:
    own = population.members[index]
    net: nn.Module = population.network(index).double()
    inputs = (x.double() - population.x_mean[index]) / population.x_scale[index]
    precision = population.log_precision[index].double().exp()
    heads = population.likelihood == "heteroscedastic"
    p = predict_regression(
        net, inputs, precision="predicted" if heads else precision, output=split_heads if heads else None,
        n_passes=plan.n_test_passes if own.dropout or own.input_dropout else None, masks="shared", seed=own.seed,
        balanced=population.balanced, progress=False,
    )  # fmt: skip
    return p.rescaled(float(population.y_scale[index]), float(population.y_mean[index]))


def _precision(p: RegressionPrediction) -> Tensor:
    assert p.precision is not None  # noqa: S101 - every network here has one # nosec B101
    return p.precision
