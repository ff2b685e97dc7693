"""What one request may ask for, and how a request is refused."""

from dataclasses import dataclass, fields

from bbalpha.checks import check_count, check_number

WAIT = 1  # seconds after which to try again where too much is going on


@dataclass(frozen=True)
class Limits:
    """What a service takes on.

    Attributes:
        max_rows: Rows of a request.
        max_passes: Passes of a request.
        max_work: Rows times passes of a request.
        max_body: Bytes of a request.
        max_bytes: Bytes of all requests under way.
        max_connections: Clients at once.
        max_queue: Requests that may wait for a model.
        batch_rows: Rows of all requests that are answered together; a request that has more goes alone.
        batch_requests: Requests that are answered together; 1 answers each by itself.
        seconds: How long a request may take, how long its head and its body may be under way, and how long its answer.

    >>> Limits(max_rows=100).max_rows
    100
    """

    max_rows: int = 10_000
    max_passes: int = 1000
    max_work: int = 1_000_000
    max_body: int = 4_000_000
    max_bytes: int = 64_000_000
    max_connections: int = 400
    max_queue: int = 256
    batch_rows: int = 1000
    batch_requests: int = 256
    seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "seconds":
                check_count(field.name, getattr(self, field.name))
        check_number("seconds", self.seconds, above=0)


class RefusedError(Exception):
    """A request that is not answered.

    Args:
        status: Of HTTP.
        sentence: Why, and what to do.
        wait: Seconds after which to try again, where that may help.
    """

    def __init__(self, status: int, sentence: str, *, wait: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.wait = status, sentence, wait
