"""K passes over any number of rows in bounded memory, in evaluation mode.

Rows are cut into batches, and passes into groups, so that about `_BUDGET` numbers of one activation are held at a
time. What a batch gives is reduced at once; only what `reduce` returns is kept.

    (outputs,) = collect(model, x, PassOptions(n_passes=100), lambda groups, _: (torch.cat(list(groups)),), row_axis=1)
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from tqdm import tqdm

from bbalpha._engine.guards import heed_interrupt, steady
from bbalpha._engine.inputs import BatchDim, Inputs
from bbalpha._engine.planning import Masks, Way, find_plan, run_passes
from bbalpha._engine.running import Plan
from bbalpha._engine.selection import Sites
from bbalpha._engine.settling import Settling, Where, run_until_settled
from bbalpha._engine.shadows import shadowed
from bbalpha._kernels import draw_seed, pass_seed
from bbalpha._torch import listened_to, tree_flatten, tree_unflatten
from bbalpha.checks import check_count, check_flag, check_masks, check_model, check_seed

_BUDGET = 2**22  # numbers in one activation: 16 MB of float32
_PATIENCE = 3.0  # seconds before a progress bar shows

Reduce = Callable[[Iterator[Any], Where], tuple[Tensor, ...]]


@dataclass(frozen=True)
class PassOptions:
    """How a model is run over its rows; the options that all of `predict_*` share.

    Attributes:
        n_passes: K; None for the network as it is, which is run once.
        batch_size: Rows at a time; None chooses by memory.
        masks: As in `bbalpha.sample`.
        seed: None draws from torch's global generator; an int leaves it untouched. With shared masks the result
            is then the same for every `batch_size`.
        balanced: As in `bbalpha.sample`.
        batch_dim: As in `bbalpha.sample`; in the results rows come first.
        progress: None shows a bar on a terminal when it takes more than a few seconds.
        sites: As in `bbalpha.sample`.
        only: Run this one of the passes, drawn as among all of them; None runs all.
    """

    n_passes: int | None
    batch_size: int | None = None
    masks: Masks = "per_example"
    seed: int | None = None
    balanced: bool = True
    batch_dim: BatchDim = 0
    progress: bool | None = None
    sites: Sites | None = None
    only: int | None = None

    def __post_init__(self) -> None:
        if self.n_passes is not None:
            check_count("n_passes", self.n_passes)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        check_masks(self.masks)
        check_seed(self.seed)
        check_flag("balanced", self.balanced)

    @property
    def count(self) -> int:
        """How many outputs there are of every row."""
        return 1 if self.n_passes is None else self.n_passes

    @property
    def draws(self) -> bool:
        """Whether a seed is drawn from torch's global generator."""
        return self.seed is None and self.n_passes is not None


def collect(
    model: nn.Module,
    x: Any,
    options: PassOptions,
    reduce: Reduce,
    *,
    row_axis: int,
    settling: Settling | None = None,
) -> tuple[Tensor, ...]:
    """What `reduce` makes of the outputs of every batch, joined over the rows.

    Args:
        model: Any model that `bbalpha.sample` takes; it is not touched.
        x: What `bbalpha.sample` takes, or an iterable of it (a DataLoader).
        options: How to run.
        reduce: Takes the groups of passes of a batch one by one, each (G, n, ...) or a structure of these, rows behind
            the passes, and where they belong; returns tensors that have the n rows.
        row_axis: The axis of the rows in what `reduce` returns.
        settling: None runs all passes of all rows; else `reduce` is called for every stage.

    Returns:
        The tensors of `reduce`, with all N rows; with `settling` what that keeps, and how many passes each row had.
    """
    check_model(model)
    if isinstance(x, (str, bytes)) or x is None or isinstance(x, (bool, int, float, complex)):
        raise TypeError(
            f"`x` must be a tensor, a tuple of arguments, a mapping of them, or an iterable of batches; "
            f"got {type(x).__name__}."
        )
    one = isinstance(x, (Tensor, tuple, list, Mapping, np.ndarray, PackedSequence))
    whole = one or not isinstance(x, Iterable) or hasattr(x, "keys")  # a graph goes through its parts by name
    with steady(draws=options.draws), torch.no_grad():
        seed = draw_seed(None) if options.draws else options.seed or 0
        try:
            return _collected(model, x, options, reduce, seed, row_axis, whole, settling)
        except _NotOneFunctionError as error:  # what is drawn hangs on the rows of a batch
            if not whole:
                raise ValueError(
                    '`masks="shared"` cannot be kept from batch to batch: which modules of this model draw depends on '
                    'the rows. Give all rows at once, or use masks="per_example".'
                ) from error
            return _collected(model, x, options, reduce, seed, row_axis, whole, settling, together=True)


def _collected(
    model: nn.Module,
    x: Any,
    options: PassOptions,
    reduce: Reduce,
    base: int,
    axis: int,
    whole: bool,
    settling: Settling | None,
    together: bool = False,
) -> tuple[Tensor, ...]:
    """`collect` of what was checked; `together` runs all rows at once."""
    rows = _Rows(axis)
    witness = _Witness()
    total = Inputs.of(x, options.batch_dim, model=model).rows if whole else None
    with _bar(x, total, options.progress) as bar:
        for part in (x,) if whole else x:
            given = Inputs.of(part, options.batch_dim, model=model)
            plan = _planned(model, given, options)
            for inputs, group, chunk in _cut(model, given, options, plan, together):
                _check_inputs(inputs, rows.count)
                # one function a pass for all rows when masks are shared; else every batch draws its own
                own = rows.count > 0 and options.masks == "per_example"
                seed = pass_seed(base, rows.count) if own else base
                witness.begin(options)
                passes = _Passes(model, plan, options, reduce, group, chunk * (inputs.rows or 1), witness)
                if settling is None:
                    reduced = passes(inputs, options.count, seed, Where(rows.count))
                else:
                    may_drop = _may_drop(inputs, plan, options) and not together
                    reduced = run_until_settled(
                        inputs, settling, passes, seed=seed, start=rows.count, axis=axis, may_drop=may_drop
                    )
                count = _check_rows(reduced, inputs, given, plan, axis)
                rows.add(reduced, count, total=_total(given, plan) if whole else None)
                bar.update(count if whole else 0)
            bar.update(0 if whole else 1)
    return rows.joined()


def _total(given: Inputs, plan: Plan) -> int | None:
    return given.rows if plan.rows is None else replace(given, axes=plan.rows.axes).rows


class _NotOneFunctionError(Exception):
    """Pass k of one batch drew in other modules than pass k of another."""


class _Witness:
    """Sees to it that, with shared masks, the same modules draw for every batch: else the draws are not the same."""

    def __init__(self) -> None:
        self.first: list[tuple[str, ...]] = []
        self.now: list[tuple[str, ...]] | None = None

    def begin(self, options: PassOptions) -> None:
        """A batch begins."""
        self.now = None if options.masks != "shared" else self.first if self.now is None else []

    def __call__(self, drawn: tuple[str, ...]) -> None:
        """A pass was run."""
        if self.now is None:
            return
        self.now.append(drawn)
        if self.now is self.first:
            return
        if len(self.now) > len(self.first):  # rows before were settled with fewer passes
            self.first.append(drawn)
        elif drawn != self.first[len(self.now) - 1]:
            raise _NotOneFunctionError


# ------------------------------------------------------------------------------ cutting


def _planned(model: nn.Module, inputs: Inputs, options: PassOptions) -> Plan:
    """How the model is run, and where it has its rows; an error that says which layer the inputs do not fit."""
    with _explained(model, inputs):
        way: Way = "once" if options.n_passes is None else "auto"
        sites = None if options.n_passes is None else options.sites
        plan = find_plan(model, inputs, way, options.masks == "shared", True, sites)
    if plan.rows is not None and plan.rows.doubtful:
        raise ValueError(
            f"`x` must tell which of its inputs have the rows: on axis {inputs.batch_dim} (`batch_dim`) their lengths "
            f"are {_lengths(inputs)}, and the output follows more than one of them. Say with `batch_dim` which axis of "
            "which input counts the rows (None for those that have none)."
        )
    return plan


def _cut(
    model: nn.Module, inputs: Inputs, options: PassOptions, plan: Plan, together: bool
) -> Iterator[tuple[Inputs, int, int]]:
    """Batches of rows, how many passes to reduce at a time, and how many of these to run at a time.

    Many rows at a time rather than few: what a pass costs besides its rows (masks that are shared, weights that are
    gathered) is paid once a batch. The group of passes depends on the numbers that one row gives alone, so that
    seeded results do not depend on `batch_size`. Rows that depend on each other, or cannot be told apart, stay
    together.
    """
    if plan.rows is not None:
        inputs = replace(inputs, axes=plan.rows.axes)
    N = inputs.rows or 1
    numbers = 1 if plan.rows is None else plan.rows.numbers
    here = [t for t, axis in zip(inputs.tensors, inputs.axes, strict=True) if axis is not None]
    widest = max((max(p.shape[:2]) for p in model.parameters() if p.ndim > 1), default=1)
    width = max(widest, sum(t.numel() for t in here) // N)
    calls = max(1, _BUDGET // width)  # rows times passes whose activations are held
    group = min(options.count, max(1, _BUDGET // numbers))
    size = options.batch_size or max(1, min(calls, _BUDGET // (group * numbers)))
    if plan.strategy == "vmap" and plan.off and options.batch_size is None:
        size = max(1, min(size, calls // group))  # all passes at once: what they share is computed once a row
    if together or plan.rows is None or not plan.rows.independent or (options.masks == "shared" and plan.rows.ragged):
        size = N
    chunk = max(1, calls // max(1, min(size, N)))
    if size >= N:
        yield inputs, group, chunk
        return
    for start in range(0, N, size):
        yield inputs.narrow(start, min(size, N - start)), group, chunk


def _may_drop(inputs: Inputs, plan: Plan, options: PassOptions) -> bool:
    """Whether some of the rows may be run without the others: where they may be cut, and can be picked."""
    rows = plan.rows
    if rows is None or not rows.independent or (options.masks == "shared" and rows.ragged):
        return False
    return any(axis is not None for axis in inputs.axes)


@dataclass(frozen=True)
class _Passes:
    """Runs passes of a batch, or of the rows that are left of it, and reduces them.

    Attributes:
        group: How many passes to reduce at a time.
        calls: Rows times passes to run at a time.
    """

    model: nn.Module
    plan: Plan
    options: PassOptions
    reduce: Reduce
    group: int
    calls: int
    witness: _Witness

    def __call__(self, inputs: Inputs, n_passes: int, seed: int, where: Where) -> tuple[Tensor, ...]:
        """What `reduce` makes of so many passes."""
        return self.reduce(self._groups(inputs, n_passes, seed), where)

    def _groups(self, inputs: Inputs, n_passes: int, seed: int) -> Iterator[Any]:
        """The outputs, `group` passes at a time, rows behind the passes."""
        plan, options = self.plan, self.options
        for first in range(0, n_passes, self.group):
            count, only = min(self.group, n_passes - first), None
            if options.only is not None:
                if not first <= options.only < first + count:
                    continue
                only = range(options.only - first, options.only - first + 1)
            own: int | None = pass_seed(seed, first) if first else seed
            if plan.own and options.seed is None:
                own = None  # no seed reaches it
            with _explained(self.model, inputs):
                outputs = run_passes(
                    self.model, inputs, count, masks=options.masks, seed=own,
                    balanced=options.balanced, chunk_size=max(1, self.calls // (inputs.rows or 1)), evaluation=True,
                    plan=plan, witness=self.witness, only=only,
                )  # fmt: skip
            yield outputs if plan.rows is None else _rows_behind_passes(outputs, plan.rows.outputs)


def _rows_behind_passes(outputs: Any, axes: tuple[int | None, ...]) -> Any:
    """(G, n, ...) of every output that has rows, (G, 1, ...) of others: these are never taken for rows."""
    flat, spec = tree_flatten(outputs)
    left = iter(axes)

    def move(t: Tensor, axis: int | None) -> Tensor:
        return t.unsqueeze(1) if axis is None else t.movedim(1 + axis, 1)

    return tree_unflatten([move(t, next(left)) if isinstance(t, Tensor) else t for t in flat], spec)


def _check_rows(reduced: tuple[Tensor, ...], inputs: Inputs, given: Inputs, plan: Plan, axis: int) -> int:
    """How many rows came out: as many as went in, on an axis that is known to be theirs."""
    came = reduced[0].shape[axis]
    rows = plan.rows
    where = "" if given.batch_dim is None else f" on axis {given.batch_dim} (`batch_dim`)"
    if rows is not None and not rows.answers and inputs.rows:
        raise ValueError(
            f"`model` must return one output a row; its output does not follow the {inputs.rows} rows of `x`{where}. "
            "Say with `batch_dim` which axis of which input counts the rows."
        )
    if rows is not None and rows.answers:
        known = [inputs.rows]
    elif given.tensors:  # nobody could tell: any input may have the rows
        known = [*_lengths(given)]
    else:
        known = [came if given.rows is None else given.rows]
    if came not in known:
        raise ValueError(
            f"`model` must return as many rows as it is given; got {came} rows for {known[0]}{where}. "
            "Say with `batch_dim` which axis of which input counts the rows."
        )
    return came


def _lengths(given: Inputs) -> list[int]:
    """How long every input is on the axis that was named."""
    axis = given.batch_dim or 0
    return [t.shape[axis] for t in given.tensors if t.ndim > axis]


@contextmanager
def _explained(model: nn.Module, inputs: Inputs) -> Iterator[None]:
    """An error of the model's, where one of its layers can tell what does not fit, as a sentence of ours."""
    try:
        yield
    except (RuntimeError, TypeError, IndexError) as error:
        heed_interrupt(error)
        misfit = _misfit(model, inputs)
        if misfit is None:
            raise
        raise ValueError(misfit) from error


class _Rows:
    """Tensors that grow by rows, copied into one place each.

    Keeping the parts and joining them at the end costs many times their size: small tensors that live long, between
    large ones that do not, leave holes that the allocator cannot use.
    """

    def __init__(self, axis: int) -> None:
        self.axis, self.count = axis, 0
        self.held: list[Tensor] = []

    def add(self, tensors: tuple[Tensor, ...], rows: int, *, total: int | None = None) -> None:
        """Take the next rows, of `total` where that is known."""
        if not self.held and rows == total:
            self.held, self.count = list(tensors), rows
            return
        room = self.held[0].shape[self.axis] if self.held else 0
        if not self.held or self.count + rows > room:
            room = max(2 * room, self.count + rows, total or 0)
            self.held = [self._enlarged(i, t, room) for i, t in enumerate(tensors)]
        for whole, t in zip(self.held, tensors, strict=True):
            place = whole.narrow(self.axis, self.count, rows)
            if place.shape != t.shape:
                raise ValueError(
                    f"`x` must give outputs of one shape in all batches; got {tuple(place.shape)}, then "
                    f"{tuple(t.shape)}. Pad the batches to one length, or predict them one by one."
                )
            place.copy_(t)
        self.count += rows

    def _enlarged(self, i: int, t: Tensor, room: int) -> Tensor:
        """Space for `room` rows, with the rows of tensor i so far at its start."""
        like = self.held[i] if self.held else t
        whole = like.new_empty([*like.shape[: self.axis], room, *like.shape[self.axis + 1 :]])
        if self.count:
            whole.narrow(self.axis, 0, self.count).copy_(like.narrow(self.axis, 0, self.count))
        return whole

    def joined(self) -> tuple[Tensor, ...]:
        """All rows."""
        if not self.held:
            raise ValueError("`x` must give at least one batch; got an iterable that is empty or used up.")
        return tuple(t.narrow(self.axis, 0, self.count).contiguous() for t in self.held)


@contextmanager
def _bar(x: Any, total: int | None, progress: bool | None) -> Iterator[Any]:
    """A progress bar over rows, or over batches where rows are not known beforehand."""
    try:
        steps = len(x) if total is None else total
    except TypeError:  # a generator
        steps = None
    with progress_bar(steps, progress, desc="predict", unit="batch" if total is None else "row") as bar:
        yield bar


@contextmanager
def progress_bar(steps: int | None, progress: bool | None, *, desc: str, unit: str) -> Iterator[Any]:
    """A bar that shows on a terminal after a few seconds where `progress` is None; tqdm is left alone without one."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield _NoBar()
        return
    delay = _PATIENCE if progress is None else 0.0
    with tqdm(total=steps, unit=unit, unit_scale=True, desc=desc, leave=False, delay=delay) as bar:
        yield bar


class _NoBar:
    def update(self, n: int) -> None:
        """Nobody looks."""


# ------------------------------------------------------------------------------ what can be wrong


def _check_inputs(inputs: Inputs, start: int) -> None:
    """Refuse nan, and infinite numbers unless there are several inputs: one of those may be an additive mask."""
    single = isinstance(inputs.x, Tensor)
    for t, axis in zip(inputs.tensors, inputs.axes, strict=True):
        if not t.is_floating_point():
            continue
        bad = ~t.isfinite() if single else t.isnan()
        if bool(bad.any()):
            place = bad.nonzero()[0].tolist()
            row = place if axis is None else place[axis] + start
            raise ValueError(f"`x` must be finite; got {float(t[tuple(place)])} in row {row}.")


def _misfit(model: nn.Module, inputs: Inputs) -> str | None:
    """Why `model` cannot take these inputs, where one of its layers can tell; None where the error lies elsewhere."""
    shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in inputs.tensors)
    if isinstance(inputs.x, (tuple, list)):
        try:
            inspect.signature(model.forward).bind(*inputs.x)
        except TypeError as error:
            return (
                f"`x` gives the model {len(inputs.x)} arguments ({shapes}), which it does not take: {error}. "
                "If the last one is the target, leave it out: (x for x, _ in loader)."
            )
    found: list[str] = []

    def look(module: nn.Module, args: tuple[Any, ...], *, name: str) -> None:
        if args and isinstance(args[0], Tensor) and not found and (why := _refusal(module, args[0])):
            found.append(f"`x` ({shapes}) does not fit the model: layer {name!r} {why}.")

    with torch.no_grad(), shadowed(model, evaluation=True, use="trial") as live:
        if live is model:  # takes no hooks
            return None
        for name, m in live.named_modules():
            listened_to(m).register_forward_pre_hook(lambda m, args, n=name: look(m, args, name=n))
        try:
            inputs.fresh().call(live)
        except (RuntimeError, TypeError, IndexError):
            return found[0] if found else None
    return None


def _refusal(module: nn.Module, x: Tensor) -> str | None:
    """What is wrong with `x` as the input of one layer."""
    if isinstance(module, nn.Embedding) and x.is_floating_point():
        return f"takes whole numbers and got {x.dtype}; use x.long()"
    if isinstance(module, nn.Linear) and x.shape[-1] != module.in_features:
        return f"takes {module.in_features} features and got {x.shape[-1]}"
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        axis = -1 - len(module.kernel_size)
        if x.ndim < -axis or x.shape[axis] != module.in_channels:
            return f"takes {module.in_channels} channels and got shape {tuple(x.shape)}"
    if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) and x.dtype != module.weight.dtype:
        return f"takes {module.weight.dtype} and got {x.dtype}; use x.to({module.weight.dtype})"
    return None
