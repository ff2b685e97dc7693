"""Rows as JSON has them: read as TableModel reads them, request by request."""

import itertools

import numpy as np
import pytest
from served import ROW, table_model

from bbalpha import BBAlphaRegressor
from bbalpha.serve.reading import Reader
from bbalpha.tabular.model import TableModel

CELLS = {
    "age": (40, 40.5, -0.0, None, 1e12),
    "town": ("Rome", "Oslo", "nowhere", "", None, 3, 3.0, True, "Århus"),
    "since": ("2020-06-01", "2020-06-01T12:30:00", None, "2020-06-01 07:00:00"),
    "member": (True, False, None, "yes", "No", 1, 0, 1.0, "1.0"),
}


@pytest.fixture(scope="module")
def model():
    return table_model("regression")


def test_each_cell_is_read_as_the_table_reads_it(model):
    reader = Reader(model)
    for name, cells in CELLS.items():
        for cell in cells:
            row = ROW | {name: cell}
            expected, got = model.table(model.frame([row])), reader.table(reader.read([row]))
            for of in (model.estimator.encoder_.transform, model.estimator.encoder_.unseen):
                np.testing.assert_array_equal(of(expected), of(got), err_msg=f"{name}={cell!r}")


def test_a_level_may_be_sent_as_a_number(model):
    cells = [Reader(model).read([ROW | {"town": town}])[0][1] for town in ("3", 3, 3.0, 3.5, True)]
    assert cells == ["3", "3", "3", "3.5", "True"]


def test_rows_of_many_requests_make_one_table(model):
    rows = [dict(zip(CELLS, cells, strict=True)) for cells in itertools.product(*(c[:4] for c in CELLS.values()))]
    reader = Reader(model)
    together = reader.table([cells for row in rows for cells in reader.read([row])])
    encode = model.estimator.encoder_.transform
    alone = np.concatenate([encode(reader.table(reader.read([row]))) for row in rows])
    np.testing.assert_array_equal(encode(together), alone)


def test_dates_of_different_forms_keep_their_moment_in_any_company(model):
    forms = ("2020-06-01", "2020-06", "2020", "2020-06-01T02:00:00+02:00", "20200601", "2020-06-01T00:00:00.000001Z")
    reader = Reader(model)
    dates = reader.table(reader.read([ROW | {"since": form} for form in forms]))["since"].to_numpy()
    first = np.datetime64("2020-06-01", "us")
    assert dates.tolist() == [
        *np.array([first, first, "2020-01-01", first, first, first + 1], dtype=dates.dtype).tolist()
    ]


@pytest.mark.parametrize(
    ("name", "cell", "told"),
    [
        ("age", "40", "a number or null"),
        ("age", True, "a number or null"),
        ("age", float("nan"), "a finite number"),
        ("age", 10**400, "a finite number"),
        ("age", [1], "a number or null"),
        ("town", {"a": 1}, "text"),
        ("town", float("inf"), "finite"),
        ("town", "half \ud800 letter", "text in Unicode"),
        ("since", "yesterday", "a date like"),
        ("since", "now", "a date like"),
        ("since", "0001-01-01T00:00:00+23:59", "a date like"),
        ("since", 2020, "a date as text"),
        ("member", "perhaps", "true, false"),
        ("member", [], "true, false"),
        ("member", 2, "true, false"),
    ],
)
def test_what_is_no_such_cell_is_refused_in_one_sentence(model, name, cell, told):
    with pytest.raises(ValueError, match="Row 1: ") as error:
        Reader(model).read([ROW, ROW | {name: cell}])
    assert told in str(error.value)
    assert name in str(error.value)
    assert len(str(error.value)) < 200


def test_columns_must_be_those_of_the_model(model):
    with pytest.raises(ValueError, match="Row 0: 'odd' is no column of the model; it has age, town"):
        Reader(model).read([ROW | {"odd": 1}])
    with pytest.raises(ValueError, match="Row 0: 'age' is missing; give null"):
        Reader(model).read([{k: v for k, v in ROW.items() if k != "age"}])


@pytest.mark.parametrize("named", [True, False])
def test_a_model_fitted_on_plain_numbers_gets_them_and_takes_no_gap(named):
    import pandas

    X = np.random.default_rng(0).normal(size=(60, 2))
    estimator = BBAlphaRegressor(hidden_layer_sizes=(10,), noise="constant", epochs=3, n_ensemble=1, random_state=0)
    estimator.fit(pandas.DataFrame(X, columns=["x0", "x1"]) if named else X, X[:, 0])
    from bbalpha.tabular.model import _bare_card

    reader = Reader(TableModel(estimator, _bare_card(estimator)))
    table = reader.table(reader.read([{"x0": 1, "x1": 2.5}]))
    assert hasattr(table, "columns") == named
    np.testing.assert_array_equal(estimator.predict(table), estimator.predict(estimator_input([[1, 2.5]], named)))
    with pytest.raises(ValueError, match="'x1' must not be missing"):
        reader.read([{"x0": 1, "x1": None}])


def estimator_input(rows, named):
    import pandas

    return pandas.DataFrame(rows, columns=["x0", "x1"], dtype=float) if named else np.array(rows)
