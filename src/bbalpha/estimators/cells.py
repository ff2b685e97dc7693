"""The cells of one column of a table, read as numbers, truth values, dates, spans of time or levels.

    read(frame["age"], "age")            # Cells of kind "number"
    read(frame["age"], "age", "number")  # the same, or an error that names the first cell that is no number

What a column is hangs on its dtype; a column of Python objects is what all its cells are. pandas is never imported:
a column of a frame brings the methods that are used here.
"""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from numbers import Complex, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
WORDS = {"number": "numbers", "flag": "truth values", "span": "spans of time", "date": "dates", "level": "text"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Cells:
    """One column as it was read.

    Attributes:
        name: Of the column.
        kind: One of "number", "flag", "span" (seconds), "date" (microseconds since 1970, UTC), "level", "empty".
        values: float64, int64 for dates, Python objects for levels (N,); what stands where one is missing is no value.
        missing: Which are None, nan, NaT or NA (N,).
    """

    name: str
    kind: str
    values: Array
    missing: Array

    @property
    def present(self) -> Array:
        """The values that are not missing."""
        return self.values[~self.missing]

    def take(self, rows: Array) -> "Cells":
        """Some of the rows."""
        return Cells(self.name, self.kind, self.values[rows], self.missing[rows])


def read(source: Any, name: str, wanted: str | None = None) -> Cells:
    """The cells of a column, a pandas Series or an array (N,); of the kind that is `wanted` where one is.

    >>> read(np.array([1, None, 2.5], dtype=object), "age").kind
    'number'
    """
    kind = source.dtype.kind
    if kind == "c":
        raise ValueError(
            f"Complex data not supported: column {name!r} must hold real numbers. Give the two parts a column each."
        )
    if str(source.dtype).startswith("period"):
        source, kind = source.dt.to_timestamp(), "M"
    if wanted == "level" or (wanted is None and source.dtype.name == "category"):
        objects = _objects(source)
        missing = _missing(objects)
        _kind(objects[~missing], objects, name)  # what no cell may hold is refused here
        return Cells(name, "level", objects, missing)
    if kind in "biuf":
        cells = _of_numbers(source, name, "flag" if kind == "b" else "number")
    elif kind in "Mm":
        cells = _of_times(source, name, kind)
    else:
        cells = _of_objects(_objects(source), name)
    return cells if wanted in (None, cells.kind) else _as_wanted(cells, str(wanted), source)


def text(value: Any) -> str:
    """A level as text, by which levels are compared: 1, 1.0 and "1" are the same.

    >>> text(1.0), text("1"), text(True), text(0.5)
    ('1', '1', 'True', '0.5')
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (Real, Decimal)) and not isinstance(value, bool):
        number = _float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    return str(value)


def texts(cells: Cells) -> list[str]:
    """The text of every cell that is there, in the order of the rows."""
    return [text(v) for v in cells.present.tolist()]


# ------------------------------------------------------------------------------ by dtype


def _of_numbers(source: Any, name: str, kind: str) -> Cells:
    """Plain dtypes and nullable ones."""
    if hasattr(source, "to_numpy"):
        values = source.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        values = source.astype(np.float64)
    return _finite(Cells(name, kind, values, np.isnan(values)))


def _of_times(source: Any, name: str, kind: str) -> Cells:
    """Dates (with a time zone: in UTC) or spans of time."""
    dtype = "datetime64[us]" if kind == "M" else "timedelta64[us]"
    times = source.to_numpy(dtype=dtype) if hasattr(source, "to_numpy") else source.astype(dtype)
    missing, counts = np.isnat(times), times.astype(np.int64)
    return Cells(name, "date", counts, missing) if kind == "M" else Cells(name, "span", counts / 1e6, missing)


def _of_objects(objects: Array, name: str) -> Cells:
    """Python objects, as what all of them are."""
    missing = _missing(objects)
    present = objects[~missing]
    kind = _kind(present, objects, name)
    if kind in ("level", "empty"):
        return Cells(name, kind, objects, missing)
    one = {"date": _microseconds, "span": _seconds}.get(kind, _float)
    values = np.full(len(objects), 0 if kind == "date" else np.nan, dtype=np.int64 if kind == "date" else np.float64)
    values[~missing] = [one(v) for v in present]
    return _finite(Cells(name, kind, values, missing))


def _objects(source: Any) -> Array:
    objects: Array = source.to_numpy(dtype=object) if hasattr(source, "to_numpy") else source.astype(object)
    return objects


def _missing(objects: Array) -> Array:
    return np.fromiter(map(_is_missing, objects), dtype=bool, count=len(objects))


def _is_missing(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    return isinstance(value, (float, np.floating, np.datetime64, np.timedelta64)) and bool(value != value)


# ------------------------------------------------------------------------------ by the cells


def _kind(present: Array, objects: Array, name: str) -> str:
    """What all the objects are; a mixture of what a cell may hold is levels."""
    kinds = {kind: _kind_of_type(kind) for kind in set(map(type, present))}
    if None in kinds.values():
        row = next(i for i, v in enumerate(objects) if type(v) in kinds and kinds[type(v)] is None)
        raise _refused(objects[row], name, row)
    found = {str(kind) for kind in kinds.values()}
    return found.pop() if len(found) == 1 else "level" if found else "empty"


def _kind_of_type(cell: type) -> str | None:
    """The kind of a column that holds cells of this type only; None where no cell may be of it."""
    if issubclass(cell, (bool, np.bool_)):
        return "flag"
    if issubclass(cell, (timedelta, np.timedelta64)):  # numpy's is an integer to numpy
        return "span"
    if issubclass(cell, (Real, Decimal)):
        return "number"
    if issubclass(cell, (date, np.datetime64)):
        return "date"
    return "level" if issubclass(cell, str) or cell.__name__ in ("Interval", "Period") else None


def _refused(value: Any, name: str, row: int) -> Exception:
    if isinstance(value, Complex):
        return ValueError(
            f"Complex data not supported: column {name!r} must hold real numbers; got {value!r} in row {row}. "
            "Give the two parts a column each."
        )
    bytes_ = isinstance(value, (bytes, bytearray))
    fix = "Decode it to text first" if bytes_ else "Give its parts a column each, or drop the column"
    return TypeError(
        f"Each cell of the `X` argument must be a string, a number, a truth value or a date; got {_short(value)} "
        f"({type(value).__name__}) in column {name!r}, row {row}. {fix}."
    )


def _finite(cells: Cells) -> Cells:
    """The cells, if none is infinite."""
    if cells.values.dtype.kind == "f" and np.isinf(cells.values).any():
        raise infinite(cells.name, int(np.flatnonzero(np.isinf(cells.values))[0]))
    return cells


def infinite(name: str, row: int) -> ValueError:
    """The error for a number that is infinite."""
    return ValueError(
        f"`X` must hold finite numbers or missing ones; got inf in column {name!r}, row {row}. "
        "Replace it, for instance by numpy.nan where it stands for a number that is missing."
    )


def _as_wanted(cells: Cells, wanted: str, source: Any) -> Cells:
    """The cells as the column was at fit, where they can be read so."""
    if cells.missing.all():
        values = np.zeros(len(cells.missing), dtype=np.int64 if wanted == "date" else np.float64)
        return Cells(cells.name, wanted, values, cells.missing)
    bits = {"number", "flag"} == {wanted, cells.kind} and (wanted == "number" or np.isin(cells.present, (0, 1)).all())
    if bits:
        return Cells(cells.name, wanted, cells.values, cells.missing)
    objects, odd = _objects(source), ~cells.missing
    if cells.kind == "level":
        odd &= np.array([_kind_of_type(type(v)) != wanted for v in objects])
    elif wanted == "flag" and cells.kind == "number":
        odd &= ~np.isin(cells.values, (0, 1))
    row = int(np.flatnonzero(odd)[0])
    fix = " Convert it with pandas.to_datetime." if wanted == "date" else ""
    raise ValueError(
        f"`X` must be as at fit: column {cells.name!r} must hold {WORDS[wanted]} as at fit; "
        f"got {_short(objects[row])} in row {row}.{fix}"
    )


def _short(value: Any) -> str:
    told = repr(value.item() if isinstance(value, np.generic) else value)
    return told if len(told) <= 60 else told[:57] + "..."


# ------------------------------------------------------------------------------ one object


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 300 digits
        return float("inf")


def _seconds(value: Any) -> float:
    if isinstance(value, np.timedelta64):
        value = value.astype("timedelta64[us]").item()
    return float(value.total_seconds())


def _microseconds(value: Any) -> int:
    """Since 1970, UTC; a date begins at midnight, and what names no time zone is in UTC."""
    if isinstance(value, np.datetime64):
        return int(value.astype("datetime64[us]").astype(np.int64))
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return int((aware - _EPOCH) // _MICROSECOND)
