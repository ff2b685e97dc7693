"""Speed of training, as ratios taken in one run -> results/fit.json.

    python benchmarks/fit.py

"population": 60 networks of the boston size (20 splits x 3 alphas, K = 10) trained together, beside 60 separate
calls of `fit` (timed on a few of them). "regressor": BBAlphaRegressor.fit on 10,000 x 10, K = 10, beside scikit-learn's
MLPRegressor of the same size, batch and epochs. One thread; ways are interleaved and the minimum of each is taken.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.neural_network import MLPRegressor

from bbalpha.estimators import BBAlphaRegressor
from bbalpha.experiments import results
from bbalpha.networks import mlp
from bbalpha.objectives import GaussianNLL
from bbalpha.training import fit
from bbalpha.training.population import Member, fit_population


@dataclass(frozen=True)
class Config:
    splits: int = 20
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0)
    rows: int = 455
    features: int = 13
    n_passes: int = 10
    batch: int = 32
    epochs: int = 4
    separate: int = 6  # of the 60, timed one after the other
    regressor_rows: int = 10_000
    regressor_features: int = 10
    regressor_batch: int = 200
    regressor_epochs: int = 4
    repeats: int = 5
    seed: int = 0


def run(config: Config) -> list[dict[str, object]]:
    return [*population(config), *regressor(config)]


def population(config: Config) -> list[dict[str, object]]:
    rng = np.random.RandomState(config.seed)
    X = rng.normal(size=(config.rows + 51, config.features))
    y = X[:, 0] + rng.normal(size=len(X))
    splits = [rng.permutation(len(X))[: config.rows] for _ in range(config.splits)]
    members = [Member(train=torch.as_tensor(s), alpha=a, seed=i) for i, s in enumerate(splits) for a in config.alphas]
    x32, y32 = torch.as_tensor(X, dtype=torch.float32), torch.as_tensor(y, dtype=torch.float32)[:, None]
    options = {"epochs": config.epochs, "n_passes": config.n_passes, "batch_size": config.batch}

    def together() -> None:
        fit_population(X, y, members, **options)

    def separately() -> None:
        for member in members[: config.separate]:
            net = mlp([config.features, 50, 1], dropout=member.dropout, input_dropout=0.0)
            data = (x32[member.train], y32[member.train])
            objective = GaussianNLL(member.alpha)
            fit(net, data, objective=objective, length_scale=member.length_scale, progress=False, seed=0, **options)

    both, alone = best({"together": together, "separately": separately}, config.repeats)
    alone *= len(members) / config.separate
    shared = {"work": "60 networks of the boston size", "n_passes": config.n_passes, "batch": config.batch}
    return [
        shared | {"way": "population", "seconds": both, "ratio": both / alone},
        shared | {"way": "separate fits", "seconds": alone, "ratio": 1.0},
    ]


def regressor(config: Config) -> list[dict[str, object]]:
    rng = np.random.RandomState(config.seed)
    X = rng.normal(size=(config.regressor_rows, config.regressor_features))
    y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=len(X))
    size = {"hidden_layer_sizes": (50,), "batch_size": config.regressor_batch, "random_state": config.seed}

    def ours(networks: int) -> None:  # with what it holds out by default
        settings = {"n_passes": config.n_passes, "epochs": config.regressor_epochs, "n_ensemble": networks}
        settings |= {"noise": "constant"}
        BBAlphaRegressor(**settings, **size).fit(X, y)

    def theirs() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that so few epochs are few
            MLPRegressor(max_iter=config.regressor_epochs, tol=0.0, n_iter_no_change=10**6, **size).fit(X, y)

    ways = {"one": lambda: ours(1), "five": lambda: ours(5), "theirs": theirs}
    one, five, mlp_time = best(ways, config.repeats)
    shared = {"work": "fit 10,000 x 10", "batch": config.regressor_batch}
    return [
        shared | {"way": "BBAlphaRegressor", "n_passes": config.n_passes, "seconds": one, "ratio": one / mlp_time},
        shared
        | {
            "way": "BBAlphaRegressor, five networks",
            "n_passes": config.n_passes,
            "seconds": five,
            "ratio": five / mlp_time,
        },
        shared | {"way": "MLPRegressor", "n_passes": 1, "seconds": mlp_time, "ratio": 1.0},
    ]


def best(ways: dict[str, Callable[[], None]], repeats: int) -> list[float]:
    """The least seconds of every way, interleaved after one round to warm up."""
    least = dict.fromkeys(ways, float("inf"))
    for i in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if i:
                least[name] = min(least[name], time.perf_counter() - start)
    return list(least.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/fit.json"))
    parser.add_argument("--repeats", type=int, default=Config.repeats)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = Config(repeats=arguments.repeats)
    start = time.time()
    rows = run(config)
    for row in rows:
        print(f"{row['work']:32} {row['way']:18} {row['seconds']:8.3f} s  ratio {row['ratio']:.3f}")
    command = "python " + " ".join(["benchmarks/fit.py", *sys.argv[1:]])
    results.write(arguments.output, command=command, seed=config.seed, seconds=time.time() - start, rows=rows)


if __name__ == "__main__":
    main()
