"""Tables of docs/peers.md, from results/peers.json and results/peers_speed.json."""

from collections import Counter
from pathlib import Path

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent
WORDS = (
    "sampled", "partly", "silently not sampled", "not sampled, warned", "changed the model", "other outputs", "error",
    "not installed",
)  # fmt: skip
SHORT = {
    "sampled": "**sampled**",
    "silently not sampled": "silent",
    "not sampled, warned": "warned",
    "changed the model": "changed",
    "other outputs": "other",
    "not installed": "-",
}
KINDS = {
    "zoo": "Models as people write them",
    "blocks": "One block between two linear layers",
    "more": "And",
}
SPEED = {
    "products": "the bare products",
    "loop": "by hand: `model.train()`, a loop",
    "baal": "baal",
    "torch-uncertainty": "torch-uncertainty",
    "lightning-uq-box": "lightning-uq-box",
    "ours": "**bbalpha**",
    "ours-shared": '**bbalpha**, `masks="shared"`',
}


def counts():
    """How many models each way got which word for."""
    content = results.read(ROOT / "results/peers.json")
    ways = ways_of(content)
    used = [w for w in WORDS if any(r["verdict"] == w for r in content["rows"])]
    lines = ["| way | " + " | ".join(used) + " | of |", "|---|" + "---|" * (len(used) + 1)]
    for way in ways:
        own = Counter(r["verdict"] for r in content["rows"] if r["way"] == way)
        lines.append(f"| {label(way, content)} | " + " | ".join(str(own[w]) for w in used) + f" | {own.total()} |")
    return "\n".join([*lines, "", note(content)])


def zoo():
    """Every model and every way."""
    content = results.read(ROOT / "results/peers.json")
    found = {(r["model"], r["way"]): r for r in content["rows"]}
    ways, lines = ways_of(content), []
    for kind, title in KINDS.items():
        lines += [f"| {title} | " + " | ".join(ways) + " |", "|---|" + "---|" * len(ways)]
        for model in dict.fromkeys(r["model"] for r in content["rows"] if r["kind"] == kind):
            cells = [cell(found[model, way]) for way in ways]
            lines.append(f"| {model.removeprefix('block ').replace('_', ' ')} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def ways_of(content):
    """The ways in their order, ours last."""
    return sorted(dict.fromkeys(r["way"] for r in content["rows"]), key=lambda way: way == "bbalpha")


def cell(row):
    """The word for one model and one way; a star where flags or layers were left otherwise than they were."""
    return SHORT.get(row["verdict"], row["verdict"]) + ("\\*" if row["flags"] else "")


def errors():
    """What is raised, and for how many models."""
    content = results.read(ROOT / "results/peers.json")
    told = Counter((r["way"], short(r["error"])) for r in content["rows"] if r["error"])
    lines = ["| way | models | what is raised |", "|---|---|---|"]
    lines += [f"| {way} | {n} | `{text}` |" for (way, text), n in told.items()]
    return "\n".join(lines)


def short(error, most=110):
    """The beginning of an error, safe in a table."""
    text = error.replace("|", "/").replace("`", "'")
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " ..."


def speed():
    """Times of a prediction, as ratios."""
    content = results.read(ROOT / "results/peers_speed.json")
    rows = {r["way"]: r for r in content["rows"]}
    versions = content["settings"]["peers"]
    lines = ["| | ratio | of medians |", "|---|---|---|"]
    for way, name in SPEED.items():
        if way in rows:
            told = f"{name} {versions[way]}" if way in versions else name
            lines.append(f"| {told} | {rows[way]['ratio']:.2f} | {rows[way]['ratio_median']:.2f} |")
    first = content["rows"][0]
    return "\n".join(
        [*lines, "", f"K = {first['n_passes']}, {first['batch']} rows, {first['rounds']} rounds. {note(content)}"]
    )


def label(way, content):
    """A way with the version of its package."""
    peers = content["settings"]["peers"] | {"bbalpha": content["versions"].get("bbalpha", "")}
    name = next((n for n in peers if way.startswith(n)), None)
    return f"{way} ({peers[name]})" if name and peers[name] else way


def note(content):
    return f"Made by `{content['command']}` with torch {content['versions']['torch']}."
