"""Passes until a row is settled: they come in stages, and rows whose answer no longer moves drop out.

After each stage a row's answer (its probabilities; its mean and the ends of its interval) is known to about two
standard errors, counted from how the passes spread. Where that is within the tolerance the row is done with the passes
it had. Stages end at numbers that divide K, so that k passes stand for K, each K / k times.

    stages(100)                                                 # (10, 20, 50, 100)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bbalpha._engine.inputs import Inputs
from bbalpha._kernels import pass_seed

_LEAST = 8  # passes before anybody looks: fewer do not show how they spread
_ERRORS = 2.0  # standard errors that have to fit into the tolerance
_CLEAR_ERRORS = 3.0  # between the two likeliest classes, or a mean and the number that decides
_BALANCED = 0.5  # what balanced masks leave of a standard error, as measured on digits, friedman1 and diabetes
_END = 1.645  # deviations from the mean to the ends of a 90 % interval

State = tuple[Tensor, ...]  # what a stage gives, with rows


@dataclass(frozen=True)
class Where:
    """Which passes of which rows: what is at (i, j) belongs to pass `first` + i of row ``row(j)``.

    Attributes:
        start: The first row of the batch.
        first: The first of the passes.
        left: The rows of the batch that are left, None for all; a last one is run twice.
    """

    start: int
    first: int = 0
    left: Tensor | None = None

    def row(self, j: int) -> int:
        """The number of row j among all."""
        return self.start + (j if self.left is None else int(self.left[min(j, len(self.left) - 1)]))

    def rows(self, count: int) -> Tensor:
        """The numbers of the first `count` rows (count,)."""
        return self.start + (torch.arange(count) if self.left is None else self.left[:count])


@dataclass(frozen=True)
class Settling:
    """When rows are settled, and what is kept of them.

    Attributes:
        n_passes: K, at most.
        joined: Two stages of the same rows, of so many passes each, as one.
        settled: Which rows (n,) need no more than the so many passes they had.
        finished: What is kept of rows that had so many passes.
    """

    n_passes: int
    joined: Callable[[State, State, int, int], State]
    settled: Callable[[State, int, Where], Tensor]
    finished: Callable[[State, int], State]


def stages(n_passes: int) -> tuple[int, ...]:
    """The numbers of passes after which rows may be done: divisors of `n_passes`, each about twice the one before.

    >>> stages(100), stages(64), stages(37)
    ((10, 20, 50, 100), (8, 16, 32, 64), (37,))
    """
    ends: list[int] = []
    for k in range(_LEAST, n_passes):
        if n_passes % k == 0 and (not ends or k >= 2 * ends[-1]):
            ends.append(k)
    return (*ends, n_passes)


def run_until_settled(
    inputs: Inputs,
    settling: Settling,
    run: Callable[[Inputs, int, int, Where], State],
    *,
    seed: int,
    start: int,
    axis: int,
    may_drop: bool,
) -> State:
    """What is kept of every row of a batch, and as the last how many passes each had.

    Args:
        inputs: The batch.
        settling: When rows are settled.
        run: So many passes of these inputs, drawn by a seed.
        seed: Of the batch.
        start: The number of its first row.
        axis: The axis of the rows in what `run` gives.
        may_drop: Whether rows may be left out: else all have the passes of the one that needs most.
    """
    kept, state, left, first = _Kept(axis), None, None, 0
    for end in stages(settling.n_passes):
        # not the seed of the batch that begins at row `first`
        own = pass_seed(pass_seed(seed, first), 1) if first else seed
        new = run(inputs, end - first, own, Where(start, first, left))
        new = new if state is None else _first_rows(new, state, axis)
        state = new if state is None else settling.joined(state, new, first, end - first)
        first = end
        done = _done(state, axis, end, Where(start, 0, left), settling, may_drop)
        if bool(done.any()) or not done.numel():
            kept.add(settling.finished(_rows(state, done, axis), end), done, left, end)
            if bool(done.all()):
                break
            state, going = _rows(state, ~done, axis), (~done).nonzero()[:, 0]
            left = going if left is None else left[going]
            # a model that was tried on several rows is never left with one: it may squeeze that axis away
            inputs = inputs.select(going.repeat(2) if len(going) == 1 else going)
    return kept.tensors


def _first_rows(new: State, state: State, axis: int) -> State:
    """As many rows as `state` has: a last row is run twice."""
    return tuple(t.narrow(axis, 0, state[0].shape[axis]) for t in new)


def _done(state: State, axis: int, end: int, where: Where, settling: Settling, may_drop: bool) -> Tensor:
    """The rows that need no further stage (n,)."""
    everybody = torch.ones(state[0].shape[axis], dtype=torch.bool, device=state[0].device)
    if end == settling.n_passes or not len(everybody):
        return everybody
    done = settling.settled(state, end, where)
    return done if may_drop or bool(done.all()) else ~everybody


def _rows(state: State, which: Tensor, axis: int) -> State:
    """The rows for which `which` (n,) is true."""
    if bool(which.all()):
        return state
    index = which.nonzero()[:, 0]
    return tuple(t.index_select(axis, index) for t in state)


class _Kept:
    """What is kept of the rows of a batch, in their place."""

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.tensors: State = ()

    def add(self, parts: State, done: Tensor, left: Tensor | None, n_passes: int) -> None:
        """Take the rows that are done, of those that are left."""
        count = parts[0].shape[self.axis]
        used = torch.full((*[1] * self.axis, count), n_passes, dtype=torch.int64, device=done.device)
        parts = (*parts, used)
        if left is None and count == len(done):
            self.tensors = parts
            return
        if not self.tensors:  # not all are done after the first stage
            shapes = [[*t.shape[: self.axis], len(done), *t.shape[self.axis + 1 :]] for t in parts]
            self.tensors = tuple(t.new_empty(shape) for t, shape in zip(parts, shapes, strict=True))
        index = done.nonzero()[:, 0] if left is None else left[done]
        for whole, t in zip(self.tensors, parts, strict=True):
            whole.index_copy_(self.axis, index, t)


# ------------------------------------------------------------------------------ when a row is settled


def classes_settled(mean: Tensor, error: Tensor, axis: int, *, tolerance: float, balanced: bool) -> Tensor:
    """The rows whose probabilities are known to within `tolerance`, and whose label does not hang on chance (N,).

    Args:
        mean: Mean probabilities (N, C, ...).
        error: Their standard errors as if the passes were independent.
        axis: The axis of the classes.
        tolerance: In probability.
        balanced: Whether the masks were balanced.
    """
    error = error * (_BALANCED if balanced else 1.0)
    near = _ERRORS * error.amax(axis) <= tolerance
    best = mean.topk(2, axis)
    gap = best.values.select(axis, 0) - best.values.select(axis, 1)
    clear = gap >= _CLEAR_ERRORS * error.gather(axis, best.indices).sum(axis)  # at most the error of the gap
    return _everywhere(near & clear)


def mixture_settled(
    outputs: Tensor, variance: Tensor, *, tolerance: float, balanced: bool, threshold: float | None = None
) -> Tensor:
    """The rows whose mean and ends are known to within `tolerance` standard deviations (N,).

    The ends are those of a Gaussian with the moments of the mixture, mean +- 1.645 std; a pass moves them by
    d +- 1.645 (d^2 + v) / (2 std), where d is how far it is from the mean and v its noise, up to a constant.

    Args:
        outputs: Means of the passes (k, N, ...).
        variance: Of their noise, broadcasting to `outputs`.
        tolerance: In standard deviations of the mixture.
        balanced: Whether the masks were balanced.
        threshold: The number that decides, which the mean must be clear of.
    """
    mean = outputs.mean(0)
    far = outputs - mean
    second = far.square() + variance
    std = second.mean(0).sqrt()
    wider = _END / 2 * second / std.clamp_min(torch.finfo(std.dtype).tiny)
    spread = torch.maximum((far + wider).std(0), (far - wider).std(0)).maximum(far.std(0))
    scale = len(outputs) ** -0.5 * (_BALANCED if balanced else 1.0)  # a deviation -> a standard error
    near = _ERRORS * scale * spread <= tolerance * std
    if threshold is not None:
        near &= (mean - threshold).abs() >= _CLEAR_ERRORS * scale * far.std(0)
    return _everywhere(near)


def _everywhere(ok: Tensor) -> Tensor:
    """Where it holds for all outputs, pixels, tokens of a row (N, ...) -> (N,)."""
    while ok.ndim > 1:
        ok = ok.all(-1)
    return ok
