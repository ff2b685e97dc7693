"""The figures of docs/scale.md, from results/scale.json: `make figures`."""

from pathlib import Path

from bbalpha import plots
from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent
MARKERS = {"per_example": "o", "shared": "s"}
NAMES = {"train": "a training step", "predict": "a prediction"}


def draw(name):
    """Draw docs/figures/scale_<name>.png; `name` is costs."""
    rows = results.read(ROOT / "results/scale.json")["rows"]
    costs_figure(rows).savefig(ROOT / f"docs/figures/scale_{name}.png", dpi=110)


def costs_figure(rows):
    """Measured seconds as points, the formula as lines; hollow is what it was not fitted to."""
    picture = plots.new_figure(9, 3.8)
    for ax, (work, title) in zip(picture.subplots(1, 2), NAMES.items(), strict=True):
        own = [
            r for r in rows if r["work"] == work and r["batch"] == max(s["batch"] for s in rows if s["work"] == work)
        ]
        for i, width in enumerate(sorted({r["width"] for r in own})):
            for dash, masks in enumerate(MARKERS):
                found = sorted(
                    (r for r in own if (r["width"], r["masks"]) == (width, masks)), key=lambda r: r["n_passes"]
                )
                style = plots.line(i, dash=dash)
                label = f"width {width}, {masks.replace('_', ' ')}"
                ax.plot([r["n_passes"] for r in found], [1e3 * r["formula"] for r in found], **style, label=label)
                for r in found:
                    face = "white" if r["held_out"] else style["color"]
                    ax.plot(r["n_passes"], 1e3 * r["seconds"], MARKERS[masks], color=style["color"], mfc=face, ms=5)
        ax.set(xscale="log", yscale="log", xlabel="passes K", title=f"{title}, {own[0]['batch']} rows")
        ax.set_xticks([1, 4, 16], ["1", "4", "16"])
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    picture.axes[0].set_ylabel("CPU time (ms)")
    picture.axes[0].legend(frameon=False, fontsize=7)
    return picture
