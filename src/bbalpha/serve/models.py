"""What is served: models of tables and of images behind one small interface, out of folders.

models = load_models(["cars", "digits"])
cars = models["cars"]
rows = cars.read([{"Cylinders": 4, ...}])
cars.answer(rows, n_passes=100, seed=1, coverage=0.9)      # one dict a row, as JSON has it
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bbalpha.lognormal import LogPrediction
from bbalpha.predictive import RegressionPrediction
from bbalpha.serve.images import ImageModel, is_image_folder
from bbalpha.serve.reading import Reader
from bbalpha.serve.reading import Row as Cells
from bbalpha.tabular.model import TableModel

Answer = dict[str, Any]
_PARTS = ("mean", "epistemic_std", "aleatoric_std")
_ROWS = 1000  # at a time: up to 2,000 go in double precision, in which a row is answered alike in any company
_POINTS, _TAIL = 161, 0.002  # of a density: how many, and what is left out on either side


class Served(Protocol):
    """A model that answers rows.

    Attributes:
        name: By which it is asked for.
        task: "regression", "classification" or "image".
        n_passes: Where a request does not say.
        seed: Where a request does not say.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def task(self) -> str: ...  # noqa: D102
    @property
    def n_passes(self) -> int: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102

    def facts(self) -> Answer:
        """What GET /models says of it."""
        ...

    def example(self) -> Any:
        """A row, or an image, that it takes."""
        ...

    def read(self, rows: Sequence[Any]) -> list[Any]:
        """Rows as JSON has them, checked: what `answer` takes; a ValueError says what is wrong."""
        ...

    def answer(self, rows: Sequence[Any], *, n_passes: int, seed: int, coverage: float) -> list[Answer | None]:
        """What it says of each row, the same alone or in company; None where that is not finite."""
        ...


@dataclass(frozen=True)
class ServedTable:
    """A table model under a name.

    Attributes:
        name: By which it is asked for.
        model: What answers.
        reader: Of its rows.
    """

    name: str
    model: TableModel
    reader: Reader

    @classmethod
    def of(cls, name: str, model: TableModel) -> "ServedTable":
        """The model, ready to be asked."""
        return cls(name, model, Reader(model))

    @property
    def task(self) -> str:
        """What it predicts."""
        return self.model.task

    @property
    def n_passes(self) -> int:
        """Where a request does not say."""
        return max(2, int(self.model.estimator.n_predict_passes))

    @property
    def seed(self) -> int:
        """Where a request does not say."""
        return int(self.model.estimator.seed_)

    def facts(self) -> Answer:
        """What GET /models says of it."""
        card = self.model.card
        return {
            "name": self.name, "task": self.task, "target": card.target, "classes": self.model.classes,
            "fields": [f.told() for f in card.fields], "scores": dict(card.scores), "guess": dict(card.guess),
            "threshold": card.threshold, "n_passes": self.n_passes, "seed": self.seed, "image": None,
        }  # fmt: skip

    def example(self) -> Answer:
        """The middle of every column."""
        return {f.name: f.centre for f in self.model.card.fields}

    def read(self, rows: Sequence[Mapping[str, Any]]) -> list[Cells]:
        """The cells of each row, checked."""
        return self.reader.read(rows)

    def answer(self, rows: Sequence[Cells], *, n_passes: int, seed: int, coverage: float) -> list[Answer | None]:
        """What it says of each row: of quantities mean, deviations and interval, of classes their probabilities."""
        blocks = (rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS))
        return [one for block in blocks for one in self._told(*self._passes(block, n_passes, seed), coverage)]

    def _told(self, table: Any, prediction: Any, coverage: float) -> list[Answer | None]:
        encoder, threshold = self.model.estimator.encoder_, self.model.card.threshold
        new = np.zeros(len(table), dtype=bool) if encoder is None else encoder.unseen(table) > 0
        classes = self.task == "classification"
        found = _class_columns(prediction) if classes else _quantity_columns(prediction, coverage)
        ignorance = self.model.ignorance(found)
        unusual = (new if threshold is None else new | (ignorance > threshold)).tolist()
        told = _classes(found, self.model.classes) if classes else _quantities(found)
        return [None if one is None else one | {"unusual": odd} for one, odd in zip(told, unusual, strict=True)]

    def density(self, rows: Sequence[Cells], *, n_passes: int, seed: int, coverage: float) -> list[Answer | None]:
        """Of each row the predictive density along a line, and the means of the passes; for quantities alone."""
        table, prediction = self._passes(rows, n_passes, seed)
        found: list[Answer | None] = []
        for i, answer in enumerate(self._told(table, prediction, coverage)):
            curve = None if answer is None else _curve(prediction, i)
            found.append(None if answer is None or curve is None else curve | answer)
        return found

    def grid(
        self, row: Mapping[str, Any], across: str, up: str, size: int
    ) -> tuple[list[float], list[float], list[Cells]]:
        """Values across, values up, and the row with these in its place, line by line from below; last the row itself.

        Raises:
            ValueError: If `across` and `up` are not two columns of numbers.
        """
        ends = {
            f.name: (f.low, f.high)
            for f in self.model.card.fields
            if f.kind in ("number", "span") and f.low is not None
        }
        for name, value in (("across", across), ("up", up)):
            if value not in ends:
                raise ValueError(f"`{name}` must be a column of numbers, one of {', '.join(ends)}; got {value!r:.60}.")
        if across == up:
            raise ValueError(f"`across` and `up` must be two columns; got {up!r} twice.")
        (cells,) = self.read([row])
        place = [f.name for f in self.model.card.fields]
        a, u = place.index(across), place.index(up)
        values = [np.linspace(float(ends[name][0]), float(ends[name][1]), size).tolist() for name in (across, up)]
        rows = []
        for y in values[1]:
            for x in values[0]:
                changed = list(cells)
                changed[a], changed[u] = x, y
                rows.append(tuple(changed))
        return values[0], values[1], [*rows, cells]

    def _passes(self, rows: Sequence[Cells], n_passes: int, seed: int) -> tuple[Any, Any]:
        """The rows as a table, and their predictive distribution."""
        table = self.reader.table(rows)
        return table, self.model.asked(n_passes=n_passes, seed=seed).estimator.predictive(table)


def load_models(paths: Iterable[str | os.PathLike[str]]) -> dict[str, Served]:
    """The models in folders, by the names of these; each was asked once.

    Raises:
        ValueError: If there is none, or two folders have one name.
    """
    models: dict[str, Served] = {}
    for path in paths:
        name = Path(path).resolve().name
        if name in models:
            raise ValueError(f"Two models must not have one name; two folders are called {name!r}: rename one.")
        models[name] = load_model(path)
    if not models:
        raise ValueError("There must be a model to serve; got none.")
    return models


def load_model(path: str | os.PathLike[str]) -> Served:
    """The model in a folder, of whichever kind it is; the name of the folder is its own."""
    if not Path(path).is_dir():
        raise FileNotFoundError(f"There is no model folder {str(path)!r}; `bbalpha fit` writes one.")
    name = Path(path).resolve().name
    model: Served = ImageModel.load(path) if is_image_folder(path) else ServedTable.of(name, TableModel.load(path))
    # what is slow the first time is done before anybody waits, and a model that cannot answer is found here
    (answer,) = model.answer(model.read([model.example()]), n_passes=model.n_passes, seed=model.seed, coverage=0.9)
    json.dumps([answer, model.facts()], allow_nan=False)
    return model


# ------------------------------------------------------------------------------ as JSON has it


def digits(value: float) -> float:
    """A quantity to ten significant digits: the last of sixteen hang on what else was in the batch.

    >>> digits(2 / 3)
    0.6666666667
    """
    return float(f"{value:.10g}")


def _class_columns(prediction: Any) -> dict[str, Any]:
    return {name: getattr(prediction, name).numpy() for name in ("probs", "entropy", "mutual_information")}


def _quantity_columns(prediction: Any, coverage: float) -> dict[str, Any]:
    mean, epistemic, aleatoric = (getattr(prediction, name)[:, 0].numpy() for name in _PARTS)
    low, high = (end[:, 0].numpy() for end in prediction.interval(coverage))
    std = np.sqrt(epistemic**2 + aleatoric**2)  # as prediction.std, which would work out both again
    parts = {"mean": mean, "std": std, "epistemic_std": epistemic, "aleatoric_std": aleatoric}
    return parts | {"low": low, "high": high}


def _quantities(found: Mapping[str, Any]) -> list[Answer | None]:
    columns = [column.tolist() for column in found.values()]
    return [
        {name: digits(v) for name, v in zip(found, row, strict=True)} if all(map(math.isfinite, row)) else None
        for row in zip(*columns, strict=True)
    ]


def _classes(found: Mapping[str, Any], classes: Sequence[str]) -> list[Answer | None]:
    told: list[Answer | None] = []
    for probs, entropy, mutual in zip(*(column.tolist() for column in found.values()), strict=True):
        if not all(map(math.isfinite, (*probs, entropy, mutual))):
            told.append(None)
            continue
        best = max(range(len(probs)), key=probs.__getitem__)
        shares = {c: round(p, 10) for c, p in zip(classes, probs, strict=True)}
        told.append({
            "label": classes[best], "probs": shares, "entropy": round(entropy, 10),
            "mutual_information": round(mutual, 10),
        })  # fmt: skip
    return told


def _curve(prediction: Any, i: int) -> Answer | None:
    """The density of row `i` along a line that holds nearly all of it; None where it is not finite."""
    logs = isinstance(prediction, LogPrediction)
    mixture = prediction.log if logs else prediction
    outputs, tau = mixture.outputs[:, i : i + 1], mixture.precision.expand_as(mixture.outputs)[:, i : i + 1]

    def repeated(n: int) -> Any:
        same = RegressionPrediction(outputs.expand(-1, n, -1), tau.expand(-1, n, -1), heavy=mixture.heavy)
        return LogPrediction(same) if logs else same

    ends = repeated(1).quantile([_TAIL, 1 - _TAIL]).flatten()
    x = torch.linspace(0, 1, _POINTS, dtype=torch.float64) * (ends[1] - ends[0]) + ends[0]
    density, means = repeated(_POINTS).log_prob(x[:, None]).exp(), repeated(1).outputs.flatten()
    if not all(bool(t.isfinite().all()) for t in (x, density, means)):
        return None
    return {name: [digits(v) for v in t.tolist()] for name, t in (("x", x), ("density", density), ("means", means))}
