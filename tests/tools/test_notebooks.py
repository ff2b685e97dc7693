"""The notebooks of the site are their sources, executed, and hold nothing of the machine that ran them."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import notebooks

SOURCES = sorted(notebooks.FOLDER.glob("*.py"))
by_name = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def code(book):
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def test_there_are_three():
    assert {path.stem for path in SOURCES} == {"regression", "digits", "finetuning"}


@by_name
def test_a_notebook_is_its_source_executed(source):
    book = json.loads(source.with_suffix(".ipynb").read_text())
    shown = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
    assert shown == [(c["cell_type"], c["source"]) for c in notebooks.cells(source.read_text())], "run `make notebooks`"
    assert [cell["execution_count"] for cell in code(book)] == list(range(1, len(code(book)) + 1))
    outputs = [output for cell in code(book) for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert any("image/png" in output.get("data", {}) for output in outputs)


@by_name
def test_a_notebook_holds_nothing_of_the_machine(source):
    path = source.with_suffix(".ipynb")
    book = json.loads(path.read_text())
    assert path.stat().st_size <= notebooks.MOST
    assert book["metadata"].keys() == {"kernelspec"}
    assert all(not cell["metadata"] for cell in book["cells"])
    said = "".join("".join(output.get("text", "")) for cell in code(book) for output in cell["outputs"])
    assert not re.search(r"/(home|root|tmp|work|usr)/|0x[0-9a-f]{6}", said)


@pytest.mark.slow
@by_name
def test_a_source_runs(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    exec(compile(source.read_text(), str(source), "exec"), {"__name__": "__main__"})


def test_what_a_cell_says_on_stderr_is_refused():
    book = notebooks.notebook('"""# T"""\n\n# %%\nprint(1)\n')
    book["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stderr", "text": ["Warning: old\n"]}]
    with pytest.raises(ValueError, match="wrote to stderr: Warning: old"):
        notebooks.cleaned(book)


def test_what_a_cell_prints_bit_by_bit_is_one_text():
    book = notebooks.notebook('"""# T"""\n\n# %%\nprint(1, 2)\n')
    book["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": t} for t in ("1\n", ["2\n"])]
    (output,) = notebooks.cleaned(book)["cells"][1]["outputs"]
    assert output["text"] == "1\n2\n"


def test_times_and_descriptions_of_figures_are_left_out():
    book = notebooks.notebook('"""# T"""\n\n# %%\ndraw()\n')
    book["cells"][1]["metadata"] = {"execution": {"iopub.status.busy": "2026"}}
    picture = {"image/png": "iVBORw0", "text/plain": "<Figure size 1 at 0x7f12>"}
    book["cells"][1]["outputs"] = [{"output_type": "display_data", "metadata": {"a": 1}, "data": picture}]
    cell = notebooks.cleaned(book)["cells"][1]
    assert (cell["metadata"], cell["outputs"][0]["metadata"]) == ({}, {})
    assert cell["outputs"][0]["data"] == {"image/png": "iVBORw0"}
