"""Tables of docs/versus.md, out of results/versus/*.json."""

import math
import sys
from pathlib import Path

from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "results" / "versus"
sys.path.insert(0, str(ROOT / "benchmarks"))

from versus_summary import average, by_split, is_ours, methods, verdict  # noqa: E402 - behind the path that finds it

SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")


def load(*, of_classes):
    """{set: content} of what was measured; FileNotFoundError if nothing was."""
    contents = {path.stem: results.read(path) for path in sorted(FOLDER.glob("*.json"))}
    found = {name: c for name, c in contents.items() if c["rows"] and ("table" in c["rows"][0]) == of_classes}
    return found or {"": results.read(FOLDER / ("iris.json" if of_classes else f"{SETS[0]}.json"))}


def nll():
    """Test NLL, and how often ours is the best."""
    return f"{table('nll', False)}\n\n{counts('nll', False)}\n\n{note(load(of_classes=False))}"


def crps():
    """CRPS, in units of the target."""
    return f"{table('crps', False, digits)}\n\n{counts('crps', False)}"


def rmse():
    """RMSE, in units of the target."""
    return f"{table('rmse', False, digits)}\n\n{counts('rmse', False)}"


def log_loss():
    """Log loss of classes, and how often ours is the best."""
    return f"{table('log_loss', True)}\n\n{counts('log_loss', True)}\n\n{note(load(of_classes=True))}"


def accuracy():
    """Share of right classes."""
    return table("accuracy", True, best=max)


def calibration():
    """The expected calibration error."""
    return table("ece", True)


def intervals():
    """Coverage of the 90 % intervals, and their width in deviations of y; nothing is in bold, as both count."""
    found = rows(False)
    names = [m for m in methods(found) if any(by_split(r, m, "coverage90") for r in found.values())]
    lines = head("covers / width", names)
    for name, own in found.items():
        cells = []
        for method in names:
            covered, width = (average(list(by_split(own, method, m).values())) for m in ("coverage90", "width90"))
            cells.append("-" if covered is None else f"{covered.mean:.2f} / {width.mean:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def seconds():
    """Processor seconds of a fit on one thread, median over splits."""
    return _seconds(False)


def class_seconds():
    """Processor seconds of a fit on one thread, of classes."""
    return _seconds(True)


def failures():
    """Which rows a method could not be scored on, and why."""
    lines = []
    for of_classes in (False, True):
        for name, own in rows(of_classes).items():
            for row in own:
                if "failed" in row:
                    place = row["fold"] if of_classes else row["split"]
                    lines.append(f"- {name}, {row['method']}, {place}: {row['failed']}")
    return "\n".join(lines) or "No method failed on any rows."


# ------------------------------------------------------------------------------ helpers


def rows(of_classes):
    return {name: content["rows"] for name, content in load(of_classes=of_classes).items()}


def digits(dataset):
    return {"naval": 5, "kin8nm": 4}.get(dataset, 3)


def head(title, names):
    return [f"| {title} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]


def table(metric, of_classes, digits=lambda _: 3, best=min):
    """Means over splits with standard errors, the best of a set in bold."""
    found = rows(of_classes)
    names = [m for m in methods(found) if any(by_split(r, m, metric) for r in found.values())]
    lines = head(f"test {metric.replace('_', ' ')}", names)
    for name, own in found.items():
        values = [average(list(by_split(own, method, metric).values())) for method in names]
        finite = [v.mean for v in values if v and math.isfinite(v.mean)]
        top = best(finite) if len(finite) > 1 else None  # nobody is best alone
        most = max(v.n for v in values if v)
        lines.append(f"| {name} ({most}) | " + " | ".join(cell(v, top, most, digits(name)) for v in values) + " |")
    return "\n".join(lines)


def cell(value, top, most, places):
    """Mean ± standard error, in bold if the best; the splits where there are fewer than others have."""
    if value is None:
        return "-"
    if math.isinf(value.mean):
        return "infinite"
    told = f"{value.mean:.{places}f}" + (f" ± {value.error:.{places}f}" if value.n > 1 else "")
    fewer = f" ({value.n} split{'s' * (value.n > 1)})" if value.n < most else ""
    return (f"**{told}**" if value.mean == top else told) + fewer


def counts(metric, of_classes):
    """On how many sets each of ours is better than every baseline, and who is not beaten on the others."""
    found, lines = rows(of_classes), []
    for ours in filter(is_ours, methods(found)):
        won, lost = verdict(found, ours, metric)
        total = len(won) + len(lost)
        if total:
            where = f" ({', '.join(won)})" if won else ""
            others = "; ".join(f"{name}: {', '.join(rivals)}" for name, rivals in lost.items())
            told = f"- `{ours}` is better than every baseline on {len(won)} of {total}{where}."
            lines.append(told + (f" Not better than: {others}." if others else ""))
    return "\n".join(lines)


def _seconds(of_classes):
    found = rows(of_classes)
    names = methods(found)
    lines = head("seconds of a fit", names)
    for name, own in found.items():
        values = [sorted(v for v in by_split(own, m, "seconds_fit").values() if math.isfinite(v)) for m in names]
        cells = [f"{v[len(v) // 2]:.2g}" if v else "-" for v in values]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def note(found):
    """Where the numbers come from."""
    content = next(iter(found.values()))
    peers = ", ".join(f"{name} {version}" for name, version in content.get("settings", {}).get("peers", {}).items())
    kind = content["command"].split(" --datasets")[0]
    versions = content["versions"]
    return (
        "Means over splits (how many, in brackets) with standard errors, the best in bold. Made by "
        f"`{kind}` with torch {versions['torch']}, "
        f"scikit-learn {versions['scikit-learn']}, {peers}."
    )
