"""The columns of a table, in words: what goes in, what is left out, and what a form for one row would offer."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bbalpha.estimators.cells import read, texts
from bbalpha.estimators.columns import fit_column

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Task = Literal["regression", "classification"]
_MOST_LEVELS = 50


@dataclass(frozen=True)
class Field:
    """One column that a model takes.

    Attributes:
        name: Of the column.
        kind: "number", "flag", "date", "span" or "level".
        low: The 1 % quantile of numbers; the first of dates, as text.
        centre: The median; the commonest level.
        high: The 99 % quantile; the last of dates.
        whole: Whether all numbers are whole.
        levels: The levels, the commonest first, at most 50.
        n_levels: How many there were.
        missing: The share of cells that were missing.
    """

    name: str
    kind: str
    low: Any = None
    centre: Any = None
    high: Any = None
    whole: bool = False
    levels: tuple[str, ...] = ()
    n_levels: int = 0
    missing: float = 0.0

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"levels": list(self.levels)}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Field":
        """The field that `told` gave."""
        if not isinstance(told["name"], str) or told["kind"] not in ("number", "flag", "date", "span", "level"):
            raise ValueError(f"a field must have a name and a kind; got {told['name']!r:.40} and {told['kind']!r:.40}")
        return cls(**{**told, "levels": tuple(told["levels"])})


def usable(frame: "DataFrame", leave_out: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The columns that a model can take, and of the others, by name, why not."""
    kept, why = [], {}
    for name in frame.columns:
        if name in leave_out:
            continue
        try:
            cells = read(frame[name], name)
            column = fit_column(cells)
        except (ValueError, TypeError) as error:
            text = "identifiers or free text" if "identifiers" in str(error) else str(error)
            why[name] = text
            continue
        if not column.names:
            why[name] = "the same in every row"
        else:
            kept.append(name)
    return kept, why


def describe(column: "Series[Any]", name: str) -> Field:
    """A column in words."""
    cells = read(column, name)
    missing = float(cells.missing.mean())
    if cells.kind == "level":
        values, counts = np.unique(np.array(texts(cells), dtype=object).astype(str), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        levels = tuple(str(values[i]) for i in order[:_MOST_LEVELS])
        return Field(
            name, "level", centre=levels[0] if levels else None, levels=levels, n_levels=len(values), missing=missing
        )
    present = cells.present
    if cells.kind == "date":
        dates = np.sort(present).astype("datetime64[us]").astype("datetime64[s]")
        first, middle, last = (str(dates[i]) for i in (0, len(dates) // 2, -1))
        return Field(name, "date", first, middle, last, missing=missing)
    low, centre, high = (float(q) for q in np.quantile(present.astype(float), (0.01, 0.5, 0.99)))
    whole = bool((present == np.round(present)).all())
    if low == high:
        low, high = float(present.min()), float(present.max())
    if whole:
        low, centre, high = float(np.floor(low)), float(round(centre)), float(np.ceil(high))
    return Field(name, cells.kind, low, centre, high, whole=whole, missing=missing)


def guess_task(target: "Series[Any]") -> Task:
    """Text, truth values and two different numbers are classes; other numbers are quantities."""
    kind = read(target, str(target.name)).kind
    if kind in ("level", "flag"):
        return "classification"
    if kind != "number":
        raise ValueError(f"The target {target.name!r} must be numbers or classes; it holds dates or spans of time.")
    return "classification" if target.dropna().nunique() <= 2 else "regression"
