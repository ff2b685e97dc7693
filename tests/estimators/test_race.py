"""The parts of the automatic choice: folds, weights, records that come twice, columns of wide tables."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor, choices, dealing
from bbalpha.estimators.dealing import deal, same_records
from bbalpha.estimators.mixing import conformal_level, stacked
from bbalpha.estimators.race import EFFORTS, Candidate
from bbalpha.training.bank import Bank
from bbalpha.training.population import Member, fit_population


@given(n=st.integers(4, 60), n_folds=st.integers(2, 4), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_folds_hold_out_every_row_once(n: int, n_folds: int, seed: int) -> None:
    parts = deal(n, n_folds, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(groups=st.lists(st.integers(0, 6), min_size=8, max_size=60), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_groups_are_held_out_whole(groups: list[int], seed: int) -> None:
    names = np.array(groups)
    parts = deal(len(names), 3, seed, names)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(names)))
    assert sum(len(np.unique(names[p])) for p in parts) == len(np.unique(names))


def test_many_rows_hold_out_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "MOST_HELD", 10)
    parts = deal(100, 5, 0)
    assert [len(p) for p in parts] == [10] * 5
    assert len(np.unique(np.concatenate(parts))) == 50


@given(seed=st.integers(0, 999), C=st.integers(2, 5))
@settings(max_examples=30, deadline=None)
def test_the_mixture_is_likelier_than_any_part(seed: int, C: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(C, 50)) + rng.normal(size=(C, 1))
    weights = stacked(values, prior=0.0, least=0.0)
    assert weights.sum() == pytest.approx(1)
    mixed = np.log(weights @ np.exp(values)).mean()
    assert mixed >= values.mean(1).max() - 1e-3
    assert mixed >= np.log(np.exp(values).mean(0)).mean() - 1e-9


def test_weights_of_rows_count_in_the_mixture() -> None:
    values = np.log([[0.9, 0.9, 0.1], [0.1, 0.1, 0.9]])
    assert stacked(values, np.array([1.0, 0.0, 5.0]), prior=0.0)[1] > 0.7 > stacked(values, prior=0.0)[1]


def test_few_rows_leave_the_mixture_near_even_and_many_do_not() -> None:
    values = np.log([[0.9, 0.8], [0.3, 0.2]])
    assert 0.4 < stacked(values)[1] < 0.5
    assert stacked(np.repeat(values, 100, 1)).tolist() == [1.0, 0.0]


def test_what_diverged_gets_no_weight() -> None:
    values = np.array([[np.nan, np.nan], [-1.0, -2.0]])
    assert stacked(values).tolist() == [0.0, 1.0]


def test_same_records() -> None:
    x = np.repeat(np.arange(12.0)[:, None], 2, 0)
    x[0] = -0.0
    found = same_records(x, np.ones(24))
    assert found is not None
    assert (found[::2] == found[1::2]).all()
    assert len(np.unique(found)) == 12
    assert same_records(np.arange(24.0)[:, None]) is None
    assert same_records(np.repeat([[1.0], [2.0]], 12, 0)) is None  # two records alone cannot be held out
    assert same_records(x.astype(np.float32), np.ones(24)) is not None


def test_a_level_that_too_few_rows_reach_is_infinite() -> None:
    scores = np.random.default_rng(0).random((99, 1))
    assert conformal_level(scores, 0.9)[0] == np.sort(scores[:, 0])[89]
    assert np.isinf(conformal_level(scores[:8], 0.9)[0])


def test_columns_of_a_fold_do_not_look_at_its_rows() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 400)), torch.as_tensor(rng.normal(size=(120, 1)))
    folds = [np.arange(60), np.arange(60, 120)]
    x[folds[0], 5] = y[folds[0], 0]  # a leak: the column knows the answers of the rows held out
    clean = x.copy()
    clean[folds[0]] = 0.0
    leaky, honest = (BBAlphaRegressor()._columns(torch.as_tensor(t), y, folds) for t in (x, clean))
    assert leaky[0].tolist() == honest[0].tolist()
    assert leaky[1][0] == 5  # those rows themselves tell


def test_members_look_at_their_columns_alone() -> None:
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    members = [Member(train=range(60), columns=[1, 4], seed=1), Member(train=range(60), seed=1)]
    population = fit_population(x, x[:, 1], members, epochs=3, hidden_layer_sizes=(8,))
    few, all_ = (population.network(i)[0].weight for i in range(2))
    assert (few[:, [0, 2, 3, 5]] == 0).all()
    assert (few[:, [1, 4]] != 0).all()
    assert (all_ != 0).all()
    assert Bank.of(population).mask() is not None


def test_a_longer_budget_does_more() -> None:
    base = EFFORTS["standard"]
    half, double = base.scaled(0.5), base.scaled(2.0)
    assert half.final_steps < base.final_steps < double.final_steps
    assert half.heat_steps < base.heat_steps < double.heat_steps
    assert half.finalists <= base.finalists <= double.finalists


def test_candidates_tell_what_they_are() -> None:
    told = str(Candidate((100, 100), "student", 0.05, 0.0, log_target=False))
    assert told == "100 x 100 relu, Student t, dropout 0.050 / 0.000, alpha 0.5, l 1"
    assert str(Candidate((), "categorical", 0.0, 0.2)).startswith("linear, classes")


def rare_flags(rng: np.random.Generator) -> np.ndarray:
    """A column of numbers and five that are 1 in one row of twenty."""
    return np.column_stack((rng.normal(size=240), rng.random((240, 5)) < 0.05)).astype(float)


def long_tails(rng: np.random.Generator) -> np.ndarray:
    return np.exp(3 * rng.normal(size=(240, 2)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("table", [rare_flags, long_tails])
@pytest.mark.parametrize("kind", [BBAlphaRegressor, BBAlphaClassifier])
def test_networks_predict_what_training_measured(kind, table, weighted, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    X = table(rng)
    score = np.log1p(abs(X)) @ np.arange(1, X.shape[1] + 1)
    y = score > np.median(score) if kind is BBAlphaClassifier else score + 0.1 * rng.normal(size=len(X))
    weight = rng.uniform(0.5, 2, len(X)) if weighted else None
    pairs, race = [], kind._race

    def watched(self, x, targets, shifts, own_weight, *rest):
        experts = race(self, x, targets, shifts, own_weight, *rest)
        for expert in experts:
            found = self._score(expert, x, targets)
            share = None if own_weight is None else own_weight[expert.held]
            pairs.append((np.nanmin(expert.curve), -np.average(found, weights=share)))
        return experts

    monkeypatch.setattr(kind, "_race", watched)
    kind(budget="quick", random_state=0, epochs=10).fit(X, y, weight)
    assert len(pairs) > 2
    for measured, predicted in pairs:
        assert predicted == pytest.approx(measured, abs=0.1)


def test_networks_of_one_kind_predict_what_training_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    X = rare_flags(rng)
    populations, train = [], choices.fit_population

    def watched(*args, **kwargs):
        populations.append(train(*args, **kwargs))
        return populations[-1]

    monkeypatch.setattr(choices, "fit_population", watched)
    y = X[:, 1:].sum(1) > 0
    model = BBAlphaClassifier(hidden_layer_sizes=(20,), epochs=30, random_state=0).fit(X, y)
    (population,) = populations
    rates = model.dropout_, model.input_dropout_
    chosen = [i for i, m in enumerate(population.members) if (m.dropout, m.input_dropout) == rates]
    for i, network, curve in zip(chosen, model.networks_, model.validation_curves_, strict=True):
        held = population.members[i].validation
        part = model._part(network, model._standardised(X)[held], 100, 0)
        assert -float(part.log_prob(torch.as_tensor(y[held]).long()).mean()) == pytest.approx(curve.min(), abs=0.05)
