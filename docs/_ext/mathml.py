"""Formulas as MathML, which browsers show by themselves: no script, no font, nothing from the net.

docutils brings the translation from LaTeX; Sphinx does not offer it, so it is registered here as a renderer of math.
"""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

log = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(_translated(node))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{_translated(node, as_block=True)}</div>')
    raise nodes.SkipNode


def _translated(node: nodes.Element, as_block: bool = False) -> str:
    try:
        return str(tex2mathml(node.astext().strip(), as_block=as_block))
    except MathError as error:
        log.warning("%s in $%s$", error, node.astext(), location=node)
        return ""
