"""`serve`: run the service until it is told to end, and end well."""

import asyncio
import gc
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

from bbalpha.serve.limits import Limits

if TYPE_CHECKING:
    import uvicorn

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_GRACE = 1.0  # seconds in which /ready says that the end is near, and new connections are still taken


def serve(
    paths: Sequence[str | os.PathLike[str]],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    api_key: str | None = None,
    audit: str | os.PathLike[str] | None = None,
) -> None:
    """Serve the models in folders until SIGTERM or SIGINT comes; then finish what is under way, and return.

    Args:
        paths: Folders of `bbalpha fit`, of an estimator's `save`, or of a network for images.
        host: Where to listen; others than this machine reach it only if told so.
        port: 0 takes a free one.
        limits: Of every request.
        api_key: What the header X-API-Key must hold, if given.
        audit: A file that gets a line of JSON for every POST.
    """
    try:
        from bbalpha.serve.app import create_app
        from bbalpha.serve.models import load_models
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "bbalpha":
            raise
        raise ImportError(f"The service needs {error.name}: pip install 'bbalpha[serve]'.") from error
    import torch

    torch.set_num_threads(1)  # one thread a model; more of them would fight over the cores
    limits = Limits() if limits is None else limits
    app = create_app(load_models(paths), limits, api_key, audit)
    listening = _listening(host, port)
    lines = [f"bbalpha serves {', '.join(app.state.service.models)} at {_address(host, listening)}"]
    lines += [f"the page is at {_address(host, listening)}/ ; stop with Ctrl-C"]
    if host not in _LOOPBACK and api_key is None:
        lines += ["no key is set: whoever reaches this address may ask"]
    gc.collect()
    gc.freeze()  # a body of a million small lists would have all that is there looked through again and again: 3 s
    try:
        _server(app, limits, lines).run(sockets=[listening])
    finally:
        gc.unfreeze()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # TCP by name: asyncio sends small answers at once only where a socket says so, else they wait for 40 ms
        with ExitStack() as stack:
            found = stack.enter_context(socket.socket(family, kind, socket.IPPROTO_TCP))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(2048)
            stack.pop_all()  # it stays open
    except (OSError, OverflowError) as error:
        raise OSError(f"Cannot listen at {host} port {port}: {error}. Choose another with --port or --host.") from error
    return found


def _address(host: str, listening: socket.socket) -> str:
    port = listening.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _server(app: Any, limits: Limits, lines: Sequence[str]) -> "uvicorn.Server":
    import uvicorn

    from bbalpha.serve.connection import KEEP_ALIVE, Connection, connections

    traffic = app.state.service.traffic

    class Server(uvicorn.Server):
        """Says where it is, and at a signal drains before it ends."""

        ends_at = float("inf")

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # not noted as uvicorn does, which would raise the signal again in the end: ours is an end with code 0
            if traffic.draining:
                self.should_exit = self.force_exit = True
            traffic.draining, self.ends_at = True, time.monotonic() + _GRACE

        async def on_tick(self, counter: int) -> bool:
            self.should_exit = self.should_exit or time.monotonic() >= self.ends_at
            if counter % 5 == 0:  # every half second
                now = asyncio.get_running_loop().time()
                for connection in [c for c in self.server_state.connections if isinstance(c, Connection)]:
                    connection.check(now)
            return await super().on_tick(counter)

    config = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="on", server_header=False, ws="none",
        http=connections(limits), proxy_headers=False,
        timeout_graceful_shutdown=int(limits.seconds) + 1, timeout_keep_alive=KEEP_ALIVE,
    )  # fmt: skip
    return Server(config)
