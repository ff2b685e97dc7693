"""Experiment 4 of the paper: what K costs. Accuracy and log-likelihood against the time spent on training.

Four layers of 1024 units, alpha = 1, Adam at a constant rate: so the time to a level does not depend on how long the
run was planned. Every way trains for the same time; tests and files do not count. The ways of one K take turns, two
minutes or less at a time, so that a machine that is busy for a while is busy for all. Each K has a file of its own,
<out>/runtime/<K>.json.

    loop              K separate passes through torch's own dropout, stacked, as the authors did
    ours              masks of the same kind, one of each row, through `bbalpha.sample`
    shared            `bbalpha.sample` with one mask a pass for the whole batch
    balanced          `ours` with passes that know of each other
    balanced-shared   `shared` with passes that know of each other

    bbalpha reproduce runtime --passes 1,10,100 --minutes 20
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha import plots
from bbalpha.experiments import mnist, results, skeleton
from bbalpha.experiments.mnist import Curve, Digits
from bbalpha.experiments.results import Ledger, Row
from bbalpha.networks import mlp
from bbalpha.objectives import CrossEntropy
from bbalpha.prediction import predict_classification
from bbalpha.sampling import sample

LEVELS = (-600.0, -500.0)  # total log-likelihoods of the 10,000 test digits


@dataclass(frozen=True)
class Config:
    """What is trained, and how.

    Attributes:
        widths: Hidden layers.
        alpha: Of the objective.
        learning_rate: Of Adam, constant; chosen on held-out training rows: docs/mnist.md.
        batch_size: Rows a step.
        n_predict_passes: K at test time, masks shared by the test rows.
        n_train: The first so many training rows; None takes all.
        n_test: The first so many test rows.
        threads: Of torch.
        seed: Of everything: the ways start from the same weights.
        clock: Seconds.
    """

    widths: tuple[int, ...] = (1024, 1024, 1024, 1024)
    alpha: float = 1.0
    learning_rate: float = 3e-4
    batch_size: int = 128
    n_predict_passes: int = 50
    n_train: int | None = None
    n_test: int | None = None
    threads: int = 2
    seed: int = 0
    clock: Callable[[], float] = time.perf_counter

    @property
    def settings(self) -> dict[str, Any]:
        """All that JSON can hold of it."""
        return {name: value for name, value in asdict(self).items() if name != "clock"}


QUICK = Config(widths=(64, 64), n_predict_passes=20, n_train=5000, n_test=1000, threads=1)


def loop(net: nn.Module, x: Tensor, n_passes: int, seed: int) -> Tensor:
    """K separate passes through torch's own dropout, stacked (K, N, C): the authors' way."""
    torch.manual_seed(seed)
    return torch.stack([net(x) for _ in range(n_passes)])


def ours(net: nn.Module, x: Tensor, n_passes: int, seed: int) -> Tensor:
    """`bbalpha.sample`, masks of their own for every row, each drawn by itself (K, N, C)."""
    outputs: Tensor = sample(net, x, n_passes, balanced=False, seed=seed)
    return outputs


def shared(net: nn.Module, x: Tensor, n_passes: int, seed: int) -> Tensor:
    """`bbalpha.sample`, one mask a pass for all rows (K, N, C)."""
    outputs: Tensor = sample(net, x, n_passes, masks="shared", balanced=False, seed=seed)
    return outputs


def balanced(net: nn.Module, x: Tensor, n_passes: int, seed: int) -> Tensor:
    """`bbalpha.sample` as it is by default (K, N, C)."""
    outputs: Tensor = sample(net, x, n_passes, seed=seed)
    return outputs


def balanced_shared(net: nn.Module, x: Tensor, n_passes: int, seed: int) -> Tensor:
    """`bbalpha.sample`, one mask a pass for all rows, drawn together (K, N, C)."""
    outputs: Tensor = sample(net, x, n_passes, masks="shared", seed=seed)
    return outputs


WAYS = {"loop": loop, "ours": ours, "shared": shared, "balanced": balanced, "balanced-shared": balanced_shared}
_DASHES = ("shared", "ours", "loop", "balanced-shared", "balanced")


def moments(budget: float) -> list[float]:
    """The training times, in seconds, after which a way is tested: close together at first, then every two minutes.

    >>> moments(100.0), len(moments(1200.0))
    ([15.0, 30.0, 60.0, 90.0, 100.0], 16)
    """
    times = [15.0, 30.0, 60.0, 90.0, *(60.0 * m for m in range(2, 6))]
    times += [120.0 * m for m in range(3, int(budget // 120) + 1)]
    if budget < 30:
        times = [budget / 4, budget / 2]
    return [*(t for t in times if t < budget), budget]


@dataclass(frozen=True)
class Turn(skeleton.Unit):
    """The training of a way with K passes until it has had so many seconds, and a test."""

    way: str
    n_passes: int
    until: float

    def done(self, kept: Ledger) -> bool:
        """Whether it was tested at that time or later: a long step passes several moments."""
        return _reached(_seconds(kept.rows, self.way, self.n_passes), self.until)


def run(
    pairs: Sequence[tuple[str, int]], times: Sequence[float], config: Config, digits: Digits, kept: Ledger, state: Path
) -> None:
    """Train and test every (way, K) in turns; rows go into `kept`.

    Args:
        pairs: The ways and the numbers of passes.
        times: Seconds of training of every pair after which it is tested; the last are its end.
        config: What is trained.
        digits: On what.
        kept: Rows that it has are not made again.
        state: The folder of unfinished runs; a run that was cut off goes on from there.
    """
    trainers = {pair: _trainer(*pair, config, digits) for pair in pairs}
    for (way, n_passes), trainer in trainers.items():
        trainer.resume(state / f"{way}-{n_passes}")

    def take(turn: Turn, _: Path) -> list[Row]:
        way, n_passes, trainer = turn.way, turn.n_passes, trainers[turn.way, turn.n_passes]
        if turn.done(kept):
            return []
        if not _reached(trainer.seconds, _seconds(kept.rows, way, n_passes)):
            raise FileNotFoundError(
                f"{kept.path} has rows of {way}, K = {n_passes}, whose weights are not in {state}: a run can only "
                "be prolonged with them. Delete the file to begin anew."
            )
        while trainer.seconds < turn.until:
            trainer.step()
        trainer.save(state / f"{way}-{n_passes}")
        return [_row(way, n_passes, trainer, config, digits)]

    with torch.random.fork_rng():
        skeleton.run_units(kept, [Turn(*pair, until) for until in times for pair in pairs], take, state=state)


def reproduce(*, ways: Sequence[str], passes: Sequence[int], minutes: float, quick: bool, out: Path) -> str:
    """Run what is missing in `out`/runtime, draw the figure, and tell the times.

    Args:
        ways: Of `WAYS`; all if empty. For K = 1 there is nothing to share or to balance: loop and ours alone.
        passes: K.
        minutes: Training time of every way.
        quick: A small network, 5,000 training rows and at most 2 seconds.
        out: The folder of results.
    """
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise ValueError(f"`ways` must be some of {', '.join(WAYS)}; got {', '.join(unknown)}.")
    if not passes or min(passes) < 1:
        raise ValueError(f"`passes` must be whole numbers of at least 1; got {list(passes)}.")
    if ways and set(passes) == {1} and not set(ways) & {"loop", "ours"}:
        raise ValueError(
            f"`passes` must be at least 2 for {', '.join(ways)}: one pass has nothing to share or balance."
        )
    config, budget = (QUICK, min(60 * minutes, 2.0)) if quick else (Config(), 60 * minutes)
    folder = out / "runtime"
    for K in passes:
        pairs = [(way, K) for way in ways or WAYS if K > 1 or way in ("loop", "ours")]
        command = f"bbalpha reproduce runtime --passes {K} --minutes {minutes:g}"
        path, settings = folder / f"{K}.json", config.settings
        kept = skeleton.open_ledger(path, command=command, quick=quick, seed=config.seed, settings=settings)
        _run_missing(pairs, budget, config, kept, skeleton.state_folder(path, settings=settings))
    content = load(folder)
    told = [f"{folder}\n{table(content['rows'])}"]
    try:
        told.append(str(figure(content["rows"], folder.with_suffix(".png"))))
    except ImportError as error:
        told.append(f"No figure. {error}")
    return "\n".join(told)


def load(folder: Path) -> dict[str, Any]:
    """The rows of every K in a folder of results, in the order of K, under the head of the first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    found = [results.read(path) for path in paths or [folder / "10.json"]]
    return found[0] | {"rows": [row for content in found for row in content["rows"]]}


def _run_missing(pairs: Sequence[tuple[str, int]], budget: float, config: Config, kept: Ledger, state: Path) -> None:
    if not all(_reached(_seconds(kept.rows, *pair), budget) for pair in pairs):
        digits = mnist.load(flat=True, n_train=config.n_train, n_test=config.n_test)
        with skeleton.threads(config.threads):
            run(pairs, moments(budget), config, digits, kept, state)
    for way, n_passes in pairs:
        skeleton.forget(state / f"{way}-{n_passes}")


# ------------------------------------------------------------------------------ one way


def _trainer(way: str, n_passes: int, config: Config, digits: Digits) -> mnist.Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        net = mlp([784, *config.widths, 10], dropout=0.5)
    passes = WAYS[way]
    return mnist.Trainer(
        net, (digits.x, digits.y), lambda net, x, seed: passes(net, x, n_passes, seed), CrossEntropy(config.alpha),
        config.learning_rate, config.seed, config.batch_size, config.clock,
    )  # fmt: skip


def _row(way: str, n_passes: int, trainer: mnist.Trainer, config: Config, digits: Digits) -> Row:
    p = predict_classification(
        trainer.net, digits.x_test, n_passes=config.n_predict_passes, masks="shared", balanced=False, seed=config.seed,
        progress=False,
    )  # fmt: skip
    facts = {
        "model": "mlp-" + "-".join(map(str, config.widths)), "method": "bbalpha", "way": way, "alpha": config.alpha,
        "masks": "shared" if "shared" in way else "per_example", "n_passes": n_passes, "seed": config.seed,
        "epoch": trainer.n_steps / trainer.steps_an_epoch, "seconds": trainer.seconds, "n_steps": trainer.n_steps,
        "batch": trainer.batch_size, "threads": torch.get_num_threads(),
    }  # fmt: skip
    return facts | mnist.scores(p, digits.y_test) | mnist.NO_STRANGERS


def _seconds(rows: Sequence[Row], way: str, n_passes: int) -> float:
    return max((row["seconds"] for row in rows if (row["way"], row["n_passes"]) == (way, n_passes)), default=0.0)


def _reached(seconds: float, until: float) -> bool:
    return seconds >= until * (1 - 1e-5)  # results have six digits


# ------------------------------------------------------------------------------ times, table and figure


def pairs_of(rows: Sequence[Row]) -> Iterator[tuple[str, int, list[Row]]]:
    """(way, K, its rows in the order of time), by K and then by way."""
    for n_passes in sorted({row["n_passes"] for row in rows}):
        for way in WAYS:
            own = [row for row in rows if (row["way"], row["n_passes"]) == (way, n_passes)]
            if own:
                yield way, n_passes, sorted(own, key=lambda row: row["seconds"])


def time_to(rows: Sequence[Row], level: float) -> float | None:
    """The training seconds at which one way first reaches a total log-likelihood; None if it never does.

    Between two tests the log-likelihood is taken to rise in a line; a way that is there at its first test gets the time
    of that test.

    >>> rows = [{"seconds": t, "total_log_likelihood": ll} for t, ll in ((10.0, -900.0), (20.0, -500.0))]
    >>> time_to(rows, -600), time_to(rows, -400)
    (17.5, None)
    """
    before: Row | None = None
    for row in sorted(rows, key=lambda row: float(row["seconds"])):
        now = row["total_log_likelihood"]
        if now >= level:
            if before is None:
                return float(row["seconds"])
            share = (level - before["total_log_likelihood"]) / (now - before["total_log_likelihood"])
            return float(before["seconds"] + share * (row["seconds"] - before["seconds"]))
        before = row
    return None


def table(rows: Sequence[Row], levels: Sequence[float] = LEVELS) -> str:
    """Every way as text: epochs, time to each level in seconds, and the best log-likelihood."""
    lines = [f"{'':16}{'epochs':>8}" + "".join(f"{f'to {level:g}, s':>12}" for level in levels) + f"{'best':>10}"]
    for way, n_passes, own in pairs_of(rows):
        times = [time_to(own, level) for level in levels]
        best = max(row["total_log_likelihood"] for row in own)
        cells = "".join(f"{'never' if t is None else f'{t:.0f}':>12}" for t in times)
        lines.append(f"{way + f', K = {n_passes}':16}{own[-1]['epoch']:>8.1f}{cells}{best:>10.0f}")
    return "\n".join(lines)


def figure(rows: Sequence[Row], path: Path) -> Path:
    """Test accuracy and log-likelihood against training time; the path of the picture."""
    picture = plots.new_figure(10, 4.8)
    panels = (("accuracy", 100.0, "test accuracy (%)"), ("total_log_likelihood", 1.0, "test log-likelihood (nats)"))
    passes = sorted({row["n_passes"] for row in rows})
    for ax, (score, scale, ylabel) in zip(picture.subplots(1, 2), panels, strict=True):
        found: dict[str, Curve] = {}
        styles = {}  # a colour for K, a dash for the way
        for way, n_passes, own in pairs_of(rows):
            label, values = f"{way}, K = {n_passes}", [scale * row[score] for row in own]
            found[label] = ([row["seconds"] / 60 for row in own], values, [0.0] * len(own))
            styles[label] = (passes.index(n_passes), _DASHES.index(way))
        mnist.draw(ax, found, xlabel="minutes of training", ylabel=ylabel, styles=styles)
        mnist.zoom(ax, {label: curve for label, curve in found.items() if "K = 100" not in label} or found, 0.1)
    for level in LEVELS:
        picture.axes[1].axhline(level, color="#999999", linewidth=1.0, zorder=0)
    handles, labels = picture.axes[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    picture.suptitle(f"MNIST, {rows[0]['model']}, alpha = {rows[0]['alpha']:g}: what a minute of training buys")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
    return path
