"""What a plan hangs on: the modules of a model, their flags, hooks and plain attributes, compared at every call."""

from collections.abc import Iterable
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from bbalpha._torch import MODULE_STATE, children, is_hooked, version_of

_PLAIN = frozenset((int, float, str, bool, type(None), bytes, complex))
_GETTERS: dict[type, Any] = {}  # of the plain attributes of torch's own modules


def note_state(module: nn.Module, modules: list[nn.Module], facts: list[Any], seen: dict[int, None]) -> None:
    """What a plan hangs on, module by module; `modules()` would take three times as long."""
    modules.append(module)
    attributes = module.__dict__
    kind = type(module)
    getter = _GETTERS.get(kind) or _getter(kind, attributes)
    try:
        facts.append((id(module), kind, is_hooked(attributes), getter(attributes)))
    except KeyError:  # not the attributes of the first of its kind, or none that are known beforehand
        facts += (id(module), kind, is_hooked(attributes), getattr(module, "training", None))
        facts += _attributes(attributes, seen)
    for child in children(module).values():
        if child is not None:
            note_state(child, modules, facts, seen)


def _getter(kind: type, attributes: dict[str, Any]) -> Any:
    """Reads the plain attributes of one of torch's own modules; fails for others, which may have any."""
    if not kind.__module__.startswith("torch.nn.modules") or "training" not in attributes:
        return itemgetter(None)
    names = [name for name, value in attributes.items() if type(value) in _PLAIN]
    getter = _GETTERS[kind] = itemgetter("training", *names)
    return getter


def _attributes(attributes: dict[str, Any], seen: dict[int, None]) -> Iterable[Any]:
    """Names and values of attributes that may steer a forward; of objects their own attributes too, one level deep."""
    for name, value in attributes.items():
        kind = type(value)
        if kind in _PLAIN:
            yield name, value
        elif name in MODULE_STATE:
            continue
        elif isinstance(value, Tensor):
            yield name, id(value), version_of(value)
        elif kind in (list, tuple, set, frozenset):
            yield name, tuple(v if type(v) in _PLAIN else id(v) for v in list(value)[:64])
        elif kind is dict:
            yield name, tuple((k, v) for k, v in list(value.items())[:64] if type(v) in _PLAIN)
        else:
            yield name, id(value)
            if id(value) not in seen and not isinstance(value, (nn.Module, type)) and not is_trainer(kind):
                seen[id(value)] = None
                yield from ((k, v) for k, v in getattr(value, "__dict__", {}).items() if type(v) in _PLAIN)


def is_trainer(kind: type) -> bool:
    """Whether it is a trainer of Lightning, to which its modules refer.

    It has the model, the data and the time of the day, and is no part of the model: a copy of it would be one of the
    data too.
    """
    found = _TRAINERS.get(kind)
    if found is None:
        found = _TRAINERS[kind] = any(base.__module__.partition(".")[0] in _LIGHTNING for base in kind.__mro__)
    return found


_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
_TRAINERS: "WeakKeyDictionary[type, bool]" = WeakKeyDictionary()
