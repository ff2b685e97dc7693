"""The draws of K passes, however the passes are laid out: one by one, stacked in one batch, or under vmap.

Pass k asks its generator for the same numbers in the same order in every layout, so that the layouts give equal
results and can be checked against each other. Which axis of a tensor counts the rows is found by its length.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from bbalpha import masks
from bbalpha.masks import Noise, Passes

Layout = Literal["single", "stacked", "vmapped"]
Observer = Callable[[str, float | None, bool], None]  # kind, rate, whether it fired


class NotStackableError(Exception):
    """A random call whose draws cannot be told apart by pass in this layout; run the passes one by one."""


class Drawing:
    """Random numbers for the calls of a model, from the generators of `passes`.

    Args:
        passes: The generators; one pass for the "single" layout.
        rows: N, the rows of the model's input in one pass.
        layout: "single": tensors are those of one pass; "stacked": rows are the K copies of the batch, pass
            after pass; "vmapped": inside `torch.func.vmap` over the pass.
        shared: One draw for all rows of a pass instead of one a row.
        batch_dim: The axis of the rows in the model's input, tried before axis 0 on tensors inside.
        index: With "vmapped", the pass as the vmapped function sees it.
        observer: Told of every random call: kind, rate, and whether it drew.
    """

    def __init__(
        self,
        passes: Passes,
        rows: int,
        *,
        layout: Layout = "single",
        shared: bool = False,
        batch_dim: int = 0,
        index: Tensor | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__()
        self.passes = passes
        self.rows = rows
        self.layout = layout
        self.shared = shared
        self.index = index
        self.observer = observer
        self.axes: tuple[int, ...] = (batch_dim, 0)  # where the rows are looked for, in this order
        self.fired = 0

    # ---- what random calls are made of

    def dropped(self, x: Tensor, rate: float, *, channels: bool = False) -> Tensor:
        """`x` with dropout at `rate`, of single units or of whole channels (N, C, ...)."""
        if rate == 1.0:
            return x * 0.0
        self.fired += 1
        if x.numel() == 0:
            return x * 1.0
        rows, axis = self._split(x)
        per_pass = rows.shape[1:] if self.layout == "stacked" else rows.shape
        if channels:
            per_pass = torch.Size((*per_pass[:2], *[1] * (len(per_pass) - 2)))
        drawn, expand = self._drawn(per_pass)
        noise = self.passes.noise(drawn, rate)
        values = self._per_pass(expand(noise.values))
        return self._join(masks.dropout(rows, Noise(values, noise.threshold, noise.scale)), axis)

    def filled(self, like: Tensor, fill: Callable[[Tensor, torch.Generator], Tensor], *, exact: bool = True) -> Tensor:
        """Random numbers of the shape of `like`, `fill(empty, generator)` for each pass."""
        self.fired += 1
        rows, axis = self._split(like, exact=exact)
        per_pass = rows.shape[1:] if self.layout == "stacked" else rows.shape
        drawn, expand = self._drawn(per_pass)
        values = torch.stack(
            [
                fill(torch.empty(drawn, dtype=like.dtype, device=like.device), generator)
                for generator in self.passes.generators
            ]
        )
        values = self._per_pass(expand(values))
        if values.shape != rows.shape:  # one draw for all rows
            values = values.expand_as(rows).contiguous()
        return self._join(values, axis)

    def alone(self, what: str) -> torch.Generator:
        """The generator of the one pass that is run; refuses where several are run together."""
        self.fired += 1
        if self.layout != "single":
            raise NotStackableError(f"{what} draws for the whole batch at once")
        return self.passes.generators[0]

    @contextmanager
    def rows_first(self) -> Iterator[None]:
        """Inside attention, whose weights have rows (or rows times heads) on axis 0 whatever the model's input has."""
        axes, self.axes = self.axes, (0,)
        try:
            yield
        finally:
            self.axes = axes

    def tell(self, kind: str, rate: float | Tensor | None, fires: bool) -> None:
        """Report a random call to the observer."""
        if self.observer is not None:
            self.observer(kind, None if rate is None else float(rate), fires)

    # ---- the draws of our own layers (`layers.Draws`)

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers of the shape of `like`."""
        return self.filled(like, lambda t, g: t.normal_(generator=g), exact=False)

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers from 0 to 1 of the shape of `like`."""
        return self.filled(like, lambda t, g: t.uniform_(generator=g), exact=False)

    def scaled(self, x: Tensor, noise: Tensor, rate: float | Tensor) -> Tensor:
        """`x * noise`, which stands for dropout at `rate`."""
        return x * noise

    def dropped_weights(self, x: Tensor, weight: Tensor, rate: float) -> tuple[Tensor, int]:
        """`weight` with dropout for every group of rows of `x` that has one draw (G, ...), and the axis of rows."""
        groups, axis = self._groups(x)
        noise = self.passes.noise((groups, *weight.shape), rate)
        return masks.dropout(weight, Noise(self._grouped(noise.values), noise.threshold, noise.scale)), axis

    def normal_weights(self, x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        """Standard normal numbers of the shape of `weight` in the same way (G, ...), and the axis of rows."""
        groups, axis = self._groups(x)
        empty = weight.new_empty((self.passes.count, groups, *weight.shape))
        values = [e.normal_(generator=g) for e, g in zip(empty, self.passes.generators, strict=True)]
        return self._grouped(torch.stack(values)), axis

    def _groups(self, x: Tensor) -> tuple[int, int]:
        """How many draws the rows of one pass of `x` (..., D) have: one, or one a row; and the axis of rows."""
        self.fired += 1
        if self.layout == "stacked":
            if x.ndim < 2:
                raise NotStackableError(f"a random layer on a tensor of shape {tuple(x.shape)} has no axis of rows")
            rows, axis = self._split(x)
            return 1 if self.shared else rows.shape[axis + 1], axis
        axis = next((a for a in self.axes if a < x.ndim - 1 and x.shape[a] == self.rows), 0)
        return 1 if self.shared or x.ndim < 2 else max(1, x.shape[axis]), axis

    def _grouped(self, values: Tensor) -> Tensor:
        """(count, G, ...) draws as the layout sees them; stacked, the groups of all passes in a row."""
        return values.flatten(0, 1) if self.layout == "stacked" else self._per_pass(values)

    # ---- layouts

    def _split(self, x: Tensor, exact: bool = False) -> tuple[Tensor, int]:
        """X as (count, *shape of one pass) and the axis its rows came from; x itself if not stacked."""
        if self.layout != "stacked":
            return x, 0
        stacked = self.passes.count * self.rows
        axes = [a for a in dict.fromkeys(self.axes) if a < x.ndim and x.shape[a] == stacked]
        if not axes and not exact and stacked and x.ndim and x.shape[0] % stacked == 0:
            axes = [0]  # rows times heads
        if not axes:
            raise NotStackableError(f"a random call on a tensor of shape {tuple(x.shape)} has no axis of rows")
        return x.unflatten(axes[0], (self.passes.count, -1)).movedim(axes[0], 0), axes[0]

    def _join(self, x: Tensor, axis: int) -> Tensor:
        return x if self.layout != "stacked" else x.movedim(0, axis).flatten(axis, axis + 1)

    def _per_pass(self, values: Tensor) -> Tensor:
        """(count, ...) draws as the layout sees them."""
        if self.layout == "single":
            return values[0]
        return values if self.index is None else values[self.index]

    def _drawn(self, shape: torch.Size) -> tuple[torch.Size, Callable[[Tensor], Tensor]]:
        """The shape to draw for one pass, and how (count, *drawn) becomes broadcastable to (count, *shape)."""
        if not self.shared or self.rows == 1:
            return shape, _same
        for axis in dict.fromkeys(self.axes):
            if axis < len(shape) and shape[axis] == self.rows:
                return torch.Size((*shape[:axis], 1, *shape[axis + 1 :])), _same
        if self.rows and len(shape) and shape[0] % self.rows == 0:  # rows times heads: one draw a head
            heads = shape[0] // self.rows
            return torch.Size((heads, *shape[1:])), lambda v: v.repeat(1, self.rows, *[1] * (v.ndim - 2))
        return shape, _same


def _same(values: Tensor) -> Tensor:
    return values
