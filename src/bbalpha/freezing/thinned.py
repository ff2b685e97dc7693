"""A chain of plain layers, frozen: K thinned networks as one batched network.

What comes before the first dropout is computed once; from there on a tensor holds all passes (K, N, ...), and a dropout
is a product with a constant (K, 1, ...). Where the K thinned weights are together little larger than the one they are
cut from, dropped units are cut out of them: their rows of one weight, their columns of the next. Passes lose unequal
numbers of units, so all are padded to the one that loses least. Other weights are laid out once (`packing.py`).
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha._engine import chains, kinds
from bbalpha._kernels import Noise, Passes
from bbalpha._torch import is_hooked, is_scripted, transforms_active
from bbalpha.freezing.packing import Packs

_LARGER = 2.0  # times the weight are all cuts of it together, at most: from 3 on one row takes longer
_MUCH = 2**26  # multiply-adds of one pass of a layer from which leaving units out at every call pays
_WIDE = (torch.float32, torch.float64)  # which hold a scale as it is


class Thinned(nn.Module):
    """K thinned networks: x (N, ...) -> (K, N, ...).

    Args:
        layers: A chain of `chains.find`, at least one of them random; copied.
        x: Rows, at least one.
        n_passes: K.
        seed: Of the passes.
    """

    def __init__(self, layers: Sequence[nn.Module], x: Tensor, n_passes: int, seed: int) -> None:
        super().__init__()
        self.n_passes, self.axes = n_passes, (0,)
        whole, self._work = _masked(layers, x, n_passes, seed)
        self.layers = nn.ModuleList(_cut(whole, n_passes))
        first = next(i for i, layer in enumerate(self.layers) if isinstance(layer, (Mask, Pick)))
        self._before, self._after = tuple(self.layers[:first]), tuple(self.layers[first:])
        self._packs = Packs()
        self._work = 0 if any(isinstance(layer, Pick) for layer in self.layers) else self._work

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of all passes (K, N, ...)."""
        if self._leaves_out(x):
            return self._left_out(x)
        for layer in self._before:
            x = self._run(layer, x)
        for layer in self._after:
            x = self._run(layer, x) if isinstance(layer, _TAKE_PASSES) else _through(layer, x)
        return x

    def extra_repr(self) -> str:
        """The passes shown by print."""
        return f"n_passes={self.n_passes}"

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        """A layer on what it takes as it is."""
        if type(layer) is nn.Linear and not is_hooked(vars(layer)):
            return self._packs.linear(x, layer.weight, layer.bias)
        out: Tensor = layer(x)
        return out

    def _leaves_out(self, x: Tensor) -> bool:
        """Whether there are so many rows that units are better left out at every call; not while it is traced."""
        plain = not (torch.compiler.is_compiling() or is_scripted() or transforms_active())
        return plain and len(x) * self._work >= _MUCH

    def _left_out(self, x: Tensor) -> Tensor:
        """The same for many rows: dropped units are left out of large products, as the engine does it."""
        layers = [layer.layer if isinstance(layer, Mask) else layer for layer in self.layers]
        masks = [layer for layer in self.layers if isinstance(layer, Mask) and layer.layer.p < 1]
        outputs = chains.run(layers, x, _Given([m.noise for m in masks], 0, self.n_passes), shared=True)
        return torch.empty(0) if outputs is None else outputs


class Mask(nn.Module):
    """Dropout as a constant: (N, ...) or (K, N, ...) -> (K, N, ...).

    Attributes:
        layer: The dropout it stands for.
        values: What units are multiplied with (K, 1, ...); in half precision 0 or 1, and the scale comes after.
        scale: Of units that are kept.
    """

    values: Tensor

    def __init__(self, layer: Any, kept: Tensor, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self._scaled = dtype in _WIDE
        self.register_buffer("values", kept.to(dtype) * scale if self._scaled else kept.to(dtype))

    def forward(self, h: Tensor) -> Tensor:
        """All passes of `h`."""
        return h * self.values if self._scaled else h * self.values * self.scale

    @property
    def noise(self) -> Noise:
        """As the engine has it."""
        return Noise(self.values, None if self._scaled else 0, self.scale)


class Pick(nn.Module):
    """The units that each pass keeps: (N, D) or (K, N, D) -> (K, N, D'), padded with unit 0."""

    units: Tensor

    def __init__(self, units: Tensor) -> None:
        super().__init__()
        self.register_buffer("units", units)  # (K, D')

    def forward(self, h: Tensor) -> Tensor:
        """The kept units of all passes."""
        if h.ndim == 2:
            picked: Tensor = h.index_select(1, self.units.flatten()).unflatten(1, self.units.shape)
            return picked.transpose(0, 1)
        return h.gather(2, self.units.unsqueeze(1).expand(-1, h.shape[1], -1))


class CutLinear(nn.Module):
    """A linear layer with a weight for every pass: (K, N, D') -> (K, N, C')."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)  # (K, D', C')
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # (K, 1, C')

    def forward(self, h: Tensor) -> Tensor:
        """The products of all passes."""
        return h @ self.weight if self.bias is None else torch.baddbmm(self.bias, h, self.weight)


_TAKE_PASSES = (Mask, Pick, CutLinear, nn.Linear, nn.LayerNorm, *kinds.ELEMENTWISE)  # (K, N, ...) as it is


def _through(layer: nn.Module, h: Tensor) -> Tensor:
    """A layer that takes rows alone, on all passes."""
    out: Tensor = layer(h.flatten(0, 1)).unflatten(0, (len(h), -1))
    return out


# ------------------------------------------------------------------------------ masks


def _masked(layers: Sequence[Any], x: Tensor, n_passes: int, seed: int) -> tuple[list[nn.Module], int]:
    """Copies of the layers with masks for dropout, and the multiply-adds of one row in the largest that one feeds."""
    passes = Passes(seed, 0, n_passes, together=n_passes, device=x.device)
    parts: list[nn.Module] = []
    copies: dict[int, Any] = {}
    h, work = x[:1].detach().clone(), 0
    for layer in layers:
        twin: Any = copy.deepcopy(layer, copies).requires_grad_(False)  # the same copy where one stands twice
        if type(layer) in kinds.DROPOUT:
            parts += [_mask(twin, h, passes)] * (twin.p > 0)
            continue
        if hasattr(twin, "inplace"):
            twin.inplace = False
        if type(layer) is nn.Conv2d:
            twin.to(memory_format=torch.channels_last)  # one row is pooled in a quarter of the time
        if parts and isinstance(parts[-1], Mask) and type(layer) in (nn.Linear, *kinds.CONVOLUTIONS):
            work = max(work, twin.weight.numel() * (h[0, 0].numel() if h.ndim > 2 else 1))
        parts.append(twin)
        with torch.no_grad():
            h = twin(h)
    return parts, work


def _mask(layer: Any, h: Tensor, passes: Passes) -> Mask:
    """The constant of a dropout on `h` (1, ...), drawn as the engine draws it."""
    shape = [1, *h.shape[1:]]
    if type(layer) in kinds.CHANNEL_DROPOUT:
        shape[2:] = [1] * (len(shape) - 2)
    return Mask(layer, *chains.kept_units(passes, shape, layer.p), h.dtype)


class _Given(Passes):
    """Passes whose noise is given, for the engine to ask for in order."""

    def __init__(self, noises: Sequence[Noise], first: int, count: int) -> None:
        super().__init__(0, first, count)
        self.given, self.left = noises, iter(noises)

    def noise(self, shape: Sequence[int], rate: float) -> Noise:
        """The next one, of these passes."""
        values, threshold, scale = next(self.left).apart
        return Noise(values[self.first : self.first + self.count].reshape(-1, *shape), threshold, scale)

    def noises(self, sites: Sequence[tuple[Sequence[int], float]], factors: torch.dtype | None = None) -> list[Noise]:
        """The next of each site."""
        return [self.noise(*site) for site in sites]

    def part(self, start: int, count: int) -> "_Given":
        """At most `count` of these passes."""
        return _Given(self.given, self.first + start, min(count, self.count - start))


# ------------------------------------------------------------------------------ cutting


def _cut(parts: list[Any], n_passes: int) -> list[nn.Module]:
    """The layers, with dropped units cut out wherever linear layers follow on dropout and it pays."""
    out: list[nn.Module] = []
    i = 0
    while i < len(parts):
        end = i
        while _feeds_linear(parts, end):  # mask, linear, units one at a time; mask, linear, ...
            end += 2
            while end < len(parts) and type(parts[end]) in kinds.ELEMENTWISE:
                end += 1
        run = parts[i:end]
        out += (_cut_run(run, n_passes) or run) if run else parts[i : i + 1]
        i = max(end, i + 1)
    return out


def _feeds_linear(parts: list[Any], i: int) -> bool:
    """Whether a dropout of the units of a table at `i` stands directly before a linear layer."""
    fits = i + 1 < len(parts) and isinstance(parts[i], Mask) and type(parts[i + 1]) is nn.Linear
    return fits and type(parts[i].layer) in kinds.UNIT_DROPOUT and parts[i].values.ndim == 3


def _cut_run(run: list[Any], n_passes: int) -> list[nn.Module] | None:
    """The run with units cut out; None if that makes the weights too large."""
    masks = [layer for layer in run if isinstance(layer, Mask)]
    linears = [layer for layer in run if type(layer) is nn.Linear]
    kept = [_kept(m(torch.ones_like(m.values))[:, 0]) for m in masks]  # (K, D') units, and what they are multiplied by
    widths = [*(units.shape[1] for units, _ in kept), linears[-1].out_features]
    size = n_passes * sum(a * b for a, b in pairwise(widths))
    if size > _LARGER * sum(linear.weight.numel() for linear in linears):
        return None
    out: list[nn.Module] = [Pick(kept[0][0])]
    at = 0
    for layer in run:
        if type(layer) is nn.Linear:
            units, factors = kept[at]
            rows = kept[at + 1][0] if at + 1 < len(kept) else None
            out.append(_cut_linear(layer, units, factors, rows))
            at += 1
        elif not isinstance(layer, Mask):
            out.append(layer)
    return out


def _kept(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of values (K, D), the places of those that are not 0, padded to the most of any pass, and the values there."""
    most = max(1, int((values > 0).sum(1).max()))
    units = (values > 0).to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :most]
    return units, values.gather(1, units)


def _cut_linear(linear: nn.Linear, units: Tensor, factors: Tensor, rows: Tensor | None) -> CutLinear:
    """A linear layer with the columns `units` (K, D') times `factors`, and the rows `rows` (K, C') of its weight."""
    weight = torch.stack([linear.weight.detach()[:, columns] for columns in units]) * factors.unsqueeze(1)
    bias = None if linear.bias is None else linear.bias.detach().expand(len(units), -1)
    if rows is not None:
        weight = torch.stack([w[r] for w, r in zip(weight, rows, strict=True)])
        bias = None if bias is None else bias.gather(1, rows)
    return CutLinear(weight.mT.contiguous(), None if bias is None else bias.unsqueeze(1).contiguous())
