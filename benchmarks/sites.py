"""Randomness where it pays: what `sites=` saves, and what it costs in likelihood -> results/sites.json.

    python benchmarks/sites.py

Cost: transformer encoders of 2 and 6 layers, K = 10, batch 32, one thread, by processor time; all ways take turns in
one process, round after round. Unit: one training step, or one stochastic pass without gradient, of plain torch.

Worth: small networks trained with K = 4 passes at alpha = 0.5, scored with 50 passes on rows that were not trained
on. Strangers are the same images with their pixels shuffled (digits), or letters (notMNIST). Settings were cut to make
the whole take six minutes, after short trials of one seed that printed test scores too; no two settings were compared
by these, and the full run was made once. MNIST is left out where its files are not at hand.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bbalpha
from bbalpha import data
from bbalpha.experiments import mnist, results
from bbalpha.networks import mlp

Row = dict[str, Any]
Call = Callable[[], object]


@dataclass(frozen=True)
class Config:
    depths: tuple[int, ...] = (2, 6)
    rounds: int = 12
    n_passes: int = 10
    batch: int = 32
    models: tuple[str, ...] = ("encoder, digits", "CNN, digits", "3x1000, MNIST")
    train_passes: int = 4
    test_passes: int = 50
    seeds: int = 3
    epochs: int = 25
    n_train: int = 1200
    rows_mnist: int = 2000
    epochs_mnist: int = 10
    seeds_mnist: int = 2
    seed: int = 0


QUICK = Config(
    depths=(1,), rounds=1, n_passes=2, batch=4, models=("encoder, digits", "CNN, digits"), train_passes=2,
    test_passes=2, seeds=1, epochs=1, n_train=1700,
)  # fmt: skip


# ------------------------------------------------------------------------------ cost


class TextEncoder(nn.Module):
    """The encoder of benchmarks/engine.py, of any depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


def costs(config: Config, depth: int) -> list[Row]:
    """Training steps and predictions of one encoder, by all ways."""
    net, x = TextEncoder(depth), torch.randint(1000, (config.batch, 32))
    y = torch.randint(10, (config.batch,))
    chosen = {"all sites": None, "last block": f"encoder.layers.{depth - 1}", "last": "last"}
    work = {
        "train": trained(net, x, y, config.n_passes, chosen),
        "predict": predicted(net, x, config.n_passes, chosen),
    }
    shared = {"model": f"encoder, {depth} layers", "n_passes": config.n_passes, "batch": config.batch}
    return [{"work": name, **shared} | row for name, ways in work.items() for row in interleaved(ways, config.rounds)]


def trained(net: nn.Module, x: Tensor, y: Tensor, n_passes: int, chosen: dict[str, Any]) -> dict[str, Call]:
    """{way: one training step}, that of torch first."""

    def step(outputs: Callable[[], Tensor]) -> None:
        net.train()
        for p in net.parameters():
            p.grad = None
        bbalpha.cross_entropy(outputs(), y, alpha=0.5).backward()

    ways: dict[str, Call] = {"torch, one pass": lambda: step(lambda: net(x)[None])}
    for name, sites in chosen.items():
        ways[name] = lambda s=sites: step(lambda: bbalpha.sample(net, x, n_passes, sites=s))
    return ways


def predicted(net: nn.Module, x: Tensor, n_passes: int, chosen: dict[str, Any]) -> dict[str, Call]:
    """{way: probabilities without gradient}, one stochastic pass of torch first."""

    def one() -> Tensor:
        net.train()
        with torch.no_grad():
            return net(x).softmax(1)

    ways: dict[str, Call] = {"torch, one pass": one}
    for name, sites in chosen.items():
        ways[name] = lambda s=sites: (
            bbalpha.predict_classification(net, x, n_passes=n_passes, sites=s, progress=False).probs
        )
    return ways


def interleaved(ways: dict[str, Call], rounds: int) -> list[Row]:
    """Ratios of the minima and of the medians to the first way, after two rounds to warm up."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(rounds + 2):
        for way, call in ways.items():
            start = time.process_time()
            call()
            if i >= 2:
                times[way].append(time.process_time() - start)
    unit = next(iter(times.values()))
    return [
        {
            "way": way,
            "ratio": round(min(t) / min(unit), 2),
            "ratio_median": round(statistics.median(t) / statistics.median(unit), 2),
            "ms": round(1e3 * min(t), 2),
        }
        for way, t in times.items()
    ]


# ------------------------------------------------------------------------------ worth


class RowEncoder(nn.Module):
    """Digits read row by row: eight tokens of eight pixels, four encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Linear(8, 32), nn.Parameter(0.1 * torch.randn(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.token(x.view(-1, 8, 8)) + self.place).mean(1))


def small_cnn() -> nn.Sequential:
    """The paper's CNN for 8 x 8 images, with dropout between the convolutions too."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(16, 32, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(128, 100), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(100, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A network, its data, and the sites that are tried besides all of them."""

    make: Callable[[], nn.Module]
    load: Callable[[Config, int], mnist.Digits]
    sites: dict[str, str]
    epochs: int
    seeds: int


def tasks(config: Config) -> dict[str, Task]:
    blocks = {"last block": "encoder.layers.3", "last": "last"}
    on_digits = (config.epochs, config.seeds)
    found = {
        "encoder, digits": Task(RowEncoder, digits, blocks, *on_digits),
        "CNN, digits": Task(small_cnn, digits, {"last": "last"}, *on_digits),
        "3x1000, MNIST": Task(
            lambda: mlp([784, 1000, 1000, 1000, 10]), large_digits, {"last": "last"}, config.epochs_mnist,
            config.seeds_mnist,
        ),
    }  # fmt: skip
    return {name: found[name] for name in config.models}


def digits(config: Config, seed: int) -> mnist.Digits:
    """scikit-learn's digits, split by `seed`; strangers are the test rows with their pixels in another order."""
    pixels, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(pixels), generator=generator)
    x, y = torch.as_tensor(pixels, dtype=torch.float32)[order] / 16, torch.as_tensor(labels)[order]
    n = config.n_train
    shuffled = x[n:, torch.randperm(64, generator=generator)]
    return mnist.Digits(x[:n], y[:n], x[n:], y[n:], shuffled)


def large_digits(config: Config, seed: int) -> mnist.Digits:
    """The first rows of MNIST, and letters for strangers."""
    return mnist.load(flat=True, n_train=config.rows_mnist, n_test=500)


def worth(config: Config, name: str, task: Task, seed: int) -> list[Row]:
    """Scores of one seed: trained with all sites or with some, predicted with all, some or none."""
    d = task.load(config, seed)
    torch.manual_seed(seed)
    fresh = task.make()
    rows = []
    for trained_with, sites in {"all sites": None, **task.sites}.items():
        net = copy.deepcopy(fresh)
        start = time.process_time()
        bbalpha.fit(
            net, (d.x, d.y), objective=bbalpha.CrossEntropy(0.5), epochs=task.epochs, n_passes=config.train_passes,
            batch_size=100, learning_rate=2e-3, sites=sites, seed=seed, progress=False,
        )  # fmt: skip
        seconds = round(time.process_time() - start, 1)
        others = {"all sites": None, **task.sites} if sites is None else {trained_with: sites}
        for predicted_with, used in [*others.items(), *([("none", None)] if sites is None else [])]:
            shared = {"work": "worth", "model": name, "seed": seed, "trained": trained_with, "way": predicted_with}
            passes = None if predicted_with == "none" else config.test_passes
            rows.append({**shared, "seconds": seconds, **scores(net, d, passes, used, seed)})
    return rows


def scores(net: nn.Module, d: mnist.Digits, n_passes: int | None, sites: str | None, seed: int) -> Row:
    """How a network does on test rows and on strangers."""
    options: Row = {"n_passes": n_passes, "sites": sites, "seed": seed, "batch_size": 64, "progress": False}
    p = bbalpha.predict_classification(net, d.x_test, **options)
    q = bbalpha.predict_classification(net, d.strange, **options)
    found = mnist.scores(p, d.y_test) | mnist.strangers(p, q)
    found["log_likelihood"] = found.pop("total_log_likelihood") / len(d.y_test)
    if n_passes is None:  # without passes there is nothing they could disagree on
        found["auroc_ood_mi"] = None
    return {k: v if v is None else round(v, 5) for k, v in found.items()}


# ------------------------------------------------------------------------------ all of it


def run(config: Config) -> list[Row]:
    torch.manual_seed(config.seed)
    rows: list[Row] = []
    for depth in config.depths:
        rows += told(costs(config, depth))
    for name, task in tasks(config).items():
        for seed in range(task.seeds):
            try:
                rows += told(worth(config, name, task, config.seed + seed))
            except data.DownloadError as error:
                print(f"{name}: left out, {error}")
                break
    return rows


def told(rows: list[Row]) -> list[Row]:
    """The rows, shown as they come."""
    for row in rows:
        print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, one epoch, one round: does it run?")
    parser.add_argument("--out", type=Path, default=Path("results/sites.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = QUICK if args.quick else Config()
    start = time.perf_counter()
    rows = run(config)
    command = "python benchmarks/sites.py" + " --quick" * args.quick
    results.write(args.out, command=command, seed=config.seed, seconds=time.perf_counter() - start, rows=rows)


if __name__ == "__main__":
    main()
