"""The way of a new user, timed: from nothing to the first page's examples and to a table and a network of one's own.

`make newcomer` does it in an empty environment that is thrown away again -> results/newcomer.json.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

from distribution import build, clean_copy
from environments import ROOT, FailedError, call, examples, install, run

from bbalpha.experiments import results


def programs() -> dict[str, str]:
    """{what is done: its code}, from the first page and the examples."""
    table, *network = examples((ROOT / "docs" / "index.md").read_text())
    return {
        "the first page, with a table": table,
        "`examples/own_table.py`": (ROOT / "examples" / "own_table.py").read_text(),
        "the first page, with a torch network": "\n".join(network),
        "`examples/own_network.py`": (ROOT / "examples" / "own_network.py").read_text(),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    folder, rows = ROOT / ".venv-newcomer", []
    python = folder / "venv" / "bin" / "python"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        (wheel,) = build(clean_copy(folder / "tree"), folder, "wheel")
        begun = time.perf_counter()
        call(Path(sys.executable), "-m", "venv", str(folder / "venv"))
        install(python, f"{wheel}[sklearn]")
        rows.append({"step": "install, with scikit-learn", "seconds": round(time.perf_counter() - begun, 1)})
        for step, code in programs().items():
            start = time.perf_counter()
            run(python, code)
            rows.append({"step": step, "seconds": round(time.perf_counter() - start, 1)})
            print(rows[-1], flush=True)
        total = time.perf_counter() - begun
        results.write(ROOT / "results" / "newcomer.json", command="make newcomer", seed=0, seconds=total, rows=rows)
    except FailedError as error:
        sys.exit(f"{len(rows)} steps were taken, the next one failed: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
