"""K passes of any model: `sample(model, x, n_passes)` -> (K, N, ...), differentiable.

Pass k draws from generators seeded by (seed, k), whatever the strategy, so all strategies agree:

    chain    nn.Sequential of plain layers: kernels of our own (`bbalpha.chains`), picked by "auto"
    loop     the model is called K times; always right
    repeat   the batch is repeated K times and the model called once
    vmap     `torch.func.vmap` over the pass: what does not depend on a random draw is computed once

"auto" traces the model once, tries the cheaper strategies on a few rows, keeps the first that gives what the
loop gives, and remembers the choice for the next call.
"""

from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten

from bbalpha import chains, sites
from bbalpha import masks as fast_masks
from bbalpha.drawing import NotStackableError
from bbalpha.inputs import Inputs
from bbalpha.running import Plan, Run, no_randomness, row_axis

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
    run = Run(model, inputs, plan, base, masks == "shared")
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


_PLANS: "WeakKeyDictionary[nn.Module, dict[Any, Plan]]" = WeakKeyDictionary()


def find_plan(model: nn.Module, inputs: Inputs, strategy: Strategy, shared: bool) -> Plan:
    """The remembered plan for this model in this state and inputs of this kind, made where there is none."""
    key = (tuple(_state(model, [])), inputs.kind, strategy, shared)
    plans = _PLANS.setdefault(model, {})
    if key not in plans:
        if len(plans) > 32:
            plans.clear()
        plans[key] = _make_plan(model, inputs, strategy, shared)
    return plans[key]


def _state(module: nn.Module, found: list[Any]) -> list[Any]:
    """What a plan hangs on, module by module; `modules()` would take three times as long."""
    found += (id(module), module.training, chains.hooked(module))
    for child in module._modules.values():
        if child is not None:
            _state(child, found)
    return found


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
        run = Run(model, few, plan, 0, False)
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
        loop = Run(model, few, replace(plan, strategy="loop", moves=True), 0, shared)(0, 2)
    try:
        with torch.no_grad(), sites.borrowed_buffers(modules):
            other = Run(model, few, plan, 0, shared)(0, 2)
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
        together = Run(model, few, plan, 0, True)(0, 1)
        alone = Run(model, few.first(1), plan, 0, True)(0, 1)
    flat, _ = tree_flatten(together)
    return all(
        _near(a.narrow(row_axis(a, few.rows, few.batch_dim) or 0, 0, 1), b)
        for a, b in zip(flat, tree_flatten(alone)[0], strict=True)
        if isinstance(a, Tensor) and row_axis(a, few.rows, few.batch_dim) is not None
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


# ------------------------------------------------------------------------------ helpers


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
