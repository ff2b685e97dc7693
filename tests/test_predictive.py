"""The laws of the predictive distribution, from passes that are known."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bbalpha import predictive
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction


def mixture(K=7, N=6, D=2, spread=3.0):
    outputs = spread * torch.randn(K, N, D, dtype=torch.float64)
    return RegressionPrediction(outputs, torch.rand(K, N, D, dtype=torch.float64) * 4 + 0.1)


# ------------------------------------------------------------------------------ regression


def test_variance_splits_into_epistemic_and_aleatoric():
    p = mixture()
    assert torch.allclose(p.std**2, p.epistemic_std**2 + p.aleatoric_std**2)
    second_moment = (p.outputs**2 + 1 / p.precision).mean(0)
    assert torch.allclose(p.std**2, second_moment - p.mean**2)


def test_log_prob_is_that_of_the_mixture_of_rows():
    p, y = mixture(), torch.randn(6, 2, dtype=torch.float64)
    each = scipy.stats.norm.logpdf(y, p.outputs, p.precision.rsqrt()).sum(-1)  # outputs of a row belong together
    expected = scipy.special.logsumexp(each, 0) - math.log(7)
    assert np.allclose(p.log_prob(y), expected)


def test_log_prob_far_away_is_finite():
    p = RegressionPrediction(torch.tensor([[0.0], [1.0]]), torch.tensor(1e6))
    assert p.log_prob(torch.tensor([100.0])).isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    means=st.lists(st.floats(-50, 50), min_size=1, max_size=6),
    log_std=st.floats(-6, 3),
    q=st.one_of(st.floats(1e-6, 1 - 1e-6), st.sampled_from([0.05, 0.5, 0.95])),
)
def test_quantile_inverts_the_cdf(means, log_std, q):
    outputs = torch.tensor(means, dtype=torch.float64)[:, None]
    p = RegressionPrediction(outputs, torch.tensor(math.exp(-2 * log_std), dtype=torch.float64))
    x = float(p.quantile(q))
    std = math.exp(log_std)
    below, above = (np.mean(scipy.stats.norm.cdf(x + d, means, std)) for d in (-1e-7 * std, 1e-7 * std))
    assert below - 1e-9 <= q <= above + 1e-9


@pytest.mark.parametrize("q", [1e-9, 1 - 1e-9])
def test_quantile_keeps_its_digits_in_both_tails(q):
    p = RegressionPrediction(torch.zeros(3, 1, dtype=torch.float64), torch.ones((), dtype=torch.float64))
    assert float(p.quantile(q)) == pytest.approx(scipy.stats.norm.ppf(q), rel=1e-6)


def test_quantiles_and_interval_match_a_million_draws():
    p = mixture(K=5, N=2, D=1)
    n = 1_000_000
    draws = p.sample(np.int64(n), seed=1)
    for q in (0.05, 0.5, 0.9):
        x = p.quantile(q)
        h = 0.05
        density = (p.cdf(x + h) - p.cdf(x - h)) / (2 * h)
        error = math.sqrt(q * (1 - q) / n) / density  # standard error of an empirical quantile
        empirical = torch.as_tensor(np.quantile(draws.numpy(), q, axis=0))
        assert ((empirical - x).abs() < 5 * error).all()
    low, high = p.interval(np.float32(0.8))
    inside = ((draws >= low) & (draws <= high)).double().mean(0)
    assert torch.allclose(inside, torch.full_like(inside, 0.8), atol=5 * math.sqrt(0.16 / n))


def test_draws_have_the_moments_and_keep_the_outputs_of_a_row_together():
    p = RegressionPrediction(torch.tensor([[[1.0, 1.0]], [[-1.0, -1.0]]]), torch.tensor([100.0, 1.0]))
    draws = p.sample(200_000, seed=0)
    assert draws.shape == (200_000, 1, 2)
    assert torch.allclose(draws.mean(0), p.mean, atol=0.02)
    assert torch.allclose(draws.std(0), p.std, atol=0.02)
    covariance = float((draws[:, 0, 0] * draws[:, 0, 1]).mean())  # the passes make both outputs 1 or both -1
    assert covariance == pytest.approx(1.0, abs=0.03)
    assert torch.equal(p.sample(3, seed=5), p.sample(3, seed=5))


def test_quantiles_of_passes_without_noise():
    p = RegressionPrediction(torch.arange(5.0)[:, None])
    assert p.quantile([0.25, 0.5]).tolist() == [[1.0], [2.0]]
    assert p.cdf(torch.tensor([2.0])).tolist() == pytest.approx([0.6])
    assert p.aleatoric_std.tolist() == [0.0]
    assert torch.equal(p.std, p.epistemic_std)
    assert set(p.sample(50, seed=0).flatten().tolist()) <= set(range(5))


def test_blocks_of_rows_change_nothing(monkeypatch):
    p, y = mixture(N=20), torch.randn(20, 2, dtype=torch.float64)
    whole = [p.log_prob(y), p.cdf(y), p.quantile([0.1, 0.7])]
    monkeypatch.setattr(predictive, "_BLOCK", 50)
    for a, b in zip(whole, [p.log_prob(y), p.cdf(y), p.quantile([0.1, 0.7])], strict=True):
        assert torch.allclose(a, b, rtol=1e-9)


def test_shapes_follow_the_outputs_and_the_shares():
    p = mixture(N=3)
    assert p.quantile(0.5).shape == (3, 2)
    assert p.quantile([0.1, 0.5, 0.9]).shape == (3, 3, 2)
    assert p.log_prob(torch.zeros(3, 2)).shape == (3,)
    one = RegressionPrediction(torch.randn(4, 3), torch.tensor(1.0))
    assert one.log_prob(torch.zeros(3)).shape == one.mean.shape == (3,)
    empty = RegressionPrediction(torch.randn(4, 0, 1), torch.tensor(1.0))
    assert empty.quantile([0.1, 0.9]).shape == (2, 0, 1)


def test_rescaled_is_the_prediction_of_the_rescaled_target():
    p, y = mixture(D=1), torch.randn(6, 1, dtype=torch.float64)
    scaled = p.rescaled(3.0, -2.0)
    assert torch.allclose(scaled.log_prob(3 * y - 2), p.log_prob(y) - math.log(3))
    assert torch.allclose(scaled.quantile(0.3), 3 * p.quantile(0.3) - 2)


# ------------------------------------------------------------------------------ classification


def classification(probs):
    """A prediction from the probabilities of the passes (K, N, C)."""
    probs = torch.as_tensor(probs)
    votes = torch.nn.functional.one_hot(probs.argmax(-1), probs.shape[-1]).float().mean(0)
    entropy = -torch.xlogy(probs, probs).sum(-1).mean(0)
    return ClassificationPrediction(probs.mean(0).log(), entropy, votes, len(probs))


def test_certain_passes_that_disagree_are_all_mutual_information():
    p = classification([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]], [[0.0, 1.0]]])
    h = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert float(p.entropy) == pytest.approx(h)
    assert float(p.mutual_information) == pytest.approx(h)
    assert float(p.expected_entropy) == 0.0
    assert float(p.variation_ratio) == 0.25
    assert p.label.tolist() == [1]


def test_passes_that_agree_have_no_mutual_information():
    p = classification([[[0.5, 0.5, 0.0]]] * 3)
    assert float(p.entropy) == pytest.approx(math.log(2))
    assert float(p.mutual_information) == pytest.approx(0.0, abs=1e-6)
    assert p.mutual_information >= 0


def test_prediction_sets_are_the_smallest_that_hold_enough():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.95, 0.0, 0.0]])
    p = classification(probs[None].repeat(2, 1, 1).double())
    for coverage, sizes in ((0.4, [1, 1]), (0.6, [2, 1]), (0.9, [3, 1]), (0.97, [4, 2])):
        inside = p.prediction_set(coverage)
        assert inside.sum(1).tolist() == sizes
        assert bool(((p.probs * inside).sum(1) >= coverage).all())
        assert bool(inside.gather(1, p.label[:, None]).all())


# ------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("coverage", [0, 1, -0.1, 1.5, float("nan"), "90%"])
def test_coverage_lies_between_0_and_1(coverage):
    with pytest.raises(ValueError, match="`coverage` must lie between 0 and 1"):
        mixture().interval(coverage)
    with pytest.raises(ValueError, match="`coverage` must lie between 0 and 1"):
        classification([[[0.5, 0.5]]] * 2).prediction_set(coverage)


@pytest.mark.parametrize("name", ["epistemic_std", "std"])
def test_one_pass_has_no_spread(name):
    p = RegressionPrediction(torch.zeros(1, 3), torch.tensor(1.0))
    with pytest.raises(ValueError, match="at least 2 passes"):
        getattr(p, name)
    assert p.interval(0.9)[0].shape == (3,)  # of the noise alone
    with pytest.raises(ValueError, match="at least 2 passes"):
        RegressionPrediction(torch.zeros(1, 3)).quantile(0.5)
    one = classification([[[0.5, 0.5]]])
    for attribute in ("mutual_information", "variation_ratio"):
        with pytest.raises(ValueError, match="at least 2 passes"):
            getattr(one, attribute)
    assert one.entropy.isfinite().all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: RegressionPrediction(torch.zeros(2, 3)).log_prob(torch.zeros(3)), ValueError, "precision=None"),
        (lambda: mixture().log_prob(torch.zeros(6)), ValueError, r"\(6, 2\); got \(6,\)"),
        (lambda: mixture().log_prob(torch.full((6, 2), math.nan)), ValueError, "not be nan"),
        (lambda: mixture().quantile(1.0), ValueError, "`q`"),
        (lambda: mixture().sample(0), ValueError, "`n`"),
        (lambda: mixture().rescaled(-1.0), ValueError, "`scale`"),
        (
            lambda: RegressionPrediction(torch.zeros(2, 3), torch.tensor(-1.0)),
            ValueError,
            "positive and finite; got -1",
        ),
        (lambda: RegressionPrediction(torch.zeros(2, 3), torch.ones(4)), ValueError, "broadcast"),
        (lambda: classification([[[0.5, 0.5]]]).log_prob(torch.tensor([2])), ValueError, "0 to 1; got 2"),
        (lambda: classification([[[0.5, 0.5]]]).log_prob(torch.tensor([0.0])), TypeError, "integer"),
        (lambda: classification([[[0.5, 0.5]]]).log_prob(torch.tensor([0, 1])), ValueError, "shape of the labels"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_where_no_passes_were_asked_for_the_spread_is_0():
    p = RegressionPrediction(torch.arange(3.0)[None], torch.tensor(4.0), drawn=False).rescaled(2.0)
    assert torch.equal(p.epistemic_std, torch.zeros(3))
    assert torch.equal(p.std, torch.ones(3))
    point = RegressionPrediction(torch.arange(3.0)[None], drawn=False)
    assert torch.equal(point.quantile(0.1), torch.arange(3.0))
    one = ClassificationPrediction(torch.tensor([[0.3, 0.7]]).log(), torch.tensor([0.6]), torch.tensor([[0.0, 1.0]]), 1)
    for name in ("mutual_information", "variation_ratio"):
        assert torch.equal(getattr(replace(one, drawn=False), name), torch.zeros(1))


def test_a_prediction_moves_whole_to_another_device():
    p = ClassificationPrediction(torch.zeros(3, 2), torch.ones(3), torch.ones(3, 2), 5, used=torch.ones(3))
    moved = p.to("meta")
    assert all(t.device.type == "meta" for t in vars(moved).values() if isinstance(t, torch.Tensor))
    assert (moved.n_passes, moved.class_axis) == (5, 1)
    q = RegressionPrediction(torch.ones(2, 3), torch.tensor(4.0)).to("cpu")
    assert torch.equal(q.aleatoric_std, torch.full((3,), 0.5))
