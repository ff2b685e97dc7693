"""Every metric against an implementation that is not ours, and against what it must do by definition."""

import inspect

import numpy as np
import pytest
import scipy.stats
import scoringrules
import sklearn.metrics
import torch
import torchmetrics.functional.classification as tm
from hypothesis import given, settings
from hypothesis import strategies as st

from bbalpha import metrics


def classified(N=400, C=5, sharp=2.0):
    probs = (sharp * torch.randn(N, C)).softmax(-1)
    return probs, torch.multinomial(probs.sqrt(), 1).squeeze(-1)


def detected(N=300, ties=True):
    scores = torch.randn(N)
    positive = torch.rand(N) < 0.3
    scores = scores + positive
    return (scores * 4).round() / 4 if ties else scores, positive


# ------------------------------------------------------------------------------ classification


def test_nll_is_the_log_of_the_mean_likelihood():
    ll = torch.randn(7, 20).double() * 30
    expected = -(torch.logsumexp(ll, 0) - np.log(7)).mean()
    assert torch.allclose(metrics.nll(ll), expected)
    assert metrics.nll(ll) <= -ll.mean()  # Jensen


@pytest.mark.parametrize("C", [2, 5])
def test_brier_and_accuracy_match_scikit_learn(C):
    probs, y = classified(C=C)
    p = probs.double()
    p = p / p.sum(-1, keepdim=True)
    expected = float((p - torch.eye(C)[y]).square().sum(-1).mean())
    theirs = sklearn.metrics.brier_score_loss
    if "scale_by_half" in inspect.signature(theirs).parameters:  # from 1.7 on; before it knew two classes alone
        theirs = theirs(y.numpy(), p.numpy() if C > 2 else p[:, 1].numpy(), scale_by_half=False, labels=list(range(C)))
        assert expected == pytest.approx(theirs, abs=1e-12)
    assert float(metrics.brier(probs, y)) == pytest.approx(expected, abs=1e-6)
    assert float(metrics.accuracy(probs, y)) == sklearn.metrics.accuracy_score(y, probs.argmax(-1))


def test_brier_of_one_hot_and_soft_targets():
    probs, y = classified()
    one_hot = torch.nn.functional.one_hot(y, 5)
    for target in (one_hot, one_hot.bool(), one_hot.float()):
        assert float(metrics.brier(probs, target)) == pytest.approx(float(metrics.brier(probs, y)), abs=1e-7)
    pixels, soft = torch.randn(2, 4, 3, 5).softmax(1), torch.randn(2, 4, 3, 5).softmax(1)
    expected = float((pixels.double() - soft.double()).square().sum(1).mean())
    assert float(metrics.brier(pixels, soft)) == pytest.approx(expected, abs=1e-12)
    assert float(metrics.brier(pixels.movedim(1, -1), soft.movedim(1, -1), class_axis=-1)) == pytest.approx(expected)
    for wrong in (2 * one_hot, one_hot - 1, torch.zeros_like(one_hot)):
        with pytest.raises(ValueError, match="`target` must be probabilities that sum to 1"):
            metrics.brier(probs, wrong)


@pytest.mark.parametrize("n_bins", [1, 10, np.int64(15)])
def test_ece_matches_torchmetrics(n_bins):
    probs, y = classified()
    expected = tm.multiclass_calibration_error(probs, y, num_classes=5, n_bins=int(n_bins))
    assert float(metrics.ece(probs, y, n_bins=n_bins)) == pytest.approx(float(expected), abs=1e-6)


def test_adaptive_ece_is_the_gap_of_bins_of_equal_count():
    probs, y = classified(N=300)
    confidence, label = probs.double().max(-1)
    order = np.argsort(confidence.numpy())
    bins = np.array_split(order, 10)
    right = (label == y).double().numpy()
    expected = sum(abs(confidence.numpy()[b].mean() - right[b].mean()) * len(b) for b in bins) / 300
    assert float(metrics.ece(probs, y, n_bins=10, adaptive=True)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("adaptive", [False, True])
def test_ece_does_not_depend_on_the_order_of_rows_and_holds_certain_rows(adaptive):
    probs = torch.tensor([1.0, 0.0]).expand(50, 2)  # confidence 1 is inside the last bin
    y = (torch.arange(50) % 5 == 0).long()
    shuffled = torch.randperm(50)
    for rows in (torch.arange(50), shuffled):
        assert float(metrics.ece(probs[rows], y[rows], adaptive=adaptive)) == pytest.approx(0.2)


def test_calibrated_predictions_have_small_ece():
    probs = torch.randn(20_000, 3).softmax(-1)
    y = torch.multinomial(probs, 1).squeeze(-1)
    assert metrics.ece(probs, y) < 0.02
    assert metrics.ece(probs.square() / probs.square().sum(-1, keepdim=True), y) > 0.05


def test_pixels_are_rows():
    probs = torch.randn(2, 4, 3, 5).softmax(1)
    y = torch.randint(4, (2, 3, 5))
    flat, flat_y = probs.movedim(1, -1).reshape(-1, 4), y.flatten()
    for metric in (metrics.accuracy, metrics.brier, metrics.ece):
        assert metric(probs, y) == metric(flat, flat_y)
        assert metric(probs.movedim(1, -1), y, class_axis=-1) == metric(flat, flat_y)


# ------------------------------------------------------------------------------ regression


def test_rmse_matches_scikit_learn():
    a, b = torch.randn(30, 2), torch.randn(30, 2)
    expected = sklearn.metrics.mean_squared_error(b.flatten(), a.flatten()) ** 0.5
    assert float(metrics.rmse(a, b)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("K", [1, 2, 30])
def test_crps_of_the_mixture_matches_scoringrules(K):
    mean, y = torch.randn(K, 40).double(), 2 * torch.randn(40).double()
    precision = torch.rand(K, 40).double() + 0.1
    expected = scoringrules.crps_mixnorm(y.numpy(), mean.T.numpy(), precision.rsqrt().T.numpy())
    assert np.allclose(metrics.crps(mean, y, precision=precision), expected, atol=1e-9)


def test_crps_of_the_passes_matches_scoringrules_and_the_limit_of_no_noise():
    values, y = torch.randn(25, 40).double(), torch.randn(40).double()
    expected = scoringrules.crps_ensemble(y.numpy(), values.T.numpy(), estimator="nrg")
    assert np.allclose(metrics.crps(values, y), expected, atol=1e-12)
    assert torch.allclose(metrics.crps(values, y, precision=1e16), metrics.crps(values, y), atol=1e-7)


def test_crps_in_blocks_is_the_same(monkeypatch):
    mean, y = torch.randn(10, 30, 2), torch.randn(30, 2)
    whole = metrics.crps(mean, y, precision=2.0)
    monkeypatch.setattr(metrics.marginal, "_BLOCK", 350)
    assert whole.shape == (30, 2)
    assert torch.allclose(metrics.crps(mean, y, precision=2.0), whole, atol=1e-14)


def test_interval_coverage_and_width_of_a_normal():
    y = torch.randn(20_000)
    z = scipy.stats.norm.ppf(0.95)
    low, high = torch.full_like(y, -z), torch.full_like(y, z)
    assert float(metrics.interval_coverage(low, high, y)) == pytest.approx(0.9, abs=0.01)
    assert float(metrics.interval_width(low, high)) == pytest.approx(2 * z, abs=1e-6)


# ------------------------------------------------------------------------------ detection


@pytest.mark.parametrize("ties", [False, True])
def test_detection_matches_scikit_learn_and_torchmetrics(ties):
    scores, positive = detected(ties=ties)
    assert float(metrics.auroc(scores, positive)) == pytest.approx(
        sklearn.metrics.roc_auc_score(positive, scores), abs=1e-9
    )
    assert float(metrics.auroc(scores, positive)) == pytest.approx(
        float(tm.binary_auroc(scores.sigmoid(), positive.long())), abs=1e-6
    )
    assert float(metrics.aupr(scores, positive)) == pytest.approx(
        sklearn.metrics.average_precision_score(positive, scores), abs=1e-9
    )
    fpr, tpr, _ = sklearn.metrics.roc_curve(positive, scores, drop_intermediate=False)
    assert float(metrics.fpr95(scores, positive)) == pytest.approx(fpr[np.argmax(tpr >= 0.95)], abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=20))
def test_auroc_is_the_share_of_pairs_in_order(rows):
    scores = torch.tensor([float(s) for s, _ in rows])
    positive = torch.tensor([p for _, p in rows])
    if positive.all() or not positive.any():
        with pytest.raises(ValueError, match="both kinds"):
            metrics.auroc(scores, positive)
        return
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[positive] for n in scores[~positive]]
    assert float(metrics.auroc(scores, positive)) == pytest.approx(sum(map(float, pairs)) / len(pairs))
    assert float(metrics.auroc(-scores, positive)) == pytest.approx(1 - float(metrics.auroc(scores, positive)))


def test_risk_coverage_is_the_mean_loss_of_the_surest_rows():
    uncertainty, loss = torch.rand(50), torch.rand(50)
    curve = metrics.risk_coverage(uncertainty, loss)
    for n in (1, 20, 50):
        assert float(curve.risk[n - 1]) == pytest.approx(float(loss[uncertainty.argsort()[:n]].mean()), abs=1e-6)
    assert float(curve.area) == pytest.approx(float(curve.risk.mean()))
    assert metrics.risk_coverage(loss, loss).area < curve.area < metrics.risk_coverage(-loss, loss).area


def test_risk_coverage_ties_do_not_depend_on_order():
    uncertainty, loss = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    for rows in ([0, 1, 2, 3], [1, 0, 3, 2]):
        assert metrics.risk_coverage(uncertainty[rows], loss[rows]).risk.tolist() == [0.5] * 4


# ------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: metrics.brier(torch.randn(3, 2), torch.zeros(3).long()), ValueError, "sum to 1"),
        (lambda: metrics.ece(torch.full((3, 2), 0.5), torch.tensor([0, 1, 2])), ValueError, "0 to 1; got 2"),
        (lambda: metrics.ece(torch.full((3, 2), 0.5), torch.zeros(3)), TypeError, "integer class indices"),
        (lambda: metrics.ece(torch.full((3, 2), 0.5), torch.zeros(3).long(), n_bins=0), ValueError, "n_bins"),
        (lambda: metrics.accuracy(torch.full((3, 2), 0.5), torch.zeros(2).long()), ValueError, "shape"),
        (lambda: metrics.accuracy(torch.full((3, 2), 0.5), torch.zeros(3).long(), class_axis=0), ValueError, "axis"),
        (lambda: metrics.rmse(torch.zeros(3), torch.zeros(3, 1)), ValueError, "shape"),
        (lambda: metrics.rmse(torch.tensor([0.0, float("nan")]), torch.zeros(2)), ValueError, r"nan at index \[1\]"),
        (lambda: metrics.rmse(torch.zeros(0), torch.zeros(0)), ValueError, "empty"),
        (lambda: metrics.rmse([0.0], torch.zeros(1)), TypeError, "got list"),
        (lambda: metrics.crps(torch.zeros(2, 3), torch.zeros(3), precision=0.0), ValueError, "above 0; got 0.0"),
        (lambda: metrics.auroc(torch.zeros(3), torch.tensor([0, 1, 1])), TypeError, "bool"),
        (lambda: metrics.auroc(torch.zeros(3, 2), torch.zeros(3, 2).bool()), ValueError, r"\(N,\)"),
        (lambda: metrics.interval_width(torch.ones(2), torch.zeros(2)), ValueError, "turned round"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
