"""How long one choice of labels takes -> results/acquisition_speed.json.

    python benchmarks/acquisition.py

Ten rows by BatchBALD out of a pool of 60,000 digits at K = 100: the passes of the network of the BatchBALD paper under
shared masks, and the choice. The network was trained on 20 digits, as in the first round. Aim: 20 s on two cores.
"""

import argparse
import time
from pathlib import Path

import torch

from bbalpha.acquisition import batch_bald
from bbalpha.experiments import mnist
from bbalpha.experiments.active import Config, Method, Trainee, prepare
from bbalpha.experiments.results import write

AIM = 20.0


def measured(n_rows, n_passes, threads):
    """The row of one choice, after a training on the digits that all runs begin with."""
    torch.set_num_threads(threads)
    config = Config(n_pool=n_rows, n_validation=256)
    data = prepare("mnist", config, 0, mnist.load(flat=False, letters=False))
    torch.manual_seed(0)
    passes = Trainee(Method(batch_bald, n_passes=n_passes, balanced=True), config, data).fit(
        data.pool[:20], data.y_pool[:20]
    )
    start, cpu = time.perf_counter(), time.process_time()
    probs = passes(data.pool)
    between = time.perf_counter()
    batch_bald(probs, 10, seed=0, progress=False)
    end = time.perf_counter()
    return {"rows": len(data.pool), "n_passes": n_passes, "threads": threads, "pass_seconds": between - start,
            "choose_seconds": end - between, "cpu_seconds": time.process_time() - cpu, "aim": AIM}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--passes", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/acquisition_speed.json"))
    given = parser.parse_args()
    start = time.perf_counter()
    row = measured(given.rows, given.passes, given.threads)
    command = "python benchmarks/acquisition.py"
    write(given.out, command=command, seed=0, seconds=time.perf_counter() - start, rows=[row])
    print(row)


if __name__ == "__main__":
    main()
