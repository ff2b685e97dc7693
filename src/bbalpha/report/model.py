"""`model_report`: one page about a fitted model, whose every word follows from a number in it."""

import math
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from bbalpha.report import judging
from bbalpha.report.evidence import Evidence, held_out, judged
from bbalpha.report.page import Bar, Block, Commands, Page, Points, Section, Table, Text, rendered
from bbalpha.report.words import ENOUGH, NOTHING, Gain, Share, listed, number, percent, rows
from bbalpha.tabular.fields import Field
from bbalpha.tabular.model import FALSE_ALARM, TableModel

if TYPE_CHECKING:
    from pandas import DataFrame

_KINDS = {"number": "number", "flag": "truth value", "date": "date", "span": "span of time", "level": "text"}
_VERDICTS = {"fewer": "fewer than promised", "more": "more than promised", "as promised": "as promised",
             "unknown": "too few rows to judge"}  # fmt: skip
_LEVELS, _CANDIDATES, _DRIVERS = 8, 40, 25  # shown
_MIXED = 200  # rows in which `fit_table` mixes up columns


def model_report(model: TableModel, *, frame: "DataFrame | None" = None) -> str:
    """A page about a model, as HTML that needs nothing else.

    Args:
        model: With its card.
        frame: Rows with targets that the model never saw, to judge it on; else those held out at the fit are taken.
    """
    evidence = held_out(model) if frame is None else judged(model, frame)
    sections = [_data(model), _candidates(model)]
    if evidence is None:
        sections.append(Section("How good is it?", [Text(_unjudged(model), matters=True)]))
    else:
        sections.append(judging.how_good(model, evidence))
        if model.task == "classification":
            sections += [judging.calibration_of_classes(evidence), judging.confusion(model, evidence)]
        else:
            sections += [judging.calibration_of_quantities(evidence), judging.intervals(model, evidence)]
        sections.append(judging.refusing(model, evidence))
    sections += [_drivers(model), _unusual(model, evidence), _limits(model, evidence), _origin(model)]
    title = f"What predicts {model.card.target}, and how well"
    return rendered(Page(title, _lead(model, evidence), _facts(model, evidence), sections))


def _lead(model: TableModel, evidence: Evidence | None) -> str:
    """What it is and how good, in two sentences."""
    card = model.card
    kind = f"one of {len(model.classes)} classes" if model.task == "classification" else "a quantity"
    seen = f", trained on {rows(card.n_rows)}" if card.n_rows else ""
    what = f"A model that predicts {card.target} ({kind}) from {_columns(len(card.fields))}{seen}."
    if evidence is None:
        return f"{what} {_unjudged(model)}"
    name, score = ("accuracy", "accuracy") if model.task == "classification" else ("typical error (RMSE)", "rmse")
    own, guess = evidence.scores.get(score), evidence.guess.get(score)
    told = f"{what} On {evidence.source}, its {name} is {_score(model, own)}"
    if guess is not None:
        told += f", against {_score(model, guess)} of the best guess that looks at no column"
    if model.task == "regression":
        told += f". {judging.coverage_words(Share(evidence.inside, 0.9))[:-1]}"
    return f"{told}."


def _facts(model: TableModel, evidence: Evidence | None) -> list[tuple[str, str, str]]:
    card = model.card
    if evidence is None:
        return [("columns", f"{len(card.fields):,}", "that it takes")]
    found = evidence.scores
    if model.task == "classification":
        guess = f"{_score(model, evidence.guess.get('accuracy'))} of the guess"
        facts = [("accuracy", _score(model, found.get("accuracy")), guess),
                 ("calibration error", number(found.get("ece"), 2), "0 is perfect")]  # fmt: skip
    else:
        share = Share(evidence.inside, 0.9)
        guess, error = f"{number(evidence.guess.get('rmse'), 3)} of the guess", percent(share.error)
        facts = [("typical error", number(found.get("rmse"), 3), guess),
                 ("inside 90 % intervals", percent(share.value), f"± {error}: {_VERDICTS[share.verdict]}")]  # fmt: skip
    flagged = percent(found.get("unusual"), 1)
    source = "given to this report" if evidence.fresh else "held out at the fit"
    return [*facts, ("flagged as unusual", flagged, "of the rows judged"),
            ("rows judged", number(found.get("n_rows")), source)]  # fmt: skip


def _score(model: TableModel, value: float | None) -> str:
    return percent(value, 1) if model.task == "classification" else number(value, 3)


def _unjudged(model: TableModel) -> str:
    return (
        "No row was held out whose prediction could be compared with its target, so nothing is known of how good it "
        f"is: give `bbalpha report` rows with `--data` that have a {model.card.target} and that it never saw."
    )


def _columns(n: int) -> str:
    return f"{n:,} column{'s' * (n != 1)}"


# ------------------------------------------------------------------------------ data and candidates


def _data(model: TableModel) -> Section:
    card = model.card
    if card.n_rows:
        words = f"It was trained on {rows(card.n_rows)}; {rows(card.n_held_out)} were held out"
        words += f" ({card.split}) and only judged on." if card.n_held_out else "."
        ranges = (
            "Of numbers the 1 %, 50 % and 99 % quantiles, of dates the first, middle and last, of the training rows."
        )
    else:
        words = "The model was saved from Python, without a card: how many rows it saw is not known."
        ranges = "Of numbers the mean and two standard deviations to each side, as far as the model remembers."
    gaps = sorted((f for f in card.fields if f.missing > 0), key=lambda f: -f.missing)
    if gaps:
        most = "most " * (len(gaps) > 1)
        words += (
            f" Cells are missing in {_columns(len(gaps))}, {most}in {gaps[0].name} ({percent(gaps[0].missing, 1)})."
        )
    blocks: list[Block] = [Text(words)]
    lines = [[f.name, _KINDS.get(f.kind, f.kind), percent(f.missing, 1), *_range(f)] for f in card.fields]
    head = ["column", "kind", "missing", "low", "middle", "high", "levels"]
    if not any(f.kind == "level" for f in card.fields):
        head, lines = head[:-1], [line[:-1] for line in lines]
    blocks.append(Table(head, lines, ranges, text_columns=(1, 6)))
    if card.left_out:
        head, caption = ["column", "why"], "Columns of the table that the model does not take."
        blocks.append(Table(head, [[str(k), str(v)] for k, v in card.left_out.items()], caption, text_columns=(1,)))
    return Section("What it has seen", blocks)


def _range(field: Field) -> list[str]:
    """Low, middle, high and levels."""
    if field.kind == "level":
        levels = listed([str(level) for level in field.levels], _LEVELS)
        return ["", str(field.centre if field.centre is not None else NOTHING), "", f"{field.n_levels:,}: {levels}"]
    if field.kind == "date":
        return [*(str(v).removesuffix("T00:00:00") for v in (field.low, field.centre, field.high)), ""]
    return [number(field.low), number(field.centre), number(field.high), ""]


def _candidates(model: TableModel) -> Section:
    tried = model.card.candidates
    if not tried:
        given = model.estimator.get_params()
        names = ("alpha", "hidden_layer_sizes", "noise", "dropout", "n_passes", "n_predict_passes")
        lines = [[name, str(given[name])] for name in names if name in given]
        words = "Nothing was tried out against something else, or it is not on the card; the settings are these."
        return Section("What was tried", [Text(words), Table(["setting", "value"], lines, "As they were given.", (1,))])
    used = [t for t in tried if (t.get("weight") or 0) > 0]
    words = (
        f"{len(tried):,} kind{'s' * (len(tried) != 1)} of network {'were' if len(tried) != 1 else 'was'} trained on "
        f"part of the training rows and compared on the rest of them; the model is a mixture of {len(used):,}, with "
        "weights by which it explains those rows best. The rows that it is judged on below had no say in this."
    )
    rounds = {"nll": "heats", "final_nll": "final"}
    rounds = {key: name for key, name in rounds.items() if any(number(t.get(key)) != NOTHING for t in tried)}
    lines = [
        [str(t.get("candidate", NOTHING)), *(number(t.get(key)) for key in rounds), percent(t.get("weight"), 1)]
        for t in tried[:_CANDIDATES]
    ]
    left = f" {len(tried) - _CANDIDATES:,} more are not shown." if len(tried) > _CANDIDATES else ""
    where = " and ".join(f"in the {name}" for name in rounds.values())
    caption = f"Negative log-likelihood in nats a row {where}; lower is better.{left}"
    return Section("What was tried", [Text(words), Table(["network", *rounds.values(), "weight"], lines, caption)])


# ------------------------------------------------------------------------------ drivers and what is unusual


def _drivers(model: TableModel) -> Section:
    title, found = "Which columns drive it?", model.card.drivers
    if not found:
        return Section(title, [Text("Not known: it takes held-out rows, and the card has none.")])
    order = sorted(found, key=lambda name: -(found[name].get("prediction") or 0.0))
    top = {key: max((v.get(key) or 0.0 for v in found.values()), default=0.0) for key in ("prediction", "ignorance")}
    lines: list[list[str | Bar]] = [
        [name, *(Bar(number(found[name].get(key), 3), (found[name].get(key) or 0) / (top[key] or 1), i)
                 for i, key in enumerate(top))]
        for name in order[:_DRIVERS]
    ]  # fmt: skip
    unit, doubt = f"units of {model.card.target}", f"epistemic deviation, units of {model.card.target}"
    if model.task == "classification":
        unit, doubt = "summed change of the probabilities", "mutual information, nats"
    doubtful = max(found, key=lambda name: found[name].get("ignorance") or 0.0)
    words = (
        f"Giving rows the {order[0]} of other rows moves the prediction most, by {number(top['prediction'], 3)} on "
        f"average ({unit}); giving them the {doubtful} of others changes what the model is ignorant of most, by "
        f"{number(top['ignorance'], 3)} ({doubt})."
    )
    left = f" The other {len(order) - _DRIVERS:,} columns move it less." if len(order) > _DRIVERS else ""
    caption = (
        f"Mean absolute change when the column is mixed up among {rows(min(_MIXED, model.card.n_held_out))} held out "
        f"at the fit, once.{left} Columns that tell the same share their effect; none of this says what causes what."
    )
    return Section(title, [Text(words), Table(["column", "the prediction", "its ignorance"], lines, caption, (1, 2))])


def _unusual(model: TableModel, evidence: Evidence | None) -> Section:
    card, title = model.card, "What is unusual?"
    new = "A row is flagged, too, if it holds what no row had at the fit: a new level, or a gap where there was none."
    if card.threshold is None:
        least = math.ceil(1 / FALSE_ALARM) - 1
        words = f"No row is flagged for being far from the others: that takes {least} held-out rows. {new}"
        return Section(title, [Text(words)])
    what = "mutual information" if model.task == "classification" else "epistemic deviation"
    words = (
        f"A row is flagged as unusual if its {what}, what the model does not know for lack of rows like it, is above "
        f"{number(card.threshold, 3)}. A new row of the same source is above with a chance of at most "
        f"{percent(FALSE_ALARM)}, on average over choices of held-out rows. The promise is about false alarms alone: "
        f"how many strange rows are caught is not known. {new}"
    )
    blocks: list[Block] = [Text(words)]
    if evidence is not None:
        blocks.append(Text(_flagged(model, evidence), matters=True))
    return Section(title, blocks)


def _flagged(model: TableModel, evidence: Evidence) -> str:
    """What the flag says of the rows that were judged."""
    flags = evidence.found["unusual"] > 0
    # the threshold itself was set by as many rows as were held out
    extra = FALSE_ALARM * (1 - FALSE_ALARM) / (model.card.n_held_out + 2)
    share = Share(flags, FALSE_ALARM, extra)
    told = f"{int(flags.sum()):,} of {rows(evidence.n)} are flagged ({percent(share.value, 1)})"
    if not evidence.fresh:
        words = f"{told}. The threshold was set by these very rows, so that this share shows nothing new."
    else:
        words = {
            "as promised": f"{told}: within two standard errors of {percent(FALSE_ALARM)}.",
            "fewer": f"{told}: fewer than {percent(FALSE_ALARM)} by more than two standard errors.",
            "more": f"{told}: more than {percent(FALSE_ALARM)} by more than two standard errors. They are not like the "
            "rows of the fit.",
            "unknown": f"{told}; {rows(evidence.n)} are too few to judge that.",
        }[share.verdict]
    if min(flags.sum(), (~flags).sum()) >= ENOUGH // 2:
        gain = Gain.between(evidence.loss[flags], evidence.loss[~flags])
        pair = f"{number(evidence.loss[flags].mean(), 3)} against {number(evidence.loss[~flags].mean(), 3)}"
        words += {
            "better": f" Errors are larger on flagged rows: {pair}.",
            "worse": f" Errors are smaller on flagged rows: {pair}.",
        }.get(gain.verdict, f" Errors of flagged and of other rows cannot be told apart: {pair}.")  # fmt: skip
    return words


# ------------------------------------------------------------------------------ limits and origin


def _limits(model: TableModel, evidence: Evidence | None) -> Section:
    card = model.card
    points = [
        "Everything here is about rows of the same source as those of the fit. Where the world, the instruments or the "
        "choice of rows change, none of it need hold.",
    ]
    if evidence is not None:
        n = evidence.n
        errors = [f"{percent(p)} has a standard error of {percent(math.sqrt(p * (1 - p) / n), 1)}" for p in (0.5, 0.9)]
        points.append(f"{rows(n)} were looked at. Of so many, a share of {errors[0]}, one of {errors[1]}.")
        kept = len(np.atleast_1d(card.held_out.get("target", ())))
        if not evidence.fresh and kept < card.n_held_out:
            points.append(f"Pictures and verdicts are of {rows(n)} that the card keeps; scores of all held out.")
        points.append(
            "Words such as narrow or better stand here only for differences above two standard errors of them. Of "
            "every twenty such looks, about one would find a difference by chance alone."
        )
        points.append(_of_split(card.split, evidence.fresh))
    points.append(
        "Intervals and probabilities are the model's own. They are measured above, not guaranteed; a guarantee for "
        "intervals comes from `predict_interval(..., guarantee=True)` of the estimator."
        if model.task == "regression"
        else "Probabilities are the model's own. They are measured above, not guaranteed."
    )
    return Section("What this cannot say", [Points(points)])


def _of_split(split: str, fresh: bool) -> str:
    if fresh:
        return "The report takes it on trust that the rows given to it are not those of the fit."
    if split.startswith("the last by"):
        return (
            f"Held out were {split}: scores are of the time right after the training rows, and rows near in time are "
            "not independent, so that the standard errors are too small."
        )
    if " groups of " in split:
        return (
            f"Held out were {split}: scores are of groups that were not there at the fit; rows of one group are "
            "not independent, so that the standard errors are too small."
        )
    return (
        "Rows were held out at random. If several rows tell of one thing, or rows come in the order of time, hold them "
        "out by that column: scores are too good otherwise."
    )


def _origin(model: TableModel) -> Section:
    facts = dict(model.card.facts)
    versions = facts.pop("versions", {})
    command = facts.pop("command", None) or _call(model, facts)
    lines = [[str(k), number(v, 3) if isinstance(v, float) else str(v)] for k, v in facts.items() if v != ""]
    lines += [["passes of a prediction", str(model.estimator.n_predict_passes)]]
    lines += [["seed of the passes", str(getattr(model.estimator, "seed_", NOTHING))]]
    lines += [[str(k), str(v)] for k, v in versions.items()]
    return Section(
        "How to get it again",
        [
            Commands(f"{command}\nbbalpha report model -o report.html"),
            Table(["what", "value"], lines, "Seeds and versions."),
        ],
    )


def _call(model: TableModel, facts: Mapping[str, object]) -> str:
    """The fit as a command, as far as card and estimator tell."""
    card, given, total = model.card, model.estimator.get_params(), model.card.n_rows + model.card.n_held_out
    parts = ["bbalpha", "fit", str(facts.get("file") or "TABLE.csv"), "--target", card.target, "-o", "model"]
    if given["alpha"] != 0.5:
        parts += ["--alpha", str(given["alpha"])]
    if given["budget"] != "standard":
        parts += ["--budget", str(given["budget"])]
    parts += [part for name, why in card.left_out.items() if why == "groups" for part in ("--group", name)]
    if card.split.startswith("the last by '"):
        parts += ["--time", card.split.removeprefix("the last by '").removesuffix("'")]
    if "--group" not in parts and round(0.1 * total) != card.n_held_out:
        parts += ["--held-out", f"{card.n_held_out / total:.4g}"]
    dropped = [name for name, why in card.left_out.items() if why == "asked for"]
    if dropped:
        parts += ["--drop", ",".join(dropped)]
    if facts.get("seed"):
        parts += ["--seed", str(facts["seed"])]
    return shlex.join(parts)
