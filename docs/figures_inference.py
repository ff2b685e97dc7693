"""The figure of docs/inference.md, from results/inference.json: `make figures`."""

from pathlib import Path

from scipy import stats

from bbalpha import plots
from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent


def draw(name):
    """Draw docs/figures/inference_<name>.png; `name` is ranks."""
    rows = results.read(ROOT / "results/inference.json")["rows"]
    ranks_figure([r for r in rows if "ranks" in r]).savefig(ROOT / f"docs/figures/inference_{name}.png", dpi=110)


def ranks_figure(rows):
    """Ranks of the true weights among draws of q; grey is what chance gives to 99 % of the bars where q is right."""
    works = list(dict.fromkeys(r["work"] for r in rows))
    alphas = sorted({r["alpha"] for r in rows})
    picture = plots.new_figure(9, 2.1 * len(works) + 0.4)
    axes = picture.subplots(len(works), len(alphas), sharex=True, squeeze=False)
    for r in rows:
        ax = axes[works.index(r["work"])][alphas.index(r["alpha"])]
        counts = [int(n) for n in r["ranks"].split()]
        low, high = stats.binom.interval(0.99, sum(counts), 1 / len(counts))
        ax.axhspan(low, high, color="#CCCCCC", linewidth=0)
        ax.bar(range(len(counts)), counts, width=0.9, color=plots.line(alphas.index(r["alpha"]))["color"])
        ax.set_title(f"{r['work']}, alpha = {r['alpha']:g}", fontsize=9)
        ax.set_xticks([0, len(counts) - 1], ["low", "high"])
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("rank of the true weight")
    return picture
