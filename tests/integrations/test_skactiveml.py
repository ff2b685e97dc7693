"""Our query strategy inside scikit-activeml's loop."""

import numpy as np
import pytest

from bbalpha import BBAlphaClassifier, acquisition
from bbalpha.integrations import modal

pytest.importorskip("skactiveml")

from skactiveml.classifier import SklearnClassifier

from bbalpha.integrations.skactiveml import BatchBALD


def blobs(n=60):
    y = (np.arange(n) % 3).astype(float)
    return np.stack((y, -y), 1) + 0.3 * np.random.default_rng(0).normal(size=(n, 2)), y


def wrapped():
    options = {"hidden_layer_sizes": (16,), "dropout": 0.3, "epochs": 20, "n_predict_passes": 30, "random_state": 0}
    return SklearnClassifier(BBAlphaClassifier(**options), classes=[0, 1, 2])


def test_a_loop_asks_for_rows_without_a_label():
    X, truth = blobs()
    y = np.full(60, np.nan)
    y[:12] = truth[:12]
    strategy = BatchBALD(random_state=0)
    for _ in range(2):
        rows = strategy.query(X, y, wrapped(), batch_size=4)
        assert len(set(rows.tolist())) == 4
        assert np.isnan(y[rows]).all()
        y[rows] = truth[rows]
    assert (~np.isnan(y)).sum() == 20


def test_rows_and_gains_are_those_of_batch_bald():
    X, truth = blobs()
    y = np.where(np.arange(60) < 12, truth, np.nan)
    clf = wrapped().fit(X, y)
    candidates = np.arange(20, 50)
    rows, gains = BatchBALD(random_state=0).query(
        X, y, clf, fit_clf=False, candidates=candidates, batch_size=5, return_utilities=True
    )
    expected = acquisition.batch_bald(modal.pass_probs(clf.estimator_, X[20:50]), 5)
    assert rows.tolist() == (20 + expected.indices).tolist()
    assert gains.shape == (5, 60)
    assert np.isnan(gains[:, :20]).all()
    assert (np.nanargmax(gains, axis=1) == rows).all()
    assert gains[np.arange(5), rows].cumsum() == pytest.approx(expected.scores.numpy())
    assert np.isnan(gains[3, rows[:3]]).all()
    given = BatchBALD(random_state=0).query(X, y, clf, fit_clf=False, candidates=X[20:50], batch_size=5)
    assert given.tolist() == expected.indices.tolist()


def test_a_pool_smaller_than_the_batch_is_scikit_activemls_affair():
    X, truth = blobs()
    y = truth.copy()
    y[:2] = np.nan
    with pytest.warns(UserWarning, match="batch_size"):
        assert sorted(BatchBALD(random_state=0).query(X, y, wrapped(), batch_size=5).tolist()) == [0, 1]
