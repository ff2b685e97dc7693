"""scikit-learn estimators: a table goes in, a predictive distribution comes out.

A Pipeline or a search shows `predict` and little else of the estimator inside; `predictive` and `reach` go there:

    predictive(pipeline, X).interval(0.9)
    estimator, rows = reach(pipeline, X)
    estimator.predict_interval(rows, 0.9), estimator.log_prob(rows, y)
"""

from bbalpha._reach import predictive, reach
from bbalpha.estimators.base import load_estimator
from bbalpha.estimators.classifier import BBAlphaClassifier
from bbalpha.estimators.cv import BBAlphaClassifierCV, BBAlphaRegressorCV
from bbalpha.estimators.regressor import BBAlphaRegressor

__all__ = [
    "BBAlphaClassifier",
    "BBAlphaClassifierCV",
    "BBAlphaRegressor",
    "BBAlphaRegressorCV",
    "load_estimator",
    "predictive",
    "reach",
]
