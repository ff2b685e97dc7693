"""Which columns of a wide table a network is given: those that a sparse linear model or a correlation speaks for."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LassoLarsIC

Array = NDArray[Any]
MOST = 50  # columns that are kept
ALIKE = 5  # of these for their correlation alone


def is_wide(n_rows: int, n_columns: int) -> bool:
    """Whether there are too many columns for a network to find the few that matter.

    >>> is_wide(200, 2000), is_wide(1797, 64), is_wide(50, 30)
    (True, False, False)
    """
    return n_columns > max(MOST, n_rows / 5)


def telling_columns(x: Array, y: Array) -> Array:
    """At most `MOST` columns of `x` (N, F), for standardised targets `y` (N, D): lasso's, and a few that correlate.

    >>> x = np.random.default_rng(0).normal(size=(100, 500))
    >>> telling_columns(x, x[:, [7]] - x[:, [300]])[:2].tolist()
    [300, 7]
    """
    centred = y - y.mean(0)
    likeness = abs(x.T @ centred).max(1) / (np.sqrt((x**2).sum(0)) + 1e-12)
    scores = likeness / max(likeness.max(), 1e-12) * 1e-7  # breaks ties
    few = np.argsort(-likeness)[: 20 * MOST]  # lasso looks at those alone
    for target in centred.T:
        noise = max(target.var() * 0.05, 1e-12)  # the criterion asks for a guess where columns outnumber rows
        linear = LassoLarsIC(criterion="bic", max_iter=MOST, noise_variance=noise).fit(
            x[:, few].astype(np.float64), target
        )
        scores[few] += abs(linear.coef_)
    scores[np.argsort(-likeness)[:ALIKE]] += 1e-6
    n_telling = int((scores >= 1e-6).sum())
    found: Array = np.argsort(-scores, kind="stable")[: min(MOST, n_telling)]
    return found
