"""Training rows out of Parquet: each once an epoch, shuffled, from any batch on; a killed run is an undisturbed one."""

import os
import signal
import subprocess
import sys
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from bbalpha.objectives import GaussianNLL
from bbalpha.training import Shards, fit
from bbalpha.training.feed import held_out, source

ROOT = Path(__file__).resolve().parents[2]
N = 103


@pytest.fixture
def folder(tmp_path):
    """Rows in two files, in row groups of 10 and of 7; the target is the number of the row."""
    x = np.random.default_rng(0).normal(size=(N, 2))
    frame = pd.DataFrame({"a": x[:, 0], "b": np.arange(N) / 64, "row": np.arange(N), "y": x[:, 0] * 2})
    (tmp_path / "rows").mkdir()
    frame[:60].to_parquet(tmp_path / "rows/0.parquet", row_group_size=10)
    frame[60:].to_parquet(tmp_path / "rows/1.parquet", row_group_size=7)
    return tmp_path / "rows"


def shards(folder, **options):
    return Shards(folder, x=["a", "b"], target="row", **{"batch_size": 8, "buffer": 25, **options})


def rows_of(batches):
    return torch.cat([target for _, target in batches]).tolist()


@pytest.mark.parametrize("buffer", [1, 25, 1000])
def test_every_row_once_an_epoch_in_an_order_of_its_own(folder, buffer):
    data = shards(folder, buffer=buffer)
    epochs = [list(data.batches(3, epoch)) for epoch in (0, 1, 0)]
    assert [len(x) for x, _ in epochs[0]] == [8] * 12 + [7]
    assert len(epochs[0]) == data.n_batches
    for batches in epochs:
        assert sorted(rows_of(batches)) == list(range(N))
        assert all(torch.equal(x[:, 1] * 64, target.float()) for x, target in batches)  # rows stay whole
    assert rows_of(epochs[0]) == rows_of(epochs[2])
    assert len({tuple(rows_of(data.batches(s, e))) for s in (3, 4) for e in (0, 1)}) == 4
    assert rows_of(data.batches(3, 0)) != list(range(N))
    assert rows_of(shards(folder, buffer=buffer, shuffle=False).batches(3, 0)) == list(range(N))


def test_an_epoch_can_begin_at_any_batch_without_what_was_before(folder, monkeypatch):
    data = shards(folder)
    whole = list(data.batches(0, 1))
    reads = []
    read = Shards._columns
    monkeypatch.setattr(Shards, "_columns", lambda self, group: reads.append(group) or read(self, group))
    for start in range(len(whole) + 1):
        reads.clear()
        rest = list(data.batches(0, 1, start))
        assert rows_of(rest) == rows_of(whole[start:]) if start < len(whole) else rest == []
        assert all(len(a) == len(b) for (a, _), (b, _) in zip(rest, whole[start:], strict=True))
        assert sum(n for _, _, n in reads) <= N - 8 * start + 40 or start == 0  # a buffer and a row group too much


def test_readers_have_rows_of_their_own_and_as_many(folder):
    data = [shards(folder, rank=rank, world_size=3) for rank in range(3)]
    for epoch in (0, 1):
        rows = [rows_of(one.batches(0, epoch)) for one in data]
        assert len({len(r) for r in rows}) == 1
        assert len(rows[0]) > N // 3 - 10
        assert len(set(chain(*rows))) == 3 * len(rows[0])
    assert set(rows_of(data[0].batches(0, 0))) != set(rows_of(data[0].batches(0, 1)))


def test_a_loop_of_ones_own_goes_on_where_it_was(folder):
    data = shards(folder)
    twice = [rows_of(data), rows_of(data)]
    assert twice[0] != twice[1]
    first, again = shards(folder), shards(folder)
    seen = [rows_of([batch]) for batch in islice(first, 5)]
    again.load_state_dict(first.state_dict())
    assert [*chain(*seen), *rows_of(again)] == twice[0]
    assert rows_of(again) == twice[1]
    with pytest.raises(ValueError, match="`state` must be of the same rows"):
        shards(folder, batch_size=9).load_state_dict(first.state_dict())


def trained(folder, checkpoint=None, objective=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    data = Shards(folder, x=["a", "b"], target=["y"], batch_size=8, buffer=25)
    history = fit(
        net, data, objective=objective or GaussianNLL(0.5), epochs=3, n_passes=3, checkpoint=checkpoint,
        checkpoint_every=4, length_scale=1.0, seed=1, validation=data,
    )  # fmt: skip
    return torch.cat([p.detach().flatten() for p in net.parameters()]), history


def cut(objective, step, how):
    """The objective, which ends the run at a step."""
    calls = [0]

    class Cut(type(objective)):
        def forward(self, *args):
            calls[0] += torch.is_grad_enabled()
            if calls[0] == step:
                how()
            return super().forward(*args)

    Cut.__name__, Cut.__qualname__, Cut.__module__ = "GaussianNLL", "GaussianNLL", GaussianNLL.__module__
    objective.__class__ = Cut
    return objective


@pytest.mark.parametrize("step", [3, 6, 14, 30])
def test_a_run_that_was_cut_off_goes_on_to_the_same_bits(folder, tmp_path, step):
    def stop():
        raise KeyboardInterrupt

    whole, history = trained(folder)
    assert history.n_steps == 39
    with pytest.raises(KeyboardInterrupt):
        trained(folder, tmp_path / "run", cut(GaussianNLL(0.5), step, stop))
    weights, again = trained(folder, tmp_path / "run")
    assert torch.equal(weights, whole)
    assert again.loss == history.loss
    assert again.nll == history.nll


def test_a_run_that_was_killed_goes_on_to_the_same_bits(folder, tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from test_shards import *; "
        "trained(Path(sys.argv[1]), Path(sys.argv[2]), "
        "cut(GaussianNLL(0.5), 22, lambda: os.kill(os.getpid(), signal.SIGKILL)))"
    )
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests/training")])
    command = [sys.executable, "-c", program, str(folder), str(tmp_path / "run")]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert any((tmp_path / "run").iterdir())
    assert torch.equal(trained(folder, tmp_path / "run")[0], trained(folder)[0])


def test_other_rows_are_another_run(folder, tmp_path):
    trained(folder, tmp_path / "run")
    pd.read_parquet(folder / "1.parquet")[::-1].to_parquet(folder / "1.parquet", row_group_size=7)
    with pytest.raises(ValueError, match="another `data`"):
        trained(folder, tmp_path / "run")


def test_what_cannot_be_is_said(folder):
    for options, said in (
        ({"x": "a"}, "`x` must be a list of columns"),
        ({"x": ["a", "nope"]}, "'nope' is missing"),
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"rank": 2, "world_size": 2}, "`rank` must be at most 1"),
        ({"world_size": 50}, "a row group for each of 50 readers; it has 13"),
    ):
        with pytest.raises(ValueError, match=said):
            Shards(folder, **{"x": ["a"], "target": "row", **options})
    with pytest.raises(TypeError, match="where `data` is a Shards"):
        held_out(shards(folder), 0.1, seed=0)
    pd.DataFrame({"a": ["x", "y"], "row": [0, 1]}).to_parquet(folder / "0.parquet")
    with pytest.raises(ValueError, match="must hold numbers"):
        list(Shards(folder / "0.parquet", x=["a"], target="row").batches(0, 0))


def test_a_source_of_shards_has_the_dtype_of_the_model(folder):
    feed = source(shards(folder), batch_size=3, dtype=torch.float64)
    x, target, weight = next(feed.epoch(0, 0))
    assert (x.dtype, target.dtype, len(x), weight) == (torch.float64, torch.int64, 8, None)
    assert feed.n_data == N
    assert feed.example().shape == (2, 2)
