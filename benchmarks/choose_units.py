"""Which hidden units suit which problem, on problems that are none of the paper's -> results/chosen_units.json.

    python benchmarks/choose_units.py

Two layers of 100 units that predict mean and noise: ReLU, SiLU, and SiLU whose first weights start out twice as large
(`Member.spread`), at two dropout rates, for 320 and 1,500 steps. Three networks each hold out a fifth of the rows of a
problem of choose_automatic.py, pick their epoch by it and are scored by it: NLL a row in deviations of the target,
the better of the two rates. What is in the output is not computed again.
"""

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch
from choose_automatic import MORE
from choose_defaults import PROBLEMS, Table

from bbalpha.estimators.choices import UNITS
from bbalpha.estimators.dealing import deal
from bbalpha.estimators.race import batch_of
from bbalpha.experiments.results import Ledger
from bbalpha.training.population import Member, fit_population

STEPS, RATES, FOLDS, LOOKS = (320, 1500), (1 / 256, 5 / 256), 3, 20


def sine() -> Table:
    """Two waves from 80 points."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-3, 3, (80, 1))
    return x, np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=80)


CHOSEN = ("borehole", "circuit", "friedman1", "friedman3", "diabetes", "uneven")
TABLES: dict[str, Callable[[], Table]] = {"sine": sine, **{k: {**PROBLEMS, **MORE}[k] for k in CHOSEN}}


def score(table: Table, activation: str, spread: float, steps: int) -> float:
    """NLL a row of held-out rows, at the better of the rates."""
    x, y = table
    y = (y - y.mean()) / y.std()
    folds = deal(len(y), 5, 0)[:FOLDS]
    members = [
        Member(np.setdiff1d(np.arange(len(y)), held).tolist(), held.tolist(), dropout=rate, spread=spread, seed=i)
        for (i, held), rate in product(enumerate(folds), RATES)
    ]
    n_rows = len(members[0].train)
    batch = batch_of(n_rows)
    rows = min(n_rows, max(batch, steps * batch // LOOKS))
    epochs = max(1, round(steps * batch / rows))
    found = fit_population(
        x, y, members, epochs=epochs, hidden_layer_sizes=(100, 100), likelihood="heteroscedastic",
        activation=activation, n_passes=4, batch_size=batch, patience=max(5, epochs // 5), epoch_rows=rows,
    )  # fmt: skip
    return float(found.nll.nan_to_num(nan=torch.inf).amin(0).view(FOLDS, -1).mean(0).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--output", type=Path, default=Path("results/chosen_units.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    ledger = Ledger(given.output, command="python benchmarks/choose_units.py", seed=0)
    for problem, steps, (activation, spread) in product(given.problems, STEPS, UNITS):
        key = {"problem": problem, "steps": steps, "activation": activation, "spread": spread}
        if not ledger.has(**key):
            row = key | {"nll": score(TABLES[problem](), activation, spread, steps)}
            ledger.add([row], seconds=0.0)
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
