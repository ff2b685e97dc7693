"""The fast path for nn.Sequential: passes stacked in one batch, kernels fused.

`find` recognises a chain of plain layers. `run` computes what comes before the first dropout once, then carries all
passes in one batch. With shared masks large layers are left to `gathering`.

A chain that ends in Linear, ReLU and Dropout alone is one autograd node from its first dropout on: forward and backward
are written out, so that a small network pays for its arithmetic and not for bookkeeping (a step takes 0.7 of what a
node a layer takes), and a large one writes its masks over its activations instead of beside them. Second derivatives
are left to autograd, on a second run with the same masks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha import _kernels as kernels
from bbalpha._engine import kinds
from bbalpha._engine.gathering import Gathering
from bbalpha._kernels import Noise, Passes
from bbalpha._torch import apply_function, has_global_hooks, is_hooked, transforms_active

Layers = Sequence[Any]  # nn.Modules, whose attributes are read

_NEAR_CACHE = 2**21  # units of one layer, all passes that are stacked together
_LITTLE = 2**15  # units whose noise is drawn in one go, all layers together


def find(model: nn.Module) -> tuple[nn.Module, ...] | None:
    """The layers of `model` in the order they run, if it is a chain that `run` can run; None otherwise.

    >>> len(find(nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Dropout(0.1)))))
    3
    >>> find(nn.LSTM(4, 8)) is None
    True
    """
    if is_hooked(model.__dict__) or has_global_hooks():
        return None
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        parts = [find(child) for child in model]  # with repeats: one layer may stand in two places
        return None if any(p is None for p in parts) else tuple(layer for p in parts if p for layer in p)
    if type(model) in (*kinds.UNIT_DROPOUT, *kinds.CHANNEL_DROPOUT, nn.ReLU):
        return (model,)  # run by kernels of ours, in place or not
    fits = type(model) in kinds.ROWWISE and not getattr(model, "inplace", False)
    plain = getattr(model, "start_dim", 1) == 1 and not getattr(model, "return_indices", False)
    return (model,) if fits and plain else None


def without(layers: Layers, off: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """`layers` without those that are off: dropout that is off is no layer at all.

    >>> net = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 8))
    >>> without(net, [net[0]])
    (Linear(in_features=4, out_features=8, bias=True),)
    """
    gone = {id(m) for m in off}
    return tuple(layer for layer in layers if id(layer) not in gone)


def is_dense(layers: Layers, x: Tensor) -> bool:
    """Whether `layers` are a plain network for a table `x` (N, D), of which everything is known without trying."""
    rates = [layer.p for layer in layers if type(layer) in kinds.DROPOUT]
    plain = all(type(layer) in (nn.Linear, *kinds.ELEMENTWISE, *kinds.UNIT_DROPOUT) for layer in layers)
    return plain and x.ndim == 2 and len(x) > 0 and x.is_floating_point() and any(rates) and max(rates) < 1


def run(layers: Layers, x: Tensor, passes: Passes, *, shared: bool) -> Tensor | None:
    """Outputs of all passes on `x` (N, ...): (K, N, ...), or None if no layer is random."""
    first = next((i for i, layer in enumerate(layers) if _drops(layer)), None)
    if first is None:
        return None
    if first and type(layers[first - 1]) is nn.ReLU:
        first -= 1  # to be fused
    for layer in layers[:first]:
        x = _apply(layer, x)
    random, x = layers[first:], x.contiguous()
    if torch.is_grad_enabled():
        return _run(random, x, passes, shared)
    step = _passes_at_once(random, x, passes.count)
    if step >= passes.count:
        return _run(random, x, passes, shared)
    outputs = [_run(random, x, passes.part(k, step), shared) for k in range(0, passes.count, step)]
    return torch.cat(outputs)


def _run(layers: Layers, x: Tensor, passes: Passes, shared: bool) -> Tensor:
    """Outputs of the passes from the first dropout on, by whatever fits best: (K, N, ...)."""
    chain = _Chain(layers, passes, x.shape[0], shared)
    if x.ndim != 2 or not chain.may_be_ours(x) or (chain.gathering is not None and chain.gathering.worth(x, 0)):
        return chain.run(x)
    parts = blocks(layers)
    if parts is None:
        return chain.run(x)

    def again(x: Tensor) -> Tensor:
        return _Chain(layers, passes.part(0, passes.count), x.shape[0], shared, plain=True).run(x).flatten(0, 1)

    return run_dense(parts, x, passes, shared=shared, again=again).view(passes.count, x.shape[0], -1)


def _passes_at_once(layers: Layers, x: Tensor, passes: int) -> int:
    """How many passes to stack where nothing is kept for a backward: what stays near the cache."""
    if passes * x.numel() <= _NEAR_CACHE // 128:  # little, whatever the widths
        return passes
    widths = [layer.weight.shape[0] for layer in layers if isinstance(layer, nn.Linear)]
    return max(1, _NEAR_CACHE // max(1, x.shape[0] * max([*widths, x[:1].numel()])))


def kept_units(passes: Passes, shape: Sequence[int], rate: float) -> tuple[Tensor, float]:
    """Which units of the next dropout each pass keeps (K, *shape), and what these are multiplied with.

    >>> kept, scale = kept_units(Passes(0, 0, 4, together=4), (1, 100), 0.5)
    >>> kept.shape, int(kept.sum(0).min()), scale            # every unit is kept in two of four
    (torch.Size([4, 1, 100]), 2, 2.0)
    """
    if not 0 < rate < 1:  # draws nothing
        return torch.full((passes.count, *shape), rate < 1, device=passes.device), 1.0
    noise = passes.noise(shape, rate)
    return noise.keep(), noise.scale


# ------------------------------------------------------------------------------ layer by layer


class _Chain:
    """The state of one run: whether the batch has been stacked, and the passes that are drawn from."""

    def __init__(self, layers: Layers, passes: Passes, rows: int, shared: bool, plain: bool = False) -> None:
        self.layers = layers
        self.passes = passes
        self.rows = rows
        self.shared = shared
        self.plain = plain  # differentiable twice: nothing overwritten, nothing left out
        self.gathering = Gathering(layers, passes, rows) if shared else None
        self.stacked = False

    def run(self, x: Tensor) -> Tensor:
        """Outputs of the passes on `x`, from a layer at the first dropout on: (K, N, ...)."""
        h, i = x, 0
        while i < len(self.layers):
            layer = self.layers[i]
            if _drops(layer):
                if self.gathering is not None and self.may_be_ours(h) and self.gathering.worth(h, i):
                    batches = self._split(h).unbind(0) if self.stacked else [h] * self.passes.count
                    self.stacked = True
                    h, i = self.gathering.run(i, batches)
                    continue
                h = self.dropped(h, layer)
            elif type(layer) is nn.ReLU and self._fuses(i):
                ours = i > 0 and type(self.layers[i - 1]) in (nn.Linear, *kinds.CONVOLUTIONS)
                i += 1
                h = self.relu_dropped(h, self.layers[i], overwrite=ours)
            else:
                h = _apply(layer, h)
            i += 1
        return h.view(self.passes.count, self.rows, *h.shape[1:])

    def _fuses(self, i: int) -> bool:
        """Whether the relu at `i` is followed by a dropout of units that shares a kernel with it."""
        if i + 1 >= len(self.layers) or (self.gathering is not None and self.gathering.feeds_weights(i + 1)):
            return False
        then = self.layers[i + 1]
        return type(then) in kinds.UNIT_DROPOUT and 0 < then.p < 1

    def dropped(self, h: Tensor, layer: Any) -> Tensor:
        """Dropout of h, stacked or not yet: (K * N, ...)."""
        rows = self._split(h)
        if layer.p == 1:
            return rows.expand(self.passes.count, *rows.shape[-h.ndim :]).flatten(0, 1) * 0.0
        return kernels.dropout(rows, self._noise(rows.shape[-h.ndim :], layer)).flatten(0, 1)

    def relu_dropped(self, h: Tensor, layer: Any, *, overwrite: bool) -> Tensor:
        """Dropout of relu(h), over h itself if nobody else needs it: (K * N, ...)."""
        overwrite = overwrite and self.stacked and not self.shared and self.may_be_ours(h)
        rows = self._split(h)
        noise = self._noise(rows.shape[-h.ndim :], layer)
        if overwrite:  # stay with h: in-place on a view costs autograd dear
            noise = replace(noise, values=noise.values.flatten(0, 1))
            return kernels.relu_dropout(h, noise, overwrite=True)
        return kernels.relu_dropout(rows, noise).flatten(0, 1)

    def _noise(self, shape: torch.Size, layer: Any) -> Noise:
        drawn = list(shape)
        if type(layer) in kinds.CHANNEL_DROPOUT:
            drawn[2:] = [1] * (len(shape) - 2)
        if self.shared:
            drawn[0] = 1
        return self.passes.noise(drawn, layer.p)

    def _split(self, h: Tensor) -> Tensor:
        """(K, N, ...) of what is stacked; from here on everything is."""
        stacked, self.stacked = self.stacked, True
        return h.view(self.passes.count, self.rows, *h.shape[1:]) if stacked else h

    def may_be_ours(self, h: Tensor) -> bool:
        """Whether kernels with a backward of our own may be used."""
        return not (self.plain or torch.is_autocast_enabled(h.device.type) or transforms_active())


def _apply(layer: Any, h: Tensor) -> Tensor:
    if type(layer) is nn.ReLU:
        return h.relu()  # never in place: h may be the caller's
    out: Tensor = h if type(layer) in kinds.DROPOUT else layer(h)
    return out


def _drops(layer: Any) -> bool:
    return type(layer) in kinds.DROPOUT and layer.p > 0


# ------------------------------------------------------------------------------ Linear, ReLU and Dropout as one node


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
        elif type(layer) in kinds.UNIT_DROPOUT and not rate and 0 <= layer.p < 1:
            rate = layer.p
        else:
            return None
    if relu or rate:
        found.append(Block(relu, rate, None))
    return tuple(found) if found and found[0].rate else None


def run_dense(
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
            h = kernels.select(h.relu() if b.relu else h, *noise.apart).view(K * N, -1)
        else:  # fresh from a product: the mask is written over it
            rows = h.view(K, N, -1)
            kernels.select(rows, *noise.apart, out=rows)
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
    drawn = iter(passes.noises(sites, x.dtype)) if little else (passes.noise(*site) for site in sites)
    for b in parts:
        yield next(drawn) if b.rate else None


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
        return kernels.select(g, entered, 0, scale, out=g if fresh else None)
    if values is None:
        return g
    rows = g.view(*ctx.size, -1)
    return kernels.select(rows, values, ctx.thresholds[i], scale, out=rows if fresh else None).view(g.shape)


def _differentiable(again: Any, x: Tensor, parameters: list[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    """The gradient as something autograd can differentiate."""
    inputs: list[Tensor | None] = [x, *parameters]
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(again(x), wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]
