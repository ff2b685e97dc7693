"""Inputs by rows: tensors, tuples and mappings."""

import numpy as np
import pytest
import torch

from bbalpha._engine.inputs import Inputs


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
    first = Inputs.of((x, table, None), 0).narrow(0, 2)
    assert first.rows == 2
    assert torch.equal(first.x[0], x[:2])
    assert first.x[1] is table
    assert first.x[2] is None


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_repeated_is_the_batch_again_and_again(batch_dim):
    x = torch.randn(4, 3, 2)
    large = Inputs.of(x, batch_dim).repeated(5).x
    assert torch.equal(large, torch.cat([x] * 5, batch_dim))


def test_chosen_rows_have_no_history_and_fresh_shares_no_memory():
    x = torch.randn(4, 3, requires_grad=True)
    assert not Inputs.of(x, 0).select(torch.tensor([1, 0])).x.requires_grad
    assert torch.equal(Inputs.of(x, 0).select(torch.tensor([1, 0])).x, x[[1, 0]])
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


def test_arrays_nested_inputs_and_objects():
    x, y = np.arange(6.0).reshape(3, 2), torch.ones(3)
    net = torch.nn.Linear(2, 1)
    given = Inputs.of({"a": x, "b": [y, (y, "text")]}, 0, model=net)
    assert [t.dtype for t in given.tensors] == [torch.float32] * 3
    assert given.narrow(1, 2).x["b"][1][0].shape == (2,)
    assert Inputs.of(x, 0).tensors[0].dtype == torch.float64
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert Inputs.of(packed, 0).call(model)[0][0] is packed
    assert Inputs.of(packed, 0).rows == 2
    own = type("Graph", (), {"x": y})()
    assert Inputs.of(own, 0).call(model)[0][0] is own
    assert Inputs.of(own, 0).rows is None


def test_rows_are_where_the_caller_says():
    x, edges = torch.zeros(2, 5), torch.zeros(2, 9)
    given = Inputs.of({"edges": edges, "x": x}, {"edges": None, "x": 1})
    assert given.rows == 5
    assert given.narrow(0, 3).x["x"].shape == (2, 3)
    assert given.narrow(0, 3).x["edges"] is edges
    assert len(given.readings()) == 1
    for wrong in ({"edges": None}, {"edges": None, "x": 2}, {"edges": 0, "x": 1}, {"edges": None, "x": None}, "x"):
        with pytest.raises(ValueError, match="`batch_dim` must"):
            Inputs.of({"edges": edges, "x": x}, wrong)


def test_readings_are_every_set_of_equal_lengths_the_first_tensors_first():
    a, b, c = torch.zeros(2, 9), torch.zeros(4, 3), torch.zeros(4, 4)
    axes = [given.axes for given in Inputs.of((a, b, c), 0).readings()]
    assert axes == [(0, None, None), (None, 0, 0), (None, 0, None), (None, None, 0)]


def test_mistakes():
    with pytest.raises(TypeError, match="`x` must be a tensor"):
        Inputs.of("text", 0)
    with pytest.raises(TypeError, match="arrays of numbers"):
        Inputs.of(np.array(["a"]), 0)
    with pytest.raises(ValueError, match="at least one tensor"):
        Inputs.of({"a": 3}, 0)
    for batch_dim in (2, -1, True, 0.5):
        with pytest.raises(ValueError, match="`batch_dim` must"):
            Inputs.of(torch.zeros(3, 2), batch_dim)
