"""Hyper-parameters of the regression networks, chosen on validation rows inside the training part of each split.

Every candidate of a split, for every alpha and every validation fold, is a member of one population. The grid and the
rows are the same for all alphas, and for MC dropout; a plain network has the candidates that differ without dropout.
Rows of the test part are never looked at.

    config = config_for(len(train), "boston")
    choices = search(X, y, [train], config, alphas=(0.0, 0.5), seeds=[0])     # {(0, 0.0): Choice(...), (0, 0.5): ...}
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bbalpha.training.feed import order
from bbalpha.training.population import Member, fit_population

_WIDE = ("protein", "year")  # 100 hidden units in the paper, else 50
_N_FOLDS = 5  # a fifth of the training part is validation


@dataclass(frozen=True)
class Choice:
    """Hyper-parameters of a network, and how they did on the validation rows.

    Attributes:
        dropout: The rate at hidden units.
        input_dropout: The rate at the inputs.
        length_scale: l of the prior, on standardised data.
        epochs: Times through the rows.
        learning_rate: Of Adam.
        validation_nll: Mean over the validation rows, in units of y; nan before the search.
    """

    dropout: float
    input_dropout: float
    length_scale: float
    epochs: int
    learning_rate: float = 0.01
    validation_nll: float = math.nan

    @property
    def group(self) -> tuple[int, bool]:
        """What the networks of a population have in common: epochs, and for speed whether inputs are dropped."""
        return self.epochs, self.input_dropout > 0

    def row(self) -> dict[str, Any]:
        """As keys of a result row."""
        return asdict(self)


@dataclass(frozen=True)
class Config:
    """How the networks of a data set are searched and trained.

    Attributes:
        hidden: Widths of the hidden layers.
        batch_size: Rows a step.
        candidates: Of the search.
        n_folds: How many of five validation folds a candidate is scored on.
        n_passes: K in training.
        n_validation_passes: K of the validation NLL.
        n_test_passes: K of the test scores.
        n_ensemble: Networks of an ensemble.
        n_together: Networks, about, of a population that searches: fewer do not use the products well, of more a run
            that is cut off loses more.
    """

    hidden: tuple[int, ...]
    batch_size: int
    candidates: tuple[Choice, ...]
    n_folds: int
    n_passes: int = 10
    n_validation_passes: int = 50
    n_test_passes: int = 100
    n_ensemble: int = 5
    n_together: int = 100

    @property
    def settings(self) -> dict[str, Any]:
        """All that JSON can hold of it: the candidates without their score, nan so far."""
        return asdict(self) | {"candidates": [astuple(candidate)[:-1] for candidate in self.candidates]}


# (rate at hidden units and at inputs in 256ths, length scale, steps, learning rate)
SMALL = (
    (2, 0, 0.3, 4000, 0.01), (5, 0, 0.3, 4000, 0.01), (13, 0, 0.3, 4000, 0.01), (5, 0, 0.3, 4000, 0.005),
    (13, 0, 0.3, 4000, 0.005), (5, 5, 0.3, 4000, 0.01), (13, 13, 0.3, 4000, 0.01), (13, 13, 0.3, 1200, 0.01),
    (13, 13, 3.0, 4000, 0.01), (26, 13, 1.0, 1200, 0.01), (26, 26, 1.0, 1200, 0.01), (51, 26, 1.0, 1200, 0.01),
)  # fmt: skip
LARGE = (
    (1, 0, 0.3, 10000, 0.02), (3, 0, 0.3, 10000, 0.02), (3, 0, 1.0, 10000, 0.02), (8, 0, 0.3, 10000, 0.02),
    (3, 0, 0.3, 10000, 0.005),
)  # fmt: skip
HUGE = ((1, 0, 0.3, 40000, 0.005), (3, 0, 0.3, 40000, 0.005), (1, 0, 1.0, 40000, 0.005))


def config_for(n_train: int, dataset: str, *, quick: bool = False) -> Config:
    """The config of a data set by its rows.

    Little noise wants small rates and many steps, much noise large rates or few. Small sets have more candidates, and
    two validation folds. Rates are multiples of 1/256, whose masks cost the least.

    >>> config = config_for(455, "boston")
    >>> config.hidden, config.batch_size, len(config.candidates)
    ((50,), 32, 12)
    """
    small, huge = n_train <= 2000, n_train > 20000
    batch_size = 32 if small else 128
    grid: Sequence[tuple[int, int, float, int, float]] = SMALL if small else HUGE if huge else LARGE
    if quick:
        grid = [(*c[:3], 60, c[4]) for c in grid[:2]]
    per_epoch = -(-n_train // batch_size)
    candidates = tuple(
        Choice(dropout / 256, inputs / 256, length_scale, max(1, round(steps / per_epoch)), learning_rate)
        for dropout, inputs, length_scale, steps, learning_rate in grid
    )
    hidden = (100,) if dataset in _WIDE else (50,)
    n_folds = 1 if quick or not small else 2
    return Config(hidden, batch_size, candidates, n_folds=n_folds, n_together=24 if huge else 100)


def plain(config: Config) -> Config:
    """The config without dropout, as deep ensembles have it: what is left of the candidates, one pass.

    >>> len(plain(config_for(455, "boston")).candidates)
    5
    """
    bare = dict.fromkeys(replace(c, dropout=0.0, input_dropout=0.0) for c in config.candidates)
    return replace(config, candidates=tuple(bare), n_passes=1, n_validation_passes=1)


def search(
    x: Any, y: Any, train: Sequence[Any], config: Config, *, alphas: Sequence[float], seeds: Sequence[int]
) -> dict[tuple[int, float], Choice]:
    """The candidate with the best validation NLL, for every training part (its index) and alpha.

    Args:
        x: Inputs (N, F) of the whole table.
        y: Targets (N,).
        train: Rows of each training part; no other row is looked at.
        config: What to try.
        alphas: Each is searched by itself.
        seeds: Of each training part: of its folds, initial weights and masks.

    >>> x = torch.randn(60, 2)
    >>> config = config_for(50, "toy", quick=True)
    >>> found = search(x, x[:, 0], [torch.arange(50)], config, alphas=(0.5,), seeds=[0])
    >>> found[0, 0.5].epochs
    30
    """
    totals: dict[tuple[int, float, Choice], list[Tensor]] = {}
    for group in dict.fromkeys(c.group for c in config.candidates):
        jobs = list(_jobs(train, config, [c for c in config.candidates if c.group == group], alphas, seeds))
        population = fit_population(
            x, y, [member for _, member, _ in jobs], epochs=group[0], hidden_layer_sizes=config.hidden,
            n_passes=config.n_passes, batch_size=config.batch_size, balanced=False,
        )  # fmt: skip
        held = population.log_likelihood(x, y, [rows for _, _, rows in jobs], n_passes=config.n_validation_passes)
        for (key, _, _), log_likelihood in zip(jobs, held, strict=True):
            totals.setdefault(key, []).append(log_likelihood.double())
    best: dict[tuple[int, float], Choice] = {}
    for (part, alpha, candidate), values in totals.items():
        nll = -float(torch.cat(values).mean())
        nll = nll if math.isfinite(nll) else math.inf
        if (part, alpha) not in best or nll < best[part, alpha].validation_nll:
            best[part, alpha] = replace(candidate, validation_nll=nll)
    return best


def _jobs(
    train: Sequence[Any], config: Config, candidates: Sequence[Choice], alphas: Sequence[float], seeds: Sequence[int]
) -> Iterator[tuple[tuple[int, float, Choice], Member, Tensor]]:
    """Key, network and validation rows; members that draw the same masks stand side by side."""
    rates = dict.fromkeys((c.dropout, c.input_dropout) for c in candidates)
    for part, (rows, seed) in enumerate(zip(train, seeds, strict=True)):
        folds = [validation_fold(rows, seed, fold) for fold in range(config.n_folds)]
        for rate in rates:
            for inner, held in folds:
                for candidate in candidates:
                    if (candidate.dropout, candidate.input_dropout) != rate:
                        continue
                    for alpha in alphas:
                        yield (part, alpha, candidate), member(candidate, inner, alpha, seed), held


def member(choice: Choice, rows: Any, alpha: float, seed: int) -> Member:
    """A network of a population with these hyper-parameters."""
    return Member(
        train=torch.as_tensor(np.asarray(rows)), alpha=alpha, dropout=choice.dropout, seed=seed,
        input_dropout=choice.input_dropout, length_scale=choice.length_scale,
        learning_rate=choice.learning_rate,
    )  # fmt: skip


def validation_fold(train: Any, seed: int, fold: int) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to validate on: fold `fold` of five, of the shuffled training part.

    >>> inner, held = validation_fold(range(100, 110), seed=0, fold=1)
    >>> len(inner), len(held), sorted([*inner.tolist(), *held.tolist()]) == list(range(100, 110))
    (8, 2, True)
    """
    rows = torch.as_tensor(np.asarray(train))
    rows = rows[order(len(rows), seed=seed, epoch=-1)]
    ends = [len(rows) * i // _N_FOLDS for i in range(_N_FOLDS + 1)]
    held = rows[ends[fold] : ends[fold + 1]]
    return torch.cat([rows[: ends[fold]], rows[ends[fold + 1] :]]), held
