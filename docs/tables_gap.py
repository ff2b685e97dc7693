"""Tables of docs/guides/unusual.md, from results/gap.json."""

import statistics
from pathlib import Path

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent


def load():
    """The results, and the ways in their order with the same name for every scale of the prior."""
    content = results.read(ROOT / "results/gap.json")
    for row in content["rows"]:
        if row["work"] != "validation":
            row["way"] = named(row["way"])
    return content


def named(way):
    """A way without the scale of its prior functions."""
    head, *rest = way.split(", ")
    if "prior" not in head:
        return way
    return ", ".join([head, *rest[1:]])


def random():
    """Means over random functions, on which the scale of the prior functions was chosen."""
    content = load()
    rows = [r for r in content["rows"] if r["work"] == "validation"]
    lines = [
        "| random functions | ratio, gap to beside | NLL in the gap | coverage of 90 % in the gap | NLL beside it |",
        "|---|---|---|---|---|",
    ]
    for way in dict.fromkeys(r["way"] for r in rows):
        ratio, nll, cover, beside = (
            statistics.mean(r[key] for r in rows if r["way"] == way)
            for key in ("ratio", "nll_gap", "coverage90_gap", "nll_beside")
        )
        lines.append(f"| {way} | {ratio:.2f} | {nll:.2f} | {cover:.0%} | {beside:.2f} |")
    count = len({(r["problem"], r["seed"]) for r in rows})
    return "\n".join([*lines, "", f"Means over {count} functions. Made by `{content['command']}`."])


def curves():
    """Deviations in the gap and beside it for functions of one input."""
    return table(load(), "curve", "functions of one input")


def tables():
    """The same for tables without the middle third of a column."""
    return table(load(), "table", "UCI sets")


def table(content, work, title):
    """Means over problems and seeds, of ways that were run on all of them."""
    rows = [r for r in content["rows"] if r["work"] == work]
    runs = {(r["problem"], r["seed"]) for r in rows if r["way"] == "GP"}
    rows = [r for r in rows if (r["problem"], r["seed"]) in runs]
    if not runs:
        return f"({title}: not measured yet)"
    lines = [
        f"| {title} | epistemic deviation in the gap | beside it | ratio (median) | NLL in the gap (median) | "
        "coverage of 90 % in the gap | NLL beside it (median) |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in dict.fromkeys(r["way"] for r in rows):
        own = [r for r in rows if r["way"] == way]
        if len(own) != len(runs):
            continue
        gap, beside, ratio, nll, at = (
            statistics.median(r[key] for r in own)
            for key in ("epistemic_gap", "epistemic_beside", "ratio", "nll_gap", "nll_beside")
        )
        cover = statistics.mean(r["coverage90_gap"] for r in own)
        lines.append(f"| {way} | {gap:.3f} | {beside:.3f} | {ratio:.1f} | {nll:.2f} | {cover:.0%} | {at:.2f} |")
    problems = ", ".join(dict.fromkeys(p for p, _ in sorted(runs)))
    return "\n".join([*lines, "", f"In deviations of y; {problems}. Made by `{content['command']}`."])


def verdict():
    """What helps, by the ratio and the likelihood in the gaps of tables, against one network at alpha 0.5."""
    rows = [r for r in load()["rows"] if r["work"] in ("curve", "table")]
    runs = {(r["problem"], r["seed"]) for r in rows if r["way"] == "GP"}
    if not runs:
        return ""
    base = {(r["problem"], r["seed"]): r for r in rows if r["way"] == "alpha 0.5"}
    lines = ["| against one network, alpha 0.5 | ratio larger in | NLL in the gap better in | beside it better in |",
             "|---|---|---|---|"]  # fmt: skip
    for way in dict.fromkeys(r["way"] for r in rows):
        own = {(r["problem"], r["seed"]): r for r in rows if r["way"] == way}
        if way == "alpha 0.5" or not runs <= own.keys():
            continue
        wins = [sum(own[k]["ratio"] > base[k]["ratio"] for k in runs)]
        wins += [sum(own[k][score] < base[k][score] for k in runs) for score in ("nll_gap", "nll_beside")]
        lines.append(f"| {way} | " + " | ".join(f"{n} of {len(runs)}" for n in wins) + " |")
    return "\n".join(lines)
