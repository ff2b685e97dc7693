"""The prior: KL of q to N(0, 1/l^2) as the L2 term it is, with its scale in l, keep probability and N.

For torch weights M behind dropout with keep probability p (torch divides what is kept by p):

    KL ~ l^2 / 2 * E_q ||W||^2 = l^2 / (2 p) * ||M||^2

The paper's p ||M||^2 is the same for the unscaled weights M / p, and drops the 1/2. DropConnect and Gaussian
noise of variance (1-p)/p have the same second moment, so the same KL. A learned rate adds minus the entropy of
its masks; a layer that knows better (`HasPriorKL`) answers for itself. Losses are means over data points, so
the KL is divided by `n_data`. Weights that are frozen (``requires_grad=False``) are given, not inferred: they have no q
and no prior, so that fine-tuning an adapter puts the prior on the adapter alone.

    loss = bbalpha.cross_entropy(outputs, y) + bbalpha.prior_kl(net, length_scale=1.0, n_data=60_000)
    optimizer = torch.optim.Adam(bbalpha.param_groups(net, length_scale=1.0, n_data=60_000))   # or this
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from bbalpha._engine import kinds
from bbalpha._engine.sites import INSERTED
from bbalpha._torch import children
from bbalpha.checks import check_count, check_flag, check_model, check_number
from bbalpha.layers import ConcreteDropout, DropConnect


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
        model: Any module. Weights are its parameters of two or more axes; those of normalisation layers and those that
            are frozen do not count.
        length_scale: l; larger pulls the weights closer to 0.
        n_data: N, the rows of the whole training set.
        keep: {parameter name: keep probability}, as in ``audit(model, x).keep``. None reads it off the model:
            our own layers, and Linear/Conv behind a Dropout in nn.Sequential; 1 elsewhere. A learned rate
            (ConcreteDropout) is always read off the model.
        biases: Put the prior on biases too; in the paper they are point estimates.

    Returns:
        ().

    >>> net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1, bias=False))
    >>> _ = nn.init.ones_(net[1].weight)
    >>> prior_kl(net, length_scale=1.0, n_data=10).item()              # 1/(2 * 0.5) * 2 / 10
    0.20000000298023224
    """
    _check(model, length_scale, n_data)
    biases = check_flag("biases", biases)
    terms = [parameter.square().sum() * (length_scale**2 / (2 * p)) for parameter, p in _quadratic(model, keep, biases)]
    own = [layer for layer in model.modules() if isinstance(layer, HasPriorKL)]
    terms += [layer.prior_kl(length_scale) for layer in own if _is_trained(layer)]
    terms += [-entropy for entropy in _mask_entropies(model)]
    if not terms:
        raise ValueError(f"`model` must have weights that are not frozen; {type(model).__name__} has none.")
    return torch.stack(terms).sum() / n_data


def param_groups(
    model: nn.Module, *, length_scale: float, n_data: int, keep: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """The prior as weight decay: parameter groups for an optimiser with coupled decay (SGD, Adam, RMSprop).

    Takes the same steps as adding `prior_kl`, but for optimisers that decouple the decay (AdamW).

    Returns:
        One group for each weight decay l^2 / (p n_data), and one without decay for everything else that is trained;
        frozen parameters are in none.

    >>> net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))
    >>> [g["weight_decay"] for g in param_groups(net, length_scale=1.0, n_data=10)]
    [0.2, 0.0]
    """
    _check(model, length_scale, n_data)
    for name, layer in model.named_modules():
        if isinstance(layer, _OTHER_KL):
            raise ValueError(
                f"`param_groups` needs a quadratic KL, and that of {type(layer).__name__} ({name or 'the model'}) is "
                "not. Add bbalpha.prior_kl(model, ...) to the loss instead."
            )
    groups: dict[float, list[nn.Parameter]] = {}
    decayed = set()
    for parameter, p in _quadratic(model, keep, biases=False):
        groups.setdefault(float(weight_decay(length_scale, p, n_data)), []).append(parameter)
        decayed.add(parameter)
    groups.setdefault(0.0, []).extend(p for p in model.parameters() if p.requires_grad and p not in decayed)
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params]


def weight_decay(length_scale: float, keep: float | Tensor, n_data: int) -> float | Tensor:
    """The prior as the decay of a weight behind dropout that keeps a share `keep`: l^2 / (p N).

    >>> weight_decay(2.0, 0.5, 100)
    0.08
    """
    check_number("length_scale", length_scale, least=0)
    check_count("n_data", n_data, most=2**63)
    if not isinstance(keep, Tensor) and check_number("keep", keep, above=0) > 1:
        raise ValueError(f"`keep` must be a share in (0, 1]; got {keep!r}.")
    return length_scale**2 / (keep * n_data)


def has_quadratic_kl(model: nn.Module) -> bool:
    """Whether the prior can be weight decay: no layer with a KL of its own, no learned rate.

    >>> has_quadratic_kl(nn.Linear(2, 1)), has_quadratic_kl(nn.Sequential(ConcreteDropout(), nn.Linear(2, 1)))
    (True, False)
    """
    check_model(model)
    return not any(isinstance(layer, _OTHER_KL) for layer in model.modules())


@torch.no_grad()
def keep_probabilities(model: nn.Module) -> dict[str, float]:
    """What the structure tells of {parameter name: keep probability}: nn.Sequential with Dropout before weights.

    >>> keep_probabilities(nn.Sequential(nn.Dropout(0.1), nn.Flatten(), nn.Linear(2, 1)))
    {'2.weight': 0.9}
    """
    check_model(model)
    return {name: math.prod(float(1 - _rate(n)) for n in noises) for name, noises in _feeding(model).items()}


def _feeding(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The noise on each weight as far as the structure tells: {parameter name: its layers of noise}."""
    found: dict[str, list[nn.Module]] = {}
    inner: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, kinds.WEIGHTS) and not isinstance(module, HasPriorKL) and _own_noise(module):
            found.setdefault(_join(name, "weight"), _own_noise(module))
        if _is_recurrent(module):
            found = _recurrent_noise(module, name, []) | found
        if not isinstance(module, nn.Sequential) or module in inner:
            continue
        noises: list[nn.Module] = []
        for child_name, child in _chain(module, name):
            inner.add(child)
            if isinstance(child, kinds.NOISE):
                noises.append(child)
            elif isinstance(child, kinds.WEIGHTS):
                noises += _own_noise(child)
                if noises and not isinstance(child, HasPriorKL):
                    found[_join(child_name, "weight")] = noises
                noises = []
            elif _is_recurrent(child):
                found |= _recurrent_noise(child, child_name, noises)
                noises = []
            elif not isinstance(child, (nn.Sequential, *kinds.ZERO_STAYS)):
                noises = []
    return found


def _own_noise(layer: nn.Module) -> list[nn.Module]:
    """The noise a weight layer has of itself: what `add_dropout` inserted, or dropped weights."""
    inserted = getattr(layer, INSERTED, None)
    own: list[nn.Module] = [inserted] if isinstance(inserted, kinds.NOISE) else []
    return [*own, layer] if isinstance(layer, DropConnect) else own


def _is_recurrent(module: nn.Module) -> TypeGuard[nn.RNNBase]:
    """A recurrent layer of ours: its weights have several names."""
    return isinstance(module, nn.RNNBase) and isinstance(module, DropConnect)


def _recurrent_noise(layer: nn.RNNBase, name: str, before: list[nn.Module]) -> dict[str, list[nn.Module]]:
    """The noise on each of its weights: their own, and that of the input or of the layer below.

    A learned rate in front of it is not taken in: two directions would count its entropy twice.
    """
    before = [n for n in before if not isinstance(n, ConcreteDropout)]
    found: dict[str, list[nn.Module]] = {}
    for leaf, parameter in layer.named_parameters(recurse=False):
        if parameter.ndim > 1:
            below = [] if "_ih_" not in leaf else before if "_l0" in leaf else [nn.Dropout(layer.dropout)]
            found[_join(name, leaf)] = [*below, layer]
    return found


def _chain(module: nn.Sequential, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested Sequentials in the order they run, also those that run twice."""
    for child_name, child in children(module).items():
        path = _join(name, child_name)
        if child is not None:
            yield path, child
        if isinstance(child, nn.Sequential):
            yield from _chain(child, path)


def _join(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf


def _rate(noise: nn.Module) -> float | Tensor:
    return noise.rate if isinstance(noise, ConcreteDropout) else noise.p  # type: ignore[return-value]


def _mask_entropies(model: nn.Module) -> Iterator[Tensor]:
    """d_in H(rate) for every weight behind a learned rate; refuses a learned rate that stands before none."""
    idle = {layer: name for name, layer in model.named_modules() if isinstance(layer, ConcreteDropout)}
    for name, noises in _feeding(model).items():
        layer = model.get_submodule(name.rpartition(".")[0])
        for noise in noises:
            if isinstance(noise, ConcreteDropout):
                idle.pop(noise, None)
                yield noise.entropy * getattr(layer, "in_channels", layer.weight.shape[1])  # type: ignore[index]
    if idle:
        raise ValueError(
            f"ConcreteDropout ({next(iter(idle.values())) or 'the model'}) must stand before a Linear or Conv in "
            "nn.Sequential, so that its KL is known. Use nn.Sequential(dropout, linear) in place of the two."
        )


_OTHER_KL = (HasPriorKL, ConcreteDropout)


def _is_trained(layer: nn.Module) -> bool:
    return any(p.requires_grad for p in layer.parameters())


def _quadratic(
    model: nn.Module, keep: Mapping[str, float] | None, biases: bool
) -> Iterator[tuple[nn.Parameter, float | Tensor]]:
    """Each parameter with a KL that is quadratic in it once, with its keep probability."""
    known: dict[str, float | Tensor] = {**keep_probabilities(model), **_check_keep(model, keep)}
    for path, noises in _feeding(model).items():
        if any(isinstance(n, ConcreteDropout) for n in noises):  # whatever `keep` has seen: the rate has a gradient
            known[path] = math.prod((1 - _rate(n) for n in noises), start=1.0)
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if kinds.is_norm(module):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            is_bias = "bias" in leaf
            counts = biases if is_bias else parameter.ndim > 1 and not isinstance(module, HasPriorKL)
            if parameter in seen or not counts:
                continue
            seen.add(parameter)
            p = 1.0 if is_bias else known.get(_join(name, leaf), 1.0)
            if parameter.requires_grad or (isinstance(p, Tensor) and p.requires_grad):  # a learned rate in front of it
                yield parameter, p


def _check_keep(model: nn.Module, keep: Mapping[str, float] | None) -> dict[str, float]:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, p in (keep or {}).items():
        if name not in names:
            raise ValueError(f"`keep` must name parameters of the model; got {name!r}.")
        if not 0 < p <= 1:
            raise ValueError(f"`keep` must hold probabilities in (0, 1]; got {p} for {name!r}.")
    return dict(keep or {})


def _check(model: nn.Module, length_scale: float, n_data: int) -> None:
    check_model(model)
    check_number("length_scale", length_scale, least=0)
    check_count("n_data", n_data, most=2**63)
