"""The draws of K passes, by whatever strategy these are run: one by one, stacked in one batch, or under vmap.

Pass k asks its generator for the same numbers in the same order by every strategy, so that all strategies give equal
results and can be checked against each other. Where the rows are in what is drawn for is told from outside (`Place`),
since no size of a tensor can tell.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bbalpha import _kernels as kernels
from bbalpha._kernels import Noise, Passes
from bbalpha._torch import pick

Strategy = Literal["loop", "repeat", "vmap"]
Observer = Callable[[str, float | None, bool], None]  # kind, rate, whether it fired


class NotStackableError(Exception):
    """A random call whose draws cannot be told apart by pass with this strategy; run the passes one by one."""


class NotShareableError(Exception):
    """A random call of which nobody can say where its rows are, so that they could share a draw."""


@dataclass(frozen=True)
class Place:
    """Where the rows are in a tensor that is drawn for.

    Attributes:
        axis: Their axis; None if the tensor has none, as a weight has not.
        fold: How many entries of the axis belong to a row, such as heads; 0 if that varies.
        rows_first: With several entries a row, whether those of a row stand together; None if nobody knows.
    """

    axis: int | None
    fold: int = 1
    rows_first: bool | None = None


_LITTLE = 2**17  # units
_WIDE = (torch.float32, torch.float64)  # which hold a scale as it is

Where = Callable[[torch.Size], Place | None]  # asked at every draw, in order; None if nobody knows


class Drawing:
    """Random numbers for the calls of a model, from the generators of `passes`.

    Args:
        passes: The generators; one pass for "loop".
        rows: N, the rows of the model's input in one pass; 0 if that is not known.
        strategy: "loop": tensors are those of one pass; "repeat": rows are the K copies of the batch, pass after
            pass; "vmap": inside `torch.func.vmap` over the pass.
        shared: One draw for all rows of a pass instead of one a row.
        where: Tells the place of the rows at every draw; without it every draw is for its own tensor.
        dimmed: Dropped units are dimmed by various amounts, not set to 0, to see what zeros would hide.
        index: With "vmap", the pass as the vmapped function sees it.
        observer: Told of every random call: kind, rate, and whether it drew.
    """

    def __init__(
        self,
        passes: Passes,
        rows: int,
        *,
        strategy: Strategy = "loop",
        shared: bool = False,
        where: Where | None = None,
        dimmed: bool = False,
        index: Tensor | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__()
        self.passes = passes
        self.rows = rows
        self.strategy = strategy
        self.shared = shared
        self.where = where
        self.dimmed = dimmed
        self.index = index
        self.observer = observer
        self.fired = 0
        self.in_attention = False  # torch's own, which folds the heads of a row together

    # ---- what random calls are made of

    def dropped(self, x: Tensor, rate: float, *, channels: bool = False) -> Tensor:
        """`x` with dropout at `rate`, of single units or of whole channels (N, C, ...)."""
        if rate == 1.0:
            return x * 0.0
        self.fired += 1
        place = self._place(x.shape)
        if x.numel() == 0:
            return x * 1.0
        rows = self._split(x, place)
        per_pass = rows.shape[1:] if self.strategy == "repeat" else rows.shape
        if channels:
            per_pass = torch.Size((*per_pass[:2], *[1] * (len(per_pass) - 2)))
        drawn, expand = self._drawn(per_pass, place)
        if self.dimmed:
            noise = self.passes.dimming(drawn, x.dtype)
        elif self.strategy == "vmap" and self.passes.count * drawn.numel() <= _LITTLE and x.dtype in _WIDE:
            noise = self.passes.noises([(drawn, rate)], x.dtype)[0]
        else:
            noise = self.passes.noise(drawn, rate)
        values = self._per_pass(expand(noise.values))
        if noise.threshold is None and self.strategy == "vmap":  # a node of our own costs more under torch.func
            return rows * values
        return self._join(kernels.dropout(rows, Noise(values, noise.threshold, noise.scale)), place)

    def recur(self, kernel: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
        """A recurrent layer by the kernel that torch has for it."""
        return kernel(*args)

    def kept(self, like: Tensor, rate: float) -> Tensor:
        """Ones of the shape of `like`, and zeros at `rate`: the masks of `dropped`."""
        return (self.dropped(torch.ones_like(like, dtype=torch.get_default_dtype()), rate) > 0).to(like.dtype)

    def filled(self, like: Tensor, fill: Callable[[Tensor, torch.Generator], Tensor]) -> Tensor:
        """Random numbers of the shape of `like`, `fill(empty, generator)` for each pass."""

        def draw(shape: torch.Size) -> Tensor:
            with self.passes.plain():
                empty = torch.empty((self.passes.count, *shape), dtype=like.dtype, device=like.device)
                return torch.stack([fill(e, g) for e, g in zip(empty, self.passes.generators, strict=True)])

        return self._covered(like, draw)

    def _covered(self, like: Tensor, draw: Callable[[torch.Size], Tensor]) -> Tensor:
        """Random numbers of the shape of `like`, `draw(shape of one pass)` for all passes (count, *shape)."""
        self.fired += 1
        place = self._place(like.shape)
        rows = self._split(like, place)
        per_pass = rows.shape[1:] if self.strategy == "repeat" else rows.shape
        drawn, expand = self._drawn(per_pass, place)
        values = self._per_pass(expand(draw(drawn)))
        if values.shape != rows.shape:  # one draw for all rows
            values = values.expand_as(rows).contiguous()
        return self._join(values, place)

    def each(self, what: str, x: Tensor, draw: Callable[[Tensor, torch.Generator], Tensor]) -> Tensor:
        """`draw(x, generator)`; with shared draws row by row, from the same state of the generator."""
        generator = self.alone(what)
        place = self._place(x.shape)
        if not self.shared or self.rows == 1 or place is None or place.axis is None:
            return draw(x, generator)
        if place.fold > 1:
            raise NotShareableError(f"{what} draws for several entries a row of a tensor of shape {tuple(x.shape)}")
        state, parts = generator.get_state(), []
        for row in x.split(1, place.axis):
            generator.set_state(state)
            parts.append(draw(row, generator))
        return torch.cat(parts, place.axis)

    def alone(self, what: str) -> torch.Generator:
        """The generator of the one pass that is run; refuses where several are run together."""
        self.fired += 1
        if self.strategy != "loop":
            raise NotStackableError(f"{what} draws for the whole batch at once")
        return self.passes.generators[0]

    def tell(self, kind: str, rate: float | Tensor | None, fires: bool) -> None:
        """Report a random call to the observer."""
        if self.observer is not None:
            self.observer(kind, None if rate is None else float(rate), fires)

    # ---- the draws of our own layers (`layers.Draws`)

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers of the shape of `like`."""
        return self._covered(like, lambda shape: self.passes.normals(shape, like.dtype))

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers from 0 to 1 of the shape of `like`."""
        return self._covered(like, lambda shape: self.passes.uniforms(shape, like.dtype))

    def scaled(self, x: Tensor, noise: Tensor, rate: float | Tensor) -> Tensor:
        """`x * noise`, which stands for dropout at `rate`."""
        return x * noise

    def dropped_weights(self, x: Tensor, weight: Tensor, rate: float) -> tuple[Tensor, int]:
        """`weight` with dropout for every group of rows of `x` that has one draw (G, ...), and the axis of rows."""
        groups, axis = self._groups(x)
        noise = self.passes.noise((groups, *weight.shape), rate)
        return kernels.dropout(weight, Noise(self._grouped(noise.values), noise.threshold, noise.scale)), axis

    def normal_weights(self, x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        """Standard normal numbers of the shape of `weight` in the same way (G, ...), and the axis of rows."""
        groups, axis = self._groups(x)
        return self._grouped(self.passes.normals((groups, *weight.shape), weight.dtype)), axis

    def _groups(self, x: Tensor) -> tuple[int, int]:
        """How many draws the rows of one pass of `x` (..., D) have: one, or one a row; and the axis of rows."""
        self.fired += 1
        place = self._place(x.shape)
        if self.strategy == "repeat":
            rows = self._split(x, place)
            axis = 0 if place is None or place.axis is None else place.axis
            return 1 if self.shared else rows.shape[axis + 1], axis
        if self.shared or x.ndim < 2:
            return 1, 0
        if place is not None and place.axis is None:
            return 1, 0
        axis = 0 if place is None or place.axis is None else place.axis  # nobody knows: as the layer does by itself
        return max(1, x.shape[axis]), axis

    def _grouped(self, values: Tensor) -> Tensor:
        """(count, G, ...) draws as the strategy sees them; stacked, the groups of all passes in a row."""
        return values.flatten(0, 1) if self.strategy == "repeat" else self._per_pass(values)

    # ---- places and strategies

    def _place(self, shape: torch.Size) -> Place | None:
        """The place of the rows in what is drawn for, seen to fit; None where it does not matter."""
        place = None if self.where is None else self.where(shape)
        if (not self.shared and self.strategy != "repeat") or 0 in shape:
            return place
        refused = NotStackableError if self.strategy == "repeat" else NotShareableError
        if place is None:
            raise refused(f"nobody knows where the rows are in a random call on a tensor of shape {tuple(shape)}")
        if place.axis is None or (place.fold == 0 and self.strategy != "repeat"):
            if self.strategy == "repeat":
                raise refused(f"a random call on a tensor of shape {tuple(shape)} has no axis of rows")
            return place
        rows = self.rows * (self.passes.count if self.strategy == "repeat" else 1)
        if place.axis >= len(shape) or place.fold == 0 or shape[place.axis] != place.fold * rows:
            raise refused(f"a random call on a tensor of shape {tuple(shape)} was for other rows before")
        if place.fold > 1 and place.rows_first is None:
            if not self.in_attention:
                raise refused(f"nobody knows the order of rows and others in a tensor of shape {tuple(shape)}")
            place = Place(place.axis, place.fold, rows_first=True)
        return place

    def _split(self, x: Tensor, place: Place | None) -> Tensor:
        """X as (count, *shape of one pass); x itself if not stacked."""
        if self.strategy != "repeat" or place is None or place.axis is None:
            return x
        if place.fold > 1 and not place.rows_first:
            raise NotStackableError(f"the rows of a tensor of shape {tuple(x.shape)} do not stand together")
        split: Tensor = x.unflatten(place.axis, (self.passes.count, -1)).movedim(place.axis, 0)
        return split

    def _join(self, x: Tensor, place: Place | None) -> Tensor:
        if self.strategy != "repeat" or place is None or place.axis is None:
            return x
        return x.movedim(0, place.axis).flatten(place.axis, place.axis + 1)

    def _per_pass(self, values: Tensor) -> Tensor:
        """(count, ...) draws as the strategy sees them."""
        if self.strategy == "loop":
            return values[0]
        return values if self.index is None else pick(values, self.index)

    def _drawn(self, shape: torch.Size, place: Place | None) -> tuple[torch.Size, Callable[[Tensor], Tensor]]:
        """The shape to draw for one pass, and how (count, *drawn) becomes broadcastable to (count, *shape)."""
        if not self.shared or self.rows == 1 or place is None or place.axis is None:
            return shape, _same
        axis, fold, N = place.axis, place.fold, self.rows
        drawn = torch.Size((*shape[:axis], max(1, fold), *shape[axis + 1 :]))
        if fold <= 1:
            return drawn, _same
        if place.rows_first:  # one draw a head, again for every row
            return drawn, lambda v: v.repeat(*[N if i == axis + 1 else 1 for i in range(v.ndim)])
        return drawn, lambda v: v.repeat_interleave(N, axis + 1)


def _same(values: Tensor) -> Tensor:
    return values
