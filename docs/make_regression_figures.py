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

FIGURES = Path(__file__).parent / "figures"
ORDER = ["bbalpha", "bbalpha-cv", "bbalpha-het", "bbalpha-ens", "bbalpha-2x", "mc-dropout", "ensemble", "vi-g", "hmc",
         "gp", "gbm"]  # fmt: skip


def figure(metric):
    """One panel a data set; methods in one order everywhere."""
    found = tables_regression.load()
    picture = Figure(figsize=(16, 4.2 * -(-len(found) // 3)), layout="constrained")
    axes = picture.subplots(-(-len(found) // 3), 3, squeeze=False).flatten()
    for ax, (dataset, content) in zip(axes, found.items(), strict=False):
        rows = sorted(content["rows"], key=lambda r: (ORDER.index(r["method"]), r["alpha"] or 0.0))
        plots.method_scores(rows, dataset=dataset, metric=metric, ax=ax)
        ax.tick_params(axis="x", labelrotation=60, labelsize=7)
    for ax in axes[len(found) :]:
        ax.set_visible(False)
    path = FIGURES / f"regression_{metric}.png"
    picture.savefig(path, dpi=90)
    return path


def main():
    for metric in ("nll", "rmse"):
        print(figure(metric))


if __name__ == "__main__":
    main()
