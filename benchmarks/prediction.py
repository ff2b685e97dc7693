"""A million rows with K = 100 passes: seconds and peak memory of `predict_*` -> results/prediction.json.

    python benchmarks/prediction.py

Each case runs in a process of its own; its peak is the largest resident memory minus what was resident before the
call, so the input (given by a generator, batch by batch, or as one tensor) is not counted, the result is.
The progress bar shows rows or batches, rate and time left.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bbalpha.experiments import results

CASES = {
    "classification": "10 classes, one tensor; probabilities, entropies and votes are kept",
    "classification-stream": "the same from a generator of batches",
    "regression": "one output, one tensor; the K means of every row are kept (400 bytes a row)",
    "regression-by-parts": "one call a part of 100,000 rows, mean and deviation kept",
}
FEATURES, PART = 10, 100_000


def measure(case: str, rows: int, n_passes: int, progress: bool) -> dict[str, Any]:
    """One case, in this process."""
    import torch

    import bbalpha
    from bbalpha.networks import mlp

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = mlp([FEATURES, 50, 10 if "class" in case else 1], dropout=0.1, input_dropout=0.0)
    options: dict[str, Any] = {"n_passes": n_passes, "seed": 0, "progress": progress}
    bbalpha.predict_regression(model, torch.randn(64, FEATURES), n_passes=2)  # first-call costs are not the question
    whole = case in ("classification", "regression")
    x = torch.randn(rows, FEATURES) if whole else None
    parts = (torch.randn(min(PART, rows - i), FEATURES) for i in range(0, rows, PART))
    before, start = _peak_mb(), time.perf_counter()
    if case.startswith("classification"):
        result = bbalpha.predict_classification(model, x if whole else parts, **options)
        count = len(result.probs)
    elif whole:
        result = bbalpha.predict_regression(model, x, precision=4.0, **options)
        count = len(result.mean)
    else:
        kept = []
        for part in parts:
            p = bbalpha.predict_regression(model, part, precision=4.0, **options)
            kept.append((p.mean, p.std))
        count = sum(len(mean) for mean, _ in kept)
    seconds = time.perf_counter() - start
    if count != rows:
        raise RuntimeError(f"{count} rows came back, not {rows}")
    return {
        "work": f"predict {rows} rows",
        "way": case,
        "n_passes": n_passes,
        "batch": "by memory",
        "rows": rows,
        "seconds": round(seconds, 1),
        "peak_mb": round(_peak_mb() - before, 1),
        "passes_per_second": round(rows * n_passes / seconds),
    }


def _peak_mb() -> float:
    """The largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)  # bytes there, kilobytes elsewhere


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--passes", type=int, default=100)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--out", type=Path, default=Path("results/prediction.json"))
    parser.add_argument("--case", choices=CASES, help="one case, printed as JSON")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args.rows, args.passes, not args.quiet)))
        return
    start, rows = time.perf_counter(), []
    for case, what in CASES.items():
        command = [sys.executable, __file__, "--case", case, "--rows", str(args.rows), "--passes", str(args.passes)]
        done = subprocess.run([*command, *["--quiet"] * args.quiet], check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout))
        print(f"{case:22s} {rows[-1]['seconds']:7.1f} s {rows[-1]['peak_mb']:8.1f} MB   {what}", flush=True)
    command = f"python benchmarks/prediction.py --rows {args.rows} --passes {args.passes}"
    results.write(args.out, command=command, seed=0, seconds=time.perf_counter() - start, rows=rows)


if __name__ == "__main__":
    main()
