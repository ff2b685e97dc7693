"""What a process and a thread keep for everybody, as it was afterwards: modes of torch, generators, compilers.

    with steady():              # an interrupt anywhere inside leaves no mode of torch behind
        ...

An interrupt may strike while a context is being left, and its clean-up is then lost. `steady` is a second one around
all others: if the inner clean-up was struck, this one completes it; if this one is, the inner had been complete.
"""

import gc
import random
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bbalpha._kernels import draw_seed
from bbalpha._torch import compiler_loaded, modes, restore_modes, seed_global


class steady:  # noqa: N801 - a context, called like a function
    """A context after which torch's modes of this thread are as they were: gradients, overrides, transforms.

    Args:
        draws: A seed is drawn inside from torch's global generator, which after an error has not moved.
    """

    __slots__ = ("before", "generator")

    def __init__(self, *, draws: bool = False) -> None:
        self.generator = torch.default_generator.get_state() if draws else None

    def __enter__(self) -> None:
        self.before = modes()

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None:  # contexts that end well have cleaned up
            return
        _finish(error)
        restore_modes(self.before)
        if self.generator is not None:
            _undraw(self.generator)
        if isinstance(error, Exception):
            heed_interrupt(error)


def heed_interrupt(error: Exception) -> None:
    """Raise the interrupt that `error` began with: a clean-up that was struck may have failed in turn.

    To be called wherever an error is caught to try something else.
    """
    struck: BaseException | None = error
    while isinstance(struck, Exception):
        struck = struck.__context__
    if struck is not None:
        raise struck


def _finish(error: BaseException) -> None:
    """Let contexts that an interrupt has cut short, and that its traceback keeps alive, clean up now and not later."""
    struck: BaseException | None = error
    interrupted = False
    while struck is not None:
        if not isinstance(struck, Exception):
            traceback.clear_frames(struck.__traceback__)
            interrupted = True
        struck = struck.__context__
    if interrupted:
        gc.collect()  # contexts in cycles


def _undraw(before: Tensor) -> None:
    """Put torch's global generator back to where it was before one seed was drawn, unless somebody else has drawn."""
    own = torch.Generator()
    own.set_state(before)
    draw_seed(own)
    if torch.equal(own.get_state(), torch.default_generator.get_state()):
        torch.default_generator.set_state(before)


# ------------------------------------------------------------------------------ compiled code


_EAGER = threading.Lock()
_eager_now: set[object] = set()  # who is inside
_eager_setting = ExitStack()


@contextmanager
def eager() -> Iterator[None]:
    """A context in which compiled code runs as it was written, so that its random calls are seen.

    That is a setting of the process; the first thread to come sets it and the last to leave takes it back.
    """
    if not compiler_loaded():
        yield
        return
    me = object()
    try:  # an interrupt on the way in leaves nobody inside
        with _EAGER:
            if not _eager_now:
                _eager_setting.enter_context(torch.compiler.set_stance("force_eager"))
            _eager_now.add(me)
        yield
    finally:
        with _EAGER:
            _eager_now.discard(me)
            if not _eager_now:
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
    """Seed the global generators of torch, Python and numpy with a number below 2^64."""
    seed_global(seed)
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])


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
