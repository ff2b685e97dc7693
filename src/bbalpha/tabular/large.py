"""Predictions for Parquet larger than memory: parts that appear whole, in order, each row once, however often cut off.

    predict_parquet("model", "rows/", "answers/", jobs=4)     # stopped or killed: the same call goes on
    pandas.read_parquet("answers/")                           # as many rows, in the order of the files

A part is some neighbouring row groups of one file. What is computed together hangs on the file alone and all rows share
the masks of one seed, so that an answer depends neither on the shard nor on where a run was cut.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bbalpha import _files as folders
from bbalpha._parquet import check_columns, group_sizes, parquet_files, told_apart
from bbalpha._spread import spread
from bbalpha.checks import check_count, check_inner_share
from bbalpha.tabular.model import TableModel

if TYPE_CHECKING:
    from pandas import DataFrame

MANIFEST = "_manifest.json"  # readers of Parquet folders pass over names that begin with _ or .
PART_ROWS = 65_536  # of a part, at least, where a file has so many; row groups are not cut


@dataclass(frozen=True)
class Piece:
    """What becomes one part.

    Attributes:
        number: Among all.
        file: Where its rows are.
        groups: Its row groups there.
        rows: How many rows.
    """

    number: int
    file: str
    groups: tuple[int, ...]
    rows: int

    @property
    def name(self) -> str:
        """Of the part."""
        return f"part-{self.number:06}.parquet"


@dataclass(frozen=True)
class Done:
    """How far a folder of predictions is.

    Attributes:
        parts: All that there will be.
        missing: Those that are not there yet, such as other ranks' parts.
        rows: All that there will be.
        written: Rows that this call wrote.
    """

    parts: int
    missing: int
    rows: int
    written: int


@dataclass(frozen=True)
class Asked:
    """What is asked of a model, the same for all rows.

    Attributes:
        model: The folder.
        stamp: A hash of what is in it.
        coverage: As in `TableModel.predict`.
        inputs: Whether the columns of the input are written too.
        n_passes: As in `TableModel.asked`.
        seed: Likewise.
    """

    model: str
    stamp: str
    coverage: float = 0.9
    inputs: bool = False
    n_passes: int | None = None
    seed: int | None = None

    def loaded(self) -> TableModel:
        """The model, read once a process."""
        return _loaded(self.model, self.stamp, self.n_passes, self.seed)


def predict_parquet(
    model: str | os.PathLike[str],
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    coverage: float = 0.9,
    inputs: bool = False,
    n_passes: int | None = None,
    seed: int | None = None,
    jobs: int | None = 1,
    rank: int | None = None,
    world_size: int | None = None,
) -> Done:
    """Predict every row of a Parquet file, or of a folder of them, into a folder of parts, in bounded memory.

    Parts that are there are not made again; a folder that was begun with another model, other rows or other options is
    refused.

    Args:
        model: A folder of `bbalpha fit`, or of an estimator's `save`.
        source: A file, or a folder whose files are taken in the order of their names.
        out: The folder; it is made.
        coverage: Of the interval from low to high.
        inputs: Write the columns of the input too.
        n_passes: K; None takes that of the model.
        seed: Of the passes; None takes that of the model.
        jobs: Parts made side by side, in processes of this machine; None is as the `joblib.parallel_config` around it
            says.
        rank: Which of `world_size` callers of the same this is; None takes both from the environment, as torchrun sets
            it, and is the only one where there is none.
        world_size: How many callers there are.
    """
    check_inner_share("coverage", coverage)
    rank, world_size = _place(rank, world_size)
    place = str(Path(model).resolve())
    asked = Asked(place, _stamp(place), coverage, inputs, n_passes, seed)
    files, target = parquet_files(source), Path(out).resolve()
    pieces = pieces_of(files)
    check_columns(files, asked.loaded().columns)
    _begin(target, _manifest(asked, files, pieces))
    missing = [p for p in pieces[rank::world_size] if not (target / p.name).exists()]
    rows = 0
    with tqdm(total=sum(p.rows for p in missing), unit="row", unit_scale=True, disable=None) as bar:
        for done in spread(partial(_write, asked, str(target)), missing, jobs=jobs):
            rows += done
            bar.update(done)
    left = sum(not (target / p.name).exists() for p in pieces)
    return Done(len(pieces), left, sum(p.rows for p in pieces), rows)


def pieces_of(files: Sequence[Path]) -> list[Piece]:
    """The parts that these files come to: row groups that are neighbours, until they have enough rows."""
    found: list[Piece] = []
    sizes = group_sizes(files)
    taken: list[int] = []
    rows = 0
    for i, (file, group, n) in enumerate(sizes):
        taken.append(group)
        rows += n
        last = i + 1 == len(sizes) or sizes[i + 1][0] != file
        if rows >= PART_ROWS or last:
            found += [Piece(len(found), str(file), tuple(taken), rows)] * bool(rows)
            taken, rows = [], 0
    return found


# ------------------------------------------------------------------------------ one part


def _write(asked: Asked, out: str, piece: Piece) -> int:
    """Make a part, which appears whole; its rows."""
    import pyarrow
    from pyarrow import parquet

    model, target = asked.loaded(), Path(out) / piece.name
    with folders.writing(target):
        fresh, rows, writer = folders.temporary(target), 0, None
        try:
            with parquet.ParquetFile(piece.file) as file:
                columns = None if asked.inputs else model.columns
                for batch in file.iter_batches(PART_ROWS, row_groups=list(piece.groups), columns=columns):
                    table = pyarrow.Table.from_batches([batch])
                    answer = _answered(table, partial(model.predict, coverage=asked.coverage), asked.inputs)
                    writer = writer or parquet.ParquetWriter(fresh, answer.schema)
                    writer.write_table(answer)
                    rows += len(answer)
            if writer is None or rows != piece.rows:
                raise ValueError(f"{piece.file!r} changed while it was read. Start again with an `out` that is empty.")
            writer.close()
            with fresh.open("rb") as written:
                os.fsync(written.fileno())
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
    return rows


def _answered(table: Any, predict: "Callable[[DataFrame], DataFrame]", inputs: bool) -> Any:
    """Predictions of the rows of an Arrow table as another; behind its columns, if these are wanted."""
    import pyarrow

    found = pyarrow.Table.from_pandas(predict(table.to_pandas(ignore_metadata=True)), preserve_index=False)
    found = found.replace_schema_metadata()
    if not inputs:
        return found
    taken = set(table.column_names)
    for name in found.column_names:
        table = table.append_column(name + " (predicted)" * (name in taken), found[name])
    return table.replace_schema_metadata()


@lru_cache(maxsize=1)
def _loaded(path: str, _: str, n_passes: int | None, seed: int | None) -> TableModel:
    return TableModel.load(path).asked(n_passes=n_passes, seed=seed)


# ------------------------------------------------------------------------------ what a folder of parts holds


def _manifest(asked: Asked, files: Sequence[Path], pieces: Sequence[Piece]) -> dict[str, Any]:
    told = {name: value for name, value in vars(asked).items() if name not in ("model", "stamp")}
    own = {"parts": len(pieces), "rows": sum(p.rows for p in pieces)}
    return {"format": 1, "model": asked.stamp, "asked": told, "source": told_apart(files), **own}


def _begin(out: Path, manifest: dict[str, Any]) -> None:
    """Make the folder, or check that it was begun for the same."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_file():
        raise ValueError(f"`out` must be a folder of parts; {str(out)!r} is a file. Choose another name.")
    out.mkdir(exist_ok=True)
    path = out / MANIFEST
    with folders.writing(path):
        if path.exists():
            before = json.loads(path.read_bytes())
            other = [name for name in manifest if before.get(name) != manifest[name]]
            if other:
                what = ", ".join(other)
                raise ValueError(f"`out` holds predictions of another {what}; choose another folder than {str(out)!r}.")
            return
        if any(p.name[0] not in "._" for p in out.iterdir()):
            raise ValueError(f"`out` must be new or hold parts of the same predictions; {str(out)!r} holds others.")
        folders.replace_file(path, json.dumps(manifest, indent=1).encode())


def _stamp(model: str) -> str:
    """A hash of a model's files."""
    digest = hashlib.sha256()
    for file in sorted(Path(model).rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            digest.update(file.relative_to(model).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks, as given or as in the environment."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"`rank` and `world_size` must be given together; got {rank} and {world_size}.")
    if rank is None or world_size is None:
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    world_size = check_count("world_size", world_size)
    return check_count("rank", rank, least=0, most=world_size - 1), world_size
