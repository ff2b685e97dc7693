"""The code of every page runs, in order, in one namespace a page, in an empty folder, with everything seeded.

What a reader sees in a ```python block is run, and so is what stands in a comment `<!-- run` (newline, Python, newline
`-->`): preparation that readers need not see. In a ```console block that follows `<!-- run -->` every `$ bbalpha` line
is run. Estimators try less, and they and `fit` train for less time, than a reader's. Pages of frameworks have a process
of their own: these packages keep settings for all of it. A page that says
`<!-- needs BBALPHA_DATA -->` is run where there are data.
"""

import os
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bbalpha
from bbalpha import fit
from bbalpha.estimators.race import EFFORTS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
APART = "integrations"  # the folder of pages with a process of their own
MOST_EPOCHS = 4
PIECE = re.compile(
    r"^```python\n(?P<shown>.*?)^```$|^<!-- run\n(?P<hidden>.*?)^-->$"
    r"|^<!-- run -->\n+```console\n(?P<typed>.*?)^```$",
    re.M | re.S,
)


def pieces(page):
    """What is to be run of a page: the line it begins at, its kind and its text."""
    text = page.read_text()
    for found in PIECE.finditer(text):
        kind = found.lastgroup
        yield text.count("\n", 0, found.start(kind)), kind, found[kind]


def run(page):
    """Run a page; a traceback shows its lines."""
    namespace = {"__name__": "__main__"}
    for line, kind, text in pieces(page):
        if kind == "typed":
            for command in re.findall(r"^\$ bbalpha (.*?)(?:\s+#.*)?$", text, re.M):
                type_command(command)
        else:
            exec(compile("\n" * line + text, str(page), "exec"), namespace)


def type_command(line):
    """A command of bbalpha, as a shell would call it; it must end well."""
    from bbalpha.cli import main

    before, sys.argv = sys.argv, ["bbalpha", *shlex.split(line)]
    try:
        main()
    except SystemExit as end:
        if end.code:
            pytest.fail(f"bbalpha {line} ended with {end.code}")
    finally:
        sys.argv = before


def prepare(put, efforts):
    """Seeds, and less work for `fit` and for the automatic choice of the estimators."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    put(bbalpha, "fit", briefly)
    for budget, effort in list(EFFORTS.items()):
        less = replace(effort, heat_steps=0, final_steps=60, finalists=2, n_networks=3, most_passes=2)
        efforts(EFFORTS, budget, less)


def briefly(*args, epochs, **options):
    """`fit`, for a few epochs."""
    return fit(*args, epochs=min(epochs, MOST_EPOCHS), **options)


def name(page):
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")


RUNNABLE = [page for page in PAGES if any(pieces(page))]


@pytest.mark.parametrize("page", [p for p in RUNNABLE if APART not in p.parts], ids=name)
def test_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    if "<!-- needs BBALPHA_DATA -->" in page.read_text() and "BBALPHA_DATA" not in os.environ:
        pytest.skip("BBALPHA_DATA names no folder of data sets")
    prepare(monkeypatch.setattr, monkeypatch.setitem)
    try:
        run(page)
    except ImportError as error:  # an extra that is not here
        if "pip install" not in str(error) and (not error.name or error.name.startswith("bbalpha")):
            raise
        pytest.skip(str(error))


@pytest.mark.frameworks
@pytest.mark.parametrize("page", [p for p in RUNNABLE if APART in p.parts], ids=name)
def test_page_of_a_framework_runs(page, tmp_path):
    settings = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", __file__, str(page)],
        cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if "pip install 'bbalpha[" in done.stderr or re.search(
        r"ModuleNotFoundError: No module named '(?!bbalpha)", done.stderr
    ):
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES[1:], ids=name)
def test_every_block_says_what_it_is(page):
    fences = re.findall(r"^```(\S*)", page.read_text(), re.M)
    opened = fences[::2]  # every second one closes
    assert all(opened), "a block without a language: is it python, console, text, json, ...?"
    assert len(fences) % 2 == 0


# ------------------------------------------------------------------------------ what `make docs` would refuse, sooner

SITE = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
MADE = SITE / "reference"  # written when the site is built


def prose(page):
    """The text of a page without its code and comments."""
    text = re.sub(r"^(`{3,}).*?^\1$|<!-- run.*?-->", "", page.read_text(), flags=re.M | re.S)
    return re.sub(r"`[^`\n]+`", lambda found: found[0] if "](" not in found[0] else "", text)


def anchors(page):
    """The headings of a page as links name them."""
    headings = re.findall(r"^#{1,4} (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(prose(page)):
        place = (page.parent / target).resolve() if target else page
        if MADE in place.parents:
            module = ROOT / "src/bbalpha" / place.stem.replace(".", "/")
            assert place.stem in ("index", "commands") or module.is_dir() or module.with_suffix(".py").exists()
            continue
        assert place.exists(), f"no file {target}"
        assert not anchor or anchor in anchors(place), f"no heading {target}#{anchor}"


def listed(page):
    """The pages that the menus of a page name, by their paths."""
    found = set()
    for menu in re.findall(r"^```{toctree}\n(.*?)^```$", page.read_text(), re.M | re.S):
        for entry in re.findall(r"^(?!:)(\S+)$", menu, re.M):
            places = sorted(page.parent.glob(f"{entry}.*")) if "*" in entry else [page.parent / f"{entry}.md"]
            if entry != "self" and MADE not in places[0].parents:
                found |= {p if p.exists() else p.with_suffix(".ipynb") for p in places}
    return found


def test_menus_lead_to_every_page_and_to_no_other():
    seen, waiting = {SITE / "index.md"}, [SITE / "index.md"]
    while waiting:
        page = waiting.pop()
        assert page.exists(), f"a menu names {page.name}"
        new = listed(page) - seen
        seen |= new
        waiting += new
    pages = {*PAGES[1:], *(SITE / "notebooks").glob("*.ipynb")}
    assert {name(p) for p in pages - seen} == set()


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare(setattr, dict.__setitem__)
    run(Path(sys.argv[1]))
