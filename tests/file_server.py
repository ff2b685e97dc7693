"""A web server of this machine, for the tests of downloads."""

import itertools
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def running_server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Server(ThreadingHTTPServer):
    """Files out of a dictionary; notes the range of every request, and cuts connections when told to."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}  # {path: content}
        self.ranges = []  # the Range header of each request, in order
        self.cuts = 0  # how many of the next answers stop half-way
        self.knows_ranges = True
        self.says_length = True
        self.raw = None  # an answer as it is, byte by byte; then zeros for ever where it is `endless`
        self.endless = False
        self.pause = 0.0  # seconds between the bytes of it

    def url(self, name="file"):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.ranges.append(asked)
        if server.raw is not None:
            return self.send_raw(server)
        if self.path not in server.files:
            return self.send_error(404)
        content = server.files[self.path]
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and server.knows_ranges else 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            return self.end_headers()
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        rest = content[start:]
        if server.says_length:
            self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if server.cuts:
            server.cuts -= 1
            rest = rest[: len(rest) // 2]
        self.wfile.write(rest)

    def send_raw(self, server):
        zeros = itertools.repeat(bytes(1 if server.pause else 1 << 16)) if server.endless else ()
        begin = [server.raw[i : i + 1] for i in range(len(server.raw))] if server.pause else [server.raw]
        try:
            for piece in itertools.chain(begin, zeros):
                self.wfile.write(piece)
                time.sleep(server.pause)
        except OSError:  # the client has had enough
            pass
        self.close_connection = True

    def log_message(self, *args):
        pass
