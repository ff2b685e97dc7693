"""What can be wrong with the rows of a fit and with its end: targets, weights, groups, networks that diverged."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import _check_sample_weight
from torch import nn

from bbalpha._torch import buffers, children, copied, own_parameters
from bbalpha.estimators.race import batch_of

Array = NDArray[Any]
ENOUGH_STEPS = 1000  # after which a likelihood that rises slowly is not called unfinished
STILL_RISING = 0.02  # nats a row


@contextmanager
def one_thread() -> Iterator[None]:
    """Small products on one thread: with two they take up to four times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def numbers_only(name: str = "X") -> Iterator[None]:
    """A context in which numpy's words about what is no number say which argument it was."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if str(error).startswith(("could not convert", "float() argument")):
            raise type(error)(f"`{name}` must hold numbers; {error}.") from error
        raise


def settled(network: nn.Module, objective: nn.Module) -> bool:
    """Whether a network has finite weights and its noise a precision that is neither 0 nor infinite."""
    logs = [p for name, p in objective.named_parameters() if name == "log_precision"]
    return all(bool(p.isfinite().all()) for p in network.parameters()) and all(bool((p.abs() < 80).all()) for p in logs)


def diverged(settings: Any) -> ValueError:
    """The error for a training that ended in numbers nobody can use."""
    return ValueError(
        "Training must end with finite numbers; it diverged. Lower `learning_rate` (it is "
        f"{settings.learning_rate}), or look for constant targets and huge values in the data."
    )


def check_converged(settings: Any, gain: Array, error: float = 0.0) -> None:
    """Refuse or warn of a network that does worse on rows it was trained on than a constant would.

    Args:
        settings: The estimator.
        gain: Log-likelihood of rows, less that under a constant prediction (N,).
        error: Mean squared error, over the sum of the variance and that of a constant prediction.
    """
    if not np.isfinite([*gain, error]).all():
        raise diverged(settings)
    if np.median(gain) < -5 or error > 4:
        warnings.warn(
            "The training ended far worse than a constant prediction, on its own rows: lower `learning_rate` (it is "
            f"{settings.learning_rate}) or give it more `epochs`.",
            ConvergenceWarning,
            stacklevel=5,
        )


def check_long_enough(settings: Any, n_rows: int) -> None:
    """Warn where the `epochs` of a user end a training of `n_rows` rows that was still under way."""
    if settings.epochs is None:
        return
    steps = settings.epochs * -(-n_rows // (settings.batch_size or batch_of(n_rows)))
    whole = [c for c in settings.validation_curves_ if len(c) == settings.epochs > 1]
    rise = np.median([np.nanmin(c[: len(c) // 2]) - np.nanmin(c) for c in whole]) if whole else 0.0
    if steps < ENOUGH_STEPS and rise > STILL_RISING:
        warnings.warn(
            f"The held-out likelihood was still rising when training ended: by {rise:.2f} nats a row in the second "
            f"half of {settings.epochs} epochs, which are but {steps} steps. Intervals are wider than they need be; "
            "give it more `epochs`, or none, so that it chooses.",
            ConvergenceWarning,
            stacklevel=5,
        )


def some_rows(n_rows: int) -> Array:
    """Up to 100 rows from the first to the last, to look at a training with.

    >>> some_rows(3).tolist(), len(some_rows(10_000))
    ([0, 1, 2], 100)
    """
    return np.linspace(0, n_rows - 1, min(n_rows, 100)).round().astype(int)


def targets(y: Array) -> Array:
    """Finite targets, one a row or several (N, D); validation lets None in a column of objects through."""
    table = np.asarray(y, np.float64).reshape(len(y), -1)
    if not np.isfinite(table).all():
        raise ValueError("`y` must be finite; got None, nan or infinity.")
    return table


def weights(sample_weight: Any, X: Array) -> Array | None:
    """One finite weight a row, none negative, not all 0 (N,)."""
    if sample_weight is None:
        return None
    with numbers_only("sample_weight"):
        weight: Array = _check_sample_weight(sample_weight, X)
    if np.iscomplexobj(weight):
        raise TypeError("`sample_weight` must hold real numbers; got complex ones.")
    if not (weight >= 0).all():
        raise ValueError(f"`sample_weight` must be finite and not negative; got {weight.min()}.")
    if not (weight > 0).any():
        raise ValueError("`sample_weight` must be above 0 for at least one row; got zeros alone.")
    return weight


def check_groups(groups: Any, n_rows: int) -> Array | None:
    """The group of each row as a number (N,)."""
    if groups is None:
        return None
    names = np.asarray(groups)
    if names.shape != (n_rows,):
        raise ValueError(f"`groups` must have one entry per row, ({n_rows},); got {names.shape}.")
    found, index = np.unique(names, return_inverse=True)
    if len(found) < 2:
        raise ValueError(f"`groups` must name at least 2 groups, so that one can be held out; got {len(found)}.")
    return index


def in_double(network: nn.Module) -> nn.Module:
    """A network in double precision that shares with `network` all but the numbers.

    Made anew for every prediction, so that it is always what `network` is now: a deep copy takes thirty times as long.
    """
    twin = copied(network)
    places: list[dict[str, Any]] = [own_parameters(twin), buffers(twin)]
    for place in places:
        place.update(
            {name: t.detach().double() for name, t in place.items() if t is not None and t.is_floating_point()}
        )
    children(twin).update({name: in_double(child) for name, child in children(twin).items() if child is not None})
    return twin
