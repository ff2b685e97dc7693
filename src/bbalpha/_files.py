"""Writing where others may write too: locks that die with their holder, files that appear whole, leftovers that go.

Who writes `name` holds the lock `.name.lock` beside it meanwhile. The system takes it from a process that is killed, so
whoever gets it next knows that what the last one left behind is nobody's.

    with writing(path):
        fresh = temporary(path)
        ...
        fresh.rename(path)
"""

import io
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

PATIENCE = 60.0  # seconds that a writer waits for another one of the same name
_LEFTOVER = re.compile(r"\.(.+)\.[0-9a-f]{32}\.(tmp|gone|old)")  # nobody else gives such names


class FolderInUseError(OSError):
    """Somebody else is writing there."""


class Lock:
    """The right to write `path`: one holder at a time among all threads and processes; gone when its process is.

    Attributes:
        sure: Whether holding it means that nobody else does; False on a file system that knows no locks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mine, other = Lock(Path(folder) / "a"), Lock(Path(folder) / "a")
    ...     print(mine.acquire(), other.acquire(), mine.release(), other.acquire(), other.release())
    True False None True None
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f".{path.name}.lock")
        self.sure = True
        self._file: io.FileIO | None = None
        self._held = False

    def acquire(self) -> bool:
        """Whether it is ours now; False while somebody else has it."""
        while True:
            self._file, self.sure = io.FileIO(self.path, "a"), True
            try:
                _lock(self._file.fileno())
            except BlockingIOError:
                self.forget()
                return False
            except OSError:  # no locks on this file system
                self.sure = False
            self._held = True
            _HELD.add(self)
            if self._is_there(self._file):
                return True
            self.release()  # the file of a holder that has just removed it: not the one others would find

    def release(self) -> None:
        """Give it back; does nothing where it is not held."""
        file = self._file
        if file is None:
            return
        if self._held and not file.closed and self._is_there(file):
            with suppress(OSError):  # Windows removes no open file: it stays, and stops nobody
                self.path.unlink()
        self.forget()

    def forget(self) -> None:
        """Let go of the file: a child process does so, and its parent goes on holding the lock."""
        if self._file is not None:
            self._file.close()
        self._file, self._held = None, False

    def _is_there(self, file: io.FileIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False


_HELD: WeakSet[Lock] = WeakSet()


def _forget() -> None:
    for lock in list(_HELD):
        lock.forget()


if hasattr(os, "register_at_fork"):  # else the workers of a killed run would hold on to its lock
    os.register_at_fork(after_in_child=_forget)


def _lock(descriptor: int) -> None:
    """Lock an open file, or raise BlockingIOError where it is locked already."""
    if sys.platform == "win32":
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError from error
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which nobody else writes `path`, and what killed writers of it left is gone."""
    lock, start = Lock(path), time.monotonic()
    with Restoring(lock.release), Restoring(lock.release):
        while not lock.acquire():
            if time.monotonic() - start > PATIENCE:
                raise FolderInUseError(
                    f"{str(path)!r} has been written to by somebody else for {PATIENCE:.0f} seconds. Try again later."
                )
            time.sleep(0.02)
        if lock.sure:
            _clear(path, [] if path.exists() else older(path)[-1:])  # the only copy of a folder is no leftover
        yield


def temporary(path: Path) -> Path:
    """A new name beside `path` for what is to become it."""
    return _beside(path, "tmp")


def remove(path: Path) -> None:
    """Remove a folder at once: renamed first, so that half of one is never taken for a whole."""
    gone = _beside(path, "gone")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def replace_folder(path: Path, fresh: Path) -> None:
    """Rename `fresh` to `path`; a folder cannot be renamed over a full one, so that steps aside first."""
    aside = _beside(path, "old")
    if path.exists():
        path.rename(aside)
    fresh.rename(path)
    for copy in older(path):
        shutil.rmtree(copy, ignore_errors=True)


def older(path: Path) -> list[Path]:
    """The folders that were `path` and stepped aside for a writer that died, the newest one last."""
    found = [p for p in path.parent.glob(".*.old") if leftover_of(p.name) == path.name or p.name == f".{path.name}.old"]
    return sorted((p for p in found if p.is_dir()), key=lambda p: p.stat().st_ctime_ns)


def write_file(path: Path, data: bytes) -> None:
    """Write a file, on the disk when this returns."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write `path` whole or not at all; nobody else may be writing it."""
    clear_leftovers(path.parent, re.escape(path.name))
    fresh = temporary(path)
    try:
        write_file(fresh, data)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def leftover_of(name: str) -> str | None:
    """The name whose writer made a temporary or older copy of this name; None for any other file."""
    found = _LEFTOVER.fullmatch(name)
    return None if found is None else found[1]


def clear_leftovers(folder: Path, pattern: str) -> None:
    """Remove what killed writers of names like `pattern` left in `folder`; what is being written stays."""
    plain = re.compile(rf"\.({pattern})\.(gone|old|lock)")  # as earlier versions named them, and locks
    for name in {leftover_of(p.name) or (plain.fullmatch(p.name) or ("", ""))[1] for p in folder.glob(".*")}:
        if not re.fullmatch(pattern, name):
            continue
        lock = Lock(folder / name)
        with Restoring(lock.release), Restoring(lock.release):
            if lock.acquire() and lock.sure:
                _clear(folder / name, [])
                for end in ("gone", "old"):
                    shutil.rmtree(folder / f".{name}.{end}", ignore_errors=True)


def _beside(path: Path, end: str) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.{end}")


def _clear(path: Path, kept: list[Path]) -> None:
    """Remove the leftovers of `path`, whose lock the caller holds, but for those that are `kept`."""
    for left in path.parent.glob(".*"):
        if leftover_of(left.name) != path.name or left in kept:
            continue
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


# ------------------------------------------------------------------------------ what was changed is put back


class Restoring:
    """A context that calls `restore` on its way out; `restore` must do no harm when it is called twice.

    Ctrl-C can strike anywhere, inside a ``finally`` too. Of two contexts, one inside the other, one always ends.

    >>> with Restoring(lambda: print("back")):
    ...     print("there")
    there
    back
    """

    def __init__(self, restore: Callable[[], object]) -> None:
        self.restore = restore

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.restore()
