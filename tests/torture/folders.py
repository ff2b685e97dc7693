"""Model folders that are damaged or forged: one sentence, or the prediction that was; no code runs, nothing is huge.

Damage is bytes changed and files cut off. A forgery has right checksums and a config with one value changed, or a
header of the weights that lies; what it says may be anything, so that a prediction is no failure, but a raw error, a
hang, a module that was imported or memory beyond a bound are. Run as a process of its own, with bounded memory.
"""

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from .rows import row

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 3 << 30  # bytes that the process may take on top of what it has when it begins
VALUES = (
    None, True, False, -1, 0, 1, 2**31, 2**40, 2**70, 1e308, 0.5, -0.5, "", "x", "os.system", "__import__('os')", [],
    {}, [[]], "../../x", {"#": "tensor", "name": "nix"}, {"#": "tensor"}, {"#": "float", "value": "nan"}, {"#": "nix"},
    {"#": "tuple", "items": 3}, {"#": "items", "items": [[[], 1]]}, {"#": "items", "items": [[{}, 1]]},
    {"#": "float", "value": "1_0"}, {"layer": "Linear"}, {"layer": "subprocess.Popen", "args": "x"},
    {"layer": "Dropout", "p": -1}, {"layer": ["Linear"]}, "9" * 5000, "\ud800", "\0",
    {"layer": "Conv2d", "in_channels": 1, "out_channels": 1, "kernel_size": [2**20, 2**20]},
)  # fmt: skip


class Trap:
    """A pickle of it makes a file."""

    def __reduce__(self):
        return Path.touch, (Path("trapped"),)


def made(folder):
    """{name: (path, loader -> something comparable)} of one folder of every kind."""
    import numpy as np
    import torch
    from torch import nn

    import bbalpha
    from bbalpha import conformal
    from bbalpha.calibration import TemperedClassifier
    from bbalpha.checkpoint import read_folder
    from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor, load_estimator
    from bbalpha.prediction import classification_of
    from bbalpha.predictive import RegressionPrediction
    from bbalpha.tabular.fields import describe
    from bbalpha.tabular.model import Card, TableModel

    torch.manual_seed(0)
    x, X = torch.randn(5, 4), np.random.default_rng(0).normal(size=(30, 4))
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    detector = bbalpha.Detector(net, n_passes=3, seed=0).fit(torch.randn(30, 4))
    settings = {"hidden_layer_sizes": (4,), "epochs": 2, "n_ensemble": 1, "random_state": 0, "n_predict_passes": 4}
    regressor = BBAlphaRegressor(noise="constant", **settings).fit(X, X[:, 0])
    classifier = BBAlphaClassifier(**settings).fit(X, X[:, 0] > 0)
    import pandas

    frame = pandas.DataFrame(X, columns=list("abcd")).assign(t=["Rome", "Oslo", "Lima"] * 10)
    table = TableModel(
        BBAlphaRegressor(noise="constant", **settings).fit(frame, X[:, 0]),
        Card("regression", "y", tuple(describe(frame[name], name) for name in frame), threshold=0.5),
    )
    paths = {
        name: folder / name
        for name in ("net", "state", "regressor", "classifier", "table", "intervals", "sets", "temperature")
    }
    bbalpha.save(net, paths["net"], alpha=0.5)
    detector.save(paths["net"])
    bbalpha.checkpoint.write_folder(paths["state"], {"a": (1, 2.5, float("inf")), "b": {3: x}, "c": [None, "text"]})
    regressor.save(paths["regressor"])
    classifier.save(paths["classifier"])
    table.save(paths["table"])
    conformal.conformal_intervals(RegressionPrediction(torch.randn(9, 30)), torch.randn(30)).save(paths["intervals"])
    conformal.conformal_sets(classification_of(torch.randn(9, 30, 3)), torch.arange(30) % 3).save(paths["sets"])
    TemperedClassifier(classifier, 1.5).save(paths["temperature"])

    def same(value):
        return hashlib.sha256(repr(value).encode()).hexdigest()

    def of_net(path):
        return same(bbalpha.load(path)(x).tolist())

    def of_detector(path):
        return same(bbalpha.Detector.load(path, net).threshold)

    def of_table(path):
        loaded = TableModel.load(path)
        return same((loaded.predict(frame.head(3)).to_numpy().tolist(), loaded.card.told()))

    loaders = {
        "net": of_net, "state": lambda p: same(str(read_folder(p).content)), "table": of_table,
        "regressor": lambda p: same(load_estimator(p).predict(X).tolist()),
        "classifier": lambda p: same(load_estimator(p).predict_proba(X).tolist()),
        "intervals": lambda p: same(vars(conformal.ConformalIntervals.load(p))),
        "sets": lambda p: same(vars(conformal.ConformalSets.load(p))),
        "temperature": lambda p: same(TemperedClassifier.load(p, classifier).temperature),
    }  # fmt: skip
    return {name: (paths[name], load) for name, load in loaders.items()} | {"detector": (paths["net"], of_detector)}


def attack(size, seed):
    """Rows of all attacks, in this process."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        targets = made(Path(name))
        before = resident()
        resource.setrlimit(resource.RLIMIT_AS, (before + MEMORY, before + MEMORY))
        right = {kind: load(path) for kind, (path, load) in targets.items()}
        rows = [_damage(max(20, round(10_000 * size)), rng, targets, right)]
        rows.append(_forge(max(20, round(4000 * size)), rng, targets))
        rows.append(_odd(targets))
        if Path("trapped").exists():
            rows[-1]["failures"] += 1
            rows[-1]["told"] += " | code of a file ran"
        return rows


def resident():
    """Bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _damage(n, rng, targets, right):
    """One byte changed, or a file cut off: an error, or what was."""
    from .outcomes import outcome

    failures = []
    for _ in range(n):
        kind = rng.choice([*targets])
        path, load = targets[kind]
        file = rng.choice([p for p in path.iterdir() if p.is_file()])
        whole = file.read_bytes()
        if rng.random() < 0.85:
            place = rng.randrange(len(whole))
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])
        else:
            file.write_bytes(whole[: rng.randrange(len(whole))])
        came, said = outcome(partial(load, path), seconds=20)
        if came == "silent" and said != repr(right[kind]):
            failures.append(f"{kind}, {file.name}: another answer")
        elif came not in ("silent", "clear"):
            failures.append(f"{kind}, {file.name}: {came}, {said}")
        file.write_bytes(whole)
    return row("bytes flipped and files cut off in model folders", "bytes", n, failures)


def _forge(n, rng, targets):
    """The config changed at one place, or the header of the weights, the checksums made right again."""
    from .outcomes import outcome

    failures = []
    for _ in range(n):
        kind = rng.choice([k for k in targets if k != "detector"])
        path, load = targets[kind]
        copy = Path("forged")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        what = forge_config(copy, rng) if rng.random() < 0.8 else forge_header(copy, rng)
        sign(copy)
        came, said = outcome(partial(load, copy), seconds=20)
        if came not in ("silent", "clear"):
            failures.append(f"{kind}, {what}: {came}, {said}")
    return row("forged model folders", "cases", n, failures)


def forge_config(folder, rng):
    """Change one value of the config or of the card; what was done."""
    files = [folder / "config.json"] + [folder / "card.json"] * (folder / "card.json").exists()
    file = rng.choice(files)
    config = json.loads(file.read_bytes())
    places = list(everywhere(config))
    holder, key = rng.choice(places)
    value = rng.choice(VALUES)
    if rng.random() < 0.15 and isinstance(holder, dict):
        del holder[key]
        value = "gone"
    else:
        holder[key] = value
    file.write_text(json.dumps(config))
    return f"{file.name}: {key} = {value!r:.40}"


def everywhere(value):
    """(holder, key) of all there is in nested lists and dicts."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from everywhere(inner)


def forge_header(folder, rng):
    """Change the header of the weights: shapes, offsets, types, its length."""
    file = folder / "weights.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    kind = rng.choice(["shape", "offset", "dtype", "length", "name"])
    if kind == "length" or not header:
        file.write_bytes(rng.choice([2**63, 2**40, 0, 5, length + 1]).to_bytes(8, "little") + data[8:])
        return "length of the header"
    name = rng.choice([*header])
    if kind == "name":
        header[rng.choice(["../../x", "", "\0", "__metadata__"])] = header.pop(name)
    else:
        told = {"shape": [2**40], "offset": [0, 2**40], "dtype": rng.choice(["F16", "I64", "nix"])}
        header[name]["data_offsets" if kind == "offset" else kind] = told[kind]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return f"{kind} of {name}"


def sign(folder):
    """Write the checksums that the files have now."""
    names = [n for n in ("config.json", "weights.safetensors", "card.json") if (folder / n).exists()]
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (folder / "checksums.sha256").write_text("".join(lines))


def _odd(targets):
    """Pickles, links, folders and devices in the place of files; a config that nests without end."""
    from .outcomes import outcome

    trap, nest = pickle.dumps(Trap()), b'{"format":1,"content":{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}}"
    deep = json.dumps({"layer": "Sequential", "children": {}})
    for _ in range(900):
        deep = '{"layer": "Sequential", "children": {"0": ' + deep + "}}"
    config = b'{"format":1,"versions":{},"content":{"kind":"model","state":{},"architecture":' + deep.encode() + b"}}"
    failures, tried = [], 0
    for kind, (path, load) in targets.items():
        for name in ("config.json", "weights.safetensors", "checksums.sha256"):
            for what in (trap, nest, config, b"", "link", "zero", "fifo", "folder", "loop"):
                copy = Path("odd")
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(path, copy)
                (copy / name).unlink()
                if isinstance(what, bytes):
                    (copy / name).write_bytes(what)
                    if name != "checksums.sha256":
                        sign(copy)
                elif what == "fifo":
                    os.mkfifo(copy / name)
                elif what == "folder":
                    (copy / name).mkdir()
                else:
                    (copy / name).symlink_to({"link": "/etc/passwd", "zero": "/dev/zero", "loop": name}[what])
                tried += 1
                came, said = outcome(partial(load, copy), seconds=20)
                if came != "clear" and not (kind == "detector" and came == "silent"):
                    failures.append(f"{kind}, {name}: {what!r:.20}: {came}, {said}")
    return row("pickles, links and devices in model folders", "cases", tried, failures)


def run(size, seed):
    """The rows, from a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.torture.folders", str(size), str(seed)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=1500)
    if done.returncode:
        raise RuntimeError(f"The process of the model folders died: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(attack(float(sys.argv[1]), int(sys.argv[2]))))
