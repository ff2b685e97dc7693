"""The figure of docs/guides/explore.md, from results/optimise.json: `make figures`."""

from pathlib import Path

import numpy as np
import tables_explore

from bbalpha import plots
from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent
LEAST = 1e-7  # regrets below are drawn there


def draw(name):
    """Draw docs/figures/explore_<name>.png; `name` is regret."""
    content = results.read(ROOT / "results/optimise.json")
    picture = plots.new_figure(8.6, 3.6)
    axes = picture.subplots(1, len(tables_explore.PROBLEMS))
    for ax, (problem, title) in zip(axes, tables_explore.PROBLEMS.items(), strict=True):
        for i, (way, label) in enumerate(tables_explore.WAYS.items()):
            own = tables_explore.select(content, problem, way)
            if not own:
                continue
            regret = np.array([[r[f"regret{n}"] for n in range(1, 61)] for r in own]).clip(LEAST)
            low, middle, high = np.quantile(regret, [0.25, 0.5, 0.75], axis=0)
            line = plots.line(i)
            ax.plot(range(1, 61), middle, label=label.strip("*"), **line)
            ax.fill_between(range(1, 61), low, high, alpha=0.12, color=line.get("color"), linewidth=0)
        ax.set(yscale="log", xlabel="evaluations", title=title)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes[0].set_ylabel("regret: median and quartiles")
    axes[0].legend(frameon=False, fontsize=8)
    picture.savefig(ROOT / f"docs/figures/explore_{name}.png", dpi=110)
