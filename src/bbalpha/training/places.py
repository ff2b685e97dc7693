"""Where a trained network can have dropout: before its last linear layer, the last three, all, or where it has some.

    for place in places(net, x):                    # x: a few rows
        net_with_dropout = place.made(net, 0.1)     # a copy; `net` is left alone

A layer counts as last if what it says reaches the output through no other linear layer; a mean and a precision that
come from two layers have two last ones. Layers are in the order in which they are called, not written.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha._engine.inputs import Inputs
from bbalpha._engine.shadows import shadowed
from bbalpha._engine.tracing import trace
from bbalpha._torch import listened_to, tree_leaves
from bbalpha.convert import add_dropout, audit, weight_layers
from bbalpha.objectives import logits_of
from bbalpha.training.feed import Batch
from bbalpha.training.loop import on_device

OWN = "its own dropout"
TRAINED = 3  # layers that are fine-tuned at most, the last ones
_CHUNK = 256  # rows whose features are computed together
_ROOM = 2**28  # numbers of features that are kept: 1 GB


@dataclass(frozen=True)
class Place:
    """A set of random sites whose rate can be chosen.

    Attributes:
        name: In words.
        layers: The layers that have dropout put before them; none where the sites are the model's own.
        rates: Modules that hold the rate of a site of the model's own, by name.
        own: Whether the sites are the model's own.
        trained: The layers that fine-tuning trains; none where it is not done.
        alone: The layer that can be run by itself on what the network gives it; None where there is no such.
    """

    name: str
    layers: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()
    own: bool = False
    trained: tuple[str, ...] = ()
    alone: str | None = None

    def made(self, model: nn.Module, rate: float | None) -> nn.Module:
        """A copy of `model` with dropout of this rate here; None leaves rates of its own as they are."""
        net = duplicate(model)
        if self.layers and rate is not None:
            add_dropout(net, rate, before=lambda name, _: name in self.layers)
        for name in self.rates if rate is not None else ():
            vars(net.get_submodule(name))["p"] = rate
        return net

    def run(self, net: nn.Module) -> nn.Module:
        """The part of what `made` gave that has to be run."""
        return net if self.alone is None else net.get_submodule(self.alone)


def places(model: nn.Module, x: Any) -> list[Place]:
    """Where dropout can be; that of its own, if it has any that draws, and no other then.

    Args:
        model: Looked at in evaluation mode; not changed.
        x: A few rows.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    >>> [(place.name, place.layers) for place in places(net, torch.zeros(2, 2))]
    [('the last linear layer', ('2',)), ('all 2 linear layers', ('0', '2'))]
    """
    model = duplicate(model).eval()
    loud = dict.fromkeys(
        s.name or "the model" for s in trace(model, Inputs.of(x), switch=False, evaluation=True).sites if s.fired
    )
    if loud:
        raise ValueError(
            f"`model` must have a plain network to compare with; {', '.join(loud)} draws in evaluation mode too. Let "
            "that follow `self.training`."
        )
    found = audit(model, x, n_passes=2)
    names, word = _weight_layers(model)
    called = _Called(model, x, names)
    firing = [site for site in found.sites if site.fired]
    if firing or found.hidden:
        rates = dict.fromkeys(s.name for s in firing if _holds(model.get_submodule(s.name), s.rate))
        return [Place(OWN, rates=tuple(rates), own=True, trained=tuple(called.order[-TRAINED:]))]
    if not called.order:
        raise ValueError(
            "`model` must have a linear layer or a convolution to put dropout before, or dropout of its own; "
            f"{type(model).__name__} calls none. Put dropout into it yourself, and its rates are tried."
        )
    last = tuple(name for name in called.order if name in called.last)
    late = tuple(name for name in called.order if name in (*called.order[-TRAINED:], *last))
    everything = tuple(called.order)
    tried = [Place(f"the last {word}{'s' * (len(last) > 1)}", last, trained=last, alone=called.alone)]
    if len(everything) > len(late) > len(last):
        tried.append(Place(f"the last {len(late)} {word}s", late, trained=late))
    if len(everything) > len(last):
        all_trained = everything if len(everything) == len(late) else ()
        tried.append(Place(f"all {len(everything)} {word}s", everything, trained=all_trained))
    return tried


def features(model: nn.Module, layer: str, x: Any) -> Tensor:
    """What `layer` is given for every row of `x`, in evaluation mode (N, d)."""
    inputs = Inputs.of(x, 0, model=model)
    rows = inputs.rows or 0
    parts = [inputs.narrow(i, min(_CHUNK, rows - i)) for i in range(0, rows, _CHUNK)] if rows > _CHUNK else [inputs]
    caught: list[Tensor] = []
    with torch.no_grad(), shadowed(model, evaluation=True, use="again") as live:
        hooked = listened_to(live.get_submodule(layer))
        hooked.register_forward_pre_hook(lambda _, args: caught.append(args[0].detach()))
        for part in parts:
            part.call(live)
    return torch.cat(caught)


def all_features(model: nn.Module, layer: str, batches: Iterable[Batch]) -> tuple[Tensor, ...] | None:
    """Features, targets and, where there are any, weights of batches as `fit` has them; None if it is too much."""
    device = next(model.parameters()).device
    kept: list[tuple[Tensor, ...]] = []
    numbers = 0
    for x, target, weight in batches:
        found = features(model, layer, on_device(x, device)).cpu()
        kept.append((found, target) if weight is None else (found, target, weight))
        numbers += found.numel()
        if numbers > _ROOM:
            return None
    return tuple(torch.cat(parts) for parts in zip(*kept, strict=True))


def duplicate(model: nn.Module) -> nn.Module:
    """A copy with weights of its own."""
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"`model` must be one that copy.deepcopy can copy, since yours is left as it is; {type(model).__name__} "
            f"is not: {error}"
        ) from error


# ------------------------------------------------------------------------------ helpers


def _weight_layers(model: nn.Module) -> tuple[frozenset[str], str]:
    """The linear layers of a model or, where it has none, its convolutions; and what to call one."""
    linear = frozenset(name for name, _ in weight_layers(model, "linear"))
    if linear:
        return linear, "linear layer"
    return frozenset(name for name, _ in weight_layers(model, "all")), "convolution"


def _holds(module: nn.Module, rate: float | None) -> bool:
    """Whether the rate of a site is the number `p` of its module."""
    return rate is not None and vars(module).get("p") == rate


class _Called:
    """The layers that a model, a copy, calls on `x`.

    Attributes:
        order: Their names, by their last call.
        last: Those that reach the output through no other.
        alone: The only last one, if it is called once, with one vector a row, and the output is what it returns.
    """

    def __init__(self, model: nn.Module, x: Any, names: frozenset[str]) -> None:
        self.given: dict[str, Any] = {}
        self.returned: dict[str, list[Any]] = {}
        for p in model.parameters():
            p.requires_grad_(p.is_floating_point() or p.is_complex())  # so that there is a graph to follow
        with torch.enable_grad(), shadowed(model, evaluation=True, use="again") as live:
            if live is model:
                raise ValueError(
                    "`model` must not be TorchScript, into which no dropout can be put; give the original."
                )
            for name, module in live.named_modules():
                if name in names:
                    listened_to(module).register_forward_hook(lambda _, args, out, n=name: self._note(n, args, out))
            output = Inputs.of(x, 0, model=model).call(live)
        answers = [t for t in tree_leaves(logits_of(output)) if isinstance(t, Tensor)]
        self.order = list(self.returned)
        self.last = self._reached(answers) or frozenset(self.order[-1:])
        self.alone = self._sole(answers)

    def _note(self, name: str, args: tuple[Any, ...], output: Any) -> None:
        calls = self.returned.pop(name, [])  # to the end of the order
        node = output.grad_fn if isinstance(output, Tensor) else None  # now: what works in place will change it
        self.given[name], self.returned[name] = args, [*calls, (output, node)]

    def _reached(self, answers: list[Tensor]) -> frozenset[str]:
        """The layers met first on the way back from the output."""
        homes = {node: name for name, calls in self.returned.items() for _, node in calls if node is not None}
        todo, seen, met = [t.grad_fn for t in answers if t.grad_fn is not None], set(), set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in homes:
                met.add(homes[node])
            else:
                todo += [before for before, _ in node.next_functions if before is not None]
        return frozenset(met)

    def _sole(self, answers: list[Tensor]) -> str | None:
        if len(self.last) != 1 or len(answers) != 1:
            return None
        (name,) = self.last
        args, calls = self.given[name], self.returned[name]
        one_vector = len(args) == 1 and isinstance(args[0], Tensor) and args[0].ndim == 2
        return name if one_vector and len(calls) == 1 and calls[0][0] is answers[0] else None
