"""Coverage and width of 90% conformal intervals on the published splits -> results/conformal.json.

    BBALPHA_DATA=... python benchmarks/conformal.py

Every split: a quarter of the training rows is held out for calibration, a small net that predicts its own noise is
trained on the rest, and three scores are compared on the test rows. "absolute" gives intervals of constant width;
"std" and "quantile" are scored by the predictive distribution. Same net, same calibration rows for all three.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import bbalpha
from bbalpha import metrics
from bbalpha.calibration import conformal_intervals
from bbalpha.experiments import results


@dataclass(frozen=True)
class Config:
    """One setting for all data sets, chosen on training rows of a few splits."""

    datasets: tuple[str, ...] = ("boston", "concrete", "wine")
    splits: int = 20
    coverage: float = 0.9
    alpha: float = 0.5
    hidden: int = 50
    dropout: float = 0.1
    length_scale: float = 3.0
    held_out: float = 0.25
    n_passes: int = 10
    n_predict_passes: int = 100
    steps: int = 500
    batch: int = 128
    rate: float = 5e-3


class TwoHeads(nn.Module):
    """A net that returns (mean, log_precision)."""

    def __init__(self, n_features: int, hidden: int, dropout: float) -> None:
        super().__init__()
        layers = [nn.Linear(n_features, hidden), nn.ReLU(), nn.Dropout(dropout)]
        layers += [nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 2)]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_precision = self.net(x).chunk(2, -1)
        return mean, log_precision.clamp(-6, 6)


def train(x: Tensor, y: Tensor, config: Config) -> TwoHeads:
    """The net fitted to standardised rows x (N, F), y (N, 1), by a plain loop."""
    model = TwoHeads(x.shape[1], config.hidden, config.dropout)
    objective = bbalpha.GaussianNLL(config.alpha, precision="predicted")
    groups = bbalpha.param_groups(model, length_scale=config.length_scale, n_data=len(x))
    optimizer = torch.optim.Adam(groups, lr=config.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    for _ in range(config.steps):
        rows = torch.randint(len(x), (config.batch,))
        loss = objective(bbalpha.sample(model, x[rows], config.n_passes), y[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
    return model


def evaluate(X: Tensor, y: Tensor, test: Tensor, config: Config) -> list[dict[str, float | str | int]]:
    """A record for every score, from training rows ~test and test rows (N,)."""
    order = torch.nonzero(~test).squeeze(1)
    order = order[torch.randperm(len(order))]
    held_out = round(config.held_out * len(order))
    calibration, training, new = order[:held_out], order[held_out:], torch.nonzero(test).squeeze(1)
    mean, std = X[training].mean(0), X[training].std(0).clamp_min(1e-6)
    inputs = ((X - mean) / std).float()
    centre, scale = y[training].mean(), y[training].std()
    model = train(inputs[training], ((y[training] - centre) / scale).float(), config)
    p_calibration, p_new = (
        bbalpha.predict_regression(
            model, inputs[rows], n_passes=config.n_predict_passes, precision="predicted", seed=0
        ).rescaled(float(scale), float(centre))
        for rows in (calibration, new)
    )
    records: list[dict[str, float | str | int]] = []
    for score in ("quantile", "std", "absolute"):
        guard = conformal_intervals(p_calibration, y[calibration].float(), coverage=config.coverage, score=score)
        low, high = guard.interval(p_new)
        covered = metrics.interval_coverage(low, high, y[new].float()).item()
        width = metrics.interval_width(low, high).item()
        records.append({"score": score, "coverage90": covered, "width": width, "n_calibration": held_out})
    return records


def run(config: Config, folder: str, seed: int = 0) -> list[dict[str, object]]:
    """Records of all data sets and splits."""
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for dataset in config.datasets:
        data = np.load(Path(folder) / "uci" / f"{dataset}.npz", allow_pickle=False)
        X, y = torch.from_numpy(data["X"]), torch.from_numpy(data["y"])[:, None]
        for split in range(min(config.splits, len(data["test_mask"]))):
            torch.manual_seed(seed + split)
            records = evaluate(X, y, torch.from_numpy(data["test_mask"][split]), config)
            rows += [
                {"dataset": dataset, "method": "bbalpha-het", "alpha": config.alpha, "split": split, **r}
                for r in records
            ]
        print(summary(rows, dataset), flush=True)
    return rows


def summary(rows: list[dict[str, object]], dataset: str) -> str:
    """Coverage and width of a data set, averaged over its splits."""
    parts = []
    for score in ("quantile", "std", "absolute"):
        own = [r for r in rows if r["dataset"] == dataset and r["score"] == score]
        coverage, width = (np.mean([r[k] for r in own]) for k in ("coverage90", "width"))
        parts.append(f"{score}: covers {coverage:.3f}, width {width:.3g}")
    return f"{dataset:10s} " + "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/conformal.json"))
    out: Path = parser.parse_args().out
    if "BBALPHA_DATA" not in os.environ:
        sys.exit("BBALPHA_DATA must name the folder of data sets")
    start = time.perf_counter()
    rows = run(Config(), os.environ["BBALPHA_DATA"])
    command = "python benchmarks/conformal.py"
    results.write(out, command=command, seed=0, seconds=time.perf_counter() - start, rows=rows)


if __name__ == "__main__":
    main()
