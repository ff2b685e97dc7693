"""Random small models whose builder knows where the rows are, and an oracle that draws by that knowledge.

Every block is written once, over `draw`: with `ByTorch` it makes the calls people make (nn.Dropout, nn.LSTM,
scaled_dot_product_attention); with `ByHand` each site draws for itself, told which axis holds the rows. Sizes are
drawn so that they coincide: N with the classes, the time steps, the heads, and with parts and multiples of them.

    case = random_case(random.Random(3))
    case.oracle(seed=0, n_passes=4, shared=True)        # what sample(case.model, case.x, 4, ...) must give
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bbalpha
from bbalpha._kernels import Passes


@dataclass(frozen=True)
class Folded:
    """Axis 0 holds rows times `count` others; `rows_major`: all of one row stand together."""

    count: int
    rows_major: bool = True


Rows = int | Folded | tuple[int, int] | None  # None: no rows, such as a weight; two axes: rows against rows


# ------------------------------------------------------------------------------ who draws


class ByTorch:
    """The calls people make."""

    def dropout(self, site: nn.Module, x: Tensor, rows: Rows) -> Tensor:
        return site(x)

    def path(self, block: nn.Module, like: Tensor, shape: list[int], rows: Rows) -> Tensor:
        if not block.training:
            return like
        return like * like.new_empty(shape).bernoulli_(1 - block.p).div_(1 - block.p)

    def lstm(self, lstm: nn.LSTM, x: Tensor) -> Tensor:
        return lstm(x)[0]

    def mha(self, mha: nn.MultiheadAttention, x: Tensor, mask: Tensor | None, weights: bool) -> Tensor:
        return mha(x, x, x, attn_mask=mask, need_weights=weights)[0]

    def sdpa(self, block: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, block.p if block.training else 0.0)


class ByHand:
    """Pass k of K of `seed`, every site told its rows; `shared` draws 1 instead of N. No seed: nothing is drawn."""

    def __init__(self, seed: int | None, k: int, n: int, shared: bool, K: int = 0) -> None:
        self.passes = None if seed is None else Passes(seed, k, 1, together=K)
        self.n, self.shared = n, shared

    def where(self, shape: list[int], rows: Rows) -> tuple[list[int], Callable[[Tensor], Tensor]]:
        """The shape that is drawn, and how a draw covers `shape`."""
        if isinstance(rows, Folded):
            assert shape[0] == self.n * rows.count
            if not self.shared:
                return shape, lambda v: v
            if rows.rows_major:
                return [rows.count, *shape[1:]], lambda v: torch.cat([v] * self.n)
            return [rows.count, *shape[1:]], lambda v: v.repeat_interleave(self.n, 0)
        axes = () if rows is None else rows if isinstance(rows, tuple) else (rows,)
        assert all(shape[a] == self.n for a in axes)
        drawn = [1 if self.shared and a in axes else size for a, size in enumerate(shape)]
        return drawn, lambda v: v

    def keep(self, x: Tensor, p: float, rows: Rows, channels: bool = False) -> Tensor:
        if self.passes is None:
            return x
        shape = [*x.shape[:2], *[1] * (x.ndim - 2)] if channels else list(x.shape)
        drawn, cover = self.where(shape, rows)
        noise = self.passes.noise(drawn, p)
        return x * cover(noise.keep()[0]) * noise.scale

    def dropout(self, site: nn.Module, x: Tensor, rows: Rows) -> Tensor:
        return self.keep(x, site.p, rows, channels=isinstance(site, (nn.Dropout1d, nn.Dropout2d)))

    def path(self, block: nn.Module, like: Tensor, shape: list[int], rows: Rows) -> Tensor:
        if self.passes is None:
            return like
        drawn, cover = self.where(shape, rows)
        return like * cover(self.passes.noise(drawn, block.p).keep()[0]) / (1 - block.p)

    def lstm(self, lstm: nn.LSTM, x: Tensor) -> Tensor:
        """Layer by layer, dropout between them."""
        state = x.new_zeros(1, x.shape[0 if lstm.batch_first else 1], lstm.hidden_size)
        for layer, weights in enumerate(lstm.all_weights):
            if layer:
                x = self.keep(x, lstm.dropout, 0 if lstm.batch_first else 1)
            x = torch.lstm(x, (state, state), weights, True, 1, 0.0, False, False, lstm.batch_first)[0]
        return x

    def mha(self, mha: nn.MultiheadAttention, x: Tensor, mask: Tensor | None, weights: bool) -> Tensor:
        """(N, T, D) or (T, N, D); the weights are (N heads, T, T) where they are asked for, else (N, heads, T, T)."""
        x = x if mha.batch_first else x.transpose(0, 1)
        parts = F.linear(x, mha.in_proj_weight, mha.in_proj_bias).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (mha.num_heads, -1)).transpose(1, 2) for t in parts)  # (N, heads, T, d)
        a = _weights(q, k, mask)
        if weights:
            a = self.keep(a.flatten(0, 1), mha.dropout, Folded(mha.num_heads)).view_as(a)
        else:
            a = self.keep(a, mha.dropout, 0)
        out = mha.out_proj((a @ v).transpose(1, 2).flatten(2))
        return out if mha.batch_first else out.transpose(0, 1)

    def sdpa(self, block: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.keep(_weights(q, k, mask), block.p, 0) @ v


def _weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores + mask).softmax(-1)


# ------------------------------------------------------------------------------ blocks: (N, T, D) or (T, N, D)


class Functional(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)


@dataclass(frozen=True)
class Sizes:
    n: int
    t: int
    d: int
    heads: int
    axis: int  # of the rows in what blocks are given


class Block(nn.Module):
    """A map of h that keeps its shape; `run(h, draw, side)`, where `side` is a (T, T) mask or None."""

    interacts = False  # rows look at each other
    two_axes = False  # a draw of rows against rows

    def __init__(self, rng: random.Random, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.p = rng.choice((0.5, 0.25, 0.3))
        self.drop = rng.choice((nn.Dropout, bbalpha.Dropout, Functional))(self.p)
        self.linear = nn.Linear(s.d, s.d)
        self.build(rng, s)

    def build(self, rng: random.Random, s: Sizes) -> None:
        """Further parameters."""

    def shape(self, *rows: int) -> list[int]:
        """(N, *rest), or with time first (rest[0], N, ...)."""
        n, *rest = rows
        return [n, *rest] if self.s.axis == 0 else [rest[0], n, *rest[1:]]


class Plain(Block):
    def run(self, h, draw, side):
        return draw.dropout(self.drop, torch.tanh(self.linear(h)), self.s.axis)


class Norm(Block):
    def build(self, rng, s):
        self.norm = nn.LayerNorm(s.d)

    def run(self, h, draw, side):
        return self.norm(h + draw.dropout(self.drop, self.linear(h), self.s.axis))


class FixedVector(Block):
    """Dropout of a vector that belongs to no row, as long as the batch or a multiple of it."""

    def build(self, rng, s):
        size = rng.choice((s.n, 2 * s.n, 3 * s.n, s.d, s.t, s.n * s.t, s.n * s.heads))
        self.vector, self.spread = nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(size, s.d))

    def run(self, h, draw, side):
        return h * (draw.dropout(self.drop, self.vector, None) @ self.spread)


class FixedMatrix(Block):
    """Weights dropped by hand."""

    def run(self, h, draw, side):
        return torch.tanh(F.linear(h, draw.dropout(self.drop, self.linear.weight, None), self.linear.bias))


class Positions(Block):
    """Dropout of learned positions (T, D) or (1, T, D)."""

    def build(self, rng, s):
        shape = rng.choice(([s.t, s.d], [1, s.t, s.d])) if s.axis == 0 else [s.t, 1, s.d]
        self.table = nn.Parameter(torch.randn(shape))

    def run(self, h, draw, side):
        return self.linear(h) * draw.dropout(self.drop, self.table, None)


class Transposed(Block):
    def run(self, h, draw, side):
        return draw.dropout(self.drop, self.linear(h).transpose(0, 1), 1 - self.s.axis).transpose(0, 1)


class Turned(Block):
    """Features first: (D, T, N)."""

    def run(self, h, draw, side):
        return draw.dropout(self.drop, self.linear(h).transpose(self.s.axis, 2), 2).transpose(self.s.axis, 2)


class Locked(Block):
    """One mask for all time steps, made of ones."""

    def run(self, h, draw, side):
        ones = h.new_ones(self.shape(h.shape[self.s.axis], 1, self.s.d))
        return self.linear(h) * draw.dropout(self.drop, ones, self.s.axis)


class Tokens(Block):
    """Rows and time in one axis, as reshape(-1, D) makes it."""

    def run(self, h, draw, side):
        flat = draw.dropout(self.drop, self.linear(h).flatten(0, 1), Folded(self.s.t, self.s.axis == 0))
        return torch.tanh(flat).view_as(h)


class Lstm(Block):
    def build(self, rng, s):
        self.lstm = nn.LSTM(s.d, s.d, rng.choice((2, 3)), dropout=self.p, batch_first=s.axis == 0)

    def run(self, h, draw, side):
        return h + draw.lstm(self.lstm, h)


class Attention(Block):
    """nn.MultiheadAttention."""

    def build(self, rng, s):
        self.mha = nn.MultiheadAttention(s.d, s.heads, dropout=self.p, batch_first=s.axis == 0)
        self.weights = rng.random() < 0.5

    def run(self, h, draw, side):
        return h + draw.mha(self.mha, h, side, self.weights)


class Fused(Block):
    """scaled_dot_product_attention on (N, heads, T, d)."""

    def run(self, h, draw, side):
        x = h if self.s.axis == 0 else h.transpose(0, 1)
        q = self.linear(x).unflatten(-1, (self.s.heads, -1)).transpose(1, 2)
        out = draw.sdpa(self, q, q, q, side).transpose(1, 2).flatten(2)
        return h + (out if self.s.axis == 0 else out.transpose(0, 1))


class FoldedHeads(Block):
    """Attention by hand with heads folded into the batch, in either order."""

    def build(self, rng, s):
        self.rows_major = rng.random() < 0.5

    def run(self, h, draw, side):
        x = h if self.s.axis == 0 else h.transpose(0, 1)
        q = self.linear(x).unflatten(-1, (self.s.heads, -1)).transpose(1, 2)  # (N, heads, T, d)
        order = q if self.rows_major else q.transpose(0, 1)
        flat = order.flatten(0, 1)
        a = draw.dropout(self.drop, _weights(flat, flat, side), Folded(self.s.heads, self.rows_major))
        out = (a @ flat).view_as(order)
        out = (out if self.rows_major else out.transpose(0, 1)).transpose(1, 2).flatten(2)
        return h + (out if self.s.axis == 0 else out.transpose(0, 1))


class Centred(Block):
    interacts = True

    def run(self, h, draw, side):
        h = draw.dropout(self.drop, self.linear(h), self.s.axis)
        return torch.tanh(self.linear(h - h.mean(self.s.axis, keepdim=True)))


class Peers(Block):
    """Rows attend to each other; dropout on what they hand over."""

    interacts = True

    def run(self, h, draw, side):
        pooled = h.mean(1 - self.s.axis)  # (N, D)
        out = _weights(pooled, pooled, None) @ draw.dropout(self.drop, self.linear(pooled), 0)
        return h + out.unsqueeze(1 - self.s.axis)


class PeersDropped(Block):
    """Rows attend to each other; dropout on the weights (N, N)."""

    interacts = two_axes = True

    def run(self, h, draw, side):
        pooled = h.mean(1 - self.s.axis)
        out = draw.dropout(self.drop, _weights(pooled, pooled, None), (0, 1)) @ self.linear(pooled)
        return h + out.unsqueeze(1 - self.s.axis)


class Path(Block):
    """Stochastic depth: whole branches are dropped, row by row."""

    def run(self, h, draw, side):
        branch = torch.tanh(self.linear(h))
        return h + draw.path(self, branch, self.shape(h.shape[self.s.axis], 1, 1), self.s.axis)


class Channels(Block):
    """Conv1d and nn.Dropout1d over (N, D, T)."""

    def build(self, rng, s):
        self.conv, self.channels = nn.Conv1d(s.d, s.d, 3, padding=1), nn.Dropout1d(self.p)

    def run(self, h, draw, side):
        x = (h if self.s.axis == 0 else h.transpose(0, 1)).transpose(1, 2)
        out = draw.dropout(self.channels, self.conv(x), 0).transpose(1, 2)
        return out if self.s.axis == 0 else out.transpose(0, 1)


BLOCKS = (
    Plain, Norm, FixedVector, FixedMatrix, Positions, Transposed, Turned, Locked, Tokens, Lstm, Attention, Fused,
    FoldedHeads, Centred, Peers, PeersDropped, Path, Channels,
)  # fmt: skip


# ------------------------------------------------------------------------------ whole models


class Net(nn.Module):
    """Blocks, and an output of (N, C), or of every time step."""

    def __init__(self, s: Sizes, blocks: list[Block], width: int, classes: int, out: str, front: nn.Module) -> None:
        super().__init__()
        self.s, self.out = s, out
        self.front, self.blocks, self.norm = front, nn.ModuleList(blocks), nn.BatchNorm1d(s.d)
        self.enter, self.head, self.side_drop = nn.Linear(width, s.d), nn.Linear(s.d, classes), nn.Dropout(0.5)
        self.register_buffer("scale", torch.rand(s.d) + 0.5)

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        return self.run(ByTorch(), x, side)

    def run(self, draw: Any, x: Tensor, side: Tensor | None = None) -> Tensor:
        """`side` is a mask (T, T), or prototypes (C, D) where the classes are told by them."""
        mask, prototypes = (None, side) if self.out == "prototypes" else (side, None)
        if isinstance(self.front, nn.Sequential):  # pictures (N, c, a, b) become (N, a b, D)
            conv, channels = self.front
            h = draw.dropout(channels, conv(x), 0).flatten(2).transpose(1, 2)
        else:
            h = torch.tanh(self.enter(x)) * self.scale
        for block in self.blocks:
            h = block.run(h, draw, mask)
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        if self.out == "tokens":
            return self.head(h)
        if self.out == "turned":
            return self.head(h).transpose(0, 1)
        pooled = h.mean(1 - self.s.axis)  # (N, D)
        if prototypes is None:
            return self.head(pooled)
        return pooled @ draw.dropout(self.side_drop, prototypes, None).T


@dataclass(frozen=True)
class Case:
    model: Net
    x: Any
    n: int
    batch_dim: int
    out_axis: int  # of the rows, in one pass
    class_axis: int  # in (K, N, ...)
    kinds: tuple[str, ...]

    @property
    def interacts(self) -> bool:
        return any(b.interacts for b in self.model.blocks)

    @property
    def two_axes(self) -> bool:
        return any(b.two_axes for b in self.model.blocks)

    @property
    def folds(self) -> bool:
        return any(isinstance(b, (FoldedHeads, Tokens)) for b in self.model.blocks)

    def arguments(self, rows: slice = slice(None)) -> dict[str, Tensor]:
        """What the model is called with, by name; `rows` of x."""
        given = self.x if isinstance(self.x, dict) else dict(zip(("x", "side"), _tuple(self.x), strict=False))
        return given | {"x": given["x"][(slice(None),) * self.batch_dim + (rows,)]}

    @torch.no_grad()
    def oracle(self, seed: int | None, n_passes: int, shared: bool, rows: slice = slice(None)) -> Tensor:
        """The passes one after the other (K, ...), in evaluation mode."""
        given = self.arguments(rows)
        n = given["x"].shape[self.batch_dim]
        return torch.stack([self.model.run(ByHand(seed, k, n, shared, n_passes), **given) for k in range(n_passes)])

    def rows_first(self, outputs: Tensor) -> Tensor:
        return outputs.movedim(1 + self.out_axis, 1)  # (K, N, ...)


def random_case(rng: random.Random) -> Case:
    """A model, its input and what is known of its rows; drawn again while nothing it drops reaches its output."""
    while True:
        case = _case(rng)
        passes = case.oracle(0, 3, False)
        if not torch.allclose(passes[0], passes[1], atol=1e-3) and not torch.allclose(passes[0], passes[2], atol=1e-3):
            return case


def _case(rng: random.Random) -> Case:
    torch.manual_seed(rng.randrange(2**31))
    n = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 12))
    axis = rng.choice((0, 0, 1)) if n > 1 else 0
    heads = rng.choice((1, 2, n if n < 5 else 2))
    d = heads * rng.choice((2, n if n < 5 else 3))
    d = d if d > 1 else 2
    picture = axis == 0 and rng.random() < 0.15
    t = 4 if picture else rng.choice((n, n, 2 * n if n < 5 else 3, rng.choice((1, 2, 3, 4, 5))))
    s = Sizes(n, t, d, heads, axis)
    few = [b for b in BLOCKS if n > 1 or not b.interacts]
    blocks = [rng.choice(few)(rng, s) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    width = rng.choice((2, n, t, d))
    classes = max(2, rng.choice((n, n, t, d, 3)))
    out = rng.choice(("rows", "rows", "prototypes", "tokens", "turned" if n > 1 else "tokens"))
    front = nn.Sequential(nn.Conv2d(width, d, 1), nn.Dropout2d(0.5)) if picture else nn.Identity()
    model = Net(s, blocks, width, classes, out, front).eval()
    x: Any = torch.randn([n, width, 2, 2] if picture else [n, t, width] if axis == 0 else [t, n, width])
    x, kind = _with_side(rng, x, s, classes, out, blocks)
    out_axis = {"rows": 0, "prototypes": 0, "tokens": axis, "turned": 1 - axis}[out]
    kinds = (*(type(b).__name__ for b in blocks), out, kind, "picture" if picture else f"axis {axis}")
    return Case(model, x, n, axis, out_axis, -1 if out in ("tokens", "turned") else 2, kinds)


def _with_side(rng: random.Random, x: Tensor, s: Sizes, classes: int, out: str, blocks: list[Block]) -> Any:
    """The input with another one beside it, where the model has a use for it."""
    if out == "prototypes":
        side = torch.randn(classes, s.d)
        return rng.choice(((x, side), {"x": x, "side": side})), "beside"
    if any(isinstance(b, (Attention, Fused, FoldedHeads)) for b in blocks) and rng.random() < 0.6:
        side = torch.randn(s.t, s.t)
        first = {"side": side, "x": x}
        return rng.choice((((x, side), "mask"), ({"x": x, "side": side}, "mask"), (first, "mask first")))
    return rng.choice((x, x, x, {"x": x})), "alone"


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)
