"""What K passes that know of each other are worth, beside K independent ones -> results/passes.json.

    python benchmarks/passes.py [--only digits] [--quick]

For networks of several kinds (passes_networks.py), per-example and shared masks and K from 2 to 100: the error of what
is predicted for held-out rows, over repetitions with other seeds. The truth is taken from G groups of 100 balanced
passes (4,000 passes at least) with seeds of their own. All that is estimated is a function of means of single passes,
and each balanced pass alone is plain dropout: the groups are right in the mean, whatever masks know of each other. They
are as good as G of the best estimates that are judged by them, so their own error squared is 1/G of the smallest here;
it is found from the differences between groups (delete-one jackknife) and subtracted.

Rows by "work": error (of one quantity at one K: root mean square over rows, standard deviation, mean bias), gradient
(trace of the covariance at a fixed batch), bias (of the alpha objective), last layer (integrated exactly), network.

What is in the output is not computed again.
"""

import argparse
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from passes_networks import NETWORKS, Problem, loss, without_last
from torch import Tensor, nn

import bbalpha
from bbalpha.experiments import skeleton
from bbalpha.experiments.results import Row
from bbalpha.predictive import RegressionPrediction

PASSES = (2, 5, 10, 20, 50, 100)
ALPHAS = (0.0, 0.5, 1.0)
GROUP = 100  # passes of a group of the reference
BIASED = ("concrete, 0.05, inputs too", "digits MLP, 0.5")  # networks whose objective's bias is measured
QUICK = ("diabetes, 0.05, inputs too", "digits MLP, 0.5")
Estimates = dict[str, Tensor]


@dataclass(frozen=True)
class Network(skeleton.Unit):
    network: str


# ------------------------------------------------------------------------------ what is estimated, and the truth


def estimates(outputs: Tensor, precision: float | None) -> Estimates:
    """What each repetition says, as the library has it: outputs (R, K, N, D) -> {quantity: (R, N, ...)}."""
    found = quantities(moments(outputs, precision))
    found["variance, K - 1"] = outputs.var(1, correction=1)
    if precision is not None:
        R, _, N, D = outputs.shape
        mixtures = RegressionPrediction(outputs.transpose(0, 1).flatten(1, 2), torch.tensor(precision))
        found["interval"] = outward(mixtures.interval(0.9)).view(R, N, D, 2)
    return found


def moments(outputs: Tensor, precision: float | None) -> Estimates:
    """Means over passes, of which everything but an interval is a function: (R, K, N, D) -> {moment: (R, N, ...)}."""
    found = {"first": outputs.mean(1), "variance": outputs.var(1, correction=0)}
    found["second"] = found["variance"] + found["first"].square()
    if precision is None:
        probs = outputs.softmax(-1)
        found |= {"probs": probs.mean(1), "entropy": torch.special.entr(probs).sum(-1).mean(1)}
    return found


def quantities(means: Estimates) -> Estimates:
    """Quantities out of means over passes; each holds for any number of passes."""
    found = {"mean": means["first"], "variance": means["second"] - means["first"].square()}
    if "probs" in means:
        entropy = torch.special.entr(means["probs"]).sum(-1)
        found |= {"probabilities": means["probs"], "entropy": entropy}
        found["mutual information"] = entropy - means["entropy"]
    return found


def reference(groups: Tensor, precision: float | None) -> dict[str, tuple[Tensor, Tensor]]:
    """{quantity: what it is with infinitely many passes, and the squared error of that}, from groups (G, 100, N, D)."""
    G = len(groups)
    each = moments(groups, precision)
    whole = quantities({k: v.mean(0) for k, v in each.items()})
    left_out = quantities({k: (v.sum(0) - v) / (G - 1) for k, v in each.items()})  # (G, N, ...)
    found = {}
    for name, value in whole.items():
        without = left_out[name]
        spread = (without - without.mean(0)).square().sum(0) * (G - 1) / G
        found[name] = (G * value - (G - 1) * without.mean(0), spread)
    found["variance, K - 1"] = found["variance"]
    if precision is not None:
        found["interval"] = reference_interval(groups, precision)
    return found


def reference_interval(groups: Tensor, precision: float) -> tuple[Tensor, Tensor]:
    """The ends of the 90 % interval of all passes, and their squared error: of the CDF, over the squared density."""
    ends = RegressionPrediction(groups.flatten(0, 1), torch.tensor(precision)).interval(0.9)  # (N, D) each
    errors = []
    for end in ends:
        u = (end - groups) * math.sqrt(precision)  # (G, 100, N, D)
        density = ((-0.5 * u.square()).exp() * math.sqrt(precision / (2 * math.pi))).mean((0, 1))
        errors.append(torch.special.ndtr(u).mean(1).var(0) / len(groups) / density.square())
    return outward(ends), torch.stack(errors, -1)


def outward(ends: tuple[Tensor, Tensor]) -> Tensor:
    """(low, high) as (-low, high) on a last axis: more is further out, and a negative bias is a narrow interval."""
    return torch.stack([-ends[0], ends[1]], -1)


# ------------------------------------------------------------------------------ errors


def error(found: Tensor, truth: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Error of repetitions (R, N, ...): mean square, its standard error, variance, and bias in the mean over rows."""
    value, own = truth
    squares = (found - value).square().flatten(1).mean(1) - own.mean()  # (R,)
    return {
        "square": max(squares.mean().item(), 0.0),
        "square_error": squares.std().item() / math.sqrt(len(found)),
        "variance": found.var(0).mean().item(),
        "bias": (found.mean(0) - value).mean().item(),
    }


def equal_passes(K: int, square: float, independent: dict[str, float]) -> float | None:
    """How many independent passes have the mean square error `square`; None for infinitely many.

    Theirs is S t + B t^2 with t = K / passes: the variance falls with the passes, the squared bias with their square.

    >>> equal_passes(20, 0.01, {"square": 1.0, "variance": 1.0})
    2000.0
    """
    if square <= 0:
        return None
    S = min(independent["variance"], independent["square"])
    B = independent["square"] - S
    t = square / S if B < 1e-6 * S else (math.sqrt(S * S + 4 * B * square) - S) / (2 * B)
    return K / t


def compared(K: int, independent: dict[str, float], balanced: dict[str, float]) -> Row:
    """The columns of an error row."""
    ratio = math.sqrt(balanced["square"] / independent["square"])
    relative = [side["square_error"] / side["square"] for side in (independent, balanced) if side["square"] > 0]
    return {
        "independent": math.sqrt(independent["square"]),
        "balanced": math.sqrt(balanced["square"]),
        "ratio": ratio,
        "ratio_error": ratio * math.hypot(*relative) / 2,
        "equal_passes": equal_passes(K, balanced["square"], independent),
        "sd_independent": math.sqrt(independent["variance"]),
        "sd_balanced": math.sqrt(balanced["variance"]),
        "bias_independent": independent["bias"],
        "bias_balanced": balanced["bias"],
    }


# ------------------------------------------------------------------------------ measuring


@torch.no_grad()
def draw(net: nn.Module, x: Tensor, K: int, repetitions: int, *, first_seed: int, balanced: bool, masks: str) -> Tensor:
    """Outputs of so many calls of `sample` (R, K, N, D), in double precision."""
    calls = [
        bbalpha.sample(net, x, K, masks=masks, balanced=balanced, seed=first_seed + r)  # type: ignore[arg-type]
        for r in range(repetitions)
    ]
    return torch.stack(calls).double()


def blocks(pool: Tensor, K: int) -> Tensor:
    """Independent passes (R, 100, ...) as repetitions of K passes, at most 2 R of them."""
    n = min(pool.shape[0] * pool.shape[1] // K, 2 * len(pool))
    return pool.flatten(0, 1)[: n * K].unflatten(0, (n, K))


def error_rows(problem: Problem, truth: dict[str, tuple[Tensor, Tensor]], masks: str) -> Iterator[Row]:
    """Balanced beside independent masks, for every K and quantity."""
    net, x, R = problem.net, problem.held_out, problem.repetitions
    pool = draw(net, x, PASSES[-1], R, first_seed=10**6, balanced=False, masks=masks)
    for K in PASSES:
        ours = draw(net, x, K, R, first_seed=10**7 + 10**4 * K, balanced=True, masks=masks)
        sides = [estimates(outputs, problem.precision) for outputs in (blocks(pool, K), ours)]
        for name, (value, _) in truth.items():
            independent, balanced = (error(side[name], truth[name]) for side in sides)
            row = {"work": "error", "masks": masks, "quantity": name, "n_passes": K}
            yield row | compared(K, independent, balanced) | {"value": value.abs().mean().item()}


def last_layer_row(problem: Problem, truth: tuple[Tensor, Tensor], K: int = 20) -> Row:
    """The error of the mean where the last dropout is replaced by its mean, which a linear layer passes on exactly."""
    row: Row = {"work": "last layer", "n_passes": K}
    if problem.last is None:
        return row | {"independent": None, "balanced": None, "independent_exact": None, "balanced_exact": None}
    x, R = problem.held_out, problem.repetitions
    exact = without_last(problem, copy.deepcopy(problem.net))
    random = any(isinstance(m, nn.Dropout) for m in exact.modules())
    for name, net in (("", problem.net), ("_exact", exact)):
        for balanced in (False, True):
            found = 0.0  # without another dropout nothing is left to chance
            if random or not name:
                outputs = draw(net, x, K, R, first_seed=2 * 10**7, balanced=balanced, masks="per_example")
                found = math.sqrt(error(outputs.mean(1), truth)["square"])
            row[("balanced" if balanced else "independent") + name] = found
    return row


def gradient_rows(problem: Problem, masks: str, K: int = 10) -> Iterator[Row]:
    """Trace of the covariance of the gradient over seeds: half the squared distance of two gradients, in the mean."""
    traces = {balanced: distances(problem, masks, balanced, K) for balanced in (False, True)}
    for i, alpha in enumerate(ALPHAS):
        independent, balanced = (traces[b][:, i] for b in (False, True))
        ratio = float(balanced.mean() / independent.mean())
        relative = [float(t.std() / t.mean()) / math.sqrt(len(t)) for t in (independent, balanced)]
        row = {"work": "gradient", "masks": masks, "alpha": alpha, "n_passes": K, "ratio": ratio}
        traced = {"independent": independent.mean().item(), "balanced": balanced.mean().item()}
        yield row | {"ratio_error": ratio * math.hypot(*relative)} | traced


def distances(problem: Problem, masks: str, balanced: bool, K: int) -> Tensor:
    """(pairs, alphas)."""
    parameters = list(problem.net.parameters())

    def gradients(seed: int) -> list[Tensor]:
        outputs = bbalpha.sample(problem.net, problem.x, K, masks=masks, balanced=balanced, seed=seed)  # type: ignore[arg-type]
        found = []
        for alpha in ALPHAS:
            each = torch.autograd.grad(loss(problem, outputs, alpha), parameters, retain_graph=alpha != ALPHAS[-1])
            found.append(torch.cat([g.flatten() for g in each]))
        return found

    seeds = range(3 * 10**7, 3 * 10**7 + 2 * problem.pairs, 2)
    both = (zip(gradients(seed), gradients(seed + 1), strict=True) for seed in seeds)
    return torch.tensor([[((a - b).double().square().sum() / 2).item() for a, b in two] for two in both])


def bias_rows(problem: Problem) -> Iterator[Row]:
    """E[loss of K passes] - loss of infinitely many, in the mean over the batch; the same for shared masks.

    With u = mean_k exp(-alpha l_k) over its expectation, which is 1, the bias is E[-log u] / alpha. Estimated is
    E[u - 1 - log u] / alpha: the same number, without the noise of the first order.
    """
    net, x = problem.net, problem.x
    R, settings = 4 * problem.repetitions, {"masks": "per_example"}
    truth = problem.losses(draw(net, x, GROUP, problem.groups, first_seed=4 * 10**7, balanced=True, **settings))
    pool = problem.losses(draw(net, x, PASSES[-1], R, first_seed=5 * 10**7, balanced=False, **settings))
    for K in (1, *PASSES):
        sides = {"independent": blocks(pool, K)}
        if K > 1:
            ours = draw(net, x, K, R, first_seed=6 * 10**7 + 10**4 * K, balanced=True, **settings)
            sides["balanced"] = problem.losses(ours)
        for alpha in ALPHAS[1:]:
            limit = -(-alpha * truth).flatten(0, 1).logsumexp(0).sub(math.log(truth.shape[0] * GROUP)) / alpha  # (N,)
            for name, losses in sides.items():
                u = (-alpha * (losses - limit)).exp().mean(1)  # (R, N)
                each = ((u - 1 - u.log()) / alpha).mean(1)
                yield {
                    "work": "bias", "alpha": alpha, "n_passes": K, "way": name, "bias": each.mean().item(),
                    "bias_error": each.std().item() / math.sqrt(len(each)), "limit": limit.mean().item(),
                }  # fmt: skip


def rows_of(name: str, *, quick: bool) -> Iterator[Row]:
    """All rows of a network."""
    torch.manual_seed(0)
    problem = NETWORKS[name]()
    if quick:
        problem = replace(problem, repetitions=4, groups=5, pairs=4, held_out=problem.held_out[:10])
    R = problem.repetitions
    yield {"work": "network", "score": problem.score, "precision": problem.precision, "repetitions": R,
           "reference_passes": GROUP * problem.groups, "rows": len(problem.held_out)}  # fmt: skip
    groups = draw(
        problem.net, problem.held_out, GROUP, problem.groups, first_seed=0, balanced=True, masks="per_example"
    )
    truth = reference(groups, problem.precision)
    yield last_layer_row(problem, truth["mean"])
    for masks in ("per_example", "shared"):
        yield from error_rows(problem, truth, masks)
        yield from gradient_rows(problem, masks)
    if name in BIASED:
        yield from bias_rows(problem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="networks whose name has this in it")
    parser.add_argument("--quick", action="store_true", help="two networks, four repetitions: for a test")
    parser.add_argument("--out", type=Path, default=Path("results/passes.json"))
    args = parser.parse_args()
    kept = skeleton.open_ledger(args.out, command="python benchmarks/passes.py", quick=args.quick, seed=0)
    names = [name for name in (QUICK if args.quick else NETWORKS) if args.only in name]

    def work(unit: Network, _: Path) -> list[Row]:
        with skeleton.threads(1):
            return [{"network": unit.network} | row for row in rows_of(unit.network, quick=args.quick)]

    skeleton.run_units(kept, [Network(name) for name in names], work, state=args.out.parent / ".state" / "passes")
    for row in kept.rows:
        if row["work"] == "error" and row["n_passes"] == 20:
            ratio = f"{row['ratio']:.3f} ± {row['ratio_error']:.3f}"
            print(f"{row['network']:30} {row['masks']:12} {row['quantity']:20} {ratio}")


if __name__ == "__main__":
    main()
