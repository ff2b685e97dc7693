"""Parquet files as rows in order: which files there are, what is in them, and how to tell them from others."""

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUFFIXES = (".parquet", ".pq")
_FOOTER = 1 << 16  # bytes, at the end of a file, where Parquet tells what is in it


def parquet_files(source: str | os.PathLike[str]) -> list[Path]:
    """The file, or those of a folder by their names; what begins with _ or . is no data."""
    path = Path(source).resolve()
    if not path.exists():
        raise FileNotFoundError(f"There is no file {str(source)!r}.")
    if path.is_file():
        return [path]
    found = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.name[0] not in "._")
    if not found:
        raise ValueError(f"`source` must be Parquet: a file, or a folder of such; {str(source)!r} has none.")
    return found


def footer(file: Path) -> Any:
    """What a file tells of itself: pyarrow's metadata."""
    needs_pyarrow()
    from pyarrow import parquet

    with damage_named(file):
        return parquet.read_metadata(file)


@contextmanager
def damage_named(file: str | os.PathLike[str]) -> Iterator[None]:
    """A context in which what pyarrow and pandas say of a damaged file is one sentence that names the file."""
    from pyarrow.lib import ArrowException

    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        told = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{os.fspath(file)!r} must be a Parquet file; {told.rstrip('.')}.") from error


def group_sizes(files: Sequence[Path]) -> list[tuple[Path, int, int]]:
    """File, number and rows of every row group, in order."""
    found = []
    for file in files:
        about = footer(file)
        found += [(file, i, about.row_group(i).num_rows) for i in range(about.num_row_groups)]
    if not any(rows for _, _, rows in found):
        raise ValueError("`source` must hold at least one row; it has names alone.")
    return found


def check_columns(files: Sequence[Path], wanted: Collection[str]) -> None:
    """Refuse files that lack one of these columns."""
    for file in files:
        lacking = set(wanted) - set(footer(file).schema.to_arrow_schema().names)
        if lacking:
            raise ValueError(
                f"{str(file)!r} must have the columns that are asked for; {sorted(lacking)[0]!r} is missing."
            )


def told_apart(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Name, size and a hash of the footer of each, without reading the rows."""
    return [{"file": f.name, "bytes": f.stat().st_size, "footer": _tail(f)} for f in files]


def needs_pyarrow() -> None:
    """Refuse to go on where there is no pyarrow."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install pyarrow; or write the table as CSV.") from error


def _tail(file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _FOOTER))
        return hashlib.sha256(opened.read()).hexdigest()[:16]
