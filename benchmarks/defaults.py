"""Defaults without tuning, on the published UCI splits -> results/defaults.json.

    BBALPHA_DATA=... python benchmarks/defaults.py

"bbalpha": the networks of BBAlphaRegressor() at alpha 0, 0.5 and 1 with nothing else set; those of all splits of a data
set are trained as one population, which gives the networks that separate fits give. Beside them scikit-learn's MLP,
random forest and gradient boosting with their defaults (the MLP on standardised inputs and targets), made Gaussian
with the variance of their residuals under 5-fold cross-validation inside the training rows. What is in the output
is not computed again: the command can be stopped and started, with more splits too.
"""

import argparse
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bbalpha.checkpoint import versions
from bbalpha.estimators import BBAlphaRegressor
from bbalpha.estimators_base import default_batch_size, default_epochs, default_input_dropout
from bbalpha.population import Member, fit_population
from bbalpha.prediction import predict_regression

SETS = ("boston", "concrete", "energy", "wine", "yacht", "kin8nm", "power", "naval", "protein")
ALPHAS = (0.0, 0.5, 1.0)
BASELINES = ("nn", "forest", "gbm")


def baseline(name: str, seed: int) -> Any:
    if name == "nn":
        return TransformedTargetRegressor(
            make_pipeline(StandardScaler(), MLPRegressor(random_state=seed)), transformer=StandardScaler()
        )
    return {"forest": RandomForestRegressor, "gbm": GradientBoostingRegressor}[name](random_state=seed)


def score_baseline(data: Any, split: int, method: str) -> dict[str, float]:
    test = data["test_mask"][split]
    X, y, X_test, y_test = data["X"][~test], data["y"][~test], data["X"][test], data["y"][test]
    model = baseline(method, split)
    folds = KFold(5, shuffle=True, random_state=split)
    variance = float(np.mean((cross_val_predict(model, X, y, cv=folds) - y) ** 2))
    mean = model.fit(X, y).predict(X_test)
    nll = 0.5 * (math.log(2 * math.pi * variance) + np.mean((y_test - mean) ** 2) / variance)
    return scores(nll, mean, mean - 1.645 * variance**0.5, mean + 1.645 * variance**0.5, y_test)


def score_population(data: Any, jobs: list[tuple[int, float]]) -> list[dict[str, float]]:
    """The scores of BBAlphaRegressor(alpha) on split, for every (split, alpha)."""
    X, y, masks = data["X"], data["y"], data["test_mask"]
    defaults = BBAlphaRegressor()
    n_rows = int((~masks[0]).sum())
    batch_size = default_batch_size(n_rows)
    members = [
        Member(
            train=torch.as_tensor(np.flatnonzero(~masks[split])), alpha=alpha, dropout=defaults.dropout, seed=split,
            input_dropout=default_input_dropout(n_rows, defaults.dropout), length_scale=defaults.length_scale,
            learning_rate=defaults.learning_rate,
        )
        for split, alpha in jobs
    ]  # fmt: skip
    population = fit_population(
        X, y, members, epochs=default_epochs(n_rows, batch_size), hidden_layer_sizes=defaults.hidden_layer_sizes,
        n_passes=defaults.n_passes, batch_size=batch_size,
    )  # fmt: skip
    rows = []
    for i, (split, _) in enumerate(jobs):
        x = (X[masks[split]] - population.x_mean[i].numpy()) / population.x_scale[i].numpy()
        prediction = predict_regression(
            population.network(i).double(), torch.as_tensor(x), n_passes=defaults.n_predict_passes, masks="shared",
            precision=float(population.log_precision[i].exp()), seed=split,
        ).rescaled(float(population.y_scale[i]), float(population.y_mean[i]))  # fmt: skip
        low, high = (t.numpy()[:, 0] for t in prediction.interval(0.9))
        y_test = y[masks[split]]
        nll = -float(prediction.log_prob(torch.as_tensor(y_test)[:, None]).mean())
        rows.append(scores(nll, prediction.mean.numpy()[:, 0], low, high, y_test))
    return rows


def scores(nll: float, mean: Any, low: Any, high: Any, y: Any) -> dict[str, float]:
    inside = np.mean((low <= y) & (y <= high))
    return {"nll": float(nll), "rmse": float(np.sqrt(np.mean((mean - y) ** 2))), "coverage90": float(inside)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/defaults.json"))
    parser.add_argument("--splits", type=int, default=20, help="of the sets of up to 2,000 rows")
    parser.add_argument("--large-splits", type=int, default=20, help="of the larger ones")
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = os.environ.get("BBALPHA_DATA")
    if not folder:
        parser.error("BBALPHA_DATA must name the folder of data sets.")
    result: dict[str, Any] = {"rows": [], "seconds": 0.0}
    if arguments.output.exists():
        result = json.loads(arguments.output.read_text())
    for dataset in arguments.sets:
        data = dict(np.load(Path(folder) / "uci" / f"{dataset}.npz", allow_pickle=False))
        splits = arguments.splits if len(data["y"]) <= 2000 else arguments.large_splits
        extend(arguments.output, result, dataset, data, range(min(splits, len(data["test_mask"]))))
        summary(dataset, result["rows"])


def extend(path: Path, result: dict[str, Any], dataset: str, data: Any, splits: range) -> None:
    """Add the rows of a data set that are not there yet."""
    known = {(r["method"], r["alpha"], r["split"]) for r in result["rows"] if r["dataset"] == dataset}

    def add(method: str, alpha: float | None, split: int, values: dict[str, float], seconds: float) -> None:
        row = {"dataset": dataset, "method": method, "alpha": alpha, "split": split}
        result["rows"].append(row | values | {"seconds": seconds})
        result["seconds"] += seconds

    start = time.perf_counter()
    jobs = [(split, alpha) for split in splits for alpha in ALPHAS if ("bbalpha", alpha, split) not in known]
    if jobs:
        values = score_population(data, jobs)
        seconds = (time.perf_counter() - start) / len(jobs)
        for (split, alpha), value in zip(jobs, values, strict=True):
            add("bbalpha", alpha, split, value, seconds)
        write(path, result)
    for split in splits:
        for method in BASELINES:
            if (method, None, split) not in known:
                start = time.perf_counter()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the MLP's 200 iterations are often too few for it
                    value = score_baseline(data, split, method)
                add(method, None, split, value, time.perf_counter() - start)
                write(path, result)


def write(path: Path, result: dict[str, Any]) -> None:
    head = {
        "command": "python " + " ".join(["benchmarks/defaults.py", *sys.argv[1:]]),
        "versions": versions() | {"scikit-learn": sklearn.__version__},
        "seed": "the number of the split",
        "seconds": result["seconds"],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(head | {"rows": result["rows"]}, indent=1) + "\n")
    fresh.rename(path)


def summary(dataset: str, rows: list[dict[str, Any]]) -> None:
    """Print mean test NLL and its standard error, by method."""
    print(dataset)
    for method, alpha in dict.fromkeys((r["method"], r["alpha"]) for r in rows):
        nll = [r["nll"] for r in rows if (r["dataset"], r["method"], r["alpha"]) == (dataset, method, alpha)]
        error = np.std(nll) / max(len(nll) - 1, 1) ** 0.5
        print(
            f"  {method:8} {'' if alpha is None else alpha!s:4} {np.mean(nll):8.3f} +- {error:.3f}  ({len(nll)} splits)"
        )


if __name__ == "__main__":
    main()
