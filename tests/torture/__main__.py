"""Run the campaign, or parts of it; a run that was cut off goes on behind the parts that are done."""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads on busy cores are slower than one

from bbalpha.experiments.results import Ledger

from . import PARTS


def campaign(ledger, parts, size, seed):
    """Run the parts that are not in the results yet."""
    for name in parts:
        if ledger.has(part=name):
            continue
        start = time.perf_counter()
        rows = importlib.import_module(f".{name}", __package__).run(size, seed)
        ledger.add([{"part": name, **row} for row in rows], seconds=time.perf_counter() - start, part=name)
        for row in rows:
            told = f": {row['told']}" if row["told"] else ""
            print(f"{name:10} {row['what']:45} {row['tried']:6} {row['unit']:8} {row['failures']:4} failures{told}")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=f"all if none: {', '.join(PARTS)}")
    parser.add_argument("--size", type=float, default=1.0, help="1 is the whole campaign")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/torture.json"))
    parser.add_argument("--again", action="store_true", help="forget what the file holds")
    args = parser.parse_args(arguments)
    if args.again:
        args.out.unlink(missing_ok=True)
    command = "make torture" if args.size == 1 else f"python -m tests.torture --size {args.size:g}"
    ledger = Ledger(args.out, command=command, seed=args.seed, settings={"size": args.size})
    campaign(ledger, args.parts or PARTS, args.size, args.seed)
    return 1 if sum(row["failures"] for row in ledger.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
