"""What a step, a prediction, an all-reduce and a queue take, and what that comes to at scale -> results/scale.json.

    python benchmarks/scale.py              # a few minutes of one core

Steps and predictions are told in CPU seconds of one thread, the least of several, so that a busy machine counts less.
The formulas of `costs.py` are fitted to K = 1 and 16; K = 4 is held out and shows how far off they are.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from costs import Machine, fitted, memory
from queueing import Service, closed, open_arrivals
from torch import multiprocessing, nn

import bbalpha
from bbalpha.experiments import results
from bbalpha.serve.batching import Batcher
from bbalpha.serve.limits import Limits
from bbalpha.serve.metrics import Metrics

GPU = Machine(flops=1e14, bandwidth=2.5e10, latency=1e-5, memory=80e9)
DAY = 86_400.0


@dataclass(frozen=True)
class Config:
    widths: tuple[int, ...] = (64, 256, 768)
    passes: tuple[int, ...] = (1, 4, 16)
    batches: tuple[int, ...] = (32, 256)
    ranks: tuple[int, ...] = (2, 4)
    repeats: int = 3
    turn: float = 5.0
    seed: int = 0


def run(config: Config, ledger: results.Ledger) -> None:
    torch.set_num_threads(1)
    for measure in (steps, messages, queues, extrapolated):
        start = time.perf_counter()
        found = measure(config, ledger.rows)
        ledger.add(found, seconds=time.perf_counter() - start)
        for row in found:
            print(json.dumps(row), flush=True)


# ------------------------------------------------------------------------------ steps and predictions


def steps(config: Config, _: list[results.Row]) -> list[results.Row]:
    """CPU seconds and bytes for backward over K, N, width and kind of masks; and what the formulas say."""
    rows = [
        measured(config, work, masks, width, K, N)
        for work in ("train", "predict")
        for masks in ("per_example", "shared")
        for width in config.widths
        for K in config.passes
        for N in config.batches
    ]
    held = sorted(config.passes)[1:-1]
    costs = []
    for work in ("train", "predict"):
        for masks in ("per_example", "shared"):
            own = [r for r in rows if (r["work"], r["masks"]) == (work, masks)]
            cost = fitted([r for r in own if r["n_passes"] not in held])
            for r in own:
                r["formula"] = cost.seconds(r)
                r["held_out"] = r["n_passes"] in held
            off = sorted(abs(r["formula"] / r["seconds"] - 1) for r in own if r["held_out"])
            costs.append({"work": "cost", "of": work, "masks": masks, **asdict(cost), "off_median": off[len(off) // 2],
                          "off_worst": off[-1]})  # fmt: skip
    return [*rows, *costs]


def measured(config: Config, work: str, masks: str, width: int, K: int, N: int) -> results.Row:
    torch.manual_seed(config.seed)
    net = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(width, 10),
    )  # fmt: skip
    x, y = torch.randn(N, width), torch.randint(10, (N,))
    weights, saved = sum(p.numel() for p in net.parameters()), [0]

    def train() -> None:
        outputs = bbalpha.sample(net, x, n_passes=K, masks=masks, seed=config.seed)
        bbalpha.cross_entropy(outputs, y, 0.5).backward()

    def predict() -> None:
        bbalpha.predict_classification(net, x, n_passes=K, masks=masks, seed=config.seed, progress=False)

    seconds = least({"train": train, "predict": predict}[work], config.repeats)
    if work == "train":
        seen: set[int] = set()

        def note(t: torch.Tensor) -> torch.Tensor:
            if t.data_ptr() not in seen and not isinstance(t, nn.Parameter):
                seen.add(t.data_ptr())
                saved[0] += t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            train()
    # of the three products the first has no dropped inputs, the second both, the third its inputs
    keep = 1.0 if masks == "per_example" else (0.5 * width + 0.25 * width + 5) / (2 * width + 10)
    return {
        "work": work, "masks": masks, "width": width, "n_passes": K, "batch": N, "weights": weights,
        "units": 2 * width, "keep": keep, "moved": weights * (K * keep if masks == "shared" else 1),
        "seconds": seconds, "saved_bytes": saved[0],
        "memory_formula": memory(K, N, 0, 2 * width) if work == "train" else 0,
    }  # fmt: skip


def least(call: Callable[[], None], repeats: int) -> float:
    """CPU seconds of the fastest of several calls."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


# ------------------------------------------------------------------------------ messages


def messages(config: Config, _: list[results.Row]) -> list[results.Row]:
    """Seconds of an all-reduce between processes of this machine, by gloo."""
    found = []
    for ranks in config.ranks:
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(_reduce, args=(ranks, f"file://{folder}/store", queue), nprocs=ranks)
        found += queue.get()
    return found


def _reduce(rank: int, ranks: int, store: str, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    rows = []
    for n in (1, 10_000, 100_000, 1_000_000, 4_000_000):
        t, times = torch.ones(n), []
        for _ in range(8):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(t)
            times.append(time.perf_counter() - start)
        rows.append({"work": "all-reduce", "ranks": ranks, "bytes": 4 * n, "seconds": min(times)})
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------ queues


def queues(config: Config, _: list[results.Row]) -> list[results.Row]:
    """The real batcher around work of a known length, and its simulation; the load of results/serve.json likewise."""
    service, found = Service(base=0.02, row=0.001), []
    for clients in (1, 10, 50):
        limits = Limits()
        seen, batches = asyncio.run(_real(service, clients, config.turn, limits))
        simulated = closed(service, clients=clients, seconds=60, limits=limits)
        ordered = sorted(seen)
        found.append({
            "work": "queue", "way": "batcher", "clients": clients, "per_second": len(seen) / config.turn,
            "ms_p50": 1e3 * ordered[len(seen) // 2], "mean_batch": len(seen) / batches,
        })  # fmt: skip
        found.append({"work": "queue", "way": "simulated", "clients": clients, **_told(simulated)})
    return found + served()


async def _real(service: Service, clients: int, seconds: float, limits: Limits) -> tuple[list[float], int]:
    batcher, latencies, batches = Batcher("x", limits, Metrics()), [], [0]

    def work(rows: list[Any]) -> list[Any]:
        batches[0] += 1
        time.sleep(service.seconds(len(rows)))
        return rows

    end = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < end:
            start = time.perf_counter()
            await batcher.ask("rows", [0], work)
            latencies.append(time.perf_counter() - start)

    await asyncio.gather(*(client() for _ in range(clients)))
    batcher.close()
    return latencies, batches[0]


def served() -> list[results.Row]:
    """The service of results/serve.json: two numbers set its simulation, the others are there to be compared."""
    content = results.read(Path(__file__).resolve().parents[1] / "results/serve.json")
    rows = {r["way"]: r for r in content["rows"] if r["work"] == "turns"}
    single, many = rows["one request, one call"], rows["together"]
    service = calibrated(1 / single["requests_per_second"], many["requests_per_second"], many["clients"])
    found = []
    for way, limits in (("together", Limits()), ("one request, one call", Limits(batch_requests=1))):
        r = rows[way]
        simulated = _told(closed(service, clients=r["clients"], seconds=60, limits=limits))
        told = {"per_second": r["requests_per_second"], **{k: r[k] for k in ("ms_p50", "ms_p95", "ms_p99")}}
        found.append({"work": "served", "way": way, "source": "measured", **told})
        found.append({"work": "served", "way": way, "source": "simulated", **asdict(service), **simulated})
    return found


def calibrated(single: float, per_second: float, clients: int) -> Service:
    """The service that takes `single` seconds for a request alone and answers so many a second of so many clients."""
    low, high = 0.0, single
    for _ in range(14):
        row = (low + high) / 2
        service = Service(base=single - row, row=row)
        low, high = (row, high) if closed(service, clients=clients, seconds=8).per_second > per_second else (low, row)
    return service


def _told(found: Any) -> dict[str, float]:
    return {"per_second": found.per_second, "mean_batch": found.mean_batch,
            **{f"ms_p{q}": found.ms(q) for q in (50, 95, 99)}}  # fmt: skip


# ------------------------------------------------------------------------------ at scale


def extrapolated(config: Config, rows: list[results.Row]) -> list[results.Row]:
    """A thousand GPUs, by the formula and the assumptions in `GPU`; 1e9 predictions a day, by what was measured."""
    found = [
        {"work": "gpus", "weights": weights, "ranks": ranks, "batch": batch, "n_passes": 10, "split": split}
        | GPU.step(10, batch, weights, ranks, split=split)
        for weights in (1e6, 1e8, 1e9)
        for ranks in (1, 8, 100, 1000)
        for batch in (256, 65_536)
        for split in ("rows", "passes", "both")
    ]
    rate = 1e9 / DAY
    service = next(Service(r["base"], r["row"]) for r in rows if r["work"] == "served" and r["source"] == "simulated")
    for servers in (4, 8, 16, 24, 32, 64):
        told = open_arrivals(service, rate=rate / servers, seconds=10)
        found.append({"work": "day", "way": "requests", "servers": servers, "refused": told.refused, **_told(told)})
    most = {"batch": max(config.batches), "n_passes": max(config.passes)}
    for r in rows:
        if r["work"] == "predict" and all(r[name] == value for name, value in most.items()):
            own = {name: r[name] for name in ("masks", "width", "n_passes")}
            found.append({"work": "day", "way": "batches", **own, "cores": rate * r["seconds"] / r["batch"]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/scale.json"))
    args = parser.parse_args()
    args.out.unlink(missing_ok=True)
    config = Config()
    run(
        config,
        results.Ledger(
            args.out,
            command="python benchmarks/scale.py",
            seed=config.seed,
            settings=asdict(config) | {"gpu": asdict(GPU)},
        ),
    )


if __name__ == "__main__":
    main()
