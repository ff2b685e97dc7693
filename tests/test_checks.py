"""The sentences themselves are tested where they reach the user, in test_objectives.py."""

import pytest
import torch

from bbalpha import checks


def test_numbers_of_all_kinds_are_an_alpha():
    for alpha in (1, 0.5, True, torch.tensor(0.5), torch.tensor([2])):
        assert isinstance(checks.check_alpha(alpha), float)


def test_values_are_read_only_where_python_may_see_them():
    assert checks.readable(torch.zeros(2))
    seen = []
    torch.func.vmap(lambda t: seen.append(checks.readable(t)) or t)(torch.zeros(2))
    assert seen == [False]


def test_weights_get_the_axes_of_the_values():
    assert checks.check_weight(torch.ones(3), torch.zeros(3, 4, 5)).shape == (3, 1, 1)
    with pytest.raises(ValueError, match="one weight per data point"):
        checks.check_weight(torch.ones(3, 1), torch.zeros(3, 4))


def test_a_learned_precision_keeps_its_gradient():
    tau = torch.ones((), requires_grad=True)
    assert checks.check_precision(tau, torch.zeros(2, 3)).requires_grad
