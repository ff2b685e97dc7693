"""The house as CONTRIBUTING shows it: every module has its line, and the root stays small enough to take in."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "bbalpha"
MODULES = sorted(str(p.relative_to(SRC)) for p in SRC.rglob("*.py") if p.name not in ("__init__.py", "__main__.py"))


def tour():
    """The modules that the tables of CONTRIBUTING name, as paths in the package."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named, room = [], ""
    for line in text.splitlines():
        if line.startswith("#"):
            found = re.search(r"`([a-z_/]+)/`", line)
            room = f"{found[1]}/" if found else ""
        if line.startswith("|"):
            named += [room + name for name in re.findall(r"`([a-z_]+\.py)`", line.split("|")[1])]
    return named


@pytest.mark.parametrize("module", MODULES)
def test_every_module_is_on_the_tour(module):
    assert module in tour(), f"CONTRIBUTING.md must say what {module} is for"


def test_the_tour_names_what_exists_and_each_once():
    assert sorted(tour()) == MODULES


def test_what_is_in_sight_at_the_root_can_be_taken_in_at_a_glance():
    in_sight = [p.name for p in SRC.glob("*.py") if not p.name.startswith("_")]
    assert len(in_sight) <= 20
