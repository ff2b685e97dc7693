"""The paper's first experiment: test NLL, RMSE and coverage on the UCI sets, for every method of the table.

    bbalpha reproduce regression --datasets boston,yacht --methods bbalpha

Writes one file a data set, out/regression/<dataset>.json. Work is done in units (the search of a split, the final
networks of a method, a baseline on a split); what a finished unit found is on disk, and the command goes on behind it.
Units hang on those of an earlier stage alone, so that a cluster runs them side by side, to the same bits.
Seeds are the numbers of the splits; a population that is trained in other parts rounds differently.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bbalpha.data.sets import load_uci
from bbalpha.experiments import baselines, skeleton
from bbalpha.experiments.results import Ledger, Row
from bbalpha.experiments.search import Choice, Config, config_for, search
from bbalpha.experiments.variants import VARIANTS, Job, fit_and_score

DATASETS = ("boston", "concrete", "energy", "wine", "yacht", "kin8nm", "power", "naval", "protein")
METHODS = (*VARIANTS, "bbalpha-cv", *baselines.METHODS)
QUICK = ("yacht", "boston")
SEED = 0


def reproduce(
    *, datasets: Sequence[str], alphas: Sequence[float], splits: int, methods: Sequence[str], quick: bool, out: Path,
    jobs: int | None = 1,
) -> str:  # fmt: skip
    """Run what is missing of the table; returns where it is.

    Args:
        datasets: As `load_uci` has them; empty is all nine (`year` runs when it is named).
        alphas: Of "bbalpha"; empty is 0, 0.5 and 1.
        splits: At most so many of the published ones.
        methods: Of `METHODS`; empty is all. "bbalpha-cv" brings the rows of "bbalpha" that it chooses from.
        quick: Two small sets, one split and few steps, into out/regression-quick.
        out: The folder of results.
        jobs: Units side by side; None is as the `joblib.parallel_config` around it says.
    """
    for name, given, known in (("datasets", datasets, (*DATASETS, "year")), ("methods", methods, METHODS)):
        wrong = [g for g in given if g not in known]
        if wrong:
            raise ValueError(f"`{name}` must be of {', '.join(known)}; got {wrong[0]!r}.")
    chosen = [m for m in METHODS if m in (methods or METHODS) or (m == "bbalpha" and "bbalpha-cv" in methods)]
    tables = [
        Table(name, alphas or (0.0, 0.5, 1.0), 1 if quick else splits, chosen, quick=quick, out=Path(out))
        for name in datasets or (QUICK if quick else DATASETS)
    ]
    for table in tables:
        table.run(jobs)
        skeleton.forget(table.state)  # every choice is in the rows now
    return f"{len(tables)} data sets in {tables[0].kept.path.parent}; figures and tables: make figures, make tables."


@dataclass(frozen=True)
class _Step(skeleton.Unit):
    """What is missing in a table: the rows of a method at these (split, alpha), or the search that goes before them."""

    method: str
    cells: tuple[tuple[int, float], ...]
    is_search: bool = False

    @property
    def label(self) -> str:
        return f"{'search of ' * self.is_search}{self.method}, splits {self.cells[0][0]} to {self.cells[-1][0]}"

    @property
    def name(self) -> str:
        return self.label

    @property
    def part(self) -> str:
        return self.method

    @property
    def stage(self) -> int:
        """Searches, what is trained, and what chooses from rows: each hangs on the stages before it alone."""
        return 0 if self.is_search else 2 if self.method == "bbalpha-cv" else 1

    def done(self, kept: Ledger) -> bool:
        return False  # what is done is no step


class Table:
    """One data set: its rows so far, and what is missing.

    Args:
        name: Of the data set.
        alphas: Of "bbalpha".
        splits: At most so many.
        methods: Of `METHODS`.
        quick: Few steps, into a folder of its own.
        out: The folder of results.
    """

    def __init__(
        self, name: str, alphas: Sequence[float], splits: int, methods: Sequence[str], *, quick: bool, out: Path
    ) -> None:
        self.data, self.alphas, self.methods, self.quick = load_uci(name), alphas, methods, quick
        self.n_splits = min(splits, len(self.data.splits))
        self.config = config_for(len(self.data.split(0)[0]), name, quick=quick)
        path, settings = out / ("regression-quick" if quick else "regression") / f"{name}.json", self.config.settings
        command = f"bbalpha reproduce regression --datasets {name}"
        self.kept = skeleton.open_ledger(path, command=command, quick=quick, seed=SEED, settings=settings)
        self.state = skeleton.state_folder(path, settings=settings)
        self.searched = Ledger(self.state / "choices.json", command=command, seed=SEED)

    def units(self) -> list[_Step]:
        """Everything that is missing, in an order that can be followed."""
        found: list[_Step] = []
        known = set(self._choices())
        for method in self.methods:
            missing = self._missing(method)
            if method not in VARIANTS:
                found += [_Step(method, (cell,)) for cell in missing]
            elif missing:
                searches = self._searches(VARIANTS[method].chosen or method, missing, known)
                known |= {(step.method, alpha, split) for step in searches for split, alpha in step.cells}
                found += [*searches, _Step(method, tuple(missing))]
        return found

    def run(self, jobs: int | None) -> None:
        """Run what is missing, stage by stage."""
        for stage in range(3):
            units = [step for step in self.units() if step.stage == stage]
            own = [row for row in self.kept.rows if row["method"] == "bbalpha" and row["alpha"] in self.alphas]
            work = _Work(self.data.name, self.config, self.quick, self._choices(), own)
            elsewhere = None if stage else self.searched
            skeleton.run_units(self.kept, units, work, state=self.state, jobs=jobs, elsewhere=elsewhere)

    def _searches(
        self, method: str, missing: Sequence[tuple[int, float]], known: set[tuple[str, float, int]]
    ) -> list[_Step]:
        """The searches for what is missing and not known, so many splits in each."""
        wanted = [(s, a) for s, a in missing if (method, a, s) not in known]
        splits, alphas = _parts(wanted)
        config = VARIANTS[method].config(self.config)
        groups = [c.group for c in config.candidates]
        together = max(groups.count(g) for g in groups) * config.n_folds * max(1, len(alphas))  # networks of a split
        each = -(-config.n_together // together)
        starts = range(0, len(splits), each)
        return [_Step(method, tuple(product(splits[i : i + each], alphas)), is_search=True) for i in starts]

    def _missing(self, method: str) -> list[tuple[int, float]]:
        """(split, alpha) whose row is not there."""
        variant = VARIANTS.get(method)
        alphas = (variant.alphas or self.alphas) if variant else (math.nan,)
        labelled = variant is not None and variant.labelled
        n_splits = self.n_splits
        if method == "hmc":
            n_splits = min(n_splits, baselines.HMC_SPLITS.get(self.data.name, 0))
        return [
            (split, alpha)
            for split in range(n_splits)
            for alpha in alphas
            if not self.kept.has(method=method, alpha=alpha if labelled else None, split=split)
        ]

    def _choices(self) -> dict[tuple[str, float, int], Choice]:
        """{(method, alpha, split): hyper-parameters}, as they were found or as rows have them."""
        rows = [
            row | {"method": VARIANTS[row["method"]].chosen or row["method"]}
            for row in self.kept.rows
            if row["method"] in VARIANTS
        ]
        return {(r["method"], r["alpha"] or 0.0, r["split"]): _choice(r) for r in [*rows, *self.searched.rows]}


@dataclass(frozen=True)
class _Work:
    """How a step is run, in whatever process: what it needs of the table and of the stages before.

    Attributes:
        name: Of the data set, which a process finds by itself.
        config: As in the table.
        quick: Likewise.
        choices: {(method, alpha, split): hyper-parameters} so far.
        rows: Those of "bbalpha" so far.
    """

    name: str
    config: Config
    quick: bool
    choices: dict[tuple[str, float, int], Choice]
    rows: Sequence[Row]

    def __call__(self, step: _Step, _: Path) -> list[Row]:
        """The rows of a step."""
        with skeleton.threads(1):  # products this small are faster so
            if step.is_search:
                return self._search(step)
            if step.method in VARIANTS:
                return self._fit(step)
            kind = self._cross_validated if step.method == "bbalpha-cv" else self._baseline
            return kind(step.method, step.cells[0][0])

    def _search(self, step: _Step) -> list[Row]:
        splits, alphas = _parts(step.cells)
        data = load_uci(self.name)
        train = [data.split(split)[0] for split in splits]
        config = VARIANTS[step.method].config(self.config)
        best = search(data.X, data.y, train, config, alphas=alphas, seeds=splits)
        return [self._row(step.method, alpha, splits[i], choice.row()) for (i, alpha), choice in best.items()]

    def _fit(self, step: _Step) -> list[Row]:
        variant = VARIANTS[step.method]
        jobs = [Job(s, a, self.choices[variant.chosen or step.method, a, s]) for s, a in step.cells]
        scores = fit_and_score(load_uci(self.name), variant, jobs, self.config)
        return [
            self._row(step.method, job.alpha if variant.labelled else None, job.split, score | job.choice.row())
            for job, score in zip(jobs, scores, strict=True)
        ]

    def _cross_validated(self, method: str, split: int) -> list[Row]:
        """The row of the alpha whose network did best on the validation rows."""
        rows = [row for row in self.rows if row["split"] == split]
        best = min(rows, key=lambda row: row["validation_nll"] if row["validation_nll"] is not None else math.inf)
        return [best | {"method": method, "alpha": None, "chosen_alpha": best["alpha"]}]

    def _baseline(self, method: str, split: int) -> list[Row]:
        data = load_uci(self.name)
        parts = [(data.X[rows], data.y[rows]) for rows in data.split(split)]
        (x, y), (x_test, y_test) = parts
        scores = baselines.METHODS[method](x, y, x_test, y_test, seed=split, quick=self.quick)
        return [self._row(method, None, split, scores)]

    def _row(self, method: str, alpha: float | None, split: int, values: dict[str, Any]) -> Row:
        return {"dataset": self.name, "method": method, "alpha": alpha, "split": split, **values}


def _parts(cells: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """The splits and the alphas of (split, alpha), each once."""
    return list(dict.fromkeys(split for split, _ in cells)), list(dict.fromkeys(alpha for _, alpha in cells))


def _choice(row: Row) -> Choice:
    """The hyper-parameters of a row; rates, which rows have rounded, are multiples of 1/256."""
    rates = {name: round(row[name] * 256) / 256 for name in ("dropout", "input_dropout")}
    nll = math.nan if row["validation_nll"] is None else row["validation_nll"]
    others = {name: row[name] for name in ("length_scale", "epochs", "learning_rate")}
    return Choice(**rates, **others, validation_nll=nll)
