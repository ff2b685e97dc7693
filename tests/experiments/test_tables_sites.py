"""The tables of docs/sites.md say what was reached and what was not."""

import subprocess
import sys
from pathlib import Path

import pytest

from bbalpha.experiments import results

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import tables_sites

ROOT = Path(__file__).resolve().parents[2]


def test_a_goal_is_reached_where_training_and_prediction_keep_it():
    def told(train, predict):
        rows = [{"model": "m", "work": w, "ratio": r} for w, r in (("train", train), ("predict", predict))]
        return tables_sites.goal(rows, "m")

    assert "not reached" not in told(1.9, 2.0)
    assert "not reached (1.00 in training, 2.10 in prediction)" in told(1.0, 2.1)
    assert "not reached" in told(2.1, 1.0)


def test_a_score_that_some_rows_lack_is_left_empty():
    assert tables_sites.cell([0.5, 0.7], 100, 1) == "60.0 ± 10.0"
    assert tables_sites.cell([0.5, None], 100, 1) == ""


def test_differences_are_taken_within_a_seed():
    kinds = [("all sites", 0, -1.0), ("all sites", 1, -3.0), ("last", 0, -1.5), ("last", 1, -3.1)]
    rows = [{"model": "m", "trained": "all sites", "way": w, "seed": s, "log_likelihood": v} for w, s, v in kinds]
    assert tables_sites.differences(rows, rows[2:]) == pytest.approx([-0.5, -0.1])


@pytest.mark.slow
def test_the_benchmark_of_sites_runs_small_and_fills_its_tables(tmp_path, monkeypatch):
    out = tmp_path / "results/sites.json"
    command = [sys.executable, "benchmarks/sites.py", "--quick", "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    rows = results.read(out)["rows"]
    assert {r["work"] for r in rows} == {"train", "predict", "worth"}
    monkeypatch.setattr(tables_sites, "ROOT", tmp_path)
    assert tables_sites.cost().count("| encoder, 1 layers |") == 4
    table = tables_sites.worth()
    assert table.count("| encoder, digits |") == 6
    assert table.count("| CNN, digits |") == 4


def test_what_is_published_came_from_the_whole_benchmark():
    content = results.read(ROOT / "results/sites.json")
    assert "--quick" not in content["command"]
    models = {r["model"] for r in content["rows"]}
    assert {"encoder, 2 layers", "encoder, 6 layers", "encoder, digits", "CNN, digits"} <= models
    by = {(r["model"], r["work"], r["way"]): r["ratio"] for r in content["rows"] if "ratio" in r}
    for work in ("train", "predict"):
        assert by["encoder, 6 layers", work, "last block"] == pytest.approx(1, abs=1)
        assert by["encoder, 2 layers", work, "last block"] < by["encoder, 2 layers", work, "all sites"]
