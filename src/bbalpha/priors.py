"""The prior: KL of q to N(0, 1/l^2) as the L2 term it is, with its scale in l, keep probability and N.

For torch weights M behind dropout with keep probability p (torch divides what is kept by p):

    KL ~ l^2 / 2 * E_q ||W||^2 = l^2 / (2 p) * ||M||^2

The paper's p ||M||^2 is the same for the unscaled weights M / p, and drops the 1/2. Losses are means over
data points, so the KL is divided by `n_data`.

    loss = bbalpha.cross_entropy(outputs, y) + bbalpha.prior_kl(net, length_scale=1.0, n_data=60_000)
    optimizer = torch.optim.Adam(bbalpha.param_groups(net, length_scale=1.0, n_data=60_000))   # or this
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bbalpha.sites import is_norm


@runtime_checkable
class HasPriorKL(Protocol):
    """A layer of ours that knows the KL of its own q; its parameters are left to it."""

    def prior_kl(self, length_scale: float) -> Tensor:
        """KL of the layer's q to N(0, 1/length_scale^2), up to a constant ()."""


def prior_kl(
    model: nn.Module,
    *,
    length_scale: float,
    n_data: int,
    keep: Mapping[str, float] | None = None,
    biases: bool = False,
) -> Tensor:
    """KL of q to the prior N(0, 1/length_scale^2) per data point, up to a constant: add it to the loss.

    Args:
        model: Any module. Weights are its parameters of two or more axes; normalisation layers do not count.
        length_scale: l; larger pulls the weights closer to 0.
        n_data: N, the rows of the whole training set.
        keep: {parameter name: keep probability}, as in ``audit(model, x).keep``. None reads it off the model:
            our own layers, and Linear/Conv behind a Dropout in nn.Sequential; 1 elsewhere.
        biases: Put the prior on biases too; in the paper they are point estimates.

    Returns:
        ().

    >>> net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1, bias=False))
    >>> _ = nn.init.ones_(net[1].weight)
    >>> prior_kl(net, length_scale=1.0, n_data=10).item()              # 1/(2 * 0.5) * 2 / 10
    0.20000000298023224
    """
    _check(length_scale, n_data)
    terms = [parameter.square().sum() * (length_scale**2 / (2 * p)) for parameter, p in _quadratic(model, keep, biases)]
    terms += [layer.prior_kl(length_scale) for layer in model.modules() if isinstance(layer, HasPriorKL)]
    if not terms:
        raise ValueError(f"`model` must have weights; {type(model).__name__} has none.")
    return torch.stack(terms).sum() / n_data


def param_groups(
    model: nn.Module, *, length_scale: float, n_data: int, keep: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """The prior as weight decay: parameter groups for an optimiser with coupled decay (SGD, Adam, RMSprop).

    Takes the same steps as adding `prior_kl`, but for optimisers that decouple the decay (AdamW).

    Returns:
        One group for each weight decay l^2 / (p n_data), and one without decay for everything else.

    >>> net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))
    >>> [g["weight_decay"] for g in param_groups(net, length_scale=1.0, n_data=10)]
    [0.2, 0.0]
    """
    _check(length_scale, n_data)
    for name, layer in model.named_modules():
        if isinstance(layer, HasPriorKL):
            raise ValueError(
                f"`param_groups` needs a quadratic KL, and that of {type(layer).__name__} ({name or 'the model'}) is "
                "not. Add bbalpha.prior_kl(model, ...) to the loss instead."
            )
    groups: dict[float, list[nn.Parameter]] = {}
    decayed = set()
    for parameter, p in _quadratic(model, keep, biases=False):
        groups.setdefault(length_scale**2 / (p * n_data), []).append(parameter)
        decayed.add(parameter)
    groups[0.0] = [p for p in model.parameters() if p not in decayed]
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params]


def keep_probabilities(model: nn.Module) -> dict[str, float]:
    """What the structure tells of {parameter name: keep probability}: nn.Sequential with Dropout before weights.

    >>> keep_probabilities(nn.Sequential(nn.Dropout(0.1), nn.Flatten(), nn.Linear(2, 1)))
    {'2.weight': 0.9}
    """
    found: dict[str, float] = {}
    inner: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential) and module not in inner:
            kept = 1.0
            for child_name, child in _chain(module, name):
                inner.add(child)
                if isinstance(child, _DropoutNd):
                    kept *= 1 - child.p
                elif _is_weight_layer(child):
                    if kept != 1.0:
                        found[f"{child_name}.weight"] = kept
                    kept = 1.0
                elif not isinstance(child, (nn.Sequential, *_ZERO_PRESERVING)):
                    kept = 1.0
    return found


def _chain(module: nn.Sequential, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested Sequentials in the order they run."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        yield path, child
        if isinstance(child, nn.Sequential):
            yield from _chain(child, path)


_ZERO_PRESERVING = (
    nn.Flatten, nn.Unflatten, nn.Identity, nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.SELU,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
)  # fmt: skip


def _is_weight_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear))


def _quadratic(
    model: nn.Module, keep: Mapping[str, float] | None, biases: bool
) -> Iterator[tuple[nn.Parameter, float]]:
    """Each parameter with a quadratic KL once, with its keep probability."""
    known = keep_probabilities(model) | _check_keep(model, keep)
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if is_norm(module) or isinstance(module, HasPriorKL):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            path = f"{name}.{leaf}" if name else leaf
            is_bias = "bias" in leaf
            if parameter in seen or not (biases if is_bias else parameter.ndim > 1):
                continue
            seen.add(parameter)
            yield parameter, 1.0 if is_bias else known.get(path, 1.0)


def _check_keep(model: nn.Module, keep: Mapping[str, float] | None) -> dict[str, float]:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, p in (keep or {}).items():
        if name not in names:
            raise ValueError(f"`keep` must name parameters of the model; got {name!r}.")
        if not 0 < p <= 1:
            raise ValueError(f"`keep` must hold probabilities in (0, 1]; got {p} for {name!r}.")
    return dict(keep or {})


def _check(length_scale: float, n_data: int) -> None:
    if not isinstance(length_scale, (int, float)) or not math.isfinite(length_scale) or length_scale < 0:
        raise ValueError(f"`length_scale` must be a finite number of at least 0; got {length_scale!r}.")
    if isinstance(n_data, bool) or not n_data >= 1:
        raise ValueError(f"`n_data` must be the number of training rows, at least 1; got {n_data!r}.")
