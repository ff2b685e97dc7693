import math

import numpy as np
import pytest
import torch
from torch import nn

from bbalpha.experiments import baselines
from bbalpha.layers import GaussianLinear


def toy(n=150, n_test=100, noise=0.3, seed=0):
    """A smooth function of two inputs with Gaussian noise, in units that are far from standardised."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n + n_test, 2))
    y = x[:, 0] + np.maximum(x[:, 1], 0) + noise * rng.normal(size=n + n_test)
    x, y = x * [3.0, 0.01] + [100.0, -1.0], 5 * y + 20
    return x[:n], y[:n], x[n:], y[n:]


# ------------------------------------------------------------------------------ all methods


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=pytest.mark.slow if m == "hmc" else ()) for m in baselines.METHODS]
)
def test_every_method_beats_a_constant(name):
    x, y, x_test, y_test = toy()
    found = baselines.METHODS[name](x, y, x_test, y_test, seed=3, quick=True)
    constant_nll = 0.5 * math.log(2 * math.pi * y.var()) + 0.5 * np.mean((y_test - y.mean()) ** 2) / y.var()
    assert {"nll", "rmse", "coverage90"} <= found.keys()
    assert all(math.isfinite(v) for v in found.values())
    assert found["rmse"] < 0.7 * np.sqrt(np.mean((y_test - y.mean()) ** 2))
    assert found["nll"] < constant_nll - 0.2
    assert 0.6 < found["coverage90"] <= 1


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=pytest.mark.slow if m == "hmc" else ()) for m in baselines.METHODS]
)
def test_every_method_knows_its_seed_and_follows_the_units(name):
    """The same seed, as tensors, with other units: the density shifts by the log of the unit, nothing else moves."""
    x, y, x_test, y_test = toy()
    found = baselines.METHODS[name](x, y, x_test, y_test, seed=3, quick=True)
    tensors = (torch.tensor(a) for a in (7 * x + 1, 1000 * y - 5, 7 * x_test + 1, 1000 * y_test - 5))
    scaled = baselines.METHODS[name](*tensors, seed=3, quick=True)
    loose = {"rel": 2e-2} if name == "hmc" else {"rel": 1e-3}  # chains in float32 take rounding errors apart
    assert scaled["nll"] - math.log(1000) == pytest.approx(found["nll"], **loose)
    assert scaled["rmse"] / 1000 == pytest.approx(found["rmse"], **loose)


@pytest.mark.parametrize("name", ["gp", "vi-g", "gbm"])
def test_scores_do_not_see_the_test_targets_before_scoring(name):
    x, y, x_test, y_test = toy(n=80, n_test=20)
    found = baselines.METHODS[name](x, y, x_test, y_test, seed=0, quick=True)
    halves = [baselines.METHODS[name](x, y, x_test, y_test + d, seed=0, quick=True) for d in (-1.0, 1.0)]
    # (m - y - 1)^2 + (m - y + 1)^2 = 2 (m - y)^2 + 2 where the mean m is the same in all three
    assert sum(h["rmse"] ** 2 for h in halves) / 2 - 1 == pytest.approx(found["rmse"] ** 2, rel=1e-6)


def test_a_column_without_spread_is_harmless():
    x, y, x_test, y_test = toy(n=60)
    with_constant = [np.c_[a, np.full(len(a), 0.998)] for a in (x, x_test)]
    data = baselines.Standardised.of(with_constant[0], y, with_constant[1], y_test)
    assert data.x[:, 2].abs().max() < 1e-9
    assert data.x_test[:, 2].abs().max() < 1e-9
    torch.testing.assert_close(data.x[:, :2].std(0, correction=0), torch.ones(2, dtype=torch.float64))


def test_large_sets_get_a_wider_layer():
    n = baselines.LARGE + 1
    data = baselines.Standardised.of(np.arange(n)[:, None] * 1.0, np.arange(n) * 1.0, np.zeros((1, 1)), np.zeros(1))
    assert data.hidden == 100


# ------------------------------------------------------------------------------ the GP


def test_a_gp_with_all_rows_inducing_is_the_exact_gp():
    x, y, x_test, _ = toy(n=40, n_test=15)
    data = baselines.Standardised.of(x, y, x_test, np.zeros(15))
    model = baselines.fit_gp(data.x, data.y, n_inducing=40, n_steps=0, seed=0)
    mean, variance = baselines.predict_gp(model, data.x_test)

    def k(a, b):
        return math.log(2) * np.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1) / 2)  # outputscale, squared length 2

    a, b = data.x.numpy(), data.x_test.numpy()
    inverse = np.linalg.inv(k(a, a) + 0.1 * np.eye(len(a)))
    np.testing.assert_allclose(mean, k(b, a) @ inverse @ data.y.numpy(), atol=2e-3)
    exact = math.log(2) - np.einsum("ij,jk,ik->i", k(b, a), inverse, k(b, a)) + 0.1
    np.testing.assert_allclose(variance, exact, atol=2e-3)


def test_the_gp_learns_the_noise():
    data = baselines.Standardised.of(*toy(n=300, noise=0.3))
    model = baselines.fit_gp(data.x, data.y, n_inducing=20, n_steps=80, seed=0)
    assert model.likelihood.noise.item() ** 0.5 * data.unit == pytest.approx(5 * 0.3, rel=0.15)


# ------------------------------------------------------------------------------ Gaussian VI


def test_vi_on_a_linear_model_finds_the_factorised_optimum():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])  # correlated: the optimum is not the posterior
    y = x @ [0.7, -0.4] + 0.5 * rng.normal(size=60)
    x, y = x - x.mean(0), y - y.mean()  # the bias, a point estimate, is then 0
    net = nn.Sequential(GaussianLinear(2, 1))
    objective = baselines.fit_vi(net, torch.tensor(x), torch.tensor(y), n_steps=1500, seed=0)

    tau = 1.0  # optimum in closed form for given tau, and of tau for given q
    for _ in range(200):
        mean = np.linalg.solve(tau * x.T @ x + np.eye(2), tau * x.T @ y)
        variance = 1 / (tau * (x**2).sum(0) + 1)
        tau = 60 / (((y - x @ mean) ** 2).sum() + (x**2 @ variance).sum())
    np.testing.assert_allclose(net[0].weight.detach().numpy()[0], mean, atol=0.03)
    np.testing.assert_allclose(net[0].std.detach().numpy()[0], variance**0.5, rtol=0.1)
    assert objective.precision.item() == pytest.approx(tau, rel=0.05)


# ------------------------------------------------------------------------------ gradient boosting


@pytest.mark.parametrize("n", [800, 5200])  # both kinds of trees
def test_boosted_quantiles_hold_about_what_they_say(n):
    found = baselines.gbm(*toy(n=n, n_test=1000), seed=0, quick=False)
    assert 0.8 < found["coverage90"] < 0.95
    ideal = 0.5 * math.log(2 * math.pi * math.e * 1.5**2)
    assert ideal - 0.1 < found["nll"] < ideal + 0.4


def test_boosting_has_no_density_sharper_than_a_hundredth_of_the_targets():
    x, y = np.linspace(0, 1, 50)[:, None], np.repeat([0.0, 1.0], 25)  # steps that trees fit without error
    found = baselines.gbm(x, y, x, y, seed=0, quick=False)
    assert found["nll"] > math.log(0.01 * y.std()) + 0.5 * math.log(2 * math.pi) - 1e-3
