"""The folder of a loop: explorer.json and its hash, written whole."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from bbalpha import _files as folders

_FILE, _FORMAT = "explorer.json", 1


def write_folder(folder: Path, state: dict[str, Any]) -> None:
    """Put the state into a folder, which appears whole or stays as it was."""
    target = Path(os.path.realpath(folder))
    if target.exists() and not (target / _FILE).is_file():
        raise FileExistsError(
            f"`folder` must be new, or hold a loop that was saved; {str(folder)!r} holds other things."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with folders.writing(target):
        fresh = folders.temporary(target)
        fresh.mkdir()
        folders.write_file(fresh / _FILE, _bytes({"format": _FORMAT, **state}))
        folders.replace_folder(target, fresh)


def read_folder(folder: Path) -> dict[str, Any]:
    """The state that was put there."""
    path = folder / _FILE
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} holds no loop; save one there with explorer.save({str(folder)!r}).")
    try:
        data = path.read_bytes()
        state = dict(json.loads(data)["explorer"])
        whole = data == _bytes(state)
    except (ValueError, KeyError, TypeError, RecursionError):  # no JSON any more, or of another shape
        whole = False
    if not whole:
        raise ValueError(f"{str(path)!r} is damaged: it is not what was written. Tell the loop anew what was observed.")
    form = state.pop("format", None)
    if form != _FORMAT:
        raise ValueError(f"{str(path)!r} has format {form!r} and this bbalpha reads {_FORMAT}.")
    return state


def _bytes(state: dict[str, Any]) -> bytes:
    told = json.dumps(state, allow_nan=False)
    file = {"explorer": state, "sha256": hashlib.sha256(told.encode()).hexdigest()}
    return json.dumps(file, indent=1, allow_nan=False).encode()
