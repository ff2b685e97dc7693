"""What an estimator does where it is told nothing: candidates, batch size, epochs, rates, networks, held-out rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bbalpha.checks import check_share
from bbalpha.estimators.race import EFFORTS, FEW_EPOCHS, MANY, Candidate, Effort
from bbalpha.training.bank import Activation, Likelihood
from bbalpha.training.feed import order
from bbalpha.training.population import Member, Population, fit_population

Array = NDArray[Any]

# at hidden units and inputs, tried on few rows; masks of multiples of 1/256 cost the least
RATES = tuple((p / 256, q / 256) for p, q in ((13, 13), (13, 0), (5, 0), (1, 0)))
RATE_OF_MANY = 5 / 256
N_OF_FEW = 5  # networks where rows are few; one of many rows takes as long
# what a race tries: smooth units are best most often, by far on smooth functions, and corners want the others
RACE_RATES = tuple((p / 256, q / 256) for p, q in ((51, 26), (13, 13), (5, 0), (1, 0)))
# widths, and units that begin smooth, with bends, or with corners
Shape = tuple[tuple[int, ...], Activation, float]
UNITS: tuple[tuple[Activation, float], ...] = (("silu", 1.0), ("silu", 2.0), ("relu", 1.0))
SHAPES: tuple[Shape, ...] = tuple(((100, 100), *unit) for unit in UNITS)
LINEAR: Shape = ((), "relu", 1.0)
LIKELIHOODS_OF: dict[str, tuple[Likelihood, ...]] = {
    "auto": ("heteroscedastic", "gaussian", "student"), "constant": ("gaussian",),
    "heteroscedastic": ("heteroscedastic",), "student": ("student",),
}  # fmt: skip
CLASS_SHAPES: tuple[Shape, ...] = (LINEAR, ((50,), "silu", 1.0), *SHAPES)
CLASS_RATES = tuple((p / 256, q / 256) for p, q in ((13, 0), (51, 13), (128, 51)))


def is_auto(value: Any) -> bool:
    """Whether a setting is left to the estimator."""
    return value is None or (isinstance(value, str) and value == "auto")


def effort_of(budget: Any) -> Effort:
    """The work that a named budget buys."""
    return EFFORTS[budget if isinstance(budget, str) else "standard"]


def regression_grid(settings: Any, skewed: bool) -> list[Candidate]:
    """What a regressor tries first: architectures, rates; the logarithm of `skewed` targets too."""
    kinds = LIKELIHOODS_OF[settings.noise]
    kinds = kinds[:1] if effort_of(settings.budget).heat_steps else kinds  # the others are tried with the best
    found = [
        Candidate(hidden, kind, p, q, alpha, scale, log, *unit)
        for (hidden, *unit), kind, (p, q), alpha, scale, log in product(
            _shapes(settings, (LINEAR, *SHAPES)),
            kinds,
            _pairs(settings, RACE_RATES),
            _alphas(settings),
            _scales(settings),
            (False, True)[: 1 + skewed],
        )
        if not (log and kind == "student") and (q or (p and hidden))
    ]
    return _fewer(found, settings)


def classification_grid(settings: Any) -> list[Candidate]:
    """What a classifier tries: architectures, a linear one too, and rates."""
    found = [
        Candidate(hidden, "categorical", p, q, alpha, scale, False, *unit)
        for (hidden, *unit), (p, q), alpha, scale in product(
            _shapes(settings, CLASS_SHAPES), _pairs(settings, CLASS_RATES), _alphas(settings), _scales(settings)
        )
        if q or (p and hidden)
    ]
    return _fewer(found, settings)


def _fewer(found: list[Candidate], settings: Any) -> list[Candidate]:
    """All of them, or, where no heats are run, the few that do well most often."""
    if not found:
        raise ValueError("`dropout` or `input_dropout` must be above 0, else all passes are equal; got 0.")
    effort = effort_of(settings.budget)
    if effort.heat_steps or len(found) <= effort.finalists:
        return found
    return sorted(found, key=promise)[: effort.finalists]


def promise(c: Candidate) -> tuple[int, ...]:
    """Small for a candidate that is tried first, where few are."""
    firm: list[Any] = [(2, *unit, "heteroscedastic", RACE_RATES[2]) for unit in UNITS]
    firm += [(2, *UNITS[0], "heteroscedastic", RACE_RATES[1])]
    firm += [(0, "relu", 1.0, "categorical", CLASS_RATES[1])]
    firm += [(2, *UNITS[0], "categorical", pair) for pair in CLASS_RATES]
    kind = (len(c.hidden_layer_sizes), c.activation, c.spread, c.likelihood, (c.dropout, c.input_dropout))
    return (firm.index(kind) if kind in firm else len(firm), int(c.log_target))


def _shapes(settings: Any, shapes: Sequence[Shape]) -> Sequence[Any]:
    """Widths and units; widths that are given with each kind of unit."""
    if is_auto(settings.hidden_layer_sizes):
        return shapes
    hidden = tuple(settings.hidden_layer_sizes)
    return [(hidden, *unit) for unit in (UNITS if hidden else UNITS[2:])]


def _pairs(settings: Any, pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Rates at hidden units and inputs, those that are given put in."""
    hidden, inputs = settings.dropout, settings.input_dropout
    if not is_auto(hidden):
        pairs = [(hidden, hidden), (hidden, 0.0)]
    return list(dict.fromkeys((p, q if is_auto(inputs) else inputs) for p, q in pairs))


def _alphas(settings: Any) -> tuple[float, ...]:
    return (0.0, 0.5, 1.0) if is_auto(settings.alpha) else (settings.alpha,)


def _scales(settings: Any) -> tuple[float, ...]:
    return (1.0, 5.0) if is_auto(settings.length_scale) else (settings.length_scale,)


def duration(settings: Any, n_rows: int) -> tuple[int, int, int | None]:
    """Batch size, epochs and patience of a training on `n_rows` rows; what an estimator has as None is chosen here.

    Few rows want small batches, as many small steps are then needed. Where rows are held out to pick the best epoch
    training may be long; where none are, few rows are best trained for about 2,000 steps.
    """
    held = n_held_out(settings, n_rows)
    batch_size, epochs, patience = settings.batch_size, settings.epochs, settings.patience
    if batch_size is None:
        batch_size = 32 if n_rows <= MANY else 128
    if epochs is None:
        steps = 8000 if n_rows > MANY else 4000 if held else 2000
        epochs = int(np.clip(round(steps * batch_size / n_rows), 40, 500))
    if patience is None:
        patience = max(1 if settings.epochs is None else FEW_EPOCHS, epochs // 5)
    return batch_size, epochs, patience if held else None


def default_input_dropout(n_rows: int, dropout: float) -> float:
    """The rate at the inputs: that of the hidden units for few rows, 0 for many."""
    return dropout if n_rows <= MANY else 0.0


def held_out_share(settings: Any, n_rows: int) -> float:
    """The share of the rows that early stopping looks at."""
    if settings.validation_fraction is None:
        return 0.2 if n_rows <= MANY else 0.1
    return check_share("validation_fraction", settings.validation_fraction)


def n_held_out(settings: Any, n_rows: int) -> int:
    """Rows that early stopping looks at; none where they would be too few to tell anything."""
    held = min(round(n_rows * held_out_share(settings, n_rows)), n_rows - 1)
    return held if held >= 5 else 0


def candidates(settings: Any, rows: Array, seed: int, *, alpha: float, groups: Array | None = None) -> Array:
    """The networks that an estimator of these settings chooses from, as members (networks, pairs of rates).

    There is one pair unless `dropout` is None and rows are few: many rows tell the rates less from each other, and
    trying them takes longer; without rows held out nothing tells. Each network has a seed and held-out rows of its own.
    """
    few, held = len(rows) <= MANY, n_held_out(settings, len(rows))
    n = settings.n_ensemble
    if n is None:
        n = N_OF_FEW if few else 1
    if not is_auto(settings.dropout):
        pairs: Sequence[tuple[float, float]] = [(settings.dropout, default_input_dropout(len(rows), settings.dropout))]
    else:
        pairs = [(RATE_OF_MANY, 0.0)] if not few else RATES if held else RATES[:1]
    rates = dict.fromkeys((p, q if is_auto(settings.input_dropout) else settings.input_dropout) for p, q in pairs)
    if settings.module is None:
        rates = dict.fromkeys(random_rates(settings, list(rates)))
    facts = {"alpha": alpha, "length_scale": settings.length_scale}
    found = np.empty((n, len(rates)), dtype=object)
    for i, j in np.ndindex(found.shape):
        p, q = list(rates)[j]
        one = member(settings, rows, seed + i, facts | {"dropout": p}, groups)
        found[i, j] = replace(one, input_dropout=q)
    return found


def random_rates(settings: Any, rates: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pairs of rates, at hidden units and inputs, under which our own networks are random; none is an error."""
    found = [(p, q) for p, q in rates if q or (p and settings.hidden_layer_sizes)]
    if not found:
        raise ValueError(
            f"`dropout` or `input_dropout` must be above 0, else all passes are equal; got {rates[0][0]} at the units "
            f"of {len(settings.hidden_layer_sizes)} hidden layers and {rates[0][1]} at the inputs."
        )
    return found


def train_together(
    settings: Any, x: Any, y: Any, members: Sequence[Member], likelihood: Likelihood, weight: Array | None = None, *,
    standardise: bool,
) -> Population:  # fmt: skip
    """The members, trained at once as an estimator of these settings would train each."""
    n_rows = max(len(m.train) + (0 if m.validation is None else len(m.validation)) for m in members)
    batch_size, epochs, patience = duration(settings, n_rows)
    return fit_population(
        x, y, members, epochs=epochs, hidden_layer_sizes=settings.hidden_layer_sizes, likelihood=likelihood,
        n_passes=settings.n_passes, batch_size=batch_size, patience=patience, sample_weight=weight,
        balanced=settings.balanced, standardise=standardise, progress=bool(getattr(settings, "verbose", False)),
    )  # fmt: skip


def best_candidate(nll: Tensor, shape: tuple[int, ...]) -> list[int]:
    """Where, in a population of `candidates` of that shape, the networks stand whose held-out rows do best in the mean.

    Args:
        nll: Of the held-out rows after every epoch (E, M).
        shape: Networks, pairs of rates.

    >>> best_candidate(torch.tensor([[3.0, 2.0, 1.0, 5.0], [4.0, 1.0, 1.0, 2.0]]), (2, 2))
    [1, 3]
    """
    best = nll.nan_to_num(nan=torch.inf).amin(0).view(shape) if len(nll) else torch.zeros(shape)
    return (torch.arange(shape[0]) * shape[1] + best.mean(0).argmin()).tolist()


def held_out_rows(settings: Any, rows: Array, seed: int, groups: Array | None) -> tuple[Tensor, Tensor | None]:
    """The rows that a network trains on and those that it holds out, whole groups of them; None holds out none."""
    shuffled = torch.as_tensor(rows)[order(len(rows), seed=seed, epoch=-1)]
    held = n_held_out(settings, len(rows))
    if not held:
        return torch.as_tensor(rows), None
    if groups is None:
        return shuffled[held:], shuffled[:held]
    first = groups[shuffled.numpy()]
    chosen = list(dict.fromkeys(first.tolist()))  # groups in a random order
    sizes = np.cumsum([(first == g).sum() for g in chosen])
    n_groups = min(int(np.searchsorted(sizes, held)) + 1, len(chosen) - 1)
    inside = torch.as_tensor(np.isin(first, chosen[:n_groups]))
    return shuffled[~inside], shuffled[inside] if n_groups else None


def member(settings: Any, rows: Array, seed: int, candidate: Mapping[str, Any], groups: Array | None = None) -> Member:
    """The network that an estimator of these settings would train on `rows`, as a member of a population.

    Args:
        settings: An estimator: its `input_dropout`, `learning_rate` and `validation_fraction` are taken.
        rows: Indices of its training rows; early stopping looks at those of them that `fit` would hold out.
        seed: The estimator's.
        candidate: alpha, dropout and length_scale.
        groups: Of all rows of the table: those of one are held out together.
    """
    train, held = held_out_rows(settings, rows, seed, groups)
    rate = settings.input_dropout
    return Member(
        train=train, validation=held,
        input_dropout=default_input_dropout(len(rows), candidate["dropout"]) if is_auto(rate) else rate,
        learning_rate=settings.learning_rate, seed=seed, **candidate,
    )  # fmt: skip
