"""Attacks on digits, on the paper's page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bbalpha import plots
from bbalpha.experiments import adversarial_figures as figures
from bbalpha.report.page import Picture, Pictures, Section, Table, Text
from bbalpha.report.paper_parts import Part, read
from bbalpha.report.svg import drawing, inline
from bbalpha.report.words import percent

Rows = Sequence[Mapping[str, Any]]
_STEPS = (0.0, 0.1, 0.2, 0.3, 0.5)
_WALK = (0, 20, 40, 100)
_LINES = (2, 0, 1, 3, 4, 5)  # the plain network is black


def attacks(folder: Path) -> Part | None:
    """The part about attacks, and whether uncertainty gives them away; None without results."""
    contents = {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
    if not contents:
        return None
    rows = figures.read(folder)
    nets = figures.networks(rows)
    held = figures.verdicts(rows)
    lines = [[v.claim, v.answer, v.figures] for v in held]
    yes = sum(v.answer == "yes" for v in held)
    text = (
        "Three layers of 1000 units. One step away from the predicted class, and many small steps towards class 0. The "
        f"paper has figures and no numbers here. Of {len(held)} claims, the paper's and ours, {yes} hold by these "
        "numbers; each is taken literally, and a change within its standard error says nothing either way."
    )
    section = Section(
        "Attacks on digits",
        [Text(text), Table(["claim", "holds here", "numbers"], lines, "The first number is of the dropout network, the "
                           "second of the plain one.", (1, 2)), *_pictures(nets), _one_step(nets), _walk(nets)],
    )  # fmt: skip
    return Part(
        [section], [("claims on attacks that hold", f"{yes} of {len(held)}", "the paper's and ours")] if held else [],
        {f"adversarial/{name}.json": c for name, c in contents.items()},
    )  # fmt: skip


def _one_step(nets: Mapping[str, Rows]) -> Table:
    lines = []
    for label, rows in nets.items():
        curve = figures.curve(rows, "fgsm")
        for r in (curve[s] for s in _STEPS if s in curve):
            lines.append([f"{label}, step {r['step']:g}", f"{r['accuracy']:.3f}",
                          f"{r['entropy']:.2f} ± {r['entropy_stderr']:.2f}", f"{r['auroc_entropy']:.3f}",
                          percent(r["caught"], 1), percent(r["unnoticed"], 1)])  # fmt: skip
    head = ["network, step", "accuracy", "entropy", "AUROC by entropy", "flagged", "wrong and not flagged"]
    caption = (
        "One step away from the predicted class. Flagged: by a threshold set on clean digits for 5 % false alarms; the "
        "rows of step 0 are clean digits."
    )
    return Table(head, lines, caption)


def _walk(nets: Mapping[str, Rows]) -> Table:
    lines = []
    for label, rows in nets.items():
        curve = figures.curve(rows, "targeted")
        for r in (curve[s] for s in _WALK if s in curve):
            lines.append([f"{label}, {r['step']:g} steps", f"{r['accuracy']:.3f}", percent(r["target_rate"], 1),
                          percent(r["nearest_target"], 1), f"{r['entropy']:.2f}", percent(r["caught"], 1)])  # fmt: skip
    head = ["network, steps", "accuracy", "taken for a 0", "nearest digit is a 0", "entropy", "flagged"]
    caption = "Small steps towards class 0. What an image looks like is judged by the nearest clean digit."
    return Table(head, lines, caption)


def _pictures(nets: Mapping[str, Rows]) -> list[Pictures]:
    with drawing():
        one = _drawn(nets, "fgsm", "size of the step", ("accuracy", "entropy", "auroc_entropy"))
        many = _drawn(nets, "targeted", "steps towards class 0", ("accuracy", "entropy", "auroc_entropy"))
        first = inline(one, name="attack-one", alt="Accuracy, entropy and AUROC against the size of one step.")
        second = inline(many, name="attack-many", alt="The same against the number of small steps towards class 0.")
    return [
        Pictures([Picture(first, "One step: accuracy, mean entropy in nats, and how well the entropy tells attacked "
                          "digits from clean ones (AUROC), against the size of the step.")]),
        Pictures([Picture(second, "Many steps towards class 0: the same against the number of steps.")]),
    ]  # fmt: skip


def _drawn(nets: Mapping[str, Rows], attack: str, xlabel: str, keys: Sequence[str]) -> Any:
    figure = plots.new_figure(9.0, 3.4)
    names = {"accuracy": "accuracy", "entropy": "entropy (nats)", "auroc_entropy": "AUROC by entropy"}
    curve: Callable[[Rows], Mapping[float, Mapping[str, Any]]] = lambda rows: figures.curve(rows, attack)  # noqa: E731
    for ax, key in zip(figure.subplots(1, len(keys)), keys, strict=True):
        for i, (label, rows) in enumerate(nets.items()):
            found = {s: r[key] for s, r in curve(rows).items() if r[key] is not None}
            ax.plot(list(found), list(found.values()), **plots.line(_LINES[i % 6]), linewidth=1.7, label=label)
        ax.set(xlabel=xlabel, ylabel=names[key])
        ax.set_ylim(bottom=0)
        ax.grid(color="#DDDDDD", linewidth=0.7)
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure
