"""Balanced masks: of the K passes of a call each unit is dropped in exactly pK, rounded up or down at random.

By chance alone a unit is dropped in 2 of 10 passes here and in 8 of 10 there, and that is the whole first-order part
of the Monte Carlo error. Here the K masks of a unit are drawn together: 16 random bits pick one of 65,536 patterns,
rows of K bits with pK drops each. Every column of that table has the same number of drops, so each pass alone is plain
dropout; units, rows and sites draw by themselves, so the order of the passes differs from unit to unit.

    table = patterns(10, 0.5)                                   # made once for (K, rate), in a few milliseconds
    table.fill(out, words, first=0)                             # (10, units) int8, positive where a unit is kept
"""

from dataclasses import dataclass, field
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
FEW = 2 * _BITS  # passes that `Patterns.factors` has
_BLOCK = 2**16  # units looked up at a time: what is in between stays in the cache

Planes = dict[int, Tensor]  # what was looked up, by plane


@dataclass(frozen=True, eq=False)
class Patterns:
    """The patterns of K passes at one rate.

    Attributes:
        n_passes: K.
        planes: Bit k % 7 of planes[k // 7][i] says whether pattern i keeps a unit in pass k; ceil(K / 7) of (2^16,).
        bits: bits[a, b] are the bits of the passes a to b of a plane (b - a, 1) int8.
        scale: One over the share of units that every pass keeps.
        few: What `factors` needs, by the number of passes and their type; made when it is asked for.
    """

    n_passes: int
    planes: tuple[Tensor, ...]
    bits: dict[tuple[int, int], Tensor]
    scale: float
    few: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

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

    def factors(self, words: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """The first passes, at most 14, as numbers to multiply with, 0 or the scale (count, units): in three steps."""
        known = self.few.get((count, dtype))
        if known is None:
            both = self.planes[0].to(torch.int16)
            if len(self.planes) > 1:
                both = both + (self.planes[1].to(torch.int16) << _BITS)
            bits = torch.tensor([[1 << k] for k in range(count)], dtype=torch.int16, device=both.device)
            known = self.few[count, dtype] = both, bits, self.scale / bits.to(dtype)  # powers of 2: nothing is lost
        both, bits, weights = known
        return both.index_select(0, _indices(words)).bitwise_and(bits).mul(weights)

    def _fill(self, out: Tensor, words: Tensor, first: int, seen: Planes | None) -> None:
        last, index = first + out.shape[-2], None
        for plane in range(first // _BITS, (last - 1) // _BITS + 1):
            kept = None if seen is None else seen.get(plane)
            if kept is None:
                index = _indices(words) if index is None else index
                kept = self.planes[plane].index_select(0, index.view(-1)).view(*index.shape[:-1], 1, -1)
                if seen is not None:
                    seen.clear()  # passes come one after the other
                    seen[plane] = kept
            base = plane * _BITS
            start, stop = max(first, base), min(last, base + _BITS)
            torch.bitwise_and(
                kept, self.bits[start - base, stop - base], out=out[..., start - first : stop - first, :]
            )  # fmt: skip


def _indices(words: Tensor) -> Tensor:
    """16 bits a unit as numbers of patterns, int32."""
    return words.view(torch.uint16).to(torch.int32)


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
    bits = {(a, b): powers[a:b] for a in range(_BITS) for b in range(a + 1, _BITS + 1)}
    return Patterns(n_passes, planes, bits, SIZE / (SIZE - drops))


@lru_cache(maxsize=64)
def groups(n_passes: int, rate: float, device: torch.device | None = None) -> tuple[tuple[int, Patterns], ...]:
    """The groups of passes that are balanced together, each with its first pass; none where passes are independent.

    >>> [(first, table.n_passes) for first, table in groups(300, 0.05)], groups(1, 0.05)
    ([(0, 120), (120, 120), (240, 60)], ())
    """
    if not is_balanced(n_passes, rate):
        return ()
    sizes = group_sizes(n_passes, rate)
    return tuple((sum(sizes[:i]), patterns(size, rate, device)) for i, size in enumerate(sizes))


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


# ------------------------------------------------------------------------------ numbers that are not 0 or 1


def add_ranks(numbers: Tensor, words: Tensor, n_passes: int, *, first: int) -> None:
    """Add to `numbers` (count, units), uniform ones, the rank of each pass from `first` on among the K of a unit.

    The ranks of a unit are a permutation, so that (rank + number) / K has one value in each K-th part of [0, 1]; that
    of a pass alone is uniform, since a permutation begins anywhere.

    Args:
        numbers: From 0 to 1, one for every pass and unit.
        words: Random 64-bit words, one for every unit (units,).
        n_passes: K, at most 128.
        first: The first of the passes.
    """
    table = _orders(n_passes, numbers.device)
    begin = (((words >> 32) + 2**31) * n_passes) >> 32  # from 0 to K - 1
    at = begin.add_(words.bitwise_and(_ORDERS - 1), alpha=2 * n_passes)
    for k, row in enumerate(numbers, first):
        row += table.index_select(0, at + k)


@lru_cache(maxsize=64)
def _orders(n_passes: int, device: torch.device) -> Tensor:
    """Random permutations of the passes, each twice in a row (4096 * 2 K,) int8."""
    random = np.random.RandomState([n_passes])
    orders = random.random_sample((_ORDERS, n_passes)).argsort(1).astype(np.int8)
    return torch.from_numpy(np.concatenate([orders, orders], 1).ravel()).to(device)


_ORDERS = 2**12

# ------------------------------------------------------------------------------ random words


class Tape:
    """Random words of a group of balanced passes, read from the start on in the order of the sites.

    Args:
        seed: Of all passes.
        group: Which group.
        device: Where the words are wanted.
        memo: What other passes of the group may have read before.
    """

    def __init__(self, seed: int, group: int, device: torch.device | None = None, memo: "Memo | None" = None) -> None:
        self.seed, self.group, self.device, self.memo = seed, group, device, memo
        self.generator: torch.Generator | None = None  # where this tape reads by itself
        self.key = 0
        self.at = 0  # words read

    def read(self, span: int, rate: float = 0.0) -> tuple[Tensor, Planes | None]:
        """The next `span` words, and what was looked up with them at `rate`, where they are remembered."""
        if self.memo is None or self.generator is not None:
            return self.draw(span), None
        name = (self.group, self.at, span)
        if name not in self.memo.words and not self.memo.room(span):
            return self.draw(span), None
        if name not in self.memo.words:
            self.memo.words[name] = self._first(self.memo, span)
        self.at += span
        return self.memo.words[name], self.memo.planes.setdefault((*name, rate), {})

    def draw(self, span: int) -> Tensor:
        """The next `span` words, from a generator that this tape has to itself."""
        if self.generator is None:
            own, self.key = tape_seed(self.seed, self.group)
            self.generator = new_generator(self.device).manual_seed(own)
            if self.at:  # behind what was remembered: there by itself
                self._draw(self.at)
        self.at += span
        return self._draw(span)

    def _first(self, memo: "Memo", span: int) -> Tensor:
        """Words that nobody has read yet: the memo has a tape that is as far as the passes have come."""
        ahead = memo.ahead.get(self.group)
        if ahead is None or ahead.at != self.at:
            ahead = Tape(self.seed, self.group, self.device)
            if self.at:
                ahead.draw(self.at)
            memo.ahead[self.group] = ahead
        return ahead.draw(span)

    def _draw(self, span: int) -> Tensor:
        words = torch.empty(span, dtype=torch.int64, device=self.device or _CPU)
        # the full range: random_() without bounds leaves the top bit 0
        return words.random_(-(2**63), None, generator=self.generator).bitwise_xor_(self.key)


class Memo:
    """What passes that are run apart draw alike: random words and masks by group and place, while there is room."""

    def __init__(self) -> None:
        self.words: dict[tuple[int, int, int], Tensor] = {}
        self.planes: dict[tuple[int, int, int, float], Planes] = {}
        self.ahead: dict[int, Tape] = {}
        self.left = 2**21  # words, of 4 units each

    def room(self, span: int) -> bool:
        """Whether so many words more may be kept."""
        if span > self.left:
            return False
        self.left -= span
        return True


def tape_seed(seed: int, group: int) -> tuple[int, int]:
    """What the masks of a group of balanced passes are drawn by: a generator's seed, and a key.

    torch's CPU generator takes 32 bits of seed, too few for all steps of a long run to differ. The 64 bits of the key
    are laid over what it draws.

    >>> len({tape_seed(step, 0) for step in range(1000)})
    1000
    """
    h = scrambled(scrambled(seed) + group)
    return h & 0xFFFFFFFF, scrambled(h) - 2**63


def scrambled(number: int) -> int:
    """A bijection of 64 bits (splitmix64)."""
    h = (number * 0x9E3779B97F4A7C15 + 0x6A09E667F3BCC909) & 0xFFFFFFFFFFFFFFFF
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return h ^ (h >> 31)


def new_generator(device: torch.device | None) -> torch.Generator:
    """A generator on `device`."""
    return torch.Generator() if device is None or device.type == "cpu" else torch.Generator(device)


_CPU = torch.device("cpu")  # whatever the default device


# ------------------------------------------------------------------------------ making a table


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
