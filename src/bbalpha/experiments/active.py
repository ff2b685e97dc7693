"""Active learning on MNIST and Repeated MNIST: which labels to ask for, as in Kirsch et al., "BatchBALD" (2019).

In Repeated MNIST every digit of the pool is there several times, each copy with a little noise of its own: choices that
look at rows one by one take all copies of a good one. Random, BALD and BatchBALD are as published (network, dropout,
training, ten passes); ours has the alpha objective, balanced passes and more of them.

    bbalpha reproduce active --datasets repeated_mnist_x2 --seeds 5

A run is cut into stages by its number of labels, and all seeds and methods do the first stage before any does the
second: the table is fair whenever it is cut off.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bbalpha.acquisition import Selection, bald, batch_bald, learn, random, top
from bbalpha.acquisition.learning import Round
from bbalpha.experiments import mnist, skeleton
from bbalpha.experiments.active_network import ThinPasses, Training, trained
from bbalpha.experiments.results import Ledger, Row

# the training rows that all published runs begin with, two of each digit
START = (38043, 40091, 17418, 2094, 39879, 3133, 5011, 40683, 54379, 24287,
         9849, 59305, 39508, 39356, 8758, 52579, 13655, 7636, 21562, 41329)  # fmt: skip
COPIES = {"mnist": 1, "repeated_mnist_x2": 2, "repeated_mnist_x5": 5}
NOISE = 0.1  # of each copy of a repeated set, in units of the normalised pixels


@dataclass(frozen=True)
class Config:
    """What is the same for all methods. The published sizes: docs/active.md.

    Attributes:
        n_pool: Rows of the pool, all copies counted; drawn for each seed. Published: all.
        n_validation: Rows by which training stops, not in the pool.
        n_test: Test rows that an accuracy is taken from, half of them of either half of MNIST's.
        size: Labels a round.
        stages: Labels at which a stage ends.
        target: Accuracy at which a run ends.
        epoch: Rows that training sees between two looks at the validation rows. Published: 5056.
        most_epochs: At most so many.
        n_test_passes: Passes of an accuracy.
    """

    n_pool: int = 5000
    n_validation: int = 1024
    n_test: int = 5000
    size: int = 10
    stages: tuple[int, ...] = (60, 100, 200, 300)
    target: float = 0.95
    epoch: int = 2560
    most_epochs: int = 30
    n_test_passes: int = 10


_SHOWN = (20, 50, 100, 150, 200, 250, 300)  # labels, in a table
QUICK = Config(
    n_pool=200, n_validation=64, n_test=200, stages=(30, 40), epoch=128, most_epochs=2, n_test_passes=4
)  # fmt: skip


@dataclass(frozen=True)
class Method:
    """What methods differ in.

    Attributes:
        choose: (probs, size, seed=) -> rows.
        n_passes: K that it sees.
        alpha: Of training; None is as published.
        train_passes: Passes of a row in a step.
        balanced: Whether passes are balanced.
    """

    choose: Callable[..., Selection]
    n_passes: int = 10
    alpha: float | None = None
    train_passes: int = 1
    balanced: bool = False


def _by_chance(probs: Tensor, size: int, *, seed: int) -> Selection:
    return random(probs.shape[1], size, seed=seed)


def _by_bald(probs: Tensor, size: int, *, seed: int) -> Selection:
    return top(bald(probs, progress=False), size)


METHODS = {
    "random": Method(_by_chance, n_passes=2),
    "bald": Method(_by_bald),
    "batch-bald": Method(batch_bald),
    "bbalpha": Method(batch_bald, n_passes=50, alpha=0.5, train_passes=4, balanced=True),
}


@dataclass(frozen=True)
class Unit(skeleton.Unit):
    """A stage of a run.

    Attributes:
        dataset: Of COPIES.
        until: Labels at which it ends.
        seed: Of the pool, the weights, the masks and the choices.
        method: Of METHODS.
    """

    dataset: str
    until: int
    seed: int
    method: str

    @property
    def part(self) -> str:
        """Seconds are told apart by method."""
        return self.method

    @property
    def run(self) -> str:
        """The name of the run that it is a stage of."""
        return f"run-{self.dataset}-{self.seed}-{self.method}"

    def done(self, kept: Ledger) -> bool:
        """Whether its rows are in the results, or its run has come to an end before."""
        own = [r for r in kept.rows if (r["dataset"], r["seed"], r["method"]) == (self.dataset, self.seed, self.method)]
        return any(row["until"] == self.until or row["ended"] for row in own)


def units(dataset: str, config: Config, seeds: int) -> list[Unit]:
    """Stage by stage, in each seed by seed, in each of them all methods.

    >>> [(unit.until, unit.method) for unit in units("mnist", Config(stages=(60, 100)), 1)][3:5]
    [(60, 'bbalpha'), (100, 'random')]
    """
    return [
        Unit(dataset, until, seed, method) for until in config.stages for seed in range(seeds) for method in METHODS
    ]


@dataclass(frozen=True, eq=False)
class Data:
    """Rows (N, 1, 28, 28), normalised, and their labels.

    Attributes:
        pool: What labels are asked of; the rows of the start are the first ones.
        y_pool: Their labels.
        validation: By which training stops, and labels.
        test: What an accuracy is taken from, and labels.
    """

    pool: Tensor
    y_pool: Tensor
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def prepare(dataset: str, config: Config, seed: int, digits: mnist.Digits) -> Data:
    """The pool of a seed: the digits of the start first, then others by chance; each again as often as it is repeated.

    Copies of row i stand at i, i + n, i + 2n, ...
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.tensor(START)
    start = start if len(digits.x) > int(start.max()) else torch.arange(len(START))  # a small part of MNIST
    others = torch.ones(len(digits.x), dtype=torch.bool)
    others[start] = False
    rows = others.nonzero()[:, 0]
    rows = rows[torch.randperm(len(rows), generator=generator)]
    copies = COPIES[dataset]
    validation, rows = rows[: config.n_validation], rows[config.n_validation :]
    rows = torch.cat((start, rows))[: config.n_pool // copies]
    pool = _normalised(digits.x[rows]).repeat(copies, 1, 1, 1)
    if copies > 1:
        pool = pool + NOISE * torch.randn(pool.shape, generator=generator)
    return Data(
        pool, digits.y[rows].repeat(copies), (_normalised(digits.x[validation]), digits.y[validation]),
        (_normalised(digits.x_test[: config.n_test]), digits.y_test[: config.n_test]),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Trainee:
    """What `learn` asks of a method: a fresh network, its passes over the pool, its accuracy."""

    method: Method
    config: Config
    data: Data

    def fit(self, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        """A function x -> probabilities of the passes that choose."""
        seed = int(torch.randint(2**31, ()))
        how = Training(self.method.alpha, self.method.train_passes, self.config.epoch, self.config.most_epochs)
        net = trained(x, y, self.data.validation, how, seed)
        return ThinPasses(net, self.method.n_passes, seed, balanced=self.method.balanced)

    def score(self, passes: Any) -> float:
        """Accuracy of the mean over passes, on the test rows."""
        x, y = self.data.test
        test = ThinPasses(passes.net, self.config.n_test_passes, passes.seed + 1, balanced=self.method.balanced)
        return float((test.mean(x).argmax(1) == y).float().mean())


def run(
    unit: Unit, method: Method, config: Config, data: Data, folder: Path, *, progress: bool | None = False
) -> list[Row]:
    """A stage of a run: a row for each number of labels that is new. Goes on from the stage before, in its folder."""
    trainee = Trainee(method, config, data)
    home = folder.parent / unit.run
    found = learn(
        data.pool, data.y_pool, fit=trainee.fit, score=trainee.score, n_labels=unit.until, start=range(len(START)),
        size=config.size, choose=method.choose, target=config.target, state=home, seed=unit.seed, progress=progress,
    )  # fmt: skip
    stages = [stage for stage in config.stages if stage < unit.until]
    before = max(stages, default=0)
    ended = found.rounds[-1].n_labels < unit.until or unit.until == config.stages[-1]
    if ended:
        shutil.rmtree(home, ignore_errors=True)
    n_images = len(data.pool) // COPIES[unit.dataset]
    return [
        asdict(unit) | {"alpha": method.alpha, "ended": ended} | _facts(r, found.rows[: r.n_labels], n_images)
        for r in found.rounds
        if r.n_labels > before
    ]


def reproduce(*, datasets: Sequence[str], seeds: int, jobs: int = 1, quick: bool, out: Path) -> str:
    """Run what is missing in `out`/active/<dataset>.json, and tell the accuracies.

    Args:
        datasets: Of COPIES.
        seeds: Runs of each method.
        jobs: Runs side by side, each in a process with one thread.
        quick: A small pool, few labels, one seed.
        out: The folder of results.
    """
    unknown = [name for name in datasets if name not in COPIES]
    if unknown or not datasets:
        raise ValueError(f"`datasets` must be some of {', '.join(COPIES)}; got {', '.join(unknown) or 'none'}.")
    told = []
    for dataset in datasets:
        path, config = out / "active" / f"{dataset}.json", QUICK if quick else Config()
        methods = {name: _settings(method) for name, method in METHODS.items()}
        settings = asdict(config) | {"methods": methods}
        command = f"bbalpha reproduce active --datasets {dataset}"
        kept = skeleton.open_ledger(path, command=command, quick=quick, seed=0, settings=settings)
        skeleton.run_units(
            kept, units(dataset, config, 1 if quick else seeds), partial(_work, config),
            state=skeleton.state_folder(path, settings=settings), jobs=jobs,
        )  # fmt: skip
        told.append(f"{path}\n{table(kept.rows)}\n")
    return "\n".join(told)


# ------------------------------------------------------------------------------ what came out


def curves(rows: Sequence[Row], method: str) -> dict[int, list[float]]:
    """{labels: accuracies of the seeds that have come so far}, in ascending order."""
    own = [row for row in rows if row["method"] == method]
    return {n: [r["accuracy"] for r in own if r["labels"] == n] for n in sorted({r["labels"] for r in own})}


def needed(rows: Sequence[Row], method: str, level: float) -> list[float]:
    """Labels with which each seed first measured `level`, infinite where none did yet; in ascending order."""
    own = [row for row in rows if row["method"] == method]
    found = []
    for seed in sorted({row["seed"] for row in own}):
        reached = [row["labels"] for row in own if row["seed"] == seed and row["accuracy"] >= level]
        found.append(min(reached, default=float("inf")))
    return sorted(found)


def table(rows: Sequence[Row]) -> str:
    """Median accuracies at some numbers of labels, as text."""
    there = {row["labels"] for row in rows}
    at = sorted(n for n in there if n in _SHOWN or n == max(there))
    lines = [f"{'':12}" + "".join(f"{n:>9}" for n in at) + "   labels"]
    for method in dict.fromkeys(row["method"] for row in rows):
        found = curves(rows, method)
        cells = [f"{float(torch.tensor(found[n]).quantile(0.5)):9.3f}" if n in found else f"{'':9}" for n in at]
        lines.append(f"{method:12}" + "".join(cells))
    return "\n".join(lines)


# ------------------------------------------------------------------------------ helpers


def _work(config: Config, unit: Unit, folder: Path) -> list[Row]:
    """The rows of a stage; in a process of its own, maybe."""
    with skeleton.threads(1):
        digits = mnist.load(flat=False, letters=False)
        mixed = torch.arange(len(digits.x_test)).view(2, -1).T.flatten()  # its second half is harder to read
        digits = replace(digits, x_test=digits.x_test[mixed], y_test=digits.y_test[mixed])
        data = prepare(unit.dataset, config, unit.seed, digits)
        return run(unit, METHODS[unit.method], config, data, folder)


def _facts(done: Round, rows: Sequence[int], n_images: int) -> Row:
    return {
        "labels": done.n_labels, "accuracy": done.score, "copies": len(rows) - len({row % n_images for row in rows}),
        "train_seconds": done.fit_seconds, "choose_seconds": done.choose_seconds,
    }  # fmt: skip


def _settings(method: Method) -> dict[str, Any]:
    return asdict(method) | {"choose": method.choose.__name__}


def _normalised(x: Tensor) -> Tensor:
    return (x - 0.1307) / 0.3081
