"""What every request goes through on its way in and out: key, size, draining, headers, counting, the audit log."""

import asyncio
import hashlib
import hmac
import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bbalpha.serve.limits import WAIT, Limits, RefusedError
from bbalpha.serve.metrics import Metrics

DRAIN_WAIT = 5  # seconds after which another copy may be there
_OPEN = ("/", "/health", "/ready")
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass
class Traffic:
    """What is going on.

    Attributes:
        under_way: Requests that are being answered.
        held: Bytes of their bodies.
        draining: Whether new ones are sent away, because the service is about to end.
    """

    under_way: int = 0
    held: int = 0
    draining: bool = False
    metrics: Metrics = field(default_factory=Metrics)


@dataclass
class _Seen:
    """Of one request, what is known at its end; no body where it was not read, and how much of it is held."""

    status: int = 500
    held: int = 0
    body: bytes | None = None


class AuditLog:
    """A file with a line of JSON for every POST: what was asked, by its hash, and what became of it; never the rows.

    Args:
        path: The file; lines are put behind those that it has.
    """

    def __init__(self, path: Path) -> None:
        self._file: FileIO = path.open("ab", buffering=0)

    def write(self, scope: Scope, body: bytes | None, status: int) -> None:
        """Put down a request, with the system before its answer goes out; where that fails, none does."""
        asked: dict[str, Any] = scope.get("state", {}).get("asked", {})
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "route": scope["path"][:200],
            "model": None, "rows": None, "n_passes": None, "seed": None, **asked,
            "sha256": None if body is None else hashlib.sha256(body).hexdigest(), "status": status,
        }  # fmt: skip
        self._file.write(json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def refusal(error: RefusedError) -> JSONResponse:
    """The answer to a request that is not answered."""
    headers = {} if error.wait is None else {"Retry-After": str(error.wait)}
    return JSONResponse({"error": error.sentence}, error.status, headers)


class Gate:
    """Middleware of the service."""

    def __init__(
        self, app: ASGIApp, traffic: Traffic, limits: Limits, api_key: str | None = None, audit: AuditLog | None = None
    ) -> None:
        self._app, self._traffic, self._limits, self._audit = app, traffic, limits, audit
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or send it away."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, seen = time.perf_counter(), _Seen()
        log = self._audit if scope["method"] == "POST" else None

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                for name, value in _HEADERS.items():
                    headers[name] = value
                if _told_twice(scope):
                    headers["Connection"] = "close"  # where the next request begins is not known
                if log is not None:
                    log.write(scope, seen.body, message["status"])
                seen.status = message["status"]
            await send(message)

        self._traffic.under_way += 1
        try:
            try:
                self._check(scope)
                if scope["method"] == "POST":
                    seen.body = await self._body(scope, receive, seen)
                    receive = _again(seen.body, receive)
            except RefusedError as error:
                await refusal(error)(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        finally:
            self._traffic.under_way -= 1
            self._traffic.held -= seen.held
            route = getattr(scope.get("route"), "path", "other")
            self._traffic.metrics.request(route, seen.status, seconds=time.perf_counter() - start)

    def _check(self, scope: Scope) -> None:
        if _told_twice(scope):
            raise RefusedError(400, "The request must tell its length once: Content-Length or Transfer-Encoding.")
        if self._key is not None and not (scope["path"] in _OPEN or scope["path"].startswith("/page/")):
            given = dict(scope["headers"]).get(b"x-api-key", b"")
            if not hmac.compare_digest(given, self._key):
                raise RefusedError(401, "The header X-API-Key must hold the key of this service; it does not.")
        if self._traffic.draining and scope["method"] == "POST":
            raise RefusedError(503, "The service is about to end; try another, or this one later.", wait=DRAIN_WAIT)

    async def _body(self, scope: Scope, receive: Receive, seen: _Seen) -> bytes:
        """The whole body, if it is not too large, however its length is told.

        What is somewhat too large is read to its end: who still sends would not see the answer.
        """
        most = self._limits.max_body
        told = Headers(scope=scope).get("content-length", "")
        if told.isdigit() and int(told) > 4 * most:
            raise _too_large(most)
        body, size, more = bytearray(), 0, True
        try:
            async with asyncio.timeout(self._limits.seconds):
                while more and size <= 4 * most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusedError(400, "The request must be sent whole; it was cut off.")
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= most:
                        body += part
                        self._hold(len(part), seen)
                    more = message.get("more_body", False)
        except TimeoutError as error:
            raise RefusedError(
                408, f"The request must be sent within {self._limits.seconds:g} s; send it again."
            ) from error
        if size > most:
            raise _too_large(most)
        return bytes(body)

    def _hold(self, size: int, seen: _Seen) -> None:
        """Count bytes that stay in memory until the request is answered."""
        if self._traffic.held + size > self._limits.max_bytes:
            raise RefusedError(
                429, f"More than {self._limits.max_bytes} bytes of requests are under way; try again in {WAIT} s.",
                wait=WAIT,
            )  # fmt: skip
        self._traffic.held += size
        seen.held += size


def _told_twice(scope: Scope) -> bool:
    """Whether the length of a body is told in two ways: a proxy may go by the other, and see a request in its rest."""
    return {name for name, _ in scope["headers"]} >= {b"content-length", b"transfer-encoding"}


def _too_large(most: int) -> RefusedError:
    return RefusedError(413, f"The body must have at most {most} bytes; it has more. Send the rows in parts.")


def _again(body: bytes, receive: Receive) -> Receive:
    """What gives the body that was read already, and then what comes."""
    given = False

    async def receiving() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receiving
