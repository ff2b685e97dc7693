"""What a long fit has trained so far, on disk: one that is cut off and begun again trains the rest.

    with remembering("model.part"):
        model.fit(X, y)                 # Ctrl-C, and again: it goes on

Everything is addressed by what it hangs on, data and settings, so that another fit finds nothing of this one.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
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
        return next(self.recalled_each([name], lambda _: iter([make()])))

    def recalled_each(
        self, names: Sequence[str], make: Callable[[list[int]], Iterator[dict[str, Any]]]
    ) -> Iterator[dict[str, Any]]:
        """What is kept under each name, in their order; `make` gives those that are missing, by their numbers."""
        kept = [self._kept(name) for name in names]
        made = make([i for i, content in enumerate(kept) if content is None])
        for name, content in zip(names, kept, strict=True):
            yield content if content is not None else self._keep(name, next(made))

    def _kept(self, name: str) -> dict[str, Any] | None:
        path = self._path(name)
        try:
            return None if path is None else read_folder(path).content
        except (FileNotFoundError, CorruptModelError):
            return None

    def _keep(self, name: str, content: dict[str, Any]) -> dict[str, Any]:
        path = self._path(name)
        if path is not None:
            write_folder(path, {"kind": "part of a fit"} | content)
        return content

    def _path(self, name: str) -> Path | None:
        folder = _FOLDER.get()
        if self.about is None or folder is None:
            return None
        return folder / hashlib.sha256(f"{self.about} {name}".encode()).hexdigest()[:24]
