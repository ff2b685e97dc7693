"""What is served: the answers of the models themselves, the same alone or in company."""

import json
import shutil

import numpy as np
import pytest
import torch
from served import ROW, houses

from bbalpha.serve.models import ServedTable, load_model, load_models
from bbalpha.tabular.model import TableModel


def trapezoid(y, x):
    """numpy's has another name before its version 2."""
    return torch.trapezoid(torch.as_tensor(y), torch.as_tensor(x)).item()


ASKED = {"n_passes": 20, "seed": 5, "coverage": 0.8}
ROWS = [ROW | {"age": age, "town": town} for age in (20, 40.5, None, 300) for town in ("Rome", "Lima", "Mars", None)]


@pytest.mark.parametrize("name", ["prices", "bands"])
def test_answers_are_those_of_the_model(folders, models, name):
    model = TableModel.load(folders[name]).asked(n_passes=20, seed=5)
    expected = model.predict(model.frame(ROWS), coverage=0.8)
    got = models[name].answer(models[name].read(ROWS), **ASKED)
    for row, (_, wanted) in zip(got, expected.iterrows(), strict=True):
        assert row["unusual"] == wanted["unusual"]
        if name == "bands":
            assert row["label"] == wanted["label"]
            flat = {f"p_{c}": p for c, p in row["probs"].items()} | row
            names = ("p_cheap", "p_dear", "entropy", "mutual_information")
        else:
            flat, names = row, ("mean", "std", "epistemic_std", "aleatoric_std", "low", "high")
        np.testing.assert_allclose([flat[n] for n in names], [wanted[n] for n in names], rtol=1e-9, atol=1e-10)
    assert len({row["unusual"] for row in got}) == 2


@pytest.mark.parametrize("name", ["prices", "bands", "shapes"])
def test_a_row_is_answered_alike_alone_and_in_company(models, name):
    model = models[name]
    images = np.random.default_rng(0).random((30, 3, 4)).tolist()
    rows = model.read(images if name == "shapes" else ROWS)
    together = model.answer(rows * 9, **ASKED)
    assert [model.answer([row], **ASKED)[0] for row in rows] * 9 == together


def test_many_rows_are_answered_as_few_are(models):
    rows = models["prices"].read(ROWS * 140)
    assert models["prices"].answer(rows, **ASKED)[-16:] == models["prices"].answer(rows[-16:], **ASKED)


def test_the_seed_and_the_passes_count(models):
    rows = models["prices"].read([ROW])
    first = models["prices"].answer(rows, **ASKED)
    assert models["prices"].answer(rows, **ASKED) == first
    assert models["prices"].answer(rows, **(ASKED | {"seed": 6})) != first
    assert models["prices"].answer(rows, **(ASKED | {"n_passes": 21})) != first
    wider = models["prices"].answer(rows, **(ASKED | {"coverage": 0.99}))[0]
    assert wider["low"] < first[0]["low"] < first[0]["high"] < wider["high"]
    assert wider["mean"] == first[0]["mean"]


def test_what_is_not_finite_is_no_answer_and_leaves_the_others(models, monkeypatch):
    model = models["prices"]
    before = model.answer(model.read([ROW]), **ASKED)
    far = ROW | {"age": 1e299}
    passes = ServedTable._passes

    def overflown(self, rows, n_passes, seed):
        table, prediction = passes(self, rows, n_passes, seed)
        prediction.outputs[:, 1:] = np.inf
        return table, prediction

    monkeypatch.setattr(ServedTable, "_passes", overflown)
    assert model.answer(model.read([ROW, far]), **ASKED) == [*before, None]


def test_a_density_is_one(models):
    model = models["prices"]
    (found,) = model.density(model.read([ROW]), **ASKED)
    x, density = np.array(found["x"]), np.array(found["density"])
    assert trapezoid(density, x) == pytest.approx(0.996, abs=2e-3)
    assert trapezoid(x * density, x) == pytest.approx(found["mean"], rel=0.01)
    assert (len(found["means"]), np.mean(found["means"])) == (20, pytest.approx(found["mean"]))
    assert np.std(found["means"]) == pytest.approx(found["epistemic_std"])
    answer = model.answer(model.read([ROW]), **ASKED)[0]
    assert {k: found[k] for k in answer} == answer
    company = model.density(model.read([ROW | {"age": 25}, ROW]), **ASKED)
    assert company[1] == found


def test_a_density_of_a_logarithm_is_one():
    from bbalpha import BBAlphaRegressor
    from bbalpha.tabular.model import Card

    frame, y = houses()
    target = np.exp(y / 30)
    estimator = BBAlphaRegressor(budget="quick", epochs=3, n_predict_passes=20, random_state=0).fit(
        frame[["age"]], target
    )
    assert estimator.log_target_, "the test needs a model of a logarithm"
    from bbalpha.tabular.fields import describe

    served = ServedTable.of("logs", TableModel(estimator, Card("regression", "y", (describe(frame["age"], "age"),))))
    (found,) = served.density(served.read([{"age": 40}]), **ASKED)
    assert trapezoid(found["density"], found["x"]) == pytest.approx(0.996, abs=5e-3)
    assert np.mean(found["means"]) == pytest.approx(found["mean"])


def test_the_map_is_the_row_with_two_columns_changed(models):
    model = models["prices"]
    wide = ServedTable.of("wide", two_numbers(model.model))
    across, up, rows = wide.grid({"age": 30.0, "size": 1.0}, "size", "age", 3)
    assert (len(across), len(up), len(rows)) == (3, 3, 10)
    assert rows[:4] == [(up[0], across[0]), (up[0], across[1]), (up[0], across[2]), (up[1], across[0])]
    assert rows[-1] == (30.0, 1.0)
    for given, told in ((("size", "size"), "two columns"), (("size", "town"), "column of numbers")):
        with pytest.raises(ValueError, match=told):
            wide.grid({"age": 30.0, "size": 1.0}, *given, 3)


def two_numbers(like):
    from dataclasses import replace

    age = like.card.fields[0]
    return replace(like, card=replace(like.card, fields=(age, replace(age, name="size", low=0.0, high=2.0))))


def test_facts_are_json_and_name_what_is_asked_for(models):
    for name, model in models.items():
        facts = json.loads(json.dumps(model.facts(), allow_nan=False))
        assert facts["name"] == name
        assert (facts["n_passes"], facts["seed"]) == (model.n_passes, model.seed)
    assert models["bands"].facts()["classes"] == ["cheap", "dear"]
    assert models["shapes"].facts()["image"] == {"shape": [3, 4]}
    assert [f["name"] for f in models["prices"].facts()["fields"]] == [*ROW]


def test_one_name_is_one_folder(folders, tmp_path):
    shutil.copytree(folders["prices"], tmp_path / "prices")
    with pytest.raises(ValueError, match="two folders are called 'prices'"):
        load_models([folders["prices"], tmp_path / "prices"])
    with pytest.raises(ValueError, match="must be a model to serve"):
        load_models([])
    with pytest.raises(FileNotFoundError, match="no model folder"):
        load_model(tmp_path / "none")
