"""What a page is made of, and the page itself.

A page has sections, a section has blocks: text, points, tables, pictures, commands. All text is escaped on its way into
the HTML; what stands between backticks in it becomes code.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from bbalpha._files import replace_file
from bbalpha.checks import check_path

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class Text:
    """A paragraph; one that `matters` stands out."""

    text: str
    matters: bool = False
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    items: Sequence[str]
    kind: ClassVar[str] = "points"


@dataclass(frozen=True)
class Bar:
    """A cell with a bar behind its number, `share` of the cell long; `series` is the number of its colour."""

    text: str
    share: float
    series: int = 0


@dataclass(frozen=True)
class Table:
    """Cells in rows, the first of each its heading; columns of numbers stand to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Bar]]
    caption: str
    text_columns: Sequence[int] = ()
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Picture:
    """An inline SVG, and below it what it shows."""

    svg: "Markup"
    caption: str


@dataclass(frozen=True)
class Pictures:
    """Pictures side by side, where there is room."""

    items: Sequence[Picture]
    kind: ClassVar[str] = "pictures"


@dataclass(frozen=True)
class Commands:
    """What a person types."""

    text: str
    kind: ClassVar[str] = "commands"


Block = Text | Points | Table | Pictures | Commands


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        """The title, as an address in the page.

        >>> Section("How good is it?", []).anchor
        'how-good-is-it'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Page:
    """A whole page.

    Attributes:
        title: Of the page and of the window.
        lead: In a sentence or two, what there is to know.
        facts: The few numbers that matter most, (what, number, more words).
        sections: In their order.
    """

    title: str
    lead: str
    facts: Sequence[tuple[str, str, str]]
    sections: Sequence[Section]


def rendered(page: Page) -> str:
    """The page as HTML, everything it needs inside."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError("Reports need jinja2: pip install 'bbalpha[report]'.") from error
    environment = Environment(
        loader=PackageLoader("bbalpha.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["prose"] = _prose
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(page=page, style=style)


def write_report(html: str, path: str | os.PathLike[str]) -> Path:
    """The path of the page, written whole or not at all."""
    if not isinstance(html, str):
        raise TypeError(f"`html` must be text; got {type(html).__name__}.")
    target = Path(check_path("path", path)).resolve()
    if target.is_dir():
        raise IsADirectoryError(f"The report must be a file; {os.fspath(path)!r} is a folder: give report.html in it.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"The folder of {os.fspath(path)!r} does not exist; make it first.")
    replace_file(target, html.encode())
    return target


def _prose(text: str) -> "Markup":
    """Escaped text, what is between backticks as code.

    >>> str(_prose("`make <x>` & go"))
    '<code>make &lt;x&gt;</code> &amp; go'
    """
    from markupsafe import Markup, escape

    told = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(told)  # noqa: S704 - escaped in the line before # nosec B704
