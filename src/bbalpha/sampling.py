"""K passes of any model: `sample(model, x, n_passes)` -> (K, N, ...), differentiable.

Pass k draws from generators seeded by (seed, k), whatever the strategy, so all strategies agree:

    chain    nn.Sequential of plain layers: kernels of our own (`bbalpha.chains`), picked by "auto"
    loop     the model is called K times; always right
    repeat   the batch is repeated K times and the model called once
    vmap     `torch.func.vmap` over the pass: what does not depend on a random draw is computed once

"auto" traces the model once, tries the cheaper strategies on a few rows, keeps the first that gives what the
loop gives, and remembers the choice for the next call.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from bbalpha import chains, sites
from bbalpha import masks as fast_masks
from bbalpha.drawing import NotStackableError
from bbalpha.inputs import Inputs
from bbalpha.interception import Interception
from bbalpha.masks import Passes

Masks = Literal["per_example", "shared"]
Strategy = Literal["auto", "vmap", "repeat", "loop"]


def sample(
    model: nn.Module,
    x: Any,
    n_passes: int,
    *,
    masks: Masks = "per_example",
    strategy: Strategy = "auto",
    chunk_size: int | None = None,
    batch_dim: int = 0,
    seed: int | None = None,
) -> Any:
    """The outputs of `n_passes` stochastic passes of `model` on `x`, stacked: (K, N, ...).

    Random sites (dropout of every kind) are sampled whether the model is in training or evaluation mode;
    everything else follows the mode it is in. Gradients flow to the parameters and to `x`.

    Args:
        model: Any nn.Module with at least one active random site.
        x: A tensor, a tuple (called as ``model(*x)``) or a mapping (``model(**x)``).
        n_passes: K.
        masks: "per_example" draws anew for every row; "shared" draws one function a pass for all rows, and
            pass k of one `seed` is the same function for every batch.
        strategy: "auto", or one of "vmap", "repeat", "loop".
        chunk_size: At most so many passes at a time; their activations are computed again in the backward.
        batch_dim: The axis of `x` that counts the rows.
        seed: None draws from torch's global generator; an int leaves it untouched.

    Returns:
        What the model returns (tensor, tuple, mapping), every tensor with a first axis of K passes.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    >>> sample(net, torch.zeros(3, 2), n_passes=10).shape
    torch.Size([10, 3, 1])
    """
    _check(model, n_passes, masks, strategy, chunk_size, seed)
    inputs = Inputs.of(x, batch_dim)
    base = fast_masks.draw_seed() if seed is None else seed
    plan = find_plan(model, inputs, strategy, masks == "shared")
    run = _Run(model, inputs, plan, base, masks == "shared")
    if plan.recomputes and torch.is_grad_enabled():
        raise ValueError(
            "`model` must not recompute its activations (gradient checkpointing): the backward would draw other masks. "
            "Switch that off and let `chunk_size` bound the memory."
        )
    try:
        return run.all(n_passes, chunk_size)
    except NotStackableError:  # so many rows can be taken for something else
        return replace(run, plan=replace(plan, strategy="loop")).all(n_passes, chunk_size)


# ------------------------------------------------------------------------------ the plan


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


_PLANS: "WeakKeyDictionary[nn.Module, dict[Any, Plan]]" = WeakKeyDictionary()


def find_plan(model: nn.Module, inputs: Inputs, strategy: Strategy, shared: bool) -> Plan:
    """The remembered plan for this model in this state and inputs of this kind, made where there is none."""
    modules = tuple((id(m), m.training, chains.hooked(m)) for m in model.modules())
    key = (modules, inputs.kind, strategy, shared)
    plans = _PLANS.setdefault(model, {})
    if key not in plans:
        if len(plans) > 32:
            plans.clear()
        plans[key] = _make_plan(model, inputs, strategy, shared)
    return plans[key]


def _make_plan(model: nn.Module, inputs: Inputs, strategy: Strategy, shared: bool) -> Plan:
    few, seen = _look(model, inputs)
    if not any(isinstance(t, Tensor) for t in tree_flatten(seen.output)[0]):
        raise TypeError(
            "`model` must return tensors, alone or in tuples, lists, dicts or a ModelOutput; "
            f"got {type(seen.output).__name__}."
        )
    if not seen.fired and inputs.rows:  # for no rows, compiled code draws nothing
        raise ValueError(no_randomness(model, seen))
    _check_structure(model, few, seen)
    only, seen = sites.least_switched(model, few, seen)
    hidden, moves = bool(seen.hidden), seen.moved
    plain = Plan("loop", False, hidden, moves, recomputes=seen.recomputes, only=only)
    if inputs.rows == 0:
        return plain
    if not _differs(model, few, plain, 4 if seen.certain else 64) and not (
        seen.certain and sites.depends(model, few, only)
    ):
        raise ValueError(no_randomness(model, seen))
    if shared and (hidden or not _rows_agree(model, few, plain)):
        if strategy not in ("auto", "loop"):
            raise ValueError(f'`strategy="{strategy}"` cannot share masks on this model; use "auto".')
        return replace(plain, rowwise=True)
    # work in front of the first draw is worth sharing; batch statistics must be those of one pass
    order: list[Literal["chain", "vmap", "repeat"]] = ["vmap", "repeat"] if seen.worth_sharing else ["repeat", "vmap"]
    layers = chains.find(model) or ()
    if layers and model not in layers and isinstance(inputs.x, Tensor) and inputs.batch_dim == 0 and strategy == "auto":
        order.insert(0, "chain")
    batch_statistics = any(isinstance(m, _NormBase) and m.training for m in model.modules())
    reasons: list[str] = []
    for way in order if strategy == "auto" else [w for w in order if w == strategy]:
        plan = replace(plain, strategy=way, reasons=tuple(reasons), layers=layers if way == "chain" else ())
        why = _objection(model, few, plan, shared, batch_statistics)
        if why is None:
            return plan
        reasons.append(f"{way}: {why}")
    if strategy in ("vmap", "repeat"):
        raise ValueError(f'`strategy="{strategy}"` does not fit this model ({reasons[0]}); use "auto" or "loop".')
    return replace(plain, reasons=tuple(reasons))


def _look(model: nn.Module, inputs: Inputs) -> tuple[Inputs, sites.Trace]:
    """A few rows to try strategies on, and what one pass on them met."""
    few = inputs.first(11)
    try:
        return few, sites.trace(model, few)
    # whatever goes wrong on part of the rows (an input as long as the batch that counts something else) may not on all
    except Exception:
        if few.rows == inputs.rows:
            raise
    return inputs.first(inputs.rows), sites.trace(model, inputs)


def _differs(model: nn.Module, few: Inputs, plan: Plan, count: int) -> bool:
    """Whether one of `count` passes differs from the first."""
    with torch.no_grad(), sites.borrowed_buffers(list(model.modules())):
        run = _Run(model, few, plan, 0, False)
        one = tree_flatten(run(0, 1))[0]
        return any(
            not torch.equal(a, b)
            for k in range(1, count)
            for a, b in zip(one, tree_flatten(run(k, 1))[0], strict=True)
            if isinstance(a, Tensor)
        )


def _objection(model: nn.Module, few: Inputs, plan: Plan, shared: bool, batch_statistics: bool) -> str | None:
    """Why `plan` may not be used: None if two passes come out as the loop gives them."""
    if plan.hidden:
        return "random calls that cannot be intercepted"
    if plan.strategy == "repeat" and batch_statistics:
        return "batch statistics would be taken over all passes"
    modules = list(model.modules())
    with torch.no_grad(), sites.borrowed_buffers(modules):
        loop = _Run(model, few, replace(plan, strategy="loop", moves=True), 0, shared)(0, 2)
    try:
        with torch.no_grad(), sites.borrowed_buffers(modules):
            other = _Run(model, few, plan, 0, shared)(0, 2)
    # any error of the model under a strategy it was not written for means: do not use that strategy
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    if sites.holds_batched(model):
        return "the model keeps tensors of a pass"
    return None if _close(loop, other) else "gives other outputs than separate passes"


def _rows_agree(model: nn.Module, few: Inputs, plan: Plan) -> bool:
    """Whether, with shared masks, the first row alone gets what it gets in the batch."""
    if few.rows < 2:
        return True
    with torch.no_grad(), sites.borrowed_buffers(list(model.modules())):
        if any(isinstance(m, _NormBase) and m.training for m in model.modules()):
            return True  # rows depend on each other by design
        together = _Run(model, few, plan, 0, True)(0, 1)
        alone = _Run(model, few.first(1), plan, 0, True)(0, 1)
    flat, _ = tree_flatten(together)
    return all(
        _near(a.narrow(_row_axis(a, few.rows, few.batch_dim) or 0, 0, 1), b)
        for a, b in zip(flat, tree_flatten(alone)[0], strict=True)
        if isinstance(a, Tensor) and _row_axis(a, few.rows, few.batch_dim) is not None
    )


def _check_structure(model: nn.Module, few: Inputs, seen: sites.Trace) -> None:
    """Refuse a model whose output changes its structure when its random sites are switched on."""
    if all(m.training for m in model.modules() if sites.may_be_random(m)):
        return
    asleep = sites.trace(model, few, switch=False)
    if not sites.same_structure(asleep.output, seen.output):
        raise ValueError(
            "`model` returns something else in training mode than in evaluation mode (an auxiliary head?), and its "
            "random sites can only be switched on by training mode. Let its forward return the same structure in "
            "both, or call sample on the part that has the dropout."
        )


def no_randomness(model: nn.Module, seen: sites.Trace) -> str:
    """The error for a model whose passes would all be the same."""
    met = [f"{s.name or 'the model'} ({s.kind}, rate {s.rate})" for s in seen.sites]
    state = "without effect on the output" if seen.fired else "off"
    found = f"found, but {state}: {', '.join(met[:5])}" if met else "no dropout of any kind was met"
    return (
        f"`model` must have at least one active random site; {type(model).__name__} has none ({found}), so all "
        "passes would be equal. Put dropout in with bbalpha.add_dropout(model, p=0.1)."
    )


# ------------------------------------------------------------------------------ running


@dataclass(frozen=True)
class _Run:
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
        return self(0, count) if chunk_size is None or chunk_size >= count else self.chunked(count, chunk_size)

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
        return _stack([_merge([self._one(k, row(n)) for n in range(self.inputs.rows)], join) for k in passes])

    def _repeat(self, first: int, count: int) -> Any:
        large = Inputs(self.inputs.repeated(count), self.inputs.batch_dim, count * self.inputs.rows)
        with self._intercept(first, count, layout="stacked") as mode:
            output = (large.fresh() if count == 1 else large).call(self.model)
        self._check_fired(mode)

        def split(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            axis = _row_axis(t, large.rows, large.batch_dim, offset=0)
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
        return _merge(outputs, torch.cat)


class _Chunks(torch.autograd.Function):
    """Chunks of passes whose activations live only while their chunk is at work, forward and backward."""

    @staticmethod
    def forward(ctx: Any, run: _Run, starts: list[tuple[int, int]], spec: list[Any], *wanted: Tensor) -> Any:
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


# ------------------------------------------------------------------------------ helpers


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
    return _merge(outputs, torch.stack)


def _merge(outputs: list[Any], how: Callable[[list[Tensor]], Tensor]) -> Any:
    """One output out of several of the same structure; what is no tensor is taken from the first."""
    flats, specs = zip(*(tree_flatten(o) for o in outputs), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise ValueError("`model` must return the same structure in every pass; its passes differ.")
    merged = [how(list(ts)) if isinstance(ts[0], Tensor) else ts[0] for ts in zip(*flats, strict=True)]
    return tree_unflatten(merged, specs[0])


def _row_axis(t: Tensor, rows: int, batch_dim: int, offset: int = 1) -> int | None:
    """The axis of `t` that counts rows, `offset` axes after where the model has it."""
    for axis in dict.fromkeys((batch_dim + offset, offset)):
        if axis < t.ndim and t.shape[axis] == rows:
            return axis
    return None


def _close(a: Any, b: Any) -> bool:
    (flat_a, spec_a), (flat_b, spec_b) = tree_flatten(a), tree_flatten(b)
    if spec_a != spec_b:
        return False
    pairs = [(s, t) for s, t in zip(flat_a, flat_b, strict=True) if isinstance(s, Tensor)]
    return all(isinstance(t, Tensor) and _near(s, t) for s, t in pairs)


def _near(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:  # autocast does not reach into vmap
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    loose = 5e-2 if a.dtype in (torch.float16, torch.bfloat16) else 1e-4
    size = a.detach().abs().float().nan_to_num(posinf=0.0).amax() if a.numel() else a.new_zeros(())
    return torch.allclose(a.float(), b.float(), rtol=loose, atol=float(size) * loose + 1e-12, equal_nan=True)


def _check(model: Any, n_passes: Any, masks: str, strategy: str, chunk_size: Any, seed: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module; got {type(model).__name__}.")
    for name, value, required in (("n_passes", n_passes, True), ("chunk_size", chunk_size, False)):
        if value is None and not required:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1; got {value!r}.")
    if masks not in ("per_example", "shared"):
        raise ValueError(f'`masks` must be "per_example" or "shared"; got {masks!r}.')
    if strategy not in ("auto", "vmap", "repeat", "loop"):
        raise ValueError(f'`strategy` must be "auto", "vmap", "repeat" or "loop"; got {strategy!r}.')
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"`seed` must be an int or None; got {type(seed).__name__}.")
