"""Requests that wait for one model, answered together: one worker thread a model, one Monte Carlo pass a batch.

Nobody waits for company: a request that finds the model idle goes at once, and what comes while it works forms the next
batch. All that is here happens in the thread of the event loop, but for the work itself, so there is nothing to lock.

    batcher = Batcher("cars", limits, metrics)
    answers = await batcher.ask(("predict", 100, 1, 0.9), rows, work)      # work: rows of a batch -> their answers
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from bbalpha.serve.limits import WAIT, Limits, RefusedError
from bbalpha.serve.metrics import Metrics

Work = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, eq=False)
class _Job:
    """One request.

    Attributes:
        key: Requests of one key may be answered together.
        rows: Checked.
        work: What answers them, the same for all of one key.
        answers: Of its rows, one day.
    """

    key: Hashable
    rows: Sequence[Any]
    work: Work
    answers: asyncio.Future[list[Any]]


class _Waits(Protocol):
    """What can be taken."""

    @property
    def key(self) -> Hashable: ...

    @property
    def rows(self) -> Sequence[Any]: ...


_J = TypeVar("_J", bound=_Waits)


class Batcher:
    """The queue of one model and the thread that works it off.

    Args:
        name: Of the model.
        limits: Rows and requests in a batch, requests in the queue, seconds.
        metrics: Where batches are counted.
    """

    def __init__(self, name: str, limits: Limits, metrics: Metrics) -> None:
        self.name, self._limits, self._metrics = name, limits, metrics
        self._waiting: deque[_Job] = deque()
        self._working = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"bbalpha-{name}")

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether another request would be refused."""
        return len(self._waiting) >= self._limits.max_queue

    async def ask(self, key: Hashable, rows: Sequence[Any], work: Work) -> list[Any]:
        """The answers of `work` to the rows, one each, when their turn has come.

        Raises:
            RefusedError: 429 if too many wait already, 504 if it takes too long.
            ValueError: What `work` raises for these rows alone.
        """
        if self.full:
            raise RefusedError(
                429, f"Too many requests wait for {self.name!r}; try again in {WAIT} s, or send fewer.", wait=WAIT
            )
        job = _Job(key, rows, work, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if not self._working:
            self._start()
        try:
            return await asyncio.wait_for(job.answers, self._limits.seconds)
        except TimeoutError as error:
            late = f"The answer took longer than {self._limits.seconds:g} s; ask for fewer rows or passes."
            raise RefusedError(504, late) from error
        finally:
            if job.answers.cancelled() and job in self._waiting:  # it takes no place that another could have
                self._waiting.remove(job)

    def close(self) -> None:
        """Let the thread end when its work is done."""
        self._thread.shutdown(wait=False)

    def _start(self) -> None:
        """Begin with the first request that waits and all that go with it."""
        jobs = self._taken()
        self._working = bool(jobs)
        if jobs:
            batch = asyncio.get_running_loop().run_in_executor(self._thread, together, jobs)
            batch.add_done_callback(lambda done: self._ended(jobs, done))

    def _taken(self) -> list[_Job]:
        """The first that waits and those of its key, as many as may go together; the others stay in their order."""
        jobs, self._waiting = taken(self._waiting, self._limits)
        return jobs

    def _ended(self, jobs: list[_Job], batch: "asyncio.Future[list[list[Any] | ValueError]]") -> None:
        self._metrics.batch(self.name, requests=len(jobs), rows=sum(len(job.rows) for job in jobs))
        error = batch.exception()
        found: Sequence[Any] = [error] * len(jobs) if error is not None else batch.result()
        for job, answers in zip(jobs, found, strict=True):
            if job.answers.done():
                continue
            if isinstance(answers, BaseException):
                job.answers.set_exception(answers)
            else:
                job.answers.set_result(answers)
        self._start()


def taken(waiting: Iterable[_J], limits: Limits) -> tuple[list[_J], deque[_J]]:
    """Of jobs that wait, each with `key` and `rows`: those that go together now, and those that wait on."""
    jobs: list[_J] = []
    others: deque[_J] = deque()
    n_rows = 0
    for job in waiting:
        fits = len(jobs) < limits.batch_requests and n_rows + len(job.rows) <= limits.batch_rows
        if not jobs or (job.key == jobs[0].key and fits):
            jobs.append(job)
            n_rows += len(job.rows)
        else:
            others.append(job)
    return jobs, others


def together(jobs: Sequence[_Job]) -> list[list[Any] | ValueError]:
    """The answers to each request, all of one key, by one call; one by one where a row spoils it for the others."""
    try:
        found = jobs[0].work([row for job in jobs for row in job.rows])
    except ValueError as error:
        if len(jobs) == 1:
            return [error]
        return [alone for job in jobs for alone in together([job])]
    answers, start = [], 0
    for job in jobs:
        answers.append(found[start : start + len(job.rows)])
        start += len(job.rows)
    return [*answers]
