"""Draw the figures of docs from JSON that is there: `make figures`; `python docs/make_figures.py mnist` for one page.

Two are not made here: docs/figures/demo.png comes from `make demo`, and strips of attacked digits need the .npz files
that `bbalpha reproduce adversarial` leaves beside its numbers; without them they stay as they are.
"""

import argparse
from pathlib import Path

import figures_active
import figures_explore
import figures_inference
import figures_method
import figures_passes
import figures_scale
import tables_regression

from bbalpha import plots
from bbalpha.experiments import adversarial_figures, classification, results, runtime

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs/figures"
ORDER = ["bbalpha", "bbalpha-cv", "bbalpha-het", "bbalpha-ens", "bbalpha-2x", "mc-dropout", "ensemble", "vi-g", "hmc",
         "gp", "gbm"]  # fmt: skip


def regression(metric):
    """One panel a data set; methods in one order everywhere."""
    found, published = tables_regression.load(), tables_regression.paper()
    rows = [row for content in found.values() for row in content["rows"]]
    rows = [r for r in rows if r["method"] in ORDER]  # balanced masks have a page of their own
    rows.sort(key=lambda r: (ORDER.index(r["method"]), r["alpha"] or 0.0))
    picture = plots.new_figure(16, 4.6 * -(-len(found) // 3))
    axes = picture.subplots(-(-len(found) // 3), 3, squeeze=False).flatten()
    for ax, dataset in zip(axes, found, strict=False):
        plots.method_scores(rows, dataset=dataset, metric=metric, ax=ax)
        columns = dict.fromkeys((r["method"], r["alpha"]) for r in rows if r["dataset"] == dataset)
        beside(ax, [published.get((dataset, metric, tables_regression.PUBLISHED.get(key))) for key in columns])
        ax.tick_params(axis="x", labelrotation=60, labelsize=7)
    for ax in axes[len(found) :]:
        ax.set_visible(False)
    picture.suptitle("Grey: what the paper has for the same method, where it is near enough to be in the panel")
    picture.savefig(FIGURES / f"regression_{metric}.png", dpi=90)


def beside(ax, numbers):
    """The paper's numbers, in grey, to the right of ours; the panel stays as it is."""
    low, high = ax.get_ylim()
    for x, number in enumerate(numbers):
        if number and low < number[0] < high:
            ax.errorbar(x + 0.28, number[0], number[1] or 0, fmt="_", color="#888888", markersize=9, elinewidth=1.2)
    ax.set_ylim(low, high)


def mnist(model):
    """Accuracy and log-likelihood: over the epochs of a model, or over time."""
    if model == "runtime":
        runtime.figure(runtime.load(ROOT / "results/runtime")["rows"], FIGURES / "mnist_runtime.png")
    else:
        rows = results.read(ROOT / f"results/classification/{model}.json")["rows"]
        classification.figure(rows, FIGURES / f"mnist_{model}.png")


PAGES = {
    "regression": (regression, ("nll", "rmse")),
    "mnist": (mnist, ("dense", "cnn", "runtime")),
    "adversarial": (lambda name: adversarial_figures.draw(ROOT / "results" / name, FIGURES), ("adversarial",)),
    "method": (figures_method.draw, ("divergences", "variance", "precision")),
    "passes": (figures_passes.draw, ("bias",)),
    "scale": (figures_scale.draw, ("costs",)),
    "active": (figures_active.draw, ("repeated_mnist_x2", "mnist", "repeated_mnist_x5")),
    "explore": (figures_explore.draw, ("regret",)),
    "inference": (figures_inference.draw, ("ranks",)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", default=list(PAGES), help=f"of {', '.join(PAGES)}; all if none is named")
    pages = parser.parse_args().pages
    if set(pages) - PAGES.keys():
        parser.error(f"pages must be of {', '.join(PAGES)}; got {', '.join(pages)}.")
    for page in pages:
        draw, names = PAGES[page]
        for name in names:
            try:
                draw(name)
                print(f"{page}: {name}")
            except FileNotFoundError as error:
                print(f"{page}: {name} has not been measured yet ({error.filename})")


if __name__ == "__main__":
    main()
