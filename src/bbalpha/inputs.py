"""What a model is called with, by rows: a tensor, a tuple of arguments or a mapping of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """A tensor (model(x)), a tuple (model(*x)) or a mapping (model(**x)); its tensors of `rows` rows belong together.

    Attributes:
        x: The inputs.
        batch_dim: The axis of the rows.
        rows: N. Tensors of another length there are the same for all rows.
    """

    x: Any
    batch_dim: int
    rows: int

    @classmethod
    def of(cls, x: Any, batch_dim: int) -> "Inputs":
        """Read the rows off the first tensor of `x`."""
        tensors = [t for t in _items(x) if isinstance(t, Tensor)]
        if not isinstance(x, (Tensor, tuple, list, Mapping)):
            raise TypeError(f"`x` must be a tensor, a tuple of arguments or a mapping of them; got {type(x).__name__}.")
        if not tensors:
            raise ValueError("`x` must hold at least one tensor; got none.")
        if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or not 0 <= batch_dim < tensors[0].ndim:
            raise ValueError(
                f"`batch_dim` must be an axis of `x`, whose shape is {tuple(tensors[0].shape)}; got {batch_dim!r}."
            )
        return cls(x, batch_dim, tensors[0].shape[batch_dim])

    def call(self, model: Callable[..., Any]) -> Any:
        """The model's output."""
        if isinstance(self.x, Tensor):
            return model(self.x)
        return model(**self.x) if isinstance(self.x, Mapping) else model(*self.x)

    def map(self, change: Callable[[Tensor], Tensor]) -> Any:
        """The same inputs with every tensor that has the rows changed."""
        return self._each(lambda t: change(t) if self._has_rows(t) else t)

    def fresh(self) -> "Inputs":
        """Copies, so that layers that work in place spare the caller's tensors."""
        return Inputs(self._each(torch.clone), self.batch_dim, self.rows)

    def first(self, rows: int) -> "Inputs":
        """The first `rows` rows, without their autograd history."""
        rows = min(rows, self.rows)
        return Inputs(self.map(lambda t: t.detach().narrow(self.batch_dim, 0, rows)), self.batch_dim, rows)

    def repeated(self, count: int) -> Any:
        """Every row `count` times: the batch, again and again."""

        def repeat(t: Tensor) -> Tensor:
            d = self.batch_dim
            return t.unsqueeze(d).expand(*t.shape[:d], count, *t.shape[d:]).flatten(d, d + 1)

        return self.map(repeat)

    @property
    def device(self) -> torch.device:
        """Where the passes are drawn."""
        return self.tensors[0].device

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the inputs."""
        return [t for t in _items(self.x) if isinstance(t, Tensor)]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What inputs have in common that a model may be run on alike."""
        seen = tuple((t.dtype, t.ndim, self._has_rows(t)) for t in self.tensors)
        keys = tuple(self.x) if isinstance(self.x, Mapping) else None
        autocast = torch.is_autocast_enabled(self.device.type)
        return seen, type(self.x), keys, self.batch_dim, min(self.rows, 2), autocast

    def _has_rows(self, t: Tensor) -> bool:
        return t.ndim > self.batch_dim and t.shape[self.batch_dim] == self.rows

    def _each(self, change: Callable[[Tensor], Tensor]) -> Any:
        def one(t: Any) -> Any:
            return change(t) if isinstance(t, Tensor) else t

        if isinstance(self.x, Tensor):
            return one(self.x)
        if isinstance(self.x, Mapping):
            return {k: one(v) for k, v in self.x.items()}
        return tuple(one(v) for v in self.x)


def _items(x: Any) -> list[Any]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        return list(x.values())
    return list(x) if isinstance(x, (tuple, list)) else []
