"""Student's t of four degrees of freedom, against scipy; mixtures in which some passes have it."""

import numpy as np
import pytest
import scipy.stats
import torch

from bbalpha import RegressionPrediction, _student

T = torch.tensor([-80.0, -3.0, -0.1, 0.0, 0.5, 4.0, 50.0], dtype=torch.float64)


def test_the_formulas_are_those_of_scipy() -> None:
    np.testing.assert_allclose(_student.cdf(T), scipy.stats.t.cdf(T, 4), rtol=1e-13)
    np.testing.assert_allclose(_student.density(T), scipy.stats.t.pdf(T, 4), rtol=1e-13)
    q = torch.tensor([1e-9, 0.001, 0.3, 0.5, 0.7, 0.999], dtype=torch.float64)
    np.testing.assert_allclose(_student.quantile(q), scipy.stats.t.ppf(q, 4), rtol=1e-10, atol=1e-12)
    tau = torch.tensor(4.0, dtype=torch.float64)
    losses = _student.student_losses(T, torch.ones_like(T), tau, tau.log())
    np.testing.assert_allclose(losses, -scipy.stats.t.logpdf(1.0, 4, loc=T, scale=0.5), rtol=1e-12)
    assert scipy.stats.t.var(4) == _student.VARIANCE


@pytest.fixture
def mixture() -> RegressionPrediction:
    """Two passes, the second with heavy tails; five rows."""
    outputs = torch.stack([torch.linspace(-2, 2, 5), torch.linspace(1, -1, 5)]).double()[..., None]
    tau = torch.tensor([4.0, 0.25], dtype=torch.float64)[:, None, None]
    return RegressionPrediction(outputs, tau, heavy=torch.tensor([False, True]))


def parts(p: RegressionPrediction) -> list:
    means = p.outputs[..., 0].numpy()
    return [scipy.stats.norm(means[0], 0.5), scipy.stats.t(4, means[1], 2.0)]


def test_a_mixture_of_both_kinds(mixture: RegressionPrediction) -> None:
    y = torch.tensor([-9.0, 0.0, 0.3, 2.0, 30.0], dtype=torch.float64)[:, None]
    at, both = y[:, 0].numpy(), parts(mixture)
    density = np.mean([part.pdf(at) for part in both], axis=0)
    np.testing.assert_allclose(mixture.log_prob(y), np.log(density), rtol=1e-10)
    np.testing.assert_allclose(mixture.cdf(y)[:, 0], np.mean([part.cdf(at) for part in both], axis=0), rtol=1e-10)
    np.testing.assert_allclose(mixture.aleatoric_std[:, 0] ** 2, (0.25 + 8.0) / 2, rtol=1e-12)
    for q in (0.001, 0.05, 0.5, 0.95, 0.999):
        np.testing.assert_allclose(mixture.cdf(mixture.quantile(q)), q, rtol=1e-8)
    moved = mixture.rescaled(3.0, 1.0)
    torch.testing.assert_close(moved.quantile(0.9), 3 * mixture.quantile(0.9) + 1)


def test_draws_have_the_distribution(mixture: RegressionPrediction) -> None:
    draws = mixture.sample(20_000, seed=0)[..., 0].numpy()
    for row, (mean, other) in enumerate(mixture.outputs[..., 0].T.tolist()):
        both = scipy.stats.norm(mean, 0.5), scipy.stats.t(4, other, 2.0)
        ranks = np.mean([part.cdf(draws[:, row]) for part in both], axis=0)
        assert scipy.stats.kstest(ranks, "uniform").pvalue > 1e-3
