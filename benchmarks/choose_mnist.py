"""How the settings of the MNIST experiments were chosen -> results/chosen_mnist.json.

    python benchmarks/choose_mnist.py --jobs 2         (--parts dense,cnn,runtime; --quick for a test)

Candidates are trained on the first 50,000 training rows and scored by the log-likelihood of the last 10,000; no test
row is seen. dense and cnn: a network with alpha = 0.5 for each batch, learning rate, length and warm-up, three for the
best of the CNN. runtime: shared masks with K = 10, after the same minutes of training on one thread. What is in the
output is not computed again.
"""

import argparse
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bbalpha.experiments import classification, mnist, runtime, skeleton
from bbalpha.experiments.classification import Unit
from bbalpha.experiments.results import Ledger, Row

NETWORKS: dict[str, tuple[tuple[int, float, int, float | None, int], ...]] = {  # the fields of `Network` behind model
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


@dataclass(frozen=True)
class Network(skeleton.Unit):
    """A candidate for the settings of dense or cnn."""

    model: str
    batch: int
    learning_rate: float
    epoch: int
    warm_up: float | None
    seed: int


@dataclass(frozen=True)
class Steps(skeleton.Unit):
    """A candidate for those of runtime."""

    model: str
    batch: int
    learning_rate: float


def train(quick: bool, network: Network, folder: Path) -> list[Row]:
    """The last row of a candidate, in a process of its own."""
    base = (classification.QUICK if quick else classification.CONFIGS)[network.model]
    config = replace(
        base, batch_size=network.batch, learning_rate=network.learning_rate, epochs=network.epoch,
        warm_up=network.warm_up, every=network.epoch,
    )  # fmt: skip
    digits = mnist.load(flat=network.model == "dense", n_train=config.n_train, n_test=config.n_test, validation=True)
    unit = Unit(network.model, "bbalpha", 0.5, "per_example", 10, network.seed)
    with skeleton.threads(1):
        row = classification.run(unit, config, digits, folder)[-1]
    return [row | {"learning_rate": network.learning_rate, "batch": network.batch, "warm_up": network.warm_up}]


def step(quick: bool, steps: Steps, _: Path) -> list[Row]:
    base = runtime.QUICK if quick else runtime.Config()
    config = replace(base, learning_rate=steps.learning_rate, batch_size=steps.batch, threads=1)
    digits = mnist.load(flat=True, n_train=config.n_train, n_test=config.n_test, validation=True)
    with tempfile.TemporaryDirectory() as folder, skeleton.threads(config.threads):
        made = Ledger(Path(folder) / "rows.json", command="", seed=0)
        runtime.run([("shared", 10)], [0.5 if quick else 60 * MINUTES], config, digits, made, Path(folder))
    return [made.rows[-1] | {"model": steps.model, "learning_rate": steps.learning_rate}]


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
    quick, command = options.quick, "python benchmarks/choose_mnist.py"
    kept = skeleton.open_ledger(options.out, command=command, quick=quick, seed=0)
    state = options.out.parent / ".state" / options.out.stem
    for part in options.parts.split(","):
        if part == "runtime":  # one at a time: time is what is measured
            found = [Steps(part, *candidate) for candidate in STEPS[: 1 if quick else None]]
            skeleton.run_units(kept, found, partial(step, quick), state=state)
        else:
            tried = ((128, 1e-3, 2, None, 0),) if quick else NETWORKS[part]
            networks = [Network(part, *candidate) for candidate in tried]
            skeleton.run_units(kept, networks, partial(train, quick), state=state, jobs=options.jobs)
    for row in kept.rows:
        print({k: row[k] for k in ("model", "learning_rate", "batch", "epoch", "accuracy", "total_log_likelihood")})


if __name__ == "__main__":
    main()
