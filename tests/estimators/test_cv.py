import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator

from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor, load_estimator
from bbalpha.estimators.cv import BBAlphaClassifierCV, BBAlphaRegressorCV

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
            single = BBAlphaRegressor(alpha, dropout=0.1, epochs=10, n_predict_passes=500, random_state=0)
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
        model.alpha_, dropout=model.dropout_, length_scale=model.length_scale_, epochs=25, random_state=model.seed_
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
