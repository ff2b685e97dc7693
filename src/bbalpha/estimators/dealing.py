"""Rows dealt into parts that are held out, those that belong together on one side."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MOST_HELD = 4000  # rows that a network holds out, at most: looking at more takes longer than training


def deal(n_rows: int, n_folds: int, seed: int, groups: Array | None = None) -> list[Array]:
    """Held-out rows of each fold; rows of one group are held out together.

    >>> [sorted(f.tolist()) for f in deal(6, 3, 0, np.array([0, 0, 1, 1, 2, 2]))]
    [[4, 5], [0, 1], [2, 3]]
    """
    rng = np.random.default_rng(seed)
    if groups is None:
        parts = np.array_split(rng.permutation(n_rows), n_folds)
    else:
        names, index = np.unique(groups, return_inverse=True)
        place = np.empty(len(names), dtype=int)
        counts, sizes = np.bincount(index), np.zeros(n_folds)
        for g in sorted(rng.permutation(len(names)), key=lambda g: -counts[g]):  # large ones first: folds of like size
            place[g] = sizes.argmin()
            sizes[place[g]] += counts[g]
        parts = [np.flatnonzero(place[index] == f) for f in range(n_folds)]
    return [np.sort(p if len(p) <= MOST_HELD else rng.choice(p, MOST_HELD, replace=False)) for p in parts]


def same_records(*columns: Array) -> Array | None:
    """A number for every row, equal for equal rows (N,); None if all differ, or too few do to hold some out."""
    code = np.zeros(len(columns[0]), dtype=np.uint64)
    for table in columns:
        for column in np.asarray(table).reshape(len(code), -1).T:
            bits = (column.astype(np.float64) + 0.0).view(np.uint64)  # -0.0 is 0.0
            code = _mixed(code ^ _mixed(bits))
    names, index = np.unique(code, return_inverse=True)
    return index if 10 <= len(names) < len(code) else None


def _mixed(bits: Array) -> Array:
    """64 bits of which each hangs on all of those given."""
    with np.errstate(over="ignore"):
        bits = (bits ^ (bits >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
        found: Array = (bits ^ (bits >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(1)
    return found
