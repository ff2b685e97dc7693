"""How the defaults of BBAlphaRegressor were chosen -> results/chosen_defaults.json.

    python benchmarks/choose_defaults.py

On problems that are none of the paper's: tables that come with scikit-learn and simulators of the design-of-experiments
literature, each with its own number of rows and noise. Every candidate is trained on three random parts of each problem
and scored by the log-likelihood of the rest; nothing here ever sees a row of the UCI sets. What is in the output is not
computed again.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import datasets

from bbalpha.estimators.choices import RATES
from bbalpha.experiments.results import Ledger
from bbalpha.training.feed import order
from bbalpha.training.population import Member, fit_population

Table = tuple[NDArray[np.float64], NDArray[np.float64]]
Kind = tuple[float, float, float]  # rates at hidden units and inputs, l
PAIRS: list[Kind] = [(*pair, 1.0) for pair in RATES]
CANDIDATES: dict[tuple[int, float, int], list[Kind]] = {  # by steps, share of rows held out, and networks
    (2500, 0.0, 1): [PAIRS[0]],
    (8000, 0.1, 1): PAIRS,
    (4000, 0.1, 5): PAIRS,
    (4000, 0.2, 5): PAIRS,
}
SPLITS = 3


# ------------------------------------------------------------------------------ problems


def diabetes() -> Table:
    found = datasets.load_diabetes()
    return found.data, found.target


def alcohol() -> Table:
    """Alcohol of Italian wines from their other twelve measurements."""
    data = datasets.load_wine().data
    return data[:, 1:], data[:, 0]


def digits() -> Table:
    """The digit as a number, from 64 pixels."""
    found = datasets.load_digits()
    return found.data, found.target.astype(float)


def friedman(make: Callable[..., Table], rows: int, noise: float) -> Callable[[], Table]:
    def problem() -> Table:
        x, y = make(n_samples=rows, random_state=0)
        return x, y + noise * y.std() * np.random.default_rng(1).standard_normal(rows)

    return problem


def simulator(ranges: list[tuple[float, float]], f: Callable[..., NDArray[np.float64]], rows: int, noise: float):
    """Uniform inputs in `ranges`, `f` of the columns, and noise as a share of the deviation of f."""

    def problem() -> Table:
        rng = np.random.default_rng(0)
        low, high = np.array(ranges).T
        x = rng.uniform(low, high, (rows, len(ranges)))
        y = f(*x.T)
        return x, y + noise * y.std() * rng.standard_normal(rows)

    return problem


def borehole(rw, r, tu, hu, tl, hl, length, kw):
    log = np.log(r / rw)
    return 2 * np.pi * tu * (hu - hl) / (log * (1 + 2 * length * tu / (log * rw**2 * kw) + tu / tl))


def circuit(rb1, rb2, rf, rc1, rc2, beta):
    vb1, b = 12 * rb2 / (rb1 + rb2), beta * (rc2 + 9)
    return ((vb1 + 0.74) * b + 11.35 * rf + 0.74 * rf * b / rc1) / (b + rf)


def piston(m, s, v0, k, p0, ta, t0):
    a = p0 * s + 19.62 * m - k * v0 / s
    v = s / (2 * k) * (np.sqrt(a**2 + 4 * k * p0 * v0 / t0 * ta) - a)
    return 2 * np.pi * np.sqrt(m / (k + s**2 * p0 * v0 / t0 * ta / v**2))


BOREHOLE = [
    (0.05, 0.15),
    (100, 5e4),
    (63070, 115600),
    (990, 1110),
    (63.1, 116),
    (700, 820),
    (1120, 1680),
    (9855, 12045),
]
CIRCUIT = [(50, 150), (25, 70), (0.5, 3), (1.2, 2.5), (0.25, 1.2), (50, 300)]
PISTON = [(30, 60), (0.005, 0.02), (0.002, 0.01), (1000, 5000), (9e4, 1.1e5), (290, 296), (340, 360)]
PROBLEMS: dict[str, Callable[[], Table]] = {
    "diabetes": diabetes,
    "alcohol": alcohol,
    "digits": digits,
    "friedman1": friedman(datasets.make_friedman1, 500, 0.2),
    "friedman2": friedman(datasets.make_friedman2, 1000, 0.05),
    "friedman3": friedman(datasets.make_friedman3, 800, 0.1),
    "borehole": simulator(BOREHOLE, borehole, 400, 0.01),
    "circuit": simulator(CIRCUIT, circuit, 800, 0.02),
    "piston": simulator(PISTON, piston, 3000, 0.05),
    "friedman1 large": friedman(datasets.make_friedman1, 5000, 0.2),
}


# ------------------------------------------------------------------------------ the comparison


def score(table: Table, steps: int, held: float, networks: int, kinds: list[Kind]) -> list[dict[str, Any]]:
    """The NLL of rows left out, in units of the target's deviation, of every kind on every split.

    Each of several networks holds out rows of its own to pick its epoch. Where rows are held out there is a row more:
    of the pair of rates of RATES that these rows pick.
    """
    x, y = table
    n_train = round(0.9 * len(y))
    batch = 32 if n_train <= 2000 else 128
    epochs = max(1, round(steps * batch / n_train))
    n_held = round(held * n_train)
    parts = [np.random.default_rng(s).permutation(len(y)) for s in range(SPLITS)]
    members = []
    for s, i in product(range(SPLITS), range(networks)):
        seed = networks * s + i
        rows = parts[s][:n_train][order(n_train, seed=seed, epoch=-1)]
        members += [
            Member(
                train=rows[n_held:], validation=rows[:n_held] if held else None, seed=seed, dropout=hidden,
                input_dropout=inputs, length_scale=scale,
            )
            for hidden, inputs, scale in kinds
        ]  # fmt: skip
    population = fit_population(x, y, members, epochs=epochs, batch_size=batch, patience=max(1, epochs // 5))
    left = [parts[m.seed // networks][n_train:] for m in members]
    values = torch.stack(population.log_likelihood(x, y, left)).double()
    mixed = values.view(SPLITS, networks, len(kinds), -1).logsumexp(1) - np.log(networks)
    nll = -mixed.mean(-1) - np.log(y.std())  # (splits, kinds)
    rows = [
        {"split": s, "dropout": kind[0], "input_dropout": kind[1], "length_scale": kind[2], "nll": float(nll[s, k])}
        for s in range(SPLITS)
        for k, kind in enumerate(kinds)
    ]
    if held:
        best = population.nll.nan_to_num(nan=torch.inf).amin(0).view(SPLITS, networks, -1)
        picked = best.mean(1)[:, : len(RATES)].argmin(1)
        rows += [rows[s * len(kinds) + int(k)] | {"dropout": None} for s, k in enumerate(picked)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/chosen_defaults.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ledger = Ledger(arguments.output, command="python benchmarks/choose_defaults.py", seed=0)
    for (name, make), ((steps, held, networks), kinds) in product(PROBLEMS.items(), CANDIDATES.items()):
        key = {"problem": name, "steps": steps, "held_out": held, "networks": networks}
        if ledger.has(**key):
            continue
        start = time.perf_counter()
        rows = [key | row for row in score(make(), steps, held, networks, kinds)]
        ledger.add(rows, seconds=time.perf_counter() - start)
        print(*key.values(), [round(r["nll"], 3) for r in rows], round(ledger.seconds), flush=True)


if __name__ == "__main__":
    main()
