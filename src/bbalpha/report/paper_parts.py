"""What the parts of the paper's page share: a part, scores over splits or networks, and how two are compared."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bbalpha.experiments import results
from bbalpha.report.page import Section
from bbalpha.report.published import Score
from bbalpha.report.words import ERRORS, NOTHING

Content = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """An experiment on the page: its sections, its most important numbers, and the files that it is made of."""

    sections: Sequence[Section]
    facts: Sequence[tuple[str, str, str]] = ()
    contents: Mapping[str, Content] = field(default_factory=dict)


def missing(experiment: str) -> str:
    """That an experiment was not run, and what would run it."""
    return f"Not measured: there is no `{experiment}/*.json` in the folder; `bbalpha reproduce {experiment}` makes it."


def read(path: Path) -> Content:
    """A results file."""
    try:
        return results.read(path)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no results file: {error} Run its experiment again.") from error


def scored(values: Sequence[float | None], factor: float = 1.0) -> Score | None:
    """Mean and standard error of what is there; None of nothing."""
    there = [factor * v for v in values if v is not None]
    if not there:
        return None
    error = statistics.stdev(there) / math.sqrt(len(there)) if len(there) > 1 else None
    return Score(statistics.fmean(there), error, len(there))


def shown(score: Score | None, digits: int = 2) -> str:
    """Mean ± standard error.

    >>> shown(Score(1.5, 0.25)), shown(Score(1.0, None), 1), shown(None)
    ('1.50 ± 0.25', '1.0', '–')
    """
    if score is None:
        return NOTHING
    return f"{score.mean:.{digits}f}" + (f" ± {score.error:.{digits}f}" if score.error is not None else "")


def compared(a: Score, b: Score, *, rounding: float = 0.0) -> str:
    """Whether `a` is "higher" or "lower" than `b` by more than two standard errors of the difference, or "alike".

    Args:
        a: Ours.
        b: Another of ours, or the paper's.
        rounding: The last digit of what was printed, which adds to the error.

    >>> compared(Score(1.0, 0.1), Score(2.0, 0.1)), compared(Score(1.0, 0.1), Score(1.1, 0.1))
    ('lower', 'alike')
    """
    if a.error is None or b.error is None:
        return "not judged"
    error = math.hypot(a.error, b.error, rounding / math.sqrt(12))
    return "alike" if abs(a.mean - b.mean) <= ERRORS * error else "lower" if a.mean < b.mean else "higher"
