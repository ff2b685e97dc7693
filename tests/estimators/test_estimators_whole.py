"""Fitted state changes at once, at the end of `fit`, or not at all; a folder is a whole estimator or an error."""

import copy
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from torch import nn

import bbalpha
from bbalpha.checkpoint import Folder, read_folder, write_folder
from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor, load_estimator
from bbalpha.estimators.cv import BBAlphaClassifierCV, BBAlphaRegressorCV
from bbalpha.estimators.folders import array_of
from bbalpha.networks import mlp

OURS = [
    str(p)
    for name in ("estimators/*", "training/population", "training/bank")
    for p in Path(bbalpha.__file__).parent.glob(f"{name}.py")
]
TINY = {"epochs": 1, "hidden_layer_sizes": (3,), "n_passes": 2, "n_predict_passes": 4, "random_state": 0}
AUTO = {name: value for name, value in TINY.items() if name != "hidden_layer_sizes"}
ONE = {"alphas": (0.5,), "dropouts": (0.1,), "cv": 2}
KINDS = {
    "constant": BBAlphaRegressor(noise="constant", n_ensemble=2, **TINY),
    "automatic": BBAlphaRegressor(n_ensemble=2, budget="quick", **AUTO),
    "heteroscedastic": BBAlphaRegressor(noise="heteroscedastic", n_ensemble=1, **TINY),
    "module": BBAlphaRegressor(module=mlp([2, 3, 1], dropout=0.2), n_ensemble=1, **TINY),
    "classes": BBAlphaClassifier(**TINY),
    "automatic classes": BBAlphaClassifier(n_ensemble=2, budget="quick", **AUTO),
    "regressor search": BBAlphaRegressorCV(**ONE, **TINY, n_ensemble=1),
    "classifier search": BBAlphaClassifierCV(**ONE, **TINY),
}


def table(kind, seed=0, n=12):
    rng = np.random.RandomState(seed)
    X = rng.normal(10**seed, 10**seed, (n, 2))
    return X, (np.arange(n) % 2 + seed if "class" in kind else 100**seed * X[:, 0])


def answers(model, X):
    return model.predict_proba(X) if hasattr(model, "predict_proba") else np.stack(model.predict(X, return_std=True))


# ------------------------------------------------------------------------------ interrupts


def interrupted(call, at=None):
    """The number of lines of estimators that `call` runs; before the one with number `at` there is a Ctrl-C."""
    count = 0

    def line(frame, event, arg):
        nonlocal count
        if event == "line":
            count += 1
            if count - 1 == at:
                raise KeyboardInterrupt
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: line if frame.f_code.co_filename in OURS else None)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(
            True
        )  # a trace can raise where no signal comes: between the body of a `with` and its end
    return count


def moments(n):
    """Line numbers: of the first and last, where state is set up and taken over, and some between."""
    return sorted({*range(0, 30, 3), *range(n - 12, n), *np.linspace(0, n - 1, 15).astype(int).tolist()})


@pytest.mark.parametrize("kind", ["constant", "classes", "regressor search", "classifier search"])
def test_an_interrupted_refit_leaves_the_old_fit_or_the_new_one(kind):
    X, y = table(kind)
    model = clone(KINDS[kind]).fit(X, y)
    again = copy.copy(model)
    n = interrupted(lambda: again.fit(*table(kind, seed=1)))
    before, after = answers(model, X), answers(again, X)
    assert not np.array_equal(before, after)
    kept = 0
    for at in moments(n):
        tried = copy.copy(model)
        interrupted(lambda tried=tried: tried.fit(*table(kind, seed=1)), at)
        found = answers(tried, X)
        old = all(vars(tried).get(name) is value for name, value in vars(model).items())  # every attribute, not some
        kept += old
        assert np.array_equal(found, before if old else after), f"line {at} of {n}"
        assert set(vars(tried)) == set(vars(model))
    assert 20 < kept < len(moments(n))  # the last moment is after the change: both ways were seen


@pytest.mark.parametrize("kind", ["heteroscedastic", "module", "classifier search"])
def test_an_interrupted_first_fit_leaves_nothing_or_all(kind):
    X, y = table(kind)
    n = interrupted(lambda: clone(KINDS[kind]).fit(X, y))
    whole = answers(clone(KINDS[kind]).fit(X, y), X)
    none = 0
    for at in moments(n):
        model = clone(KINDS[kind])
        interrupted(lambda model=model: model.fit(X, y), at)
        try:
            np.testing.assert_array_equal(answers(model, X), whole)
        except NotFittedError:
            none += 1
    assert 20 < none < len(moments(n))


@pytest.mark.parametrize("kind", KINDS)
def test_data_that_are_refused_change_nothing(kind):
    X, y = table(kind)
    model = clone(KINDS[kind]).fit(pd.DataFrame(X, columns=["a", "b"]), y)
    state = dict(vars(model))
    wide = np.ones((12, 5))
    for bad in (
        (wide, y[:3]),
        (wide * np.nan, y),
        (wide, np.full(12, None)),
        (wide, y, -np.ones(12)),
        (wide, y, [0] * 12),
    ):
        for tried in (model, clone(model)):
            with pytest.raises((ValueError, TypeError)):
                tried.fit(*bad)
        assert vars(model) == state
        with pytest.raises(NotFittedError):
            tried.predict(X)


# ------------------------------------------------------------------------------ one fit after another


def test_a_refit_is_a_first_fit_nothing_is_left_over():
    X, y = table("regression")
    model = BBAlphaRegressor(noise="constant", **TINY).fit(pd.DataFrame(X, columns=["a", "b"]), y)
    assert {"precision_", "feature_names_in_"} <= set(vars(model))
    model.set_params(noise="heteroscedastic").fit(X, y)
    fresh = clone(model).fit(X, y)
    assert set(vars(model)) == set(vars(fresh))
    np.testing.assert_array_equal(answers(model, X), answers(fresh, X))


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_fit_sets_is_declared(kind):
    model = clone(KINDS[kind]).fit(*table(kind))
    assert set(vars(model)) - set(model.get_params()) <= set(model._fitted_names)
    assert {k: v for k, v in vars(model).items() if k in model.get_params()} == model.get_params()


@pytest.mark.parametrize("kind", ["constant", "heteroscedastic", "module"])
def test_predictions_are_those_of_the_fit_whatever_is_set_after_it(kind):
    X, y = table(kind)
    model = clone(KINDS[kind]).fit(X, y)
    before = answers(model, X)
    for noise in ("constant", "heteroscedastic", "loud"):
        for module in (None, nn.Linear(2, 1)):
            model.set_params(noise=noise, module=module, hidden_layer_sizes=(9, 9), alpha=-7.0, n_ensemble=50)
            np.testing.assert_array_equal(answers(model, X), before)


class Scaled(BBAlphaRegressor):
    """Keeps something of its own from before the fit."""

    def fit(self, X, y):
        self.unit_ = np.abs(y).max()
        return super().fit(X, y / self.unit_)


def test_attributes_of_a_subclass_stay_and_do_not_look_like_a_fit():
    X, y = table("regression")
    assert Scaled(**TINY).fit(X, y).unit_ == np.abs(y).max()
    half = Scaled(**TINY).set_params(epochs=0)
    with pytest.raises(ValueError, match="`epochs`"):
        half.fit(X, y)
    assert hasattr(half, "unit_")
    with pytest.raises(NotFittedError):
        half.predict(X)


def test_a_function_that_hands_out_one_module_twice_does_not_tie_fits_together():
    X, y = table("regression")
    kept = mlp([2, 3, 1], dropout=0.2)
    model = BBAlphaRegressor(module=lambda i, o: kept, **TINY | {"n_ensemble": 2}).fit(X, y)
    before = answers(model, X)
    copy.copy(model).fit(*table("regression", seed=1))
    np.testing.assert_array_equal(answers(model, X), before)
    assert model.networks_[0] is not model.networks_[1]


# ------------------------------------------------------------------------------ trainings that fail


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch, of the precision in an error
@pytest.mark.parametrize("settings", [{}, {"n_ensemble": 1, "dropout": 0.1, "validation_fraction": 0}])
def test_a_training_that_diverges_is_an_error_and_a_bad_one_a_warning(settings):
    rng = np.random.RandomState(0)
    X = rng.normal(size=(120, 2))
    y = 3 * X[:, 0]
    paper = {"hidden_layer_sizes": (50,), "noise": "constant"}  # of several candidates those that diverge lose
    model = BBAlphaRegressor(epochs=8, random_state=0, **paper, **settings).fit(X, y)
    before = answers(model, X)
    with pytest.raises(ValueError, match=r"it diverged\. Lower `learning_rate` \(it is 1000000\.0\)"):
        model.set_params(learning_rate=1e6).fit(X, y)
    np.testing.assert_array_equal(answers(model, X), before)
    with pytest.warns(ConvergenceWarning, match="far worse than a constant") as told:
        model.set_params(learning_rate=5.0).fit(X, y)
    assert told[0].filename == __file__
    assert model.score(X, y) < -5  # the warning was right


def test_a_bad_classifier_is_told_too():
    X = np.random.RandomState(0).normal(size=(60, 2))

    def far_off(n_inputs, n_outputs):
        net = mlp([n_inputs, 4, n_outputs], dropout=0.1)
        nn.init.constant_(net[-1].bias, 0.0)
        net[-1].bias.data[0] = 1000.0
        return net

    with pytest.warns(ConvergenceWarning, match="far worse than a constant"):
        BBAlphaClassifier(module=far_off, epochs=1, random_state=0).fit(X, np.arange(60) % 3)


def test_a_rare_class_of_weight_zero_is_as_if_it_were_not_there():
    X, _ = table("classes")
    y, weight = np.arange(12) % 3, (np.arange(12) % 3 < 2) * 1.0
    for n_ensemble in (1, 2):
        model = BBAlphaClassifier(**TINY, n_ensemble=n_ensemble).fit(X, y, sample_weight=weight)
        without = BBAlphaClassifier(**TINY, n_ensemble=n_ensemble).fit(X[y < 2], y[y < 2])
        assert model.classes_.tolist() == [0, 1]
        np.testing.assert_allclose(model.predict_proba(X), without.predict_proba(X), rtol=1e-4)


# ------------------------------------------------------------------------------ folders


def forgeries(content):
    """What is in a folder with one part left out, or one part something else."""
    paths = [(k,) for k in content] + [("fitted", k) for k in content["fitted"]]
    paths += [("params", k) for k in ("alpha", "noise", "n_predict_passes") if k in content["params"]]
    for path in [*paths, *(("networks", 0, k) for k in ("architecture", "state", "objective"))]:
        for value in (KeyError, "nonsense", {"array": torch.full((2,), torch.nan)}):
            forged = copy.deepcopy(content)
            part = forged
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = value
            if value is KeyError:
                del part[path[-1]]
            yield path, value, forged


@pytest.mark.parametrize("kind", ["constant", "classes", "automatic", "automatic classes"])
def test_a_forged_folder_is_an_error_or_changes_no_prediction(kind, tmp_path, monkeypatch):
    X, y = table(kind)
    model = clone(KINDS[kind]).set_params(n_predict_passes=100, n_ensemble=2).fit(X, y)  # 100 is the default
    model.save(tmp_path)
    content, before, n_refused = read_folder(tmp_path).content, answers(model, X), 0
    for path, value, forged in forgeries(content):
        monkeypatch.setattr("bbalpha.estimators.folders.read_folder", lambda _, forged=forged: Folder(forged, {}))
        try:
            again = load_estimator(tmp_path)
        except ValueError:
            n_refused += 1
            continue
        np.testing.assert_array_equal(answers(again, X), before, err_msg=f"{path}: {value}")
    assert n_refused > 30


def test_a_folder_says_what_is_wrong_with_it(tmp_path):
    X, y = table("constant")
    clone(KINDS["constant"]).fit(X, y).save(tmp_path / "whole")
    content = read_folder(tmp_path / "whole").content
    for change, message in (
        ({"kind": "Oracle"}, "must hold an estimator.* holds a Oracle"),
        ({"networks": []}, "'networks_'"),
        ({"fitted": content["fitted"] | {"fit": 1}}, "'fit'"),
        ({"fitted": {k: v for k, v in content["fitted"].items() if k != "x_mean_"}}, "'x_mean_'"),
        ({"fitted": content["fitted"] | {"x_mean_": {"array": torch.zeros(1).double()}}}, r"shape \(2,\); got \(1,\)"),
        (
            {"fitted": content["fitted"] | {"n_features_in_": 2**31 - 1}},
            r"`x_mean_` of .* must have the shape \(2147",
        ),
        ({"params": content["params"] | {"speed": 3}}, "must hold a whole estimator.*speed"),
    ):
        write_folder(tmp_path / "forged", content | change)
        with pytest.raises(ValueError, match=message):
            load_estimator(tmp_path / "forged")
    del content["kind"]
    write_folder(tmp_path / "forged", content)
    with pytest.raises(ValueError, match="another kind"):
        load_estimator(tmp_path / "forged")


def test_folders_from_before_these_names_are_read(tmp_path):
    X, y = table("heteroscedastic")
    model = clone(KINDS["heteroscedastic"]).fit(X, y)
    model.save(tmp_path / "m")
    content = read_folder(tmp_path / "m").content
    for name in ("noise_", "uses_module_"):
        del content["fitted"][name]
    write_folder(tmp_path / "m", content)
    np.testing.assert_array_equal(answers(load_estimator(tmp_path / "m"), X), answers(model, X))


def test_a_plain_module_of_ones_own_predicts_the_same_bits_from_its_folder(tmp_path):
    X, y = table("module")
    model = clone(KINDS["module"]).fit(X, y)
    model.save(tmp_path / "m")
    np.testing.assert_array_equal(answers(load_estimator(tmp_path / "m"), X), answers(model, X))
    with pytest.raises(ValueError, match="must hold a whole estimator"):
        load_estimator(tmp_path / "m", module=nn.Linear(2, 1))


@pytest.mark.parametrize("name", [{"layer": "Linear"}, 3, None, ["x"]])
def test_names_in_a_folder_are_text(name):
    with pytest.raises(ValueError, match="must be text"):
        array_of({"strings": ["a", name], "object": True})
