"""Tables of docs/regression.md and of the README, out of results/regression/*.json and what the paper published."""

import csv
import statistics
from pathlib import Path

from bbalpha.experiments import results
from bbalpha.experiments.regression import DATASETS

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "results" / "regression"
ALPHAS = (0.0, 0.5, 1.0)
# (method, alpha) -> the published column, where there is one
PUBLISHED = {
    **{("bbalpha", a): f"alpha={a}" for a in ALPHAS},
    ("hmc", None): "HMC",
    ("gp", None): "GP",
    ("vi-g", None): "VI-G",
}
EXTRAS = {
    ("bbalpha-het", 0.5): "predicted noise",
    ("bbalpha-ens", 0.5): "five networks",
    ("bbalpha-2x", 0.5): "two hidden layers",
    ("bbalpha-cv", None): "alpha chosen",
}
OTHERS = {("mc-dropout", 0.0): "MC dropout", ("ensemble", None): "deep ensemble", ("gbm", None): "boosting"}
NOT_HERE = "not available here"


def load():
    """{data set: content} of what was measured; FileNotFoundError if nothing was."""
    found = {name: results.read(FOLDER / f"{name}.json") for name in DATASETS if (FOLDER / f"{name}.json").exists()}
    return found or {DATASETS[0]: results.read(FOLDER / f"{DATASETS[0]}.json")}


def paper():
    """{(data set, metric, column): (mean, standard error or None)} as published."""
    with (ROOT / "src" / "bbalpha" / "report" / "published.csv").open() as file:
        return {
            (r["dataset"], r["metric"], r["method"]): (float(r["mean"]), number(r["stderr"]))
            for r in csv.DictReader(file)
            if r["mean"] != "NA"
        }


def number(text):
    return None if text == "NA" else float(text)


def score(content, method, alpha, metric="nll"):
    """(mean, standard error, splits) over the splits; None without rows."""
    values = [
        r[metric] for r in content["rows"] if (r["method"], r["alpha"]) == (method, alpha) and r.get(metric) is not None
    ]
    if not values:
        return None
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.mean(values), error, len(values)


def shown(value, digits=2):
    """Mean ± standard error."""
    return "" if value is None else f"{value[0]:.{digits}f} ± {value[1] or 0:.{digits}f}"


def ours(content, key, metric, digits):
    """Mean ± standard error of a method, and its number of splits where the alpha networks have more."""
    value, whole = score(content, *key, metric), score(content, "bbalpha", 0.5, metric)
    if value is None:
        return "-"
    fewer = f", {value[2]} split{'s' * (value[2] > 1)}" if whole and value[2] < whole[2] else ""
    return shown(value, digits) + fewer


def beside(content, published, key, dataset, metric="nll", digits=2):
    """Ours, and what was published, in brackets."""
    own = ours(content, key, metric, digits)
    theirs = published.get((dataset, metric, PUBLISHED[key]))
    return own if theirs is None else f"{own} ({theirs[0]:.2f})"


def year(published, metric, columns):
    """The row of the set that is not here: what was published."""
    cells = []
    for column in columns:
        theirs = published.get(("year", metric, column))
        cells.append(f"({theirs[0]:.2f})" if theirs else "")
    return f"| year: {NOT_HERE} | " + " | ".join(cells) + " |"


def of_paper(metric, digits):
    found, published = load(), paper()
    names = ["alpha 0", "alpha 0.5", "alpha 1", "HMC", "sparse GP", "VI-G"]
    lines = [f"| test {metric.upper()} | " + " | ".join(names) + " |", "|---" * 7 + "|"]
    for dataset, content in found.items():
        cells = [beside(content, published, key, dataset, metric, digits(dataset)) for key in PUBLISHED]
        lines.append(f"| {dataset} | " + " | ".join(cells) + " |")
    lines.append(year(published, metric, PUBLISHED.values()))
    return "\n".join(lines)


def beyond(metric, digits):
    found = load()
    columns = EXTRAS | OTHERS
    lines = [f"| test {metric.upper()} | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for dataset, content in found.items():
        cells = [ours(content, key, metric, digits(dataset)) for key in columns]
        lines.append(f"| {dataset} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def full():
    """NLL of everything: the paper's columns, then ours beyond it."""
    return f"{of_paper('nll', lambda _: 2)}\n\n{beyond('nll', lambda _: 2)}\n\n{note()} In brackets what the paper has."


def rmse():
    """RMSE of everything; sets of small targets with more digits."""

    def digits(dataset):
        return {"naval": 4, "kin8nm": 3}.get(dataset, 2)

    return f"{of_paper('rmse', digits)}\n\n{beyond('rmse', digits)}"


def short():
    """For the README: our alpha networks and the best of the extras beside the paper's best columns."""
    found, published = load(), paper()
    lines = [
        "| test NLL | alpha 0 | **alpha 0.5** | alpha 1 | best extra | paper: alpha 0.5 | paper: VI-G | paper: HMC |",
        "|---" * 8 + "|",
    ]
    for dataset, content in found.items():
        alphas = [ours(content, ("bbalpha", a), "nll", 2) for a in ALPHAS]
        extra = best(content, EXTRAS)
        theirs = [shown(published[dataset, "nll", c]) for c in ("alpha=0.5", "VI-G", "HMC")]
        last = "-" if extra is None else f"{shown(extra[1])} ({EXTRAS[extra[0]]})"
        lines.append(f"| {dataset} | " + " | ".join([*alphas, last, *theirs]) + " |")
    return "\n".join(lines) + f"\n\n{note()}"


def best(content, keys):
    """(key, score) of the lowest NLL among `keys`."""
    known = {key: score(content, *key) for key in keys if score(content, *key) is not None}
    return min(known.items(), key=lambda item: item[1][0]) if known else None


def verdict():
    """What was aimed at, counted."""
    found, published = load(), paper()
    reached, beats_vi, beats_zero, beats_hmc, beats_ours = [], [], [], [], []
    for dataset, content in found.items():
        half, zero = score(content, "bbalpha", 0.5), score(content, "bbalpha", 0.0)
        top, extra = best(content, [("bbalpha", a) for a in ALPHAS]), best(content, EXTRAS)
        if half:
            mean, error = published[dataset, "nll", "alpha=0.5"]
            reached.append((dataset, half[0] <= mean + 2 * ((error or 0) ** 2 + half[1] ** 2) ** 0.5))
        if top:
            beats_vi.append((dataset, top[1][0] < published[dataset, "nll", "VI-G"][0]))
        if half and zero:
            beats_zero.append((dataset, half[0] < zero[0]))
        if extra:
            beats_hmc.append((dataset, extra[1][0] < published[dataset, "nll", "HMC"][0]))
        own = score(content, "hmc", None)
        if extra and own:
            beats_ours.append((dataset, extra[1][0] < own[0]))
    lines = ["| aim | on | not on |", "|---|---|---|"]
    for aim, outcome in (
        ("alpha 0.5 reaches the paper's alpha 0.5 within two combined standard errors, or is better", reached),
        ("the best alpha beats the paper's VI-G", beats_vi),
        ("alpha 0.5 beats our alpha 0", beats_zero),
        ("the best extra beats the paper's HMC", beats_hmc),
        ("the best extra beats our own HMC, where that was run", beats_ours),
    ):
        yes, no = ([name for name, met in outcome if met == wanted] for wanted in (True, False))
        lines.append(f"| {aim} | {len(yes)} of {len(outcome)}: {', '.join(yes)} | {', '.join(no)} |")
    return "\n".join(lines)


def distance():
    """How close the best extra comes to the paper's HMC."""
    published = paper()
    lines = ["| test NLL | best extra | | paper's HMC | extra is | |", "|---" * 6 + "|"]
    for dataset, content in load().items():
        extra, theirs = best(content, EXTRAS), published[dataset, "nll", "HMC"]
        if extra:
            gap = extra[1][0] - theirs[0]
            error = ((theirs[1] or 0) ** 2 + extra[1][1] ** 2) ** 0.5
            told = f"{abs(gap):.2f} {'better' if gap < 0 else 'worse'}"
            errors = f"{abs(gap) / error:.1f} standard errors" if error else ""  # one split has none
            lines.append(
                f"| {dataset} | {shown(extra[1])} | {EXTRAS[extra[0]]} | {shown(theirs)} | {told} | {errors} |"
            )
    return "\n".join(lines)


def coverage():
    """How much of the test rows the central 90 % intervals hold."""
    columns = {("bbalpha", a): f"alpha {a:g}" for a in ALPHAS} | EXTRAS | OTHERS
    columns |= {("hmc", None): "HMC", ("gp", None): "GP", ("vi-g", None): "VI-G"}
    lines = ["| coverage of 90 % | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for dataset, content in load().items():
        values = [score(content, *key, "coverage90") for key in columns]
        lines.append(f"| {dataset} | " + " | ".join("-" if v is None else f"{v[0]:.2f}" for v in values) + " |")
    return "\n".join(lines)


def chains():
    """How the chains of HMC mixed, and what they cost."""
    lines = [
        "| data set | splits | acceptance | divergences | R-hat, median | R-hat, worst | minutes a split |",
        "|---" * 7 + "|",
    ]
    for dataset, content in load().items():
        own = [r for r in content["rows"] if r["method"] == "hmc"]
        if own:
            draws = sum(r["n_samples"] for r in own)
            cells = [
                len(own), f"{statistics.mean(r['accept'] for r in own):.2f}",
                f"{sum(r['divergences'] for r in own)} of {draws}", f"{statistics.median(r['rhat'] for r in own):.2f}",
                f"{max(r['rhat_worst'] for r in own):.2f}", f"{content['seconds_of']['hmc'] / 60 / len(own):.1f}",
            ]  # fmt: skip
            lines.append(f"| {dataset} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def settings():
    """The hyper-parameters that were chosen most often for each alpha; the time of all alphas."""
    lines = [
        "| data set | alpha | dropout | at inputs | length scale | epochs | learning rate | on | minutes, all alphas |",
        "|---" * 9 + "|",
    ]
    names = ("dropout", "input_dropout", "length_scale", "epochs", "learning_rate")
    for dataset, content in load().items():
        minutes = content.get("seconds_of", {}).get("bbalpha", 0.0) / 60
        for alpha in ALPHAS:
            own = [r for r in content["rows"] if (r["method"], r["alpha"]) == ("bbalpha", alpha)]
            if own:
                choices = [tuple(r[n] for n in names) for r in own]
                common = statistics.mode(choices)
                cells = [f"{value:.3g}" for value in common]
                cells += [f"{choices.count(common)} of {len(own)} splits", f"{minutes:.0f}"]
                lines.append(f"| {dataset} | {alpha:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def note():
    """Where the numbers come from, and how many splits they are means of."""
    found = load()
    splits = {name: score(content, "bbalpha", 0.5) for name, content in found.items()}
    told = ", ".join(f"{name} {value[2]}" for name, value in splits.items() if value)
    version = next(iter(found.values()))["versions"]["torch"]
    return (
        f"Made by `bbalpha reproduce regression` with torch {version}; means over splits ± standard error ({told}). "
        "Lower is better."
    )
