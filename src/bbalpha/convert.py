"""Look at the randomness a model has, and give it some if it has none.

print(audit(model, x))                                   # every random site, and whether passes differ
kl = prior_kl(model, ..., keep=audit(model, x).keep)     # which dropout feeds which weight
add_dropout(model, 0.1)                                  # in front of every linear layer; weights kept
remove_dropout(model)                                    # as it was
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from bbalpha._engine import kinds
from bbalpha._engine.guards import steady
from bbalpha._engine.inputs import BatchDim, Inputs
from bbalpha._engine.planning import find_plan
from bbalpha._engine.running import SampleCall
from bbalpha._engine.sites import INSERTED
from bbalpha._engine.tracing import Site, Trace, trace
from bbalpha._torch import hook_places, is_compiled, tree_leaves
from bbalpha.checks import check_call, check_count, check_model
from bbalpha.layers import (
    ConcreteDropout,
    DropConnect,
    DropConnectConv1d,
    DropConnectConv2d,
    DropConnectConv3d,
    DropConnectGRU,
    DropConnectLinear,
    DropConnectLSTM,
    Dropout,
    GaussianDropout,
    GaussianLinear,
)

Model = TypeVar("Model", bound=nn.Module)
Before = Literal["linear", "all"] | Callable[..., bool]

_CONVERTED = "_converted_to"  # on a layer that became a stochastic one
_PLAIN: dict[Any, type[nn.Module]] = {  # what a stochastic layer takes the place of
    DropConnectLinear: nn.Linear, GaussianLinear: nn.Linear, DropConnectConv1d: nn.Conv1d, DropConnectConv2d: nn.Conv2d,
    DropConnectConv3d: nn.Conv3d, DropConnectLSTM: nn.LSTM, DropConnectGRU: nn.GRU,
}  # fmt: skip


@dataclass(frozen=True)
class Audit:
    """What `audit` found; print it for a table.

    Attributes:
        sites: Random calls in the order they are made: name, kind, rate, fired; those made several times once.
        calls: How often each of them is made in one pass.
        hidden: Random operators that cannot be intercepted, by name; they are seeded for every pass instead.
        differed: Whether the passes that were tried differ.
        strategy: What `sample` runs the passes by; None if it refuses the model.
        reasons: Why cheaper strategies were not taken.
        prefix: Layers that are done before the first draw: all passes share them where the strategy allows.
        keep: {parameter name: keep probability of the units that feed it}, for `prior_kl`; 1 where there is none.
        silent: {site: why, in words} of those with a rate that drew nothing: not called, or called with training off.
        warnings: What to know or to change.
    """

    sites: tuple[Site, ...]
    calls: tuple[int, ...]
    hidden: tuple[str, ...]
    differed: bool
    strategy: str | None
    reasons: tuple[str, ...]
    prefix: tuple[str, ...]
    keep: dict[str, float]
    silent: dict[str, str]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("site", "kind", "rate", "fired")]
        for s, n in zip(self.sites, self.calls, strict=True):
            kind = s.kind if n == 1 else f"{s.kind} x {n}"
            rows.append((s.name or "(model)", kind, "" if s.rate is None else f"{s.rate:.3g}", _yes(s.fired)))
        rows += [("", name, "", "yes, hidden") for name in self.hidden]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "-" * (sum(widths) + 6))
        lines += ["", f"passes differ   {_yes(self.differed)}", f"strategy        {self.strategy or 'none'}"]
        lines += [f"                not {reason}" for reason in self.reasons]
        lines += [f"shared prefix   {', '.join(self.prefix) or 'none'}"]
        lines += [f"warning         {warning}" for warning in self.warnings]
        return "\n".join(lines)


def audit(model: nn.Module, x: Any, *, n_passes: int = 8, batch_dim: BatchDim = 0) -> Audit:
    """Every random site of `model` on `x`, whether it fired, and whether passes differ; nothing is changed.

    Args:
        model: Any module, in the mode it will be sampled in.
        x: As for `sample`.
        n_passes: How many passes are compared.
        batch_dim: The axis of `x` that counts the rows.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1)).eval()
    >>> found = audit(net, torch.zeros(2, 4))
    >>> found.sites, found.differed, found.keep
    ((Site(name='2', kind='dropout', rate=0.1, fired=True),), True, {'3.weight': 0.9})
    """
    check_model(model)
    n_passes = check_count("n_passes", n_passes)
    with steady():
        return _audited(model, Inputs.of(x, batch_dim, model=model), n_passes)


def _audited(model: nn.Module, inputs: Inputs, n_passes: int) -> Audit:
    seen = trace(model, inputs)
    asleep = trace(model, inputs, switch=False, evaluation=True)
    silent = _silent(model, seen)
    warnings = [*_warnings(model, seen, asleep), *(f"{why}." for why in silent.values())]
    differed, strategy = False, None
    reasons: tuple[str, ...] = ()
    try:
        with torch.no_grad():
            plan = find_plan(model, inputs, "auto", False, False)
            if plan.rows is not None:
                inputs = replace(inputs, axes=plan.rows.axes)
            outputs = SampleCall(model, inputs, plan, 0, False).again(0, n_passes, {})
    except ValueError as error:
        warnings.append(str(error))
    else:
        tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]
        differed = any(not torch.equal(t[0], t[k]) for t in tensors for k in range(1, n_passes))
        strategy, reasons = plan.strategy, plan.reasons
        if not differed and inputs.rows:
            warnings.append(
                f"{n_passes} passes gave the same: what is dropped does not reach the output as it stands, "
                "or too seldom on so few rows."
            )
    sites = Counter(seen.sites)
    return Audit(
        tuple(sites), tuple(sites.values()), seen.hidden, differed, strategy, reasons, seen.prefix, seen.keep, silent,
        tuple(warnings),
    )  # fmt: skip


def add_dropout(
    model: Model, p: float, *, layer: Callable[..., nn.Module] = Dropout, before: Before | None = None
) -> Model:
    """`model` itself, now with dropout in front of its weights: q for a net that has none.

    Weights are the same objects, and no name in the state dict changes. `remove_dropout` undoes it.

    Args:
        model: Any module; changed in place.
        p: The rate of being dropped, in (0, 1).
        layer: What to insert, called as ``layer(p)``: Dropout, GaussianDropout, ConcreteDropout, nn.Dropout2d and
            so on. Layers with random weights are put in the place of plain ones: DropConnectLinear,
            DropConnectConv2d, DropConnectLSTM and so on, DropConnect for whichever of them fits; GaussianLinear
            begins with the weights' variance under dropout.
        before: "linear" layers, "all" for convolutions too, or a predicate on weight layers: ``f(module)`` or
            ``f(name, module)``. None: those that `layer` takes the place of, else the linear ones.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> [type(m).__name__ for m in add_dropout(net, 0.1, before=lambda name, _: name == "2").modules()]
    ['Sequential', 'Linear', 'ReLU', 'Linear', 'Dropout']
    """
    check_model(model)
    check_call("layer", layer)
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 < p < 1:
        raise ValueError(f"`p` must be a dropout rate between 0 and 1; got {p!r}.")
    replaces = layer is DropConnect or layer in _PLAIN
    picked = before or (_replaced_by(layer) if replaces else "linear")
    chosen = dict(weight_layers(model, picked, recurrent=replaces))
    if not chosen:
        told = repr(picked) if before or not replaces else f"layer={layer.__name__}"
        raise ValueError(
            f"`before` must pick at least one layer; {told} picks none of the weight layers of "
            f"{type(model).__name__}. Give a predicate, or 'all' for convolutions too."
        )
    for name, module in chosen.items():
        if hasattr(module, INSERTED) or hasattr(module, _CONVERTED):
            raise ValueError(f"`model` has dropout added to {name or 'it'} already; call remove_dropout(model) first.")
    if replaces:
        for module, stochastic in _pairs(chosen, layer):
            _convert(module, stochastic, p)
        return model
    for module in chosen.values():
        module.add_module(INSERTED, layer(p).to(next(module.parameters()).device).train(module.training))
        module.register_forward_pre_hook(_drop_first_input)
    return model


def remove_dropout(model: Model) -> Model:
    """`model` itself without what `add_dropout` added; dropout of its own is left alone.

    >>> net = add_dropout(nn.Linear(4, 1), 0.1)
    >>> remove_dropout(net)
    Linear(in_features=4, out_features=1, bias=True)
    """
    check_model(model)
    for module in list(model.modules()):
        if hasattr(module, INSERTED):
            delattr(module, INSERTED)
            for hooks in hook_places(module):
                for key in [key for key, hook in hooks.items() if hook is _drop_first_input]:
                    del hooks[key]
        if hasattr(module, _CONVERTED):
            delattr(module, _CONVERTED)
            delattr(module, "p" if isinstance(module, DropConnect) else "log_std")
            module.__class__ = _PLAIN[type(module)]
    return model


def _drop_first_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (getattr(module, INSERTED)(args[0]), *args[1:])


# ------------------------------------------------------------------------------ auditing


def _warnings(model: nn.Module, seen: Trace, asleep: Trace) -> Iterator[str]:
    """What to know of the sites met by a pass, and by one in evaluation mode."""
    for s in dict.fromkeys(s for s in asleep.sites if s.fired):
        yield f"{_label(s)} draws in evaluation mode too: the model is never deterministic."
    for s in dict.fromkeys(seen.sites):
        if s.rate == 0:
            yield f"{_label(s)} has rate 0 and drops nothing."
        if s.rate == 1:
            yield f"{_label(s)} has rate 1 and drops everything, in every pass."
    scripted = {name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)}
    for name, m in model.named_modules():
        where = name or "the model"
        if isinstance(m, kinds.BATCH_NORMS) and m.training:
            yield f"{where} is in training mode: each pass has batch statistics of its own, and they move once a call."
        if is_compiled(m):
            yield f"{where} is compiled: while sampling it runs as it was written."
        if name in scripted and (not name or name.rpartition(".")[0] not in scripted):
            yield f"{where} is traced or scripted: its draws cannot be intercepted, and passes are run one by one."
    for operator in seen.hidden:
        yield f"{operator} draws from a global generator: passes are run one by one."
    if seen.recomputes:
        yield "activations are recomputed (gradient checkpointing): sample refuses to run with gradients."


def _silent(model: nn.Module, seen: Trace) -> dict[str, str]:
    """The sites that drew nothing though they have a rate, each with the reason."""
    found = {
        s.name: f"{_label(s)} was called with training off, whatever the mode of the model"
        for s in seen.sites
        if not s.fired and s.rate != 0
    }
    met = {s.name for s in seen.sites}
    drawn = {(s.name, s.rate) for s in seen.sites if s.fired}
    for name, m in model.named_modules():
        rate = _rate(m)
        read = (name.rpartition(".")[0], rate) in drawn  # by its parent, as attention does with a Dropout of its own
        if rate and name not in met and not read and not seen.hidden:  # whose the hidden draws are nobody can say
            found[name] = f"{_label(Site(name, type(m).__name__, rate, False))} was not called"
    return found


def _rate(m: nn.Module) -> float | None:
    """The rate of a layer that draws by itself; None for any other."""
    if isinstance(m, (*kinds.DROPOUT, GaussianDropout, DropConnect)):
        return float(m.p)  # type: ignore[arg-type]
    if isinstance(m, ConcreteDropout):
        return float(m.rate.detach())
    if isinstance(m, nn.MultiheadAttention) or (isinstance(m, nn.RNNBase) and m.num_layers > 1):
        return float(m.dropout)
    return None


def _label(site: Site) -> str:
    return f"{site.name or 'the model'} ({site.kind}{'' if site.rate is None else f', rate {site.rate:.3g}'})"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# ------------------------------------------------------------------------------ choosing


def weight_layers(model: nn.Module, before: Before, *, recurrent: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The layers that `before` picks, by name; with `recurrent`, LSTMs and their like can be among them."""
    if not callable(before) and before not in ("linear", "all"):
        raise ValueError(f"`before` must be 'linear', 'all' or a predicate; got {before!r}.")
    # attention takes the weights of its output layer and never calls it
    bypassed = {m.out_proj for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    for name, module in model.named_modules():
        if module in bypassed or not (_has_weights(module) or (recurrent and isinstance(module, nn.RNNBase))):
            continue
        if before == "linear":
            wanted = _is_linear(module)
        elif before == "all":
            wanted = _is_linear(module) or isinstance(module, kinds.ANY_CONVOLUTION)
        else:
            wanted = before(name, module) if _takes_name(before) else before(module)
        if wanted:
            yield name, module


def _has_weights(module: nn.Module) -> bool:
    """A layer that multiplies its input by a weight, of torch or of somebody else."""
    weight = getattr(module, "weight", None)
    looked_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return isinstance(weight, Tensor) and weight.ndim > 1 and not looked_up and not kinds.is_norm(module)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's name for a linear layer


def _takes_name(predicate: Callable[..., bool]) -> bool:
    kinds = [p for p in inspect.signature(predicate).parameters.values() if p.default is p.empty]
    return len(kinds) > 1


# ------------------------------------------------------------------------------ layers with random weights


def _replaced_by(layer: Any) -> Callable[[nn.Module], bool]:
    """Whether a module is of a kind that `layer` takes the place of."""
    if layer is DropConnect:
        return lambda m: _is_linear(m) or isinstance(m, (*kinds.ANY_CONVOLUTION, nn.RNNBase))
    return _is_linear if _PLAIN[layer] is nn.Linear else lambda m: isinstance(m, _PLAIN[layer])


def _pairs(chosen: dict[str, nn.Module], layer: Any) -> list[tuple[nn.Module, Any]]:
    """Each module with what takes its place; refuses one that has nothing, before any is changed."""
    places = {_PLAIN[c]: c for c in _PLAIN if c is layer or (layer is DropConnect and issubclass(c, DropConnect))}
    for name, module in chosen.items():
        if type(module) not in places:
            kinds = ", ".join(f"nn.{plain.__name__}" for plain in places)
            raise ValueError(
                f"`layer` {layer.__name__} takes the place of {kinds}; {name or 'the model'} is a "
                f"{type(module).__name__}. Choose others with `before`."
            )
    return [(module, places[type(module)]) for module in chosen.values()]


def _convert(module: nn.Module, layer: Any, p: float) -> None:
    """A plain layer becomes a stochastic one: same object, same parameters, another class."""
    module.__class__ = layer
    setattr(module, _CONVERTED, layer.__name__)
    if isinstance(module, DropConnect):
        module.p = float(p)
    elif isinstance(module, GaussianLinear):
        std = module.weight.detach().abs().clamp_min(1e-3) * math.sqrt(p / (1 - p))
        module.log_std = nn.Parameter(torch.log(std))
