"""From what scikit-learn wraps around an estimator to the estimator itself, and the rows as it gets them.

A scikit-learn Pipeline shows `predict` and little else of its last step; a search shows no more. What an estimator
can tell besides (intervals, densities, the predictive distribution) is reached by going through the steps before it.
No scikit-learn is imported: a pipeline is what has `steps`, a fitted search what has `best_estimator_`.

    estimator, rows = reach(pipeline, X)
    estimator.predict_interval(rows, 0.9), estimator.log_prob(rows, y)
    predictive(pipeline, X).epistemic_std
"""

from typing import Any


def reach(model: Any, X: Any) -> tuple[Any, Any]:
    """The estimator inside `model`, and `X` as it comes out of all the steps before it.

    Args:
        model: A fitted estimator with a method `predictive`; a Pipeline that ends in one; a fitted search, such as
            GridSearchCV, over one; or these in each other.
        X: Rows as `model.predict` takes them.

    >>> import numpy as np
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from bbalpha import BBAlphaRegressor
    >>> X = np.linspace(0, 9, 40)[:, None]
    >>> pipeline = make_pipeline(StandardScaler(), BBAlphaRegressor(epochs=5, random_state=0)).fit(X, X[:, 0])
    >>> estimator, rows = reach(pipeline, X)
    >>> [end.shape for end in estimator.predict_interval(rows, coverage=0.9)]
    [(40,), (40,)]
    """
    inner = model
    while not callable(getattr(inner, "predictive", None)):
        if getattr(inner, "steps", None):
            X = inner[:-1].transform(X) if len(inner.steps) > 1 else X
            inner = inner.steps[-1][1]
        elif hasattr(inner, "best_estimator_"):
            inner = inner.best_estimator_
        else:
            where = "" if inner is model else f" with a {type(inner).__name__} inside"
            raise TypeError(
                "`model` must be a fitted estimator with a method `predictive`, a Pipeline that ends in one or a "
                f"fitted search over one; got {type(model).__name__}{where}."
            )
    return inner, X


def predictive(model: Any, X: Any) -> Any:
    """The predictive distribution of the rows `X`: what the `predictive` of the estimator inside `model` returns.

    Args:
        model: As in `reach`.
        X: Rows as `model.predict` takes them.
    """
    estimator, rows = reach(model, X)
    return estimator.predictive(rows)
