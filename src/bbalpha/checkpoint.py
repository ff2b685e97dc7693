"""Model folders: safetensors weights and a JSON config, never pickle.

    model/
      config.json           what was saved: format, architecture, preprocessing, alpha, precision, facts, versions
      weights.safetensors   the tensors
      checksums.sha256      of these files, and of what else was written with them, as `sha256sum -c` reads it

A folder is written under a temporary name and renamed, so there is never half of one; it replaces a model folder and
nothing else. Loading hashes the bytes it is about to read: one changed byte in any of the three files is an error. No
file names code to run: a network made of torch's plain layers is rebuilt from a fixed list of them, any other is passed
in by the caller; nothing is changed or allocated before names and shapes are seen to fit.

    save(net, "model"); net = load("model")
    save(my_net, "model"); load("model", model=MyNet())
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bbalpha import _files as folders
from bbalpha._torch import hook_places
from bbalpha.checks import check_alpha, check_model, check_number, check_path
from bbalpha.layers import Dropout

FORMAT = 1
_CONFIG, _WEIGHTS, _CHECKSUMS = "config.json", "weights.safetensors", "checksums.sha256"
_OURS = (_CONFIG, _WEIGHTS, _CHECKSUMS, "detector.json", "card.json")
_BESIDE = ("card.json",)  # that may be written with a folder, and are checked like the rest
_STATE = r"step-\d{9,}"


class CorruptModelError(ValueError):
    """A model folder whose bytes are not those that were written."""


# ------------------------------------------------------------------------------ models


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    alpha: float | None = None,
    precision: float | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write `model` as the folder `path`; an older model there is replaced, anything else is refused.

    Args:
        model: Any module. One of nn.Sequential and torch's plain layers is loaded back without further help.
        path: The folder.
        alpha: What it was trained with.
        precision: Tau of the noise, for regression.
        preprocessing: What its inputs go through first; plain values and tensors.
        training: Facts worth keeping; plain values and tensors.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(net, f"{folder}/model", alpha=0.5)
    ...     torch.equal(load(f"{folder}/model")[0].weight, net[0].weight)
    True
    """
    check_model(model)
    alpha = None if alpha is None else check_alpha(alpha)
    precision = None if precision is None else check_number("precision", precision, above=0)
    state = model.state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise TypeError(f"`model` must keep its state in tensors; {odd[0]!r} is a {type(state[odd[0]]).__name__}.")
    content = {
        "kind": "model",
        "architecture": describe(model),
        "alpha": alpha,
        "precision": precision,
        "preprocessing": dict(preprocessing or {}),
        "training": dict(training or {}),
        "state": dict(state),
    }
    write_folder(path, content)


def load(path: str | os.PathLike[str], *, model: nn.Module | None = None) -> nn.Module:
    """The model in the folder `path`, in evaluation mode.

    Args:
        path: A folder written by `save`.
        model: Needed for an architecture of your own: a module of the same shape, whose state is replaced; it stays
            as it was where the shapes differ.

    Raises:
        CorruptModelError: If any byte of the folder has changed.
    """
    content = read_folder(path).content
    if "state" not in content:
        raise ValueError(f"`path` must be a model folder; {str(path)!r} holds a {content.get('kind', 'folder')}.")
    if model is None:
        if content.get("architecture") is None:
            raise ValueError(
                f"{str(path)!r} holds an architecture of its author's own; "
                "build it and pass it: load(path, model=MyNet())."
            )
        return build(content["architecture"], content["state"]).eval()
    check_model(model)
    check_state(model, content["state"])
    model.load_state_dict(content["state"])
    return model.eval()


def check_state(model: nn.Module, state: Any) -> None:
    """Refuse a state that is not of the names and shapes of the model's own."""
    told = "`model` does not have the shape of the saved one: "
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{told}its state must be tensors by name; got {type(state).__name__}.")
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name in (*own, *state):
        if name not in state or name not in own:
            raise ValueError(f"{told}{name!r} is {'not in the file' if name in own else 'in the file only'}.")
        if not is_lazy(own[name]) and own[name].shape != state[name].shape:
            shapes = f"{tuple(own[name].shape)} here and {tuple(state[name].shape)} in the file"
            raise ValueError(f"{told}{name!r} is {shapes}.")


# ------------------------------------------------------------------------------ architectures

# the only layers a file can ask for, with the arguments that rebuild them
_LAYERS: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "Linear": (nn.Linear, ("in_features", "out_features")),
    "Conv2d": (nn.Conv2d, ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")),
    "MaxPool2d": (nn.MaxPool2d, ("kernel_size", "stride", "padding")),
    "Flatten": (nn.Flatten, ("start_dim", "end_dim")),
    "Dropout": (nn.Dropout, ("p",)),
    "Dropout2d": (nn.Dropout2d, ("p",)),
    "FastDropout": (Dropout, ("p",)),
    "ReLU": (nn.ReLU, ()),
    "Tanh": (nn.Tanh, ()),
    "Sigmoid": (nn.Sigmoid, ()),
    "GELU": (nn.GELU, ("approximate",)),
    "SiLU": (nn.SiLU, ()),
    "Identity": (nn.Identity, ()),
}
_NAMES = {layer: name for name, (layer, _) in _LAYERS.items()}


def describe(model: nn.Module) -> dict[str, Any] | None:
    """The architecture of a network of plain layers as JSON values; None for any other.

    >>> describe(nn.Sequential(nn.Dropout(0.1)))
    {'layer': 'Sequential', 'children': {'0': {'layer': 'Dropout', 'p': 0.1}}}
    """
    check_model(model)
    if type(model) is nn.Sequential:
        children = {name: describe(child) for name, child in model.named_children()}
        whole = all(children.values()) and len(children) == len(model)  # a layer used twice is listed once
        return {"layer": "Sequential", "children": children} if whole else None
    name = _NAMES.get(type(model))
    if name is None or any(hook_places(model)):
        return None
    told: dict[str, Any] = {"layer": name}
    for argument in _LAYERS[name][1]:
        value = getattr(model, argument)
        told[argument] = list(value) if isinstance(value, tuple) else value
    if name in ("Linear", "Conv2d"):
        told["bias"] = model.bias is not None
    plain = getattr(model, "padding_mode", "zeros") == "zeros" and not getattr(model, "ceil_mode", False)
    plain = plain and getattr(model, "dilation", 1) == 1 if name == "MaxPool2d" else plain
    same_state = set(model.state_dict()) <= {"weight", "bias"}  # parametrised layers have more
    return told if plain and same_state else None


def build(architecture: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> nn.Module:
    """The network that `describe` told of.

    Args:
        architecture: From a file, so it may ask for anything.
        state: Its weights, which become the network's own; nothing is allocated before they are seen to fit. None
            gives fresh weights.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu" if state is None else "meta"):
            model = _build(architecture)
    except CorruptModelError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise CorruptModelError(f"The file asks for layers that cannot be built: {error}") from error
    if state is not None:
        check_state(model, state)
        odd = [name for name, value in state.items() if not value.is_floating_point()]
        if odd:
            raise CorruptModelError(f"The file's {odd[0]!r} must be floating-point numbers; got {state[odd[0]].dtype}.")
        model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    return model


def _build(architecture: Mapping[str, Any]) -> nn.Module:
    options = dict(architecture)
    name = options.pop("layer")
    if name == "Sequential":
        model = nn.Sequential()
        for child, told in options["children"].items():
            model.add_module(child, _build(told))
        return model
    if name not in _LAYERS:
        raise CorruptModelError(f"The file asks for a layer {name!r} that this version of bbalpha does not know.")
    layer, arguments = _LAYERS[name]
    unknown = set(options) - {*arguments, *(("bias",) if name in ("Linear", "Conv2d") else ())}
    if unknown:
        odd = min(map(str, unknown))
        raise CorruptModelError(f"The file asks for a {name} with {odd!r}, which bbalpha does not write.")
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    for argument, value in options.items():
        if not _is_plain(argument, value):
            raise CorruptModelError(f"The file asks for a {name} whose {argument} is {value!r:.40}.")
    return layer(**options)


def _is_plain(argument: str, value: Any) -> bool:
    """Whether a layer can have been written with this value."""
    if argument == "bias":
        return isinstance(value, bool)
    if argument == "p":
        return type(value) in (int, float) and 0 <= value <= 1
    if isinstance(value, str):
        return value in ("same", "valid", "none", "tanh")
    least = -64 if argument in ("start_dim", "end_dim") else 0
    numbers = value if isinstance(value, tuple) and 0 < len(value) <= 4 else (value,)
    return all(type(number) is int and least <= number < 2**31 for number in numbers)


# ------------------------------------------------------------------------------ folders


@dataclass(frozen=True)
class Folder:
    """What a folder holds.

    Attributes:
        content: What was passed to `write_folder`.
        versions: Of the libraries that wrote it.
        beside: The other files that were written with it.
    """

    content: dict[str, Any]
    versions: dict[str, str]
    beside: Mapping[str, bytes] = field(default_factory=dict)


def write_folder(
    path: str | os.PathLike[str], content: Mapping[str, Any], *, beside: Mapping[str, bytes] | None = None
) -> None:
    """Write nested dicts, lists, tuples, plain values and tensors as a folder, whole or not at all.

    Args:
        path: The folder; one written by us before is replaced, any other is left alone with an error. A link is
            followed.
        content: What `read_folder` gives back.
        beside: Another file of the folder, card.json, as {its name: its bytes}.
    """
    target = _real(path)
    check_replaceable(target)
    tensors: dict[str, Tensor] = {}
    config = {"format": FORMAT, "versions": versions(), "content": _pack(content, tensors, "")}
    files = {
        _CONFIG: json.dumps(config, indent=1, allow_nan=False).encode(),
        _WEIGHTS: safetensors.torch.save(tensors),
        **(beside or {}),
    }
    files[_CHECKSUMS] = _checksums(files)
    target.parent.mkdir(parents=True, exist_ok=True)
    with folders.writing(target):
        check_replaceable(target)
        fresh = folders.temporary(target)
        fresh.mkdir()
        try:
            for name, data in files.items():
                folders.write_file(fresh / name, data)
            folders.replace_folder(target, fresh)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def read_folder(path: str | os.PathLike[str]) -> Folder:
    """The content of a folder, every byte of it checked.

    Raises:
        FileNotFoundError: If there is no such folder.
        CorruptModelError: If any byte has changed, or it is not what bbalpha writes.
        ValueError: If a newer bbalpha wrote it.
    """
    target = _real(path)
    if not target.exists():
        target = next(reversed(folders.older(target)), target)  # the writer died between its two renames
    if not target.is_dir():
        raise FileNotFoundError(f"`path` must be a model folder; {str(path)!r} does not exist.")
    missing = [name for name in (_CONFIG, _WEIGHTS, _CHECKSUMS) if not (target / name).is_file()]
    if missing:
        raise CorruptModelError(f"`path` must be a model folder; {str(path)!r} has no {missing[0]}.")
    told = (target / _CHECKSUMS).read_bytes()
    beside = [name for name in _BESIDE if f"  {name}\n".encode() in told]
    try:
        files = {name: (target / name).read_bytes() for name in (_CONFIG, _WEIGHTS, *beside)}
    except (FileNotFoundError, IsADirectoryError, MemoryError) as error:
        told_of = error or "a file is larger than the memory"
        raise CorruptModelError(f"{str(path)!r} is not whole: {told_of}.") from error
    if told != _checksums(files):
        wrong = [n for n in files if f"{hashlib.sha256(files[n]).hexdigest()}  {n}\n".encode() not in told]
        raise CorruptModelError(
            f"{str(path)!r} is damaged: {wrong[0] if wrong else _CHECKSUMS} is not what was written. Save it again."
        )
    try:
        config = json.loads(files[_CONFIG])
        form, wrote = config.get("format"), dict(config.get("versions", {}))
        if form == FORMAT:
            content = _unpack(config["content"], safetensors.torch.load(files[_WEIGHTS]))
            return Folder(dict(content), wrote, {name: files[name] for name in beside})
    except (
        AttributeError, KeyError, TypeError, ValueError, RecursionError, OverflowError, MemoryError, RuntimeError,
        safetensors.SafetensorError,
    ) as error:  # fmt: skip
        raise CorruptModelError(f"{str(path)!r} is not of the form that bbalpha writes: {error!r}.") from error
    raise ValueError(
        f"{str(path)!r} has format {form!r} and this bbalpha reads format {FORMAT}. "
        f"It was written by bbalpha {wrote.get('bbalpha', 'unknown')}; use that version."
    )


def write_kind(path: str | os.PathLike[str], kind: str, content: Mapping[str, Any]) -> None:
    """Write a folder that says of what `kind` it is; it replaces one of the same kind and nothing else."""
    if (_real(path) / _CONFIG).is_file():
        held = read_folder(path).content.get("kind", "folder of another kind")
        if held != kind:
            raise ValueError(
                f"`path` must be new or hold a {kind}; {str(path)!r} holds a {held}, which would be lost. Choose "
                "another name."
            )
    write_folder(path, {"kind": kind, **content})


def read_kind(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """The content of a folder that says it is of this `kind`; any other is an error."""
    content = read_folder(path).content
    held = content.get("kind", "folder of another kind")
    if held != kind:
        raise ValueError(f"`path` must hold a {kind}; {str(path)!r} holds a {held}.")
    return content


def _real(path: str | os.PathLike[str]) -> Path:
    """Where `path` leads, links followed."""
    return Path(os.path.realpath(check_path("path", path)))


def check_replaceable(target: Path) -> None:
    """Refuse to replace what is no model folder, or holds anything else besides."""
    above = next((p for p in target.parents if p.exists()), None)
    if above is not None and not above.is_dir():
        raise ValueError(f"`path` must lie in a folder; {str(above)!r} is a file.")
    if not target.exists():
        return
    found = [p.name for p in target.iterdir()] if target.is_dir() else None
    if found is None or (found and _CHECKSUMS not in found):
        raise ValueError(
            f"`path` must be new or a model folder; {str(target)!r} is something else. Choose another name."
        )
    others = [name for name in found if name not in _OURS and folders.leftover_of(name) not in _OURS]
    if others:
        raise ValueError(
            f"`path` must be new or a model folder; {str(target)!r} holds {sorted(others)[0]!r} too, which would be "
            "lost. Choose another name."
        )


def versions(packages: Iterable[str] = ("bbalpha", "torch", "numpy", "safetensors")) -> dict[str, str]:
    """The versions of those packages that are installed; of a source tree that is not, there is none."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# ------------------------------------------------------------------------------ states of a run


def write_state(folder: Path, step: int, content: Mapping[str, Any]) -> None:
    """Write the state of a run after `step` steps as a folder of its own; the one before it is kept too."""
    write_folder(folder / f"step-{step:09d}", content)
    for old in _states(folder)[:-2]:
        folders.remove(old)
    folders.clear_leftovers(folder, _STATE)


def newest_state(folder: Path) -> dict[str, Any] | None:
    """The newest state in `folder` that can be read, None if there is none; a damaged one gives way."""
    states = _states(folder)
    for path in reversed(states):
        try:
            return read_folder(path).content
        except CorruptModelError:
            if path == states[0]:
                raise
    return None


def _states(folder: Path) -> list[Path]:
    found = [p for p in folder.glob("step-*") if re.fullmatch(_STATE, p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


# ------------------------------------------------------------------------------ helpers


def _checksums(files: Mapping[str, bytes]) -> bytes:
    return "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in files).encode()


def _pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """`value` as JSON, its tensors moved to `tensors`."""
    if isinstance(value, Tensor):
        tensors[where] = value.detach().cpu().contiguous().clone()
        return {"#": "tensor", "name": where}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"#": "float", "value": repr(value)}
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and k != "#" for k in value):
            return {k: _pack(v, tensors, f"{where}.{k}" if where else k) for k, v in value.items()}
        return {"#": "items", "items": [[k, _pack(v, tensors, f"{where}.{k}")] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [_pack(v, tensors, f"{where}.{i}") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"#": "tuple", "items": items}
    raise TypeError(f"A model folder holds plain values and tensors; got {type(value).__name__} at {where!r}.")


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `_pack` was given."""
    if isinstance(value, list):
        return [_unpack(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("#")
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "float":
        return float(value["value"])
    if kind == "tuple":
        return tuple(_unpack(v, tensors) for v in value["items"])
    if kind == "items":
        return {k: _unpack(v, tensors) for k, v in value["items"]}
    return {k: _unpack(v, tensors) for k, v in value.items()}
