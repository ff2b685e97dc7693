"""Rows as JSON has them, read as the cells of a table, request by request; a table is made of a whole batch.

It takes what `TableModel.frame` takes, much faster for one row, with one difference: dates must be ISO 8601, because
what else a date may be is guessed from its neighbours, and there are other requests among them.

reader = Reader(model)
rows = reader.read([{"age": 40, "city": "Rome"}])     # one tuple a row, or a ValueError in one sentence
reader.table(rows)                                    # what the estimator takes
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bbalpha.tabular.fields import Field
from bbalpha.tabular.model import TableModel

Row = tuple[Any, ...]
_HUGE = 1e300
_YEAR, _MONTH = re.compile(r"\d{4}"), re.compile(r"\d{4}-\d{2}")
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Reader:
    """Reads the rows of one model.

    Args:
        model: It says which columns there are, of which kinds, and whether cells may be missing.
    """

    def __init__(self, model: TableModel) -> None:
        self._fields = model.card.fields
        self._names = frozenset(model.columns)
        self._read = [(f.name, _READERS[f.kind]) for f in self._fields]
        self._gaps = model.estimator.encoder_ is not None
        self._named = hasattr(model.estimator, "feature_names_in_")

    def read(self, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
        """The cells of each row, in the order of the columns.

        Raises:
            ValueError: If a row lacks a column, has another, or a cell is not of the kind of its column.
        """
        found = []
        for i, row in enumerate(rows):
            if row.keys() != self._names:
                raise ValueError(f"Row {i}: {self._odd(row)}.")
            cells = []
            for name, read in self._read:
                cell = row[name]
                if cell is None and not self._gaps:
                    raise ValueError(f"Row {i}: {name!r} must not be missing: it never was at the fit; got null.")
                try:
                    cells.append(None if cell is None else read(cell))
                except ValueError as error:
                    raise ValueError(f"Row {i}: {name!r} must be {error}; got {_short(cell)}.") from error
            found.append(tuple(cells))
        return found

    def table(self, rows: Sequence[Row]) -> Any:
        """Rows that were read, as the estimator takes them: a table, or an array where it was fitted on one."""
        columns = {f.name: _column(f, cells) for f, cells in zip(self._fields, zip(*rows, strict=True), strict=True)}
        if not self._gaps and not self._named:
            return np.column_stack([*columns.values()])
        import pandas

        return pandas.DataFrame(columns, copy=False)

    def _odd(self, row: Mapping[str, Any]) -> str:
        other = row.keys() - self._names
        if other:
            return f"{_short(min(other))} is no column of the model; it has {', '.join(f.name for f in self._fields)}"
        return f"{min(self._names - row.keys())!r} is missing; give null for an unknown one"


def _number(cell: Any) -> float:
    if type(cell) not in (int, float):
        raise ValueError("a number or null")
    if not abs(cell) < _HUGE:
        raise ValueError("a finite number")
    return float(cell)


def _level(cell: Any) -> str:
    if isinstance(cell, str):
        if not cell.isascii() and any("\ud800" <= letter <= "\udfff" for letter in cell):  # half a letter
            raise ValueError("text in Unicode, a number, a truth value or null")
        return cell
    if isinstance(cell, (list, dict)):
        raise ValueError("text, a number, a truth value or null")
    if isinstance(cell, float):
        if not math.isfinite(cell):
            raise ValueError("text, a finite number, a truth value or null")
        return str(int(cell)) if cell.is_integer() else str(cell)
    return str(cell)


def _flag(cell: Any) -> bool:
    found = _TRUTH.get(_level(cell).strip().lower().removesuffix(".0")) if not isinstance(cell, (list, dict)) else None
    if found is None:
        raise ValueError("true, false or null")
    return found


def _date(cell: Any) -> np.datetime64:
    """In UTC."""
    if not isinstance(cell, str):
        raise ValueError("a date as text, like 1976-01-31 or 1976-01-31T12:00:00, or null")
    text = f"{cell}-01-01" if _YEAR.fullmatch(cell) else f"{cell}-01" if _MONTH.fullmatch(cell) else cell
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            moment = moment.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError) as error:
        raise ValueError("a date like 1976-01-31 or 1976-01-31T12:00:00, or null") from error
    return np.datetime64(moment, "us")


_READERS: dict[str, Callable[[Any], Any]] = {
    "number": _number, "span": _number, "level": _level, "flag": _flag, "date": _date,
}  # fmt: skip


def _column(about: Field, cells: Sequence[Any]) -> Any:
    if about.kind in ("level", "flag"):
        import pandas

        return pandas.Series(cells, dtype=object)  # as they are: what pandas makes of text takes longer to read
    if about.kind == "date":
        return np.array([np.datetime64("NaT") if c is None else c for c in cells], dtype="datetime64[us]")
    numbers: NDArray[Any] = np.array([np.nan if c is None else c for c in cells], dtype=np.float64)
    if about.kind == "span":  # seconds
        return (numbers * 1e6).astype("timedelta64[us]")
    return numbers


def _short(cell: Any) -> str:
    told = repr(cell)
    return told if len(told) <= 60 else told[:57] + "..."
