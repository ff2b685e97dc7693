"""Figures as SVG inside a page, in the colours of the page: light, dark or on paper.

Text stays text, colours become variables of the style sheet, and what would clash with another figure gets a name of
its own.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

# what `bbalpha.plots` and the experiments draw with -> variables of page.css
_VARIABLES = {
    "#000000": "ink", "#ffffff": "paper", "#0072b2": "c0", "#d55e00": "c1", "#009e73": "c3", "#cc79a7": "c4",
    "#e69f00": "c5", "#56b4e9": "c6", "#888888": "grey", "#999999": "grey", "#808080": "grey", "#dddddd": "grid",
    "#e5e5e5": "grid",
}  # fmt: skip
_SIZE = 10.0  # of text, in the units of the figure


@contextmanager
def drawing() -> Iterator[None]:
    """A context for figures whose labels come from data: dollars are no formulas, letters no font has are no news."""
    from matplotlib import rc_context

    with (
        rc_context({"text.parse_math": False, "font.size": _SIZE, "axes.titlesize": _SIZE + 1}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")  # some scripts
        yield


def inline(figure: "Figure", *, name: str, alt: str) -> "Markup":
    """A figure as an SVG element.

    Args:
        figure: Drawn within `drawing`.
        name: Of its own in the page.
        alt: What it shows, for who cannot see it.
    """
    from markupsafe import Markup, escape
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    width, height = (f"{72 * inches:.0f}" for inches in figure.get_size_inches())
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.S)
    body = re.sub(r"<[^>]*>", lambda tag: _tag(tag[0], name), body)
    body = re.sub(r">\s+<", "><", body)
    size = f'viewBox="0 0 {width} {height}" style="max-width: {1.45 * float(width):.0f}px"'
    head = f'<svg {size} role="img" aria-label="{escape(alt)}">'
    told = f"{head}<title>{escape(alt)}</title>{body.strip()}</svg>"
    return Markup(told)  # noqa: S704 - matplotlib escapes the words of its figures, and `alt` is escaped # nosec B704


def label(text: str, most: int = 40) -> str:
    """Text from data for an axis: on one line, and not too long."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def _tag(tag: str, name: str) -> str:
    """A tag of matplotlib's, in the names and colours of the page."""
    tag = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', tag)
    tag = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", tag)
    tag = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', tag)
    tag = re.sub(r"font: [^;\"]*?([\d.]+px)[^;\"]*", r"font-size: \1", tag)
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r"#[0-9a-f]{6}\b", lambda c: f"var(--{_VARIABLES[c[0]]})" if c[0] in _VARIABLES else c[0], tag)
    return re.sub(r"\s+", " ", re.sub(r"(\.\d\d)\d+", r"\1", tag))
