"""Servers that send nonsense, and archives that are none: the right file, or one sentence."""

import gzip
import hashlib
import random
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from bbalpha.data import download as downloading
from bbalpha.data.download import DownloadError, download
from bbalpha.data.sources import Idx, Table
from file_server import running_server

from .damage import damaged
from .outcomes import outcome
from .rows import row

CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HEADS = (
    "HTTP/1.1 200 OK\r\nContent-Length: {n}\r\n\r\n",
    "HTTP/1.0 206 Partial Content\r\nContent-Range: bytes 100-{n}/{n}\r\nContent-Length: {n}\r\n\r\n",
    "HTTP/1.1 302 Found\r\nLocation: /file\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Range: bytes */{n}\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 503 Busy\r\nRetry-After: 99999\r\nContent-Length: {n}\r\n\r\n",
)


def run(size, seed):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        return [
            _answers(max(5, round(2000 * size)), rng, Path(folder)),
            *_archives(max(5, round(2000 * size)), rng, Path(folder)),
        ]


def _answers(n, rng, folder):
    """Answers of a server with bytes of the head changed, taken out and doubled."""
    failures, path = [], folder / "file.bin"
    with running_server() as server, mock.patch.object(downloading, "PAUSE", 0.0):
        for _ in range(n):
            head = rng.choice(HEADS).format(n=len(CONTENT)).encode()
            server.raw = damaged(head, rng) + rng.choice([CONTENT, CONTENT[:-1], CONTENT + b"x", b""])
            came, said = outcome(lambda: download([server.url()], path, sha256=SHA256, most=20_000, progress=False))
            right = came == "silent" and path.read_bytes() == CONTENT
            if not (right or (came == "clear" and said.startswith(DownloadError.__name__) and not path.exists())):
                failures.append(f"{server.raw[:60]!r}: {came}, {said}")
            for left in folder.iterdir():
                left.unlink()
    return row("answers of a server, heads damaged", "cases", n, failures)


def _archives(n, rng, folder):
    """Files of a table and of images with bytes changed: the right numbers, or one sentence."""
    X, y = np.arange(36.0).reshape(12, 3), np.arange(12.0)
    numbers = hashlib.sha256(X.tobytes() + y.tobytes()).hexdigest()
    table = Table(what="toy", n_rows=12, n_features=3, numbers=numbers, forms=(), urls=())
    np.savez_compressed(folder / "toy.npz", X=X, y=y)
    text = "\n".join(" ".join(map(str, [*a, b])) for a, b in zip(X, y, strict=True))
    with zipfile.ZipFile(folder / "toy.txt.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy.txt", text)
    images = (2051).to_bytes(4, "big") + b"".join(k.to_bytes(4, "big") for k in (3, 4, 4)) + bytes(range(48))
    (folder / "toy.gz").write_bytes(gzip.compress(images))
    digest = hashlib.sha256(images).hexdigest()
    pictures = Idx(shape=(3, 4, 4), content=digest, sha256=digest, forms=(), urls=())
    rows = []
    for name, reader in (("toy.npz", table), ("toy.txt.zip", table), ("toy.gz", pictures)):
        whole, failures = (folder / name).read_bytes(), []
        for _ in range(n):
            (folder / name).write_bytes(damaged(whole, rng))
            came, said = outcome(partial(reader.read, folder / name))
            if came not in ("clear", "silent"):  # what is read is checked by its sum
                failures.append(f"{name}: {came}, {said}")
        rows.append(row(f"damaged archives: {name.partition('.')[2]}", "bytes", n, failures))
    return rows
