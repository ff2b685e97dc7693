"""Fill the tables of README and docs from results/*.json: `make tables`; --check only compares.

A table stands between `<!-- table: name -->` and `<!-- end -->`; `name` is a function here, or `page.name` one of
docs/tables_page.py.
"""

import argparse
import re
import sys
from importlib import import_module
from pathlib import Path

from bbalpha.experiments import demo as demo_experiment
from bbalpha.experiments import results

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "benchmarks/README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
)
WAYS = {
    "products": "the bare products",
    "loop": "K separate passes, as the authors did",
    "repeat-torch": "the batch repeated K times, torch's dropout",
    "ours-vmap": 'bbalpha, `strategy="vmap"`',
    "ours": "**bbalpha**",
    "ours-shared": '**bbalpha**, `masks="shared"`',
    "ours-chunked": "bbalpha, `chunk_size=K/10`",
    "baal": "baal {baal}",
    "torch-uncertainty": "torch-uncertainty {torch-uncertainty}",
}


def demo():
    """The demo's table."""
    content = results.read(ROOT / "results/demo.json")
    lines = [
        "| | accuracy / RMSE | log-likelihood | calibration off by | tampered inputs found (AUROC) |",
        "|---|---|---|---|---|",
    ]
    for dataset, score, form in (("digits", "accuracy", "{:.3f}"), ("diabetes", "rmse", "{:.1f}")):
        for label, own in demo_experiment.methods(content["rows"], dataset):
            cells = demo_experiment.cells(own, score, form)
            lines.append(f"| {dataset}, {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{note(content)} Means over three splits with standard errors."


def benchmarks():
    """The README's short table: 3x1000."""
    content = results.read(ROOT / "results/benchmarks.json")
    columns = [("train", 10, 128), ("train", 10, 512), ("predict", 100, 1000)]
    lines = ["| | train, batch 128 | train, batch 512 | predict |", "|---|---|---|---|"]
    found = [
        {r["way"]: r for r in select(content, work, model="3x1000", n_passes=K, batch=b)} for work, K, b in columns
    ]
    for way in WAYS:
        if any(way in column for column in found) and way != "products":
            peer = next((r["peers"] for c in found for r in c.values() if r.get("peers")), {})
            cells = [f"{column[way]['ratio']:.2f}" if way in column else "" for column in found]
            lines.append(f"| {WAYS[way].format(**peer)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{note(content)}"


def engine():
    """Everything that was measured, for benchmarks/README.md."""
    content = results.read(ROOT / "results/benchmarks.json")
    lines = [
        "| work | model | K | batch | way | ratio | of medians | ms | rounds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in content["rows"]:
        if "ms" in r:
            lines.append(
                f"| {r['work']} | {r['model']} | {r['n_passes']} | {r['batch']} | {r['way']} | {r['ratio']:.2f} "
                f"| {r['ratio_median']:.2f} | {r['ms']:.2f} | {r['rounds']} |"
            )
    lines += ["", "| memory of a training step, 4x1024, batch 128 | K | peak, MB | ratio |", "|---|---|---|---|"]
    lines += [
        f"| {r['way']} | {r['n_passes']} | {r['peak_mb']:.0f} | {r['ratio']:.2f} |" for r in select(content, "memory")
    ]
    lines += ["", "| growth of a training step | with | log-log slope |", "|---|---|---|"]
    lines += [f"| {r['way']} | {r['axis']} | {r['slope']:.2f} |" for r in select(content, "growth")]
    return "\n".join(lines) + f"\n\n{note(content)}"


def select(content, work, **where):
    """Rows of one kind of work."""
    return [r for r in content["rows"] if r["work"] == work and all(r[k] == v for k, v in where.items())]


def note(content):
    """Where the numbers come from."""
    return f"Made by `{content['command']}` with torch {content['versions']['torch']}, seed {content['seed']}."


def filled(text):
    """`text` with every table made anew; a table whose results are missing says so."""

    def table(match):
        try:
            page, _, name = match[1].rpartition(".")
            body = (getattr(import_module(f"tables_{page}"), name) if page else globals()[name])()
        except FileNotFoundError as error:
            body = f"(not measured yet: {Path(error.filename).name})"
        return f"<!-- table: {match[1]} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w.]+) -->\n.*?<!-- end -->", table, text, flags=re.S)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if a page is not as the results have it")
    check = parser.parse_args().check
    stale = []
    for path in PAGES:
        text = path.read_text()
        if filled(text) != text:
            stale.append(path.name)
            if not check:
                path.write_text(filled(text))
    if check and stale:
        sys.exit(f"{', '.join(stale)}: tables differ from results/; run `make tables`.")


if __name__ == "__main__":
    main()
