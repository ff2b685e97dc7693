"""Tables in files: what is written is read again, dates are dates only where they cannot be anything else."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bbalpha.tabular.files import read_table, with_dates, write_table


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.parquet"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    frame = pd.DataFrame({"a": [1.5, np.nan, 3.0], "b": ["x", None, "z"], "d": pd.to_datetime(["2020-01-01"] * 3)})
    write_table(frame, tmp_path / name)
    found = read_table(tmp_path / name)
    pd.testing.assert_frame_equal(found, frame, check_dtype=False)
    assert found["d"].dtype.kind == "M"


@pytest.mark.parametrize(
    ("cells", "is_date"),
    [
        (["2020-01-31", "2021-02-28"], True),
        (["2020-01-31T10:00:00Z", None], True),
        (["31.01.2020", "01.02.2020"], True),
        (["31/01/2020", "01/02/2020"], True),  # no month is the 31st
        (["01/02/2020", "03/04/2020"], False),  # either way
        (["2020-01-31", "soon"], False),
        (["a1", "b2"], False),
        ([None, None], False),
    ],
)
def test_text_is_a_date_only_where_it_can_be_nothing_else(cells: list[str | None], is_date: bool) -> None:
    found = with_dates(pd.DataFrame({"d": pd.Series(cells, dtype=object)}))
    assert (found["d"].dtype.kind == "M") is is_date


@pytest.mark.parametrize(
    ("content", "said"), [("", "table"), ("a,b\n", "at least one row"), ('a,b\n1,2\n3,"', "table"), (None, "no file")]
)
def test_what_is_no_table_is_said(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "t.csv").write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        read_table(tmp_path / "t.csv")


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="Parquet"):
        read_table(tmp_path / "t.parquet")


def test_nothing_is_written_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make it first"):
        write_table(pd.DataFrame({"a": [1]}), tmp_path / "no" / "t.csv")


@pytest.mark.parametrize("ending", ["gz", "zip", "xz"])
def test_a_compressed_table_that_is_cut_off_is_named(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"t.csv.{ending}"
    pd.DataFrame({"a": np.arange(1000.0)}).to_csv(path, index=False)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=rf"t\.csv\.{ending}' (is damaged|must be a table)"):
        read_table(path)


def test_a_parquet_file_with_changed_bytes_is_a_table_or_one_sentence(tmp_path: Path) -> None:
    frame, path = pd.DataFrame({"a": [1.5, np.nan, 3.0], "b": ["x", None, "z"]}), tmp_path / "t.parquet"
    frame.to_parquet(path)
    whole, rng, said = path.read_bytes(), np.random.default_rng(0), set()
    for _ in range(400):
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        try:
            read_table(path)
        except ValueError as error:
            said.add(str(error).partition(";")[0])
    assert said == {f"{str(path)!r} must be a Parquet file"}


def test_what_only_says_that_it_is_compressed_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv.gz").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"t\.csv\.gz' is damaged: Not a gzipped file"):
        read_table(tmp_path / "t.csv.gz")
