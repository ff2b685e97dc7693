"""Tables of docs/guides/explore.md, from results/optimise.json and results/explorer_chosen.json."""

import statistics
from pathlib import Path

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent
PROBLEMS = {"branin": "Branin", "hartmann6": "Hartmann-6"}
WAYS = {
    "bbalpha": "**bbalpha**",
    "gp": "GP (scikit-learn)",
    "gp, eased": "GP, large values drawn together",
    "botorch": "botorch",
    "random": "by chance",
}
SHOWN = (20, 40, 60)


def regret():
    """Medians and quartiles over seeds, by evaluations; and whether ours is not worse than the process."""
    content = results.read(ROOT / "results/optimise.json")
    lines = ["| | | " + " | ".join(f"after {n}" for n in SHOWN) + " | seeds |", "|---|---|" + "---|" * (len(SHOWN) + 1)]
    for problem, title in PROBLEMS.items():
        for way, label in WAYS.items():
            own = select(content, problem, way)
            if own:
                cells = [quartiles([r[f"regret{n}"] for r in own]) for n in SHOWN]
                lines.append(f"| {title} | {label} | " + " | ".join(cells) + f" | {len(own)} |")
    lines += ["", f"Medians (quartiles) over seeds. Made by `{content['command']}`.", ""]
    return "\n".join([*lines, *(f"- {verdict(content, problem)}" for problem in PROBLEMS)])


def verdict(content, problem):
    """Whether our median is not above that of scikit-learn's process, and in how many seeds we are ahead."""
    ours, theirs = ({r["seed"]: r["regret60"] for r in select(content, problem, way)} for way in ("bbalpha", "gp"))
    both = ours.keys() & theirs.keys()
    if not both:
        return f"{PROBLEMS[problem]}: not measured yet."
    medians = [statistics.median(own[s] for s in both) for own in (ours, theirs)]
    word = "not worse than" if medians[0] <= medians[1] else "worse than"
    ahead = sum(ours[s] <= theirs[s] for s in both)
    return (
        f"{PROBLEMS[problem]}: after 60 evaluations {word} scikit-learn's process ({medians[0]:.2g} against "
        f"{medians[1]:.2g} in the median; ahead in {ahead} of {len(both)} seeds)."
    )


def choice():
    """Mean ranks of the ways that were tried."""
    content = results.read(ROOT / "results/explorer_chosen.json")
    rows = content["rows"]
    runs = {(r["function"], r["seed"]) for r in rows}
    ways = [w for w in dict.fromkeys(r["way"] for r in rows) if sum(r["way"] == w for r in rows) == len(runs)]
    found = []
    for way in ways:
        ranks = []
        for run in runs:
            least = {r["way"]: r["least"] for r in rows if (r["function"], r["seed"]) == run and r["way"] in ways}
            ranks.append(1 + sum(value < least[way] for value in least.values()))
        found.append((statistics.mean(ranks), way))
    lines = ["| | mean rank |", "|---|---|", *(f"| {way} | {rank:.2f} |" for rank, way in sorted(found))]
    return "\n".join([*lines, "", f"Over {len(runs)} runs. Made by `{content['command']}`."])


def select(content, problem, way):
    """Rows of one way on one problem."""
    return [r for r in content["rows"] if (r["problem"], r["way"]) == (problem, way)]


def quartiles(values):
    """Median and quartiles."""
    if len(values) < 2:
        return f"{values[0]:.2g}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2g} ({low:.2g}, {high:.2g})"
