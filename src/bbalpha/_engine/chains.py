"""The fast path for nn.Sequential: passes stacked in one batch, kernels fused, dropped units left out.

`find` recognises a chain of plain layers. `run` computes what comes before the first dropout once, then
carries all passes in one batch, relu and dropout in one kernel. With shared masks a unit that is dropped is
dropped for the whole batch, so its row of one weight and its column of the next are left out of the products:
at dropout 0.5 a quarter of the work remains, forward and backward.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import _has_any_global_hook

from bbalpha import _kernels as masks
from bbalpha import layers as own
from bbalpha._engine import dense
from bbalpha._kernels import Passes

Layers = Sequence[Any]  # nn.Modules, whose attributes are read

# one unit at a time, so they may run on the kept units alone
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Identity,
)  # fmt: skip
# one channel at a time
_CHANNELWISE = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
# one row at a time
_ROWWISE = (
    *_ELEMENTWISE, *_CHANNELWISE, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Flatten, nn.LayerNorm, nn.GroupNorm,
)  # fmt: skip
_UNIT_DROPOUT = (nn.Dropout, own.Dropout)
_CHANNEL_DROPOUT = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

_WEIGHTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

_NEAR_CACHE = 2**21  # units of one layer, all passes that are stacked together
# multiply-adds of one pass of a layer from which leaving units out is worth the gathering
_WORTH_GATHERING = 2**23


def find(model: nn.Module) -> tuple[nn.Module, ...] | None:
    """The layers of `model` in the order they run, if it is a chain that `run` can run; None otherwise.

    >>> len(find(nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Dropout(0.1)))))
    3
    >>> find(nn.LSTM(4, 8)) is None
    True
    """
    if hooked(model.__dict__) or _has_any_global_hook():
        return None
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        parts = [find(child) for child in model]  # with repeats: one layer may stand in two places
        return None if any(p is None for p in parts) else tuple(layer for p in parts if p for layer in p)
    if type(model) in (*_UNIT_DROPOUT, *_CHANNEL_DROPOUT, nn.ReLU):
        return (model,)  # run by kernels of ours, in place or not
    fits = type(model) in _ROWWISE and not getattr(model, "inplace", False)
    plain = getattr(model, "start_dim", 1) == 1 and not getattr(model, "return_indices", False)
    return (model,) if fits and plain else None


def is_dense(layers: Layers, x: Tensor) -> bool:
    """Whether `layers` are a plain network for a table `x` (N, D), of which everything is known without trying."""
    rates = [layer.p for layer in layers if isinstance(layer, _DropoutNd)]
    plain = all(type(layer) in (nn.Linear, *_ELEMENTWISE, *_UNIT_DROPOUT) for layer in layers)
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
    if x.ndim != 2 or not chain.may_be_ours(x) or (shared and chain.worth_gathering(x)):
        return chain.run(x)
    parts = dense.blocks(layers)
    if parts is None:
        return chain.run(x)

    def again(x: Tensor) -> Tensor:
        return _Chain(layers, passes.part(0, passes.count), x.shape[0], shared, plain=True).run(x).flatten(0, 1)

    return dense.run(parts, x, passes, shared=shared, again=again).view(passes.count, x.shape[0], -1)


def _passes_at_once(layers: Layers, x: Tensor, passes: int) -> int:
    """How many passes to stack where nothing is kept for a backward: what stays near the cache."""
    if passes * x.numel() <= _NEAR_CACHE // 128:  # little, whatever the widths
        return passes
    widths = [layer.weight.shape[0] for layer in layers if isinstance(layer, nn.Linear)]
    return max(1, _NEAR_CACHE // max(1, x.shape[0] * max([*widths, x[:1].numel()])))


class _Chain:
    """The state of one run: whether the batch has been stacked, and the passes that are drawn from."""

    def __init__(self, layers: Layers, passes: Passes, rows: int, shared: bool, plain: bool = False) -> None:
        self.layers = layers
        self.passes = passes
        self.rows = rows
        self.shared = shared
        self.plain = plain  # differentiable twice: nothing overwritten, nothing left out
        self.stacked = False

    def run(self, x: Tensor) -> Tensor:
        """Outputs of the passes on `x`, from a layer at the first dropout on: (K, N, ...)."""
        h, i = x, 0
        while i < len(self.layers):
            layer = self.layers[i]
            if _drops(layer):
                if self.shared and self.worth_gathering(h, i):
                    h, i = self.gathered(i, h)
                    continue
                h = self.dropped(h, layer)
            elif type(layer) is nn.ReLU and self._fuses(i):
                ours = i > 0 and type(self.layers[i - 1]) in _WEIGHTS
                weights_follow = i + 2 < len(self.layers) and type(self.layers[i + 2]) is nn.Linear
                h = self.relu_dropped(h, self.layers[i + 1], overwrite=ours, own_gradient=weights_follow)
                i += 1
            else:
                h = _apply(layer, h)
            i += 1
        return h.view(self.passes.count, self.rows, *h.shape[1:])

    def _fuses(self, i: int) -> bool:
        """Whether the relu at `i` is followed by a dropout of units that shares a kernel with it."""
        if i + 1 >= len(self.layers) or (self.shared and self._feeds_weights(i + 1)):
            return False
        then = self.layers[i + 1]
        return type(then) in _UNIT_DROPOUT and 0 < then.p < 1

    def dropped(self, h: Tensor, layer: Any) -> Tensor:
        """Dropout of h, stacked or not yet: (K * N, ...)."""
        rows = self._split(h)
        if layer.p == 1:
            return rows.expand(self.passes.count, *rows.shape[-h.ndim :]).flatten(0, 1) * 0.0
        return masks.dropout(rows, self._noise(rows.shape[-h.ndim :], layer)).flatten(0, 1)

    def relu_dropped(self, h: Tensor, layer: Any, *, overwrite: bool, own_gradient: bool) -> Tensor:
        """Dropout of relu(h), over h itself if nobody else needs it: (K * N, ...)."""
        overwrite = overwrite and self.stacked and self.may_be_ours(h)
        rows = self._split(h)
        noise = self._noise(rows.shape[-h.ndim :], layer)
        if not overwrite:
            return masks.relu_dropout(rows, noise).flatten(0, 1)
        if noise.values.shape == rows.shape:  # stay with h: in-place on a view costs autograd dear
            noise = replace(noise, values=noise.values.flatten(0, 1))
            return masks.relu_dropout_(h, noise, own_gradient=own_gradient)
        return masks.relu_dropout_(rows, noise, own_gradient=own_gradient).flatten(0, 1)

    def _split(self, h: Tensor) -> Tensor:
        """(K, N, ...) of what is stacked; from here on everything is."""
        stacked, self.stacked = self.stacked, True
        return h.view(self.passes.count, self.rows, *h.shape[1:]) if stacked else h

    def _noise(self, shape: torch.Size, layer: Any) -> masks.Noise:
        drawn = list(shape)
        if type(layer) in _CHANNEL_DROPOUT:
            drawn[2:] = [1] * (len(shape) - 2)
        if self.shared:
            drawn[0] = 1
        return self.passes.noise(drawn, layer.p)

    # ---- shared masks: dropped units are left out of the products

    def may_be_ours(self, h: Tensor) -> bool:
        """Whether kernels with a backward of our own may be used."""
        return not (
            self.plain or torch.is_autocast_enabled(h.device.type) or torch._C._are_functorch_transforms_active()
        )

    def worth_gathering(self, h: Tensor, i: int = 0) -> bool:
        """Whether the dropout at `i` feeds weights large enough to leave units out of them."""
        if type(self.layers[i]) is nn.ReLU:
            i += 1
        if not self._feeds_weights(i) or not self.may_be_ours(h):
            return False
        positions = h[0, 0].numel() if h.ndim > 2 else 1
        while self._feeds_weights(i):
            if positions * self.rows * self.layers[i + 1].weight.numel() >= _WORTH_GATHERING:
                return True
            i = self._next_dropout(i + 1)
        return False

    def gathered(self, i: int, h: Tensor) -> tuple[Tensor, int]:
        """Run from the dropout at `i` as far as weights follow on dropout: stacked output, next layer."""
        K = self.passes.count
        batches = list(h.unflatten(0, (K, self.rows)).unbind(0)) if self.stacked else [h] * K
        self.stacked = True
        kept, scales = self._kept(i, h.shape[1])
        batches = [b.index_select(1, k) for b, k in zip(batches, kept, strict=True)]
        while True:
            weights, end = self.layers[i + 1], self._next_dropout(i + 1)
            wanted, next_scales = self._kept(end, weights.weight.shape[0]) if self._feeds_weights(end) else (None, [])
            first = i + 2
            if isinstance(weights, nn.Linear):
                relu = type(self.layers[first]) is nn.ReLU if first < end else False
                batches = _linear(weights, batches, kept, wanted, scales, relu)
                first += relu
            else:
                batches = _convolution(weights, batches, kept, wanted, scales)
            for layer in self.layers[first:end]:
                batches = [b.relu() if type(layer) is nn.ReLU else layer(b) for b in batches]
            if wanted is None:
                return torch.cat(batches), end
            i, kept, scales = end, wanted, next_scales

    def _kept(self, i: int, units: int) -> tuple[list[Tensor], list[float]]:
        """The units that the dropout at `i` keeps, and the scale of what is kept, pass by pass.

        Where a pass keeps none, unit 0 stands in with a scale of 0: not every kernel takes empty operands.
        """
        noise = self.passes.noise((units,), self.layers[i].p)
        kept = [k.nonzero().squeeze(1) for k in noise.keep()]
        scales = [noise.scale if len(k) else 0.0 for k in kept]
        return [k if len(k) else k.new_zeros(1) for k in kept], scales

    def _feeds_weights(self, i: int) -> bool:
        """Whether a dropout at `i` stands directly before weights whose inputs are the units it drops."""
        if i + 1 >= len(self.layers) or not _drops(self.layers[i]) or self.layers[i].p == 1:
            return False
        then = self.layers[i + 1]
        if type(self.layers[i]) in _UNIT_DROPOUT:
            return type(then) is nn.Linear
        return isinstance(then, _ConvNd) and then.groups == 1 and then.padding_mode == "zeros"

    def _next_dropout(self, i: int) -> int:
        """The next layer after the weights at `i` that is not computed unit by unit."""
        alone = _ELEMENTWISE if isinstance(self.layers[i], nn.Linear) else (*_ELEMENTWISE, *_CHANNELWISE)
        i += 1
        while i < len(self.layers) and type(self.layers[i]) in alone:
            i += 1
        return i


# ------------------------------------------------------------------------------ products of kept units


def _linear(
    layer: nn.Linear,
    batches: list[Tensor],
    kept: list[Tensor],
    wanted: list[Tensor] | None,
    scales: list[float],
    relu: bool,
) -> list[Tensor]:
    return list(_GatheredLinear.apply(layer.weight, layer.bias, scales, relu, kept, wanted, *batches))


def _gather(weight: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
    return (weight if rows is None else weight.index_select(0, rows)).index_select(1, columns)


class _GatheredLinear(torch.autograd.Function):
    """relu?(x_k W[rows_k, columns_k]^T * scale_k + b[rows_k]) for every pass k, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        scales: list[float],
        relu: bool,
        columns: list[Tensor],
        rows: list[Tensor] | None,
        *batches: Tensor,
    ) -> tuple[Tensor, ...]:
        out, gathered = [], []
        for k, x in enumerate(batches):
            w = _gather(weight, rows[k] if rows else None, columns[k])
            gathered.append(w)
            if bias is None:
                y = (x @ w.t()).mul_(scales[k])
            else:
                y = torch.addmm(bias.index_select(0, rows[k]) if rows else bias, x, w.t(), alpha=scales[k])
            out.append(y.relu_() if relu else y)
        ctx.save_for_backward(weight, *batches, *gathered, *(out if relu else ()))
        ctx.biased, ctx.scales, ctx.relu, ctx.columns, ctx.rows = bias is not None, scales, relu, columns, rows
        return tuple(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weight, *saved = ctx.saved_tensors
        K = len(grads)
        width = weight.shape[1]
        grad_weight, grad_bias = torch.zeros_like(weight), weight.new_zeros(weight.shape[0])
        grad_batches: list[Tensor | None] = []
        for k, grad in enumerate(grads):
            x, rows, columns = saved[k], ctx.rows[k] if ctx.rows else None, ctx.columns[k]
            g = masks.select(grad, saved[2 * K + k], 0, 1.0) if ctx.relu else grad
            if ctx.needs_input_grad[0]:
                part = (g.t() @ x).mul_(ctx.scales[k])
                if rows is None:
                    grad_weight.index_add_(1, columns, part)
                else:
                    at = rows[:, None] * width + columns
                    grad_weight.view(-1).scatter_add_(0, at.view(-1), part.view(-1))
            if ctx.biased:
                grad_bias.index_add_(0, rows, g.sum(0)) if rows is not None else grad_bias.add_(g.sum(0))
            needs = ctx.needs_input_grad[6 + k]
            grad_batches.append((g @ saved[K + k]).mul_(ctx.scales[k]) if needs else None)
        return grad_weight, grad_bias if ctx.biased else None, None, None, None, None, *grad_batches


def _convolution(
    layer: _ConvNd, batches: list[Tensor], kept: list[Tensor], wanted: list[Tensor] | None, scales: list[float]
) -> list[Tensor]:
    convolve = {3: nn.functional.conv1d, 4: nn.functional.conv2d, 5: nn.functional.conv3d}[batches[0].ndim]
    out = []
    for k, x in enumerate(batches):
        rows = wanted[k] if wanted else None
        bias = layer.bias if rows is None or layer.bias is None else layer.bias.index_select(0, rows)
        weight = _gather(layer.weight, rows, kept[k]) * scales[k]
        out.append(convolve(x, weight, bias, layer.stride, layer.padding, layer.dilation))
    return out


# ------------------------------------------------------------------------------ helpers


def _apply(layer: Any, h: Tensor) -> Tensor:
    if type(layer) is nn.ReLU:
        return h.relu()  # never in place: h may be the caller's
    out: Tensor = h if isinstance(layer, _DropoutNd) else layer(h)
    return out


def _drops(layer: Any) -> bool:
    return isinstance(layer, _DropoutNd) and layer.p > 0


def hooked(own: dict[str, Any]) -> bool:
    """Whether somebody listens to the calls of a module with these attributes, or put a forward of his own in it."""
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    ) or ("forward" in own)
