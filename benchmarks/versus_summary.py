"""Means, standard errors and counts of the rows of versus.py, for its last words and for docs/versus.md."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

Row = dict[str, Any]
SILENT = {"nll": ("hist-gbm-quantiles", "lightgbm-quantiles", "mapie"), "rmse": ("mapie",), "crps": ("mapie",)}


@dataclass(frozen=True)
class Mean:
    """The mean over splits, its standard error (0 of one split), and how many splits."""

    mean: float
    error: float
    n: int


def is_ours(method: str) -> bool:
    return method.split("-")[0] == "bbalpha"


def by_split(rows: Iterable[Row], method: str, metric: str) -> dict[int, float]:
    """{split or fold: value} of a method, infinite where it failed or had no finite value; empty if it says none."""
    if method in SILENT.get(metric, ()):
        return {}
    found = {}
    for row in rows:
        if row["method"] == method:
            value = row.get(metric)
            found[row["split"] if "split" in row else row["fold"]] = math.inf if value is None else value
    return found


def average(values: Sequence[float]) -> Mean | None:
    """The mean of some splits; None of none."""
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Mean(math.inf, 0.0, len(values))
    return Mean(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0, len(values))


def methods(contents: Mapping[str, Sequence[Row]]) -> list[str]:
    """Every method of any set, ours first."""
    names = dict.fromkeys(row["method"] for rows in contents.values() for row in rows)
    return sorted(names, key=lambda name: not is_ours(name))


def beaten(rows: Sequence[Row], ours: str, metric: str) -> tuple[list[str], list[str]]:
    """The baselines that have a worse mean than `ours` on the splits that both have, and those that have not."""
    own = by_split(rows, ours, metric)
    worse, others = [], []
    for rival in methods({"": rows}):
        theirs = by_split(rows, rival, metric)
        common = own.keys() & theirs.keys()
        if not is_ours(rival) and common:
            mine, other = (fmean(side[k] for k in common) for side in (own, theirs))
            (worse if mine < other else others).append(rival)
    return worse, others


def verdict(contents: Mapping[str, Sequence[Row]], ours: str, metric: str) -> tuple[list[str], dict[str, list[str]]]:
    """The sets on which `ours` is better than every baseline, and by whom it is not worse beaten on the others."""
    won, lost = [], {}
    for name, rows in contents.items():
        worse, others = beaten(rows, ours, metric)
        if others:
            lost[name] = others
        elif worse:
            won.append(name)
    return won, lost


def shown(value: Mean | None, digits: int = 3) -> str:
    """Mean ± standard error; a dash of none."""
    if value is None:
        return "-"
    return "infinite" if math.isinf(value.mean) else f"{value.mean:.{digits}f} ± {value.error:.{digits}f}"


def text(contents: Mapping[str, Sequence[Row]], metrics: Sequence[str]) -> str:
    """Everything as lines of a terminal: for each set a method a line, then the counts."""
    width = max(map(len, methods(contents)), default=0)
    lines = []
    for name, rows in contents.items():
        lines.append(f"\n{name}" + " " * (width + 2 - len(name)) + "".join(f"{m:>20}" for m in metrics))
        for method in methods({name: rows}):
            cells = [shown(average(list(by_split(rows, method, m).values()))) for m in metrics]
            n = sum(row["method"] == method for row in rows)
            lines.append(f"  {method:<{width}}" + "".join(f"{c:>20}" for c in cells) + f"   {n} splits")
    lines.append("")
    for ours in filter(is_ours, methods(contents)):
        won, lost = verdict(contents, ours, metrics[0])
        if won or lost:
            total = len(won) + len(lost)
            told = f"{ours}: better {metrics[0]} than every baseline on {len(won)} of {total}"
            lines.append(told + (f" ({', '.join(won)})" if won else ""))
    return "\n".join(lines)
