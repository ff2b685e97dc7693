"""Rows in batches, passes in groups: what is held at a time, and what comes out."""

import pytest
import torch
from torch import nn

import bbalpha
from bbalpha._engine import batches
from bbalpha._engine.batches import PassOptions, collect


def joined(groups, where):
    return (torch.cat(list(groups)),)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("total", [None, 100])
def test_rows_are_held_in_one_place_that_at_most_doubles(axis, total):
    x = torch.randn(3, 100, 2).movedim(1, axis)
    rows = batches._Rows(axis)
    for part in x.split(7, axis):
        rows.add((part,), part.shape[axis], total=total)
        assert len(rows.held) == 1
        assert rows.held[0].shape[axis] <= (total or 2 * rows.count)
    assert torch.equal(rows.joined()[0], x)


def test_one_batch_is_not_copied():
    x = torch.randn(5, 2)
    rows = batches._Rows(0)
    rows.add((x,), 5, total=5)
    assert rows.joined()[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize(("batch_size", "budget"), [(None, 64), (3, 64), (None, 4096), (20, 30)])
def test_rows_times_passes_stay_within_the_budget(batch_size, budget, monkeypatch):
    monkeypatch.setattr(batches, "_BUDGET", budget)
    seen = []

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 8), nn.Dropout(0.5)

        def forward(self, x):
            out = self.layer(self.drop(x))
            seen.append(out.numel())
            return out

    model, x = Wide(), torch.randn(20, 4)
    for _ in range(2):  # the first call also tries strategies out
        seen.clear()
        (outputs,) = collect(model, x, PassOptions(n_passes=6, batch_size=batch_size), joined, row_axis=1)
    assert outputs.shape == (6, 20, 8)
    assert sum(seen) == 6 * 20 * 8  # passes are stacked here: what is seen is what is held
    one_pass = (batch_size or 1) * 8  # no fewer than one pass of a batch can be run
    assert max(seen) <= max(budget, one_pass)


def test_reduce_is_told_its_first_row():
    starts = []

    def reduce(groups, where):
        starts.append(where.start)
        assert [where.row(j) for j in range(2)] == [where.start, where.start + 1]
        return joined(groups, where)

    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    collect(model, (torch.randn(n, 2) for n in (3, 4, 5)), PassOptions(n_passes=2, batch_size=2), reduce, row_axis=1)
    assert starts == [0, 2, 3, 5, 7, 9, 11]


def test_an_error_in_reduce_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()

    def reduce(groups, where):
        next(groups)
        raise KeyError

    with pytest.raises(KeyError) as caught:
        collect(model, torch.randn(4, 2), PassOptions(n_passes=2), reduce, row_axis=1)
    assert caught.tb is not None  # frames are alive: nothing waits for the garbage collector
    assert all(m.training for m in model.modules())


def test_convolutions_and_embeddings_say_what_they_take():
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"layer '0' takes 3 channels and got shape \(2, 1, 8, 8\)"):
        bbalpha.predict_regression(images, torch.zeros(2, 1, 8, 8), n_passes=2)
    words = nn.Sequential(nn.Embedding(10, 4), nn.Dropout(0.5))
    with pytest.raises(ValueError, match="layer '0' takes whole numbers"):
        bbalpha.predict_regression(words, torch.zeros(2, 5), n_passes=2)
