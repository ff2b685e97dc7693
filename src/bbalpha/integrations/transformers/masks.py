"""Dropout by position: what pass k drops of token t of a text hangs on (seed, k, site, t) and on nothing else.

A text is run whole, or token by token with cached keys and values; alone, or beside longer texts with padding in front
of it. Masks that are drawn in the order of the calls would come out differently every time, and the K functions with
them. Here the random words of a site are a hash of the seed, the site and the position (splitmix64 as a counter), so
that pass k is one function of a text. Each mask alone, and the masks of different tokens, sites and units, are as
independent as in training; over the passes they are balanced, as in `bbalpha.sample`.

    words(key, positions, span)             # the same for a position, whatever others are asked for
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bbalpha import _kernels as kernels
from bbalpha._balance import PER_WORD, groups, scrambled
from bbalpha._engine.interception import Interception
from bbalpha._engine.rows import Finder
from bbalpha._kernels import Noise, Passes
from bbalpha._torch import generators


@dataclass(frozen=True)
class Site:
    """Where texts and positions are in a tensor that is drawn for.

    Attributes:
        rows: The axis of the texts.
        query: The axis of the positions, and whether they are those of the source of an encoder.
        key: With attention, the same for the positions that are looked at.
        folded: Whether texts and positions are one axis, all tokens of a text before those of the next.
    """

    rows: int
    query: tuple[int, bool]
    key: tuple[int, bool] | None = None
    folded: bool = False


@dataclass(frozen=True)
class Columns:
    """The positions that a draw is for: each once, and where it is wanted.

    Attributes:
        found: Positions of queries (U,).
        index: Which of them every column has (N, q), or (1, q) where all texts have the same.
        keys: Positions that are looked at (N, k) or (1, k); None without attention.
        looked: How many positions may be looked at; 1 without attention.
    """

    found: Tensor
    index: Tensor
    keys: Tensor | None
    looked: int

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor | None) -> "Columns":
        """Of positions (N, q) and (N, k)."""
        found, index = queries.unique(return_inverse=True)
        alike = bool((queries == queries[:1]).all()) and (keys is None or bool((keys == keys[:1]).all()))
        some = slice(0, 1 if alike else None)
        if keys is None:
            return cls(found, index[some], None, 1)
        return cls(found, index[some], keys[some], int(keys.max()) + 1)


class Places:
    """Which positions the next draw is for, by the module that draws and the columns that are being run.

    Args:
        sites: Of every module that draws, in order.
        finder: Knows the module at work.
        targets: The position of every column of the texts, of columns to come too (N, T).
        sources: The same for what an encoder reads (N, E).
        config: Of the model.
        head: The name of the layer that gives the logits.
    """

    def __init__(
        self,
        sites: Mapping[str, tuple[Site, ...]],
        finder: Finder,
        targets: Tensor,
        sources: Tensor | None,
        *,
        config: Any,
        head: str | None,
    ) -> None:
        self.sites, self.finder, self.targets, self.sources, self.head = sites, finder, targets, sources, head
        self.ids = "decoder_input_ids" if config.is_encoder_decoder else "input_ids"
        self.skips_layers = any(v for name, v in vars(config).items() if name.endswith("layerdrop"))
        self.start = self.stop = 0  # the columns that are run
        self.at_work = False
        self._known: dict[tuple[Any, ...], Columns] = {}

    @contextmanager
    def call(self, given: Mapping[str, Any]) -> Iterator[None]:
        """A context for a call of the model, on the columns behind those that it has cached."""
        past = given.get("past_key_values")
        self.start = 0 if past is None else int(past.get_seq_length())
        self.stop = self.start + given[self.ids].shape[1]
        self.finder.counts.clear()
        self._known.clear()
        self.at_work = True
        yield
        self.at_work = False

    def next(self) -> tuple[Site, str, int]:
        """The site of the next draw, the module that draws, and 64 bits that stand for the two."""
        home = self.finder.stack[-1]
        i = self.finder.counts.get(home, 0)
        self.finder.counts[home] = i + 1
        known = self.sites.get(home, ())
        if i >= len(known):
            raise ValueError(
                f"`model` must draw in the same modules for every text; {home!r} drew where it did not before."
            )
        name = hashlib.blake2b(f"{home}/{i}".encode(), digest_size=8).digest()
        return known[i], home, int.from_bytes(name, "little")

    def columns(self, home: str, site: Site, shape: torch.Size) -> Columns:
        """The positions that a draw for a tensor of that shape is for."""
        lengths = shape[site.query[0]], None if site.key is None else shape[site.key[0]]
        last = self._is_head(home)
        name = (site.query[1], site.key and site.key[1], lengths, last)
        if name not in self._known:
            queries = self._run(home, lengths[0], site.query[1], self.start, last=last)
            keys = None
            if site.key is not None and lengths[1] is not None:  # a window may have left the first ones out
                keys = self._run(home, lengths[1], site.key[1], 0, last=True)
            self._known[name] = Columns.of(queries, keys)
        return self._known[name]

    def _run(self, home: str, length: int, source: bool, start: int, *, last: bool) -> Tensor:
        """Positions of the source, or of the columns from `start` on, of which the last ones may do (N, length)."""
        columns = self.sources if source and self.sources is not None else self.targets[:, start : self.stop]
        columns = columns[:, -length:] if last else columns
        if columns.shape[1] != length:
            raise ValueError(
                f"`model` must draw for the tokens that it is run on, {columns.shape[1]} of each text; {home!r} drew "
                f"for {length}. Has it a static cache? Use the dynamic one."
            )
        return columns

    def _is_head(self, home: str) -> bool:
        """Whether this is the layer of the logits, which is run on the last position alone where a text goes on."""
        return self.head is not None and f"{home}.".startswith(f"{self.head}.")


class Positioned(Interception):
    """Serves the dropout of a model from masks that hang on the position; refuses to draw anything else.

    Args:
        places: Tells which positions a draw is for.
        n_passes: K, all of them.
        first: The first pass that is run.
        count: How many are: rows are the texts, once for each of these.
        seed: Of all passes.
    """

    def __init__(self, places: Places, n_passes: int, first: int, count: int, seed: int) -> None:
        super().__init__(Passes(seed, 0, 1), len(places.targets))
        self.places, self.n_passes, self.first, self.count = places, n_passes, first, count
        self.key = scrambled(seed)
        self.chooser = generators([scrambled(seed ^ 0x5851F42D4C957F2D)])[0]

    def dropped(self, x: Tensor, rate: float, *, channels: bool = False) -> Tensor:
        """`x` with dropout at `rate`."""
        if rate == 1.0 or not x.numel():
            return x * 0.0
        if channels:
            self.alone("dropout of channels")
        site, home, name = self.places.next()
        if not site.folded:
            return self._dropped(x, rate, site, home, name)
        rows = x.unflatten(site.rows, (self.count * self.rows, -1))
        apart = Site(site.rows, (site.rows + 1, site.query[1]))
        return self._dropped(rows, rate, apart, home, name).flatten(site.rows, site.rows + 1)

    def _dropped(self, x: Tensor, rate: float, site: Site, home: str, name: int) -> Tensor:
        axes = [site.query[0]] + ([] if site.key is None else [site.key[0]])
        units = [axis for axis in range(x.ndim) if axis not in (site.rows, *axes)]
        columns = self.places.columns(home, site, x.shape)
        noise = self._noise(self.key ^ name, rate, columns, [x.shape[axis] for axis in units], x.device)
        # the axes of the noise behind (count, N): positions, then units; those of x behind its rows: as they come
        order = [2 + [*axes, *units].index(axis) for axis in range(x.ndim) if axis != site.rows]
        values = noise.values.permute(0, 1, *order).contiguous()
        rows = x.movedim(site.rows, 0).contiguous().unflatten(0, (self.count, -1))
        out = kernels.dropout(rows, Noise(values, noise.threshold, noise.scale))
        return out.flatten(0, 1).movedim(0, site.rows)

    def _noise(self, key: int, rate: float, columns: Columns, shape: list[int], device: torch.device) -> Noise:
        """Masks for positions, or for pairs of them, with units of `shape` each: (count, N | 1, q, *shape)."""
        span = columns.looked * torch.Size(shape).numel()
        noise = self._at(key, rate, columns.found.to(device), span)  # (U, count, span)
        index = columns.index.to(device)
        if columns.keys is None:
            values = noise.values.unflatten(2, shape or [1])[index].movedim(2, 0)
            return Noise(values if shape else values.squeeze(-1), noise.threshold, noise.scale)
        drawn = noise.values.unflatten(2, [columns.looked, *shape])
        values = drawn[index[:, :, None], :, columns.keys.to(device)[:, None, :]]  # (N | 1, q, k, count, *shape)
        return Noise(values.movedim(3, 0), noise.threshold, noise.scale)

    def _at(self, key: int, rate: float, positions: Tensor, span: int) -> Noise:
        """Masks of `span` units for every position (U, count, span)."""
        balanced = groups(self.n_passes, rate, positions.device)
        if not balanced:  # a rate too near to 0 or 1
            each = [words(key + 1 + k, positions, span) for k in range(self.first, self.first + self.count)]
            kept = torch.stack(each, 1).bitwise_and_(2**53 - 1) >= int(rate * 2**53)
            return Noise(kept.to(torch.get_default_dtype()) / (1 - rate), None, 1.0)
        needed = -(-span // PER_WORD)
        out = torch.empty((len(positions), self.count, PER_WORD * needed), dtype=torch.int8, device=positions.device)
        for group, (start, table) in enumerate(balanced):
            low, high = max(start, self.first), min(start + table.n_passes, self.first + self.count)
            if low < high:
                bits = words(key - group, positions, needed)
                table.fill(out[:, low - self.first : high - self.first], bits, first=low - start)
        return Noise(out[..., :span], 0, balanced[0][1].scale)

    # ---- what is drawn besides dropout

    def each(self, what: str, x: Tensor, draw: Callable[[Tensor, torch.Generator], Tensor]) -> Tensor:
        """A token sampled for each text: one for all of its passes."""
        if what != "multinomial" or self.places.at_work:
            self.alone(what)
        chosen = draw(x[: self.rows].cpu(), self.chooser).to(x.device)
        return chosen.repeat(self.count, *[1] * (chosen.ndim - 1))

    def alone(self, what: str) -> torch.Generator:
        """Refuse a draw that is no dropout."""
        raise ValueError(
            f"`model` must draw nothing but dropout of units, so that each token has masks of its own; got {what} in "
            f"{self.places.finder.stack[-1]!r}. Switch it off in the config of the model, or leave it out by `sites`."
        )

    def _covered(self, like: Tensor, draw: Callable[[torch.Size], Tensor]) -> Tensor:
        if like.ndim or self.places.skips_layers:
            self.alone("random numbers" if like.ndim else "layers that are skipped (layerdrop)")
        return draw(like.shape)[0]  # which layers that could be skipped compare with a rate of 0

    def _groups(self, x: Tensor) -> tuple[int, int]:
        self.alone("weights")
        return 1, 0


# ------------------------------------------------------------------------------ hashing


def words(key: int, positions: Tensor, span: int) -> Tensor:
    """Random words of 64 bits for every position, addressed by (key, position, place) (U, span).

    >>> torch.equal(words(7, torch.tensor([3, 5]), 4)[1:, :2], words(7, torch.tensor([5]), 2))
    True
    """
    signed = ((key + 2**63) & (2**64 - 1)) - 2**63
    begin = _mixed(positions * _STEP + signed)
    return _mixed(begin[:, None] + torch.arange(1, span + 1, device=positions.device) * _STEP)


_STEP = 0x9E3779B97F4A7C15 - 2**64  # splitmix64


def _mixed(numbers: Tensor) -> Tensor:
    """A bijection of 64 bits; shifts of torch keep the sign, which is masked out."""
    h = (numbers ^ (numbers >> 30 & 2**34 - 1)).mul_(0xBF58476D1CE4E5B9 - 2**64)
    h = (h ^ (h >> 27 & 2**37 - 1)).mul_(0x94D049BB133111EB - 2**64)
    return h ^ (h >> 31 & 2**33 - 1)
