"""Labels asked for in rounds: train on what is labelled, choose what to ask for next, ask, and again.

    found = learn(pool, ask_a_person, fit=train, n_labels=200, state="asked")
    found.rows, found.labels, [(r.n_labels, r.score) for r in found.rounds]

Which rows are asked for follows from the pool, `fit`, the labels and the seed: each round's training and passes draw
from a seed of their own. A loop that was killed goes on from its folder to the same choices, and no label is asked for
twice.

This stands on the floor of choosing, not on that of training: `fit` is the caller's, so nothing here knows how a model
is trained.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bbalpha._engine.batches import progress_bar
from bbalpha._files import FolderInUseError, Lock, Restoring
from bbalpha._kernels import step_seed
from bbalpha.acquisition.batch import batch_bald
from bbalpha.acquisition.labels import LabelFile
from bbalpha.acquisition.selection import Selection, random
from bbalpha.checkpoint import newest_state, write_state
from bbalpha.checks import check_count, check_number
from bbalpha.joint import Functions

_KIND = "active learning"
Choose = Callable[..., Selection]  # (probs of K passes (K, N, C), size, seed=int) -> places among the N rows


@dataclass(frozen=True)
class Round:
    """One training, and the choice that followed.

    Attributes:
        n_labels: How many rows it was trained on.
        score: What `score` said of the model; None where nobody asked.
        fit_seconds: Time of the training.
        choose_seconds: Time it took to choose; 0 of the last round.
    """

    n_labels: int
    score: float | None
    fit_seconds: float
    choose_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Learnt:
    """What `learn` found.

    Attributes:
        rows: Rows of the pool that are labelled, in the order they were asked for.
        labels: Their labels, in this order.
        rounds: How it went, a round each.
        model: That of the last round; None where the folder said that nothing was left to do.
    """

    rows: list[int]
    labels: list[Any]
    rounds: list[Round]
    model: Any


def learn(
    pool: Any,
    labels: Any,
    *,
    fit: Callable[[Any, Any], Any],
    n_labels: int,
    start: int | Sequence[int] = 20,
    size: int = 10,
    choose: Choose = batch_bald,
    n_passes: int = 100,
    score: Callable[[Any], float] | None = None,
    target: float | None = None,
    callback: Callable[[Round], object] | None = None,
    state: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Learnt:
    """Ask for the labels of the rows that tell most, a few at a time, until `n_labels` are known.

    Args:
        pool: All rows, (N, ...): a tensor, an array or a DataFrame.
        labels: Labels of all rows; a function of a list of rows that gives theirs; or the path of a CSV file with the
            columns `row` and `label` (see `LabelFile`).
        fit: (rows of the pool, their labels) -> a fresh model trained on them: a torch module that gives logits, an
            estimator with `predict_passes` like ours, or a function x -> class probabilities of K passes (K, N, C).
            torch's global generator is seeded for each round.
        n_labels: How many labels to end with, those of the start counted. A finished loop goes on with more.
        start: Rows that are labelled first, or how many drawn by chance.
        size: Rows a round.
        choose: How rows are chosen: `batch_bald`, which does not ask for the same thing twice; `power_bald`; or any
            (probs, size, seed=) -> Selection. Of a torch module, probs are computed when read: ``probs[:, rows]``.
        n_passes: K, of a torch module. A batch can tell no more than log K.
        score: What a model is worth, on rows of which none is in the pool.
        target: A score at which to stop.
        callback: Told of every round, before its rows are chosen.
        state: A folder from which a loop that was cut off goes on; one of another loop is refused.
        seed: Of the start, of training and of the choices.
        progress: True or False; None shows a bar on a terminal when it takes more than a few seconds.

    >>> x = torch.cat((torch.randn(50, 2) - 2, torch.randn(50, 2) + 2))
    >>> net = lambda x, y: nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2))     # train it on x and y
    >>> found = learn(x, torch.arange(100) // 50, fit=net, n_labels=12, start=4, size=4)
    >>> len(set(found.rows)), [round.n_labels for round in found.rounds]
    (12, [4, 8, 12])
    """
    loop = _Loop(pool, _asking(labels, len(pool)), fit, choose, score, check_count("n_passes", n_passes, 2), seed)
    first = _first(start, len(pool), seed)
    size, n_labels = check_count("size", size), check_count("n_labels", n_labels, len(first), len(pool))
    target = None if target is None else check_number("target", target)
    settings = {
        "n_rows": len(pool), "pool": _mark(pool), "start": first, "size": size, "n_passes": n_passes, "seed": seed,
        "choose": _name(choose), "fit": _name(fit),
    }  # fmt: skip
    folder = None if state is None else Path(state)
    with _alone(folder):
        known = _Known(folder, settings)
        with progress_bar(n_labels, progress, desc="ask", unit="label") as bar:
            bar.update(len(known.rows))
            model = None
            known.ask(loop.ask, first if not known.rows else [])
            while known.waiting or not known.ends(n_labels, target):
                if not known.waiting:
                    model = loop.round(known, callback)
                    left = n_labels - len(known.rows)
                    if known.ends(n_labels, target):
                        known.save()
                        break
                    loop.choose_from(known, model, min(size, left))
                before = len(known.rows)
                known.ask(loop.ask, known.waiting)
                bar.update(len(known.rows) - before)
    return Learnt(known.rows, known.labels, known.rounds, model)


# ------------------------------------------------------------------------------ a round


@dataclass(frozen=True, eq=False)
class _Loop:
    """What a round is made of."""

    pool: Any
    ask: Callable[[list[int]], list[Any]]
    fit: Callable[[Any, Any], Any]
    choose: Choose
    score: Callable[[Any], float] | None
    n_passes: int
    seed: int

    def round(self, known: "_Known", callback: Callable[[Round], object] | None) -> Any:
        """The model of what is known; the round is noted, once."""
        start = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed(known) % 2**63)
            model = self.fit(taken(self.pool, known.rows), _as_target(known.labels))
            spent = time.perf_counter() - start
            found = None if self.score is None else float(self.score(model))
        if not known.rounds or known.rounds[-1].n_labels != len(known.rows):
            known.rounds.append(Round(len(known.rows), found, spent))
            if callback is not None:
                callback(known.rounds[-1])
        return model

    def choose_from(self, known: "_Known", model: Any, size: int) -> None:
        """Note the rows to be asked for, on the disk before anybody is."""
        start, labelled = time.perf_counter(), set(known.rows)
        left = [row for row in range(len(self.pool)) if row not in labelled]
        seed = self._seed(known)
        chosen = self.choose(self._probs(model, left, seed), size, seed=seed % 2**63)
        known.waiting = [left[place] for place in chosen.indices.tolist()]
        last = known.rounds[-1]
        spent = time.perf_counter() - start
        known.rounds[-1] = Round(last.n_labels, last.score, last.fit_seconds, spent)
        known.save()

    def _probs(self, model: Any, left: list[int], seed: int) -> Any:
        if isinstance(model, nn.Module):  # computed as it is read: nothing is copied
            pool = self.pool if isinstance(self.pool, Tensor) else torch.as_tensor(np.asarray(self.pool))
            probs = Functions(model, self.n_passes, seed=seed).probs(pool)
            return _Part(probs, torch.tensor(left))
        x = taken(self.pool, left)
        if callable(getattr(model, "predict_passes", None)):
            return torch.as_tensor(model.predict_passes(x))
        if callable(model):
            return model(x)
        raise TypeError(
            "`fit` must return a torch module, an estimator with `predict_passes`, or a function that gives class "
            f"probabilities (K, N, C); got {type(model).__name__}."
        )

    def _seed(self, known: "_Known") -> int:
        return step_seed(self.seed, len(known.rows))


@dataclass(frozen=True, eq=False)
class _Part:
    """Some rows of a pool of probabilities, read as the pool is: ``part[:, rows]``."""

    probs: Any
    rows: Tensor

    @property
    def shape(self) -> torch.Size:
        """(K, N, C)."""
        n_passes, _, n_classes = self.probs.shape
        return torch.Size((n_passes, len(self.rows), n_classes))

    def __getitem__(self, key: tuple[slice, slice | Tensor]) -> Any:
        return self.probs[key[0], self.rows[key[1]]]


class _Known:
    """What is labelled, what is asked for, and how it went; kept in a folder, if there is one."""

    def __init__(self, folder: Path | None, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        content = newest_state(folder) if folder is not None and folder.exists() else None
        if content is not None:
            _check_same(content, settings, folder)
        content = content or {}
        self.rows: list[int] = content.get("rows", [])
        self.labels: list[Any] = content.get("labels", [])
        self.waiting: list[int] = content.get("waiting", [])
        self.rounds = [Round(**told) for told in content.get("rounds", [])]
        self.steps: int = content.get("steps", 0)

    def ask(self, ask: Callable[[list[int]], list[Any]], rows: list[int]) -> None:
        """Get the labels of these rows."""
        if rows:
            self.labels = [*self.labels, *ask(rows)]
            self.rows, self.waiting = [*self.rows, *rows], []
            self.save()

    def ends(self, n_labels: int, target: float | None) -> bool:
        """Whether the last round is one to stop at."""
        if not self.rounds or self.rounds[-1].n_labels != len(self.rows):
            return False
        score = self.rounds[-1].score
        return len(self.rows) >= n_labels or (target is not None and score is not None and score >= target)

    def save(self) -> None:
        """Write it all, the state before is kept too."""
        if self.folder is None:
            return
        self.steps += 1
        content = {name: getattr(self, name) for name in ("settings", "rows", "labels", "waiting", "steps")}
        rounds = [asdict(r) for r in self.rounds]
        write_state(self.folder, self.steps, {"kind": _KIND, **content, "rounds": rounds})


# ------------------------------------------------------------------------------ helpers


def taken(pool: Any, rows: Sequence[int]) -> Any:
    """Rows of a tensor, an array or a DataFrame."""
    if isinstance(pool, Tensor):
        return pool[torch.as_tensor(rows, dtype=torch.long)]
    return pool.iloc[list(rows)] if hasattr(pool, "iloc") else np.asarray(pool)[list(rows)]


def _asking(labels: Any, n_rows: int) -> Callable[[list[int]], list[Any]]:
    """(rows) -> labels, from whatever the caller has them in."""
    if isinstance(labels, (str, os.PathLike)):
        labels = LabelFile(labels)
    if not callable(labels):
        table = labels if isinstance(labels, Tensor) else np.asarray(labels)
        if table.ndim != 1 or len(table) != n_rows:
            raise ValueError(f"`labels` must hold one for each of the {n_rows} rows; got shape {tuple(table.shape)}.")
        return lambda rows: list(taken(table, rows).tolist())

    def ask(rows: list[int]) -> list[Any]:
        found = labels(rows)
        found = found.tolist() if hasattr(found, "tolist") else list(found)
        found = [label.item() if hasattr(label, "item") else label for label in found]
        if len(found) != len(rows):
            raise ValueError(f"`labels` must give one label for each of {len(rows)} rows; got {len(found)}.")
        return found

    return ask


def _first(start: int | Sequence[int], n_rows: int, seed: int) -> list[int]:
    if isinstance(start, (int, np.integer)):
        return random(n_rows, check_count("start", start, 1, n_rows), seed=seed).indices.tolist()
    rows = [int(row) for row in start]
    if not rows or len(set(rows)) != len(rows) or min(rows) < 0 or max(rows) >= n_rows:
        raise ValueError(f"`start` must name rows of the pool, each once, from 0 to {n_rows - 1}; got {rows[:20]}.")
    return rows


def _as_target(labels: list[Any]) -> Any:
    return torch.tensor(labels) if all(isinstance(label, int) for label in labels) else np.asarray(labels)


def _mark(pool: Any) -> str:
    """What tells one pool from another: its first and last rows, and some between."""
    some = taken(pool, sorted({round(i * (len(pool) - 1) / 31) for i in range(32)}))
    values = some.to_csv() if hasattr(some, "to_csv") else str(np.asarray(some, dtype=object).tolist())
    return hashlib.sha256(values.encode()).hexdigest()[:16]


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _check_same(content: dict[str, Any], settings: dict[str, Any], folder: Path | None) -> None:
    if content.get("kind") != _KIND:
        raise ValueError(f"`state` must be new or hold a loop of `learn`; {str(folder)!r} holds something else.")
    other = [name for name, value in settings.items() if content["settings"].get(name) != value]
    if other:
        raise ValueError(
            f"`state` must be new or hold the same loop; {str(folder)!r} holds one with another "
            f"{' and another '.join(f'`{name}`' for name in other)}. Choose another folder, or delete it."
        )


@contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """A context in which nobody else goes on with the loop of a folder."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder / "loop")
    with Restoring(lock.release), Restoring(lock.release):
        if not lock.acquire():
            raise FolderInUseError(f"{str(folder)!r} is in use: another loop goes on there.")
        yield
