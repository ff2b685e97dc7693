"""Tables of docs/sites.md, from results/sites.json."""

from pathlib import Path

from bbalpha.experiments import results
from bbalpha.experiments.mnist import mean_error

ROOT = Path(__file__).resolve().parent.parent
GOAL = 2.0  # times torch's own single pass, live sites in the last block alone
WAYS = {
    "torch, one pass": "torch, K = 1",
    "all sites": "all sites",
    "last block": "the last block",
    "last": '`sites="last"`',
    "none": "none, no passes",
}
# score, heading, factor, digits
COLUMNS = (
    ("accuracy", "accuracy, %", 100, 1),
    ("log_likelihood", "log-likelihood a row", 1, 3),
    ("ece", "calibration error", 1, 3),
    ("auroc_ood_entropy", "strangers by entropy", 1, 3),
    ("auroc_ood_mi", "strangers by mutual information", 1, 3),
)


def cost():
    """Times of a training step and of a prediction, and whether the goal was reached."""
    content = results.read(ROOT / "results/sites.json")
    rows = [r for r in content["rows"] if r["work"] != "worth"]
    lines = ["| | live sites | training step | of medians | prediction | of medians |", "|---|---|---|---|---|---|"]
    for model, way in dict.fromkeys((r["model"], r["way"]) for r in rows):
        own = {r["work"]: r for r in rows if (r["model"], r["way"]) == (model, way)}
        cells = [f"{own[work][key]:.2f}" for work in ("train", "predict") for key in ("ratio", "ratio_median")]
        lines.append(f"| {model} | {WAYS[way]} | " + " | ".join(cells) + " |")
    blocks = [r for r in rows if r["way"] == "last block"]
    lines += ["", f"K = {blocks[0]['n_passes']}, batch {blocks[0]['batch']}. {note(content)}", ""]
    return "\n".join([*lines, *(f"- {goal(blocks, model)}" for model in dict.fromkeys(r["model"] for r in blocks))])


def goal(blocks, model):
    """Whether live sites in the last block alone cost at most what was aimed at."""
    found = {r["work"]: r["ratio"] for r in blocks if r["model"] == model}
    reached = "reached" if max(found.values()) <= GOAL else "not reached"
    return (
        f"{model}, the last block alone, at most {GOAL:g} times torch's K = 1: {reached} ({found['train']:.2f} in "
        f"training, {found['predict']:.2f} in prediction)."
    )


def worth():
    """Scores of networks trained and predicted with all sites or with some."""
    content = results.read(ROOT / "results/sites.json")
    rows = [r for r in content["rows"] if r["work"] == "worth"]
    lines = [
        "| | trained with | predicted with | "
        + " | ".join(heading for _, heading, _, _ in COLUMNS)
        + " | difference |",
        "|---|---|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for key in dict.fromkeys((r["model"], r["trained"], r["way"]) for r in rows):
        own = [r for r in rows if (r["model"], r["trained"], r["way"]) == key]
        cells = [cell([r[score] for r in own], factor, digits) for score, _, factor, digits in COLUMNS]
        cells.append(cell(differences(rows, own), 1, 3) if key[1:] != ("all sites", "all sites") else "")
        lines.append(f"| {key[0]} | {WAYS[key[1]]} | {WAYS[key[2]]} | " + " | ".join(cells) + " |")
    seeds = {model: len({r["seed"] for r in rows if r["model"] == model}) for model in {r["model"] for r in rows}}
    counts = ", ".join(f"{seeds[model]} for {model}" for model in sorted(seeds))
    return "\n".join(
        [
            *lines,
            "",
            f"Means ± standard errors over seeds ({counts}); the difference is in log-likelihood. {note(content)}",
        ]
    )


def differences(rows, own):
    """Log-likelihoods less those of the same network and seed with all sites in training and prediction."""
    base = {(r["model"], r["seed"]): r["log_likelihood"] for r in rows if r["trained"] == r["way"] == "all sites"}
    return [r["log_likelihood"] - base[r["model"], r["seed"]] for r in own]


def cell(values, factor, digits):
    """Mean and standard error; empty where there is no such score."""
    if any(v is None for v in values):
        return ""
    mean, error = mean_error([factor * v for v in values])
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def note(content):
    return f"Made by `{content['command']}` with torch {content['versions']['torch']}."
