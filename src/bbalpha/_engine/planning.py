"""How to run a model: traced once, tried on a few rows, remembered for as long as the model is what it was.

The cheaper strategies are tried in turn, and the first that gives what separate passes give is taken. A plan belongs to
a model in a state: its modules, their flags, hooks and plain attributes are compared at every call, and whatever has
changed leads to a new plan.
"""

import weakref
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bbalpha._engine import chains, selection, tracing
from bbalpha._engine.drawing import NotShareableError, NotStackableError, Strategy
from bbalpha._engine.guards import heed_interrupt, steady
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.kinds import BATCH_NORMS
from bbalpha._engine.rows import Places, Rows, a_few, find_rows, near, refused
from bbalpha._engine.running import Plan, SampleCall, Witness
from bbalpha._engine.sites import may_be_random
from bbalpha._engine.states import note_state
from bbalpha._engine.tracing import Trace, trace
from bbalpha._kernels import draw_seed
from bbalpha._torch import outside_transforms, tree_flatten
from bbalpha.layers import DropConnectLinear, GaussianLinear

Masks = Literal["per_example", "shared"]
StrategyChoice = Strategy | Literal["auto"]
Way = StrategyChoice | Literal["once"]
Key = tuple[Any, ...]
_PASSES = 3  # that have to agree on whether rows depend on each other: one may have lost the path they do so on


class _Memory:
    """What was found out about a model in one state.

    Attributes:
        modules: Its modules; a new one may have the address of an old one, so the address does not tell.
        plans: By inputs and options.
        rows: By inputs and the modules that are switched on.
        random: By inputs: whether anything draws.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = [weakref.ref(m) for m in modules]
        self.plans: dict[Key, Plan] = {}
        self.rows: dict[Key, Rows | None] = {}
        self.random: dict[Key, bool] = {}

    def holds(self, modules: list[nn.Module]) -> bool:
        """Whether these are the modules it was made for."""
        for ref, m in zip(self.modules, modules, strict=True):  # noqa: SIM110 - half the time of all()
            if ref() is not m:
                return False
        return True


_MEMORY: "WeakKeyDictionary[nn.Module, dict[Key, _Memory]]" = WeakKeyDictionary()


def run_passes(
    model: nn.Module,
    inputs: Inputs,
    n_passes: int | None,
    *,
    masks: Masks,
    seed: int | None,
    balanced: bool = True,
    strategy: Way = "auto",
    chunk_size: int | None = None,
    evaluation: bool = False,
    plan: Plan | None = None,
    witness: Witness | None = None,
    sites: selection.Sites | None = None,
    only: range | None = None,
) -> Any:
    """`sample` of what was checked; with `evaluation`, as if the caller had called ``model.eval()`` before.

    A `witness` is told, with shared masks, which modules drew in each pass. `only` runs these of the passes.
    """
    if n_passes is None:  # nothing is drawn: no seed either
        n_passes, masks, strategy, seed, sites = 1, "per_example", "once", 0, None
    if inputs.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "`sample` must not be captured in a CUDA graph: its masks are drawn from generators that are made at every "
            "call, so every replay would have the same ones. Capture a frozen model (bbalpha.freeze), or nothing."
        )
    shared = masks == "shared"
    with steady(draws=seed is None):
        base = draw_seed(None) if seed is None else seed
        plan = plan or find_plan(model, inputs, strategy, shared, evaluation, sites)
        if plan.rows is not None and plan.rows.axes != inputs.axes:
            inputs = replace(inputs, axes=plan.rows.axes)
        _check_plan(plan, seed)
        together, wanted = n_passes if balanced else 0, range(n_passes) if only is None else only
        call = SampleCall(model, inputs, plan, base, shared, evaluation, witness=witness, together=together)
        try:
            return call.all(wanted, chunk_size)
        except NotStackableError as error:  # what was tried on a few rows does not hold here
            heed_interrupt(error)
            call = replace(call, plan=replace(plan, strategy="loop"))
            return call.all(wanted, chunk_size)
        except NotShareableError as error:
            raise ValueError(refused(error)) from error


def _check_plan(plan: Plan, seed: int | None) -> None:
    """Refuse what the plan cannot keep."""
    if plan.recomputes and torch.is_grad_enabled():
        raise ValueError(
            "`model` must not recompute its activations (gradient checkpointing): the backward would draw other masks. "
            "Switch that off and let `chunk_size` bound the memory."
        )
    if plan.own and seed is not None:
        raise ValueError(
            "`seed` cannot be kept: the passes of this model differ by a generator of its own. Use seed=None, or let "
            "it draw from torch."
        )


def is_random(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a pass of `model` on a few rows draws anything with its random sites switched on; remembered."""
    memory, kind = _remembered(model), inputs.kind
    if kind not in memory.random:
        with outside_transforms():
            memory.random[kind] = look_at(model, inputs.concrete(), evaluation=True)[1].fired
    return memory.random[kind]


def keep_with(model: nn.Module, inputs: Inputs, sites: selection.Sites) -> dict[str, float]:
    """`Trace.keep` of a pass in which only `sites` draw."""
    asked = selection.asked(model, sites)
    few, seen = look_at(model, inputs, evaluation=False)
    return selection.narrowed(model, few, seen, None, asked, evaluation=False)[2].keep


def find_plan(
    model: nn.Module,
    inputs: Inputs,
    strategy: Way,
    shared: bool,
    evaluation: bool,
    sites: selection.Sites | None = None,
) -> Plan:
    """The remembered plan for this model in this state and inputs of this kind, made where there is none."""
    memory = _remembered(model)
    asked = None if sites is None else selection.asked(model, sites)
    key = (inputs.kind, strategy, shared, evaluation, asked)
    plan = memory.plans.get(key)
    if plan is None:
        given = inputs.concrete()
        try:
            with outside_transforms():
                plan = _make_plan(model, given, strategy, shared, evaluation, asked, memory)
        except NotShareableError as error:
            raise ValueError(refused(error)) from error
        if plan.rows is None or plan.rows.certain:
            memory.plans[key] = plan
    return plan


def _remembered(model: nn.Module) -> _Memory:
    """What is known of `model` in the state it is in."""
    modules: list[nn.Module] = []
    facts: list[Any] = []
    note_state(model, modules, facts, {})
    state = tuple(facts)
    states = _MEMORY.get(model)
    memory = None if states is None else states.get(state)
    if memory is None or not memory.holds(modules):
        states = _MEMORY.setdefault(model, {})
        if len(states) > 16:
            states.clear()
        memory = states[state] = _Memory(modules)
    elif len(memory.plans) > 32:
        memory.plans.clear()
    return memory


# ------------------------------------------------------------------------------ making a plan


def _make_plan(
    model: nn.Module,
    inputs: Inputs,
    strategy: Way,
    shared: bool,
    evaluation: bool,
    asked: selection.Asked | None,
    memory: _Memory,
) -> Plan:
    if strategy == "once":
        return _plan_without_passes(model, inputs, evaluation)
    layers = chains.find(model) or () if isinstance(inputs.x, Tensor) and inputs.batch_dim == 0 else ()
    if asked is None and strategy == "auto" and layers and model not in layers and chains.is_dense(layers, inputs.x):
        return Plan("chain", layers=layers, rows=_rows_of_a_chain(layers, inputs.x))
    _check_runnable(model)
    few, seen = look_at(model, inputs, evaluation=evaluation)
    _check_output(seen.output)
    _check_structure(model, few, seen, evaluation)
    only, seen = tracing.least_switched(model, few, seen, evaluation=evaluation)
    off: frozenset[str] = frozenset()
    if asked is not None:
        only, off, seen = selection.narrowed(model, few, seen, only, asked, evaluation=evaluation)
        layers = chains.without(layers, [m for name, m in model.named_modules() if name in off])
    plain = Plan(
        "loop", hidden=bool(seen.hidden), foreign=seen.foreign, moves=seen.moved, recomputes=seen.recomputes, only=only,
        off=off, located=any(isinstance(m, (DropConnectLinear, GaussianLinear)) for m in model.modules()),
    )  # fmt: skip
    if inputs.rows == 0:  # for no rows, compiled code draws nothing
        return plain
    plain = _check_random(model, few, seen, plain, evaluation)
    if asked is not None:
        _check_told(model, few, plain, evaluation)
    if shared or evaluation or plain.located or strategy in ("auto", "repeat"):
        rows = _known_rows(model, inputs, plain, memory)
        if rows is not None:
            plain, few = replace(plain, rows=rows), rows.tried_on(inputs)
    return _cheapest(model, few, seen, plain, layers, strategy, shared, evaluation)


def _cheapest(
    model: nn.Module,
    few: Inputs,
    seen: Trace,
    plain: Plan,
    layers: tuple[nn.Module, ...],
    strategy: StrategyChoice,
    shared: bool,
    evaluation: bool,
) -> Plan:
    """The plan with the first strategy that gives what the loop gives."""
    # work in front of the first draw is worth sharing; batch statistics must be those of one pass
    order: list[Strategy | Literal["chain"]] = ["vmap", "repeat"] if seen.worth_sharing else ["repeat", "vmap"]
    if layers and model not in layers and strategy == "auto":
        order.insert(0, "chain")
    reasons: list[str] = []
    for way in order if strategy == "auto" else [w for w in order if w == strategy]:
        plan = replace(plain, strategy=way, reasons=tuple(reasons), layers=layers if way == "chain" else ())
        why = _objection(model, few, plan, shared, evaluation)
        if why is None:
            return plan
        reasons.append(f"{way}: {why}")
    if strategy in ("vmap", "repeat"):
        raise ValueError(f'`strategy="{strategy}"` does not fit this model ({reasons[0]}); use "auto" or "loop".')
    return replace(plain, reasons=tuple(reasons))


def _plan_without_passes(model: nn.Module, inputs: Inputs, evaluation: bool) -> Plan:
    """The plan for the network as it is, random sites off; with `evaluation` it knows the rows, to cut them."""
    _check_runnable(model)
    few, seen = look_at(model, inputs, evaluation=evaluation, switch=False)
    _check_output(seen.output)
    off, seen = tracing.least_silenced(model, few, seen, evaluation=evaluation)
    plan = Plan("once", foreign=seen.fired, moves=seen.moved, only=frozenset(), off=off)
    if seen.fired and _differs(model, few, plan, 64, evaluation):
        raise ValueError(
            f"`n_passes=None` needs a model that draws nothing with its random sites off; {type(model).__name__} still "
            f"draws: {', '.join(seen.draws_made[:5])}. Let that follow `self.training`, or give a number of passes."
        )
    return replace(plan, rows=_rows(model, inputs, plan) if evaluation and inputs.rows else None)


def look_at(model: nn.Module, inputs: Inputs, *, evaluation: bool, switch: bool = True) -> tuple[Inputs, Trace]:
    """A few rows to try strategies on, and what one pass on them met."""
    if inputs.rows and any(axis is not None for axis in inputs.axes):
        few = a_few(inputs)
        try:
            return few, trace(model, few, evaluation=evaluation, switch=switch)
        # whatever goes wrong on part of the rows (an input as long as the batch that counts something else) may not on
        # all of them
        except Exception as error:  # noqa: BLE001
            heed_interrupt(error)
    return inputs, trace(model, inputs, evaluation=evaluation, switch=switch)


def _known_rows(model: nn.Module, inputs: Inputs, plain: Plan, memory: _Memory) -> Rows | None:
    """`_rows`, remembered."""
    key = (inputs.kind, plain.only, plain.off)
    rows = memory.rows[key] if key in memory.rows else _rows(model, inputs, plain) if inputs.rows else None
    if rows is None or rows.certain:
        memory.rows[key] = rows
    return rows


def _rows(model: nn.Module, inputs: Inputs, plain: Plan) -> Rows | None:
    """Where the rows are, as the model shows in evaluation mode."""

    def look(some: Inputs, seed: int) -> Trace:
        on, off = plain.only, plain.off
        return trace(model, some, switch=plain.strategy != "once", only=on, off=off, evaluation=True, seed=seed)

    def run(some: Inputs, places: Places) -> Any:
        plan = replace(plain, moves=True, rows=Rows(some.axes, (), places, False, False, 1))
        return replace(_trial(model, some, plan, True, True), dimmed=True)(0, _PASSES)

    with torch.no_grad():
        return find_rows(inputs, look, run)


def _trial(model: nn.Module, few: Inputs, plan: Plan, shared: bool, evaluation: bool) -> SampleCall:
    return SampleCall(model, few, plan, 0, shared, evaluation, use="trial")


def _check_random(model: nn.Module, few: Inputs, seen: Trace, plan: Plan, evaluation: bool) -> Plan:
    """The plan, if passes differ; by a generator of the model's own if by nothing else."""
    if not seen.fired:
        own = replace(plan, own=True)
        if _differs(model, few, own, 3, evaluation):
            return own
        raise ValueError(seen.nothing_random(model))
    if not _differs(model, few, plan, 4 if seen.certain else 64, evaluation) and not (
        seen.certain and tracing.depends(model, few, plan.only, plan.off, evaluation=evaluation)
    ):
        raise ValueError(selection.without_effect(seen) if plan.off else seen.nothing_random(model))
    return plan


def _check_told(model: nn.Module, few: Inputs, plan: Plan, evaluation: bool) -> None:
    """Refuse sites of a model that also draws what no trace shows: nobody can say whether that is off."""
    with torch.no_grad():
        run = _trial(model, few, replace(plan, moves=True), False, evaluation)
        if not close(run(0, 2), run(0, 2)):
            raise ValueError(
                "`sites` needs draws that can be told by module; the passes of this model also differ by a generator "
                "of its own. Let it draw from torch, or leave `sites` out."
            )


def _differs(model: nn.Module, few: Inputs, plan: Plan, count: int, evaluation: bool) -> bool:
    """Whether one of `count` passes differs from the first."""
    with torch.no_grad():
        run = _trial(model, few, plan, False, evaluation)
        one = tree_flatten(run(0, 1))[0]
        return any(
            not torch.equal(a, b)
            for k in range(1, count)
            for a, b in zip(one, tree_flatten(run(k, 1))[0], strict=True)
            if isinstance(a, Tensor)
        )


def _objection(model: nn.Module, few: Inputs, plan: Plan, shared: bool, evaluation: bool) -> str | None:
    """Why `plan` may not be used: None if two passes come out as the loop gives them."""
    if plan.hidden or plan.own:
        return "random calls that cannot be intercepted"
    if plan.strategy == "repeat":
        if plan.rows is None:
            return "nobody knows where the rows are"
        if not plan.rows.independent:
            return "rows depend on each other"
        if not evaluation and any(isinstance(m, BATCH_NORMS) and m.training for m in model.modules()):
            return "batch statistics would be taken over all passes"
    with torch.no_grad():
        loop = _trial(model, few, replace(plan, strategy="loop", moves=True), shared, evaluation)(0, 2)
        try:
            other = _trial(model, few, plan, shared, evaluation)(0, 2)
        # any error of the model under a strategy it was not written for means: do not use that strategy
        except Exception as error:  # noqa: BLE001
            heed_interrupt(error)
            return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return None if close(loop, other) else "gives other outputs than separate passes"


def _rows_of_a_chain(layers: tuple[nn.Module, ...], x: Tensor) -> Rows:
    widths = [layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
    return Rows((0,), (0,), {}, True, True, widths[-1] if widths else x.shape[1])


# ------------------------------------------------------------------------------ what cannot be run


def _check_runnable(model: nn.Module) -> None:
    for m in model.modules():
        if isinstance(m, torch.jit.ScriptModule) and not hasattr(m, "training"):
            raise ValueError(
                "`model` is frozen TorchScript: its dropout was removed for good. Give the model as it was before "
                "torch.jit.freeze."
            )
    if any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise ValueError("`model` must have weights to be run; its parameters are on the meta device.")


def _check_output(output: Any) -> None:
    if not any(isinstance(t, Tensor) for t in tree_flatten(output)[0]):
        raise TypeError(
            "`model` must return tensors, alone or in tuples, lists, dicts or a ModelOutput; "
            f"got {type(output).__name__}."
        )


def _check_structure(model: nn.Module, few: Inputs, seen: Trace, evaluation: bool) -> None:
    """Refuse a model whose output changes its structure when its random sites are switched on."""
    if not evaluation and all(m.training for m in model.modules() if may_be_random(m)):
        return
    asleep = trace(model, few, switch=False, evaluation=evaluation)
    if not tracing.same_structure(asleep.output, seen.output):
        raise ValueError(
            "`model` returns something else in training mode than in evaluation mode (an auxiliary head?), and its "
            "random sites can only be switched on by training mode. Let its forward return the same structure in "
            "both, or call sample on the part that has the dropout."
        )


def close(a: Any, b: Any) -> bool:
    (flat_a, spec_a), (flat_b, spec_b) = tree_flatten(a), tree_flatten(b)
    if spec_a != spec_b:
        return False
    pairs = [(s, t) for s, t in zip(flat_a, flat_b, strict=True) if isinstance(s, Tensor)]
    return all(isinstance(t, Tensor) and near(s, t) for s, t in pairs)
