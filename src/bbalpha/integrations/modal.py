"""Query strategies for modAL: which labels an ActiveLearner asks for, by what they tell about our classifiers.

    learner = ActiveLearner(BBAlphaClassifier(), query_strategy=batch_bald, X_training=X, y_training=y)
    rows, instances = learner.query(X_pool, n_instances=10)

modAL itself is not imported: a strategy is a function of the learner and the pool.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bbalpha import acquisition
from bbalpha._reach import reach


def batch_bald(learner: Any, X_pool: Any, n_instances: int = 1, *, seed: int | None = None) -> NDArray[np.int64]:
    """The rows whose labels tell most together (`bbalpha.acquisition.batch_bald`).

    Args:
        learner: An ActiveLearner whose estimator is a fitted BBAlphaClassifier, or a Pipeline that ends in one.
        X_pool: The rows to choose from.
        n_instances: How many.
        seed: As in `bbalpha.acquisition.batch_bald`.
    """
    return acquisition.batch_bald(pass_probs(learner.estimator, X_pool), n_instances, seed=seed).indices.numpy()


def bald(learner: Any, X_pool: Any, n_instances: int = 1) -> NDArray[np.int64]:
    """The rows whose labels tell most, each by itself (`bbalpha.acquisition.bald`)."""
    return acquisition.top(acquisition.bald(pass_probs(learner.estimator, X_pool)), n_instances).indices.numpy()


def pass_probs(model: Any, X: Any) -> torch.Tensor:
    """Probabilities in each pass of the classifier inside `model`, a Pipeline or a search (K, N, C)."""
    estimator, rows = reach(model, X)
    if not callable(getattr(estimator, "predict_passes", None)):
        raise TypeError(
            "`estimator` must be a BBAlphaClassifier, or have `predict_passes` like one; got "
            f"{type(estimator).__name__}."
        )
    return torch.as_tensor(estimator.predict_passes(rows))
