"""The sections of a model's report that say how good it is: scores, calibration, intervals or confusion, refusal."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import torch

from bbalpha import metrics
from bbalpha.report import pictures
from bbalpha.report.evidence import Evidence
from bbalpha.report.page import Bar, Block, Picture, Pictures, Section, Table, Text
from bbalpha.report.svg import drawing, inline
from bbalpha.report.words import ENOUGH, NOTHING, Array, Gain, Share, listed, number, percent, rows
from bbalpha.tabular.model import TableModel

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_DRAWS = 200  # of a perfectly calibrated model; fewer of many rows
_CLASSES = 12  # in a confusion table
SCORES = {
    "n_rows": ("rows", "How many rows were judged."),
    "nll": ("negative log-likelihood", "How little was expected of what happened, in nats a row. Lower is better."),
    "rmse": ("typical error (RMSE)", "Root of the mean squared distance from prediction to target. Lower is better."),
    "mae": ("mean absolute error", "Mean distance from prediction to target, in its units. Lower is better."),
    "r2": ("variance explained (R²)", "1 is perfect, 0 is what the mean of these targets would have."),
    "coverage90": ("inside the 90 % interval", "Share of the targets that lie in their interval; 0.9 was promised."),
    "width90": ("width of the 90 % interval", "Mean, in units of the target. Narrower is better at equal coverage."),
    "accuracy": ("accuracy", "Share of the rows whose likeliest class is the right one. Higher is better."),
    "brier": ("Brier score", "Squared distance of the probabilities from what happened, 0 to 2. Lower is better."),
    "ece": ("calibration error (ECE)", "Mean gap between how sure it is and how often it is right. Lower is better."),
    "unusual": ("flagged as unusual", "Share of the rows."),
}


def how_good(model: TableModel, evidence: Evidence) -> Section:
    """Every score, beside that of the guess, in words."""
    fit = model.card.scores if evidence.fresh else {}
    head = ["score", "model", *(["at the fit"] if fit else []), "guess", "in words"]
    lines = []
    for key in dict.fromkeys((*evidence.scores, *fit)):
        name, meaning = SCORES.get(key, (key, ""))
        cells = [name, number(evidence.scores.get(key)), *([number(fit.get(key))] if fit else [])]
        lines.append([*cells, number(evidence.guess.get(key)), meaning])
    caption = f"On {evidence.source}. The guess looks at no column: it knows {evidence.guessed_from} alone."
    return Section(
        "How good is it?",
        [Text(against_guess(model, evidence), matters=True), Table(head, lines, caption, (len(head) - 1,))],
    )


def against_guess(model: TableModel, evidence: Evidence) -> str:
    """Whether the model beats a constant: row by row against the best constant for these rows."""
    y = evidence.target
    if model.task == "classification":
        common = float(np.bincount(y).argmax())
        gain = Gain.of((1 - evidence.loss) - (y == common))
        what = "right more often than the commonest class of these rows would be"
        told = f"{number(gain.mean, 2)} ± {number(gain.error, 2)} of the rows"
    else:
        gain = Gain.of((y - y.mean()) ** 2 - evidence.loss**2)
        what = "closer to the targets than their own mean is"
        told = f"squared error less by {number(gain.mean, 3)} ± {number(gain.error, 2)}"
    return {
        "better": f"The model is {what} ({told}, more than two standard errors).",
        "worse": f"The model is NOT {what}: it is worse ({told}). Do not use it as it is.",
        "no difference": f"Whether the model is {what} cannot be told from {rows(gain.n)} ({told}).",
        "unknown": f"Whether the model is {what} cannot be told: {rows(gain.n)} are too few.",
    }[gain.verdict]


# ------------------------------------------------------------------------------ quantities


def shares(evidence: Evidence) -> list[Share]:
    """Targets inside central intervals of every level; those of 90 % as predicted, the others by the ranks."""
    distance = abs(ranks(evidence) - 0.5)
    return [Share(evidence.inside if level == 0.9 else distance <= level / 2, level) for level in LEVELS]


def ranks(evidence: Evidence) -> Array:
    """The predictive distribution function at the targets (N,); of a normal one, where no other is known."""
    if evidence.pit is not None:
        return evidence.pit
    z = (evidence.target - evidence.found["mean"]) / np.maximum(evidence.found["std"], 1e-300)
    return np.array([NormalDist().cdf(float(v)) for v in z])


def coverage_words(share: Share) -> str:
    """What the 90 % intervals hold, in a sentence."""
    seen = f"The 90 % intervals hold {percent(share.value)} of the targets"
    n = len(share.hits)
    return {
        "as promised": f"{seen}: within two standard errors of the promise, as far as {rows(n)} can tell.",
        "fewer": f"{seen}, fewer than promised by more than two standard errors: they are too narrow.",
        "more": f"{seen}, more than promised by more than two standard errors: they are wider than need be.",
        "unknown": f"{seen}; {rows(n)} are too few to judge that.",
    }[share.verdict]


def calibration_of_quantities(evidence: Evidence) -> Section:
    """Are the intervals as wide as they should be?"""
    seen = shares(evidence)
    nominal = next(share for share in seen if share.promised == 0.9)
    bias = Gain.of(evidence.target - evidence.found["mean"])
    about = f"by {number(abs(bias.mean), 3)} ± {number(bias.error, 2)} on average"
    side = {
        "better": f"Targets lie above the predictions, {about}.",
        "worse": f"Targets lie below the predictions, {about}.",
        "no difference": f"No lean to one side can be told: targets are off {about}, within two standard errors.",
        "unknown": f"{rows(evidence.n)} are too few to tell a lean to one side.",
    }[bias.verdict]
    exact = evidence.pit is not None
    normal = "" if exact else (
        " But for 90 %, intervals are those of a normal distribution with the predicted mean and deviation: "
        "the card keeps no others."
    )  # fmt: skip
    words = {"as promised": "within two errors", "fewer": "too narrow", "more": "too wide", "unknown": "too few rows"}
    table = Table(
        ["level", "targets inside", "verdict"],
        [[percent(s.promised), s.told, words[s.verdict]] for s in seen],
        f"Share of {rows(evidence.n)} inside the interval of each level, with its standard error.{normal}", (2,),
    )  # fmt: skip
    return Section(
        "Are its intervals honest?",
        [Text(f"{coverage_words(nominal)} {side}", matters=True), _calibration_pictures(evidence, seen), table],
    )


def _calibration_pictures(evidence: Evidence, seen: Sequence[Share]) -> Pictures:
    told = ", ".join(f"{percent(s.promised)}: {percent(s.value)}" for s in seen)
    exact = evidence.pit is not None
    with drawing():
        curve = inline(pictures.coverage(seen), name="coverage", alt=f"Targets inside intervals of each level. {told}.")
        histogram = inline(
            pictures.ranks(ranks(evidence)), name="ranks",
            alt="Histogram of where targets fall in the predicted distributions; flat where the model is right.",
        )  # fmt: skip
    approximate = "" if exact else " Each prediction is taken as normal here, with the mean and deviation on the card."
    return Pictures([
        Picture(curve, "Share of the targets inside intervals of each level. On the line: as promised; below it the "
                "intervals are too narrow, above it too wide."),
        Picture(histogram, "Where each target falls in what was predicted for it. Flat: honest. High at both ends: too "
                f"sure; high in the middle: too cautious; leaning: off to one side.{approximate}"),
    ])  # fmt: skip


def intervals(model: TableModel, evidence: Evidence) -> Section:
    """Intervals and targets, row by row."""
    with drawing():
        figure, shown = pictures.intervals(evidence, model.card.target)
        outside = int((~evidence.inside).sum())
        alt = f"90 % intervals of {shown} rows with their targets; of all {evidence.n} rows {outside} are outside."
        svg = inline(figure, name="intervals", alt=alt)
    spread = evidence.found["std"]
    parts = evidence.found["epistemic_std"] ** 2
    own = float(parts.sum() / max((spread**2).sum(), 1e-300))
    caption = (
        f"Each bar is the 90 % interval of one row, in the order of the predicted mean ({shown:,} of {evidence.n:,} "
        f"rows shown). A dot is a target inside, a cross one outside: {outside:,} of {evidence.n:,}."
    )
    words = (
        f"Predicted deviations go from {number(float(spread.min()), 3)} to {number(float(spread.max()), 3)}. "
        f"{percent(own)} of the predicted variance is epistemic (what more rows of the same kind would settle), the "
        "rest is noise that they would not."
    )
    return Section("Its intervals, row by row", [Text(words), Pictures([Picture(svg, caption)])])


# ------------------------------------------------------------------------------ classes


def calibration_of_classes(evidence: Evidence) -> Section:
    """Is it as often right as it says?"""
    probs = evidence.found["probs"]
    confidence = probs.max(1)
    gap = float(confidence.mean() - (1 - evidence.loss).mean())
    error = math.sqrt(float((confidence * (1 - confidence)).sum())) / len(confidence)
    said = (
        f"It is right in {percent(1 - float(evidence.loss.mean()), 1)} of the rows and {percent(confidence.mean(), 1)} "
        f"sure on average (difference {percent(gap, 1)}, standard error {percent(error, 1)})"
    )
    verdict = Gain(gap, error, evidence.n).verdict
    sure = {
        "better": f"{said}: it is too sure of itself, by more than two standard errors.",
        "worse": f"{said}: it is less sure than it could be, by more than two standard errors.",
        "no difference": f"{said}: as sure as right, as far as {rows(evidence.n)} can tell.",
        "unknown": f"{said}; {rows(evidence.n)} are too few to judge that.",
    }[verdict]
    ece, mean, high = _expected_error(probs, evidence.target)
    usual = "no more than chance would make" if ece <= high else "more than chance would make"
    text = (
        f"The calibration error of these rows is {number(ece, 3)}. Were every probability right, so many rows would "
        f"still show {number(mean, 3)} on average, and in 95 of 100 draws at most {number(high, 3)}: it is {usual}."
    )
    with drawing():
        svg = inline(
            pictures.reliability(evidence), name="reliability",
            alt=f"Share of right labels against confidence; expected calibration error {number(ece, 3)}.",
        )  # fmt: skip
    caption = (
        "How often labels are right (up) against how sure the model is of them (across); larger dots hold more rows. "
        "On the line: as sure as right; below it: too sure. Grey bars: where a bin may fall by chance alone."
    )
    return Section(
        "Are its probabilities honest?", [Text(sure, matters=True), Text(text), Pictures([Picture(svg, caption)])]
    )


def _expected_error(probs: Array, target: Array) -> tuple[float, float, float]:
    """The calibration error, and its mean and 95 % quantile if labels were drawn from the probabilities."""
    p = torch.tensor(probs)
    ece = float(metrics.ece(p, torch.tensor(target)))
    rng, sums = np.random.default_rng(0), probs.cumsum(1)
    drawn = [
        float(metrics.ece(p, torch.tensor((rng.random((len(p), 1)) * sums[:, -1:] > sums).sum(1))))
        for _ in range(max(20, min(_DRAWS, 1_000_000 // len(p))))
    ]
    return ece, float(np.mean(drawn)), float(np.quantile(drawn, 0.95))


def confusion(model: TableModel, evidence: Evidence) -> Section:
    """Which classes are taken for which."""
    label, target, classes = evidence.found["probs"].argmax(1), evidence.target, model.classes
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(counts, (target, label), 1)
    order = np.argsort(-(counts.sum(1) + counts.sum(0)), kind="stable")[:_CLASSES]
    lines: list[list[str | Bar]] = []
    for i in sorted(order):
        n = int(counts[i].sum())
        cells = [Bar(f"{counts[i, j]:,}", counts[i, j] / max(n, 1), int(i != j)) for j in sorted(order)]
        near = (counts[i, i] + 1) / (n + 2)  # a row more on each side: of 3 rows, all right, the error is not 0
        right = f"{percent(counts[i, i] / n)} ± {percent(math.sqrt(near * (1 - near) / n))}" if n else NOTHING
        lines.append([classes[i], *cells, f"{n:,}", right])
    left = f" The {_CLASSES} commonest of {len(classes)} classes are shown." if len(classes) > _CLASSES else ""
    mistakes = sorted(((counts[i, j], classes[i], classes[j]) for i, j in np.argwhere(counts) if i != j), reverse=True)
    most = [f"{a} for {b} ({n:,})" for n, b, a in mistakes[:3]]
    words = f"Taken for another most often: {listed(most)}." if most else "No row was given a wrong class."
    table = Table(
        ["true class", *(f"said {classes[j]}" for j in sorted(order)), "rows", "right"], lines,
        f"Rows by their true class (down) and the class they were given (across), on {evidence.source}.{left}",
        range(1, len(order) + 1),
    )  # fmt: skip
    return Section("Which classes are mixed up?", [Text(words), table])


# ------------------------------------------------------------------------------ refusing


def refusing(model: TableModel, evidence: Evidence) -> Section:
    """Is it wrong where it is unsure?"""
    classes = model.task == "classification"
    unit = "share wrong" if classes else "mean absolute error"
    order = np.argsort(evidence.doubt, kind="stable")
    half = len(order) // 2
    sure, unsure = evidence.loss[order[:half]], evidence.loss[order[half:]]
    gain = Gain.between(unsure, sure)
    told = f"{unit} {number(sure.mean(), 3)} on the surer half, {number(unsure.mean(), 3)} on the other" if half else ""
    words = {
        "better": f"It is worse where it says that it is unsure: {told}. Leaving out the least sure rows helps.",
        "worse": f"Its uncertainty points the wrong way: {told}. Do not use it to leave rows out.",
        "no difference": f"Errors of surer and of less sure rows cannot be told apart: {told}, within two errors.",
        "unknown": f"Whether it is worse where it is unsure cannot be told from {rows(evidence.n)}.",
    }[gain.verdict]
    blocks: list[Block] = [Text(words, matters=True)]
    if evidence.n >= ENOUGH:
        names = ("by entropy", "by mutual information") if classes else ("by deviation", "by epistemic deviation")
        with drawing():
            alt = f"{unit} of the rows kept against the share kept, surest first. {told}."
            svg = inline(pictures.refusing(evidence, unit, names), name="refusing", alt=alt)
        caption = (
            f"From right to left the least sure rows are left to somebody else; up is the {unit} of those kept. A line "
            "that falls to the left: the model knows where it is wrong. Its left end rests on few rows. In brackets "
            "the mean height of each line; lower is better."
        )
        blocks.append(Pictures([Picture(svg, caption)]))
    return Section("What if the least sure rows are left out?", blocks)
