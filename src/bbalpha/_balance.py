"""Balanced masks: of the K passes of a call each unit is dropped in exactly pK, rounded up or down at random.

By chance alone a unit is dropped in 2 of 10 passes here and in 8 of 10 there, and that is the whole first-order part
of the Monte Carlo error. Here the K masks of a unit are drawn together: 16 random bits pick one of 65,536 patterns,
rows of K bits with pK drops each. Every column of that table has the same number of drops, so each pass alone is plain
dropout; units, rows and sites draw by themselves, so the order of the passes differs from unit to unit.

    table = patterns(10, 0.5)                                   # made once for (K, rate), in a few milliseconds
    table.fill(out, words, first=0)                             # (10, units) int8, positive where a unit is kept
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIZE = 2**16  # patterns of a table: 16 random bits pick one
PER_WORD = 4  # units that 64 random bits are enough for
LARGEST = 128  # passes that are balanced together
LEAST_RATE = 2**-10  # a table is too coarse for smaller rates, and for those as near to 1
_BITS = 7  # passes in a byte, whose sign is left alone: what is kept is positive
_BLOCK = 2**16  # units looked up at a time: what is in between stays in the cache

Planes = dict[int, Tensor]  # what was looked up, by plane


@dataclass(frozen=True, eq=False)
class Patterns:
    """The patterns of K passes at one rate.

    Attributes:
        planes: Bit k % 7 of planes[k // 7][i] says whether pattern i keeps a unit in pass k; ceil(K / 7) of (2^16,).
        powers: 1, 2, 4, ... (7, 1) int8.
        scale: One over the share of units that every pass keeps.
    """

    planes: tuple[Tensor, ...]
    powers: Tensor
    scale: float

    def fill(self, out: Tensor, words: Tensor, *, first: int, seen: Planes | None = None) -> None:
        """Write what is positive where a unit is kept to `out` (..., count, units), for the passes from `first` on.

        Args:
            out: The masks, int8.
            words: Random 64-bit words, one for every 4 units (..., units / 4).
            first: The first of the passes.
            seen: Keeps the plane that was looked up last for the next call with the same words.
        """
        units = out.shape[-1]
        if seen is not None or units <= _BLOCK or out.ndim > 2:
            self._fill(out, words, first, seen)
            return
        for start in range(0, units, _BLOCK):
            part = slice(start, min(units, start + _BLOCK))
            self._fill(out[:, part], words[start // PER_WORD : part.stop // PER_WORD], first, None)

    def _fill(self, out: Tensor, words: Tensor, first: int, seen: Planes | None) -> None:
        last, index = first + out.shape[-2], None
        for plane in range(first // _BITS, (last - 1) // _BITS + 1):
            kept = None if seen is None else seen.get(plane)
            if kept is None:
                if index is None:
                    index = words.view(torch.int16).to(torch.int32).add_(SIZE // 2)
                kept = self.planes[plane].index_select(0, index.view(-1)).view(*index.shape[:-1], 1, -1)
                if seen is not None:
                    seen.clear()  # passes come one after the other
                    seen[plane] = kept
            start, stop = max(first, plane * _BITS), min(last, (plane + 1) * _BITS)
            bits = self.powers[start - plane * _BITS : stop - plane * _BITS]
            torch.bitwise_and(kept, bits, out=out[..., start - first : stop - first, :])


@lru_cache(maxsize=64)
def patterns(n_passes: int, rate: float, device: torch.device | None = None) -> Patterns:
    """The table of patterns of `n_passes` (at most 128) that drop at `rate`, to 2^-17; always the same one.

    >>> table = patterns(10, 0.25)
    >>> len(table.planes), table.planes[0].shape, round(table.scale, 4)
    (2, torch.Size([65536]), 1.3333)
    """
    drops = round(rate * SIZE)  # of every pass, over all patterns
    planes = tuple(torch.from_numpy(p).to(device or "cpu") for p in _planes(n_passes, drops))
    powers = torch.tensor([[1 << bit] for bit in range(_BITS)], dtype=torch.int8, device=device)
    return Patterns(planes, powers, SIZE / (SIZE - drops))


@lru_cache(maxsize=256)
def group_sizes(n_passes: int, rate: float) -> tuple[int, ...]:
    """The passes that are balanced together: groups as large as may be, of sizes that drop whole numbers if there are.

    >>> group_sizes(10, 0.5), group_sizes(100, 0.05), group_sizes(300, 0.05)
    ((10,), (100,), (120, 120, 60))
    """
    if n_passes <= LARGEST:
        return (n_passes,)
    sizes = range(LARGEST, LARGEST // 2, -1)
    size = min(sizes, key=lambda s: (round(abs(rate * s - round(rate * s)), 6), -s))
    whole, left = divmod(n_passes, size)
    return (size,) * whole + ((left,) if left else ())


def is_balanced(n_passes: int, rate: float) -> bool:
    """Whether so many passes at this rate can be balanced: a single one has nothing to balance.

    >>> is_balanced(10, 0.5), is_balanced(1, 0.5), is_balanced(10, 1e-6)
    (True, False, False)
    """
    return n_passes > 1 and LEAST_RATE <= rate <= 1 - LEAST_RATE


def _planes(K: int, drops: int) -> list[NDArray[np.int8]]:
    """The table, 7 passes a plane: rows that drop drops * K / 2^16 passes, rounded down or up, and equal columns.

    Random patterns, each with its K rotations: a pattern and its rotations drop equally often in every pass. The few
    rows that are left over, less than 2 K, each begin where the last has stopped. The rows come in random order.
    """
    random = np.random.RandomState([K, drops])  # whose numbers are the same in every version of numpy
    few, more = divmod(drops * K, SIZE)  # drops of a row, and how many rows have one more
    n_starts = SIZE // K - 1
    longer = min(more // K, n_starts)
    numbers = few + (np.arange(n_starts) < longer)
    starts = random.random_sample((n_starts, K)).argsort(1).argsort(1) >= numbers[:, None]  # what is kept (n, K)
    left = SIZE - n_starts * K
    arcs = few + (np.arange(left) < more - longer * K)
    since = (np.arange(K) - (np.cumsum(arcs) - arcs)[:, None]) % K  # passes since the arc began (left, K)
    windows = _windows(np.concatenate([starts, since >= arcs[:, None]])).ravel()
    turn, row = np.divmod(random.permutation(SIZE), n_starts)
    over = turn >= K  # those that are left are not turned
    row[over] += (turn[over] - K + 1) * n_starts
    turn[over] = 0
    at = row * K - turn
    return [windows.take(at + np.where(turn > first, first + K, first)) for first in range(0, K, _BITS)]


def _windows(kept: NDArray[np.bool_]) -> NDArray[np.int8]:
    """At k, bit b says whether pass k + b is kept, round the end (n, K)."""
    return sum(np.roll(kept, -bit, 1).astype(np.int8) << bit for bit in range(_BITS)).astype(np.int8)  # type: ignore[union-attr]
