"""Tables of docs/active.md, from results/active/*.json and what was published."""

import csv
import statistics
from pathlib import Path

from bbalpha.experiments import active, results

ROOT = Path(__file__).resolve().parent.parent
SETS = {"repeated_mnist_x2": "repeated, x2", "mnist": "MNIST", "repeated_mnist_x5": "repeated, x5"}
METHODS = {"random": "random", "bald": "BALD", "batch-bald": "BatchBALD", "bbalpha": "**ours**"}
SHOWN = (20, 50, 100, 150, 200, 250, 300)
LEVELS = (0.90, 0.95)
# labels at which the published runs first measured 90 % and 95 %, medians of six seeds; of MNIST with K = 100
PUBLISHED = {
    ("mnist", "BALD"): (130, 260), ("mnist", "BatchBALD"): (100, 210),
    ("repeated_mnist_x2", "random"): (170, None), ("repeated_mnist_x2", "BALD"): (170, None),
    ("repeated_mnist_x2", "BatchBALD"): (100, 240), ("repeated_mnist_x5", "random"): (150, None),
    ("repeated_mnist_x5", "BALD"): (310, None), ("repeated_mnist_x5", "BatchBALD"): (110, 270),
}  # fmt: skip


def load():
    """{set: content} of what was measured; FileNotFoundError if nothing was."""
    paths = {name: ROOT / f"results/active/{name}.json" for name in SETS}
    found = {name: results.read(path) for name, path in paths.items() if path.exists()}
    return found or {"": results.read(paths["repeated_mnist_x2"])}


def published(dataset):
    """{method: [row]} of the published curves."""
    with (ROOT / "docs/active_published.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["dataset"] == dataset]
    return {method: [r for r in rows if r["method"] == method] for method in dict.fromkeys(r["method"] for r in rows)}


def accuracies():
    """Median accuracies, ours and published, by labels."""
    lines = ["| | | seeds | " + " | ".join(f"{n}" for n in SHOWN) + " |", "|---|---|---|" + "---|" * len(SHOWN)]
    for dataset, content in load().items():
        for method, label in METHODS.items():
            curve = active.curves(content["rows"], method)
            cells = [accuracy(curve.get(n)) for n in SHOWN]
            lines.append(f"| {SETS[dataset]} | {label} | {seeds(curve)} | " + " | ".join(cells) + " |")
        for method, rows in published(dataset).items():
            medians = {int(row["labels"]): f"{100 * float(row['acc_median']):.1f}" for row in rows}
            cells = [medians.get(n, "") for n in SHOWN]
            lines.append(f"| {SETS[dataset]} | {method}, published | 6 | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *map(note, load().values())])


def needed():
    """Labels to 90 % and 95 %: medians over the seeds whose run got so far, ours and published."""
    lines = ["| | | to 90 % | to 95 % | published: to 90 % | to 95 % |", "|---|---|---|---|---|---|"]
    for dataset, content in load().items():
        for method, label in METHODS.items():
            own = [r for r in content["rows"] if r["method"] == method]
            ours = [labels(active.needed(own, method, level), own) for level in LEVELS]
            known = PUBLISHED.get((dataset, label if method != "bbalpha" else "BatchBALD"))
            cells = ["no run", "no run"] if known is None else [str(n or "not within 310") for n in known]
            lines.append(f"| {SETS[dataset]} | {label} | " + " | ".join(ours + cells) + " |")
    return "\n".join(lines) + "\n\nBeside ours stands the published BatchBALD."


def seconds():
    """Time of a round: training, and choosing."""
    lines = ["| | | training, s | choosing, s |", "|---|---|---|---|"]
    for dataset, content in load().items():
        for method, label in METHODS.items():
            own = [r for r in content["rows"] if r["method"] == method]
            chosen = [r["choose_seconds"] for r in own if r["choose_seconds"]]
            if chosen:
                train = statistics.median(r["train_seconds"] for r in own)
                lines.append(f"| {SETS[dataset]} | {label} | {train:.1f} | {statistics.median(chosen):.1f} |")
    return "\n".join(lines)


def speed():
    """One choice of ten rows out of 60,000, on two cores."""
    content = results.read(ROOT / "results/acquisition_speed.json")
    lines = [
        "| rows | K | passes, s | choice, s | in all, s | processor time, s | aim, s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['rows']:,} | {r['n_passes']} | {r['pass_seconds']:.1f} | {r['choose_seconds']:.1f} "
        f"| {r['pass_seconds'] + r['choose_seconds']:.1f} | {r['cpu_seconds']:.1f} | {r['aim']:.0f} |"
        for r in content["rows"]
    ]
    return "\n".join([*lines, "", f"{content['rows'][0]['threads']} threads. Made by `{content['command']}`."])


def chosen():
    """How our training was chosen, on held-out training rows."""
    content = results.read(ROOT / "results/active_chosen.json")
    lines = ["| training | seeds | accuracy, 100 labels by chance |", "|---|---|---|"]
    for method in dict.fromkeys(r["method"] for r in content["rows"]):
        own = [r["accuracy"] for r in content["rows"] if r["method"] == method]
        lines.append(f"| {method} | {len(own)} | {100 * statistics.fmean(own):.1f} |")
    return "\n".join([*lines, "", f"Made by `{content['command']}`."])


# ------------------------------------------------------------------------------ helpers


def accuracy(values):
    """The median in percent; empty where nothing was measured."""
    return f"{100 * statistics.median(values):.1f}" if values else ""


def seeds(curve):
    """How many seeds the curve has, from its first place to its last."""
    if not curve:
        return "0"
    first, last = (len(curve[n]) for n in (min(curve), max(curve)))
    return f"{first}" if first == last else f"{first} to {last}"


def labels(found, own):
    """The median, or how far all runs got without."""
    if not found:
        return "not run yet"
    middle = found[(len(found) - 1) // 2]  # of two the one that is known better
    if middle < float("inf"):
        return f"{middle} ({len(found)} seed{'s' * (len(found) > 1)})"
    furthest = [max(r["labels"] for r in own if r["seed"] == seed) for seed in {r["seed"] for r in own}]
    return f"not within {min(furthest)}"


def note(content):
    """Where the numbers come from."""
    return f"Made by `{content['command']}` with torch {content['versions']['torch']}."
