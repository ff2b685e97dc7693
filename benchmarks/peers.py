"""Our zoo of models through the ways people run a dropout model K times -> results/peers.json.

    python benchmarks/peers.py                      # the zoo; a run that was cut off goes on
    python benchmarks/peers.py --speed              # how long a prediction takes -> results/peers_speed.json

The ways: by hand (the model in training mode; only its nn.Dropout modules), baal, torch-uncertainty, lightning-uq-box,
bbalpha. Each runs in a process of its own, so that what one patches or breaks reaches no other, and a process that dies
is an "error" of the model it died at. A peer that is not here is "not installed". To have them all, in an empty
environment:

    pip install torch==2.13.0
    pip install numpy scikit-learn scipy transformers mpmath structlog einops seaborn pandas h5py uncertainty-toolbox \\
        torchmetrics lightning gpytorch
    pip install --no-deps baal torch-uncertainty lightning-uq-box
    pip install --no-deps --editable .

`--no-deps`, as their pins bring a torchvision for another torch. Without one torch-uncertainty and lightning-uq-box do
not import as packages; their MC dropout is one module each, and this is loaded alone.
"""

import argparse
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from peers_verdict import N_PASSES, SEED, Facts, measure, verdict, yardstick
from peers_ways import WAYS, installed, peer, whole
from peers_zoo import CASES, Case

from bbalpha.experiments import results

Row = dict[str, Any]


def run(out: Path, cases: Sequence[Case] = CASES, ways: Sequence[str] = tuple(WAYS)) -> None:
    """All ways with all models; rows that the file has are kept."""
    here = installed()
    imports = {name: next(in_a_child(whole, [name]))[0] for name in here}
    settings = {"peers": here, "imports": imports, "n_passes": N_PASSES}
    ledger = results.Ledger(out, command="python benchmarks/peers.py", seed=SEED, settings=settings)
    for way in ways:
        missing = [case for case in cases if not ledger.has(model=case.name, way=way)]
        if peer(way) not in (None, *here):
            ledger.add([row_of(case, way, "not installed", Facts()) for case in missing], seconds=0.0)
            continue
        for case in missing:
            yardstick(case)  # kept for the children
        for row, seconds in rows_of(way, missing):
            ledger.add([row], seconds=seconds)
            print(f"{way}: {row['model']}: {row['verdict']}", flush=True)


def rows_of(way: str, cases: Sequence[Case]) -> Iterator[tuple[Row, float]]:
    """The rows of one way, from a process of its own; where it dies another takes the rest."""
    left, start = list(cases), time.perf_counter()
    while left:
        for facts, code in in_a_child(partial(measure, name=way), left[:]):
            facts = facts or Facts(error=f"the process ended with {code}")
            yield row_of(left.pop(0), way, verdict(facts), facts), time.perf_counter() - start
            start = time.perf_counter()


def in_a_child(work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[tuple[Any, int | None]]:
    """(what `work` makes of an item, 0) item by item; at the one a process dies at (None, its exit code), and the end.

    The process is a fork: what is imported and computed here is there without being done again.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=send, args=(sender, work, items))
    child.start()
    sender.close()
    for _ in items:
        try:
            yield receiver.recv(), 0
        except EOFError:
            child.join()
            yield None, child.exitcode
            return
    child.join()


def send(sender: Connection, work: Callable[[Any], Any], items: Sequence[Any]) -> None:
    for item in items:
        sender.send(work(item))


def row_of(case: Case, way: str, word: str, facts: Facts) -> Row:
    return {"model": case.name, "kind": case.kind, "way": way, "verdict": word, **asdict(facts)}


def speed(out: Path, rounds: int) -> None:
    """A prediction of 784-1000-1000-1000-10, K = 20, 1,000 rows, by processor time; unit: the bare matrix products."""
    from sites import interleaved

    from engine import case_predict

    shared = {"work": "predict", "model": "3x1000", "n_passes": 20, "batch": 1000, "rounds": rounds}
    start = time.perf_counter()
    rows = [shared | row for row in interleaved(case_predict.ways("3x1000", 20, 1000), rounds)]
    command, seconds = "python benchmarks/peers.py --speed", time.perf_counter() - start
    results.write(out, command=command, seed=SEED, seconds=seconds, rows=rows, settings={"peers": installed()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--speed", action="store_true", help="measure times instead")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if args.speed:
        speed(args.out or Path("results/peers_speed.json"), args.rounds)
    else:
        run(args.out or Path("results/peers.json"))


if __name__ == "__main__":
    main()
