"""Numbers as text, and the rules by which a word such as "narrow" or "better" may stand on a page.

One rule for all of them: a difference is named only if it is larger than two standard errors of it.

    judged = Share(inside, promised=0.9)
    judged.told, judged.verdict         # "80.0 % ± 4.7 %", "fewer"
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ENOUGH = 20  # rows below which nothing is judged
ERRORS = 2.0  # standard errors
NOTHING = "–"  # noqa: RUF001


def number(value: Any, digits: int = 4) -> str:
    """A number with so many digits that count; a dash where there is none.

    >>> number(1234567.0), number(0.000123456), number(-3.0), number(None), number(float("nan"))
    ('1,234,567', '0.0001235', '-3', '–', '–')
    """
    if value is None or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
        return NOTHING
    size = abs(float(value))
    return f"{value:,.0f}" if size >= 10**digits else f"{value:.{digits}g}"


def percent(share: float | None, digits: int = 0) -> str:
    """A share in hundredths.

    >>> percent(0.9), percent(0.0123, 1), percent(None)
    ('90 %', '1.2 %', '–')
    """
    return NOTHING if share is None or not math.isfinite(share) else f"{100 * share:.{digits}f} %"


def rows(n: int) -> str:
    """A number of rows.

    >>> rows(1), rows(1200)
    ('1 row', '1,200 rows')
    """
    return f"{n:,} row{'s' * (n != 1)}"


@dataclass(frozen=True)
class Share:
    """A share of rows beside the one that it should be.

    Attributes:
        hits: Whether each row counts (N,).
        promised: What the share should be.
        extra: Variance that the promise has by itself, beside that of N rows.
    """

    hits: Array
    promised: float
    extra: float = 0.0

    @property
    def value(self) -> float:
        """The share that was seen."""
        return float(self.hits.mean())

    @property
    def error(self) -> float:
        """The standard error of a share of N rows, were the promise kept."""
        return math.sqrt(self.promised * (1 - self.promised) / len(self.hits) + self.extra)

    @property
    def verdict(self) -> Literal["unknown", "as promised", "fewer", "more"]:
        """What can be said of it: "unknown" of less than 20 rows."""
        if len(self.hits) < ENOUGH:
            return "unknown"
        gap = self.value - self.promised
        return "as promised" if abs(gap) <= ERRORS * self.error else "fewer" if gap < 0 else "more"

    @property
    def told(self) -> str:
        """The share and its standard error."""
        return f"{percent(self.value, 1)} ± {percent(self.error, 1)}"


@dataclass(frozen=True)
class Gain:
    """The mean of a difference over rows, and whether it can be told from none.

    Attributes:
        mean: Positive where things are better.
        error: Its standard error; nan where it is not known.
        n: Rows.
        least: Of these; below, nothing is said.
    """

    mean: float
    error: float
    n: int
    least: int = ENOUGH

    @classmethod
    def of(cls, gains: Array, least: int = ENOUGH) -> "Gain":
        """Of one difference a row (N,)."""
        error = float(gains.std(ddof=1) / math.sqrt(len(gains))) if len(gains) > 1 else math.nan
        return cls(float(gains.mean()), error, len(gains), least)

    @classmethod
    def between(cls, a: Array, b: Array) -> "Gain":
        """Of the mean of `a` over that of `b`, which are different rows."""
        if min(len(a), len(b)) < 2:
            return cls(math.nan, math.nan, len(a) + len(b))
        error = math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
        return cls(float(a.mean() - b.mean()), error, len(a) + len(b))

    @property
    def verdict(self) -> Literal["unknown", "better", "worse", "no difference"]:
        """What can be said of it."""
        if self.n < self.least or not math.isfinite(self.mean) or not math.isfinite(self.error):
            return "unknown"
        clear = abs(self.mean) > ERRORS * self.error
        return "no difference" if not clear else "better" if self.mean > 0 else "worse"


def listed(names: list[str], most: int = 5) -> str:
    """Names in a sentence.

    >>> listed(["a", "b", "c"]), listed(["a"]), listed(list("abc"), 2)
    ('a, b and c', 'a', 'a, b and 1 more')
    """
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most:,} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
