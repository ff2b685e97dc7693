"""Running the passes of a model by one strategy: the plan says which, a `SampleCall` does it.

SampleCall(model, inputs, Plan("loop"), seed=0, shared=False)(first=0, count=10)       # (10, N, ...)
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bbalpha._balance import Memo
from bbalpha._engine import chains, sites
from bbalpha._engine.drawing import NotStackableError, Strategy
from bbalpha._engine.guards import eager, forked_generators, seed_generators, steady
from bbalpha._engine.hidden import Hidden
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.interception import Interception
from bbalpha._engine.rows import Finder, Rows
from bbalpha._engine.shadows import Use, shadowed
from bbalpha._engine.tracing import trace
from bbalpha._kernels import Passes, pass_seed
from bbalpha._torch import TreeSpec, tree_flatten, tree_unflatten

Witness = Callable[[tuple[str, ...]], None]  # told the modules that drew in a pass, in order


@dataclass(frozen=True)
class Plan:
    """How a model is run, found once by trying.

    Attributes:
        strategy: What the passes are run by.
        hidden: Draws are made by operators that only the dispatcher shows.
        foreign: Draws come from global generators, which are seeded for every pass.
        moves: Buffers change in a pass and have to be looked after.
        reasons: Why the cheaper strategies were not taken.
        recomputes: The model draws inside torch.utils.checkpoint, whose backward would draw anew.
        own: Passes differ by a generator of the model's own, which no seed reaches.
        located: Draws of single rows need the places of the rows: layers that draw weights.
        only: The modules to switch on, by name, None for all that may be random; with "once" none is.
        off: The modules to switch off: all with "once", those that are not live with `sites`.
        layers: With "chain", the layers in the order they run.
        rows: Where the rows are; None if that is not known, or not needed.
    """

    strategy: Strategy | Literal["chain", "once"]
    hidden: bool = False
    foreign: bool = False
    moves: bool = False
    reasons: tuple[str, ...] = ()
    recomputes: bool = False
    own: bool = False
    located: bool = False
    only: frozenset[str] | None = None
    off: frozenset[str] = frozenset()
    layers: tuple[nn.Module, ...] = ()
    rows: Rows | None = None


@dataclass(slots=True, eq=False)  # made at every call, and a frozen one takes three times as long
class SampleCall:
    """One call of `sample`: passes first..first+count of a model on its inputs.

    Attributes:
        model: The caller's model, which is not touched.
        inputs: What it is run on.
        plan: How.
        seed: Of all passes.
        shared: One draw for all rows.
        evaluation: Everything but the random sites in evaluation mode, whatever the caller's.
        use: As in `shadowed`.
        dimmed: As in `Drawing`.
        witness: Told which modules drew, pass by pass as they are run, where places are asked for.
        together: How many passes are balanced among each other; 0: they are independent.
        memo: What passes that are run apart draw alike.
    """

    model: nn.Module
    inputs: Inputs
    plan: Plan
    seed: int
    shared: bool
    evaluation: bool = False
    use: Use = "run"
    dimmed: bool = False
    witness: Witness | None = None
    together: int = 0
    memo: Memo | None = None

    def __call__(self, first: int, count: int) -> Any:
        """The outputs of the passes, stacked."""
        if self.plan.strategy == "chain":  # touches no flag and no buffer
            return self._chain(first, count)
        with self._live() as live:
            return live(first, count)

    def all(self, passes: range, chunk_size: int | None) -> Any:
        """Those passes, at most `chunk_size` at a time; with gradients, chunks are computed again in the backward."""
        first, count = passes.start, len(passes)
        bounded = self.plan.strategy == "chain" and not torch.is_grad_enabled()  # by itself, its prefix run once
        if chunk_size is None or chunk_size >= count or bounded:
            return self(first, count)
        starts = [(k, min(chunk_size, passes.stop - k)) for k in passes[::chunk_size]]
        wanted = [t for t in (*self.inputs.tensors, *self.model.parameters()) if t.requires_grad]
        if not torch.is_grad_enabled() or not wanted:
            return self.each(starts)
        spec: list[Any] = []
        tensors = iter(_Chunks.apply(self, starts, spec, *wanted))
        flat, tree = spec
        return tree_unflatten([next(tensors) if isinstance(t, Tensor) else t for t in flat], tree)

    def each(self, starts: list[tuple[int, int]]) -> Any:
        """The chunks (first, count) one after the other; buffers that move do so once for all of them."""
        if self.plan.strategy == "chain":
            return merge([self._chain(k, n) for k, n in starts], torch.cat)
        with self._live() as live:
            return live.each(starts)

    def again(self, first: int, count: int, buffers: dict[Tensor, Tensor]) -> Any:
        """The passes once more, from the buffers that the first time found; nothing is handed back."""
        if self.plan.strategy == "chain":
            return self._chain(first, count)
        with ExitStack() as contexts:
            live = contexts.enter_context(replace(self, use="again")._live())
            modules = list(live.model.modules()) if self.plan.moves else []
            for original, copy in contexts.enter_context(sites.borrowed_buffers(modules)).items():
                copy.copy_(buffers.get(original, copy))  # as the forward found them
            return live(first, count)

    @contextmanager
    def _live(self) -> Iterator["_Live"]:
        """What is run: random sites switched, buffers of modules in evaluation mode protected, compiled parts eager."""
        with ExitStack() as contexts:
            model = contexts.enter_context(shadowed(self.model, evaluation=self.evaluation, use=self.use))
            if self.plan.moves:
                quiet = [m for m in model.modules() if not m.training]
                contexts.enter_context(sites.borrowed_buffers(quiet))
            if self.plan.strategy != "once":
                contexts.enter_context(sites.switched_on(model, self.plan.only))
            if self.plan.off:
                contexts.enter_context(sites.switched_off(model, self.plan.off))
            if self.plan.foreign:
                contexts.enter_context(forked_generators())
            contexts.enter_context(eager())
            finder = None
            if self.shared or self.plan.located or self.plan.strategy == "repeat":
                finder = Finder({} if self.plan.rows is None else self.plan.rows.places)
                contexts.enter_context(finder.listening(model, own=model is not self.model))
            yield _Live(self, model, finder)

    def passes(self, first: int, count: int) -> Passes:
        """What draws for the passes from `first` on."""
        if self.memo is None and count < self.together:
            self.memo = Memo()
        device = self.inputs.device
        return Passes(self.seed, first, count, together=self.together, device=device, memo=self.memo)

    def _chain(self, first: int, count: int) -> Tensor:
        outputs = chains.run(self.plan.layers, self.inputs.x, self.passes(first, count), shared=self.shared)
        if outputs is None:
            raise ValueError(trace(self.model, self.inputs.narrow(0, 1)).nothing_random(self.model))
        return outputs


@dataclass(frozen=True)
class _Live:
    """The strategies, on the model that is run for the caller's."""

    call: SampleCall
    model: nn.Module
    finder: Finder | None

    def __call__(self, first: int, count: int) -> Any:
        return getattr(self, f"_{self.call.plan.strategy}")(first, count)

    def each(self, starts: list[tuple[int, int]]) -> Any:
        """The chunks one after the other."""
        moving = self._moving()
        outputs, moved = [], []
        for k, n in starts:
            with sites.borrowed_buffers(moving) as copies:
                outputs.append(self(k, n))
            moved += [copies] * n
        _settle(moved)
        return merge(outputs, torch.cat)

    def _moving(self) -> list[nn.Module]:
        return [m for m in self.model.modules() if m.training] if self.call.plan.moves else []

    def _intercept(self, first: int, count: int, strategy: Strategy) -> Interception:
        inputs = self.call.inputs
        passes = self.call.passes(first, count)
        where = None if self.finder is None else self.finder.begin()
        return Interception(
            passes, inputs.rows or 0, strategy=strategy, where=where, shared=self.call.shared, dimmed=self.call.dimmed
        )

    def _check_fired(self, mode: Interception) -> None:
        plan = self.call.plan
        if self.call.witness is not None and self.finder is not None:
            self.call.witness(tuple(self.finder.log))
        if not mode.fired and not plan.foreign and not plan.own and self.call.inputs.rows != 0:
            raise ValueError(trace(self.call.model, self.call.inputs).nothing_random(self.call.model))

    # ---- strategies

    def _loop(self, first: int, count: int) -> Any:
        moving = self._moving()
        outputs, moved = [], []
        for k in range(first, first + count):
            with sites.borrowed_buffers(moving) as copies:
                outputs.append(self._one(k))
            moved.append(copies)
        _settle(moved)
        return merge(outputs, torch.stack)

    def _one(self, k: int) -> Any:
        if self.call.plan.foreign:
            seed_generators(pass_seed(self.call.seed, k))
        mode = self._intercept(k, 1, "loop")
        with Hidden(mode) if self.call.plan.hidden else nullcontext(), mode:
            output = self.call.inputs.fresh().call(self.model)
        self._check_fired(mode)
        return output

    def _once(self, first: int, _: int) -> Any:
        """The network as it is, no passes: (1, N, ...)."""
        if self.call.plan.foreign:
            seed_generators(pass_seed(self.call.seed, first))
        return merge([self.call.inputs.fresh().call(self.model)], lambda ts: ts[0].unsqueeze(0))

    def _repeat(self, first: int, count: int) -> Any:
        rows = self.call.plan.rows
        if rows is None:
            raise NotStackableError("nobody knows where the rows are")
        large = self.call.inputs.repeated(count)
        mode = self._intercept(first, count, "repeat")
        views = count == 1 or self.call.inputs.rows == 1  # of the caller's memory
        with mode:
            output = (large.fresh() if views else large).call(self.model)
        self._check_fired(mode)
        flat, spec = tree_flatten(output)
        axes = iter(rows.outputs)

        def split(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            axis = next(axes)
            if axis is None or axis >= t.ndim or t.shape[axis] != large.rows:
                raise NotStackableError(f"an output of shape {tuple(t.shape)} has no axis of rows")
            return t.unflatten(axis, (count, self.call.inputs.rows)).movedim(axis, 0)

        return tree_unflatten([split(t) for t in flat], spec)

    def _vmap(self, first: int, count: int) -> Any:
        mode = self._intercept(first, count, "vmap")
        rest: list[Any] = []
        spec: list[TreeSpec] = []

        def one(index: Tensor) -> list[Tensor]:
            mode.index = index
            with mode:
                flat, tree = tree_flatten(self.call.inputs.fresh().call(self.model))
            spec.append(tree)
            rest.extend(flat)
            return [t for t in flat if isinstance(t, Tensor)]

        index = torch.arange(count, device=self.call.inputs.device)
        tensors = iter(torch.func.vmap(one, randomness="same")(index))
        self._check_fired(mode)
        if self.call.use == "trial" and sites.holds_batched(self.model):
            raise NotStackableError("the model keeps tensors of a pass")
        return tree_unflatten([next(tensors) if isinstance(t, Tensor) else t for t in rest], spec[0])


class _Chunks(torch.autograd.Function):
    """Chunks of passes whose activations live only while their chunk is at work, forward and backward."""

    @staticmethod
    def forward(ctx: Any, call: SampleCall, starts: list[tuple[int, int]], spec: list[Any], *wanted: Tensor) -> Any:
        ctx.buffers = {b: b.clone() for b in call.model.buffers()} if call.plan.moves else {}
        outputs = call.each(starts)
        spec.extend(tree_flatten(outputs))
        ctx.call, ctx.starts, ctx.wanted = call, starts, wanted
        ctx.save_for_backward(*wanted)
        tensors = tuple(t for t in spec[0] if isinstance(t, Tensor))
        ctx.mark_non_differentiable(*(t for t in tensors if not t.is_floating_point()))
        return tensors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _ = ctx.saved_tensors  # an error if a weight was changed since: the passes would come out differently
        total: list[Tensor | None] = [None] * len(ctx.wanted)
        first = ctx.starts[0][0]
        for k, n in ctx.starts:
            with steady(), torch.enable_grad():
                flat = [t for t in tree_flatten(ctx.call.again(k, n, ctx.buffers))[0] if isinstance(t, Tensor)]
            pairs = [(t, g[k - first : k - first + n]) for t, g in zip(flat, grads, strict=True) if t.requires_grad]
            parts = torch.autograd.grad([t for t, _ in pairs], ctx.wanted, [g for _, g in pairs], allow_unused=True)
            for i, part in enumerate(parts):
                if part is not None:
                    total[i] = part if total[i] is None else total[i].add_(part)  # type: ignore[union-attr]
        return None, None, None, *total


# ------------------------------------------------------------------------------ outputs


def _settle(moved: list[dict[Tensor, Tensor]]) -> None:
    """Buffers that every pass moved from the same start move once: to the mean over the passes."""
    with torch.no_grad():
        for original in moved[0] if moved else ():
            values = [copies[original] for copies in moved]
            if original.is_floating_point():
                original.copy_(torch.stack(values).mean(0) if len(values) > 1 else values[0])
            else:
                original.copy_(values[0])  # counters


def merge(outputs: list[Any], how: Callable[[list[Tensor]], Tensor]) -> Any:
    """One output out of several of the same structure; what is no tensor is taken from the first."""
    flats, specs = zip(*(tree_flatten(o) for o in outputs), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise ValueError("`model` must return the same structure in every pass; its passes differ.")
    merged = [how(list(ts)) if isinstance(ts[0], Tensor) else ts[0] for ts in zip(*flats, strict=True)]
    return tree_unflatten(merged, specs[0])
