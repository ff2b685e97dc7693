"""What is a row? Found by evidence: how the outputs and the random calls of a model answer to other rows.

The model is run on a few rows, then on the same rows in another order with one more of them: an axis that grows counts
rows. Then, all rows sharing their draws, on every other of the rows: if each row comes out as before, rows do not
depend on each other, and a large input may be cut. A model that breaks on fewer rows (a graph whose edges name nodes)
is given more of them instead. Sizes that happen to be equal tell nothing and are not looked at.

One row is the hard case: an axis of length 1 is stretched to whatever it meets, so that more of it may run and mean
something else than rows. Where another input can claim the rows too, one row has to show more, or nobody knows.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha._engine.drawing import NotShareableError, Place
from bbalpha._engine.guards import heed_interrupt
from bbalpha._engine.inputs import Axes, Inputs
from bbalpha._engine.tracing import Trace
from bbalpha._torch import listened_to, tree_flatten

Places = Mapping[str, tuple[Place | None, ...]]  # of the draws of every module, in order; one if all are alike


@dataclass(frozen=True)
class Rows:
    """Where a model has its rows.

    Attributes:
        axes: Of every input tensor, as in `Inputs`.
        outputs: The axis of the rows of every output tensor; None where it has none.
        places: Of the draws.
        independent: Whether every row comes out as it would alone, in evaluation mode: then rows may be cut.
        certain: Whether the rows that were tried could show the opposite.
        numbers: How many numbers a row gives.
        fewer: Whether the model can be run on fewer rows, independent or not.
        doubtful: Whether outputs follow either of two inputs, and nothing tells which of them has the rows.
    """

    axes: Axes
    outputs: tuple[int | None, ...]
    places: Places
    independent: bool
    certain: bool
    numbers: int
    fewer: bool = True
    doubtful: bool = False

    def tried_on(self, inputs: Inputs) -> Inputs:
        """The rows of `inputs` to try something out on."""
        read = replace(inputs, axes=self.axes)
        return a_few(read) if self.fewer else read

    @property
    def answers(self) -> bool:
        """Whether some output has as many rows as the inputs."""
        return any(axis is not None for axis in self.outputs)

    @property
    def placed(self) -> bool:
        """Whether every draw has its place."""
        return all(None not in places for places in self.places.values())

    @property
    def ragged(self) -> bool:
        """Whether the rows themselves decide which of them a draw is for, as where rows are sent to experts."""
        return any(p is not None and p.fold == 0 for places in self.places.values() for p in places)


Look = Callable[[Inputs, int], Trace]  # of a seed
Try = Callable[[Inputs, Places], Any]  # a few passes with shared draws, (K, N, ...)


def find_rows(inputs: Inputs, look: Look, attempt: Try) -> Rows | None:
    """Where a model has its rows; None if it does not tell.

    Args:
        inputs: What it is to be run on, at least one row.
        look: Traces a pass of the model, of a seed.
        attempt: Runs a few passes of the model, draws shared by rows whose places it is given.
    """
    found: list[Rows] = []
    readings = inputs.readings()
    first = [r for r in readings if r.axes[0] is not None]  # who names one axis for several inputs means the first
    for some in (first, [r for r in readings if r not in first]):
        seen = _asked(some, look, attempt)
        if seen is not None and seen.answers:
            return seen if len(readings) == 1 else _weighed(seen, readings, look, attempt)
        found += [] if seen is None else [seen]
    return found[0] if found else None


def _asked(readings: list[Inputs], look: Look, attempt: Try) -> Rows | None:
    """What the best of the readings shows, on fewer rows, or whole and with rows added."""
    found: list[Rows] = []
    for fewer in (True, False):
        seen = _best(readings, look, attempt, fewer)
        if seen is not None and seen.answers:
            return seen
        found += [] if seen is None else [seen]
    return found[0] if found else None


def _best(readings: list[Inputs], look: Look, attempt: Try, fewer: bool) -> Rows | None:
    """The first reading whose rows are independent, else the first that an output answers to, else the first."""
    found: list[Rows] = []
    for reading in readings:
        seen = _evidence(a_few(reading) if fewer else reading, look, attempt, fewer)
        if seen is not None and seen.independent:
            return seen
        found += [] if seen is None else [seen]
    return next((f for f in found if f.answers), found[0] if found else None)


def a_few(inputs: Inputs, most: int = 12, least: int = 5) -> Inputs:
    """From 5 to 12 rows that differ: some of `inputs`, or these again with their numbers changed.

    Fewer where whole numbers cannot be changed: they may name something.
    """
    N = inputs.rows or 1
    count = min(max(N, least), most)
    rows = torch.linspace(0, N - 1, count).round().long() if count <= N else torch.arange(count) % N
    few = inputs.select(rows)
    if _distinct(few):
        return few
    changed = few.map(_changed)
    return changed if N < 2 or _distinct(changed) else inputs.select(rows.unique())


# ------------------------------------------------------------------------------ evidence


def _evidence(few: Inputs, look: Look, attempt: Try, fewer: bool) -> Rows | None:
    """What the model shows on these rows, and on others made of them; None if it fails."""
    n = few.rows or 0
    more = torch.cat((torch.arange(n).flip(0), torch.tensor([n // 2]))) if fewer else torch.arange(n + 3) % n
    try:
        ones, others = [look(few, 0)], [look(few.select(more), 0)]
        if _drawn_in(ones[0]) != _drawn_in(others[0]):  # chance decides what is run: see more of it
            ones += [look(few, seed) for seed in range(1, 6)]
            others += [look(few.select(more), seed) for seed in range(1, 6)]
    # whatever the model says to rows that are not those it was given: it cannot be asked this way
    except Exception as error:  # noqa: BLE001
        heed_interrupt(error)
        return None
    (flat, spec), (flat_other, spec_other) = tree_flatten(ones[0].output), tree_flatten(others[0].output)
    if spec != spec_other:
        return None
    shapes = [(a.shape, b.shape) for a, b in zip(flat, flat_other, strict=True) if isinstance(a, Tensor)]
    placed = [_place(a, b, n, len(more)) for a, b in shapes]
    outputs = tuple(p.axis if p is not None and p.fold == 1 else None for p in placed)
    numbers = sum(a.numel() for a, _ in shapes) // n
    rows = Rows(few.axes, outputs, _places(ones, others, n, len(more)), False, _distinct(few), max(1, numbers), fewer)
    return _confirmed(rows, few, attempt) if fewer and rows.answers else rows


def _confirmed(rows: Rows, few: Inputs, attempt: Try) -> Rows:
    """`rows`, seen to be independent or not: every other row, and the ones between, come out as they do in company."""
    n = few.rows or 0
    parts = (torch.arange(1, n, 2).flip(0), torch.arange(0, n, 2))
    for places in _orders(rows.places):
        try:
            whole = attempt(few, places)
            alone = [attempt(few.select(part), places) for part in parts]
        except Exception as error:  # noqa: BLE001 - as above, or draws that nobody can share
            heed_interrupt(error)
            continue
        if all(_agree(whole, other, part, rows.outputs) for other, part in zip(alone, parts, strict=True)):
            certain = rows.certain and _rows_differ(whole, rows.outputs)
            return replace(rows, places=places, independent=certain, certain=certain)
    return rows


def _place(a: torch.Size, b: torch.Size, n: int, m: int) -> Place | None:
    """The place of the rows in a tensor of shape a for n rows and of shape b for m; None if that is not to be told."""
    if len(a) != len(b):
        return None
    changed = [i for i in range(len(a)) if a[i] != b[i]]
    if not changed:
        return Place(None)
    if len(changed) > 1:
        return None
    axis = changed[0]
    fold = a[axis] // n
    return Place(axis, fold if (a[axis], b[axis]) == (fold * n, fold * m) else 0)


def _places(ones: list[Trace], others: list[Trace], n: int, m: int) -> Places:
    """The places of the draws of every module, as far as passes on n rows and passes on m rows tell."""
    found: dict[str, tuple[Place | None, ...]] = {}
    for home in {name for t in ones for name, _ in t.draws}:
        a, b = ({tuple(shape for name, shape in t.draws if name == home) for t in ts} - {()} for ts in (ones, others))
        places = {_place(s, t, n, m) for few in a for s in few for many in b for t in many}
        if len(places) == 1:
            found[home] = tuple(places)
        elif len(a) == len(b) == 1 and len(few := a.pop()) == len(many := b.pop()):
            found[home] = tuple(_place(s, t, n, m) for s, t in zip(few, many, strict=True))
    return found


def _drawn_in(seen: Trace) -> list[str]:
    return [name for name, _ in seen.draws]


def _orders(places: Places, most: int = 16) -> Iterator[Places]:
    """`places`, and where rows are folded with something else, every order of folding, module by module."""
    folded = [home for home, ps in places.items() if any(p is not None and p.fold > 1 for p in ps)]
    for chosen in islice(product((True, False), repeat=len(folded)), most):
        order = dict(zip(folded, chosen, strict=True))
        yield {
            home: tuple(p if p is None or p.fold <= 1 else replace(p, rows_first=order[home]) for p in ps)
            for home, ps in places.items()
        }


# ------------------------------------------------------------------------------ one row beside other inputs


def _weighed(seen: Rows, readings: list[Inputs], look: Look, attempt: Try) -> Rows:
    """`seen`; if it is of one row, which may have been stretched, the reading with the better claim, or doubt."""
    reading = next(r for r in readings if r.axes == seen.axes)
    if reading.rows != 1:
        return seen
    if not seen.placed:  # other inputs of one row mean the same row, where the outputs look the same by it
        ones = (_evidence(a_few(r), look, attempt, True) for r in readings if r.rows == 1)
        placed = [one for one in ones if one is not None and one.answers and one.placed]
        output = look(reading, 0).output
        seen = next((one for one in placed if _same_layout(seen, one, output)), seen)
        reading = replace(reading, axes=seen.axes)
    apart = [r for r in readings if all(None in pair for pair in zip(r.axes, seen.axes, strict=True))]
    return _contested(seen, reading, apart, look, attempt) if apart else seen


def _contested(seen: Rows, reading: Inputs, apart: list[Inputs], look: Look, attempt: Try) -> Rows:
    """Who has the rows: `seen`, where `reading` has one of them, or one of the readings of other inputs; or doubt."""
    stretched = _stretched(reading, look)
    if reading.batch_dim in seen.outputs and not stretched:
        return seen
    mute = stretched and _mute(reading, look)  # dead units make rows mute too: that alone takes them from nobody
    for some in ([r for r in apart if r.rows != 1], [r for r in apart if r.rows == 1]):
        other = _asked(some, look, attempt)
        if other is None or not other.answers:
            continue
        other_mute = _mute(replace(reading, axes=other.axes), look)
        if other_mute and not stretched:
            continue
        if mute and not other_mute:
            return other
        if some[0].rows != 1 or not _same_layout(seen, other, look(reading, 0).output):
            nowhere = (None,) * len(seen.outputs)
            return Rows(seen.axes, nowhere, {}, False, True, seen.numbers, fewer=False, doubtful=True)
    return seen


def _mute(reading: Inputs, look: Look, tries: int = 8) -> bool:
    """Whether no output hears of the rows: very different numbers in them change nothing, whatever is drawn."""
    few = a_few(reading)
    rows = [t for t, axis in zip(few.tensors, few.axes, strict=True) if axis is not None]
    if not all(t.is_floating_point() for t in rows):  # whole numbers may name something and cannot be changed at will
        return False
    changed = few.map(lambda t, _: _other_numbers(t))
    for seed in range(tries):  # one draw may have dropped what the rows do
        one, other = _looked(few, look, seed), _looked(changed, look, seed)
        if one is None or other is None or not _unchanged(one.output, other.output):
            return False
    return True


def _stretched(reading: Inputs, look: Look) -> bool:
    """Whether one row meets an axis of length 1 in another input: were that longer, there could not be more rows."""
    once_more = torch.zeros(2, dtype=torch.long)
    for i, t in enumerate(reading.tensors):
        for axis in (a for a in range(t.ndim) if reading.axes[i] is None and t.shape[a] == 1):
            alone = tuple(axis if j == i else None for j in range(len(reading.axes)))
            longer = replace(replace(reading, axes=alone).select(once_more), axes=reading.axes)
            if _looked(longer, look) is not None and _looked(a_few(longer), look) is None:
                return True
    return False


def _looked(some: Inputs, look: Look, seed: int = 0) -> Trace | None:
    """A pass; None if the model fails on such inputs."""
    try:
        return look(some, seed)
    except Exception as error:  # noqa: BLE001 - as in _evidence
        heed_interrupt(error)
        return None


def _other_numbers(t: Tensor) -> Tensor:
    size = float(t.detach().float().nan_to_num(0.0, 0.0, 0.0).abs().amax()) if t.numel() else 0.0
    return t + (1.0 + size) * torch.randn(t.shape, generator=torch.Generator().manual_seed(0)).to(t)


def _unchanged(one: Any, other: Any) -> bool:
    a, b = ([t for t in tree_flatten(o)[0] if isinstance(t, Tensor)] for o in (one, other))
    return len(a) == len(b) and all(near(s, t) for s, t in zip(a, b, strict=True))


def _same_layout(seen: Rows, other: Rows, output: Any) -> bool:
    """Whether outputs of one row look the same with the row first, wherever it is."""
    tensors = [t for t in tree_flatten(output)[0] if isinstance(t, Tensor)]
    return all(
        a == b or (a is not None and b is not None and t.movedim(a, 0).shape == t.movedim(b, 0).shape)
        for t, a, b in zip(tensors, seen.outputs, other.outputs, strict=True)
    )


# ------------------------------------------------------------------------------ comparing


def _agree(whole: Any, part: Any, rows: Tensor, axes: tuple[int | None, ...]) -> bool:
    """Whether the outputs of some rows are those that these rows have among all."""
    a, b = ([t for t in tree_flatten(o)[0] if isinstance(t, Tensor)] for o in (whole, part))
    return len(a) == len(b) and all(
        near(s.index_select(axis + 1, rows.to(s.device)), t)
        for s, t, axis in zip(a, b, axes, strict=True)
        if axis is not None
    )


def _rows_differ(outputs: Any, axes: tuple[int | None, ...]) -> bool:
    """Whether some output tells rows apart: if none does, rows that depend on each other would go unnoticed."""
    tensors = [t for t in tree_flatten(outputs)[0] if isinstance(t, Tensor)]
    return any(
        axis is not None and not near(t, t.narrow(axis + 1, 0, 1).expand_as(t))
        for t, axis in zip(tensors, axes, strict=True)
    )


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are the same up to rounding, in a model that was run in two ways."""
    if a.shape != b.shape or a.dtype != b.dtype:  # autocast does not reach into vmap
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    loose = 5e-2 if a.dtype in (torch.float16, torch.bfloat16) else 1e-4
    size = a.detach().abs().float().nan_to_num(posinf=0.0).amax() if a.numel() else a.new_zeros(())
    return torch.allclose(a.float(), b.float(), rtol=loose, atol=float(size) * loose + 1e-12, equal_nan=True)


def _distinct(inputs: Inputs) -> bool:
    """Whether no row stands twice."""
    pairs = zip(inputs.tensors, inputs.axes, strict=True)
    columns = [t.movedim(axis, 0).reshape(t.shape[axis], -1).double() for t, axis in pairs if axis is not None]
    table = torch.cat(columns, 1) if columns else torch.zeros(2, 0)
    return len(table.unique(dim=0)) == len(table)


def _changed(t: Tensor, axis: int) -> Tensor:
    """Rows of other, believable numbers: noise on real ones, whole ones moved along within their row."""
    generator = torch.Generator().manual_seed(0)
    if t.is_floating_point():
        noise = torch.randn(t.shape, generator=generator).to(t)
        size = float(t.detach().float().nan_to_num(0.0, 0.0, 0.0).abs().mean()) if t.numel() else 0.0
        return t + noise * (0.1 * size or 0.1)
    rows = t.movedim(axis, 0)
    if rows.ndim > 1:
        rows = torch.stack([row.roll(i, 0) for i, row in enumerate(rows)])
    return rows.movedim(0, axis)


# ------------------------------------------------------------------------------ where a draw is made


class Finder:
    """Tells the place of the rows at every draw of a pass, by the module that draws."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.stack = [""]
        self.counts: dict[str, int] = {}
        self.log: list[str] = []

    def __call__(self, shape: torch.Size) -> Place | None:
        """The place of the rows in the next draw, for a tensor of `shape`."""
        home = self.stack[-1]
        known = self.places.get(home, ())
        i = self.counts.get(home, 0)
        self.counts[home] = i + 1
        self.log.append(home)
        if len(known) == 1:
            return known[0]
        return known[i] if i < len(known) else None

    def begin(self) -> "Finder":
        """Before a pass: nothing drawn yet."""
        self.counts.clear()
        self.log.clear()
        self.stack[1:] = []
        return self

    def _leave(self, *_: Any) -> None:
        self.stack.pop()

    @contextmanager
    def listening(self, live: nn.Module, *, own: bool) -> Iterator[None]:
        """A context in which the modules that draw tell when they are at work; `own`: `live` is a shadow."""
        handles = []
        try:
            for name, m in live.named_modules() if self.places.keys() - {""} else ():
                if name in self.places and not isinstance(m, torch.jit.ScriptModule):
                    m = listened_to(m) if own else m
                    handles.append(m.register_forward_pre_hook(lambda *_, n=name: self.stack.append(n)))
                    handles.append(m.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()


def refused(error: NotShareableError) -> str:
    """The error where draws cannot be shared."""
    return (
        f'`masks="shared"` needs to know which axis of every random call counts the rows; {error}. '
        'Use masks="per_example", or say which inputs have rows with `batch_dim` (None for those that have none).'
    )
