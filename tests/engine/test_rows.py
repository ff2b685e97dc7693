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


# ------------------------------------------------------------------------------ an input of length 1 is stretched


class Masked(nn.Module):
    """Attention with a mask (T, T). Where T = 1 its weights hear nothing of it, unless they are not normalised."""

    def __init__(self, out, *, normalised=True, centred=False, twice=False):
        super().__init__()
        self.out, self.normalised, self.centred, self.twice = out, normalised, centred, twice
        self.drop, self.a = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, mask, x):  # (T, T), (N, T, 4)
        h = self.a(x)
        h = h - h.mean(0) if self.centred else h
        weights = (h @ h.mT + mask).softmax(-1) if self.normalised else (h @ h.mT) * mask
        h = self.drop(weights) @ self.drop(h)
        h = self.drop((h @ h.mT + mask).softmax(-1)) @ h if self.twice else h
        return {"tokens": h, "turned": h.transpose(0, 1), "pooled": h.mean(1)}[self.out]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.a = nn.Dropout(0.5), nn.Linear(4, 1)

    def forward(self, scale, x):  # (1,), (N, 4)
        return self.a(self.drop(x)) * scale


def everything(model, x, batch_dim=0):
    return [
        bbalpha.sample(model, x, 3, seed=0, masks="shared", batch_dim=batch_dim),
        bbalpha.predict_regression(model, x, n_passes=3, seed=0, batch_dim=batch_dim).outputs,
        bbalpha.predict_regression(model, x, n_passes=3, seed=0, masks="shared", batch_dim=batch_dim).outputs,
    ]


@pytest.mark.parametrize("out", ["tokens", "turned", "pooled"])
@pytest.mark.parametrize("options", [{}, {"centred": True}, {"twice": True}])
@pytest.mark.parametrize(("n", "t"), [(1, 1), (3, 1), (5, 1), (12, 1), (1, 3), (3, 3)])
def test_an_input_that_nobody_hears_of_has_no_rows(n, t, out, options):
    model = Masked(out, **options).eval()
    x = {"mask": torch.randn(t, t), "x": torch.randn(n, t, 4)}
    found, said = everything(model, x), everything(model, x, {"mask": None, "x": 0})
    for a, b in zip(found, said, strict=True):
        torch.testing.assert_close(a, b)
    assert found[1].shape == ((3, n, 3) if out == "pooled" else (3, n, t, 3))


@pytest.mark.parametrize("out", ["tokens", "turned", "scaled"])
@pytest.mark.parametrize("n", [3, 5, 12])
def test_one_row_that_may_be_something_else_is_refused_beside_other_rows(out, n):
    if out == "scaled":
        model, first, x = Scaled(), "scale", {"scale": torch.ones(1), "x": torch.randn(n, 4)}
    else:
        model, first, x = Masked(out, normalised=False), "mask", {"mask": torch.ones(1, 1), "x": torch.randn(n, 1, 4)}
    model.eval()
    said = {first: None, "x": 0}
    with pytest.raises(ValueError, match=rf"their lengths are \[1, {n}\], and the output follows more than one"):
        bbalpha.predict_regression(model, x, n_passes=3)
    with pytest.raises(ValueError, match="say which inputs have rows with `batch_dim`"):
        bbalpha.sample(model, x, 3, masks="shared")
    assert all(n in out.shape[1:3] for out in everything(model, x, said))
    drawn = bbalpha.sample(model, x, 3, seed=0)  # needs no rows
    torch.testing.assert_close(drawn, bbalpha.sample(model, x, 3, seed=0, batch_dim=said))


def test_one_row_beside_another_input_is_the_row():
    class Dead(Prototypes):
        def forward(self, x, prototypes):
            return super().forward(x * 0 + 1, prototypes)

    x, prototypes = torch.randn(1, 3), torch.randn(7, 3)
    for model in (Prototypes(), Dead()):
        assert rows_of(model, (x, prototypes)).axes == (0, None)
        assert bbalpha.predict_regression(model, (x, prototypes), n_passes=3).outputs.shape == (3, 1, 7)
    alone = {"scale": torch.ones(1), "x": torch.randn(1, 4)}
    assert bbalpha.predict_regression(Scaled(), alone, n_passes=3).outputs.shape == (3, 1, 1)


def test_one_row_stays_the_row_where_the_other_input_lends_its_length_alone():
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.a = nn.Dropout(0.5), nn.Linear(4, 3)

        def forward(self, x, steps):  # (N, 4), (T,)
            return self.a(self.drop(x)).expand(len(steps), -1, -1)  # (T, N, 3)

    for n in (1, 3):
        x = (torch.randn(n, 4), torch.linspace(0, 1, 7))
        assert bbalpha.predict_regression(Repeated(), x, n_passes=3).outputs.shape == (3, n, 7, 3)


class Alike(Masked):
    """Rows all come out the same, whatever their numbers are."""

    def forward(self, mask, x):
        return super().forward(mask, x.sign().abs())


@pytest.mark.parametrize("mask_first", [True, False])
@pytest.mark.parametrize("make", [lambda: Alike("pooled"), lambda: Masked("tokens", normalised=False, twice=True)])
def test_one_row_needs_no_evidence_of_several_to_share_its_draws(make, mask_first):
    model, x = make().eval(), {"mask": torch.randn(1, 1), "x": torch.randn(1, 1, 4)}
    x = x if mask_first else dict(reversed(x.items()))
    shared = bbalpha.sample(model, x, 3, seed=0, masks="shared")
    torch.testing.assert_close(shared, bbalpha.sample(model, x, 3, seed=0))


def test_where_nobody_hears_of_any_input_nobody_knows_the_rows():
    with pytest.raises(ValueError, match="the output follows more than one of them"):
        bbalpha.predict_regression(Alike("turned"), {"mask": torch.randn(1, 1), "x": torch.randn(3, 1, 4)}, n_passes=3)
