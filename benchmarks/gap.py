"""In between the data: how unsure is a model where a stretch of x is missing? -> results/gap.json

    BBALPHA_DATA=... python benchmarks/gap.py            # about a quarter of an hour on one quiet core; resumable

Functions of one input with a gap, and UCI sets whose rows in the middle third of one column are left out of training:
the likelihood of the rows in the gap, their coverage, and the epistemic deviation there against that at held-out rows
beside the gap. The scale of the prior functions is chosen on random functions of this file's own (work "validation").
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from torch import Tensor

import bbalpha
from bbalpha.experiments.results import Ledger
from bbalpha.exploration.networks import Settings
from bbalpha.exploration.surrogate import fit_draws
from bbalpha.networks import mlp
from bbalpha.training.fitting import cosine
from bbalpha.training.population import Member, Population, fit_population

COMMAND = "python benchmarks/gap.py"
FIVE, PASSES, EPOCHS, BATCH = 5, 50, 150, 32
DROPOUT, LENGTH_SCALE, RATE = 0.05, 0.1, 0.01
SCALES = (0.5, 1.0, 2.0, 4.0)  # of prior functions, in deviations of y
COLUMNS = 2  # of a table: those with the most distinct values
SETS = ("concrete", "energy", "yacht")


@dataclass(frozen=True, eq=False)
class Task:
    """Training rows, rows in the gap, and held-out rows beside it; inputs and targets standardised by the first."""

    x: Tensor
    y: Tensor
    gap: tuple[Tensor, Tensor]
    beside: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, x: Tensor, y: Tensor, gap: Tensor, seed: int) -> "Task":
        """`gap` (N,) says which rows are left out; a tenth of the others is held out."""
        rows = (~gap).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
        held, train = rows[: len(rows) // 10], rows[len(rows) // 10 :]
        scale = x[train].std(0)
        x = (x - x[train].mean(0)) / torch.where(scale > 0, scale, 1.0)
        y = (y - y[train].mean()) / y[train].std()
        return cls(x[train], y[train], (x[gap], y[gap]), (x[held], y[held]))


# what a way knows: values of K functions at rows (K, n), and the precision of the noise of each (K, 1)
Known = Callable[[Tensor], tuple[Tensor, Tensor]]


# ------------------------------------------------------------------------------ the ways


def fitted(task: Task, members: list[Member], targets: list[Tensor], depth: int) -> Population:
    """Networks side by side, each with targets of its own for the same rows."""
    N = len(task.x)
    own = [
        Member(range(i * N, (i + 1) * N), None, m.alpha, m.dropout, 0.0, LENGTH_SCALE, RATE, m.seed)
        for i, m in enumerate(members)
    ]
    table, target = task.x.repeat(len(members), 1), torch.cat(targets)
    epochs = max(20, min(EPOCHS, 30_000 // N))
    return fit_population(
        table, target, own, epochs=epochs, hidden_layer_sizes=(50,) * depth, n_passes=10, batch_size=BATCH,
        schedule=cosine,
    )  # fmt: skip


def prior(seed: int, inputs: int) -> Callable[[Tensor], Tensor]:
    """A fixed random network of one hidden layer: its values have a deviation of about 1."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    weight, bias = torch.randn(inputs, 50, generator=generator), torch.randn(50, generator=generator)
    out = torch.randn(50, generator=generator) * (2 / 50) ** 0.5
    return lambda x: (x @ weight / inputs**0.5 + bias).tanh() @ out


def known(population: Population, index: int, added: Callable[[Tensor], Tensor] | None, n_passes: int) -> Known:
    """One network of a population, with the prior function that was added to it."""
    net, p = population.network(index), population

    def values(x: Tensor) -> tuple[Tensor, Tensor]:
        inputs = ((x - p.x_mean[index]) / p.x_scale[index]).float()
        out = bbalpha.sample(net, inputs, n_passes, masks="shared", seed=0).detach()[..., 0]
        out = out * p.y_scale[index, 0, 0] + p.y_mean[index, 0, 0]
        tau = p.log_precision[index].exp().double() / p.y_scale[index, 0, 0].double() ** 2
        return out.double() + (0 if added is None else added(x)), tau.expand(n_passes, 1)

    return values


def together(parts: list[Known]) -> Known:
    """The passes of several networks, all as likely."""

    def values(x: Tensor) -> tuple[Tensor, Tensor]:
        found = [part(x) for part in parts]
        return torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found])

    return values


def networks(task: Task, seed: int, scales: tuple[float, ...], depth: int) -> dict[str, Known]:
    """Single networks of each alpha, five of them, and five with prior functions."""
    tail = "" if depth == 1 else f", {depth} layers"
    plain = [Member((), alpha=a, dropout=DROPOUT, seed=10 * seed) for a in (0.0, 0.5, 1.0)]
    more = [Member((), alpha=0.5, dropout=DROPOUT, seed=10 * seed + i) for i in range(1, FIVE)]
    members, targets = plain + more, [task.y] * (len(plain) + len(more))
    priors: list[Callable[[Tensor], Tensor]] = []
    for scale in scales:
        for i in range(FIVE):
            function = prior(10 * seed + i, task.x.shape[1])
            priors.append(lambda x, f=function, s=scale: s * f(x.float()).double())
            members.append(Member((), alpha=0.5, dropout=DROPOUT, seed=10 * seed + i))
            targets.append(task.y - priors[-1](task.x))
    p = fitted(task, members, targets, depth)
    ways = {f"alpha {m.alpha:g}{tail}": known(p, i, None, PASSES * 2) for i, m in enumerate(plain)}
    five = [1, *range(3, 2 + FIVE)]
    ways[f"five networks{tail}"] = together([known(p, i, None, PASSES) for i in five])
    at = len(plain) + len(more)
    for k, scale in enumerate(scales):
        own = range(k * FIVE, (k + 1) * FIVE)
        ways[f"one with a prior, {scale:g}{tail}"] = known(p, at + own[0], priors[own[0]], 2 * PASSES)
        ways[f"five with priors, {scale:g}{tail}"] = together([known(p, at + j, priors[j], PASSES) for j in own])
    return ways


def joint(task: Task, seed: int) -> Known:
    """Alpha 0.5 of groups of ten rows under shared masks."""
    torch.manual_seed(seed)
    net = mlp([task.x.shape[1], 50, 1], dropout=DROPOUT, input_dropout=0.0)
    objective = bbalpha.GaussianNLL(0.5, group_size=10)
    bbalpha.fit(
        net, (task.x.float(), task.y[:, None].float()), objective=objective, epochs=min(EPOCHS, 30_000 // len(task.x)),
        batch_size=BATCH - BATCH % 10, learning_rate=RATE, length_scale=LENGTH_SCALE, masks="shared",
        schedule=cosine, seed=seed, progress=False,
    )  # fmt: skip
    tau = objective.precision.detach().double().reshape(1, 1)

    def values(x: Tensor) -> tuple[Tensor, Tensor]:
        out = bbalpha.sample(net.eval(), x.float(), 2 * PASSES, masks="shared", seed=0).detach()[..., 0]
        return out.double(), tau.expand(2 * PASSES, 1)

    return values


def drawn(task: Task, seed: int) -> Known:
    """Networks whose readouts are drawn from their posterior, on at most 300 of the rows."""
    low, high = task.x.amin(0), task.x.amax(0)
    size = torch.where(high > low, high - low, 1.0)
    alone = Settings(passes=16, share=1.0)
    draws = fit_draws((task.x[:300] - low) / size, task.y[:300].double(), seed=seed, settings=alone)
    return lambda x: (draws((x - low) / size), draws.precision.expand(64, 1))


def process(task: Task, seed: int) -> Known:
    """scikit-learn's Gaussian process, Matern 5/2 with a length for each column; on at most 400 of the rows."""
    kernel = ConstantKernel(1.0) * Matern(np.ones(task.x.shape[1]), (1e-2, 1e3), nu=2.5) + WhiteKernel(0.1, (1e-5, 10))
    gp = GaussianProcessRegressor(kernel, n_restarts_optimizer=0, random_state=seed)
    gp.fit(task.x[:400].numpy(), task.y[:400].numpy())
    noise = float(gp.kernel_.k2.noise_level)

    def values(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = gp.predict(x.numpy(), return_std=True)
        apart = np.sqrt(np.maximum(std**2 - noise, 1e-12))  # predict adds the noise
        levels = torch.special.ndtri((torch.arange(200) + 0.5) / 200).double()  # its quantiles stand for functions
        functions = torch.from_numpy(mean) + levels[:, None] * torch.from_numpy(apart)
        return functions, torch.full((200, 1), 1 / noise, dtype=torch.float64)

    return values


def all_ways(task: Task, seed: int, scale: float) -> dict[str, Callable[[], dict[str, Known]]]:
    """Every way by name, made when it is asked for; those of a population at once."""
    return {
        "networks": lambda: networks(task, seed, (scale,), 1),
        "two layers": lambda: networks(task, seed, (scale,), 2),
        "joint loss, groups of 10": lambda: {"joint loss, groups of 10": joint(task, seed)},
        "drawn readouts": lambda: {"drawn readouts": drawn(task, seed)},
        "GP": lambda: {"GP": process(task, seed)},
    }


# ------------------------------------------------------------------------------ what they know


def scores(way: Known, task: Task) -> dict[str, float]:
    """Of a way: likelihood and coverage in the gap and beside it, and the epistemic deviation in both."""
    found: dict[str, float] = {}
    for where, (x, y) in (("gap", task.gap), ("beside", task.beside)):
        values, tau = way(x)
        each = 0.5 * (tau * (y - values) ** 2 - tau.log() + np.log(2 * np.pi))
        found[f"nll_{where}"] = -(torch.logsumexp(-each, 0) - np.log(len(values))).mean().item()
        below = torch.special.ndtr((y - values) * tau.sqrt()).mean(0)
        found[f"coverage90_{where}"] = ((below > 0.05) & (below < 0.95)).double().mean().item()
        found[f"epistemic_{where}"] = values.std(0, correction=0).median().item()
        found[f"rmse_{where}"] = (values.mean(0) - y).square().mean().sqrt().item()
    found["ratio"] = found["epistemic_gap"] / max(found["epistemic_beside"], 1e-12)
    return found


# ------------------------------------------------------------------------------ the tasks


def curve(name: str, seed: int) -> Task:
    """A function of one input, 100 rows on either side of a gap, noise 0.1."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.rand(200, generator=generator, dtype=torch.float64)
    x = torch.where(at < 0.5, -3 + 4 * at, -1 + 4 * at)  # [-3, -1] and [1, 3]
    x = torch.cat((x, torch.linspace(-0.7, 0.7, 50, dtype=torch.float64)))
    functions = {
        "sin(2x)": lambda x: (2 * x).sin(),
        "cubic": lambda x: (x / 2) ** 3,
        "rising wave": lambda x: 0.5 * x + (3 * x).cos(),
    }
    y = functions[name](x) + 0.1 * torch.randn(len(x), generator=generator, dtype=torch.float64)
    return Task.of(x[:, None], y, torch.arange(len(x)) >= 200, seed)


def random_function(inputs: int, seed: int) -> Task:
    """For choices: a draw of a Gaussian process on [-3, 3]^inputs, the middle third of the first input left out."""
    generator = torch.Generator().manual_seed(500 + seed)
    x = 6 * torch.rand((200 * inputs, inputs), generator=generator, dtype=torch.float64) - 3
    weight = torch.randn((inputs, 500), generator=generator, dtype=torch.float64) / inputs**0.5
    phase = 2 * np.pi * torch.rand(500, generator=generator, dtype=torch.float64)
    out = torch.randn(500, generator=generator, dtype=torch.float64) * (2 / 500) ** 0.5
    y = (x @ weight + phase).cos() @ out + 0.1 * torch.randn(len(x), generator=generator, dtype=torch.float64)
    return Task.of(x, y, x[:, 0].abs() < 1, seed)


def table(name: str, rank: int, seed: int) -> tuple[Task, int]:
    """A UCI set without the middle third of its column with the rank-th most distinct values; that column."""
    data = np.load(Path(os.environ["BBALPHA_DATA"]) / "uci" / f"{name}.npz", allow_pickle=False)
    x, y = torch.from_numpy(data["X"]).double(), torch.from_numpy(data["y"]).double().reshape(-1)
    counts = torch.tensor([len(x[:, c].unique()) for c in range(x.shape[1])])
    column = int(counts.argsort(descending=True, stable=True)[rank])
    low, high = x[:, column].quantile(1 / 3), x[:, column].quantile(2 / 3)
    return Task.of(x, y, (x[:, column] > low) & (x[:, column] < high), seed), column


def chosen(rows: list[dict[str, float | str]]) -> float:
    """The scale of prior functions with the best likelihood in the gaps of the validation functions, five networks."""
    own = [r for r in rows if r["work"] == "validation"]
    return min(SCALES, key=lambda s: np.mean([r["nll_gap"] for r in own if r["way"] == f"five with priors, {s:g}"]))


def validate(kept: Ledger) -> float:
    """Likelihoods by the scale of the prior functions, and the scale that is taken."""
    for inputs in (1, 3):
        for seed in range(3):
            key = {"work": "validation", "problem": f"random, {inputs} inputs", "seed": seed}
            if not kept.has(**key):
                start, task = time.perf_counter(), random_function(inputs, seed)
                ways = networks(task, seed, SCALES, 1)
                rows = [{**key, "way": name, **scores(way, task)} for name, way in ways.items()]
                kept.add(rows, seconds=time.perf_counter() - start)
    return chosen(kept.rows)


def measure(kept: Ledger, key: dict[str, str | int], task: Task, scale: float) -> None:
    """All ways on one task, one kind after the other."""
    for kind, make in all_ways(task, int(key["seed"]), scale).items():
        if not kept.has(**key, kind=kind):
            start = time.perf_counter()
            rows = [{**key, "kind": kind, "way": name, **scores(way, task)} for name, way in make().items()]
            kept.add(rows, seconds=time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/gap.json"))
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    if "BBALPHA_DATA" not in os.environ:
        sys.exit("BBALPHA_DATA must name the folder of data sets")
    torch.set_num_threads(1)
    kept = Ledger(args.out, command=COMMAND, seed=0)
    scale = validate(kept)
    print(f"prior functions at scale {scale:g}", flush=True)
    for turn in range(max(args.seeds, COLUMNS)):  # so that what is there when it is cut off is of all kinds
        if turn < args.seeds:
            for name in ("sin(2x)", "cubic", "rising wave"):
                measure(kept, {"work": "curve", "problem": name, "seed": turn}, curve(name, turn), scale)
        for name in SETS[: len(SETS) if turn < COLUMNS else 0]:
            task, column = table(name, turn, 0)
            measure(kept, {"work": "table", "problem": f"{name}, column {column}", "seed": 0}, task, scale)
            print(name, column, len(task.x), len(task.gap[0]), flush=True)


if __name__ == "__main__":
    main()
