import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from bbalpha import checkpoint
from bbalpha._kernels import step_seed
from bbalpha.training.feed import held_out, order, rng_state, set_rng_state, source


def test_orders_are_permutations_that_differ_by_seed_and_epoch():
    orders = [order(50, seed=s, epoch=e) for s in (0, 1) for e in (0, 1)]
    assert all(torch.equal(o.sort().values, torch.arange(50)) for o in orders)
    assert len({tuple(o.tolist()) for o in orders}) == 4
    assert len({step_seed(s, t) for s in range(20) for t in range(500)}) > 9990


@pytest.mark.parametrize("kind", ["arrays", "dataset", "loader"])
def test_an_epoch_has_every_row_once(kind):
    x, y = torch.arange(10.0)[:, None], torch.arange(10)
    data = {
        "arrays": (x.double().numpy(), y.numpy()),
        "dataset": TensorDataset(x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True),
    }[kind]
    feed = source(data, batch_size=4, dtype=torch.float32)
    assert (feed.n_data, feed.n_batches) == (10, 3)
    batches = list(feed.epoch(seed=0, epoch=0))
    assert [len(b[1]) for b in batches] == [4, 4, 2]
    rows = torch.cat([b[0] for b in batches]).flatten()
    assert rows.dtype == torch.float32
    assert torch.equal(rows, torch.cat([b[1] for b in batches]).float())  # x and target stay together
    assert torch.equal(rows.sort().values, torch.arange(10.0))
    assert feed.example().shape == (2, 1)


def test_rows_without_weight_are_left_out_and_the_others_average_1():
    feed = source((torch.eye(4), torch.arange(4), [0.0, 1.0, 2.0, 3.0]), batch_size=8, dtype=torch.float32)
    ((_, target, weight),) = feed.epoch(0, 0)
    by_row = dict(zip(target.tolist(), weight.tolist(), strict=True))
    assert by_row == {1: 0.5, 2: 1.0, 3: 1.5}
    assert feed.n_data == 3


@pytest.mark.parametrize("wrap", [tuple, lambda data: TensorDataset(*data)])
def test_held_out_rows_are_apart_from_the_others(wrap):
    data = wrap((torch.arange(20.0)[:, None], torch.arange(20)))
    train, held = (source(d, batch_size=50, dtype=torch.float32) for d in held_out(data, 0.25, seed=1))
    ((_, a, _),), ((_, b, _),) = train.epoch(0, 0), held.epoch(0, 0)
    assert (len(a), len(b)) == (15, 5)
    assert sorted([*a.tolist(), *b.tolist()]) == list(range(20))
    with pytest.raises(TypeError, match="`validation` must be data of its own"):
        held_out(DataLoader(TensorDataset(torch.zeros(3))), 0.5, seed=0)


def test_generators_go_back_through_a_file(tmp_path):
    checkpoint.write_folder(tmp_path / "rng", rng_state())
    drawn = (torch.rand(3), np.random.randn(3), random.gauss(0, 1), np.random.rand())
    set_rng_state(checkpoint.read_folder(tmp_path / "rng").content)
    again = (torch.rand(3), np.random.randn(3), random.gauss(0, 1), np.random.rand())
    assert str(drawn) == str(again)


def test_a_batch_must_be_a_pair():
    feed = source(DataLoader(TensorDataset(torch.zeros(3, 1)), batch_size=3), batch_size=3, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"must be \(x, target\)"):
        next(feed.epoch(0, 0))


def test_a_mapping_with_labels_is_x_and_target():
    arrays = {"a": torch.arange(6.0)[:, None], "b": torch.arange(6), "labels": torch.arange(6)}
    feed = source(arrays, batch_size=4, dtype=torch.float32)
    for x, target, weight in feed.epoch(0, 0):
        assert set(x) == {"a", "b"}
        assert torch.equal(x["b"], target)
        assert weight is None
    train, held = held_out(arrays, 0.5, seed=0)
    assert sorted([*train[1].tolist(), *held[1].tolist()]) == list(range(6))
    with pytest.raises(ValueError, match=r"as 'labels'; got \['a', 'b'\]"):
        source({"a": 1, "b": 2}, batch_size=4, dtype=torch.float32)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: DataLoader(d, 2), lambda d: DataLoader(d, 2, shuffle=True)])
def test_looking_at_items_leaves_the_generators(wrap):
    class Noisy(TensorDataset):
        def __getitem__(self, i):
            return self.tensors[0][i] + torch.rand(()) + np.random.rand() + random.random(), self.tensors[1][i]

    sets = [wrap(Noisy(torch.eye(9), y)) for y in (torch.ones(9), torch.eye(9))]
    feeds = [source(d, batch_size=2, dtype=torch.float32) for d in sets]
    before = str(rng_state())
    told = [feed.fingerprint() for feed in (*feeds, *feeds)]
    assert str(rng_state()) == before
    assert told[0] == told[2] != told[1] == told[3]
