"""Latency of frozen models beside sampling live, one row and K = 20 -> results/freezing_speed.json.

    python benchmarks/freezing.py

Unit: `bbalpha.sample` with shared masks and a seed, planned before. All ways take turns, round after round, in one
process and one thread, by the time that the processor worked for them; each is called twice in its turn, and the second
call counts, so that none pays for what another left in the caches. The ratio of the minima is reported, and the ratio
of the medians beside. "K rows" is the bare network in evaluation mode on a batch of K rows: about the arithmetic
that all passes need, where nothing comes before the first dropout. The goal is half of the unit for a frozen model.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

import bbalpha
from bbalpha import freezing
from bbalpha.experiments import results
from bbalpha.networks import cnn, mlp

Call = Callable[[], object]


@dataclass(frozen=True)
class Config:
    n_passes: int = 20
    rounds: int = 150
    seed: int = 0


class Tagger(nn.Module):
    """Two layers of LSTM with dropout between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 64, 2, dropout=0.2, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class TextEncoder(nn.Module):
    """The encoder of benchmarks/engine.py."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(x)).mean(1))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, bool]]] = {  # model, a row, whether it gives numbers
    "13-50-50-1, dropout 0.05": lambda: (mlp([13, 50, 50, 1], dropout=0.05), torch.randn(1, 13), True),
    "784-1000-1000-1000-10": lambda: (mlp([784, 1000, 1000, 1000, 10]), torch.rand(1, 784), False),
    "784-1000-1000-1000-10, dropout 0.8": lambda: (mlp([784, 1000, 1000, 1000, 10], dropout=0.8),
                                                   torch.rand(1, 784), False),
    "the paper's CNN": lambda: (cnn(), torch.rand(1, 1, 28, 28), False),
    "LSTM, 2 x 64, 20 steps": lambda: (Tagger(), torch.randn(1, 20, 16), True),
    "encoder, 2 layers, 32 tokens": lambda: (TextEncoder(), torch.randint(1000, (1, 32)), False),
}  # fmt: skip


def run(config: Config, name: str) -> list[dict[str, Any]]:
    torch.manual_seed(config.seed)
    model, x, numbers = MODELS[name]()
    model.eval()
    K, seed = config.n_passes, config.seed
    frozen = bbalpha.freeze(model, K, seed=seed, x=x)
    summary = freezing.RegressionSummary() if numbers else freezing.ClassificationSummary()
    predict = bbalpha.predict_regression if numbers else bbalpha.predict_classification
    whole, several = nn.Sequential(frozen, summary), x.expand(K, *x.shape[1:]).contiguous()
    traced = torch.jit.trace(frozen, x, check_trace=False)
    ways: dict[str, Call] = {
        "sample": lambda: bbalpha.sample(model, x, K, masks="shared", seed=seed),
        "predict": lambda: predict(model, x, n_passes=K, masks="shared", seed=seed, progress=False),
        "K rows": lambda: model(several),
        "frozen": lambda: frozen(x),
        "frozen, summary": lambda: whole(x),
        "frozen, TorchScript": lambda: traced(x),
        "frozen, onnxruntime": in_onnxruntime(frozen, x),
    }
    with torch.no_grad():
        times = interleaved(ways, config.rounds)
    unit = times["sample"]
    shared = {"work": "latency", "model": name, "n_passes": K, "batch": 1, "rounds": config.rounds}
    return [
        shared
        | {
            "way": way,
            "ratio": round(min(t) / min(unit), 3),
            "ratio_median": round(statistics.median(t) / statistics.median(unit), 3),
            "ms": round(1e3 * min(t), 3),
        }
        for way, t in times.items()
    ]


def in_onnxruntime(frozen: nn.Module, x: Tensor) -> Call:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        freezing.export_onnx(frozen, f"{folder}/net.onnx", x)
        session = onnxruntime.InferenceSession(f"{folder}/net.onnx", options, providers=["CPUExecutionProvider"])
    given = {"x": x.numpy()}
    return lambda: session.run(None, given)


def interleaved(ways: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round, after a few to warm up."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(rounds + 5):
        for way, call in ways.items():
            call()
            start = time.process_time()
            call()
            if i >= 5:
                times[way].append(time.process_time() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=Config.rounds)
    parser.add_argument("--out", type=Path, default=Path("results/freezing_speed.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    start, config, rows = time.perf_counter(), Config(rounds=args.rounds), []
    for name in MODELS:
        rows += (found := run(config, name))
        for row in found:
            print(f"{name:36} {row['way']:22} {row['ms']:8.3f} ms {row['ratio']:6.2f} (median {row['ratio_median']})")
    command = f"python benchmarks/freezing.py --rounds {args.rounds}"
    results.write(args.out, command=command, seed=config.seed, seconds=time.perf_counter() - start, rows=rows)


if __name__ == "__main__":
    main()
