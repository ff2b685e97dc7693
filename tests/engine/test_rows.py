"""What is a row is found by how a model answers to other rows, never by a coincidence of sizes."""

import pytest
import torch
from torch import nn

import bbalpha
from bbalpha._engine.drawing import Place
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import find_plan
from bbalpha._engine.rows import a_few


def rows_of(model, x, batch_dim=0):
    return find_plan(model.eval(), Inputs.of(x, batch_dim), "auto", False, True).rows


class Flat(nn.Module):
    """Tokens of all rows in one long axis, in either order."""

    def __init__(self, rows_first):
        super().__init__()
        self.rows_first, self.drop, self.b = rows_first, nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x):  # (N, T, 4)
        n, t, d = x.shape
        h = x if self.rows_first else x.transpose(0, 1)
        h = self.b(self.drop(h.reshape(n * t, d)))
        return h.view(n, t, d) if self.rows_first else h.view(t, n, d).transpose(0, 1)


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("n", [1, 3, 4, 8])
def test_the_order_of_what_is_folded_is_found_by_its_values(rows_first, n):
    rows = rows_of(Flat(rows_first), torch.randn(n, 3, 4))
    assert rows.places["drop"] == (Place(0, 3, rows_first),)
    assert rows.independent


class Time(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.drop, self.head = nn.LSTM(2, 4), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x):  # (T, N, 2)
        return self.head(self.drop(self.lstm(x)[0][-1]))  # (N, 4)


@pytest.mark.parametrize("shape", [(4, 4, 2), (6, 4, 2), (4, 1, 2)])
def test_rows_of_the_output_need_not_be_on_the_axis_of_the_input(shape):
    model, x = Time(), torch.randn(*shape)
    assert rows_of(model, x, 1).outputs == (0,)
    p = bbalpha.predict_regression(model, x, n_passes=3, seed=0, batch_dim=1)
    torch.testing.assert_close(p.outputs, bbalpha.sample(model, x, 3, seed=0, batch_dim=1).detach())


@pytest.mark.parametrize("shape", [(4, 4, 2), (6, 4, 2)])
def test_a_batch_axis_that_was_forgotten_is_told(shape):
    with pytest.raises(ValueError, match=r"does not follow the \d rows of `x` on axis 0"):
        bbalpha.predict_regression(Time(), torch.randn(*shape), n_passes=3)


def test_a_pooled_output_is_no_row():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x).mean(0)

    with pytest.raises(ValueError, match="does not follow the 4 rows"):
        bbalpha.predict_regression(Pooled(), torch.randn(4, 4), n_passes=3)
    assert bbalpha.sample(Pooled(), torch.randn(4, 4), 3, masks="shared").shape == (3, 4)


def test_an_output_without_rows_is_never_taken_for_rows():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            h = self.drop(x)
            return h, h.mean(0)

    x = torch.randn(4, 4)
    assert bbalpha.predict_regression(Two(), x, n_passes=3, output=0).mean.shape == (4, 4)
    with pytest.raises(ValueError, match="as many rows as it is given; got 1 rows for 4"):
        bbalpha.predict_regression(Two(), x, n_passes=3, output=1)


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x, prototypes):
        return self.drop(x) @ prototypes.T


def test_which_inputs_have_rows_is_tried_or_said():
    model, x, prototypes = Prototypes(), torch.randn(5, 3), torch.randn(5, 3)
    assert rows_of(model, (x, prototypes)).axes == (0, None)
    said = bbalpha.predict_regression(model, (x, prototypes), n_passes=3, seed=0, batch_dim=(0, None)).outputs
    assert torch.equal(said, bbalpha.predict_regression(model, (x, prototypes), n_passes=3, seed=0).outputs)


def test_a_few_rows_differ_even_where_those_given_do_not():
    for x in (torch.zeros(3, 2), torch.ones(1, 4), torch.arange(6).expand(2, 6), torch.randn(100, 3)):
        few = a_few(Inputs.of(x)).x
        assert 5 <= len(few) <= 12
        assert len(few.unique(dim=0)) == len(few)


@pytest.mark.parametrize("normalise", [lambda h: h - h.mean(0), lambda h: h / h.abs().amax(), lambda h: h.softmax(0)])
@pytest.mark.parametrize("x", [torch.zeros(6, 4), torch.randn(6, 4), torch.randn(1, 4)])
def test_rows_that_depend_on_each_other_are_told_from_any_input(normalise, x):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)

        def forward(self, x):
            return normalise(self.drop(self.a(x)))

    model = Net()
    rows = rows_of(model, x)
    assert rows.answers
    assert not rows.independent
    later = torch.randn(9, 4)
    whole = bbalpha.sample(model, later, 3, seed=0, strategy="loop")
    assert torch.allclose(bbalpha.sample(model, later, 3, seed=0), whole, atol=1e-6)
    cut = bbalpha.predict_regression(model, later, n_passes=3, seed=0, batch_size=2).outputs
    assert torch.allclose(cut, whole, atol=1e-6)
