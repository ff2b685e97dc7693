"""Each extra by itself: does its first example run where nothing else is installed, and what does it weigh?

`make extras` gives every extra an empty environment that is thrown away again, and runs in it the first example of
docs/integrations/EXTRA.md, or, where there is no such page, imports all that the extra is for. Rows go to
results/extras.json as they are known: what was cut off goes on, and what failed, or is named, is tried again.
"""

import argparse
import shutil
import sys
import time
import tomllib
from pathlib import Path

from distribution import build, clean_copy
from environments import ROOT, FailedError, environment, first_example, install, megabytes, run

from bbalpha.experiments.results import Ledger

GROUPS = ("all", "baselines", "demo", "dev", "docs", "integrations", "versus")  # extras of extras, and of developers
NOTHING = "(none)"  # bbalpha alone
ROOMS = {"sklearn": "estimators", "cluster": "distributed"}  # where the modules of an extra have another name
PLAIN = """
import importlib, pkgutil, re
from importlib.metadata import packages_distributions, requires

def load(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return  # there is no such module: a fault would be one that it needs
        raise
    for part in pkgutil.iter_modules(getattr(module, "__path__", ())) if name.startswith("bbalpha.") else ():
        load(f"{name}.{part.name}")

for name in ("bbalpha.objectives", "bbalpha.{room}", "bbalpha.integrations.{extra}"):
    load(name)
own = [re.match(r"[\\w.-]+", line)[0] for line in requires("bbalpha") if line.endswith("extra == '{extra}'")
       or line.endswith('extra == "{extra}"')]
plain = lambda name: re.sub(r"[-_.]+", "-", name).lower()
for module, homes in packages_distributions().items():
    if {*map(plain, homes)} & {*map(plain, own)} and module.isidentifier() and not module.startswith(("_", "test")):
        importlib.import_module(module)
"""


def extras() -> list[str]:
    """The extras that users install, bbalpha alone first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [NOTHING, *(name for name in project["optional-dependencies"] if name not in GROUPS)]


def code_of(extra: str) -> tuple[str, str]:
    """What is run for an extra: where it stands, and the code."""
    page = ROOT / "docs" / "integrations" / f"{extra}.md"
    code = first_example(page.read_text()) if page.exists() else None
    if code is not None:
        return str(page.relative_to(ROOT)), code
    return "imports", PLAIN.replace("{extra}", extra).replace("{room}", ROOMS.get(extra, extra))


def tried(extra: str, wheel: Path, folder: Path) -> dict[str, object]:
    """The row of an extra, tried in an environment of its own."""
    ran, code = code_of(extra)
    row = {"extra": extra, "ran": ran, "ok": False}
    start = time.perf_counter()
    with environment(folder) as python:
        try:
            install(python, str(wheel) if extra == NOTHING else f"{wheel}[{extra}]")
            row["install_seconds"] = round(time.perf_counter() - start, 1)
            row["mb"] = round(megabytes(folder))
            start = time.perf_counter()
            run(python, code)
            return row | {"run_seconds": round(time.perf_counter() - start, 1), "ok": True}
        except FailedError as error:
            return row | {"error": str(error).splitlines()[-1][:300]}


def table(rows: list[dict[str, object]]) -> str:
    """Rows as text: what ran, how long, how much more than bbalpha alone."""
    alone = next((row["mb"] for row in rows if row["extra"] == NOTHING and "mb" in row), None)
    lines = [f"{'extra':13} {'install, s':>10} {'run, s':>7} {'MB':>6} {'more':>6}  ok   ran"]
    for row in rows:
        more = f"{row['mb'] - alone:.0f}" if "mb" in row and alone is not None else ""
        cells = (
            f"{row.get(name, ''):>{width}}" for name, width in (("install_seconds", 10), ("run_seconds", 7), ("mb", 6))
        )
        lines.append(f"{row['extra']:13} {' '.join(cells)} {more:>6}  {'yes' if row['ok'] else 'no ':3}  {row['ran']}")
        lines += [f"{'':13} {row['error']}"] if "error" in row else []
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="EXTRA", help="all if none is named")
    named = parser.parse_args().names
    wanted = named or extras()
    unknown = sorted(set(wanted) - set(extras()))
    if unknown:
        parser.error(f"EXTRA must be one of {', '.join(extras())}; got {', '.join(unknown)}.")
    ledger = Ledger(ROOT / "results" / "extras.json", command="make extras", seed=0)
    folder = ROOT / ".venv-extras"  # what a run that was killed leaves there goes with the next one
    shutil.rmtree(folder, ignore_errors=True)
    try:
        (wheel,) = build(clean_copy(folder / "tree"), folder, "wheel")
        for extra in wanted:
            if not named and ledger.has(extra=extra, ok=True, ran=code_of(extra)[0]):
                continue
            start = time.perf_counter()
            row = tried(extra, wheel, folder / "venv")
            ledger.rows = [other for other in ledger.rows if other["extra"] != extra]
            ledger.add([row], seconds=time.perf_counter() - start)
            print(table([row]).splitlines()[1], flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(ledger.rows))
    sys.exit(not all(row["ok"] for row in ledger.rows))


if __name__ == "__main__":
    main()
