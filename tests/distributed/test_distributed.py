"""Jobs of several processes, started by torchrun as users do: what they find must be what one process finds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import bbalpha
from bbalpha.distributed import Spread, Step, processes, rank_seed
from bbalpha.distributed.ranks import Ranks, shares

SCRIPT = Path(__file__).with_name("ranks.py")
CLOSE = 1e-5


def job(n, names, folder, *, ends_well=True):
    """A job of `n` processes that does what `ranks.py` calls by these names; what it said, and what rank 0 found."""
    source = str(Path(bbalpha.__file__).parents[1])
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0", str(SCRIPT), names, str(folder),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}, capture_output=True, text=True, timeout=500,
        check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == ends_well, done.stderr[-5000:]
    found = {p.stem: json.loads(p.read_text()) for p in folder.glob("*.json")}
    return done.stdout + done.stderr, found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return job(2, "laws,fits,refused,pieces", tmp_path_factory.mktemp("two"))[1]


def far(found):
    return {name: told for name, told in found.items() if not max(told[:2]) < CLOSE}


def test_gradients_of_two_ranks_are_those_of_one_process(two):
    assert len(two["laws"]) > 20
    assert not far(two["laws"])


def test_runs_of_two_ranks_are_those_of_one_process(two):
    free = two["fits"].pop("other masks")
    assert not far(two["fits"])
    assert free[0] < 0.1  # other masks of the same kind: the same loss, but for noise


def test_all_ranks_are_told_what_is_wrong(two):
    found = two["refused"]
    assert found.pop("epochs of the callback") == 2  # asked on rank 0 alone
    for name, word in {
        "data": "that of rank 1 is not that of rank 0", "sampler": "Leave the DistributedSampler out",
        "passes": "at least the number of ranks", "grid": "must divide the number of ranks, 2; got 3",
        "objective": "must go through bbalpha's", "optimizer": "must be a function of parameter groups",
        "half": "must be torch.bfloat16", "folder": "must be a folder", "nan": "target of this batch holds",
    }.items():  # fmt: skip
        assert all(word in told for told in found[name]), (name, found[name])


def test_pieces_of_rank_0_are_done_by_all_ranks(two):
    found = [[0, 0, [0, 0]], [1, 1, [1, 1]], [2, 0, [0, 0]], [3, 0, [0, 0]]]  # a piece, its rank, that of those inside
    assert two["pieces"] == {"found": found, "told": "4", "none": []}


@pytest.mark.slow
def test_gradients_and_runs_of_four_ranks_are_those_of_one_process(tmp_path):
    found = job(4, "laws,fits", tmp_path)[1]
    free = found["fits"].pop("other masks")
    assert len(found["laws"]) > 30
    assert not far(found["laws"])
    assert not far(found["fits"])
    assert free[0] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 2), (3, 1), (2, 4)])
def test_a_killed_rank_ends_the_job_and_fewer_go_on(before, after, tmp_path):
    said, _ = job(before, "killed", tmp_path, ends_well=False)
    assert f"Rank {before - 1} of {before} no longer answers" in said
    assert "Start the same command again" in said
    _, found = job(after, "resumed", tmp_path)
    _, found = job(1, "uninterrupted", tmp_path)
    ours, theirs = found["resumed"], found["uninterrupted"]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=CLOSE)
    assert ours["weights"] == pytest.approx(theirs["weights"], abs=CLOSE)


def test_the_example_runs_on_two_ranks(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "distributed.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
         "--rdzv-endpoint", "localhost:0", str(example)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(bbalpha.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("accuracy") == 1
    assert (tmp_path / "run").is_dir()


# ------------------------------------------------------------------------------ a process by itself


def net():
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


def test_a_process_by_itself_is_a_job_of_one():
    x = torch.randn(20, 2)
    runs = []
    for distributed in (False, True, Spread(shard=True)):
        torch.manual_seed(0)
        runs.append(net())
        bbalpha.fit(
            runs[-1], (x, x[:, :1]), objective=bbalpha.GaussianNLL(), epochs=2, seed=0, distributed=distributed
        )  # fmt: skip
    assert not torch.distributed.is_initialized()
    for other in runs[1:]:
        assert all(type(p) is nn.Parameter for p in other.parameters())
        assert all(torch.equal(p, q) for p, q in zip(runs[0].parameters(), other.parameters(), strict=True))


def test_parts_of_balanced_passes_are_the_passes():
    from bbalpha._engine.inputs import Inputs
    from bbalpha._engine.planning import run_passes

    for model in (net(), nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(8))):
        x = torch.randn(6, 2)
        whole = bbalpha.sample(model, x, 11, seed=5)
        parts = [
            run_passes(model, Inputs.of(x, 0), 11, masks="per_example", seed=5, only=part, chunk_size=2)
            for part in shares(11, 4)
        ]
        torch.testing.assert_close(torch.cat(parts), whole)
        grads = []
        for outputs in (whole, torch.cat(parts)):
            model.zero_grad()
            (outputs * torch.linspace(0, 1, outputs.numel()).view_as(outputs)).sum().backward()
            grads.append(model[0].weight.grad.clone())
        torch.testing.assert_close(*grads)


def test_shares_are_all_of_it_and_nearly_equal():
    for n in range(20):
        for count in range(1, 8):
            parts = shares(n, count)
            assert [i for part in parts for i in part] == list(range(n))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_seeds_of_blocks_differ_from_each_other_and_from_those_of_other_steps():
    seeds = {rank_seed(step, block) for step in range(100) for block in range(100)}
    assert len(seeds) == 100 * 100


def test_what_cannot_be_spread_is_refused():
    with pytest.raises(RuntimeError, match="among processes that are joined"):
        Step(net(), bbalpha.GaussianNLL())
    with pytest.raises(ValueError, match="`passes` must be a whole number"):
        Spread(passes=0)
    with pytest.raises(ValueError, match="`timeout` must be a finite number above 0"):
        Spread(timeout=0)
    with pytest.raises(ValueError, match="`distributed` must be True or False"):
        bbalpha.fit(net(), (torch.zeros(4, 2), torch.zeros(4, 1)), objective=bbalpha.GaussianNLL(), epochs=1,
                    distributed="ddp")  # fmt: skip
    with processes():
        with pytest.raises(ValueError, match="must divide the number of ranks, 1; got 2"):
            Ranks(Spread(passes=2))
        cut = net()
        Step(cut, bbalpha.GaussianNLL(), spread=Spread(shard=True))
        with pytest.raises(ValueError, match="`model` must be whole"):
            Step(cut, bbalpha.GaussianNLL())


def test_an_error_of_the_caller_stays_what_it_is():
    with pytest.raises(RuntimeError, match="mine"), processes():
        raise RuntimeError("mine")
    assert not torch.distributed.is_initialized()
