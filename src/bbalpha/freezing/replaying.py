"""Constants in the place of draws: the modes that give the random calls of a model what was recorded.

`Replaying` serves a pass, or all of them at once, by any strategy of the engine; `Sharing` one pass after the other,
with what comes before the first draw computed once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bbalpha._engine.drawing import Strategy
from bbalpha._engine.interception import Interception, may_draw
from bbalpha._kernels import Passes
from bbalpha._torch import is_scripted, is_watched
from bbalpha.freezing.packing import Packs
from bbalpha.freezing.recording import Draw

_WIDE = (torch.float32, torch.float64)  # which hold a scale as it is


@dataclass(frozen=True)
class Site:
    """How the constants of one random call meet what they are for.

    Attributes:
        axis: Of the rows; None if there is none.
        split: What that axis is split into in one pass: rows (-1), and what is folded into them.
        rest: The other axes of what is drawn for.
        scale: Of units that are kept, where the constants are bare masks; else 1.
        weights: As in `Draw`.
    """

    axis: int | None
    split: tuple[int, ...]
    rest: tuple[int, ...]
    scale: float
    weights: bool

    def parted(self, x: Tensor, passes: tuple[int, ...]) -> Tensor:
        """`x` with stacked passes, rows and what is folded into them on axes of their own."""
        split = (*passes, *self.split)
        return x if self.axis is None or len(split) < 2 else x.unflatten(self.axis, split)

    def joined(self, x: Tensor, passes: tuple[int, ...]) -> Tensor:
        """The way back."""
        count = len(passes) + len(self.split)
        return x if self.axis is None or count < 2 else x.flatten(self.axis, self.axis + count - 1)

    def stacked(self, values: Tensor) -> Tensor:
        """The constants of all passes (K, ...), passes in front of the rows."""
        if self.weights:
            return values.flatten(0, 1)
        return values if self.axis is None else values.movedim(0, self.axis)

    def check(self, shape: torch.Size, *, channels: bool = False) -> None:
        """Refuse a call on another shape, rows left out, than the one that was recorded; of channels any size."""
        rest = tuple(shape) if self.axis is None else (*shape[: self.axis], *shape[self.axis + 1 :])
        count = len(self.rest) if not channels else 2 if self.axis is None or self.axis > 1 else 1
        if rest[:count] != self.rest[:count] or len(rest) != len(self.rest):
            raise ValueError(
                "`x` must have the shape that the model was frozen for, rows left out; a random call is made for "
                f"{_shown(rest, self.axis)} and was frozen for {_shown(self.rest, self.axis)}. Freeze the model "
                "again with `x` of this shape."
            )


def laid_out(draws: Sequence[Draw]) -> tuple[Site, Tensor]:
    """The draws of all passes at one random call as one constant (K, ...), and how it is used."""
    one = draws[0]
    axis, fold, first = one.place.axis, one.place.fold, one.place.rows_first
    values, scale = torch.stack([d.values for d in draws]), 1.0
    if one.scale is not None:
        scale = max(d.scale or 0.0 for d in draws)  # 0 in a pass that lost every unit
        values = values.to(one.dtype if one.dtype.is_floating_point else torch.get_default_dtype())
        if values.dtype in _WIDE:
            values, scale = values * scale, 1.0
    if axis is None or one.weights:
        return Site(axis, (), one.shape, scale, one.weights), values
    split = (-1,) if fold <= 1 else (-1, fold) if first else (fold, -1)
    if fold > 1:
        values = values.unsqueeze(axis + 1 if first else axis + 2)
    return Site(axis, split, (*one.shape[:axis], *one.shape[axis + 1 :]), scale, False), values


class Replaying(Interception):
    """A mode that gives the random calls inside of it constants, in order.

    Args:
        sites: How each constant is used.
        values: The constants: of one pass with "loop" and "vmap" (...), single numbers as such; of all with "repeat"
            (K, ...).
        count: K.
        strategy: As in `Drawing`.
        index: With "vmap", the pass as the vmapped function sees it.
        packs: Where weights are laid out for products.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        values: Sequence[Any],
        count: int,
        *,
        strategy: Strategy,
        index: Tensor | None = None,
        packs: Packs | None = None,
    ) -> None:
        super().__init__(Passes(0, 0, count), 0, strategy=strategy, shared=True, index=index)
        self.stacked: tuple[int, ...] = (count,) if strategy == "repeat" else ()
        self.packs = packs or Packs()
        self.left: Iterator[tuple[Site, Any]] = iter(zip(sites, values, strict=True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and self.stacked:
            return self._product(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def recur(self, kernel: Any, *args: Any) -> Any:
        """A recurrent layer, before the first draw for one of the passes that are stacked, which are all the same."""
        x, states, _, padded, *rest = args  # ..., batch_first; rows of several lengths come in another order
        if not self._alike() or not isinstance(padded, bool):
            return kernel(*args)
        K, axis, several = self.stacked[0], 0 if rest[-1] else 1, isinstance(states, list)
        fed = [(x, axis), *((s, 1) for s in (states if several else [states]))]
        if not all(_repeats(t, along, K) for t, along in fed):
            return kernel(*args)
        x, *few = (t.narrow(along, 0, t.shape[along] // K).contiguous() for t, along in fed)
        out, *last = kernel(x, few if several else few[0], *args[2:])
        return (torch.cat([out] * K, axis), *(torch.cat([t] * K, 1) for t in last))

    def _product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear, before the first draw for one of the passes."""
        if self._alike():
            for axis in range(input.ndim - 1):
                if _repeats(input, axis, self.stacked[0]):
                    one = input.narrow(axis, 0, input.shape[axis] // self.stacked[0])
                    return torch.cat([self.packs.linear(one, weight, bias)] * self.stacked[0], axis)
        return self.packs.linear(input, weight, bias)

    def _alike(self) -> bool:
        """Whether passes that are stacked may be the same so far, and one may look at the numbers to see it."""
        return bool(self.stacked) and not self.fired and not is_watched()

    def dropped(self, x: Tensor, rate: float, *, channels: bool = False) -> Tensor:
        """`x` times the next constant."""
        if rate == 1.0:
            return x * 0.0
        site, values = self._next()
        if not is_scripted():
            site.check(x.shape, channels=channels)
        out = site.parted(x, self.stacked) * values
        return site.joined(out if site.scale == 1.0 else out * site.scale, self.stacked)

    def dropped_weights(self, x: Tensor, weight: Tensor, rate: float) -> tuple[Tensor, int]:
        """`weight` times the next constant, for every pass that is stacked (G, ...), and the axis of rows."""
        site, values = self._next()
        return weight * values * site.scale, site.axis or 0

    def normal_weights(self, x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        """The next constant, for every pass that is stacked (G, ...), and the axis of rows."""
        site, values = self._next()
        return values, site.axis or 0

    def finish(self) -> None:
        """Refuse a pass that made fewer random calls than the one that was recorded."""
        if next(self.left, None) is not None:
            raise ValueError(_other_calls("fewer"))

    def _covered(self, like: Tensor, draw: Any) -> Tensor:
        site, values = self._next()
        if not isinstance(values, Tensor):  # one that Python may look at, whatever traces it
            return torch.tensor(values, dtype=like.dtype, device=like.device)
        if not is_scripted():
            site.check(like.shape)
        return site.joined(values.expand_as(site.parted(like, self.stacked)).clone(), self.stacked)

    def _next(self) -> tuple[Site, Any]:
        self.fired += 1
        found = next(self.left, None)
        if found is None:
            raise ValueError(_other_calls("more"))
        site, values = found
        return site, site.stacked(values) if self.stacked else values


class Prefix:
    """What was computed before the first draw of a pass, in order: the same for every pass."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.whole = False


class Sharing(Replaying):
    """`Replaying` of one pass after the other in which what comes before the first draw is computed once."""

    def __init__(self, sites: Sequence[Site], values: Sequence[Any], prefix: Prefix) -> None:
        super().__init__(sites, values, 1, strategy="loop")
        self.prefix = prefix
        self._given = iter(prefix.results) if prefix.whole else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.fired or may_draw(func):
            return super().__torch_function__(func, types, args, kwargs)
        if self._given is not None:
            return next(self._given)
        out = func(*args, **(kwargs or {}))
        self.prefix.results.append(out)
        return out

    def finish(self) -> None:
        """As in `Replaying`; the prefix is known from now on."""
        super().finish()
        self.prefix.whole = True


def _repeats(t: Tensor, axis: int, count: int) -> bool:
    """Whether `count` equal blocks stand one after the other along an axis."""
    size = t.shape[axis]
    one, rest = size // count, size - size // count
    return size % count == 0 and torch.equal(t.narrow(axis, 0, rest), t.narrow(axis, one, rest))


def _shown(rest: Sequence[int], axis: int | None) -> str:
    """A shape with N where the rows are."""
    parts = [str(n) for n in rest]
    if axis is not None:
        parts.insert(axis, "N")
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _other_calls(how: str) -> str:
    return (
        f"`x` leads to {how} random calls than the `x` that the model was frozen with. Freeze the model again with "
        "rows like these."
    )
