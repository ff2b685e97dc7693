"""The benchmark against other packages: its scores, its rows, and going on after a cut."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import scoringrules
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import tables_versus
import versus
import versus_classes
import versus_peers
import versus_summary
import versus_tables

from bbalpha.data import UCIData
from bbalpha.estimators import BBAlphaRegressor


def tiny(_):
    """60 rows of a line with noise, two splits."""
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 2))
    rows = np.arange(60)
    splits = ((rows[:50], rows[50:]), (rows[10:], rows[:10]))
    return UCIData("tiny", x, x[:, 0] + 0.1 * random.normal(size=60), splits)


@pytest.fixture
def on_tiny(monkeypatch):
    monkeypatch.setattr(versus, "_uci", tiny)


def test_scores_of_a_gaussian_are_those_of_others():
    random = np.random.default_rng(1)
    mean, std, y = random.normal(size=200), random.uniform(0.5, 2, 200), random.normal(size=200)
    found = versus_peers.score(versus_peers.of_gaussian(mean, std**2), y, unit=2.0)
    density = torch.distributions.Normal(torch.as_tensor(mean), torch.as_tensor(std))
    assert found["crps"] == pytest.approx(scoringrules.crps_normal(y, mean, std).mean())
    assert found["nll"] == pytest.approx(-density.log_prob(torch.as_tensor(y)).mean().item())
    assert found["width90"] == pytest.approx((2 * 1.6448536 * std).mean() / 2.0)
    assert found["coverage90"] == pytest.approx((np.abs(y - mean) < 1.6448536 * std).mean())


@pytest.mark.parametrize(("n_levels", "too_high"), [(10, 0.007), (20, 0.002), (1000, 0.0)])
def test_crps_from_quantiles_is_too_high_by_what_is_told(n_levels, too_high):
    normal = torch.distributions.Normal(0.0, 1.0)
    levels = (np.arange(n_levels) + 0.5) / n_levels
    y = normal.icdf((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000).numpy()
    values = np.tile(normal.icdf(torch.as_tensor(levels)).numpy(), (len(y), 1))
    exact = 1 / math.sqrt(math.pi)
    assert versus_peers.quantile_crps(levels, values, y).mean() / exact - 1 == pytest.approx(too_high, abs=5e-4)


def test_crps_from_quantiles_is_that_of_the_ensemble_of_them():
    random = np.random.default_rng(2)
    values, y = np.sort(random.normal(size=(30, 10)), 1), random.normal(size=30)
    ours = versus_peers.quantile_crps(versus_peers.LEVELS, values, y)
    np.testing.assert_allclose(ours, scoringrules.crps_ensemble(y, values))


def test_quantiles_that_cross_are_put_in_order():
    forecast = versus_peers.of_quantiles(versus_peers.LEVELS, np.arange(10.0)[None, ::-1], np.zeros(1))
    assert (forecast.low, forecast.high) == (0.0, 9.0)


def test_scores_of_classes_stay_finite_and_calibration_is_the_gap_by_bins():
    random = np.random.default_rng(3)
    probs, y = random.dirichlet(np.ones(3), 300), random.integers(3, size=300)
    confidence, right = probs.max(1), probs.argmax(1) == y
    bins = np.ceil(confidence * 15)
    gaps = [(bins == b).mean() * abs(confidence[bins == b].mean() - right[bins == b].mean()) for b in np.unique(bins)]
    found = versus_classes.class_scores(probs, y)
    assert found["ece"] == pytest.approx(sum(gaps))
    assert found["log_loss"] == pytest.approx(-np.log(probs[np.arange(300), y]).mean())
    sure = np.array([[1.0, 0.0]])
    wrong = [versus_classes.class_scores(sure.astype(t), np.array([1]))["log_loss"] for t in (np.float64, np.float32)]
    assert wrong == pytest.approx([-math.log(np.finfo(t).eps) for t in (np.float64, np.float32)], rel=1e-6)


def test_a_run_goes_on_behind_a_cut_and_can_forget_a_method(on_tiny, tmp_path, monkeypatch):
    asked = []
    forest = versus_peers.REGRESSORS["forest"]

    def cut_off(x, y, seed):
        asked.append(seed)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return forest(x, y, seed)

    monkeypatch.setitem(versus_peers.REGRESSORS, "forest", cut_off)
    arguments = {"names": ["tiny"], "chosen": ["mlp", "forest"], "splits": 20, "out": tmp_path / "v"}
    with pytest.raises(KeyboardInterrupt):
        versus.run("regression", **arguments)
    kept = json.loads((tmp_path / "v/tiny.json").read_text())
    assert len(kept["rows"]) == 3
    rows = versus.run("regression", **arguments)["tiny"]
    assert asked == [0, 1, 1]
    assert rows[:3] == kept["rows"]
    assert [(r["method"], r["split"]) for r in rows] == [(m, s) for m in arguments["chosen"] for s in (0, 1)]
    assert all(r["nll"] < 2 and 0 < r["width90"] < 4 and r["seconds_fit"] > 0 for r in rows)
    assert {"command", "versions", "seed", "seconds", "rows"} <= kept.keys()
    versus.run("regression", **arguments, again=["forest"])
    assert asked == [0, 1, 1, 0, 1]


def test_ours_answer_through_what_everybody_can_call(on_tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(
        versus_peers.REGRESSORS, "bbalpha", versus_peers.bbalpha(epochs=3, dropout=0.05, n_ensemble=1)
    )  # fmt: skip
    row = versus.run("regression", names=["tiny"], chosen=["bbalpha"], splits=1, out=tmp_path / "v")["tiny"][0]
    assert row["alpha"] == versus_peers.alpha_of("bbalpha")
    assert all(row[k] is not None for k in ("nll", "rmse", "crps", "coverage90", "width90", "seconds_predict"))


def test_a_method_that_fails_on_its_rows_says_so_and_the_run_goes_on(on_tiny, tmp_path, monkeypatch):
    def refuse(x, y, seed):
        raise ValueError("singular")

    monkeypatch.setitem(versus_peers.REGRESSORS, "forest", refuse)
    row = versus.run("regression", names=["tiny"], chosen=["forest"], splits=1, out=tmp_path / "v")["tiny"][0]
    assert row["failed"] == "ValueError: singular"
    assert row["nll"] is None
    assert versus_summary.average(list(versus_summary.by_split([row], "forest", "nll").values())).mean == math.inf


def test_what_the_estimator_lacks_is_skipped_with_a_reason(capsys):
    class Bare:
        def __init__(self, alpha=0.5):
            self.alpha = alpha

    assert "no `budget`" in versus_peers.why_not("bbalpha-quick", Bare)
    assert versus_peers.why_not("bbalpha-alpha0.5", Bare) == "it is what bbalpha is already"
    assert versus_peers.why_not("bbalpha", BBAlphaRegressor) is None


def test_words_and_holes_reach_every_classifier(tmp_path):
    pytest.importorskip("vega_datasets")
    table = versus_tables.load("cars")
    assert table.words == ["brand"]
    assert table.X.isna().sum().sum() == 14
    train, test = table.split(6)
    assert set(train) | set(test) == set(range(len(table.y)))
    methods = ["logistic", "hist-gbm"]
    rows = versus.run("classification", names=["cars"], chosen=methods, splits=1, out=tmp_path / "v")["cars"]
    assert [r["method"] for r in rows] == methods
    assert all(r["accuracy"] > 0.8 and r["log_loss"] < 0.6 for r in rows)


@pytest.mark.parametrize("method", ["lightgbm", "catboost", "ngboost"])
def test_classifiers_of_other_packages_take_words_and_holes(method):
    pytest.importorskip(method)
    pytest.importorskip("vega_datasets")
    table = versus_tables.load("cars")
    model = versus_classes.classifier(method, table, 0)
    inner = model.model
    inner.set_params(**({"n_estimators": 5} if method != "catboost" else {"iterations": 5}))
    train, test = table.split(0)
    probs = model.fit(table.X.iloc[train], table.y[train]).predict_proba(table.X.iloc[test])
    assert versus_classes.class_scores(np.asarray(probs), table.y[test])["accuracy"] > 0.6


def test_a_win_is_over_every_baseline_on_the_splits_that_both_have():
    def rows(**scores):
        return [{"method": m, "split": s, "nll": v} for m, vs in scores.items() for s, v in enumerate(vs)]

    a = rows(bbalpha=[1.0, 2.0], forest=[1.5], ngboost=[None, 1.0], mapie=[None])
    b = rows(bbalpha=[1.0], forest=[0.5])
    won, lost = versus_summary.verdict({"a": a, "b": b}, "bbalpha", "nll")
    assert won == ["a"]
    assert lost == {"b": ["forest"]}
    assert "on 1 of 2 (a)" in versus_summary.text({"a": a, "b": b}, ["nll"])


def test_tables_are_made_from_the_rows(on_tiny, tmp_path, monkeypatch):
    folder = tmp_path / "versus"
    versus.run("regression", names=["boston"], chosen=["forest"], splits=1, out=folder)
    versus.run("classification", names=["iris"], chosen=["logistic"], splits=2, out=folder)
    monkeypatch.setattr(tables_versus, "FOLDER", folder)
    for name in ("nll", "crps", "rmse", "intervals", "seconds"):
        assert "boston" in getattr(tables_versus, name)()
    assert "| iris (2) |" in tables_versus.log_loss()  # its number of folds
    assert tables_versus.calibration().count("±") == 1
    monkeypatch.setattr(tables_versus, "FOLDER", tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        tables_versus.nll()
