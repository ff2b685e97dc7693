"""Names set as code lead to their page in the reference: `bbalpha.sample`, `predict_regression(...)`.

Pages are plain Markdown, which is also read where no role of Sphinx is known; so the links are made here. A name
without `bbalpha.` in front of it leads somewhere only if it says by itself what it is: `fit` is a method of many.
"""

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import bbalpha

_DOTTED = re.compile(r"(bbalpha(?:\.\w+)+)(\(.*\))?$")
_ALONE = re.compile(r"(\w+)(\(.*\))?$")
_COMMON = {"Audit", "History", "fit", "load", "sample", "save", "stochastic"}


class Names(SphinxTransform):
    """Turns literals that are public names into references."""

    default_priority = 210  # before references are resolved

    def apply(self, **kwargs: Any) -> None:
        """Go through the literals of the page."""
        for literal in list(self.document.findall(nodes.literal)):
            target = _target(literal.astext())
            inside = (nodes.reference, nodes.title, addnodes.pending_xref, addnodes.desc_signature)
            if target and not any(isinstance(parent, inside) for parent in _parents(literal)):
                reference = addnodes.pending_xref(
                    "", refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname, refwarn=False
                )
                literal.replace_self(reference)
                reference += literal


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.add_transform(Names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _target(text: str) -> str | None:
    if found := _DOTTED.match(text):
        return found[1]
    found = _ALONE.match(text)
    return f"bbalpha.{found[1]}" if found and found[1] in set(bbalpha.__all__) - _COMMON else None


def _parents(node: nodes.Node) -> Any:
    while node.parent is not None:
        node = node.parent
        yield node
