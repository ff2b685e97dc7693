"""The log-sum-exp of Eq. 7 in the operations of another array library: `keras.ops` or `jax.numpy`.

    L(l; alpha) = c - 1/alpha log( 1 + mean_k expm1(alpha (c - l_k)) )        for every c

holds whatever c is. So c is found without gradients, close to L, and the formula is evaluated around it: nothing
overflows, nothing cancels near alpha = 0, and the derivatives of every order are those of L, first of all
dL / dl_k = softmax(-alpha l)_k.
"""

from collections.abc import Callable
from typing import Any

LEAST, MOST = 1e-29, 1e29  # smaller ones are 0, larger ones change no digit: 1 / alpha is a float32 too


def log_mean_exp(losses: Any, alpha: Any, axis: int, xp: Any, hold: Callable[[Any], Any]) -> Any:
    """-1/alpha log mean_k exp(-alpha l_k) over one axis, for every finite alpha: (..., K, ...) -> (...).

    Args:
        losses: Arrays of `xp` in single or double precision.
        alpha: A number, or an array () of the dtype of `losses`, traced or not.
        axis: That of the K passes.
        xp: The library: `keras.ops` or `jax.numpy`.
        hold: Its way to let no gradient through.

    >>> import numpy
    >>> float(log_mean_exp(numpy.array([1.0, 3.0]), 0.0, 0, numpy, hold=lambda a: a))
    2.0
    """
    small = abs(alpha) < LEAST
    mean = xp.mean(losses, axis)
    if small is True:
        return mean
    value = _around_itself(losses, alpha if small is False else xp.where(small, 1.0, alpha), axis, xp, hold)
    return value if small is False else xp.where(small, mean, value)


def _around_itself(losses: Any, alpha: Any, axis: int, xp: Any, hold: Callable[[Any], Any]) -> Any:
    if isinstance(alpha, float):
        alpha = max(-MOST, min(MOST, alpha))
    centre = hold(_rough(hold(losses), alpha, axis, xp))
    power = alpha * (xp.expand_dims(centre, axis) - losses)
    # below -1 the gradient of expm1, its value plus 1, has lost the digits that exp has
    excess = xp.mean(xp.where(power < -1, xp.exp(power) - 1, xp.expm1(power)), axis)
    return centre - xp.log1p(excess) / alpha


def _rough(losses: Any, alpha: Any, axis: int, xp: Any) -> Any:
    """The value to a few digits of the spread of the passes, and among them: (..., K, ...) -> (...)."""
    low, high = xp.min(losses, axis), xp.max(losses, axis)
    peak = xp.where(alpha > 0, low, high)  # the pass that dominates: no exponent is above 0
    powers = alpha * (xp.expand_dims(peak, axis) - losses)
    rough = peak - xp.log(xp.mean(xp.exp(powers), axis)) / alpha
    rough = xp.where(abs(alpha) * (high - low) >= 1, rough, xp.mean(losses, axis))
    return xp.minimum(xp.maximum(rough, low), high)
