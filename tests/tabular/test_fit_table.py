"""From a table to a model: which columns go in, what is held out, what the card says."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from houses import houses

from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.tabular import fitting
from bbalpha.tabular.fields import describe, guess_task, usable
from bbalpha.tabular.fitting import evaluate, fit_table
from bbalpha.tabular.model import TableModel

SMALL: dict[str, Any] = {
    "hidden_layer_sizes": (30,),
    "epochs": 60,
    "n_ensemble": 2,
    "n_predict_passes": 20,
    "dropout": 0.05,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimators of one small network, so that a fit takes less than a second."""

    def made(estimator: type) -> Any:
        return lambda **settings: estimator(**{**settings, **SMALL, **_noise(estimator)})

    for name, estimator in (("BBAlphaRegressor", BBAlphaRegressor), ("BBAlphaClassifier", BBAlphaClassifier)):
        monkeypatch.setattr(fitting, name, made(estimator))


def _noise(estimator: type) -> dict[str, Any]:
    return {"noise": "constant"} if estimator is BBAlphaRegressor else {}


def test_columns_that_cannot_be_used_are_left_out_and_said() -> None:
    kept, why = usable(houses(), ["price"])
    assert kept == ["size", "town", "rooms", "garden", "sold", "street"]
    assert why == {"id": "identifiers or free text", "country": "the same in every row"}


def test_fields_say_what_a_form_would_offer() -> None:
    frame = houses()
    size, town, rooms = (describe(frame[name], name) for name in ("size", "town", "rooms"))
    assert (size.kind, town.kind, rooms.kind) == ("number", "level", "number")
    assert 50 <= size.low < size.centre < size.high <= 200
    assert set(town.levels) == {"Rome", "Paris", "Oslo"}
    assert rooms.whole
    assert rooms.missing == pytest.approx(0.1, abs=0.01)
    assert describe(frame["sold"], "sold").low == "2020-01-01T00:00:00"


@pytest.mark.parametrize(
    ("cells", "task"),
    [
        ([1.5, 2.0, 3.0], "regression"), ([0, 1, 1], "classification"), (["a", "b", "a"], "classification"),
        ([True, False, True], "classification"), ([3, 4, 5], "regression"),
    ],
)  # fmt: skip
def test_the_task_is_guessed_by_the_target(cells: list[Any], task: str) -> None:
    assert guess_task(pd.Series(cells, name="y")) == task


def test_a_regression_and_its_card(tmp_path: Path) -> None:
    frame = houses()
    model = fit_table(frame, "price", source="houses.csv")
    card = model.card
    assert (card.task, card.n_rows, card.n_held_out) == ("regression", 215, 24)
    assert card.scores["rmse"] < card.guess["rmse"] / 2
    assert card.threshold is not None
    assert max(card.drivers, key=lambda name: card.drivers[name]["prediction"]) == "size"
    assert len(card.held_out["target"]) == 24
    model.save(tmp_path / "m")
    again = TableModel.load(tmp_path / "m")
    assert again.card.fields == card.fields
    pd.testing.assert_frame_equal(again.predict(frame), model.predict(frame))
    assert evaluate(again, frame)["n_rows"] == 239


def test_a_training_that_was_too_short_is_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    (told,) = fit_table(houses(), "price").card.facts["warnings"]
    assert "held-out likelihood was still rising" in told
    monkeypatch.setitem(SMALL, "epochs", None)  # it chooses
    assert not fit_table(houses(), "price").card.facts["warnings"]


def test_classes_come_back_as_they_are_written() -> None:
    model = fit_table(houses(), "town", leave_out=["street"])
    assert model.classes == ["Oslo", "Paris", "Rome"]
    found = model.predict(houses())
    assert set(found["label"]) <= {"Oslo", "Paris", "Rome"}
    assert found[["p_Oslo", "p_Paris", "p_Rome"]].sum(axis=1).to_numpy() == pytest.approx(1)
    assert model.card.left_out["street"] == "asked for"


@pytest.mark.parametrize("by", ["group", "time_column"])
def test_held_out_rows_are_whole_groups_or_the_last(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frame, seen = houses(), []
    judged = fitting._judged
    monkeypatch.setattr(fitting, "_judged", lambda m, f, *rest: (seen.append(f), judged(m, f, *rest))[1])
    column = "street" if by == "group" else "sold"
    model = fit_table(frame, "price", **{by: column})
    (held,) = seen
    rest = frame[frame["price"].notna()].drop(held.index)
    if by == "group":
        assert not set(held[column]) & set(rest[column])
        assert column not in model.columns
    else:
        assert held[column].min() > rest[column].max()


def test_targets_of_held_out_rows_change_nothing_but_scores() -> None:
    """A planted leak: what is held out must not reach the model."""
    frame = houses()
    frame = frame[frame["price"].notna()]
    order = np.random.default_rng(0).permutation(len(frame))
    other = frame.copy()
    other.iloc[order[: round(0.1 * len(frame))], frame.columns.get_loc("price")] = 1e6
    a, b = fit_table(frame, "price"), fit_table(other, "price")
    assert a.card.scores["rmse"] * 10 < b.card.scores["rmse"]
    columns = ["mean", "std"]
    pd.testing.assert_frame_equal(a.predict(frame)[columns], b.predict(frame)[columns])


def test_few_rows_have_no_threshold_and_none_held_out_no_scores() -> None:
    few = fit_table(houses(60), "price")
    assert few.card.threshold is None
    none = fit_table(houses(60), "price", held_out=0.0)
    assert not none.card.scores
    assert "unusual" in none.predict(houses(60))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": "nope"}, "no column 'nope'"), ({"leave_out": ["nope"]}, "no column 'nope'"),
        ({"target": "sold"}, "numbers or classes"), ({"task": "regression", "target": "town"}, "must hold numbers"),
        ({"group": "street", "time_column": "sold"}, "not by both"), ({"time_column": "town"}, "dates or numbers"),
        ({"held_out": 1.5}, "held_out"),
    ],
)  # fmt: skip
def test_mistakes_are_said(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit_table(houses(60), **{"target": "price", **change})


@pytest.mark.parametrize("asked", [{"group": "price"}, {"time_column": "price"}, {"leave_out": ["price"]}])
def test_a_target_that_is_the_group_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="The target 'price' must not be the group"):
        fit_table(houses(), "price", budget="quick", **asked)
