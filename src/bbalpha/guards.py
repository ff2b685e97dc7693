"""What a process and a thread keep for everybody, as it was afterwards: modes of torch, generators, compilers.

    with steady():              # an interrupt anywhere inside leaves no mode of torch behind
        ...

An interrupt may strike while a context is being left, and its clean-up is then lost. `steady` is a second one around
all others: if the inner clean-up was struck, this one completes it; if this one is, the inner had been complete.
"""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._functorch import pyfunctorch


class steady:  # noqa: N801 - a context, called like a function
    """A context after which torch's modes of this thread are as they were: gradients, overrides, transforms."""

    __slots__ = ("before",)

    def __enter__(self) -> None:
        self.before = (
            torch.is_grad_enabled(),
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._functorch.get_dynamic_layer_stack_depth(),
        )

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:  # contexts that end well have cleaned up
            return
        grad, functions, dispatches, depth = self.before
        while torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        while torch._C._len_torch_dispatch_stack() > dispatches:
            torch._C._pop_torch_dispatch_stack(None)
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        torch._C._set_grad_enabled(grad)


class drawn_seed:  # noqa: N801 - a context, called like a function
    """A seed drawn from torch's global generator, which moves on as for nn.Dropout; after an error it has not moved."""

    __slots__ = ("before",)

    def __enter__(self) -> int:
        self.before = torch.default_generator.get_state()
        return draw_seed(None)

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            return
        own = torch.Generator()
        own.set_state(self.before)
        draw_seed(own)
        if torch.equal(own.get_state(), torch.default_generator.get_state()):  # nobody else has drawn since
            torch.default_generator.set_state(self.before)


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed from `generator`; None is torch's global one."""
    with outside_transforms():
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


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


# ------------------------------------------------------------------------------ compiled code


_EAGER = threading.Lock()
_eager_now = [0]  # how many are inside
_eager_setting = ExitStack()


@contextmanager
def eager() -> Iterator[None]:
    """A context in which compiled code runs as it was written, so that its random calls are seen.

    That is a setting of the process; the first thread to come sets it and the last to leave takes it back.
    """
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled, and importing it takes a second
        yield
        return
    with _EAGER:
        if not _eager_now[0]:
            _eager_setting.enter_context(torch.compiler.set_stance("force_eager"))
        _eager_now[0] += 1
    try:
        yield
    finally:
        with _EAGER:
            _eager_now[0] -= 1
            if not _eager_now[0]:
                _eager_setting.close()


# ------------------------------------------------------------------------------ generators of the process


_FOREIGN = threading.RLock()  # the global generators, by one thread of ours at a time


@contextmanager
def forked_generators() -> Iterator[None]:
    """Draws from the global generators of torch, Python and numpy that leave them as they were.

    For models that draw there and cannot be given another generator. Other threads that draw meanwhile share these
    numbers: nothing can tell them apart.
    """
    with _FOREIGN:
        before = Foreign()
        try:
            with torch.random.fork_rng():
                yield
        finally:
            before.undo()


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, Python and numpy with a number below 2^32."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class Foreign:
    """Whether anybody drew from the global generators of Python and numpy since this was made, and the way back."""

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state(legacy=True)

    def moved(self) -> list[str]:
        """Which of them were drawn from."""
        (_, words, position, *_), (_, words_now, position_now, *_) = self.numpy, np.random.get_state(legacy=True)
        same = position == position_now and np.array_equal(words, words_now)
        return ["random"] * (self.python != random.getstate()) + ["numpy.random"] * (not same)

    def undo(self) -> None:
        """Put them back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def torch_states(device: torch.device) -> list[Tensor]:
    """The state of torch's global generators that a model on `device` may draw from."""
    own = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state()]
    return [torch.get_rng_state(), *own]
