"""Every command with every option gone bad: one line on stderr and exit code 2, no traceback, no half of a file."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .rows import row

ROOT = Path(__file__).resolve().parents[2]

NETS = """
import torch
from torch import nn
def make(): return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), torch.randn(3, 4)
def alone(): return make()[0]
def number(): return 3
def broken(): raise RuntimeError("the disk is gone")
def leaving(): raise SystemExit(7)
class Moody(nn.Module):
    calls = 0
    def forward(self, x):
        Moody.calls += 1
        if Moody.calls > 1: raise KeyError("moody")
        return nn.functional.dropout(x)
def moody(): return Moody(), torch.randn(3, 4)
value = 7
"""
FILES = {
    "nets.py": NETS, "syntax.py": "def", "dies.py": "1 / 0", "leaves.py": "raise SystemExit(3)", "empty.csv": "",
    "names.csv": "a,b,y\n", "one.csv": "a,b,y\n1,2,3\n", "ragged.csv": "a,b,y\n1,2\n1,2,3,4,5\n",
    "latin.csv": "name,y\ncaf\xe9,1\n".encode("latin-1"), "utf16.csv": "a,y\n1,2\n".encode("utf-16"),
    "zeros.csv": b"\0" * 100, "noise.parquet": b"PAR1 and no more", "cut.csv.gz": b"\x1f\x8b\x08\0abc",
    "gone.csv.zip": b"PK\x05\x06" + b"\0" * 18, "quote.csv": 'a,y\n"1,2\n', "twice.csv": "a,a,y\n1,2,3\n2,3,4\n",
    "inf.csv": "a,y\n" + "inf,1\n-inf,2\n" * 9, "empty.parquet": b"", "same.csv": "a,y\n" + "1,1\n" * 30,
    "text.csv": "a,y\n" + "".join(f"{i},w{i}\n" for i in range(30)), "not_a_model/config.json": "{}",
    "other.csv": "z\n1\n", "good.csv": "a,b,y\n" + "".join(f"{i},{i % 3},{i}\n" for i in range(40)),
}  # fmt: skip
BAD_TABLES = [
    *[name for name in FILES if name.split(".", 1)[-1] in ("csv", "parquet", "csv.gz", "csv.zip")
      if name not in ("good.csv", "same.csv", "text.csv", "inf.csv", "twice.csv")],
    "nix.csv", ".", "not_a_model", "good.csv/x", "a\nb.csv", "x" * 300 + ".csv", "http://127.0.0.1:1/x.csv",
]  # fmt: skip
COUNTS = ["0", "-1", "1.5", "nan", "inf", "x", "", "1e3", "9" * 30]
NUMBERS = ["nan", "inf", "-inf", "x", "", "0x10", "1,2", "--"]
LISTS = ["nan", "inf", "x", "0,,1", ",", "0,nan", "1;2", "0,"]
FOLDERS = ["nix", "good.csv", ".", "not_a_model", "", "x" * 300]
OUTS = ["nix/deep/out.csv", ".", "good.csv/out.csv", "full/out.csv", "x" * 300]


def cases():
    """Lists of words behind `bbalpha`."""
    doctor = ["doctor", "nets:make"]
    yield from ([*doctor, "--n-passes", v] for v in [*COUNTS, "1"])
    yield from ([*doctor, "--batch-dim", v] for v in ["-1", "9", "x", "1.5", "9" * 30])
    shapes = [
        "-1,4",
        "4,-1",
        "x",
        "1.5,4",
        "nan",
        ",",
        "3,,4",
        "9999999999,9999999",
        "9" * 30,
        "3 4",
        "3",
        "3,5",
        "0x3,4",
    ]
    yield from (["doctor", "nets:alone", "--shape", v] for v in shapes)
    factories = (
        "nets nets: :make nets:nix nets:value nets:number nets:broken nets:leaving nix:make nets:moody syntax:make "
        "dies:make leaves:make nets.make:x ..:x nets:make:x os:getcwd"
    )
    yield from (["doctor", v] for v in [*factories.split(), "", "a b:c"])
    yield from (["fit", v, "--target", "y", "-o", "new"] for v in BAD_TABLES)
    fit = ["fit", "good.csv", "--target", "y", "-o", "new"]
    options = {
        "--target": ["nix", "", "a,b"], "--task": ["", "nix", "Regression"], "--alpha": NUMBERS,
        "--held-out": [*NUMBERS, "1", "-0.1", "2"], "--group": ["nix", "y"], "--time": ["nix"],
        "--drop": ["nix", "a,b"],
        "--budget": ["", "nix", "0", "-1", "nan", "inf", "1d", "1e3", "9" * 40, "quick,"],
        "--seed": ["-1", "1.5", "x", "9" * 30, "nan"], "--out": ["good.csv", ".", "not_a_model", "good.csv/x", ""],
    }  # fmt: skip
    yield from ([*fit, name, v] for name, values in options.items() for v in values)
    for command in (["predict"], ["evaluate"]):
        yield from ([*command, v, "good.csv"] for v in FOLDERS)
        yield from ([*command, "model", v] for v in [*BAD_TABLES, "other.csv"] if v != "one.csv")
    predict = ["predict", "model", "good.csv"]
    yield from ([*predict, "--coverage", v] for v in [*NUMBERS, "0", "1", "1.5", "-0.1"])
    yield from ([*predict, "--n-passes", v] for v in ["-1", "1", "1.5", "nan", "x", "9" * 30])
    yield from ([*predict, "--seed", v] for v in ["-2", "1.5", "x", "9" * 30])
    yield from ([*predict, "-o", v] for v in OUTS)
    yield from (["report", v] for v in FOLDERS if v != "")
    yield from (["report", "--results", v] for v in ["nix", "good.csv"])
    yield from (["report", "model", "-o", v] for v in ["nix/deep.html", ".", "good.csv/x"])
    yield from (["report", "model", "--data", v] for v in [*BAD_TABLES, "other.csv"])
    yield from (["serve", v] for v in FOLDERS)
    serve = ["serve", "model"]
    yield from ([*serve, "--port", v] for v in ["0", "-1", "65536", "x", "1.5", "9" * 30])
    yield from ([*serve, "--host", v] for v in ["", "256.1.1.1", "a b", "nix.invalid"])
    yield from ([*serve, "--max-rows", v] for v in COUNTS)
    yield from ([*serve, "--max-passes", v] for v in [*COUNTS, "1"])
    yield from ([*serve, "--audit", v] for v in [".", "nix/deep.log", "good.csv/x"])
    yield ["serve", "model", "model"]
    yield from (["data", "fetch", v] for v in ["nix", "", "a b", "../boston", "boston,yacht"])
    for kind in ("regression", "classification", "adversarial"):
        yield from (["reproduce", kind, "--quick", "--alphas", v] for v in LISTS)
    for kind in ("regression", "classification", "adversarial", "runtime"):
        yield from (["reproduce", kind, "--quick", "--out", v] for v in ["good.csv", "good.csv/x"])
    regression = ["reproduce", "regression", "--quick"]
    yield from ([*regression, "--splits", v] for v in COUNTS)
    yield from (
        [*regression, name, v] for name in ("--datasets", "--methods") for v in ["nix", ",", "boston,,", "boston;x"]
    )
    for name in ("--seeds", "--jobs"):
        yield from (["reproduce", "classification", "--quick", name, v] for v in [*COUNTS, "99999999"])
    yield from (["reproduce", "classification", "--quick", "--models", v] for v in ["nix", ",", "dense,,cnn", ""])
    runtime = ["reproduce", "runtime", "--quick"]
    yield from ([*runtime, "--passes", v] for v in [*LISTS, "0", "-1", "1.5", "1e3", "9" * 30])
    yield from ([*runtime, "--minutes", v] for v in [*NUMBERS, "0", "-1", "1e300"])
    yield from ([*runtime, "--ways", v] for v in ["nix", ",", "loop,,ours"])
    yield from ([v] for v in ("nix", "--nix", "fit", "predict", "evaluate", "serve", "doctor", "data nix"))
    yield from ([c, "--nix"] for c in ("fit", "predict", "evaluate", "serve", "doctor", "report"))
    yield from (["reproduce", v] for v in ("nix", ""))


def run(size, seed):
    """All of them at size 1; every so many at less."""
    step = max(1, round(0.1 / size)) if size < 0.5 else 1
    found = ran(step, seed)
    bad = [f"bbalpha {' '.join(c['words'])[:80]}: {c['why']}" for c in found if c["why"]]
    return [row("commands", "cases", len(found), bad)]


def ran(step, seed):
    """What each command came to, in a process of its own for all of them."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": folder + "/cache",
        }
        env["BBALPHA_DATA"] = folder
        command = [sys.executable, "-m", "tests.torture.commands", folder, str(step), str(seed)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=1500)
        if done.returncode:
            raise RuntimeError(f"The commands died: {done.stderr[-2000:]}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"words"')]


def prepare(folder):
    """The files that the commands are given, and a small model."""
    import numpy as np
    import pandas

    from bbalpha import BBAlphaRegressor
    from bbalpha.tabular.fields import describe
    from bbalpha.tabular.model import Card, TableModel

    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    frame = pandas.DataFrame({"a": np.arange(40.0), "b": np.arange(40) % 3, "y": np.arange(40.0)})
    settings = {"hidden_layer_sizes": (4,), "epochs": 2, "n_ensemble": 1, "random_state": 0, "n_predict_passes": 4}
    estimator = BBAlphaRegressor(noise="constant", **settings).fit(frame[["a", "b"]], frame["y"])
    fields = tuple(describe(frame[name], name) for name in ("a", "b"))
    TableModel(estimator, Card("regression", "y", fields)).save(folder / "model")


def why(words, before, folder):
    """Why a command failed to refuse, or None."""
    from bbalpha import cli

    from .outcomes import Caught, HangError, deadline

    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["bbalpha", *words]
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), Caught() as caught, deadline(20):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    said = [line for line in err.getvalue().splitlines() if line.strip() and "Warning" not in line]
    if isinstance(caught.error, HangError):
        return "hang"
    if caught.error is not None:
        return f"traceback of {type(caught.error).__name__}: {str(caught.error)[:100]}"
    if code != 2:
        return f"exit code {code}: {out.getvalue()[:60]!r}"
    if not said or not said[-1].startswith("bbalpha: ") or len(said[-1]) < 20:
        return f"no line of ours: {said[-1:]}"
    left = {str(p.relative_to(folder)) for p in folder.rglob("*")}
    new = sorted(name for name in left - before if not name.startswith(("__pycache__", "results", "cache")))
    before |= left
    return f"left {new[0]!r}" if new else None


def main(folder, step, seed):
    """Run every `step`-th command and print what it came to."""
    import torch

    torch.set_num_threads(1)
    prepare(folder)
    os.chdir(folder)
    before = {str(p.relative_to(folder)) for p in folder.rglob("*")}
    for words in list(cases())[seed % step :: step]:
        print(json.dumps({"words": words, "why": why(words, before, folder)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
