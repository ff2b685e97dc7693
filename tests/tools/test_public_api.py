"""The snapshot of the public names: it is what the code has, and what users are shown is in it."""

import re
import sys
from pathlib import Path

import pytest

import bbalpha

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import api

ROOT = Path(__file__).resolve().parents[2]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
IMPORT = re.compile(r"^ *from (bbalpha[\w.]*) import (\([^)]*\)|[^\n(]+)", re.M)


@pytest.fixture(scope="module")
def names():
    return set(api._by_name(api.path_of(api.current()).read_text()))


def test_the_snapshot_is_what_the_code_has():
    kept, now = api.path_of(api.current()).read_text(), api.snapshot(api.current())
    told = "\n".join(api.changes(kept, now))
    assert kept == now, f"what users can call has changed: run `make api`, and tell it in CHANGELOG.md\n{told}"


def test_every_name_of_the_package_is_in_it(names):
    assert {f"bbalpha.{name}" for name in bbalpha.__all__} <= names


def test_what_pages_and_examples_import_is_public(names):
    shown = set()
    for page in PAGES:
        for module, imported in IMPORT.findall(page.read_text()):
            words = (part.split("#")[0].split(" as ")[0].strip() for part in imported.strip("()").split(","))
            shown |= {f"{module}.{word}" for word in words if word}
    modules = {name.rpartition(".")[0] for name in names}
    assert len(shown) > 10
    assert shown - names - modules == set(), "make these names public, or show others"


def package(folder, **files):
    """The surface of a package of the same name that has these modules."""
    (folder / "bbalpha").mkdir(parents=True)
    for name, text in {"__init__": "", **files}.items():
        path = folder / "bbalpha" / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return list(api.surface(folder))


def test_public_is_what_has_no_underscore_or_is_listed(tmp_path):
    found = package(
        tmp_path,
        __init__="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from bbalpha.one import f\n"
        "    from bbalpha._hidden import kept\n",
        _hidden="def kept(x: int): ...\ndef unseen(): ...\nclass Base:\n    def inherited(self, y=2): ...\n",
        one="import os\nfrom bbalpha._hidden import Base, unseen\nfrom bbalpha.two import g as g\nLIMIT = 3\n"
        "def f(a, *, b: str = 'c') -> int: ...\ndef _f(): ...\n"
        "class C(Base):\n    size: int\n    def __init__(self, n=1): self.n = n\n    def _own(self): ...\n",
        two="def g(): ...\n",
        checks="def check(): ...\n",
        room__in____init__="from math import pi\nfrom bbalpha.room.inside import listed\n"
        "__all__ = ['late', 'listed', 'pi']\ndef __getattr__(name): ...\n",
        room__in__inside="def listed(): ...\ndef unlisted(): ...\n",
        quiet__in____init__="def h(): ...\n",
    )
    assert found == [
        "bbalpha.f = bbalpha.one.f",
        "bbalpha.kept(x: int)",
        "class bbalpha.one.C",
        "bbalpha.one.C.__init__(n=1)",
        "bbalpha.one.C.inherited(y=2)",
        "bbalpha.one.C.size: int",
        "bbalpha.one.LIMIT = 3",
        "bbalpha.one.f(a, *, b: str = 'c') -> int",
        "bbalpha.one.g = bbalpha.two.g",
        "bbalpha.room.late",
        "bbalpha.room.listed()",
        "bbalpha.room.pi = math.pi",
        "bbalpha.two.g()",
    ]


def test_changes_are_told_apart():
    fit = "$ bbalpha fit"
    old = f"# head\nbbalpha.a(x)\nbbalpha.b = 1\nclass bbalpha.C\n{fit} --seed = 0\n{fit} data required\n"
    new = f"# other\nbbalpha.a(x, y)\nclass bbalpha.C\nbbalpha.C.d: int\n{fit} --seed = 1\n{fit} data = x\n"
    assert list(api.changes(old, old)) == []
    assert sorted(api.changes(old, new)) == [
        f"changed  {fit} --seed = 0\n      to {fit} --seed = 1",
        f"changed  {fit} data required\n      to {fit} data = x",
        "changed  bbalpha.a(x)\n      to bbalpha.a(x, y)",
        "gone     bbalpha.b",
        "new      bbalpha.C.d",
    ]


def test_commands_have_their_options():
    found = list(api.commands())
    assert "$ bbalpha predict --coverage = 0.9" in found
    assert "$ bbalpha predict model required" in found
    assert "$ bbalpha data fetch" in found
    assert not any("completion" in line for line in found)


def test_the_last_release_is_the_newest_before(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "ROOT", tmp_path)
    assert api.released_before("0.11.0") is None
    (tmp_path / "api").mkdir()
    for version in ("0.9.0", "0.10.0", "0.11.0"):
        api.path_of(version).touch()
    assert api.released_before("0.11.0") == api.path_of("0.10.0")
