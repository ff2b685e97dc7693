"""Is the posterior right, where the right one is known? -> results/inference.json

    python benchmarks/inference.py            # one or two minutes on one core; resumable

Simulation-based calibration: weights are drawn from the prior, data from the weights, and q is fitted to the data by
the library as a user would call it. Where q is the posterior, the rank of the true weight among draws of q is uniform,
and intervals hold it as often as they say. Linear regression with a Gaussian q of independent weights: with orthogonal
columns q can be the posterior, with correlated ones it cannot. All data sets of a design are the outputs of one layer.

Then dropout networks on repeated data sets of a curve: how often intervals hold its values, and new targets.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import bbalpha
from bbalpha.experiments.results import Ledger, Row
from bbalpha.layers import GaussianLinear
from bbalpha.training import Member, fit_population

COMMAND = "python benchmarks/inference.py"
ALPHAS = (0.0, 0.5, 1.0)
CORRELATIONS = {"orthogonal": 0.0, "correlated": 0.9}  # of two columns
N, DRAWS, BINS, NOISE = 20, 99, 20, 0.5  # rows of a data set, draws of q, bins of their ranks, deviation of the noise
PASSES, STEPS, RATE = 50, 800, 0.05
COVERAGES = (0.5, 0.9)
ROWS, NETS_EPOCHS = 40, 300  # of the curve


# ------------------------------------------------------------------------------ a model whose posterior is known


def design(correlation: float) -> Tensor:
    """Two columns of mean square 1 with exactly this correlation (N, 2)."""
    columns, _ = torch.linalg.qr(torch.randn(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    other = correlation * columns[:, 0] + math.sqrt(1 - correlation**2) * columns[:, 1]
    return torch.stack((columns[:, 0], other), 1) * math.sqrt(N)


def simulated(x: Tensor, sets: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights from the prior (S, 2), targets of as many data sets (N, S), and new ones at the same rows."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(sets, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, len(x), sets, generator=generator, dtype=torch.float64)
    return weights, x @ weights.T + NOISE * noise[0], x @ weights.T + NOISE * noise[1]


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The posterior of the weights: means (S, 2), and the covariance of all data sets (2, 2)."""
    covariance = torch.linalg.inv(torch.eye(2, dtype=x.dtype) + x.T @ x / NOISE**2)
    return (covariance @ x.T @ y / NOISE**2).T, covariance


def fitted(x: Tensor, y: Tensor, alpha: float, *, steps: int, seed: int) -> GaussianLinear:
    """q for each of the data sets y (N, S): a row of weights of one layer, by the library's objective and prior."""
    x, y = x.float(), y.float()
    sets = y.shape[1]
    net = GaussianLinear(2, sets, bias=False, initial_std=0.2)
    with torch.no_grad():
        net.weight.zero_()
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        outputs = bbalpha.sample(net, x, PASSES, masks="shared", seed=seed * 1_000_000 + step)  # (K, N, S)
        each = outputs.flatten(1), y.flatten()  # every target is a data point
        nll = bbalpha.gaussian_nll(*each, alpha, precision=1 / NOISE**2, reduction="sum")
        loss = nll + bbalpha.prior_kl(net, length_scale=1.0, n_data=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def scores(net: GaussianLinear, x: Tensor, simulation: tuple[Tensor, Tensor, Tensor], seed: int) -> Row:
    """Ranks and coverage of the true weights, the deviation of q beside that of the posterior, and new targets."""
    weights, y, new = simulation
    with torch.no_grad():
        draws = bbalpha.sample(net, torch.eye(2), DRAWS, masks="shared", balanced=False, seed=seed)  # (L, 2, S)
        p = bbalpha.predict_regression(net, x.float(), n_passes=200, masks="shared", precision=1 / NOISE**2, seed=seed)
    ranks = (draws.double() < weights.T).sum(0).flatten()  # from 0 to L
    counts = np.bincount((ranks * BINS // (DRAWS + 1)).numpy(), minlength=BINS)
    mean, covariance = exact(x, y)
    deviation = covariance.diagonal().sqrt()
    at = stats.norm.cdf(((weights - net.weight.detach()) / net.std.detach()).double().numpy())
    found: Row = {f"coverage{c:.0%}"[:-1]: float((abs(at - 0.5) < c / 2).mean()) for c in COVERAGES}
    low, high = p.interval(0.9)
    return found | {
        "data_sets": len(weights), "ranks": " ".join(map(str, counts)),
        "uniform_p": float(stats.chisquare(counts).pvalue),
        "width": float((net.std.detach() / deviation).mean()),
        "off": float(((net.weight.detach() - mean) / deviation).abs().mean()),
        "coverage90_new": float(((low <= new) & (new <= high)).double().mean()),
    }  # fmt: skip


def factorised(correlation: float) -> float:
    """The deviation of the best q at alpha = 0 beside that of the posterior: 1 over the diagonal of its precision."""
    x = design(correlation)
    precision = torch.eye(2, dtype=x.dtype) + x.T @ x / NOISE**2
    return float((1 / precision.diagonal() / torch.linalg.inv(precision).diagonal()).sqrt().mean())


# ------------------------------------------------------------------------------ dropout networks


def curve(x: Tensor) -> Tensor:
    return torch.sin(2 * x)


def networks(alpha: float, sets: int, seed: int) -> Row:
    """Coverage of the values of a curve, and of new targets, by networks that were each fitted to a data set."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(sets, ROWS, 1, generator=generator) - 2
    y = curve(x) + 0.2 * torch.randn(sets, ROWS, 1, generator=generator)
    members = [
        Member(range(i * ROWS, (i + 1) * ROWS), alpha=alpha, dropout=0.05, length_scale=0.1, seed=seed + i)
        for i in range(sets)
    ]
    p = fit_population(x.flatten(0, 1), y.flatten(0, 1), members, epochs=NETS_EPOCHS, n_passes=10)
    grid = torch.linspace(-2, 2, 50)[:, None]
    inside = {"coverage90": 0.0, "coverage90_new": 0.0, "error": 0.0}
    for i in range(sets):
        scale, at = p.y_scale[i, 0, 0], p.y_mean[i, 0, 0]
        outputs = bbalpha.sample(p.network(i), ((grid - p.x_mean[i]) / p.x_scale[i]).float(), 200, seed=i).detach()
        f = outputs * scale + at  # (K, n, 1)
        low, high = f.quantile(0.05, 0), f.quantile(0.95, 0)
        own = bbalpha.predictive.RegressionPrediction(f, p.log_precision[i].exp() / scale**2)
        below, above = own.interval(0.9)
        new = curve(grid) + 0.2 * torch.randn(len(grid), 1, generator=generator)
        inside["coverage90"] += float(((low <= curve(grid)) & (curve(grid) <= high)).double().mean()) / sets
        inside["coverage90_new"] += float(((below <= new) & (new <= above)).double().mean()) / sets
        inside["error"] += float((own.mean - curve(grid)).square().mean().sqrt()) / sets
    return {"data_sets": sets, **inside}


# ------------------------------------------------------------------------------ all of it


def measure(kept: Ledger, *, sets: int, nets: int, steps: int = STEPS) -> None:
    """All designs and alphas that the results do not have yet."""
    for name, correlation in CORRELATIONS.items():
        x = design(correlation)
        simulation = simulated(x, sets, seed=1)
        for alpha in ALPHAS:
            if not kept.has(work=name, alpha=alpha):
                start = time.perf_counter()
                net = fitted(x, simulation[1], alpha, steps=steps, seed=2)
                row = {
                    "work": name,
                    "alpha": alpha,
                    **scores(net, x, simulation, seed=3),
                    "vi": factorised(correlation),
                }
                kept.add([row], seconds=time.perf_counter() - start)
    for alpha in ALPHAS:
        if nets and not kept.has(work="dropout", alpha=alpha):
            start = time.perf_counter()
            row = {"work": "dropout", "alpha": alpha, **networks(alpha, nets, seed=0)}
            kept.add([row], seconds=time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/inference.json"))
    parser.add_argument("--sets", type=int, default=500, help="data sets of a design")
    parser.add_argument("--nets", type=int, default=40, help="dropout networks of an alpha")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = Ledger(args.out, command=COMMAND, seed=0, settings={"sets": args.sets, "nets": args.nets})
    measure(kept, sets=args.sets, nets=args.nets)
    for row in kept.rows:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    main()
