"""The campaign in small: every part runs and finds nothing; what it found once stays mended."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from . import PARTS
from .__main__ import main
from .found import FOUND
from .rows import row

ROOT = Path(__file__).resolve().parents[2]
FINDINGS = [(test, what) for part in FOUND.values() for test, what in part.items()]


@pytest.mark.parametrize("part", [pytest.param(p, marks=pytest.mark.slow if p == "faults" else ()) for p in PARTS])
def test_a_part_in_small_finds_nothing(part):
    rows = importlib.import_module(f".{part}", __package__).run(0.01, 0)
    assert rows
    assert [r["told"] for r in rows if r["failures"]] == []


@pytest.mark.parametrize(("test", "what"), FINDINGS, ids=[test for test, _ in FINDINGS])
def test_what_was_found_has_a_test(test, what):
    path, _, name = test.partition("::")
    assert f"\ndef {name}(" in (ROOT / path).read_text(), f"found once, and without a test now: {what}"


def test_a_part_that_is_done_is_not_run_again(tmp_path, monkeypatch):
    runs = []

    def part(name, failures):
        def run(size, seed):
            runs.append((name, size, seed))
            return [row("it", "cases", 3, failures)]

        return SimpleNamespace(run=run)

    monkeypatch.setitem(sys.modules, f"{__package__}.one", part("one", []))
    monkeypatch.setitem(sys.modules, f"{__package__}.two", part("two", ["it broke."]))
    monkeypatch.setattr(f"{__package__}.__main__.PARTS", ("one", "two"))
    out = tmp_path / "torture.json"
    assert main(["one", "--size", "0.5", "--out", str(out)]) == 0
    assert main(["--size", "0.5", "--out", str(out)]) == 1
    assert runs == [("one", 0.5, 0), ("two", 0.5, 0)]
    found = json.loads(out.read_text())["rows"]
    assert [(r["part"], r["tried"], r["failures"]) for r in found] == [("one", 3, 0), ("two", 3, 1)]


def test_a_row_counts_something_known():
    with pytest.raises(ValueError, match="`unit` must be one of cases, faults, bytes, requests"):
        row("it", "apples", 1)


def test_the_threat_model_names_tests_that_are_there():
    page, tests = (ROOT / "docs/threat-model.md").read_text(), {p.name: p for p in (ROOT / "tests").rglob("*.py")}
    names = re.findall(r"`(?:tests/\w+/)?(\w+\.py)(?:::(\w+))?`", page)
    assert len(names) > 15
    for file, test in names:
        assert not test or f"\ndef {test}(" in tests[file].read_text(), f"{file}::{test}"
