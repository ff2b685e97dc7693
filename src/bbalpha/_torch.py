"""Every private or forged part of torch that the library uses: what each is for, and what is lost where it goes.

No other file names one (a test looks). What only some versions of torch have is left out where
it is missing; what the library cannot do without is an ImportError that names it.
"""

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

try:
    # `DispatchMode`, below. Trees: nested inputs and outputs as torch itself takes them apart, the classes that others
    # registered (ModelOutput) included; else: a walk of our own, without these
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

    # whether a transform of torch.func is at work, in which values cannot be read and generators not be asked
    transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
    # whether a tensor is of such a transform, or of vmap; else: `sample` inside torch.func is refused
    is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
    is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor
    # (x, values, t): x where values > t, else 0, in one vectorised step and broadcasting; else: torch.where, 9 x slower
    where_above = torch.ops.aten.threshold_backward
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"torch {torch.__version__} lacks a part that bbalpha needs: {error}. Install a version it asks for."
    ) from error

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]


# ------------------------------------------------------------------------------ autograd and torch.func


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """function.apply(*args); outside of torch.func transforms without the binding of default arguments.

    That binding takes 40 us a call, a quarter of what a small network takes. Forged: the `apply` of the class below
    torch.autograd.Function; without it, function.apply.
    """
    if transforms_active() or torch.compiler.is_compiling():
        out: Tensor = function.apply(*args)
    else:
        out = super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    return out


def outside_transforms() -> AbstractContextManager[Any]:
    """A context outside of the torch.func transforms that are at work: random calls and values of tensors are plain.

    Without it `sample` inside of torch.func fails where torch refuses to draw.
    """
    if not transforms_active():
        return nullcontext()
    from torch._functorch import pyfunctorch

    return pyfunctorch.temporarily_clear_interpreter_stack()


def concrete(t: Tensor) -> Tensor:
    """A tensor with values that Python may read, for one that a torch.func transform has wrapped; of a batch the first.

    For plans, which are made by trying; without it `sample` inside of torch.func must have been planned outside.

    >>> torch.func.vmap(lambda t: (concrete(t) == 1.0).all() * t)(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    functorch = torch._C._functorch
    while is_wrapped(t):
        value: Tensor = functorch.get_unwrapped(t)
        t = value.select(functorch.maybe_get_bdim(t), 0) if is_batched(t) else value
    return t


def pick(values: Tensor, index: Tensor) -> Tensor:
    """values[index] where vmap has an `index` () for each pass; in one step, where torch is newer than 2.6."""
    try:
        return values[index]
    except RuntimeError:  # "calling .item() on a Tensor"
        return values.index_select(0, index.unsqueeze(0)).squeeze(0)


version_of: Callable[[Tensor], int] = attrgetter("_version")  # grows when a tensor is written to: plans hang on it
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")  # what it is a view of: whose weights were fed?


# ------------------------------------------------------------------------------ generators

# the state of a CPU generator that has drawn nothing, as numbers of 64 bits; its 624 words are at _WORDS
_NEW = torch.Generator().manual_seed(7).get_state().numpy().view(np.uint64).copy()
_WORDS = slice(3, 627)
if _NEW.shape != (632,) or _NEW[_WORDS][:2].tolist() != [7, 7 * 1812433253 + 1 & 0xFFFFFFFF]:
    raise ImportError(
        f"torch {torch.__version__} keeps its generator in another form. Install a version bbalpha asks for."
    )
_MIX, _SHIFT = np.uint64(0xBF58476D1CE4E5B9), np.uint64(32)
_PLACES = np.random.RandomState(0).randint(0, 2**64, 624, np.uint64)  # one for each word


def generators(seeds: Sequence[int], device: torch.device | None = None) -> list[torch.Generator]:
    """A generator for each seed, of which all 64 bits count; seeds must be scrambled, as those of `_kernels` are.

    `manual_seed` of a CPU generator takes the lower 32: with these, one pass in a thousand of a run of a million steps
    shares its numbers with that of another step. Forged: the state of the generator; without it, `manual_seed`.

    >>> a, b = (torch.rand(3, generator=g) for g in generators([5, 5 + 2**32]))
    >>> bool((a == b).any())
    False
    """
    if device is not None and device.type != "cpu":
        return [torch.Generator(device).manual_seed(seed) for seed in seeds]
    made = [torch.Generator() for _ in seeds]
    for generator, state in zip(made, _states(seeds), strict=True):
        generator.set_state(state)
    return made


def seed_global(seed: int) -> None:
    """Seed torch's global generators, that of the CPU by all 64 bits."""
    torch.manual_seed(seed)
    torch.default_generator.set_state(_states([seed])[0])


def _states(seeds: Sequence[int]) -> list[Tensor]:
    """The state of a CPU generator for each seed: its words are the seed, scrambled in 624 ways."""
    states = np.empty((len(seeds), len(_NEW)), np.uint64)
    states[:] = _NEW
    words = states[:, _WORDS]
    np.bitwise_xor(np.array(seeds, np.uint64)[:, None], _PLACES, out=words)
    words *= _MIX
    words >>= _SHIFT
    # each by itself: `set_state` reads from where the memory of a tensor begins, not where a view of it does
    return [torch.from_numpy(state) for state in states.view(np.uint8)]


# ------------------------------------------------------------------------------ modes of a thread

Modes = tuple[bool, list[Any], int, int]


def modes() -> Modes:
    """The modes of torch this thread is in: gradients, overrides, dispatchers, transforms.

    With `restore_modes`, what an interrupt may leave behind; without the two, such a thread has to be started anew.
    """
    return (
        torch.is_grad_enabled(),
        _function_modes(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._functorch.get_dynamic_layer_stack_depth(),
    )


def restore_modes(before: Modes) -> None:
    """Leave the modes that were entered since `before`."""
    grad, functions, dispatches, depth = before
    while torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
    while torch._C._len_torch_dispatch_stack() > dispatches:
        torch._C._pop_torch_dispatch_stack(None)
    if _function_modes() != functions:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in functions:
            torch._C._push_on_torch_function_stack(mode)
    torch._C._set_grad_enabled(grad)


def _function_modes() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(i) for i in range(count)] if count else []


# ------------------------------------------------------------------------------ functions and operators


class DispatchMode(TorchDispatchMode):
    """Sees every operator on its way to the kernel, so draws that no Python function shows; without dynamo.

    Importing that takes a second. Without the mode such models are run with the global generators seeded for each pass.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def operator_name(operator: Any) -> str:
    """The name of an operator that a dispatch mode meets, "aten::rand"."""
    return str(operator._schema.name)


def takes_generator(operator: Any) -> bool:
    """Whether an operator that a dispatch mode meets can be given a generator."""
    return any(a.name == "generator" for a in operator._schema.arguments)


def multiply_adds(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """About how many multiply-adds a call of an operator takes that a dispatch mode meets; 0 for what has no weights.

    Asked of torch's own table, whose counter would import dynamo. Without it frozen models may compute what their
    passes share once for each of them.
    """
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(operator._overloadpacket)
    if count is not None:
        return int(count(*args, **kwargs, out_val=out)) // 2
    if not any(kind in operator_name(operator) for kind in ("lstm", "gru", "rnn")):
        return 0
    tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    weights = sum(t.numel() for t in tensors if t.ndim == 2)  # once for every row and step
    return tensors[0].shape[:-1].numel() * weights


def native(name: str) -> Any:
    """torch.<name>, a kernel without documentation that torch's layers call; its name, which nobody calls, if gone."""
    return getattr(torch, name, name)


def body_of(func: Any) -> Any:
    """A Python function of torch.nn.functional, to be run with an override mode on, so that its random calls are seen.

    Forged: at their top these functions ask whether somebody overrides them, which would call the mode again for ever;
    in the copy that question is answered no. Without it each of them has to be written anew.
    """
    copy = types.FunctionType(func.__code__, _NOT_OVERRIDDEN, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_NOT_OVERRIDDEN = dict(vars(F)) | {
    name: lambda *_: False for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


def is_scripted() -> bool:
    """Whether torch.jit.trace looks on: sizes are tensors then, and may not steer Python."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def inside_checkpoint(outermost: types.CodeType) -> bool:
    """Whether the caller, further in than `outermost`, is at work inside torch.utils.checkpoint.

    Forged: read off the frames. Without it gradient checkpointing would give wrong gradients and not an error.
    """
    checkpoint = sys.modules.get("torch.utils.checkpoint")  # torch 2.6 imports it when it is asked for
    frame: types.FrameType | None = None if checkpoint is None else sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        if frame.f_code.co_filename == checkpoint.__file__:  # type: ignore[union-attr]
            return True
        frame = frame.f_back
    return False


def is_watched() -> bool:
    """Whether somebody traces, transforms, casts or differentiates forwards what is called."""
    dual = torch.autograd.forward_ad._current_level >= 0
    seen = is_scripted() or torch.compiler.is_compiling() or transforms_active() or torch.is_autocast_enabled("cpu")
    return bool(dual or seen or torch._C._len_torch_dispatch_stack())


# ------------------------------------------------------------------------------ layers


def pack(weight: Tensor, rows: int) -> Tensor | None:
    """A weight (C, D) laid out for products with about so many rows on this CPU; None where torch has no such layout.

    Private: the operators that torch.compile uses. Without them `F.linear`, which lays the weight out at every call:
    twice the time of large layers with few rows.
    """
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        product_with_packed(weight.new_zeros(1, weight.shape[1]), packed, None)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return packed  # type: ignore[no-any-return]


def product_with_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear for a weight that was packed; not to be differentiated."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], None)
    return out


def convolve(layer: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """What a convolution with another weight gives, padding modes included; else: F.conv, without these."""
    return layer._conv_forward(x, weight, layer.bias)  # type: ignore[no-any-return,operator]


def recur(kind: type[nn.RNNBase], layer: nn.RNNBase, change: Callable[[Tensor], Tensor], x: Any, hx: Any) -> Any:
    """What a recurrent layer with changed weights gives, run as a `kind`; the layer itself is left alone.

    Without it: torch.func.functional_call, which changes the layer for a moment, so that threads could not share it.
    """
    weights = [change(getattr(layer, name)) for name in layer._flat_weights_names]
    return kind.forward(_Reweighted(layer, weights), x, hx)


class _Reweighted:
    def __init__(self, layer: nn.Module, weights: list[Tensor]) -> None:
        self._layer, self._flat_weights = layer, weights

    def _update_flat_weights(self) -> None:
        """They are up to date."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def decay_after_unscaling(optimizer: torch.optim.Optimizer) -> None:
    """Have a GradScaler unscale the gradients before the step of a fused optimiser: something is added to them."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------ modules
# What every nn.Module keeps in its __dict__. Public ways to it (named_children, register_...) leave out modules that
# stand in two places, or cost three times as much; without it there are no shadows, and models are run in place.

MODULE_STATE = frozenset(nn.Module().__dict__) | {"_compiled_call_impl"}
# its own children (also those that stand in two places), buffers and parameters by name
children: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """`parameters` in a new place, which may be written to: for a copy, which shares that of its model."""
    module.__dict__["_parameters"] = dict(module._parameters)
    return module._parameters


def copied(module: nn.Module) -> nn.Module:
    """A copy with attributes, a place for children and one for buffers of its own; not compiled."""
    twin: nn.Module = object.__new__(type(module))
    state = module.__dict__.copy()
    object.__setattr__(twin, "__dict__", state)
    for name in ("_modules", "_buffers"):
        if state[name]:
            state[name] = state[name].copy()
    if state.get("_compiled_call_impl") is not None:
        state["_compiled_call_impl"] = None
    return twin


def listened_to(module: nn.Module) -> nn.Module:
    """`module`, a copy, with hooks of its own: whoever listens to it does not listen to the model."""
    for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called"):
        module.__dict__[name] = module.__dict__[name].copy()
    return module


def is_hooked(attributes: dict[str, Any]) -> bool:
    """Whether somebody listens to the calls of a module with these attributes, or put a forward of his own in it."""
    own = attributes  # of every module at every call, hence no loop
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return bool(hooks) or "forward" in own


def hook_places(module: nn.Module) -> Iterator[dict[int, Any]]:
    """Where its forward hooks and forward pre-hooks are kept; nothing for TorchScript, which takes none."""
    if not isinstance(module, torch.jit.ScriptModule):
        yield from (module._forward_hooks, module._forward_pre_hooks)


def change_hooks(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Give a copy other forward hooks and pre-hooks, in places of its own."""
    state = module.__dict__
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        if state[name]:
            state[name] = type(state[name])((key, change(hook)) for key, hook in state[name].items())


def has_global_hooks() -> bool:
    """Whether somebody listens to the calls of all modules; assumed not where torch keeps them elsewhere."""
    names = [f"_global_{way}_hooks" for way in ("forward", "forward_pre", "backward", "backward_pre")]
    return any(getattr(nn.modules.module, name, None) for name in names)


# ------------------------------------------------------------------------------ compiled and wrapped modules


def compiler_loaded() -> bool:
    """Whether anything can have been compiled: importing the compiler takes a second."""
    return "torch._dynamo" in sys.modules


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what torch.compile made, or compiled in place."""
    return is_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is the module that torch.compile puts around another, to which it hands on its flags."""
    return "_orig_mod" in module._modules


class Eager(nn.Module):
    """In the place of such a wrapper: the same name for its only child, run as it was written."""

    def __init__(self, wrapper: nn.Module, change: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self._orig_mod = change(wrapper._orig_mod)  # type: ignore[arg-type]
        self.training = wrapper.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model inside gives."""
        return self._orig_mod(*args, **kwargs)


def written_class(module: nn.Module) -> type:
    """The class as somebody wrote it: before torch scripted the module, or wrapped its class to parametrise it."""
    if isinstance(module, torch.jit.ScriptModule):
        found: type = getattr(nn, getattr(module, "original_name", ""), type(module))
        return found
    return type(module).__mro__[1] if parametrize.is_parametrized(module) else type(module)
