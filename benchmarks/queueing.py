"""The queue of a served model as discrete events, by the rule of `bbalpha.serve.batching` itself.

    found = closed(Service(base=0.01, row=0.001), clients=50, seconds=60)       # each sends, waits, and sends again
    found = open_arrivals(Service(base=0.01, row=0.001), rate=200, seconds=60)      # from many, at random
    found.per_second, found.ms(99), found.refused

One thread works; who finds it idle goes at once; what comes meanwhile forms the next batch (`taken`, with its limits);
a queue that is full refuses. A batch of n rows takes base + row n seconds. Reading and writing of requests takes
`request` seconds each before a request waits: they overlap with the work, but not with one another.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from bbalpha.serve.batching import taken
from bbalpha.serve.limits import Limits


@dataclass(frozen=True)
class Service:
    """Seconds of a batch, of each of its rows, and of reading and writing a request."""

    base: float
    row: float
    request: float = 0.0

    def seconds(self, rows: int) -> float:
        return self.base + self.row * rows


@dataclass(frozen=True, eq=False)
class Request:
    key: Any
    rows: range
    sent: float
    client: int = 0


@dataclass
class Found:
    """What happened: the latencies of requests, the sizes of batches, who was refused."""

    seconds: float
    latencies: list[float] = field(default_factory=list)
    batches: list[list[Request]] = field(default_factory=list)
    refused: int = 0

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def mean_batch(self) -> float:
        return sum(map(len, self.batches)) / max(1, len(self.batches))

    def ms(self, percent: int) -> float:
        ordered = sorted(self.latencies)
        return 1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


class Simulation:
    """Events in the order of their time."""

    def __init__(self, service: Service, limits: Limits, seconds: float, warm_up: float) -> None:
        self.service, self.limits, self.end, self.warm_up = service, limits, warm_up + seconds, warm_up
        self.found, self.now, self.working, self.desk_free = Found(seconds), 0.0, False, 0.0
        self.waiting: deque[Request] = deque()
        self.answered: Callable[[Request], None] = lambda request: None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._number), event))

    def run(self) -> Found:
        while self._events and self._events[0][0] < self.end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.found

    def send(self, request: Request) -> None:
        """A request is read, when those before it have been, and waits then."""
        self.desk_free = max(self.now, self.desk_free) + self.service.request
        self.at(self.desk_free, lambda: self._arrive(request))

    def _arrive(self, request: Request) -> None:
        if len(self.waiting) >= self.limits.max_queue:
            self.found.refused += 1
            return
        self.waiting.append(request)
        if not self.working:
            self._start()

    def _start(self) -> None:
        jobs, self.waiting = taken(self.waiting, self.limits)
        self.working = bool(jobs)
        if jobs:
            done = self.now + self.service.seconds(sum(len(job.rows) for job in jobs))
            self.at(done, lambda: self._ended(jobs))

    def _ended(self, jobs: list[Request]) -> None:
        if self.now >= self.warm_up:
            self.found.batches.append(jobs)
            self.found.latencies += [self.now - job.sent for job in jobs]
        self._start()
        for job in jobs:
            self.answered(job)


def closed(
    service: Service, *, clients: int, seconds: float, limits: Limits | None = None, warm_up: float = 1.0
) -> Found:
    """So many clients with one row each, who send again when they have their answer."""
    s = Simulation(service, limits or Limits(), seconds, warm_up)
    s.answered = lambda request: s.send(Request("rows", range(1), s.now, request.client))
    for client in range(clients):
        s.at(client * 1e-4, lambda client=client: s.send(Request("rows", range(1), s.now, client)))
    return s.run()


def open_arrivals(
    service: Service, *, rate: float, seconds: float, limits: Limits | None = None, seed: int = 0, warm_up: float = 1.0
) -> Found:
    """Requests of one row from many, at random: so many a second."""
    s, draws = Simulation(service, limits or Limits(), seconds, warm_up), random.Random(seed)

    def next_one() -> None:
        s.send(Request("rows", range(1), s.now))
        s.at(s.now + draws.expovariate(rate), next_one)

    s.at(draws.expovariate(rate), next_one)
    return s.run()


def scripted(service: Service, requests: list[Request], limits: Limits) -> Found:
    """These requests, at the times at which they were sent."""
    s = Simulation(service, limits, float("inf"), 0.0)
    for request in requests:
        s.at(request.sent, lambda request=request: s.send(request))
    return s.run()
