"""The pins: what the project asks for and what that needs, in versions that it allows."""

import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import pins

ROOT = Path(__file__).resolve().parents[2]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINNED = {canonicalize_name(name): version for name, version in (line.split("==") for line in LINES[1:])}


@pytest.fixture
def world(monkeypatch):
    """An environment of four packages, one of which nobody needs."""
    packages = {
        "bbalpha": ("0.2.0", ["torch>=2", "Keras>=3; extra == 'dev'", "old; python_version < '3'"]),
        "torch": ("2.13.0+cpu", []),
        "keras": ("3.15.1", ["h5_py[fast]"]),
        "h5-py": ("3.0", ["quick; extra == 'fast'"]),
        "quick": ("1.0", ["keras"]),
        "stranger": ("9.9", []),
    }

    def distribution(name):
        version, requires = packages[name]
        return SimpleNamespace(metadata={"Name": name.title()}, version=version, requires=requires)

    def version(name):
        if canonicalize_name(name) not in packages:
            raise pins.PackageNotFoundError(name)
        return packages[canonicalize_name(name)][0]

    monkeypatch.setattr(pins, "distribution", distribution)
    monkeypatch.setattr(pins, "version", version)
    return packages


def test_everything_that_is_needed_is_pinned_and_nothing_else(world):
    assert pins.pins(extras=["dev"]) == ["H5-Py==3.0", "Keras==3.15.1", "Quick==1.0", "Torch==2.13.0"]
    assert pins.pins(extras=[]) == ["Torch==2.13.0"]


@pytest.mark.parametrize(("version", "told"), [("2.9", "2.9 is installed"), (None, "none is installed")])
def test_an_environment_that_is_not_as_asked_is_refused(world, version, told):
    if version is None:
        del world["keras"]
    else:
        world["keras"] = (version, [])
    with pytest.raises(SystemExit, match=f"bbalpha needs Keras>=3; {told}"):
        pins.pins(extras=["dev"])


def test_all_that_the_project_asks_for_is_pinned_within_its_bounds():
    asked = [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
    for needed in map(Requirement, asked):
        if needed.name != "bbalpha":
            assert needed.specifier.contains(PINNED[canonicalize_name(needed.name)]), needed


def test_the_file_is_as_it_is_written():
    assert LINES[0] + "\n" == pins.HEAD
    assert LINES[1:] == sorted(LINES[1:], key=str.lower)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in LINES[1:])
    assert PINNED["torch"] == "2.13.0"
    assert not {"bbalpha", "botorch"} & PINNED.keys()
