"""The pictures of a model's report, a figure each; colours and lines are those of `bbalpha.plots`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from bbalpha import metrics, plots
from bbalpha.report.evidence import Evidence
from bbalpha.report.svg import label
from bbalpha.report.words import ERRORS, Array, Share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN, _PLACES = 150, 1000  # intervals in a picture, points of a line
_BLUE, _RED, _BLACK = (plots.line(i)["color"] for i in range(3))
_GREY, _GRID = "#888888", "#DDDDDD"


def coverage(shares: Sequence[Share]) -> "Figure":
    """Targets inside against the level that was promised, with bars of two standard errors."""
    figure, ax = _panel(5.0, 4.0)
    at = [100 * share.promised for share in shares]
    ax.plot([45, 100], [45, 100], color=_GREY, linewidth=1, label="as promised")
    ax.errorbar(
        at, [100 * share.value for share in shares], [100 * ERRORS * share.error for share in shares], fmt="o",
        color=_BLUE, capsize=4, markersize=6, label="seen, with two standard errors",
    )  # fmt: skip
    ax.set(xlabel="level of the interval (%)", ylabel="targets inside (%)", xlim=(45, 100))
    ax.set_ylim(min(45, ax.get_ylim()[0]), 103)
    ax.legend(frameon=False, loc="upper left")
    return figure


def ranks(pit: Array) -> "Figure":
    """How often targets fall into each part of what was predicted for them."""
    figure, ax = _panel(5.0, 4.0)
    n_bins = 10 if len(pit) >= 100 else 5
    counts, edges = np.histogram(pit.clip(0, 1), np.linspace(0, 1, n_bins + 1))
    error = np.sqrt((1 - 1 / n_bins) / n_bins / len(pit))
    ax.stairs(counts / len(pit), edges, fill=True, color=_BLUE, alpha=0.45)
    ax.stairs(counts / len(pit), edges, color=_BLUE, linewidth=1.4)
    ax.axhline(1 / n_bins, color=_BLACK, linewidth=1.2, label="where the model is right")
    for side in (-ERRORS, ERRORS):
        ax.axhline(
            max(1 / n_bins + side * error, 0), color=_BLACK, linewidth=0.9, linestyle="--",
            label="two standard errors around it" if side > 0 else None,
        )  # fmt: skip
    ax.set(xlabel="share of the prediction that lies below the target", ylabel="share of rows", xlim=(0, 1))
    ax.set_ylim(0, 1.35 * max(counts.max() / len(pit), 1 / n_bins + ERRORS * error))
    ax.legend(frameon=False, loc="upper left")
    return figure


def intervals(evidence: Evidence, target: str) -> tuple["Figure", int]:
    """90 % intervals in the order of their means, with targets in and out of them; and how many are shown."""
    figure, ax = _panel(9.0, 4.2)
    order = np.argsort(evidence.found["mean"], kind="stable")
    if len(order) > _SHOWN:
        order = order[np.linspace(0, len(order) - 1, _SHOWN).round().astype(int)]
    low, high, y = (v[order] for v in (evidence.found["low"], evidence.found["high"], evidence.target))
    at, inside = np.arange(len(order)), evidence.inside[order]
    width = float(np.clip(500 / len(order), 1.5, 8))
    ax.vlines(at, low, high, color=_BLUE, linewidth=width, alpha=0.4, label="90 % interval")
    ax.plot(at[inside], y[inside], "o", color=_BLACK, markersize=3.5, label="target inside")
    if not inside.all():
        ax.plot(at[~inside], y[~inside], "X", color=_RED, markersize=7, label="target outside")
    ax.set(xlabel="rows, by their predicted mean", ylabel=label(target), xlim=(-1, len(order)))
    ax.legend(frameon=False, loc="upper left")
    return figure, len(order)


def reliability(evidence: Evidence) -> "Figure":
    """Accuracy against confidence."""
    figure, ax = _panel(5.0, 4.6)
    found = metrics.reliability(torch.tensor(evidence.found["probs"]), torch.tensor(evidence.target))
    plots.reliability_diagram({"the model": found}, ax=ax)
    at, count = found.confidence.numpy(), found.count.numpy()
    error = np.sqrt(at * (1 - at) / count)
    ax.errorbar(
        at, at, ERRORS * error, fmt="none", ecolor=_GREY, capsize=4,
        label="two standard errors",
    )  # fmt: skip
    ax.set_title("")
    ax.legend(frameon=False, loc="upper left")
    return figure


def refusing(evidence: Evidence, risk: str, names: tuple[str, str]) -> "Figure":
    """What is lost on the rows kept, the surest first."""
    figure, ax = _panel(5.6, 4.0)
    loss = torch.tensor(evidence.loss)
    curves = {
        name: _thinned(metrics.risk_coverage(torch.tensor(by), loss))
        for name, by in zip(names, (evidence.doubt, evidence.ignorance), strict=True)
    }
    plots.risk_coverage(curves, risk=risk, ax=ax)
    ax.axhline(float(loss.mean()), color=_GREY, linewidth=1, label="rows kept at random")
    ax.set_title("")
    ax.set_ylim(0, max(1.3 * float(loss.mean()), ax.get_ylim()[1]))
    ax.legend(frameon=False)
    return figure


def _thinned(curve: metrics.RiskCoverage) -> metrics.RiskCoverage:
    """The curve at places enough for a picture."""
    n = len(curve.risk)
    if n <= _PLACES:
        return curve
    at = torch.linspace(0, n - 1, _PLACES).round().long()
    return metrics.RiskCoverage(curve.coverage[at], curve.risk[at])


def _panel(width: float, height: float) -> "tuple[Figure, Axes]":
    figure = plots.new_figure(width, height)
    ax: Axes = figure.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color=_GRID, linewidth=0.7)
    ax.set_axisbelow(True)
    return figure, ax
