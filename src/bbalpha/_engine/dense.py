"""The dense end of a network, all passes of it, as one autograd node.

Linear, ReLU and Dropout layers in a row: forward and backward are written out, so that a small network pays
for its arithmetic and not for bookkeeping, and a large one writes its masks over its activations instead of
beside them. Second derivatives are left to autograd, on a second run with the same masks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha import _kernels as masks
from bbalpha._kernels import Noise, Passes
from bbalpha._torch import apply_function
from bbalpha.layers import Dropout


@dataclass(frozen=True)
class Block:
    """relu, then dropout at `rate`, then a linear layer; any of them may be missing."""

    relu: bool
    rate: float
    linear: nn.Linear | None


def blocks(layers: Sequence[Any]) -> tuple[Block, ...] | None:
    """`layers` as blocks, if they are only Linear, ReLU and Dropout, and the first dropout comes first.

    >>> [b.rate for b in blocks([nn.ReLU(), nn.Dropout(0.5), nn.Linear(3, 2), nn.ReLU()])]
    [0.5, 0.0]
    """
    found: list[Block] = []
    relu, rate = False, 0.0
    for layer in layers:
        if type(layer) is nn.Linear:
            found.append(Block(relu, rate, layer))
            relu, rate = False, 0.0
        elif type(layer) is nn.ReLU and not rate:
            relu = True
        elif type(layer) in (nn.Dropout, Dropout) and not rate and 0 <= layer.p < 1:
            rate = layer.p
        else:
            return None
    if relu or rate:
        found.append(Block(relu, rate, None))
    return tuple(found) if found and found[0].rate else None


def run(
    parts: Sequence[Block], x: Tensor, passes: Passes, *, shared: bool, again: Callable[[Tensor], Tensor]
) -> Tensor:
    """Outputs of all passes of `parts` on `x` (N, D): (K * N, C).

    Args:
        parts: From `blocks`.
        x: Inputs of the first of them.
        passes: Where the masks come from.
        shared: One mask for all rows of a pass.
        again: x -> the same outputs by ordinary operators, for second derivatives.
    """
    parameters = [p for b in parts if b.linear is not None for p in (b.linear.weight, b.linear.bias)]
    if not torch.is_grad_enabled() or not (
        x.requires_grad or any(p is not None and p.requires_grad for p in parameters)
    ):
        with torch.no_grad():
            return _forward(parts, x, passes, shared)[0]
    return apply_function(_Dense, parts, passes, shared, again, x, *parameters)


def _forward(
    parts: Sequence[Block], x: Tensor, passes: Passes, shared: bool
) -> tuple[Tensor, list[Tensor], list[Noise | None]]:
    """The output, what entered each linear layer, and the noise in front of it where a backward needs it."""
    entered: list[Tensor] = []
    kept: list[Noise | None] = []
    K, N = passes.count, x.shape[0]
    h = x
    for b, noise in zip(parts, _noises(parts, passes, x, 1 if shared else N), strict=True):
        if noise is None:
            h = h.relu_() if b.relu else h
        elif not entered:
            h = masks.select(h.relu() if b.relu else h, *noise.apart).view(K * N, -1)
        else:  # fresh from a product: the mask is written over it
            rows = h.view(K, N, -1)
            masks.select(rows, *noise.apart, out=rows)
            h = h.relu_() if b.relu else h
        kept.append(noise)
        entered.append(h)
        if b.linear is not None:
            weight, bias = b.linear.weight, b.linear.bias
            h = h @ weight.t() if bias is None else torch.addmm(bias, h, weight.t())
    return h, entered, kept


def _noises(parts: Sequence[Block], passes: Passes, x: Tensor, rows: int) -> Iterator[Noise | None]:
    """The noise of each block: drawn in one go where it is little, block by block where it is much."""
    sites = []
    width = x.shape[1]
    for b in parts:
        if b.rate:
            sites.append(((rows, width), b.rate))
        width = b.linear.out_features if b.linear is not None else width
    little = passes.count * sum(n * d for (n, d), _ in sites) <= _LITTLE
    drawn = iter(passes.factors(sites, x.dtype)) if little else (passes.noise(*site) for site in sites)
    for b in parts:
        yield next(drawn) if b.rate else None


_LITTLE = 2**15  # units


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: Sequence[Block], passes: Passes, shared: bool, again: Any, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        out, entered, kept = _forward(parts, x, passes, shared)
        ctx.parts, ctx.again, ctx.size = parts, again, (passes.count, x.shape[0])
        ctx.scales = [1.0 if noise is None else noise.scale for noise in kept]
        ctx.thresholds = [None if noise is None else noise.threshold for noise in kept]
        # behind a relu the sign of what entered tells what was kept
        values = [None if noise is None or b.relu else noise.values for b, noise in zip(parts, kept, strict=True)]
        ctx.save_for_backward(x, *parameters, *entered, *values)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        n = len(ctx.parts)
        x, *saved = ctx.saved_tensors
        parameters, entered, values = saved[: -2 * n], saved[-2 * n : -n], saved[-n:]
        if torch.is_grad_enabled():
            return None, None, None, None, *_differentiable(ctx.again, x, parameters, grad)
        needs_x, *needs = ctx.needs_input_grad[4:]
        grads: list[Tensor | None] = []
        before = len(needs)  # parameters of the layers that are still to come
        g, fresh = grad, False
        for i in reversed(range(n)):
            linear = ctx.parts[i].linear
            if linear is not None:
                before -= 2
                weight, bias = needs[before : before + 2]
                grads[:0] = [g.t() @ entered[i] if weight else None, g.sum(0) if bias else None]
                if not needs_x and not any(needs[:before]):
                    return None, None, None, None, None, *[None] * before, *grads
                g, fresh = g @ linear.weight, True
            g = _through(ctx, i, g, entered[i], values[i], fresh)
        return None, None, None, None, g.view(*ctx.size, -1).sum(0), *grads


def _through(ctx: Any, i: int, g: Tensor, entered: Tensor, values: Tensor | None, fresh: bool) -> Tensor:
    """The gradient before the relu and the dropout of block i."""
    scale = ctx.scales[i]
    if ctx.parts[i].relu:  # positive exactly where the relu was open and the unit was kept
        return masks.select(g, entered, 0, scale, out=g if fresh else None)
    if values is None:
        return g
    rows = g.view(*ctx.size, -1)
    return masks.select(rows, values, ctx.thresholds[i], scale, out=rows if fresh else None).view(g.shape)


def _differentiable(again: Any, x: Tensor, parameters: list[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    """The gradient as something autograd can differentiate."""
    inputs: list[Tensor | None] = [x, *parameters]
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(again(x), wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]
