"""The tables of docs/active.md: medians as far as runs have come, and what was published beside them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import tables_active


def rows(method, *runs):
    return [
        {"method": method, "seed": seed, "labels": 20 + 10 * i, "accuracy": accuracy, "train_seconds": 1.0,
         "choose_seconds": 2.0 * (i + 1 < len(run))}
        for seed, run in enumerate(runs)
        for i, accuracy in enumerate(run)
    ]  # fmt: skip


@pytest.fixture
def content(monkeypatch):
    found = {
        "command": "make x", "versions": {"torch": "2.13"},
        "rows": rows("bald", (0.6, 0.7, 0.91, 0.92), (0.8, 0.9), (0.5, 0.6)) + rows("random", (0.4,)),
    }  # fmt: skip
    monkeypatch.setattr(tables_active, "load", lambda: {"repeated_mnist_x2": found})
    return found


def cells(table, *names):
    """The cells of the row that begins with these."""
    line = next(line for line in table.splitlines() if line.startswith("| " + " | ".join(names) + " |"))
    return [cell.strip() for cell in line.strip("|").split("|")][len(names) :]


def test_accuracies_are_medians_and_the_published_ones_stand_beside_them(content):
    table = tables_active.accuracies()
    assert cells(table, "repeated, x2", "BALD")[:3] == ["3 to 1", "60.0", "92.0"]
    assert cells(table, "repeated, x2", "random")[:3] == ["1", "40.0", ""]
    assert cells(table, "repeated, x2", "**ours**")[0] == "0"
    assert cells(table, "repeated, x2", "BatchBALD, published")[1:4] == ["63.8", "79.0", "90.0"]


def test_a_level_that_was_not_reached_is_said_with_how_far_the_run_got(content):
    table = tables_active.needed()
    assert cells(table, "repeated, x2", "BALD") == ["40 (3 seeds)", "not within 30", "170", "not within 310"]
    content["rows"] = rows("bald", (0.6, 0.95), (0.96,), (0.1,))
    assert cells(tables_active.needed(), "repeated, x2", "BALD")[:2] == ["30 (3 seeds)", "30 (3 seeds)"]
    assert cells(tables_active.needed(), "repeated, x2", "**ours**")[0] == "not run yet"


def test_seconds_are_medians_of_rounds_that_chose(content):
    assert cells(tables_active.seconds(), "repeated, x2", "BALD") == ["1.0", "2.0"]
    assert "random" not in tables_active.seconds()


def test_the_published_medians_are_first_crossings_of_the_published_curves_or_near():
    for (dataset, method), levels in tables_active.PUBLISHED.items():
        curve = tables_active.published(dataset)[method]
        for level, known in zip(tables_active.LEVELS, levels, strict=True):
            if known is not None and known < 300:
                near = [float(r["acc_median"]) for r in curve if abs(int(r["labels"]) - known) <= 20]
                assert min(near) - 0.02 <= level <= max(near) + 0.02
