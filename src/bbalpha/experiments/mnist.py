"""What the MNIST experiments share: the digits, the paper's weight decay, a loop whose time is known, and scores.

digits = load(flat=True)
trainer = Trainer(net, (digits.x, digits.y), passes=loop, objective=CrossEntropy(1.0), learning_rate=1e-3, seed=0)
trainer.step()                                                            # trainer.seconds counts steps alone
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bbalpha import data, metrics, plots
from bbalpha._kernels import step_seed
from bbalpha.checkpoint import newest_state, write_state
from bbalpha.experiments.results import Row
from bbalpha.predictive import ClassificationPrediction
from bbalpha.training.feed import order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WEIGHT_DECAY = 2e-6  # the authors' Keras l2(1e-6) on kernels: its gradient has a factor of 2
N_HELD_OUT = 10_000  # the last rows of training, on which settings are chosen
_NONE = torch.empty(0)


@dataclass(frozen=True, eq=False)
class Digits:
    """Pixels in [0, 1], as rows (N, 784) or images (N, 1, 28, 28), and labels.

    Attributes:
        x: Training digits.
        y: Their labels (N,).
        x_test: Test digits.
        y_test: Their labels.
        strange: Letters, of notMNIST; none where nobody asks for them.
        x_held_out: Training digits that are not trained on; none likewise.
        y_held_out: Their labels.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    strange: Tensor = _NONE
    x_held_out: Tensor = _NONE
    y_held_out: Tensor = _NONE


def load(
    *, flat: bool, n_train: int | None = None, n_test: int | None = None, validation: bool = False, letters: bool = True
) -> Digits:
    """MNIST and notMNIST as tensors.

    Args:
        flat: Rows of pixels for a dense network; else images of one channel.
        n_train: The first so many training rows; None takes all.
        n_test: The first so many test rows, and letters; None takes all.
        validation: Hold out the last 10,000 training rows and put them in the place of the test rows: for
            choosing settings.
        letters: Whether notMNIST is wanted.
    """
    train, test = data.load_mnist("train"), data.load_mnist("test")
    x, y = _pixels(train.images, flat), torch.from_numpy(train.labels)
    x_test, y_test = _pixels(test.images, flat), torch.from_numpy(test.labels)
    if validation:
        x, x_test = x[:-N_HELD_OUT], x[-N_HELD_OUT:]
        y, y_test = y[:-N_HELD_OUT], y[-N_HELD_OUT:]
    strange = _pixels(data.load_notmnist().images, flat) if letters else _NONE
    return Digits(x[:n_train], y[:n_train], x_test[:n_test], y_test[:n_test], strange[:n_test])


def adam(net: nn.Module, learning_rate: float) -> torch.optim.Adam:
    """Adam with the paper's weight decay on weights, none on biases.

    >>> [group["weight_decay"] for group in adam(nn.Linear(2, 1), 1e-3).param_groups]
    [2e-06, 0.0]
    """
    weights = [p for p in net.parameters() if p.ndim > 1]
    biases = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.Adam(groups, lr=learning_rate, fused=True)


# ------------------------------------------------------------------------------ a loop whose time is known

Forward = Callable[[nn.Module, Tensor, int], Tensor]  # (net, x, seed of the step) -> (K, N, C)


@dataclass
class Trainer:
    """A network in training, step by step; only the time inside `step` counts.

    Attributes:
        net: The network, trained in place.
        data: Inputs (N, ...) and labels (N,).
        passes: How the K outputs of a batch are made.
        objective: (outputs, target) -> ().
        learning_rate: Of Adam.
        seed: Of the order of rows, and of the masks.
        batch_size: Rows a step.
        clock: Seconds.
        n_steps: Steps done.
        seconds: Time that they took.
    """

    net: nn.Module
    data: tuple[Tensor, Tensor]
    passes: Forward
    objective: Callable[[Tensor, Tensor], Tensor]
    learning_rate: float
    seed: int
    batch_size: int = 128
    clock: Callable[[], float] = time.perf_counter
    n_steps: int = 0
    seconds: float = 0.0
    _rows: tuple[int, Tensor] = field(default=(-1, torch.empty(0)), init=False)

    def __post_init__(self) -> None:
        self.optimizer = adam(self.net, self.learning_rate)

    @property
    def steps_an_epoch(self) -> int:
        """Batches of an epoch; the last one may be short."""
        return -(-len(self.data[0]) // self.batch_size)

    def step(self) -> float:
        """The loss of one more step."""
        start = self.clock()
        epoch, batch = divmod(self.n_steps, self.steps_an_epoch)
        if self._rows[0] != epoch:
            self._rows = (epoch, order(len(self.data[0]), seed=self.seed, epoch=epoch))
        rows = self._rows[1][batch * self.batch_size : (batch + 1) * self.batch_size]
        self.net.train()
        outputs = self.passes(self.net, self.data[0][rows], step_seed(self.seed, self.n_steps))  # (K, N, C)
        loss = self.objective(outputs, self.data[1][rows])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        value = loss.item()
        self.n_steps += 1
        self.seconds += self.clock() - start
        return value

    def save(self, folder: Path) -> None:
        """Write the state into a folder, the one before is kept too."""
        content = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        write_state(folder, self.n_steps, content | {"n_steps": self.n_steps, "seconds": self.seconds})

    def resume(self, folder: Path) -> None:
        """Take up the newest state in the folder, if there is one."""
        state = newest_state(folder) if folder.exists() else None
        if state is not None:
            self.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.n_steps, self.seconds = state["n_steps"], state["seconds"]


# ------------------------------------------------------------------------------ scores


def scores(p: ClassificationPrediction, target: Tensor) -> Row:
    """Accuracy, total log-likelihood, calibration error, and how well entropy tells errors from the rest (AUROC)."""
    wrong = p.label != target
    mixed = bool(wrong.any()) and not bool(wrong.all())
    return {
        "accuracy": float(metrics.accuracy(p.probs, target)),
        "total_log_likelihood": float(p.log_prob(target).double().sum()),
        "ece": float(metrics.ece(p.probs, target)),
        "auroc_error": float(metrics.auroc(p.entropy, wrong)) if mixed else None,
    }


def strangers(p: ClassificationPrediction, q: ClassificationPrediction) -> Row:
    """How well uncertainty tells inputs of another kind, predicted as `q`, from test inputs, `p` (AUROC).

    By mutual information only with more than one pass: a plain net has none.
    """
    strange = torch.arange(len(p.label) + len(q.label)) >= len(p.label)
    several = p.n_passes > 1
    by_mi = torch.cat((p.mutual_information, q.mutual_information)) if several else None
    return {
        "auroc_ood_entropy": float(metrics.auroc(torch.cat((p.entropy, q.entropy)), strange)),
        "auroc_ood_mi": None if by_mi is None else float(metrics.auroc(by_mi, strange)),
    }


NO_STRANGERS: Row = {"auroc_ood_entropy": None, "auroc_ood_mi": None}
NO_SCORES: Row = {"accuracy": None, "total_log_likelihood": None, "ece": None, "auroc_error": None}


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; 0 for a single value.

    >>> mean_error([1.0, 3.0])
    (2.0, 1.0)
    """
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.fmean(values), error


# ------------------------------------------------------------------------------ curves

Curve = tuple[Sequence[float], Sequence[float], Sequence[float]]  # places, means, standard errors


def draw(
    ax: "Axes",
    curves: Mapping[str, Curve],
    *,
    xlabel: str,
    ylabel: str,
    styles: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Means as lines with bands of one standard error, told apart by colour and dash; `styles` has their numbers."""
    for i, (label, (at, mean, error)) in enumerate(curves.items()):
        c, d = (i, i) if styles is None else styles[label]
        style, m, e = plots.line(c, dash=d), np.asarray(mean), np.asarray(error)
        ax.plot(at, m, **style, linewidth=1.7, label=label)
        ax.fill_between(at, m - e, m + e, color=style["color"], alpha=0.18, linewidth=0)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#DDDDDD", linewidth=0.7)


def zoom(ax: "Axes", curves: Mapping[str, Curve], skipped: float = 0.25) -> None:
    """Limit the height to what happens after the first part of every curve, where nothing is to be seen any more."""
    late = [m for at, means, _ in curves.values() for a, m in zip(at, means, strict=True) if a >= skipped * max(at)]
    margin = 0.08 * (max(late) - min(late) or 1.0)
    ax.set_ylim(min(late) - margin, max(late) + margin)


def _pixels(images: Any, flat: bool) -> Tensor:
    x = torch.from_numpy(images).float() / 255
    return x.flatten(1) if flat else x[:, None]
