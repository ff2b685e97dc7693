"""Experiment 2 of the paper: MNIST with its dense network and its CNN, for several alphas.

Beside the alpha networks stand MC dropout (alpha = 0 with one pass a step) and the plain network. Test accuracy and
total log-likelihood over the epochs; calibration, found errors and found strangers (notMNIST) at the end.

    bbalpha reproduce classification --models dense --alphas 0,0.5,1 --seeds 3 --jobs 2

One network is one unit of work; --jobs of them are trained side by side. A run that was cut off goes on: whole networks
are in the results file, the epochs of unfinished ones in `<out>/.state`.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from bbalpha import plots
from bbalpha._engine.planning import Masks
from bbalpha.experiments import mnist, skeleton
from bbalpha.experiments.mnist import NO_SCORES, NO_STRANGERS, Curve, Digits, mean_error
from bbalpha.experiments.results import Ledger, Row
from bbalpha.networks import cnn, mlp
from bbalpha.objectives import CrossEntropy
from bbalpha.prediction import predict_classification
from bbalpha.predictive import ClassificationPrediction
from bbalpha.training.fitting import Progress, cosine, fit


@dataclass(frozen=True)
class Config:
    """How the networks of a model are trained and tested.

    Attributes:
        learning_rate: Of Adam; it falls to 0 along half a cosine. Chosen, as the batch size and the warm-up, by the
            log-likelihood of held-out training rows: docs/mnist.md.
        epochs: Times through the training rows.
        warm_up: The share of training in which the rate also rises from 0 in a line; None has no such part. Without
            it a high rate kills units of the CNN for good in the first epoch.
        batch_size: Rows a step.
        n_predict_passes: K at test time, masks shared by the test rows.
        every: Epochs between scores; those in between have none.
        n_train: The first so many training rows; None takes all.
        n_test: The first so many test rows.
    """

    learning_rate: float
    epochs: int
    warm_up: float | None = None
    batch_size: int = 128
    n_predict_passes: int = 100
    every: int = 2
    n_train: int | None = None
    n_test: int | None = None

    def schedule(self, share: float) -> float:
        """What the learning rate is multiplied by after a share of training."""
        return cosine(share) * (min(1.0, share / self.warm_up) if self.warm_up else 1.0)


CONFIGS = {
    "dense": Config(learning_rate=2e-3, epochs=30),
    "cnn": Config(learning_rate=4e-3, epochs=12, warm_up=0.1, batch_size=32),
}
QUICK = {
    "dense": replace(CONFIGS["dense"], epochs=2, every=1, n_train=5000, n_test=1000),
    "cnn": replace(CONFIGS["cnn"], epochs=1, every=1, n_train=5000, n_test=500),
}


@dataclass(frozen=True)
class Unit(skeleton.Unit):
    """One network.

    Attributes:
        model: dense or cnn.
        method: bbalpha, mc-dropout or nn.
        alpha: None for nn.
        masks: None for nn.
        n_passes: K in training.
        seed: Of its first weights, the order of rows and the masks.
    """

    model: str
    method: str
    alpha: float | None
    masks: Masks | None
    n_passes: int
    seed: int

    @property
    def label(self) -> str:
        """A name for figures and tables."""
        if self.method != "bbalpha":
            return {"mc-dropout": "MC dropout (K = 1)", "nn": "plain network"}[self.method]
        return f"alpha = {self.alpha:g}" + (", shared masks" if self.masks == "shared" else "")


def units(model: str, alphas: Sequence[float], seeds: int) -> list[Unit]:
    """The networks of a model, seed by seed, so that an unfinished run has some of each kind.

    >>> [unit.label for unit in units("cnn", [0.5], 1)]
    ['alpha = 0.5', 'MC dropout (K = 1)', 'plain network']
    """
    found = []
    for seed in range(seeds):
        found += [Unit(model, "bbalpha", alpha, "per_example", 10, seed) for alpha in alphas]
        found += [Unit(model, "mc-dropout", 0.0, "per_example", 1, seed), Unit(model, "nn", None, None, 1, seed)]
        if model == "dense" and 0.5 in alphas:  # for the study of masks
            found.append(Unit(model, "bbalpha", 0.5, "shared", 10, seed))
    return found


def network(model: str, *, dropout: float = 0.5) -> nn.Sequential:
    """The paper's dense network, dropout also on its inputs, or the paper's CNN; 0 is the plain network."""
    return mlp([784, 100, 100, 10], dropout=dropout) if model == "dense" else cnn(dropout=dropout)


def run(unit: Unit, config: Config, digits: Digits, folder: Path, *, progress: bool | None = False) -> list[Row]:
    """Train and test one network; a row an epoch.

    Args:
        unit: Which.
        config: How.
        digits: On what.
        folder: For the state of the run, taken up if there is one.
        progress: Show a bar of its epochs on terminals.
    """
    with torch.random.fork_rng():
        torch.manual_seed(unit.seed)
        net = network(unit.model, dropout=0.0 if unit.method == "nn" else 0.5)
    log = _Log(net, unit, config, digits, Ledger(folder / "epochs.json", command=unit.name, seed=unit.seed))
    fit(
        net, (digits.x, digits.y), objective=CrossEntropy(unit.alpha or 0.0), epochs=config.epochs,
        n_passes=None if unit.method == "nn" else unit.n_passes, batch_size=config.batch_size,
        optimizer=mnist.adam(net, config.learning_rate), schedule=config.schedule, masks=unit.masks or "per_example",
        balanced=False, checkpoint=folder / "training", callback=log.note, seed=unit.seed, progress=progress,
    )  # fmt: skip
    return log.ledger.rows


def reproduce(
    *, models: Sequence[str], alphas: Sequence[float], seeds: int, jobs: int | None = 1, quick: bool, out: Path
) -> str:
    """Run what is missing in `out`/classification/<model>.json, draw the figures, and tell the last scores.

    Args:
        models: dense, cnn.
        alphas: Of the alpha networks.
        seeds: Networks of each kind.
        jobs: Networks trained side by side, each in a process with one thread; None is as the
            `joblib.parallel_config` around it says.
        quick: 5,000 training rows, a few epochs, one seed.
        out: The folder of results.
    """
    unknown = [model for model in models if model not in CONFIGS]
    if unknown or not models:
        raise ValueError(f"`models` must be some of {', '.join(CONFIGS)}; got {', '.join(unknown) or 'none'}.")
    told = []
    for model in models:
        path = out / "classification" / f"{model}.json"
        config = (QUICK if quick else CONFIGS)[model]
        command = f"bbalpha reproduce classification --models {model}"
        settings = asdict(config)
        kept = skeleton.open_ledger(path, command=command, quick=quick, seed=0, settings=settings)
        skeleton.run_units(
            kept, units(model, alphas, 1 if quick else seeds),
            partial(_train, config, progress=None if jobs == 1 else False),
            state=skeleton.state_folder(path, settings=settings), jobs=jobs,
        )  # fmt: skip
        told.append(f"{path}\n{table(kept.rows)}")
        try:
            told.append(f"{figure(kept.rows, path.with_suffix('.png'))}\n")
        except ImportError as error:
            told.append(f"No figure. {error}\n")
    return "\n".join(told)


# ------------------------------------------------------------------------------ one network


@dataclass
class _Log:
    """Writes the row of every epoch, and keeps the time of training apart from that of tests."""

    net: nn.Module
    unit: Unit
    config: Config
    digits: Digits
    ledger: Ledger

    def __post_init__(self) -> None:
        self.start = time.perf_counter()

    def note(self, progress: Progress) -> None:
        """Score the epoch that ended, unless a run that was cut off has done so."""
        spent = time.perf_counter() - self.start
        epoch = progress.epoch
        if not self.ledger.has(epoch=epoch):
            before = max((row["seconds"] for row in self.ledger.rows if row["epoch"] < epoch), default=0.0)
            facts = asdict(self.unit) | {"epoch": epoch, "seconds": before + spent, "loss": progress.loss}
            self.ledger.add([facts | self._scores(epoch)], seconds=spent)
        self.start = time.perf_counter()

    def _scores(self, epoch: int) -> Row:
        ends = epoch == self.config.epochs
        if epoch % self.config.every and not ends:
            return NO_SCORES | NO_STRANGERS
        p = self._predict(self.digits.x_test)
        found = mnist.strangers(p, self._predict(self.digits.strange)) if ends else NO_STRANGERS
        return mnist.scores(p, self.digits.y_test) | found

    def _predict(self, x: torch.Tensor) -> ClassificationPrediction:
        K = None if self.unit.method == "nn" else self.config.n_predict_passes
        return predict_classification(
            self.net, x, n_passes=K, masks="shared", balanced=False, seed=self.unit.seed, progress=False
        )


def _train(config: Config, unit: Unit, folder: Path, *, progress: bool | None) -> list[Row]:
    """The rows of one network; in a process of its own, maybe."""
    digits = mnist.load(flat=unit.model == "dense", n_train=config.n_train, n_test=config.n_test)
    with skeleton.threads(1):  # small networks are faster so; train several side by side instead
        return run(unit, config, digits, folder, progress=progress)


# ------------------------------------------------------------------------------ table and figure


def kinds(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """{label: rows of all its seeds}, in the order in which they were run."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        unit = Unit(*(row[name] for name in Unit.__dataclass_fields__))
        found.setdefault(replace(unit, seed=0).label, []).append(row)
    return found


def last(rows: Sequence[Row]) -> list[Row]:
    """The rows of the last epoch."""
    end = max((row["epoch"] for row in rows), default=0)
    return [row for row in rows if row["epoch"] == end]


def table(rows: Sequence[Row]) -> str:
    """The scores after the last epoch as text: means over seeds with their standard errors."""
    lines = [f"{'':28}{'accuracy, %':>18}{'log-likelihood':>20}{'notMNIST by MI':>20}"]
    for label, own in kinds(rows).items():
        end = last(own)
        accuracy, error = mean_error([100 * row["accuracy"] for row in end])
        ll, ll_error = mean_error([row["total_log_likelihood"] for row in end])
        by_mi = [row["auroc_ood_mi"] for row in end if row["auroc_ood_mi"] is not None]
        mi = "{:.3f} ± {:.3f}".format(*mean_error(by_mi)) if by_mi else ""
        lines.append(f"{label:28}{accuracy:>10.2f} ± {error:.2f}{ll:>13.0f} ± {ll_error:<4.0f}{mi:>20}")
    return "\n".join(lines)


def curves(rows: Sequence[Row], score: str, scale: float = 1.0) -> dict[str, Curve]:
    """{label: epochs, means over seeds, standard errors} of a score."""
    found: dict[str, Curve] = {}
    for label, own in kinds(rows).items():
        epochs = sorted({row["epoch"] for row in own if row[score] is not None})
        at = [[scale * row[score] for row in own if row["epoch"] == epoch] for epoch in epochs]
        means, errors = zip(*(mean_error(values) for values in at), strict=True)
        found[label] = (epochs, means, errors)
    return found


def figure(rows: Sequence[Row], path: Path) -> Path:
    """Test accuracy and log-likelihood over the epochs, as in the paper; the path of the picture."""
    picture = plots.new_figure(10, 4.6)
    panels = (("accuracy", 100.0, "test accuracy (%)"), ("total_log_likelihood", 1.0, "test log-likelihood (nats)"))
    for ax, (score, scale, ylabel) in zip(picture.subplots(1, 2), panels, strict=True):
        found = curves(rows, score, scale)
        mnist.draw(ax, found, xlabel="epoch", ylabel=ylabel)
        mnist.zoom(ax, found)
    handles, labels = picture.axes[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    seeds = len({row["seed"] for row in rows})
    picture.suptitle(f"MNIST, {rows[0]['model']}: mean and standard error of {seeds} network{'s' * (seeds > 1)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
    return path
