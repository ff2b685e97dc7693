"""The paper's first experiment: test NLL, RMSE and coverage on the UCI sets, for every method of the table.

    bbalpha reproduce regression --datasets boston,yacht --methods bbalpha

Writes one file a data set, out/regression/<dataset>.json. Work is done in units (the search of a split, the final
networks of a method, a baseline on a split); what a finished unit found is on disk, and the command goes on behind it.
Seeds are the numbers of the splits; a population that is trained in other parts rounds differently.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bbalpha.data.sets import UCIData, load_uci
from bbalpha.experiments.results import Ledger
from bbalpha.experiments.search import Choice, Plan, plan_for, search
from bbalpha.experiments.variants import VARIANTS, Job, fit_and_score

DATASETS = ("boston", "concrete", "energy", "wine", "yacht", "kin8nm", "power", "naval", "protein")
METHODS = (*VARIANTS, "bbalpha-cv", "hmc", "gp", "vi-g", "gbm")
QUICK = ("yacht", "boston")
SEED = 0


def reproduce(
    *, datasets: Sequence[str], alphas: Sequence[float], splits: int, methods: Sequence[str], quick: bool, out: Path
) -> str:
    """Run what is missing of the table; returns where it is.

    Args:
        datasets: As `load_uci` has them; empty is all nine (`year` runs when it is named).
        alphas: Of "bbalpha"; empty is 0, 0.5 and 1.
        splits: At most so many of the published ones.
        methods: Of `METHODS`; empty is all. "bbalpha-cv" brings the rows of "bbalpha" that it chooses from.
        quick: Two small sets, one split and few steps, into out/regression-quick.
        out: The folder of results.
    """
    for name, given, known in (("datasets", datasets, (*DATASETS, "year")), ("methods", methods, METHODS)):
        wrong = [g for g in given if g not in known]
        if wrong:
            raise ValueError(f"`{name}` must be of {', '.join(known)}; got {wrong[0]!r}.")
    chosen = [m for m in METHODS if m in (methods or METHODS) or (m == "bbalpha" and "bbalpha-cv" in methods)]
    runs = [
        _Run.of(name, alphas or (0.0, 0.5, 1.0), 1 if quick else splits, chosen, quick=quick, out=Path(out))
        for name in datasets or (QUICK if quick else DATASETS)
    ]
    total = sum(len(run.units()) for run in runs)
    quiet = bool(os.environ.get("CI")) or not sys.stderr.isatty()
    with _one_thread(), tqdm(total=total, unit="unit", desc="regression", disable=quiet) as bar:
        for run in runs:
            run(bar)
    folder = runs[0].ledger.path.parent
    return (
        f"{len(runs)} data sets in {folder}; figures and tables: python docs/make_regression_figures.py, make tables."
    )


@dataclass
class _Run:
    """One data set: its table so far, and what is missing."""

    data: UCIData
    plan: Plan
    alphas: Sequence[float]
    n_splits: int
    methods: Sequence[str]
    quick: bool
    ledger: Ledger
    state: Path
    choices: dict[str, Choice] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, alphas: Sequence[float], splits: int, methods: Sequence[str], *, quick: bool, out: Path
    ) -> "_Run":
        data = load_uci(name)
        folder = "regression-quick" if quick else "regression"
        command = f"bbalpha reproduce regression --datasets {name}{' --quick' if quick else ''}"
        run = cls(
            data, plan_for(len(data.split(0)[0]), name, quick=quick), alphas, min(splits, len(data.splits)), methods,
            quick, Ledger(out / folder / f"{name}.json", command=command, seed=SEED),
            out / ".state" / folder / f"{name}.json",
        )  # fmt: skip
        if run.state.exists():
            run.choices = {k: Choice(**v) for k, v in json.loads(run.state.read_text()).items()}
        for row in run.ledger.rows:
            if row["method"] in VARIANTS:
                source = VARIANTS[row["method"]].chosen or row["method"]
                run.choices.setdefault(_key(source, row["alpha"] or 0.0, row["split"]), _choice(row))
        return run

    def __call__(self, bar: Any) -> None:
        for label, work in self.units():
            bar.set_postfix_str(f"{self.data.name}, {label}")
            work()
            bar.update()
        self.state.unlink(missing_ok=True)  # every choice is in the rows now

    def units(self) -> list[tuple[str, Callable[[], None]]]:
        """(label, work) of everything that is missing, in an order that can be followed."""
        found: dict[str, Callable[[], None]] = {}
        known = set(self.choices)
        for method in self.methods:
            missing = self._missing(method)
            if method in VARIANTS:
                known |= self._plan_search(VARIANTS[method].chosen or method, missing, known, found)
                if missing:
                    found[method] = _call(self._fit, method, missing)
            else:
                work = self._cross_validated if method == "bbalpha-cv" else self._baseline
                found |= {f"{method}, split {split}": _call(work, method, split) for split, _ in missing}
        return list(found.items())

    def _plan_search(
        self, method: str, missing: list[tuple[int, float]], known: set[str], found: dict[str, Callable[[], None]]
    ) -> set[str]:
        """Add the searches for what is missing and not known, so many splits in each; returns what they will find."""
        wanted = [(s, a) for s, a in missing if _key(method, a, s) not in known]
        splits, alphas = list(dict.fromkeys(s for s, _ in wanted)), list(dict.fromkeys(a for _, a in wanted))
        plan = VARIANTS[method].plan(self.plan)
        groups = [c.group for c in plan.candidates]
        together = max(groups.count(g) for g in groups) * plan.n_folds * max(1, len(alphas))  # networks of a split
        each = -(-plan.n_together // together)
        for i in range(0, len(splits), each):
            part = splits[i : i + each]
            found[f"search of {method}, splits {part[0]} to {part[-1]}"] = _call(self._search, method, part, alphas)
        return {_key(method, alpha, split) for split in splits for alpha in alphas}

    def _missing(self, method: str) -> list[tuple[int, float]]:
        """(split, alpha) whose row is not there."""
        variant = VARIANTS.get(method)
        alphas = (variant.alphas or self.alphas) if variant else (math.nan,)
        labelled = variant is not None and variant.labelled
        n_splits = self.n_splits
        if method == "hmc":
            from bbalpha.experiments.baselines import HMC_SPLITS

            n_splits = min(n_splits, HMC_SPLITS.get(self.data.name, 0))
        return [
            (split, alpha)
            for split in range(n_splits)
            for alpha in alphas
            if not self.ledger.has(method=method, alpha=alpha if labelled else None, split=split)
        ]

    def _search(self, method: str, splits: Sequence[int], alphas: Sequence[float]) -> None:
        start = time.perf_counter()
        train = [self.data.split(split)[0] for split in splits]
        plan = VARIANTS[method].plan(self.plan)
        best = search(self.data.X, self.data.y, train, plan, alphas=alphas, seeds=splits)
        self.choices |= {_key(method, alpha, splits[i]): choice for (i, alpha), choice in best.items()}
        self.state.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.state.with_suffix(".tmp")
        temporary.write_text(json.dumps({k: c.row() for k, c in self.choices.items()}, indent=1))
        temporary.replace(self.state)
        self.ledger.add([], seconds=time.perf_counter() - start, part=method)

    def _fit(self, method: str, missing: Sequence[tuple[int, float]]) -> None:
        start = time.perf_counter()
        variant = VARIANTS[method]
        jobs = [Job(s, a, self.choices[_key(variant.chosen or method, a, s)]) for s, a in missing]
        scores = fit_and_score(self.data, variant, jobs, self.plan)
        rows = [
            self._row(method, job.alpha if variant.labelled else None, job.split, score | job.choice.row())
            for job, score in zip(jobs, scores, strict=True)
        ]
        self.ledger.add(rows, seconds=time.perf_counter() - start, part=method)

    def _cross_validated(self, method: str, split: int) -> None:
        """The row of the alpha whose network did best on the validation rows."""
        rows = [
            row
            for row in self.ledger.rows
            if row["method"] == "bbalpha" and row["split"] == split and row["alpha"] in self.alphas
        ]
        best = min(rows, key=lambda row: row["validation_nll"] if row["validation_nll"] is not None else math.inf)
        self.ledger.add([best | {"method": method, "alpha": None, "chosen_alpha": best["alpha"]}], seconds=0.0)

    def _baseline(self, method: str, split: int) -> None:
        from bbalpha.experiments import baselines

        start = time.perf_counter()
        parts = [(self.data.X[rows], self.data.y[rows]) for rows in self.data.split(split)]
        (x, y), (x_test, y_test) = parts
        scores = baselines.METHODS[method](x, y, x_test, y_test, seed=split, quick=self.quick)
        row = self._row(method, None, split, scores)
        self.ledger.add([row], seconds=time.perf_counter() - start, part=method)

    def _row(self, method: str, alpha: float | None, split: int, values: dict[str, Any]) -> dict[str, Any]:
        return {"dataset": self.data.name, "method": method, "alpha": alpha, "split": split, **values}


# ------------------------------------------------------------------------------ helpers


def _key(method: str, alpha: float, split: int) -> str:
    return f"{method} {float(alpha):g} {split}"


def _choice(row: dict[str, Any]) -> Choice:
    """The hyper-parameters of a row; rates, which rows have rounded, are multiples of 1/256."""
    rates = {name: round(row[name] * 256) / 256 for name in ("dropout", "input_dropout")}
    nll = math.nan if row["validation_nll"] is None else row["validation_nll"]
    others = {name: row[name] for name in ("length_scale", "epochs", "learning_rate")}
    return Choice(**rates, **others, validation_nll=nll)


def _call(work: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: work(*arguments)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products this small are faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
