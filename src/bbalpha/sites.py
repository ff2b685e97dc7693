"""Find, switch and record the random sites of any nn.Module.

`stochastic(model)` switches the random sites on and leaves the rest as the caller has it: batch norm, spectral
norm and the like follow their own mode. `trace` runs one pass and reports every random call it met.

    with stochastic(model):          # model.eval() before: batch norm stays in evaluation mode
        one_sample = model(x)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bbalpha.interception import Interception
from bbalpha.masks import Passes

# torch's own modules whose randomness, or whose way around it (the fast path), hangs on `training`
_RANDOM = (
    _DropoutNd,
    nn.RReLU,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)


# ------------------------------------------------------------------------------ switching


@contextmanager
def stochastic(model: nn.Module) -> Iterator[nn.Module]:
    """A context in which `model` samples: random sites on, everything else in the mode the caller left it in.

    Afterwards all flags are as they were, and so is every buffer of a module in evaluation mode, also after
    an exception.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    >>> with stochastic(net):
    ...     net.training, net[0].training, net[1].training
    (False, False, True)
    """
    quiet = [m for m in model.modules() if not m.training]
    with borrowed_buffers(quiet), switched_on(model):
        yield model


@contextmanager
def switched_on(model: nn.Module) -> Iterator[None]:
    """Training mode for every module that may hold a random site; restored on the way out."""
    switched = [m for m in model.modules() if not m.training and may_be_random(m)]
    try:
        for m in switched:
            m.training = True
        yield
    finally:
        for m in switched:
            m.training = False


def may_be_random(module: nn.Module) -> bool:
    """Whether `module` is switched on for sampling: not torch's plain layers, not normalisation layers."""
    if isinstance(module, _RANDOM):
        return True
    if isinstance(module, _NORMS):
        return False
    home = type(module).__module__
    return not home.startswith("torch.nn.")


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a normalisation layer: no prior on its parameters, never switched on."""
    return isinstance(module, _NORMS) or "norm" in type(module).__name__.lower()


@contextmanager
def borrowed_buffers(modules: Sequence[nn.Module]) -> Iterator[dict[Tensor, Tensor]]:
    """Work on copies of the buffers of `modules`; yields {original: copy}, originals are put back after.

    Copies rather than copying back: an autograd graph may hold the buffer a pass has seen.
    """
    copies: dict[Tensor, Tensor] = {}
    places: list[tuple[nn.Module, str, Tensor]] = []
    for m in modules:
        for name, buffer in m.named_buffers(recurse=False):
            copies.setdefault(buffer, buffer.clone())
            places.append((m, name, buffer))
    try:
        for m, name, buffer in places:
            setattr(m, name, copies[buffer])
        yield copies
    finally:
        for m, name, buffer in places:
            if getattr(m, name) is not copies[buffer]:  # assigned anew by the model
                copies[buffer] = getattr(m, name)
            setattr(m, name, buffer)


# ------------------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class Inputs:
    """What a model is called with: a tensor, a tuple (model(*x)) or a mapping (model(**x)), by rows."""

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
        if not isinstance(batch_dim, int) or not 0 <= batch_dim < tensors[0].ndim:
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

        def one(t: Any) -> Any:
            has_rows = isinstance(t, Tensor) and t.ndim > self.batch_dim and t.shape[self.batch_dim] == self.rows
            return change(t) if has_rows else t

        if isinstance(self.x, Tensor):
            return one(self.x)
        if isinstance(self.x, Mapping):
            return {k: one(v) for k, v in self.x.items()}
        return tuple(one(v) for v in self.x)

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


def _items(x: Any) -> list[Any]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        return list(x.values())
    return list(x) if isinstance(x, (tuple, list)) else []


# ------------------------------------------------------------------------------ recording


@dataclass(frozen=True)
class Site:
    """A random call met in one pass.

    Attributes:
        name: The module it happened in ("" is the model itself), as in named_modules.
        kind: "dropout", "attention dropout", "bernoulli_" and so on.
        rate: The rate of being dropped, where there is one.
        fired: Whether it drew.
    """

    name: str
    kind: str
    rate: float | None
    fired: bool


@dataclass(frozen=True)
class Trace:
    """What one pass met.

    Attributes:
        sites: Random calls in order.
        hidden: Random operators that could not be intercepted (compiled or foreign code), by name.
        prefix: Modules with parameters that ran before the first draw: work that all passes share.
        behind: Modules that ran after it.
        keep: Keep probability of the units that feed each weight, {parameter name: probability}.
        moved: Whether the pass changed a buffer.
        output: What the model returned.
    """

    sites: tuple[Site, ...]
    hidden: tuple[str, ...]
    prefix: tuple[str, ...]
    behind: tuple[str, ...]
    keep: dict[str, float]
    moved: bool
    output: Any

    @property
    def fired(self) -> bool:
        """Whether anything random happened."""
        return bool(self.hidden) or any(s.fired for s in self.sites)


def trace(model: nn.Module, inputs: Inputs, *, switch: bool = True) -> Trace:
    """Run one pass of `model` without gradients and report its random calls; nothing is changed by it.

    With ``switch=False`` the modules keep the caller's mode, so that what fires by itself can be told from
    what sampling switches on.
    """
    names = {m: n for n, m in model.named_modules()}
    parameters = {id(p): n for n, p in model.named_parameters()}
    stack: list[nn.Module] = []
    sites: list[Site] = []
    prefix: dict[str, None] = {}
    behind: dict[str, None] = {}

    def observe(kind: str, rate: float | None, fires: bool) -> None:
        sites.append(Site(names[stack[-1] if stack else model], kind, rate, fires))

    def enter(m: nn.Module, *_: Any) -> None:
        stack.append(m)
        if next(m.parameters(recurse=False), None) is not None:
            (behind if mode.fired else prefix).setdefault(names[m])

    def leave(*_: Any) -> None:
        stack.pop()

    mode = _Tracer(Passes(0, 0, 1, device=inputs.device), inputs.rows, inputs.batch_dim, observe, parameters)
    hidden = _Watch(mode)
    with ExitStack() as contexts:
        for m in names:
            contexts.callback(m.register_forward_pre_hook(enter).remove)
            contexts.callback(m.register_forward_hook(leave, always_call=True).remove)
        copies = contexts.enter_context(borrowed_buffers(list(names)))
        versions = {t: t._version for t in copies.values()}
        if switch:
            contexts.enter_context(switched_on(model))
        contexts.enter_context(torch.random.fork_rng(devices=[]))
        contexts.enter_context(torch.compiler.set_stance("force_eager"))
        contexts.enter_context(torch.no_grad())
        contexts.enter_context(hidden)
        contexts.enter_context(mode)
        output = inputs.call(model)
    moved = any(t not in versions or t._version != versions[t] for t in copies.values())
    return Trace(tuple(sites), tuple(hidden.seen), tuple(prefix), tuple(behind), mode.keep, moved, output)


class _Watch(TorchDispatchMode):
    """Lists operators that draw from torch's global generator behind the back of `mode`."""

    def __init__(self, mode: Interception) -> None:
        super().__init__()
        self.mode = mode
        self.seen: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self.mode.inside:
            self.seen.setdefault(str(func))
        return func(*args, **(kwargs or {}))


class _Tracer(Interception):
    """An interception that also follows which dropout feeds which weight."""

    def __init__(
        self,
        passes: Passes,
        rows: int,
        batch_dim: int,
        observe: Callable[[str, float | None, bool], None],
        parameters: dict[int, str],
    ) -> None:
        super().__init__(passes, rows, batch_dim=batch_dim, observer=observe)
        self.parameters = parameters
        self.keep: dict[str, float] = {}

    def dropped(self, x: Tensor, rate: float, *, channels: bool = False) -> Tensor:
        out = super().dropped(x, rate, channels=channels)
        out._keep = getattr(x, "_keep", 1.0) * (1 - rate)  # type: ignore[attr-defined]
        return out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if not args or not isinstance(args[0], Tensor):
            return out
        if name in _WEIGHTED and len(args) + len(kwargs or {}) > 1:
            weights = [*args, *(kwargs or {}).values()]
            kept = min(getattr(a, "_keep", 1.0) for a in weights if isinstance(a, Tensor))
            for a in weights:
                if isinstance(a, Tensor) and a.ndim > 1 and id(a) in self.parameters:
                    self.keep[self.parameters[id(a)]] = kept
        elif name in _ZERO_PRESERVING and isinstance(out, Tensor) and hasattr(args[0], "_keep"):
            out._keep = args[0]._keep  # type: ignore[attr-defined]
        return out


_WEIGHTED = frozenset(
    ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "matmul",
     "__matmul__", "mm", "addmm", "bmm", "baddbmm", "bilinear")
)  # fmt: skip
_ZERO_PRESERVING = frozenset(
    ("relu", "relu_", "leaky_relu", "leaky_relu_", "tanh", "tanh_", "gelu", "silu", "elu", "selu", "celu", "hardswish",
     "view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous", "squeeze", "unsqueeze", "clone",
     "to", "float", "half", "bfloat16", "double", "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "t",
     "movedim")
)  # fmt: skip


def same_structure(a: Any, b: Any) -> bool:
    """Whether two outputs hold tensors of equal shapes in equal places."""
    shapes = [[tuple(t.shape) if isinstance(t, Tensor) else type(t) for t in tree_leaves(o)] for o in (a, b)]
    return type(a) is type(b) and shapes[0] == shapes[1]
