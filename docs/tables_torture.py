"""The tables of docs/torture.md, from results/torture.json and tests/torture/found.py."""

import importlib.util
from pathlib import Path

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent


def figures():
    """What was tried, part by part, and what failed."""
    content = results.read(ROOT / "results/torture.json")
    lines = ["| part | what | tried | failures left | explained |", "|---|---|---|---|---|"]
    for r in content["rows"]:
        lines.append(
            f"| {r['part']} | {r['what']} | {r['tried']:,} {r['unit']} | {r['failures']} | {r['explained'] or ''} |"
        )
    spent = content["seconds"] / 60
    return "\n".join(lines) + (
        f"\n\nMade by `{content['command']}` with torch {content['versions']['torch']}, seed {content['seed']}, in "
        f"{spent:.0f} minutes on two cores."
    )


def totals():
    """All parts together, in a sentence or two."""
    content = results.read(ROOT / "results/torture.json")
    counts = {}
    for r in content["rows"]:
        counts[r["unit"]] = counts.get(r["unit"], 0) + r["tried"]
    words = {
        "cases": "cases of bad input tried", "faults": "faults injected", "bytes": "bytes flipped",
        "requests": "requests served",
    }  # fmt: skip
    told = [f"{counts[unit]:,} {word}" for unit, word in words.items() if unit in counts]
    left = sum(r["failures"] for r in content["rows"])
    return f"{', '.join(told)}; {sum(map(len, _found().values()))} failures found and mended, {left} left."


def soak():
    """What a service held while it was asked for long, and how slow clients fared."""
    content = results.read(ROOT / "results/torture.json")
    rows = {r["what"]: r for r in content["rows"] if r["part"] == "service"}
    held = next(r for r in rows.values() if "memory_mb" in r)
    slow, huge, heavy = (rows[name] for name in ("slow clients", "huge bodies", "bodies that are hard to read"))
    lines = ["| after | memory, MB | threads | file handles |", "|---|---|---|---|"]
    for i, name in enumerate(("a third", "two thirds", "all of it")):
        lines.append(f"| {name} | {held['memory_mb'][i]:.1f} | {held['threads'][i]} | {held['handles'][i]} |")
    beside = f"Beside slow clients {slow['beside']} good requests were answered"
    return "\n".join(lines) + (
        f"\n\nSix clients for {held['seconds']} s, {held['tried']:,} requests. {beside}, the slowest after "
        f"{slow['longest_beside_s'] * 1000:.0f} ms; with a limit of 2 s the last slow client was left after "
        f"{slow['longest_slow_s']:.1f} s. Of a body that says it has 10 GB, at most {huge['taken_mb']:.0f} MB were "
        "taken, most of them by the buffers of the system. Of bodies within the limit that are made to be hard to "
        f"read, the worst ({heavy['slowest']}) was refused after {heavy['slowest_s']:.1f} s."
    )


def fuzz():
    """What atheris tried, by target."""
    content = results.read(ROOT / "results/fuzz.json")
    lines = ["| read | executions | finds left |", "|---|---|---|"]
    lines += [f"| {r['target']} | {r['executions']:,} | {r['finds']} |" for r in content["rows"]]
    spent = content["seconds"] / 60
    return "\n".join(lines) + f"\n\nMade by `{content['command']}` in {spent:.0f} minutes, seed {content['seed']}."


def reasons():
    """The failures that stay, and why."""
    content = results.read(ROOT / "results/torture.json")
    told = [f"- {r['part']}: {reason}" for r in content["rows"] for reason in r["reasons"].split(" | ") if reason]
    return "\n".join(dict.fromkeys(told)) or "None."


def found():
    """What was found and mended, with its test."""
    lines = ["| part | found | kept by |", "|---|---|---|"]
    for part, findings in _found().items():
        lines += [f"| {part} | {what} | `{test.partition('::')[0]}` |" for test, what in findings.items()]
    return "\n".join(lines)


def _found():
    spec = importlib.util.spec_from_file_location("found", ROOT / "tests/torture/found.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FOUND
