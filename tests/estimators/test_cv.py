import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator
from torch import nn

from bbalpha.checkpoint import read_folder, write_folder
from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor, load_estimator
from bbalpha.estimators.cv import BBAlphaClassifierCV, BBAlphaRegressorCV
from bbalpha.estimators.soundness import diverged
from bbalpha.networks import mlp

WEIGHTS = "check_sample_weight_equivalence_on_dense_data"  # order of rows and masks differ where rows are repeated
SMALL = {"alphas": (0.5,), "dropouts": (0.05,), "cv": 2, "n_predict_passes": 20, "learning_rate": 0.05}


def checks(estimator):
    for instance, check in estimator_checks_generator(estimator):
        name = getattr(check, "func", check).__name__
        if name not in (WEIGHTS, "check_array_api_input"):
            yield pytest.param(instance, check, id=f"{type(estimator).__name__}-{name}")


@pytest.mark.filterwarnings("ignore:Can't check dok sparse matrix", "ignore:The least populated class:UserWarning")
@pytest.mark.parametrize(
    ("estimator", "check"),
    [
        *checks(BBAlphaRegressorCV(epochs=15, **SMALL)),
        *checks(BBAlphaClassifierCV(epochs=8, **SMALL)),
    ],
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.parametrize("kind", [BBAlphaRegressor, BBAlphaClassifier, BBAlphaRegressorCV, BBAlphaClassifierCV])
def test_scikit_learn_checks_with_nothing_set(kind):
    found = check_estimator(kind(), expected_failed_checks={WEIGHTS: "rows that are repeated draw other masks"})
    assert len(found) > 40


def rows(n=90, seed=0):
    rng = np.random.RandomState(seed)
    X = rng.normal(size=(n, 2))
    return X, 10 * X[:, 0] + rng.normal(size=n)


def test_the_score_is_that_of_separate_fits_on_the_folds():
    X, y = rows()
    y[60:] *= 5  # folds differ: one taken for another is noticed
    folds = KFold(3)
    model = BBAlphaRegressorCV(alphas=(0.0, 1.0), dropouts=(0.1,), cv=folds, epochs=10, n_predict_passes=500)
    model.set_params(random_state=0).fit(X, y)
    assert list(model.cv_results_["param_alpha"]) == [0.0, 1.0]
    for c, alpha in enumerate((0.0, 1.0)):
        for i, (train, test) in enumerate(folds.split(X)):
            single = BBAlphaRegressor(
                alpha,
                dropout=0.1,
                epochs=10,
                n_predict_passes=500,
                random_state=0,
                hidden_layer_sizes=(50,),
                noise="constant",
            )
            single.set_params(length_scale=model.length_scales[0])
            single.fit(X[train], y[train])
            score = single.log_prob(X[test], y[test]).mean()
            assert model.cv_results_[f"split{i}_test_score"][c] == pytest.approx(score, rel=0.1)


def test_the_best_candidate_is_fitted_on_all_rows():
    X, y = rows()
    model = BBAlphaRegressorCV(alphas=(0.5,), dropouts=(0.02, 0.6), cv=3, epochs=25, random_state=0).fit(X, y)
    results = model.cv_results_
    best = int(np.argmax(results["mean_test_score"]))
    assert (model.alpha_, model.dropout_) == (results["param_alpha"][best], results["param_dropout"][best])
    assert model.dropout_ == 0.02
    assert results["rank_test_score"][best] == 1
    np.testing.assert_allclose(
        results["mean_test_score"], np.mean([results[f"split{i}_test_score"] for i in range(3)], 0)
    )
    alone = BBAlphaRegressor(
        model.alpha_,
        dropout=model.dropout_,
        length_scale=model.length_scale_,
        epochs=25,
        random_state=model.seed_,
        hidden_layer_sizes=(50,),
        noise="constant",
    ).fit(X, y)
    np.testing.assert_array_equal(model.predict(X), alone.predict(X))
    assert model.predict_interval(X, 0.9)[0].shape == model.log_prob(X, y).shape == (90,)
    assert model.predict_quantiles(X, [0.1, 0.9]).shape == model.sample_y(X, 2).shape == (90, 2)


def noise(n=40, seed=0):
    rng = np.random.RandomState(seed)
    return rng.normal(size=(n, 8)), rng.normal(size=n)


CANDIDATES = {"alphas": (0.0,), "dropouts": (0.004, 0.7), "length_scales": (0.01,), "epochs": 80, "learning_rate": 0.03,
              "validation_fraction": 0}  # fmt: skip


class Leaky(KFold):
    """Trains on the rows it holds out."""

    def split(self, X, y=None, groups=None):
        for train, test in super().split(X, y, groups):
            yield np.concatenate([train, test]), test


def test_a_planted_leak_is_caught(monkeypatch):
    X, y = noise()
    honest = BBAlphaRegressorCV(**CANDIDATES, cv=4, random_state=0).fit(X, y)
    assert honest.dropout_ == 0.7  # targets are noise: the candidate that learns it by heart must lose
    leaky = clone(honest).set_params(cv=Leaky(4))
    with pytest.raises(ValueError, match="must hold out rows that it does not train on; fold 0"):
        leaky.fit(X, y)
    # and were it let through, the choice would be the other one: the first assertion can fail
    monkeypatch.setattr("bbalpha.estimators.cv._check_apart", lambda folds: None)
    assert leaky.fit(X, y).dropout_ == 0.004


def test_held_out_rows_do_not_touch_what_they_are_scored_by():
    X, y = rows(60)
    folds = [(np.arange(40), np.arange(40, 60))]
    first = BBAlphaRegressorCV((0.5,), (0.1,), cv=folds, epochs=5, random_state=0).fit(X, y)
    moved = y.copy()
    moved[40:50] += 1000  # wild held-out targets: the score of the others must not move
    outside = BBAlphaRegressorCV((0.5,), (0.1,), cv=[(np.arange(40), np.arange(50, 60))], epochs=5, random_state=0)
    a = outside.fit(X, y).best_score_
    b = clone(outside).fit(X, moved).best_score_
    assert a == b
    assert first.best_score_ != a


def test_the_classifier_searches_too():
    X, y = rows(80)
    labels = np.where(y > 0, "up", "down")
    model = BBAlphaClassifierCV(alphas=(0.0, 1.0), dropouts=(0.05, 0.8), cv=3, epochs=20, random_state=0)
    model.fit(X, labels)
    assert model.dropout_ == 0.05
    assert len(model.cv_results_["params"]) == 4
    assert model.score(X, labels) > 0.9
    assert model.predict_entropy(X).shape == model.predict_mutual_information(X).shape == (80,)
    np.testing.assert_allclose(model.predict_proba(X), np.exp(model.predict_log_proba(X)))


def test_ensembles_folders_pipelines_and_frames(tmp_path):
    X, y = rows()
    frame = pd.DataFrame(X, columns=["a", "b"])
    model = BBAlphaRegressorCV((0.5,), (0.05,), cv=2, epochs=3, n_ensemble=2, random_state=0).fit(frame, y)
    assert len(model.best_estimator_.networks_) == 2
    model.save(tmp_path / "m")
    np.testing.assert_array_equal(load_estimator(tmp_path / "m").predict(frame), model.predict(frame))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["b", "a"]])
    make_pipeline(StandardScaler(), clone(model)).fit(frame, y).predict(frame)


def test_errors():
    X, y = rows(20)
    with pytest.raises(ValueError, match="at least one value"):
        BBAlphaRegressorCV(alphas=()).fit(X, y)
    with pytest.raises(NotFittedError):
        BBAlphaClassifierCV().predict(X)


@pytest.mark.slow
def test_noise_may_depend_on_the_inputs_in_the_search_too():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (200, 1))
    y = X[:, 0] + np.where(X[:, 0] > 0, 0.5, 0.02) * rng.standard_normal(200)
    settings = {"alphas": (0.5,), "dropouts": (0.01, 0.05), "cv": 3, "epochs": 60, "random_state": 0}
    constant = BBAlphaRegressorCV(**settings).fit(X, y)
    model = BBAlphaRegressorCV(noise="heteroscedastic", **settings).fit(X, y)
    assert model.best_score_ > constant.best_score_ + 0.3
    _, std = model.predict([[-0.5], [0.5]], return_std=True)
    assert std[1] > 3 * std[0]
    with pytest.raises(ValueError, match="`noise` must be"):
        BBAlphaRegressorCV(noise="none").fit(X, y)


# ------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("kind", [BBAlphaRegressorCV, BBAlphaClassifierCV])
def test_a_search_is_written_and_read(kind, tmp_path):
    X, y = rows()
    y = y if kind is BBAlphaRegressorCV else np.where(y > 0, "up", "down")
    frame = pd.DataFrame(X, columns=["a", "b"])
    settings = {"hidden_layer_sizes": 7, "epochs": 3, "n_predict_passes": 20, "random_state": 0}
    model = kind(np.array([0, 1], np.float32), [0.05, 0.5], cv=np.int64(3), **settings).fit(frame, y)
    model.save(tmp_path / "m")
    again = kind.load(tmp_path / "m")
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    assert set(vars(again)) == set(vars(model))
    for name in ("alpha_", "dropout_", "length_scale_", "best_score_", "seed_", "n_features_in_"):
        assert getattr(again, name) == getattr(model, name), name
    assert set(again.cv_results_) == set(model.cv_results_)
    for name, values in model.cv_results_.items():
        np.testing.assert_array_equal(again.cv_results_[name], values)
    assert (again.cv, again.alphas, again.dropouts) == (3, (0.0, 1.0), (0.05, 0.5))
    assert type(again.best_estimator_) is type(model.best_estimator_) is type(load_estimator(tmp_path / "m"))
    with pytest.raises(ValueError, match="feature names"):
        again.predict(frame[["b", "a"]])
    again.set_params(random_state=0).fit(frame, y)  # the settings came back too
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    again.save(tmp_path / "m")
    assert kind.load(tmp_path / "m").best_score_ == model.best_score_


def test_folders_without_a_search_are_no_search(tmp_path):
    X, y = rows(20)
    BBAlphaRegressor(epochs=1, n_ensemble=1, hidden_layer_sizes=(50,), noise="constant").fit(X, y).save(
        tmp_path / "plain"
    )
    with pytest.raises(ValueError, match=r"must hold a BBAlphaRegressorCV; .* holds a BBAlphaRegressor\."):
        BBAlphaRegressorCV.load(tmp_path / "plain")
    BBAlphaRegressorCV((0.5,), (0.05,), cv=2, epochs=1).fit(X, y).save(tmp_path / "search")
    with pytest.raises(ValueError, match=r"must hold a BBAlphaClassifierCV; .* holds a BBAlphaRegressorCV\."):
        BBAlphaClassifierCV.load(tmp_path / "search")
    content = read_folder(tmp_path / "search").content
    for odd in ("candidates", "scores", "seed", "cv"):
        search = {name: value for name, value in content["search"].items() if name != odd}
        write_folder(tmp_path / "odd", content | {"search": search})
        with pytest.raises(ValueError, match=f"must hold a whole BBAlphaRegressorCV; .* does not: KeyError.*{odd}"):
            BBAlphaRegressorCV.load(tmp_path / "odd")
        load_estimator(tmp_path / "odd")


# ------------------------------------------------------------------------------ networks of one's own


def own(n_inputs, n_outputs):
    return mlp([n_inputs, 6, n_outputs], dropout=0.1)


def test_candidates_with_a_network_of_ones_own_are_scored_as_separate_fits_are():
    X, y = rows()
    y[60:] *= 5  # folds differ
    folds, weight = KFold(3), np.linspace(0.5, 1.5, 90)
    model = BBAlphaRegressorCV((0.0, 1.0), cv=folds, module=own, epochs=4, random_state=0).fit(X, y, weight)
    assert model.dropout_ is None
    assert list(model.cv_results_["param_alpha"]) == [0.0, 1.0]
    for i, (train, test) in enumerate(folds.split(X)):
        for c, alpha in enumerate((0.0, 1.0)):
            single = BBAlphaRegressor(alpha, module=own, epochs=4, n_ensemble=1, random_state=model.seed_ + i)
            single.fit(X[train], y[train], weight[train])
            score = np.average(single.log_prob(X[test], y[test]), weights=weight[test])
            assert model.cv_results_[f"split{i}_test_score"][c] == pytest.approx(score)
    best = model.best_estimator_
    assert best.uses_module_
    assert best.networks_[0][0].p == 0.1 or any(getattr(layer, "p", 0) == 0.1 for layer in best.networks_[0])


def test_a_classifier_searches_with_a_network_of_ones_own(tmp_path):
    X, y = rows(60)
    labels = np.where(y > 0, "up", "down")
    model = BBAlphaClassifierCV((0.5,), length_scales=(0.1, 30.0), cv=2, module=own, epochs=15, random_state=0)
    model.fit(X, labels)
    assert model.length_scale_ == 0.1  # the other prior lets nothing be learnt
    model.save(tmp_path / "m")
    again = BBAlphaClassifierCV.load(tmp_path / "m", module=own)
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.dropouts is None
    assert again.module is own


def test_what_does_not_go_with_a_network_of_ones_own_is_refused():
    X, y = rows(20)
    with pytest.raises(ValueError, match=r"`dropouts` must be None with a `module`.*got \(0.1,\)"):
        BBAlphaRegressorCV(dropouts=(0.1,), module=own).fit(X, y)
    apart = [(np.arange(10), np.arange(10, 20))]
    with pytest.raises(ValueError, match="must train on every class that it holds out"):
        BBAlphaClassifierCV((0.5,), cv=apart, module=own, epochs=1).fit(X, np.repeat([0, 1, 2, 3], 5))
    with pytest.raises(ValueError, match="random site"):  # an error that is no divergence is told
        BBAlphaRegressorCV((0.5,), cv=2, module=nn.Linear(2, 1), epochs=1).fit(X, y)


def test_a_network_of_ones_own_that_diverges_loses_and_all_that_do_are_an_error(monkeypatch):
    X, y = rows(30)
    trained = BBAlphaRegressor.fit

    def fit(self, *args, **kwargs):
        if self.alpha in lost:
            raise diverged(self)
        return trained(self, *args, **kwargs)

    monkeypatch.setattr(BBAlphaRegressor, "fit", fit)
    lost = (0.0,)
    model = BBAlphaRegressorCV((0.0, 1.0), cv=2, module=own, epochs=1).fit(X, y)
    assert model.alpha_ == 1.0
    assert model.cv_results_["mean_test_score"][0] == -np.inf
    lost = (0.0, 1.0)
    with pytest.raises(ValueError, match="diverged"):
        clone(model).fit(X, y)


@pytest.mark.parametrize("module", [None, own])
def test_a_search_tells_if_asked(module, capsys):
    X, y = rows(30)
    model = BBAlphaRegressorCV((0.5,), None if module else (0.1,), cv=2, module=module, epochs=2, n_ensemble=1)
    capsys.readouterr()
    model.fit(X, y)
    assert capsys.readouterr() == ("", "")
    model.set_params(verbose=True).fit(X, y)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 * (3 if module else 2)  # the search, fold by fold with a module, and the last fit
    assert all(line.startswith("epoch ") for line in told)
