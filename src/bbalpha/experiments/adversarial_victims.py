"""The networks that the adversarial experiment attacks: how they are trained, and what is measured on them."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha import checkpoint, metrics
from bbalpha.detection import Detector
from bbalpha.experiments import mnist
from bbalpha.experiments.mnist import Digits
from bbalpha.networks import mlp
from bbalpha.objectives import CrossEntropy
from bbalpha.prediction import predict_classification
from bbalpha.predictive import ClassificationPrediction
from bbalpha.training.fitting import cosine, fit


@dataclass(frozen=True)
class Config:
    """What is run. The settings of training were chosen on training digits that were held out.

    Attributes:
        model: Name in the rows.
        sizes: Widths from the inputs to the outputs; dropout 0.5 before every layer.
        epochs: Of Adam with a cosine schedule.
        batch_size: Rows of a training step; they share the masks of a pass.
        learning_rate: Of the first step.
        length_scale: Of the prior; this one gives the weight decay of the authors, 2e-6.
        n_passes: K in training, attacks and prediction.
        n_train: Digits to train on.
        n_held_out: Other training digits, for the threshold of the detector.
        n_test: Test digits under the attacks of the paper.
        n_few: Test digits under all other attacks.
        steps: Sizes of the fast gradient sign step.
        few_steps: Those of the attackers the paper leaves out.
        n_targeted: Steps towards class 0.
        block: Every so many of them there is a row.
        few_targeted: Numbers of steps with a row, for the other attackers who walk.
        stride: Size of a step of a walk.
        radii: The most that the attacker who knows of the detector changes a pixel on a walk.
        evades: Weights of the entropy that this attacker tries.
        false_alarm: Share of clean digits the detector may flag.
        seed: Of everything.
    """

    model: str = "3x1000"
    sizes: tuple[int, ...] = (784, 1000, 1000, 1000, 10)
    epochs: int = 8
    batch_size: int = 128
    learning_rate: float = 1e-3
    length_scale: float = 0.235
    n_passes: int = 10
    n_train: int = 55_000
    n_held_out: int = 5_000
    n_test: int = 10_000
    n_few: int = 2_000
    steps: tuple[float, ...] = tuple(round(0.02 * i, 2) for i in range(26))
    few_steps: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    n_targeted: int = 100
    block: int = 4
    few_targeted: tuple[int, ...] = (10, 20, 30, 40)
    stride: float = 0.01
    radii: tuple[float, ...] = (0.1, 0.2)
    evades: tuple[float, ...] = (0.0, 0.3, 1.0, 3.0)
    false_alarm: float = 0.05
    seed: int = 0


QUICK = Config(
    model="1x100", sizes=(784, 100, 10), epochs=4, batch_size=100, learning_rate=3e-3, n_train=4_000,
    n_held_out=1_000, n_test=400, n_few=200, steps=(0.0, 0.1, 0.2, 0.5), few_steps=(0.2, 0.5), n_targeted=8, block=4,
    few_targeted=(4, 8), radii=(0.02,), evades=(0.0, 1.0),
)  # fmt: skip


def load_digits(config: Config) -> Digits:
    """As many as `config` asks for; which training digits are held out, for the detector, is drawn with its seed."""
    whole = mnist.load(flat=True, n_test=config.n_test, letters=False)
    order = torch.randperm(len(whole.x), generator=torch.Generator().manual_seed(config.seed))
    held, used = order[: config.n_held_out], order[config.n_held_out :][: config.n_train]
    return replace(whole, x=whole.x[used], y=whole.y[used], x_held_out=whole.x[held], y_held_out=whole.y[held])


def trained(config: Config, alpha: float | None, digits: Digits, folder: Path) -> nn.Module:
    """The network of `alpha`, None the plain one: from `folder`, where a training that was cut off goes on.

    Args:
        config: Its sizes and how it is trained.
        alpha: Of the objective.
        digits: To train on.
        folder: Of the states of training and of the model when it is done.
    """
    if (folder / "model").is_dir():
        return checkpoint.load(folder / "model")
    with seeded(config.seed, "weights"):  # the same start for all
        net = mlp(config.sizes, dropout=0.0 if alpha is None else 0.5)
    fit(
        net, (digits.x, digits.y), objective=CrossEntropy(alpha or 0.0), epochs=config.epochs,
        n_passes=None if alpha is None else config.n_passes, batch_size=config.batch_size,
        length_scale=config.length_scale, learning_rate=config.learning_rate, schedule=cosine, masks="shared",
        balanced=False, checkpoint=folder / "training", seed=config.seed,
    )  # fmt: skip
    checkpoint.save(net, folder / "model", alpha=alpha)
    return net


class Victim:
    """A trained network, what it says of clean test digits, and a detector for each way to predict with it.

    Fresh: masks of their own for every digit and every prediction. Fixed: the same K networks for everything.

    Args:
        net: Plain or with dropout.
        config: Its n_passes, false_alarm and seed.
        digits: Held-out ones for the detector, test digits to attack.
        plain: Whether `net` has no dropout.
    """

    def __init__(self, net: nn.Module, config: Config, digits: Digits, *, plain: bool) -> None:
        self.net, self.config, self.digits, self.plain = net, config, digits, plain
        self.fixed_seed = config.seed + 1  # of those who fix their masks, and of who attacks them

    def predict(self, x: Tensor, word: str, *, fixed: bool = False) -> ClassificationPrediction:
        """The prediction for `x`; `word` names what is predicted, and so the fresh masks."""
        K = None if self.plain else self.config.n_passes
        if fixed:
            return predict_classification(self.net, x, n_passes=K, masks="shared", seed=self.fixed_seed, progress=False)
        return predict_classification(self.net, x, n_passes=K, seed=_seed(self.config.seed, word), progress=False)

    @cached_property
    def clean(self) -> ClassificationPrediction:
        """Of all test digits, with fresh masks."""
        return self.predict(self.digits.x_test, "clean")

    @cached_property
    def clean_fixed(self) -> ClassificationPrediction:
        """Of the digits that those who fix their masks are attacked on."""
        return self.predict(self.digits.x_test[: self.config.n_few], "clean", fixed=True)

    @cached_property
    def thresholds(self) -> dict[bool, float]:
        """Entropies above which the alarm is raised, {fixed: threshold}."""
        found = {}
        for fixed in (False, True):
            with seeded(self.config.seed, "detector"):
                detector = Detector(
                    self.net, n_passes=self.config.n_passes, seed=self.fixed_seed if fixed else None,
                    false_alarm=self.config.false_alarm,
                ).fit(self.digits.x_held_out)  # fmt: skip
            found[fixed] = float(detector.threshold or 0.0)
        return found

    def scores(
        self, x: Tensor, rows: Tensor, word: str, *, target: int | Tensor | None = None, fixed: bool = False
    ) -> dict[str, Any]:
        """What an attack has come to: a flat record.

        Args:
            x: Attacked images (n, 784).
            rows: Which test digits they were made of (n,).
            word: Names the attack.
            target: The class it was after.
            fixed: Whether those who predict fix their masks.
        """
        p, before = self.predict(x, word, fixed=fixed), self.clean_fixed if fixed else self.clean
        wrong = p.label != self.digits.y_test[rows]
        flagged = p.entropy > self.thresholds[fixed]
        found: dict[str, Any] = {
            "accuracy": 1 - _share(wrong),
            "target_rate": None if target is None else _share(p.label == target),
            "entropy": p.entropy.mean().item(),
            "entropy_stderr": (p.entropy.std() / len(rows) ** 0.5).item(),
            "auroc_entropy": _auroc(before.entropy[rows], p.entropy),
            "auroc_mi": None,
            "auroc_variation": None,
            "nearest_target": None if target is None else _share(self._nearest(x) == target),
            "allowed": self.config.false_alarm,
            "false_alarm": _share(before.entropy[rows] > self.thresholds[fixed]),
            "caught": _share(flagged),
            "unnoticed": _share(wrong & ~flagged),
            "change": (x - self.digits.x_test[rows]).abs().mean().item(),
            "n": len(rows),
        }
        if not self.plain:  # one pass has no spread
            found["auroc_mi"] = _auroc(before.mutual_information[rows], p.mutual_information)
            found["auroc_variation"] = _auroc(before.variation_ratio[rows], p.variation_ratio)
        return found

    def _nearest(self, x: Tensor) -> Tensor:
        """The class of the nearest held-out digit: what an image looks like to who knows no network (n,)."""
        held = self.digits.x_held_out
        return self.digits.y_held_out[torch.cat([torch.cdist(part, held).argmin(1) for part in x.split(500)])]


@contextmanager
def seeded(seed: int, word: str) -> Iterator[None]:
    """A context in which torch's global generator follows from `seed` and `word`; as it was afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(_seed(seed, word))
        yield


def _seed(seed: int, word: str) -> int:
    return zlib.crc32(f"{seed} {word}".encode())


def _share(which: Tensor) -> float:
    return which.double().mean().item()


def _auroc(clean: Tensor, attacked: Tensor) -> float:
    positive = torch.arange(len(clean) + len(attacked)) >= len(clean)
    return float(metrics.auroc(torch.cat((clean, attacked)), positive))
