"""Is any row of `make bench` slower than at another commit? Both trees side by side: `make bench-against BASE=main~5`.

Two processes, one with the package as it is and one with that of the other commit, take turns: each step of each case
is timed in short bursts, now in the one, now in the other, so that a busy machine hits both. Shown is new / old of the
minima and of the medians; two copies of the same tree (`BASE=HEAD` with nothing changed) show the noise.

    python benchmarks/against.py BASE [--only tiny train] [--rounds 30] [--out against.json]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

BURST = 0.05  # seconds of one way before the other tree has its turn
LARGEST = 10_000  # passes times rows; larger cases take minutes a row and show what smaller ones show


# ------------------------------------------------------------------------------ one tree


def work():
    """The process of one tree: a case, then bursts of its ways, as asked for on the standard input."""
    import torch

    import engine

    ways = {}
    for line in sys.stdin:
        ask = json.loads(line)
        if "case" in ask:
            torch.manual_seed(0)
            name, case, net, K, batch = engine.CASES[ask["case"]]
            torch.set_num_threads(1 if name == "tiny" else 2)
            ways = {n: w for n, w in case.ways(net, K, batch).items() if n.startswith("ours")}
            for way in ways.values():
                way()
            answer = list(ways)
        else:
            answer, start = [], time.perf_counter()
            while not answer or time.perf_counter() - start < BURST:
                begin = time.perf_counter()
                ways[ask["way"]]()
                answer.append(time.perf_counter() - begin)
        print(json.dumps(answer), flush=True)


class Tree:
    """A process that runs the cases with the package in `src`."""

    def __init__(self, src):
        command = [sys.executable, __file__, "--work", "-"]
        environment = {**os.environ, "PYTHONPATH": str(src)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def ask(self, **what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


# ------------------------------------------------------------------------------ both


def compare(new, old, index, rounds):
    """[(way, new / old of the minima, of the medians)] of one case."""
    ways = new.ask(case=index)
    if old.ask(case=index) != ways:
        raise SystemExit("the two trees have other ways of running this case")
    times = {way: ([], []) for way in ways}
    for turn in range(rounds):
        for way in ways:
            pair = [(new, times[way][0]), (old, times[way][1])]
            for tree, found in pair if turn % 2 else reversed(pair):
                found += tree.ask(way=way)
    return [(way, min(a) / min(b), middle(a) / middle(b)) for way, (a, b) in times.items()]


def middle(values):
    return sorted(values)[len(values) // 2]


def main():
    import engine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--only", nargs="*", help="kinds of work to measure")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work()
    here = Path(__file__).resolve().parents[1]
    rows, start = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", options.base, "src"], cwd=here, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        new, old = Tree(here / "src"), Tree(Path(folder) / "src")
        for index, (work_name, case, net, K, batch) in enumerate(tqdm(engine.CASES)):
            asked = not options.only or work_name in options.only
            if not asked or not hasattr(case, "ways") or K * batch > LARGEST:
                continue
            for way, ratio, ratio_median in compare(new, old, index, options.rounds):
                where = {"work": work_name, "model": net, "n_passes": K, "batch": batch, "way": way}
                rows.append({**where, "ratio": round(ratio, 4), "ratio_median": round(ratio_median, 4)})
                slow = "   <- slower" if min(ratio, ratio_median) > 1.03 else ""
                tqdm.write(f"{work_name:8} {net:9} K={K:<4} N={batch:<5} {way:20} {ratio:.3f} {ratio_median:.3f}{slow}")
        for tree in (new, old):
            tree.process.stdin.close()
            tree.process.wait()
    if options.out:
        from bbalpha.experiments import results

        seconds = time.perf_counter() - start
        command = f"python benchmarks/against.py {options.base}"
        results.write(options.out, command=command, seed=0, seconds=seconds, rows=rows)
    slower = [r for r in rows if min(r["ratio"], r["ratio_median"]) > 1.03]
    print(f"{len(rows)} rows, {len(slower)} slower by more than 3 % by minima and by medians")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
