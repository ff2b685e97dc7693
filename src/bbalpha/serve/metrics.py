"""What a service did, in the text form that Prometheus reads.

metrics = Metrics()
metrics.request("/predict", 200, seconds=0.01)
metrics.text({"bbalpha_queue_length": {"cars": 3}})
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_HELP = {
    "bbalpha_requests_total": ("counter", "Requests by route and status."),
    "bbalpha_request_seconds": ("histogram", "Time from the first byte of a request to the last of its answer."),
    "bbalpha_batch_requests": ("histogram", "Requests that were answered by one Monte Carlo pass."),
    "bbalpha_rows_total": ("counter", "Rows that were answered."),
    "bbalpha_queue_length": ("gauge", "Requests that wait."),
    "bbalpha_under_way": ("gauge", "Requests that are being answered, those that wait too."),
    "bbalpha_draining": ("gauge", "1 while the service is about to end."),
}


@dataclass
class Histogram:
    """Counts of values by the first bound that they do not exceed.

    Attributes:
        bounds: Rising; what is above all of them has a place of its own.
        counts: By bound.
        total: The sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> list[str]:
        """As Prometheus has it: counts up to each bound."""
        found, below = [], 0
        for bound, count in zip((*map(_number, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            found.append(f'{name}_bucket{{{labels},le="{bound}"}} {below}')
        return [*found, f"{name}_sum{{{labels}}} {_number(self.total)}", f"{name}_count{{{labels}}} {below}"]


class Metrics:
    """Counters of one service; touched by the thread of the event loop alone."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, Histogram] = {}
        self._batches: dict[str, Histogram] = {}
        self._rows: Counter[str] = Counter()

    def request(self, route: str, status: int, *, seconds: float) -> None:
        """Count a request that was answered."""
        self._requests[route, status] += 1
        self._seconds.setdefault(route, Histogram(_SECONDS)).add(seconds)

    def batch(self, model: str, *, requests: int, rows: int) -> None:
        """Count requests that were answered together."""
        self._batches.setdefault(model, Histogram(_REQUESTS)).add(requests)
        self._rows[model] += rows

    def text(self, gauges: Mapping[str, float | Mapping[str, float]]) -> str:
        """All of it, with what is now: a number, or one by model, for each name."""
        found: dict[str, list[str]] = {name: [] for name in _HELP}
        for (route, status), count in sorted(self._requests.items()):
            found["bbalpha_requests_total"].append(
                f'bbalpha_requests_total{{route="{_label(route)}",status="{status}"}} {count}'
            )
        for name, label, histograms in (
            ("bbalpha_request_seconds", "route", self._seconds),
            ("bbalpha_batch_requests", "model", self._batches),
        ):
            for key, histogram in sorted(histograms.items()):
                found[name] += histogram.lines(name, f'{label}="{_label(key)}"')
        for model, count in sorted(self._rows.items()):
            found["bbalpha_rows_total"].append(f'bbalpha_rows_total{{model="{_label(model)}"}} {count}')
        for name, value in gauges.items():
            by_model = value.items() if isinstance(value, Mapping) else ()
            found[name] += [f'{name}{{model="{_label(model)}"}} {_number(v)}' for model, v in by_model]
            found[name] += [] if isinstance(value, Mapping) else [f"{name} {_number(value)}"]
        lines = [
            line
            for name, (kind, about) in _HELP.items()
            for line in (f"# HELP {name} {about}", f"# TYPE {name} {kind}", *found[name])
        ]
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.9g}"


def _label(text: str) -> str:
    r"""A value between quotes.

    >>> _label('a"b')
    'a\\"b'
    """
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
