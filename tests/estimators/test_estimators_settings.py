"""Every setting of every estimator is checked at `fit`, before anything is trained, in one sentence."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from torch import nn

from bbalpha.checks import RULES
from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.estimators.choices import candidates
from bbalpha.estimators.cv import BBAlphaClassifierCV, BBAlphaRegressorCV
from bbalpha.networks import mlp
from bbalpha.training.population import Population

NAN, HUGE = float("nan"), 2**70
COUNT = (0, -5, 1.5, NAN, "3", True, HUGE, [2])
RATE = (-0.1, 1, 1.5, NAN, "0.1", float("inf"))
WRONG = {
    "alpha": (NAN, float("inf"), "0.5", None),
    "dropout": RATE,
    "input_dropout": RATE,
    "length_scale": (NAN, -1.0, None, "1"),
    "learning_rate": (NAN, 0, -0.1, float("inf"), None, "0.1"),
    "n_passes": (*COUNT, None),
    "n_predict_passes": (*COUNT, None),
    "balanced": ("no", None, 1, 0.0),
    "epochs": COUNT,
    "batch_size": COUNT,
    "patience": COUNT,
    "n_ensemble": (*COUNT, 1025),
    "validation_fraction": RATE,
    "hidden_layer_sizes": (0, -1, (50, 0), (50, 2.5), "50", None, 2.5, NAN, ((3, 4),), HUGE),
    "noise": ("loud", None, 3),
    "budget": ("long", None, 0, -1, NAN),
    "class_weight": ("even", 3),
    "epoch_rows": COUNT,
    "module": ("mlp", 3),
    "alphas": ((), (NAN,), (0.5, None), 0.5, None, "0.5"),
    "dropouts": ((), (0.1, 1.0), (-1,), (NAN,), 0.1, (None,)),
    "length_scales": ((), (-1,), (NAN,), 1.0),
    "cv": (0, 1, -3, True, 2.5, [], [([0, 1], [])], [([0, 1], [-1])], [([0, 1], [99])], [([0.5], [1])]),
}
KINDS = (BBAlphaRegressor, BBAlphaClassifier, BBAlphaRegressorCV, BBAlphaClassifierCV)
CASES = [(kind, name) for kind in KINDS for name in kind().get_params() if name in WRONG]


def table(kind, n=12):
    X = np.random.RandomState(0).normal(size=(n, 2))
    return X, np.arange(n) % 2 if "Classifier" in kind.__name__ else X[:, 0]


def test_no_setting_is_left_out():
    known = {*WRONG, "verbose", "random_state"}  # any truth value; scikit-learn checks the other
    assert all(set(kind().get_params()) <= known for kind in KINDS)
    assert set(RULES) - set(WRONG) == {"seed", "spread", "n_validation_passes"}  # of populations alone


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind.__name__}-{name}" for kind, name in CASES])
def test_what_is_wrong_is_named_before_anything_is_trained(kind, name, monkeypatch):
    def trained(*args, **kwargs):
        raise AssertionError("it came to a training")

    monkeypatch.setattr("bbalpha.estimators.base.fit", trained)
    monkeypatch.setattr("bbalpha.estimators.choices.fit_population", trained)
    monkeypatch.setattr("bbalpha.estimators.race.fit_population", trained)
    for value in WRONG[name]:
        model = kind(**{name: value})  # never in the constructor: scikit-learn's convention
        with pytest.raises(ValueError, match=rf"^`{name}|^Expected .?{name}"):  # scikit-learn's, of cv
            model.fit(*table(kind))
        with pytest.raises(NotFittedError):
            model.predict(table(kind)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_numpy_are_numbers(kind):
    X, y = table(kind, 40)
    plain = {"epochs": 2, "batch_size": 16, "n_passes": 5, "n_predict_passes": 10, "patience": 2, "n_ensemble": 2,
             "learning_rate": 0.5, "validation_fraction": 0.25, "input_dropout": 0.125, "random_state": 0}  # fmt: skip
    plain |= {"dropouts": (0.25,), "alphas": (0.5,), "cv": 2} if "CV" in kind.__name__ else {"dropout": 0.25}
    as_numpy = {k: type(v)(map(np.float64, v)) if isinstance(v, tuple) else np.asarray(v)[()] for k, v in plain.items()}
    assert isinstance(as_numpy["epochs"], np.int64)
    expected = kind(hidden_layer_sizes=(7,), **plain).fit(X, y).predict(X)
    for hidden in (7, np.int32(7), [7], np.array([7])):
        model = kind(hidden_layer_sizes=hidden, **as_numpy)
        before = dict(model.get_params())
        np.testing.assert_array_equal(model.fit(X, y).predict(X), expected)
        assert all(model.get_params()[k] is v for k, v in before.items())  # settings stay as they were given
        np.testing.assert_array_equal(clone(model).fit(X, y).predict(X), expected)


def test_passes_of_predictions_are_checked_when_they_are_used():
    X, y = table(BBAlphaRegressor)
    model = BBAlphaRegressor(epochs=1, n_ensemble=1, hidden_layer_sizes=(50,), noise="constant").fit(X, y)
    for wrong in (0, NAN, HUGE, 100_001):
        with pytest.raises(ValueError, match=r"^`n_predict_passes` must be"):
            model.set_params(n_predict_passes=wrong).predict(X)
    with pytest.raises(ValueError, match=r"^`n_samples` must be"):
        model.set_params(n_predict_passes=2).sample_y(X, 0)


NOT_RANDOM = [
    {"dropout": 0},
    {"dropout": 0.0, "input_dropout": 0},
    {"dropout": 0.5, "hidden_layer_sizes": (), "input_dropout": 0},
    {"dropout": None, "hidden_layer_sizes": (), "input_dropout": 0},
]


@pytest.mark.parametrize("settings", NOT_RANDOM)
def test_networks_without_dropout_are_refused_before_they_are_trained(settings):
    for kind in KINDS:
        given = dict(settings)
        if "CV" in kind.__name__:
            given["dropouts"] = (0.1 if given["dropout"] is None else given["dropout"],)
            del given["dropout"]
        with pytest.raises(
            ValueError, match=r"`dropout` or `input_dropout` must be above 0, else all passes are equal"
        ):
            kind(epochs=1, **given).fit(*table(kind))


def test_dropout_at_one_place_is_enough():
    X, y = table(BBAlphaRegressor, 40)
    for settings in ({"dropout": 0, "input_dropout": 0.5}, {"dropout": 0.5, "input_dropout": 0}):
        _, std = (
            BBAlphaRegressor(epochs=1, **settings, hidden_layer_sizes=(50,), noise="constant")
            .fit(X, y)
            .predict(X, return_std=True)
        )
        assert (std > 0).all()
    assert BBAlphaRegressor(hidden_layer_sizes=(), epochs=1, noise="constant").fit(X, y).input_dropout_ > 0
    own = BBAlphaRegressor(dropout=0, module=mlp([2, 3, 1], dropout=0.5), epochs=1).fit(X, y)  # has its own
    assert np.isfinite(own.predict(X)).all()
    with pytest.raises(ValueError, match="random site"):
        BBAlphaRegressor(module=nn.Linear(2, 1), epochs=1).fit(X, y)


def test_some_rows_are_left_to_train_on_whatever_is_held_out():
    X, y = table(BBAlphaRegressor, 40)
    model = BBAlphaRegressor(validation_fraction=0.999, epochs=1, hidden_layer_sizes=(50,), noise="constant")
    assert len(candidates(model, np.arange(40), 0, alpha=0.5)[0, 0].train) == 1
    assert np.isfinite(model.fit(X, y).predict(X)).all()


# ------------------------------------------------------------------------------ the search


@pytest.mark.parametrize("value", [NAN, -np.inf])
def test_a_candidate_that_diverges_is_not_chosen(value, monkeypatch):
    X, y = table(BBAlphaRegressor, 30)
    scored = Population.log_likelihood

    def broken(self, *args, **kwargs):
        found = scored(self, *args, **kwargs)
        return [v * 0 + value if m.dropout in lost else v for v, m in zip(found, self.members, strict=True)]

    monkeypatch.setattr(Population, "log_likelihood", broken)
    model = BBAlphaRegressorCV((0.5,), (0.1, 0.2), cv=2, epochs=2, random_state=0)
    lost = set()
    for diverging, best in ((0.1, 0.2), (0.2, 0.1)):
        lost.clear()
        lost.add(diverging)
        assert model.fit(X, y).dropout_ == best
        assert np.isfinite(model.best_score_)
        assert model.cv_results_["rank_test_score"].tolist() == ([2, 1] if best == 0.2 else [1, 2])
    lost.update((0.1, 0.2))
    with pytest.raises(ValueError, match="it diverged"):
        model.fit(X, y)
    assert model.dropout_ == 0.1
