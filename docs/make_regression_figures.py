"""The figures of docs/regression.md out of results/regression/*.json: `python docs/make_regression_figures.py`.

Writes docs/figures/regression_nll.png and docs/figures/regression_rmse.png: every method, means and standard errors.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

from bbalpha import plots

sys.path.insert(0, str(Path(__file__).parent))
import tables_regression
from tables_regression import PUBLISHED

FIGURES = Path(__file__).parent / "figures"
ORDER = ["bbalpha", "bbalpha-cv", "bbalpha-het", "bbalpha-ens", "bbalpha-2x", "mc-dropout", "ensemble", "vi-g", "hmc",
         "gp", "gbm"]  # fmt: skip


def figure(metric):
    """One panel a data set; methods in one order everywhere."""
    found, published = tables_regression.load(), tables_regression.paper()
    rows = [row for content in found.values() for row in content["rows"]]
    rows.sort(key=lambda r: (ORDER.index(r["method"]), r["alpha"] or 0.0))
    picture = Figure(figsize=(16, 4.6 * -(-len(found) // 3)), layout="constrained")
    axes = picture.subplots(-(-len(found) // 3), 3, squeeze=False).flatten()
    for ax, dataset in zip(axes, found, strict=False):
        plots.method_scores(rows, dataset=dataset, metric=metric, ax=ax)
        columns = dict.fromkeys((r["method"], r["alpha"]) for r in rows if r["dataset"] == dataset)
        beside(ax, [published.get((dataset, metric, PUBLISHED.get(key))) for key in columns])
        ax.tick_params(axis="x", labelrotation=60, labelsize=7)
    for ax in axes[len(found) :]:
        ax.set_visible(False)
    picture.suptitle("Grey: what the paper has for the same method, where it is near enough to be in the panel")
    path = FIGURES / f"regression_{metric}.png"
    picture.savefig(path, dpi=90)
    return path


def beside(ax, numbers):
    """The paper's numbers, in grey, to the right of ours; the panel stays as it is."""
    low, high = ax.get_ylim()
    for x, number in enumerate(numbers):
        if number and low < number[0] < high:
            ax.errorbar(x + 0.28, number[0], number[1] or 0, fmt="_", color="#888888", markersize=9, elinewidth=1.2)
    ax.set_ylim(low, high)


def main():
    for metric in ("nll", "rmse"):
        print(figure(metric))


if __name__ == "__main__":
    main()
