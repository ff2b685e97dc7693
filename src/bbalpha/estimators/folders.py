"""What a folder of an estimator holds: numbers, text and dates, and one sentence where something is odd."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bbalpha.checkpoint import read_folder


def read_content(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """What a folder holds, at least its `kind`."""
    with whole(path):
        content = read_folder(path).content
        return {"kind": "folder of another kind"} | content


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[None]:
    """What is missing or odd in a folder as one sentence."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"`path` must hold a whole estimator; {str(path)!r} does not: {error!r}.") from error


def plain(value: Any) -> Any:
    """Arrays as what a model folder holds."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "fiub":
            return {"array": torch.as_tensor(value)}
        if value.dtype.kind in "mM":
            return {"dates": torch.as_tensor(value.view("i8")), "unit": str(value.dtype)}
        return {"strings": [str(v) for v in value], "object": value.dtype == object}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return tuple(plain(v) for v in value) if isinstance(value, (tuple, list)) else value


def array_of(value: Any) -> Any:
    """What `plain` was given."""
    if isinstance(value, dict):
        if "array" in value:
            return value["array"].numpy()
        if "dates" in value:
            return value["dates"].numpy().view(value["unit"])
        if "strings" in value:
            odd = [text for text in value["strings"] if not isinstance(text, str)]
            if odd:
                raise ValueError(f"Names in a model folder must be text; got {odd[0]!r:.40}.")
            return np.array(value["strings"], dtype=object if value["object"] else None)
        return {k: array_of(v) for k, v in value.items()}
    return value
