"""The sentences themselves are tested where they reach the user, in test_objectives.py."""

import numpy as np
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


def test_whole_numbers_of_numpy_count_and_nonsense_does_not():
    assert type(checks.check_count("n", np.int64(3))) is int
    assert checks.check_count("n", 0, least=0) == 0
    for wrong in (True, 1.0, "3", None, -1, 2**70, float("nan")):
        with pytest.raises(ValueError, match=r"^`n` must be"):
            checks.check_count("n", wrong)


def test_numbers_within_bounds():
    assert checks.check_number("x", np.float32(0.5), above=0) == 0.5
    assert checks.check_number("x", 0, least=0) == 0.0
    for wrong in (0, -1, float("inf"), float("nan"), "1", True, None):
        with pytest.raises(ValueError, match=r"^`x` must be a finite number above 0; got"):
            checks.check_number("x", wrong, above=0)


def test_shares_with_and_without_their_ends():
    assert checks.check_share("p", 0) == 0.0
    checks.check_inner_share("p", np.float32(0.5))
    for wrong in (1, 1.5, -0.1, float("nan"), "0.5", True, None):
        with pytest.raises(ValueError, match=r"^`p` must be"):
            checks.check_share("p", wrong)
        with pytest.raises(ValueError, match=r"^`p` must lie between 0 and 1, both left out; got"):
            checks.check_inner_share("p", wrong)
    with pytest.raises(ValueError, match="both left out; got 0"):
        checks.check_inner_share("p", 0)


def test_seeds_of_every_size_or_of_64_bits():
    assert checks.check_any_seed(None) is None
    assert checks.check_any_seed(-(2**70)) == -(2**70)
    assert type(checks.RULES["seed"]("seed", np.uint8(3))) is int
    for wrong in (0.5, "1", None, 2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match=r"^`seed` must be a whole number of 64 bits; got"):
            checks.RULES["seed"]("seed", wrong)
