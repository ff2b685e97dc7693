"""Every private part of torch that the library uses, in one place."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch import pyfunctorch


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """function.apply(*args); outside of torch.func transforms without the binding of default arguments.

    That binding costs 0.1 ms a call, more than a small network takes.
    """
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        out: Tensor = function.apply(*args)
    else:
        out = super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    return out


def outside_transforms() -> AbstractContextManager[Any]:
    """A context outside of the torch.func transforms that are at work: random calls and values of tensors are plain."""
    if not torch._C._are_functorch_transforms_active():
        return nullcontext()
    return pyfunctorch.temporarily_clear_interpreter_stack()


def concrete(t: Tensor) -> Tensor:
    """A tensor with values that Python may read, for one that a torch.func transform has wrapped; of a batch the first.

    >>> torch.func.vmap(lambda t: (concrete(t) == 1.0).all() * t)(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(t):
        value: Tensor = functorch.get_unwrapped(t)
        t = value.select(functorch.maybe_get_bdim(t), 0) if functorch.is_batchedtensor(t) else value
    return t
