"""Pieces of work on all ranks: `bbalpha fit` under torchrun gives the model of one process, and all ranks work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import bbalpha
from bbalpha._spread import spread, spreading
from bbalpha.distributed.pieces import on_all_ranks
from bbalpha.tabular.model import TableModel

SCRIPT = Path(__file__).with_name("dealt.py")
SOURCE = str(Path(bbalpha.__file__).parents[1])


def run(folder, *words, ranks=2):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
              "--rdzv-endpoint", "localhost:0", str(SCRIPT), str(folder)] if ranks else ["-m", "bbalpha"]  # fmt: skip
    return subprocess.run(
        [sys.executable, *launch, *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
    )  # fmt: skip


@pytest.mark.slow
def test_a_fit_under_torchrun_is_that_of_one_process(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 2))
    pd.DataFrame(x, columns=["a", "b"]).assign(y=x[:, 0] * 2 + x[:, 1] ** 2).to_csv(tmp_path / "t.csv", index=False)
    found = []
    for ranks in (2, 0):
        words = ("fit", "t.csv", "--target", "y", "--budget", "quick", "-o", f"m{ranks}", "--json")
        done = run(tmp_path, *words, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stderr.count("t.csv: 60 rows") == 1
        told = json.loads(done.stdout)
        found.append(told["scores"])
    assert found[0] == found[1]
    model, other = (TableModel.load(tmp_path / f"m{ranks}") for ranks in (2, 0))
    frame = pd.read_csv(tmp_path / "t.csv")
    pd.testing.assert_frame_equal(model.predict(frame), other.predict(frame), check_exact=True)
    assert all(int((tmp_path / f"rank{rank}").read_text()) > 0 for rank in range(2))
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target", "z"), "has no column 'z'"),
        (("--target", "y", "--jobs", "2"), "`jobs` and `backend` must be left out under torchrun"),
    ],
)
def test_a_mistake_is_said_once_and_ends_all(words, said, tmp_path):
    pd.DataFrame({"a": range(60), "y": range(60)}).to_csv(tmp_path / "t.csv", index=False)
    done = run(tmp_path, "fit", "t.csv", *words)
    assert done.returncode != 0
    assert [said in line for line in done.stderr.splitlines() if line.startswith("bbalpha:")] == [True]
    assert (tmp_path / "rank1").read_text() == "0"


# ------------------------------------------------------------------------------ a process by itself


def failing(number):
    if number == 1:
        raise Odd("one", lambda: None)
    return number


class Odd(Exception):
    """An error that cannot be sent."""


def inside(number):
    return list(spread(abs, [-number, number]))


def test_pieces_come_in_order_and_those_inside_of_pieces_stay_there():
    assert on_all_ranks(lambda: list(spread(inside, [3, 1, 2]))) == [[3, 3], [1, 1], [2, 2]]
    assert on_all_ranks(lambda: list(spread(inside, []))) == []


def test_the_error_of_a_piece_is_raised_behind_the_results_before_it():
    found = []

    def work():
        for result in spread(failing, [0, 1, 2]):
            found.append(result)

    with pytest.raises(RuntimeError, match="Odd"):
        on_all_ranks(work)
    assert found == [0]
    with pytest.raises(KeyError, match="mine"):
        on_all_ranks(lambda: {}["mine"])


def test_other_ways_to_share_pieces_are_refused():
    def work():
        with spreading("loky", jobs=2):
            pass

    with pytest.raises(ValueError, match="must be left out under torchrun"):
        on_all_ranks(work)
