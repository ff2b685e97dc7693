"""The table of docs/index.md, from results/newcomer.json."""

from pathlib import Path

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent


def steps():
    """What each step of a new user takes."""
    content = results.read(ROOT / "results/newcomer.json")
    lines = ["| step | seconds |", "|---|---|"]
    lines += [f"| {row['step']} | {row['seconds']:.0f} |" for row in content["rows"]]
    return "\n".join([*lines, "", f"Made by `{content['command']}`, in an empty environment on two busy cores."])
