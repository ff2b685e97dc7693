import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import nn

import bbalpha
from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor, load_estimator
from bbalpha.estimators.choices import RATE_OF_MANY, RATES
from bbalpha.networks import mlp

EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": "order of rows and masks differ where rows are repeated: "
    "equal in expectation, not in bits",
}


QUICKLY = {  # of the checks, those that the automatic choice may fail where one network does not; the others are slow
    "check_estimators_nan_inf", "check_estimators_dtypes", "check_fit_idempotent", "check_methods_subset_invariance",
    "check_dict_unchanged", "check_dont_overwrite_attributes", "check_do_not_raise_errors_in_init_or_set_param",
}  # fmt: skip


def checks(estimator, quickly=None):
    """The checks of scikit-learn for `estimator`, as pytest parameters; slow but for those named."""
    for instance, check in estimator_checks_generator(estimator, expected_failed_checks=EXPECTED):
        name = getattr(check, "func", check).__name__
        marks = [pytest.mark.skip(reason=EXPECTED[name])] if name in EXPECTED else []
        marks += [pytest.mark.slow] if quickly is not None and name not in quickly else []
        kind = "one network" if quickly is None else "automatic"
        if name != "check_array_api_input":  # skips itself
            yield pytest.param(instance, check, marks=marks, id=f"{type(estimator).__name__}-{kind}-{name}")


AUTOMATIC = {"budget": "quick", "epochs": 15, "learning_rate": 0.05, "n_ensemble": 2, "n_predict_passes": 20}
ONE = {"hidden_layer_sizes": (20,), "dropout": 0.05, "n_ensemble": 1} | AUTOMATIC


@pytest.mark.filterwarnings("ignore:Can't check dok sparse matrix")
@pytest.mark.parametrize(
    ("estimator", "check"),
    [
        *checks(BBAlphaRegressor(**ONE, noise="constant")),
        *checks(BBAlphaClassifier(**ONE)),
        *checks(BBAlphaRegressor(**AUTOMATIC), QUICKLY),
        *checks(BBAlphaClassifier(**AUTOMATIC | {"epochs": 10}), QUICKLY),
    ],
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def curve(n=120, seed=0):
    rng = np.random.RandomState(seed)
    X = rng.uniform(-2, 2, (n, 2)) * [1.0, 100.0]
    return X, 50 + 20 * np.sin(2 * X[:, 0]) + rng.normal(0, 2, n)


@pytest.fixture(scope="module")
def regressor():
    X, y = curve(300)
    return BBAlphaRegressor(
        epochs=60, learning_rate=0.02, n_ensemble=2, random_state=0, hidden_layer_sizes=(50,), noise="constant"
    ).fit(X, y)


def test_learns_the_curve_and_its_noise(regressor):
    X, y = curve(200, seed=1)
    assert regressor.score(X, y) > 0.9
    assert 1 < float(regressor.precision_[0, 0]) ** -0.5 < 5  # noise 2, in units of y
    low, high = regressor.predict_interval(X, coverage=0.9)
    assert 0.75 < np.mean((low < y) & (y < high)) <= 1.0


def test_the_parts_of_a_prediction_fit_together(regressor):
    X, y = curve(40, seed=2)
    mean, std = regressor.predict(X, return_std=True)
    draws = regressor.sample_y(X, 4000)
    assert draws.shape == (40, 4000)
    np.testing.assert_allclose(draws.mean(1), mean, atol=5 * std.max() / 4000**0.5)
    np.testing.assert_allclose(draws.std(1), std, rtol=0.1)
    q = regressor.predict_quantiles(X, [0.05, 0.5, 0.95])
    assert q.shape == (40, 3)
    low, high = regressor.predict_interval(X, coverage=0.9)
    np.testing.assert_allclose(q[:, [0, 2]], np.stack([low, high], 1))
    np.testing.assert_allclose(regressor.predict_quantiles(X, 0.5), q[:, 1])
    # log_prob in units of y: the density integrates to 1
    grid = np.linspace(-200, 300, 4001)
    density = np.exp(regressor.log_prob(np.repeat(X[:1], 4001, 0), grid))
    assert float(torch.trapezoid(torch.tensor(density), torch.tensor(grid))) == pytest.approx(1.0, abs=1e-3)
    assert regressor.log_prob(X, y).shape == (40,)


def test_scaling_of_inputs_and_targets_changes_nothing_but_units(regressor):
    X, y = curve(300)
    other = clone(regressor).fit(X * [3.0, 0.01] + 7, y / 1000 - 1)
    np.testing.assert_allclose(other.predict(X[:5] * [3.0, 0.01] + 7), regressor.predict(X[:5]) / 1000 - 1, rtol=1e-3)
    np.testing.assert_allclose(
        other.log_prob(X[:5] * [3.0, 0.01] + 7, y[:5] / 1000 - 1), regressor.log_prob(X[:5], y[:5]) + np.log(1000), 0.05
    )


def test_a_row_gets_the_same_answer_in_any_company(regressor):
    X, _ = curve(50, seed=3)
    whole = regressor.predict(X, return_std=True)
    single = [regressor.predict(X[i : i + 1], return_std=True) for i in range(50)]
    np.testing.assert_allclose(whole[0], [m[0] for m, _ in single], rtol=1e-10)
    np.testing.assert_allclose(whole[1], [s[0] for _, s in single], rtol=1e-10)


def test_heteroscedastic_noise_follows_the_inputs():
    rng = np.random.RandomState(0)
    X = rng.uniform(-1, 1, (400, 1))
    y = 3 * X[:, 0] + rng.normal(0, np.where(X[:, 0] > 0, 1.0, 0.1))
    model = BBAlphaRegressor(
        noise="heteroscedastic", n_ensemble=1, epochs=60, learning_rate=0.02, random_state=0, hidden_layer_sizes=(50,)
    ).fit(X, y)
    _, std = model.predict([[-0.5], [0.5]], return_std=True)
    assert std[1] > 3 * std[0]
    assert not hasattr(model, "precision_")


def test_several_targets():
    X, y = curve()
    model = BBAlphaRegressor(epochs=10, random_state=0, hidden_layer_sizes=(50,), noise="constant").fit(
        X, np.stack([y, -y, X[:, 0]], 1)
    )
    mean, std = model.predict(X[:4], return_std=True)
    assert mean.shape == std.shape == (4, 3)
    assert model.predict_quantiles(X[:4], [0.1, 0.9]).shape == (4, 3, 2)
    assert model.sample_y(X[:4], 5).shape == (4, 3, 5)
    assert model.log_prob(X[:4], np.zeros((4, 3))).shape == (4,)


def test_the_classifier_is_unsure_where_classes_meet_and_ignorant_far_away():
    rng = np.random.RandomState(0)
    X = np.concatenate([rng.normal(-2, 1, (100, 2)), rng.normal(2, 1, (100, 2))])
    model = BBAlphaClassifier(
        dropout=0.25, epochs=30, random_state=0, hidden_layer_sizes=(50,), n_ensemble=1, validation_fraction=0.0
    ).fit(X, np.repeat(["no", "yes"], 100))
    assert model.score(X, np.repeat(["no", "yes"], 100)) > 0.95
    entropy = model.predict_entropy([[-3.0, -3.0], [0.0, 0.0]])
    assert entropy[1] > 2 * entropy[0]
    information = model.predict_mutual_information(X)
    assert bool((information >= 0).all())
    assert bool((information <= model.predict_entropy(X) + 1e-9).all())
    np.testing.assert_allclose(model.predict_proba(X), np.exp(model.predict_log_proba(X)))


@pytest.mark.parametrize("estimator", [BBAlphaRegressor, BBAlphaClassifier])
def test_an_ensemble_is_the_mixture_of_its_networks(estimator):
    X, y = curve()
    y = y if estimator is BBAlphaRegressor else y > 50
    options = {"epochs": 4, "n_predict_passes": 50, "hidden_layer_sizes": (50,)}
    options |= {"noise": "constant"} if estimator is BBAlphaRegressor else {}
    both = estimator(n_ensemble=2, random_state=3, **(options | {"n_predict_passes": 100})).fit(X, y)
    assert len(both.networks_) == 2
    singles = []
    for i in range(2):
        one = clone(both).set_params(n_ensemble=1, n_predict_passes=50)
        one.fit(X, y)
        one.networks_, one.objectives_ = both.networks_[i : i + 1], both.objectives_[i : i + 1]
        one.shares_ = np.ones(1)
        one.seed_ = both.seed_ + i
        if estimator is BBAlphaRegressor:
            one.precision_ = both.precision_[i : i + 1]
        singles.append(one)
    if estimator is BBAlphaClassifier:
        mean = (singles[0].predict_proba(X) + singles[1].predict_proba(X)) / 2
        np.testing.assert_allclose(both.predict_proba(X), mean, rtol=1e-8)
    else:
        mean = np.logaddexp(singles[0].log_prob(X, y), singles[1].log_prob(X, y)) - np.log(2)
        np.testing.assert_allclose(both.log_prob(X, y), mean, rtol=1e-8)


def test_a_module_of_ones_own():
    X, y = curve()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    before = module[0].weight.detach().clone()
    model = BBAlphaRegressor(module=module, epochs=5, random_state=0).fit(X, y)
    assert torch.equal(module[0].weight, before)  # the caller's stays as it is
    assert model.predict(X).shape == (120,)
    made = BBAlphaClassifier(module=lambda i, o: mlp([i, 4, o], dropout=0.1), epochs=2).fit(X, y > 50)
    assert made.networks_[0][-1].out_features == 2
    clone(model).fit(X, y)


def test_the_same_seed_the_same_model_and_constructor_arguments_untouched():
    X, y = curve()
    a = BBAlphaRegressor(epochs=3, random_state=5, hidden_layer_sizes=(50,), noise="constant")
    before = a.get_params()
    state = torch.get_rng_state()
    a.fit(X, y)
    assert a.get_params() == before
    assert torch.equal(state, torch.get_rng_state())
    b, c = clone(a).fit(X, y), clone(a).set_params(random_state=6).fit(X, y)
    np.testing.assert_array_equal(a.predict(X), b.predict(X))
    assert not np.array_equal(a.predict(X), c.predict(X))


def test_works_with_scikit_learn_and_pandas():
    X, y = curve()
    frame = pd.DataFrame(X, columns=["a", "b"])
    pipeline = make_pipeline(
        PolynomialFeatures(2), BBAlphaRegressor(epochs=3, random_state=0, hidden_layer_sizes=(50,), noise="constant")
    ).set_output(transform="pandas")
    search = GridSearchCV(pipeline, {"bbalpharegressor__alpha": [0.0, 1.0]}, cv=2).fit(frame, y)
    assert search.best_estimator_[-1].feature_names_in_[1] == "a"
    assert (
        len(
            cross_val_score(
                BBAlphaClassifier(
                    epochs=2, hidden_layer_sizes=(50,), dropout=0.05, n_ensemble=1, validation_fraction=0.0
                ),
                frame,
                y > 50,
                cv=2,
            )
        )
        == 2
    )
    model = BBAlphaRegressor(epochs=2, hidden_layer_sizes=(50,), noise="constant").fit(frame, y)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["b", "a"]])


def test_early_stopping():
    X, y = curve()
    model = BBAlphaRegressor(
        epochs=200,
        validation_fraction=0.3,
        patience=3,
        learning_rate=0.05,
        random_state=0,
        hidden_layer_sizes=(50,),
        noise="constant",
    )
    model.fit(X, y)
    assert model.n_iter_ == max(map(len, model.validation_curves_)) < 200


@pytest.mark.parametrize("how", ["pickle", "folder"])
@pytest.mark.parametrize("kind", ["constant", "heteroscedastic", "classes", "texts"])
def test_a_fitted_estimator_survives(how, kind, tmp_path):
    X, y = curve(60)
    if kind in ("classes", "texts"):
        labels = (y > 50).astype(int) + 3 if kind == "classes" else np.where(y > 50, "high", "low")
        model = BBAlphaClassifier(
            epochs=2, n_ensemble=2, hidden_layer_sizes=(50,), dropout=0.05, validation_fraction=0.0
        ).fit(pd.DataFrame(X, columns=["a", "b"]), labels)
    else:
        model = BBAlphaRegressor(epochs=2, noise=kind, hidden_layer_sizes=(50,)).fit(
            pd.DataFrame(X, columns=["a", "b"]), y
        )
    if how == "pickle":
        again = pickle.loads(pickle.dumps(model))
    else:
        model.save(tmp_path / "m")
        again = load_estimator(tmp_path / "m")
        assert {k: v for k, v in again.get_params().items() if k != "random_state"} == {
            k: v for k, v in model.get_params().items() if k != "random_state"
        }
    frame = pd.DataFrame(X, columns=["a", "b"])
    np.testing.assert_array_equal(model.predict(frame), again.predict(frame))
    assert list(again.feature_names_in_) == ["a", "b"]
    if kind in ("classes", "texts"):
        assert again.classes_.dtype == model.classes_.dtype


def test_folders_of_own_modules_and_wrong_kinds(tmp_path):
    X, y = curve(60)
    own = BBAlphaRegressor(module=Odd(), epochs=2).fit(X, y)
    own.save(tmp_path / "own")
    with pytest.raises(ValueError, match="`module` must be given"):
        BBAlphaRegressor.load(tmp_path / "own")
    again = BBAlphaRegressor.load(tmp_path / "own", module=Odd())
    np.testing.assert_array_equal(own.predict(X), again.predict(X))
    with pytest.raises(ValueError, match="must hold a BBAlphaClassifier"):
        BBAlphaClassifier.load(tmp_path / "own")
    bbalpha.save(mlp([1, 2, 1]), tmp_path / "net")
    with pytest.raises(ValueError, match="must hold an estimator"):
        load_estimator(tmp_path / "net")
    with pytest.raises(ValueError, match="holds a BBAlphaRegressor"):
        bbalpha.load(tmp_path / "own")


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.drop = nn.Linear(2, 1), nn.Dropout(0.2)

    def forward(self, x):
        return self.line(self.drop(x))


def test_errors():
    X, y = curve(20)
    with pytest.raises(NotFittedError):
        BBAlphaRegressor().predict_interval(X)
    with pytest.raises(ValueError, match="`noise` must be"):
        BBAlphaRegressor(noise="loud", hidden_layer_sizes=(50,)).fit(X, y)
    with pytest.raises(ValueError, match="`n_ensemble` must be"):
        BBAlphaRegressor(n_ensemble=0, hidden_layer_sizes=(50,), noise="constant").fit(X, y)
    with pytest.raises(ValueError, match="at least 2 classes; got 1 class"):
        BBAlphaClassifier().fit(X, np.ones(20))


def test_constant_columns_and_targets():
    X, y = curve(30)
    X = np.concatenate([X, np.full((30, 1), 0.1 + 0.2)], 1)
    model = BBAlphaRegressor(epochs=2, hidden_layer_sizes=(50,), noise="constant").fit(X, np.full(30, 7.0))
    assert np.isfinite(model.predict(X)).all()
    assert model.x_scale_[2] == 1.0
    assert np.isfinite(model.log_prob(X, y)).all()


def test_dropout_is_chosen_on_the_held_out_rows_of_all_networks():
    rng = np.random.RandomState(0)
    X = rng.uniform(-1, 1, (150, 2))
    y = np.sin(3 * X[:, 0]) + X[:, 1]  # no noise: dropout can only harm
    settings = {"epochs": 60, "n_ensemble": 2, "random_state": 0}
    model = BBAlphaRegressor(**settings, hidden_layer_sizes=(50,), noise="constant").fit(X, y)
    separate = {}
    for pair in RATES:
        fitted = BBAlphaRegressor(
            dropout=pair[0], input_dropout=pair[1], **settings, hidden_layer_sizes=(50,), noise="constant"
        ).fit(X, y)
        separate[pair] = np.mean([curve.min() for curve in fitted.validation_curves_])
    assert (model.dropout_, model.input_dropout_) == min(separate, key=separate.get) != RATES[0]
    assert np.mean([c.min() for c in model.validation_curves_]) == pytest.approx(min(separate.values()), rel=1e-6)
    assert (
        BBAlphaRegressor(input_dropout=0.3, **settings, hidden_layer_sizes=(50,), noise="constant")
        .fit(X, y)
        .input_dropout_
        == 0.3
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", [BBAlphaRegressor, BBAlphaClassifier])
def test_networks_trained_together_are_those_trained_alone(estimator, weighted):
    X, y = curve(100)
    y = y if estimator is BBAlphaRegressor else y > 50
    weight = np.arange(100) % 4 / 2.0 if weighted else None  # some are 0
    settings = {"dropout": 0.1, "epochs": 4, "validation_fraction": 0.2, "random_state": 0}
    settings |= {"hidden_layer_sizes": (50,)} | ({"noise": "constant"} if estimator is BBAlphaRegressor else {})
    alone = estimator(n_ensemble=1, **settings).fit(X, y, sample_weight=weight)
    together = estimator(n_ensemble=2, **settings).fit(X, y, sample_weight=weight)
    for mine, theirs in zip(together.networks_[0].parameters(), alone.networks_[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(together.validation_curves_[0], alone.validation_curves_[0], rtol=1e-3)
    if estimator is BBAlphaRegressor:
        np.testing.assert_allclose(together.precision_[0], alone.precision_[0], rtol=1e-4)
    assert not torch.equal(*(net[1].weight for net in together.networks_))


def test_few_rows_have_five_networks_and_many_have_one():
    X, y = curve(60)
    assert len(BBAlphaRegressor(epochs=1, hidden_layer_sizes=(50,), noise="constant").fit(X, y).networks_) == 5
    assert (
        len(
            BBAlphaRegressor(epochs=1, hidden_layer_sizes=(50,), noise="constant")
            .fit(np.tile(X, (40, 1)), np.tile(y, 40))
            .networks_
        )
        == 1
    )


def test_dropout_that_is_set_or_cannot_be_chosen_is_not_searched():
    X, y = curve(60)
    assert BBAlphaRegressor(dropout=0.3, epochs=1, hidden_layer_sizes=(50,), noise="constant").fit(X, y).dropout_ == 0.3
    assert (
        BBAlphaRegressor(validation_fraction=0, epochs=1, hidden_layer_sizes=(50,), noise="constant").fit(X, y).dropout_
        == RATES[0][0]
    )
    assert (
        BBAlphaRegressor(epochs=1, hidden_layer_sizes=(50,), noise="constant").fit(X[:20], y[:20]).dropout_
        == RATES[0][0]
    )  # too few rows to hold any out
    many = BBAlphaRegressor(epochs=1, hidden_layer_sizes=(50,), noise="constant").fit(
        np.tile(X, (40, 1)), np.tile(y, 40)
    )
    assert (many.dropout_, many.input_dropout_) == (RATE_OF_MANY, 0.0)
    chosen = BBAlphaClassifier(
        dropout=None, validation_fraction=0.2, epochs=5, random_state=0, hidden_layer_sizes=(50,), n_ensemble=1
    ).fit(X, y > 50)
    assert (chosen.dropout_, chosen.input_dropout_) in RATES


def test_many_rows_are_answered_in_blocks_and_as_a_few_are(monkeypatch):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 3))
    y = np.exp(X[:, 0] + 0.1 * rng.normal(size=300))
    model = BBAlphaRegressor(budget="quick", epochs=3, random_state=0).fit(X, y)
    asked = [lambda t: model.predict(t, return_std=True), lambda t: model.predict_interval(t, 0.8)]
    asked += [
        lambda t: model.predict_interval(t, 0.8, guarantee=True),
        lambda t: model.predict_quantiles(t, [0.1, 0.5]),
    ]
    asked += [lambda t: model.log_prob(t, y)]
    whole = [ask(X) for ask in asked]
    monkeypatch.setattr("bbalpha.estimators.regressor._ROWS", 128)
    seen = []
    predictive = BBAlphaRegressor.predictive
    monkeypatch.setattr(BBAlphaRegressor, "predictive", lambda self, t: seen.append(len(t)) or predictive(self, t))
    for table in (X, X.tolist(), pd.DataFrame(X)):
        for ask, expected in zip(asked, whole, strict=True):
            np.testing.assert_allclose(ask(table), expected, rtol=1e-9)
    assert set(seen) == {128, 300 - 2 * 128}
    monkeypatch.setattr("bbalpha.estimators.base.FEW", 10)  # and in single precision
    np.testing.assert_allclose(model.predict(X), whole[0][0], rtol=1e-3)
