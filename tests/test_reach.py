"""What scikit-learn hides of an estimator in a pipeline or a search can be asked for, on the rows as they come."""

import numpy as np
import pytest
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from torch import nn

from bbalpha import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.estimators import predictive, reach

SMALL = {"epochs": 3, "n_ensemble": 1, "dropout": 0.1, "random_state": 0}


@pytest.fixture(scope="module")
def rows():
    X = 100 + 7 * np.random.RandomState(0).normal(size=(60, 2))
    return X, X[:, 0]


def wrapped():
    inner = BBAlphaRegressor(**SMALL)
    grid = {"bbalpharegressor__alpha": [0.0, 0.5]}
    two = make_pipeline(MinMaxScaler(), StandardScaler(), inner)
    return {
        "alone": inner,
        "pipeline": two,
        "pipeline of one": make_pipeline(inner),
        "search over a pipeline": GridSearchCV(two, grid, cv=2),
        "search in a pipeline": make_pipeline(StandardScaler(), GridSearchCV(inner, {"alpha": [0.5]}, cv=2)),
        "pipeline in a pipeline": make_pipeline(MinMaxScaler(), make_pipeline(StandardScaler(), inner)),
    }


@pytest.mark.parametrize("name", list(wrapped()))
def test_the_distribution_inside_has_the_mean_that_is_predicted(name, rows):
    X, y = rows
    model = wrapped()[name].fit(X, y)
    np.testing.assert_array_equal(predictive(model, X).mean[:, 0].numpy(), model.predict(X))
    estimator, inside = reach(model, X)
    low, high = estimator.predict_interval(inside, 0.9)
    assert ((low < model.predict(X)) & (model.predict(X) < high)).all()
    assert estimator.log_prob(inside, y).shape == (60,)


@pytest.mark.parametrize(
    ("model", "inner"),
    [
        (LinearRegression(), ""),
        (nn.Linear(2, 1), ""),
        (make_pipeline(LinearRegression()), " with a LinearRegression inside"),
        (TransformedTargetRegressor(BBAlphaRegressor()), ""),
        (GridSearchCV(BBAlphaRegressor(), {}), ""),  # not fitted
        (None, ""),
    ],
)
def test_what_holds_no_distribution_is_named(model, inner, rows):
    with pytest.raises(TypeError, match=rf"^`model` must be .*; got {type(model).__name__}{inner}\.$"):
        predictive(model, rows[0])


def test_what_is_not_fitted_says_so(rows):
    for model in (BBAlphaClassifier(), make_pipeline(StandardScaler(), BBAlphaClassifier())):
        with pytest.raises(NotFittedError):
            predictive(model, rows[0])
