"""What a model is judged on: predictions and targets of rows that it never saw.

They are those that its card keeps from the fit, or those of a table that is given to the report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bbalpha.report.words import Array, rows
from bbalpha.tabular.fitting import indices, scores, with_target
from bbalpha.tabular.model import TableModel

if TYPE_CHECKING:
    from pandas import DataFrame

_ROWS = 4096  # at a time


@dataclass(frozen=True)
class Evidence:
    """Rows that a model never saw.

    Attributes:
        found: What the model says of them, column by column: `mean`, `std`, `low`, ... or `probs`, `entropy`, ...
        target: Their targets (N,): numbers, or indices of classes.
        scores: On all of them, those that a card does not keep too.
        guess: The same of a guess that looks at no column.
        source: What rows these are, in words.
        guessed_from: What the guess knows, in words.
        pit: The predictive distribution function at the targets (N,); None where it is not known.
        fresh: Whether they were given to the report.
    """

    found: Mapping[str, Array]
    target: Array
    scores: Mapping[str, float]
    guess: Mapping[str, float]
    source: str
    guessed_from: str
    pit: Array | None = None
    fresh: bool = False

    @property
    def n(self) -> int:
        """How many rows can be shown."""
        return len(self.target)

    @property
    def ignorance(self) -> Array:
        """By row, what more data of its kind would settle (N,)."""
        return self.found["mutual_information" if "probs" in self.found else "epistemic_std"]

    @property
    def doubt(self) -> Array:
        """By row, the whole uncertainty (N,)."""
        return self.found["entropy" if "probs" in self.found else "std"]

    @property
    def loss(self) -> Array:
        """By row, whether the label is wrong, or by how much the mean is (N,)."""
        if "probs" in self.found:
            wrong: Array = self.found["probs"].argmax(1) != self.target
            return wrong.astype(float)
        distance: Array = abs(self.found["mean"] - self.target)
        return distance

    @property
    def inside(self) -> Array:
        """By row, whether the target is within the 90 % interval (N,)."""
        inside: Array = (self.found["low"] <= self.target) & (self.target <= self.found["high"])
        return inside


def held_out(model: TableModel) -> Evidence | None:
    """What the card keeps of the rows held out at the fit; None if it keeps nothing."""
    card = model.card
    columns = {name: list(cells) for name, cells in card.held_out.items()}
    if not columns.get("target") or not card.scores:
        return None
    kept = [f"p_{name}" for name in model.classes] or ["mean", "std", "low", "high", "epistemic_std"]
    lost = [name for name in (*kept, "unusual") if len(columns.get(name, ())) != len(columns["target"])]
    if lost:
        raise ValueError(f"The card must keep {lost[0]!r} of every held-out row; it does not. Fit the model again.")
    if model.task == "classification":
        place = {name: i for i, name in enumerate(model.classes)}
        target = np.array([float(place.get(str(t), np.nan)) for t in columns.pop("target")])
        probs = [columns.pop(f"p_{name}") for name in model.classes]
    else:
        target, probs = _numbers(columns.pop("target")), []
    columns.pop("label", None)
    found = {name: _numbers(cells) for name, cells in columns.items()}
    if probs:
        found["probs"] = np.stack([_numbers(p) for p in probs], 1)
    whole = np.isfinite(target) & np.all([np.isfinite(v).reshape(len(v), -1).all(1) for v in found.values()], 0)
    found = {name: values[whole] for name, values in found.items()}
    if not whole.any():
        return None
    return Evidence(
        found, target[whole].astype(int) if probs else target[whole], card.scores, card.guess,
        f"the {rows(card.n_held_out)} held out at the fit ({card.split})", "the training targets",
        found.pop("pit", None),
    )  # fmt: skip


def judged(model: TableModel, frame: "DataFrame") -> Evidence:
    """What the rows of a table that have a target say; the model must not have seen them."""
    frame, y, _ = with_target(frame, model.card.target, model.task)
    target = indices(model, y) if model.task == "classification" else y
    table = model.predict(frame)
    found = {str(name): table[name].to_numpy() for name in table if name != "label"}
    pit = None
    if model.task == "classification":
        found["probs"] = np.stack([found.pop(f"p_{name}") for name in model.classes], 1)
    else:
        pit = model.pit(frame, y)
    return Evidence(
        {name: values.astype(float) for name, values in found.items()}, target, scores(model, frame, target),
        _guess(model, target), f"the {rows(len(target))} given to this report", "the targets of these very rows", pit,
        fresh=True,
    )  # fmt: skip


def _guess(model: TableModel, target: Array) -> dict[str, float]:
    """Scores of the best constant for these rows: harder to beat than one that knows the training rows alone."""
    if model.task == "classification":
        shares = np.bincount(target, minlength=len(model.classes)) / len(target)
        present = shares[shares > 0]
        return {"nll": float(-(present * np.log(present)).sum()), "accuracy": float(shares.max())}
    std = float(max(target.std(), 1e-12))
    return {"nll": float(np.log(std) + 0.5 * np.log(2 * np.pi) + 0.5), "rmse": std}


def _numbers(cells: Sequence[Any]) -> Array:
    """A column of a card as numbers; JSON has None for what is not finite."""
    return np.array([np.nan if cell is None else float(cell) for cell in cells], dtype=float)
