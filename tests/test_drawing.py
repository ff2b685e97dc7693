"""The draws of K passes are the same in every layout, and one for all rows where they are shared."""

import pytest
import torch

from bbalpha.drawing import Drawing, NotStackableError
from bbalpha.masks import Passes

N, D, K = 5, 3, 4


def one_by_one(draw, **options):
    """`draw(drawing)` of each pass, stacked."""
    return torch.stack([draw(Drawing(Passes(0, k, 1), N, **options)) for k in range(K)])


@pytest.mark.parametrize("shared", [False, True])
def test_stacked_rows_get_what_they_get_alone(shared):
    x = torch.randn(N, D)
    alone = one_by_one(lambda d: d.dropped(x, 0.5), shared=shared)
    together = Drawing(Passes(0, 0, K), N, layout="stacked", shared=shared).dropped(x.repeat(K, 1), 0.5)
    assert torch.equal(together.view(K, N, D), alone)
    kept = (alone != 0).float()
    assert bool((kept == kept[:, :1]).all()) == shared


def test_rows_on_another_axis():
    x = torch.randn(7, N, D)
    alone = one_by_one(lambda d: d.dropped(x, 0.5), batch_dim=1, shared=True)
    large = Drawing(Passes(0, 0, K), N, layout="stacked", batch_dim=1, shared=True).dropped(x.repeat(1, K, 1), 0.5)
    assert torch.equal(large.view(7, K, N, D).movedim(1, 0), alone)
    kept = (alone != 0).float()
    assert torch.equal(kept, kept[:, :, :1].expand_as(kept))


def test_rows_times_heads_share_one_draw_a_head():
    x = torch.ones(2 * N, D)
    (kept,) = (Drawing(Passes(0, 0, 1), N, shared=True).dropped(x, 0.5) != 0).view(1, N, 2, D)
    assert torch.equal(kept, kept[:1].expand_as(kept))


def test_channels_are_dropped_whole():
    out = Drawing(Passes(0, 0, 1), N).dropped(torch.ones(N, D, 9), 0.5, channels=True)
    assert torch.equal(out, out[..., :1].expand_as(out))


def test_no_axis_of_rows_is_refused():
    drawing = Drawing(Passes(0, 0, K), N, layout="stacked")
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
