"""Tables in files: CSV and Parquet.

They are read with their dates, and written whole or not at all:

frame = read_table("houses.csv")
write_table(frame, "out.parquet")
"""

import gzip
import io
import lzma
import os
import sys
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bbalpha._files import replace_file
from bbalpha._parquet import SUFFIXES, damage_named, needs_pyarrow

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_TABBED = (".tsv", ".tab")
# of a column of text, all of whose cells must be of one of these; where two would do, none is taken
_DATES = ("ISO8601", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%b %d %Y", "%d %b %Y")


def read_table(path: str | os.PathLike[str], *, dates: bool = True) -> "DataFrame":
    """The table in a file: CSV (tabs in .tsv, compressed as .gz and the like), or Parquet; "-" is CSV from stdin.

    Args:
        path: The file.
        dates: Whether columns of text that are dates in every cell become dates.
    """
    pandas = _pandas()
    name = os.fspath(path)
    try:
        if name == "-":
            frame = pandas.read_csv(io.StringIO(sys.stdin.read()))
        elif Path(name).suffix.lower() in SUFFIXES:
            frame = _read_parquet(pandas, name)
        else:
            tabs = any(end in _TABBED for end in map(str.lower, Path(name).suffixes))
            frame = pandas.read_csv(name, sep="\t" if tabs else ",")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no file {name!r}.") from error
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{name!r} must be a table with a line of names, commas between cells; {error}.") from error
    except (
        EOFError,
        zlib.error,
        zipfile.BadZipFile,
        lzma.LZMAError,
        gzip.BadGzipFile,
    ) as error:  # of what is compressed
        raise ValueError(f"{name!r} is damaged: {error}.") from error
    if not len(frame):
        raise ValueError(f"{name!r} must hold at least one row; it has names alone.")
    frame.columns = [str(column) for column in frame.columns]
    return with_dates(frame) if dates else frame


def with_dates(frame: "DataFrame") -> "DataFrame":
    """The table, its columns of text that are dates in every cell as dates."""
    found = {name: date for name in frame.columns if (date := _date(frame[name])) is not None}
    return frame.assign(**found) if found else frame


def write_table(frame: "DataFrame", path: str | os.PathLike[str] | None) -> None:
    """Write a table as the name of the file says; None or "-" is CSV on stdout."""
    name = "-" if path is None else os.fspath(path)
    if name == "-":
        sys.stdout.write(frame.to_csv(index=False))
        return
    data = io.BytesIO()
    if Path(name).suffix.lower() in SUFFIXES:
        needs_pyarrow()
        frame.to_parquet(data, index=False)
    else:
        frame.to_csv(data, index=False, sep="\t" if Path(name).suffix.lower() in _TABBED else ",")
    folder = Path(name).resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"The folder of {name!r} does not exist; make it first.")
    replace_file(Path(name).resolve(), data.getvalue())


def _date(column: "Series[Any]") -> Any:
    """A column of text as dates, or None where a cell is none, or could be read in two ways."""
    pandas = _pandas()
    if not (pandas.api.types.is_object_dtype(column) or pandas.api.types.is_string_dtype(column)):
        return None
    present = column.dropna()
    if not len(present) or not all(isinstance(cell, str) and any(map(str.isdigit, cell)) for cell in present):
        return None
    found = []
    for form in _DATES:
        try:
            dates = pandas.to_datetime(column, format=form, utc=form == "ISO8601")
        except (ValueError, TypeError, OverflowError):
            continue
        if form == "ISO8601":
            return dates.dt.tz_localize(None)
        found.append(dates)
    return found[0] if len(found) == 1 else None


def _read_parquet(pandas: Any, name: str) -> "DataFrame":
    needs_pyarrow()
    with damage_named(name):
        found: DataFrame = pandas.read_parquet(name)
    return found


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError("Tables need pandas: pip install 'bbalpha[cli]'.") from error
    return pandas
