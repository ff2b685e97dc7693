"""Which run a checkpoint folder holds.

A run is told from others by its fingerprint: all that its steps follow from. Where a folder holds the state of the same
run, it is taken up; any other state is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bbalpha.checkpoint import CorruptModelError, newest_state

KIND = "training state"
_NEEDED = ("weights", "best", "optimizer", "schedule", "scaler", "rng", "epoch_rng", "sums", "halted", "loss", "nll",
           "rates", "steps_an_epoch")  # fmt: skip


def state_in(folder: Path) -> dict[str, Any] | None:
    """The newest state of a run of `fit` in a folder, None if it holds none."""
    content = newest_state(folder)
    if content is None:
        return None
    if content.get("kind") != KIND or not isinstance(content.get("fingerprint"), dict):
        raise ValueError(f"`checkpoint` must be new or hold a run of `fit`; {str(folder)!r} holds something else.")
    whole = all(type(content.get(name)) is int for name in ("seed", "epoch", "batch", "step"))
    if not whole or not content.keys() >= set(_NEEDED):
        raise CorruptModelError(f"{str(folder)!r} is not of the form that `fit` writes. Delete it, and begin anew.")
    return content


def check_same(before: Mapping[str, Any], fingerprint: Mapping[str, Any], folder: Path | None) -> None:
    """Refuse the state of another run, and name what differs."""
    for key, now in fingerprint.items():
        if key not in before:
            raise ValueError(
                f"`checkpoint` holds a run of an older bbalpha, which did not note its `{key}`. Choose another "
                f"folder, or delete {str(folder)!r}."
            )
        was = before[key]
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):  # name the part
            part = next(k for k in (*now, *was) if was.get(k) != now.get(k))
            was, now = f"{part} {was.get(part)}", now.get(part)
        raise ValueError(
            f"`checkpoint` holds a run with another `{key}` ({was}, now {now}). "
            f"Choose another folder, or delete {str(folder)!r}."
        )
