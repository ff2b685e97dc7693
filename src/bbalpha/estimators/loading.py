"""`load_estimator`: whatever estimator a folder holds."""

import os
from typing import Any

from bbalpha.estimators.base import Module, read_content
from bbalpha.estimators.classifier import BBAlphaClassifier
from bbalpha.estimators.regressor import BBAlphaRegressor


def load_estimator(path: str | os.PathLike[str], *, module: Module | None = None) -> Any:
    """The estimator in a folder written by `save`, of whichever class it is."""
    kind = read_content(path)["kind"]
    for estimator in (BBAlphaRegressor, BBAlphaClassifier):
        if kind == estimator.__name__:
            return estimator.load(path, module=module)
    raise ValueError(f"`path` must hold an estimator; {str(path)!r} holds a {kind}.")
