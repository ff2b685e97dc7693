"""The figure of docs/passes.md, from results/passes.json: `make figures`."""

from pathlib import Path

from bbalpha import plots
from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent
MARKERS = {"independent": "o", "balanced": "s"}


def draw(name):
    """Draw docs/figures/passes_<name>.png; `name` is bias."""
    rows = [r for r in results.read(ROOT / "results/passes.json")["rows"] if r["work"] == name]
    bias_figure(rows).savefig(ROOT / f"docs/figures/passes_{name}.png", dpi=110)


def bias_figure(rows):
    """Bias of the alpha objective against K, one panel a network: colour is alpha, full is independent."""
    networks = list(dict.fromkeys(r["network"] for r in rows))
    picture = plots.new_figure(8.6, 3.6)
    axes = picture.subplots(1, len(networks), squeeze=False)[0]
    for ax, network in zip(axes, networks, strict=True):
        for i, alpha in ((1, 0.5), (4, 1.0)):
            for dash, way in enumerate(MARKERS):
                own = [r for r in rows if (r["network"], r["alpha"]) == (network, alpha)]
                own = [r for r in own if r["way"] == way or r["n_passes"] == 1]  # a single pass is the same
                ax.errorbar(
                    [r["n_passes"] for r in own], [r["bias"] for r in own], [2 * r["bias_error"] for r in own],
                    **plots.line(i, dash=dash), marker=MARKERS[way], markersize=4, elinewidth=1,
                    label=rf"$\alpha$ = {alpha:g}, {way}",
                )  # fmt: skip
        ax.set(xscale="log", yscale="log", xlabel="passes K", title=network)
        ax.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes[0].set_ylabel("bias of the loss of K passes (nats)")
    axes[0].legend(frameon=False, fontsize=8)
    return picture
