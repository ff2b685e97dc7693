"""Shared masks of nn.Sequential: a unit that is dropped is dropped for the whole batch, and left out of the products.

Its row of one weight and its column of the next are left out: at dropout 0.5 a quarter of the work remains, forward
and backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha import _kernels as kernels
from bbalpha._engine import kinds
from bbalpha._kernels import Passes

# multiply-adds of one pass of a layer from which leaving units out is worth the gathering
_WORTH_IT = 2**23


class Gathering:
    """Runs of layers in which weights follow on dropout, pass by pass on the units that are kept.

    Args:
        layers: A chain of `chains.find`.
        passes: Where the masks come from.
        rows: N.
    """

    def __init__(self, layers: Sequence[Any], passes: Passes, rows: int) -> None:
        self.layers, self.passes, self.rows = layers, passes, rows

    def worth(self, h: Tensor, i: int) -> bool:
        """Whether the dropout at `i`, or behind a relu there, feeds weights large enough to leave units out of them."""
        if type(self.layers[i]) is nn.ReLU:
            i += 1
        positions = h[0, 0].numel() if h.ndim > 2 else 1
        while self.feeds_weights(i):
            if positions * self.rows * self.layers[i + 1].weight.numel() >= _WORTH_IT:
                return True
            i = self._next_dropout(i + 1)
        return False

    def run(self, i: int, batches: Sequence[Tensor]) -> tuple[Tensor, int]:
        """Run from the dropout at `i` as far as weights follow on dropout: the passes in one batch, next layer."""
        kept, scales = self._kept(i, batches[0].shape[1])
        batches = [b.index_select(1, k) for b, k in zip(batches, kept, strict=True)]
        while True:
            weights, end = self.layers[i + 1], self._next_dropout(i + 1)
            wanted, next_scales = self._kept(end, weights.weight.shape[0]) if self.feeds_weights(end) else (None, [])
            first = i + 2
            if isinstance(weights, nn.Linear):
                relu = type(self.layers[first]) is nn.ReLU if first < end else False
                batches = _Linear.apply(weights.weight, weights.bias, scales, relu, kept, wanted, *batches)
                first += relu
            else:
                batches = _convolution(weights, batches, kept, wanted, scales)
            for layer in self.layers[first:end]:
                batches = [b.relu() if type(layer) is nn.ReLU else layer(b) for b in batches]
            if wanted is None:
                return torch.cat(batches), end  # type: ignore[arg-type]
            i, kept, scales = end, wanted, next_scales

    def feeds_weights(self, i: int) -> bool:
        """Whether a dropout at `i` stands directly before weights whose inputs are the units it drops."""
        if i + 1 >= len(self.layers) or type(self.layers[i]) not in kinds.DROPOUT or not 0 < self.layers[i].p < 1:
            return False
        then = self.layers[i + 1]
        if type(self.layers[i]) in kinds.UNIT_DROPOUT:
            return type(then) is nn.Linear
        return type(then) in kinds.CONVOLUTIONS and then.groups == 1 and then.padding_mode == "zeros"

    def _kept(self, i: int, units: int) -> tuple[list[Tensor], list[float]]:
        """The units that the dropout at `i` keeps, and the scale of what is kept, pass by pass.

        Where a pass keeps none, unit 0 stands in with a scale of 0: not every kernel takes empty operands.
        """
        noise = self.passes.noise((units,), self.layers[i].p)
        kept = [k.nonzero().squeeze(1) for k in noise.keep()]
        scales = [noise.scale if len(k) else 0.0 for k in kept]
        return [k if len(k) else k.new_zeros(1) for k in kept], scales

    def _next_dropout(self, i: int) -> int:
        """The next layer after the weights at `i` that is not computed unit by unit."""
        linear = isinstance(self.layers[i], nn.Linear)
        alone = kinds.ELEMENTWISE if linear else (*kinds.ELEMENTWISE, *kinds.CHANNELWISE)
        i += 1
        while i < len(self.layers) and type(self.layers[i]) in alone:
            i += 1
        return i


def _gather(weight: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
    return (weight if rows is None else weight.index_select(0, rows)).index_select(1, columns)


class _Linear(torch.autograd.Function):
    """relu?(x_k W[rows_k, columns_k]^T * scale_k + b[rows_k]) for every pass k, and its gradients.

    Autograd of the same operators makes a gradient of the size of W for every pass: a training step takes 1.18 times.
    """

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
            g = kernels.select(grad, saved[2 * K + k], 0, 1.0) if ctx.relu else grad
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
    layer: Any, batches: Sequence[Tensor], kept: list[Tensor], wanted: list[Tensor] | None, scales: list[float]
) -> list[Tensor]:
    convolve = {3: nn.functional.conv1d, 4: nn.functional.conv2d, 5: nn.functional.conv3d}[batches[0].ndim]
    out = []
    for k, x in enumerate(batches):
        rows = wanted[k] if wanted else None
        bias = layer.bias if rows is None or layer.bias is None else layer.bias.index_select(0, rows)
        weight = _gather(layer.weight, rows, kept[k]) * scales[k]
        out.append(convolve(x, weight, bias, layer.stride, layer.padding, layer.dilation))
    return out
