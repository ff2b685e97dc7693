"""One row through an estimator, beside the passes of its networks -> results/one_row.json.

    python benchmarks/one_row.py

Unit: `bbalpha.sample` of each network in double precision with shared masks, planned before, one after the other. All
ways take turns, round after round, in one process and one thread, by the time that the processor worked for them: a few
milliseconds are soon doubled by a neighbour. The ratio of the minima is reported and the ratio of the medians beside.
Another tree is measured by PYTHONPATH=<tree>/src and --out.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

import bbalpha
from bbalpha.experiments import results


@dataclass(frozen=True)
class Config:
    rows: int = 200
    features: int = 8
    epochs: int = 4
    rounds: int = 300
    seed: int = 0


def run(config: Config) -> list[dict[str, object]]:
    rng = np.random.RandomState(config.seed)
    X = rng.normal(size=(config.rows, config.features))
    y = X[:, 0] + 0.1 * rng.normal(size=len(X))
    settings = {"epochs": config.epochs, "random_state": config.seed, "hidden_layer_sizes": (50,)}
    kinds = {
        "BBAlphaRegressor": (bbalpha.BBAlphaRegressor(noise="constant", **settings), y),
        "BBAlphaRegressor, heteroscedastic": (bbalpha.BBAlphaRegressor(noise="heteroscedastic", **settings), y),
        "BBAlphaClassifier": (bbalpha.BBAlphaClassifier(**settings), y > 0),
    }
    found = []
    for name, (model, target) in kinds.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # so few epochs are few
            model.fit(X, target)
        times = interleaved({"the passes alone": passes(model, X[:1]), name: predict(model, X[:1])}, config.rounds)
        unit = times["the passes alone"]
        shared = {"work": f"predict 1 row by {len(model.networks_)} networks", "n_passes": 100, "batch": 1}
        found += [
            shared
            | {
                "way": way,
                "ratio": round(min(t) / min(unit), 2),
                "ratio_median": round(statistics.median(t) / statistics.median(unit), 2),
                "ms": round(1e3 * min(t), 2),
            }
            for way, t in times.items()
        ]
    return found


def passes(model: bbalpha.BBAlphaRegressor, X: np.ndarray) -> Callable[[], None]:
    """What cannot be saved: the passes of each network."""
    x = torch.as_tensor((X - model.x_mean_) / model.x_scale_)
    networks = [copy.deepcopy(network).double() for network in model.networks_]
    n_passes = -(-model.n_predict_passes // len(networks))

    def all_networks() -> None:
        with torch.no_grad():
            for i, network in enumerate(networks):
                bbalpha.sample(network, x, n_passes, masks="shared", seed=model.seed_ + i)

    return all_networks


def predict(model: bbalpha.BBAlphaRegressor, X: np.ndarray) -> Callable[[], None]:
    """What a caller gets at: mean and deviation, or probabilities."""
    if hasattr(model, "predict_proba"):
        return lambda: model.predict_proba(X)
    return lambda: model.predict(X, return_std=True)


def interleaved(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round, after a few to warm up."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(rounds + 5):
        for way, call in ways.items():
            start = time.process_time()
            call()
            if i >= 5:
                times[way].append(time.process_time() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=Config.rounds)
    parser.add_argument("--out", type=Path, default=Path("results/one_row.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    start, config = time.perf_counter(), Config(rounds=args.rounds)
    rows = run(config)
    for row in rows:
        print(
            f"{row['work']:32} {row['way']:36} {row['ms']:7.2f} ms  {row['ratio']:6.2f} (median {row['ratio_median']})"
        )
    command = f"python benchmarks/one_row.py --rounds {args.rounds}"
    results.write(args.out, command=command, seed=config.seed, seconds=time.perf_counter() - start, rows=rows)


if __name__ == "__main__":
    main()
