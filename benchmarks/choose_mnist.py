"""How the settings of the MNIST experiments were chosen -> results/chosen_mnist.json.

    python benchmarks/choose_mnist.py --jobs 2         (--parts dense,cnn,runtime; --quick for a test)

Candidates are trained on the first 50,000 training rows and scored by the log-likelihood of the last 10,000; no test
row is seen. dense and cnn: a network with alpha = 0.5 for each batch, learning rate, length and warm-up, three for the
best of the CNN. runtime: shared masks with K = 10, after the same minutes of training on one thread. What is in the
output is not computed again.
"""

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from bbalpha.experiments import classification, mnist, runtime
from bbalpha.experiments.classification import Unit
from bbalpha.experiments.mnist import Row
from bbalpha.experiments.results import Ledger

Candidate = tuple[int, float, int, float | None, int]  # batch, learning rate, epochs, warm-up, seed
NETWORKS: dict[str, tuple[Candidate, ...]] = {
    "dense": tuple((128, rate, 30, None, 0) for rate in (1e-3, 2e-3, 4e-3)),
    "cnn": (
        *((batch, rate, epochs, None, 0) for epochs in (4, 12) for batch in (128, 32) for rate in (1e-3, 2e-3, 4e-3)),
        (32, 4e-3, 24, None, 0),  # the best of 12 epochs, longer; and beyond the highest rate, which was the best
        (128, 8e-3, 12, None, 0),
        (32, 8e-3, 12, None, 0),
        (32, 4e-3, 12, 0.1, 0),
        (32, 2e-3, 12, 0.1, 0),
        (32, 4e-3, 8, 0.1, 0),
        *(
            (32, 4e-3, epochs, warm_up, seed)
            for seed in (1, 2)
            for epochs, warm_up in ((8, 0.1), (12, 0.1), (12, None))
        ),
    ),
}
STEPS = ((128, 3e-4), (128, 1e-3), (512, 1e-3))  # batch, learning rate
MINUTES = 6.0


def network(model: str, quick: bool, candidate: Candidate) -> Row:
    """The last row of a candidate, in a process of its own."""
    batch, rate, epochs, warm_up, seed = candidate
    base = (classification.QUICK if quick else classification.CONFIGS)[model]
    config = replace(base, batch_size=batch, learning_rate=rate, epochs=epochs, warm_up=warm_up, every=epochs)
    digits = mnist.load(flat=model == "dense", n_train=config.n_train, n_test=config.n_test, validation=True)
    unit = Unit(model, "bbalpha", 0.5, "per_example", 10, seed)
    with tempfile.TemporaryDirectory() as folder, mnist.threads(1):
        row = classification.run(unit, config, digits, Path(folder))[-1]
    return row | {"learning_rate": rate, "batch": batch, "warm_up": warm_up}


def networks(model: str, quick: bool, jobs: int, kept: Ledger) -> None:
    wanted = ((128, 1e-3, 2, None, 0),) if quick else NETWORKS[model]
    names = ("batch", "learning_rate", "epoch", "warm_up", "seed")
    missing = [c for c in wanted if not kept.has(model=model, **dict(zip(names, c, strict=True)))]
    rows = mnist.side_by_side(partial(network, model, quick), jobs, missing)
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
