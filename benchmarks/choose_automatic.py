"""How the automatic regressor does on problems that are none of the paper's -> results/chosen_automatic.json.

    python benchmarks/choose_automatic.py --ways quick standard fixed

The problems of choose_defaults.py and a few more: noise that depends on the inputs, targets with a long tail, outliers.
Each is cut three times into rows to fit and a tenth to score; what is in the output is not computed again. Rules of the
race (how many heats, steps and finalists, which candidates) were chosen by this table, never by a row of the UCI sets.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from choose_defaults import PROBLEMS, SPLITS, Table
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import cross_val_predict

from bbalpha.estimators import BBAlphaRegressor
from bbalpha.experiments.results import Ledger


def uneven() -> Table:
    """Noise that grows with a column."""
    rng = np.random.default_rng(5)
    x = rng.uniform(-2, 2, (900, 6))
    return x, np.sin(2 * x[:, 1]) + x[:, 2] * x[:, 3] + np.exp(x[:, 0] - 1) * rng.standard_normal(900)


def tailed() -> Table:
    """A positive target whose logarithm is simple."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((600, 8))
    return x, np.exp(x[:, 0] + 0.5 * np.sin(2 * x[:, 1]) + 0.3 * rng.standard_normal(600))


def outliers() -> Table:
    """Noise with outliers: Student's t of two degrees of freedom."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((700, 5))
    return x, x[:, 0] * x[:, 1] + np.cos(2 * x[:, 2]) + 0.1 * rng.standard_t(2, 700)


def nearly_linear() -> Table:
    rng = np.random.default_rng(8)
    x = rng.standard_normal((300, 40))
    return x, x @ rng.standard_normal(40) * 0.3 + 0.3 * np.tanh(x[:, 0]) + rng.standard_normal(300)


MORE = {"uneven": uneven, "tailed": tailed, "outliers": outliers, "nearly linear": nearly_linear}
PAPER: dict[str, Any] = {"hidden_layer_sizes": (50,), "noise": "constant"}
WAYS: dict[str, dict[str, Any]] = {
    "quick": {"budget": "quick"},
    "standard": {},
    "thorough": {"budget": "thorough"},
    "fixed": PAPER,
    "one kind": {"hidden_layer_sizes": (100, 100), "noise": "heteroscedastic"},
}


def score_ours(x: Any, y: Any, train: Any, test: Any, settings: dict[str, Any], split: int) -> dict[str, Any]:
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = BBAlphaRegressor(random_state=split, **settings).fit(x[train], y[train])
    seconds = time.process_time() - start
    low, high = model.predict_interval(x[test], 0.9)
    nll = -model.log_prob(x[test], y[test])
    best = max(model.trials_, key=lambda t: t["weight"])["candidate"] if model.trials_ else ""
    inside = (low <= y[test]) & (y[test] <= high)
    return _row(y, nll, model.predict(x[test]) - y[test], inside) | {"seconds_fit": seconds, "best": best}


def score_boosting(x: Any, y: Any, train: Any, test: Any, settings: dict[str, Any], split: int) -> dict[str, Any]:
    start = time.process_time()
    model = HistGradientBoostingRegressor(random_state=split)
    deviation = (cross_val_predict(model, x[train], y[train]) - y[train]).std()
    error = model.fit(x[train], y[train]).predict(x[test]) - y[test]
    nll = 0.5 * (error / deviation) ** 2 + np.log(deviation) + 0.5 * np.log(2 * np.pi)
    return _row(y, nll, error, abs(error) < 1.645 * deviation) | {
        "seconds_fit": time.process_time() - start,
        "best": "",
    }


def _row(y: Any, nll: Any, error: Any, inside: Any) -> dict[str, Any]:
    scale = y.std()
    return {
        "nll": float(nll.mean() - np.log(scale)), "rmse": float(np.sqrt((error**2).mean()) / scale),
        "coverage90": float(inside.mean()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, "boosting"], default=["quick", "standard", "boosting"])
    parser.add_argument("--problems", nargs="+", choices=[*PROBLEMS, *MORE], default=[*PROBLEMS, *MORE])
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--output", type=Path, default=Path("results/chosen_automatic.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ledger = Ledger(arguments.output, command="python benchmarks/choose_automatic.py", seed=0)
    problems: dict[str, Callable[[], Table]] = {**PROBLEMS, **MORE}
    for name, split, way in product(arguments.problems, range(arguments.splits), arguments.ways):
        key = {"problem": name, "split": split, "way": way}
        if ledger.has(**key):
            continue
        x, y = problems[name]()
        order = np.random.default_rng(split).permutation(len(y))
        n_train = round(0.9 * len(y))
        score = score_boosting if way == "boosting" else score_ours
        row = key | score(x, y, order[:n_train], order[n_train:], WAYS.get(way, {}), split)
        ledger.add([row], seconds=row["seconds_fit"])
        print(*(round(v, 3) if isinstance(v, float) else v for v in row.values()), flush=True)


if __name__ == "__main__":
    main()
