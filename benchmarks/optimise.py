"""The least value of Branin and Hartmann-6 in 60 evaluations, beside a Gaussian process -> results/optimise.json

    python benchmarks/optimise.py                        # ten to thirty minutes on a quiet core; resumable
    python benchmarks/optimise.py --only botorch         # one way; it needs botorch, which bbalpha does not

All ways begin with the same scrambled Sobol design (2 F + 2 rows, by seed). The processes have a Matern 5/2 kernel with
a length for every input, refitted from two starts before each evaluation, and expected improvement climbed from as many
candidates as ours. `gp, eased` sees values above the median drawn together, as `Explorer` does by itself.
"""

import argparse
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.stats import norm
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from torch import Tensor

import bbalpha
from bbalpha.experiments.results import Ledger, Row
from bbalpha.exploration.loop import eased

COMMAND = "python benchmarks/optimise.py"
EVALUATIONS, SEEDS = 60, 10
Objective = Callable[[Tensor], Tensor]


def branin(x: Tensor) -> Tensor:
    """On the unit square; three minima of 0.397887."""
    a, b = 15 * x[:, 0] - 5, 15 * x[:, 1]
    parabola = b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6
    return parabola**2 + 10 * (1 - 1 / (8 * math.pi)) * a.cos() + 10


def hartmann(x: Tensor) -> Tensor:
    """Of six inputs on the unit cube; its minimum is -3.32237."""
    height = torch.tensor([1.0, 1.2, 3.0, 3.2], dtype=torch.float64)
    sharp = torch.tensor(
        [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]],
        dtype=torch.float64,
    )
    centre = 1e-4 * torch.tensor(
        [[1312, 1696, 5569, 124, 8283, 5886], [2329, 4135, 8307, 3736, 1004, 9991],
         [2348, 1451, 3522, 2883, 3047, 6650], [4047, 8828, 8732, 5743, 1091, 381]], dtype=torch.float64,
    )  # fmt: skip
    return -(height * torch.exp(-(sharp * (x[:, None] - centre).square()).sum(2))).sum(1)


PROBLEMS: dict[str, tuple[Objective, int, float]] = {
    "branin": (branin, 2, 0.39788735772973816),
    "hartmann6": (hartmann, 6, -3.322368011391339),
}


# ------------------------------------------------------------------------------ the ways


def ours(measure: Objective, inputs: int, seed: int) -> Tensor:
    """`Explorer` as it is."""
    explorer = bbalpha.Explorer([(0.0, 1.0)] * inputs, first=2 * inputs + 2, seed=seed)
    while len(explorer.y) < EVALUATIONS:
        x = explorer.suggest()
        explorer.observe(x, measure(x))
    return explorer.y


def design(inputs: int, seed: int) -> Tensor:
    """The rows that every way begins with."""
    return bbalpha.Explorer([(0.0, 1.0)] * inputs, first=2 * inputs + 2, seed=seed).suggest(2 * inputs + 2)


def by_chance(measure: Objective, inputs: int, seed: int) -> Tensor:
    """Evenly drawn rows behind the design."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand((EVALUATIONS - 2 * inputs - 2, inputs), generator=generator, dtype=torch.float64)
    return measure(torch.cat((design(inputs, seed), rows)))


def process(
    measure: Objective, inputs: int, seed: int, change: Callable[[Tensor], Tensor] = lambda y: y, *,
    evaluations: int = EVALUATIONS,
) -> Tensor:  # fmt: skip
    """scikit-learn's Gaussian process and expected improvement."""
    random = np.random.default_rng(seed)
    x = design(inputs, seed)
    y = measure(x)
    while len(y) < evaluations:
        gp = fitted(x.numpy(), change(y).numpy(), seed)
        row = torch.from_numpy(climbed(gp, x.numpy(), change(y).numpy(), random))[None]
        x, y = torch.cat((x, row)), torch.cat((y, measure(row)))
    return y


def fitted(x: np.ndarray, y: np.ndarray, seed: int) -> GaussianProcessRegressor:
    """The likeliest process, from one more start than its own."""
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * Matern(np.full(x.shape[1], 0.5), (0.01, 100.0), nu=2.5)
    kernel += WhiteKernel(1e-6, (1e-9, 1e-1))
    gp = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=1, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # lengths at their bounds: inputs that do not count
        return gp.fit(x, y)


def climbed(gp: GaussianProcessRegressor, x: np.ndarray, y: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Where expected improvement is largest: candidates as `Explorer` has them, the best three refined by L-BFGS."""
    F = x.shape[1]
    near = np.repeat(x[np.argsort(y)[:3]], 60, 0)
    near = near + 0.2 * 10 ** (-3 * random.random((len(near), 1))) * random.standard_normal(near.shape)
    rows = np.concatenate([random.random((600, F)), np.clip(near, 0, 1)])

    def minus_log_improvement(at: np.ndarray) -> np.ndarray:
        mean, std = gp.predict(np.atleast_2d(at), return_std=True)
        std = np.maximum(std, 1e-12)
        z = (y.min() - mean) / std
        safe = np.maximum(z, -25.0)  # from there on the logarithm of the tail
        body = np.log(safe * norm.cdf(safe) + norm.pdf(safe))
        tail = -0.5 * z**2 - 2 * np.log(np.abs(z) + 1e-300) - 0.5 * math.log(2 * math.pi)
        return -(np.log(std) + np.where(z > -25, body, tail))

    values = minus_log_improvement(rows)
    starts = rows[np.argsort(values)[:3]]
    found = [
        minimize(lambda at: float(minus_log_improvement(at)[0]), start, method="L-BFGS-B", bounds=[(0, 1)] * F,
                 options={"maxiter": 15})
        for start in starts
    ]  # fmt: skip
    return np.clip(min(found, key=lambda f: f.fun).x, 0.0, 1.0)


def botorch(measure: Objective, inputs: int, seed: int) -> Tensor:
    """botorch's SingleTaskGP as it comes, standardised values, LogExpectedImprovement."""
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.transforms import Standardize
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood

    torch.manual_seed(seed)
    x = design(inputs, seed)
    y = measure(x)
    box = torch.tensor([[0.0] * inputs, [1.0] * inputs], dtype=torch.float64)
    while len(y) < EVALUATIONS:
        model = SingleTaskGP(x, -y[:, None], outcome_transform=Standardize(1))
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        score = LogExpectedImprovement(model, best_f=(-y).max())
        row, _ = optimize_acqf(score, bounds=box, q=1, num_restarts=5, raw_samples=512)
        x, y = torch.cat((x, row)), torch.cat((y, measure(row)))
    return y


WAYS: dict[str, Callable[[Objective, int, int], Tensor]] = {
    "bbalpha": ours,
    "gp": process,
    "gp, eased": lambda measure, inputs, seed: process(measure, inputs, seed, eased),
    "botorch": botorch,
    "random": by_chance,
}


def run(kept: Ledger, ways: list[str], seeds: range) -> None:
    """What is not in the results yet, the seeds one after the other."""
    for seed in seeds:
        for problem, (measure, inputs, least) in PROBLEMS.items():
            for way in ways:
                if kept.has(problem=problem, way=way, seed=seed):
                    continue
                start = time.perf_counter()
                regret = WAYS[way](measure, inputs, seed).cummin(0).values - least
                seconds = time.perf_counter() - start
                row: Row = {"problem": problem, "way": way, "seed": seed, "seconds": seconds}
                row |= {f"regret{n}": float(r) for n, r in enumerate(regret.clamp_min(0), 1)}
                kept.add([row], seconds=seconds)
                print(problem, way, seed, f"{row[f'regret{EVALUATIONS}']:.2g}, {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/optimise.json"))
    parser.add_argument("--only", nargs="*", choices=list(WAYS), help="all but botorch if none is named")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, SEEDS), metavar=("FROM", "TO"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="botorch|linear_operator|gpytorch")
    run(Ledger(args.out, command=COMMAND, seed=0), args.only or [w for w in WAYS if w != "botorch"], range(*args.seeds))


if __name__ == "__main__":
    main()
