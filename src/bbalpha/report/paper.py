"""`paper_report`: one page about the reproduced paper, what was published beside what was measured here."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from bbalpha.checks import check_path
from bbalpha.report import paper_attacks, paper_digits, paper_tables
from bbalpha.report.page import Commands, Page, Points, Section, Table, Text, rendered
from bbalpha.report.paper_parts import Part, missing
from bbalpha.report.words import number

_PAPER = "Li and Gal, Dropout Inference in Bayesian Neural Networks with Alpha-divergences (ICML 2017)"
_PARTS: Sequence[tuple[str, Callable[[Path], Part | None]]] = (
    ("regression", paper_tables.regression), ("classification", paper_digits.classification),
    ("runtime", paper_digits.run_time), ("adversarial", paper_attacks.attacks),
)  # fmt: skip
_TITLES = {
    "regression": "Regression on UCI tables", "classification": "Digits", "runtime": "What K costs",
    "adversarial": "Attacks on digits",
}  # fmt: skip


def paper_report(results: str | os.PathLike[str]) -> str:
    """A page about the reproduced paper, as HTML that needs nothing else.

    Args:
        results: The folder that `bbalpha reproduce` wrote to. What is not in it is named, with the command for it.
    """
    folder = Path(check_path("results", results))
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r}; `bbalpha reproduce regression` makes one.")
    parts, absent = [], []
    for name, make in _PARTS:
        part = make(folder / name)
        if part is None:
            absent.append(Section(_TITLES[name], [Text(missing(name))]))
        else:
            parts.append(part)
    sections = [section for part in parts for section in part.sections] + absent
    lead = (
        f"The experiments of {_PAPER}, run again with bbalpha. "
        f"{len(parts)} of {len(_PARTS)} are in this folder; numbers of the paper stand beside ours."
    )
    if any("--quick" in content["command"] for part in parts for content in part.contents.values()):
        lead += " Some were run with `--quick`, at a small size: these do not compare with the paper."
    facts = [fact for part in parts for fact in part.facts][:4]
    return rendered(Page("The paper, reproduced", lead, facts, [*sections, _rules(), _origin(parts)]))


def _rules() -> Section:
    return Section(
        "How the words were chosen",
        [Points([
            "Better, worse and reached stand for differences above two standard errors of them; what is smaller is "
            "called alike, or not told apart. Where only one network was trained, numbers stand without such a word.",
            "Standard errors over splits take these for independent, which they are not: published splits share rows. "
            "Those over three networks are rough.",
            "The paper's numbers are as printed, with two digits; what that cuts off counts as error. Where it "
            "has figures and no numbers, its sentences are held against ours.",
            "Optimisers and lengths of training differ from the authors', and so do machines: times compare within a "
            "table, not with the paper.",
        ])],
    )  # fmt: skip


def _origin(parts: Sequence[Part]) -> Section:
    contents = {name: content for part in parts for name, content in part.contents.items()}
    lines = [
        [name, content["command"], str(content["seed"]), number(content["seconds"] / 60, 3),
         str(content["versions"].get("torch", "")), str(content["versions"].get("python", ""))]
        for name, content in contents.items()
    ]  # fmt: skip
    others = sorted(
        {f"{k} {v}" for content in contents.values() for k, v in content["versions"].items()
         if k not in ("torch", "python")}
    )  # fmt: skip
    commands = list(dict.fromkeys(content["command"] for content in contents.values()))
    return Section(
        "How to get it again",
        [
            Commands("\n".join([*commands, "bbalpha report --results results -o paper.html"])),
            Table(["file", "command", "seed", "minutes", "torch", "Python"], lines, "Every file of this page.", (1,)),
            Text(f"Other packages: {', '.join(others)}." if others else "No other package is named."),
        ],
    )
