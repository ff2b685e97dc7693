"""What the user gave and cannot be used: one line on stderr, and exit code 2."""

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
