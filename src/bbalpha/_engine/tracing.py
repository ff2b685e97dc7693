"""Run one pass of any model and report every random call it met; nothing is changed by it.

seen = trace(net, Inputs.of(x))
seen.sites, seen.hidden, seen.fired
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha._engine.guards import Foreign, eager, heed_interrupt
from bbalpha._engine.hidden import Hidden
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.kinds import is_norm
from bbalpha._engine.lineage import Lineage, Probe
from bbalpha._engine.shadows import shadowed
from bbalpha._engine.sites import borrowed_buffers, may_be_random, no_randomness, switched_off, switched_on
from bbalpha._kernels import Passes
from bbalpha._torch import inside_checkpoint, listened_to, tree_leaves


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
        hidden: Random operators that Python does not show (TorchScript, foreign code), by name.
        foreign: Whether there were draws from global generators, torch's, Python's or numpy's.
        drew: The modules that drew, in order, as often as they did: one for every random call that fired.
        draws: Every draw in order: the module it was made in, and the shape it was made for.
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
    foreign: bool
    drew: tuple[str, ...]
    draws: tuple[tuple[str, torch.Size], ...]
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
    def ran(self) -> frozenset[str]:
        """The modules that ran."""
        return self.quiet | self.homes

    @property
    def draws_made(self) -> tuple[str, ...]:
        """Where and what was drawn, in words."""
        met = [f"{s.name or 'the model'} ({s.kind})" for s in self.sites if s.fired]
        return *dict.fromkeys(met), *self.hidden

    @property
    def certain(self) -> bool:
        """Whether dropout was met: random numbers of other kinds may have no effect (layer drop at rate 0)."""
        return any(s.fired and (s.rate is not None or s.kind == "rrelu") for s in self.sites)

    def nothing_random(self, model: nn.Module) -> str:
        """The error for a model whose passes would all be the same."""
        met = [f"{s.name or 'the model'} ({s.kind}, rate {s.rate})" for s in self.sites]
        state = "without effect on the output" if self.fired else "off"
        found = f"found, but {state}: {', '.join(met[:5])}" if met else "no dropout of any kind was met"
        return f"{no_randomness(model, found)} For the network as it is, without passes, use n_passes=None."


def least_switched(
    model: nn.Module, inputs: Inputs, seen: Trace, *, evaluation: bool
) -> tuple[frozenset[str] | None, Trace]:
    """The modules to switch on (None: all that may be random), and what a pass with them meets.

    Some modules read `training` for something else (probabilities instead of logits, statistics of their own).
    If leaving those that ran and drew nothing in the caller's mode changes the output, that is where they stay.
    """
    named = {name: m for name, m in model.named_modules() if may_be_random(m)}
    quiet = {name for name in seen.quiet if name in named and (evaluation or not named[name].training)}
    parents = {home[:i] for home in seen.homes for i in range(len(home)) if i == 0 or home[i] == "."}
    for left in (quiet, quiet - parents):
        only = frozenset(named.keys() - left)
        less = trace(model, inputs, only=only, evaluation=evaluation) if left else seen
        if (less.sites, less.hidden) == (seen.sites, seen.hidden):
            return (None, seen) if same_values(less.output, seen.output) else (only, less)
    return None, seen


def least_silenced(model: nn.Module, inputs: Inputs, seen: Trace, *, evaluation: bool) -> tuple[frozenset[str], Trace]:
    """The modules to switch off for a network that draws nothing, and what a run without them meets.

    Those that ran in the caller's mode and made no random call, as `seen` has it, stay in that mode, unless draws that
    no module can be told of (Python's and numpy's generators) end with theirs.
    """
    if evaluation:  # all of them are off
        return frozenset(), seen
    training = frozenset(name for name, m in model.named_modules() if m.training and may_be_random(m))
    off = training - seen.quiet
    if not seen.fired:
        return off, seen
    less = trace(model, inputs, switch=False, off=off)
    least = trace(model, inputs, switch=False, off=training) if less.fired and off != training else less
    return (off, less) if least.draws_made == less.draws_made else (training, least)


def trace(
    model: nn.Module,
    inputs: Inputs,
    *,
    switch: bool = True,
    only: Collection[str] | None = None,
    off: Collection[str] = (),
    evaluation: bool = False,
    seed: int = 0,
) -> Trace:
    """Run one pass of `model` without gradients and report its random calls; nothing is changed by it.

    With ``switch=False`` the modules keep their mode, so that what fires by itself can be told from what sampling
    switches on; `only` names those to switch on, `off` those to switch off; `evaluation` begins with all of them in
    evaluation mode. What is drawn follows from `seed`, as some models let it steer what they do.
    """
    foreign = Foreign()
    record, mode, output, moved = _traced(model, inputs, switch, only, off, evaluation, seed)
    if foreign.moved():  # by this pass, or by another thread: look once more
        once_more = Foreign()
        record, mode, output, moved = _traced(model, inputs, switch, only, off, evaluation, seed)
        for name in once_more.moved():
            record.hide(name, True)
        if record.foreign:
            foreign.undo()
    homes = {s.name for s in record.sites} | set(record.drew)
    return Trace(
        sites=tuple(record.sites),
        hidden=tuple(record.hidden),
        foreign=record.foreign,
        drew=tuple(record.drew),
        draws=tuple(record.draws),
        homes=frozenset(homes),
        quiet=frozenset(record.ran.keys() - homes),
        prefix=tuple(record.names[m] for m in record.prefix),
        worth_sharing=any(not is_norm(m) and not isinstance(m, nn.Embedding) for m in record.prefix),
        keep=mode.keep,
        moved=moved,
        recomputes=record.recomputes,
        output=output,
    )


def _traced(
    model: nn.Module,
    inputs: Inputs,
    switch: bool,
    only: Collection[str] | None,
    off: Collection[str],
    evaluation: bool,
    seed: int,
) -> tuple["_Record", Lineage, Any, bool]:
    """One pass: what was met, where its draws led, what came out, and whether a buffer changed."""
    with ExitStack() as contexts:
        live = contexts.enter_context(shadowed(model, evaluation=evaluation, use="trial"))
        record = _Record(live)
        contexts.enter_context(record.hooked(own=live is not model))
        copies = contexts.enter_context(borrowed_buffers(list(record.names)))
        before = {original: copy.clone() for original, copy in copies.items()}
        contexts.enter_context(switched_on(live, only) if switch else nullcontext())
        contexts.enter_context(switched_off(live, off))
        passes = Passes(seed, 0, 1, device=inputs.device)
        mode = Lineage(passes, observer=record.draw, where=record.place, parameters=dict(live.named_parameters()))
        for context in (eager(), torch.no_grad(), Hidden(mode, record.hide), mode):
            contexts.enter_context(context)
        output = inputs.fresh().call(live)
    moved = any(copy.shape != before[t].shape or not torch.equal(copy, before[t]) for t, copy in copies.items())
    return record, mode, output, moved


def depends(
    model: nn.Module, inputs: Inputs, only: Collection[str] | None, off: Collection[str], *, evaluation: bool
) -> bool:
    """Whether the output depends on what is drawn, as autograd sees it: weights of 0 behind a dropout count.

    True as well where autograd cannot tell.
    """
    probe = Probe(Passes(0, 0, 1, device=inputs.device))
    try:
        with ExitStack() as contexts:
            live = contexts.enter_context(shadowed(model, evaluation=evaluation, use="trial"))
            switches = (switched_on(live, only), switched_off(live, off))
            modes = (borrowed_buffers(list(live.modules())), *switches, eager(), Hidden(probe))
            for context in (*modes, torch.enable_grad(), probe):
                contexts.enter_context(context)
            output = inputs.fresh().call(live)
        numbers = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        leaves = [t for t in numbers if t.requires_grad]
        if not leaves:
            return torch.is_inference_mode_enabled() or not numbers
        (grad,) = torch.autograd.grad(leaves, probe.one, [torch.ones_like(t) for t in leaves], allow_unused=True)
    except RuntimeError as error:  # in-place code that cannot be differentiated
        heed_interrupt(error)
        return True
    return grad is not None


class _Record:
    """The modules at work while a pass runs, and the random calls made in each."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {m: name for name, m in model.named_modules()}
        self.stack: list[nn.Module] = []
        self.sites: list[Site] = []
        self.drew: list[str] = []
        self.draws: list[tuple[str, torch.Size]] = []
        self.hidden: dict[str, None] = {}  # operators
        self.ran: dict[str, None] = {}
        self.prefix: dict[nn.Module, None] = {}
        self.drawn = self.recomputes = self.foreign = False

    def draw(self, kind: str, rate: float | None, fires: bool) -> None:
        """A random call that was intercepted."""
        self.sites.append(Site(self._home(), kind, rate, fires))
        self.drew += [self._home()] * fires
        self.drawn |= fires
        self.recomputes |= fires and inside_checkpoint(trace.__code__)

    def place(self, shape: torch.Size) -> None:
        """A draw for a tensor of that shape."""
        self.draws.append((self._home(), shape))

    def hide(self, operator: str, foreign: bool) -> None:
        """A random operator that was not intercepted by Python."""
        self.hidden.setdefault(operator)
        self.drew.append(self._home())
        self.foreign |= foreign
        self.drawn = True

    @contextmanager
    def hooked(self, own: bool) -> Iterator[None]:
        """A context in which the modules report when they begin and when they are done."""
        with ExitStack() as hooks:
            for m in self.names:
                if not isinstance(m, torch.jit.ScriptModule):  # takes no hooks
                    m = listened_to(m) if own else m
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
