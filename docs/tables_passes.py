"""Tables of docs/passes.md and a sentence of README, from results/passes*.json and regression/."""

from math import log10
from pathlib import Path
from statistics import fmean, median, stdev

from bbalpha.experiments import results
from bbalpha.experiments.regression import DATASETS

ROOT = Path(__file__).resolve().parent.parent
QUANTITIES = ("mean", "probabilities", "entropy", "mutual information", "variance", "interval")
PASSES = (2, 5, 10, 20, 50, 100)
ALPHAS = (0.0, 0.5, 1.0)
MASKS = ("per_example", "shared")
ALLOWED = 1.05
UCI = ("concrete", "boston")
SHOWN = ("concrete, 0.05, inputs too", "digits MLP, 0.5", "LSTM, 0.3", "MNIST 3 x 1000, 0.5")  # of the spread


def errors():
    """Error ratios at K = 20, of all quantities."""
    content = _read()
    lines = _head("balanced / independent, K = 20", *QUANTITIES)
    for name in _networks(content):
        cells = [_pair(content, name, quantity, 20) for quantity in QUANTITIES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + (
        f"\n\nRoot mean square errors; masks of every row by itself / shared masks. {_note(content)}"
    )


def by_passes():
    """Error ratios of what is averaged, for every K."""
    content = _read()
    lines = _head("balanced / independent", "of", *(f"K = {K}" for K in PASSES))
    for name in _networks(content):
        for quantity in ("mean", "probabilities"):
            found = [_pick(content, name, quantity, K) for K in PASSES]
            if all(found):
                cells = [f"{r['ratio']:.2f}" for r in found]
                lines.append(f"| {name} | {quantity} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def equal():
    """How many independent passes give the error of K balanced ones."""
    content = _read()
    kinds = [(q, K) for q in ("mean", "probabilities") for K in (10, 20, 100)]
    lines = _head("independent passes with the error of", *(f"{q}, K = {K}" for q, K in kinds))
    for name in _networks(content):
        found = [_pick(content, name, q, K) for q, K in kinds]
        cells = [count(r["equal_passes"]) if r else "" for r in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gradients():
    """Ratios of the gradient's variance."""
    content = _read()
    kinds = [(masks, alpha) for masks in MASKS for alpha in ALPHAS]
    titles = (f"alpha {alpha:g}{', shared' if masks == 'shared' else ''}" for masks, alpha in kinds)
    lines = _head("variance, balanced / independent, K = 10", *titles)
    for name in _networks(content):
        found = [_row(content, work="gradient", network=name, masks=m, alpha=a) for m, a in kinds]
        lines.append(f"| {name} | " + " | ".join(_with_error(r) for r in found) + " |")
    return "\n".join(lines)


def worst():
    """The worst ratio of any network, by quantity and K; what is beyond doubt above 1.05 is in bold."""
    content = _read()
    lines = _head("the worst of all networks", *(f"K = {K}" for K in PASSES))
    for quantity in (*QUANTITIES, "variance, K - 1"):
        cells = []
        for K in PASSES:
            row = max(_rows(content, work="error", quantity=quantity, n_passes=K), key=lambda r: r["ratio"])
            cells.append(f"**{_with_error(row)}**" if is_worse(row) else _with_error(row))
        lines.append(f"| {quantity} | " + " | ".join(cells) + " |")
    told = [r for r in _rows(content, work="error") if is_worse(r)]
    return "\n".join(lines) + (
        f"\n\nBold: above {ALLOWED} by more than two standard errors. So are {len(told)} of the "
        f"{len(_rows(content, work='error'))} ratios of all networks, masks, quantities and K: {_by_quantity(told)}."
    )


def spread():
    """Bias and standard deviation of the variance over passes, in percent of it."""
    content = _read()
    ways = "independent, divided by K", "by K - 1", "balanced, divided by K", "by K - 1"
    lines = _head("% of the variance: bias, deviation", "K", *ways)
    for name in (n for n in SHOWN if n in _networks(content)):
        for K in (2, 5, 10, 20):
            rows = [_pick(content, name, quantity, K) for quantity in ("variance", "variance, K - 1")]
            cells = [
                f"{100 * r[f'bias_{side}'] / r['value']:+.0f}, {100 * r[f'sd_{side}'] / r['value']:.0f}"
                for side in ("independent", "balanced")
                for r in rows
            ]
            lines.append(f"| {name} | {K} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def unsure():
    """The same for mutual information and interval ends."""
    content = _read()
    lines = _head("% of the value: bias, deviation", "of", "K", "independent", "balanced")
    for name in (n for n in SHOWN if n in _networks(content)):
        for quantity in ("mutual information", "interval"):
            for K in (2, 10, 20):
                r = _pick(content, name, quantity, K)
                if r:
                    cells = [
                        f"{100 * r[f'bias_{side}'] / r['value']:+.1f}, {100 * r[f'sd_{side}'] / r['value']:.1f}"
                        for side in ("independent", "balanced")
                    ]
                    lines.append(f"| {name} | {quantity} | {K} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bias():
    """Bias of the objective, with the passes that independent masks need for the same."""
    content = _read()
    lines = _head("bias of the objective, nats", "alpha", "masks", *(f"K = {K}" for K in PASSES))
    for name in dict.fromkeys(r["network"] for r in _rows(content, work="bias")):
        for alpha in ALPHAS[1:]:
            for way in ("independent", "balanced"):
                own = _rows(content, work="bias", network=name, alpha=alpha, way=way)
                found = {r["n_passes"]: r["bias"] for r in own}
                lines.append(f"| {name} | {alpha:g} | {way} | " + " | ".join(f"{found[K]:.2g}" for K in PASSES) + " |")
    return "\n".join(lines)


def goals():
    """What was aimed at, and what came out."""
    content = _read()
    uci, mnist = _uci_means(content), _mnist_probabilities(content)
    return "\n".join(
        [
            goal(
                "Means of the UCI networks at rate 0.05, K = 20: error at most 0.1 of that of independent masks",
                uci,
                0.1,
            ),
            goal("Probabilities of the MNIST networks, K = 20: at most 0.65", mnist, 0.65),
            goal("Variance of the gradient, K = 10, every alpha: at most 0.8", _rows(content, work="gradient"), 0.8),
            goal(f"No error of any network, at any K, above {ALLOWED}", _rows(content, work="error"), ALLOWED),
        ]
    )


def floor():
    """How far balancing single units can get, beside how far ours gets."""
    content = results.read(ROOT / "results/passes_floor.json")
    lines = _head("means, K = 20", "units by themselves", "least error that is left", "ours")
    for row in content["rows"]:
        ours = _pick(_read(), row["network"], "mean", 20)["ratio"]
        share = f"{100 * row['first_order']:.1f} ± {100 * row['first_order_error']:.1f} % of the variance"
        lines.append(f"| {row['network']} | {share} | {row['floor']:.2f} | {ours:.2f} |")
    return "\n".join([*lines, "", _note(content)])


def last_layer():
    """Whether it helps to integrate the last dropout exactly."""
    rows = [r for r in _rows(_read(), work="last layer") if r["balanced"] is not None]
    some = sorted((r for r in rows if r["balanced_exact"] > 0), key=lambda r: r["balanced_exact"] / r["balanced"])
    ours, theirs = ([r[f"{side}_exact"] / r[side] for r in some] for side in ("balanced", "independent"))
    return (
        f"With balanced masks (K = {rows[0]['n_passes']}) the error of the mean falls to {median(ours):.2f} of itself "
        f"in the median of {len(some)} networks, from {ours[0]:.2f} ({some[0]['network']}) to {ours[-1]:.2f} "
        f"({some[-1]['network']}); with independent masks to {median(theirs):.2f} in the median. In the "
        f"{len(rows) - len(some)} networks with no other dropout nothing is left to draw, and the network run once "
        "without dropout is the exact mean."
    )


def headline():
    """What README says: of each kind of network the one that gains least."""
    content = _read()
    uci, mnist = _uci_means(content), _mnist_probabilities(content)
    steps = [r["ratio"] for r in _rows(content, work="gradient")]
    least = max(uci, key=lambda r: r["ratio"])
    K, equals = least["n_passes"], least["equal_passes"]
    return (
        "The masks of the K passes of a call know of each other: each unit is dropped in its share of them. On UCI "
        f"networks with dropout 0.05, {K} passes, in which each unit is dropped once, predict means as well as "
        f"{count(equals)} or more independent ones: at least **{count(equals / K)} times fewer passes for the same "
        "error**; with so few passes that most units are never dropped little is gained. For the probabilities of "
        f"the MNIST networks it is {count(min(r['equal_passes'] for r in mnist) / K)} times fewer, and gradients have "
        f"{min(steps):.2f} to {max(steps):.2f} of their variance, {median(steps):.2f} in the median. "
        "[What gets better, what does not, and "
        "why](docs/passes.md)."
    )


# ------------------------------------------------------------------------------ helpers


def count(number):
    """A number of passes to two digits; None, of no error at all, and what is beyond measuring as "over 100,000"."""
    if number is None or number > 1e5:
        return "over 100,000"
    return f"{round(number, 1 - int(log10(number))):,.0f}" if number >= 10 else f"{number:.1f}"


def goal(words, rows, least):
    """A line that says whether all rows are at or below `least`, and if not which are not."""
    over = [r for r in rows if r["ratio"] > least]
    span = f"{min(r['ratio'] for r in rows):.2f} to {max(r['ratio'] for r in rows):.2f}"
    if not over:
        return f"- {words}: reached, {span}."
    networks = sorted({r["network"] for r in over})
    named = "; ".join(networks) if len(networks) <= 6 else f"on {len(networks)} networks"
    return f"- {words}: not reached by {len(over)} of {len(rows)} ({named}); {span}."


def is_worse(row):
    """Whether a ratio is above 1.05 by more than two standard errors."""
    return row["ratio"] - 2 * row["ratio_error"] > ALLOWED


def _with_error(row):
    return f"{row['ratio']:.2f} ± {row['ratio_error']:.2f}"


def _by_quantity(rows):
    counts = {q: [r for r in rows if r["quantity"] == q] for q in (*QUANTITIES, "variance, K - 1")}
    told = [f"{len(own)} of {q} (K = {_span(own)})" for q, own in counts.items() if own]
    return ", ".join(told) or "none"


def _span(rows):
    values = sorted({r["n_passes"] for r in rows})
    return f"{values[0]} to {values[-1]}" if len(values) > 1 else str(values[0])


def _uci_means(content):
    kinds = tuple(f"{name}, 0.05" for name in UCI)
    return [r for r in _rows(content, work="error", quantity="mean", n_passes=20) if r["network"].startswith(kinds)]


def _mnist_probabilities(content):
    kinds = ("MNIST", "CNN")
    found = _rows(content, work="error", quantity="probabilities", n_passes=20)
    return [r for r in found if r["network"].startswith(kinds)]


def _pair(content, name, quantity, K):
    found = [_pick(content, name, quantity, K, masks) for masks in MASKS]
    return " / ".join(f"{r['ratio']:.2f}" for r in found if r)


def _pick(content, name, quantity, K, masks="per_example"):
    return _row(content, work="error", network=name, quantity=quantity, n_passes=K, masks=masks)


def _row(content, **where):
    return next(iter(_rows(content, **where)), None)


def _rows(content, **where):
    return [r for r in content["rows"] if all(r.get(k) == v for k, v in where.items())]


def _networks(content):
    return list(dict.fromkeys(r["network"] for r in content["rows"]))


def _head(*titles):
    return ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]


def _note(content):
    return f"Made by `{content['command']}` with torch {content['versions']['torch']}, seed {content['seed']}."


def _read():
    return results.read(ROOT / "results/passes.json")


# ------------------------------------------------------------------------------ in training


def uci():
    """The paper's table at alpha = 0.5 with balanced passes, beside independent ones."""
    lines = _head("alpha = 0.5", "splits", "NLL, independent", "NLL, balanced", "difference", "coverage of 90 %")
    better = worse = 0
    content = None
    for dataset in DATASETS:
        content = results.read(ROOT / "results/regression" / f"{dataset}.json")
        ways = [_by_split(content, method) for method in ("bbalpha", "bbalpha-balanced")]
        splits = sorted(set(ways[0]) & set(ways[1]))
        if not splits:
            continue
        nll = [[way[s]["nll"] for s in splits] for way in ways]
        cover = [100 * fmean(way[s]["coverage90"] for s in splits) for way in ways]
        change, error = _mean_error([b - a for a, b in zip(*nll, strict=True)])
        better, worse = better + (change < -2 * error), worse + (change > 2 * error)
        cells = [str(len(splits)), *(f"{fmean(n):.3f}" for n in nll), f"{change:+.3f} ± {error:.3f}"]
        lines.append(f"| {dataset} | " + " | ".join(cells) + f" | {cover[0]:.1f}, {cover[1]:.1f} |")
    told = f"Better by more than two standard errors: {better} of the sets; worse: {worse}. "
    return "\n".join(lines) + (
        "\n\nSame hyper-parameters, seeds and splits; differences are paired. " + told + "Made by "
        f"`bbalpha reproduce regression --methods bbalpha-balanced` with torch {content['versions']['torch']}."
    )


def training():
    """MNIST trained with balanced and with independent passes, step for step."""
    content = results.read(ROOT / "results/passes_training.json")
    lines = _head("K", "log-likelihood, independent", "balanced", "difference", "accuracy, %")
    for K in dict.fromkeys(r["n_passes"] for r in content["rows"]):
        ways = [[r for r in content["rows"] if (r["n_passes"], r["balanced"]) == (K, b)] for b in (False, True)]
        found = [[r["total_log_likelihood"] for r in way] for way in ways]
        change, error = _mean_error([b - a for a, b in zip(*found, strict=True)])
        right = ", ".join(f"{100 * fmean(r['accuracy'] for r in way):.2f}" for way in ways)
        means = " | ".join(f"{fmean(values):.0f}" for values in found)
        lines.append(f"| {K} | {means} | {change:+.0f} ± {error:.0f} | {right} |")
    return "\n".join(lines) + (
        f"\n\nMade by `{content['command']}` with torch {content['versions']['torch']}, "
        f"{content['settings']['seeds']} seeds; differences are paired."
    )


def runtime():
    """The paper's run-time experiment: log-likelihood of the test digits after equal times."""
    content = results.read(ROOT / "results/balanced/runtime/10.json")
    names = {
        "ours": "independent", "balanced": "balanced", "shared": "shared masks, independent",
        "balanced-shared": "shared masks, balanced",
    }  # fmt: skip
    ways = {way: [r for r in content["rows"] if r["way"] == way] for way in names}
    lines = _head("seconds of training", *names.values())
    for place in zip(*ways.values(), strict=False):
        cells = [f"{r['total_log_likelihood']:.0f} ({r['epoch']:.1f} epochs)" for r in place]
        lines.append(f"| {place[0]['seconds']:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + (
        f"\n\nOne run, seed {content['seed']}, torch {content['versions']['torch']}. Made by `{content['command']}`."
    )


def _by_split(content, method):
    rows = [r for r in content["rows"] if r["method"] == method and r["alpha"] == 0.5]
    return {r["split"]: r for r in rows}


def _mean_error(values):
    return fmean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
