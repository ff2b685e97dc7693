"""A shadow of a model: a copy to run in its place, with flags, buffers and hooks of its own and the same parameters.

Running passes means switching flags, moving buffers and listening to modules. All of it is done to a shadow, so the
caller's model is never touched: any number of threads can run one model, and an interrupt leaves nothing to mend.

    shadow = Shadow.of(net, evaluation=True)
    shadow.model(x)                             # in evaluation mode, whatever `net` is in
    shadow.hand_back()                          # what the model wrote down for its caller, such as an auxiliary loss
"""

import copy
import functools
import gc
import threading
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from bbalpha._engine.sites import borrowed_buffers

Use = Literal["run", "again", "trial"]
_IN_PLACE = threading.RLock()  # models without a shadow are run by one thread at a time


@dataclass(frozen=True)
class Shadow:
    """What is run instead of a model.

    Attributes:
        model: The copy, or the model itself where it has no shadow.
        pairs: Every module of the model with its copy.
        links: Attributes of copies that lead to other copies: (address of the copy, name).
        evaluation: Whether the copies began in evaluation mode, whatever the model is in.
    """

    model: nn.Module
    pairs: list[tuple[nn.Module, nn.Module]]
    links: set[tuple[int, str]]
    evaluation: bool

    @classmethod
    def of(cls, model: nn.Module, *, evaluation: bool) -> "Shadow":
        """The shadow of `model`, in the mode of the caller or in evaluation mode."""
        copies: dict[int, nn.Module] = {}
        pairs: list[tuple[nn.Module, nn.Module]] = []
        twin = _copied(model, copies, pairs, evaluation)
        links = {(id(copied), name) for _, copied in pairs for name in _relink(copied, copies)}
        return cls(twin, pairs, links, evaluation)

    def hand_back(self) -> None:
        """Give the model what its forward assigned: attributes, and buffers of modules in training mode."""
        for original, copied in self.pairs:
            if not self.evaluation and original.training and copied._buffers:
                _hand_back_buffers(original, copied)
            if type(copied).__module__.startswith("torch.nn."):
                continue  # torch's own layers write nothing down
            given = original.__dict__
            for name, value in copied.__dict__.items():
                same = name in _STATE or given.get(name, _NOTHING) is value or (id(copied), name) in self.links
                if not same and not _holds_a_module(value):
                    given[name] = value


@contextmanager
def shadowed(model: nn.Module, *, evaluation: bool, use: Use = "run") -> Iterator[nn.Module]:
    """What to run instead of `model`; where that has no shadow, the model itself, by one thread at a time.

    After a run the model is handed back what it wrote down; when a run is done again it is not. In a trial, which asks
    how the model works and not what it says, weights that are all 0 (a branch that has not begun to learn) give way to
    small numbers: what they hide today may show tomorrow.
    """
    try:
        shadow = Shadow.of(model, evaluation=evaluation)
    except NoShadowError:
        pass
    else:
        if use == "trial":
            _wake(shadow)
            _own_buffers(shadow)
        yield shadow.model
        if use == "run":
            shadow.hand_back()
        return
    with _IN_PLACE:
        flags = [(m, m.training) for m in model.modules()]
        try:
            for m, training in flags:
                if evaluation and training:
                    m.training = False
            with borrowed_buffers(list(model.modules())) if use == "trial" else nullcontext():
                yield model
        finally:
            for m, training in flags:
                if m.training != training:
                    m.training = training


class NoShadowError(Exception):
    """A model that cannot be copied: TorchScript, or lazy layers that do not know their size yet."""


# ------------------------------------------------------------------------------ copying

_STATE = frozenset(nn.Module().__dict__) | {"_compiled_call_impl"}  # what every module has, looked after by itself
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
_NOTHING = object()


class _Eager(nn.Module):
    """In the place of a compiled module: the same name for its only child, run as it was written."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._orig_mod = original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)


def _copied(
    module: nn.Module, copies: dict[int, nn.Module], pairs: list[tuple[nn.Module, nn.Module]], evaluation: bool
) -> nn.Module:
    found = copies.get(id(module))
    if found is not None:
        return found
    if isinstance(module, torch.jit.ScriptModule) or (
        isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()
    ):
        raise NoShadowError
    children = module._modules
    if "_orig_mod" in children:
        copies[id(module)] = eager = _Eager(_copied(children["_orig_mod"], copies, pairs, evaluation))  # type: ignore[arg-type]
        eager.training = module.training and not evaluation
        return eager
    twin: nn.Module = object.__new__(type(module))
    state = module.__dict__.copy()
    object.__setattr__(twin, "__dict__", state)
    copies[id(module)] = twin
    pairs.append((module, twin))
    if children:
        state["_modules"] = {
            name: None if child is None else _copied(child, copies, pairs, evaluation)
            for name, child in children.items()
        }
    if state["_buffers"]:
        state["_buffers"] = state["_buffers"].copy()
    if evaluation:
        state["training"] = False
    if state.get("_compiled_call_impl") is not None:
        state["_compiled_call_impl"] = None
    return twin


def listened_to(module: nn.Module) -> nn.Module:
    """`module`, a copy, with hooks of its own: whoever listens to it does not listen to the model."""
    for name in _HOOKS:
        module.__dict__[name] = module.__dict__[name].copy()
    return module


def _wake(shadow: Shadow) -> None:
    """Small numbers in the place of parameters that are all 0."""
    generator = torch.Generator().manual_seed(0)
    for _, copied in shadow.pairs:
        asleep = [n for n, p in copied._parameters.items() if p is not None and p.is_floating_point() and not p.any()]
        if asleep and not isinstance(copied, nn.RNNBase):  # which holds its weights a second time
            state = copied.__dict__["_parameters"] = dict(copied._parameters)
            for name in asleep:
                p = state[name]
                noise = 0.05 * torch.randn(p.shape, generator=generator)
                state[name] = nn.Parameter(noise.to(p), p.requires_grad)


def _own_buffers(shadow: Shadow) -> None:
    """Copies of the buffers too, one for each."""
    copies: dict[int, Tensor] = {}
    for _, copied in shadow.pairs:
        for name, b in copied._buffers.items():
            if b is not None:
                copied._buffers[name] = copies.setdefault(id(b), b.clone())


def _hand_back_buffers(original: nn.Module, copied: nn.Module) -> None:
    for name, buffer in copied._buffers.items():
        if buffer is not original._buffers.get(name):
            original._buffers[name] = buffer


# ------------------------------------------------------------------------------ references between modules

_PLAIN: frozenset[type] = frozenset(
    (int, float, complex, str, bytes, bool, type(None), Tensor, nn.Parameter, torch.dtype, torch.device, torch.Size,
     types.BuiltinFunctionType, torch.Generator)
)  # fmt: skip
_KNOWN_CLEAN: dict[int, "weakref.ref[Any]"] = {}  # objects that were seen to lead to no module


def _relink(copied: nn.Module, copies: dict[int, nn.Module]) -> Iterator[str]:
    """Let what `copied` refers to outside of its children (lists of layers, hooks, closures) be copies too.

    The names of the attributes that were changed for it.
    """
    state = copied.__dict__
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        if state[name]:
            state[name] = type(state[name])((key, _relinked_hook(hook, copies)) for key, hook in state[name].items())
    if type(copied).__module__.startswith("torch.nn."):
        return
    for name, value in state.items():
        if type(value) not in _PLAIN and name not in _STATE:
            linked = _relinked(value, copies)
            if linked is not value:
                state[name] = linked
                yield name


def _relinked_hook(hook: Any, copies: dict[int, nn.Module]) -> Any:
    """A hook for the copies; one that keeps settings in itself (spectral norm) as a copy of its own."""
    linked = _relinked(hook, copies)
    stateful = linked is hook and type(hook).__module__.startswith("torch.nn.utils")
    return copy.copy(hook) if stateful and not isinstance(hook, types.FunctionType) else linked


def _relinked(value: Any, copies: dict[int, nn.Module]) -> Any:
    """`value` with copies in the place of modules; itself where it leads to none."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, type):
        return value
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if kind in (list, tuple, set, frozenset):
        items = [_relinked(v, copies) for v in value]
        return kind(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if kind is dict:
        parts = {k: _relinked(v, copies) for k, v in value.items()}
        return parts if any(parts[k] is not v for k, v in value.items()) else value
    if kind is types.MethodType:
        owner = _relinked(value.__self__, copies)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if kind is types.FunctionType:
        return _relinked_function(value, copies)
    if kind is functools.partial:
        func, args, keywords = (_relinked(v, copies) for v in (value.func, value.args, value.keywords))
        same = func is value.func and args is value.args and keywords is value.keywords
        return value if same else functools.partial(func, *args, **keywords)
    if kind is weakref.ref:
        target = value()
        linked = target if target is None else _relinked(target, copies)
        return value if linked is target else weakref.ref(linked)
    return _relinked_object(value, copies)


def _relinked_function(value: types.FunctionType, copies: dict[int, nn.Module]) -> Any:
    cells = value.__closure__ or ()
    try:
        inside = [c.cell_contents for c in cells]
    except ValueError:  # a cell that is still empty
        return value
    linked = [_relinked(v, copies) if v is not value else v for v in inside]
    if all(a is b for a, b in zip(inside, linked, strict=True)):
        return value
    closure = tuple(types.CellType(v) for v in linked)
    twin = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
    twin.__kwdefaults__ = value.__kwdefaults__
    return twin


def _relinked_object(value: Any, copies: dict[int, nn.Module]) -> Any:
    """An object of somebody's own: copied whole if it leads to a module of the model."""
    known = _KNOWN_CLEAN.get(id(value))
    if known is not None and known() is value:
        return value
    if _leads_to_a_module(value, copies):
        tensors = {id(t): t for twin in copies.values() for t in (*twin._parameters.values(), *twin._buffers.values())}
        return copy.deepcopy(value, {**copies, **tensors})
    with suppress(TypeError):  # what takes no weak reference is looked at anew every time
        _KNOWN_CLEAN[id(value)] = weakref.ref(value, functools.partial(_forget, id(value)))
    return value


def _forget(key: int, _: Any) -> None:
    _KNOWN_CLEAN.pop(key, None)


def _leads_to_a_module(value: Any, copies: dict[int, nn.Module], most: int = 20_000) -> bool:
    seen, todo = {id(value)}, [value]
    while todo and len(seen) < most:
        for found in gc.get_referents(todo.pop()):
            if id(found) in copies:
                return True
            deep = not isinstance(found, (Tensor, type, types.ModuleType, types.FunctionType, str, int, float))
            if deep and id(found) not in seen:
                seen.add(id(found))
                todo.append(found)
    return False


def _holds_a_module(value: Any) -> bool:
    """Whether `value` is a module, or a container with one in it: of the shadow, and nothing for its model."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_a_module(v) for v in value)
    return isinstance(value, nn.Module)
