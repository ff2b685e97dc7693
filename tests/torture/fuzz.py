"""Fuzz what reads files, with coverage as the guide -> results/fuzz.json; by hand, where atheris is installed.

    pip install atheris pyarrow 'bbalpha[sklearn]'     # in an environment of its own
    python -m tests.torture.fuzz --seconds 60

Each target reads bytes that libFuzzer makes: checksums are made right first, so that it comes to what is behind them.
It may answer, or end in one sentence; an error that is not ours, a file that is written, a process that is begun, more
than two gigabytes or half a minute are finds.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEGABYTES, SLOWEST, LONGEST = 2000, 30, 20_000  # of memory; seconds of one case; bytes of one case
FORBIDDEN = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class", "socket.connect")


# ------------------------------------------------------------------------------ targets


def model_folder(folder):
    """A network and a detector in one folder."""
    import torch
    from torch import nn

    import bbalpha

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    bbalpha.save(net, folder / "net", alpha=0.5, training={"classes": ["a", "b"], "at": (1, 2.5)})
    bbalpha.Detector(net, n_passes=3, seed=0).fit(torch.randn(30, 4)).save(folder / "net")
    return net


def config(folder):
    """config.json of a network."""
    return signed_file(folder, "config.json")


def weights(folder):
    """weights.safetensors of a network."""
    return signed_file(folder, "weights.safetensors")


def signed_file(folder, name):
    import bbalpha

    from .folders import sign

    model_folder(folder)

    def read(data):
        (folder / "net" / name).write_bytes(data)
        sign(folder / "net")
        bbalpha.load(folder / "net")

    return read, [(folder / "net" / name).read_bytes()]


def checksums(folder):
    """checksums.sha256 of a network."""
    import bbalpha

    model_folder(folder)
    file = folder / "net" / "checksums.sha256"

    def read(data):
        file.write_bytes(data)
        bbalpha.load(folder / "net")

    return read, [file.read_bytes()]


def card(folder):
    """card.json of a table model."""
    import numpy as np
    import pandas

    from bbalpha.estimators import BBAlphaRegressor
    from bbalpha.tabular.fields import describe
    from bbalpha.tabular.model import Card, TableModel

    from .folders import sign

    frame = pandas.DataFrame({"a": np.arange(30.0), "b": ["Rome", "Oslo", "Lima"] * 10})
    estimator = BBAlphaRegressor(noise="constant", hidden_layer_sizes=(4,), epochs=2, n_ensemble=1, random_state=0)
    fields = tuple(describe(frame[name], name) for name in frame)
    TableModel(estimator.fit(frame, frame["a"]), Card("regression", "y", fields, threshold=0.5)).save(folder / "table")

    def read(data):
        (folder / "table" / "card.json").write_bytes(data)
        sign(folder / "table")
        TableModel.load(folder / "table")

    return read, [(folder / "table" / "card.json").read_bytes()]


def hashed(name, path, load):
    """Reads a file of JSON that holds its own checksum, as it is and with the checksum made right."""

    def read(data):
        if data[:1] == b"!":  # sign what follows
            state = json.loads(data[1:])
            told = json.dumps(state, allow_nan=False)
            whole = {name: state, "sha256": hashlib.sha256(told.encode()).hexdigest()}
            data = json.dumps(whole, indent=1, allow_nan=False).encode()
        path.write_bytes(data)
        load()

    seed = path.read_bytes()
    return read, [seed, b"!" + json.dumps(json.loads(seed)[name]).encode()]


def detector(folder):
    """detector.json."""
    import bbalpha

    net = model_folder(folder)
    return hashed("detector", folder / "net" / "detector.json", lambda: bbalpha.Detector.load(folder / "net", net))


def explorer(folder):
    """explorer.json, the state of a search."""
    import torch

    from bbalpha.exploration import Explorer

    loop = Explorer([(0.0, 1.0), (1.0, 5.0)], first=2, seed=0)
    points = loop.suggest(2)
    loop.observe(points, torch.tensor([1.0, 2.0]))
    loop.save(folder / "loop")
    (file,) = (folder / "loop").glob("*.json")
    return hashed("explorer", file, lambda: Explorer.load(folder / "loop"))


def idx(folder):
    """Images, packed or not."""
    from bbalpha.data.sources import read_idx

    file, images = folder / "images.gz", (2051).to_bytes(4, "big") + b"\0\0\0\3\0\0\0\4\0\0\0\4" + bytes(range(48))

    def read(data):
        file.write_bytes(gzip.compress(data[1:], 1) if data[:1] == b"!" else data)
        read_idx(file)

    return read, [b"!" + images, gzip.compress(images), b"!" + (2049).to_bytes(4, "big") + b"\0\0\0\2\1\2"]


def archives(folder):
    """Tables in .npz, .txt.zip and .txt."""
    import numpy as np

    from bbalpha.data.sources import Table

    table = Table(what="toy", n_rows=12, n_features=3, numbers=None, forms=(), urls=())
    X, y = np.arange(36.0).reshape(12, 3), np.arange(12.0)
    arrays, packed = io.BytesIO(), io.BytesIO()
    np.savez_compressed(arrays, X=X, y=y)
    text = "\n".join(" ".join(map(str, [*a, b])) for a, b in zip(X, y, strict=True))
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy.txt", text)
    names = {b"n": folder / "toy.npz", b"z": folder / "toy.txt.zip", b"t": folder / "toy.txt"}

    def read(data):
        file = names.get(data[:1], names[b"t"])
        file.write_bytes(data[1:])
        table.read(file)

    return read, [b"n" + arrays.getvalue(), b"z" + packed.getvalue(), b"t" + text.encode()]


def tables(folder):
    """Tables of users: .csv, .csv.gz, .tsv, .parquet."""
    import pandas

    from bbalpha.tabular.files import read_table

    dates = ["2020-01-01", "2021-05-06", "1999-12-31"]
    frame = pandas.DataFrame({"a": [1.5, None, 3.0], "b": ["x", "y", None], "c": dates})
    text, parquet = frame.to_csv(index=False).encode(), io.BytesIO()
    frame.to_parquet(parquet)
    names = {b"c": "x.csv", b"g": "x.csv.gz", b"t": "x.tsv", b"p": "x.parquet", b"z": "x.csv.zip"}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("x.csv", text)

    def read(data):
        file = folder / names.get(data[:1], "x.csv")
        file.write_bytes(data[1:])
        read_table(file)

    return read, [
        b"c" + text, b"g" + gzip.compress(text), b"t" + text.replace(b",", b"\t"), b"p" + parquet.getvalue(),
        b"z" + packed.getvalue(),
    ]  # fmt: skip


TARGETS = {f.__name__: f for f in (config, weights, checksums, card, detector, explorer, idx, archives, tables)}


# ------------------------------------------------------------------------------ one target, in a process of its own


def fuzz(name, seconds, seed):
    """Fuzz one target until the time is over; every new find is a line of JSON on stdout."""
    import atheris

    with atheris.instrument_imports(include=["bbalpha"]):
        import bbalpha.data.sources
        import bbalpha.detection
        import bbalpha.exploration
        import bbalpha.tabular.files
        import bbalpha.tabular.model  # noqa: F401

    from .outcomes import kind

    folder = Path(tempfile.mkdtemp(dir=os.environ["FUZZ_FOLDER"]))
    read, seeds = TARGETS[name](folder)
    corpus = folder / "corpus"
    corpus.mkdir()
    deep = [b'{"a":' * 3000, b"[" * 19_000, b'!{"a":' * 3000]
    for i, data in enumerate([*seeds, *deep]):
        (corpus / str(i)).write_bytes(data)
    known, watched = set(), [False]

    def watch(event, arguments):
        bad = event.startswith(FORBIDDEN)
        if event == "open" and isinstance(arguments[0], str) and re.search("[wax+]", str(arguments[1] or "")):
            bad = not arguments[0].startswith((str(folder), "/dev/null"))
        if watched[0] and bad:
            find(f"{event}: {str(arguments)[:100]}", b"")

    def find(what, data, where=None):
        if (where or what) not in known:
            known.add(where or what)
            os.write(1, (json.dumps({"find": what, "data": data[:3000].hex()}) + "\n").encode())

    def one(data):
        watched[0] = True
        try:
            read(data)
        except Exception as error:  # noqa: BLE001 - whatever it is, is what is asked for
            if kind(error) != "clear" and not own(error):
                where = f"{type(error).__name__} at {place(error)}"
                find(f"{where}: {str(error)[:80]}", data, where)
        finally:
            watched[0] = False

    sys.addaudithook(watch)
    warnings.simplefilter("ignore")
    limits = [f"-rss_limit_mb={MEGABYTES}", f"-timeout={SLOWEST}", f"-max_len={LONGEST}", f"-seed={seed + 1}"]
    atheris.Setup([sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-artifact_prefix={folder}/", *limits], one)
    atheris.Fuzz()


def own(error):
    """Whether an error is of the target here, before anything of ours was called."""
    trace = error.__traceback__
    while trace is not None:
        if "/bbalpha/" in trace.tb_frame.f_code.co_filename:
            return False
        trace = trace.tb_next
    return True


def place(error):
    """The last line of ours that an error came through."""
    found, trace = "?", error.__traceback__
    while trace is not None:
        if "/bbalpha/" in trace.tb_frame.f_code.co_filename:
            found = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


# ------------------------------------------------------------------------------ all targets


def fuzzed(name, seconds, seed):
    """A row of one target."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"OMP_NUM_THREADS": "1", "FUZZ_FOLDER": folder, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-m", "tests.torture.fuzz", "--target", name]
        command += ["--seconds", str(seconds), "--seed", str(seed)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False, timeout=seconds * 3 + 300)
    said = done.stderr.decode(errors="replace")
    finds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b'{"find"')]
    runs = re.findall(r"^Done (\d+) runs", said, re.MULTILINE) or re.findall(r"^#(\d+)", said, re.MULTILINE)
    if done.returncode:
        finds.append({"find": f"the process died: {' '.join(said.split())[-300:]}", "data": ""})
    features = re.findall(r"cov: (\d+)", said)
    return {
        "target": name, "executions": int(runs[-1]) if runs else 0, "seconds": round(time.perf_counter() - start, 1),
        "edges": int(features[-1]) if features else 0, "finds": len(finds),
        "told": " | ".join(f["find"] for f in finds[:20]),
    }, finds  # fmt: skip


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.torture.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help=f"all if none: {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "fuzz.json")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.target:
        fuzz(args.target, args.seconds, args.seed)
        return 0
    from bbalpha.experiments import results

    start, rows = time.perf_counter(), []
    for name in args.targets or TARGETS:
        row, finds = fuzzed(name, args.seconds, args.seed)
        rows.append(row)
        print(f"{name:10} {row['executions']:9} executions {row['edges']:6} edges {row['finds']:3} finds", flush=True)
        for found in finds:
            print(f"    {found['find']}\n        {found['data'][:200]}")
    command = f"python -m tests.torture.fuzz --seconds {args.seconds}"
    seconds = time.perf_counter() - start
    results.write(args.out, command=command, seed=args.seed, seconds=seconds, rows=rows)
    return 1 if any(row["finds"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
