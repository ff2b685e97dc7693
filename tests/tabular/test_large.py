"""Predictions in parts: each row once and in order, the same wherever the rows are cut and whoever makes them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from houses import houses
from typer.testing import CliRunner

from bbalpha.cli import app
from bbalpha.estimators import BBAlphaRegressor
from bbalpha.tabular import large
from bbalpha.tabular.large import predict_parquet
from bbalpha.tabular.model import TableModel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model of houses."""
    frame = houses().drop(index=3)
    columns = ["size", "town", "rooms", "garden", "sold"]
    settings = {"hidden_layer_sizes": (8,), "noise": "constant", "dropout": 0.1, "n_ensemble": 1, "epochs": 2}
    fitted = BBAlphaRegressor(**settings, n_predict_passes=10, random_state=0).fit(frame[columns], frame["price"])
    path = tmp_path_factory.mktemp("model") / "m"
    fitted.save(path)
    return path


def many(n, seed=0):
    rng = np.random.default_rng(seed)
    frame = houses(240).iloc[rng.integers(0, 240, n)].reset_index(drop=True)
    return frame.assign(size=rng.uniform(50, 200, n), row=np.arange(n))


def written(folder):
    frame = pd.read_parquet(folder)
    assert len(pq.ParquetDataset(folder).files) == len(list(folder.glob("part-*.parquet")))
    return frame


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(large, "PART_ROWS", 100)


def test_every_row_once_in_order_as_in_memory(model, small_parts, tmp_path):
    frame = many(950)
    source = tmp_path / "rows"
    source.mkdir()
    frame[:500].to_parquet(source / "a.parquet", row_group_size=70)
    frame[500:].to_parquet(source / "b.parquet", row_group_size=450)
    (source / "_SUCCESS").touch()
    done = predict_parquet(model, source, tmp_path / "out", inputs=True)
    found = written(tmp_path / "out")
    assert (done.missing, done.rows, done.written) == (0, 950, 950)
    assert done.parts == len(list((tmp_path / "out").glob("part-*"))) == 4 + 1
    assert np.array_equal(found["row"], frame["row"])
    assert list(found["town"]) == list(frame["town"])
    whole = TableModel.load(model).predict(frame)
    for name in ("mean", "std", "low", "high"):
        np.testing.assert_allclose(found[name], whole[name], rtol=1e-5)
    assert np.array_equal(found["unusual"], whole["unusual"])


def test_ranks_jobs_and_cuts_change_no_bit(model, small_parts, tmp_path):
    many(600).to_parquet(tmp_path / "rows.parquet", row_group_size=50)
    predict_parquet(model, tmp_path / "rows.parquet", tmp_path / "one")
    whole = written(tmp_path / "one")
    dones = [predict_parquet(model, tmp_path / "rows.parquet", tmp_path / "two", rank=r, world_size=4) for r in (2, 0)]
    assert [d.missing for d in dones] == [5, 3]  # of six parts
    (tmp_path / "two/part-000000.parquet").unlink()  # as if it had never been finished
    kept = (tmp_path / "two/part-000002.parquet").stat().st_mtime_ns
    done = predict_parquet(model, tmp_path / "rows.parquet", tmp_path / "two")
    assert (done.missing, done.written) == (0, 400)
    assert (tmp_path / "two/part-000002.parquet").stat().st_mtime_ns == kept
    pd.testing.assert_frame_equal(written(tmp_path / "two"), whole)
    assert predict_parquet(model, tmp_path / "rows.parquet", tmp_path / "two").written == 0


SLOWLY = """
import sys, time
from bbalpha.tabular import large

def slowly(path, done=large.os.fsync):
    done(path)
    time.sleep(0.1)

large.PART_ROWS, large.os.fsync = 100, slowly
large.predict_parquet(*sys.argv[1:4])
"""


def test_a_killed_run_goes_on_and_no_row_is_lost_or_doubled(model, small_parts, tmp_path):
    frame, source, out = many(4000), tmp_path / "rows.parquet", tmp_path / "out"
    frame.to_parquet(source, row_group_size=100)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, str(model), str(source), str(out)], env=environment)
    while len(list(out.glob("part-*.parquet"))) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = len(list(out.glob("part-*.parquet")))
    assert 3 <= before < 40
    done = predict_parquet(model, source, out)
    assert (done.written, done.missing) == (4000 - 100 * before, 0)
    assert not list(out.glob(".*.tmp"))
    predict_parquet(model, source, tmp_path / "undisturbed")
    pd.testing.assert_frame_equal(written(out), written(tmp_path / "undisturbed"))


def test_what_cannot_be_is_said(model, small_parts, tmp_path, monkeypatch):
    rows, out = tmp_path / "rows.parquet", tmp_path / "out"
    many(50).to_parquet(rows)
    predict_parquet(model, rows, out)
    for options, said in (
        ({"coverage": 0.5}, "predictions of another asked"),
        ({"seed": 3}, "predictions of another asked"),
        ({"rank": 2, "world_size": 2}, "`rank` must be at most 1; got 2"),
        ({"rank": 1}, "must be given together; got 1 and None"),
    ):
        with pytest.raises(ValueError, match=said):
            predict_parquet(model, rows, out, **options)
    with pytest.raises(ValueError, match="is a file"):
        predict_parquet(model, rows, rows)
    many(50, seed=1).to_parquet(rows)
    with pytest.raises(ValueError, match="predictions of another source"):
        predict_parquet(model, rows, out)
    many(50).drop(columns="town").to_parquet(rows)
    with pytest.raises(ValueError, match="'town' is missing"):
        predict_parquet(model, rows, tmp_path / "other")
    many(0).to_parquet(rows)
    with pytest.raises(ValueError, match="at least one row"):
        predict_parquet(model, rows, tmp_path / "other")
    rows.write_bytes(b"no")
    with pytest.raises(ValueError, match="must be a Parquet file"):
        predict_parquet(model, rows, tmp_path / "other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="a folder of such"):
        predict_parquet(model, tmp_path / "empty", tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="There is no file"):
        predict_parquet(model, tmp_path / "nope", tmp_path / "other")


def test_the_ranks_of_torchrun_share_the_work(model, small_parts, tmp_path, monkeypatch):
    many(400).to_parquet(tmp_path / "rows.parquet", row_group_size=100)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, left in ((1, 3), (2, 2), (0, 0)):
        monkeypatch.setenv("RANK", str(rank))
        assert predict_parquet(model, tmp_path / "rows.parquet", tmp_path / "out").missing == left


def test_memory_is_that_of_a_part(model, small_parts, tmp_path, monkeypatch):
    seen = []
    answered = large._answered
    monkeypatch.setattr(large, "_answered", lambda table, *rest: seen.append(len(table)) or answered(table, *rest))
    many(950).to_parquet(tmp_path / "rows.parquet", row_group_size=400)
    predict_parquet(model, tmp_path / "rows.parquet", tmp_path / "out")
    assert sum(seen) == 950
    assert max(seen) <= large.PART_ROWS


def command(*words):
    return CliRunner().invoke(app, ["predict", *map(str, words)])


def test_the_command_writes_parts_for_folders_and_jobs(model, small_parts, tmp_path):
    many(250).to_parquet(tmp_path / "rows.parquet", row_group_size=50)
    done = command(model, tmp_path / "rows.parquet", "-o", tmp_path / "parts", "--jobs", 1, "--coverage", 0.5)
    assert done.exit_code == 0, done.output
    assert "250 of 250 rows predicted now" in done.stderr
    done = command(model, tmp_path / "rows.parquet", "-o", tmp_path / "whole.parquet", "--coverage", 0.5)
    assert done.exit_code == 0, done.output
    whole = pd.read_parquet(tmp_path / "whole.parquet")
    found = written(tmp_path / "parts")
    assert list(found) == list(whole)
    np.testing.assert_allclose(found[["mean", "low"]], whole[["mean", "low"]], rtol=1e-5)
    shared = ("-o", tmp_path / "shared", "--world-size", 2)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows.parquet").rename(tmp_path / "rows/0.parquet")
    assert "1 of 3 parts are for other callers" in command(model, tmp_path / "rows", *shared, "--rank", 0).stderr
    assert "parts are" not in command(model, tmp_path / "rows", *shared, "--rank", 1).stderr
    for words, said in (
        (("-o", tmp_path / "a.csv"), "must name a folder of Parquet parts"),
        ((), "predicted in parts; got '-'"),
        ((*shared, "--rank", 2), "`rank` must be at most 1"),
    ):
        done = command(model, tmp_path / "rows", *words)
        assert (done.exit_code, said in " ".join(done.stderr.split())) == (2, True), done.output


@pytest.mark.slow
def test_jobs_change_no_bit(model, small_parts, tmp_path):
    many(500).to_parquet(tmp_path / "rows.parquet", row_group_size=100)
    predict_parquet(model, tmp_path / "rows.parquet", tmp_path / "one")
    predict_parquet(model, tmp_path / "rows.parquet", tmp_path / "two", jobs=2)
    pd.testing.assert_frame_equal(written(tmp_path / "one"), written(tmp_path / "two"))
