"""Held-out data make the numbers true: likelihood at its maximum, coverage as promised."""

import math

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import scipy.special
import torch
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

import bbalpha
from bbalpha import BBAlphaClassifier, BBAlphaRegressor, calibration
from bbalpha.calibration import (
    ConformalSets,
    TemperedClassifier,
    conformal_intervals,
    conformal_sets,
    fit_precision,
    fit_temperature,
)
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction


class Scaled(nn.Module):
    """Logits of the data's own distribution, too large by a factor, with dropout's noise on them."""

    def __init__(self, factor, rate=0.02):
        super().__init__()
        self.factor, self.drop = factor, nn.Dropout(rate)

    def forward(self, x):
        return self.factor * self.drop(x)


# ------------------------------------------------------------------------------ one number


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_temperature_undoes_over_and_underconfidence(factor):
    logits = 2 * torch.randn(4000, 4)
    y = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
    temperature = fit_temperature(Scaled(factor), logits, y, n_passes=5, seed=0)
    assert temperature == pytest.approx(factor, rel=0.15)


def test_temperature_minimises_the_loss_of_the_mean_over_passes():
    model, x = Scaled(3.0, rate=0.5), 2 * torch.randn(300, 4)
    y = torch.multinomial(x.softmax(-1), 1).squeeze(-1)
    outputs = bbalpha.sample(model.eval(), x, 10, seed=0)

    def loss(t):
        probs = (outputs.double() / math.exp(t)).softmax(-1).mean(0)
        return -float(probs[torch.arange(300), y].log().mean())

    best = scipy.optimize.minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-8})
    temperature = fit_temperature(model, x, y, n_passes=10, seed=0)
    p = bbalpha.predict_classification(model, x, n_passes=10, seed=0, temperature=temperature)
    assert float(-p.log_prob(y).mean()) == pytest.approx(best.fun, abs=1e-5)


@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_precision_maximises_the_likelihood_of_the_mixture(rate):
    model, x = Scaled(1.0, rate), torch.randn(300, 2)
    y = x + 0.3 * torch.randn(300, 2)
    tau = fit_precision(model, x, y, n_passes=10, seed=0)

    def loss(log_tau):
        p = bbalpha.predict_regression(model, x, n_passes=10, seed=0, precision=math.exp(log_tau))
        return -float(p.log_prob(y).mean())

    best = scipy.optimize.minimize_scalar(loss, bounds=(-3, 8), method="bounded", options={"xatol": 1e-6})
    assert loss(math.log(tau)) == pytest.approx(best.fun, abs=1e-5)
    if rate < 0.1:
        assert tau == pytest.approx(1 / 0.09, rel=0.3)


@pytest.fixture(scope="module")
def overconfident():
    """A pipeline whose classifier has learnt noisy labels by heart, and rows that it has not seen."""
    rng = np.random.RandomState(0)
    X = 50 + 9 * rng.normal(size=(300, 3))
    flipped = rng.rand(300) < 0.3
    y = np.where((X[:, 0] > 50) ^ flipped, "yes", "no")
    alone = {"hidden_layer_sizes": (50,), "n_ensemble": 1, "validation_fraction": 0}
    inner = BBAlphaClassifier(epochs=60, length_scale=0.0, dropout=0.02, n_predict_passes=20, random_state=0, **alone)
    return make_pipeline(StandardScaler(), inner).fit(X[:80], y[:80]), X[80:], y[80:]


def nll(model, X, y):
    return -np.log(model.predict_proba(X)[np.arange(len(y)), np.searchsorted(model.classes_, y)]).mean()


def test_the_temperature_of_a_pipeline_makes_its_probabilities_truer(overconfident):
    model, X, y = overconfident
    calibrated = fit_temperature(model, X[:110], pd.Series(y[:110], index=range(7, 117)))
    assert calibrated.temperature > 1.3
    assert nll(calibrated, X[110:], y[110:]) < nll(model, X[110:], y[110:]) - 0.02
    np.testing.assert_array_equal(calibrated.predict(X), model.predict(X))
    np.testing.assert_allclose(calibrated.predict_proba(X).sum(1), 1)
    np.testing.assert_allclose(np.exp(calibrated.predict_log_proba(X)), calibrated.predict_proba(X))


def test_the_temperature_of_an_estimator_is_the_likeliest_of_its_mean_probabilities(overconfident):
    model, X, y = overconfident
    logs = model.predict_log_proba(X)
    index = np.searchsorted(model.classes_, y)

    def loss(t):
        return -scipy.special.log_softmax(logs / math.exp(t), 1)[np.arange(len(y)), index].mean()

    best = scipy.optimize.minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-8})
    assert fit_temperature(model, X, y).temperature == pytest.approx(math.exp(best.x), rel=1e-3)
    assert fit_temperature(model, X, list(y)).temperature == pytest.approx(math.exp(best.x), rel=1e-3)


def test_what_a_temperature_does_not_know_is_nan(overconfident):
    model, X, y = overconfident
    p = fit_temperature(model, X, y).predictive(X)
    assert p.mutual_information.isnan().all()
    assert p.entropy.isfinite().all()


def test_a_temperature_is_written_and_read(overconfident, tmp_path):
    model, X, y = overconfident
    calibrated = fit_temperature(model, X, y)
    calibrated.save(tmp_path / "t")
    again = TemperedClassifier.load(tmp_path / "t", model)
    np.testing.assert_array_equal(again.predict_proba(X), calibrated.predict_proba(X))
    three = BBAlphaClassifier(epochs=1).fit(X, np.arange(len(X)) % 3)
    with pytest.raises(ValueError, match=r"2 classes of the temperature in .*; got 3"):
        TemperedClassifier.load(tmp_path / "t", three)
    with pytest.raises(ValueError, match=r"must hold a ConformalSets; .* holds a TemperedClassifier"):
        ConformalSets.load(tmp_path / "t")
    model[-1].save(tmp_path / "model")
    with pytest.raises(ValueError, match="holds a BBAlphaClassifier, which would be lost"):
        calibrated.save(tmp_path / "model")
    BBAlphaClassifier.load(tmp_path / "model")


def test_what_is_wrong_with_an_estimator_is_named(overconfident):
    model, X, y = overconfident
    with pytest.raises(ValueError, match="takes no options"):
        fit_temperature(model, X, y, n_passes=7)
    with pytest.raises(ValueError, match="labels that the model was fitted with; got 'maybe'"):
        fit_temperature(model, X[:2], ["yes", "maybe"])
    with pytest.raises(ValueError, match="one entry a row, 220; got 9"):
        fit_temperature(model, X, y[:9])
    with pytest.raises(ValueError, match="got none"):
        fit_temperature(model, X, y[:0])
    with pytest.raises(TypeError, match="must be a classifier"):
        fit_temperature(BBAlphaRegressor(epochs=1, n_ensemble=1).fit(X, X[:, 0]), X, X[:, 0])
    with pytest.raises(TypeError, match="`model` must be a fitted estimator"):
        fit_temperature("net", X, y)


def test_targets_of_a_network_may_be_arrays():
    model, x = Scaled(2.0), torch.randn(60, 3)
    y = torch.randint(3, (60,))
    expected = fit_temperature(model, x, y, n_passes=5, seed=0)
    for target in (y.numpy(), pd.Series(y.numpy()), y.tolist()):
        assert fit_temperature(model, x, target, n_passes=5, seed=0) == expected
    assert fit_precision(model, x, x.numpy() + 1, n_passes=5, seed=0) == fit_precision(
        model, x, x + 1, n_passes=5, seed=0
    )


# ------------------------------------------------------------------------------ conformal


def regression(N, D=1, noise=None):
    """Rows whose noise is known to the prediction up to a factor, with wrong means on top."""
    std = (4 * torch.rand(N, D) - 3).exp() if noise is None else torch.full((N, D), noise)
    centre = torch.randn(N, D)
    target = centre + std * torch.randn(N, D)
    outputs = centre + std * (0.3 + 0.1 * torch.randn(5, N, D))
    return RegressionPrediction(outputs, (0.5 * std).pow(-2)), target  # twice overconfident


@pytest.mark.parametrize("score", ["std", "quantile", "absolute"])
@pytest.mark.parametrize("n", [19, 100])
def test_intervals_cover_as_promised_in_finite_samples(score, n):
    covered = []
    for _ in range(200):
        p, y = regression(n)
        low, high = conformal_intervals(p, y, coverage=0.9, score=score).interval((new := regression(50))[0])
        covered.append(((low <= new[1]) & (new[1] <= high)).float().mean())
    covered = torch.stack(covered)
    error = float(covered.std() / math.sqrt(200))
    assert 0.9 - 4 * error <= float(covered.mean()) <= 0.9 + 1 / (n + 1) + 4 * error


def test_intervals_adapt_to_the_row():
    (p, y), (new, target) = regression(2000), regression(2000)
    widths = {}
    for score in ("std", "quantile", "absolute"):
        low, high = conformal_intervals(p, y, score=score).interval(new)
        widths[score] = (high - low).flatten()
    assert widths["absolute"].std() < 1e-5
    assert widths["std"].mean() < 0.95 * widths["absolute"].mean()
    assert widths["quantile"].mean() < 0.95 * widths["absolute"].mean()
    unsure = new.std.flatten() > new.std.median()
    low, high = conformal_intervals(p, y, score="std").interval(new)
    inside = ((low <= target) & (target <= high)).flatten().float()
    assert abs(float(inside[unsure].mean() - inside[~unsure].mean())) < 0.08


def test_every_output_has_its_own_threshold():
    p, y = regression(500, D=2)
    y = y * torch.tensor([1.0, 10.0])
    guard = conformal_intervals(p, y)
    assert guard.threshold.shape == (2,)
    assert guard.threshold[1] > 3 * guard.threshold[0]
    low, high = guard.interval(p)
    assert (((low <= y) & (y <= high)).float().mean(0) >= 0.9).all()


def test_quantile_intervals_never_turn_round():
    outputs = torch.randn(50, 99)
    p = RegressionPrediction(outputs, torch.tensor(1.0))
    guard = conformal_intervals(p, p.mean, score="quantile")  # far too wide: the threshold is negative
    low, high = guard.interval(RegressionPrediction(torch.zeros(50, 3), torch.tensor(1e6)))
    assert guard.threshold < 0
    assert (low <= high).all()


def classification(N, C=5, sharp=3.0):
    logits = torch.randn(N, C)
    y = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
    return ClassificationPrediction((sharp * logits).log_softmax(-1), torch.zeros(N), torch.zeros(N, C), 10), y


@pytest.mark.parametrize("score", ["probability", "cumulative"])
def test_sets_cover_as_promised_in_finite_samples(score):
    covered, size = [], []
    for _ in range(200):
        guard = conformal_sets(*classification(60), coverage=0.8, score=score)
        p, y = classification(50)
        inside = guard.prediction_set(p)
        assert inside.any(1).all()
        covered.append(inside.gather(1, y[:, None]).float().mean())
        size.append(inside.float().sum(1).mean())
    covered = torch.stack(covered)
    error = float(covered.std() / math.sqrt(200))
    # continuous scores: never more than 1/(n + 1) too much, but for the top class that is always in
    assert 0.8 - 4 * error <= float(covered.mean()) <= 0.8 + 1 / 61 + 0.02 + 4 * error
    assert 1 < torch.stack(size).mean() < 5


def test_sets_grow_with_coverage():
    p, y = classification(500)
    sizes = [conformal_sets(p, y, coverage=c).prediction_set(p).sum() for c in (0.5, 0.8, 0.95)]
    assert sizes[0] < sizes[1] < sizes[2]


# ------------------------------------------------------------------------------ bad input


def one_axis(N):
    return RegressionPrediction(torch.randn(3, N), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: conformal_intervals(one_axis(0), torch.zeros(0)), ValueError, "got none"),
        (lambda: conformal_intervals(one_axis(8), torch.zeros(8)), ValueError, "at least 9 calibration rows"),
        (lambda: conformal_intervals(one_axis(9), torch.zeros(8)), ValueError, "one entry a row, 9; got 8"),
        (lambda: conformal_intervals(one_axis(9), torch.zeros(9, 1)), ValueError, r"of the shape \(9,\)"),
        (lambda: conformal_intervals(one_axis(9), torch.full((9,), math.nan)), ValueError, "finite"),
        (lambda: conformal_intervals(one_axis(9), torch.zeros(9), coverage=1.0), ValueError, "`coverage`"),
        (lambda: conformal_intervals(one_axis(9), torch.zeros(9), score="best"), ValueError, "got 'best'"),
        (
            lambda: conformal_intervals(RegressionPrediction(torch.zeros(3, 9)), torch.zeros(9), score="std"),
            ValueError,
            "deviation above 0",
        ),
        (lambda: conformal_intervals(one_axis(9), torch.zeros(9)).interval(regression(3)[0]), ValueError, "outputs"),
        (lambda: conformal_sets(classification(9)[0], torch.full((9,), 5)), ValueError, "0 to 4; got 5"),
        (lambda: conformal_sets(classification(9)[0], torch.zeros(8).long()), ValueError, "shape of the labels"),
        (lambda: conformal_sets(*classification(0)), ValueError, "got none"),
        (lambda: conformal_sets(*classification(9), score="x"), ValueError, "`score`"),
        (lambda: fit_temperature(Scaled(1.0), torch.zeros(0, 3), torch.zeros(0).long()), ValueError, "got none"),
        (lambda: fit_temperature(Scaled(1.0), torch.ones(4, 3), torch.full((4,), 3)), ValueError, "0 to 2; got 3"),
        (lambda: fit_precision(Scaled(1.0), torch.ones(4, 3), torch.zeros(4)), ValueError, r"one pass, \(4, 3\)"),
        (lambda: fit_precision(Scaled(0.0), torch.ones(4, 1), torch.zeros(4, 1)), ValueError, "predicted exactly"),
        (lambda: fit_precision(Scaled(1.0), torch.ones(4, 1), ["a"] * 4), TypeError, "real numbers; got <U1 in a list"),
        (lambda: fit_precision(Scaled(1.0), torch.ones(4, 1), torch.zeros(4, 1) * 1j), TypeError, "real numbers"),
        (lambda: fit_precision(Scaled(1.0), torch.ones(4, 1), torch.tensor(0.0)), ValueError, "got none"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_minimum_is_found_between_grid_points():
    for centre in (-2.9, -0.123, 2.95):
        assert calibration._minimum(lambda t, c=centre: (t - c) ** 2, -3, 3) == pytest.approx(centre, abs=1e-3)
