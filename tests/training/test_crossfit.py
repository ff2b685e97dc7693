import math

import pytest
import torch

from bbalpha.training.crossfit import Fitted, Patience, deal, fitted, judge, standard_error


def as_fitted(rows, folds):
    """A candidate without a number of its own."""
    counts = folds.bincount()
    sums = torch.zeros(len(counts), dtype=rows.dtype).index_add_(0, folds, rows)
    return Fitted(1.0, float(rows.mean()), rows, (rows.sum() - sums) / (len(rows) - counts))


def trial(gains, seed):
    """Candidates (C, N) that gain so much on each row of a plain network that scores 0."""
    folds = deal(gains.shape[1], seed=seed)
    return judge(as_fitted(torch.zeros_like(gains[0]), folds), [as_fitted(-g, folds) for g in gains], folds, seed=seed)


def draws(n_candidates, n_rows, seed, shared=0.0):
    g = torch.Generator().manual_seed(seed)
    own = torch.randn(n_candidates, n_rows, dtype=torch.float64, generator=g)
    return own + shared * torch.randn(1, n_rows, dtype=torch.float64, generator=g)


def test_folds_are_equal_and_follow_the_seed():
    a = deal(103, seed=1)
    assert a.bincount().tolist() == [11, 11, 11] + [10] * 7
    assert torch.equal(a, deal(103, seed=1))
    assert not torch.equal(a, deal(103, seed=2))


@pytest.mark.parametrize("true", [0.02, 1.0, 30.0])
def test_the_number_is_that_of_maximum_likelihood(true):
    y = math.sqrt(true) * torch.randn(500, dtype=torch.float64)
    found = fitted(lambda v: 0.5 * (y.square() / v + math.log(2 * math.pi * v)), 1.0, deal(500, seed=0), reach=20)
    best = float(y.square().mean())
    assert abs(math.log(found.number / best)) < 0.03
    assert found.nll - 0.5 * (1 + math.log(2 * math.pi * best)) < 1e-3


def test_rows_are_scored_with_numbers_that_they_had_no_part_in():
    folds = deal(40, seed=0)
    y = torch.randn(40, dtype=torch.float64)
    y[folds == 3] = 50.0  # only the numbers of the other folds may know

    def nll(v):
        return 0.5 * (y.square() / v + math.log(2 * math.pi * v))

    found = fitted(nll, 1.0, folds, reach=20)
    rest = y[folds != 3].square().mean()
    assert torch.allclose(found.rows[folds == 3], nll(float(rest))[folds == 3], rtol=0.05)
    assert float(found.without[3]) == pytest.approx(float(nll(float(rest))[folds != 3].mean()), abs=2e-3)
    assert float(found.rows.mean()) > found.nll  # as everybody's own number would not be


def test_the_search_ends_where_it_is_told_to():
    y = 1e4 * torch.ones(40, dtype=torch.float64)
    found = fitted(lambda v: 0.5 * (y.square() / v + math.log(v)), 1.0, deal(40, seed=0), reach=3)
    assert found.number == pytest.approx(math.exp(1.5))


@pytest.mark.parametrize(("n_candidates", "shared"), [(1, 0.0), (12, 0.0), (12, 2.0), (60, 2.0)])
def test_of_candidates_that_are_no_better_hardly_any_passes_however_many_there_are(n_candidates, shared):
    found = [trial(draws(n_candidates, 100, seed, shared), seed) for seed in range(60)]
    assert sum(bool(v.passes.any()) for v in found) <= 5  # 1.5 expected
    gains = torch.tensor([v.gain for v in found])
    assert abs(float(gains.mean())) < 4 * standard_error(gains)  # no winner's curse


def test_the_best_of_many_would_seem_better_than_it_is():
    naive = torch.stack([draws(12, 100, seed).mean(1).amax() for seed in range(100)])
    assert float(naive.mean()) > 10 * standard_error(naive)  # what the gain of a verdict is free of


def test_a_candidate_that_is_better_passes_and_its_gain_is_told():
    gains = draws(12, 400, 0) - 0.5
    gains[5] += 0.9
    verdict = trial(gains, 0)
    assert verdict.passes.nonzero().tolist() == [[5]]
    assert verdict.gain == pytest.approx(float(gains[5].mean()))
    assert verdict.error == pytest.approx(standard_error(gains[5]))


def test_the_margin_grows_with_candidates_but_not_with_hopeless_ones():
    gains = draws(30, 200, 0)
    few, many = trial(gains[:1], 0).margin, trial(gains, 0).margin
    assert 1.8 < few < 2.1 < many
    assert trial(torch.cat((gains[:1], gains[1:] - 3)), 0).margin == pytest.approx(few)
    assert trial(gains[:1].repeat(30, 1), 0).margin == pytest.approx(few)  # copies of one are one


def test_nothing_that_loses_on_the_rows_themselves_passes():
    folds = deal(100, seed=0)
    plain = as_fitted(torch.zeros(100, dtype=torch.float64), folds)
    better = as_fitted(torch.full((100,), -1.0, dtype=torch.float64), folds)
    assert judge(plain, [better], folds, seed=0).passes.all()
    worse = Fitted(1.0, 0.5, better.rows, better.without)  # with one number for all rows
    assert not judge(plain, [worse], folds, seed=0).passes.any()


def test_candidates_like_the_plain_network_do_not_pass():
    verdict = trial(torch.zeros(3, 50, dtype=torch.float64), 0)
    assert not verdict.passes.any()
    assert verdict.gain == verdict.error == 0


def test_patience_waits_for_every_fold():
    patience = Patience(2)
    scores = ([3.0, 3.0], [2.0, 4.0], [4.0, 2.0], [4.0, 4.0], [2.0, 2.0])
    assert [patience.out(torch.tensor(s)) for s in scores] == [False, False, False, False, True]
