"""Uncertainty for networks that were trained without any: what `retrofit` gives on test rows -> results/trained.json.

    python benchmarks/trained.py

Networks are trained plainly, on few rows: 700 of scikit-learn's digits, 3000 (dense) or 2000 (CNN) of MNIST, 80 % of
the training part of published UCI splits. The rows held out for `retrofit` are other training rows; test rows are
scored once, in the end. What is scored: the network as it is (for regression with the noise of its training rows), the
same with its temperature or precision fitted on the held-out rows, what `retrofit` makes of it, and what it makes of
it with the training rows for fine-tuning. Strangers are test digits with their pixels shuffled, or letters (notMNIST).

`retrofit` was designed with seed 0 of the digits and split 0 of boston in sight, test rows too; these are left out.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bbalpha
from bbalpha import data
from bbalpha.experiments import mnist, scoring
from bbalpha.experiments.results import Ledger
from bbalpha.networks import cnn, mlp

Row = dict[str, Any]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Config:
    seeds: int = 5  # also splits of UCI
    seeds_mnist: int = 3
    sets: tuple[str, ...] = ("boston", "concrete", "energy")
    epochs: int = 40  # of plain training, of digits and MNIST
    steps_uci: int = 4000
    n_passes: int = 50
    tuning: int = 10
    tuning_mnist: int = 4
    seed: int = 0


QUICK = Config(seeds=1, seeds_mnist=1, sets=("boston",), epochs=1, steps_uci=50, n_passes=4, tuning=1, tuning_mnist=1)


@dataclass(frozen=True, eq=False)
class Task:
    """A network that is to be trained plainly, and its rows."""

    net: nn.Module
    train: Pair
    held: Pair
    test: Pair
    strange: Tensor | None = None
    scale: Pair | None = None  # mean and deviation of a target that was standardised


# ------------------------------------------------------------------------------ tasks


def digits(config: Config, seed: int) -> Task:
    """scikit-learn's digits; strangers have the pixels of test rows in another order."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels))
    x, y = torch.as_tensor(pixels, dtype=torch.float32)[order] / 16, torch.as_tensor(labels)[order]
    parts = list(zip(x.split([700, 350, 747]), y.split([700, 350, 747]), strict=True))
    return Task(mlp([64, 100, 100, 10], dropout=0), *parts, strange=parts[2][0][:, torch.randperm(64)])


def large_digits(config: Config, seed: int, *, flat: bool) -> Task:
    """Some of MNIST, drawn by seed; the first 2000 test rows and letters."""
    d = mnist.load(flat=flat, n_test=2000)
    rows = torch.randperm(len(d.x))
    n = 3000 if flat else 2000
    train, held = rows[:n], rows[n : n + 1000]
    net = mlp([784, 100, 100, 10], dropout=0) if flat else cnn(dropout=0, filters=8)
    return Task(net, (d.x[train], d.y[train]), (d.x[held], d.y[held]), (d.x_test, d.y_test), d.strange)


def table(config: Config, seed: int, *, name: str) -> Task:
    """A UCI set, standardised by the rows that are trained on."""
    d = data.load_uci(name)
    x, y = torch.as_tensor(d.X, dtype=torch.float32), torch.as_tensor(d.y, dtype=torch.float32)[:, None]
    inside, test = (torch.as_tensor(rows) for rows in d.split(seed))
    inside = inside[torch.randperm(len(inside))]
    train, held = inside.split([len(inside) * 4 // 5, len(inside) - len(inside) * 4 // 5])
    x = (x - x[train].mean(0)) / x[train].std(0).clamp_min(1e-6)
    scale = y[train].mean(), y[train].std()
    z = (y - scale[0]) / scale[1]
    net = mlp([x.shape[1], 50, 50, 1], dropout=0)
    return Task(net, (x[train], z[train]), (x[held], z[held]), (x[test], y[test]), scale=scale)


def tasks(config: Config) -> dict[str, tuple[Callable[[Config, int], Task], int]]:
    """{name: (what makes it, seeds)}."""
    found = {
        "digits, dense": (digits, config.seeds),
        "MNIST, dense": (lambda c, s: large_digits(c, s, flat=True), config.seeds_mnist),
        "MNIST, CNN": (lambda c, s: large_digits(c, s, flat=False), config.seeds_mnist),
    }
    return found | {name: (lambda c, s, n=name: table(c, s, name=n), config.seeds) for name in config.sets}


# ------------------------------------------------------------------------------ training and scoring


def trained(task: Task, config: Config, seed: int) -> None:
    """The network, trained plainly."""
    n = len(task.train[0])
    classes = task.scale is None
    objective = bbalpha.CrossEntropy(0.0) if classes else bbalpha.GaussianNLL(0.0, precision=1.0)
    batch = 64 if classes else 32
    epochs = config.epochs if classes else -(-config.steps_uci * batch // n)
    bbalpha.fit(
        task.net, task.train, objective=objective, n_passes=None, epochs=epochs, batch_size=batch, seed=seed,
        progress=False,
    )  # fmt: skip


def measured(name: str, task: Task, config: Config, seed: int) -> list[Row]:
    """Scores of one network, four ways."""
    trained(task, config, seed)
    classes = task.scale is None
    objective: Any = bbalpha.CrossEntropy(0.5) if classes else bbalpha.GaussianNLL(0.5)
    epochs = config.tuning_mnist if name.startswith("MNIST") else config.tuning
    found, rows = {}, []
    for way, train in (("dropout", None), ("fine-tuned", task.train)):
        start = time.process_time()
        found[way] = bbalpha.retrofit(
            task.net, task.held, objective=objective, train=train, n_passes=config.n_passes, epochs=epochs, seed=seed
        )
        rows.append({"way": way, "seconds": round(time.process_time() - start, 1), **told(found[way])})
    calibrated = found["dropout"].scores[1 if classes else 0].calibration
    with torch.no_grad():
        given = 1.0 if classes else 1 / float((task.net.eval()(task.train[0]) - task.train[1]).square().mean())
    scores = {"plain": plain(task, given), "calibrated": plain(task, calibrated)}
    scores |= {way: scored(task, lambda x, f=f: predicted(f, x, seed)) for way, f in found.items()}
    rows = [{"way": "plain"}, {"way": "calibrated"}, *rows]
    return [{"task": name, "seed": seed, **row, **scores[row["way"]]} for row in rows]


def told(found: bbalpha.Retrofit) -> Row:
    """What `retrofit` says of itself."""
    return {
        "kept_plain": found.kept_plain,
        "sites": found.sites,
        "dropout": found.dropout,
        "epochs": found.fine_tuned,
        "calibration": found.calibration,
        "gain": found.gain,
        "gain_error": found.gain_error,
        "candidates": len(found.scores),
    }


def plain(task: Task, number: float) -> Row:
    """Scores of the network as it is, with this temperature or precision."""
    if task.scale is None:
        return scored(task, lambda x: bbalpha.predict_classification(task.net, x, n_passes=None, temperature=number))
    return scored(task, lambda x: bbalpha.predict_regression(task.net, x, n_passes=None, precision=number))


def predicted(found: bbalpha.Retrofit, x: Tensor, seed: int) -> Any:
    predict = found.predict_classification if hasattr(found.kind.given, "class_axis") else found.predict_regression
    return predict(x, seed=seed)


def scored(task: Task, predict: Callable[[Tensor], Any]) -> Row:
    """How a prediction does on test rows, and on strangers where there are some."""
    x, y = task.test
    p = predict(x)
    if task.scale is None:
        row = mnist.scores(p, y) | mnist.strangers(p, predict(task.strange))
        row["nll"] = -row.pop("total_log_likelihood") / len(y)
        return row
    p = p.rescaled(task.scale[1], task.scale[0])
    low, high = p.interval(0.9)
    return scoring.scores(p.log_prob(y), p.mean[:, 0], low[:, 0], high[:, 0], y[:, 0])


# ------------------------------------------------------------------------------ all of it


def run(config: Config, kept: Ledger) -> None:
    for name, (make, seeds) in tasks(config).items():
        for seed in range(config.seed + 1, config.seed + 1 + seeds):
            if kept.has(task=name, seed=seed):
                continue
            start = time.process_time()
            torch.manual_seed(seed)
            rows = measured(name, make(config, seed), config, seed)
            kept.add(rows, seconds=time.process_time() - start, part=name)
            for row in rows:
                print(
                    "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, hardly any training: does it run?")
    parser.add_argument("--out", type=Path, default=Path("results/trained.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = QUICK if args.quick else Config()
    command = "python benchmarks/trained.py" + " --quick" * args.quick
    run(config, Ledger(args.out, command=command, seed=config.seed, settings=asdict(config)))


if __name__ == "__main__":
    main()
