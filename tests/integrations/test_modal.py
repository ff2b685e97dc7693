"""Our query strategies inside modAL, whose `teach` does not go with the scikit-learn of these tests."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bbalpha import BBAlphaClassifier, acquisition
from bbalpha.integrations import modal

models = pytest.importorskip("modAL.models")


def blobs(n=60):
    y = np.arange(n) % 3
    return np.stack((y, -y), 1) + 0.3 * np.random.default_rng(0).normal(size=(n, 2)), y


def classifier():
    return BBAlphaClassifier(hidden_layer_sizes=(16,), dropout=0.3, epochs=20, n_predict_passes=30, random_state=0)


@pytest.mark.parametrize("make", [classifier, lambda: make_pipeline(StandardScaler(), classifier())])
def test_a_learner_asks_for_the_rows_that_tell_most(make):
    X, y = blobs()
    learner = models.ActiveLearner(make(), query_strategy=modal.batch_bald, X_training=X[:12], y_training=y[:12])
    rows, instances = learner.query(X[12:], n_instances=4, seed=0)
    probs = modal.pass_probs(learner.estimator, X[12:])
    expected = acquisition.batch_bald(probs, 4, seed=0)
    assert rows.tolist() == expected.indices.tolist()
    np.testing.assert_array_equal(instances, X[12:][rows])


def test_bald_takes_each_row_by_itself():
    X, y = blobs()
    learner = models.ActiveLearner(classifier(), query_strategy=modal.bald, X_training=X[:12], y_training=y[:12])
    rows, _ = learner.query(X[12:], n_instances=4)
    probs = torch.as_tensor(learner.estimator.predict_passes(X[12:]))
    assert rows.tolist() == acquisition.bald(probs).topk(4).indices.tolist()


def test_other_estimators_are_refused():
    X, y = blobs()

    class Other(LogisticRegression):
        def predictive(self, X):
            return None

    with pytest.raises(TypeError, match="must be a BBAlphaClassifier, or have `predict_passes`"):
        modal.pass_probs(Other().fit(X, y), X)
    with pytest.raises(TypeError, match="must be a fitted estimator with a method `predictive`"):
        modal.pass_probs(LogisticRegression().fit(X, y), X)
