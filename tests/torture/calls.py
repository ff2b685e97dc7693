"""Every public function with one argument gone bad: by a table of values, and by what hypothesis draws.

Run as a process of its own it takes cases from a place on and writes each before it begins, so that one that hangs in C
or takes the process down is seen by whoever started it, and left out.
"""

import inspect
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from .rows import row

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # seconds for one case, and for the start, before the process is ended
MEMORY = 12 << 30
"""Bytes of address space that the process may have: who asks for more is refused by the system, an opaque error."""


def cases(folder, size, seed):
    """(name, argument, kind, function, arguments with the bad value in its place), in an order that never changes."""
    from .functions import goods
    from .values import KIND_OF, KINDS, drawn

    n = round(20 * size)
    for name, (function, good) in goods(folder).items():
        named = dict(inspect.signature(function).parameters)
        defaults = {k: p.default for k, p in named.items()} | (good if "settings" in named else {})
        for argument in [*dict.fromkeys([*named, *good])]:
            kind = KINDS_HERE.get((name, argument)) or KIND_OF.get(argument)
            if kind not in KINDS or (argument not in named and argument not in defaults):
                continue
            table = KINDS[kind] if size >= 0.5 else KINDS[kind][:: max(1, round(0.06 / size))]
            for value in [*table, *drawn(kind, n, seed)]:
                if not allowed(value, argument, kind, defaults.get(argument), named.get(argument)):
                    yield name, argument, kind, function, {**good, argument: value}


KINDS_HERE = {
    ("quantile", "q"): "inner", ("fetch", "name"): "text", ("weight_decay", "keep"): "above_zero",
    ("CrossEntropy", "class_axis"): "integer", ("ClassificationSummary", "class_axis"): "integer",
    ("fit", "learning_rate"): "not_negative", ("iterative_fgsm", "n_steps"): "whole",
    ("TemperedClassifier", "model"): "array",
    ("AlphaLoss", "loss"): "call",
    ("DropConnectConv2d", "groups"): "torch's",
}  # fmt: skip


def allowed(value, argument, kind, default, parameter):
    """Whether this value is a good one here after all."""
    told = str(getattr(parameter, "annotation", ""))
    if argument == "sample_weight" and isinstance(value, float) and value == 3.0:
        return True  # scikit-learn: the same for all rows
    if argument == "budget" and isinstance(value, int) and value > 0:
        return True  # seconds
    if (
        argument in ("precision", "outputs", "keep")
        and hasattr(value, "shape")
        and str(value.dtype) != "torch.complex64"
    ):
        return True  # arrays are numbers too, and tensors may broadcast
    if value is None:
        return default is None or "None" in told
    if isinstance(value, str):
        return value in told or value == default
    return False


def run(size, seed):
    """Rows by kind of argument."""
    found = swept(size, seed)
    rows = []
    for kind in sorted({case["kind"] for case in found}):
        own = [case for case in found if case["kind"] == kind]
        counts = Counter(case["outcome"] for case in own)
        bad = [f"{c['name']}({c['argument']}={c['value']}): {c['outcome']}, {c['said']}" for c in own if c["failed"]]
        told = {name: counts[name] for name in ("clear", "opaque", "silent", "hang", "theirs")}
        rows.append(row(f"library calls: {kind}", "cases", len(own), bad, **told))
    return rows


def swept(size, seed):
    """What every case came to; the process is begun anew behind one that hangs or dies."""
    start, found = 0, []
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        while True:
            journal.write_text("")
            command = [sys.executable, "-m", "tests.torture.calls", str(journal), str(size), str(seed), str(start)]
            env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
            child = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            said = watched(child, journal)
            lines = [json.loads(line) for line in journal.read_text().splitlines()]
            found += [line for line in lines if "outcome" in line]
            begun = [line for line in lines if "outcome" not in line]
            if said is None:
                return found
            if not begun:
                raise RuntimeError(f"The sweep died before its first case: {said}")
            found.append(begun[-1] | {"outcome": "hang" if said == "hang" else "opaque", "said": said, "failed": True})
            start = begun[-1]["number"] + 1


def watched(child, journal):
    """None if it ended well, "hang" if it had to be ended, else what it said when it died."""
    last, size = time.monotonic(), 0
    try:
        while child.poll() is None:
            time.sleep(0.2)
            now = journal.stat().st_size
            if now != size:
                last, size = time.monotonic(), now
            if time.monotonic() - last > PATIENCE:
                return "hang"
        return None if child.returncode == 0 else f"code {child.returncode}: {child.stderr.read()[-300:]}"
    finally:
        child.kill()
        child.wait()
        child.stderr.close()


def main(journal, size, seed, start):
    """Run the cases from number `start` on."""
    import torch

    from .outcomes import outcome

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory() as folder, open(journal, "a") as file:
        os.chdir(folder)
        for number, (name, argument, kind, function, arguments) in enumerate(cases(Path(folder), size, seed)):
            if number < start:
                continue
            told = {
                "number": number,
                "name": name,
                "argument": argument,
                "kind": kind,
                "value": repr(arguments[argument])[:60],
            }
            file.write(json.dumps(told) + "\n")
            file.flush()
            came, said = outcome(partial(function, **arguments), seconds=30)
            failed = came in ("opaque", "silent", "hang")
            file.write(json.dumps(told | {"outcome": came, "said": said, "failed": failed}) + "\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
