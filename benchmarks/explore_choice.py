"""What `Explorer` is to know functions by, on functions that no table is about -> results/explorer_chosen.json

    python benchmarks/explore_choice.py                  # ten minutes on a quiet core; resumable

Levy, Rosenbrock and Ackley functions, the six-hump camel and a draw of a Gaussian process, in 2 to 5 inputs, 40
evaluations each from the same designs. A way is worth its mean rank over functions and seeds, by the least value found.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from optimise import process
from torch import Tensor

import bbalpha
from bbalpha.experiments.results import Ledger, Row
from bbalpha.exploration.loop import Model, eased
from bbalpha.exploration.networks import Settings
from bbalpha.exploration.surrogate import fit_passes

COMMAND = "python benchmarks/explore_choice.py"
EVALUATIONS, SEEDS = 40, 6


def levy(x: Tensor) -> Tensor:
    """Rugged, on [-10, 10]^F; 0 at (1, ..., 1)."""
    z = 1 + (20 * x - 11) / 4
    first = (math.pi * z[:, 0]).sin().square()
    inner = (z[:, :-1] - 1).square() * (1 + 10 * (math.pi * z[:, :-1] + 1).sin().square())
    return first + inner.sum(1) + (z[:, -1] - 1).square() * (1 + (2 * math.pi * z[:, -1]).sin().square())


def camel(x: Tensor) -> Tensor:
    """Six humps, on [-3, 3] x [-2, 2]; two minima, lifted to 0."""
    a, b = 6 * x[:, 0] - 3, 4 * x[:, 1] - 2
    return (4 - 2.1 * a**2 + a**4 / 3) * a**2 + a * b + (-4 + 4 * b**2) * b**2 + 1.0316284534898774


def rosenbrock(x: Tensor) -> Tensor:
    """A bent valley, on [-2, 2]^F; 0 at (1, ..., 1)."""
    z = 4 * x - 2
    return (100 * (z[:, 1:] - z[:, :-1].square()).square() + (1 - z[:, :-1]).square()).sum(1)


def ackley(x: Tensor) -> Tensor:
    """A funnel with ripples, its bottom aside from the middle."""
    z = 20 * (x - 0.5) + 3.1
    return -20 * (-0.2 * z.square().mean(1).sqrt()).exp() - (2 * math.pi * z).cos().mean(1).exp() + 20 + math.e


def waves(x: Tensor) -> Tensor:
    """A draw of a Gaussian process."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn((x.shape[1], 500), generator=generator, dtype=torch.float64) / (0.35 * (x.shape[1] / 2) ** 0.5)
    phase = 2 * math.pi * torch.rand(500, generator=generator, dtype=torch.float64)
    return (x @ weight + phase).cos() @ torch.randn(500, generator=generator, dtype=torch.float64) * (2 / 500) ** 0.5


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "levy": (levy, 2), "camel": (camel, 2), "rosenbrock": (rosenbrock, 3), "waves": (waves, 4), "ackley": (ackley, 5),
}  # fmt: skip
WAYS: dict[str, tuple[Settings, bool]] = {  # settings, and whether large values are drawn together
    "networks and a process": (Settings(share=None), True),
    "networks alone": (Settings(share=1.0), True),
    "a process alone": (Settings(share=0.0), True),
    "networks not trained": (Settings(steps=0, share=None), True),
    "values as they are": (Settings(share=None), False),
}
PROCESS = "GP (scikit-learn), large values drawn together"  # for comparison


def model(settings: Settings, ease: bool) -> Model:
    """What `Explorer` is given."""
    return lambda x, y, seed: fit_passes(x, eased(y) if ease else y, seed=seed, settings=settings)


def least(way: str, function: str, seed: int) -> float:
    """The least value after all evaluations."""
    measure, inputs = FUNCTIONS[function]
    if way == PROCESS:
        return float(process(measure, inputs, seed, eased, evaluations=EVALUATIONS).min())
    explorer = bbalpha.Explorer([(0.0, 1.0)] * inputs, first=2 * inputs + 2, seed=seed, model=model(*WAYS[way]))
    while len(explorer.y) < EVALUATIONS:
        x = explorer.suggest()
        explorer.observe(x, measure(x))
    return explorer.best_y


def ranks(rows: list[Row]) -> dict[str, float]:
    """The mean rank of each way that has run on all functions and seeds, 1 for the best."""
    ways = [w for w in (*WAYS, PROCESS) if sum(r["way"] == w for r in rows) == len(FUNCTIONS) * SEEDS]
    found = dict.fromkeys(ways, 0.0)
    for function in FUNCTIONS:
        for seed in range(SEEDS):
            own = {r["way"]: r["least"] for r in rows if (r["function"], r["seed"]) == (function, seed)}
            for way in ways:
                found[way] += 1 + sum(own[other] < own[way] for other in ways)
    return {way: total / (len(FUNCTIONS) * SEEDS) for way, total in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/explorer_chosen.json"))
    parser.add_argument("--only", nargs="*", choices=[*WAYS, PROCESS], default=[*WAYS, PROCESS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = Ledger(args.out, command=COMMAND, seed=0)
    for seed in range(SEEDS):
        for function in FUNCTIONS:
            for way in args.only:
                if kept.has(way=way, function=function, seed=seed):
                    continue
                start = time.perf_counter()
                value = least(way, function, seed)
                seconds = time.perf_counter() - start
                row = {"way": way, "function": function, "seed": seed, "least": value, "seconds": seconds}
                if way in WAYS:
                    settings, ease = WAYS[way]
                    row |= asdict(settings) | {"eased": ease}
                kept.add([row], seconds=seconds)
                print(function, seed, way, f"{value:.4g}, {seconds:.0f} s", flush=True)
    for way, rank in sorted(ranks(kept.rows).items(), key=lambda pair: pair[1]):
        print(f"{rank:.2f}  {way}")


if __name__ == "__main__":
    main()
