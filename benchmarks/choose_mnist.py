"""How the settings of the MNIST experiments were chosen -> results/chosen_mnist.json.

    python benchmarks/choose_mnist.py --jobs 2         (--parts dense,cnn,runtime; --quick for a test)

Candidates are trained on the first 50,000 training rows and scored by the log-likelihood of the last 10,000; no test
row is seen. dense and cnn: a network with alpha = 0.5 for each batch, learning rate and length. runtime: shared masks
with K = 10, after the same minutes of training on one thread. What is in the output is not computed again.
"""

import argparse
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from bbalpha.experiments import classification, mnist, runtime
from bbalpha.experiments.classification import Unit
from bbalpha.experiments.mnist import Row
from bbalpha.experiments.results import Ledger

NETWORKS = {  # batch, learning rate, epochs
    "dense": ((128, 1e-3, 30), (128, 2e-3, 30), (128, 4e-3, 30)),
    "cnn": (
        *((batch, rate, 4) for batch in (128, 32) for rate in (1e-3, 2e-3, 4e-3)),
        *((batch, rate, 12) for batch in (128, 32) for rate in (1e-3, 2e-3, 4e-3)),
        (32, 4e-3, 24),  # the best of 12, longer; and beyond the highest rate, which was the best
        (128, 8e-3, 12),
        (32, 8e-3, 12),
    ),
}
STEPS = ((128, 3e-4), (128, 1e-3), (512, 1e-3))  # batch, learning rate
MINUTES = 6.0


def network(model: str, quick: bool, candidate: tuple[int, float, int]) -> Row:
    """The last row of a candidate, in a process of its own."""
    batch, rate, epochs = candidate
    base = (classification.QUICK if quick else classification.CONFIGS)[model]
    config = replace(base, batch_size=batch, learning_rate=rate, epochs=epochs, every=epochs)
    digits = mnist.load(flat=model == "dense", n_train=config.n_train, n_test=config.n_test, validation=True)
    unit = Unit(model, "bbalpha", 0.5, "per_example", 10, seed=0)
    with tempfile.TemporaryDirectory() as folder, mnist.threads(1):
        row = classification.run(unit, config, digits, Path(folder))[-1]
    return row | {"learning_rate": rate, "batch": batch}


def networks(model: str, quick: bool, jobs: int, kept: Ledger) -> None:
    wanted = [(batch, rate, 2) for batch, rate, _ in NETWORKS[model][:1]] if quick else NETWORKS[model]
    missing = [c for c in wanted if not kept.has(model=model, batch=c[0], learning_rate=c[1], epoch=c[2])]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        rows = pool.map(partial(network, model, quick), missing)  # nothing new is begun once one has failed
        for row in tqdm(rows, total=len(missing), unit="net", desc=model, disable=None):
            kept.add([row], seconds=row["seconds"])


def steps(batch: int, rate: float, quick: bool, kept: Ledger) -> None:
    base = runtime.QUICK if quick else runtime.Config()
    config = replace(base, learning_rate=rate, batch_size=batch, threads=1)
    if kept.has(model="runtime", learning_rate=rate, batch=batch):
        return
    digits = mnist.load(flat=True, n_train=config.n_train, n_test=config.n_test, validation=True)
    with tempfile.TemporaryDirectory() as folder, mnist.threads(config.threads):
        made = Ledger(Path(folder) / "rows.json", command="", seed=0)
        runtime.run([("shared", 10)], [0.5 if quick else 60 * MINUTES], config, digits, made, Path(folder))
    row = made.rows[-1] | {"model": "runtime", "learning_rate": rate}
    kept.add([row], seconds=row["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="dense,cnn,runtime", help="with commas")
    parser.add_argument("--jobs", type=int, default=1, help="networks trained side by side, on one thread each")
    parser.add_argument("--quick", action="store_true", help="5,000 rows")
    parser.add_argument("--out", type=Path, default=Path("results/chosen_mnist.json"))
    options = parser.parse_args()
    unknown = set(options.parts.split(",")) - {*NETWORKS, "runtime"}
    if unknown:
        parser.error(f"--parts must be some of dense, cnn, runtime; got {', '.join(sorted(unknown))}.")
    kept = mnist.ledger(options.out, "python benchmarks/choose_mnist.py", quick=options.quick, seed=0)
    for part in options.parts.split(","):
        if part != "runtime":
            networks(part, options.quick, options.jobs, kept)
            continue
        for batch, rate in STEPS[: 1 if options.quick else None]:
            steps(batch, rate, options.quick, kept)
    for row in kept.rows:
        print({k: row[k] for k in ("model", "learning_rate", "batch", "epoch", "accuracy", "total_log_likelihood")})


if __name__ == "__main__":
    main()
