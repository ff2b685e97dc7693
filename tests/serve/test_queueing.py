"""The simulation of the queue does what the batcher does, and what queueing theory says; costs are found again."""

import asyncio
import random
import sys
import threading
from pathlib import Path

import pytest

from bbalpha.serve.batching import Batcher
from bbalpha.serve.limits import Limits
from bbalpha.serve.metrics import Metrics

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from costs import Cost, Machine, fitted, wire
from queueing import Request, Service, closed, open_arrivals, scripted


def script(seed, n=40):
    """Requests at random, of two kinds, with one to four rows."""
    draws, time, found = random.Random(seed), 0.0, []
    for i in range(n):
        time += draws.expovariate(0.8)
        first = 100 * i
        found.append(Request(draws.choice("ab"), range(first, first + draws.randint(1, 4)), time))
    return found


async def batches_of_the_batcher(requests, service, limits):
    """The rows of every batch, in the time of the script: work ends when the script says so."""
    batcher, seen, end = Batcher("m", limits, Metrics()), [], threading.Semaphore(0)

    def work(rows):
        seen.append(rows)
        end.acquire()
        return rows

    tasks, ends, done = [], None, 0
    arrivals = list(requests)
    while arrivals or ends is not None:
        if ends is None or (arrivals and arrivals[0].sent < ends):
            request = arrivals.pop(0)
            now = request.sent
            tasks.append(asyncio.ensure_future(batcher.ask(request.key, request.rows, work)))
            await asyncio.sleep(0)
        else:
            now, done, ends = ends, done + 1, None
            left = len(batcher)
            end.release()
            while batcher._working and len(seen) == done and left:
                await asyncio.sleep(0.001)
            while not left and batcher._working:
                await asyncio.sleep(0.001)
        if batcher._working and ends is None:
            while len(seen) == done:
                await asyncio.sleep(0.001)
            ends = now + service.seconds(len(seen[-1]))
    await asyncio.gather(*tasks)
    batcher.close()
    return seen


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_requests_go_together_as_in_the_service(seed):
    service, limits = Service(base=2.1, row=0.301), Limits(batch_rows=7, batch_requests=3)
    requests = script(seed)
    real = asyncio.run(asyncio.wait_for(batches_of_the_batcher(requests, service, limits), 60))
    found = scripted(service, requests, limits)
    assert [[row for job in batch for row in job.rows] for batch in found.batches] == real
    assert max(map(len, found.batches)) > 1
    assert sum(map(len, found.batches)) == len(requests)


@pytest.mark.parametrize("clients", [1, 7, 50])
def test_of_those_who_wait_for_their_answer_none_is_lost(clients):
    found = closed(Service(base=0.01, row=0.002), clients=clients, seconds=20)
    mean = sum(found.latencies) / len(found.latencies)
    assert found.per_second * mean == pytest.approx(clients, rel=0.02)  # Little's law
    assert found.mean_batch == pytest.approx(max(1, clients), rel=0.5)
    alone = closed(Service(base=0.01, row=0.002), clients=clients, seconds=20, limits=Limits(batch_requests=1))
    assert alone.per_second == pytest.approx(1 / 0.012, rel=0.01)
    assert alone.mean_batch == 1


def test_one_by_one_it_waits_as_long_as_theory_says():
    seconds, rate = 0.01, 60.0
    found = open_arrivals(Service(base=seconds, row=0), rate=rate, seconds=600, limits=Limits(batch_requests=1))
    load = rate * seconds
    expected = seconds + load * seconds / (2 * (1 - load))  # Pollaczek and Khinchine, service of one length
    assert sum(found.latencies) / len(found.latencies) == pytest.approx(expected, rel=0.04)
    together = open_arrivals(Service(base=seconds, row=0), rate=rate, seconds=600)
    assert sum(together.latencies) < sum(found.latencies)


def test_a_full_queue_refuses_and_reading_takes_its_turn():
    few = open_arrivals(Service(base=0.1, row=0), rate=500, seconds=5, limits=Limits(max_queue=8, batch_requests=4))
    assert few.refused > 1000
    assert few.ms(99) < 1e3 * 0.1 * (8 / 4 + 2)
    assert closed(Service(base=0.01, row=0, request=0.005), clients=1, seconds=9).ms(50) == pytest.approx(15)
    assert closed(Service(base=0.001, row=0, request=0.005), clients=50, seconds=9).per_second <= 201


def test_a_cost_is_found_again_and_more_ranks_talk_more():
    cost = Cost(base=1e-3, weight=4e-9, operation=2e-11, unit=3e-9)
    cases = [(K, N, w, u) for K in (1, 16) for N in (32, 256) for w, u in ((1e4, 128), (1e6, 2048))]
    rows = [
        {"work": "train", "n_passes": K, "batch": N, "weights": w, "units": u, "keep": 1.0, "moved": w}
        for K, N, w, u in cases
    ]
    found = fitted([row | {"seconds": cost.seconds(row)} for row in rows])
    for name, value in vars(cost).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-4)
    machine = Machine(flops=1e14, bandwidth=2.5e10, latency=1e-5, memory=8e10)
    steps = [machine.step(10, 256, 1e8, ranks, split="both") for ranks in (1, 8, 1000)]
    assert steps[0]["efficiency"] == pytest.approx(1)
    assert steps[0]["talk"] == wire(1e8, 1) == 0
    assert steps[0]["efficiency"] > steps[1]["efficiency"] > steps[2]["efficiency"]
    by_rows, by_both = (machine.step(10, 256, 1e8, 1000, split=s)["compute"] for s in ("rows", "both"))
    assert by_both < by_rows
