"""`fit_table`: from a table to a model.

Rows are held out that say how good it is, and what is usual:

model = fit_table(read_table("houses.csv"), "price")
print(model.card.scores)
model.save("model")
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning

from bbalpha import metrics
from bbalpha.checkpoint import versions
from bbalpha.checks import check_count, check_flag, check_number, check_settings, check_share
from bbalpha.detection import conformal_threshold
from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.estimators.cells import read, text
from bbalpha.tabular.fields import Task, describe, guess_task, usable
from bbalpha.tabular.model import FALSE_ALARM, Card, TableModel

if TYPE_CHECKING:
    from pandas import DataFrame

Array = NDArray[Any]
_BLOCKS = 20  # of time, within which rows are held out together
_SHOWN = 2000  # held-out rows that a card keeps
_MIXED = 200  # rows in which columns are mixed up, to see what they do


def fit_table(
    frame: "DataFrame",
    target: str,
    *,
    task: Literal["auto", "regression", "classification"] = "auto",
    alpha: float | Literal["auto"] = 0.5,
    budget: float | Literal["quick", "standard", "thorough"] = "standard",
    held_out: float = 0.1,
    group: str | None = None,
    time_column: str | None = None,
    leave_out: Sequence[str] = (),
    seed: int = 0,
    verbose: bool = False,
    source: str = "",
) -> TableModel:
    """A model of the `target` column, and its card.

    Args:
        frame: The table; rows without a target are left out.
        target: The name of the column to predict.
        task: "auto" takes text, truth values and two different numbers for classes.
        alpha: As in the estimators.
        budget: As in the estimators.
        held_out: The share of rows that the model never sees: they say how good it is and what is unusual.
        group: A column whose equal rows belong together: they are held out together. It is not used to predict.
        time_column: A column of dates or numbers: the last rows by it are held out. It is used to predict, too.
        leave_out: Columns not to be used.
        seed: Of everything.
        verbose: Tell what is being tried.
        source: The name of the file, for the card.
    """
    start = time.perf_counter()
    _check(frame, target, alpha, budget, seed, verbose)
    frame, y, task = with_target(frame, target, task)
    names = [target, *leave_out] + ([group] if group else [])
    odd = [name for name in (*names, *([time_column] if time_column else [])) if name not in frame.columns]
    if odd:
        raise ValueError(f"The table has no column {odd[0]!r}; it has {', '.join(map(str, frame.columns[:20]))}.")
    if target in (group, time_column, *leave_out):
        raise ValueError(f"The target {target!r} must not be the group, the time or left out: it is to be predicted.")
    columns, why = usable(frame, names)
    if not columns:
        raise ValueError(f"The table must have a column to predict {target!r} from; it has none that can be used.")
    inside, outside, split, groups = _split(frame, check_share("held_out", held_out), group, time_column, seed)
    settings: dict[str, Any] = {"alpha": alpha, "budget": budget, "random_state": seed, "verbose": verbose}
    estimator = (BBAlphaRegressor if task == "regression" else BBAlphaClassifier)(**settings)
    X = frame[columns]
    with warnings.catch_warnings(record=True) as caught:  # they go on the card, where everybody sees them
        warnings.simplefilter("always", ConvergenceWarning)
        estimator.fit(X.iloc[inside], y[inside], groups=None if groups is None else groups[inside])
    fields = tuple(describe(X[name].iloc[inside], name) for name in columns)
    facts: dict[str, Any] = {
        "file": source,
        "seed": seed,
        "seconds": time.perf_counter() - start,
        "versions": versions(),
    }
    facts["warnings"] = [str(w.message) for w in caught if issubclass(w.category, ConvergenceWarning)]
    left_out = dict.fromkeys(leave_out, "asked for") | ({group: "groups"} if group else {}) | why
    card = Card(
        task, target, fields, left_out, len(inside), len(outside), split,
        candidates=tuple(sorted(estimator.trials_, key=lambda t: -t["weight"])), facts=facts,
    )  # fmt: skip
    model = TableModel(estimator, card)
    return model if not len(outside) else _judged(model, frame.iloc[outside], y[outside], y[inside])


def evaluate(model: TableModel, frame: "DataFrame") -> dict[str, float]:
    """How good a model is on the rows of a table that have a target, which it must not have seen."""
    frame, y, _ = with_target(frame, model.card.target, model.task)
    return scores(model, frame, indices(model, y) if model.task == "classification" else y)


def scores(model: TableModel, frame: "DataFrame", y: Array) -> dict[str, float]:
    """NLL and what else is asked of a distribution; `y` are numbers, or indices of classes."""
    found, target = model.predict(frame), torch.as_tensor(y)
    nll = -float(model.log_prob(frame, y).mean())
    if model.task == "classification":
        probs = torch.tensor(found[[f"p_{c}" for c in model.classes]].to_numpy())
        return {
            "n_rows": float(len(y)), "nll": nll, "accuracy": float(metrics.accuracy(probs, target)),
            "brier": float(metrics.brier(probs, target)), "ece": float(metrics.ece(probs, target)),
            "unusual": float(found["unusual"].mean()),
        }  # fmt: skip
    error = found["mean"].to_numpy() - y
    low, high = found["low"].to_numpy(), found["high"].to_numpy()
    explained = {"r2": float(1 - (error**2).mean() / y.var())} if y.min() < y.max() else {}
    return {
        "n_rows": float(len(y)), "nll": nll, "rmse": float(np.sqrt((error**2).mean())), "mae": float(abs(error).mean()),
        **explained, "coverage90": float(((low <= y) & (y <= high)).mean()), "width90": float((high - low).mean()),
        "unusual": float(found["unusual"].mean()),
    }  # fmt: skip


# ------------------------------------------------------------------------------ helpers


def _check(frame: Any, target: Any, alpha: Any, budget: Any, seed: Any, verbose: Any) -> None:
    """What the estimator would say only after a look at all the rows."""
    if not hasattr(frame, "columns"):
        raise TypeError(f"`frame` must be a pandas.DataFrame; got {type(frame).__name__}.")
    if not isinstance(target, str):
        raise TypeError(f"`target` must be the name of a column; got {target!r}.")
    if alpha != "auto":
        check_number("alpha", alpha)
    check_settings({"budget": budget})
    check_count("seed", seed, least=0, most=2**32 - 1)
    check_flag("verbose", verbose)


def with_target(frame: "DataFrame", target: str, task: str) -> tuple["DataFrame", Array, Task]:
    """The rows that have a target, these targets (numbers, or classes as text), and the task."""
    if target not in frame.columns:
        raise ValueError(f"The table has no column {target!r}; it has {', '.join(map(str, frame.columns[:20]))}.")
    frame = frame[frame[target].notna()]
    if len(frame) < 2:
        raise ValueError(f"At least 2 rows must have a {target!r}; {len(frame)} have.")
    found: Task = guess_task(frame[target]) if task == "auto" else task  # type: ignore[assignment]
    cells = read(frame[target], target)
    if found == "regression":
        if cells.kind not in ("number", "span"):
            raise ValueError(f"The target {target!r} must hold numbers for a regression; it holds text.")
        return frame, cells.values.astype(np.float64), found
    as_text = _label if cells.kind in ("number", "flag") else text
    return frame, np.array([as_text(v) for v in frame[target]], dtype=object).astype(str), found


def _label(value: Any) -> str:
    whole = isinstance(value, (float, np.floating)) and float(value).is_integer()
    return str(int(value)) if whole else str(value)


def _split(
    frame: "DataFrame", share: float, group: str | None, time_column: str | None, seed: int
) -> tuple[Array, Array, str, Array | None]:
    """Rows to train on, rows held out, how in words, and what is held out together within the training rows."""
    n, rng = len(frame), np.random.default_rng(seed)
    if group and time_column:
        raise ValueError("Rows can be held out by group or by time, not by both; leave one out.")
    if group:
        import pandas

        code = pandas.factorize(frame[group], use_na_sentinel=False)[0]
        order = rng.permutation(code.max() + 1)
        counts = np.bincount(code)[order].cumsum()
        chosen = order[: min(int(np.searchsorted(counts, share * n)) + 1, len(order) - 1)] if share else order[:0]
        out = np.isin(code, chosen)
        words = f"{len(chosen)} of {len(order)} groups of {group!r}, chosen at random"
        return np.flatnonzero(~out), np.flatnonzero(out), words, code
    if time_column:
        when = read(frame[time_column], time_column)
        if when.kind not in ("date", "number", "span") or when.missing.any():
            raise ValueError(f"The time column {time_column!r} must hold dates or numbers, none of them missing.")
        order = np.argsort(when.values, kind="stable")
        blocks = np.empty(n, dtype=int)
        blocks[order] = np.arange(n) * _BLOCKS // n
        cut = n - round(share * n)
        return np.sort(order[:cut]), np.sort(order[cut:]), f"the last by {time_column!r}", blocks
    order = rng.permutation(n)
    held = round(share * n)
    return np.sort(order[held:]), np.sort(order[:held]), "chosen at random", None


def _judged(model: TableModel, frame: "DataFrame", y: Array, seen: Array) -> TableModel:
    """The model, with what held-out rows say of it on its card."""
    if model.task == "classification":
        known = np.isin(y, model.estimator.classes_.astype(str))  # a class may have no row left to train on
        frame, y = frame[known], y[known]
        if not len(y):
            return model
    target = indices(model, y) if model.task == "classification" else y
    found = model.predict(frame)
    ignorance = torch.as_tensor(model.ignorance(found).astype(np.float64))
    enough = len(y) + 1 >= 1 / FALSE_ALARM
    threshold = conformal_threshold(ignorance, FALSE_ALARM) if enough else None
    model = replace(model, card=replace(model.card, threshold=threshold))
    found = model.predict(frame)
    shown = found.iloc[:_SHOWN].assign(target=y[:_SHOWN])
    if model.task == "regression":
        shown["pit"] = model.pit(frame.iloc[:_SHOWN], y[:_SHOWN])
    card = replace(
        model.card, scores=scores(model, frame, target), guess=_guess(model, target, seen),
        drivers=_drivers(model, frame.iloc[:_MIXED]), held_out={str(k): v.tolist() for k, v in shown.items()},
    )  # fmt: skip
    return replace(model, card=card)


def _guess(model: TableModel, y: Array, seen: Array) -> Mapping[str, float]:
    """Scores of the mean and deviation of the training targets, or of the shares of classes."""
    if model.task == "classification":
        counts = np.bincount(indices(model, seen), minlength=len(model.classes))
        probs = counts / counts.sum()
        return {"nll": float(-np.log(probs[y]).mean()), "accuracy": float((y == probs.argmax()).mean())}
    mean, std = float(seen.mean()), float(max(seen.std(), 1e-12))
    nll = 0.5 * ((y - mean) / std) ** 2 + np.log(std) + 0.5 * np.log(2 * np.pi)
    return {"nll": float(nll.mean()), "rmse": float(np.sqrt(((y - mean) ** 2).mean()))}


def _drivers(model: TableModel, frame: "DataFrame") -> dict[str, dict[str, float]]:
    """By column: how far its mixing up moves the prediction, and how much it changes what the model is ignorant of."""
    rng, before = np.random.default_rng(0), model.predict(frame)
    moved = [f"p_{c}" for c in model.classes] or ["mean"]
    found = {}
    for name in model.columns:
        mixed = frame.assign(**{name: frame[name].to_numpy()[rng.permutation(len(frame))]})
        after = model.predict(mixed)
        change = abs(after[moved].to_numpy() - before[moved].to_numpy()).sum(1).mean()
        doubt = abs(model.ignorance(after) - model.ignorance(before)).mean()
        found[name] = {"prediction": float(change), "ignorance": float(doubt)}
    return found


def indices(model: TableModel, y: Array) -> Array:
    """Classes as indices; one that the model does not know is an error."""
    place = {c: i for i, c in enumerate(model.classes)}
    odd = [c for c in y if c not in place]
    if odd:
        raise ValueError(f"The class {odd[0]!r} of {model.card.target!r} was not there at the fit.")
    return np.array([place[c] for c in y], dtype=np.int64)
