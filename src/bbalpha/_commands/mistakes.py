"""What the user gave and cannot be used: one line on stderr, and exit code 2."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def mistakes() -> Iterator[None]:
    """A context in which errors about what the user gave become one line and exit code 2."""
    try:
        yield
    except BrokenPipeError as error:  # the reader of our pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from error
    except (ValueError, TypeError, OSError, ImportError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"bbalpha: {message}", err=True)
        raise typer.Exit(2) from error


def number(name: str, text: str) -> float:
    """The finite number that an option holds."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{name} must be a finite number; got {text!r}.")
    return found


def numbers(name: str, text: str) -> list[float]:
    """The finite numbers that an option holds, with commas between them; at least one."""
    return [number(name, part) for part in listed(name, text)]


def listed(name: str, text: str, *, least: int = 1) -> list[str]:
    """The parts between commas; none of them empty."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if "" in parts or len(parts) < least:
        raise ValueError(f"{name} must have something between its commas; got {text!r}.")
    return parts
