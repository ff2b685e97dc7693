import pytest
import torch

from bbalpha.exploration.ascent import ascend


def rows(n, f, seed=0):
    return torch.rand(n, f, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_climbing_reaches_the_top_and_stays_in_the_box():
    top = torch.tensor([0.3, 1.4], dtype=torch.float64)  # outside: the best in the box is (0.3, 1)
    found = ascend(lambda x: -(x - top).square().sum(1), rows(5, 2))
    assert (found - torch.tensor([0.3, 1.0])).abs().max() < 1e-2


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e9])
def test_a_narrow_ridge_is_followed_to_its_top_in_any_units(size):
    def minus_rosenbrock(x):
        z = 4 * x - 2
        return -size * (100 * (z[:, 1] - z[:, 0].square()).square() + (1 - z[:, 0]).square())

    found = ascend(minus_rosenbrock, rows(3, 2), calls=200)
    assert (found - 0.75).abs().max() < 1e-6


def test_each_start_climbs_as_if_it_were_alone_and_the_best_is_returned():
    def score(x):
        return (9 * x[:, 0]).sin() + x[:, 0]

    start = rows(4, 1)
    alone = torch.stack([ascend(score, row[None]) for row in start])
    torch.testing.assert_close(ascend(score, start), alone[int(score(alone).argmax())])


def test_where_there_is_no_number_it_does_not_go():
    found = ascend(lambda x: (x[:, 0] - 0.5).where(x[:, 0] < 0.8, torch.nan), torch.full((1, 1), 0.1).double())
    assert 0.7 < found < 0.8


def test_bounds_of_every_coordinate():
    low, high = torch.tensor([-3.0, 2.0]).double(), torch.tensor([-1.0, 5.0]).double()
    found = ascend(lambda x: x[:, 0] - x[:, 1], low + (high - low) * rows(3, 2), low=low, high=high)
    torch.testing.assert_close(found, torch.tensor([-1.0, 2.0]).double())
