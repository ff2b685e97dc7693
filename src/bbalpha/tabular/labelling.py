"""A person labels rows, the one that tells most next, and sees what it is worth: `bbalpha label`.

A task is a table of rows, some with labels: those that have one are learnt from, a part of them is held out to judge
by, and the rest is what a person is asked about.

    task = table_task("cars.csv", "Origin")
    label(task, "labels.csv", ask=..., tell=print)
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bbalpha.acquisition import LabelFile, Learnt, Round, Selection, learn, power_bald, random
from bbalpha.acquisition.labels import Label
from bbalpha.checks import check_count
from bbalpha.tabular.files import read_table

if TYPE_CHECKING:
    from pandas import DataFrame

_SHADES = " ░▒▓█"
_HELD_OUT = 0.25  # of the labels that a table has
_AT_LEAST = 8  # labels of a table from which some are held out
# with 60, twenty digits were worth 0.48 on other digits, with 200 more: few rows make few steps an epoch
_EPOCHS = 200


@dataclass(frozen=True, eq=False)
class Task:
    """Rows to be labelled.

    Attributes:
        rows: All rows that may be learnt from (N, ...), an array or a DataFrame.
        numbers: The number of each in the file, counted from 0; labels are kept by these.
        given: {number: label} of those that have one.
        held_out: Rows to judge by, and their labels; None where there are too few.
        show: The text of a row, by its place in `rows`.
        classes: What a label can be; None takes new ones as they come.
    """

    rows: Any
    numbers: Sequence[int]
    given: dict[int, Label]
    held_out: tuple[Any, Sequence[Label]] | None
    show: Callable[[int], str]
    classes: tuple[Label, ...] | None = None


def digits_task(*, n_held_out: int = 500) -> Task:
    """The 8 x 8 digits that come with scikit-learn; the last rows are held out, with their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    n = len(images) - check_count("n_held_out", n_held_out, most=len(images) - 100)
    held = (images[n:], [int(label) for label in labels[n:]])
    return Task(images[:n], range(n), {}, held, lambda place: drawn(images[place].reshape(8, 8) / 16), tuple(range(10)))


def table_task(path: str | os.PathLike[str], target: str, *, seed: int = 0) -> Task:
    """A table with a column of labels that is empty in the rows to be asked about.

    Args:
        path: CSV or Parquet.
        target: The column of labels.
        seed: Of the quarter of its labels that is held out, where there are eight or more.
    """
    frame = read_table(path)
    if target not in frame:
        raise ValueError(f"`target` must be a column of {os.fspath(path)!r}; got {target!r}.")
    there = frame[target].notna().to_numpy()
    if there.all():
        raise ValueError(f"Column {target!r} must be empty where a label is asked for; every row has one.")
    labelled = there.nonzero()[0]
    labelled = labelled[torch.randperm(len(labelled), generator=torch.Generator().manual_seed(seed)).numpy()]
    n_held = int(_HELD_OUT * len(labelled)) if len(labelled) >= _AT_LEAST else 0
    held, numbers = sorted(labelled[:n_held].tolist()), sorted({*range(len(frame))} - {*labelled[:n_held].tolist()})
    inputs = frame.drop(columns=target)
    answers = [_label(value) for value in frame[target]]
    rows = inputs.iloc[numbers]
    return Task(
        rows, numbers, {number: answers[number] for number in numbers if there[number]},
        (inputs.iloc[held], [answers[number] for number in held]) if held else None, lambda place: fields(rows, place),
    )  # fmt: skip


def label(
    task: Task,
    path: str | os.PathLike[str],
    *,
    ask: Callable[[str, Sequence[Label]], Label],
    tell: Callable[[Round], object],
    most: int | None = None,
    seed: int = 0,
) -> Learnt:
    """Ask for one label after the other, each kept in `path` at once, and train anew after each.

    Args:
        task: The rows.
        path: The CSV file of the labels, taken up if it is there.
        ask: (a row as text, the labels that there are so far) -> its label.
        tell: Told of every training: labels, and the accuracy on what is held out, None where nothing is.
        most: How many labels to ask for; None goes on until all rows have one, or `ask` raises.
        seed: Of training and of the choices.
    """
    held = task.held_out
    place_of = {number: place for place, number in enumerate(task.numbers)}
    kept = LabelFile(path)
    strange = [number for number in kept.rows if number not in place_of or number in task.given]
    if strange:
        raise ValueError(
            f"{str(kept.path)!r} must hold labels of rows that had none; row {strange[0]} is not one of them."
        )

    def asked(number: int) -> Label:
        seen = task.classes or tuple(dict.fromkeys([*task.given.values(), *kept.known.values()]))
        return ask(task.show(place_of[number]), seen)

    kept.ask = asked
    known = [place_of[number] for number in (*task.given, *kept.rows)]
    left = [place for place in range(len(task.numbers)) if place not in set(known)]
    if not left:
        raise ValueError(f"There is nothing to ask for: every row has a label, in the table or in {str(kept.path)!r}.")
    start = known or [left[int(random(len(left), 1, seed=seed).indices)]]  # a model needs one to begin with
    end = len(task.numbers) if most is None else min(len(task.numbers), len(known) + check_count("most", most))

    def labels(places: Sequence[int]) -> list[Label]:
        numbers = [task.numbers[place] for place in places]
        return [task.given[n] if n in task.given else kept([n])[0] for n in numbers]

    return learn(
        task.rows, labels, fit=Learner, n_labels=end, start=start, size=1, choose=_chosen, callback=tell, seed=seed,
        score=None if held is None else lambda model: model.accuracy(*held), progress=False,
    )  # fmt: skip


class Learner:
    """A classifier of the labels so far; of fewer than two classes it knows nothing.

    Args:
        X: Rows, an array or a DataFrame.
        y: Their labels.
    """

    def __init__(self, X: Any, y: Any) -> None:
        from bbalpha.estimators import BBAlphaClassifier

        self.labels = np.asarray([str(label) for label in np.asarray(y).tolist()])
        self.model = None
        if len(set(self.labels)) > 1:
            self.model = BBAlphaClassifier(
                hidden_layer_sizes=(100,), dropout=0.2, input_dropout=0.0, epochs=_EPOCHS, batch_size=20,
                n_ensemble=1, validation_fraction=0, patience=_EPOCHS, random_state=int(torch.randint(2**31, ())),
            ).fit(X, self.labels)  # fmt: skip

    def predict_passes(self, X: Any) -> Any:
        """Class probabilities of K passes (K, N, C); all the same where nothing is known."""
        return torch.full((2, len(X), 2), 0.5) if self.model is None else self.model.predict_passes(X)

    def accuracy(self, X: Any, y: Sequence[Label]) -> float:
        """Share of these rows that are told right."""
        found = np.full(len(X), self.labels[0]) if self.model is None else self.model.predict(X)
        return float((found == np.asarray([str(label) for label in y])).mean())


def drawn(image: Any) -> str:
    """A grey picture in [0, 1] (H, W) as block characters, two a pixel.

    >>> drawn(np.array([[0.0, 0.5], [1.0, 0.0]])).splitlines()
    ['  ▒▒', '██  ']
    """
    shades = np.clip(np.asarray(image) * len(_SHADES), 0, len(_SHADES) - 1).astype(int)
    return "\n".join("".join(2 * _SHADES[shade] for shade in line) for line in shades)


def fields(frame: "DataFrame", place: int) -> str:
    """A row of a table, a line each field."""
    row = frame.iloc[place]
    width = max(len(str(name)) for name in frame.columns)
    return "\n".join(f"{name!s:>{width}}  {'' if _missing(value) else value}" for name, value in row.items())


# ------------------------------------------------------------------------------ helpers


def _chosen(probs: Tensor, size: int, *, seed: int) -> Selection:
    """Rows by chance, the more their label tells the likelier."""
    if bool((probs == probs[:1]).all()):  # nothing is known yet
        return random(probs.shape[1], size, seed=seed)
    return power_bald(probs, size, seed=seed, progress=False)


def _label(value: Any) -> Label:
    """A cell as a label: whole numbers as such (pandas has them as 1.0 where some are missing), else its text."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return int(value)
    return int(value) if isinstance(value, (int, np.integer)) and not isinstance(value, bool) else str(value)


def _missing(value: Any) -> bool:
    return value is None or value != value
