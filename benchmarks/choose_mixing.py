"""How far the weights of a mixture should trust few held-out rows -> results/mixing_chosen.json

    python benchmarks/choose_mixing.py                   # about ten minutes on a quiet core; resumable

Made-up problems with classes and with numbers, none of them in `versus.py`, each drawn three times: a few rows to fit
and 2,000 to score. The finalists of a fit are mixed by weights whose prior is worth so many rows, and each mixture is
scored: `stacked(prior=...)` has the prior that does best here.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor, race
from bbalpha.estimators.mixing import stacked
from bbalpha.experiments.results import Ledger

COMMAND = "python benchmarks/choose_mixing.py"
SCORED, SPLITS = 2000, 3  # rows to score, draws of a problem
PRIORS = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 1e6)
Rng = np.random.Generator
Table = tuple[pd.DataFrame, np.ndarray]


def drawn(z: np.ndarray, rng: Rng) -> np.ndarray:
    """A class for each row of logits (N, C)."""
    p = np.exp(z - z.max(1, keepdims=True))
    return ((p / p.sum(1, keepdims=True)).cumsum(1) > rng.random((len(z), 1))).argmax(1)


def line(n: int, rng: Rng) -> Table:
    """A logistic line of three columns."""
    x = rng.standard_normal((n, 3))
    return pd.DataFrame(x), drawn(np.c_[np.zeros(n), x @ [1.5, 0.8, 0.0] - 0.5], rng)


def wide(n: int, rng: Rng) -> Table:
    """A logistic line of forty columns."""
    x = rng.standard_normal((n, 40))
    return pd.DataFrame(x), drawn(x @ (np.random.default_rng(1).standard_normal((40, 3)) * 0.4), rng)


def brands(n: int, rng: Rng) -> Table:
    """Words of many levels that nearly tell the class, beside numbers."""
    brand, x = rng.zipf(1.3, n) % 40, rng.standard_normal((n, 5))
    home = np.random.default_rng(2).integers(0, 3, 40)[brand]
    y = np.where(rng.random(n) < 0.03, drawn(x[:, :3], rng), home)
    return pd.DataFrame(x + 0.7 * home[:, None]).assign(brand=[f"brand {b}" for b in brand]), y


def clouds(n: int, rng: Rng) -> Table:
    """Five clouds that touch."""
    y = rng.integers(0, 5, n)
    return pd.DataFrame((np.random.default_rng(3).standard_normal((5, 6)) * 1.5)[y] + rng.standard_normal((n, 6))), y


def bend(n: int, rng: Rng) -> Table:
    """A number that bends, with noise that grows."""
    x = rng.uniform(-2, 2, (n, 3))
    return pd.DataFrame(x), np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + np.exp(x[:, 0] - 1.5) * rng.standard_normal(n)


def slope(n: int, rng: Rng) -> Table:
    """A number that is linear in ten columns, with outliers."""
    x = rng.standard_normal((n, 10))
    return pd.DataFrame(x), x @ np.linspace(1, 0, 10) + 0.5 * rng.standard_t(3, n)


PROBLEMS: dict[str, tuple[Callable[[int, Rng], Table], int]] = {
    "line": (line, 30), "wide": (wide, 150), "brands": (brands, 300), "clouds": (clouds, 150), "bend": (bend, 200),
    "slope": (slope, 60),
}  # fmt: skip


def losses(name: str, split: int) -> dict[str, float]:
    """The loss of the scored rows under each prior."""
    make, n = PROBLEMS[name]
    table, y = make(n + SCORED, np.random.default_rng(split))
    table.columns = table.columns.astype(str)
    model: Any = (BBAlphaClassifier if y.dtype.kind == "i" else BBAlphaRegressor)(random_state=split)
    values, owner = fitted_evenly(model, table[:n], y[:n])
    rest, target = table[n:], y[n:]
    if isinstance(model, BBAlphaClassifier):
        known = np.isin(target, model.classes_)
        rest, target = rest[known], target[known]
    found = {}
    for prior in PRIORS:
        by_network = stacked(values, prior=prior)[owner]
        model.shares_ = by_network / by_network.sum()
        found[f"prior {prior:g}"] = -float(np.mean(scores(model, rest, target)))
    return found


def fitted_evenly(model: Any, X: pd.DataFrame, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Held-out log-densities of the finalists (C, N), all of whom the model keeps, and whose each network is."""
    seen: list[np.ndarray] = []
    owners: list[race.Candidate] = []
    mix, run = race.stacked, race.Race.run

    def even(values: np.ndarray, weight: Any = None) -> np.ndarray:
        seen.append(values)
        return np.full(len(values), 1 / len(values))

    def watched(self: race.Race, *args: Any) -> Any:
        experts, shares = run(self, *args)
        owners.extend(e.candidate for e in experts)
        finalists.extend(t.candidate for t in sorted(self.trials, key=lambda t: t.nll) if t.weight)
        return experts, shares

    finalists: list[race.Candidate] = []
    race.stacked, race.Race.run = even, watched  # type: ignore[assignment,method-assign]
    try:
        model.fit(X, y)
    finally:
        race.stacked, race.Race.run = mix, run  # type: ignore[method-assign]
    return seen[0], np.array([finalists.index(c) for c in owners])


def scores(model: Any, X: pd.DataFrame, y: np.ndarray) -> np.ndarray:
    """Log-density, or log-probability of the class, of each row."""
    if isinstance(model, BBAlphaRegressor):
        return np.asarray(model.log_prob(X, y))
    return np.asarray(model.predict_log_proba(X))[np.arange(len(y)), np.searchsorted(model.classes_, y)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/mixing_chosen.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kept = Ledger(args.out, command=COMMAND, seed=0)
    for split in range(SPLITS):
        for name in PROBLEMS:
            if not kept.has(problem=name, split=split):
                start = time.perf_counter()
                row = {"problem": name, "rows": PROBLEMS[name][1], "split": split} | losses(name, split)
                kept.add([row], seconds=time.perf_counter() - start)
                print(*(f"{v:.4f}" if isinstance(v, float) else v for v in row.values()), flush=True)


if __name__ == "__main__":
    main()
