"""Opening an address of the web: every wait has an end, also where a server sends its answer letter by letter.

A socket's own time limit begins anew with each byte. Here a clock runs from the connection to the last line of the
head, and ends the connection when it is over.
"""

import socket
import threading
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

TIMEOUT = 30.0  # seconds without a byte
HEAD = 60.0  # seconds from the connection to the end of the head of the answer


def opened(url: str, headers: dict[str, str]) -> Any:
    """The answer to a request for `url`, its head read."""
    request = Request(url, headers=headers)  # noqa: S310 - our own addresses; a redirection to a file is refused
    return build_opener(_Http, _Https, _Redirect).open(request, timeout=TIMEOUT)


class _Watched(HTTPConnection):
    """A connection that is ended where the head of the answer takes too long."""

    _late = False

    def getresponse(self) -> HTTPResponse:
        bell = threading.Timer(HEAD, self._end)
        bell.daemon = True
        bell.start()
        try:
            response = super().getresponse()
        finally:
            bell.cancel()
        if self._late:
            response.close()
            raise TimeoutError(f"no whole answer within {HEAD:g} seconds")
        return response

    def _end(self) -> None:
        self._late = True
        with suppress(OSError, AttributeError):  # it is gone already
            self.sock.shutdown(socket.SHUT_RDWR)


class _WatchedTls(_Watched, HTTPSConnection):
    """The same, encrypted."""


class _Http(HTTPHandler):
    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_Watched, req)


class _Https(HTTPSHandler):
    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_WatchedTls, req)


class _Redirect(HTTPRedirectHandler):
    def http_error_302(self, req: Request, fp: Any, code: int, msg: str, headers: Any) -> Any:
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        finally:
            fp.close()  # also where the new address is none

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302
