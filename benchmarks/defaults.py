"""Defaults without tuning, on the published UCI splits -> results/defaults/*.json.

    BBALPHA_DATA=... python benchmarks/defaults.py

"bbalpha": the paper's network, BBAlphaRegressor(hidden_layer_sizes=(50,), noise="constant"), at alpha 0, 0.5 and 1;
those of all splits of a data set are trained as one population, which gives the networks that separate fits give.
Beside them scikit-learn's MLP, random forest and gradient boosting with their defaults (the MLP on standardised inputs
and targets), made Gaussian with the variance of their residuals under 5-fold cross-validation inside the training rows.
What is in the files is not computed again: the command can be stopped and started, and run twice for different sets.
"""

import argparse
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import GradientBoostingRegressor, RandomForestRegressor
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from bbalpha.data import UCIData, load_uci
from bbalpha.estimators import BBAlphaRegressor
from bbalpha.estimators.choices import best_candidate, candidates, train_together
from bbalpha.experiments.results import Ledger
from bbalpha.experiments.scoring import scores
from bbalpha.prediction import predict_regression
from bbalpha.predictive import RegressionPrediction
from bbalpha.training.population import Population

SETS = ("boston", "yacht", "energy", "concrete", "wine", "kin8nm", "power", "naval", "protein")
ALPHAS = (0.0, 0.5, 1.0)
BASELINES = ("nn", "forest", "gbm")


def baseline(name: str, seed: int) -> Any:
    if name == "nn":
        return TransformedTargetRegressor(
            make_pipeline(StandardScaler(), MLPRegressor(random_state=seed)), transformer=StandardScaler()
        )
    return {"forest": RandomForestRegressor, "gbm": GradientBoostingRegressor}[name](random_state=seed)


def score_baseline(data: UCIData, split: int, method: str) -> dict[str, float]:
    train, test = data.splits[split]
    X, y = data.X[train], data.y[train]
    model = baseline(method, split)
    folds = KFold(5, shuffle=True, random_state=split)
    variance = float(np.mean((cross_val_predict(model, X, y, cv=folds) - y) ** 2))
    mean = torch.as_tensor(model.fit(X, y).predict(data.X[test]))
    target = torch.as_tensor(data.y[test])
    log_prob = -0.5 * (math.log(2 * math.pi * variance) + (target - mean) ** 2 / variance)
    half = 1.6449 * variance**0.5
    return scores(log_prob, mean, mean - half, mean + half, target)


def score_population(data: UCIData, jobs: list[tuple[int, float]]) -> list[dict[str, float]]:
    """The scores of BBAlphaRegressor(alpha) on split, for every (split, alpha)."""
    defaults = BBAlphaRegressor(hidden_layer_sizes=(50,), noise="constant")
    members = [candidates(defaults, data.splits[split][0], 100 * split, alpha=alpha) for split, alpha in jobs]
    shape = members[0].shape  # networks, pairs of rates
    order = np.stack(members, -1)  # those that draw the same masks, which differ in alpha, side by side
    population = train_together(defaults, data.X, data.y, order.ravel().tolist(), "gaussian")
    rows = []
    for j, (split, _) in enumerate(jobs):
        own = torch.arange(order.size).view(order.shape)[..., j]
        chosen = own.flatten()[best_candidate(population.nll[:, own.flatten()], shape)].tolist()
        target = torch.as_tensor(data.y[data.splits[split][1]])
        prediction = predicted(population, chosen, data.X[data.splits[split][1]], defaults.n_predict_passes)
        low, high = prediction.interval(0.9)
        log_prob = prediction.log_prob(target[:, None])
        values = scores(log_prob, prediction.mean[:, 0], low[:, 0], high[:, 0], target)
        best = population.members[chosen[0]]
        rates = {"dropout": best.dropout, "input_dropout": best.input_dropout, "networks": len(chosen)}
        rows.append(values | rates | {"best_epoch": float(population.best_epoch[chosen].double().mean())})
    return rows


def predicted(population: Population, chosen: list[int], x: Any, n_passes: int) -> RegressionPrediction:
    """The mixture of some networks, as the estimator makes it."""
    outputs, precisions = [], []
    for i in chosen:
        inputs = torch.as_tensor((x - population.x_mean[i].numpy()) / population.x_scale[i].numpy())
        tau = float(population.log_precision[i].exp())
        p = predict_regression(
            population.network(i).double(), inputs, n_passes=-(-n_passes // len(chosen)), masks="shared",
            precision=tau, seed=population.members[i].seed, progress=False,
        ).rescaled(float(population.y_scale[i]), float(population.y_mean[i]))  # fmt: skip
        outputs.append(p.outputs)
        precisions.append(torch.as_tensor(p.precision).expand_as(p.outputs))
    return RegressionPrediction(torch.cat(outputs), torch.cat(precisions))


def run(folder: Path, dataset: str, method: str, splits: int, block: int) -> None:
    """Add what is missing of a method on a data set; networks in blocks of splits, so that little is lost by a cut."""
    data = load_uci(dataset)
    path = folder / f"{dataset}.{'bbalpha' if method == 'bbalpha' else 'sklearn'}.json"
    ledger = Ledger(path, command="python benchmarks/defaults.py", seed=0)
    chosen = range(min(splits, len(data.splits)))
    alphas = ALPHAS if method == "bbalpha" else (None,)
    missing = [(s, a) for s in chosen for a in alphas if not ledger.has(method=method, alpha=a, split=s)]
    size = block * len(ALPHAS) if method == "bbalpha" else 1
    for i in tqdm(range(0, len(missing), size), desc=f"{dataset} {method}", disable=None):
        jobs = missing[i : i + size]
        start = time.perf_counter()
        if method == "bbalpha":
            values = score_population(data, jobs)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the MLP's 200 iterations are often too few for it
                values = [score_baseline(data, jobs[0][0], method)]
        head = {"dataset": dataset, "method": method}
        rows = [head | {"alpha": a, "split": s} | v for (s, a), v in zip(jobs, values, strict=True)]
        ledger.add(rows, seconds=time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/defaults"), help="folder")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--block", type=int, default=20, help="splits whose networks are trained as one")
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--methods", nargs="+", default=("bbalpha", *BASELINES), choices=("bbalpha", *BASELINES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for dataset in arguments.sets:
        for method in arguments.methods:
            run(arguments.output, dataset, method, arguments.splits, arguments.block)


if __name__ == "__main__":
    main()
