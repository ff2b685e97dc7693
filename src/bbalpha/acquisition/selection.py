"""What was chosen: rows in the order they were picked, and what they score; the plain ways to choose.

top(bald(probs), 10).indices                                # the ten best rows, each taken by itself
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bbalpha.checks import check_count, check_real, check_seed

_HAIR = 0.01  # of the bound: what is left to be told by further picks is below the error of K passes


@dataclass(frozen=True, eq=False)
class Selection:
    """Rows that were chosen from a pool.

    Attributes:
        indices: Their numbers, in the order they were picked (B,).
        scores: What the picks score: where picks count together, all up to this one, else each by itself (B,).
        bound: What no score can exceed: log K, for information about which of K functions is right; None has none.
    """

    indices: Tensor
    scores: Tensor
    bound: float | None = None

    @property
    def decided(self) -> int:
        """How many picks it takes to come within 1 % of the bound; picks after them are decided by noise."""
        if self.bound is None:
            return len(self.scores)
        below = self.scores < (1 - _HAIR) * self.bound
        return min(int(below.sum()) + 1, len(self.scores))


def top(scores: Tensor, size: int) -> Selection:
    """The rows that score highest, each by itself; of equal ones the first: (N,) -> (size,).

    Near copies of one good row all score high, and all are taken: `batch_bald` knows better.

    >>> top(torch.tensor([0.1, 0.9, 0.5]), 2).indices
    tensor([1, 2])
    """
    check_scores(scores)
    size = check_size(size, len(scores))
    best = scores.argsort(descending=True, stable=True)[:size]
    return Selection(best, scores[best])


def random(n_rows: int, size: int, *, seed: int | None = None) -> Selection:
    """Rows by chance, each at most once: what every other choice has to beat.

    Args:
        n_rows: N, in the pool.
        size: How many to choose.
        seed: None draws from torch's global generator; an int leaves it untouched.

    >>> random(100, 3, seed=0).indices.shape
    torch.Size([3])
    """
    n_rows = check_count("n_rows", n_rows)
    size = check_size(size, n_rows)
    chosen = torch.randperm(n_rows, generator=new_generator(seed))[:size]
    return Selection(chosen, torch.zeros(size))


# ------------------------------------------------------------------------------


def check_scores(scores: Tensor) -> None:
    """Refuse what is not one number a row."""
    check_real("scores", scores)
    if scores.ndim != 1 or not len(scores) or bool(scores.isnan().any()):
        shape = tuple(scores.shape)
        raise ValueError(f"`scores` must have one number a row, (N,), none of them nan; got shape {shape}.")


def check_size(size: int, n_rows: int) -> int:
    """How many to choose, if the pool has as many."""
    size = check_count("size", size)
    if size > n_rows:
        raise ValueError(f"`size` must be at most the {n_rows} rows of the pool; got {size}.")
    return size


def new_generator(seed: int | None) -> torch.Generator | None:
    """A generator of its own for a seed; None is torch's global one."""
    check_seed(seed)
    return None if seed is None else torch.Generator().manual_seed(seed)
