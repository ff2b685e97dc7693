"""Running the passes of a model by one strategy: the plan says which, `Run` does it.

Run(model, inputs, Plan("loop"), seed=0, shared=False)(first=0, count=10)       # (10, N, ...)
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from bbalpha import chains, sites
from bbalpha import masks as fast_masks
from bbalpha.drawing import NotStackableError
from bbalpha.inputs import Inputs
from bbalpha.interception import Interception
from bbalpha.masks import Passes


@dataclass(frozen=True)
class Plan:
    """How a model is run, found once by trying.

    Attributes:
        strategy: What the passes are run by.
        rowwise: Shared masks only: a row's draw depends on the batch around it, so rows are run one by one.
        hidden: Draws come from torch's global generator too, which is seeded for every pass.
        moves: Buffers change in a pass and have to be looked after.
        reasons: Why the cheaper strategies were not taken.
        only: The modules to switch on, by name; None for all that may be random.
        recomputes: The model draws inside torch.utils.checkpoint, whose backward would draw anew.
        layers: With "chain", the layers in the order they run.
    """

    strategy: Literal["chain", "vmap", "repeat", "loop"]
    rowwise: bool
    hidden: bool
    moves: bool
    reasons: tuple[str, ...] = ()
    recomputes: bool = False
    only: frozenset[str] | None = None
    layers: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Run:
    """One call of `sample`: passes first..first+count of a model on its inputs."""

    model: nn.Module
    inputs: Inputs
    plan: Plan
    seed: int
    shared: bool

    def __call__(self, first: int, count: int) -> Any:
        """The outputs of the passes, stacked."""
        if self.plan.strategy == "chain":  # touches no flag and no buffer
            return self._chain(first, count)
        with self._prepared():
            if self.plan.rowwise:
                return self._rowwise(first, count)
            return getattr(self, f"_{self.plan.strategy}")(first, count)

    def all(self, count: int, chunk_size: int | None) -> Any:
        """All passes, at most `chunk_size` at a time."""
        bounded = self.plan.strategy == "chain" and not torch.is_grad_enabled()  # by itself, its prefix run once
        if chunk_size is None or chunk_size >= count or bounded:
            return self(0, count)
        return self.chunked(count, chunk_size)

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Random sites on, buffers of modules in evaluation mode protected, compiled parts run eagerly."""
        with ExitStack() as contexts:
            if self.plan.moves:
                quiet = [m for m in self.model.modules() if not m.training]
                contexts.enter_context(sites.borrowed_buffers(quiet))
            contexts.enter_context(sites.switched_on(self.model, self.plan.only))
            if self.plan.hidden:
                contexts.enter_context(sites.forked_generators())
            contexts.enter_context(sites.eager())
            yield

    def _intercept(self, first: int, count: int, **layout: Any) -> Interception:
        passes = Passes(self.seed, first, count, device=self.inputs.device)
        return Interception(passes, self.inputs.rows, shared=self.shared, batch_dim=self.inputs.batch_dim, **layout)

    # ---- strategies

    def _chain(self, first: int, count: int) -> Tensor:
        passes = Passes(self.seed, first, count, device=self.inputs.device)
        outputs = chains.run(self.plan.layers, self.inputs.x, passes, shared=self.shared)
        if outputs is None:
            raise ValueError(no_randomness(self.model, sites.trace(self.model, self.inputs.first(1))))
        return outputs

    def _loop(self, first: int, count: int) -> Any:
        moving = [m for m in self.model.modules() if m.training] if self.plan.moves else []
        outputs, moved = [], []
        for k in range(first, first + count):
            with sites.borrowed_buffers(moving) as copies:
                outputs.append(self._one(k, self.inputs))
            moved.append(copies)
        _settle(moved)
        return _stack(outputs)

    def _one(self, k: int, inputs: Inputs) -> Any:
        if self.plan.hidden:
            sites.seed_generators(fast_masks.pass_seed(self.seed, k))
        with self._intercept(k, 1) as mode:
            mode.rows = inputs.rows
            output = inputs.fresh().call(self.model)
        self._check_fired(mode)
        return output

    def _rowwise(self, first: int, count: int) -> Any:
        d = self.inputs.batch_dim

        def row(n: int) -> Inputs:
            return Inputs(self.inputs.map(lambda t: t.narrow(d, n, 1)), d, 1)

        def join(rows: list[Tensor]) -> Tensor:
            return torch.cat(rows, d if rows[0].ndim > d and rows[0].shape[d] == 1 else 0)

        passes = range(first, first + count)
        return _stack([merge([self._one(k, row(n)) for n in range(self.inputs.rows)], join) for k in passes])

    def _repeat(self, first: int, count: int) -> Any:
        large = Inputs(self.inputs.repeated(count), self.inputs.batch_dim, count * self.inputs.rows)
        with self._intercept(first, count, layout="stacked") as mode:
            output = (large.fresh() if count == 1 else large).call(self.model)
        self._check_fired(mode)

        def split(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            axis = row_axis(t, large.rows, large.batch_dim, offset=0)
            if axis is None:
                raise NotStackableError(f"an output of shape {tuple(t.shape)} has no axis of rows")
            return t.unflatten(axis, (count, self.inputs.rows)).movedim(axis, 0)

        flat, spec = tree_flatten(output)
        return tree_unflatten([split(t) for t in flat], spec)

    def _vmap(self, first: int, count: int) -> Any:
        mode = self._intercept(first, count, layout="vmapped")
        rest: list[Any] = []
        spec: list[TreeSpec] = []

        def one(index: Tensor) -> list[Tensor]:
            mode.index = index
            with mode:
                flat, tree = tree_flatten(self.inputs.fresh().call(self.model))
            spec.append(tree)
            rest.extend(flat)
            return [t for t in flat if isinstance(t, Tensor)]

        index = torch.arange(count, device=self.inputs.device)
        tensors = iter(torch.func.vmap(one, randomness="same")(index))
        self._check_fired(mode)
        return tree_unflatten([next(tensors) if isinstance(t, Tensor) else t for t in rest], spec[0])

    def _check_fired(self, mode: Interception) -> None:
        if not mode.fired and not self.plan.hidden and self.inputs.rows:
            raise ValueError(no_randomness(self.model, sites.trace(self.model, self.inputs.first(1))))

    # ---- bounded memory

    def chunked(self, count: int, size: int) -> Any:
        """All passes, `size` at a time; with gradients, activations are computed again in the backward."""
        starts = [(k, min(size, count - k)) for k in range(0, count, size)]
        wanted = [t for t in (*self.inputs.tensors, *self.model.parameters()) if t.requires_grad]
        if not torch.is_grad_enabled() or not wanted:
            return self.each(starts)
        spec: list[Any] = []
        tensors = iter(_Chunks.apply(self, starts, spec, *wanted))
        flat, tree = spec
        return tree_unflatten([next(tensors) if isinstance(t, Tensor) else t for t in flat], tree)

    def each(self, starts: list[tuple[int, int]]) -> Any:
        """The chunks (first, count) one after the other; buffers that move do so once for all of them."""
        moving = [m for m in self.model.modules() if m.training] if self.plan.moves else []
        outputs, moved = [], []
        for k, n in starts:
            with sites.borrowed_buffers(moving) as copies:
                outputs.append(self(k, n))
            moved += [copies] * n
        _settle(moved)
        return merge(outputs, torch.cat)


class _Chunks(torch.autograd.Function):
    """Chunks of passes whose activations live only while their chunk is at work, forward and backward."""

    @staticmethod
    def forward(ctx: Any, run: Run, starts: list[tuple[int, int]], spec: list[Any], *wanted: Tensor) -> Any:
        if run.plan.moves:
            ctx.buffers = {b: b.clone() for b in run.model.buffers()}
        outputs = run.each(starts)
        spec.extend(tree_flatten(outputs))
        ctx.run, ctx.starts, ctx.wanted = run, starts, wanted
        ctx.save_for_backward(*wanted)
        tensors = tuple(t for t in spec[0] if isinstance(t, Tensor))
        ctx.mark_non_differentiable(*(t for t in tensors if not t.is_floating_point()))
        return tensors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _ = ctx.saved_tensors  # an error if a weight was changed since: the passes would come out differently
        total: list[Tensor | None] = [None] * len(ctx.wanted)
        for k, n in ctx.starts:
            with torch.enable_grad(), sites.borrowed_buffers(list(ctx.run.model.modules())) as copies:
                for original, copy in copies.items() if ctx.run.plan.moves else ():
                    copy.copy_(ctx.buffers.get(original, copy))  # as the forward found them
                flat = [t for t in tree_flatten(ctx.run(k, n))[0] if isinstance(t, Tensor)]
            pairs = [(t, g[k : k + n]) for t, g in zip(flat, grads, strict=True) if t.requires_grad]
            parts = torch.autograd.grad([t for t, _ in pairs], ctx.wanted, [g for _, g in pairs], allow_unused=True)
            for i, part in enumerate(parts):
                if part is not None:
                    total[i] = part if total[i] is None else total[i].add_(part)  # type: ignore[union-attr]
        return None, None, None, *total


# ------------------------------------------------------------------------------ outputs


def no_randomness(model: nn.Module, seen: sites.Trace) -> str:
    """The error for a model whose passes would all be the same."""
    met = [f"{s.name or 'the model'} ({s.kind}, rate {s.rate})" for s in seen.sites]
    state = "without effect on the output" if seen.fired else "off"
    found = f"found, but {state}: {', '.join(met[:5])}" if met else "no dropout of any kind was met"
    return (
        f"`model` must have at least one active random site; {type(model).__name__} has none ({found}), so all "
        "passes would be equal. Put dropout in with bbalpha.add_dropout(model, p=0.1)."
    )


def _settle(moved: list[dict[Tensor, Tensor]]) -> None:
    """Buffers that every pass moved from the same start move once: to the mean over the passes."""
    with torch.no_grad():
        for original in moved[0] if moved else ():
            values = [copies[original] for copies in moved]
            if original.is_floating_point():
                original.copy_(torch.stack(values).mean(0) if len(values) > 1 else values[0])
            else:
                original.copy_(values[0])  # counters


def _stack(outputs: list[Any]) -> Any:
    return merge(outputs, torch.stack)


def merge(outputs: list[Any], how: Callable[[list[Tensor]], Tensor]) -> Any:
    """One output out of several of the same structure; what is no tensor is taken from the first."""
    flats, specs = zip(*(tree_flatten(o) for o in outputs), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise ValueError("`model` must return the same structure in every pass; its passes differ.")
    merged = [how(list(ts)) if isinstance(ts[0], Tensor) else ts[0] for ts in zip(*flats, strict=True)]
    return tree_unflatten(merged, specs[0])


def row_axis(t: Tensor, rows: int, batch_dim: int, offset: int = 1) -> int | None:
    """The axis of `t` that counts rows, `offset` axes after where the model has it."""
    for axis in dict.fromkeys((batch_dim + offset, offset)):
        if axis < t.ndim and t.shape[axis] == rows:
            return axis
    return None
