"""Find, switch and record the random sites of any nn.Module.

`stochastic(model)` switches the random sites on and leaves the rest as the caller has it: batch norm, spectral
norm and the like follow their own mode. `trace` runs one pass and reports every random call it met.

    with stochastic(model):          # model.eval() before: batch norm stays in evaluation mode
        one_sample = model(x)
"""

import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bbalpha.inputs import Inputs as Inputs  # also a name of this module
from bbalpha.lineage import Lineage, Probe
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
INSERTED = "inserted_dropout"  # the child that `add_dropout` gives to a weight layer
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
def switched_on(model: nn.Module, only: Collection[str] | None = None) -> Iterator[None]:
    """Training mode for every module that may hold a random site, or for those named; restored on the way out.

    Statistics that such a module keeps by itself (F.batch_norm on buffers of its own, spectral norm) still
    follow the caller's mode.
    """
    named = [(name, m) for name, m in model.named_modules() if not m.training and may_be_random(m)]
    switched = [m for name, m in named if only is None or name in only]
    statistics = {id(b) for m in switched for b in m.buffers(recurse=False)}
    powers = {h: h.n_power_iterations for m in switched for h in _hooks(m) if isinstance(h, SpectralNorm)}
    try:
        for hook in powers:
            hook.n_power_iterations = 0
        for m in switched:
            m.training = True
        with _QuietStatistics(statistics) if statistics else nullcontext():
            yield
    finally:
        for m in switched:
            m.training = False
        for hook, n in powers.items():
            hook.n_power_iterations = n


def may_be_random(module: nn.Module) -> bool:
    """Whether `module` is switched on for sampling: not torch's plain layers, not normalisation layers."""
    written = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        written = getattr(nn, getattr(module, "original_name", ""), written)
    elif parametrize.is_parametrized(module):
        written = type(module).__mro__[1]  # the class as it was before torch wrapped it
    if issubclass(written, _RANDOM):
        return True
    if issubclass(written, _NORMS) or hasattr(module, "_orig_mod"):  # torch.compile's wrapper hands flags on
        return False
    return not written.__module__.startswith("torch.nn.")


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


class _QuietStatistics(TorchFunctionMode):
    """Lets F.batch_norm and F.instance_norm use, and not move, the running statistics it is given."""

    def __init__(self, statistics: set[int]) -> None:
        super().__init__()
        self.statistics = statistics  # ids of buffers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flag = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}.get(func)
        if flag is not None and any(id(t) in self.statistics for t in (*args[1:3], *kwargs.values())):
            args = args[:5]
            kwargs[flag] = False
        return func(*args, **kwargs)


def eager() -> AbstractContextManager[Any]:
    """A context in which compiled code runs as it was written, so that its random calls are seen."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled, and importing it takes a second
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


@contextmanager
def forked_generators() -> Iterator[None]:
    """Draws from the global generators of torch, random and numpy that leave them as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, random and numpy with a number below 2^32."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def holds_batched(model: nn.Module) -> bool:
    """Whether a module has kept a tensor that is of use inside `torch.func.vmap` only."""
    return any(
        isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)
        for m in model.modules()
        for value in vars(m).values()
    )


def _hooks(module: nn.Module) -> list[Any]:
    return [] if isinstance(module, torch.jit.ScriptModule) else list(module._forward_pre_hooks.values())


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
        homes: The modules in which random calls were made, whether they drew or not.
        quiet: The modules that ran and made none.
        prefix: Modules with parameters that were done before the first draw: work that all passes share.
        worth_sharing: Whether one of the prefix does more than look up or normalise.
        keep: Keep probability of the units that feed each weight, {parameter name: probability}.
        moved: Whether the pass changed a buffer.
        recomputes: Whether a draw happened inside torch.utils.checkpoint.
        output: What the model returned.
    """

    sites: tuple[Site, ...]
    hidden: tuple[str, ...]
    homes: frozenset[str]
    quiet: frozenset[str]
    prefix: tuple[str, ...]
    worth_sharing: bool
    keep: dict[str, float]
    moved: bool
    recomputes: bool
    output: Any

    @property
    def fired(self) -> bool:
        """Whether anything random happened."""
        return bool(self.hidden) or any(s.fired for s in self.sites)

    @property
    def certain(self) -> bool:
        """Whether dropout was met: random numbers of other kinds may have no effect (layer drop at rate 0)."""
        return any(s.fired and (s.rate is not None or s.kind == "rrelu") for s in self.sites)


def least_switched(model: nn.Module, inputs: Inputs, seen: Trace) -> tuple[frozenset[str] | None, Trace]:
    """The modules to switch on (None: all that may be random), and what a pass with them meets.

    Some modules read `training` for something else (probabilities instead of logits, statistics of their own).
    If leaving those that ran and drew nothing in the caller's mode changes the output, that is where they stay.
    """
    named = {name: m for name, m in model.named_modules() if may_be_random(m)}
    quiet = {name for name in seen.quiet if name in named and not named[name].training}
    parents = {home[:i] for home in seen.homes for i in range(len(home)) if i == 0 or home[i] == "."}
    for left in (quiet, quiet - parents):
        only = frozenset(named.keys() - left)
        less = trace(model, inputs, only=only) if left else seen
        if (less.sites, less.hidden) == (seen.sites, seen.hidden):
            return (None, seen) if same_values(less.output, seen.output) else (only, less)
    return None, seen


def trace(model: nn.Module, inputs: Inputs, *, switch: bool = True, only: Collection[str] | None = None) -> Trace:
    """Run one pass of `model` without gradients and report its random calls; nothing is changed by it.

    With ``switch=False`` the modules keep the caller's mode, so that what fires by itself can be told from
    what sampling switches on; `only` names those to switch on.
    """
    record = _Record(model)
    passes, parameters = Passes(0, 0, 1, device=inputs.device), dict(model.named_parameters())
    mode = Lineage(passes, inputs.rows, batch_dim=inputs.batch_dim, observer=record.draw, parameters=parameters)
    with ExitStack() as contexts:
        contexts.enter_context(record.hooked())
        copies = contexts.enter_context(borrowed_buffers(list(record.names)))
        before = {original: copy.clone() for original, copy in copies.items()}
        if switch:
            contexts.enter_context(switched_on(model, only))
        for context in (forked_generators(), eager(), torch.no_grad(), _Watch(inputs.device, record.hide), mode):
            contexts.enter_context(context)
        output = inputs.fresh().call(model)
    homes = {s.name for s in record.sites} | set(record.hidden.values())
    moved = any(copy.shape != before[t].shape or not torch.equal(copy, before[t]) for t, copy in copies.items())
    return Trace(
        sites=tuple(record.sites),
        hidden=tuple(record.hidden),
        homes=frozenset(homes),
        quiet=frozenset(record.ran.keys() - homes),
        prefix=tuple(record.names[m] for m in record.prefix),
        worth_sharing=any(not is_norm(m) and not isinstance(m, nn.Embedding) for m in record.prefix),
        keep=mode.keep,
        moved=moved,
        recomputes=record.recomputes,
        output=output,
    )


def depends(model: nn.Module, inputs: Inputs, only: Collection[str] | None) -> bool:
    """Whether the output depends on what is drawn, as autograd sees it: weights of 0 behind a dropout count.

    True as well where autograd cannot tell.
    """
    probe = Probe(Passes(0, 0, 1, device=inputs.device), inputs.rows, batch_dim=inputs.batch_dim)
    try:
        with ExitStack() as contexts:
            modes = (borrowed_buffers(list(model.modules())), switched_on(model, only), forked_generators(), eager())
            for context in (*modes, torch.enable_grad(), probe):
                contexts.enter_context(context)
            output = inputs.fresh().call(model)
        numbers = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        leaves = [t for t in numbers if t.requires_grad]
        if not leaves:
            return torch.is_inference_mode_enabled() or not numbers
        (grad,) = torch.autograd.grad(leaves, probe.one, [torch.ones_like(t) for t in leaves], allow_unused=True)
    except RuntimeError:  # in-place code that cannot be differentiated
        return True
    return grad is not None


def _called_from(file: str) -> bool:
    """Whether code of `file` is at work further up."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Record:
    """The modules at work while a pass runs, and the random calls made in each."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {m: name for name, m in model.named_modules()}
        self.stack: list[nn.Module] = []
        self.sites: list[Site] = []
        self.hidden: dict[str, str] = {}  # operator: the module it was first met in
        self.ran: dict[str, None] = {}
        self.prefix: dict[nn.Module, None] = {}
        self.drawn = self.recomputes = False

    def draw(self, kind: str, rate: float | None, fires: bool) -> None:
        """A random call that was intercepted."""
        self.sites.append(Site(self._home(), kind, rate, fires))
        self.drawn |= fires
        self.recomputes |= fires and _called_from(torch.utils.checkpoint.__file__)

    def hide(self, operator: str) -> None:
        """A random operator that was not."""
        self.hidden.setdefault(operator, self._home())
        self.drawn = True

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """A context in which the modules report when they begin and when they are done."""
        with ExitStack() as hooks:
            for m in self.names:
                if not isinstance(m, torch.jit.ScriptModule):  # takes no hooks
                    hooks.callback(m.register_forward_pre_hook(self._enter).remove)
                    hooks.callback(m.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, m: nn.Module, *_: Any) -> None:
        self.stack.append(m)
        self.ran.setdefault(self.names[m])

    def _leave(self, m: nn.Module, *_: Any) -> None:
        self.stack.pop()
        if not self.drawn and next(m.parameters(recurse=False), None) is not None:
            self.prefix.setdefault(m)

    def _home(self) -> str:
        return self.names[self.stack[-1]] if self.stack else ""


class _Watch(TorchDispatchMode):
    """Tells of operators that draw from a global generator, which calls that were intercepted never do."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what we watch runs eagerly, and importing dynamo takes a second

    def __init__(self, device: torch.device, met: Callable[[str], None]) -> None:
        super().__init__()
        self.device = device
        self.met = met
        self.foreign = _foreign_states()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **(kwargs or {}))
        before = self._states()
        out = func(*args, **(kwargs or {}))
        if any(not torch.equal(a, b) for a, b in zip(before, self._states(), strict=True)):
            self.met(str(func))
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, state in _foreign_states().items():
            if state != self.foreign[name]:
                self.met(name)

    def _states(self) -> list[Tensor]:
        own = [] if self.device.type == "cpu" else [torch.get_device_module(self.device).get_rng_state()]
        return [torch.get_rng_state(), *own]


def _foreign_states() -> dict[str, Any]:
    """The generators of Python and numpy, which stochastic depth is sometimes drawn from."""
    _, words, position, *_ = np.random.get_state()
    return {"random": random.getstate(), "numpy.random": (np.asarray(words).tobytes(), position)}


def same_values(a: Any, b: Any) -> bool:
    """Whether two outputs of equal structure hold the same numbers, to rounding."""
    return same_structure(a, b) and all(
        torch.allclose(s.float(), t.float(), rtol=1e-3, atol=1e-5, equal_nan=True)
        for s, t in zip(tree_leaves(a), tree_leaves(b), strict=True)
        if isinstance(s, Tensor) and not s.is_complex()
    )


def same_structure(a: Any, b: Any) -> bool:
    """Whether two outputs hold tensors of equal shapes in equal places."""
    shapes = [[tuple(t.shape) if isinstance(t, Tensor) else type(t) for t in tree_leaves(o)] for o in (a, b)]
    return type(a) is type(b) and shapes[0] == shapes[1]
