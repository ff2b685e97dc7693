import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent


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


def test_the_readme_runs():
    code = (ROOT / "README.md").read_text().split("```python")[1].split("```")[0]
    found = {}
    exec(compile(code, "README.md", "exec"), found)
    assert found["p"].probs.shape == (1000, 3)
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]) <= 10
