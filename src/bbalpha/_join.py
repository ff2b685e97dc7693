"""The other processes that work on a batch, as the objectives meet them: set by `bbalpha.distributed`, else nobody.

with joined(join):
loss = bbalpha.cross_entropy(outputs, y)          # outputs of the rows and passes that are here, loss of all
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor


class Join(Protocol):
    """Who has the other passes of these rows, and who has the other rows."""

    def passes(self, values: Tensor, over: Callable[[Tensor], Tensor]) -> Tensor:
        """The objective over all passes, `over` (K, ...) -> (...), from that over the passes that are here (...)."""

    def total(self, total: Tensor | float) -> Tensor:
        """What all rows count, from what those here count ()."""

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all rows, from that over those here ()."""


_JOIN: ContextVar[Join | None] = ContextVar("join", default=None)


@contextmanager
def joined(join: Join) -> Iterator[None]:
    """A context in which the objectives are taken over what all processes have."""
    token = _JOIN.set(join)
    try:
        yield
    finally:
        _JOIN.reset(token)


def joined_now() -> Join | None:
    """The processes that are joined here; compiled code knows of none."""
    return None if torch.compiler.is_compiling() else _JOIN.get()
