"""Each extra by itself: what is run for it, and that a run that was cut off goes on."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import environments
import extras

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A repository with two extras, one with a page; tries succeed unless they are told not to."""
    (tmp_path / "docs" / "integrations").mkdir(parents=True)
    (tmp_path / "docs" / "integrations" / "keras.md").write_text("```python\nfirst = 1\n```\n```python\nsecond\n```\n")
    (tmp_path / "pyproject.toml").write_text("[project.optional-dependencies]\nkeras = []\nplots = []\ndev = []\n")
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    monkeypatch.setattr(extras, "build", lambda *_: [Path("x.whl")])
    monkeypatch.setattr(extras, "clean_copy", lambda folder: folder.mkdir(parents=True))
    return tmp_path


def test_those_that_users_install_are_tried(house):
    assert extras.extras() == ["(none)", "keras", "plots"]


def test_every_extra_of_the_project_is_either_tried_or_a_group():
    found = extras.extras()
    assert {"sklearn", "cli", "report", "serve", "parquet", "keras", "jax", "onnx", "cluster"} <= set(found)
    assert not {"dev", "all", "versus"} & set(found)


def test_the_first_example_of_a_page_is_run_else_everything_is_imported(house):
    assert extras.code_of("keras") == ("docs/integrations/keras.md", "first = 1\n")
    ran, code = extras.code_of("sklearn")
    assert ran == "imports"
    assert '"bbalpha.estimators"' in code
    compile(code, "code", "exec")


@pytest.mark.slow
def test_imports_reach_the_modules_and_packages_of_an_extra():
    _, code = extras.code_of("plots")
    more = "\nimport sys; print({'matplotlib', 'bbalpha.plots'} - {*sys.modules})"
    assert environments.run(Path(sys.executable), code + more) == "set()\n"


def test_a_module_that_is_not_there_is_no_fault_and_one_that_lacks_another_is(tmp_path):
    """The code is run on a package of the same name, whose module `room` needs what is missing."""
    package = tmp_path / "bbalpha"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "objectives.py").touch()
    (package / "room.py").write_text("import nowhere\n")
    code = extras.PLAIN.split("own =")[0].replace("{extra}", "fine")
    here = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    environments.run(Path(sys.executable), here + code.replace("{room}", "absent"))
    with pytest.raises(environments.FailedError, match="nowhere"):
        environments.run(Path(sys.executable), here + code.replace("{room}", "room"))


def test_what_is_done_is_kept_and_what_failed_is_tried_again(house, monkeypatch, capsys):
    calls = []

    def tried(extra, wheel, folder):
        calls.append(extra)
        row = {"extra": extra, "ran": extras.code_of(extra)[0], "install_seconds": 1.0, "mb": 100 + len(extra)}
        ok = extra != "plots" or len(calls) > 3
        return row | ({"run_seconds": 2.0, "ok": True} if ok else {"ok": False, "error": "no font"})

    monkeypatch.setattr(extras, "tried", tried)
    monkeypatch.setattr(sys, "argv", ["extras.py"])
    for code in (1, 0, 0):
        with pytest.raises(SystemExit) as end:
            extras.main()
        assert end.value.code == code
        told = capsys.readouterr().out
        assert ("no font" in told) == (code == 1)
    assert calls == ["(none)", "keras", "plots", "plots"]
    content = json.loads((house / "results" / "extras.json").read_text())
    assert [(row["extra"], row["ok"]) for row in content["rows"]] == [
        ("(none)", True),
        ("keras", True),
        ("plots", True),
    ]
    monkeypatch.setattr(sys, "argv", ["extras.py", "keras"])
    with pytest.raises(SystemExit):
        extras.main()
    assert calls[4:] == ["keras"]  # named: once more
    assert content["command"] == "make extras"
    assert not (house / ".venv-extras").exists()


def test_an_extra_whose_page_has_arrived_is_tried_again(house, monkeypatch):
    calls = []
    monkeypatch.setattr(extras, "tried", lambda extra, *_: calls.append(extra) or dict(
        zip(("extra", "ran", "ok"), (extra, extras.code_of(extra)[0], True), strict=True)))  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["extras.py", "plots"])
    with pytest.raises(SystemExit):
        extras.main()
    (house / "docs" / "integrations" / "plots.md").write_text("```python\n1\n```\n")
    with pytest.raises(SystemExit):
        extras.main()
    assert calls == ["plots", "plots"]


def test_an_unknown_extra_is_told(house, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["extras.py", "kears"])
    with pytest.raises(SystemExit):
        extras.main()
    assert "got kears" in capsys.readouterr().err


def test_a_failed_example_is_a_row_and_not_the_end(house, monkeypatch):
    def fail(*_):
        raise environments.FailedError("Traceback\nValueError: no")

    monkeypatch.setattr(extras, "install", lambda *_: None)
    monkeypatch.setattr(extras, "run", fail)
    monkeypatch.setattr(environments.subprocess, "run", lambda *_, **__: None)
    row = extras.tried("keras", Path("x.whl"), house / "venv")
    assert (row["ok"], row["error"], row["ran"]) == (False, "ValueError: no", "docs/integrations/keras.md")
