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

from bbalpha._engine.sites import borrowed_buffers, kept_flags
from bbalpha._engine.states import is_trainer
from bbalpha._torch import (
    MODULE_STATE,
    Eager,
    buffers,
    change_hooks,
    children,
    copied,
    is_wrapper,
    own_parameters,
    parameters,
)

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
        links = {(id(copy), name) for _, copy in pairs for name in _relink(copy, copies)}
        return cls(twin, pairs, links, evaluation)

    def hand_back(self) -> None:
        """Give the model what its forward assigned: attributes, and buffers of modules in training mode."""
        for original, twin in self.pairs:
            if not self.evaluation and original.training and buffers(twin):
                _hand_back_buffers(original, twin)
            if type(twin).__module__.startswith("torch.nn."):
                continue  # torch's own layers write nothing down
            given = original.__dict__
            for name, value in twin.__dict__.items():
                same = name in MODULE_STATE or given.get(name, _NOTHING) is value or (id(twin), name) in self.links
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
    with _IN_PLACE, kept_flags(model):
        for m in model.modules():
            if evaluation and m.training:
                m.training = False
        with borrowed_buffers(list(model.modules())) if use == "trial" else nullcontext():
            yield model


class NoShadowError(Exception):
    """A model that cannot be copied: TorchScript, or lazy layers that do not know their size yet."""


# ------------------------------------------------------------------------------ copying

_NOTHING = object()


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
    if is_wrapper(module):
        copies[id(module)] = eager = Eager(module, lambda inside: _copied(inside, copies, pairs, evaluation))
        eager.training = module.training and not evaluation
        return eager
    copies[id(module)] = twin = copied(module)
    pairs.append((module, twin))
    places = children(twin)
    for name, child in places.items():
        if child is not None:
            places[name] = _copied(child, copies, pairs, evaluation)
    if evaluation:
        twin.__dict__["training"] = False
    return twin


def _wake(shadow: Shadow) -> None:
    """Small numbers in the place of parameters that are all 0."""
    generator = torch.Generator().manual_seed(0)
    for _, twin in shadow.pairs:
        given = parameters(twin).items()
        asleep = {name: p for name, p in given if p is not None and p.is_floating_point() and not p.any()}
        if asleep and not isinstance(twin, nn.RNNBase):  # which holds its weights a second time
            places = own_parameters(twin)
            for name, p in asleep.items():
                noise = 0.05 * torch.randn(p.shape, generator=generator)
                places[name] = nn.Parameter(noise.to(p), p.requires_grad)


def _own_buffers(shadow: Shadow) -> None:
    """Copies of the buffers too, one for each."""
    copies: dict[int, Tensor] = {}
    for _, twin in shadow.pairs:
        places = buffers(twin)
        for name, b in places.items():
            if b is not None:
                places[name] = copies.setdefault(id(b), b.clone())


def _hand_back_buffers(original: nn.Module, twin: nn.Module) -> None:
    for name, buffer in buffers(twin).items():
        if buffer is not buffers(original).get(name):
            buffers(original)[name] = buffer


# ------------------------------------------------------------------------------ references between modules

_PLAIN: frozenset[type] = frozenset(
    (int, float, complex, str, bytes, bool, type(None), Tensor, nn.Parameter, torch.dtype, torch.device, torch.Size,
     types.BuiltinFunctionType, torch.Generator)
)  # fmt: skip
_KNOWN_CLEAN: dict[int, "weakref.ref[Any]"] = {}  # objects that were seen to lead to no module


def _relink(twin: nn.Module, copies: dict[int, nn.Module]) -> Iterator[str]:
    """Let what `twin` refers to outside of its children (lists of layers, hooks, closures) be copies too.

    The names of the attributes that were changed for it.
    """
    state = twin.__dict__
    change_hooks(twin, lambda hook: _relinked_hook(hook, copies))
    if type(twin).__module__.startswith("torch.nn."):
        return
    for name, value in state.items():
        if type(value) not in _PLAIN and name not in MODULE_STATE:
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
    if (known is not None and known() is value) or is_trainer(type(value)):
        return value
    if _leads_to_a_module(value, copies):
        tensors = {id(t): t for twin in copies.values() for t in (*parameters(twin).values(), *buffers(twin).values())}
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
