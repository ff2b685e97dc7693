"""Columns with long tails: a few numbers far out, which a network sees little else of.

Such a column may go in through asinh, which is linear in the middle and a logarithm far out. Whether it does is for
held-out rows to say; and so it is whether the logarithm of a skewed target is modelled.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FAR = 6.0  # deviations from the mean
LEAST_DISTINCT = 10  # numbers that differ: a column of fewer is a code and not a size
_LOOKED_AT = 20_000  # rows


def fit_squash(x: Array) -> Array:
    """How each standardised column of `x` (N, F) is squashed (4, F): centre, scale, then mean and deviation of asinh.

    A scale of 0 leaves a column as it is.

    >>> x = np.random.default_rng(0).normal(size=(500, 2))
    >>> x[:, 1] = np.exp(2 * x[:, 1])
    >>> (fit_squash((x - x.mean(0)) / x.std(0))[1] > 0).tolist()
    [False, True]
    """
    found = np.zeros((4, x.shape[1]))
    for i in np.flatnonzero(abs(x).max(0) > FAR):
        column = x[:: max(1, len(x) // _LOOKED_AT), i].astype(np.float64)
        if len(np.unique(column)) < LEAST_DISTINCT:
            continue
        centre = np.median(column)
        scale = 1.48 * np.median(abs(column - centre)[column != centre])  # of many, most may be one number
        bent = np.arcsinh((column - centre) / scale)
        found[:, i] = centre, scale, bent.mean(), bent.std()
    return found


def squashed(x: Array, squash: Array) -> Array:
    """Standardised rows with the columns squashed that `fit_squash` says (N, F)."""
    columns = np.flatnonzero(squash[1])
    if not len(columns):
        return x
    centre, scale, mean, deviation = squash[:, columns]
    found = x.copy()
    found[:, columns] = (np.arcsinh((x[:, columns] - centre) / scale) - mean) / deviation
    return found


def is_skewed(table: Array) -> bool:
    """Whether targets are positive and their logarithm is less skewed: the logarithm is then worth a try.

    >>> is_skewed(np.exp(np.random.default_rng(0).normal(size=(100, 1)))), is_skewed(np.arange(1.0, 9.0)[:, None])
    (True, False)
    """
    if not (table > 0).all() or (table.std(0) <= 1e-12 * abs(table.mean(0))).any():
        return False
    return bool((_skewness(table) > abs(_skewness(np.log(table)))).all())


def _skewness(table: Array) -> Array:
    centred = table - table.mean(0)
    found: Array = (centred**3).mean(0) / (centred**2).mean(0) ** 1.5
    return found
