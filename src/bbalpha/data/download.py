"""Files from the web: whole and checked, or not there at all.

A file arrives under a temporary name beside its own, is checked, and only then renamed. A connection that is cut is
taken up again where it stopped, in the same call or in a later one. Who comes while somebody else is fetching the same
file fetches it too, under a name of its own: no two write to one file.
"""

import hashlib
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from bbalpha._files import Lock, Restoring

CONNECTIONS = 5  # how often one file is taken up again before we give up
PAUSE = 1.0  # seconds before the second connection; twice as many before each further one
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 16  # bytes


class DownloadError(OSError):
    """A file could not be fetched, or is not the one that was asked for."""


class _WrongFileError(DownloadError):
    """All bytes came, and they are not the right ones."""


def download(
    urls: Sequence[str],
    path: Path,
    *,
    sha256: str | None = None,
    check: Callable[[Path], object] | None = None,
    progress: bool = True,
) -> Path:
    """The path of a file that was fetched from the first of `urls` that has it.

    Args:
        urls: Where the file may be had, tried in this order.
        path: Where to put it. Folders are made as needed; nothing has this name before the file is whole and checked.
        sha256: Checksum of its bytes, 64 hexadecimal digits; None where it is not known.
        check: Called with the path of the file before it gets its name; raises ValueError where the content is wrong.
        progress: Whether to show a bar on a terminal.

    Returns:
        `path`.

    Raises:
        DownloadError: No url has the file, it is not the right one, or the folder cannot be written to.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "origin.txt").write_text("1 2 3")
        >>> download([(folder / "origin.txt").as_uri()], folder / "copy.txt").read_text()
        '1 2 3'
    """
    failures = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _partial(path) as part:
            for url in urls:
                try:
                    _fetch(url, part, sha256, check, progress)
                except DownloadError as error:
                    failures.append(str(error))
                else:
                    os.replace(part, path)
                    return path
    except OSError as error:
        raise DownloadError(
            f"{path.parent} must be a folder that can be written to; got {error.strerror or error}. "
            "XDG_CACHE_HOME names another place for the cache."
        ) from error
    raise DownloadError(" ".join(failures))


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Where to put what comes of `path`: the place that later calls go on from, or one of our own if that is in use."""
    first = path.with_name(f"partial-{path.name}")  # keeps the suffix, which `check` may go by
    lock = Lock(first)
    with Restoring(lock.release), Restoring(lock.release):
        if lock.acquire() and lock.sure:
            _remove_strays(path)
            yield first
            return
    own = path.with_name(f"partial-{uuid.uuid4().hex}-{path.name}")
    lock = Lock(own)
    with Restoring(lock.release), Restoring(lock.release):
        lock.acquire()
        try:
            yield own
        finally:
            own.unlink(missing_ok=True)


def _remove_strays(path: Path) -> None:
    """Remove what killed calls left under names of their own; nobody can go on from there."""
    stray = re.compile(rf"\.?(partial-[0-9a-f]{{32}}-{re.escape(path.name)})(\.lock)?")
    for name in {found[1] for p in path.parent.iterdir() if (found := stray.fullmatch(p.name))}:
        lock = Lock(path.with_name(name))
        with Restoring(lock.release), Restoring(lock.release):
            if lock.acquire() and lock.sure:
                path.with_name(name).unlink(missing_ok=True)


def _fetch(url: str, part: Path, sha256: str | None, check: Callable[[Path], object] | None, progress: bool) -> None:
    """Fill `part` from `url` and check it; a wrong file is removed."""
    left_over = part.exists()
    _receive(url, part, progress)
    try:
        _verify(url, part, sha256, check)
    except _WrongFileError:
        part.unlink()
        if not left_over:
            raise
        # what an earlier call left was of another file, or of another version of this one: begin anew, once
        _fetch(url, part, sha256, check, progress)


def _verify(url: str, part: Path, sha256: str | None, check: Callable[[Path], object] | None) -> None:
    if sha256 is not None:
        with part.open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != sha256:
            raise _WrongFileError(f"{url} must have the sha256 {sha256}; got {got}. The file was removed.")
    if check is not None:
        try:
            check(part)
        except ValueError as error:
            raise _WrongFileError(f"{url} is not the file it should be, and was removed: {error}") from error


def _receive(url: str, part: Path, progress: bool) -> None:
    """Fill `part` to the last byte, over as many connections as it takes."""
    for connection in range(CONNECTIONS):
        if connection:
            time.sleep(PAUSE * 2 ** (connection - 1))
        if _complete_after_one_connection(url, part, progress):
            return
    kept = part.stat().st_size if part.exists() else 0
    raise DownloadError(
        f"{url} was cut off {CONNECTIONS} times; {kept} bytes are kept, and the next call goes on from there."
    )


def _complete_after_one_connection(url: str, part: Path, progress: bool) -> bool:
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "bbalpha", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == 416 and have:  # nothing comes after what we have: it is the whole, or too much
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return True
            part.unlink()
            return False
        raise DownloadError(f"{url} answers {error.code} {error.reason}.") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise DownloadError(f"{url} cannot be reached: {reason}.") from error
    with response:
        if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            have = 0  # a server that knows no ranges begins anew
        return _written(response, part, have, progress)


def _written(response: Any, part: Path, have: int, progress: bool) -> bool:
    """Whether the rest of the file came whole; what came is in `part`, after its first `have` bytes."""
    length = response.headers.get("Content-Length")
    total = None if length is None else have + int(length)
    with part.open("ab" if have else "wb") as file, _bar(part, have, total, progress) as bar:
        while True:
            try:
                block = response.read(BLOCK)
            except (OSError, HTTPException):
                return False
            if not block:
                break
            file.write(block)
            if bar is not None:
                bar.update(len(block))
    return total is None or part.stat().st_size == total


def _bar(part: Path, have: int, total: int | None, progress: bool) -> Any:
    """A bar on a terminal, None elsewhere: tqdm takes a lock of all processes as soon as there is one."""
    if not progress or not sys.stderr.isatty():
        return nullcontext()
    from tqdm import tqdm

    title = re.sub("^partial-([0-9a-f]{32}-)?", "", part.name)
    return tqdm(total=total, initial=have, desc=title, unit="B", unit_scale=True)
