import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bbalpha.experiments import demo, results

ROOT = Path(__file__).resolve().parent.parent


def test_the_demo_runs_small(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bbalpha.experiments.demo", "--quick", "--out", str(tmp_path)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert "alpha = 0.5" in done.stdout
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    rows = results.read(tmp_path / "demo.json")["rows"]
    assert {(r["dataset"], r["alpha"]) for r in rows} == {
        (d, a) for d in ("digits", "diabetes") for a in (None, 0, 0.5, 1)
    }
    for r in rows:
        assert 0 <= r["auroc_tampered"] <= 1
        assert math.isfinite(r["nll"])


def test_tampering_keeps_columns_and_breaks_rows():
    x = torch.arange(60.0).view(20, 3)
    strange = demo._tampered(x, 0)
    assert torch.equal(strange.sort(0).values, x)
    assert (strange[:, 1] - strange[:, 0] != 1).any()


def test_results_are_written_whole_and_read_back(tmp_path):
    path = tmp_path / "deep" / "x.json"
    rows = [{"a": torch.tensor(0.1234567891), "b": float("nan"), "c": "text", "d": None}, {"a": 3}]
    results.write(path, command="make x", seed=1, seconds=2.34, rows=rows)
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
    content = results.read(path)
    assert content["rows"] == [{"a": 0.123457, "b": None, "c": "text", "d": None}, {"a": 3}]
    assert content["versions"]["torch"]
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match="lacks command"):
        results.read(path)


def test_tables_are_those_of_the_results():
    subprocess.run([sys.executable, "docs/make_tables.py", "--check"], check=True, cwd=ROOT)


def test_the_benchmark_runs_small(tmp_path):
    out = tmp_path / "b.json"
    command = [sys.executable, "benchmarks/engine.py", "--quick", "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    rows = results.read(out)["rows"]
    assert {r["work"] for r in rows} == {"tiny", "growth", "cnn"}
    assert all(r["ratio"] > 0 for r in rows if "ratio" in r)
