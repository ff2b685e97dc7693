"""Random operators that no Python function of torch shows: TorchScript, distributions, compiled code of others.

`Hidden` sees every operator on its way to the kernel and gives those that draw the generator of the pass, so that
torch's global generator is neither asked nor moved. It costs Python at every operator: models without hidden draws do
without.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bbalpha._engine.drawing import Drawing, NotShareableError
from bbalpha._engine.guards import torch_states
from bbalpha._torch import DispatchMode, operator_name, takes_generator

_aten = torch.ops.aten
Met = Callable[[str, bool], None]  # the operator, and whether it drew from torch's global generator


class Hidden(DispatchMode):
    """A mode that serves hidden draws from `drawing`, the pass that is run; `met` is told of them.

    A few kernels of accelerators take no generator: `met` is told if they drew from torch's global one.
    """

    def __init__(self, drawing: Drawing, met: Met | None = None) -> None:
        super().__init__()
        self.drawing = drawing
        self.met = met

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None or any(isinstance(a, torch.Generator) for a in args):
            return func(*args, **kwargs)  # intercepted, or the model's own
        draw = _served(func, args, kwargs)
        if draw is None:
            return self._watched(func, args, kwargs)
        if self.met is not None:
            self.met(str(func), False)
        tensors = [a for a in args if isinstance(a, Tensor)]
        if not tensors:
            return self._new(func, args, kwargs, draw)
        return self._drawn(str(func), args, draw)

    def _watched(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A kernel that takes no generator, and may draw from torch's global one."""
        if self.met is None:
            return func(*args, **kwargs)
        device = self.drawing.passes.device or torch.device("cpu")
        before = torch_states(device)
        out = func(*args, **kwargs)
        if any(not torch.equal(a, b) for a, b in zip(before, torch_states(device), strict=True)):
            self.met(str(func), True)
        return out

    def _new(self, func: Any, args: Any, kwargs: Any, draw: Any) -> Tensor:
        """A tensor of a given size (rand, randn, randint): one draw for all rows where these are shared."""
        like = torch.empty(_size(func, args), dtype=kwargs.get("dtype"), device=kwargs.get("device"))
        place = self.drawing.where(like.shape) if self.drawing.where is not None else None
        generator = self.drawing.alone(str(func))
        if not self.drawing.shared or place is None or place.axis is None or operator_name(func) == "aten::randperm":
            return draw(args, generator)  # type: ignore[no-any-return]
        if place.fold > 1:
            raise NotShareableError(f"{func} draws for several entries a row")
        size = list(like.shape)
        size[place.axis] = 1
        parts = [size if isinstance(a, (list, tuple)) else a for a in args]
        return draw(parts, generator).expand_as(like).contiguous()  # type: ignore[no-any-return]

    def _drawn(self, what: str, args: Any, draw: Any) -> Any:
        """What depends on tensors: row by row where draws are shared, each row from the same numbers."""
        first = next(a for a in args if isinstance(a, Tensor))
        drawing = self.drawing
        generator = drawing.alone(what)
        place = drawing.where(first.shape) if drawing.where is not None else None
        if not drawing.shared or drawing.rows == 1 or place is None or place.axis is None:
            return draw(args, generator)
        if place.fold > 1:
            raise NotShareableError(f"{what} draws for several entries a row of a tensor of {tuple(first.shape)}")
        axis, state, parts = place.axis, generator.get_state(), []
        for n in range(first.shape[axis]):
            generator.set_state(state)
            row = [a.narrow(axis, n, 1) if isinstance(a, Tensor) and a.shape == first.shape else a for a in args]
            parts.append(draw(row, generator))
        if not parts:
            return draw(args, generator)
        if isinstance(parts[0], tuple):
            return tuple(torch.cat(ts, axis) for ts in zip(*parts, strict=True))
        return first if draw.inplace else torch.cat(parts, axis)


class _Served:
    """An operator with its generator given."""

    def __init__(self, call: Callable[[Any, torch.Generator], Any], inplace: bool = False) -> None:
        self.call, self.inplace = call, inplace

    def __call__(self, args: Any, generator: torch.Generator) -> Any:
        return self.call(args, generator)


def _served(func: Any, args: Any, kwargs: Any) -> _Served | None:
    """How to call `func` with a generator; None if it takes none."""
    rest = {k: v for k, v in kwargs.items() if k != "generator"}
    if takes_generator(func):
        inplace = operator_name(func).endswith("_")
        return _Served(lambda a, g: func(*a, generator=g, **rest), inplace)
    name = operator_name(func).removeprefix("aten::")
    if func in (_aten.rand.default, _aten.randn.default, _aten.randperm.default, _aten.randint.default):
        named = getattr(_aten, name).generator
        return _Served(lambda a, g: named(*a, generator=g, **rest))
    if func is _aten.randint.low:
        return _Served(lambda a, g: _aten.randint.low_generator(*a, generator=g, **rest))
    if func is _aten.rand_like.default:
        return _Served(lambda a, g: torch.empty_like(a[0], **rest).uniform_(generator=g))
    if func is _aten.randn_like.default:
        return _Served(lambda a, g: torch.empty_like(a[0], **rest).normal_(generator=g))
    if func is _aten.native_dropout.default and args[2] is not False and args[1] > 0:
        return _Served(_native_dropout)
    return None


def _native_dropout(args: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, p = args[:2]
    mask = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
    return x * mask / (1 - p) if p < 1 else x * 0, mask.bool()


def _size(func: Any, args: Any) -> Any:
    sizes = [a for a in args if isinstance(a, (list, tuple))]
    return sizes[0] if sizes else (args[0],)
