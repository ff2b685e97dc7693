"""How a call with a bad argument ended: clear, opaque, silent, hang, or in code that is not ours.

clear    a ValueError, TypeError, OSError or ImportError that a `raise` of ours made; of scikit-learn's checks too
opaque   any other error
silent   an answer to a question that has none
hang     no end within the time
theirs   an error of the user's own code: the forward of the model, a function that was handed in
"""

import ast
import functools
import linecache
import signal
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import bbalpha

OURS = str(Path(bbalpha.__file__).parent)
SPOKEN = (ValueError, TypeError, OSError, ImportError)
CHECKERS = ("/sklearn/utils/", "/sklearn/base.py", "/sklearn/model_selection/", "/typer/", "/click/")


class HangError(BaseException):
    """The time is over; no `except Exception` may take it."""


class Caught:
    """A context that keeps whatever error ends it, but for those that end the whole run."""

    error = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.error = error
        return not isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))


def outcome(call, *, seconds=10.0):
    """(what it came to, what was said or answered)."""
    found = None
    with Caught() as caught, deadline(seconds), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = call()
    if caught.error is None:
        return "silent", repr(found)[:80].replace("\n", " ")
    if isinstance(caught.error, HangError):
        return "hang", f"no end after {seconds:g} s"
    return kind(caught.error), f"{type(caught.error).__name__}: {' '.join(str(caught.error).split())[:160]}"


def kind(error):
    """Of an error: clear, opaque or theirs."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name))
        trace = trace.tb_next
    file, line, _ = frames[-1]
    said = bool(str(error).strip())
    if file.startswith(OURS) and isinstance(error, SPOKEN):
        return "clear" if said and raised(file, line) else "opaque"
    if any(part in file for part in CHECKERS) and isinstance(error, SPOKEN) and raised(file, line):
        return "clear" if said else "opaque"
    return "theirs" if any(name.startswith("users_") for _, _, name in frames) else "opaque"


def raised(file, line):
    """Whether this line belongs to a `raise`."""
    return any(first <= line <= last for first, last in _raises(file))


@functools.cache
def _raises(file):
    tree = ast.parse("".join(linecache.getlines(file)))
    return [(node.lineno, node.end_lineno) for node in ast.walk(tree) if isinstance(node, ast.Raise)]


@contextmanager
def deadline(seconds):
    """A context that ends with HangError after so many seconds, where signals can say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_):
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
