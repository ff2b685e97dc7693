"""What a model is called with, by rows: a tensor, a tuple of arguments, a mapping of them, or one object.

Tensors may be nested in lists, tuples and dicts. Which of them have rows, and on which axis, is said by `batch_dim` or
found by evidence (`bbalpha._engine.rows`), never by a coincidence of sizes alone.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bbalpha._torch import TreeSpec, concrete, transforms_active, tree_flatten, tree_unflatten

BatchDim = int | tuple[Any, ...] | list[Any] | Mapping[str, Any]  # an axis, or one (or None) for every input
Axes = tuple[int | None, ...]
T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 - a decorator, called like a function
    """A property that is found out once, without a lock.

    That of functools has one for all objects of a class, and an interrupt at the wrong moment leaves it locked for good
    (Python 3.11): every other thread hangs.
    """

    def __init__(self, find: Callable[[Any], T]) -> None:
        self.find, self.__doc__ = find, find.__doc__

    def __get__(self, instance: Any, owner: type) -> T:
        value = instance.__dict__[self.find.__name__] = self.find(instance)
        return value


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model, and where their rows are.

    Attributes:
        x: A tensor (model(x)), a tuple (model(*x)), a dict (model(**x)), or any other object (model(x)).
        axes: For every tensor in `x`, in order, the axis of its rows; None if it is the same for all rows.
        batch_dim: The axis that was named, where the tensors that have it are still to be told.
    """

    x: Any
    axes: Axes
    batch_dim: int | None = None

    @classmethod
    def of(cls, x: Any, batch_dim: BatchDim = 0, *, model: nn.Module | None = None) -> "Inputs":
        """Inputs as they are given; arrays become tensors of the dtype of `model`.

        With one axis for all inputs, the tensors that are as long there as the first are taken to have the rows, until
        evidence says otherwise.
        """
        if isinstance(x, Tensor) and type(batch_dim) is int and 0 <= batch_dim < x.ndim:
            return cls(x, (batch_dim,), batch_dim)
        x = _tidied(x, model)
        tensors = _tensors(x)
        if not isinstance(batch_dim, int):
            return cls(x, _declared(x, batch_dim))
        if isinstance(batch_dim, bool) or (tensors and not 0 <= batch_dim < tensors[0].ndim):
            got = tuple(tensors[0].shape) if tensors else "of no tensor"
            raise ValueError(f"`batch_dim` must be an axis of `x`, whose shape is {got}; got {batch_dim!r}.")
        rows = tensors[0].shape[batch_dim] if tensors else None
        axes = tuple(batch_dim if t.ndim > batch_dim and t.shape[batch_dim] == rows else None for t in tensors)
        return cls(x, axes, batch_dim)

    def call(self, model: Callable[..., Any]) -> Any:
        """The model's output."""
        if isinstance(self.x, dict):
            return model(**self.x)
        return model(*self.x) if type(self.x) is tuple else model(self.x)

    @lazy
    def tensors(self) -> list[Tensor]:
        """The tensors among the inputs."""
        return _tensors(self.x)

    @lazy
    def rows(self) -> int | None:
        """N; None where no input is known to have rows."""
        if isinstance(self.x, Tensor):
            axis = self.axes[0]
            return None if axis is None else self.x.shape[axis]
        for t, axis in zip(self.tensors, self.axes, strict=True):
            if axis is not None:
                return t.shape[axis]
        packed = self._packed()
        return None if packed is None else int(packed.batch_sizes[0])

    @property
    def device(self) -> torch.device:
        """Where the passes are drawn."""
        if isinstance(self.x, Tensor):
            return self.x.device
        packed = self._packed()
        found = [*self.tensors, *(() if packed is None else (packed.data,))]
        return found[0].device if found else torch.device("cpu")

    @property
    def kind(self) -> tuple[Any, ...]:
        """What inputs have in common that a model may be run on alike."""
        x, rows = self.x, self.rows
        few = rows if rows is None or rows < 2 else 2
        if isinstance(x, Tensor) and x.is_cpu:
            return few, self.axes, self.batch_dim, torch.is_autocast_enabled("cpu"), x.dtype, x.ndim
        device = self.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        common = (few, self.axes, self.batch_dim, autocast, device)
        if isinstance(x, Tensor):
            return *common, x.dtype, x.ndim
        leaves, spec = _flat(x)
        plain = tuple(v if isinstance(v, (bool, str)) else type(v) for v in leaves if not isinstance(v, Tensor))
        return *common, tuple((t.dtype, t.ndim) for t in self.tensors), str(spec), plain

    # ---- the same inputs, changed

    def map(self, change: Callable[[Tensor, int], Tensor]) -> "Inputs":
        """The same inputs with every tensor that has rows changed: change(tensor, axis of its rows)."""
        pairs = zip(self.tensors, self.axes, strict=True)
        return self.holding([t if axis is None else change(t, axis) for t, axis in pairs])

    def fresh(self) -> "Inputs":
        """Copies, so that layers that work in place spare the caller's tensors."""
        return self.holding([t.clone() for t in self.tensors])

    def concrete(self) -> "Inputs":
        """Tensors whose values Python may read, where a torch.func transform is at work."""
        return self.holding([concrete(t) for t in self.tensors]) if transforms_active() else self

    def narrow(self, start: int, count: int) -> "Inputs":
        """The rows from `start` on, `count` of them."""
        return self.map(lambda t, axis: t.narrow(axis, start, count))

    def select(self, rows: Tensor) -> "Inputs":
        """Rows by number, without their autograd history."""
        return self.map(lambda t, axis: t.detach().index_select(axis, rows.to(t.device)))

    def repeated(self, count: int) -> "Inputs":
        """Every row `count` times: the batch, again and again."""

        def repeat(t: Tensor, d: int) -> Tensor:
            return t.unsqueeze(d).expand(*t.shape[:d], count, *t.shape[d:]).flatten(d, d + 1)

        return self.map(repeat)

    def holding(self, tensors: list[Tensor]) -> "Inputs":
        """The same with other tensors, in order."""
        if isinstance(self.x, Tensor):
            return replace(self, x=tensors[0])
        left = iter(tensors)
        leaves, spec = _flat(self.x)
        return replace(self, x=tree_unflatten([next(left) if isinstance(v, Tensor) else v for v in leaves], spec))

    def _packed(self) -> PackedSequence | None:
        if isinstance(self.x, Tensor):
            return None
        return next((v for v in _flat(self.x)[0] if isinstance(v, PackedSequence)), None)

    # ---- which of them have rows

    def readings(self, most: int = 16) -> list["Inputs"]:
        """These inputs with every set of tensors that may be the ones with rows, the likeliest first.

        Tensors of one length at `batch_dim` may belong together, those of the first tensor's length first.
        """
        if self.batch_dim is None:
            return [self]
        d = self.batch_dim
        lengths = [t.shape[d] if t.ndim > d else None for t in self.tensors]
        found: list[Axes] = []
        for length in dict.fromkeys(n for n in lengths if n is not None):
            group = [i for i, n in enumerate(lengths) if n == length]
            for size in range(len(group), 0, -1):
                for chosen in combinations(group, size):
                    found.append(tuple(d if i in chosen else None for i in range(len(lengths))))
        return [replace(self, axes=axes) for axes in found[:most]]


def _tidied(x: Any, model: nn.Module | None) -> Any:
    """`x` as a tensor, a tuple, a dict or an object, with tensors in the place of arrays."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping):
        x = dict(x)
    elif isinstance(x, (tuple, list)) and not isinstance(x, PackedSequence):
        x = tuple(x)
    elif _is_plain(x) or isinstance(x, (set, frozenset)) or type(x) is object or inspect.isroutine(x):
        raise TypeError(f"`x` must be a tensor, a tuple of arguments or a mapping of them; got {type(x).__name__}.")
    leaves, spec = _flat(x)
    if isinstance(x, (tuple, dict)) and all(_is_plain(v) for v in leaves):
        raise ValueError(f"`x` must hold at least one tensor; got none in {_short(x)}.")
    if not any(isinstance(v, np.ndarray) for v in leaves):
        return x
    dtype = None if model is None else next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return tree_unflatten([_as_tensor(v, dtype) if isinstance(v, np.ndarray) else v for v in leaves], spec)


def _as_tensor(array: Any, dtype: torch.dtype | None) -> Tensor:
    try:
        t = torch.as_tensor(array)
    except TypeError as error:
        raise TypeError(f"`x` must hold arrays of numbers; got dtype {array.dtype}.") from error
    return t.to(dtype) if dtype is not None and t.is_floating_point() else t


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, bytes, bool, int, float, complex))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _tensors(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [v for v in _flat(x)[0] if isinstance(v, Tensor)]


def _flat(x: Any) -> tuple[list[Any], TreeSpec]:
    """What lists, tuples and dicts hold in the end; packed sequences stay whole."""
    return tree_flatten(x, is_leaf=lambda v: isinstance(v, PackedSequence))


def _declared(x: Any, batch_dim: Any) -> Axes:
    """The axis of every tensor, as the caller says it: in the structure of `x`, None for all tensors below it."""
    axes: list[int | None] = []
    for part, said in _paired(x, batch_dim):
        for t in _tensors(part):
            if said is not None and (isinstance(said, bool) or not isinstance(said, int) or not 0 <= said < t.ndim):
                raise ValueError(
                    f"`batch_dim` must name an axis of every tensor or None; got {said!r} for shape {tuple(t.shape)}."
                )
            axes.append(said)
    rows = {t.shape[axis] for t, axis in zip(_tensors(x), axes, strict=True) if axis is not None}
    if len(rows) != 1:
        raise ValueError(f"`batch_dim` must name axes of one length, the rows; got lengths {sorted(rows)}.")
    return tuple(axes)


def _paired(x: Any, said: Any) -> list[tuple[Any, Any]]:
    if isinstance(said, Mapping) and isinstance(x, Mapping) and said.keys() == x.keys():
        return [pair for k in x for pair in _paired(x[k], said[k])]
    if isinstance(said, (tuple, list)) and isinstance(x, (tuple, list)) and len(said) == len(x):
        return [pair for a, b in zip(x, said, strict=True) for pair in _paired(a, b)]
    if said is None or isinstance(said, int):
        return [(x, said)]
    raise ValueError(f"`batch_dim` must be an axis or have the structure of `x`; got {_short(said)} for {_short(x)}.")
