"""Mixtures of log-normal distributions, against scipy."""

import numpy as np
import pytest
import scipy.stats
import torch

from bbalpha import RegressionPrediction
from bbalpha.calibration import conformal_intervals
from bbalpha.lognormal import LogPrediction


@pytest.fixture
def prediction() -> LogPrediction:
    outputs = torch.tensor([[0.0, 1.0, -2.0], [0.5, 0.0, 1.0]], dtype=torch.float64)[..., None]
    return LogPrediction(RegressionPrediction(outputs, torch.tensor(4.0, dtype=torch.float64)))


def test_it_is_the_mixture(prediction: LogPrediction) -> None:
    both = [scipy.stats.lognorm(0.5, scale=np.exp(m)) for m in prediction.log.outputs[..., 0].numpy()]
    y = torch.tensor([0.3, 2.0, 5.0], dtype=torch.float64)[:, None]
    at = y[:, 0].numpy()
    np.testing.assert_allclose(prediction.log_prob(y), np.log(np.mean([p.pdf(at) for p in both], axis=0)), rtol=1e-10)
    np.testing.assert_allclose(prediction.cdf(y)[:, 0], np.mean([p.cdf(at) for p in both], axis=0), rtol=1e-10)
    means = np.array([p.mean() for p in both])
    np.testing.assert_allclose(prediction.mean[:, 0], means.mean(0), rtol=1e-10)
    np.testing.assert_allclose(prediction.epistemic_std[:, 0], means.std(0), rtol=1e-10)
    variance = np.mean([p.var() for p in both], axis=0) + means.var(0)
    np.testing.assert_allclose(prediction.std[:, 0], np.sqrt(variance), rtol=1e-10)
    np.testing.assert_allclose(prediction.cdf(prediction.quantile(0.2)), 0.2, rtol=1e-8)


def test_what_is_not_positive_cannot_be(prediction: LogPrediction) -> None:
    y = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)[:, None]
    assert prediction.log_prob(y).isneginf().tolist() == [True, True, False]
    assert prediction.cdf(y)[:2].tolist() == [[0.0], [0.0]]


def test_conformal_intervals_take_it() -> None:
    generator = torch.Generator().manual_seed(0)
    p = LogPrediction(RegressionPrediction(torch.randn(20, 99, 1, generator=generator), torch.tensor(1.0)))
    low, high = conformal_intervals(p, torch.ones(99), coverage=0.9).interval(p)
    assert low.shape == (99,)
    assert int(((low <= 1) & (high >= 1)).sum()) >= 90
