"""Find and switch the random sites of any nn.Module.

`stochastic(model)` switches the random sites on and leaves the rest as the caller has it: batch norm, spectral
norm and the like follow their own mode.

    with stochastic(model):          # model.eval() before: batch norm stays in evaluation mode
        one_sample = model(x)
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode

from bbalpha._engine import kinds
from bbalpha._engine.guards import Foreign, torch_states
from bbalpha._torch import hook_places, is_batched, is_wrapper, tree_leaves, written_class
from bbalpha.checks import check_model

INSERTED = "inserted_dropout"  # the child that `add_dropout` gives to a weight layer


# ------------------------------------------------------------------------------ switching


@contextmanager
def stochastic(model: nn.Module) -> Iterator[nn.Module]:
    """A context in which `model` samples: random sites on, everything else in the mode the caller left it in.

    It stays on after a `model.eval()` inside. Afterwards all flags are as they were, and so is every buffer of a module
    in evaluation mode, also after an exception. A model that was called and drew nothing is an error. The model itself
    is switched, so one thread at a time; `bbalpha.sample` has no such limit.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    >>> with stochastic(net):
    ...     net.training, net[0].training, net[1].training
    (False, False, True)
    """
    check_model(model)
    if not any(may_be_random(m) for m in model.modules()):
        raise ValueError(no_randomness(model, "no dropout of any kind was met"))
    quiet = [m for m in model.modules() if not m.training]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    states, foreign, calls = torch_states(device), Foreign(), [0]
    with kept_flags(model), borrowed_buffers(quiet), switched_on(model), _kept_on(model, calls):
        yield model
    drawn = foreign.moved() or any(not torch.equal(a, b) for a, b in zip(states, torch_states(device), strict=True))
    if calls[0] and not drawn:
        raise ValueError(no_randomness(model, "it was called and drew nothing"))


@contextmanager
def kept_flags(model: nn.Module) -> Iterator[None]:
    """Every `training` flag as it was, on the way out."""
    flags = [(m, m.training) for m in model.modules()]
    try:
        yield
    finally:
        for m, training in flags:
            if m.training != training:
                m.training = training


@contextmanager
def _kept_on(model: nn.Module, calls: list[int]) -> Iterator[None]:
    """Count the calls of `model`, and switch what is on now on again before it runs."""

    def count(_: nn.Module, args: Any, kwargs: Any) -> None:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        calls[0] += all(t.numel() for t in given)  # for no rows nothing is drawn

    def on(m: nn.Module, *_: Any) -> None:
        m.training = True

    takes_hooks = [m for m in model.modules() if m.training and not isinstance(m, torch.jit.ScriptModule)]
    with ExitStack() as hooks:
        if not isinstance(model, torch.jit.ScriptModule):
            hooks.callback(model.register_forward_pre_hook(count, with_kwargs=True).remove)
        for m in takes_hooks:
            if may_be_random(m):
                hooks.callback(m.register_forward_pre_hook(on).remove)
        yield


def no_randomness(model: nn.Module, found: str) -> str:
    """The error for a model whose passes would all be the same."""
    return (
        f"`model` must have at least one active random site; {type(model).__name__} has none ({found}), so all "
        "passes would be equal. Put dropout in with bbalpha.add_dropout(model, p=0.1)."
    )


@contextmanager
def switched_on(model: nn.Module, only: Collection[str] | None = None) -> Iterator[None]:
    """Training mode for every module that may hold a random site, or for those named; restored on the way out.

    Statistics that such a module keeps by itself (F.batch_norm on buffers of its own, spectral norm) still
    follow the caller's mode.
    """
    switched, powers = _to_switch(model, only)
    try:
        for hook in powers:
            hook.n_power_iterations = 0
        with _switched(switched, True):
            yield
    finally:
        for hook, n in powers.items():
            hook.n_power_iterations = n


def switch_on_for_good(copy: nn.Module, only: Collection[str] | None = None) -> None:
    """The same without a way back, for a copy in evaluation mode.

    Statistics that its modules keep by themselves are left to `CallersStatistics`, whenever it is run.
    """
    switched, powers = _to_switch(copy, only)
    for hook in powers:
        hook.n_power_iterations = 0
    for m in switched:
        m.training = True


def _to_switch(model: nn.Module, only: Collection[str] | None) -> tuple[list[nn.Module], dict[SpectralNorm, int]]:
    """The modules to switch on, and the hooks in them that would go on iterating, with how often."""
    named = [(name, m) for name, m in model.named_modules() if not m.training and may_be_random(m)]
    switched = [m for name, m in named if only is None or name in only]
    hooks = [h for m in switched for place in hook_places(m) for h in place.values()]
    return switched, {h: h.n_power_iterations for h in hooks if isinstance(h, SpectralNorm)}


@contextmanager
def switched_off(model: nn.Module, only: Collection[str]) -> Iterator[None]:
    """Evaluation mode for the modules named, restored on the way out; their statistics follow the caller's mode."""
    with _switched([m for name, m in model.named_modules() if m.training and name in only], False):
        yield


@contextmanager
def _switched(modules: list[nn.Module], on: bool) -> Iterator[None]:
    """Training or evaluation mode for `modules`, which are all in the other one."""
    statistics = {id(b) for m in modules for b in m.buffers(recurse=False)}
    try:
        for m in modules:
            m.training = on
        with CallersStatistics(statistics, not on) if statistics else nullcontext():
            yield
    finally:
        for m in modules:
            m.training = not on


def may_be_random(module: nn.Module) -> bool:
    """Whether `module` is switched on for sampling: not torch's plain layers, not normalisation layers."""
    written = written_class(module)
    if issubclass(written, kinds.RANDOM):
        return True
    if issubclass(written, kinds.NORMS) or is_wrapper(module):
        return False
    return not written.__module__.startswith("torch.nn.")


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


class CallersStatistics(TorchFunctionMode):
    """Lets F.batch_norm and F.instance_norm use the running statistics it is given, or with `moving` move them."""

    def __init__(self, statistics: set[int], moving: bool) -> None:
        super().__init__()
        self.statistics, self.moving = statistics, moving  # ids of buffers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flag = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}.get(func)
        if flag is not None and any(id(t) in self.statistics for t in (*args[1:3], *kwargs.values())):
            args = args[:5]
            kwargs[flag] = self.moving
        return func(*args, **kwargs)


def holds_batched(model: nn.Module) -> bool:
    """Whether a module has kept a tensor that is of use inside `torch.func.vmap` only."""
    return any(isinstance(value, Tensor) and is_batched(value) for m in model.modules() for value in vars(m).values())
