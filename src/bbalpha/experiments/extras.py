"""Packages that only the baselines need: pip install 'bbalpha[baselines]'."""

from importlib import import_module
from typing import Any


def extra(name: str) -> Any:
    """The module `name` of a package that only the baselines need."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the baselines need {name.split('.')[0]}; install it with pip install 'bbalpha[baselines]'.",
            name=error.name,
        ) from error
