"""What a long fit has trained so far, on disk: one that is cut off and begun again trains the rest.

    with remembering("model.part"):
        model.fit(X, y)                 # Ctrl-C, and again: it goes on

Everything is addressed by what it hangs on, data and settings, so that another fit finds nothing of this one.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bbalpha.checkpoint import CorruptModelError, read_folder, write_folder

_FOLDER: ContextVar[Path | None] = ContextVar("folder of what was trained", default=None)


@contextmanager
def remembering(folder: str | Path) -> Iterator[None]:
    """A context in which automatic estimators keep what they have trained in `folder`, and take it from there."""
    token = _FOLDER.set(Path(folder))
    try:
        yield
    finally:
        _FOLDER.reset(token)


@dataclass(frozen=True)
class Memory:
    """What was trained under one fit.

    Attributes:
        about: A hash of all that the fit hangs on; None where nothing is kept.
    """

    about: str | None

    @classmethod
    def of(cls, *what: Any) -> "Memory":
        """The memory of a fit that hangs on these arrays and plain values."""
        if _FOLDER.get() is None:
            return cls(None)
        digest = hashlib.sha256()
        for part in what:
            digest.update(part.tobytes() if hasattr(part, "tobytes") else repr(part).encode())
        return cls(digest.hexdigest())

    def part(self, name: str) -> "Memory":
        """That of a fit that differs from this one by what is named."""
        return self if self.about is None else Memory(hashlib.sha256(f"{self.about} {name}".encode()).hexdigest())

    def recalled(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What is kept under a name, or what `make` gives, which is then kept."""
        folder = _FOLDER.get()
        if self.about is None or folder is None:
            return make()
        path = folder / hashlib.sha256(f"{self.about} {name}".encode()).hexdigest()[:24]
        try:
            return read_folder(path).content
        except (FileNotFoundError, CorruptModelError):
            found = make()
            write_folder(path, {"kind": "part of a fit"} | found)
            return found
