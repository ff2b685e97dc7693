"""A model of a table: rows in any form give the same answer, and an answer can be had again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from houses import houses

from bbalpha.checkpoint import CorruptModelError
from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.tabular.files import read_table, write_table
from bbalpha.tabular.fitting import fit_table
from bbalpha.tabular.model import TableModel


@pytest.fixture(scope="module")
def model() -> TableModel:
    return fit_table(houses(), "price", budget="quick")


def test_rows_of_a_frame_of_a_file_and_of_json_are_the_same(model: TableModel, tmp_path: Path) -> None:
    frame = houses(12)
    expected = model.predict(frame)
    write_table(frame, tmp_path / "t.csv")
    pd.testing.assert_frame_equal(model.predict(read_table(tmp_path / "t.csv", dates=False)), expected)
    rows = frame[model.columns].astype(object).where(frame[model.columns].notna(), None)
    records = [{k: str(v) if k == "sold" else v for k, v in row.items()} for row in rows.to_dict("records")]
    pd.testing.assert_frame_equal(model.predict(model.frame(records)), expected)
    alone = pd.concat([model.predict(model.frame([r])) for r in records], ignore_index=True)
    pd.testing.assert_frame_equal(alone, expected)


def test_order_of_columns_and_further_ones_do_not_matter(model: TableModel) -> None:
    frame = houses(5)
    mixed = frame[sorted(frame.columns)].assign(more=1)
    pd.testing.assert_frame_equal(model.predict(mixed), model.predict(frame))


def test_an_answer_can_be_had_again_by_its_seed(model: TableModel) -> None:
    frame = houses(5)
    a, b, c = (model.asked(n_passes=30, seed=s).predict(frame) for s in (1, 1, 2))
    pd.testing.assert_frame_equal(a, b)
    assert not np.allclose(a["mean"], c["mean"], rtol=1e-12)
    assert model.estimator.n_predict_passes == 100


def test_what_no_row_had_is_unusual(model: TableModel) -> None:
    frame = houses(20)
    assert model.predict(frame)["unusual"].mean() < 0.5
    assert model.predict(frame.assign(town="Atlantis"))["unusual"].all()
    assert model.predict(frame.assign(size=frame["size"] * 1000))["unusual"].all()


def test_intervals_hold_what_is_asked(model: TableModel) -> None:
    found = [model.predict(houses(), coverage=c) for c in (0.5, 0.95)]
    assert ((found[1]["high"] - found[1]["low"]) > (found[0]["high"] - found[0]["low"])).all()
    assert (found[0]["std"] ** 2).to_numpy() == pytest.approx(
        (found[0]["epistemic_std"] ** 2 + found[0]["aleatoric_std"] ** 2).to_numpy(), rel=1e-6
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": "large"}, "'size' must be a number or null; got 'large'"), ({"size": True}, "must be a number"),
        ({"size": 1e308 * 10}, "finite"), ({"town": ["Rome"]}, "must be text"), ({"nope": 1}, "no column of the model"),
        ({"sold": "soon"}, "dates"), ({"garden": "perhaps"}, "truth values"), ({"size": None}, None),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_read_are_said(model: TableModel, change: dict[str, Any], said: str | None) -> None:
    row = {"size": 80, "town": "Rome", "rooms": None, "garden": True, "sold": "2020-02-01", "street": 3}
    if said is None:
        assert bool(model.predict(model.frame([row | change]))["unusual"][0])  # no size was missing at the fit
        return
    with pytest.raises(ValueError, match=said):
        model.predict(model.frame([row | change]))


def test_a_column_that_is_missing_is_said(model: TableModel) -> None:
    with pytest.raises(ValueError, match="'town' is missing"):
        model.predict(houses(5).drop(columns="town"))
    with pytest.raises(ValueError, match="'town' is missing; give null"):
        model.frame([{"size": 80, "rooms": None, "garden": True, "sold": None, "street": 3}])


@pytest.mark.parametrize("named", [True, False])
def test_a_model_that_was_saved_from_python_is_one_too(tmp_path: Path, named: bool) -> None:
    rng = np.random.default_rng(0)
    X: Any = rng.normal(size=(60, 2))
    X = pd.DataFrame(X, columns=["a", "b"]) if named else X
    settings: dict[str, Any] = {"hidden_layer_sizes": (5,), "epochs": 5, "n_ensemble": 1, "random_state": 0}
    estimator = BBAlphaClassifier(**settings).fit(X, np.asarray(X)[:, 0] > 0)
    estimator.save(tmp_path / "m")
    model = TableModel.load(tmp_path / "m")
    assert model.columns == (["a", "b"] if named else ["x0", "x1"])
    found = model.predict(model.frame([dict.fromkeys(model.columns, 0.5)]))
    assert found["p_True"][0] == pytest.approx(estimator.predict_proba(X[:1] * 0 + 0.5)[0, 1])
    with pytest.raises(ValueError, match="no missing"):
        model.predict(model.frame([dict.fromkeys(model.columns)]))


def test_a_model_of_a_mixed_table_that_was_saved_from_python_has_its_fields(tmp_path: Path) -> None:
    frame = houses(60)[["size", "town", "sold", "rooms", "garden"]]
    settings: dict[str, Any] = {"hidden_layer_sizes": (5,), "noise": "constant", "epochs": 5, "n_ensemble": 1}
    BBAlphaRegressor(**settings, random_state=0).fit(frame, frame["size"]).save(tmp_path / "m")
    model = TableModel.load(tmp_path / "m")
    assert [f.kind for f in model.card.fields] == ["number", "level", "date", "number", "flag"]
    middle = {f.name: f.centre for f in model.card.fields}
    assert np.isfinite(model.predict(model.frame([middle | {"garden": True}]))["mean"][0])


def test_ranks_of_the_mean_are_in_the_middle_and_of_the_impossible_at_the_end(model: TableModel) -> None:
    frame = houses()
    ranks = model.pit(frame, model.predict(frame)["mean"].to_numpy())
    assert ((ranks > 0.2) & (ranks < 0.8)).mean() > 0.9
    assert model.pit(frame, np.full(240, 1e9)) == pytest.approx(1)


def test_a_damaged_card_is_said(tmp_path: Path, model: TableModel) -> None:
    model.save(tmp_path / "m")
    (tmp_path / "m" / "card.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        TableModel.load(tmp_path / "m")


def test_one_changed_number_of_the_card_is_said(tmp_path: Path, model: TableModel) -> None:
    model.save(tmp_path / "m")
    card = tmp_path / "m" / "card.json"
    for changed in (card.read_bytes().replace(b'"n_rows": 2', b'"n_rows": 3'), None):
        if changed is None:
            card.unlink()
        else:
            assert changed != card.read_bytes()
            card.write_bytes(changed)
        with pytest.raises(CorruptModelError, match=r"card\.json"):
            TableModel.load(tmp_path / "m")


def test_the_card_of_another_model_is_said(tmp_path: Path, model: TableModel) -> None:
    model.estimator.save(tmp_path / "m")
    assert TableModel.load(tmp_path / "m").card.n_rows == 0
    (tmp_path / "m" / "card.json").write_text(json.dumps(model.card.told(), default=str))
    with pytest.raises(CorruptModelError, match=r"card\.json' was not written with this model"):
        TableModel.load(tmp_path / "m")


def test_several_targets_are_refused(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(40, 2))
    settings: dict[str, Any] = {"hidden_layer_sizes": (5,), "noise": "constant", "epochs": 3, "n_ensemble": 1}
    BBAlphaRegressor(**settings).fit(X, X).save(tmp_path / "m")
    with pytest.raises(ValueError, match="one target"):
        TableModel.load(tmp_path / "m")
