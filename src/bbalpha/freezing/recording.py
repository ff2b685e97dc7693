"""Passes of a model run once with every draw written down: what a frozen model is given ever after.

`record` runs them one by one as `bbalpha.sample` does with shared masks. What is kept has no rows in it, so any number
of rows can be served; what hangs on the rows themselves cannot be kept, and is refused.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha._balance import Memo
from bbalpha._engine.drawing import Place
from bbalpha._engine.guards import eager
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.interception import Interception
from bbalpha._engine.rows import Finder
from bbalpha._engine.running import Plan, merge
from bbalpha._engine.shadows import Shadow
from bbalpha._engine.sites import switch_on_for_good
from bbalpha._kernels import Passes
from bbalpha._torch import MODULE_STATE, DispatchMode, buffers, multiply_adds, own_parameters, tree_map


class NotFreezableError(Exception):
    """A random call whose numbers hang on the rows it is made for, or on nobody: there is nothing to keep."""


@dataclass(frozen=True)
class Draw:
    """What one random call of one pass was given.

    Attributes:
        values: The numbers, without rows: masks of dropout (bool), or the random numbers themselves.
        place: Where the rows are in what is drawn for; for weights, in what they are multiplied with.
        shape: Of what is drawn for, as it was.
        dtype: Of what is drawn for.
        scale: Of units that are kept, where the values are masks.
        weights: Whether it is drawn for weights: in groups of rows (1, ...), one a pass.
    """

    values: Tensor
    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float | None = None
    weights: bool = False


class Recording(Interception):
    """One pass with shared masks, whose draws are kept in `draws`; arguments as for `Drawing`."""

    def __init__(self, passes: Passes, rows: int, **options: Any) -> None:
        super().__init__(passes, rows, shared=True, **options)
        self.draws: list[Draw] = []
        self.at_first: Callable[[], None] | None = None  # called before the first draw
        self._last = Place(None)

    def dropped(self, x: Tensor, rate: float, *, channels: bool = False) -> Tensor:
        """As `Drawing` has it."""
        if rate == 1.0 or x.numel() == 0:
            return super().dropped(x, rate, channels=channels)
        factors = super().dropped(torch.ones_like(x, dtype=torch.float64), rate, channels=channels)
        values = self._of_one_row(factors)
        if channels:
            values = values[(slice(None), slice(None), *[slice(1)] * (values.ndim - 2))]
        scale = float(values.amax())
        self._keep(values > 0, x, scale=scale)
        return x * (factors > 0) * scale

    def dropped_weights(self, x: Tensor, weight: Tensor, rate: float) -> tuple[Tensor, int]:
        """As `Drawing` has it."""
        factors, axis = super().dropped_weights(x, torch.ones_like(weight, dtype=torch.float64), rate)
        scale = float(factors.amax())
        self._keep(factors > 0, weight, scale=scale, weights=True)
        return weight * (factors > 0) * scale, axis

    def normal_weights(self, x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        """As `Drawing` has it."""
        values, axis = super().normal_weights(x, weight)
        self._keep(values, weight, weights=True)
        return values, axis

    def each(self, what: str, x: Tensor, draw: Any) -> Tensor:
        """Refused: what is drawn hangs on the numbers of the rows."""
        raise NotFreezableError(f"{what} draws by the numbers of the rows themselves")

    def alone(self, what: str) -> torch.Generator:
        """Refused: drawn for the whole batch at once, or by a generator of the model's own."""
        raise NotFreezableError(f"{what} draws for all rows at once, or by a generator of the model's own")

    def _covered(self, like: Tensor, draw: Any) -> Tensor:
        values = super()._covered(like, draw)
        self._keep(self._of_one_row(values), like)
        return values

    def _keep(self, values: Tensor, like: Tensor, *, scale: float | None = None, weights: bool = False) -> None:
        kept = values.detach().clone()
        self.draws.append(Draw(kept, self._last, tuple(like.shape), like.dtype, scale, weights))

    def _place(self, shape: torch.Size) -> Place | None:
        if self.at_first is not None and not self.draws:
            self.at_first()
        place = super()._place(shape)
        self._last = Place(None) if place is None else place
        return place

    def _of_one_row(self, values: Tensor) -> Tensor:
        """What all rows were given alike: an axis of rows is as long as what is folded into it, or 1."""
        axis, fold, first = self._last.axis, self._last.fold, self._last.rows_first
        if axis is None:
            return values
        if fold <= 1:
            return values.narrow(axis, 0, 1)
        parts: Tensor = values.unflatten(axis, (-1, fold) if first else (fold, -1))
        return parts.select(axis if first else axis + 1, 0)


# ------------------------------------------------------------------------------ all passes


@dataclass(frozen=True)
class Recorded:
    """What the passes of a model were given, and what came of it.

    Attributes:
        draws: Of every pass, in order.
        outputs: Of all passes on the rows that were tried (K, N, ...).
        before: Multiply-adds of a row before the first draw of a pass.
        work: Multiply-adds of a row in all of it.
    """

    draws: list[list[Draw]]
    outputs: Any
    before: float
    work: float

    @property
    def alike(self) -> bool:
        """Whether all passes make the same random calls."""
        return len({tuple((d.shape, d.place) for d in draws) for draws in self.draws}) == 1

    def by_site(self) -> list[list[tuple[Draw, ...]]]:
        """The draws of all passes at each random call; for every pass by itself where passes are not alike."""
        if self.alike:
            return [list(zip(*self.draws, strict=True))]
        return [[(d,) for d in draws] for draws in self.draws]


def record(model: nn.Module, inputs: Inputs, plan: Plan, n_passes: int, seed: int) -> Recorded:
    """The draws of `n_passes` passes of a model in `own_copy`'s state on a few rows."""
    finder = Finder({} if plan.rows is None else plan.rows.places)
    memo, draws, outputs = Memo(), [], []
    work, before = Work(), [0]
    with torch.no_grad(), eager(), finder.listening(model, own=True):
        for k in range(n_passes):
            passes = Passes(seed, k, 1, together=n_passes, device=inputs.device, memo=memo)
            mode = Recording(passes, inputs.rows or 0, where=finder.begin())
            mode.at_first = None if k else lambda: before.append(work.total)
            with nullcontext() if k else work, mode:
                outputs.append(inputs.fresh().call(model))
            draws.append(mode.draws)
    rows = max(1, inputs.rows or 1)
    return Recorded(draws, merge(outputs, torch.stack), before[-1] / rows, work.total / rows)


class Work(DispatchMode):
    """Counts the multiply-adds that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += multiply_adds(func, args, kwargs or {}, out)
        return out


def own_copy(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of `model` with tensors of its own, in evaluation mode, random sites switched on."""
    shadow = Shadow.of(model, evaluation=True)
    own: dict[int, Tensor] = {}

    def copy(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if id(t) not in own:
            fresh = t.detach().clone()
            own[id(t)] = nn.Parameter(fresh, requires_grad=False) if isinstance(t, nn.Parameter) else fresh
        return own[id(t)]

    for original, twin in shadow.pairs:
        for places in (own_parameters(twin), buffers(twin)):
            places.update([(name, copy(t)) for name, t in places.items()])
        for name, value in list(vars(twin).items()):
            given = vars(original).get(name)  # what the shadow has changed leads to its own modules
            if name not in MODULE_STATE and value is given and type(value) in (list, tuple, dict, Tensor, nn.Parameter):
                vars(twin)[name] = tree_map(copy, value)
    switch_on_for_good(shadow.model, plan.only)
    return shadow.model
