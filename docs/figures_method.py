"""The numbers, tables and figures of docs/method.md.

    python docs/figures_method.py      measures: docs/figures/method.json, and the tables in method.md
    make figures                       draws docs/figures/method_*.png

The score of the naval data needs the data sets (BBALPHA_DATA); without them its last value is kept.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.patches import Ellipse
from scipy import optimize
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MultivariateNormal, Normal

import bbalpha
from bbalpha import divergences as dv
from bbalpha import plots
from bbalpha.experiments import results
from bbalpha.experiments.results import Row
from bbalpha.networks import mlp

DOCS = Path(__file__).parent
FIGURES = DOCS / "figures"
ALPHAS = (0.0, 0.5, 1.0)
COLOURS = {alpha: plots.line(i)["color"] for alpha, i in zip(ALPHAS, (0, 1, 4), strict=True)}
NAMES = {0.0: "zero-forcing", 0.5: "in between", 1.0: "mass-covering"}
SIGNS = {"minus": plots.line(0)["color"], "plus": plots.line(1)["color"]}  # of the term in log tau
N_DATA = (10, 100, 1000)
CORRELATED = ((1.0, 0.85), (0.85, 1.0))  # covariance of the two weights
SEED = 0


def best_q(divergence: Callable[[Distribution], Tensor], mean: list[float], std: list[float]) -> tuple[Any, Any]:
    """Mean and standard deviation of the factorised Gaussian with the smallest `divergence`, from a start."""
    d = len(mean)

    def objective(theta: Any) -> tuple[float, Any]:
        t = torch.tensor(theta, requires_grad=True)
        value = divergence(Independent(Normal(t[:d], t[d:].exp()), 1))
        value.backward()
        return value.item(), t.grad.numpy()  # type: ignore[union-attr]

    start = np.array([*mean, *np.log(std)])
    found = optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-14, "gtol": 1e-9})
    return found.x[:d], np.exp(found.x[d:])


def ellipse(axis: Any, mean: Any, covariance: Any, **style: Any) -> None:
    """The contour of a Gaussian that holds 86 % of it: two standard deviations."""
    values, vectors = np.linalg.eigh(covariance)
    angle = math.degrees(math.atan2(vectors[1, 1], vectors[0, 1]))
    width, height = 4 * np.sqrt(values[::-1])
    axis.add_patch(Ellipse(mean, width, height, angle=angle, **style))


# ------------------------------------------------------------------------------ what is measured


def mode_and_tail() -> tuple[Tensor, Tensor]:
    """A posterior of one weight with a mode and a wide tail: a grid, and the density on it."""
    grid = torch.linspace(-8, 9, 3401, dtype=torch.float64)
    modes = [(0.75, -1.0, 0.5), (0.25, 1.2, 1.2)]  # weight, mean, deviation
    return grid, torch.stack([weight * Normal(mean, std).log_prob(grid).exp() for weight, mean, std in modes]).sum(0)


def closest() -> Iterator[Row]:
    """The Gaussian that is closest to p in D_alpha[p||q], for a mode with a tail and for two correlated weights."""
    grid, density = mode_and_tail()
    p = Categorical(density)  # on a grid every divergence is a sum
    target = MultivariateNormal(torch.zeros(2, dtype=torch.float64), torch.tensor(CORRELATED, dtype=torch.float64))
    for alpha in ALPHAS:
        mean, std = best_q(
            lambda q, a=alpha: dv.amari(p, Categorical(logits=q.log_prob(grid[:, None])), a), [-0.8], [0.6]
        )
        yield {"figure": "mode and tail", "alpha": alpha, "mean": mean[0], "std": std[0]}
        _, std = best_q(lambda q, a=alpha: dv.amari(target, q, a), [0.0, 0.0], [0.6, 0.6])
        yield {"figure": "correlated", "alpha": alpha, "variance_ratio": std[0] ** 2}


def optima() -> Iterator[Row]:
    """What minimising the loss does: one weight for growing N, and two correlated weights."""
    prior = Independent(Normal(torch.zeros(1, dtype=torch.float64), 1.0), 1)
    for n in N_DATA:
        factors = one_weight(n)
        exact = factors.posterior(prior)
        start = exact.mean.tolist(), exact.stddev.tolist()
        for alpha in np.linspace(0, 1, 21).tolist():
            _, std = best_q(lambda q, f=factors, a=alpha: dv.large_data_energy(q, prior, f, alpha=a), *start)
            ratio = float(std[0] ** 2 / exact.variance)
            yield {"figure": "one weight", "n_data": n, "alpha": alpha, "variance_ratio": ratio}
    prior = Independent(Normal(torch.zeros(2, dtype=torch.float64), 1.0), 1)
    factors = two_weights(60)
    exact = factors.posterior(prior)
    for alpha in ALPHAS:
        energy = lambda q, a=alpha: dv.large_data_energy(q, prior, factors, alpha=a)  # noqa: E731
        mean, std = best_q(energy, exact.mean.tolist(), [0.1, 0.1])
        ratio = std**2 / exact.covariance_matrix.diagonal().numpy()
        places = {"mean_1": mean[0], "mean_2": mean[1], "std_1": std[0], "std_2": std[1]}
        yield {"figure": "two weights", "alpha": alpha, "variance_ratio": float(ratio.mean()), **places}


def precisions() -> Iterator[Row]:
    """A precision learned with the right and with the printed sign of the term in log tau."""
    for sign in SIGNS:
        trace = learned_precision(printed=sign == "plus")
        yield from ({"figure": "precision", "sign": sign, "step": s, "precision": trace[s]} for s in range(0, 2001, 20))


def learned_precision(*, printed: bool, steps: int = 2000) -> list[float]:
    """The precision after every step of training a small dropout network on a noisy sine."""
    torch.manual_seed(SEED)
    x = torch.linspace(-2, 2, 200)[:, None]
    y = torch.sin(2 * x) + 0.2 * torch.randn_like(x)  # precision 25
    net = mlp([1, 50, 1], dropout=0.05, input_dropout=0)
    log_precision = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([*net.parameters(), log_precision], lr=0.01)
    trace = [1.0]
    for _ in range(steps):
        loss = bbalpha.gaussian_nll(bbalpha.sample(net, x, 10), y, alpha=0.5, precision=log_precision.exp())
        if printed:  # the loss has -1/2 log tau a point; the paper prints +1/2 log tau
            loss = loss + log_precision
        optimizer.zero_grad()
        (loss + bbalpha.prior_kl(net, length_scale=0.1, n_data=200)).backward()
        optimizer.step()
        trace.append(log_precision.exp().item())
    return trace


def one_weight(n: int) -> dv.LinearGaussian:
    """N observations of one number, with residuals whose variance is exactly what the model says."""
    noise = torch.randn(n, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    noise = (noise - noise.mean()) / noise.std(correction=0)
    return dv.LinearGaussian(torch.ones(n, 1, dtype=torch.float64), 0.5 + noise)


def two_weights(n: int) -> dv.LinearGaussian:
    """Linear regression on two inputs with correlation -0.85 or so: the weights come out correlated."""
    g = torch.Generator().manual_seed(SEED)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64)
    x[:, 1] = -0.85 * x[:, 0] + math.sqrt(1 - 0.85**2) * x[:, 1]
    return dv.LinearGaussian(x, x @ torch.ones(2, dtype=torch.float64) + torch.randn(n, generator=g).double())


def naval_score() -> list[Row]:
    """The score of predicting the training mean and deviation on naval, over the published splits."""
    folder = os.environ.get("BBALPHA_DATA")
    if not folder:
        return select(results.read(FIGURES / "method.json")["rows"], "naval")
    data = np.load(Path(folder) / "uci" / "naval.npz", allow_pickle=False)
    scores = []
    for test in data["test_mask"]:
        train, held = data["y"][~test], data["y"][test]
        scores.append(
            np.mean(((held - train.mean()) / train.std()) ** 2 / 2) + math.log(train.std()) + math.log(2 * math.pi) / 2
        )
    return [{"figure": "naval", "nll_of_the_mean": float(np.mean(scores)), "rmse_of_the_mean": float(data["y"].std())}]


# ------------------------------------------------------------------------------ figures


def draw(name: str) -> None:
    """Draw docs/figures/method_<name>.png from method.json; `name` is divergences, variance or precision."""
    rows = results.read(FIGURES / "method.json")["rows"]
    picture = {"divergences": divergence_figure, "variance": variance_figure, "precision": precision_figure}[name](rows)
    picture.savefig(FIGURES / f"method_{name}.png", dpi=110)


def select(rows: list[Row], figure: str, **where: Any) -> list[Row]:
    """Rows of a figure."""
    return [r for r in rows if r["figure"] == figure and all(r[k] == v for k, v in where.items())]


def divergence_figure(rows: list[Row]) -> Any:
    """The closest Gaussians."""
    fig = plots.new_figure(8.6, 3.4)
    left, right = fig.subplots(1, 2, width_ratios=(1.45, 1))
    grid, density = mode_and_tail()
    left.fill_between(grid, density, color="0.85", label="posterior p")
    for row in select(rows, "mode and tail"):
        q = Normal(row["mean"], row["std"]).log_prob(grid).exp()
        left.plot(grid, q, color=COLOURS[row["alpha"]], label=rf"$\alpha$ = {row['alpha']:g}, {NAMES[row['alpha']]}")
    left.set(xlim=(-3.6, 4.6), yticks=[], xlabel="w", title="a mode and a wide tail")
    left.set_ylim(0, 0.8)
    left.legend(frameon=False, fontsize=8)
    ellipse(right, (0, 0), np.array(CORRELATED), color="0.85")
    for row in select(rows, "correlated"):
        ellipse(right, (0, 0), row["variance_ratio"] * np.eye(2), fill=False, edgecolor=COLOURS[row["alpha"]], lw=2)
    right.set(
        xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal", xlabel="$w_1$", ylabel="$w_2$", title="correlation 0.85"
    )
    return fig


def variance_figure(rows: list[Row]) -> Any:
    """The optima of the loss beside the exact posterior."""
    fig = plots.new_figure(8.6, 3.4)
    left, right = fig.subplots(1, 2, width_ratios=(1.45, 1))
    for n, shade in zip(N_DATA, ("0.65", "0.4", "0.0"), strict=True):
        own = select(rows, "one weight", n_data=n)
        left.plot([r["alpha"] for r in own], [r["variance_ratio"] for r in own], color=shade, label=f"N = {n}")
    alphas = np.linspace(0, 1, 21)[:-1]
    left.plot(alphas, 1 / (1 - alphas), "--", color=COLOURS[0.5], label=r"1 / (1 - $\alpha$)")
    left.set(yscale="log", xlabel=r"$\alpha$", ylabel="variance of q / exact", title="one weight, model well specified")
    left.set_yticks([1, 2, 5, 10, 30], ["1", "2", "5", "10", "30"])
    left.minorticks_off()
    left.legend(frameon=False, fontsize=8)
    exact = two_weights(60).posterior(Independent(Normal(torch.zeros(2, dtype=torch.float64), 1.0), 1))
    ellipse(right, exact.mean.numpy(), exact.covariance_matrix.numpy(), color="0.85", label="exact posterior")
    for row in select(rows, "two weights"):
        mean, std = ((row[f"{name}_1"], row[f"{name}_2"]) for name in ("mean", "std"))
        label, colour = rf"$\alpha$ = {row['alpha']:g}", COLOURS[row["alpha"]]
        ellipse(right, mean, np.diag(std) ** 2, fill=False, edgecolor=colour, lw=2, label=label)
    right.set(xlabel="$w_1$", ylabel="$w_2$", title="two weights, N = 60", aspect="equal", xlim=(-0.2, 3.1))
    right.set_ylim(-0.5, 2.2)
    right.legend(frameon=False, fontsize=8, loc="center right")
    return fig


def precision_figure(rows: list[Row]) -> Any:
    """The learned precision over the steps."""
    fig = plots.new_figure(5.2, 3.2)
    axis = fig.subplots()
    for sign, colour in SIGNS.items():
        own = select(rows, "precision", sign=sign)
        label = f"{sign} ND/2 log τ" + (", as printed" if sign == "plus" else "")
        axis.plot([r["step"] for r in own], [r["precision"] for r in own], color=colour, label=label)
    axis.axhline(25, color="0.6", ls=":", label="the data's: 25")
    axis.set(yscale="log", xlabel="step", ylabel="learned τ")
    axis.legend(frameon=False, fontsize=8)
    return fig


# ------------------------------------------------------------------------------ tables


def tables(rows: list[Row]) -> dict[str, str]:
    """The tables of method.md by the name of their marker."""

    def pick(**where: Any) -> Row:
        return next(r for r in rows if all(r.get(k) == v for k, v in where.items()))

    def ratio(**where: Any) -> str:
        return f"{pick(**where)['variance_ratio']:.2f}"

    lines = ["| variance of q / exact | alpha = 0 | alpha = 0.5 | alpha = 1 |", "|---|---|---|---|"]
    kinds = [(f"one weight, N = {n}", {"figure": "one weight", "n_data": n}) for n in N_DATA]
    kinds.append(("two correlated weights, N = 60", {"figure": "two weights"}))
    lines += [f"| {k} | " + " | ".join(ratio(alpha=a, **w) for a in ALPHAS) + " |" for k, w in kinds]
    steps = (0, 500, 1000, 2000)
    runaway = ["| term in log τ | " + " | ".join(f"step {s}" for s in steps) + " |", "|---|---|---|---|---|"]
    for sign in ("minus", "plus"):
        values = (pick(figure="precision", sign=sign, step=s)["precision"] for s in steps)
        runaway.append(f"| {sign} | " + " | ".join(f"{v:.2g}" for v in values) + " |")
    naval = pick(figure="naval")
    scores = (
        f"Predicting the training mean with the training deviation scores {naval['nll_of_the_mean']:.2f} (negative "
        f"log-likelihood, mean over the 20 splits), with an RMSE of {naval['rmse_of_the_mean']:.3f}."
    )
    return {"variance": "\n".join(lines), "precision": "\n".join(runaway), "naval": scores}


def main() -> None:
    """Measure everything."""
    start = time.time()
    torch.set_num_threads(1)
    rows = [*closest(), *optima(), *precisions(), *naval_score()]
    path = results.write(
        FIGURES / "method.json", command="python docs/figures_method.py", seed=SEED, seconds=time.time() - start,
        rows=rows,
    )  # fmt: skip
    page = DOCS / "method.md"
    text = page.read_text()
    for name, table in tables(results.read(path)["rows"]).items():
        head, found, rest = text.partition(f"<!-- begin {name} -->\n")
        if not found:
            raise ValueError(f"docs/method.md must have the marker <!-- begin {name} -->; it has none.")
        text = head + found + table + "\n" + rest[rest.index(f"<!-- end {name} -->") :]
    page.write_text(text)


if __name__ == "__main__":
    main()
