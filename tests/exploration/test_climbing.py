import math

import pytest
import torch

from bbalpha.exploration.climbing import Drawn, Expected, log_h, log_improvement
from bbalpha.exploration.networks import Settings
from bbalpha.exploration.surrogate import fit_passes

QUICK = Settings(networks=2, passes=3, width=16, steps=10, share=None)


def rows(n, f, seed=0):
    return torch.rand(n, f, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected(noise=0.0, settings=QUICK):
    x = rows(10, 2)
    y = (5 * x).sin().sum(1) + noise * torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Expected(fit_passes(x, y, seed=0, settings=settings), torch.Generator().manual_seed(1))


@pytest.mark.parametrize("settings", [QUICK, Settings(passes=2)])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_expected_improvement_agrees_with_many_draws(noise, settings):
    climb = expected(noise, settings)
    at = rows(40, 2, 5)
    mean, std = climb.passes.moments(at)
    best = climb.passes.moments(climb.passes.x)[0].amin(1)
    draws = torch.randn(20_000, *mean.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    improved = (best[:, None] - mean - std * draws).clamp_min(0).mean(1)  # of every draw, over passes
    error = 5 * improved.std(0) / math.sqrt(len(draws))
    assert bool(((climb.score(at).exp() - improved.mean(0)).abs() < error + 1e-4).all())
    assert improved.mean(0).max() > 0.01


def test_the_improvement_is_known_far_below_what_it_can_be():
    z = torch.tensor([-8.0, -30.0, -200.0, -900.0, -1100.0, -1e6], dtype=torch.float64)
    series = 1 - 3 / z**2 + 15 / z**4 - 105 / z**6 + 945 / z**8
    tail = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) - 2 * z.abs().log() + series.log()
    torch.testing.assert_close(log_h(z), tail, rtol=1e-6, atol=1e-4)
    for seam in (-1.0, -1e3):
        beside = torch.tensor([seam * (1 - 1e-9), seam * (1 + 1e-9)], dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(log_h(beside).sum(), beside)
        assert (log_h(beside).diff() / log_h(beside)[0]).abs() < 1e-8
        assert (slope.diff() / slope[0]).abs() < 1e-5
    many = torch.linspace(-50, 10, 200).double().requires_grad_()
    assert torch.autograd.gradcheck(log_h, many)


def test_a_row_that_is_taken_is_not_worth_taking_again():
    for noise, settings in ((0.0, QUICK), (0.5, QUICK), (0.0, Settings()), (0.5, Settings())):
        climb = expected(noise, settings)
        at = climb.refine(rows(100, 2, 3))
        before = climb.score(at[None])
        climb.take(at)
        assert climb.score(at[None]) < before - 3


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


def test_a_row_that_is_taken_leaves_nothing_to_gain_beside_it():
    draws = lambda x: (x - 0.5).square().sum(1).expand(4, -1)  # noqa: E731
    climb = Drawn(draws, rows(6, 2))
    at = torch.full((1, 2), 0.5, dtype=torch.float64)
    before = climb.scores(at)
    climb.take(at[0])
    assert climb.scores(at) < before - 1
