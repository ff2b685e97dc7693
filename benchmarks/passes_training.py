"""Training with balanced and with independent passes, step for step -> results/passes_training.json.

    python benchmarks/passes_training.py

10,000 MNIST digits, two layers of 100 units, dropout 0.5, alpha = 0.5: the same network, order and number of steps
with 2, 4 and 10 passes, and the log-likelihood of all 10,000 test digits under 100 passes. Nothing is chosen here.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import bbalpha
from bbalpha.experiments import mnist, results
from bbalpha.networks import mlp


@dataclass(frozen=True)
class Config:
    n_train: int = 10_000
    widths: tuple[int, ...] = (100, 100)
    alpha: float = 0.5
    epochs: int = 15
    batch_size: int = 128
    learning_rate: float = 1e-3
    passes: tuple[int, ...] = (2, 4, 10)
    seeds: int = 3


def run(config: Config) -> list[dict[str, object]]:
    digits = mnist.load(flat=True, n_train=config.n_train, n_test=None)
    rows = []
    for K in config.passes:
        for seed in range(config.seeds):
            for balanced in (False, True):  # side by side, so that a busy machine is busy for both
                start = time.perf_counter()
                net = trained(config, digits, K, seed, balanced)
                seconds = time.perf_counter() - start
                p = bbalpha.predict_classification(net, digits.x_test, n_passes=100, balanced=False, seed=seed)
                found = {"total_log_likelihood": float(p.log_prob(digits.y_test).sum()),
                         "accuracy": float((p.label == digits.y_test).double().mean())}  # fmt: skip
                rows.append({"n_passes": K, "seed": seed, "balanced": balanced, **found, "seconds": round(seconds, 1)})
    return rows


def trained(config: Config, digits: mnist.Digits, K: int, seed: int, balanced: bool) -> torch.nn.Module:
    torch.manual_seed(seed)
    net = mlp([784, *config.widths, 10], dropout=0.5)
    bbalpha.fit(
        net, (digits.x, digits.y), objective=bbalpha.CrossEntropy(config.alpha), epochs=config.epochs, n_passes=K,
        batch_size=config.batch_size, learning_rate=config.learning_rate, balanced=balanced, seed=seed, progress=False,
    )  # fmt: skip
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/passes_training.json"))
    parser.add_argument("--quick", action="store_true", help="few digits and epochs: does it run?")
    args = parser.parse_args()
    config = Config(n_train=500, epochs=1, passes=(2,), seeds=1) if args.quick else Config()
    torch.set_num_threads(1)
    start = time.perf_counter()
    rows = run(config)
    command = "python benchmarks/passes_training.py" + (" --quick" if args.quick else "")
    results.write(
        args.out, command=command, seed=0, seconds=time.perf_counter() - start, rows=rows, settings=asdict(config)
    )


if __name__ == "__main__":
    main()
