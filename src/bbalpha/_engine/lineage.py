"""Which dropout feeds which weight: keep probabilities followed from where they arise to where they are used.

A dropped unit stays 0 through relu, reshape, max pooling and the like; when it meets a parameter in a matrix
product or convolution, that parameter has the keep probability of the unit (Sec. 4 of the paper: its prior term
is l^2 / (2 p) ||M||^2).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bbalpha._engine import kinds
from bbalpha._engine.drawing import Observer, Where
from bbalpha._engine.interception import Interception
from bbalpha._kernels import Passes
from bbalpha._torch import base_of


class Lineage(Interception):
    """An interception of one pass that also follows the keep probability of every unit.

    Args:
        passes: The generator of the pass.
        observer: Told of every random call.
        where: Asked at every draw, as in `Drawing`.
        parameters: {name: parameter}, each parameter once.
    """

    def __init__(
        self,
        passes: Passes,
        *,
        observer: Observer,
        where: Where,
        parameters: Mapping[str, Tensor],
    ) -> None:
        super().__init__(passes, 0, observer=observer, where=where)
        self.names = {id(p): name for name, p in parameters.items()}
        self.rate = 0.0  # of the random call just made
        self._keep: dict[str, float] = {}

    @property
    def keep(self) -> dict[str, float]:
        """{parameter name: keep probability of the units that feed it}, where it is not 1."""
        return {name: p for name, p in self._keep.items() if p != 1.0}

    # ---- what the random calls tell

    def tell(self, kind: str, rate: float | Tensor | None, fires: bool) -> None:
        """Report a random call, and remember its rate."""
        self.rate = float(rate) if fires and rate is not None else 0.0
        super().tell(kind, rate, fires)

    def scaled(self, x: Tensor, noise: Tensor, rate: float | Tensor) -> Tensor:
        """`x * noise`, which stands for dropout at `rate`."""
        out = super().scaled(x, noise, rate)
        _mark(out, _kept(x) * (1 - float(rate)))
        return out

    def dropped_weights(self, x: Tensor, weight: Tensor, rate: float) -> tuple[Tensor, int]:
        """`weight` with dropout: its keep probability is its own times that of the units it meets."""
        self._feed([weight], _kept(x) * (1 - rate))
        return super().dropped_weights(x, weight, rate)

    # ---- what every call does to it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        given = [t for a in (*args, *(kwargs or {}).values()) for t in _tensors(a)]
        before = [_kept(t) for t in given]  # an in-place call may change them
        self.rate = 0.0
        out = super().__torch_function__(func, types, args, kwargs)
        if not given:
            return out
        if name in kinds.DROPOUT_BY_NAME or (name == "bernoulli_" and self.rate):
            _mark(out, (1.0 if name == "bernoulli_" else before[0]) * (1 - self.rate))
            if self.rate and self._name(given[0]):  # a weight that is dropped itself
                out._bbalpha_weight = self._name(given[0])
        elif name in kinds.RECURRENT_BY_NAME:
            for p, own in zip(given, before, strict=True):
                below = before[0] if "weight_ih_l0" in self._name(p) else 1 - self.rate
                self._feed([p], own * (below if "weight_ih_l" in self._name(p) else 1.0))
        elif name in kinds.WEIGHTS_BY_NAME:
            self._feed(given, math.prod(before))
        elif name in kinds.ZERO_STAYS_BY_NAME:
            _mark(out, before[0])
        elif name in kinds.PRODUCTS_BY_NAME:
            _mark(out, math.prod(before))
        elif name in kinds.JOINS_BY_NAME and len(set(before)) == 1:
            _mark(out, before[0])
        elif name.endswith("_") and not name.startswith("__"):
            _mark(out, 1.0)  # overwritten
        return out

    def _feed(self, given: Iterable[Tensor], keep: float) -> None:
        for name in filter(None, map(self._name, given)):
            self._keep.setdefault(name, keep)

    def _name(self, t: Tensor) -> str:
        """The parameter that `t` is, is a view of, or is with entries dropped; "" if none."""
        known = self.names.get(id(t)) or self.names.get(id(base_of(t))) or getattr(t, "_bbalpha_weight", "")
        return str(known) if t.ndim > 1 else ""


class Probe(Interception):
    """An interception of one pass that multiplies whatever is drawn by `one`: autograd tells what it reaches."""

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes, 0)
        self.one = torch.ones((), device=passes.device, requires_grad=True)

    def dropped(self, x: Tensor, rate: float, *, channels: bool = False) -> Tensor:
        """`x` with dropout."""
        return super().dropped(x, rate, channels=channels) * self.one

    def filled(self, like: Tensor, fill: Callable[[Tensor, torch.Generator], Tensor]) -> Tensor:
        """Random numbers of the shape of `like`."""
        values = super().filled(like, fill)
        return values * self.one if values.is_floating_point() else values

    def dropped_weights(self, x: Tensor, weight: Tensor, rate: float) -> tuple[Tensor, int]:
        """`weight` with dropout."""
        weights, axis = super().dropped_weights(x, weight, rate)
        return weights * self.one, axis


def _kept(t: Tensor) -> float:
    return getattr(t, "_bbalpha_keep", 1.0)


def _mark(out: Any, keep: float) -> None:
    for t in _tensors(out):
        if keep != 1.0 or hasattr(t, "_bbalpha_keep"):
            t._bbalpha_keep = keep  # type: ignore[attr-defined]


def _tensors(a: Any) -> list[Tensor]:
    if isinstance(a, Tensor):
        return [a]
    return [t for t in a if isinstance(t, Tensor)] if isinstance(a, (tuple, list)) else []
