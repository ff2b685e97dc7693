import math

import torch
from sklearn.gaussian_process.kernels import Matern

from bbalpha.exploration.scales import RATIOS, Scales, likeliest, log_evidence, matern


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(x, phi, target, scales):
    """Log density of the values under every pass, and of one more value that is as large as expected: the mean."""
    covariance = scales.covariance(x, x, phi, phi) + scales.ratio * torch.eye(len(x), dtype=torch.float64)
    values = torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), scales.size * covariance)
    return values.log_prob(target).mean() - 0.5 * (scales.size.log() + 1 / scales.size)


def scales_at(at, size):
    return Scales(at[:-2].exp(), at[-2].sigmoid(), at[-1].exp(), size)


def test_matern_is_the_known_kernel():
    x, other, lengths = normal(5, 3), normal(4, 3, seed=1), torch.tensor([0.3, 1.0, 4.0]).double()
    expected = Matern(lengths.numpy(), nu=2.5)(x.numpy(), other.numpy())
    torch.testing.assert_close(matern(x / lengths, other / lengths), torch.from_numpy(expected))


def test_the_evidence_is_that_of_the_gaussian():
    x, phi, target = normal(6, 2), normal(3, 6, 4, seed=1), normal(6, seed=2)
    at = torch.tensor([[0.1, -0.7, 0.4, -2.0], [1.0, 0.2, -3.0, -6.0]], dtype=torch.float64)
    found, size = log_evidence(phi @ phi.mT, x, target, at, None)
    constant = 3 * math.log(2 * math.pi) + 3.5  # what the evidence leaves out: N log(2 pi) / 2 + (N + 1) / 2
    for i in range(2):
        own = scales_at(at[i], size[i])
        torch.testing.assert_close(found[i], by_hand(x, phi, target, own) + constant)
        for factor in (0.9, 1.1):
            assert by_hand(x, phi, target, scales_at(at[i], factor * size[i])) < by_hand(x, phi, target, own)


def test_its_slope_is_what_autograd_takes_it_to_be():
    x, phi, target = normal(6, 2), normal(3, 6, 4, seed=1), normal(6, seed=2)
    at = torch.tensor([[0.1, -0.7, 0.4, -2.0], [1.0, 0.2, -3.0, -6.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: log_evidence(phi @ phi.mT, x, target, a, None)[0], at)


def test_no_noise_on_a_grid_is_likelier():
    x, phi = torch.rand(12, 1, generator=torch.Generator().manual_seed(0)).double(), normal(2, 12, 3)
    target = (5 * x[:, 0]).sin() + 0.1 * normal(12)
    found = likeliest(x, phi, target, None)
    lengths = found.lengths.log()

    def total(log_ratio):
        at = torch.cat((lengths, torch.stack((found.share.logit(), log_ratio))))[None]
        return log_evidence(phi @ phi.mT, x, target, at, None)[0][0] - 0.5 * ((log_ratio + 20) / 6) ** 2

    grid = torch.linspace(math.log(RATIOS[0]), math.log(RATIOS[1]), 40).double()
    assert total(found.ratio.log()) > max(total(r) for r in grid) - 1e-6


def test_lengths_tell_which_inputs_count():
    x = torch.rand(30, 2, generator=torch.Generator().manual_seed(0)).double()
    found = likeliest(x, torch.zeros(1, 30, 1).double(), (8 * x[:, 0]).sin(), 0.0)
    assert found.lengths[1] > 5 * found.lengths[0]


def test_the_noise_of_values_without_any_is_tiny_and_rows_may_repeat():
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0)).double()
    x = torch.cat((x, x[:5]))
    target = (4 * x[:, 0]).sin() + x[:, 1]
    phi = torch.zeros(1, 25, 1).double()
    assert likeliest(x, phi, target, 0.0).ratio < 1e-6
    noisy = likeliest(x, phi, target + 0.3 * normal(25), 0.0)
    assert 0.15 < (noisy.ratio * noisy.size).sqrt() < 0.45
