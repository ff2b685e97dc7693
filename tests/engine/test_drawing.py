"""The draws of K passes are the same by every strategy, and one for all rows where they are shared."""

import pytest
import torch

from bbalpha._engine.drawing import Drawing, NotShareableError, NotStackableError, Place
from bbalpha._kernels import Passes

N, D, K = 5, 3, 4


def at(axis, **options):
    return lambda _: Place(axis, **options)


def one_by_one(draw, **options):
    """`draw(drawing)` of each pass, stacked."""
    return torch.stack([draw(Drawing(Passes(0, k, 1), N, **options)) for k in range(K)])


@pytest.mark.parametrize("shared", [False, True])
def test_stacked_rows_get_what_they_get_alone(shared):
    x = torch.randn(N, D)
    alone = one_by_one(lambda d: d.dropped(x, 0.5), shared=shared, where=at(0))
    together = Drawing(Passes(0, 0, K), N, strategy="repeat", shared=shared, where=at(0)).dropped(x.repeat(K, 1), 0.5)
    assert torch.equal(together.view(K, N, D), alone)
    kept = (alone != 0).float()
    assert bool((kept == kept[:, :1]).all()) == shared


def test_rows_on_another_axis():
    x = torch.randn(7, N, D)
    alone = one_by_one(lambda d: d.dropped(x, 0.5), where=at(1), shared=True)
    large = Drawing(Passes(0, 0, K), N, strategy="repeat", where=at(1), shared=True).dropped(x.repeat(1, K, 1), 0.5)
    assert torch.equal(large.view(7, K, N, D).movedim(1, 0), alone)
    kept = (alone != 0).float()
    assert torch.equal(kept, kept[:, :, :1].expand_as(kept))


@pytest.mark.parametrize("rows_first", [True, False])
def test_rows_times_heads_share_one_draw_a_head(rows_first):
    x = torch.ones(2 * N, D)
    where = at(0, fold=2, rows_first=rows_first)
    kept = Drawing(Passes(0, 0, 1), N, shared=True, where=where).dropped(x, 0.5) != 0
    kept = kept.view(N, 2, D) if rows_first else kept.view(2, N, D).movedim(0, 1)
    assert torch.equal(kept, kept[:1].expand_as(kept))
    assert not torch.equal(kept[0, 0], kept[0, 1])
    if rows_first:
        alone = one_by_one(lambda d: d.dropped(x, 0.5), shared=True, where=where)
        large = Drawing(Passes(0, 0, K), N, strategy="repeat", shared=True, where=where).dropped(x.repeat(K, 1), 0.5)
        assert torch.equal(large.view(K, 2 * N, D), alone)


def test_a_number_of_entries_that_varies_shares_one_draw():
    kept = Drawing(Passes(0, 0, 1), N, shared=True, where=at(0, fold=0)).dropped(torch.ones(7, D), 0.5)
    assert torch.equal(kept, kept[:1].expand_as(kept))


@pytest.mark.parametrize("where", [None, lambda _: None, at(0, fold=2), at(5)])
def test_rows_that_nobody_knows_share_nothing(where):
    with pytest.raises(NotShareableError):
        Drawing(Passes(0, 0, 1), N, shared=True, where=where).dropped(torch.ones(N, D), 0.5)


def test_tensors_without_rows_are_drawn_whole():
    x = torch.ones(N, D)
    alone = Drawing(Passes(0, 0, 1), N).dropped(x, 0.5)
    assert torch.equal(Drawing(Passes(0, 0, 1), N, shared=True, where=at(None)).dropped(x, 0.5), alone)


def test_row_by_row_each_from_the_same_numbers():
    x = torch.full((N, 40), 0.5)
    out = Drawing(Passes(0, 0, 1), N, shared=True, where=at(0)).each(
        "it", x, lambda t, g: torch.poisson(t, generator=g)
    )
    assert torch.equal(out, out[:1].expand_as(out))
    assert len(out.unique()) > 1


def test_channels_are_dropped_whole():
    out = Drawing(Passes(0, 0, 1), N).dropped(torch.ones(N, D, 9), 0.5, channels=True)
    assert torch.equal(out, out[..., :1].expand_as(out))


def test_no_axis_of_rows_is_refused():
    drawing = Drawing(Passes(0, 0, K), N, strategy="repeat", where=at(None))
    with pytest.raises(NotStackableError, match="no axis of rows"):
        drawing.dropped(torch.ones(7, D), 0.5)
    with pytest.raises(NotStackableError, match="at once"):
        drawing.alone("randperm")


def test_nothing_is_drawn_at_rate_1_and_for_no_rows():
    drawing = Drawing(Passes(0, 0, 1), N)
    assert torch.equal(drawing.dropped(torch.ones(N, D), 1.0), torch.zeros(N, D))
    assert drawing.fired == 0
    assert drawing.dropped(torch.ones(0, D), 0.5).shape == (0, D)
    assert drawing.fired == 1
