"""Tables as they come: what each kind of column becomes, and what is refused."""

import datetime as dt
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.preprocessing import StandardScaler

from bbalpha.checkpoint import read_folder, write_folder
from bbalpha.estimators.folders import array_of, plain
from bbalpha.estimators.tables import TableEncoder

quiet = settings(
    deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],  # to shrink a table takes minutes
)  # fmt: skip


def encoded(values, dtype=None, name="a"):
    """The encoder of a table of one column, and what it makes of it."""
    frame = pd.DataFrame({name: pd.Series(values, dtype=dtype)})
    encoder = TableEncoder.fit(frame)
    return encoder, encoder.transform(frame)


def one(values, dtype=None, name="a"):
    return pd.DataFrame({name: pd.Series(values, dtype=dtype)})


# ------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 5, 2], "int64"), ([1, 5, 2], "uint8"), ([1.0, 5.0, 2.0], "float64"), ([1.0, 5.0, 2.0], "float32"),
        ([1, 5, 2], "Int64"), ([1, 5, 2], "Float64"), ([1, 5, 2], object), ([1, 5.0, np.int8(2)], object),
        ([Decimal(1), Decimal(5), Decimal("2.0")], object), ([1.0, 5.0, 2.0], "Sparse[float]"),
    ],
)  # fmt: skip
def test_numbers_of_every_dtype_stay_as_they_are(values, dtype):
    encoder, x = encoded(values, dtype)
    assert encoder.names == ("a",)
    assert encoder.numeric.tolist() == [True]
    np.testing.assert_array_equal(x, [[1], [5], [2]])


@pytest.mark.parametrize(
    ("missing", "dtype"),
    [(np.nan, "float64"), (None, "Int64"), (pd.NA, "Float64"), (None, object), (Decimal("nan"), object)],
)
def test_missing_numbers_are_the_median_and_are_told(missing, dtype):
    encoder, x = encoded([1, missing, 5, 2], dtype)
    assert encoder.names == ("a", "a is missing")
    assert encoder.numeric.tolist() == [True, False]
    np.testing.assert_array_equal(x, [[1, 0], [2, 1], [5, 0], [2, 0]])
    assert not encoder.unseen(one([1, missing], dtype)).any()


@pytest.mark.parametrize("as_table", [pd.DataFrame, np.asarray])
def test_numbers_missing_after_the_fit_alone_are_the_median_and_unusual(as_table):
    encoder = TableEncoder.fit(as_table(np.array([[1.0, 7.0], [2.0, 8.0], [6.0, 9.0]])))
    new = as_table(np.array([[np.nan, 8.0], [1.0, 7.0], [np.nan, np.nan]]))
    np.testing.assert_array_equal(encoder.transform(new), [[2, 8], [1, 7], [2, 8]])
    assert encoder.unseen(new).tolist() == [1, 0, 2]


@pytest.mark.parametrize("infinity", [np.inf, -np.inf, 10**400, Decimal("inf")])
def test_infinite_numbers_are_refused_by_column_and_row(infinity):
    dtype = float if isinstance(infinity, float) else object
    fine, bad = one([1.0, 2.0, 3.0], name="age"), one([1.0, None, infinity], dtype, name="age")
    for act in (TableEncoder.fit, TableEncoder.fit(fine).transform):
        with pytest.raises(ValueError, match=r"`X` must hold finite.*got inf in column 'age', row 2"):
            act(bad)


def test_the_median_of_huge_numbers_is_finite():
    encoder = TableEncoder.fit(np.array([[1.6e308], [1.7e308]]))
    np.testing.assert_allclose(encoder.transform(np.array([[np.nan]])), [[1.65e308]])


def test_integers_are_numbers_unless_they_are_called_categories():
    codes = [1, 2, 3, 1, 2, 3]
    assert encoded(codes)[0].names == ("a",)
    assert encoded(codes, "category")[0].names == ("a=1", "a=2", "a=3")


@pytest.mark.parametrize("dtype", [bool, "boolean", object])
def test_truth_values_are_0_and_1_and_no_plain_numbers(dtype):
    encoder, x = encoded([True, False, True], dtype)
    assert encoder.names == ("a",)
    assert not encoder.numeric.any()
    np.testing.assert_array_equal(x, [[1], [0], [1]])
    if dtype is not bool:
        encoder, x = encoded([True, None, True, False], dtype)
        assert encoder.names == ("a", "a is missing")
        np.testing.assert_array_equal(x, [[1, 0], [1, 1], [1, 0], [0, 0]])


def test_truth_values_may_come_as_0_and_1_and_numbers_as_truth_values():
    flags, numbers = TableEncoder.fit(one([True, False])), TableEncoder.fit(one([0, 1, 2]))
    np.testing.assert_array_equal(flags.transform(one([0, 1])), [[0], [1]])
    np.testing.assert_array_equal(numbers.transform(one([False, True])), [[0], [1]])
    with pytest.raises(ValueError, match=r"column 'a' must hold truth values as at fit; got 3 in row 1"):
        flags.transform(one([1, 3]))


def test_a_truth_value_that_no_row_had_is_unusual():
    encoder = TableEncoder.fit(pd.DataFrame({"a": [True, True], "b": [1, 2]}))
    assert encoder.unseen(pd.DataFrame({"a": [True, False], "b": [1, 3]})).tolist() == [0, 1]


# ------------------------------------------------------------------------------ columns that say nothing


def test_columns_that_say_nothing_are_left_out_and_remembered():
    frame = pd.DataFrame(
        {
            "same": 1.0,
            "x": [1.0, 2.0, 3.0],
            "none": np.nan,
            "empty": None,
            "word": "w",
            "day": pd.Timestamp("2020-01-01"),
        }
    )
    encoder = TableEncoder.fit(frame)
    assert encoder.names == ("x",)
    assert encoder.n_features_in == 6
    assert encoder.feature_names_in.tolist() == [*frame]
    np.testing.assert_array_equal(encoder.transform(frame), [[1], [2], [3]])
    assert not encoder.unseen(frame).any()
    new = frame.assign(same=2.0, none=[np.nan, 1.0, np.nan], empty=[None, "z", None], word=["w", "v", "w"])
    np.testing.assert_array_equal(encoder.transform(new), [[1], [2], [3]])
    assert encoder.unseen(new).tolist() == [0, 3, 0]


def test_a_constant_with_gaps_tells_its_gaps():
    encoder, x = encoded([4.0, np.nan, 4.0])
    assert encoder.names == ("a is missing",)
    np.testing.assert_array_equal(x, [[0], [1], [0]])


@pytest.mark.parametrize("table", [np.ones((3, 2)), one(["w"] * 3), one([None] * 3), one(["a", "b", "c"])])
def test_a_table_that_says_nothing_is_refused(table):
    with pytest.raises(ValueError, match=r"must have a column that says something; got 3 rows"):
        TableEncoder.fit(table)


def test_a_single_row_is_refused_in_the_words_scikit_learn_looks_for():
    with pytest.raises(ValueError, match="1 sample"):
        TableEncoder.fit(np.ones((1, 3)))


# ------------------------------------------------------------------------------ levels


@pytest.mark.parametrize("dtype", ["category", "str", "string", object])
def test_levels_have_a_column_each_the_commonest_first(dtype):
    encoder, x = encoded(["b", "a", "c", "a", "b", "c", "a"], dtype)
    assert encoder.names == ("a=a", "a=b", "a=c")
    assert not encoder.numeric.any()
    np.testing.assert_array_equal(x.argmax(axis=1), [1, 0, 2, 0, 1, 2, 0])
    np.testing.assert_array_equal(x.sum(axis=1), 1)


@pytest.mark.parametrize("dtype", ["category", "str", "string", object])
def test_missing_levels_are_a_level_if_the_fit_saw_some(dtype):
    encoder, x = encoded(["b", None, "b", "a", "a"], dtype)
    assert encoder.names == ("a=a", "a=b", "a is missing")
    assert x.argmax(axis=1).tolist() == [1, 2, 1, 0, 0]
    assert not encoder.unseen(one([None, "a"], dtype)).any()
    whole = encoded(["b", "b", "a", "a", "c", "c"], dtype)[0]
    np.testing.assert_array_equal(whole.transform(one([None, "c"], dtype)), [[0, 0, 0], [0, 0, 1]])
    assert whole.unseen(one([None, "c"], dtype)).tolist() == [1, 0]


def test_two_levels_are_one_column_for_the_less_common():
    encoder, x = encoded(["m", "f", "m", "m", "f"])
    assert encoder.names == ("a=f",)
    assert x[:, 0].tolist() == [0, 1, 0, 0, 1]
    assert encoder.transform(one(["x"])).tolist() == [[0]]
    assert encoder.unseen(one(["x", "m"])).tolist() == [1, 0]
    assert encoded(["m", None, "m"])[0].names == ("a is missing",)


def test_levels_of_one_row_are_rare_and_so_are_new_ones():
    encoder, x = encoded(["a", "a", "b", "b", "c", "d"])
    assert encoder.names == ("a=a", "a=b", "a=rare")
    assert x.argmax(axis=1).tolist() == [0, 0, 1, 1, 2, 2]
    new = one(["c", "e", None])
    assert encoder.transform(new).tolist() == [[0, 0, 1]] * 3
    assert encoder.unseen(new).tolist() == [0, 1, 1]


def test_no_more_than_50_levels_have_a_column():
    values = [f"l{i:02d}" for i in range(60) for _ in range(2 if i < 10 else 4)]
    encoder, x = encoded(values)
    assert len(encoder.names) == 51
    assert encoder.names[-1] == "a=rare"
    assert x[:, -1].sum() == 20
    assert not encoder.unseen(one(values)).any()


def test_in_many_rows_a_level_in_under_1_of_1000_is_rare():
    values = ["a"] * 5000 + ["b"] * 4990 + ["c"] * 10 + ["d"] * 9
    assert encoded(values)[0].names == ("a=a", "a=b", "a=rare")
    assert encoded(values[:-9])[0].names == ("a=a", "a=b", "a=c")


def test_mixtures_are_levels_compared_by_their_text():
    encoder, x = encoded([1, "1", True, "True", "x", 1.0, "x", 2.5, 2.5], object)
    assert encoder.names == ("a=1", "a=2.5", "a=True", "a=x")
    assert x.argmax(axis=1).tolist() == [0, 0, 2, 2, 3, 0, 3, 1, 1]
    np.testing.assert_array_equal(encoder.transform(one([1, 3])), [[1, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(encoder.transform(one([True, False])), [[0, 0, 1, 0], [0, 0, 0, 0]])
    assert encoder.unseen(one([1, 3])).tolist() == [0, 1]


def test_categories_of_other_kinds_are_levels_too():
    assert encoded(pd.cut([1, 2, 5, 6, 9, 9], [0, 3, 7, 10]))[0].names == ("a=(0, 3]", "a=(3, 7]", "a=(7, 10]")
    days = pd.Categorical([dt.date(2020, 1, 1), dt.date(2020, 1, 2)] * 2)
    assert encoded(days)[0].names == ("a=2020-01-02",)
    assert encoded(pd.Categorical([True, False] * 2))[0].names == ("a=True",)


def test_categories_that_no_row_has_are_unseen():
    frame = one(pd.Categorical(["a", "b", "a", "b"], categories=["a", "b", "c"]))
    encoder = TableEncoder.fit(frame)
    assert encoder.names == ("a=b",)
    assert encoder.unseen(one(pd.Categorical(["c", "b"]))).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", ["str", "category"])
def test_identifiers_and_free_text_are_refused(dtype):
    several = [f"id{i}" for i in range(60)]
    with pytest.raises(ValueError, match=r"got 60 different.*119 rows of column 'who'. Drop it; .*pandas.to_datetime"):
        TableEncoder.fit(one(several + several[:59], dtype, name="who"))
    assert len(encoded(several * 2, dtype)[0].names) == 51
    assert encoded([f"id{i}" for i in range(49)] + ["id0"] * 2, dtype)[0].names == ("a=rare",)


def test_text_that_looks_like_dates_or_numbers_is_text():
    assert encoded(["2020-01-01", "2020-01-02"] * 2)[0].names == ("a=2020-01-02",)
    assert encoded(["1", "2"] * 2)[0].names == ("a=2",)


# ------------------------------------------------------------------------------ dates and spans of time


def test_dates_are_days_and_circles_where_they_vary():
    days = pd.to_datetime(["2020-01-06", "2020-04-06", "2021-07-06"])  # Monday, Monday, Tuesday
    encoder, x = encoded(days, name="day")
    circles = [f"day: {cycle} ({part})" for cycle in ("month", "weekday") for part in ("sin", "cos")]
    assert encoder.names == ("day: days", *circles)
    assert encoder.numeric.tolist() == [True, False, False, False, False]
    assert x[:, 0].tolist() == [0, 91, 547]
    np.testing.assert_allclose(x[:, 1:3], [[0, 1], [1, 0], [0, -1]], atol=1e-12)
    tuesday = 2 * np.pi / 7
    np.testing.assert_allclose(x[:, 3:], [[0, 1], [0, 1], [np.sin(tuesday), np.cos(tuesday)]], atol=1e-12)


def test_weekdays_and_months_are_those_of_the_calendar_before_1970_too():
    days = pd.Series(pd.date_range("1960-02-27", periods=900, freq="D"))
    encoder, x = encoded(days)
    turn = {
        name: np.arctan2(x[:, i], x[:, i + 1]) / 2 / np.pi % 1 for i, name in enumerate(encoder.names) if "sin" in name
    }
    np.testing.assert_allclose((turn["a: weekday (sin)"] * 7).round() % 7, days.dt.day_of_week)
    np.testing.assert_allclose((turn["a: month (sin)"] * 12).round() % 12, days.dt.month - 1)


def test_times_of_day_are_on_a_circle_if_they_occur():
    hours = pd.to_datetime(["2020-01-06 00:00", "2020-01-06 06:00", "2020-01-06 18:00"])
    encoder, x = encoded(hours)
    assert encoder.names == ("a: days", "a: hour (sin)", "a: hour (cos)")
    np.testing.assert_allclose(x, [[0, 0, 1], [0.25, 1, 0], [0.75, -1, 0]], atol=1e-12)


def test_dates_with_a_time_zone_are_in_utc():
    naive = pd.Series(pd.to_datetime(["2020-01-06 12:00", "2020-03-09 18:30", "2021-01-06 23:45"]))
    encoder, x = encoded(naive)
    abroad = one(naive.dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"))
    np.testing.assert_array_equal(TableEncoder.fit(abroad).transform(abroad), x)
    np.testing.assert_array_equal(encoder.transform(abroad), x)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_dates_are_the_same_in_every_unit_and_as_objects(unit):
    days = [dt.datetime(2020, 1, 6, 5), dt.datetime(2020, 3, 9), dt.datetime(2021, 1, 6)]
    expected = encoded(pd.Series(np.array(days, dtype="M8[us]")))[1]
    as_unit = np.array(days, dtype=f"M8[{unit}]")
    np.testing.assert_array_equal(encoded(pd.Series(as_unit))[1], expected)
    np.testing.assert_array_equal(TableEncoder.fit(as_unit[:, None]).transform(as_unit[:, None]), expected)
    aware = [
        days[0].replace(tzinfo=dt.UTC),
        days[1].replace(tzinfo=dt.UTC).astimezone(dt.timezone(dt.timedelta(hours=9))),
        days[2],
    ]
    for objects in (days, [pd.Timestamp(d) for d in days], [*as_unit], [days[0], days[1].date(), days[2]], aware):
        column = pd.Series(objects, dtype=object)
        np.testing.assert_array_equal(encoded(column)[1], expected)


def test_dates_of_far_centuries_are_days_too():
    encoder, x = encoded([dt.date(1000, 1, 1), dt.date(9999, 1, 1)], object)
    assert x[1, encoder.names.index("a: days")] == (dt.date(9999, 1, 1) - dt.date(1000, 1, 1)).days


def test_missing_dates_are_the_median_day_in_the_centre_of_the_circles():
    encoder, x = encoded(pd.to_datetime(["2020-01-06", None, "2020-01-08", "2020-01-12"]))
    assert encoder.names == ("a: days", "a: weekday (sin)", "a: weekday (cos)", "a is missing")
    assert x[1].tolist() == [2, 0, 0, 1]
    assert x[:, 3].tolist() == [0, 1, 0, 0]
    whole = encoded(pd.to_datetime(["2020-01-06", "2020-01-08"]))[0]
    new = one([dt.date(2020, 1, 7), None], object)
    assert whole.transform(new)[:, 0].tolist() == [1, 1]
    assert whole.unseen(new).tolist() == [0, 1]


def test_periods_are_the_dates_they_begin_with():
    periods = pd.Series(pd.period_range("2020-01", periods=3, freq="M"))
    np.testing.assert_array_equal(encoded(periods)[1], encoded(periods.dt.to_timestamp())[1])


def test_spans_of_time_are_seconds():
    spans = [dt.timedelta(hours=1), None, dt.timedelta(milliseconds=500), dt.timedelta(minutes=1)]
    for column in (pd.Series(spans, dtype="m8[us]"), pd.Series(spans, dtype="m8[ns]"), pd.Series(spans, dtype=object)):
        encoder, x = encoded(column)
        assert encoder.names == ("a", "a is missing")
        assert encoder.numeric.tolist() == [True, False]
        np.testing.assert_array_equal(x, [[3600, 0], [60, 1], [0.5, 0], [60, 0]])


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("cell", [[1, 2], {"foo": "bar"}, (1,), {1}, np.ones(2), b"x", dt.time(3), object()])
@pytest.mark.parametrize("others", [["a"], [1.0]])
def test_cells_of_several_values_or_none_of_ours_are_refused(cell, others):
    column = np.empty(3, dtype=object)
    column[:] = [None, *others, None]
    column[2] = cell
    message = rf"argument must be a string, a number.*\({type(cell).__name__}\) in column 'a', row 2\."
    with pytest.raises(TypeError, match=message):
        TableEncoder.fit(one(column))
    if others == ["a"]:
        with pytest.raises(TypeError, match=message):
            TableEncoder.fit(one(["a", "b"] * 2)).transform(one(column))


@pytest.mark.parametrize("table", [np.array([[1j], [2]]), one([1j, 2]), one([1j, "a"], object), [[1j], ["a"]]])
def test_complex_numbers_are_refused(table):
    with pytest.raises(ValueError, match="Complex data not supported"):
        TableEncoder.fit(table)


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), ValueError, "different names; got 'a' more than once"),
        (pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("a", "b"), ("a", "c")])), ValueError, "Flatten"),
        (pd.DataFrame([[1, 2]], columns=["a", 1]), TypeError, "only supported if all input features have string"),
        (pd.DataFrame(index=range(3)), ValueError, r"0 feature\(s\) \(shape=\(3, 0\)\) while a minimum of 1 is req"),
        (np.empty((3, 0)), ValueError, r"0 feature\(s\) \(shape=\(3, 0\)\) while a minimum of 1 is required\."),
        (pd.DataFrame({"a": []}), ValueError, r"0 sample\(s\) \(shape=\(0, 1\)\) while a minimum of 1"),
        (np.empty((0, 2)), ValueError, r"0 sample\(s\) \(shape=\(0, 2\)\) while a minimum of 1"),
        (sparse.csr_matrix(np.eye(3)), TypeError, r"dense table; got a sparse matrix. Use `X.toarray\(\)`"),
        (sparse.coo_array(np.eye(3)), TypeError, r"dense table; got a sparse matrix. Use `X.toarray\(\)`"),
        (np.ones(3), ValueError, "got a 1D array. Reshape your data"),
        (pd.Series([1, 2]), ValueError, "got a 1D array out of a Series. Reshape your data"),
        ([{"a": 1}, {"a": 2}], ValueError, "1D array out of a list. "),
        (np.ones((2, 2, 2)), ValueError, "got a 3D array"),
        (np.array([[b"x"], [b"y"]]), TypeError, r"got b'x' \(bytes\) in column 'x0', row 0. Decode"),
        (np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]), ValueError, "2-D array or a list"),
        ([[1, 2], [3]], ValueError, "rows of one length"),
        ("table.csv", TypeError, "got str"),
        (Path("table.csv"), TypeError, "got .*Path"),
        ({"a": [1, 2]}, TypeError, "got dict"),
        (None, TypeError, "got NoneType"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(table, error, message):
    with pytest.raises(error, match=message):
        TableEncoder.fit(table)


def test_other_frames_come_by_way_of_pandas_or_not_at_all():
    class Frame:
        def to_pandas(self):
            return one([1, 2, 3])

    class Other:
        def __dataframe__(self):
            raise AssertionError

    assert TableEncoder.fit(Frame()).names == ("a",)
    with pytest.raises(TypeError, match=r"Other. Convert it to pandas first"):
        TableEncoder.fit(Other())


# ------------------------------------------------------------------------------ another table than at fit


def frame_of(*names):
    return pd.DataFrame({name: [1.0, 2.0, 3.0] for name in names})


@pytest.mark.parametrize("names", ["abd", "ab", "abcd", "bac", "xyz", "ghijklmno"])
def test_other_names_are_refused_in_the_words_of_scikit_learn(names):
    with pytest.raises(ValueError, match="The feature names should match") as theirs:
        StandardScaler().fit(frame_of(*"abc")).transform(frame_of(*names))
    for act in ("transform", "unseen"):
        with pytest.raises(ValueError, match="The feature names should match") as ours:
            getattr(TableEncoder.fit(frame_of(*"abc")), act)(frame_of(*names))
        assert str(ours.value) == str(theirs.value)


def test_another_number_of_columns_is_refused_in_the_words_of_scikit_learn():
    encoder = TableEncoder.fit(np.random.default_rng(0).normal(size=(5, 4)))
    with pytest.raises(ValueError, match=r"X has 3 features, but \w+ is expecting 4 features as input"):
        encoder.transform(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"X has 3 features, but \w+ is expecting 4 features as input"):
        TableEncoder.fit(frame_of(*"abcd")).transform(np.ones((2, 3)))


def test_names_that_are_no_text_are_no_names():
    encoder = TableEncoder.fit(pd.DataFrame(np.eye(2)))
    assert encoder.feature_names_in is None
    assert encoder.names == ("0", "1")
    assert TableEncoder.fit(np.eye(2)).names == ("x0", "x1")


@pytest.mark.parametrize(
    ("fitted", "given", "message"),
    [
        ([1.0, 2.0], [1, 2.0, None, "abc"], "must hold numbers as at fit; got 'abc' in row 3"),
        ([1.0, 2.0], pd.to_datetime(["2020-01-01"]), "must hold numbers as at fit; got .*2020.* in row 0"),
        ([True, False], ["True"], "must hold truth values as at fit; got 'True' in row 0"),
        (pd.to_datetime(["2020-01-01", "2020-01-02"]), [None, "2020"],
         "must hold dates as at fit; got '2020' in row 1. Convert it"),
        (pd.to_datetime(["2020-01-01", "2020-01-02"]), [2020.0], "must hold dates as at fit; got 2020.0 in row 0"),
        (pd.to_timedelta(["1h", "2h"]), [3600.0], "must hold spans of time as at fit; got 3600.0 in row 0"),
    ],
)  # fmt: skip
def test_a_column_of_another_kind_than_at_fit_is_refused(fitted, given, message):
    encoder = TableEncoder.fit(one(fitted, name="age"))
    with pytest.raises(ValueError, match="column 'age' " + message):
        encoder.transform(one(given, name="age"))


def test_what_is_missing_altogether_is_of_every_kind():
    frame = pd.DataFrame(
        {"n": [1, 2, 4], "f": [True, False, True], "d": pd.to_datetime(["2020-01-01", "2020-01-02", "2020-01-04"]),
         "s": pd.to_timedelta(["1h", "2h", "4h"]), "l": ["a", "b", "b"]}
    )  # fmt: skip
    encoder, empty = TableEncoder.fit(frame), pd.DataFrame({name: [None] for name in frame})
    x = dict(zip(encoder.names, encoder.transform(empty)[0], strict=True))
    assert (x["n"], x["f"], x["d: days"], x["s"], x["l=rare"]) == (2, 1, 1, 7200, 1)
    assert encoder.unseen(empty).tolist() == [5]


def test_numbers_may_come_as_categories_of_numbers():
    assert TableEncoder.fit(one([1, 2, 4])).transform(one([4, 1], "category")).tolist() == [[4], [1]]


# ------------------------------------------------------------------------------ arrays


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_with_nothing_to_encode_are_passed_on(dtype):
    X = np.random.default_rng(0).normal(size=(7, 3)).astype(dtype)
    encoder = TableEncoder.fit(X)
    assert encoder.transform(X) is X
    assert encoder.transform(pd.DataFrame(X)).dtype == dtype
    X[:, 1] = 2
    assert TableEncoder.fit(X).names == ("x0", "x2")
    np.testing.assert_array_equal(TableEncoder.fit(X).transform(X), X[:, [0, 2]])


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.float16, bool])
def test_other_numbers_become_float64(dtype):
    X = np.array([[0, 1], [1, 0], [1, 1]], dtype=dtype)
    encoder = TableEncoder.fit(X)
    assert encoder.transform(X).dtype == np.float64
    assert encoder.numeric.all() == (dtype is not bool)
    np.testing.assert_array_equal(encoder.transform(X), X)


def test_a_table_of_numbers_is_the_same_at_once_and_column_by_column():
    X = np.random.default_rng(0).normal(size=(40, 6))
    X[:, 2] = 5
    X[::3, 1] = X[::4, 2] = X[5, 4] = np.nan
    new = np.random.default_rng(1).normal(size=(9, 6))
    new[2:4] = np.nan
    for table in (X, np.nan_to_num(X)):
        at_once, apart = TableEncoder.fit(table), TableEncoder.fit(table.astype(object))
        assert at_once.content() == apart.content()
        for given_ in (table, X, new):
            np.testing.assert_array_equal(at_once.transform(given_), apart.transform(given_.astype(object)))
            np.testing.assert_array_equal(at_once.unseen(given_), apart.unseen(given_.astype(object)))


def test_lists_and_object_arrays_are_frames_without_names():
    rows = [[1, "a", True], [2.5, "b", False], [None, "a", True], [4, "b", False]]
    frame = pd.DataFrame(rows)
    expected = TableEncoder.fit(frame).transform(frame)
    assert expected.shape == (4, 4)
    for table in (rows, np.array(rows, dtype=object), tuple(map(tuple, rows))):
        encoder = TableEncoder.fit(table)
        assert encoder.names == ("x0", "x0 is missing", "x1=b", "x2")
        assert encoder.feature_names_in is None
        np.testing.assert_array_equal(encoder.transform(table), expected)
    assert TableEncoder.fit([[1.5, "a"], [2.5, "b"]] * 2).numeric.tolist() == [True, False]  # numpy: all text
    assert TableEncoder.fit([["a", "1"], ["b", "2"], ["a", "1"], ["b", "2"]]).names == ("x0=b", "x1=2")
    assert TableEncoder.fit(np.array([["a", "1"], ["b", "2"]] * 2)).names == ("x0=b", "x1=2")


def test_an_encoder_of_a_mixed_frame_takes_arrays_by_position():
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0, 4.0], "b": [1, "u", 1, "u"]})
    encoder = TableEncoder.fit(frame)
    np.testing.assert_array_equal(encoder.transform(np.array([[7.0, 1.0]])), [[7, 0]])
    assert encoder.unseen(np.array([[7.0, 1.0], [7.0, 2.0]])).tolist() == [0, 1]


def test_masked_cells_are_missing():
    X = np.ma.array([[1.0, 2.0], [3.0, 4.0], [9.0, 5.0]], mask=[[0, 0], [0, 0], [1, 0]])
    np.testing.assert_array_equal(TableEncoder.fit(X).transform(X), [[1, 0, 2], [3, 0, 4], [2, 1, 5]])


def test_arrays_need_no_pandas():
    code = (
        "import sys; sys.modules['pandas'] = None; import numpy as np, datetime as dt\n"
        "from bbalpha.estimators.tables import TableEncoder as T\n"
        "rows = [[1, 'a', dt.date(2020, 1, 1)], [None, 'b', dt.date(2020, 1, 2)], [2, 'b', None], [3, 'a', None]]\n"
        "print(T.fit(np.eye(3)).names, T.fit(rows).names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'x0 is missing', 'x1=b', 'x2: days'" in done.stdout


# ------------------------------------------------------------------------------ weights, names, folders


def test_rows_of_weight_0_are_as_if_they_were_not_there():
    frame = pd.DataFrame({"n": [1.0, 2.0, 90.0, np.nan], "l": ["a", "b", "c", "c"], "k": ["u", "v", "u", "v"]})
    frame = pd.concat([frame, frame.head(2)], ignore_index=True)
    weight = np.array([1.0, 0.5, 0.0, 0.0, 2.0, 1.0])
    for table, part in ((frame, frame[weight > 0]), (frame[["n"]].fillna(9.0), frame.loc[weight > 0, ["n"]])):
        assert TableEncoder.fit(table, weight).content() == TableEncoder.fit(part).content()
    with pytest.raises(ValueError, match=r"one number a row, \(6,\); got \(2,\)"):
        TableEncoder.fit(frame, weight[:2])
    with pytest.raises(ValueError, match="above 0 for at least one row"):
        TableEncoder.fit(frame, 0 * weight)


def test_names_are_different_from_each_other():
    frame = pd.DataFrame(
        {"a": [1, None, 3, 4, 5], "a is missing": [1, 2, 3, 4, 5], "b": ["rare", "rare", "u", "u", "v"]}
    )
    names = TableEncoder.fit(frame).names
    assert names == ("a", "a is missing", "a is missing (2)", "b=rare", "b=u", "b=rare (2)")


def through_folder(encoder, path):
    """As `DropoutEstimator.save` and `load` take it there and back."""
    write_folder(path, {"fitted": {"table_": plain(encoder.content())}})
    return TableEncoder.of(array_of(read_folder(path).content["fitted"])["table_"])


def same(one_, other, *tables):
    assert one_.names == other.names
    assert one_.content() == other.content()
    np.testing.assert_array_equal(one_.numeric, other.numeric)
    np.testing.assert_array_equal(one_.feature_names_in, other.feature_names_in)
    for table in tables:
        np.testing.assert_array_equal(one_.transform(table), other.transform(table))
        np.testing.assert_array_equal(one_.unseen(table), other.unseen(table))


def test_a_column_that_has_the_name_of_a_part_of_a_folder_survives_it(tmp_path):
    names = ["array", "strings", "#", "kind", "ü\x00", "\ud800"]
    cells = np.array([["array", "#", name] * 2 for name in names], dtype=object).T
    frame = pd.DataFrame(cells, columns=pd.Index(names, dtype=object), dtype=object)  # pyarrow has no half characters
    encoder = TableEncoder.fit(frame)
    same(encoder, through_folder(encoder, tmp_path / "model"), frame)


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "odd"), ("centre", np.nan), ("varies", 1), ("missing", None), ("name", 3), ("more", 1), ("levels", ())],
)
def test_content_that_does_not_fit_together_is_refused(field, value):
    content = TableEncoder.fit(one([1.0, 2.0])).content()
    content["columns"][0][field] = value
    with pytest.raises(ValueError, match=r"of a column must be|must hold what its fit sets"):
        TableEncoder.of(content)


def test_content_of_levels_and_dates_that_is_odd_is_refused():
    frame = pd.DataFrame({"d": pd.to_datetime(["2020-01-01", "2020-01-02"]), "l": pd.Categorical(["a", "a"])})
    for i, field, value in ((0, "cycles", ["year"]), (0, "start", 0.5), (1, "levels", [1]), (1, "rare", "abc")):
        content = TableEncoder.fit(frame).content()
        content["columns"][i][field] = value
        with pytest.raises(ValueError, match="must hold what its fit sets"):
            TableEncoder.of(content)
    with pytest.raises(ValueError, match="must have columns"):
        TableEncoder.of({"named": True, "columns": []})


# ------------------------------------------------------------------------------ laws

CELLS = {
    "number": st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5),
    "flag": st.none() | st.booleans(),
    "level": st.none() | st.sampled_from(["a", "b", "c", ""]) | st.text(max_size=2),
    "mixed": st.none() | st.sampled_from(["1", "x", 1, 2, True, 0.5]),
    "date": st.none() | st.datetimes(dt.datetime(1800, 1, 1), dt.datetime(2200, 1, 1)) | st.dates(),
    "span": st.none() | st.timedeltas(dt.timedelta(-9), dt.timedelta(9)),
}
ROWS = st.lists(st.tuples(*CELLS.values()), min_size=3, max_size=12)


def frame_of_cells(rows):
    return pd.DataFrame(rows, columns=[*CELLS], dtype=object)


def frame_and_encoder(rows):
    """A frame of every kind of column; its first row says of which kind each is."""
    frame = frame_of_cells([(0.5, True, "a", "x", dt.date(2020, 1, 1), dt.timedelta(1)), *rows])
    return frame, TableEncoder.fit(frame)


@quiet
@given(ROWS, st.randoms(use_true_random=False))
def test_a_row_is_encoded_by_itself(rows, random):
    frame, encoder = frame_and_encoder(rows)
    x, unseen = encoder.transform(frame), encoder.unseen(frame)
    assert np.isfinite(x).all()
    assert x.shape == (len(frame), len(encoder.names)) == (len(frame), len(encoder.numeric))
    assert not unseen.any()
    order = random.sample(range(len(frame)), len(frame))
    np.testing.assert_array_equal(encoder.transform(frame.iloc[order]), x[order])
    for i in range(len(frame)):
        np.testing.assert_array_equal(encoder.transform(frame.iloc[[i]])[0], x[i])


@quiet
@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_the_rows_at_fit_does_not_matter(rows, random):
    frame, encoder = frame_and_encoder(rows)
    order = random.sample(range(len(frame)), len(frame))
    assert TableEncoder.fit(frame.iloc[order]).content() == encoder.content()


@quiet
@given(ROWS, ROWS)
def test_the_content_makes_the_same_encoder(rows, others):
    frame, encoder = frame_and_encoder(rows)
    again = TableEncoder.of(json.loads(json.dumps(encoder.content(), allow_nan=False)))
    same(encoder, again, frame, frame_of_cells(others))


def test_a_folder_holds_the_encoder(tmp_path):
    rows = [(1.5, True, "a", 1, dt.date(2020, 1, 1), dt.timedelta(1)), (None, False, None, "x", None, None)] * 2
    frame, encoder = frame_and_encoder(rows)
    same(encoder, through_folder(encoder, tmp_path / "model"), frame)
    unnamed = TableEncoder.fit(np.eye(3))
    same(unnamed, through_folder(unnamed, tmp_path / "other"), np.eye(3))


@quiet
@given(ROWS, ROWS)
def test_unseen_counts_what_no_row_had(rows, others):
    frame, encoder = frame_and_encoder(rows)
    new = frame_of_cells(others)
    expected = np.zeros(len(new), dtype=int)
    for name in CELLS:
        gaps = new[name].isna().to_numpy()
        expected += gaps & (not frame[name].isna().any())
        if name in ("level", "mixed", "flag"):
            seen = {str(v) for v in frame[name].dropna()}
            expected += ~gaps & [str(v) not in seen for v in new[name]]
    np.testing.assert_array_equal(encoder.unseen(new), expected)


# ------------------------------------------------------------------------------ real tables


def real_table(name):
    local_data = pytest.importorskip("vega_datasets").local_data
    path = Path(getattr(local_data, name).filepath)
    return pd.DataFrame(json.loads(path.read_text())) if path.suffix == ".json" else pd.read_csv(path)


def test_a_table_of_cars_as_it_comes(tmp_path):
    cars = real_table("cars")
    with pytest.raises(ValueError, match=r"got 311 different.*column 'Name'|no identifiers.*column 'Name'"):
        TableEncoder.fit(cars)
    cars = cars.drop(columns="Name").assign(Year=pd.to_datetime(cars["Year"]))
    encoder = TableEncoder.fit(cars)
    x = encoder.transform(cars)
    assert np.isfinite(x).all()
    of = dict(zip(encoder.names, x.T, strict=True))
    gaps = cars["Horsepower"].isna()
    assert gaps.sum() == of["Horsepower is missing"].sum() > 0
    np.testing.assert_array_equal(of["Horsepower"], cars["Horsepower"].fillna(cars["Horsepower"].median()))
    np.testing.assert_array_equal(of["Origin=USA"], cars["Origin"] == "USA")
    assert of["Year: days"].max() == (cars["Year"].max() - cars["Year"].min()).days
    assert "Year: month (sin)" not in of  # all on the first of January
    same(encoder, through_folder(encoder, tmp_path / "model"), cars)


def test_the_weather_of_seattle_as_it_comes():
    weather = real_table("seattle_weather")
    with pytest.raises(ValueError, match=r"column 'date'. Drop it; if it is a date, convert it"):
        TableEncoder.fit(weather)
    weather["date"] = pd.to_datetime(weather["date"])
    encoder = TableEncoder.fit(weather)
    assert [n for n in encoder.names if n.startswith("date: ")] == [
        "date: days", "date: month (sin)", "date: month (cos)", "date: weekday (sin)", "date: weekday (cos)",
    ]  # fmt: skip
    new = weather.tail(2).assign(weather=["hail", "sun"])
    assert encoder.unseen(new).tolist() == [1, 0]
