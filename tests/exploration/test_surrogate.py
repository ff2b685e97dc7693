import math

import torch

from bbalpha.exploration.climbing import Climb, ascend, log_improvement
from bbalpha.exploration.surrogate import Settings, _evidence, _Readout, fit_draws

QUICK = Settings(networks=2, passes=8, width=32, steps=20)


def rows(n, f, seed=0):
    return torch.rand(n, f, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_functions_meet_the_measurements_and_part_away_from_them():
    x = torch.cat((rows(15, 1) * 0.3, 0.7 + rows(15, 1, 1) * 0.3))
    draws = fit_draws(x, (6 * x[:, 0]).sin(), seed=0, settings=QUICK)
    assert (draws(x) - (6 * x[:, 0]).sin()).abs().max() < 0.05
    gap = torch.linspace(0.4, 0.6, 9, dtype=torch.float64)[:, None]
    assert draws(gap).std(0).median() > 3 * draws(x).std(0).median()


def test_noise_is_found():
    x = rows(80, 2)
    y = 2 * x.sum(1) + 0.3 * torch.randn(80, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert 0.15 < fit_draws(x, y, seed=0, settings=QUICK).precision.rsqrt() < 0.45


def test_the_same_seed_gives_the_same_functions_in_any_units():
    x, y = rows(12, 2), rows(12, 1)[:, 0]
    first, other = (fit_draws(x, t, seed=4, settings=QUICK) for t in (y, 100 * y - 7))
    at = rows(5, 2, 9)
    torch.testing.assert_close(100 * first(at) - 7, other(at), rtol=1e-3, atol=1e-2)
    assert torch.equal(fit_draws(x, y, seed=4, settings=QUICK)(at), first(at))
    assert not torch.equal(fit_draws(x, y, seed=5, settings=QUICK)(at), first(at))


def test_readouts_have_the_moments_of_the_posterior():
    K, N, H = 20_000, 4, 3
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(N, H, generator=generator, dtype=torch.float64)
    target = features @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + torch.tensor([0.3, -0.2, 0.1, 0.0])
    readout = _Readout(features.expand(K, N, H), target, generator)
    phi = torch.cat((features, torch.ones(N, 1)), 1) / math.sqrt(H)
    precision = (phi.T @ phi / readout.noise + torch.eye(H + 1)) / readout.size
    covariance = torch.linalg.inv(precision)
    mean = covariance @ phi.T @ target / (readout.noise * readout.size)
    weight = readout.weight[..., 0]
    error = (covariance.diagonal() / K).sqrt()
    assert bool(((weight.mean(0) - mean).abs() < 5 * error).all())
    torch.testing.assert_close(weight.T.cov(), covariance, rtol=0.1, atol=0.05 * float(covariance.abs().max()))


def _size(phi, target, noise):
    kernel = phi @ phi.T + noise * torch.eye(len(target), dtype=torch.float64)
    return target @ torch.linalg.solve(kernel, target) / len(target)


def test_the_evidence_is_that_of_the_gaussian():
    phi = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    target = torch.randn(6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def log_evidence(noise, size):
        covariance = size * (phi[0] @ phi[0].T + noise * torch.eye(6, dtype=torch.float64))
        return torch.distributions.MultivariateNormal(torch.zeros(6).double(), covariance).log_prob(target)

    noise, size = _evidence(phi, target)
    found = log_evidence(noise, size)
    assert found > log_evidence(noise, 1.1 * size)
    assert found > log_evidence(noise, 0.9 * size)
    grid = torch.logspace(-6, 1, 22, dtype=torch.float64)
    assert found > max(log_evidence(r, _size(phi[0], target, r)) for r in grid) - 1e-9


def test_improvement_of_gaussian_draws_is_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    mean, std, best = torch.tensor([0.0, 1.0, -0.5]), torch.tensor([1.0, 0.3, 0.1]), 0.2
    values = mean + std * torch.randn(200_000, 3, generator=generator)
    z = (best - mean) / std
    normal = torch.distributions.Normal(0.0, 1.0)
    expected = (best - mean) * normal.cdf(z) + std * normal.log_prob(z).exp()
    found = log_improvement(values, torch.full((200_000,), best), 1e-4).exp() * 1e-4 / len(values)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=2e-4)


def test_where_nothing_improves_there_is_a_way_up():
    values = torch.tensor([[5.0, 4.0, 1e4]], dtype=torch.float64).requires_grad_()
    scores = log_improvement(values, torch.zeros(1, dtype=torch.float64), 1e-3)
    assert scores[1] > scores[0] > scores[2]
    (slope,) = torch.autograd.grad(scores.sum(), values)
    assert bool((slope < 0).all())


def test_climbing_reaches_the_top_and_stays_in_the_box():
    top = torch.tensor([0.3, 1.4], dtype=torch.float64)  # outside: the best in the box is (0.3, 1)
    found = ascend(lambda x: -(x - top).square().sum(1), rows(5, 2))
    assert (found - torch.tensor([0.3, 1.0])).abs().max() < 1e-2


def test_a_row_that_is_taken_leaves_nothing_to_gain_beside_it():
    draws = lambda x: (x - 0.5).square().sum(1).expand(4, -1)  # noqa: E731
    climb = Climb(draws, rows(6, 2))
    at = torch.full((1, 2), 0.5, dtype=torch.float64)
    before = climb.scores(at)
    climb.take(at[0])
    assert climb.scores(at) < before - 1
