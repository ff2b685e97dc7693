"""What a run is made of, in plain values that are the same in every process: data hashed, functions and layers told.

A run is taken up again only where all of this is as it was. Nothing here holds an address, so that the same program
started again tells the same.

    told(lambda x: 2 * x), structure(net), digest(x, y)
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bbalpha._torch import tree_flatten

_ROWS = 1000  # of a tensor that are hashed; of the others only the sum
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OF_EVERY_MODULE = set(vars(nn.Module()))
_MOVING = (  # in torch's schedulers
    "optimizer", "last_epoch", "T_cur", "T_i", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial",
)  # fmt: skip


# ------------------------------------------------------------------------------ data


def digest(*values: Any) -> str:
    """A hash of nested tensors and plain values: shapes, types, up to 1,000 rows evenly spaced, the sum of all bits.

    One changed number anywhere changes it; in large tensors an exchange of two numbers may not.

    >>> x = torch.zeros(5000, 2)
    >>> before = digest(x)
    >>> x[123, 1] = 1e-30
    >>> digest(x) == before
    False
    """
    leaves, form = tree_flatten(values)
    found = hashlib.sha256(str(form).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            _add(found, leaf.detach())
        elif hasattr(leaf, "tobytes"):  # arrays and images
            found.update(leaf.tobytes())
        else:
            found.update(told(leaf).encode())
    return found.hexdigest()


def evenly(n: int, count: int) -> list[int]:
    """At most `count` of the numbers below `n`, evenly spaced, the first and the last among them.

    >>> evenly(10, 4), evenly(3, 4)
    ([0, 3, 6, 9], [0, 1, 2])
    """
    return list(range(n)) if n <= count else [i * (n - 1) // (count - 1) for i in range(count)]


def _add(found: Any, t: Tensor) -> None:
    found.update(f"{t.dtype} {tuple(t.shape)}".encode())
    t = torch.view_as_real(t) if t.is_complex() else t
    t = t.reshape(1) if t.ndim == 0 else t
    rows = t[torch.tensor(evenly(len(t), _ROWS), device=t.device, dtype=torch.long)].cpu().contiguous()
    found.update(rows.reshape(-1).view(torch.uint8).numpy().tobytes())
    if len(t) > _ROWS:
        size = max(1, (1 << 22) // max(1, t[0].numel()))
        kind = _INTEGERS[t.element_size()]
        sums = (part.contiguous().view(kind).sum(dtype=torch.int64).item() for part in t.split(size))
        found.update(str([int(s) for s in sums]).encode())


# ------------------------------------------------------------------------------ functions and values


def told(value: Any, depth: int = 4) -> str:
    """A value in words: plain ones as they are, functions by name and code, objects by type and what they hold.

    >>> told(functools.partial(max, 3)), told((1, 0.5))
    ('builtins.max(3)', '(1, 0.5)')
    """
    text = _told(value, depth)
    return text if len(text) <= 300 else f"{text[:100]}... {hashlib.sha256(text.encode()).hexdigest()}"


def _told(value: Any, depth: int) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, type):
        return _name(value)
    if depth == 0:
        return _name(type(value))
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(told(v, depth - 1) for v in value)})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(told(v, depth - 1) for v in value))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{told(k, 1)}: {told(v, depth - 1)}' for k, v in value.items())}}}"
    if isinstance(value, functools.partial):
        given = [told(v, depth - 1) for v in value.args]
        given += [f"{k}={told(v, depth - 1)}" for k, v in value.keywords.items()]
        return f"{told(value.func, depth - 1)}({', '.join(given)})"
    if isinstance(value, MethodType):
        return f"{told(value.__self__, depth - 1)}.{told(value.__func__, depth - 1)}"
    if isinstance(value, FunctionType):
        return _function(value, depth)
    if isinstance(value, BuiltinFunctionType):
        return _name(value)
    if isinstance(value, LRScheduler):
        held = {k: v for k, v in vars(value).items() if k not in _MOVING}
        return f"{_name(type(value))}({_attributes(held, depth - 1)})"
    if isinstance(value, nn.Module):
        return told(structure(value, depth - 1), depth - 1)
    if callable(value) or dataclasses.is_dataclass(value):
        return f"{_name(type(value))}({_attributes(getattr(value, '__dict__', {}), depth - 1)})"
    return _name(type(value))


def _function(function: FunctionType, depth: int) -> str:
    """A function by its name, its code, its defaults and what it closes over."""
    held = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            held[name] = None
    extra = _attributes({name: v for name, v in held.items() if v is not None}, depth - 1)
    return f"{_name(function)}#{_code(function.__code__)[:12]}{f'({extra})' if extra else ''}"


def _code(code: CodeType) -> str:
    """A hash of what a function does, wherever it stands."""
    constants = [_code(c) if isinstance(c, CodeType) else told(c) for c in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()


def _attributes(held: Mapping[str, Any], depth: int) -> str:
    return ", ".join(f"{name}={told(v, depth)}" for name, v in sorted(held.items()) if not isinstance(v, Tensor))


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None) or 'builtins'}.{getattr(value, '__qualname__', type(value).__name__)}"


# ------------------------------------------------------------------------------ models and optimisers


def structure(module: nn.Module, depth: int = 3) -> dict[str, str]:
    """Every layer by name: its type and its plain attributes (rates, eps, activations), not its weights or its mode.

    >>> structure(nn.Sequential(nn.Dropout(0.1)))[".0"]
    'torch.nn.modules.dropout.Dropout(inplace=False, p=0.1)'
    """
    found = {}
    for name, layer in module.named_modules():
        held = {k: v for k, v in vars(layer).items() if k not in _OF_EVERY_MODULE}
        found[f".{name}"] = f"{_name(type(layer))}({_attributes(held, depth)})"
    return found


def parameters(module: nn.Module) -> dict[str, str]:
    """Every parameter by name: its type, its shape, whether it is trained."""
    return {
        name: f"{p.dtype} {tuple(p.shape)}{'' if p.requires_grad else ' frozen'}"
        for name, p in module.named_parameters()
    }


def objective(function: Any) -> Any:
    """An objective: a module with the values of its buffers, such as a fixed precision, or any function."""
    if not isinstance(function, nn.Module):
        return told(function)
    return structure(function) | {f"buffer {name}": digest(b) for name, b in function.named_buffers()}


def optimizer(made: Optimizer, schedule: Any) -> dict[str, str]:
    """An optimiser: its type, and the settings of its groups but for those that a scheduler of torch moves."""
    moving = {"params", "lr", "momentum", "betas"} if isinstance(schedule, LRScheduler) else {"params"}
    found = {"type": _name(type(made))}
    for i, group in enumerate(made.param_groups):
        settings = {k: v for k, v in group.items() if k not in moving}
        found[f"group {i}"] = f"{len(group['params'])} parameters, {_attributes(settings, 3)}"
    return found
