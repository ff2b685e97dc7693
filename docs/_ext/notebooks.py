"""Executed notebooks as pages: cells and what they printed, as Markdown for MyST; pictures go to the build folder."""

import base64
import json
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx


class NotebookParser(MystParser):
    """Reads .ipynb."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """The page of a notebook."""
        source = Path(document["source"])
        folder = source.parents[1] / "_build" / "notebooks"
        super().parse(as_markdown(json.loads(inputstring), folder, source.stem), document)


def as_markdown(notebook: dict[str, Any], folder: Path, name: str) -> str:
    """The text of a notebook; its pictures are written into `folder`, which is named from docs/."""
    parts = []
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for place, output in enumerate(cell["outputs"]):
            picture = output.get("data", {}).get("image/png")
            if picture:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{name}-{number}-{place}.png"
                path.write_bytes(base64.b64decode(picture))
                parts.append(f"![what the cell above drew](/_build/notebooks/{path.name})")
            else:
                text = output.get("text") or output.get("data", {}).get("text/plain") or ""
                parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(parts)


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
