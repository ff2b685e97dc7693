"""Which random sites draw: `sites=` of `sample`, `predict_*` and `fit`. The others are off, as in evaluation mode.

A trace tells the modules that draw, in order; those that are not live are switched off by their `training` flag, and a
second trace has to show that they are silent and that the live ones still draw. What cannot be told apart is refused.

    asked(net, "last")                            # what was asked for, to remember a plan by
    narrowed(net, inputs, seen, None, "last")     # the modules to switch on, those to switch off, and the second trace
"""

from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

from torch import nn

from bbalpha._engine.inputs import Inputs
from bbalpha._engine.sites import may_be_random
from bbalpha._engine.tracing import Trace, same_structure, trace

Sites = str | Sequence[str] | Callable[[str, nn.Module], bool] | float
Asked = str | float | tuple[str, ...] | frozenset[str]  # "last", a share, names, or what a function said yes to
Names = frozenset[str]

_FORMS = 'a name or a sequence of names, a function (name, module) -> bool, "last", or a share in (0, 1]'


def asked(model: nn.Module, sites: Any) -> Asked:
    """What `sites` asks for, as something that can be compared; a function is asked anew, of every module.

    >>> asked(nn.Linear(1, 1), ["head", "body.1"])
    ('head', 'body.1')
    """
    if isinstance(sites, str):
        return sites if sites == "last" else (sites,)
    if callable(sites):
        yes = frozenset(name for name, m in model.named_modules(remove_duplicate=False) if sites(name, m))
        if not yes:
            raise ValueError("`sites` must leave a random site live; the function said no to every module.")
        return yes
    if isinstance(sites, Real) and not isinstance(sites, bool):
        if not 0 < float(sites) <= 1:
            raise ValueError(f"`sites` must be a share of the depth above 0 and at most 1; got {sites!r}.")
        return float(sites)
    names = tuple(sites) if isinstance(sites, Iterable) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"`sites` must be {_FORMS}; got {sites!r}.")
    if not names:
        raise ValueError(f"`sites` must name at least one module; got {sites!r}.")
    return names


def narrowed(
    model: nn.Module, inputs: Inputs, seen: Trace, only: Names | None, asked: Asked, *, evaluation: bool
) -> tuple[Names, Names, Trace]:
    """The modules to switch on, those to switch off, and what a pass then meets.

    Args:
        model: The caller's.
        inputs: A few rows.
        seen: A pass with all random sites on.
        only: The modules that were switched on for it; None for all that may be random.
        asked: What is to stay on.
        evaluation: As in `trace`.
    """
    if not seen.drew:
        raise ValueError(seen.nothing_random(model))
    live = _late(seen, asked) if isinstance(asked, (str, float)) else _named(model, seen, asked)
    named = frozenset(name for name, m in model.named_modules() if may_be_random(m))
    rest = named - live
    objections = []
    # modules that draw nothing stay as they are, unless their flag is what lets others draw
    for off in dict.fromkeys((rest - seen.quiet, rest)):
        on = (named if only is None else only) - off
        less = trace(model, inputs, only=on, off=off, evaluation=evaluation)
        objection = _objection(seen, less, live)
        if objection is None:
            return on, off, less
        objections.append(objection)
    raise ValueError(objections[0])


def without_effect(seen: Trace) -> str:
    """The error where what is live does not reach the output."""
    return (
        f"`sites` must leave a random site live that has an effect on the output; {_list(seen.drew)} has none, so all "
        "passes would be equal. Choose others."
    )


# ------------------------------------------------------------------------------ who is live


def _late(seen: Trace, asked: str | float) -> Names:
    """The modules of the last site, or of the last share of the sites, in the order they draw."""
    count = max(1, int(asked * len(seen.drew) + 1e-9)) if isinstance(asked, float) else 1
    live, earlier = frozenset(seen.drew[-count:]), frozenset(seen.drew[:-count])
    if live & earlier:
        raise ValueError(
            f"`sites={asked!r}` must part modules that draw early from those that draw late; {_list(live & earlier)} "
            "does both. Give each place a dropout of its own, or choose by name, which has all places of a module live."
        )
    return live


def _named(model: nn.Module, seen: Trace, asked: tuple[str, ...] | Names) -> Names:
    """The modules that were named, with what is inside of them; those that a function chose, alone."""
    names: dict[int, list[str]] = {}  # one module may have several
    for name, m in model.named_modules(remove_duplicate=False):
        names.setdefault(id(m), []).append(name)
    first = {name: own[0] for own in names.values() for name in own}  # the name that a trace knows
    meant = set(asked)
    if isinstance(asked, tuple):
        for name in asked:
            inside = {n for n in first if not name or n == name or n.startswith(f"{name}.")}
            _check_name(name, {first[n] for n in inside}, seen)
            meant |= inside
    live = frozenset(first[n] for n in meant)
    if not live & set(seen.drew):
        raise ValueError(
            f"`sites` must leave a random site live; the function said no to all of them: {_list(seen.drew)}."
        )
    for own in names.values():
        left = [n for n in own if n not in meant]
        if left and len(left) < len(own) and own[0] in seen.drew:
            raise ValueError(
                f"`sites` must name one module by all of its names or by none; {own[0]!r} is also "
                f"{_list(own[1:])}, and {_list(left)} is not among them. Name that too, or give each place its own."
            )
    return live


def _check_name(name: str, inside: set[str], seen: Trace) -> None:
    """Refuse a name that no module has, or in which nothing is random."""
    if not inside:
        raise ValueError(
            f"`sites` must name modules as in model.named_modules(); got {name!r}. Random sites are in "
            f"{_list(seen.drew)}."
        )
    if not inside & set(seen.drew):
        raise ValueError(
            f"`sites` must name modules with a random site in them; {name!r} has none that is on. Random sites are in "
            f"{_list(seen.drew)}."
        )


# ------------------------------------------------------------------------------ who is silent


def _objection(seen: Trace, less: Trace, live: Names) -> str | None:
    """What speaks against `less`, a pass with what is not live switched off; None if nothing does."""
    if less.foreign:
        return (
            f"`sites` needs draws that belong to a module; this model also draws from {', '.join(less.hidden)}, which "
            "nobody can tell by module. Let it draw from torch, or leave `sites` out."
        )
    loud = [name for name in less.drew if name not in live]
    if loud:
        return (
            f"`sites` must leave out only what can be switched off; {_list(loud)} draws in evaluation mode too. Let "
            "that follow `self.training`, or have it among the live sites."
        )
    lost = [name for name in seen.drew if name in live and name in less.ran and name not in less.drew]
    if lost or not less.drew:
        return (
            f"`sites` must leave live what draws by itself; {_list(lost or live)} draws only while a module that is "
            "not live is in training mode. Have that among the live sites."
        )
    if not same_structure(less.output, seen.output):
        return (
            "`sites` must not change what the model returns; with the other sites off, as in evaluation mode, it "
            "returns another structure. Let its forward return the same in both modes."
        )
    return None


def _list(names: Iterable[str]) -> str:
    """Names for a sentence, each once."""
    told = [repr(name) if name else "the model itself" for name in dict.fromkeys(names)]
    return ", ".join(told[:8]) + (f" and {len(told) - 8} more" if len(told) > 8 else "")
