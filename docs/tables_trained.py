"""The table of docs/trained.md, from results/trained.json."""

from pathlib import Path

from bbalpha.experiments import results
from bbalpha.experiments.mnist import mean_error

ROOT = Path(__file__).resolve().parent.parent
WAYS = {
    "plain": "as it was trained",
    "calibrated": "the same, calibrated",
    "dropout": "`retrofit`",
    "fine-tuned": "`retrofit`, fine-tuned",
}


def likelihood():
    """How likely test rows are, four ways, and how often dropout was kept."""
    content = results.read(ROOT / "results/trained.json")
    lines = [
        "| | | NLL a test row | less than as trained by | dropout kept | strangers found (AUROC, entropy) |",
        "|---|---|---|---|---|---|",
    ]
    for task, way in dict.fromkeys((row["task"], row["way"]) for row in content["rows"]):
        own = rows_of(content, task, way)
        kept = f"{sum(not row['kept_plain'] for row in own)} of {len(own)}" if "kept_plain" in own[0] else ""
        better = gains(rows_of(content, task, "plain"), own)
        cells = [told([row["nll"] for row in own]), told(better) if way != "plain" else "", kept]
        cells.append(told([row.get("auroc_ood_entropy") for row in own]))
        lines.append(f"| {task} | {WAYS[way]} | " + " | ".join(cells) + " |")
    tuned = [row for row in content["rows"] if row["way"] == "fine-tuned"]
    count = len({(row["task"], row["seed"]) for row in tuned})
    return "\n".join(
        [
            *lines,
            "",
            f"Means ± standard errors over {count} trained networks, test rows scored once, in the end. "
            f"Made by `{content['command']}` with torch {content['versions']['torch']}.{missing(content)}",
        ]
    )


def missing(content):
    """What of the run is still to come."""
    settings = content["settings"]
    planned = {"digits, dense": settings["seeds"]} | dict.fromkeys(
        ("MNIST, dense", "MNIST, CNN"), settings["seeds_mnist"]
    )
    planned |= dict.fromkeys(settings["sets"], settings["seeds"])
    done = {task: len(rows_of(content, task, "fine-tuned")) for task in planned}
    less = [f"{task} {done[task]} of {count} networks" for task, count in planned.items() if done[task] < count]
    return f" The run is not complete ({', '.join(less)}); the same command goes on." if less else ""


def rows_of(content, task, way):
    return [row for row in content["rows"] if (row["task"], row["way"]) == (task, way)]


def gains(plain, own):
    """By how much the NLL is less than that of the same network as it was trained."""
    base = {row["seed"]: row["nll"] for row in plain}
    return [base[row["seed"]] - row["nll"] for row in own]


def told(values):
    """Mean and standard error; empty where there is no such score."""
    if any(value is None for value in values):
        return ""
    mean, error = mean_error(values)
    return f"{mean:.3f} ± {error:.3f}"
