"""The way of a new user: every step is taken and timed, and what was made for it is gone."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import newcomer


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A repository with a first page and two examples; nothing is installed."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "docs" / "index.md").write_text("".join(f"```python\n{name} = 1\n```\n" for name in "abc"))
    for name in ("own_table", "own_network"):
        (tmp_path / "examples" / f"{name}.py").write_text(f"print({name!r})\n")
    monkeypatch.setattr(newcomer, "ROOT", tmp_path)
    monkeypatch.setattr(newcomer, "clean_copy", lambda folder: folder.mkdir(parents=True))
    monkeypatch.setattr(newcomer, "build", lambda *_: [Path("x.whl")])
    monkeypatch.setattr(newcomer, "call", lambda *_: "")
    monkeypatch.setattr(sys, "argv", ["newcomer.py"])
    return tmp_path


def test_the_first_block_is_the_table_and_the_others_are_one_program(house):
    assert list(newcomer.programs().values()) == [
        "a = 1\n",
        "print('own_table')\n",
        "b = 1\n\nc = 1\n",
        "print('own_network')\n",
    ]


def test_every_step_is_timed_in_the_order_it_is_taken(house, monkeypatch):
    done = []
    monkeypatch.setattr(newcomer, "install", lambda python, what: done.append(what))
    monkeypatch.setattr(newcomer, "run", lambda python, code: done.append(code))
    (house / "results").mkdir()
    newcomer.main()
    assert done == ["x.whl[sklearn]", *newcomer.programs().values()]
    rows = json.loads((house / "results" / "newcomer.json").read_text())["rows"]
    assert [row["step"] for row in rows] == ["install, with scikit-learn", *newcomer.programs()]
    assert not (house / ".venv-newcomer").exists()


def test_a_step_that_fails_leaves_no_results(house, monkeypatch):
    def fails(python, code):
        raise newcomer.FailedError("no")

    monkeypatch.setattr(newcomer, "install", lambda *_: None)
    monkeypatch.setattr(newcomer, "run", fails)
    with pytest.raises(SystemExit, match="1 steps were taken, the next one failed: no"):
        newcomer.main()
    assert not (house / "results").exists()
    assert not (house / ".venv-newcomer").exists()
