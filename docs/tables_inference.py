"""Tables of docs/inference.md, from results/inference.json."""

from pathlib import Path

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent


def gaussian():
    """A Gaussian q of independent weights beside the exact posterior."""
    content = results.read(ROOT / "results/inference.json")
    lines = [
        "| columns | alpha | deviation of q / exact | best at alpha 0, in theory | weights in 50 % | weights in 90 % | "
        "uniform ranks, p | new targets in 90 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in content["rows"]:
        if r["work"] != "dropout":
            p = "< 0.001" if r["uniform_p"] < 1e-3 else f"{r['uniform_p']:.2f}"
            theory = f"{r['vi']:.2f}" if r["alpha"] == 0 else ""
            lines.append(
                f"| {r['work']} | {r['alpha']:g} | {r['width']:.2f} | {theory} | {r['coverage50']:.0%} | "
                f"{r['coverage90']:.0%} | {p} | {r['coverage90_new']:.0%} |"
            )
    sets = next(r["data_sets"] for r in content["rows"])
    return "\n".join(lines) + (
        f"\n\n{sets} data sets of 20 rows, two weights each. Made by `{content['command']}` with torch "
        f"{content['versions']['torch']}, seed {content['seed']}."
    )


def networks():
    """Dropout networks on repeated data sets of a curve."""
    content = results.read(ROOT / "results/inference.json")
    own = [r for r in content["rows"] if r["work"] == "dropout"]
    lines = ["| alpha | curve in 90 % | new targets in 90 % | RMSE of the mean |", "|---|---|---|---|"]
    for r in own:
        lines.append(f"| {r['alpha']:g} | {r['coverage90']:.0%} | {r['coverage90_new']:.0%} | {r['error']:.3f} |")
    return "\n".join(lines) + f"\n\nMeans over {own[0]['data_sets']} data sets, one network of 50 units each."
