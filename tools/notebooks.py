"""Executed notebooks out of their sources: `make notebooks` writes docs/notebooks/NAME.ipynb from NAME.py beside it.

A source is a script. Its docstring is the first cell, Markdown; a line `# %%` begins a cell of code, `# %% [markdown]`
one whose comments are Markdown. What the cells printed and drew is kept, and nothing else that depends on the machine.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from bbalpha._files import replace_file

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
MOST = 500 * 1024  # bytes of a notebook

Cell = dict[str, Any]


def cells(source: str) -> list[Cell]:
    r"""The cells of a source, not run yet.

    >>> [c["source"] for c in cells('"# Title"\n\n# %%\na = 1\n\n# %% [markdown]\n# Words.\n')]
    ['# Title', 'a = 1', 'Words.']
    """
    head, *parts = re.split(r"(?m)^# %%", source)
    found = [_cell(0, "markdown", head.strip().strip('"').strip())]
    for part in parts:
        kind, _, text = part.partition("\n")
        if "[markdown]" in kind:
            found.append(_cell(len(found), "markdown", re.sub(r"(?m)^# ?", "", text).strip()))
        else:
            found.append(_cell(len(found), "code", re.sub(r" *# fmt: skip", "", text).strip()))
    return found


def _cell(number: int, kind: str, text: str) -> Cell:
    cell: Cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook(source: str) -> dict[str, Any]:
    """The notebook of a source, not run yet."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells(source), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def executed(source: str) -> dict[str, Any]:
    """The notebook of a source with what its cells printed and drew; a cell that fails is an error."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.from_dict(notebook(source))
    NotebookClient(book, timeout=1800, kernel_name="python3").execute()
    return cleaned(json.loads(nbformat.writes(book)))


def cleaned(book: dict[str, Any]) -> dict[str, Any]:
    """A notebook without times and addresses; words on stderr are refused, since readers would meet them too."""
    book["metadata"] = {"kernelspec": book["metadata"]["kernelspec"]}
    for cell in book["cells"]:
        cell["metadata"] = {}
        if cell["cell_type"] == "code":
            cell["outputs"] = _outputs(cell["outputs"])
    return book


def _outputs(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was printed, in one piece up to the next picture, and pictures alone."""
    found: list[dict[str, Any]] = []
    for output in given:
        if output.get("name") == "stderr":
            raise ValueError(f"a cell wrote to stderr: {''.join(output['text']).strip()[:300]}")
        if output["output_type"] == "stream":
            output = output | {"text": "".join(output["text"])}
            if found and found[-1]["output_type"] == "stream":
                found[-1]["text"] += output["text"]
                continue
        elif "image/png" in output.get("data", {}):
            output = output | {"metadata": {}, "data": {"image/png": output["data"]["image/png"]}}
        found.append(output)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if none is named")
    names = parser.parse_args().names or sorted(path.stem for path in FOLDER.glob("*.py"))
    for name in names:
        text = json.dumps(executed((FOLDER / f"{name}.py").read_text()), indent=1, ensure_ascii=False) + "\n"
        if len(text) > MOST:
            raise SystemExit(f"{name}.ipynb would be larger than {MOST} bytes: {len(text)}. Draw less.")
        replace_file(FOLDER / f"{name}.ipynb", text.encode())
        print(f"{name}.ipynb: {len(text) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
