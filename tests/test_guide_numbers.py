"""Numbers in the guides are those of the results, and the results are what the guides say of them."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def results(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())["rows"]


def mean(rows, key, **where):
    values = [r[key] for r in rows if all(r[k] == v for k, v in where.items())]
    return sum(values) / len(values)


def test_tables_of_the_decisions_are_those_of_the_results():
    rows = results("decisions")
    spec = importlib.util.spec_from_file_location("decisions", ROOT / "benchmarks" / "decisions.py")
    decisions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(decisions)
    guide = (ROOT / "docs" / "which-number.md").read_text()
    for table in (*decisions.tables(rows).values(), decisions.conformal_table(results("conformal"))):
        assert table in guide


def test_the_guide_ranks_by_the_right_number():
    rows = results("decisions")
    errors = {w: mean(rows, "error", work="abstain", way=w, kept=0.9) for w in ("entropy", "random")}
    assert errors["entropy"] < errors["random"]
    asked = [r for r in rows if r["work"] == "ask" and r["labels"] == 100]
    by = {w: mean(asked, "accuracy", way=w) for w in ("mutual_information", "entropy", "random")}
    assert by["mutual_information"] > by["random"] > by["entropy"]
    together = {w: mean(asked, "accuracy", way=w) for w in ("batch_bald", "bald, shared masks", "power_bald")}
    assert max(together, key=together.get) == "batch_bald"
    assert together["batch_bald"] > by["random"]


@pytest.mark.parametrize("dataset", ["boston", "concrete", "wine"])
def test_conformal_intervals_cover_and_are_narrower_than_constant_ones(dataset):
    rows = [r for r in results("conformal") if r["dataset"] == dataset]
    assert len({r["split"] for r in rows}) == 20
    assert abs(mean(rows, "coverage90", score="quantile") - 0.9) < 0.03
    assert mean(rows, "width", score="quantile") < mean(rows, "width", score="absolute")


def test_a_million_rows_take_little_more_memory_than_their_result():
    peaks = {r["way"]: r["peak_mb"] for r in results("prediction") if r["rows"] == 1_000_000}
    assert peaks["classification"] < 300
    assert peaks["classification-stream"] < 400
    assert peaks["regression"] < 400 + 200  # the means of 100 passes are 400 MB
    assert peaks["regression-by-parts"] < 300
