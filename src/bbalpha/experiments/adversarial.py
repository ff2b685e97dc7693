"""Adversarial digits: how wrong and how unsure a plain network and dropout networks become, and who is noticed.

Networks of three layers of 1000 units on MNIST in [0, 1], a plain one and one with dropout 0.5 for every alpha, are
attacked as in the paper: by fast gradient sign steps of growing size ("fgsm"), and by small steps towards class 0
("targeted"). Who attacks:

    fresh      through the MC predictive, with masks of its own: the paper
    fixed      through the very K networks that are predicted with
    adaptive   knows that the entropy is watched, and keeps it low; walks towards the class that comes second
    transfer   has the plain network only

    bbalpha reproduce adversarial                 results/adversarial/<network>.json, a row for every point of a curve

A run that was cut off goes on behind the last epoch, the last row, the last block of steps of a walk. Networks have
files of their own and can run side by side: first `--alphas ""` (the plain one), then a command for every alpha.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bbalpha._engine.planning import Masks
from bbalpha.attacks import fgsm, iterative_fgsm
from bbalpha.checkpoint import newest_state, write_state
from bbalpha.experiments import adversarial_figures as figures
from bbalpha.experiments import skeleton
from bbalpha.experiments.adversarial_victims import QUICK, Config, Victim, load_digits, seeded, trained
from bbalpha.experiments.mnist import Digits
from bbalpha.experiments.results import Row

Array = np.ndarray[Any, Any]
_BATCH = 500  # rows at a time, which share masks on a walk


def reproduce(*, alphas: Sequence[float], quick: bool, out: Path) -> str:
    """Where the results are, and which claims they bear out, for a plain network and one for every alpha.

    Args:
        alphas: Of the dropout networks.
        quick: A small network, few digits and few steps.
        out: Folder of results; states of an unfinished run are in its folder .state.
    """
    with skeleton.threads(1):  # two processes are faster than two threads
        return run(QUICK if quick else Config(), alphas, Path(out))


def run(config: Config, alphas: Sequence[float], out: Path) -> str:
    """All networks of one config, then figures and verdicts; for what comes back see `reproduce`."""
    bad = [alpha for alpha in alphas if not math.isfinite(alpha)]
    if bad:
        raise ValueError(f"`alphas` must be finite numbers; got {bad[0]}.")
    study = Study(config, load_digits(config), out)
    for alpha in (None, *alphas):
        study.attack(alpha)
    if alphas:  # the plain network alone is a first step: the others need it
        study.tidy()
    drawn = figures.draw(out / "adversarial", out / "adversarial")
    told = [f"{v.answer}: {v.claim} ({v.figures})" for v in figures.verdicts(figures.read(out / "adversarial"))]
    return "\n".join([f"Numbers and figures: {out / 'adversarial'} ({len(drawn)} figures).", *told])


def name(alpha: float | None) -> str:
    """The name of a network's files.

    >>> name(None), name(0.5)
    ('nn', 'bbalpha-0.5')
    """
    return "nn" if alpha is None else f"bbalpha-{alpha:g}"


@dataclass(frozen=True)
class Case(skeleton.Unit):
    """A point of a curve: what its row in the results begins with."""

    attack: str
    attacker: str
    step: float  # the size of the one step, or the number of small ones
    evade: float = 0.0
    radius: float | None = None


def cases(config: Config, *, plain: bool) -> Iterator[Case]:
    """All points of a network, in the order in which they are made."""
    c = config
    for step in c.steps:
        yield Case("fgsm", "fresh", step)
    for n in range(0, c.n_targeted + 1, c.block):
        yield Case("targeted", "fresh", n)
    if not plain:
        for attacker in ("fixed", "transfer"):
            for step in c.few_steps:
                yield Case("fgsm", attacker, step)
            for n in c.few_targeted:
                yield Case("targeted", attacker, n)
    for evade in c.evades:
        for step in c.few_steps if evade else ():
            yield Case("fgsm", "adaptive", step, evade)
        for radius in c.radii:  # there and back
            yield Case("targeted", "adaptive", round(2 * radius / c.stride), evade, radius)


class Study:
    """Trains networks and takes them through the attacks; what is done is on disk and is not done again.

    Args:
        config: What is run.
        digits: To train on and to attack.
        out: Folder of the results.
    """

    def __init__(self, config: Config, digits: Digits, out: Path) -> None:
        self.config, self.digits, self.folder = config, digits, out / "adversarial"
        self.victims: dict[float | None, Victim] = {}

    def attack(self, alpha: float | None) -> None:
        """Put all rows of a network into its file, and its example images beside it."""
        c, state, path = self.config, self.state(alpha), self.folder / f"{name(alpha)}.json"
        kept = skeleton.open_ledger(
            path, command="bbalpha reproduce adversarial", quick=c == QUICK, seed=c.seed, settings=asdict(c)
        )
        facts = {"model": c.model, "method": "nn" if alpha is None else "bbalpha", "alpha": alpha}

        @cache  # trained when the first row is wanted
        def attacks() -> Attacks:
            return Attacks(self.victim(alpha), state, None if alpha is None else self.victim(None))

        def work(case: Case, _: Path) -> list[Row]:
            return [facts | asdict(case) | attacks().scores(case)]

        skeleton.run_units(kept, list(cases(c, plain=alpha is None)), work, state=state)
        images = path.with_suffix(".npz")
        if not images.exists():
            _save_arrays(images, attacks().examples())

    def state(self, alpha: float | None) -> Path:
        """The folder of what is unfinished of a network."""
        return skeleton.state_folder(self.folder / f"{name(alpha)}.json", settings=asdict(self.config))

    def victim(self, alpha: float | None) -> Victim:
        """The network of `alpha`, trained at the first call."""
        if alpha not in self.victims:
            net = trained(self.config, alpha, self.digits, self.state(alpha))
            self.victims[alpha] = Victim(net, self.config, self.digits, plain=alpha is None)
        return self.victims[alpha]

    def tidy(self) -> None:
        """Remove the states of networks that are done; the plain one's as long as no other needs it."""
        done = {path.stem for path in self.folder.glob("*.npz")}
        plain = self.state(None)
        for state in plain.parent.glob("bbalpha-*"):
            if state.name in done:
                skeleton.forget(state)
        if not any(plain.parent.glob("bbalpha-*")):
            skeleton.forget(plain)


class Attacks:
    """All attacks on a network.

    Args:
        victim: The network.
        folder: For the states of walks.
        plain: The network that images are transferred from; None if `victim` is that.
    """

    def __init__(self, victim: Victim, folder: Path, plain: Victim | None) -> None:
        self.victim, self.folder, self.plain = victim, folder, plain
        self.config, self.digits = victim.config, victim.digits
        self.directions: dict[tuple[str, float], Tensor] = {}
        self.all = torch.arange(len(self.digits.x_test))
        self.few = self.all[: self.config.n_few]

    def scores(self, case: Case) -> Row:
        """The rest of the row that `case` begins."""
        word = " ".join(str(part) for part in asdict(case).values())
        fixed = case.attacker == "fixed"
        rows = self.all if case.attacker == "fresh" else self.few
        if case.attack == "fgsm":
            x = self.digits.x_test[rows]
            moved = (x + case.step * self._direction(case, rows)).clamp(0, 1)
            return self.victim.scores(moved, rows, word, fixed=fixed)
        if case.attacker == "adaptive":
            moved, target = self._quiet_walk(case, word)
            return self.victim.scores(moved, self.few, word, target=target)
        others = rows[self.digits.y_test[rows] != 0]  # those that can be taken for a 0
        moved = self._walked(case.attacker, self.digits.x_test[others], int(case.step), self.folder)
        return self.victim.scores(moved, others, word, target=0, fixed=fixed)

    def examples(self) -> dict[str, Array]:
        """A few digits under attack, for the strips of images: arrays (steps, digits, ...)."""
        c, y = self.config, self.digits.y_test
        rows = torch.stack([(y == label).nonzero()[0, 0] for label in (2, 4, 7)])
        x = self.digits.x_test[rows]
        sizes = [c.steps[i * (len(c.steps) - 1) // 5] for i in range(6)]
        counts = [i * c.n_targeted // 5 for i in range(6)]
        direction = self._sign(self.victim, x, 0.0, "examples")
        strips = {
            "fgsm": (sizes, [(x + size * direction).clamp(0, 1) for size in sizes]),
            "targeted": (counts, [self._walked("fresh", x, n, None) for n in counts]),
        }
        found: dict[str, Array] = {}
        for attack, (steps, images) in strips.items():
            predictions = [self.victim.predict(moved, f"{attack} {i}") for i, moved in enumerate(images)]
            found[f"{attack}_steps"] = np.asarray(steps)
            found[f"{attack}_images"] = (torch.stack(images) * 255).round().byte().numpy()
            found[f"{attack}_labels"] = torch.stack([p.label for p in predictions]).numpy()
            found[f"{attack}_entropies"] = torch.stack([p.entropy for p in predictions]).numpy()
        return found

    def _direction(self, case: Case, rows: Tensor) -> Tensor:
        """The signs of the one step; the gradient is that of the clean digits, so one serves all sizes (n, 784)."""
        key = case.attacker, case.evade
        if key not in self.directions:
            source = self.plain if case.attacker == "transfer" and self.plain else self.victim
            self.directions = {key: self._sign(source, self.digits.x_test[rows], case.evade, case.attacker)}
        return self.directions[key]

    def _sign(self, source: Victim, x: Tensor, evade: float, attacker: str) -> Tensor:
        fixed = attacker == "fixed"
        masks: Masks = "shared" if fixed else "per_example"
        with seeded(self.config.seed, f"fgsm {attacker} {evade}"):
            moved = fgsm(
                source.net, x, step=1.0, clip=None, evade=evade, n_passes=self.config.n_passes, masks=masks,
                seed=source.fixed_seed if fixed else None, batch_size=_BATCH,
            )  # fmt: skip
        return (moved - x).round()  # -1, 0, 1

    def _walked(self, attacker: str, x: Tensor, n_steps: int, folder: Path | None) -> Tensor:
        """`x` after `n_steps` small steps towards class 0, from the state in `folder` if there is one."""
        source = self.plain if attacker == "transfer" and self.plain else self.victim
        walk = None if folder is None else folder / f"walk-{attacker}"
        state = (newest_state(walk) if walk else None) or {"x": x, "step": 0}
        if state["step"] > n_steps:  # of rows that somebody has deleted
            state = {"x": x, "step": 0}
        moved: Tensor = state["x"]
        done: int = state["step"]
        for i in range(done, n_steps):
            with seeded(self.config.seed, f"walk {attacker} {i}"):
                moved = iterative_fgsm(
                    source.net, moved, target=0, step=self.config.stride, n_steps=1, n_passes=self.config.n_passes,
                    masks="shared", seed=source.fixed_seed if attacker == "fixed" else None, batch_size=_BATCH,
                )  # fmt: skip
        if walk and n_steps > done:
            write_state(walk, n_steps, {"x": moved, "step": n_steps})
        return moved

    def _quiet_walk(self, case: Case, word: str) -> tuple[Tensor, Tensor]:
        """Images within `radius` of the clean ones, on the way to the class that came second and quiet; that class."""
        x, reach = self.digits.x_test[self.few], case.radius or 0.0
        target = self.victim.clean.log_probs[self.few].topk(2).indices[:, 1]
        moved = x
        with seeded(self.config.seed, word):
            for _ in range(int(case.step)):
                moved = iterative_fgsm(
                    self.victim.net, moved, target=target, step=self.config.stride, n_steps=1, evade=case.evade,
                    n_passes=self.config.n_passes, masks="shared", batch_size=_BATCH,
                )  # fmt: skip
                moved = (x + (moved - x).clamp(-reach, reach)).clamp(0, 1)
        return moved, target


def _save_arrays(path: Path, arrays: dict[str, Array]) -> None:
    """Whole or not at all."""
    fresh = path.with_name(f".{path.name}")
    with fresh.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    fresh.replace(path)
