"""Tables of docs/integrations/onnx.md, from results/freezing.json and results/freezing_speed.json."""

from pathlib import Path

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.5  # of sampling live, one row and K = 20
LIVE = ("sample", "predict", "K rows")
WAYS = {
    "predict": "`predict_*`",
    "K rows": "the bare network on K rows",
    "frozen": "frozen",
    "frozen, summary": "with summary",
    "frozen, TorchScript": "TorchScript",
    "frozen, onnxruntime": "onnxruntime",
}
HALF = "half_precision"  # whose numbers have three digits
KINDS = (("error", "called"), ("torchscript", "TorchScript"), ("onnx", "onnxruntime"))


def zoo():
    """What can be frozen, and how far it is from the model itself."""
    content = results.read(ROOT / "results/freezing.json")
    lines = ["| model | frozen as | " + " | ".join(heading for _, heading in KINDS) + " |", "|---|---|---|---|---|"]
    lines += [line(row) for row in content["rows"]]
    rows = content["rows"]
    half, rest = (worst([row for row in rows if (row["model"] == HALF) is own]) for own in (True, False))
    frozen = sum(row["frozen"] for row in rows)
    told = f"{frozen} of {len(rows)} models were frozen; the largest difference is {rest:.1e}, in bfloat16 {half:.1e}."
    return "\n".join([*lines, "", f"{told} {note(content)}"])


def worst(rows):
    """The largest difference to the passes of `sample`, by any way."""
    return max(row[key] for row in rows for key, _ in KINDS if row.get(key) is not None)


def line(row):
    """A model: where it went, or why it did not."""
    name = row["model"].replace("_", " ")
    if not row["frozen"]:
        return f"| {name} | refused: {row['reason'].rpartition('cannot be: ')[2].rstrip('.')} | | | |"
    cells = [f"{row[key]:.0e}" if row.get(key) is not None else "refused" for key, _ in KINDS]
    return f"| {name} | {row['way']} | " + " | ".join(cells) + " |"


def speed():
    """Latency of a row as a share of sampling live, and where the goal was reached."""
    content = results.read(ROOT / "results/freezing_speed.json")
    models = list(dict.fromkeys(row["model"] for row in content["rows"]))
    lines = ["| K = 20, one row | " + " | ".join(WAYS.values()) + " |", "|---|" + "---|" * len(WAYS)]
    reached = []
    for model in models:
        own = {row["way"]: row["ratio"] for row in content["rows"] if row["model"] == model}
        lines.append(f"| {model} | " + " | ".join(f"{own[way]:.2f}" for way in WAYS) + " |")
        reached.append((model, min((ratio, way) for way, ratio in own.items() if way not in LIVE), own["frozen"]))
    told = "Shares of `bbalpha.sample` with shared masks and a seed, in processor time, one thread."
    return "\n".join([*lines, "", f"{told} {note(content)}", "", *(goal(*one) for one in reached)])


def goal(model, best, frozen):
    """Whether the frozen model takes at most what was aimed at: called as it is, or where it can go."""
    ratio, way = best
    if frozen <= GOAL:
        said = f"reached as it is ({frozen:.2f})"
    elif ratio <= GOAL:
        said = f"not reached as it is ({frozen:.2f}); reached in {WAYS[way]} ({ratio:.2f})"
    else:
        said = f"not reached ({frozen:.2f} as it is, {ratio:.2f} at best)"
    return f"- {model}, at most {GOAL:g} of sampling live: {said}."


def note(content):
    return f"Made by `{content['command']}` with torch {content['versions']['torch']}."
