"""Guards for estimators, arrays and folders; that they cover as promised is tested in test_calibration.py."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

import bbalpha
from bbalpha import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.calibration import fit_temperature
from bbalpha.checkpoint import CorruptModelError, write_folder
from bbalpha.conformal import ConformalIntervals, ConformalSets, class_index, conformal_intervals, conformal_sets
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction

SCORES = ("quantile", "std", "absolute")
SMALL = {"epochs": 8, "n_ensemble": 1, "dropout": 0.05, "n_predict_passes": 20, "random_state": 0}


@pytest.fixture(scope="module")
def rows():
    rng = np.random.RandomState(0)
    X = 100 + 7 * rng.normal(size=(240, 2))
    return X, X[:, 0] + rng.normal(size=240), np.array(["a", "b", "c"])[np.digitize(X[:, 1], [97, 103])]


@pytest.fixture(scope="module")
def regressor(rows):
    return make_pipeline(StandardScaler(), BBAlphaRegressor(**SMALL)).fit(rows[0][:60], rows[1][:60])


@pytest.fixture(scope="module")
def classifier(rows):
    return make_pipeline(StandardScaler(), BBAlphaClassifier(**SMALL)).fit(rows[0][:60], rows[2][:60])


def direct(pipeline, X):
    return pipeline[-1].predictive(pipeline[:-1].transform(X))


# ------------------------------------------------------------------------------ estimators


@pytest.mark.parametrize("score", SCORES)
def test_intervals_of_a_pipeline_are_those_of_its_predictions(score, rows, regressor):
    X, y, _ = rows
    guard = conformal_intervals(regressor, X[60:150], y[60:150], score=score)
    low, high = guard.interval(regressor, X[150:])
    assert isinstance(low, np.ndarray)
    assert low.shape == high.shape == (90,)
    assert ((low <= y[150:]) & (y[150:] <= high)).mean() > 0.8
    p, new = direct(regressor, X[60:150]), direct(regressor, X[150:])
    by_hand = conformal_intervals(p, torch.as_tensor(y[60:150])[:, None], score=score)
    ends = by_hand.interval(new)
    np.testing.assert_allclose(low, ends[0][:, 0].numpy())
    np.testing.assert_allclose(high, ends[1][:, 0].numpy())


def test_a_fitted_search_is_an_estimator(rows):
    X, y, _ = rows
    search = GridSearchCV(BBAlphaRegressor(**SMALL), {"alpha": [0.0, 0.5]}, cv=2).fit(X[:60], y[:60])
    guard = conformal_intervals(search, X[60:], y[60:])
    expected = conformal_intervals(search.best_estimator_, X[60:], y[60:])
    assert torch.equal(guard.threshold, expected.threshold)


def test_several_targets_keep_their_columns(rows):
    X, y, _ = rows
    Y = np.stack([y, -3 * y], 1)
    model = BBAlphaRegressor(**SMALL).fit(X[:60], Y[:60])
    low, high = conformal_intervals(model, X[60:], pd.DataFrame(Y[60:])).interval(model, X)
    assert low.shape == high.shape == (240, 2)
    with pytest.raises(ValueError, match=r"of the shape \(180, 2\); got shape \(180,\)"):
        conformal_intervals(model, X[60:], y[60:])


def test_sets_of_a_pipeline_are_those_of_its_predictions_and_know_its_labels(rows, classifier):
    X, _, labels = rows
    guard = conformal_sets(classifier, X[60:150], pd.Series(labels[60:150]), coverage=0.8)
    inside = guard.prediction_set(classifier, X[150:])
    assert isinstance(inside, np.ndarray)
    assert inside.shape == (90, 3)
    held = inside[np.arange(90), np.searchsorted(classifier.classes_, labels[150:])]
    assert held.mean() > 0.65
    index = torch.as_tensor(np.searchsorted(classifier.classes_, labels[60:150]))
    by_hand = conformal_sets(direct(classifier, X[60:150]), index, coverage=0.8)
    np.testing.assert_array_equal(inside, by_hand.prediction_set(direct(classifier, X[150:])).numpy())


def test_a_classifier_with_a_temperature_is_an_estimator(rows, classifier):
    X, _, labels = rows
    calibrated = fit_temperature(classifier, X[60:120], labels[60:120])
    guard = conformal_sets(calibrated, X[120:], labels[120:])
    assert guard.prediction_set(calibrated, X).any(1).all()
    assert not torch.equal(guard.threshold, conformal_sets(classifier, X[120:], labels[120:]).threshold)


# ------------------------------------------------------------------------------ targets


def prediction(N=30, axes=(1,)):
    return RegressionPrediction(torch.randn(5, N, *axes), torch.tensor(4.0))


@pytest.mark.parametrize("axes", [(), (1,), (2,)])
@pytest.mark.parametrize("score", SCORES)
def test_arrays_series_and_lists_are_targets(axes, score):
    p = prediction(axes=axes)
    y = torch.randn(30, *axes)
    expected = conformal_intervals(p, y, score=score)
    kinds = [np.asarray, torch.Tensor.tolist, lambda t: t.numpy().astype(">f4"), lambda t: t.numpy().astype(object)]
    for kind in (*kinds, lambda t: pd.DataFrame(t.numpy()) if axes else pd.Series(t.numpy(), index=range(30, 60))):
        guard = conformal_intervals(p, kind(y), score=score)
        assert torch.equal(guard.threshold, expected.threshold)
        assert guard.threshold.dtype == torch.float32
        assert torch.equal(guard.interval(p)[0], expected.interval(p)[0])


@pytest.mark.parametrize("tau", [None, torch.tensor(4.0), torch.tensor([[[4.0]]]), torch.rand(5, 30, 1) + 1])
def test_one_axis_of_targets_will_do_for_one_output(tau):
    p, y = RegressionPrediction(torch.randn(5, 30, 1), tau), torch.randn(30)
    flat, column = conformal_intervals(p, y), conformal_intervals(p, y[:, None])
    assert [end.shape for end in flat.interval(p)] == [(30,), (30,)]  # intervals look like the targets
    assert [end.shape for end in column.interval(p)] == [(30, 1), (30, 1)]
    assert torch.equal(flat.interval(p)[0], column.interval(p)[0][:, 0])
    with pytest.raises(ValueError, match=r"outputs \(1,\) as in calibration; got \(\)"):
        flat.interval(prediction(axes=()))


def test_classes_may_be_arrays_and_lists():
    p = ClassificationPrediction(torch.randn(30, 3).log_softmax(1), torch.zeros(30), torch.zeros(30, 3), 10)
    y = torch.arange(30) % 3
    expected = conformal_sets(p, y).threshold
    for target in (y.numpy(), y.tolist(), pd.Series(y.numpy()), y.numpy().astype(np.uint8)):
        assert torch.equal(conformal_sets(p, target).threshold, expected)


def test_labels_of_every_kind_find_their_class():
    days = np.array(["2020-01-01", "2021-01-01"], "datetime64[ns]")
    for classes, labels in (
        ([3, 5], [5, 3]),
        ([False, True], pd.Series([1, 0])),
        (np.array(["x", "y"], dtype=object), np.array(["y", "x"])),
        (days, days[::-1].astype("datetime64[D]")),
        ([3, 5], torch.tensor([5, 3])),
    ):
        assert class_index(classes, labels).tolist() == [1, 0]


# ------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("axes", [(), (1,), (2,)])
def test_guards_of_intervals_are_written_and_read(axes, tmp_path):
    p, y = prediction(axes=axes), torch.randn(30, *(axes if axes == (2,) else ()))
    guard = conformal_intervals(p, y, coverage=0.8, score="std")
    guard.save(tmp_path / "guard")
    guard.save(tmp_path / "guard")  # takes the place of the one before
    again = ConformalIntervals.load(tmp_path / "guard")
    assert (again.coverage, again.score, again.column) == (0.8, "std", axes == (1,))
    assert all(map(torch.equal, again.interval(p), guard.interval(p)))


def test_guards_of_sets_are_written_and_read(tmp_path, rows, classifier):
    X, _, labels = rows
    guard = conformal_sets(classifier, X[60:], labels[60:], score="cumulative")
    guard.save(tmp_path / "guard")
    again = ConformalSets.load(tmp_path / "guard")
    np.testing.assert_array_equal(again.prediction_set(classifier, X), guard.prediction_set(classifier, X))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["guard"]  # nothing temporary is left


def test_folders_of_another_kind_are_refused_and_left_alone(tmp_path):
    guard = conformal_intervals(prediction(), torch.randn(30))
    net = nn.Linear(2, 1)
    bbalpha.save(net, tmp_path / "model")
    with pytest.raises(ValueError, match=r"must hold a ConformalIntervals; .* holds a model"):
        ConformalIntervals.load(tmp_path / "model")
    with pytest.raises(ValueError, match="holds a model, which would be lost"):
        guard.save(tmp_path / "model")
    assert torch.equal(bbalpha.load(tmp_path / "model").weight, net.weight)
    guard.save(tmp_path / "guard")
    with pytest.raises(ValueError, match=r"must hold a ConformalSets; .* holds a ConformalIntervals"):
        ConformalSets.load(tmp_path / "guard")
    with pytest.raises(ValueError, match="holds a ConformalIntervals"):
        bbalpha.load(tmp_path / "guard")
    with pytest.raises(ValueError, match=r"must hold an estimator; .* holds a ConformalIntervals"):
        bbalpha.load_estimator(tmp_path / "guard")
    with pytest.raises(FileNotFoundError):
        ConformalIntervals.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    "odd",
    [{"threshold": 1.0}, {"coverage": 1.5}, {"coverage": None}, {"score": "best"}, {"column": None}],
)
def test_a_guard_that_cannot_be_is_not_read(odd, tmp_path):
    whole = {"threshold": torch.tensor(1.0), "coverage": 0.9, "score": "std", "column": False}
    write_folder(tmp_path / "g", {"kind": "ConformalIntervals", **whole, **odd})
    with pytest.raises(CorruptModelError, match="not of the form"):
        ConformalIntervals.load(tmp_path / "g")


# ------------------------------------------------------------------------------ bad input


def test_what_is_wrong_is_named(rows, regressor, classifier):
    X, y, labels = rows
    p = prediction()
    guard = conformal_intervals(p, torch.zeros(30))
    for call, error, message in (
        (lambda: conformal_intervals(regressor, y), TypeError, r"got Pipeline and one argument more. Use \(model, X"),
        (lambda: conformal_intervals(nn.Linear(2, 1), torch.zeros(30)), TypeError, r"Use bbalpha.predict_\*"),
        (lambda: conformal_intervals(p, X, y), ValueError, "`y` must be left out after a prediction"),
        (lambda: conformal_intervals(classifier, X, y), TypeError, "a RegressionPrediction; got a Classification"),
        (lambda: conformal_sets(regressor, X, y), TypeError, "a ClassificationPrediction; got a Regression"),
        (lambda: conformal_sets(classifier, X[:2], ["a", "z"]), ValueError, "fitted with; got 'z'"),
        (lambda: conformal_sets(classifier, X[:2], [["a"], ["b"]]), ValueError, "one label a row"),
        (lambda: conformal_sets(classifier, X[:9], labels[:8]), ValueError, "shape of the labels"),
        (lambda: conformal_intervals(regressor, X[:9], y[:8]), ValueError, "one entry a row, 9; got 8"),
        (lambda: conformal_intervals(p, ["a"] * 30), TypeError, "must hold real numbers"),
        (lambda: conformal_intervals(p, [None] * 30), ValueError, "must be finite"),
        (lambda: conformal_intervals(p, [1j] * 30), TypeError, "must hold real numbers"),
        (lambda: conformal_intervals(p, [math.inf] * 30), ValueError, "must be finite"),
        (lambda: guard.interval(regressor), TypeError, "or an estimator with its rows; got Pipeline"),
        (lambda: guard.interval(p, X), ValueError, "`X` must be left out"),
        (lambda: guard.interval(nn.Linear(2, 1), X), TypeError, "`model` must be a fitted estimator"),
    ):
        with pytest.raises(error, match=message):
            call()
