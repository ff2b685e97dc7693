"""Fast random masks, addressed by (seed, pass), and the kernel that applies them.

torch's CPU dropout spends as long on drawing the mask as on the matrix product it serves. Here 8 random
bits a unit (32 when the rate is no multiple of 1/256) are cut from 64-bit words, and applied by vectorised
compare-and-select; a relu in front is fused, so that the backward needs the sign of the output and no mask.

The masks of passes that are balanced are drawn together (`_balance.py`): one draw of bits for every random site and all
passes. Otherwise, and for numbers of other kinds, pass k draws from a generator of its own, that of (seed, k). So the
same masks come out however the passes are run: one by one, stacked in one batch, under vmap, in chunks, in another
process.

    passes = Passes(seed=0, first=0, count=10, together=10)
    out = dropout(x, passes.noise(x.shape, 0.5))        # (N, D) -> (10, N, D)
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bbalpha._balance import (
    FEW,
    PER_WORD,
    Memo,
    Patterns,
    Planes,
    Tape,
    add_ranks,
    groups,
    scrambled,
)
from bbalpha._torch import apply_function, generators, outside_transforms, transforms_active, where_above

# ------------------------------------------------------------------------------ seeds


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed from `generator`; None is torch's global one."""
    if transforms_active():
        with outside_transforms():
            return draw_seed(generator)
    return int(torch.empty((), dtype=torch.int64, device=_CPU).random_(generator=generator).item())


_CPU = torch.device("cpu")  # whatever the default device


def step_seed(seed: int, step: int) -> int:
    """The seed of the masks of training step `step`, of 64 bits: no two steps of a long run share one."""
    return scrambled(scrambled(seed ^ 0x2545F4914F6CDD1D) + step)


def held_out_seed(seed: int, batch: int) -> int:
    """The seed of the masks of a batch of held-out rows: that of no step, of no seed."""
    return step_seed(step_seed(seed, -1), batch)


def pass_seed(seed: int, index: int) -> int:
    """The seed of what pass `index` draws by itself, of 64 bits: distinct for all passes of one `seed`, scrambled.

    >>> len({pass_seed(0, k) for k in range(10_000)})
    10000
    """
    return scrambled(scrambled(seed ^ 0x0D1B54A32D192ED03) + index)


def streams(seed: int, first: int, count: int, device: torch.device | None = None) -> list[torch.Generator]:
    """A generator for each of `count` passes from `first` on.

    >>> [int(torch.randint(100, (), generator=g)) for g in streams(0, 8, 2)]
    [32, 8]
    """
    return generators([pass_seed(seed, index) for index in range(first, first + count)], device)


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of the order of the rows in an epoch of training."""
    return order_seed(seed ^ 0x5DEECE66D, epoch)


def order_seed(seed: int, index: int) -> int:
    """The seed of an order of rows, of 32 bits, which is what `manual_seed` takes: distinct for all of one `seed`.

    >>> len({order_seed(0, k) for k in range(10_000)})
    10000
    """
    h = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    h = (((h ^ (h >> 29)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF) >> 32
    h = (h + index) & 0xFFFFFFFF  # from here on a bijection of 32 bits
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


# ------------------------------------------------------------------------------ drawing


@dataclass(frozen=True)
class Noise:
    """Random bytes and the threshold above which a unit is kept.

    Attributes:
        values: int8, of the shape of what it is applied to or broadcasting to it; factors if threshold is None.
        threshold: A unit is kept where its value is larger. None: the values are to be multiplied with.
        scale: One over the realised keep probability.
    """

    values: Tensor
    threshold: int | None
    scale: float

    def keep(self) -> Tensor:
        """Which units are kept, as bool."""
        return self.values > (self.threshold or 0)

    @property
    def apart(self) -> tuple[Tensor, int | None, float]:
        """values, threshold, scale."""
        return self.values, self.threshold, self.scale


class Passes:
    """`count` passes from `first` on, and the one place where their noise is drawn.

    Asked for a site, it gives the noise of all passes at once. What is drawn hangs on the seed and on the sites met
    before, so all ways of running the passes must ask in the order of the sites and with the shape of a single pass.

    Args:
        seed: Of all passes.
        first: The first pass.
        count: How many.
        together: How many passes there are in all, to be balanced among each other; 0 for independent ones.
        device: Where the noise is wanted.
        memo: What the passes of one call draw alike, shared by those that are run apart.
    """

    def __init__(
        self,
        seed: int,
        first: int,
        count: int,
        *,
        together: int = 0,
        device: torch.device | None = None,
        memo: "Memo | None" = None,
    ) -> None:
        self.seed = seed
        self.first = first
        self.count = count
        self.together = together
        self.device = device
        self.memo = memo
        self.transformed = transforms_active()
        self._generators: list[torch.Generator] | None = None
        self._tapes: dict[int, Tape] = {}

    @property
    def generators(self) -> list[torch.Generator]:
        """One for each pass, consumed in the order of the sites."""
        if self._generators is None:
            with self.plain():
                self._generators = streams(self.seed, self.first, self.count, self.device)
        return self._generators

    def plain(self) -> AbstractContextManager[Any]:
        """A context to draw in: outside of torch.func transforms that were at work before the passes began."""
        return outside_transforms() if self.transformed else nullcontext()

    def part(self, start: int, count: int) -> "Passes":
        """At most `count` of these passes, before anything was drawn."""
        count = min(count, self.count - start)
        if self.memo is None and count < self.count and self.together:
            self.memo = Memo()
        return Passes(
            self.seed, self.first + start, count, together=self.together, device=self.device, memo=self.memo
        )  # fmt: skip

    def noise(self, shape: Sequence[int], rate: float) -> Noise:
        """Noise of shape (count, *shape) that drops units at `rate`."""
        return self.noises([(shape, rate)])[0]

    def noises(self, sites: Sequence[tuple[Sequence[int], float]], factors: torch.dtype | None = None) -> list[Noise]:
        """The noise of several sites at once, as if asked for one after the other.

        As `factors` of that dtype, numbers to multiply with, it takes fewer steps where there is little to do.
        """
        if not self.transformed:  # entering a context that does nothing takes as long as a small draw
            return self._drawn(sites, factors)
        with self.plain():
            return self._drawn(sites, factors)

    def _drawn(self, sites: Sequence[tuple[Sequence[int], float]], factors: torch.dtype | None) -> list[Noise]:
        rate = sites[0][1]
        if len(sites) > 1 and any(other != rate for _, other in sites):
            return [self._drawn([site], factors)[0] for site in sites]
        balanced = groups(self.together, rate, self.device)
        if not balanced:
            return draw_noise(self.generators, sites, self.device, factors)
        spans = [-(-math.prod(shape) // PER_WORD) for shape, _ in sites]
        threshold, table = None, balanced[0][1]
        if factors is not None and self.count == self.together <= FEW:
            values = table.factors(self._read(0, sum(spans), rate)[0], self.count, factors)
        else:
            values = self._units(balanced, sum(spans), rate)
            threshold = 0 if factors is None else None
            values = values if factors is None else _factors(values > 0, table.scale, factors)
        noises, at, scale = [], 0, table.scale
        for span, (shape, _) in zip(spans, sites, strict=True):
            noises.append(Noise(_part(values, at, shape), threshold, scale))
            at += PER_WORD * span
        return noises

    def _units(self, balanced: Sequence[tuple[int, Patterns]], span: int, rate: float) -> Tensor:
        """What is positive where a unit is kept (count, 4 span) int8, from bits that all passes of a group share."""
        units = None
        for group, (start, table) in enumerate(balanced):
            low, high = max(start, self.first), min(start + table.n_passes, self.first + self.count)
            if low >= high:
                continue
            words, seen = self._read(group, span, rate)
            if units is None:
                units = torch.empty((self.count, PER_WORD * span), dtype=torch.int8, device=self.device)
            table.fill(units[low - self.first : high - self.first], words, first=low - start, seen=seen)
        if units is None:
            units = torch.empty((0, PER_WORD * span), dtype=torch.int8, device=self.device)
        return units

    def _read(self, group: int, span: int, rate: float) -> tuple[Tensor, Planes | None]:
        """The next words of a group, as `Tape` has it."""
        tape = self._tapes.get(group)
        if tape is None:
            tape = self._tapes[group] = Tape(self.seed, group, self.device, self.memo)
        return tape.read(span, rate)

    def uniforms(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers from 0 to 1 (count, *shape); of balanced passes one in each K-th part of the way, in any order."""
        with self.plain():
            numbers = torch.empty((self.count, *shape), device=self.device, dtype=dtype)
            for one, generator in zip(numbers, self.generators, strict=True):
                one.uniform_(generator=generator)
            for group, (start, table) in enumerate(groups(self.together, 0.5, self.device)):
                low, high = max(start, self.first), min(start + table.n_passes, self.first + self.count)
                if low < high:
                    words, _ = self._read(group, math.prod(shape), 0.0)
                    part = numbers[low - self.first : high - self.first]
                    add_ranks(part.flatten(1), words, table.n_passes, first=low - start)
                    part.div_(table.n_passes).clamp_max_(1 - torch.finfo(dtype).eps / 2)  # 1 is left out
        return numbers

    def normals(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Standard normal numbers (count, *shape); of balanced passes one in each K-th part of the distribution."""
        if self.together < 2:
            with self.plain():
                numbers = torch.empty((self.count, *shape), device=self.device, dtype=dtype)
                for one, generator in zip(numbers, self.generators, strict=True):
                    one.normal_(generator=generator)
            return numbers
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        most = 1 - torch.finfo(wide).eps / 2
        sides = self.uniforms(shape, wide).mul_(2).sub_(1).clamp_(-most, most)
        return sides.erfinv_().mul_(math.sqrt(2)).to(dtype)

    def dimming(self, shape: Sequence[int], dtype: torch.dtype) -> Noise:
        """Factors from 1/2 to 3/2 of shape (count, *shape), where no unit may be lost."""
        values = torch.empty((self.count, *shape), device=self.device, dtype=dtype)
        for one, generator in zip(values, self.generators, strict=True):
            one.uniform_(0.5, 1.5, generator=generator)
        return Noise(values, None, 1.0)


def draw_noise(
    generators: Sequence[torch.Generator | None],
    sites: Sequence[tuple[Sequence[int], float]],
    device: torch.device | None = None,
    factors: torch.dtype | None = None,
) -> list[Noise]:
    """For each (shape, rate), noise of shape (len(generators), *shape); None is torch's global generator.

    With `factors` the noise comes as numbers of that dtype, 0 or the scale.

    >>> [noise.values.shape for noise in draw_noise([None], [((4, 2), 0.5), ((3,), 0.1)])]
    [torch.Size([1, 4, 2]), torch.Size([1, 3])]
    """
    if device is not None and device.type != "cpu":  # torch's own kernels are fast there
        return [_draw_on(device, generators, shape, rate, factors) for shape, rate in sites]
    spans = [-(-math.prod(shape) // units_per_word(rate)) for shape, rate in sites]
    words = _draw_words(generators, sum(spans))
    rates = {rate for _, rate in sites}
    if len(rates) == 1:
        return _cut(words, spans, [shape for shape, _ in sites], rates.pop(), factors)
    parts = zip(words.split(spans, 1), spans, sites, strict=True)
    return [_cut(part.contiguous(), [span], [shape], rate, factors)[0] for part, span, (shape, rate) in parts]


def draw_rates(generators: Sequence[torch.Generator], shape: Sequence[int], rates: Sequence[float]) -> list[Noise]:
    """Noise (len(generators), *shape) for each of `rates`, all of one `units_per_word`, cut from the same random words.

    >>> few, many = draw_rates([torch.Generator().manual_seed(0)], (100,), [1 / 256, 0.5])
    >>> bool((few.keep() >= many.keep()).all())
    True
    """
    span = -(-math.prod(shape) // units_per_word(rates[0]))
    words = _draw_words(generators, span)
    return [_cut(words, [span], [shape], rate, None)[0] for rate in rates]


def draw_balanced(
    read: Callable[[int, int], Tensor], shape: Sequence[int], rates: Sequence[float], n_passes: int
) -> list[Noise]:
    """Noise (S, n_passes, *shape) for each of `rates`, cut from the same words.

    Args:
        read: (group, span) -> so many words of a group of passes, from S tapes (S, span).
        shape: Of a site.
        rates: Of being dropped.
        n_passes: K, all of them.

    >>> (noise,) = draw_balanced(lambda group, span: Tape(0, group).draw(span)[None], (100,), [0.5], 4)
    >>> torch.equal(noise.values[0], Passes(0, 0, 4, together=4).noise((100,), 0.5).values)
    True
    """
    span = -(-math.prod(shape) // PER_WORD)
    words: list[Tensor] = []  # by group
    found = []
    for rate in rates:
        balanced = groups(n_passes, rate)
        words += [read(group, span) for group in range(len(words), len(balanced))]
        units = torch.empty((len(words[0]), n_passes, span * PER_WORD), dtype=torch.int8)
        for own, (start, table) in zip(words, balanced, strict=False):
            table.fill(units[:, start : start + table.n_passes], own, first=0)
        scale = balanced[0][1].scale
        found.append(Noise(units[..., : math.prod(shape)].unflatten(-1, list(shape)), 0, scale))
    return found


def _draw_words(generators: Sequence[torch.Generator | None], span: int) -> Tensor:
    """64 random bits, so many for each generator (len(generators), span)."""
    words = torch.empty((len(generators), span), dtype=torch.int64)
    for row, generator in zip(words.unbind(0), generators, strict=True):
        # the full range: random_() without bounds leaves the top bit 0
        row.random_(-(2**63), None, generator=generator)
    return words


def units_per_word(rate: float) -> int:
    """8 bits a unit if that hits the rate exactly, else 32."""
    return 8 if (1 - rate) * 256 % 1 == 0 else 2


def _cut(
    words: Tensor, spans: Sequence[int], shapes: Sequence[Sequence[int]], rate: float, factors: torch.dtype | None
) -> list[Noise]:
    """Noise of the shapes (count, *shape) out of 64-bit words (count, ...), so many words for each."""
    per_word = units_per_word(rate)
    if per_word == 8:
        levels = round((1 - rate) * 256)
        units, cut, scale = words.view(torch.int8), 128 - levels, 256 / levels
    else:
        kept = min(max(round((1 - rate) * 2**32), 1), 2**32 - 1)  # of 2^32 values
        units, cut, scale = words.view(torch.int32), 2**31 - kept, 2**32 / kept
    threshold: int | None = cut - 1
    if factors is not None:
        units, threshold = _factors(units >= cut, scale, factors), None
    elif per_word == 2:
        units, threshold = (units >= cut).view(torch.int8), 0
    noises, start = [], 0
    for span, shape in zip(spans, shapes, strict=True):
        noises.append(Noise(_part(units, start, shape), threshold, scale))
        start += span * per_word
    return noises


def _factors(kept: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """0 or the scale, as numbers to multiply with."""
    exact = dtype == torch.get_default_dtype()  # the type that a product with a number comes out in
    return kept.mul(scale) if exact else kept.to(dtype).mul_(scale)


def _part(units: Tensor, start: int, shape: Sequence[int]) -> Tensor:
    """Units of each row of `units` from `start` on, as (count, *shape); a view, in one step where two cost as much."""
    strides = [1]
    for n in reversed(shape):
        strides.append(strides[-1] * n)
    return units.as_strided((units.shape[0], *shape), (units.stride(0), *strides[-2::-1]), start)


def _draw_on(
    device: torch.device,
    generators: Sequence[torch.Generator | None],
    shape: Sequence[int],
    rate: float,
    factors: torch.dtype | None,
) -> Noise:
    values = torch.empty((len(generators), *shape), dtype=factors or torch.int8, device=device)
    for one, generator in zip(values, generators, strict=True):
        one.bernoulli_(1 - rate, generator=generator)
    scale = 1 / (1 - rate)
    return Noise(values, 0, scale) if factors is None else Noise(values.mul_(scale), None, scale)


# ------------------------------------------------------------------------------ applying


def dropout(x: Tensor, noise: Noise) -> Tensor:
    """`x` with the units that `noise` drops set to 0 and the others scaled; either may broadcast.

    >>> noise = Passes(seed=0, first=0, count=1).noise((1000,), 0.5)
    >>> dropout(torch.ones(1, 1000), noise).unique()
    tensor([0., 2.])
    """
    return _apply(x, noise, False, False)


def relu_dropout(x: Tensor, noise: Noise, *, overwrite: bool = False) -> Tensor:
    """dropout(relu(x)) in one step: keeps its output for the backward and neither x nor the mask.

    With `overwrite` in the place of x, which has the shape of the noise and is needed by nobody else.
    """
    return _apply(x, noise, True, overwrite)


def _apply(x: Tensor, noise: Noise, relu: bool, overwrite: bool) -> Tensor:
    args = (x, *noise.apart, relu, overwrite)
    if x.requires_grad or transforms_active() or torch.compiler.is_compiling():
        return apply_function(_Dropout, *args)
    with torch.no_grad():
        return _Dropout.forward(*args)


def select(x: Tensor, values: Tensor, threshold: int | None, scale: float, out: Tensor | None = None) -> Tensor:
    """What `values` let through: x * scale where values > threshold, else 0; in blocks that stay in the cache."""
    if threshold is None:
        return x * values if out is None else torch.mul(x, values, out=out)
    if torch.is_grad_enabled() or transforms_active():
        chosen: Tensor = where_above(x, values.to(x.dtype), threshold)
        return chosen * scale
    by_pass = x.ndim == values.ndim and x.shape[0] == values.shape[0]  # (K, N, D) and (K, N, D) or (K, 1, D)
    if max(x.numel(), values.numel()) <= _BLOCK or not (by_pass or x.shape == values.shape[1:]):
        few = values.to(x.dtype)
        small: Tensor = (
            where_above(x, few, threshold) if out is None else where_above.grad_input(x, few, threshold, grad_input=out)
        )
        return small.mul_(scale)
    if out is None:
        out = torch.empty(x.shape if by_pass else values.shape, dtype=x.dtype, device=x.device)
    step = max(1, _BLOCK * out.shape[0] // out.numel())
    for i in range(0, out.shape[0], step):
        part = slice(i, i + step)
        where_above.grad_input(x[part] if by_pass else x, values[part].to(x.dtype), threshold, grad_input=out[part])
        out[part].mul_(scale)
    return out


_BLOCK = 2**18  # units: 1 MiB of float32


class _Dropout(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, values: Tensor, threshold: int | None, scale: float, relu: bool, overwrite: bool) -> Tensor:
        out = select(x, values, threshold, scale, out=x if overwrite else None)
        return out.relu_() if relu else out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, values, ctx.threshold, ctx.scale, relu, overwrite = inputs
        ctx.shape = x.shape
        if overwrite:
            ctx.mark_dirty(x)
        if relu:  # the output is positive exactly where x was positive and the unit was kept
            values, ctx.threshold = output, 0
        ctx.save_for_backward(values)
        ctx.save_for_forward(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (values,) = ctx.saved_tensors
        grad = select(grad, values, ctx.threshold, ctx.scale)
        return grad if grad.shape == ctx.shape else grad.sum_to_size(ctx.shape), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (values,) = ctx.saved_tensors
        return select(tangent, values, ctx.threshold, ctx.scale)
