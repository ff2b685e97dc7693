"""Stochastic layers: the families q that torch lacks, as drop-in modules.

    Dropout(p)              units are 0 or 1/(1-p) times themselves; in front of a Linear or Conv
    GaussianDropout(p)      units times N(1, p/(1-p)): the same mean and variance; in front of a Linear or Conv
    ConcreteDropout(p)      dropout with a rate that is learned; in front of a Linear or Conv
    DropConnectLinear(...)  instead of a Linear: single weights are dropped
    DropConnectConv2d(...)  instead of a Conv2d (1d, 3d), DropConnectLSTM of an LSTM, DropConnectGRU of a GRU
    GaussianLinear(...)     instead of a Linear: each weight has a mean and a standard deviation (mean-field VI)

`p` is always the rate of being dropped. Random in training mode and under `bbalpha.sample`; otherwise each
layer is its mean. Every row has draws of its own, or under ``sample(..., masks="shared")`` one for all rows; weights
of convolutions and of recurrent layers are always drawn once for all rows of a pass.

    net = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), Dropout(0.1), nn.Linear(50, 1))
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bbalpha import _kernels as kernels
from bbalpha._torch import convolve, recur, transforms_active
from bbalpha.checks import check_number, check_share


class Dropout(nn.Dropout):
    """nn.Dropout with fast masks: same distribution, same switches, a fraction of the time on the CPU.

    >>> Dropout(0.5)(torch.ones(1000)).unique()
    tensor([0., 2.])
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__(_check_rate(p), inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Dropout of `input`, any shape, in training mode; `input` itself otherwise."""
        if (
            not self.training
            or self.p == 0
            or input.device.type != "cpu"
            or torch.compiler.is_compiling()
            or torch.overrides.has_torch_function_unary(input)
            or transforms_active()
        ):
            return F.dropout(input, self.p, self.training, self.inplace)
        noise = kernels.draw_noise([None], [(input.shape, self.p)])[0]
        out = kernels.dropout(input, replace(noise, values=noise.values[0]))
        return input.copy_(out) if self.inplace else out


class GaussianDropout(nn.Module):
    """Multiplicative noise N(1, p/(1-p)): the mean and variance of dropout at rate `p`, without zeros.

    Args:
        p: The rate of the dropout it stands for, in [0, 1).

    >>> GaussianDropout(0.2)(torch.ones(1_000_000)).var().round(decimals=2)     # 0.2 / 0.8
    tensor(0.2500)
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = _check_rate(p)

    def forward(self, input: Tensor) -> Tensor:
        """`input`, any shape, times noise; `input` itself in evaluation mode."""
        return _called(gaussian_dropout, input, self.p, self.training)

    def extra_repr(self) -> str:
        """The rate shown by print."""
        return f"p={self.p}"


class ConcreteDropout(nn.Module):
    """Dropout whose rate is learned, by a relaxation of its masks (Gal, Hron & Kendall, 2017).

    Put it where a Dropout would be: in front of a Linear or Conv in nn.Sequential, where `bbalpha.prior_kl`
    finds the weights it feeds. Their KL holds the rate in check and has to be in the loss:

        l^2 / (2 (1 - rate)) ||M||^2 - d_in H(rate)         H: entropy of a coin; d_in: inputs of the weights

    Args:
        p: The rate to begin with, in (0, 1).
        temperature: Of the relaxation; towards 0 masks become binary and gradients noisy.

    >>> ConcreteDropout(0.2).rate
    tensor(0.2000, grad_fn=<SigmoidBackward0>)
    """

    def __init__(self, p: float = 0.1, *, temperature: float = 0.1) -> None:
        super().__init__()
        if _check_rate(p) == 0:
            raise ValueError("`p` must be above 0 for a rate that can be learned; got 0.")
        temperature = check_number("temperature", temperature, above=0)
        self.logit = nn.Parameter(torch.tensor(math.log(p / (1 - p))))
        self.temperature = temperature

    @property
    def rate(self) -> Tensor:
        """The rate of being dropped as it stands ()."""
        return self.logit.sigmoid()

    @property
    def entropy(self) -> Tensor:
        """H(rate), the entropy of one mask ()."""
        return F.softplus(self.logit) - self.rate * self.logit

    def forward(self, input: Tensor) -> Tensor:
        """`input`, any shape, times relaxed masks; `input` itself in evaluation mode."""
        return _called(concrete_dropout, input, self.logit, self.temperature, self.training)

    def extra_repr(self) -> str:
        """The rate and temperature shown by print."""
        return f"rate={self.rate.item():.3g}, temperature={self.temperature}"


class DropConnect(nn.Module):
    """What layers with dropped weights have in common: single weights are 0 or 1/(1-p) times themselves.

    Not a layer by itself. ``add_dropout(model, p, layer=DropConnect)`` takes the one that fits for every Linear,
    Conv, LSTM and GRU of a model.

    Attributes:
        p: The rate of a weight being dropped.
    """

    p: float

    def extra_repr(self) -> str:
        """The sizes and the rate shown by print."""
        return f"{super().extra_repr()}, p={self.p}"


class DropConnectLinear(DropConnect, nn.Linear):
    """nn.Linear with single weights dropped at rate `p` (Wan et al., 2013).

    With draws of its own every row needs a mask of the size of the weights: for wide layers use
    ``sample(..., masks="shared")`` or a small `chunk_size`.

    >>> DropConnectLinear(3, 2, p=0.5)
    DropConnectLinear(in_features=3, out_features=2, bias=True, p=0.5)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        p: float = 0.5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.p = _check_rate(p)

    def forward(self, input: Tensor) -> Tensor:
        """The linear map of `input` (N, ..., in_features) with dropped weights: (N, ..., out_features)."""
        return _called(drop_connect, input, self.weight, self.bias, self.p, self.training)


class _DropConnectConv(DropConnect):
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        p: float = 0.5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        sizes = in_channels, out_channels, kernel_size, stride, padding, dilation, groups
        super().__init__(*sizes, bias, padding_mode, device, dtype)
        self.p = _check_rate(p)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of `input` with dropped weights, shapes as in torch's layer."""
        return convolve(self, input, F.dropout(self.weight, self.p, self.training))


class DropConnectConv1d(_DropConnectConv, nn.Conv1d):
    """nn.Conv1d with single weights dropped at rate `p`: one draw for all rows of a pass.

    A draw for every row would be a convolution for every row; `masks` makes no difference to it.

    >>> DropConnectConv1d(2, 4, 3, p=0.1)
    DropConnectConv1d(2, 4, kernel_size=(3,), stride=(1,), p=0.1)
    """


class DropConnectConv2d(_DropConnectConv, nn.Conv2d):
    """nn.Conv2d with single weights dropped at rate `p`: one draw for all rows of a pass (see DropConnectConv1d)."""


class DropConnectConv3d(_DropConnectConv, nn.Conv3d):
    """nn.Conv3d with single weights dropped at rate `p`: one draw for all rows of a pass (see DropConnectConv1d)."""


class _DropConnectRNN(DropConnect):
    _plain: type[nn.RNNBase]  # torch's layer

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        p: float = 0.5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        sizes, dropout = (input_size, hidden_size, num_layers), check_share("dropout", dropout)
        super().__init__(*sizes, bias, batch_first, dropout, bidirectional, device=device, dtype=dtype)
        self.p = _check_rate(p)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """The output and the last states with dropped weights, shapes as in torch's layer."""
        return recur(self._plain, self, self._dropped, input, hx)  # type: ignore[arg-type]

    def _dropped(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, self.p, self.training) if weight.ndim > 1 else weight


class DropConnectLSTM(_DropConnectRNN, nn.LSTM):
    """nn.LSTM with single weights dropped at rate `p`, those of the input and of the state: biases are kept.

    One draw for all rows and time steps of a pass, as for convolutions; `masks` makes no difference to it.
    `dropout` between the layers is torch's, and comes on top.

    >>> DropConnectLSTM(3, 8, p=0.1)
    DropConnectLSTM(3, 8, p=0.1)
    """

    _plain = nn.LSTM


class DropConnectGRU(_DropConnectRNN, nn.GRU):
    """nn.GRU with single weights dropped at rate `p`: one draw for all rows of a pass (see DropConnectLSTM)."""

    _plain = nn.GRU


class GaussianLinear(nn.Linear):
    """nn.Linear whose weights are independent Gaussians N(weight, exp(log_std)^2): the paper's VI-G family.

    Inputs (N, D) with draws for every row get the local reparameterisation: the outputs are drawn, which has
    the same distribution and less noisy gradients. Otherwise weights are drawn, one set for all rows when
    masks are shared. Biases are point estimates.

    Args:
        in_features: D.
        out_features: The width of the output.
        bias: Whether to have one.
        initial_std: The standard deviation of all weights to begin with.
        device: As in nn.Linear.
        dtype: As in nn.Linear.

    >>> GaussianLinear(3, 2)(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        initial_std: float = 0.05,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        initial_std = check_number("initial_std", initial_std, above=0)
        self.log_std = nn.Parameter(torch.full_like(self.weight, math.log(initial_std)))

    @property
    def std(self) -> Tensor:
        """The standard deviations of the weights (out_features, in_features)."""
        return self.log_std.exp()

    def prior_kl(self, length_scale: float) -> Tensor:
        """KL of the weights to N(0, 1/length_scale^2), exactly ()."""
        if not length_scale > 0:
            raise ValueError(f"`length_scale` must be positive where q is Gaussian; got {length_scale!r}.")
        log_ratio = self.log_std + math.log(length_scale)  # of standard deviations, q to prior
        scaled = length_scale**2 * self.weight.square()
        return ((2 * log_ratio).expm1() + scaled - 2 * log_ratio).sum() / 2

    def forward(self, input: Tensor) -> Tensor:
        """The linear map of `input` (N, ..., in_features) with random weights: (N, ..., out_features)."""
        return _called(gaussian_linear, input, self.weight, self.log_std, self.bias, self.training)


# ------------------------------------------------------------------------------ the layers as functions of draws


class Draws(Protocol):
    """Where random numbers come from: torch's generator, or the passes of `sample` (`bbalpha._engine.interception`)."""

    @property
    def shared(self) -> bool:
        """Whether all rows of a pass share one draw."""

    def tell(self, kind: str, rate: float | Tensor | None, fires: bool) -> None:
        """Take note of a random site."""

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers of the shape of `like`."""

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers from 0 to 1 of the shape of `like`."""

    def scaled(self, x: Tensor, noise: Tensor, rate: float | Tensor) -> Tensor:
        """`x * noise`, which stands for dropout at `rate`."""

    def dropped_weights(self, x: Tensor, weight: Tensor, rate: float) -> tuple[Tensor, int]:
        """`weight` with dropout for every group of rows of `x` that has one draw (G, ...), and the axis of rows."""

    def normal_weights(self, x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        """Standard normal numbers of the shape of `weight` in the same way (G, ...), and the axis of rows."""


def gaussian_dropout(draws: Draws, x: Tensor, p: float, training: bool) -> Tensor:
    """`x` times N(1, p/(1-p))."""
    fires = training and p > 0
    draws.tell("gaussian dropout", p, fires)
    return draws.scaled(x, 1 + math.sqrt(p / (1 - p)) * draws.normal(x), p) if fires else x


def concrete_dropout(draws: Draws, x: Tensor, logit: Tensor, temperature: float, training: bool) -> Tensor:
    """`x` times masks that are nearly 0 or 1/(1-rate), differentiable in the logit of the rate."""
    rate = logit.sigmoid()
    draws.tell("concrete dropout", rate.detach(), training)
    if not training:
        return x
    dropped = ((logit + draws.uniform(x).logit()) / temperature).sigmoid()  # near 1 with probability `rate`
    return draws.scaled(x, (1 - dropped) / (1 - rate), rate)


def drop_connect(draws: Draws, x: Tensor, weight: Tensor, bias: Tensor | None, p: float, training: bool) -> Tensor:
    """The linear map of `x` with single weights dropped."""
    fires = training and p > 0
    draws.tell("dropconnect", p, fires)
    return _linear(x, *draws.dropped_weights(x, weight, p), bias) if fires else F.linear(x, weight, bias)


def gaussian_linear(
    draws: Draws, x: Tensor, weight: Tensor, log_std: Tensor, bias: Tensor | None, training: bool
) -> Tensor:
    """The linear map of `x` with weights N(weight, exp(log_std)^2)."""
    draws.tell("gaussian weights", None, training)
    if not training:
        return F.linear(x, weight, bias)
    if x.ndim == 2 and not draws.shared:  # local reparameterisation: outputs are independent Gaussians
        mean = F.linear(x, weight, bias)
        variance = F.linear(x.square(), (2 * log_std).exp())
        std = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()  # a row of zeros: no noise, gradient 0
        return mean + std * draws.normal(mean)
    noise, axis = draws.normal_weights(x, weight)
    return _linear(x, weight + log_std.exp() * noise, axis, bias)


BODIES: tuple[Callable[..., Tensor], ...] = (gaussian_dropout, concrete_dropout, drop_connect, gaussian_linear)


def _linear(x: Tensor, weights: Tensor, axis: int, bias: Tensor | None) -> Tensor:
    """The linear map of x (..., D) with weights (G, D_out, D), one for each of G parts of x along `axis`."""
    if len(weights) == 1:
        return F.linear(x, weights[0], bias)
    rows = x.movedim(axis, 0)  # (G R, ..., D)
    out = rows.reshape(len(weights), -1, x.shape[-1]) @ weights.mT  # (G, R ..., D_out)
    out = out if bias is None else out + bias
    return out.reshape(*rows.shape[:-1], -1).movedim(0, axis)


class _TorchDraws:
    """Draws from torch's global generator, one for every row; plain functions, so that vmap and compile work."""

    shared = False

    def tell(self, kind: str, rate: float | Tensor | None, fires: bool) -> None:
        """Nobody listens."""

    def normal(self, like: Tensor) -> Tensor:
        return torch.randn_like(like)

    def uniform(self, like: Tensor) -> Tensor:
        return torch.rand_like(like)

    def scaled(self, x: Tensor, noise: Tensor, rate: float | Tensor) -> Tensor:
        return x * noise

    def dropped_weights(self, x: Tensor, weight: Tensor, rate: float) -> tuple[Tensor, int]:
        return F.dropout(weight.expand(_groups(x), *weight.shape), rate), 0

    def normal_weights(self, x: Tensor, weight: Tensor) -> tuple[Tensor, int]:
        return torch.randn_like(weight.expand(_groups(x), *weight.shape)), 0


_TORCH = _TorchDraws()


def _groups(x: Tensor) -> int:
    return max(1, x.shape[0]) if x.ndim > 1 else 1


def _called(body: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """The layer function `body` with torch's draws, or with those of the interception that is on."""
    if torch.overrides.has_torch_function_unary(x):
        out: Tensor = torch.overrides.handle_torch_function(body, (x,), _TORCH, x, *args)
        return out
    return body(_TORCH, x, *args)


def _check_rate(p: float) -> float:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
        raise ValueError(f"`p` must be a dropout rate in [0, 1); got {p!r}.")
    return float(p)
