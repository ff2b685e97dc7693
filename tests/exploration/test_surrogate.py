import pytest
import torch

from bbalpha.exploration.networks import Settings
from bbalpha.exploration.scales import Scales
from bbalpha.exploration.surrogate import DropoutDraws, Passes, fit_draws, fit_passes

QUICK = Settings(networks=2, passes=8, width=32, steps=20, share=None)


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


@pytest.mark.parametrize("measure", [lambda x: (6 * x).sin().sum(1), lambda x: (x - 0.3).square().sum(1) + 100.0])
@pytest.mark.parametrize("settings", [None, Settings(share=None)])
def test_values_without_noise_are_met_and_so_little_is_taken_for_noise(measure, settings):
    x = rows(30, 2)
    x = torch.cat((x, (x[:1] + 0.01 * rows(6, 2, 1)).clamp(0, 1)))  # some of them close together
    y = measure(x)
    passes = fit_passes(x, y, seed=0, settings=settings)
    mean, std = passes.moments(x)
    assert (mean - y).abs().max() < 1e-3 * y.std()
    assert std.max() < 1e-3 * y.std()
    assert (fit_draws(x, y, seed=0, settings=settings)(x) - y).abs().max() < 1e-3 * y.std()
    assert passes.precision.rsqrt() < 1e-3 * y.std()


def test_draws_and_moments_need_no_units_of_the_rows_precision():
    x, y = rows(12, 2), rows(12, 1)[:, 0]
    assert fit_draws(x.float(), y.float(), seed=0, settings=QUICK)(x.float()).dtype == torch.float64


def known(K, share):
    """Passes with features, scales and values of this file's own, and rows to ask for."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    x, at = rows(4, 2), rows(3, 2, 1)
    scales = Scales(*(torch.tensor(v).double() for v in ([0.4, 0.9], share, 0.01, 1.7)))
    target = (5 * x[:, 0]).sin() + x[:, 1]
    passes = Passes(
        lambda x: (3 * x @ turn).tanh().expand(K, -1, -1), scales, x, target.expand(K, -1), scales.ratio.expand(4),
        torch.tensor(2.0).double(), torch.tensor(3.0).double(),
    )  # fmt: skip
    return passes, at, (3 * x @ turn).tanh(), (3 * at @ turn).tanh(), target


def posterior(share):
    """Mean and covariance at the rows asked for, by the textbook."""
    passes, at, phi, its_phi, target = known(1, share)
    everything = torch.cat((phi, its_phi))[None]
    where = torch.cat((passes.x, at))
    C = passes.scales.size * passes.scales.covariance(where, where, everything, everything)[0]
    gain = C[4:, :4] @ torch.linalg.inv(C[:4, :4] + 0.01 * 1.7 * torch.eye(4))
    return 2 + 3 * gain @ target, 9 * (C[4:, 4:] - gain @ C[:4, 4:])


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_mean_and_deviation_are_those_of_the_posterior(share):
    passes, at, *_ = known(2, share)
    mean, covariance = posterior(share)
    found, std = passes.moments(at)
    torch.testing.assert_close(found, mean.expand(2, -1))
    torch.testing.assert_close(std, covariance.diagonal().sqrt().expand(2, -1))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_draws_have_the_moments_of_the_posterior(share):
    K = 20_000
    passes, at, *_ = known(K, share)
    mean, covariance = posterior(share)
    values = DropoutDraws(passes, torch.Generator().manual_seed(1))(at)
    error = (covariance.diagonal() / K).sqrt()
    if share == 1.0:  # the process is a sum of waves that all passes share, and exact only nearly
        assert bool(((values.mean(0) - mean).abs() < 5 * error).all())
    torch.testing.assert_close(values.mean(0), mean, rtol=0.02, atol=0.02 * float(covariance.diagonal().max().sqrt()))
    torch.testing.assert_close(values.T.cov(), covariance, rtol=0.1, atol=0.05 * float(covariance.abs().max()))


def test_readouts_have_the_moments_of_the_posterior():
    """Of the weights, found again from what is drawn: with features alone, and less the constant."""
    K = 20_000
    passes, _, phi, _, target = known(K, 1.0)
    full = torch.cat((phi, torch.ones(4, 1)), 1)
    precision = (full.T @ full / 0.01 + torch.eye(4)) / 1.7
    covariance = torch.linalg.inv(precision)
    mean = covariance @ full.T @ target / (0.01 * 1.7)
    draws = DropoutDraws(passes, torch.Generator().manual_seed(1))
    at = rows(40, 2, 7)
    values = (draws(at) - passes.centre) / passes.scale
    reads = torch.cat((passes.features(at)[0], torch.ones(40, 1)), 1)
    weight = values @ torch.linalg.pinv(reads).T
    error = (covariance.diagonal() / K).sqrt()
    assert bool(((weight.mean(0) - mean).abs() < 5 * error).all())
    torch.testing.assert_close(weight.T.cov(), covariance, rtol=0.1, atol=0.05 * float(covariance.abs().max()))


def test_a_row_that_is_joined_is_known_as_if_it_had_been_measured():
    passes, at, *_ = known(50, 0.4)
    row = at[1]
    mean, covariance = posterior(0.4)
    more = passes.joined(row, torch.Generator().manual_seed(0))
    value, std = more.moments(row[None])
    assert std.max() < 1e-3
    assert bool(((value[:, 0] - mean[1]).abs() < 4 * covariance[1, 1].sqrt()).all())
    assert value.std() > 0.5 * covariance[1, 1].sqrt()
    elsewhere, its_std = more.moments(at[:1])
    gain = covariance[0, 1] / covariance[1, 1]
    torch.testing.assert_close(elsewhere, mean[0] + gain * (value - mean[1]), rtol=1e-6, atol=1e-6)
    left = covariance[0, 0] - gain * covariance[0, 1]
    torch.testing.assert_close(its_std, left.sqrt().expand(50, 1), rtol=1e-6, atol=1e-6)
