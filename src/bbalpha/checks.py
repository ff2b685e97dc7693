"""Checks at the public boundary: each wrong argument gets one sentence with what was wrong, received and the fix.

check_alpha(float("nan"))        # ValueError: `alpha` must be a finite number; got nan.
"""

import math
import operator
import os
import warnings
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bbalpha._torch import is_wrapped


def check_model(model: Any) -> None:
    """Refuse what is no torch module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module; got {type(model).__name__}.")


def check_count(name: str, value: Any, least: int = 1, most: int = 2**31) -> int:
    """`value` as an int, if it is a whole number (numpy's too) from `least` to `most`.

    >>> check_count("n_passes", 0)
    Traceback (most recent call last):
    ValueError: `n_passes` must be a whole number of at least 1; got 0.
    """
    if type(value) is int and least <= value <= most:
        return value
    count = None if isinstance(value, bool) else _whole(value)
    if count is None or count < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}; got {value!r}.")
    if count > most:
        raise ValueError(f"`{name}` must be at most {'2^31' if most == 2**31 else most}; got {value!r}.")
    return count


def check_number(name: str, value: Any, *, above: float | None = None, least: float | None = None) -> float:
    """`value` as a float, if it is a finite number (numpy's too) above or at least a bound.

    >>> check_number("learning_rate", -1.0, above=0)
    Traceback (most recent call last):
    ValueError: `learning_rate` must be a finite number above 0; got -1.0.
    """
    rule = "" if above is None and least is None else f" above {above}" if least is None else f" of at least {least}"
    try:
        number = math.nan if isinstance(value, (bool, str, bytes, bytearray)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    low = (above is not None and not number > above) or (least is not None and not number >= least)
    if low or not math.isfinite(number):
        raise ValueError(f"`{name}` must be a finite number{rule}; got {value!r}.")
    return number


def check_share(name: str, value: Any) -> float:
    """`value` as a float, if it is a number in [0, 1)."""
    number = check_number(name, value, least=0)
    if number >= 1:
        raise ValueError(f"`{name}` must be at least 0 and less than 1; got {value!r}.")
    return number


def check_inner_share(name: str, value: Any) -> None:
    """Refuse what is not strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < 1:
        raise ValueError(f"`{name}` must lie between 0 and 1, both left out; got {value!r}.")


def check_whole(name: str, value: Any) -> int:
    """`value` as an int, if it is a whole number of either sign (numpy's too)."""
    whole = None if isinstance(value, bool) else _whole(value)
    if whole is None or not -(2**63) <= whole < 2**63:
        raise TypeError(f"`{name}` must be a whole number; got {value!r}.")
    return whole


def check_call(name: str, value: Any) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise TypeError(f"`{name}` must be a function; got {type(value).__name__}.")


def check_path(name: str, value: Any) -> str:
    """`value` as text, if it can be the name of a file or a folder.

    >>> check_path("path", "")
    Traceback (most recent call last):
    ValueError: `path` must name a file or a folder; got ''.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"`{name}` must be a path, a str or a pathlib.Path; got {type(value).__name__}.")
    text = os.fspath(value)
    if not isinstance(text, str) or not text or "\0" in text or any(len(part) > 255 for part in text.split("/")):
        raise ValueError(f"`{name}` must name a file or a folder; got {text!r:.60}.")
    return text


def check_widths(name: str, value: Any) -> tuple[int, ...]:
    """Widths of layers; one number is one layer, as in scikit-learn."""
    try:
        widths = list(value)
    except TypeError:
        widths = [value]
    if isinstance(value, (str, Mapping)):
        raise ValueError(f"`{name}` must be a whole number or several; got {value!r}.")
    return tuple(check_count(name, width) for width in widths)


def check_settings(given: Mapping[str, Any], *, optional: Container[str] = ()) -> dict[str, Any]:
    """`given`, each value checked by the rule of its name and made Python's own; what is `optional` may be None.

    >>> check_settings({"epochs": 5, "hidden_layer_sizes": 50, "dropout": None}, optional=("dropout",))
    {'epochs': 5, 'hidden_layer_sizes': (50,), 'dropout': None}
    """
    return {
        name: None if value is None and name in optional else RULES[name](name, value) for name, value in given.items()
    }


def readable(t: Tensor) -> bool:
    """Whether values may steer Python here: not inside torch.compile or a torch.func transform."""
    return not torch.compiler.is_compiling() and not is_wrapped(t)


def check_alpha(alpha: float) -> float:
    """`alpha` as a float, if it is a finite number."""
    if isinstance(alpha, Tensor) and alpha.numel() == 1:
        alpha = alpha.item()
    try:
        finite = math.isfinite(alpha)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"`alpha` must be a finite number; got {type(alpha).__name__}.") from None
    if not finite:
        raise ValueError(f"`alpha` must be a finite number; got {alpha}.")
    return float(alpha)


def check_floating(name: str, t: Tensor) -> None:
    """Refuse what is no tensor of real floating-point numbers."""
    if not isinstance(t, Tensor):
        raise TypeError(f"`{name}` must be a torch tensor; got {type(t).__name__}.")
    if not t.is_floating_point():
        raise TypeError(f"`{name}` must be real floating-point numbers; got {t.dtype}.")


def check_real(name: str, t: Tensor) -> None:
    """Refuse what is no tensor of real numbers."""
    if not isinstance(t, Tensor) or t.is_complex():
        raise TypeError(f"`{name}` must be a tensor of real numbers; got {getattr(t, 'dtype', type(t).__name__)}.")


def check_targets(target: Any, rows: int | None = None) -> Tensor:
    """Targets of held-out rows as a tensor, if there are any, and one for each of `rows`.

    A tensor stays as it is; numbers of an array, a Series or a list keep their precision.

    >>> check_targets([1, 0, 1])
    tensor([1, 0, 1])
    """
    tensor = target if isinstance(target, Tensor) else _tensor(target)
    check_real("target", tensor)
    if tensor.ndim == 0 or len(tensor) == 0:
        raise ValueError("`target` must have calibration rows; got none. Hold some data out of training.")
    if rows is not None and len(tensor) != rows:
        raise ValueError(f"`target` must have one entry a row, {rows}; got {len(tensor)}.")
    return tensor


def _tensor(values: Any) -> Tensor:
    """Numbers of an array, a Series or a list, those in columns of objects too."""
    array = np.asarray(values)
    if array.dtype.kind == "O":
        with suppress(TypeError, ValueError):
            array = array.astype(np.float64)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"`target` must hold real numbers; got {array.dtype} in a {type(values).__name__}.")
    return torch.tensor(array.astype(array.dtype.newbyteorder("=")))


def check_passes(name: str, t: Tensor) -> None:
    """Refuse a first axis of no passes."""
    if t.shape[0] == 0:
        raise ValueError(f"`{name}` must hold at least one pass (K >= 1); got shape {tuple(t.shape)}.")


def check_outputs(outputs: Tensor, *, least: int) -> None:
    """Refuse outputs that are not (K, N, ...) with at least so many axes."""
    check_floating("outputs", outputs)
    if outputs.ndim < least:
        want = "(K, N, C)" if least == 3 else "(K, N, ...)"
        raise ValueError(
            f"`outputs` must have shape {want} with the K passes first; got {tuple(outputs.shape)}. "
            "Use bbalpha.sample(model, x, n_passes=K), or outputs[None] for a single pass."
        )
    check_passes("outputs", outputs)


def check_same_shape(outputs: Tensor, target: Tensor) -> None:
    """Refuse a target that is not of the shape of one pass."""
    if not isinstance(target, Tensor) or target.shape != outputs.shape[1:]:
        got = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            f"`target` must have the shape of one pass, {tuple(outputs.shape[1:])}, "
            f"for `outputs` {tuple(outputs.shape)}; got {got}. It is never broadcast: reshape it."
        )


def check_class_axis(class_axis: int, outputs: Tensor) -> int:
    """`class_axis` counted from the front, if it is an axis of (K, N, ...) after K and N."""
    if isinstance(class_axis, bool) or not isinstance(class_axis, int):
        raise TypeError(f"`class_axis` must be a whole number or None; got {class_axis!r}.")
    if not -outputs.ndim <= class_axis < outputs.ndim or class_axis % outputs.ndim < 2:
        raise ValueError(
            f"`class_axis` must name an axis of the outputs after K and N; got {class_axis} "
            f"for shape {tuple(outputs.shape)}."
        )
    return class_axis % outputs.ndim


def check_precision(precision: float | Tensor, outputs: Tensor) -> float | Tensor:
    """The precision, a number or a tensor that broadcasts to `outputs`, if it is positive."""
    if not isinstance(precision, Tensor):
        return check_number("precision", precision, above=0)
    check_floating("precision", precision)
    tau = precision.to(torch.promote_types(precision.dtype, outputs.dtype))
    try:
        fits = tau.ndim == 0 or torch.broadcast_shapes(tau.shape, outputs.shape) == outputs.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"`precision` must broadcast to the shape of `outputs`, {tuple(outputs.shape)}; got {tuple(tau.shape)}."
        )
    if readable(tau) and not bool((tau > 0).all() & tau.isfinite().all()):
        raise ValueError(f"`precision` must be positive and finite; got {_first_bad(tau)}.")
    return tau


def _first_bad(tau: Tensor) -> float:
    return float(tau.detach()[~((tau > 0) & tau.isfinite())].flatten()[0])


def check_weight(weight: Tensor, values: Tensor) -> Tensor:
    """The weights (N,) with the axes of `values`, if there is one for each data point."""
    try:
        weight = torch.as_tensor(weight, dtype=values.dtype, device=values.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"`sample_weight` must hold real numbers; got {type(weight).__name__}.") from error
    if weight.shape != values.shape[:1]:
        raise ValueError(
            f"`sample_weight` must have one weight per data point, ({values.shape[0]},); got {tuple(weight.shape)}."
        )
    if readable(weight) and not bool((weight >= 0).all() & weight.isfinite().all()):
        raise ValueError("`sample_weight` must be finite and not negative; got a value that is not.")
    return weight.reshape(-1, *[1] * (values.ndim - 1))


def check_row_groups(groups: Any, rows: int) -> tuple[Tensor, int]:
    """For each row the place of its group, in ascending order of `groups` (N,), and how many groups there are.

    >>> check_row_groups(torch.tensor([7, 7, 3]), 3)
    (tensor([1, 1, 0]), 2)
    """
    if not isinstance(groups, Tensor) or groups.is_floating_point() or groups.is_complex():
        got = groups.dtype if isinstance(groups, Tensor) else type(groups).__name__
        raise TypeError(f"`groups` must be a tensor of whole numbers, the group of each row; got {got}.")
    if groups.shape != (rows,):
        raise ValueError(f"`groups` must have one number a row, ({rows},); got {tuple(groups.shape)}.")
    numbers, place = torch.unique(groups, return_inverse=True)
    return place, len(numbers)


def check_masks(masks: Any) -> None:
    """Refuse what is no way to share masks."""
    if not isinstance(masks, str) or masks not in ("per_example", "shared"):
        raise ValueError(f'`masks` must be "per_example" or "shared"; got {masks!r}.')


def check_flag(name: str, value: Any) -> bool:
    """`value` as a bool, if it is True or False (numpy's too).

    >>> check_flag("balanced", "no")
    Traceback (most recent call last):
    ValueError: `balanced` must be True or False; got 'no'.
    """
    if type(value) is bool:
        return value
    if type(value).__name__ in ("bool", "bool_") and type(value).__module__ == "numpy":
        return bool(value)
    raise ValueError(f"`{name}` must be True or False; got {value!r}.")


def check_seed(seed: Any) -> None:
    """Refuse what is no seed."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"`seed` must be an int or None; got {type(seed).__name__}.")


def check_any_seed(seed: Any) -> int | None:
    """`seed` as an int of either sign and any size (numpy's too), or None."""
    whole = _whole(seed)
    if seed is not None and whole is None:
        raise TypeError(f"`seed` must be None or a whole number; got {seed!r}.")
    return whole


def _alpha(name: str, value: Any) -> float:
    """Any finite number; one below 0 is allowed by the mathematics, and seldom what is meant."""
    alpha = check_number(name, value)
    if alpha < 0:
        warnings.warn(
            f"`{name}` is below 0 ({alpha}): the passes that predict a row worst count most then; they spread less "
            "than with 0, which is MC dropout as usual, and a noise that is learned grows. The paper has 0 to 1.",
            UserWarning,
            stacklevel=2,
        )
    return alpha


def _noise(name: str, value: Any) -> Any:
    if value not in ("auto", "constant", "heteroscedastic", "student"):
        raise ValueError(f'`{name}` must be "auto", "constant", "heteroscedastic" or "student"; got {value!r}.')
    return value


def _class_weight(name: str, value: Any) -> Any:
    if value is not None and value != "balanced" and not isinstance(value, Mapping):
        raise ValueError(f'`{name}` must be None, "balanced" or a weight for each class; got {value!r}.')
    return value


def _budget(name: str, value: Any) -> Any:
    if isinstance(value, str):
        if value not in ("quick", "standard", "thorough"):
            raise ValueError(f'`{name}` must be "quick", "standard", "thorough" or seconds; got {value!r}.')
        return value
    return check_number(name, value, above=0)


def _seed_of_64_bits(name: str, value: Any) -> int:
    seed = _whole(value)
    if seed is None or not -(2**63) <= seed < 2**63:
        raise ValueError(f"`{name}` must be a whole number of 64 bits; got {value!r}.")
    return seed


def _whole(value: Any) -> int | None:
    """A whole number of any kind (numpy's too) as an int; None for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


RULES: dict[str, Callable[[str, Any], Any]] = {
    "alpha": _alpha,
    "dropout": check_share,
    "input_dropout": check_share,
    "length_scale": partial(check_number, least=0),
    "learning_rate": partial(check_number, above=0),
    "spread": partial(check_number, above=0),
    "noise": _noise,
    "budget": _budget,
    "class_weight": _class_weight,
    "seed": _seed_of_64_bits,
    "hidden_layer_sizes": check_widths,
    "n_passes": check_count,
    "n_predict_passes": check_count,
    "n_validation_passes": check_count,
    "epochs": check_count,
    "batch_size": check_count,
    "epoch_rows": check_count,
    "patience": check_count,
    "n_ensemble": partial(check_count, most=2**10),
    "validation_fraction": check_share,
    "balanced": check_flag,
}
