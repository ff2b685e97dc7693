"""Speed and memory of K passes, as ratios in one run: `make bench`.

Every case runs all its ways in turn, round after round, in one process, so that a busy machine hits all of them; the
ratio of the minima is reported and the ratio of the medians beside it. Unit: the bare matrix products of the dense
K-pass step, on operands that lie ready. Results go to results/benchmarks.json after every case; --resume goes on.

    python benchmarks/engine.py [--resume] [--only train] [--rounds 15] [--quick]
"""

import argparse
import copy
import importlib.util
import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

import bbalpha
from bbalpha.networks import cnn, mlp

NETS = {"3x1000": [784, 1000, 1000, 1000, 10], "4x1024": [784, 1024, 1024, 1024, 1024, 10]}
LONG_ROUND = 8.0  # seconds; cases whose rounds take longer get a third of the rounds


# ------------------------------------------------------------------------------ ways


def products(net, rows, backward):
    """The unit: the products of the linear layers of `net` for so many rows, and of their backward."""
    weights = [m.weight.detach() for m in net.modules() if isinstance(m, nn.Linear)]
    inputs = [torch.randn(rows, w.shape[1]) for w in weights]
    grads = [torch.randn(rows, w.shape[0]) for w in weights]

    def run():
        for i, w in enumerate(weights):
            inputs[i] @ w.t()
        for i in reversed(range(len(weights) if backward else 0)):
            grads[i].t() @ inputs[i]
            if i:
                grads[i] @ weights[i]

    return run


def train_ways(net, x, y, K, chunk=None):
    """{way: one training step}, all with our loss."""

    def step(outputs):
        for p in net.parameters():
            p.grad = None
        bbalpha.cross_entropy(outputs(), y, alpha=0.5).backward()

    def loop():
        return torch.stack([net(x) for _ in range(K)])

    def repeated():
        return net(x.repeat(K, *[1] * (x.ndim - 1))).view(K, len(x), -1)

    net.train()
    ways = {"loop": loop, "repeat-torch": repeated}
    ways["ours"] = lambda: bbalpha.sample(net, x, K)
    ways["ours-shared"] = lambda: bbalpha.sample(net, x, K, masks="shared")
    ways["ours-vmap"] = lambda: bbalpha.sample(net, x, K, strategy="vmap")
    if chunk:
        ways["ours-chunked"] = lambda: bbalpha.sample(net, x, K, chunk_size=chunk)
    return {name: (lambda way=way: step(way)) for name, way in ways.items()}


def predict_ways(net, x, K):
    """{way: mean class probabilities of x}, peers included where they are installed."""

    def loop():
        net.train()
        with torch.no_grad():
            out = torch.stack([net(x).softmax(1) for _ in range(K)]).mean(0)
        net.eval()
        return out

    ways = {"loop": loop}
    ways["ours"] = lambda: bbalpha.predict_classification(net, x, n_passes=K, progress=False)
    ways["ours-shared"] = lambda: bbalpha.predict_classification(net, x, n_passes=K, masks="shared", progress=False)
    return ways | peers(net, x, K)


def peers(net, x, K):
    """MC dropout of other libraries, as their documentation calls it; on copies, as baal changes the model."""
    found = {}
    if importlib.util.find_spec("baal"):
        from baal.bayesian.dropout import MCDropoutModule
        from baal.modelwrapper import ModelWrapper, TrainingArgs

        wrapped = ModelWrapper(MCDropoutModule(copy.deepcopy(net)), TrainingArgs(use_cuda=False))
        found["baal"] = lambda: wrapped.predict_on_batch(x, iterations=K).softmax(1).mean(-1)
    module = torch_uncertainty()
    if module is not None:
        model = module.mc_dropout(copy.deepcopy(net), num_estimators=K, task="classification").eval()

        def run():
            with torch.no_grad():
                return model(x).view(K, len(x), -1).softmax(2).mean(0)

        found["torch-uncertainty"] = run
    if importlib.util.find_spec("lightning_uq_box"):
        from peers_ways import part

        boxes = part("lightning_uq_box.uq_methods.mc_dropout")
        box = boxes.MCDropoutClassification(copy.deepcopy(net), K, torch.nn.CrossEntropyLoss()).eval()
        found["lightning-uq-box"] = lambda: box.predict_step(x)["pred"]
    return found


def torch_uncertainty():
    """Its MC dropout module alone: the whole package wants torchvision."""
    try:
        path = next(f for f in files("torch-uncertainty") or () if str(f).endswith("methods/mc_dropout.py"))
    except (PackageNotFoundError, StopIteration):
        return None
    spec = importlib.util.spec_from_file_location("peer_mc_dropout", path.locate())
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError:
        return None
    return module


# ------------------------------------------------------------------------------ measuring


def interleaved(ways, rounds, unit):
    """[{way, ratio, ratio_median, ms}] against the way named `unit`, all ways in turn in every round."""
    times = {name: [] for name in ways}
    for way in ways.values():
        way()
    done = 0
    while done < rounds:
        start = time.perf_counter()
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - begin)
        done += 1
        if time.perf_counter() - start > LONG_ROUND:
            rounds = max(done, rounds // 3) if done == 1 else rounds
    low = {name: min(t) for name, t in times.items()}
    middle = {name: sorted(t)[len(t) // 2] for name, t in times.items()}
    return [
        {"way": name, "ratio": low[name] / low[unit], "ratio_median": middle[name] / middle[unit],
         "ms": low[name] * 1e3, "rounds": done}
        for name in ways
    ]  # fmt: skip


def peak_memory(code):
    """Peak memory of a process that runs `code`, above that of its imports, in MB."""
    script = (
        "import torch, bbalpha\nfrom torch import nn\nfrom bbalpha.networks import mlp\n"
        # what getrusage tells of a process that a larger one started is the size of the larger one
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "torch.set_num_threads(2)\n"
        "net = mlp([784, 1024, 1024, 1024, 1024, 10])\nx = torch.rand(128, 784)\ny = torch.randint(10, (128,))\n"
        "bbalpha.cross_entropy(bbalpha.sample(net, x[:2], 2), y[:2]).backward()\n"
        f"base = peak()\n{code}\nprint((peak() - base) / 1024)"
    )
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


# ------------------------------------------------------------------------------ cases: each yields rows


def timed(make):
    """A case out of a function (net name, K, batch) -> {way: step}, whose first way is the unit."""

    def case(net_name, K, batch, rounds):
        ways = make(net_name, K, batch)
        return interleaved(ways, rounds, next(iter(ways)))

    case.ways = make
    return case


@timed
def case_train(net_name, K, batch):
    net = mlp(NETS[net_name])
    x, y = torch.rand(batch, 784), torch.randint(10, (batch,))
    return {"products": products(net, K * batch, True), **train_ways(net, x, y, K, max(1, K // 10))}


@timed
def case_predict(net_name, K, batch):
    net = mlp(NETS[net_name]).eval()
    x = torch.rand(batch, 784)
    one = products(net, batch, False)

    def unit():
        for _ in range(K):
            one()

    return {"products": unit, **predict_ways(net, x, K)}


@timed
def case_cnn(_, K, batch):
    net, x, y = cnn(), torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,))
    return {"torch-one-pass": train_ways(net, x, y, 1)["loop"], **train_ways(net, x, y, K)}


class Encoder(nn.Module):
    """A small text classifier: embedding, two encoder layers, mean, linear."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x)).mean(1))


@timed
def case_encoder(_, K, batch):
    net, x, y = Encoder(), torch.randint(1000, (batch, 32)), torch.randint(10, (batch,))
    return {"torch-one-pass": train_ways(net, x, y, 1)["loop"], **train_ways(net, x, y, K)}


def tiny_ways(_, K, batch):
    """{way: step} of one hidden layer of 50: nothing but overhead; training steps and passes without gradient."""
    net, x, y = mlp([13, 50, 1], dropout=0.05), torch.rand(batch, 13), torch.rand(batch, 1)

    def step(outputs):
        for p in net.parameters():
            p.grad = None
        bbalpha.gaussian_nll(outputs(), y, precision=1.0).backward()

    def predicted(outputs):
        with torch.no_grad():
            outputs()

    passes = {
        "loop": lambda: torch.stack([net(x) for _ in range(K)]),
        "ours": lambda: bbalpha.sample(net, x, K),
        "ours-shared": lambda: bbalpha.sample(net, x, K, masks="shared"),
    }
    kinds = (("", step), ("-predict", predicted))
    return {name + kind: (lambda o=o, a=around: a(o)) for kind, around in kinds for name, o in passes.items()}


def case_tiny(net_name, K, batch, rounds):
    """On one thread."""
    torch.set_num_threads(1)
    try:
        ways = tiny_ways(net_name, K, batch)
        kinds = [{n: w for n, w in ways.items() if n.endswith("-predict") == alone} for alone in (False, True)]
        return [row for kind in kinds for row in interleaved(kind, 40 * rounds, next(iter(kind)))]
    finally:
        torch.set_num_threads(2)


case_tiny.ways = tiny_ways


def case_profile(_, K, batch, rounds):
    """Where a call of `sample` on the tiny net spends its time, part by part."""
    from bbalpha._engine.inputs import Inputs
    from bbalpha._engine.planning import find_plan
    from bbalpha._kernels import Passes, draw_seed

    net, x = mlp([13, 50, 1], dropout=0.05), torch.rand(batch, 13)
    inputs, passes = Inputs.of(x, 0), Passes(0, 0, K)
    drawn = [((batch, 13), 0.05), ((batch, 50), 0.05)]
    first, last = net[1], net[4]

    def linear():
        torch.addmm(last.bias, torch.addmm(first.bias, x.repeat(K, 1), first.weight.t()).relu_(), last.weight.t())

    parts = {
        "plain loop, all passes": lambda: torch.stack([net(x) for _ in range(K)]),
        "sample, all passes": lambda: bbalpha.sample(net, x, K),
        "of which: a seed": lambda: draw_seed(None),
        "of which: looking up the plan": lambda: find_plan(net, inputs, "auto", False, False),
        "of which: a generator for each pass": lambda: Passes(0, 0, K),
        "of which: the masks": lambda: passes.noises(drawn, x.dtype),
        "of which: products and relu": linear,
    }

    def without_gradient(part):
        with torch.no_grad():
            part()

    torch.set_num_threads(1)
    try:
        ways = {name: (lambda part=part: without_gradient(part)) for name, part in parts.items()}
        return interleaved(ways, 40 * rounds, "plain loop, all passes")
    finally:
        torch.set_num_threads(2)


def case_memory(*_):
    """A training step of the paper's 4x1024 net, batch 128, above the base of the process."""
    loss = "bbalpha.cross_entropy({}, y).backward()"
    ways = {
        ("repeat-torch", 10): loss.format("net(x.repeat(10, 1)).view(10, 128, -1)"),
        ("loop", 10): loss.format("torch.stack([net(x) for _ in range(10)])"),
        ("ours", 10): loss.format("bbalpha.sample(net, x, 10)"),
        ("ours-shared", 10): loss.format("bbalpha.sample(net, x, 10, masks='shared')"),
        ("ours", 100): loss.format("bbalpha.sample(net, x, 100)"),
        ("ours-chunked", 100): loss.format("bbalpha.sample(net, x, 100, chunk_size=10)"),
        ("ours-chunked", 1000): loss.format("bbalpha.sample(net, x, 1000, chunk_size=10)"),
        ("ours-chunked-shared", 1000): loss.format("bbalpha.sample(net, x, 1000, chunk_size=10, masks='shared')"),
    }
    peaks = {key: peak_memory(code) for key, code in ways.items()}
    base = peaks["repeat-torch", 10]
    return [{"way": way, "n_passes": K, "peak_mb": mb, "ratio": mb / base} for (way, K), mb in peaks.items()]


def case_growth(_, K, batch, rounds):
    """Log-log slope of the time of a training step in passes, rows and width: 1, 1 and 2 for the products."""

    def seconds(K, batch, width, masks):
        net = mlp([256, width, width, 10])
        x, y = torch.rand(batch, 256), torch.randint(10, (batch,))

        def step():
            bbalpha.cross_entropy(bbalpha.sample(net, x, K, masks=masks), y).backward()

        return min(r["ms"] for r in interleaved({"step": step}, rounds, "step"))

    rows = []
    for masks in ("per_example", "shared"):
        base = {"K": K, "batch": batch, "width": 256}
        for axis in base:
            small, large = (seconds(**{**base, axis: base[axis] * m}, masks=masks) for m in (1, 8))
            slope = torch.tensor(large / small).log2().item() / 3
            rows.append({"way": "ours" if masks == "per_example" else "ours-shared", "axis": axis, "slope": slope})
    return rows


def case_import(_, K, batch, rounds):
    """Seconds of a new process that imports torch, and torch and bbalpha."""

    def process(code):
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    ways = {"torch": process("import torch"), "bbalpha": process("import torch, bbalpha; bbalpha.sample"),
            "name only": process("import bbalpha")}  # fmt: skip
    return interleaved(ways, rounds, "torch")


CASES = [  # what matters most comes first
    ("train", case_train, "3x1000", 10, 128),
    ("train", case_train, "3x1000", 10, 512),
    ("predict", case_predict, "3x1000", 100, 1000),
    ("cnn", case_cnn, "paper", 10, 128),
    *[("tiny", case_tiny, "1x50", K, b) for K in (2, 3, 4, 5, 10, 100) for b in (1, 32)],
    ("profile", case_profile, "1x50", 2, 32),
    ("encoder", case_encoder, "2x128", 10, 32),
    ("memory", case_memory, "4x1024", 10, 128),
    ("growth", case_growth, "2 layers", 8, 64),
    ("import", case_import, "-", 1, 1),
    ("train", case_train, "4x1024", 10, 128),
    ("train", case_train, "4x1024", 10, 512),
    *[("train", case_train, net, 1, b) for net in NETS for b in (128, 512)],
    *[("predict", case_predict, net, 10, 1000) for net in NETS],
    ("predict", case_predict, "4x1024", 100, 1000),
    *[("train", case_train, net, 100, b) for net in NETS for b in (128, 512)],
]
QUICK = [("tiny", case_tiny, "1x50", 5, 8), ("growth", case_growth, "2 layers", 2, 8), ("cnn", case_cnn, "paper", 2, 4)]


def main():
    from bbalpha.experiments import results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks.json"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", help="kinds of work to measure; the others are kept as they are")
    parser.add_argument("--resume", action="store_true", help="keep the cases that the file already has")
    parser.add_argument("--quick", action="store_true", help="three small cases, two rounds: does it run?")
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    keep = options.resume or options.only
    rows = json.loads(options.out.read_text())["rows"] if keep and options.out.exists() else []
    start = time.perf_counter()
    command = "python benchmarks/engine.py" + (", in several runs" if rows else "")
    peers_found = {}
    for name in ("baal", "torch-uncertainty", "lightning-uq-box"):
        try:
            peers_found[name] = version(name)
        except PackageNotFoundError:
            continue
    for work, case, net, K, batch in tqdm(QUICK if options.quick else CASES, desc="cases"):
        where = {"work": work, "model": net, "n_passes": K, "batch": batch}
        here = [
            r for r in rows if all(r.get(k) == v or (k == "n_passes" and work == "memory") for k, v in where.items())
        ]
        if (options.only and work not in options.only) or (options.resume and here):
            continue
        rows = [r for r in rows if r not in here]
        found = case(net, K, batch, 2 if options.quick else options.rounds)
        rows += [{**where, "peers": peers_found or None, **r} if work == "predict" else {**where, **r} for r in found]
        results.write(options.out, command=command, seed=0, seconds=time.perf_counter() - start, rows=rows)
        for r in rows[-len(found) :]:
            tqdm.write(
                "  ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in r.items() if k != "peers")
            )


if __name__ == "__main__":
    main()
