"""Inputs by rows: tensors, tuples and mappings."""

import pytest
import torch

from bbalpha.inputs import Inputs


def model(*args, **kwargs):
    return args, kwargs


def test_how_a_model_is_called():
    x, y = torch.zeros(3, 2), torch.ones(3)
    assert Inputs.of(x, 0).call(model)[0][0] is x
    assert Inputs.of((x, y), 0).call(model)[0] == (x, y)
    assert Inputs.of([x, y], 0).call(model)[0] == (x, y)
    assert Inputs.of({"a": x, "b": 3}, 0).call(model)[1] == {"a": x, "b": 3}


def test_only_tensors_with_the_rows_are_changed():
    x, table = torch.arange(12.0).view(4, 3), torch.zeros(7, 3)
    first = Inputs.of((x, table, None), 0).first(2)
    assert first.rows == 2
    assert torch.equal(first.x[0], x[:2])
    assert first.x[1] is table
    assert first.x[2] is None


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_repeated_is_the_batch_again_and_again(batch_dim):
    x = torch.randn(4, 3, 2)
    large = Inputs.of(x, batch_dim).repeated(5)
    assert torch.equal(large, torch.cat([x] * 5, batch_dim))


def test_first_has_no_history_and_fresh_shares_no_memory():
    x = torch.randn(4, 3, requires_grad=True)
    assert not Inputs.of(x, 0).first(2).x.requires_grad
    fresh = Inputs.of({"x": x, "n": 1}, 0).fresh().x
    assert fresh["x"].data_ptr() != x.data_ptr()
    assert fresh["x"].requires_grad
    assert fresh["n"] == 1


def test_kinds_differ_where_a_model_may_behave_otherwise():
    x = torch.zeros(4, 3)
    others = [(x, 1), (x[:1], 0), (x[:0], 0), (x.double(), 0), ((x,), 0), ({"x": x}, 0), ({"y": x}, 0)]
    others += [((x, torch.zeros(5)), 0), ((x, torch.zeros(4)), 0)]  # without rows, with rows
    kinds = [Inputs.of(*args).kind for args in [(x, 0), *others]]
    assert len(set(kinds)) == len(kinds)
    assert Inputs.of(torch.ones(9, 3), 0).kind == kinds[0]


def test_mistakes():
    with pytest.raises(TypeError, match="`x` must be a tensor"):
        Inputs.of("text", 0)
    with pytest.raises(ValueError, match="at least one tensor"):
        Inputs.of({"a": 3}, 0)
    for batch_dim in (2, -1, True, 0.5):
        with pytest.raises(ValueError, match="`batch_dim` must be an axis"):
            Inputs.of(torch.zeros(3, 2), batch_dim)
