"""Parts of a mixture: their weights, what is dealt by them, and what held-out scores promise of new ones."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def stacked(values: Array, weight: Array | None = None, *, prior: float = 10.0, least: float = 0.02) -> Array:
    """The weights of a mixture under which its rows are likeliest, by EM; those below `least` are left out.

    Few rows tell little about which part is best, and each part has stopped where these very rows liked it most. So the
    weights begin even, and the rows must speak against that.

    Args:
        values: Log-densities of the rows under each part (C, N).
        weight: Of the rows (N,).
        prior: So many rows more, which say that all parts with a density everywhere are alike.
        least: The smallest weight that is kept, of what the rows themselves say.

    >>> few = np.log([[0.9, 0.8, 0.1], [0.1, 0.2, 0.9], [0.1, 0.1, 0.1]])
    >>> stacked(few, prior=0).round(2), stacked(few).round(2), stacked(few.repeat(100, 1)).round(2)
    (array([0.68, 0.32, 0.  ]), array([0.39, 0.34, 0.27]), array([0.67, 0.33, 0.  ]))
    """
    sound = np.isfinite(values).all(1)
    values = np.where(np.isfinite(values), values, -1e300)
    parts = np.exp(np.clip(values - values.max(0), -700, 0))  # (C, N)
    share = np.ones(values.shape[1]) if weight is None else weight
    believed = prior / (prior + values.shape[1])
    share = share / share.sum() * (1 - believed)
    even = sound / sound.sum() if sound.any() else np.full(len(parts), 1 / len(parts))
    weights = even
    for _ in range(300):
        joint = weights[:, None] * parts
        weights = (joint / joint.sum(0) * share).sum(1) + believed * even
    weights[weights - believed * even < least * (1 - believed)] = 0.0
    found: Array = weights / weights.sum()
    return found


def in_shares(total: int, shares: Array) -> list[int]:
    """`total` things dealt by shares that sum to 1, the rounding by largest remainders.

    >>> in_shares(10, np.array([0.5, 0.44, 0.03, 0.03]))
    [5, 5, 0, 0]
    """
    wanted = total * shares
    counts = np.floor(wanted + 1e-9).astype(int)
    counts[np.argsort(counts - wanted, kind="stable")[: total - counts.sum()]] += 1
    found: list[int] = counts.tolist()
    return found


def conformal_level(scores: Array, coverage: float) -> Array:
    """What the score of a new row stays below with frequency `coverage`, by those of n rows (n, D) -> (D,).

    >>> conformal_level(np.arange(1.0, 10.0)[:, None], 0.8), conformal_level(np.ones((5, 1)), 0.9)
    (array([8.]), array([inf]))
    """
    rank = int(np.ceil((len(scores) + 1) * coverage - 1e-9))
    if rank > len(scores):
        return np.full(scores.shape[1], np.inf)
    found: Array = np.sort(scores, axis=0)[rank - 1]
    return found
