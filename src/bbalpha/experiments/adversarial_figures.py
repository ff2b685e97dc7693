"""What the adversarial experiment shows: figures as in the paper, and its claims held against our numbers.

rows = read("results/adversarial")
draw("results/adversarial", "docs/figures")
for v in verdicts(rows): print(v.answer, v.claim, v.figures)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bbalpha import plots
from bbalpha.experiments import results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
_LINES = (2, 0, 1, 3, 4, 5)  # the plain network is black


@dataclass(frozen=True)
class Verdict:
    """A claim, whether our numbers bear it out, and the numbers."""

    claim: str
    answer: str  # "yes", "no"
    figures: str


def read(folder: str | Path) -> list[dict[str, Any]]:
    """All rows of the results in `folder`, the plain network first."""
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise FileNotFoundError(2, "no results", str(folder))
    rows = [row for path in paths for row in results.read(path)["rows"]]
    return sorted(rows, key=lambda r: -1e9 if r["alpha"] is None else r["alpha"])


def networks(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by network, {label: rows}.

    >>> list(networks([{"alpha": None}, {"alpha": 0.5}]))
    ['plain network', 'alpha = 0.5']
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault("plain network" if row["alpha"] is None else f"alpha = {row['alpha']:g}", []).append(row)
    return found


def curve(rows: Sequence[Row], attack: str, attacker: str = "fresh") -> dict[float, Row]:
    """The rows of one attack by their step."""
    found = [r for r in rows if r["attack"] == attack and r["attacker"] == attacker]
    return {r["step"]: r for r in sorted(found, key=lambda r: float(r["step"]))}


def strongest(rows: Sequence[Row], attack: str, **where: Any) -> Row | None:
    """Of the attempts of the attacker who knows of the detector: that with the most images wrong and unnoticed."""
    known = [r for r in rows if (r["attack"], r["attacker"]) == (attack, "adaptive")]
    known = [r for r in known if all(r[key] == value for key, value in where.items())]
    return max(known, key=lambda r: float(r["unnoticed"]), default=None)


# ------------------------------------------------------------------------------ claims


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """The claims of the paper and ours, as far as there are rows for them."""
    nets = networks(rows)
    plain = nets.pop("plain network", [])
    found: list[Verdict] = []
    for label, own in nets.items():
        a, b = curve(plain, "fgsm"), curve(own, "fgsm")
        late = [s for s in b if s >= 0.1 and s in a]
        if late:
            found += [_keeps_accuracy(label, a, b, late), _says_so(label, a, b, late)]
        found += _turns_to_zero(label, curve(plain, "targeted"), curve(own, "targeted"))
        if 0.2 in b and 0.5 in b and label == "alpha = 0.5":
            found += _detects(label, a, b)
    found += [_alarms(label, own) for label, own in ({"plain network": plain} | nets).items() if own]
    return found


def _verdict(claim: str, holds: bool, figures: str) -> Verdict:
    return Verdict(claim, "yes" if holds else "no", figures)


def _keeps_accuracy(label: str, a: Mapping[float, Row], b: Mapping[float, Row], late: Sequence[float]) -> Verdict:
    lost = [s for s in late if b[s]["accuracy"] <= a[s]["accuracy"]]
    said = _pairs(a, b, "accuracy", late) + (f"; not at {', '.join(f'{s:g}' for s in lost)}" if lost else "")
    return _verdict(f"{label} keeps more accuracy than the plain network at every step from 0.1 on", not lost, said)


def _says_so(label: str, a: Mapping[float, Row], b: Mapping[float, Row], late: Sequence[float]) -> Verdict:
    """Rises: nowhere falls back from its highest by more than two standard errors."""
    highest, rises = -1.0, True
    for row in b.values():
        rises &= row["entropy"] > highest - 2 * row["entropy_stderr"]
        highest = max(highest, row["entropy"])
    above = all(b[s]["entropy"] > a[s]["entropy"] for s in late)
    claim = f"the entropy of {label} rises with the step, and is above that of the plain network from 0.1 on"
    return _verdict(claim, rises and above, _pairs(a, b, "entropy", late))


def _turns_to_zero(label: str, a: Mapping[float, Row], b: Mapping[float, Row]) -> list[Verdict]:
    if not (a and b):
        return []
    last = max(set(a) & set(b))
    there, here = a[last]["nearest_target"], b[last]["nearest_target"]
    claim = (
        f"after {last:g} targeted steps more images of {label} than of the plain network look like a 0 "
        "(their nearest training digit is one)"
    )
    return [_verdict(claim, here > there, f"{here:.2f} against {there:.2f}")]


def _detects(label: str, a: Mapping[float, Row], b: Mapping[float, Row]) -> list[Verdict]:
    early, late = b[0.2]["auroc_entropy"], b[0.5]["auroc_entropy"]
    error = math.hypot(*(_auroc_error(b[step]["auroc_entropy"], b[step]["n"]) for step in (0.2, 0.5)))
    said = f"{early:.3f} and {late:.3f}"
    if 0.2 in a and 0.5 in a:
        said += f"; plain network {a[0.2]['auroc_entropy']:.3f} and {a[0.5]['auroc_entropy']:.3f}"
    return [
        _verdict(f"the entropy of {label} gives away a step of 0.2, AUROC at least 0.94", early >= 0.94, said),
        _verdict(
            f"the AUROC of {label} does not fall from a step of 0.2 to one of 0.5",
            late >= early,
            f"{said}; a change of {late - early:+.4f} with a standard error of {error:.4f}",
        ),
    ]


def _auroc_error(auroc: float, n: int) -> float:
    """The standard error of an AUROC of n against n scores, after Hanley and McNeil (1982).

    >>> round(_auroc_error(0.96, 10_000), 4)
    0.0014
    """
    a = auroc
    spread = a * (1 - a) + (n - 1) * (a / (2 - a) - a**2) + (n - 1) * (2 * a**2 / (1 + a) - a**2)
    return math.sqrt(max(spread, 0.0)) / n


def _alarms(label: str, own: Sequence[Row]) -> Verdict:
    row = max(own, key=lambda r: int(r["n"]) if r["attacker"] == "fresh" else 0)
    claim = f"{label}: false alarms within one point of the {row['allowed']:.0%} asked for"
    return _verdict(
        claim, abs(row["false_alarm"] - row["allowed"]) <= 0.01, f"{row['false_alarm']:.2%} of {row['n']} digits"
    )


def _pairs(a: Mapping[float, Row], b: Mapping[float, Row], key: str, steps: Sequence[float]) -> str:
    """A few values of both."""
    shown = [s for s in (0.1, 0.2, 0.3, 0.5) if s in steps]
    return ", ".join(f"{b[s][key]:.2f} against {a[s][key]:.2f} at {s:g}" for s in shown)


# ------------------------------------------------------------------------------ figures


def draw(folder: str | Path, to: str | Path) -> list[Path]:
    """The figures, made of the results in `folder`; strips of images only where their .npz files are there.

    Args:
        folder: Of the results, such as results/adversarial.
        to: Folder of the figures.
    """
    nets = networks(read(folder))
    images = {label: Path(folder) / f"{_file(own[0])}.npz" for label, own in nets.items()}
    here = {label: dict(np.load(path)) for label, path in images.items() if path.exists()}
    figures = {f"adversarial_{make.__name__[1:]}": make(nets) for make in (_fgsm, _targeted, _detection)}
    if here:
        figures["adversarial_fgsm_images"] = _strips(here, "fgsm", "step {:.2g}")
        figures["adversarial_targeted_images"] = _strips(here, "targeted", "{:.0f} steps")
    Path(to).mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(Path(to) / f"{name}.png", dpi=100)
    return [Path(to) / f"{name}.png" for name in figures]


def _fgsm(nets: Mapping[str, Sequence[Row]]) -> "Figure":
    figure, (left, right) = _panels(2)
    _lines(left, nets, lambda rows: curve(rows, "fgsm"), "accuracy", "accuracy")
    _lines(right, nets, lambda rows: curve(rows, "fgsm"), "entropy", "mean predictive entropy (nats)")
    for ax in (left, right):
        ax.set_xlabel("size of the fast gradient sign step")
    left.legend(frameon=False)
    return figure


def _targeted(nets: Mapping[str, Sequence[Row]]) -> "Figure":
    figure, axes = _panels(3)
    named = {"accuracy": "accuracy", "target_rate": "share taken for a 0", "entropy": "mean predictive entropy (nats)"}
    for ax, (key, label) in zip(axes, named.items(), strict=True):
        _lines(ax, nets, lambda rows: curve(rows, "targeted"), key, label)
        ax.set_xlabel("steps of 0.01 towards class 0")
    axes[0].legend(frameon=False)
    return figure


def _detection(nets: Mapping[str, Sequence[Row]]) -> "Figure":
    figure, axes = _panels(3)
    _lines(axes[0], nets, lambda rows: curve(rows, "fgsm"), "auroc_entropy", "AUROC by entropy")
    _lines(axes[1], nets, lambda rows: curve(rows, "fgsm"), "caught", "share flagged (of clean ones 5%)")
    _lines(axes[2], nets, lambda rows: curve(rows, "targeted"), "auroc_entropy", "AUROC by entropy")
    for ax, x in zip(
        axes, ("size of the fast gradient sign step",) * 2 + ("steps of 0.01 towards class 0",), strict=True
    ):
        ax.set(xlabel=x, ylim=(0, 1.02))
    axes[0].legend(frameon=False, loc="lower right")
    return figure


def _panels(n: int) -> "tuple[Figure, Sequence[Axes]]":
    figure = plots.new_figure(4.4 * n, 3.6)
    axes: Sequence[Axes] = figure.subplots(1, n)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#E5E5E5", linewidth=0.7)
        ax.set_axisbelow(True)
    return figure, axes


def _lines(
    ax: "Axes",
    nets: Mapping[str, Sequence[Row]],
    points: Callable[[Sequence[Row]], Mapping[float, Row]],
    key: str,
    ylabel: str,
) -> None:
    """A curve for every network; of entropies with the standard error."""
    for i, (label, rows) in enumerate(nets.items()):
        found = points(rows)
        at, values = np.array(list(found)), np.array([row[key] for row in found.values()], dtype=float)
        style = plots.line(_LINES[i % 6])
        ax.plot(at, values, **style, linewidth=1.8, label=label)
        if key == "entropy":
            error = np.array([row["entropy_stderr"] for row in found.values()], dtype=float)
            ax.fill_between(at, values - error, values + error, color=style["color"], alpha=0.25, linewidth=0)
    ax.set_ylabel(ylabel)
    ax.set_ylim(bottom=0)


def _strips(examples: Mapping[str, Mapping[str, Any]], attack: str, column: str) -> "Figure":
    """Digits under attack: a row for every digit and network, a column for every step; predicted class and entropy."""
    first = next(iter(examples.values()))
    steps, n_digits = first[f"{attack}_steps"], first[f"{attack}_images"].shape[1]
    figure = plots.new_figure(1.05 * len(steps) + 1.1, 1.2 * n_digits * len(examples) + 0.2)
    axes = figure.subplots(n_digits * len(examples), len(steps), squeeze=False)
    for d in range(n_digits):
        for i, (label, found) in enumerate(examples.items()):
            line = axes[d * len(examples) + i]
            line[0].set_ylabel(label, fontsize=8)
            for j, ax in enumerate(line):
                ax.imshow(found[f"{attack}_images"][j, d].reshape(28, 28), cmap="gray_r", vmin=0, vmax=255)
                ax.set(xticks=[], yticks=[])
                said = f"{found[f'{attack}_labels'][j, d]}, {found[f'{attack}_entropies'][j, d]:.2f}"
                ax.set_title(f"{column.format(steps[j])}\n{said}" if d == i == 0 else said, fontsize=8, pad=2)
    return figure


def _file(row: Row) -> str:
    return "nn" if row["alpha"] is None else f"bbalpha-{row['alpha']:g}"
