"""scikit-learn estimators: a table goes in, a predictive distribution comes out."""

from bbalpha.estimators.cv import BBAlphaClassifierCV, BBAlphaRegressorCV
from bbalpha.estimators.single import BBAlphaClassifier, BBAlphaRegressor, load_estimator

__all__ = ["BBAlphaClassifier", "BBAlphaClassifierCV", "BBAlphaRegressor", "BBAlphaRegressorCV", "load_estimator"]
