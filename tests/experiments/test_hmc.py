import numpy as np
import pytest
import torch

from bbalpha.experiments import hmc
from bbalpha.experiments.hmc import Settings, sample_posterior


def prior_draws(rng, n, d, hidden, x):
    """f at x (n, M) and the noise precision (n,) of draws from the prior, in plain NumPy."""
    w1, b1 = rng.normal(size=(n, d, hidden)), rng.normal(size=(n, 1, hidden))
    w2, b2 = rng.normal(size=(n, hidden, 1)), rng.normal(size=(n, 1))
    return (np.maximum(x @ w1 + b1, 0) @ w2)[..., 0] + b2, rng.gamma(1.0, 1 / 0.1, size=n)


@pytest.mark.slow
def test_draws_have_the_moments_of_the_posterior():
    x, y = np.array([[-1.0], [0.0], [1.5]]), np.array([0.5, -0.3, 1.0])
    new = np.array([[-2.0], [0.5], [3.0]])
    f, tau = prior_draws(np.random.default_rng(0), 400_000, 1, 2, np.vstack([x, new]))
    log_weight = (0.5 * np.log(tau)[:, None] - 0.5 * tau[:, None] * (y - f[:, :3]) ** 2).sum(1)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()  # importance sampling: the prior, weighted by the likelihood
    mean = weight @ f[:, 3:]
    std = np.sqrt(weight @ (f[:, 3:] - mean) ** 2)

    settings = Settings(hidden=2, n_chains=2, n_start=50, n_warmup=500, n_samples=3000, n_leapfrog=20)
    tensors = (torch.tensor(a) for a in (x, y, new))
    posterior = sample_posterior(*tensors, settings=settings, seed=0)
    draws = posterior.outputs.flatten(0, 1).numpy()
    assert posterior.outputs.shape == (2, 3000, 3)
    assert posterior.diagnostics["rhat_worst"] < 1.1
    np.testing.assert_allclose(draws.mean(0), mean, atol=0.15)
    np.testing.assert_allclose(draws.std(0), std, rtol=0.2)
    assert float(posterior.precision.log().mean()) == pytest.approx(weight @ np.log(tau), abs=0.2)


def test_diagnostics_tell_chains_that_have_met_from_others():
    f = np.random.default_rng(0).normal(size=(2, 500, 3))
    accept, diverging = np.array([[0.5] * 500, [0.9] * 500]), np.arange(1000).reshape(2, 500) < 7
    met = hmc._diagnostics(f, accept, diverging)
    assert met["rhat_worst"] < 1.02
    assert (met["accept"], met["divergences"], met["n_samples"]) == (pytest.approx(0.7), 7, 1000)
    apart = hmc._diagnostics(f + np.array([[[0.0]], [[5.0]]]) * [0, 0, 1], accept, diverging)
    # one row of three apart by five deviations: variance between is 12.5, within 1
    assert apart["rhat"] < 1.02
    assert apart["rhat_worst"] == pytest.approx(np.sqrt(1 + 25 / 3), rel=0.05)
