"""How one column of a table becomes columns of numbers: plain numbers, dates, levels.

Each kind is a frozen dataclass of plain values, so that a model folder can hold it, with the same four things: `names`
of the columns it becomes, `numeric` (which of them are plain numbers), `encode` and `unseen`.

    column = fit_column(read(frame["city"], "city"))
    column.names                                      # ("city=Paris", "city=Rome", "city=rare")
    column.encode(read(frame["city"], "city", column.kind))   # (N, 3)
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from bbalpha.estimators.cells import WORDS, Array, Cells, texts

MOST_LEVELS = 50
_DAY = 86_400_000_000  # microseconds
_CYCLES = ("month", "weekday", "hour")


@dataclass(frozen=True)
class Numbers:
    """Numbers, truth values or spans of time: as they are, the median in place of missing ones.

    Attributes:
        name: Of the column.
        kind: "number", "flag" or "span".
        centre: The median of the rows at fit.
        varies: Whether it was not the same number in all of them.
        missing: Whether some were missing.
    """

    name: str
    kind: str
    centre: float
    varies: bool
    missing: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns it becomes."""
        return (self.name,) * self.varies + (f"{self.name} is missing",) * self.missing

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which of them are plain numbers."""
        return (self.kind != "flag",) * self.varies + (False,) * self.missing

    def encode(self, cells: Cells) -> Array:
        """The columns it becomes (N, f)."""
        value = np.where(cells.missing, self.centre, cells.values)
        return _side_by_side([value] * self.varies + [cells.missing] * self.missing, len(value))

    def unseen(self, cells: Cells) -> Array:
        """Which cells are missing where none was, or are the truth value that no row had (N,)."""
        other = self.kind == "flag" and not self.varies
        new = ~cells.missing & (cells.values != self.centre) if other else np.zeros_like(cells.missing)
        return new if self.missing else new | cells.missing


@dataclass(frozen=True)
class Dates:
    """Dates: days since the first, and where they vary month, weekday and time of day as points on a circle.

    A missing date is the median day, and in the centre of each circle.

    Attributes:
        name: Of the column.
        start: The first date at fit, in microseconds since 1970, UTC.
        centre: The median day at fit.
        varies: Whether it was not the same moment in all rows.
        cycles: Which of month, weekday and hour varied.
        missing: Whether some were missing.
    """

    name: str
    start: int
    centre: float
    varies: bool
    cycles: tuple[str, ...]
    missing: bool
    kind: str = "date"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns it becomes."""
        circles = tuple(f"{self.name}: {cycle} ({part})" for cycle in self.cycles for part in ("sin", "cos"))
        return (f"{self.name}: days",) * self.varies + circles + (f"{self.name} is missing",) * self.missing

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which of them are plain numbers."""
        return tuple(i < self.varies for i in range(len(self.names)))

    def encode(self, cells: Cells) -> Array:
        """The columns it becomes (N, f)."""
        days = np.where(cells.missing, self.centre, (cells.values - self.start) / _DAY)
        turns = [2 * np.pi * _turn(cells.values, cycle) for cycle in self.cycles]
        circles = [np.where(cells.missing, 0.0, part(turn)) for turn in turns for part in (np.sin, np.cos)]
        return _side_by_side([days] * self.varies + circles + [cells.missing] * self.missing, len(days))

    def unseen(self, cells: Cells) -> Array:
        """Which cells are missing where none was (N,)."""
        return np.zeros_like(cells.missing) if self.missing else cells.missing


@dataclass(frozen=True)
class Levels:
    """Text and categories: a column of 0 and 1 for each common level, one for all rare ones, one for missing cells.

    Where these would be two they are one, for the less common; where they would be one there is none. A level that is
    new after the fit is a rare one, or 0 everywhere where none was rare.

    Attributes:
        name: Of the column.
        levels: Those that have a column, the commonest first.
        rare: The others that were seen.
        missing: Whether some cells were missing.
    """

    name: str
    levels: tuple[str, ...]
    rare: tuple[str, ...]
    missing: bool
    kind: str = "level"

    @property
    def _slots(self) -> tuple[str, ...]:
        own = tuple(f"{self.name}={level}" for level in self.levels)
        return own + (f"{self.name}=rare",) * bool(self.rare) + (f"{self.name} is missing",) * self.missing

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns it becomes."""
        return self._slots if len(self._slots) > 2 else self._slots[1:]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which of them are plain numbers: none."""
        return (False,) * len(self.names)

    def encode(self, cells: Cells) -> Array:
        """The columns it becomes (N, f)."""
        n_slots = len(self._slots)
        rest = len(self.levels) if self.rare else n_slots  # past the last slot: 0 everywhere
        slot = np.full(len(cells.missing), n_slots - 1 if self.missing else rest)
        place = {level: i for i, level in enumerate(self.levels)}
        slot[~cells.missing] = [place.get(t, rest) for t in texts(cells)]
        first = n_slots - len(self.names)
        return np.asarray(slot[:, None] == np.arange(first, n_slots), dtype=np.float64)

    def unseen(self, cells: Cells) -> Array:
        """Which cells hold a level that no row had, or are missing where none was (N,)."""
        known = {*self.levels, *self.rare}
        new = np.full(len(cells.missing), not self.missing)
        new[~cells.missing] = [t not in known for t in texts(cells)]
        return new


Column = Numbers | Dates | Levels


def fit_column(cells: Cells) -> Column:
    """What a column becomes, learnt from its cells.

    >>> cells = np.array(["b", "a", "a", "b", "c", "c"], dtype=object)
    >>> fit_column(Cells("city", "level", cells, np.zeros(6, dtype=bool))).names
    ('city=a', 'city=b', 'city=c')
    """
    missing = bool(cells.missing.any())
    if cells.missing.all():
        return Levels(cells.name, (), (), missing)
    if cells.kind == "level":
        return _fit_levels(cells, missing)
    present = cells.present
    varies = bool((present != present[0]).any())
    if cells.kind != "date":
        return Numbers(cells.name, cells.kind, float(median(present)), varies, missing)
    start = int(present.min())
    cycles = tuple(c for c in _CYCLES if np.ptp(_turn(present, c)) > 0)
    return Dates(cells.name, start, float(median((present - start) / _DAY)), varies, cycles, missing)


def median(values: Array) -> Any:
    """The median down the rows; of halves, so that the mean of two huge numbers is not infinite."""
    return 2 * np.median(values / 2, axis=0)


def content(column: Column) -> dict[str, Any]:
    """A column as plain values."""
    return asdict(column)


def of_content(told: Mapping[str, Any]) -> Column:
    """The column that `content` was given."""
    kinds: dict[str, type[Column]] = {**dict.fromkeys(WORDS, Numbers), "date": Dates, "level": Levels}
    if told["kind"] not in kinds:
        raise ValueError(f"The kind of a column must be one of {', '.join(kinds)}; got {told['kind']!r}.")
    made = kinds[told["kind"]]
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, (list, tuple)) else v for k, v in told.items()}
    if set(values) != {field.name for field in fields(made)} or not all(map(_is_sound, values, values.values())):
        raise ValueError(f"A column of kind {told['kind']!r} must hold what its fit sets; got {dict(told)!r}.")
    return made(**values)


# ------------------------------------------------------------------------------ helpers


def _fit_levels(cells: Cells, missing: bool) -> Levels:
    """A level has a column if it is one of the 50 commonest and neither in one row alone nor in under 1 of 1000."""
    counts, n_rows = Counter(texts(cells)), len(cells.missing)
    if len(counts) > max(MOST_LEVELS, n_rows / 2):
        raise ValueError(
            f"`X` must hold no identifiers and no free text; got {len(counts)} different ones in the {n_rows} rows of "
            f"column {cells.name!r}. Drop it; if it is a date, convert it with pandas.to_datetime."
        )
    order = sorted(counts, key=lambda level: (-counts[level], level))
    own = [level for level in order[:MOST_LEVELS] if counts[level] >= max(2, n_rows / 1000)]
    return Levels(cells.name, tuple(own), tuple(order[len(own) :]), missing)


def _turn(moments: Array, cycle: str) -> Array:
    """Where moments, in microseconds, stand in their year, week or day, from 0 to 1."""
    if cycle == "month":
        return moments.astype("datetime64[us]").astype("datetime64[M]").astype(np.int64) % 12 / 12
    if cycle == "weekday":
        return (moments // _DAY + 3) % 7 / 7  # the first of January 1970 was a Thursday
    return moments % _DAY / _DAY


def _side_by_side(columns: list[Array], n_rows: int) -> Array:
    """The columns as one table, also where there are none (N, f)."""
    table = np.empty((n_rows, len(columns)))
    for i, column in enumerate(columns):
        table[:, i] = column
    return table


def _is_sound(name: str, value: Any) -> bool:
    """Whether a field holds what one of its name may hold."""
    if name in ("varies", "missing"):
        return isinstance(value, bool)
    if name == "cycles":
        return isinstance(value, tuple) and set(value) <= set(_CYCLES)
    if name in ("levels", "rare"):
        return isinstance(value, tuple) and all(isinstance(v, str) for v in value)
    if name == "start":
        return type(value) is int
    return bool(np.isfinite(value)) if name == "centre" else isinstance(value, str)
