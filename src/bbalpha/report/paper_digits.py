"""MNIST on the paper's page: accuracy and likelihood for three alphas, and what passes cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bbalpha import plots
from bbalpha.experiments import classification as digits
from bbalpha.experiments import mnist
from bbalpha.experiments import runtime as timing
from bbalpha.report import published
from bbalpha.report.page import Picture, Pictures, Points, Section, Table, Text
from bbalpha.report.paper_parts import Part, compared, missing, read, scored, shown
from bbalpha.report.svg import drawing, inline
from bbalpha.report.words import percent

Rows = Sequence[Mapping[str, Any]]
# score, heading, factor, digits
COLUMNS = (
    ("accuracy", "accuracy, %", 100, 2), ("total_log_likelihood", "log-likelihood", 1, 0),
    ("ece", "calibration error", 1, 4), ("auroc_error", "errors found", 1, 3),
    ("auroc_ood_entropy", "letters by entropy", 1, 3), ("auroc_ood_mi", "letters by mutual information", 1, 3),
)  # fmt: skip
_NETS = {"dense": "two layers of 100 units", "cnn": "a convolutional network"}
_PANELS = (("accuracy", 100.0, "test accuracy (%)"), ("total_log_likelihood", 1.0, "test log-likelihood (nats)"))


def classification(folder: Path) -> Part | None:
    """The part about accuracy and likelihood; None without results."""
    contents = {model: read(folder / f"{model}.json") for model in _NETS if (folder / f"{model}.json").exists()}
    if not contents:
        return None
    sections, facts = [], []
    for model, content in contents.items():
        found = {label: digits.last(rows) for label, rows in digits.kinds(content["rows"]).items()}
        sections.append(_network(model, content["rows"], found))
        own = scored([r["accuracy"] for r in found.get("alpha = 0.5", [])], 100)
        if own:
            facts.append((f"digits, {model}, alpha 0.5", f"{own.mean:.2f} %", f"accuracy of {own.n} networks"))
    for model in _NETS.keys() - contents.keys():
        sections.append(Section(f"Digits, {_NETS[model]}", [Text(missing("classification"))]))
    return Part(sections, facts, {f"classification/{name}.json": c for name, c in contents.items()})


def _network(model: str, rows: Rows, found: Mapping[str, Rows]) -> Section:
    lines = [
        [label, *(shown(scored([r[key] for r in own], factor), n) for key, _, factor, n in COLUMNS)]
        for label, own in found.items()
    ]
    caption = (
        "After the last epoch, mean ± standard error over networks. The log-likelihood is the sum over the test "
        "digits; errors and letters found are AUROC, 0.5 is chance and 1 perfect."
    )
    claims = [_claim(found, claim) for claim in published.CLAIMS[model]]
    with drawing():
        alt = f"Test accuracy and log-likelihood of {_NETS[model]} over the epochs, a line for every kind of network."
        svg = inline(_curves(rows), name=f"digits-{model}", alt=alt)
    return Section(
        f"Digits, {_NETS[model]}",
        [
            Text("MNIST with dropout 0.5. The paper has figures and no numbers here; these are its sentences, held "
                 "against our numbers."),
            Table(["the paper says", "here", "numbers"], [c for c in claims if c], "Better and worse by more than two "
                  "standard errors of the difference; alike within them.", (1, 2)),
            Pictures([Picture(svg, "Accuracy and log-likelihood of the test digits over the epochs, with a band of one "
                              "standard error. Higher is better in both.")]),
            Table(["network", *(heading for _, heading, _, _ in COLUMNS)], lines, caption),
        ],
    )  # fmt: skip


def _claim(found: Mapping[str, Rows], claim: published.Claim) -> list[str]:
    """The claim, whether it holds here, and the numbers."""
    factor, digits_shown = (100, 2) if claim.score == "accuracy" else (1, 0)
    a, b = (scored([r[claim.score] for r in found.get(k, [])], factor) for k in (claim.first, claim.second))
    if a is None or b is None:
        return []
    word = compared(a, b)
    if claim.alike:
        answer = "yes" if word == "alike" else "no" if word in ("lower", "higher") else "not judged"
    else:
        answer = {"higher": "yes", "lower": "no, worse", "alike": "not told apart"}.get(word, "not judged")
    return [claim.words, answer, f"{shown(a, digits_shown)} and {shown(b, digits_shown)}"]


def _curves(rows: Rows) -> Any:
    figure = plots.new_figure(9.0, 4.2)
    for ax, (score, scale, ylabel) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        found = digits.curves([dict(r) for r in rows], score, scale)
        mnist.draw(ax, found, xlabel="epoch", ylabel=ylabel)
        mnist.zoom(ax, found)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


# ------------------------------------------------------------------------------ run time


def run_time(folder: Path) -> Part | None:
    """The part about training time and K; None without results."""
    paths = sorted((p for p in folder.glob("*.json") if p.stem.isdigit()), key=lambda p: int(p.stem))
    contents = {path.stem: read(path) for path in paths}
    if not contents:
        return None
    rows = [dict(row) for content in contents.values() for row in content["rows"]]
    found = {(way, K): own for way, K, own in timing.pairs_of(rows)}
    lines = []
    for (way, K), own in found.items():
        times = [_clock(timing.time_to(own, level)) for level in timing.LEVELS]
        best = max(own, key=lambda r: float(r["total_log_likelihood"]))["total_log_likelihood"]
        accuracy = max(float(r["accuracy"]) for r in own)
        pace = f"{1000 * own[-1]['seconds'] / own[-1]['n_steps']:.0f}"
        lines.append([f"{way}, K = {K}", pace, f"{own[-1]['epoch']:.1f}", *times, f"{best:.0f}", percent(accuracy, 2)])
    levels = [f"to {level:g}" for level in timing.LEVELS]
    caption = (
        "One network each, so that small differences say nothing. Times in minutes:seconds of training; `loop` is K "
        "separate passes as the authors had them, the others are ways of bbalpha."
    )
    with drawing():
        alt = "Test accuracy and log-likelihood against minutes of training, a line for every K and way."
        svg = inline(_over_time(found), name="runtime", alt=alt)
    section = Section(
        "What K costs",
        [
            Text("Four layers of 1024 units, alpha 1, with 1, 10 and 100 passes a step, for the same time."),
            Points(_time_readings(found)),
            Pictures([Picture(svg, "Accuracy and log-likelihood of the test digits (up) against minutes of training "
                              "(across): a colour for K, a dash for the way. Grey: the levels of the table.")]),
            Table(["way", "ms a step", "epochs", *levels, "best log-likelihood", "best accuracy"], lines, caption),
        ],
    )  # fmt: skip
    return Part([section], [], {f"runtime/{name}.json": c for name, c in contents.items()})


def _time_readings(found: Mapping[tuple[str, int], Rows]) -> list[str]:
    """The paper's times beside ours, and what a pass is worth at equal time."""
    lines = []
    for K, level, seconds in published.RUN_TIME:
        own = {way: timing.time_to([dict(r) for r in rows], level) for (way, k), rows in found.items() if k == K}
        told = ", ".join(f"{way} {_clock(t)}" for way, t in own.items())
        given = _clock(min((_end(rows)["seconds"] for (_, k), rows in found.items() if k == K), default=0.0))
        if told:
            lines.append(
                f"The paper: K = {K} reaches {level:g} in about {seconds} s ({_clock(seconds)}). "
                f"Here, of {given} given: {told}."
            )
    best = {pair: max(float(r["accuracy"]) for r in rows) for pair, rows in found.items()}
    if best:
        (way, K), top = max(best.items(), key=lambda item: item[1])
        lines.append(
            f"The paper: all K end at an accuracy of {percent(published.RUN_TIME_ACCURACY, 1)}. "
            f"Here the highest is {percent(top, 2)} ({way}, K = {K})."
        )
    for K in sorted({K for _, K in found}):
        ways = {way: float(_end(rows)["total_log_likelihood"]) for (way, k), rows in found.items() if k == K}
        if "loop" in ways and len(ways) > 1:
            told = ", ".join(f"{way} {value:.0f}" for way, value in ways.items())
            lines.append(f"Log-likelihood at the end of the time, K = {K}: {told}.")
    return lines


def _end(rows: Rows) -> Mapping[str, Any]:
    """The row of the last test."""
    return max(rows, key=lambda r: float(r["seconds"]))


def _over_time(found: Mapping[tuple[str, int], Rows]) -> Any:
    figure = plots.new_figure(9.0, 4.6)
    passes, ways = sorted({K for _, K in found}), list(dict.fromkeys(way for way, _ in found))
    for ax, (score, scale, ylabel) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        curves, styles = {}, {}
        for (way, K), rows in found.items():
            at, values = [r["seconds"] / 60 for r in rows], [scale * r[score] for r in rows]
            curves[f"{way}, K = {K}"] = (at, values, [0.0] * len(rows))
            styles[f"{way}, K = {K}"] = (passes.index(K), ways.index(way))
        mnist.draw(ax, curves, xlabel="minutes of training", ylabel=ylabel, styles=styles)
        mnist.zoom(ax, {k: c for k, c in curves.items() if "K = 100" not in k} or curves, 0.1)
    for level in timing.LEVELS:
        figure.axes[1].axhline(level, color="#999999", linewidth=1.0, zorder=0)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _clock(seconds: float | None) -> str:
    """Minutes and seconds.

    >>> _clock(75.2), _clock(None)
    ('1:15', 'never')
    """
    return "never" if seconds is None else f"{round(seconds) // 60}:{round(seconds) % 60:02d}"
