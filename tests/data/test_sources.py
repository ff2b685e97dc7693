"""What the files of the data sets must hold, whatever their form."""

import gzip
import hashlib
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bbalpha.data.sources import IMAGES, TABLES, Idx, Table, read_idx


def toy_table(**other):
    """A table of 12 rows and 3 inputs, with its numbers."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 3)), rng.normal(size=12)
    numbers = hashlib.sha256(X.tobytes() + y.tobytes()).hexdigest()
    table = Table(what="toy", n_rows=12, n_features=3, numbers=numbers, forms=("uci/toy.txt",), urls=())
    return replace(table, **other), X, y


def write_text(path, *columns, delimiter=" "):
    rows = np.column_stack(columns)
    path.write_text("".join(delimiter.join(repr(float(value)) for value in row) + "\n" for row in rows))
    return path


def idx_bytes(array):
    magic = {1: 2049, 3: 2051}[array.ndim]
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.astype(np.uint8).tobytes()


def toy_idx(tmp_path, array):
    path = tmp_path / "toy.gz"
    path.write_bytes(gzip.compress(idx_bytes(array)))
    return path


def test_text_and_arrays_are_the_same_numbers(tmp_path):
    table, X, y = toy_table()
    np.savez(tmp_path / "toy.npz", X=X, y=y)
    for path in (tmp_path / "toy.npz", write_text(tmp_path / "toy.txt", X, y)):
        got_X, got_y = table.read(path)
        np.testing.assert_array_equal(got_X, X)
        np.testing.assert_array_equal(got_y, y)
        assert got_X.dtype == got_y.dtype == np.float64


def test_columns_after_the_target_are_dropped(tmp_path):
    table, X, y = toy_table()
    got_X, got_y = table.read(write_text(tmp_path / "toy.txt", X, y, -y))
    np.testing.assert_array_equal(got_X, X)
    np.testing.assert_array_equal(got_y, y)


@pytest.mark.parametrize("form", ["text", "arrays"])
def test_one_changed_number_is_an_error_that_names_both_checksums(tmp_path, form):
    table, X, y = toy_table()
    X[7, 1] = np.nextafter(X[7, 1], 1)
    path = tmp_path / ("toy.txt" if form == "text" else "toy.npz")
    write_text(path, X, y) if form == "text" else np.savez(path, X=X, y=y)
    got = hashlib.sha256(X.tobytes() + y.tobytes()).hexdigest()
    with pytest.raises(ValueError, match=f"must have the sha256 {table.numbers}; got {got}"):
        table.read(path)


def test_wrong_sizes_are_named(tmp_path):
    table, X, y = toy_table()
    with pytest.raises(ValueError, match=r"X \(12, 3\) and y \(12,\); got X \(11, 3\) and y \(11,\)"):
        table.read(write_text(tmp_path / "toy.txt", X[1:], y[1:]))
    with pytest.raises(ValueError, match="must have 4 columns or more; got 3"):
        table.read(write_text(tmp_path / "toy.txt", X))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("toy.txt", b"1 2 3 4\n1 2 3\n"),
        ("toy.txt", b"<html>Not found</html>\n"),
        ("toy.txt", bytes(range(128, 256))),
        ("toy.npz", b"PK\x03\x04 and no more"),
        ("toy.npz", b"neither"),
        ("toy.txt.zip", b"<html>Not found</html>"),
    ],
)
def test_damaged_tables_are_named(tmp_path, name, content):
    table, _, _ = toy_table()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} cannot be read: "):
        table.read(tmp_path / name)


def bomb(path, name, size):
    """An archive of one member, zeros, packed to next to nothing."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as member:
        for _ in range(size >> 20):
            member.write(bytes(1 << 20))
    return path


def test_an_archive_that_unpacks_to_more_than_a_table_has_is_refused_unread(tmp_path):
    table, _, _ = toy_table()
    for path, name in ((tmp_path / "toy.txt.zip", "toy.txt"), (tmp_path / "toy.npz", "X.npy")):
        assert bomb(path, name, 64 << 20).stat().st_size < 1 << 17
        with pytest.raises(
            ValueError, match=rf"cannot be read: it must hold at most {table.most} bytes; it has 67108864"
        ):
            table.read(path)
    (tmp_path / "toy.txt").write_bytes(bytes(table.most + 1))
    with pytest.raises(ValueError, match=f"must hold at most {table.most} bytes"):
        table.read(tmp_path / "toy.txt")


def test_a_text_with_endless_rows_is_not_read_to_its_end(tmp_path):
    table, _, _ = toy_table()
    (tmp_path / "toy.txt").write_text("1 2 3 4\n" * 50_000)
    with pytest.raises(ValueError, match=r"got X \(13, 3\)"):
        table.read(tmp_path / "toy.txt")


def test_images_that_unpack_to_more_than_they_are_are_refused(tmp_path):
    array = np.zeros((3, 28, 28), np.uint8)
    file = Idx(shape=array.shape, content="0" * 64, sha256="0" * 64, forms=("toy.gz",), urls=())
    path = toy_idx(tmp_path, array)
    path.write_bytes(path.read_bytes() + gzip.compress(bytes(1 << 24)))
    with pytest.raises(ValueError, match=f"cannot be read: it must hold at most {file.most} bytes"):
        file.read(path)


@pytest.mark.parametrize("shape", ["(1000000000000, 13)", "(99999999999999999999,)", "(-1,)"])
def test_arrays_that_say_they_are_huge_are_named(tmp_path, shape):
    table, _, y = toy_table()
    np.savez(tmp_path / "toy.npz", X=np.zeros((12, 3)), y=y)
    head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}"
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + head.ljust(117).encode() + b"\n" + bytes(8)
    with zipfile.ZipFile(tmp_path / "toy.npz", "w") as archive:
        archive.writestr("X.npy", member)
        archive.writestr("y.npy", member)
    with pytest.raises(ValueError, match=r"toy.npz cannot be read: "):
        table.read(tmp_path / "toy.npz")


@pytest.mark.parametrize("kind", ["locked", "oddly packed", "cut", "elsewhere"])
def test_odd_archives_are_named(tmp_path, kind):
    table, X, y = toy_table()
    path = tmp_path / "toy.txt.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(write_text(tmp_path / "toy.txt", X, y), "toy.txt" if kind != "elsewhere" else "../toy.txt")
    data = bytearray(path.read_bytes())
    middle = data.rindex(b"PK\x01\x02")
    if kind == "locked":
        data[6] |= 1
        data[middle + 8] |= 1
    elif kind == "oddly packed":
        data[8] = data[middle + 10] = 97
    elif kind == "cut":
        del data[40:80]
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"toy.txt.zip cannot be read: "):
        table.read(path)


def test_an_archive_is_read_under_the_names_of_a_download(tmp_path):
    table, X, y = toy_table()
    for name in ("partial-toy.txt.zip", f"partial-{'a' * 32}-toy.txt.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.write(write_text(tmp_path / "toy.txt", X, y), "toy.txt")
        np.testing.assert_array_equal(table.read(tmp_path / name)[0], X)


def test_arrays_under_other_names_and_pickles_are_refused(tmp_path):
    table, X, y = toy_table()
    path = tmp_path / "toy.npz"
    np.savez(path, inputs=X, y=y)
    with pytest.raises(ValueError, match="cannot be read"):
        table.read(path)
    np.savez(path, X=np.array([object()], dtype=object), y=y)
    with pytest.raises(ValueError, match=r"cannot be read: .*allow_pickle"):
        table.read(path)


def small_year(tmp_path, n_rows=40):
    """YearPredictionMSD with few rows: the year first, commas between, no header."""
    rng = np.random.default_rng(1)
    years, X = rng.integers(1922, 2012, n_rows), rng.normal(scale=50, size=(n_rows, 90)).round(5)
    path = tmp_path / "YearPredictionMSD.txt"
    path.write_text(
        "".join(f"{year},{','.join(f'{v:.5f}' for v in row)}\n" for year, row in zip(years, X, strict=True))
    )
    return path, X, years


def zipped(path):
    archive_path = path.with_name(path.name + ".zip")
    with zipfile.ZipFile(archive_path, "w") as archive:
        archive.write(path, path.name)
    return archive_path


def test_year_as_text_and_as_archive(tmp_path):
    path, X, years = small_year(tmp_path)
    table = replace(TABLES["year"], n_rows=40)
    for form in (path, zipped(path)):
        got_X, got_y = table.read(form)
        np.testing.assert_array_equal(got_X, X)
        np.testing.assert_array_equal(got_y, years)


def test_year_with_other_rows_or_years_is_refused(tmp_path):
    path, _, _ = small_year(tmp_path)
    with pytest.raises(ValueError, match=r"X \(515345, 90\) .* got X \(40, 90\)"):
        TABLES["year"].read(path)
    path.write_text(path.read_text().replace(path.read_text()[:4], "1921", 1))
    with pytest.raises(ValueError, match=r"targets from 1922 to 2011; got targets from 1921"):
        replace(TABLES["year"], n_rows=40).read(path)


def test_year_in_an_archive_of_something_else(tmp_path):
    path, _, _ = small_year(tmp_path)
    other = zipped(path.rename(tmp_path / "readme.txt")).rename(tmp_path / "YearPredictionMSD.txt.zip")
    with pytest.raises(ValueError, match=r"no item named 'YearPredictionMSD.txt'"):
        TABLES["year"].read(other)


@pytest.mark.parametrize("shape", [(5,), (5, 28, 28), (0,), (2, 3, 4)])
def test_idx_round_trip(tmp_path, shape):
    array = np.random.default_rng(0).integers(0, 256, shape)
    got = read_idx(toy_idx(tmp_path, array))
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (struct.pack(">II", 2050, 1) + b"x", "got 2050"),
        (struct.pack("<II", 2049, 1) + b"x", "2049"),  # little endian
        (struct.pack(">II", 2049, 3) + b"xx", r"have 11 bytes for \(3,\); got 10"),
        (struct.pack(">II", 2049, 3) + b"xxxx", "got 12"),
        (struct.pack(">II", 2051, 3), "got 8"),
        (b"", "got 0"),
    ],
)
def test_wrong_idx_files_are_named(tmp_path, content, said):
    path = tmp_path / "toy.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=rf"toy.gz must .*{said}"):
        read_idx(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-9],
        lambda b: b[:10] + b"\xff" * 5 + b[15:],
        lambda b: b[:-8] + b"crc?" + b[-4:],
        lambda b: b"no gzip",
    ],
)
def test_damaged_idx_files_are_named(tmp_path, damage):
    path = toy_idx(tmp_path, np.arange(2000) % 251)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"toy.gz cannot be read: "):
        read_idx(path)


def test_idx_content_counts_and_not_its_compression(tmp_path):
    labels = np.arange(50) % 10
    content = idx_bytes(labels)
    file = Idx(shape=(50,), content=hashlib.sha256(content).hexdigest(), sha256="", forms=(), urls=())
    path = tmp_path / "labels.gz"
    for level in (0, 1, 9):
        path.write_bytes(gzip.compress(content, level))
        np.testing.assert_array_equal(file.read(path), labels)
    path.write_bytes(gzip.compress(idx_bytes(labels[::-1])))
    with pytest.raises(ValueError, match=f"must have the sha256 {file.content}; got "):
        file.read(path)
    with pytest.raises(ValueError, match=r"must hold an array \(49,\); got \(50,\)"):
        replace(file, shape=(49,)).read(path)


@pytest.mark.parametrize("name", ["boston", "concrete", "energy", "wine", "yacht"])  # the small ones
def test_texts_have_the_numbers_of_the_arrays(data_dir, tmp_path, name):
    with np.load(Path(data_dir) / "uci" / f"{name}.npz") as arrays:
        TABLES[name].read(write_text(tmp_path / f"{name}.txt", arrays["X"], arrays["y"]))


def test_originals_of_mnist_have_the_published_md5(data_dir):
    published = {
        "train-images-idx3-ubyte.gz": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte.gz": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte.gz": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte.gz": "27ae3e4e09519cfbb04c329615203637",
    }
    for file in (file for part in IMAGES["mnist"].values() for file in part):
        path = Path(data_dir) / file.forms[0]
        file.read(path)
        assert hashlib.md5(gzip.decompress(path.read_bytes())).hexdigest() == published[path.name]


def test_every_source_is_checked_and_public():
    for table in TABLES.values():
        assert (table.numbers is None) == (table is TABLES["year"])
        assert all(url.startswith("https://") for url in table.urls)
    files = [file for parts in IMAGES.values() for part in parts.values() for file in part]
    assert len({checksum for file in files for checksum in (file.sha256, file.content)}) == 12
