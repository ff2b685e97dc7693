"""Every figure, one function each: draws on `ax` (a new one if None) and returns it.

Colours are Okabe and Ito's, told apart by colour-blind eyes; lines also differ in dash and marker, areas in
brightness and hatching, so that a grey print reads the same.

    ax = reliability_diagram({"alpha 0.5": metrics.reliability(p.probs, y)})
    ax.figure.savefig("reliability.png")
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bbalpha.checks import check_count, check_inner_share, check_real
from bbalpha.metrics import Reliability, RiskCoverage
from bbalpha.predictive import RegressionPrediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#000000", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)))
_MARKERS = "osD^vPX"
_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++", "oo")
_UNITS = {"nll": "test negative log-likelihood (nats)", "rmse": "test RMSE (units of the target)"}


def regression_bands(
    x: Tensor,
    prediction: RegressionPrediction,
    *,
    coverage: float = 0.9,
    data: tuple[Tensor, Tensor] | None = None,
    xlabel: str = "x",
    ylabel: str = "y",
    ax: "Axes | None" = None,
) -> "Axes":
    """The mean of a 1-D regression, with the bands of its passes (epistemic) and of the whole mixture.

    Args:
        x: Inputs (N,) or (N, 1), in any order.
        prediction: Of one output at these inputs.
        coverage: What both bands hold.
        data: Training inputs and targets to show as points.
        xlabel: Name and unit of the input.
        ylabel: Name and unit of the target.
        ax: Where to draw.
    """
    check_inner_share("coverage", coverage)
    check_real("x", x)
    if data is not None and not (isinstance(data, (tuple, list)) and len(data) == 2):
        raise ValueError(f"`data` must be a pair of tensors, inputs and targets; got {type(data).__name__}.")
    if x.ndim == 0 or prediction.outputs[0].numel() != len(x) or x.numel() != len(x):
        raise ValueError(
            f"`x` and `prediction` must be one number a row; got {tuple(x.shape)} and {tuple(prediction.mean.shape)}."
        )
    ax = _axes(ax)
    order = x.flatten().argsort()
    at = _numbers(x.flatten()[order])
    passes = replace(prediction, precision=None)
    layers: list[tuple[RegressionPrediction, str, str]] = [(passes, "#5B8DB8", "epistemic: where the mean may lie")]
    if prediction.precision is not None:
        layers.insert(0, (prediction, "#C9DCEB", "total: where a new target may lie"))
    for p, colour, label in layers:
        low, high = (_numbers(b.flatten()[order]) for b in p.interval(coverage))
        ax.fill_between(at, low, high, color=colour, linewidth=0, label=label)
        ax.plot(at, low, at, high, color="#30506B", linewidth=0.6)
    ax.plot(at, _numbers(prediction.mean.flatten()[order]), color="black", linewidth=1.6, label="mean")
    if data is not None:
        points = [_numbers(t.flatten()) for t in data]
        ax.plot(*points, "o", color="white", markeredgecolor="black", markeredgewidth=1, markersize=4, label="data")
    ax.set(xlabel=xlabel, ylabel=ylabel, title=f"Prediction with {coverage:.0%} bands")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)  # nothing of the data hidden
    return ax


def reliability_diagram(curves: Mapping[str, Reliability], *, ax: "Axes | None" = None) -> "Axes":
    """Accuracy against confidence: on the diagonal a model is right as often as it says.

    Args:
        curves: {label: metrics.reliability(probs, target)}. Points grow with the number of predictions.
        ax: Where to draw.
    """
    _check_curves(curves)
    ax = _axes(ax)
    ax.plot([0, 1], [0, 1], color="#888888", linewidth=1, label="as sure as right")
    for i, (label, r) in enumerate(curves.items()):
        style = _style(i)
        confidence, accuracy = _numbers(r.confidence), _numbers(r.accuracy)
        share = _numbers(r.count / r.count.sum())
        ax.plot(confidence, accuracy, **style, label=f"{label} (error {float(r.error):.3f})")
        ax.scatter(confidence, accuracy, 10 + 300 * share, color=style["color"], marker=_MARKERS[i % 7], zorder=3)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.set(xlabel="confidence (probability of the predicted class)", ylabel="accuracy (share right)")
    ax.set_title("Reliability")
    ax.legend(frameon=False, loc="upper left")
    return ax


def risk_coverage(curves: Mapping[str, RiskCoverage], *, risk: str = "share wrong", ax: "Axes | None" = None) -> "Axes":
    """What is lost on the rows kept, against how many are kept, surest first.

    Args:
        curves: {label: metrics.risk_coverage(uncertainty, loss)}.
        risk: Name and unit of the loss.
        ax: Where to draw.
    """
    _check_curves(curves)
    ax = _axes(ax)
    for i, (label, curve) in enumerate(curves.items()):
        ax.plot(
            _numbers(curve.coverage), _numbers(curve.risk), **_style(i), label=f"{label} (area {float(curve.area):.3g})"
        )
    ax.set(xlim=(0, 1), xlabel="coverage (share of rows kept)", ylabel=f"risk ({risk})", title="Risk against coverage")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    return ax


def entropy_histogram(
    entropies: Mapping[str, Tensor],
    *,
    n_bins: int = 30,
    xlabel: str = "predictive entropy (nats)",
    ax: "Axes | None" = None,
) -> "Axes":
    """How unsure a model is on data like its training data, and on other data.

    Args:
        entropies: {label: entropy or mutual information (N,)}.
        n_bins: Bins, the same for all.
        xlabel: Name and unit of the uncertainty.
        ax: Where to draw.
    """
    _check_curves(entropies)
    n_bins = check_count("n_bins", n_bins)
    ax = _axes(ax)
    values = {label: _numbers(e.flatten()) for label, e in entropies.items()}
    edges = np.linspace(0, max(max(float(v.max()) for v in values.values()), 1e-9), n_bins + 1)
    for i, (label, v) in enumerate(values.items()):
        colour = _COLOURS[i % 7]
        share = np.histogram(v, edges)[0] / len(v)
        ax.stairs(share, edges, fill=True, color=colour, alpha=0.25 if i == 0 else 0.0)
        ax.stairs(share, edges, color=colour, linewidth=1.6, linestyle=_DASHES[i % 7], label=label)
        if _HATCHES[i % 7]:
            ax.stairs(share, edges, fill=True, facecolor="none", edgecolor=colour, hatch=_HATCHES[i % 7], linewidth=0)
    ax.set(xlabel=xlabel, ylabel="share of rows", title="Uncertainty by origin")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    return ax


def learning_curves(
    curves: Mapping[str, Sequence[float]],
    *,
    ylabel: str = "loss per data point (nats)",
    xlabel: str = "epoch",
    ax: "Axes | None" = None,
) -> "Axes":
    """Losses over the epochs of a training; the least of every curve is marked.

    Args:
        curves: {label: one number an epoch}.
        ylabel: Name and unit of the numbers.
        xlabel: What counts them.
        ax: Where to draw.
    """
    _check_curves(curves)
    ax = _axes(ax)
    for i, (label, values) in enumerate(curves.items()):
        numbers = np.asarray(values, dtype=float)
        epochs = np.arange(1, len(numbers) + 1)
        style = _style(i)
        ax.plot(epochs, numbers, **style, label=label)
        if np.isfinite(numbers).any():
            best = int(np.nanargmin(numbers))
            ax.plot(epochs[best], numbers[best], _MARKERS[i % 7], color=style["color"])
    ax.set(xlabel=xlabel, ylabel=ylabel, title="Learning curves")
    ax.locator_params(axis="x", integer=True)
    ax.legend(frameon=False)
    return ax


def method_scores(
    rows: Sequence[Mapping[str, Any]], *, dataset: str, metric: str = "nll", ax: "Axes | None" = None
) -> "Axes":
    """One panel of the paper's comparison: mean and standard error over the splits of a data set, by method.

    Points with error bars, not bars from 0: methods differ by little, and 0 nats means nothing. A method so far above
    the others that they would be one line leaves the panel at its top, with its number.

    Args:
        rows: Flat result records with `dataset`, `method`, `alpha`, `split` and `metric`. Colours go by the methods of
            all rows: panels of the same rows agree.
        dataset: Which to show.
        metric: "nll", "rmse" or another number of the records.
        ax: Where to draw.
    """
    groups: dict[tuple[str, Any], list[float]] = {}
    for row in rows:
        if row["dataset"] == dataset and row.get(metric) is not None:
            groups.setdefault((str(row["method"]), row.get("alpha")), []).append(float(row[metric]))
    if not groups:
        known = sorted({str(row["dataset"]) for row in rows})
        raise ValueError(f"`rows` must hold {metric!r} of {dataset!r}; got the data sets {known}.")
    ax = _axes(ax)
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    ends = []
    for i, ((method, _), values) in enumerate(groups.items()):
        mean = float(np.mean(values))
        error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
        ends.append((mean - error, mean + error))
        m = methods.index(method)
        ax.errorbar(
            i, mean, error, fmt=_MARKERS[m % 7], color=_COLOURS[m % 7], markersize=7, capsize=4, elinewidth=1.6,
            markerfacecolor=_COLOURS[m % 7] if m < 7 else "white",
        )  # fmt: skip
    _cut_the_highest(ax, ends)
    names = [method if alpha is None else f"{method}\nalpha {alpha:g}" for method, alpha in groups]
    ax.set_xticks(range(len(groups)), names)
    ax.set_xlim(-0.6, len(groups) - 0.4)
    splits = max(len(v) for v in groups.values())
    ax.set_ylabel(_UNITS.get(metric, metric))
    ax.set_title(f"{dataset}: mean and standard error of {splits} split{'s' if splits > 1 else ''}")
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    ax.set_axisbelow(True)
    return ax


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'bbalpha[plots]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def line(i: int, *, dash: int | None = None) -> dict[str, Any]:
    """Colour and dash of the i-th line of a figure, for `ax.plot`; with the dash of another if `dash` is its number.

    >>> line(0)["color"], line(7) == line(0), line(0, dash=1)["linestyle"]
    ('#0072B2', True, '--')
    """
    return {"color": _COLOURS[i % 7], "linestyle": _DASHES[(i if dash is None else dash) % 7]}


# ------------------------------------------------------------------------------ helpers


def _axes(ax: "Axes | None") -> "Axes":
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'bbalpha[plots]'.") from error
    if ax is None:
        _, ax = plt.subplots(figsize=(5.5, 4.0), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _cut_the_highest(ax: "Axes", ends: Sequence[tuple[float, float]]) -> None:
    """Leave the highest of these (low, high) out of the panel if the others would fill less than a tenth of it."""
    at = max(range(len(ends)), key=lambda i: ends[i][1])
    low, high = (pick(end[side] for i, end in enumerate(ends) if i != at or len(ends) == 1)
                 for side, pick in ((0, min), (1, max)))  # fmt: skip
    if 0 < 10 * (high - low) < max(end[1] for end in ends) - low:
        ax.set_ylim(low - 0.1 * (high - low), high + 0.2 * (high - low))
        mean, error = sum(ends[at]) / 2, (ends[at][1] - ends[at][0]) / 2
        ax.annotate(
            f"{mean:.3g} ± {error:.2g}", (at, high + 0.2 * (high - low)), xytext=(0, -26), textcoords="offset points",
            ha="center", fontsize=8, arrowprops={"arrowstyle": "->"},
        )  # fmt: skip


def _style(i: int) -> dict[str, Any]:
    return line(i) | {"linewidth": 1.8}


def _numbers(t: Tensor) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return t.detach().to("cpu", torch.float64).numpy()


def _check_curves(curves: Mapping[str, Any]) -> None:
    if not isinstance(curves, Mapping) or not curves:
        got = "none" if isinstance(curves, Mapping) else type(curves).__name__
        raise ValueError(f"Curves must be a mapping {{label: values}} of at least one; got {got}.")
