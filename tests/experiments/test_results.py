import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parents[2]


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


def test_what_a_killed_writer_left_goes(tmp_path):
    left = tmp_path / f".x.json.{'a' * 32}.tmp"
    left.write_text("half")
    results.write(tmp_path / "x.json", command="x", seed=0, seconds=1.0, rows=[])
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_ledger_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    first = results.Ledger(tmp_path / "x.json", command="make x", seed=1)
    first.add([{"alpha": 0.5, "nll": 1.0}], seconds=2)
    again = results.Ledger(tmp_path / "x.json", command="make x", seed=1)
    assert again.has(alpha=0.5)
    assert not again.has(alpha=0.0)
    again.add([{"alpha": 0.0, "nll": 2.0}], seconds=3, part="fit")
    results.Ledger(tmp_path / "x.json", command="make x", seed=1).add([], seconds=4, part="fit")
    content = results.read(tmp_path / "x.json")
    assert [r["alpha"] for r in content["rows"]] == [0.5, 0.0]
    assert content["seconds"] == 9
    assert content["seconds_of"] == {"fit": 7}
    with pytest.raises(ValueError, match=r"results of seed 2; .* has seed 1: delete it"):
        results.Ledger(tmp_path / "x.json", command="make x", seed=2)
    monkeypatch.setattr(results, "versions", lambda: {"torch": "0"})
    with pytest.raises(ValueError, match="delete it, or give another"):
        results.Ledger(tmp_path / "x.json", command="make x", seed=1)


def test_a_ledger_of_any_release_names_all_of_them(tmp_path, monkeypatch):
    path, options = tmp_path / "x.json", {"command": "make x", "seed": 0}
    for release in ("0.1.0", "0.2.0", "0.2.0"):
        now = {"bbalpha": release, "torch": "2"}
        monkeypatch.setattr(results, "versions", now.copy)
        results.Ledger(path, **options, any_release=True).add([{"by": release}], seconds=1.0)
    content = results.read(path)
    assert content["versions"] == {"bbalpha": "0.1.0, 0.2.0", "torch": "2"}
    assert [row["by"] for row in content["rows"]] == ["0.1.0", "0.2.0", "0.2.0"]
    with pytest.raises(ValueError, match=r"results of bbalpha 0\.2\.0; .* has bbalpha 0\.1\.0, 0\.2\.0"):
        results.Ledger(path, **options)
    monkeypatch.setattr(results, "versions", lambda: {"bbalpha": "0.2.0", "torch": "3"})
    with pytest.raises(ValueError, match="torch 3"):
        results.Ledger(path, **options, any_release=True)


def test_a_ledger_of_other_settings_is_refused(tmp_path):
    def ledger(**settings):
        return results.Ledger(tmp_path / "x.json", command="make x", seed=1, settings=settings)

    ledger(rate=0.1, widths=(2, 3)).add([{"a": 1}], seconds=1)
    ledger(rate=0.1, widths=(2, 3)).add([{"a": 2}], seconds=1)
    content = results.read(tmp_path / "x.json")
    assert content["settings"] == {"rate": 0.1, "widths": [2, 3]}
    assert content["rows"] == [{"a": 1}, {"a": 2}]
    with pytest.raises(ValueError, match=r"results of rate 0.2, decay 1; .* has rate 0.1, decay None: delete it"):
        ledger(rate=0.2, widths=(2, 3), decay=1)
    with pytest.raises(ValueError, match=r"has rate 0.1, widths \[2, 3\]"):
        ledger()
    results.write(tmp_path / "x.json", command="make x", seed=1, seconds=1, rows=[])
    ledger(rate=0.2).add([{"a": 3}], seconds=1)  # begun without: that its rows are of these cannot be known
    assert "settings" not in results.read(tmp_path / "x.json")


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
