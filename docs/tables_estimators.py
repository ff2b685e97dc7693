"""Tables of docs/estimators.md, from results/defaults/*.json and results/chosen_defaults.json."""

from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent
METHODS = [("bbalpha", 0.0), ("bbalpha", 0.5), ("bbalpha", 1.0), ("nn", None), ("forest", None), ("gbm", None)]
CHOSEN = (4000, 0.2, 5)  # steps, share held out and networks of the defaults for few rows
SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")


def defaults():
    """Test NLL of the defaults on the published splits, beside scikit-learn's."""
    found, contents = _defaults()
    lines = [
        "| test NLL | splits | alpha 0 | alpha 0.5 | alpha 1 | MLP | random forest | boosting |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dataset in SETS:
        columns = [list(found[dataset].get(m, {}).values()) for m in METHODS]
        n = " / ".join(str(k) for k in sorted({len(c) for c in columns if c}))
        best = min((fmean(c) for c in columns if c), default=None)
        lines.append(f"| {dataset} | {n} | " + " | ".join(_cell(c, best) for c in columns) + " |")
    head = contents[0]
    return "\n".join(lines) + (
        "\n\nMeans over splits with standard errors, the best in bold; lower is better. "
        f"Made by `{head['command']}` with torch {head['versions']['torch']} "
        f"and scikit-learn {head['versions']['scikit-learn']}."
    )


def units():
    """Held-out NLL by kind of unit, on problems that are none of the paper's."""
    content = results.read(ROOT / "results/chosen_units.json")
    found = {(r["problem"], r["steps"], r["activation"], r["spread"]): r["nll"] for r in content["rows"]}
    kinds = list(dict.fromkeys(key[2:] for key in found))
    names = [f"{activation}" + (f" from {spread:g}" if spread != 1 else "") for activation, spread in kinds]
    lines = ["| held-out NLL | steps | " + " | ".join(names) + " |", "|---" * (2 + len(kinds)) + "|"]
    for problem, steps in dict.fromkeys(key[:2] for key in found):
        values = [found[problem, steps, *kind] for kind in kinds]
        cells = [f"**{v:.2f}**" if v == min(values) else f"{v:.2f}" for v in values]
        lines.append(f"| {problem} | {steps} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\nMade by `{content['command']}` with torch {content['versions']['torch']}."


def mixing():
    """The loss of a mixture by how much its weights trust few rows."""
    content = results.read(ROOT / "results/mixing_chosen.json")
    priors = [name for name in content["rows"][0] if name.startswith("prior ")]
    heads = ["even" if float(name.split()[1]) > 1e5 else name.split()[1] for name in priors]
    lines = ["| loss | rows to fit | draws | " + " | ".join(heads) + " |", "|---" * (3 + len(priors)) + "|"]
    for problem, rows in dict.fromkeys((r["problem"], r["rows"]) for r in content["rows"]):
        own = [r for r in content["rows"] if r["problem"] == problem]
        values = [fmean(r[name] for r in own) for name in priors]
        cells = [f"**{v:.4f}**" if v == min(values) else f"{v:.4f}" for v in values]
        lines.append(f"| {problem} | {rows} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\nMade by `{content['command']}` with torch {content['versions']['torch']}."


def large():
    """Many rows: seconds, memory and scores."""
    content = results.read(ROOT / "results/large.json")
    lines = [
        "| rows | way | fit, s | predict all, s | intervals of 100,000, s | memory, MB | NLL | RMSE | 90 % hold |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ways = {"quick": '`budget="quick"`', "standard": '`budget="standard"`', "boosting": "HistGradientBoosting"}
    for r in content["rows"]:
        ends = f"{r['interval_seconds_of_100000']:.0f}" if "interval_seconds_of_100000" in r else "-"
        seconds = f"{r['fit_seconds']:.0f} | {r['predict_seconds']:.0f} | {ends}"
        scores = f"{r['nll']:.3f} | {r['rmse']:.3f} | {r['coverage90']:.3f}"
        lines.append(f"| {r['rows']:,} | {ways[r['way']]} | {seconds} | {r['mb']:.0f} | {scores} |")
    return "\n".join(lines) + f"\n\nMade by `{content['command']}`; another program was running on the second core."


def verdict():
    """Where the defaults win and where they do not, on the splits that all have."""
    found, _ = _defaults()
    full = {d: _common(found[d], METHODS) for d in SETS if all(m in found[d] for m in METHODS)}
    won = [d for d, m in full.items() if m["bbalpha", 0.5] < min(m[k, None] for k in ("nn", "forest", "gbm"))]
    ours = {d: _common(found[d], METHODS[:3]) for d in SETS if all(m in found[d] for m in METHODS[:3])}
    over = [d for d, m in ours.items() if m["bbalpha", 0.5] < m["bbalpha", 0.0]]
    return (
        f"At alpha = 0.5 the defaults beat all three of scikit-learn's on {len(won)} of {len(full)} sets "
        f"({_names(won)}){_but(', and lose to the best of them on', full, won)}. Alpha 0.5 is better than alpha 0 on "
        f"{len(over)} of {len(ours)} ({_names(over)}){_but('; not on', ours, over)}."
    )


def choice():
    """What the candidates for the defaults scored."""
    content = results.read(ROOT / "results/chosen_defaults.json")
    kinds = defaultdict(dict)
    for r in content["rows"]:
        name = _kind(r)
        kinds[name].setdefault(r["problem"], []).append(r["nll"])
    problems = list(dict.fromkeys(r["problem"] for r in content["rows"]))
    lines = ["| candidate | " + " | ".join(problems) + " | mean |", "|---|" + "---|" * (len(problems) + 1)]
    for name, scores in kinds.items():
        cells = [fmean(scores[p]) for p in problems if p in scores]
        if len(cells) == len(problems):
            mean = fmean(min(c, 3.0) for c in cells)
            lines.append(f"| {name} | " + " | ".join(f"{c:.2f}" for c in cells) + f" | {mean:.3f} |")
    return "\n".join(lines) + (
        "\n\nHeld-out NLL in units of the target's deviation (predicting the mean gives about 1.42), three splits "
        "each; values over 3 count as 3 in the mean. "
        f"Made by `{content['command']}`, {content['seconds'] / 60:.0f} minutes."
    )


def speed():
    """What training costs beside what it stands for."""
    content = results.read(ROOT / "results/fit.json")
    lines = ["| work | way | K | seconds | ratio |", "|---|---|---|---|---|"]
    lines += [
        f"| {r['work']} | {r['way']} | {r['n_passes']} | {r['seconds']:.2f} | {r['ratio']:.2f} |"
        for r in content["rows"]
    ]
    return "\n".join(lines) + (
        f"\n\nOne thread, the best of several interleaved rounds. Made by `{content['command']}` with torch "
        f"{content['versions']['torch']} and scikit-learn {content['versions']['scikit-learn']}."
    )


def _kind(r):
    hold = f"best epoch by {r['held_out']:.0%} held out" if r["held_out"] else "all rows, last epoch"
    what = f"{r['networks']} networks, each " if r["networks"] > 1 else ""
    if r["dropout"] is None:
        chosen = "**" if (r["steps"], r["held_out"], r["networks"]) == CHOSEN else ""
        return f"{chosen}{what}{r['steps']} steps, {hold}, and by the same rows the best of these four pairs{chosen}"
    rates = f"dropout {r['dropout']:.2g}, at inputs {r['input_dropout']:.2g}"
    return f"{what}{r['steps']} steps, {hold}; {rates}, l = {r['length_scale']:g}"


def _defaults():
    paths = sorted((ROOT / "results/defaults").glob("*.json"))
    if not paths:
        raise FileNotFoundError(2, "no results", "results/defaults/*.json")
    found, contents = defaultdict(lambda: defaultdict(dict)), [results.read(p) for p in paths]
    for r in (r for c in contents for r in c["rows"]):
        found[r["dataset"]][r["method"], r["alpha"]][r["split"]] = r["nll"]
    return found, contents


def _common(methods, names):
    """{method: its mean over the splits that all have}."""
    splits = set.intersection(*(set(methods[m]) for m in names))
    return {m: fmean(methods[m][split] for split in splits) for m in names}


def _but(words, all_sets, some):
    rest = [d for d in all_sets if d not in some]
    return f"{words} {_names(rest)}" if rest else ""


def _cell(values, best):
    if not values:
        return ""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    text = f"{fmean(values):.2f}{error}"
    return f"**{text}**" if fmean(values) == best else text


def _names(sets):
    return ", ".join(sets) or "none"
