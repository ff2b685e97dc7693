"""What is shipped: the wheel holds the package and nothing else, and what is wrong with one is told."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import distribution
import environments

ROOT = Path(__file__).resolve().parents[2]

SOURCES = ["src/bbalpha/__init__.py", "src/bbalpha/py.typed", "src/bbalpha/serve/page/app.js", "tests/test_a.py"]
NOTES = ["bbalpha-1.dist-info/METADATA", "bbalpha-1.dist-info/entry_points.txt", "bbalpha-1.dist-info/licenses/LICENSE"]


def wheel(*more, without=()):
    names = [*(name.removeprefix("src/") for name in SOURCES[:3]), *NOTES, *more]
    return {name: 10 for name in names if name not in without}


def test_a_wheel_built_here_holds_the_package_and_nothing_else(tmp_path):
    files = distribution.tracked()
    tree = distribution.clean_copy(tmp_path / "tree")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = distribution.in_wheel(next(tmp_path.glob("*.whl")))
    assert distribution.faults_of_wheel(names, files) == []
    assert {"bbalpha/py.typed", "bbalpha/report/page.html.j2", "bbalpha/serve/page/index.html"} <= names.keys()
    assert not [name for name in names if name.startswith("tests") or name.endswith((".npz", ".json"))]


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (wheel(without=["bbalpha/py.typed"]), "bbalpha/py.typed is missing."),
        (wheel(without=["bbalpha/serve/page/app.js"]), "bbalpha/serve/page/app.js is missing."),
        (wheel("tests/test_a.py"), "tests/test_a.py does not belong into a wheel."),
        (wheel(without=[NOTES[1]]), "entry_points.txt is missing."),
        (wheel() | {"bbalpha/__init__.py": 300_000}, "bbalpha/__init__.py has 300,000 bytes: is it data?"),
    ],
)
def test_faults_of_a_wheel_are_told(names, fault):
    assert distribution.faults_of_wheel(wheel(), SOURCES) == []
    assert distribution.faults_of_wheel(names, SOURCES) == [fault]


def test_data_among_the_sources_are_told():
    fault = "bbalpha/boston.npz is no code and no page."
    assert distribution.faults_of_wheel(wheel("bbalpha/boston.npz"), [*SOURCES, "src/bbalpha/boston.npz"]) == [fault]


def test_faults_of_an_sdist_are_told():
    whole = {*SOURCES, "PKG-INFO", "setup.cfg", "src/bbalpha.egg-info/SOURCES.txt"}
    assert distribution.faults_of_sdist(whole, [*SOURCES, ".gitignore"]) == []
    faults = distribution.faults_of_sdist(whole - {"tests/test_a.py"} | {"notes.txt"}, SOURCES)
    assert faults == [
        "tests/test_a.py is missing from the sdist: see MANIFEST.in.",
        "notes.txt does not belong into the sdist.",
    ]


def test_the_examples_of_readme_are_found():
    first, second = environments.examples((ROOT / "README.md").read_text())[:2]
    assert "bbalpha.sample(net" in first
    assert "BBAlphaRegressor(" in second


def test_the_first_example_comes_with_its_preparation():
    page = "A.\n<!-- run\na = 1\n-->\n```text\nno\n```\n```python\nb = a\n```\n<!-- run\nc\n-->\n```python\nd\n```\n"
    assert environments.first_example(page) == "a = 1\nb = a\n"
    assert environments.first_example("<!-- run\na = 1\n-->\n") is None
    assert environments.examples(page) == ["b = a\n", "d\n"]


def test_a_program_that_fails_says_why_and_knows_nothing_of_the_source_tree(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    code = "import os, sys; print(os.listdir('.'), 'PYTHONPATH' in os.environ)"
    assert environments.run(Path(sys.executable), code) == "[] False\n"
    with pytest.raises(environments.FailedError, match="ZeroDivisionError"):
        environments.run(Path(sys.executable), "1 / 0")
    with pytest.raises(environments.FailedError, match="exit 3"):
        environments.run(Path(sys.executable), "raise SystemExit(3)")
    monkeypatch.setattr(environments, "PATIENCE", 0.1)
    with pytest.raises(environments.FailedError, match=r"not done after 0\.1 seconds"):
        environments.run(Path(sys.executable), "import time; time.sleep(60)")


@pytest.mark.slow
def test_an_environment_is_empty_and_goes_whatever_happens(tmp_path):
    def fail(python):
        assert "torch" not in environments.call(python, "-m", "pip", "list")
        raise KeyboardInterrupt

    folder = tmp_path / "venv"
    folder.mkdir()
    (folder / "left over").touch()
    with pytest.raises(KeyboardInterrupt), environments.environment(folder) as python:
        fail(python)
    assert not folder.exists()
