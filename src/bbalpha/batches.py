"""K passes over any number of rows in bounded memory, in evaluation mode.

Rows are cut into batches, and passes into groups, so that about `_BUDGET` numbers of one activation are held at a
time. What a batch gives is reduced at once; only what `reduce` returns is kept.

    (outputs,) = collect(model, x, Passes(n_passes=100), lambda groups, _: (torch.cat(list(groups)),), row_axis=1)
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from bbalpha import masks as fast_masks
from bbalpha.inputs import Inputs
from bbalpha.sampling import Masks, sample

_BUDGET = 2**22  # numbers in one activation: 16 MB of float32
_PATIENCE = 3.0  # seconds before a progress bar shows
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

Reduce = Callable[[Iterator[Any], int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Passes:
    """How a model is run over its rows; the options that all of `predict_*` share.

    Attributes:
        n_passes: K.
        batch_size: Rows at a time; None chooses by memory.
        masks: As in `bbalpha.sample`.
        seed: None draws from torch's global generator; an int leaves it untouched. With shared masks the result
            is then the same for every `batch_size`.
        batch_dim: The axis of the inputs that counts rows; in the outputs rows come first.
        progress: None shows a bar on a terminal when it takes more than a few seconds.
    """

    n_passes: int
    batch_size: int | None = None
    masks: Masks = "per_example"
    seed: int | None = None
    batch_dim: int = 0
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name, value in (("n_passes", self.n_passes), ("batch_size", self.batch_size)):
            if value is None and name == "batch_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a whole number of at least 1; got {value!r}.")


def collect(model: nn.Module, x: Any, passes: Passes, reduce: Reduce, *, row_axis: int) -> tuple[Tensor, ...]:
    """What `reduce` makes of the outputs of every batch, joined over the rows.

    Args:
        model: Any model that `bbalpha.sample` takes; its flags and buffers are as they were afterwards.
        x: What `bbalpha.sample` takes, or an iterable of it (a DataLoader).
        passes: How to run.
        reduce: Takes the groups of passes of a batch one by one, each (G, n, ...) or a structure of these, and
            the number of its first row; returns tensors that have the n rows.
        row_axis: The axis of the rows in what `reduce` returns.

    Returns:
        The tensors of `reduce`, with all N rows.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module; got {type(model).__name__}.")
    whole = isinstance(x, (Tensor, tuple, list, Mapping))
    if not whole and not isinstance(x, Iterable):
        raise TypeError(
            f"`x` must be a tensor, a tuple of arguments, a mapping of them, or an iterable of batches; "
            f"got {type(x).__name__}."
        )
    total = Inputs.of(x, passes.batch_dim).rows if whole else None
    rows = _Rows(row_axis, total)
    base = fast_masks.draw_seed() if passes.seed is None else passes.seed
    with torch.no_grad(), evaluation(model), _bar(x, total, passes.progress) as bar:
        numbers = None
        for part in (x,) if whole else x:
            given = Inputs.of(part, passes.batch_dim)
            numbers = numbers or _outputs_a_row(model, given, passes)
            for inputs, group, chunk in _cut(model, given, passes, numbers):
                _check_inputs(inputs, rows.count)
                # one function a pass for all rows when masks are shared; else every batch draws its own
                own = rows.count > 0 and passes.masks == "per_example"
                seed = fast_masks.pass_seed(base, rows.count) if own else base
                rows.add(reduce(_groups(model, inputs, passes, group, chunk, seed), rows.count), inputs.rows)
                bar.update(inputs.rows if whole else 0)
            bar.update(0 if whole else 1)
    return rows.joined()


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for every module; all flags as they were afterwards."""
    switched = [m for m in model.modules() if m.training]
    try:
        for m in switched:
            m.training = False
        yield
    finally:
        for m in switched:
            m.training = True


# ------------------------------------------------------------------------------ cutting


def _cut(model: nn.Module, inputs: Inputs, passes: Passes, numbers: int) -> Iterator[tuple[Inputs, int, int]]:
    """Batches of rows, how many passes to reduce at a time, and how many of these to run at a time.

    Many rows at a time rather than few: what a pass costs besides its rows (masks that are shared, weights that are
    gathered) is paid once a batch. The group of passes depends on the `numbers` that one row gives alone, so that
    seeded results do not depend on `batch_size`.
    """
    here = [t for t in inputs.tensors if t.ndim > inputs.batch_dim and t.shape[inputs.batch_dim] == inputs.rows]
    widest = max((max(p.shape[:2]) for p in model.parameters() if p.ndim > 1), default=1)
    width = max(widest, sum(t.numel() for t in here) // max(1, inputs.rows))
    calls = max(1, _BUDGET // width)  # rows times passes whose activations are held
    group = min(passes.n_passes, max(1, _BUDGET // numbers))
    size = passes.batch_size or max(1, min(calls, _BUDGET // (group * numbers)))
    chunk = max(1, calls // max(1, min(size, inputs.rows)))
    if inputs.rows <= size:
        yield inputs, group, chunk
        return
    for start in range(0, inputs.rows, size):
        count = min(size, inputs.rows - start)
        part = inputs.map(lambda t, a=start, n=count: t.narrow(inputs.batch_dim, a, n))  # type: ignore[misc]
        yield Inputs(part, inputs.batch_dim, count), group, chunk


def _outputs_a_row(model: nn.Module, inputs: Inputs, passes: Passes) -> int:
    """How many numbers one pass gives for one row, seen on two of them."""
    few = inputs.first(2)
    outputs = _sampled(model, few, passes, 1, chunk=1, seed=0)
    numbers = sum(t.numel() for t in tree_leaves(outputs) if isinstance(t, Tensor))
    return max(1, numbers // max(1, few.rows))


def _groups(model: nn.Module, inputs: Inputs, passes: Passes, group: int, chunk: int, seed: int) -> Iterator[Any]:
    """The outputs of one batch, `group` passes at a time."""
    for first in range(0, passes.n_passes, group):
        count = min(group, passes.n_passes - first)
        own = fast_masks.pass_seed(seed, first) if first else seed
        yield _sampled(model, inputs, passes, count, chunk=chunk, seed=own)


def _sampled(model: nn.Module, inputs: Inputs, passes: Passes, count: int, *, chunk: int, seed: int) -> Any:
    """`sample`, with an error that says which layer the inputs do not fit."""
    try:
        return sample(
            model, inputs.x, count, masks=passes.masks, chunk_size=chunk, batch_dim=passes.batch_dim, seed=seed
        )
    except (RuntimeError, TypeError, IndexError) as error:
        misfit = _misfit(model, inputs)
        if misfit is None:
            raise
        raise ValueError(misfit) from error


class _Rows:
    """Tensors that grow by rows, copied into one place each.

    Keeping the parts and joining them at the end costs many times their size: small tensors that live long, between
    large ones that do not, leave holes that the allocator cannot use.
    """

    def __init__(self, axis: int, total: int | None) -> None:
        self.axis, self.total, self.count = axis, total, 0
        self.held: list[Tensor] = []

    def add(self, tensors: tuple[Tensor, ...], rows: int) -> None:
        """Take the next rows."""
        if not self.held and rows == self.total:
            self.held, self.count = list(tensors), rows
            return
        room = self.held[0].shape[self.axis] if self.held else 0
        if not self.held or self.count + rows > room:
            room = max(2 * room, self.count + rows) if self.total is None else self.total
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
def _bar(x: Any, total: int | None, progress: bool | None) -> Iterator["tqdm[Any]"]:
    """A progress bar over rows, or over batches where rows are not known beforehand."""
    try:
        steps = len(x) if total is None else total
    except TypeError:  # a generator
        steps = None
    hidden = None if progress is None else not progress  # tqdm: None hides where there is no terminal
    delay = _PATIENCE if progress is None else 0.0
    unit = "batch" if total is None else "row"
    with tqdm(total=steps, unit=unit, unit_scale=True, desc="predict", leave=False, delay=delay, disable=hidden) as bar:
        yield bar


# ------------------------------------------------------------------------------ what can be wrong


def _check_inputs(inputs: Inputs, start: int) -> None:
    """Refuse nan, and infinite numbers unless there are several inputs: one of those may be an additive mask."""
    single = isinstance(inputs.x, Tensor)
    for t in inputs.tensors:
        if not t.is_floating_point():
            continue
        bad = ~t.isfinite() if single else t.isnan()
        if bool(bad.any()):
            place = bad.nonzero()[0].tolist()
            row = place[inputs.batch_dim] + start if len(place) > inputs.batch_dim else place
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

    hooks = [
        m.register_forward_pre_hook(lambda m, args, n=name: look(m, args, name=n)) for name, m in model.named_modules()
    ]
    try:
        inputs.first(1).call(model)
    except (RuntimeError, TypeError, IndexError):
        return found[0] if found else None
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _refusal(module: nn.Module, x: Tensor) -> str | None:
    """What is wrong with `x` as the input of one layer."""
    if isinstance(module, nn.Embedding) and x.is_floating_point():
        return f"takes whole numbers and got {x.dtype}; use x.long()"
    if isinstance(module, nn.Linear) and x.shape[-1] != module.in_features:
        return f"takes {module.in_features} features and got {x.shape[-1]}"
    if isinstance(module, _CONVOLUTIONS):
        axis = -1 - len(module.kernel_size)
        if x.ndim < -axis or x.shape[axis] != module.in_channels:
            return f"takes {module.in_channels} channels and got shape {tuple(x.shape)}"
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)) and x.dtype != module.weight.dtype:
        return f"takes {module.weight.dtype} and got {x.dtype}; use x.to({module.weight.dtype})"
    return None
