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


@pytest.mark.parametrize("value", [b"1", bytearray(b"1"), "1", [], object(), 1j, torch.ones(2), float("nan"), 10**400])
def test_what_is_no_number_is_named(value):
    with pytest.raises(ValueError, match="`alpha` must be a finite number"):
        checks.check_number("alpha", value)


@pytest.mark.parametrize("alpha", [b"1", [], torch.ones(2), 1j, object(), 10**400])
def test_what_is_no_alpha_is_named(alpha):
    with pytest.raises(TypeError, match="`alpha` must be a finite number"):
        checks.check_alpha(alpha)


@pytest.mark.parametrize("path", ["", "\0", "a\0b", "x" * 300, "a/" + "x" * 300])
def test_what_names_no_file_is_named(path):
    with pytest.raises(ValueError, match="`path` must name a file or a folder"):
        checks.check_path("path", path)


@pytest.mark.parametrize("path", [None, 3, b"x", [], object()])
def test_what_is_no_path_is_named(path):
    with pytest.raises(TypeError, match="`path` must be a path"):
        checks.check_path("path", path)


@pytest.mark.parametrize("weight", ["x", [object()], [1j], {}])
def test_weights_that_are_no_numbers_are_named(weight):
    with pytest.raises((TypeError, ValueError), match="`sample_weight` must h"):
        checks.check_weight(weight, torch.zeros(1, 4))


@pytest.mark.parametrize("value", ["x", {}, {"a": 1}, [0], [2**70], None])
def test_what_are_no_widths_is_named(value):
    with pytest.raises(ValueError, match="`sizes` must be"):
        checks.check_widths("sizes", value)


def test_whole_numbers_of_either_sign():
    assert checks.check_whole("ignore_index", np.int64(-100)) == -100
    for value in (True, 0.5, "1", 2**64, None):
        with pytest.raises(TypeError, match="`ignore_index` must be a whole number"):
            checks.check_whole("ignore_index", value)
