"""Filters and units of the CNN that are dead after the first of its epochs -> results/dead_units.json.

    python benchmarks/dead_units.py                    (--quick for a test)

Dead: its ReLU gives 0 for each of the first 10,000 training digits, dropout off, and so it gets no gradient. With
and without the warm-up of the learning rate, all else as in `bbalpha reproduce classification --models cnn`, alpha =
0.5. What is in the output is not computed again.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from bbalpha.experiments import classification, mnist, skeleton
from bbalpha.experiments.classification import Config
from bbalpha.experiments.mnist import Digits
from bbalpha.experiments.results import Row
from bbalpha.objectives import CrossEntropy
from bbalpha.training import fit

LAYERS = ("first convolution", "second convolution", "dense layer")


@dataclass(frozen=True)
class Network(skeleton.Unit):
    warm_up: float | None
    seed: int


def first_epoch(config: Config, digits: Digits, seed: int) -> nn.Sequential:
    """The CNN after the first of `config.epochs` epochs."""
    torch.manual_seed(seed)
    net = classification.network("cnn")
    fit(
        net, (digits.x, digits.y), objective=CrossEntropy(0.5), epochs=1, n_passes=10, batch_size=config.batch_size,
        optimizer=mnist.adam(net, config.learning_rate), schedule=lambda share: config.schedule(share / config.epochs),
        seed=seed, progress=False,
    )  # fmt: skip
    return net


@torch.no_grad()
def dead(net: nn.Sequential, x: torch.Tensor) -> list[tuple[int, int]]:
    """(units, dead ones) after each ReLU; a filter is one unit."""
    counts = []
    for layer in net.eval():
        x = layer(x)
        if isinstance(layer, nn.ReLU):
            alive = (x > 0).transpose(0, 1).flatten(1).any(1)
            counts.append((len(alive), int((~alive).sum())))
    return counts


def rows_of(config: Config, digits: Digits, seed: int) -> list[Row]:
    counts = dead(first_epoch(config, digits, seed), digits.x[:10_000])
    same = {"warm_up": config.warm_up, "learning_rate": config.learning_rate, "seed": seed}
    return [same | {"layer": name, "units": n, "dead": m} for name, (n, m) in zip(LAYERS, counts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5,000 rows, one network of each")
    parser.add_argument("--out", type=Path, default=Path("results/dead_units.json"))
    options = parser.parse_args()
    base = classification.CONFIGS["cnn"]
    digits = mnist.load(flat=False, n_train=5_000 if options.quick else None)
    command = "python benchmarks/dead_units.py"
    kept = skeleton.open_ledger(options.out, command=command, quick=options.quick, seed=0)
    networks = [Network(warm_up, seed) for seed in range(1 if options.quick else 3) for warm_up in (None, base.warm_up)]

    def work(network: Network, _: Path) -> list[Row]:
        with skeleton.threads(1):
            return rows_of(replace(base, warm_up=network.warm_up), digits, network.seed)

    skeleton.run_units(kept, networks, work, state=options.out.parent / ".state" / "dead_units")
    for row in kept.rows:
        print(row)


if __name__ == "__main__":
    main()
