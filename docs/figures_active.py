"""Figures of docs/active.md: learning curves, ours beside the published ones."""

import statistics
from pathlib import Path

import tables_active

from bbalpha import plots
from bbalpha.experiments import active, results

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"random": "random", "bald": "BALD", "batch-bald": "BatchBALD", "bbalpha": "ours"}


def draw(dataset):
    """Accuracy by labels: medians and quartiles as far as all seeds have come; the published medians in grey."""
    content = results.read(ROOT / f"results/active/{dataset}.json")
    picture = plots.new_figure(8, 4.8)
    ax = picture.subplots()
    for i, (method, name) in enumerate(NAMES.items()):
        curve = active.curves(content["rows"], method)
        whole = {n: values for n, values in curve.items() if len(values) == max(map(len, curve.values()))}
        if not whole:
            continue
        quarters = [statistics.quantiles(v, n=4, method="inclusive") if len(v) > 1 else v * 3 for v in whole.values()]
        style, seeds = plots.line(i), len(next(iter(whole.values())))
        ax.plot(list(whole), [q[1] for q in quarters], **style, label=f"{name} ({seeds} seed{'s' * (seeds > 1)})")
        low, high = [q[0] for q in quarters], [q[2] for q in quarters]
        ax.fill_between(list(whole), low, high, color=style["color"], alpha=0.18, linewidth=0)
    for dash, (method, rows) in zip((":", "--", "-"), tables_active.published(dataset).items(), strict=False):
        at = [(int(r["labels"]), float(r["acc_median"])) for r in rows if int(r["labels"]) <= 300]
        ax.plot(*zip(*at, strict=True), color="#888888", linestyle=dash, linewidth=1.2, label=f"{method}, published")
    ax.set(xlabel="labels", ylabel="test accuracy", ylim=(0.6, 1.0), title=tables_active.SETS[dataset])
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#DDDDDD", linewidth=0.7)
    ax.legend(frameon=False, fontsize=8, loc="lower right")
    picture.savefig(ROOT / f"docs/figures/active_{dataset}.png", dpi=110)
