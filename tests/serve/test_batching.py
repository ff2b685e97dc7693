"""Who waits together is answered together, in bounded numbers; nobody suffers for another."""

import asyncio
import threading

import pytest

from bbalpha.serve.batching import Batcher
from bbalpha.serve.limits import Limits, RefusedError
from bbalpha.serve.metrics import Metrics


class Worker:
    """Squares numbers, notes what it is given, and can be held up."""

    def __init__(self):
        self.calls, self.open = [], threading.Event()
        self.open.set()

    def __call__(self, rows):
        self.open.wait(10)
        self.calls.append(list(rows))
        if -1 in rows:
            raise ValueError("a row must not be -1.")
        if -2 in rows:
            raise RuntimeError("broken")
        return [row**2 for row in rows]


async def all_of(batcher, worker, asked):
    """Ask while the first is held up: all others wait."""
    worker.open.clear()
    tasks = [asyncio.ensure_future(batcher.ask(*one, worker)) for one in asked]
    await asyncio.sleep(0.05)
    worker.open.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def run(asked, **limits):
    worker, batcher = Worker(), Batcher("m", Limits(**limits), Metrics())
    try:
        found = asyncio.run(all_of(batcher, worker, asked))
    finally:
        batcher.close()
    return found, worker.calls


def test_what_waits_goes_together_and_each_gets_its_own():
    found, calls = run([("k", [i, i + 1]) for i in range(10)])
    assert found == [[i**2, (i + 1) ** 2] for i in range(10)]
    assert calls == [[0, 1], [n for i in range(1, 10) for n in (i, i + 1)]]


def test_other_keys_go_apart_in_their_order():
    found, calls = run([("a", [0]), ("a", [1]), ("b", [2]), ("a", [3]), ("b", [4])])
    assert found == [[0], [1], [4], [9], [16]]
    assert calls == [[0], [1, 3], [2, 4]]


def test_a_batch_has_no_more_rows_and_requests_than_allowed():
    _, calls = run([("k", [i] * 3) for i in range(7)], batch_rows=7)
    assert [len(call) for call in calls] == [3, 6, 6, 6]
    _, calls = run([("k", [i] * n) for i, n in enumerate((1, 9, 2, 2))], batch_rows=4)
    assert [len(call) for call in calls] == [1, 9, 4]
    _, calls = run([("k", [i]) for i in range(7)], batch_requests=4)
    assert [len(call) for call in calls] == [1, 4, 2]
    _, calls = run([("k", [i]) for i in range(4)], batch_requests=1)
    assert [len(call) for call in calls] == [1, 1, 1, 1]


def test_one_bad_row_hurts_no_other_request():
    found, _ = run([("k", [i]) for i in (0, 1, -1, 2)])
    assert [found[0], found[1], found[3]] == [[0], [1], [4]]
    assert isinstance(found[2], ValueError)


def test_what_breaks_is_told_to_all_and_the_worker_goes_on():
    worker, batcher = Worker(), Batcher("m", Limits(), Metrics())

    async def both():
        found = await all_of(batcher, worker, [("k", [0]), ("k", [-2]), ("k", [3])])
        return found, await batcher.ask("k", [5], worker)

    found, after = asyncio.run(both())
    assert found[0] == [0]
    assert all(isinstance(one, RuntimeError) for one in found[1:])
    assert after == [25]


def test_a_full_queue_sends_away():
    found, calls = run([("k", [i]) for i in range(6)], max_queue=2)
    assert found[:3] == [[0], [1], [4]]
    assert [(one.status, one.wait) for one in found[3:]] == [(429, 1)] * 3
    assert len(calls) == 2


def test_who_waited_too_long_is_not_answered_and_costs_nothing():
    worker, batcher = Worker(), Batcher("m", Limits(seconds=0.05), Metrics())

    async def late():
        worker.open.clear()
        first = asyncio.ensure_future(batcher.ask("k", [0], worker))
        second = asyncio.ensure_future(batcher.ask("k", [1], worker))
        found = await asyncio.gather(first, second, return_exceptions=True)
        assert len(batcher) == 0
        worker.open.set()
        await asyncio.sleep(0.05)
        return found, await batcher.ask("k", [2], worker)

    found, after = asyncio.run(late())
    assert [one.status for one in found] == [504, 504]
    assert after == [4]
    assert worker.calls == [[0], [2]]


def test_batches_are_counted():
    worker, metrics = Worker(), Metrics()
    asyncio.run(all_of(Batcher("m", Limits(), metrics), worker, [("k", [i, i]) for i in range(5)]))
    text = metrics.text({})
    assert 'bbalpha_batch_requests_count{model="m"} 2' in text
    assert 'bbalpha_batch_requests_sum{model="m"} 5' in text
    assert 'bbalpha_rows_total{model="m"} 10' in text


@pytest.mark.parametrize("limits", [{"max_rows": 0}, {"max_body": -1}, {"max_queue": 1.5}, {"seconds": 0}])
def test_limits_must_be_limits(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)


def test_a_refusal_says_why():
    assert str(RefusedError(429, "Too many.", wait=1)) == "Too many."
