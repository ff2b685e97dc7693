"""The tables of docs/adversarial.md, from results/adversarial/*.json."""

from pathlib import Path

from bbalpha.experiments import adversarial_figures as figures
from bbalpha.experiments import results

FOLDER = Path(__file__).resolve().parent.parent / "results" / "adversarial"
STEPS = (0.1, 0.2, 0.3, 0.5)
WALK = (10, 20, 40, 100)


def verdicts():
    """Claims, held against our numbers."""
    lines = ["| claim | holds here | numbers |", "|---|---|---|"]
    lines += [f"| {v.claim} | {v.answer} | {v.figures} |" for v in figures.verdicts(figures.read(FOLDER))]
    return "\n".join(lines)


def fgsm():
    """The fast gradient sign attack of the paper."""
    lines = [
        "| | step | accuracy | entropy | AUROC by entropy | by mutual information | flagged | wrong and not flagged |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, rows in figures.networks(figures.read(FOLDER)).items():
        curve = figures.curve(rows, "fgsm")
        for step in (s for s in (0.0, *STEPS) if s in curve):
            r = curve[step]
            lines.append(
                f"| {label} | {step:g} | {r['accuracy']:.3f} | {r['entropy']:.2f} ± {r['entropy_stderr']:.2f} "
                f"| {number(r['auroc_entropy'])} | {number(r['auroc_mi'])} | {r['caught']:.1%} | {r['unnoticed']:.1%} |"
            )
    return "\n".join(lines) + f"\n\n{note()}"


def targeted():
    """Small steps towards class 0."""
    lines = [
        "| | steps | accuracy | taken for a 0 | nearest digit is a 0 | entropy | AUROC by entropy | flagged |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, rows in figures.networks(figures.read(FOLDER)).items():
        curve = figures.curve(rows, "targeted")
        for n in (n for n in (0, *WALK) if n in curve):
            r = curve[n]
            lines.append(
                f"| {label} | {n} | {r['accuracy']:.3f} | {r['target_rate']:.1%} | {r['nearest_target']:.1%} "
                f"| {r['entropy']:.2f} ± {r['entropy_stderr']:.2f} | {number(r['auroc_entropy'])} | {r['caught']:.1%} |"
            )
    return "\n".join(lines)


def attackers():
    """Who attacks, on the same first test digits; of the attacker who knows, the strongest weight."""
    lines = [
        "| | attack | attacker | evade | accuracy | entropy | AUROC by entropy | flagged | wrong and not flagged |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for label, rows in figures.networks(figures.read(FOLDER)).items():
        for attack, attacker, r in chosen(rows):
            lines.append(
                f"| {label} | {attack} | {attacker} | {r['evade']:g} | {r['accuracy']:.3f} | {r['entropy']:.2f} "
                f"| {number(r['auroc_entropy'])} | {r['caught']:.1%} | {r['unnoticed']:.1%} |"
            )
    return "\n".join(lines)


def chosen(rows):
    """(attack, attacker, row) for the table of attackers."""
    for attacker in ("fresh", "fixed", "transfer"):
        r = figures.curve(rows, "fgsm", attacker).get(0.2)
        if r:
            yield "one step of 0.2", attacker, r
    known = figures.strongest(rows, "fgsm", step=0.2)
    if known:
        yield "one step of 0.2", "adaptive", known
    for attacker in ("fresh", "fixed", "transfer"):
        r = figures.curve(rows, "targeted", attacker).get(40)
        if r:
            yield "40 steps to class 0", attacker, r
    for radius in sorted({r["radius"] for r in rows if r["radius"]}):
        known = figures.strongest(rows, "targeted", radius=radius)
        yield f"walk within {radius:g} to the second class", "adaptive", known


def number(value):
    return "" if value is None else f"{value:.3f}"


def note():
    """Where the numbers come from."""
    content = results.read(FOLDER / "nn.json")
    return f"Made by `{content['command']}` with torch {content['versions']['torch']}, seed {content['seed']}."
