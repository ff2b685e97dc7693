"""Files from the web: whole and checked, or not there at all.

A file arrives under a temporary name beside its own, is checked, and only then renamed. A connection that is cut is
taken up again where it stopped, in the same call or in a later one. Who comes while somebody else is fetching the same
file fetches it too, under a name of its own: no two write to one file. A server that sends more than the file can be,
or next to nothing, is left.
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

from bbalpha._files import Lock, Restoring
from bbalpha.data.connections import opened

CONNECTIONS = 5  # how often one file is taken up again before we give up
PAUSE = 1.0  # seconds before the second connection; twice as many before each further one
BLOCK = 1 << 16  # bytes
MOST = 1 << 30  # bytes of a file of which nothing else is known
PACE = 1000  # bytes a second that a connection must bring after its first seconds
GRACE = 30.0  # these seconds
SECONDS = 7200.0  # for one file, all connections together


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
    most: int = MOST,
    progress: bool = True,
) -> Path:
    """The path of a file that was fetched from the first of `urls` that has it.

    Args:
        urls: Where the file may be had, tried in this order.
        path: Where to put it. Folders are made as needed; nothing has this name before the file is whole and checked.
        sha256: Checksum of its bytes, 64 hexadecimal digits; None where it is not known.
        check: Called with the path of the file before it gets its name; raises ValueError where the content is wrong.
        most: Bytes that it may have.
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
                    _fetch(url, part, sha256, check, most, progress)
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


def _fetch(
    url: str, part: Path, sha256: str | None, check: Callable[[Path], object] | None, most: int, progress: bool
) -> None:
    """Fill `part` from `url` and check it; a wrong file is removed."""
    left_over = part.exists()
    try:
        _receive(url, part, most, progress)
        _verify(url, part, sha256, check)
    except _WrongFileError:
        part.unlink(missing_ok=True)
        if not left_over:
            raise
        # what an earlier call left was of another file, or of another version of this one: begin anew, once
        _fetch(url, part, sha256, check, most, progress)


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


def _receive(url: str, part: Path, most: int, progress: bool) -> None:
    """Fill `part` to the last byte, over as many connections as it takes."""
    end = time.monotonic() + SECONDS
    for connection in range(CONNECTIONS):
        if connection:
            time.sleep(PAUSE * 2 ** (connection - 1))
        if _complete_after_one_connection(url, part, most, end, progress):
            return
    kept = part.stat().st_size if part.exists() else 0
    raise DownloadError(
        f"{url} was cut off {CONNECTIONS} times; {kept} bytes are kept, and the next call goes on from there."
    )


def _complete_after_one_connection(url: str, part: Path, most: int, end: float, progress: bool) -> bool:
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "bbalpha", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = opened(url, headers)
    except HTTPError as error:
        error.close()
        if error.code == 416 and have:  # nothing comes after what we have: it is the whole, or too much
            if error.headers.get("Content-Range") == f"bytes */{have}":
                return True
            part.unlink()
            return False
        raise DownloadError(f"{url} answers {error.code} {error.reason}.") from error
    except (OSError, ValueError, HTTPException) as error:  # ValueError: an address that is none, also of a redirection
        reason = error.reason if isinstance(error, URLError) else error
        raise DownloadError(f"{url} cannot be reached: {reason}.") from error
    with response:
        if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            have = 0  # a server that knows no ranges begins anew
        total = _total(url, response.headers.get("Content-Length"), have, most)
        whole = _written(url, response, part, have, total, min(most, total or most), end, progress)
    return whole and (total is None or part.stat().st_size == total)


def _total(url: str, length: str | None, have: int, most: int) -> int | None:
    """Bytes of the whole file, if the server says so."""
    if length is None:
        return None
    length = length.strip(" \t")  # and of nothing else: `int` takes fewer kinds of space than `strip`
    if not re.fullmatch("[0-9]{1,18}", length):
        raise DownloadError(f"{url} answers with a length that is none: {length[:40]!r}.")
    total = have + int(length)
    if total > most:
        raise _WrongFileError(f"{url} must have at most {most} bytes; it says {total}. What came of it was removed.")
    return total


def _written(
    url: str, response: Any, part: Path, have: int, total: int | None, most: int, end: float, progress: bool
) -> bool:
    """Whether the connection brought all it had; what came is in `part`, after its first `have` bytes."""
    start, came = time.monotonic(), 0
    with part.open("ab" if have else "wb") as file, _bar(part, have, total, progress) as bar:
        while True:
            try:
                block = response.read1(BLOCK)  # what is there: a whole block may never be
            except (OSError, ValueError, HTTPException):
                return False
            if not block:
                return True
            came += len(block)
            if have + came > most:
                break
            file.write(block)
            if bar is not None:
                bar.update(len(block))
            now = time.monotonic()
            if now > end:
                raise DownloadError(f"{url} sends too slowly: {have + came} bytes in {SECONDS / 60:g} minutes.")
            if now - start > GRACE and came < PACE * (now - start):
                return False
    raise _WrongFileError(f"{url} must have at most {most} bytes; it sends more. What came of it was removed.")


def _bar(part: Path, have: int, total: int | None, progress: bool) -> Any:
    """A bar on a terminal, None elsewhere: tqdm takes a lock of all processes as soon as there is one."""
    if not progress or not sys.stderr.isatty():
        return nullcontext()
    from tqdm import tqdm

    title = re.sub("^partial-([0-9a-f]{32}-)?", "", part.name)
    return tqdm(total=total, initial=have, desc=title, unit="B", unit_scale=True)
