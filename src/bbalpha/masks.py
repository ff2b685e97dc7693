"""Fast random masks, addressed by (seed, pass), and the kernels that apply them.

torch's CPU dropout spends as long on drawing the mask as on the matrix product it serves. Here 8 random
bits a unit (32 when the rate is no multiple of 1/256) are cut from 64-bit words, and applied by vectorised
compare-and-select; a relu in front is fused, so that the backward needs the sign of the output and no mask.

Pass k of a call draws from a generator of its own, seeded by (seed, k). So the same masks come out however
the passes are run: one by one, stacked in one batch, under vmap, in chunks, in another process.

    passes = Passes(seed=0, first=0, count=10)
    out = dropout(x, passes.noise(x.shape, 0.5))        # (N, D) -> (10, N, D)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_threshold = torch.ops.aten.threshold_backward  # (x, noise, t): x where noise > t, else 0; broadcasts


@dataclass(frozen=True)
class Noise:
    """Random bytes and the threshold above which a unit is kept.

    Attributes:
        values: int8, of the shape of what it is applied to or broadcasting to it.
        threshold: A unit is kept where its value is larger.
        scale: One over the realised keep probability.
    """

    values: Tensor
    threshold: int
    scale: float

    def keep(self) -> Tensor:
        """Which units are kept, as bool."""
        return self.values > self.threshold


# ------------------------------------------------------------------------------ drawing


def pass_seed(seed: int, index: int) -> int:
    """The generator seed of pass `index`: distinct for all passes of one `seed`, scrambled.

    torch's CPU generator takes 32 bits of seed, so the map from pass to seed is a bijection of 32 bits.

    >>> len({pass_seed(0, k) for k in range(10_000)})
    10000
    """
    base = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    base = ((base ^ (base >> 29)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    h = ((base >> 32) + index) & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def draw_seed() -> int:
    """A seed drawn from torch's global generator, which moves on as it does for nn.Dropout."""
    return int(torch.empty((), dtype=torch.int64).random_())


class Passes:
    """The generators of `count` passes from `first` on, and the noise they draw.

    Each pass consumes its generator in the order of the random sites it meets, so all ways of running the
    passes must ask in that order and with the shape of a single pass.
    """

    def __init__(self, seed: int, first: int, count: int, *, device: torch.device | str | None = None) -> None:
        self.count = count
        self.device = torch.device(device or "cpu")
        self.generators = [
            torch.Generator(self.device).manual_seed(pass_seed(seed, k)) for k in range(first, first + count)
        ]

    def noise(self, shape: Sequence[int], rate: float) -> Noise:
        """Noise of shape (count, *shape) that drops units at `rate`, each pass from its own generator."""
        return draw_noise(self.generators, shape, rate, self.device)


def draw_noise(
    generators: Sequence[torch.Generator | None],
    shape: Sequence[int],
    rate: float,
    device: torch.device | None = None,
) -> Noise:
    """Noise of shape (len(generators), *shape) that drops units at `rate`; None is torch's global generator.

    >>> draw_noise([None], (4, 2), 0.5).values.shape
    torch.Size([1, 4, 2])
    """
    size = math.prod(shape)
    if device is not None and device.type != "cpu":  # torch's own kernels are fast there
        kept = torch.empty((len(generators), size), dtype=torch.int8, device=device)
        for row, generator in zip(kept, generators, strict=True):
            row.bernoulli_(1 - rate, generator=generator)
        return Noise(kept.view(-1, *shape), 0, 1 / (1 - rate))
    values, threshold, scale = _draw_bytes(generators, size, rate)
    return Noise(values.view(len(generators), *shape), threshold, scale)


def _draw_bytes(generators: Sequence[torch.Generator | None], size: int, rate: float) -> tuple[Tensor, int, float]:
    """(len(generators), size) int8 noise, its threshold, and the scale of what is kept."""
    levels = round((1 - rate) * 256)
    per_word = 8 if levels == (1 - rate) * 256 and 0 < levels < 256 else 2
    words = torch.empty((len(generators), -(-size // per_word)), dtype=torch.int64)
    for row, generator in zip(words, generators, strict=True):
        # the full range: random_() without bounds leaves the top bit 0
        row.random_(-(2**63), None, generator=generator)
    if per_word == 8:
        return words.view(torch.int8)[:, :size].contiguous(), 127 - levels, 256 / levels
    # 32 bits a unit: kept where the value reaches `cut`, of 2^32 values
    kept = min(max(round((1 - rate) * 2**32), 1), 2**32 - 1)
    cut = 2**31 - kept
    bits = words.view(torch.int32)[:, :size]
    return bits.clamp(cut - 1, cut).sub_(cut - 1).to(torch.int8), 0, 2**32 / kept


# ------------------------------------------------------------------------------ applying


def dropout(x: Tensor, noise: Noise) -> Tensor:
    """`x` with the units that `noise` drops set to 0 and the others scaled; noise may broadcast over x.

    >>> noise = Passes(seed=0, first=0, count=1).noise((1000,), 0.5)
    >>> dropout(torch.ones(1, 1000), noise).unique()
    tensor([0., 2.])
    """
    out: Tensor = _Dropout.apply(x, noise.values, noise.threshold, noise.scale)
    return out


def relu_dropout(x: Tensor, noise: Noise) -> Tensor:
    """dropout(relu(x)) in one step: keeps its output for the backward and neither x nor the mask."""
    out: Tensor = _ReluDropout.apply(x, noise.values, noise.threshold, noise.scale)
    return out


def _select(x: Tensor, values: Tensor, threshold: int, scale: float) -> Tensor:
    out: Tensor = _threshold(x, values.to(x.dtype), threshold)
    return out.mul_(scale) if not torch.is_grad_enabled() else out * scale


def _sum_to(grad: Tensor, shape: torch.Size) -> Tensor:
    return grad if grad.shape == shape else grad.sum_to_size(shape)


class _Dropout(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, values: Tensor, threshold: int, scale: float) -> Tensor:
        return _select(x, values, threshold, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, float], output: Tensor) -> None:
        x, values, ctx.threshold, ctx.scale = inputs
        ctx.shape = x.shape
        ctx.save_for_backward(values)
        ctx.save_for_forward(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (values,) = ctx.saved_tensors
        return _sum_to(_select(grad, values, ctx.threshold, ctx.scale), ctx.shape), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (values,) = ctx.saved_tensors
        return _select(tangent, values, ctx.threshold, ctx.scale)


class _ReluDropout(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, values: Tensor, threshold: int, scale: float) -> Tensor:
        return _select(x, values, threshold, scale).relu_()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, float], output: Tensor) -> None:
        x, _, _, ctx.scale = inputs
        ctx.shape = x.shape
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (output,) = ctx.saved_tensors  # positive exactly where x was positive and the unit was kept
        return _sum_to(_select(grad, output, 0, ctx.scale), ctx.shape), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (output,) = ctx.saved_tensors
        return _select(tangent, output, 0, ctx.scale)
