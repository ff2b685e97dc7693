"""Our estimators against what people would pick instead, each with its defaults -> results/versus/*.json.

    BBALPHA_DATA=... python benchmarks/versus.py regression
    python benchmarks/versus.py classification --datasets cars iris --methods bbalpha catboost --splits 5

Needs pip install 'bbalpha[versus]'. Everybody gets the same rows, decides from training rows alone, and is not tuned.
Regression has the nine UCI sets with their published splits, classification the tables of versus_tables.py in five
stratified folds, shuffled anew for every five. A row is on disk as soon as it is known: the command can be stopped and
started, and started twice for different sets. `--again bbalpha` forgets the rows of a method first. Seconds in rows are
processor time, which a busy machine does not stretch much.
How each method becomes a distribution: versus_peers.py, and docs/versus.md in words.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import versus_classes
import versus_peers
import versus_summary
import versus_tables
from threadpoolctl import threadpool_limits

from bbalpha.data import UCIData, load_uci
from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.experiments import skeleton
from bbalpha.experiments.results import Ledger, Row

SETS = ("boston", "yacht", "energy", "concrete", "wine", "kin8nm", "power", "naval", "protein")
PEERS = ("ngboost", "catboost", "lightgbm", "mapie", "statsmodels", "vega_datasets", "pandas")
FAILURES = (ValueError, ArithmeticError, RuntimeError)  # of numbers; anything else is a bug and stops the run
_uci = cache(load_uci)


@dataclass(frozen=True)
class Regression(skeleton.Unit):
    """A method on a published split."""

    dataset: str
    method: str
    alpha: float | None
    split: int

    @property
    def part(self) -> str:
        return self.method


@dataclass(frozen=True)
class Classification(skeleton.Unit):
    """A method on a fold of a table."""

    table: str
    method: str
    fold: int

    @property
    def part(self) -> str:
        return self.method


def regress(unit: Regression, _: Path) -> list[Row]:
    """The row of a method on a split."""
    data: UCIData = _uci(unit.dataset)
    train, test = data.split(unit.split)
    x, y = data.X[train], data.y[train]
    seconds: dict[str, float | None] = {"seconds_fit": None, "seconds_predict": None}
    names = ("nll", "rmse", "crps", "coverage90", "width90")

    def work() -> Row:
        np.random.seed(unit.split)  # the trees of NGBoost draw from here
        start = time.process_time()
        predict = versus_peers.REGRESSORS[unit.method](x, y, unit.split)
        middle = time.process_time()
        forecast = predict(data.X[test])
        end = time.process_time()
        if unit.method in versus_peers.TOGETHER:
            seconds.update(seconds_fit=end - start)
        else:
            seconds.update(seconds_fit=middle - start, seconds_predict=end - middle)
        return versus_peers.score(forecast, data.y[test], float(y.std()))

    return [_row(unit, work, names, seconds)]


def classify(unit: Classification, _: Path) -> list[Row]:
    """The row of a method on a fold."""
    table = versus_tables.load(unit.table)
    train, test = table.split(unit.fold)
    seconds: dict[str, float | None] = {"seconds_fit": None, "seconds_predict": None}

    def work() -> Row:
        np.random.seed(unit.fold)
        start = time.process_time()
        model = versus_classes.classifier(unit.method, table, unit.fold).fit(table.X.iloc[train], table.y[train])
        middle = time.process_time()
        probs = np.asarray(model.predict_proba(table.X.iloc[test]))
        seconds.update(seconds_fit=middle - start, seconds_predict=time.process_time() - middle)
        return versus_classes.class_scores(probs, table.y[test])

    return [_row(unit, work, ("log_loss", "accuracy", "ece"), seconds)]


def _row(unit: skeleton.Unit, work: Callable[[], Row], names: Sequence[str], seconds: Row) -> Row:
    """What `work` found; empty, with the reason, where the method failed on these rows."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")  # 200 iterations of scikit-learn's MLP are often too few for it
        try:
            values = work()
        except FAILURES as error:
            values = dict.fromkeys(names) | {"failed": f"{type(error).__name__}: {error}"[:200]}
    return asdict(unit) | values | seconds


def command(kind: str, name: str) -> str:
    return f"python benchmarks/versus.py {kind} --datasets {name}"


def open_rows(kind: str, name: str, out: Path, again: Sequence[str]) -> Ledger:
    """The results of a set, without those of methods that are to be run again."""
    peers = {"peers": _versions()}
    kept = Ledger(out / f"{name}.json", command=command(kind, name), seed=0, settings=peers, any_release=True)
    kept.forget("method", again)
    return kept


def run(kind: str, *, names: Sequence[str], chosen: Sequence[str], splits: int, out: Path, jobs: int = 1,
        again: Sequence[str] = ()) -> dict[str, list[Row]]:  # fmt: skip
    """Run what is missing; the rows of every set."""
    found = {}
    for name in names:
        kept = open_rows(kind, name, out, again)
        state = skeleton.state_folder(kept.path, settings={})
        if kind == "regression":
            count = min(splits, len(_uci(name).splits))
            units = [Regression(name, m, versus_peers.alpha_of(m), s) for m in chosen for s in range(count)]
            skeleton.run_units(kept, units, regress, state=state, jobs=jobs)
        else:
            folds = [Classification(name, m, k) for m in chosen for k in range(splits)]
            skeleton.run_units(kept, folds, classify, state=state, jobs=jobs)
        found[name] = kept.rows
    return found


def runnable(kind: str, wanted: Sequence[str] | None) -> list[str]:
    """The methods that can be run here; says which not, and why."""
    known: Sequence[str] = list(versus_peers.REGRESSORS) if kind == "regression" else versus_classes.CLASSIFIERS
    estimator = BBAlphaRegressor if kind == "regression" else BBAlphaClassifier
    chosen = []
    for method in wanted or known:
        if method not in known:
            raise SystemExit(f"--methods must be of {', '.join(known)}; got {method!r}.")
        reason = versus_peers.why_not(method, estimator)
        needed = versus_peers.NEEDS.get(method)
        if needed and find_spec(needed) is None:
            reason = f"{needed} is not installed (pip install 'bbalpha[versus]')"
        if reason:
            print(f"skipped {method}: {reason}")
        else:
            chosen.append(method)
    return chosen


def _versions() -> dict[str, str]:
    found = {}
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("regression", "classification"))
    parser.add_argument("--datasets", nargs="+", help="default: all")
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--splits", type=int, default=20, help="at most so many splits, or folds")
    parser.add_argument("--out", type=Path, default=Path("results/versus"), help="folder")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", nargs="+", default=(), metavar="METHOD", help="forget its rows first")
    given: Any = parser.parse_args(argv)
    known = SETS if given.kind == "regression" else tuple(versus_tables.TABLES)
    names = given.datasets or known
    wrong = [name for name in names if name not in known]
    if wrong:
        parser.error(f"--datasets must be of {', '.join(known)}; got {wrong[0]!r}")
    chosen = runnable(given.kind, given.methods)
    found = run(given.kind, names=names, chosen=chosen, splits=given.splits, out=given.out, jobs=given.jobs,
                again=given.again)  # fmt: skip
    columns = {"regression": ("nll", "crps", "rmse", "coverage90", "width90", "seconds_fit")}
    print(versus_summary.text(found, columns.get(given.kind, ("log_loss", "accuracy", "ece", "seconds_fit"))))


if __name__ == "__main__":
    main()
