"""Tables of docs/passes-enough.md, from results/enough.json and results/enough_chosen.json."""

from pathlib import Path

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent
RECOMMENDED = {False: 0.1, True: 0.2}  # for classes, for regression


def measured():
    """What a tolerance saves and what it changes, on MNIST and UCI."""
    return _table("enough")


def chosen():
    """The same on the problems that rule and tolerances were chosen on."""
    return _table("enough_chosen")


def verdict():
    """What was asked for, and what came out at the recommended tolerances."""
    content = results.read(ROOT / "results/enough.json")
    lines = []
    for name in dict.fromkeys(r["dataset"] for r in content["rows"]):
        own = {r["tolerance"]: r for r in content["rows"] if r["dataset"] == name}
        r = own[RECOMMENDED["coverage90" in own[None]]]
        said = f"- {name}, tolerance {r['tolerance']}: {r['passes']:.1f} passes a row, {_met(r['passes'] <= 20)}; "
        said += f"decisions equal those of another run of 100 for {_percent(r)} of the rows, "
        said += f"{_met(r['same_decisions'] >= 0.999)} (two runs of 100: {_percent(own[None])}), "
        said += f"and those it would have come to with all its passes for {_percent(r, 'same_as_gone_on')}, "
        said += _met(r["same_as_gone_on"] >= 0.999)
        if "coverage90_moved" in r:
            moved = r["coverage90_moved"]
            said += f"; coverage moved by {moved:+.2f} points, {_met(abs(moved) <= 0.5)}"
        lines.append(said + ".")
    return "\n".join(lines)


def _met(fine):
    return "as asked for" if fine else "**not** as asked for"


def _percent(r, key="same_decisions"):
    return f"{100 * r[key]:.2f} %"


def _table(name):
    content = results.read(ROOT / f"results/{name}.json")
    near = any("within" in r for r in content["rows"])
    lines = [
        "| set | rows | tolerance | passes | time | same decision as 100 passes | as the same passes gone on "
        "| log-likelihood moves | 90 % coverage moves |" + (" within the tolerance |" if near else ""),
        "|---|---|---|---|---|---|---|---|---|" + ("---|" if near else ""),
    ]
    for r in content["rows"]:
        again = r["tolerance"] is None
        moved = f"{r['coverage90_moved']:+.2f} ± {r['coverage90_moved_error']:.2f}" if "coverage90_moved" in r else ""
        cells = [
            r["dataset"] if again else "",
            f"{r['n_rows']:,}" if again else "",
            "100 again" if again else f"{r['tolerance']}",
            f"{r['passes']:.1f}",
            f"{r['ratio']:.2f}",
            _percent(r),
            "" if again else _percent(r, "same_as_gone_on"),
            f"{r['log_likelihood'] - r['log_likelihood_full']:+.4f}",
            moved,
            *([f"{100 * r['within']:.0f} %" if "within" in r else ""] if near else []),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + (
        f"\n\nMade by `{content['command']}` with torch {content['versions']['torch']}, seed {content['seed']}. Means "
        "over seeds of the passes; points of coverage with standard errors; time as a ratio to 100 passes."
    )
