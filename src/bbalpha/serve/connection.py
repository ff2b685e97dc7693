"""HTTP on one connection, with an end to every wait, and a sentence for what is no HTTP.

It waits for a head, for who does not take the answer, for what is still sent when the request was refused.

    uvicorn.Config(app, http=connections(limits))
"""

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from bbalpha.serve.limits import Limits

KEEP_ALIVE = 75  # seconds; longer than proxies keep a connection: they shall be the ones to close it
_LINGER = 2.0  # seconds in which a client that was refused may send on, so that it comes to read why


class Connection(H11Protocol):
    """A connection that keeps to `limits`; the server asks each of them to `check` itself from time to time."""

    limits: Limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Take a client, if there are not too many."""
        super().connection_made(transport)
        self._over, self._unread = False, 0
        self._waits: tuple[str, object] = ("head", None)
        self._since = self.loop.time()
        most = self.limits.max_connections
        if len(self.connections) > 2 * most:
            transport.abort()
        elif len(self.connections) > most:
            self._hang_up(503, f"There are {most} connections already; try again in 1 s, or another copy.")

    def data_received(self, data: bytes) -> None:
        """Read on; what comes behind a refusal is thrown away, and not without end."""
        if not self._over:
            super().data_received(data)
        self._unread = self._unread + len(data) if self._waiting() == "rest" else 0
        if self._unread > 4 * self.limits.max_body:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Of uvicorn, for what h11 cannot read."""
        self._hang_up(400, "The request must be HTTP/1.1 with a head of at most 16384 bytes; it cannot be read.")

    def check(self, now: float) -> None:
        """Leave a client that has let the service wait for too long."""
        kind = self._waiting()
        if (kind, self.cycle) != self._waits:
            self._waits, self._since = (kind, self.cycle), now
        seconds = self.limits.seconds
        most = {"answer": seconds, "head": seconds, "rest": _LINGER, "idle": KEEP_ALIVE + 5.0}
        if now - self._since < most.get(kind, float("inf")) or (kind != "answer" and self.transport.is_closing()):
            return
        if kind == "head" and self.conn.trailing_data[0]:
            self._hang_up(408, f"The head of the request must be sent within {seconds:g} s; send it again.")
        else:
            self.transport.abort()

    def _waiting(self) -> str:
        """What for: answer (to be taken), rest (of what was refused), work (ours), head, or idle."""
        if self.transport.get_write_buffer_size():
            return "answer"
        answered = self.cycle is None or self.cycle.response_complete
        if self._over or (answered and self.conn.their_state is h11.SEND_BODY):
            return "rest"
        if not answered:
            return "work"
        return "head" if self.cycle is None or self.conn.trailing_data[0] else "idle"

    def _hang_up(self, status: int, sentence: str) -> None:
        """Say why, if nothing was said yet, and no more; the client may read it before the connection is closed."""
        state, method = self.conn.our_state, None
        if self.cycle is not None and not self.cycle.response_complete:
            method = self.scope["method"]
            self.cycle.disconnected = True  # nobody listens to what the application may say now
            self.cycle.message_event.set()
        if state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": sentence}).encode()
            head = h11.Response(
                status_code=status, reason={400: b"Bad Request", 408: b"Request Timeout"}.get(status, b""),
                headers=[
                    ("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close"),
                    ("X-Content-Type-Options", "nosniff"), *([("Retry-After", "1")] if status == 503 else []),
                ],
            )  # fmt: skip
            for event in (head, *([] if method == "HEAD" else [h11.Data(data=body)]), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._over = True
        if self.transport.can_write_eof():
            self.transport.write_eof()


def connections(limits: Limits) -> type[Connection]:
    """The class of the connections of one server."""
    return type("BoundedConnection", (Connection,), {"limits": limits})
