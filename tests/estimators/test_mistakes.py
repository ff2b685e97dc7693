"""A slip of the hand is told by every door into training alike: estimators, searches, `fit` and populations."""

import numpy as np
import pytest
import torch

import bbalpha
from bbalpha import BBAlphaClassifier, BBAlphaClassifierCV, BBAlphaRegressor, BBAlphaRegressorCV, GaussianNLL
from bbalpha.checks import RULES
from bbalpha.networks import mlp
from bbalpha.training.population import Member, fit_population

X = np.random.RandomState(0).normal(size=(24, 2))
OF_A_MEMBER = ("alpha", "dropout", "input_dropout", "length_scale", "learning_rate")
LISTS = {"alpha": "alphas", "dropout": "dropouts", "length_scale": "length_scales"}
SMALL = {"epochs": 1, "n_passes": 2, "batch_size": 8}


def estimator(kind):
    def run(sample_weight=None, **settings):
        y = X[:, 0] > 0 if "Classifier" in kind.__name__ else X[:, 0]
        small = SMALL | {"n_predict_passes": 4, "n_ensemble": 1, "hidden_layer_sizes": (50,)}
        if kind is BBAlphaRegressor:
            small["noise"] = "constant"
        if kind.__name__.endswith("CV"):
            small |= {"cv": 2, "alphas": (0.5,), "dropouts": (0.1,)}
            settings = {LISTS.get(name, name): (v,) if name in LISTS else v for name, v in settings.items()}
        return kind(**small | settings).fit(X, y, sample_weight)

    return run


def loop(sample_weight=None, **settings):
    x = torch.as_tensor(X, dtype=torch.float32)
    data = (x, x[:, :1]) if sample_weight is None else (x, x[:, :1], torch.as_tensor(sample_weight))
    torch.manual_seed(0)
    net = mlp([2, 4, 1], dropout=settings.pop("dropout", 0.1), input_dropout=0)
    bbalpha.fit(net, data, objective=GaussianNLL(settings.pop("alpha", 0.5)), seed=0, **SMALL | settings)
    return net


def population(**settings):
    own = {name: settings.pop(name) for name in OF_A_MEMBER if name in settings}
    return fit_population(X, X[:, 0], [Member(train=range(24), **own)], **SMALL | settings)


DOORS = {kind.__name__: estimator(kind) for kind in (BBAlphaRegressor, BBAlphaClassifier)}
SEARCHES = {kind.__name__: estimator(kind) for kind in (BBAlphaRegressorCV, BBAlphaClassifierCV)}
DOORS |= SEARCHES | {"fit": loop, "fit_population": population}
REFUSED = {
    "learning_rate": (-1, float("nan")),
    "length_scale": (-1, float("nan")),
    "epochs": (0, -1, 1.5),
    "patience": (0, -1),
    "n_passes": (0, -1),
    "n_predict_passes": (0, -1),
    "batch_size": (0, -1),
    "sample_weight": (-np.ones(24), np.r_[-1.0, np.ones(23)], np.zeros(24), np.full(24, np.nan)),
    "hidden_layer_sizes": (0, -50, "50"),
    "dropout": (1, -0.1),
    "alpha": (float("nan"), float("inf")),
}
# scikit-learn looks at weights first, a population wants some in every member, `fit` says it of its data
OF_WEIGHTS = "|.*sample_weight|Sample weights must|`members` must each have|The weights of `data`"
OF_THE_MODEL = ("hidden_layer_sizes", "dropout", "alpha")  # and of the objective: `fit` is given both
CASES = [
    pytest.param(door, name, id=f"{door}-{name}")
    for door in DOORS
    for name in REFUSED
    if not (door == "fit" and name in OF_THE_MODEL) and not ("fit" in door and name == "n_predict_passes")
]


@pytest.mark.parametrize(("door", "name"), CASES)
def test_what_cannot_be_meant_is_refused_by_name(door, name):
    others = OF_WEIGHTS if name == "sample_weight" else ""
    for value in REFUSED[name]:
        shown = LISTS.get(name, name) if door in SEARCHES else name
        with pytest.raises(ValueError, match=rf"^(`{shown}(\[0\])?` must{others})"):
            DOORS[door](**{name: value})


@pytest.mark.parametrize("door", [door for door in DOORS if door != "fit"])
def test_an_alpha_below_0_is_taken_and_told(door):
    name = "alphas[0]" if door in SEARCHES else "alpha"
    with pytest.warns(UserWarning, match=r"^`alpha.*` is below 0 \(-1\.0\)") as told:
        DOORS[door](alpha=-1)
    assert any(str(w.message).startswith(f"`{name}` is below 0") for w in told)
    DOORS[door](alpha=0)  # without a word: warnings are errors here


def test_what_is_told_of_an_alpha_below_0_is_true():
    rng = np.random.RandomState(0)
    x = rng.uniform(-2, 2, (200, 1))
    y = np.sin(2 * x[:, 0]) + 0.2 * rng.normal(size=200)
    settings = {"dropout": 0.2, "n_ensemble": 1, "validation_fraction": 0, "epochs": 60, "random_state": 0}
    settings |= {"hidden_layer_sizes": (50,), "noise": "constant"}
    usual = BBAlphaRegressor(0, **settings).fit(x, y).predictive(x)
    with pytest.warns(UserWarning, match="they spread less than with 0.* a noise that is learned grows"):
        below = BBAlphaRegressor(-5, **settings).fit(x, y).predictive(x)
    assert below.epistemic_std.mean() < 0.9 * usual.epistemic_std.mean()
    assert below.aleatoric_std.mean() > 1.1 * usual.aleatoric_std.mean()


@pytest.mark.parametrize("door", [door for door in DOORS if door != "fit"])
def test_a_number_is_one_hidden_layer(door):
    made = DOORS[door](hidden_layer_sizes=5)
    if door == "fit_population":
        assert made.weights[0][0].shape == (1, 5, 2)
    else:
        network = getattr(made, "best_estimator_", made).networks_[0]
        assert next(network.parameters()).shape == (5, 2)


@pytest.mark.parametrize("door", [door for door in DOORS if door != "fit_population"])
def test_without_dropout_nothing_is_trained_that_could_not_predict(door):
    with pytest.raises(ValueError, match=r"all passes are equal|random site"):
        DOORS[door](dropout=0)


@pytest.mark.parametrize("door", list(DOORS))
def test_a_length_scale_of_0_is_no_prior(door):
    found = [parameters(DOORS[door](length_scale=scale, **seeded(door))) for scale in (0, 1e-9, 30.0)]
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


def seeded(door):
    return {} if door.startswith("fit") else {"random_state": 0}


def parameters(made):
    """Of the first layer."""
    if hasattr(made, "weights"):
        return made.weights[0][0]
    network = getattr(made, "best_estimator_", made)
    network = network.networks_[0] if hasattr(network, "networks_") else network
    return next(network.parameters()).detach()


@pytest.mark.parametrize("kind", [BBAlphaClassifier, BBAlphaClassifierCV])
def test_labels_of_every_kind_come_back_as_they_are(kind):
    settings = {"alphas": (0.5,), "dropouts": (0.1,), "cv": 2} if kind is BBAlphaClassifierCV else {}
    days = np.array(["2020-01-01", "2021-01-01"], "datetime64[D]")
    for labels in (
        days,
        days.astype("datetime64[ns]"),
        np.array([3, 7]),
        np.array(["a", "b"]),
        np.array([False, True]),
    ):
        found = kind(**settings, epochs=1).fit(X, labels[np.arange(24) % 2]).predict(X)
        assert found.dtype == labels.dtype
        assert set(found.tolist()) <= set(labels.tolist())


def test_the_list_of_mistakes_knows_the_rules():
    assert set(REFUSED) - {"sample_weight"} <= set(RULES)
