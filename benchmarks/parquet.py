"""Ten million rows predicted from Parquet, killed halfway and resumed -> results/parquet.json.

    python benchmarks/parquet.py                    # four minutes of one core
    python benchmarks/parquet.py --rows 200000 --out /tmp/parquet.json

A small classifier (five columns, one hidden layer of eight units, ten passes) and a file that is made here. Asked is
what happens around the model: memory beside that of a tenth of the rows, what a kill costs, and whether every row is
there once and in its place. Rows a second are told by the clock and by CPU time; the machine may be busy.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
import pyarrow
from pyarrow import parquet
from tqdm import tqdm

from bbalpha._parquet import parquet_files
from bbalpha.estimators import BBAlphaClassifier
from bbalpha.experiments import results
from bbalpha.tabular.large import _answered, pieces_of
from bbalpha.tabular.model import TableModel

_GROUP = 1 << 16
_NAMES = [f"x{i}" for i in range(5)]
_CHILD = """
import json, resource, sys
from bbalpha.tabular.large import predict_parquet
done = predict_parquet(*sys.argv[1:4], inputs=True)
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"written": done.written, "peak_mb": used.ru_maxrss / 1024, "cpu": used.ru_utime + used.ru_stime}))
"""


@dataclass(frozen=True)
class Config:
    rows: int = 10_000_000
    n_passes: int = 10
    seed: int = 0


def run(config: Config, folder: Path, ledger: results.Ledger) -> None:
    model = str(fitted(config, folder))
    start = time.perf_counter()
    few = undisturbed(config, model, folder)
    ledger.add([few], seconds=time.perf_counter() - start)
    print(json.dumps(few), flush=True)
    start = time.perf_counter()
    many = killed_halfway(config, model, folder)
    ledger.add([many | {"peak_ratio": many["peak_mb"] / few["peak_mb"]}], seconds=time.perf_counter() - start)
    print(json.dumps(many), flush=True)


def undisturbed(config: Config, model: str, folder: Path) -> results.Row:
    """A tenth of the rows."""
    n = config.rows // 10
    source, out = made(n, folder / "few.parquet"), folder / "few"
    start = time.perf_counter()
    told = ended(begun(model, source, out))
    return {"way": "undisturbed", "rows": n, "kills": 0, **speed(n, told, time.perf_counter() - start)} | checked(
        model, source, out, n
    )


def killed_halfway(config: Config, model: str, folder: Path) -> results.Row:
    """All rows; SIGKILL when half of the parts are there, and the same call again."""
    n = config.rows
    source, out = made(n, folder / "many.parquet"), folder / "many"
    half, start = len(pieces_of(parquet_files(source))) // 2, time.perf_counter()
    first = begun(model, source, out)
    while len(list(out.glob("part-*.parquet"))) < half:
        if first.poll() is not None:
            raise RuntimeError("The first run must still be at work when half of the parts are there; it ended.")
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = sum(parquet.read_metadata(p).num_rows for p in out.glob("part-*.parquet"))
    again = time.perf_counter()
    told = ended(begun(model, source, out))
    row = {"way": "killed and resumed", "rows": n, "kills": 1, "rows_before_kill": before}
    row |= speed(told["written"], told, time.perf_counter() - again)
    return row | {"seconds": time.perf_counter() - start} | checked(model, source, out, n)


def speed(rows: int, told: dict[str, Any], seconds: float) -> results.Row:
    return {
        "peak_mb": told["peak_mb"], "seconds": seconds, "rows_per_second": rows / seconds,
        "rows_per_cpu_second": rows / told["cpu"],
    }  # fmt: skip


def checked(model: str, source: Path, out: Path, n: int) -> results.Row:
    """How many rows are lost, doubled, out of order, or not what three parts come to by themselves."""
    ids = np.concatenate([
        parquet.read_table(p, columns=["row"])["row"].to_numpy() for p in sorted(out.glob("part-*.parquet"))
    ])  # fmt: skip
    counts = np.bincount(ids, minlength=n)
    pieces, other = pieces_of(parquet_files(source)), 0
    loaded = TableModel.load(model)
    for piece in (pieces[0], pieces[len(pieces) // 2], pieces[-1]):
        rows = parquet.ParquetFile(piece.file).read_row_groups(list(piece.groups))
        other += int(not _answered(rows, loaded.predict, inputs=True).equals(parquet.read_table(out / piece.name)))
    return {
        "lost": int((counts == 0).sum()), "doubled": int((counts > 1).sum()),
        "out_of_order": int((np.diff(ids) != 1).sum()), "parts_that_differ": other,
    }  # fmt: skip


# ------------------------------------------------------------------------------ model, rows and processes


def fitted(config: Config, folder: Path) -> Path:
    """A small model."""
    X = frame(2000, np.random.default_rng(config.seed))[_NAMES]
    y = X["x0"] * X["x1"] + np.sin(X["x2"]) > 0
    settings = {"hidden_layer_sizes": (8,), "dropout": 0.1, "n_ensemble": 1, "validation_fraction": 0.0, "epochs": 30}
    model = BBAlphaClassifier(**settings, n_predict_passes=config.n_passes, random_state=config.seed)
    model.fit(X, y).save(folder / "model")
    return folder / "model"


def frame(n: int, rng: np.random.Generator, first: int = 0) -> pd.DataFrame:
    rows = pd.DataFrame(rng.normal(size=(n, len(_NAMES))), columns=_NAMES)
    return rows.assign(row=np.arange(first, first + n))


def made(n: int, path: Path) -> Path:
    """A file of so many rows; one that is there is taken."""
    if path.exists():
        return path
    rng, fresh, writer = np.random.default_rng(1), path.with_suffix(".tmp"), None
    for first in tqdm(range(0, n, _GROUP), desc=path.name, disable=None):
        table = pyarrow.Table.from_pandas(frame(min(_GROUP, n - first), rng, first), preserve_index=False)
        writer = writer or parquet.ParquetWriter(fresh, table.schema)
        writer.write_table(table)
    writer.close()
    return fresh.rename(path)


def begun(model: str, source: Path, out: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _CHILD, model, str(source), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ended(process: "subprocess.Popen[str]") -> dict[str, Any]:
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"The predictions must end with code 0; they ended with {process.returncode}.")
    told: dict[str, Any] = json.loads(said)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=Config.rows)
    parser.add_argument("--out", type=Path, default=Path("results/parquet.json"))
    args = parser.parse_args()
    config = Config(rows=args.rows)
    args.out.unlink(missing_ok=True)  # memory and speed are measured whole
    command = f"python benchmarks/parquet.py --rows {args.rows}"
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder), results.Ledger(args.out, command=command, seed=config.seed, settings=vars(config)))


if __name__ == "__main__":
    main()
