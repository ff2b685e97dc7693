"""Any model, frozen: a copy of it whose random calls are given constants.

The passes are run stacked in one batch. Where that is not right, or much is computed before the first draw, they are
run under vmap, or one by one with that computed once. While it is exported or traced vmap, which fixes the number of
rows, is left out: `torch.export`, `torch.jit.trace` and ONNX see plain operators and constants.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha._engine.drawing import Strategy
from bbalpha._engine.guards import heed_interrupt
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import close
from bbalpha._engine.rows import Rows
from bbalpha._engine.running import Plan, merge
from bbalpha._engine.sites import CallersStatistics
from bbalpha._torch import is_scripted, tree_flatten, tree_unflatten
from bbalpha.freezing.packing import Packs
from bbalpha.freezing.recording import Recorded, own_copy, record
from bbalpha.freezing.replaying import Prefix, Replaying, Sharing, Site, laid_out

_MUCH = 2**16  # multiply-adds of a row before the first draw of a pass that are worth computing once


class Replayed(nn.Module):
    """K passes of a model with constants for its random calls: x -> what the model returns, tensors (K, N, ...).

    Attributes:
        model: A copy of the model, its own, random sites switched on.
        n_passes: K.
        axes: Of the rows in every tensor that it is called with; None where there are none.
        eager: How the passes are run.
        traced: The same while it is exported or traced.
        shares: Whether passes that are run one by one compute what comes before the first draw once.
    """

    def __init__(self, model: nn.Module, recorded: Recorded, rows: Rows, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.model = model
        self.n_passes = len(recorded.draws)
        self.eager: Strategy = "loop"
        self.traced: Strategy = "loop"
        self.shares = False
        self._packs = Packs()
        self._numbers: dict[str, list[Any]] = {}
        self.axes, self._outputs, self._names = rows.axes, rows.outputs, tuple(names)
        self._keepers = [m for m in model.modules() if m.training and any(True for _ in m.buffers(recurse=False))]
        self._sites: list[list[Site]] = []  # one list for all passes, or one for each where these differ
        for i, group in enumerate(recorded.by_site()):
            found = [laid_out(draws) for draws in group]
            self._sites.append([site for site, _ in found])
            for j, (_, values) in enumerate(found):
                self.register_buffer(f"draw_{i}_{j}", values)
        _note_numbers(self)
        self.register_load_state_dict_post_hook(_note_numbers)

    def forward(self, x: Tensor) -> Any:
        """The outputs of all passes on `x`."""
        return self.run(x)

    def train(self, mode: bool = True) -> "Replayed":
        """Set the flag of this module alone: what is inside stays as it was frozen."""
        self.training = mode
        return self

    def extra_repr(self) -> str:
        """The passes shown by print."""
        return f"n_passes={self.n_passes}"

    def run(self, x: Any) -> Any:
        """The outputs of all passes on a tensor, a tuple or a dict."""
        inputs = Inputs(x, self.axes)
        if len(inputs.tensors) != len(self.axes):
            raise ValueError(
                f"`x` must have the structure that the model was frozen with, {len(self.axes)} tensors; "
                f"got {len(inputs.tensors)}."
            )
        way = self.traced if torch.compiler.is_exporting() or is_scripted() else self.eager
        with self._norms():
            return getattr(self, f"_{way}")(inputs)

    def _norms(self) -> AbstractContextManager[Any]:
        """Statistics that a module with random sites keeps by itself are used and not moved."""
        statistics = {id(b) for m in self._keepers for b in m.buffers(recurse=False)}
        return CallersStatistics(statistics, False) if statistics else nullcontext()

    def _constants(self, group: int = 0) -> list[Tensor]:
        return [getattr(self, f"draw_{group}_{j}") for j in range(len(self._sites[group]))]

    def _of_pass(self, group: int, at: int) -> list[Any]:
        """The constants of one pass; while it is exported, single numbers as Python's: they may decide what is run."""
        numbers: dict[str, list[Any]] = self._numbers if torch.compiler.is_exporting() else {}
        names = [f"draw_{group}_{j}" for j in range(len(self._sites[group]))]
        return [numbers[name][at] if name in numbers else getattr(self, name)[at] for name in names]

    # ---- strategies, as in `bbalpha._engine.running`

    def _loop(self, inputs: Inputs) -> Any:
        outputs, prefix, alike = [], Prefix(), len(self._sites) == 1
        for k in range(self.n_passes):
            group, at = (0, k) if alike else (k, 0)
            sites, values = self._sites[group], self._of_pass(group, at)
            mode = Sharing(sites, values, prefix) if self.shares else Replaying(sites, values, 1, strategy="loop")
            with mode:
                outputs.append(inputs.fresh().call(self.model))
            mode.finish()
        return merge(outputs, torch.stack)

    def _repeat(self, inputs: Inputs) -> Any:
        mode = Replaying(self._sites[0], self._constants(), self.n_passes, strategy="repeat", packs=self._packs)
        with mode:
            output = inputs.repeated(self.n_passes).fresh().call(self.model)
        mode.finish()
        axes: Iterator[Any] = iter(self._outputs)

        def split(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            axis = next(axes)
            return t.unflatten(axis, (self.n_passes, -1)).movedim(axis, 0)

        flat, spec = tree_flatten(output)
        return tree_unflatten([split(t) for t in flat], spec)

    def _vmap(self, inputs: Inputs) -> Any:
        rest: list[Any] = []

        def one(index: Tensor, *values: Tensor) -> list[Tensor]:
            mode = Replaying(self._sites[0], values, self.n_passes, strategy="vmap", index=index)
            with mode:
                rest[:] = tree_flatten(inputs.fresh().call(self.model))
            mode.finish()
            return [t for t in rest[0] if isinstance(t, Tensor)]

        index = torch.arange(self.n_passes, device=inputs.device)
        tensors = iter(torch.func.vmap(one)(index, *self._constants()))
        flat, spec = rest
        return tree_unflatten([next(tensors) if isinstance(t, Tensor) else t for t in flat], spec)


class ReplayedArguments(Replayed):
    """The same for a model of several arguments; those that were named may be given by name or in that order."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of all passes on arguments in the structure that the model was frozen with."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if self._names and given.keys() != set(self._names):
            raise ValueError(f"`x` must have the arguments {', '.join(self._names)}; got {', '.join(given)}.")
        return self.run({name: given[name] for name in self._names} if self._names else args)


def _note_numbers(frozen: Any, _: Any = None) -> None:
    """Note the constants that are a single number in every pass."""
    named = {name: b for name, b in frozen.named_buffers(recurse=False) if b.ndim == 1}
    frozen._numbers = {name: b.tolist() for name, b in named.items()}


# ------------------------------------------------------------------------------ making one


def replayed(model: nn.Module, inputs: Inputs, plan: Plan, rows: Rows, n_passes: int, seed: int) -> Replayed:
    """`model` with the draws of `n_passes` passes recorded, run by the cheapest ways that give what was recorded."""
    few = rows.tried_on(inputs)
    own = own_copy(model, plan)
    recorded = record(own, few, plan, n_passes, seed)
    names = tuple(few.x) if isinstance(few.x, dict) else ()
    frozen = (Replayed if isinstance(few.x, Tensor) else ReplayedArguments)(own, recorded, rows, names)
    fits = {way: _fits(frozen, way, few, recorded) for way in _worth_trying(recorded, plan, rows)}
    shares = _fits(frozen, "loop", few, recorded, shares=True)
    if not shares and not _fits(frozen, "loop", few, recorded):
        raise ValueError(
            "`model` must give the same outputs whenever its random calls are given the same numbers, to be frozen; "
            f"{type(model).__name__} does not. Let all of its randomness come from torch, and let it keep no state."
        )
    late = shares and recorded.before >= max(_MUCH, recorded.work / 2)
    ways = [way for way, right in fits.items() if right and not (late and way == "repeat")]
    frozen.eager, frozen.shares = ways[0] if ways else "loop", shares
    frozen.traced = "repeat" if "repeat" in ways else "loop"  # vmap is exported for one number of rows alone
    return frozen


def _worth_trying(recorded: Recorded, plan: Plan, rows: Rows) -> list[Strategy]:
    """Ways that may be cheaper than one pass after the other, the cheapest first where little is shared."""
    if plan.strategy == "loop" or not recorded.alike:
        return []
    stacks = rows.independent and None not in rows.outputs
    return ["repeat", "vmap"] if stacks else ["vmap"]


def _fits(frozen: Replayed, way: Strategy, few: Inputs, recorded: Recorded, *, shares: bool = False) -> bool:
    """Whether the passes come out by `way` as they were recorded."""
    frozen.eager, frozen.shares = way, shares
    try:
        with torch.no_grad():
            return close(recorded.outputs, frozen.run(few.x))
    except Exception as error:  # noqa: BLE001 - any error under a strategy it was not written for: do not use that
        heed_interrupt(error)
        return False
