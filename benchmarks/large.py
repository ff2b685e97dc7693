"""100,000 and 1,000,000 rows x 20 columns: seconds and peak memory of fit and prediction -> results/large.json.

    python benchmarks/large.py
    python benchmarks/large.py --rows 100000 --ways quick boosting

Friedman's first function of 20 columns in single precision, noise a fifth of its deviation; 10,000 more rows are
scored. "quick" and "standard" are budgets of BBAlphaRegressor(), "boosting" is HistGradientBoostingRegressor(), whose
spread is that of 10,000 rows left out. Each case runs in a process of its own, with torch's threads as they come; its
peak is the largest resident memory minus what was resident before `fit`, the table among it. What is on disk is not run
again.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bbalpha.experiments.results import Ledger

SCORED = 10_000


def table(rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.random((rows + SCORED, 20), dtype=np.float32)
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, y + rng.standard_normal(len(y), dtype=np.float32)


def peak() -> float:
    """The largest resident memory of this process so far, in MB."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def measure(rows: int, way: str) -> dict[str, Any]:
    """One case, in this process."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    from bbalpha.estimators import BBAlphaRegressor

    warnings.simplefilter("ignore")
    x, y = table(rows)
    new, truth = x[rows:], y[rows:]
    before, start = peak(), time.perf_counter()
    if way == "boosting":
        model = HistGradientBoostingRegressor(random_state=0).fit(x[: rows - SCORED], y[: rows - SCORED])
        deviation = float((model.predict(x[rows - SCORED : rows]) - y[rows - SCORED : rows]).std())
    else:
        model = BBAlphaRegressor(budget=way, random_state=0).fit(x[:rows], y[:rows])
    fitted, grown = time.perf_counter(), peak()
    found = model.predict(x[:rows])
    predicted = time.perf_counter()
    row = {"fit_seconds": fitted - start, "fit_mb": grown - before, "predict_seconds": predicted - fitted}
    if len(found) != rows:
        raise RuntimeError(f"{len(found)} rows came back, not {rows}")
    if way == "boosting":
        error = model.predict(new) - truth
        nll = 0.5 * (error / deviation) ** 2 + np.log(deviation) + 0.5 * np.log(2 * np.pi)
        inside = abs(error) < 1.645 * deviation
    else:
        model.predict_interval(x[: min(rows, 100_000)])
        row["interval_seconds_of_100000"] = time.perf_counter() - predicted
        low, high = model.predict_interval(new)
        nll, error, inside = -model.log_prob(new, truth), model.predict(new) - truth, (low <= truth) & (truth <= high)
    row |= {"mb": peak() - before, "nll": float(nll.mean()), "rmse": float(np.sqrt((error**2).mean()))}
    return row | {"coverage90": float(inside.mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--ways", nargs="+", choices=("quick", "standard", "boosting"), default=None)
    parser.add_argument("--output", type=Path, default=Path("results/large.json"))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(int(given.one[0]), given.one[1])))
        return
    ledger = Ledger(given.output, command="python benchmarks/large.py", seed=0)
    for rows, way in product(given.rows, given.ways or ("boosting", "quick", "standard")):
        key = {"rows": rows, "way": way}
        if ledger.has(**key):
            continue
        command = [sys.executable, __file__, "--one", str(rows), way]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = key | json.loads(told.splitlines()[-1])
        ledger.add([row], seconds=row["fit_seconds"] + row["predict_seconds"])
        print(*(round(v, 2) if isinstance(v, float) else v for v in row.values()), flush=True)


if __name__ == "__main__":
    main()
