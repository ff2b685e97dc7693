"""`TableModel`: a fitted estimator and its card.

The card says what the model takes, how it did on held-out rows, and what is usual.

model = TableModel.load("model")
model.predict(frame)              # a table: mean, std, low, high, ..., unusual
model.frame([{"rooms": 4, "town": "Rome"}])     # rows as JSON has them, as a table
"""

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bbalpha.checkpoint import CorruptModelError, read_folder, write_folder
from bbalpha.checks import check_count, check_inner_share, check_number
from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.estimators.base import load_estimator
from bbalpha.estimators.storing import MOST_PASSES, content_of
from bbalpha.tabular.fields import Field, Task

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Array = NDArray[Any]
CARD = "card.json"
FALSE_ALARM = 0.05
_FORMAT = 1
_ROWS = 4096  # predicted at a time
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


@dataclass(frozen=True)
class Card:
    """What is known of a model beside its weights, as plain values.

    Attributes:
        task: "regression" or "classification".
        target: The name of the target.
        fields: The columns it takes, in their order.
        left_out: Columns of the table that it does not take, and why.
        n_rows: Rows it was trained on.
        n_held_out: Rows that it never saw, on which `scores` were taken.
        split: How these were chosen, in words.
        scores: On held-out rows.
        guess: The same scores of the best guess that looks at no column.
        threshold: Of what is unusual; None where too few rows were held out.
        drivers: By field, how much mixing up the column changes the prediction and the epistemic uncertainty.
        held_out: Targets and predictions of held-out rows, column by column, for pictures.
        candidates: What was tried.
        facts: Seconds, versions, seed, the name of the file.
    """

    task: Task
    target: str
    fields: tuple[Field, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    n_rows: int = 0
    n_held_out: int = 0
    split: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    guess: Mapping[str, float] = field(default_factory=dict)
    threshold: float | None = None
    drivers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    held_out: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    candidates: Sequence[Mapping[str, Any]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"format": _FORMAT, "fields": [f.told() for f in self.fields]}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Card":
        """The card that `told` gave."""
        if told.get("format") != _FORMAT:
            raise ValueError(f"{CARD} must have format {_FORMAT}; got {told.get('format')!r}.")
        values = {name: value for name, value in told.items() if name != "format"}
        card = cls(**{**values, "fields": tuple(Field.of(f) for f in told["fields"])})
        if card.task not in ("regression", "classification") or not isinstance(card.target, str):
            raise ValueError(f"a card must name a task and a target; got {card.task!r:.40} and {card.target!r:.40}")
        if card.threshold is not None:
            check_number("threshold", card.threshold)
        return card


@dataclass(frozen=True)
class TableModel:
    """An estimator with its card.

    Attributes:
        estimator: Fitted.
        card: What is known of it.
    """

    estimator: BBAlphaRegressor | BBAlphaClassifier
    card: Card

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TableModel":
        """The model in a folder of `bbalpha fit`, or of an estimator's `save`."""
        estimator, beside = load_estimator(path), read_folder(path).beside
        file = Path(path) / CARD
        if CARD not in beside:
            if file.exists():
                raise CorruptModelError(f"{str(file)!r} was not written with this model. Fit the model again.")
            return cls(estimator, _bare_card(estimator))
        try:
            card = Card.of(json.loads(beside[CARD]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptModelError(f"{str(file)!r} is damaged: {error}. Fit the model again.") from error
        return cls(estimator, card)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as a folder: safetensors and JSON, no pickle."""
        data = json.dumps(_plain(self.card.told()), indent=1, allow_nan=False).encode()
        write_folder(path, content_of(self.estimator), beside={CARD: data})

    @property
    def task(self) -> Task:
        """What it predicts."""
        return self.card.task

    @property
    def columns(self) -> list[str]:
        """The names of the columns that it takes, in their order."""
        return [f.name for f in self.card.fields]

    @property
    def classes(self) -> list[str]:
        """The classes, as text; none of a regression."""
        return [str(c) for c in self.estimator.classes_] if self.task == "classification" else []

    def asked(self, *, n_passes: int | None = None, seed: int | None = None) -> "TableModel":
        """The same model with so many passes of another seed; this one stays as it is."""
        estimator = copy.copy(self.estimator)
        if n_passes is not None:
            estimator.n_predict_passes = check_count("n_passes", n_passes, least=2, most=MOST_PASSES)
        if seed is not None:
            estimator.seed_ = check_count("seed", seed, least=0)
        return replace(self, estimator=estimator)

    def predict(self, frame: "DataFrame", *, coverage: float = 0.9) -> "DataFrame":
        """What it says of every row, as a table.

        Quantities: mean, std, epistemic_std, aleatoric_std, low, high (of `coverage`), unusual. Classes: label, p_CLASS
        for each, entropy, mutual_information, unusual. A row is unusual if the model is more ignorant of it than of all
        but 5 % of held-out rows, or if it holds what no row had at `fit`.
        """
        import pandas

        check_inner_share("coverage", coverage)
        X = self.table(frame)
        parts = [self._answer(X.iloc[start : start + _ROWS], coverage) for start in range(0, len(X), _ROWS)]
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if self.task == "classification":
            found["label"] = self.estimator.classes_[found["label"]]
        return pandas.DataFrame(found, index=frame.index)

    def _answer(self, X: "DataFrame", coverage: float) -> dict[str, Array]:
        rows = self.given(X)
        new = self.estimator.unseen(rows) > 0
        prediction: Any = self.estimator.predictive(rows)
        if self.task == "classification":
            probs = prediction.probs.numpy()
            found = {"label": probs.argmax(1)} | {f"p_{c}": probs[:, i] for i, c in enumerate(self.classes)}
            found |= {k: getattr(prediction, k).numpy() for k in ("entropy", "mutual_information")}
        else:
            names = ("mean", "std", "epistemic_std", "aleatoric_std")
            low, high = prediction.interval(coverage)
            found = {k: getattr(prediction, k)[:, 0].numpy() for k in names}
            found |= {"low": low[:, 0].numpy(), "high": high[:, 0].numpy()}
        ignorant = np.zeros(len(X), dtype=bool)
        if self.card.threshold is not None:
            ignorant = self.ignorance(found) > self.card.threshold
        return found | {"unusual": ignorant | new}

    def ignorance(self, found: "Mapping[str, Any] | DataFrame") -> Array:
        """By row, what more data of its kind would settle: the epistemic deviation, or the mutual information."""
        return np.asarray(found["mutual_information" if self.task == "classification" else "epistemic_std"])

    def log_prob(self, frame: "DataFrame", y: Array) -> Array:
        """Of each row's target (N,); classes as indices."""
        X = self.table(frame)
        if isinstance(self.estimator, BBAlphaRegressor):
            return self.estimator.log_prob(self.given(X), y)
        rows = range(0, len(X), _ROWS)
        probs = [self.estimator.predict_log_proba(self.given(X.iloc[i : i + _ROWS])) for i in rows]
        found: Array = np.concatenate(probs)[np.arange(len(X)), y]
        return found

    def pit(self, frame: "DataFrame", y: Array) -> Array:
        """The predictive distribution function at the target of each row (N,): uniform where a regression is right."""
        X, parts = self.table(frame), []
        for start in range(0, len(X), _ROWS):
            prediction: Any = self.estimator.predictive(self.given(X.iloc[start : start + _ROWS]))
            target = torch.tensor(y[start : start + _ROWS, None], dtype=prediction.mean.dtype)
            parts.append(prediction.cdf(target)[:, 0].double().numpy())
        return np.concatenate(parts)

    def table(self, frame: "DataFrame") -> "DataFrame":
        """The columns that the model takes, of the kinds that it was fitted on."""
        missing = [name for name in self.columns if name not in frame.columns]
        if missing:
            raise ValueError(f"The table must have the columns of the fit; {_named(missing)} is missing.")
        twice = [name for name in self.columns if (frame.columns == name).sum() > 1]
        if twice:
            raise ValueError(f"The table must have each column once; {_named(twice)} is there twice.")
        X = frame[self.columns]
        return X.assign(**{f.name: _as_kind(X[f.name], f) for f in self.card.fields})

    def frame(self, rows: Sequence[Mapping[str, Any]]) -> "DataFrame":
        """Rows as JSON has them, as a table; null is a missing cell, a name that is left out is an error."""
        import pandas

        known = set(self.columns)
        for i, row in enumerate(rows):
            odd = sorted(set(row) - known) or sorted(known - set(row))
            if odd:
                wrong = (
                    "is no column of the model" if odd[0] not in known else "is missing; give null for an unknown one"
                )
                raise ValueError(f"Row {i}: {odd[0]!r} {wrong}.")
        columns = {f.name: _read_json([row[f.name] for row in rows], f) for f in self.card.fields}
        return pandas.DataFrame(columns, columns=self.columns, index=pandas.RangeIndex(len(rows)))

    def given(self, X: "DataFrame") -> Any:
        """As the estimator was given it: an array where it was fitted on one."""
        if self.estimator.encoder_ is None:
            numbers = X.to_numpy(dtype=np.float64)
            gaps = np.argwhere(~np.isfinite(numbers))
            if len(gaps):
                name = self.columns[gaps[0, 1]]
                raise ValueError(f"Column {name!r} must have no missing or infinite cells: there were none at the fit.")
            return X if hasattr(self.estimator, "feature_names_in_") else numbers
        return X


def _as_kind(column: "Series[Any]", about: Field) -> Any:
    """A column as it was at the fit, where a file has it in another way."""
    import pandas

    if about.kind == "date" and not pandas.api.types.is_datetime64_any_dtype(column):
        try:
            return pandas.to_datetime(column)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"Column {about.name!r} must hold dates; {error}.") from error
    if about.kind in ("number", "span") and column.isna().all():
        return column.astype(float)
    if about.kind == "flag":
        return column.map(lambda cell: _truth(cell, about.name)).astype(object)
    if about.kind == "level" and pandas.api.types.is_numeric_dtype(column):
        return column.astype(object).where(column.notna(), None).map(_text, na_action="ignore")
    return column


def _read_json(cells: list[Any], about: Field) -> Any:
    import pandas

    if about.kind in ("number", "span"):
        for cell in cells:
            if cell is not None and (isinstance(cell, bool) or not isinstance(cell, (int, float))):
                raise ValueError(f"{about.name!r} must be a number or null; got {cell!r:.60}.")
            if cell is not None and not abs(cell) < 1e300:
                raise ValueError(f"{about.name!r} must be a finite number; got {cell!r:.60}.")
        values = [np.nan if cell is None else float(cell) for cell in cells]
        return pandas.Series(values, dtype=float)
    for cell in cells:
        if isinstance(cell, (list, dict)):
            raise ValueError(f"{about.name!r} must be text, a number, a truth value or null; got {cell!r:.60}.")
    if about.kind == "date":
        dates = [None if cell is None else str(cell) for cell in cells]
        return _as_kind(pandas.Series(dates, dtype=object), about)
    texts = [None if cell is None else cell if about.kind == "flag" else _text(cell) for cell in cells]
    return pandas.Series(texts, dtype=object)


def _truth(cell: Any, name: str) -> bool | None:
    if cell is None or cell != cell:
        return None
    text = str(cell).strip().lower().removesuffix(".0")
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(f"Column {name!r} must hold truth values; got {cell!r:.60}.")
    return text in _TRUE


def _text(cell: Any) -> str:
    whole = isinstance(cell, float) and cell.is_integer()
    return str(int(cell)) if whole else str(cell)


def _named(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _bare_card(estimator: Any) -> Card:
    """Of a model that was saved from Python: its columns and their middles."""
    task: Literal["regression", "classification"] = (
        "classification" if isinstance(estimator, BBAlphaClassifier) else "regression"
    )
    if task == "regression" and estimator.y_ndim_ != 1:
        raise ValueError("The model must have one target; it has several.")
    if estimator.encoder_ is None:
        names = getattr(estimator, "feature_names_in_", [f"x{i}" for i in range(estimator.n_features_in_)])
        mean, scale = estimator.x_mean_, estimator.x_scale_
        fields = [
            Field(str(n), "number", float(m - 2 * s), float(m), float(m + 2 * s))
            for n, m, s in zip(names, mean, scale, strict=True)
        ]
    else:
        fields = [_field_of(column) for column in estimator.encoder_.columns]
    return Card(task, "target", tuple(fields))


def _field_of(column: Any) -> Field:
    """What an encoder's column tells of itself."""
    if column.kind == "level":
        levels = (*column.levels, *column.rare)[:50]
        return Field(column.name, "level", centre=levels[0] if levels else None, levels=levels, n_levels=len(levels))
    if column.kind == "date":
        first = np.datetime64(column.start, "us").astype("datetime64[s]")
        middle = first + np.timedelta64(int(column.centre * 86400), "s")
        return Field(column.name, "date", str(first), str(middle), str(middle + (middle - first)))
    return Field(column.name, column.kind, column.centre - 1, column.centre, column.centre + 1)


def _plain(value: Any) -> Any:
    """As JSON may have it: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value
