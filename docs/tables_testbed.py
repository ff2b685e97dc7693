"""Tables of docs/testbed.md, from results/testbed.json and results/testbed_chosen.json."""

from pathlib import Path

from bbalpha.experiments import results
from bbalpha.experiments.testbed_choices import AGENTS, CANDIDATES, CHOSEN
from bbalpha.experiments.testbed_scoring import common, mean_and_error, paired_error, ratios

ROOT = Path(__file__).resolve().parent.parent
# benchmark_agents_kl_estimates.png of google-deepmind/neural_testbed (October 2021, classification_2d), bars measured
PUBLISHED = {
    "mlp": {"kl_1": (1.000, 0.051), "kl_100": (1.000, 0.048)},
    "ensemble": {"kl_1": (0.996, 0.048), "kl_100": (0.992, 0.044)},
    "mc-dropout": {"kl_1": (0.995, 0.059), "kl_100": (0.977, 0.045)},
    "bbb": {"kl_1": (0.995, 0.047), "kl_100": (0.730, 0.023)},
    "ensemble+": {"kl_1": (1.001, 0.036), "kl_100": (0.580, 0.019)},
}
COLUMNS = {"kl_1": "tau = 1", "kl_10": "tau = 10", "kl_10_dyadic": "tau = 10, dyadic", "kl_100": "tau = 100"}
AIM = 0.73


def measured():
    """Every agent on the reported problems, over the mlp, beside the published bars."""
    content = results.read(ROOT / "results/testbed.json")
    found, left_out = _shared(content["rows"], list(AGENTS))
    parts = {key: ratios(found, key) for key in COLUMNS}
    published = {"kl_1": "published, 1", "kl_100": "published, 100"}
    heads = ["agent", *COLUMNS.values(), "paired error at 100", "accuracy", *published.values()]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for agent in sorted(found, key=lambda agent: -parts["kl_100"][agent][0]):
        own = found[agent]
        cells = [_number(parts[key][agent]) for key in COLUMNS]
        cells.append(f"{paired_error(found, 'kl_100', agent):.3f}")
        cells.append(f"{mean_and_error(own, 'accuracy')[0]:.3f}")
        cells += [_number(PUBLISHED[agent][key]) if agent in PUBLISHED else "" for key in published]
        lines.append(f"| {agent} | " + " | ".join(cells) + " |")
    note = f"Made by `{content['command']}` with torch {content['versions']['torch']}; {_problems(found)}."
    if left_out:
        note += f" Not run yet, or not on all of these: {', '.join(left_out)}."
    return "\n".join(lines) + "\n\n" + note


def sizes():
    """Tau = 100 by the number of training points."""
    content = results.read(ROOT / "results/testbed.json")
    found, _ = _shared(content["rows"], list(AGENTS))
    numbers = sorted({row["n_data"] for own in found.values() for row in own})
    lines = ["| agent | " + " | ".join(f"N = {n}" for n in numbers) + " |", "|---" * (len(numbers) + 1) + "|"]
    for agent, own in found.items():
        means = [mean_and_error([r for r in own if r["n_data"] == n], "kl_100")[0] for n in numbers]
        lines.append(f"| {agent} | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
    return "\n".join(lines)


def verdicts():
    """What was asked, and what came out."""
    found, _ = _shared(results.read(ROOT / "results/testbed.json")["rows"], list(AGENTS))
    joint, single = ratios(found, "kl_100"), ratios(found, "kl_1")
    lines = []
    for agent, bars in PUBLISHED.items():
        if agent in joint and agent != "mlp":
            value, error, (bar, half) = joint[agent][0], paired_error(found, "kl_100", agent), bars["kl_100"]
            away = abs(value - bar) / (error**2 + half**2) ** 0.5
            said = "agrees" if away <= 2 else "does **not** agree"
            lines.append(
                f"- {agent} at tau = 100: {value:.2f} ± {error:.2f}, published {bar:.2f} ± {half:.2f}: {said}."
            )
    for agent in CHOSEN:
        if agent in joint and "mc-dropout" in single:
            reached = joint[agent][0] <= AIM and single[agent][0] <= single["mc-dropout"][0]
            lines.append(
                f"- {agent} has {joint[agent][0]:.2f} ± {paired_error(found, 'kl_100', agent):.2f} at tau = 100 and "
                f"{single[agent][0]:.3f} ± {paired_error(found, 'kl_1', agent):.3f} at tau = 1. The aim was {AIM} or "
                f"better at 100, and no worse than MC dropout ({single['mc-dropout'][0]:.3f}) at 1: "
                + ("reached." if reached else "**not** reached.")
            )
    return "\n".join(lines)


def chosen():
    """The candidates on problems of other seeds."""
    content = results.read(ROOT / "results/testbed_chosen.json")
    found, left_out = _shared(content["rows"], list(CANDIDATES))
    joint, single = ratios(found, "kl_100"), ratios(found, "kl_1")
    lines = ["| candidate | tau = 1 | tau = 100 | |", "|---|---|---|---|"]
    for agent in sorted(found, key=lambda agent: joint[agent][0]):
        mark = "taken" if agent in CHOSEN.values() and not left_out else ""
        lines.append(f"| {agent} | {single[agent][0]:.3f} | {joint[agent][0]:.3f} | {mark} |")
    note = f"Made by `{content['command']}`; {_problems(found)}, seeds from 1001 on."
    if left_out:
        note += f" **Not compared yet**, so that the choice is not made: {', '.join(left_out)}."
    return "\n".join(lines) + "\n\n" + note


def _shared(rows, agents):
    """Rows of the agents on the problems that they have in common, and the agents that lack some."""
    found = common(rows, agents)
    return found, [agent for agent in agents if agent not in found]


def _problems(found):
    """How many problems, of how many seeds."""
    own = next(iter(found.values()))
    seeds = len({row["number"] for row in own})
    return f"{len(own)} problems, {seeds} of each kind"


def _number(pair):
    return f"{pair[0]:.3f}" + (f" ± {pair[1]:.3f}" if pair[1] == pair[1] else "")
