"""Interception where randomness happens: every random torch call of a model, while its passes are run.

Modules are not scanned for dropout; a `TorchFunctionMode` sees the calls themselves (functional dropout,
attention dropout, the dropout between LSTM layers, `torch.rand` in a DropPath of one's own) and serves each
from the generators of the passes. Because a pass always draws the same numbers in the same order, the passes
can be run one by one ("loop"), stacked in one large batch ("repeat") or under `torch.func.vmap` ("vmap") with
equal results, and checked against each other.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bbalpha import layers
from bbalpha._engine.drawing import Drawing
from bbalpha._torch import body_of, is_batched, native, pick


class Interception(Drawing, TorchFunctionMode):
    """A mode that serves the random calls made inside the `with` block; arguments as for `Drawing`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, *args, **kwargs)
        body = _BODIES.get(func)
        if body is None:
            return func(*args, **kwargs)
        self.in_attention, before = func is F.multi_head_attention_forward, self.in_attention
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self.in_attention = before


def may_draw(func: Any) -> bool:
    """Whether a call of this function is one that is intercepted, or may hide one."""
    return func in _HANDLERS or func in _BODIES


# ------------------------------------------------------------------------------ handlers: dropout and its kin


def _dropout(mode: Drawing, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    p = float(p)  # a rate that is learned or scheduled may be a tensor
    mode.tell("dropout", p, training and 0 < p < 1)
    if not training or p <= 0 or p > 1:
        return F.dropout(input, p, training, inplace)
    return _put(input, mode.dropped(input, p), inplace)


def _feature_dropout(mode: Drawing, input: Tensor, p: float, train: bool) -> Tensor:
    mode.tell("channel dropout", p, train and 0 < p < 1)
    if not train or p <= 0 or p > 1:
        return torch.feature_dropout(input, p, train)
    return mode.dropped(input, p, channels=True)


def _alpha_dropout(mode: Drawing, input: Tensor, p: float, train: bool) -> Tensor:
    mode.tell("alpha dropout", p, train and 0 < p < 1)
    if not train or p <= 0 or p >= 1:
        return torch.alpha_dropout(input, p, train)
    return _self_normalising(mode, input, p, channels=False)


def _feature_alpha_dropout(mode: Drawing, input: Tensor, p: float, train: bool) -> Tensor:
    mode.tell("alpha dropout", p, train and 0 < p < 1)
    if not train or p <= 0 or p >= 1:
        return torch.feature_alpha_dropout(input, p, train)
    return _self_normalising(mode, input, p, channels=True)


def _self_normalising(mode: Drawing, input: Tensor, p: float, *, channels: bool) -> Tensor:
    """Alpha dropout: dropped units take SELU's lowest value, then mean and variance are restored."""
    lowest = -1.7580993408473766
    kept = mode.dropped(torch.ones_like(input), p, channels=channels) * (1 - p)  # 0 or 1
    a = 1 / math.sqrt((1 + p * lowest**2) * (1 - p))
    return (input * kept + lowest * (1 - kept)) * a - a * lowest * p


def _rrelu(mode: Drawing, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Tensor:
    mode.tell("rrelu", None, training and lower < upper)
    if not training or lower == upper:
        return torch.rrelu(input, lower, upper, training)
    slope = mode.filled(input, lambda t, g: t.uniform_(lower, upper, generator=g))
    return torch.where(input < 0, input * slope, input)


def _attention(
    mode: Drawing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention; spelt out where it drops attention weights."""
    mode.tell("attention dropout", dropout_p, 0 < dropout_p < 1)
    if dropout_p <= 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        nowhere = scores.isneginf().all(-1, keepdim=True)  # a query that may look at nothing gets 0, not nan
        weights = scores.masked_fill(nowhere, 0.0).softmax(-1).masked_fill(nowhere, 0.0)
    return mode.dropped(weights, dropout_p) @ value


def _recurrent(kernel: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """torch.lstm and its kin, layer by layer so that the dropout between layers is ours."""

    def handler(mode: Drawing, *args: Any) -> tuple[Tensor, ...]:
        packed = not isinstance(args[3], bool)  # (data, batch_sizes, hx, params, ...) or (input, hx, params, ...)
        head, (hx, params, biases, layers, p, train, both, *rest) = args[: 1 + packed], args[1 + packed :]
        fires = train and p > 0 and layers > 1
        mode.tell("recurrent dropout", p, fires and p < 1)
        if not fires:
            return kernel(*args)
        directions = 2 if both else 1
        size = len(params) // layers
        states = hx if isinstance(hx, (tuple, list)) else (hx,)
        out, finals = head[0], []
        for layer in range(layers):
            if layer:
                out = mode.dropped(out, p)
            span = slice(layer * directions, (layer + 1) * directions)
            own = [s[span].contiguous() for s in states]
            weights = params[layer * size : (layer + 1) * size]
            out, *last = mode.recur(
                kernel, out, *head[1:], own if isinstance(hx, (tuple, list)) else own[0], weights,
                biases, 1, 0.0, train, both, *rest,
            )  # fmt: skip
            finals.append(last)
        return (out, *(torch.cat(part) for part in zip(*finals, strict=True)))

    return handler


# ------------------------------------------------------------------------------ handlers: plain random numbers


def _fill_(name: str) -> Callable[..., Tensor]:
    """tensor.bernoulli_() and its kin."""

    def handler(mode: Drawing, input: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        p = kwargs.get("p", args[0] if args else 0.5) if name == "bernoulli_" else None
        mode.tell(name, 1 - p if isinstance(p, (int, float)) else None, True)
        method = getattr(Tensor, name)
        if generator is not None:
            mode.alone(name)
            return method(input, *args, generator=generator, **kwargs)  # type: ignore[no-any-return]
        if isinstance(p, (int, float)) and 0 < p < 1:
            return _put(input, mode.kept(input, 1 - p), True)
        if isinstance(p, Tensor):
            uniform = mode.filled(input, lambda t, g: t.uniform_(generator=g))
            return _put(input, (uniform < p).to(input.dtype), True)
        values = mode.filled(input, lambda t, g: method(t, *args, generator=g, **kwargs))
        return _put(input, values, True)

    return handler


def _new(name: str, empty: Callable[..., Tensor], fill: Callable[[Tensor, torch.Generator], Tensor]) -> Any:
    """torch.rand and its kin: an empty tensor of the asked shape, filled."""

    def handler(mode: Drawing, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        mode.tell(name, None, True)
        like = empty(*args, **kwargs)
        if generator is None:
            values = mode.filled(like, fill)
        else:
            mode.alone(name)
            values = fill(like.detach(), generator)
        return values.requires_grad_() if like.requires_grad else values

    return handler


def _empty(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.empty and its kin: under vmap one for every pass, since a random call may be about to fill it."""

    def handler(mode: Drawing, *args: Any, **kwargs: Any) -> Tensor:
        out = empty(*args, **kwargs)
        if mode.index is None or is_batched(out):
            return out
        return pick(out.new_empty((mode.passes.count, *out.shape)), mode.index)

    return handler


def _bernoulli(mode: Drawing, input: Tensor, p: float | None = None, *, generator: Any = None) -> Tensor:
    mode.tell("bernoulli", p, True)
    if generator is not None:
        mode.alone("bernoulli")
        return torch.bernoulli(input, generator=generator)
    if p is not None and 0 < p < 1:
        return mode.kept(input, 1 - p)
    uniform = mode.filled(input, lambda t, g: t.uniform_(generator=g))
    return (uniform < (input if p is None else p)).to(input.dtype)


def _normal(mode: Drawing, mean: Any, std: Any = 1.0, size: Any = None, *, generator: Any = None, **kwargs: Any) -> Any:
    mode.tell("normal", None, True)
    if generator is not None:
        mode.alone("normal")
        sized = () if size is None else (size,)
        return torch.normal(mean, std, *sized, generator=generator, **kwargs)
    if size is not None:
        like = torch.empty(size, **kwargs)
    else:
        like = torch.broadcast_tensors(torch.as_tensor(mean), torch.as_tensor(std))[0]
    return mean + std * mode.filled(like, lambda t, g: t.normal_(generator=g))


def _randint(mode: Drawing, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
    """torch.randint(high, size) or (low, high, size)."""
    mode.tell("randint", None, True)
    if generator is not None:
        mode.alone("randint")
        return torch.randint(*args, generator=generator, **kwargs)
    numbers = list(args)
    size = kwargs.pop("size") if "size" in kwargs else numbers.pop()
    high = kwargs.pop("high") if "high" in kwargs else numbers.pop()
    low = kwargs.pop("low", numbers.pop() if numbers else 0)
    like = torch.empty(size, **{"dtype": torch.int64, **kwargs})
    return mode.filled(like, lambda t, g: t.random_(int(low), int(high), generator=g))


def _rowwise(name: str) -> Callable[..., Tensor]:
    """torch.multinomial and poisson: whatever rows they are given, one pass at a time."""
    func = getattr(torch, name)

    def handler(mode: Drawing, input: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        mode.tell(name, None, True)
        if generator is not None:
            mode.alone(name)
            return func(input, *args, generator=generator, **kwargs)  # type: ignore[no-any-return]
        return mode.each(name, input, lambda t, g: func(t, *args, generator=g, **kwargs))

    return handler


def _randperm(mode: Drawing, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
    """A permutation knows no rows of its own: one for a pass, shared or not."""
    mode.tell("randperm", None, True)
    return torch.randperm(*args, generator=generator or mode.alone("randperm"), **kwargs)


def _own(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer of ours with its draws from the passes."""

    def handler(mode: Drawing, _: layers.Draws, *args: Any) -> Tensor:
        return body(mode, *args)

    return handler


# ------------------------------------------------------------------------------ helpers and tables


def _put(input: Tensor, out: Tensor, inplace: bool) -> Tensor:
    if not inplace:
        return out
    return input.copy_(out)  # vmap refuses where `input` is one for all passes


def _inplace(handler: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def changed(mode: Drawing, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _put(input, handler(mode, input, *args, **kwargs), True)

    return changed


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "dropout": _dropout,
    "feature_dropout": _feature_dropout,
    "alpha_dropout": _alpha_dropout,
    "feature_alpha_dropout": _feature_alpha_dropout,
    "rrelu": _rrelu,
}

_HANDLERS: dict[Any, Callable[..., Any]] = {
    **{body: _own(body) for body in layers.BODIES},
    F.dropout: _dropout,
    **{native(name): handler for name, handler in _KERNELS.items()},
    **{native(f"{name}_"): _inplace(handler) for name, handler in _KERNELS.items()},
    F.scaled_dot_product_attention: _attention,
    **{kernel: _recurrent(kernel) for kernel in map(native, ("lstm", "gru", "rnn_tanh", "rnn_relu"))},
    **{
        getattr(Tensor, name): _fill_(name)
        for name in (
            "bernoulli_", "uniform_", "normal_", "exponential_", "random_", "cauchy_", "log_normal_", "geometric_",
        )
    },
    **{empty: _empty(empty) for empty in (torch.empty, torch.empty_like, Tensor.new_empty)},
    torch.rand: _new("rand", torch.empty, lambda t, g: t.uniform_(generator=g)),
    torch.randn: _new("randn", torch.empty, lambda t, g: t.normal_(generator=g)),
    torch.rand_like: _new("rand_like", torch.empty_like, lambda t, g: t.uniform_(generator=g)),
    torch.randn_like: _new("randn_like", torch.empty_like, lambda t, g: t.normal_(generator=g)),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.normal: _normal,
    torch.randint: _randint,
    torch.randperm: _randperm,
    **{getattr(torch, name): _rowwise(name) for name in ("multinomial", "poisson")},
    Tensor.multinomial: _rowwise("multinomial"),
}  # fmt: skip

# Python functions of torch that hide random calls: their bodies are run with the mode on
_BODIES: dict[Any, Any] = {
    func: body_of(func)
    for func in (
        F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu, F.gumbel_softmax,
        F.multi_head_attention_forward,
    )
}  # fmt: skip
