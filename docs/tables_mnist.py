"""Tables of docs/mnist.md and the short one of README, out of results/classification and results/runtime."""

from pathlib import Path

from bbalpha.experiments import classification, results
from bbalpha.experiments import runtime as timing
from bbalpha.experiments.mnist import mean_error

ROOT = Path(__file__).resolve().parent.parent
# score, heading, factor, digits
COLUMNS = (
    ("accuracy", "accuracy, %", 100, 2),
    ("total_log_likelihood", "log-likelihood", 1, 0),
    ("ece", "calibration error", 1, 4),
    ("auroc_error", "errors found", 1, 3),
    ("auroc_ood_entropy", "notMNIST by entropy", 1, 3),
    ("auroc_ood_mi", "notMNIST by mutual information", 1, 3),
)
GOALS = {
    "dense": (("accuracy", 100, 97.2, "%"), ("total_log_likelihood", 1, -1330, ""), ("auroc_ood_mi", 1, 0.96, "")),
    "cnn": (("accuracy", 100, 99.3, "%"), ("total_log_likelihood", 1, -250, "")),
}
NAMES = {"accuracy": "accuracy", "total_log_likelihood": "log-likelihood", "auroc_ood_mi": "AUROC on notMNIST"}


def dense():
    return network("dense")


def cnn():
    return network("cnn")


def network(model):
    """All scores of a model after its last epoch, and what they say of the paper's claims."""
    content = read(f"classification/{model}.json")
    found = {k: classification.last(v) for k, v in classification.kinds(content["rows"]).items()}
    lines = [
        "| | " + " | ".join(heading for _, heading, _, _ in COLUMNS) + " | seconds an epoch |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for label, rows in found.items():
        pace = mean_error([r["seconds"] / r["epoch"] for r in rows])[0]
        cells = [cell(rows, score, factor, digits) for score, _, factor, digits in COLUMNS]
        lines.append(f"| {label} | " + " | ".join(cells) + f" | {pace:.1f} |")
    lines += ["", note(content) + f" Means ± standard errors of {seeds(found)}; K = 100 at test time.", ""]
    lines += [f"- {against(found, label, 'alpha = 0')}" for label in ("alpha = 0.5", "alpha = 1") if label in found]
    lines += [f"- {goal(found['alpha = 0.5'], *g)}" for g in GOALS[model] if "alpha = 0.5" in found]
    return "\n".join(lines)


def warm_up():
    """Log-likelihoods of the CNN, seed by seed, with and without the warm-up."""
    share = f"{100 * classification.CONFIGS['cnn'].warm_up:.0f}"
    contents = {"0": read("cnn_without_warm_up.json"), share: read("classification/cnn.json")}
    count = max(r["seed"] for r in contents[share]["rows"]) + 1
    lines = [
        "| | warm-up, % | " + " | ".join(f"seed {i}" for i in range(count)) + " | log-likelihood | accuracy, % |",
        "|---|---|" + "---|" * (count + 2),
    ]
    for label in ("alpha = 0", "alpha = 0.5", "alpha = 1", "MC dropout (K = 1)", "plain network"):
        for name, content in contents.items():
            rows = classification.last(classification.kinds(content["rows"])[label])
            each = " | ".join(f"{r['total_log_likelihood']:.0f}" for r in sorted(rows, key=lambda r: r["seed"]))
            scores = f"{cell(rows, 'total_log_likelihood', 1, 0)} | {cell(rows, 'accuracy', 100, 2)}"
            lines.append(f"| {label} | {name} | {each} | {scores} |")
    return "\n".join(lines) + f"\n\n{note(contents[share])}"


def short():
    """The README's table: the networks that were measured, the scores that matter most."""
    columns = [c for c in COLUMNS if c[0] not in ("ece", "auroc_error")]
    lines = ["| | " + " | ".join(heading for _, heading, _, _ in columns) + " |", "|---|" + "---|" * len(columns)]
    contents = {
        m: read(f"classification/{m}.json") for m in GOALS if (ROOT / f"results/classification/{m}.json").exists()
    }
    for model, content in contents.items():
        for label, rows in classification.kinds(content["rows"]).items():
            if "masks" not in label:
                cells = [cell(classification.last(rows), score, factor, digits) for score, _, factor, digits in columns]
                lines.append(f"| {'2 x 100' if model == 'dense' else 'CNN'}, {label} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(note(content) for content in contents.values())])


def runtime():
    """Every way and K: how far it came, when it reached the levels, and how much sooner than the loop."""
    content = timing.load(ROOT / "results" / "runtime")
    found = {(way, K): rows for way, K, rows in timing.pairs_of(content["rows"])}
    head = "".join(f" to {level:g} |" for level in timing.LEVELS)
    lines = [
        f"| way | K | ms a step | epochs |{head} best log-likelihood | best accuracy, % |",
        "|---|" + "---|" * (5 + len(timing.LEVELS)),
    ]
    for (way, K), rows in found.items():
        end = rows[-1]
        reached = " | ".join(clock(timing.time_to(rows, level)) for level in timing.LEVELS)
        lines.append(
            f"| {way} | {K} | {1000 * end['seconds'] / end['n_steps']:.0f} | {end['epoch']:.1f} "
            f"| {reached} | {best(rows):.0f} | {100 * max(r['accuracy'] for r in rows):.2f} |"
        )
    budget = min(rows[-1]["seconds"] for rows in found.values())
    lines += [
        "",
        f"{of_runtime(content)} Times as minutes:seconds of training; {budget / 60:.0f} minutes for each.",
        "",
    ]
    for K in sorted({K for _, K in found}):
        if ("loop", K) in found:
            lines += [f"- {sooner(found, way, K)}" for way in ("ours", "shared") if (way, K) in found]
    return "\n".join([*lines, *goals(found, 10)])


def masks():
    """Shared masks against those of each row: at equal epochs, and at equal time."""
    return "\n\n".join((masks_by_epochs(), masks_by_time()))


def masks_by_epochs():
    content = read("classification/dense.json")
    found = classification.kinds(content["rows"])
    labels = {"alpha = 0.5": "of each row", "alpha = 0.5, shared masks": "shared by the batch"}
    scored = sorted({r["epoch"] for r in content["rows"] if r["accuracy"] is not None})
    chosen = sorted({scored[0], *(scored[len(scored) * i // 3 - 1] for i in (1, 2, 3) if len(scored) * i >= 3)})
    lines = [
        "| 2 x 100, alpha = 0.5: masks | "
        + " | ".join(f"epoch {e}: accuracy, % | log-likelihood" for e in chosen)
        + " | seconds an epoch |",
        "|---|" + "---|" * (2 * len(chosen) + 1),
    ]
    for label, name in labels.items():
        rows = [r for r in found.get(label, []) if r["epoch"] in chosen]
        cells = [
            cell([r for r in rows if r["epoch"] == e], *column)
            for e in chosen
            for column in (("accuracy", 100, 2), ("total_log_likelihood", 1, 0))
        ]
        pace = mean_error([r["seconds"] / r["epoch"] for r in classification.last(rows)] or [0.0])[0]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {pace:.1f} |")
    ends = {k: classification.last(found[k]) for k in labels if k in found}
    verdict = against(ends, "alpha = 0.5, shared masks", "alpha = 0.5") if len(ends) == 2 else ""
    return "\n".join(lines) + f"\n\n{note(content)} {verdict}"


def masks_by_time():
    content = timing.load(ROOT / "results" / "runtime")
    found = {(way, K): rows for way, K, rows in timing.pairs_of(content["rows"])}
    budget = min(rows[-1]["seconds"] for rows in found.values())
    at = [t for t in timing.moments(budget) if t in (60.0, 120.0, 300.0, 600.0)] + [budget]
    lines = ["| way | K | " + " | ".join(f"{clock(t)}" for t in at) + " |", "|---|---|" + "---|" * len(at)]
    for (way, K), rows in found.items():
        lines.append(f"| {way} | {K} | " + " | ".join(f"{after(rows, t):.0f}" for t in at) + " |")
    ends = {pair: after(rows, budget) for pair, rows in found.items()}
    (way, K), value = max(ends.items(), key=lambda item: item[1])
    return (
        "\n".join(lines)
        + f"\n\n{of_runtime(content)} Log-likelihood of the test digits after so much training (minutes:seconds). "
        + f"Highest at the end: {way} with K = {K}, {value:.0f}."
    )


def chosen():
    """What was tried on held-out training rows; bold is what the experiments use."""
    content = read("chosen_mnist.json")
    used = {(m, c.epochs, c.batch_size, c.learning_rate, c.warm_up) for m, c in classification.CONFIGS.items()}
    of_time = timing.Config()
    found = {}
    for r in content["rows"]:
        key = (r["model"], r["epoch"], r["batch"], r["learning_rate"], r.get("warm_up"))
        if r["model"] == "runtime" and (r["batch"], r["learning_rate"]) == (of_time.batch_size, of_time.learning_rate):
            used.add(key)  # as many epochs as its time allows
        found.setdefault(key, []).append(r)
    lines = [
        "| | epochs | batch | learning rate | warm-up, % | networks | accuracy, % | log-likelihood |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, rows in sorted(
        found.items(), key=lambda item: (("dense", "cnn", "runtime").index(item[0][0]), item[0][1])
    ):
        model, epochs, batch, rate, warm_up = key
        mark = "**" if key in used else ""
        share = f"{100 * warm_up:.0f}" if warm_up else ""
        lines.append(
            f"| {model} | {epochs:.3g} | {batch} | {rate:g} | {share} | {len(rows)} "
            f"| {cell(rows, 'accuracy', 100, 2)} | {mark}{cell(rows, 'total_log_likelihood', 1, 0)}{mark} |"
        )
    return "\n".join(lines) + f"\n\n{note(content)} Bold: used."


def dead():
    """Filters and units that are dead after an epoch, a column a seed."""
    content = read("dead_units.json")
    found = {}
    for r in content["rows"]:
        found.setdefault((r["warm_up"], r["layer"], r["units"]), []).append(r["dead"])
    count = max(map(len, found.values()))
    lines = [
        "| warm-up, % | layer | units | " + " | ".join(f"dead, seed {i}" for i in range(count)) + " |",
        "|---|---|---|" + "---|" * count,
    ]
    for (warm_up, layer, units), values in sorted(found.items(), key=lambda item: item[0][0] or 0):
        lines.append(f"| {100 * (warm_up or 0):.0f} | {layer} | {units} | " + " | ".join(map(str, values)) + " |")
    return "\n".join(lines) + f"\n\n{note(content)}"


# ------------------------------------------------------------------------------ parts


def read(name):
    return results.read(ROOT / "results" / name)


def note(content):
    return f"Made by `{content['command']}` with torch {content['versions']['torch']}."


def of_runtime(content):
    threads = sorted({r["threads"] for r in content["rows"]})
    return (
        f"Made by `bbalpha reproduce runtime` with torch {content['versions']['torch']}, threads of torch: "
        f"{', '.join(map(str, threads))}."
    )


def seeds(found):
    counts = {len(rows) for rows in found.values()}
    return f"{min(counts)} networks" if len(counts) == 1 else f"{min(counts)} to {max(counts)} networks"


def cell(rows, score, factor, digits):
    values = [factor * r[score] for r in rows if r[score] is not None]
    if not values:
        return ""
    mean, error = mean_error(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def against(found, label, other):
    """Which of two is better, by how much, and whether that is more than chance."""
    parts = []
    for score, factor, digits in (("accuracy", 100, 2), ("total_log_likelihood", 1, 0)):
        (a, ea), (b, eb) = (mean_error([factor * r[score] for r in found[k]]) for k in (label, other))
        error = (ea**2 + eb**2) ** 0.5
        word = "no clear difference" if abs(a - b) <= error else "better" if a > b else "worse"
        parts.append(f"{NAMES[score]} {a - b:+.{digits}f} ± {error:.{digits}f} ({word})")
    return f"{label} against {other}: {', '.join(parts)}."


def goal(rows, score, factor, level, unit):
    mean, _ = mean_error([factor * r[score] for r in rows])
    answer = "reached" if mean >= level else "not reached"
    return f"Goal for alpha = 0.5, {NAMES[score]} of at least {level:g}{unit}: {answer}, {mean:.5g}{unit}."


def best(rows):
    return max(r["total_log_likelihood"] for r in rows)


def after(rows, seconds):
    """The log-likelihood at the first test after so much training."""
    return next(r["total_log_likelihood"] for r in rows if r["seconds"] >= seconds * (1 - 1e-5))


def clock(seconds):
    return "never" if seconds is None else f"{seconds // 60:.0f}:{seconds % 60:02.0f}"


def levels(rows):
    """The levels of the experiment, and the best that these rows reached."""
    return sorted({*timing.LEVELS, best(rows)})


def sooner(found, way, K):
    """How many times sooner a way is where the loop is: at the levels, and at the best that the loop reached."""
    slow, fast = found["loop", K], found[way, K]
    parts = []
    for level in levels(slow):
        a, b = timing.time_to(slow, level), timing.time_to(fast, level)
        name = f"{level:.0f}" + (" (the best of loop)" if level == best(slow) else "")
        if a and b:
            parts.append(f"{name} {a / b:.1f} times sooner")
        elif b:
            parts.append(f"{name} after {clock(b)}, loop never")
        elif a:
            parts.append(f"{name} never, loop after {clock(a)}")
    return f"{way} against loop, K = {K}: " + ", ".join(parts) + "."


def goals(found, K):
    """The goals of the engine: the least gain over all levels that the loop reached."""
    least = {}
    for way in ("ours", "shared"):
        if ("loop", K) in found and (way, K) in found:
            slow, fast = found["loop", K], found[way, K]
            pairs = [(timing.time_to(slow, level), timing.time_to(fast, level)) for level in levels(slow)]
            least[way] = min(a / b if b else 0.0 for a, b in pairs if a)
    if len(least) < 2:
        return []
    return [
        f"- Goal for {name}, K = {K}: at least {wanted:g} times sooner than loop at every level that loop reached: "
        f"{'reached' if value >= wanted else 'not reached'}, {value:.1f}."
        for name, wanted, value in (("ours", 1.4, least["ours"]), ("the better of both masks", 2, max(least.values())))
    ]
