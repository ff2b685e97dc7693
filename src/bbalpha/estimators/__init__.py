"""scikit-learn estimators: a table goes in, a predictive distribution comes out."""

from bbalpha.estimators.base import load_estimator
from bbalpha.estimators.classifier import BBAlphaClassifier
from bbalpha.estimators.cv import BBAlphaClassifierCV, BBAlphaRegressorCV
from bbalpha.estimators.regressor import BBAlphaRegressor

__all__ = ["BBAlphaClassifier", "BBAlphaClassifierCV", "BBAlphaRegressor", "BBAlphaRegressorCV", "load_estimator"]
