"""A real `bbalpha serve` on this machine: many requests, slow clients, huge bodies, floods, keys and odd heads.

Every answer must be a good one, or a 4xx or 503 with one sentence of ours; none may be missing; what is slow must be
left after a while, and others answered meanwhile; and memory, threads and file handles must be flat.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from types import SimpleNamespace

from .rows import row

ROOT = Path(__file__).resolve().parents[2]
KEY = "k3y-of-the-campaign"
SECONDS = 2.0  # that the bounded service waits for a client
PATIENCE = 60.0  # seconds for an answer, before it is called a hang
LIMITS = {"max_queue": 8, "max_connections": 60, "max_bytes": 8_000_000, "seconds": SECONDS}
FLAT = 25e6  # bytes that the service may hold at the end on top of what it held after the first third
BOUNDED = """
import json, sys
from bbalpha.serve.limits import Limits
from bbalpha.serve.running import serve
serve([sys.argv[1]], port=int(sys.argv[2]), api_key=sys.argv[3], limits=Limits(**json.loads(sys.argv[4])))
"""


# ------------------------------------------------------------------------------ services and clients


class Service:
    """A process that serves, and what it holds."""

    def __init__(self, command, port, errors):
        env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "BBALPHA_API_KEY": KEY}
        self.port, self.errors = port, errors
        with errors.open("wb") as file:
            self.child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=env, cwd=ROOT)

    def ready(self):
        """Wait until it answers."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.child.poll() is None:
            with suppress(OSError):
                if exchange(self.port, request("GET", "/ready"))[:1]:
                    return self
            time.sleep(0.1)
        raise RuntimeError(f"The service did not begin: {self.errors.read_text()[-2000:]}")

    def held(self):
        """(bytes, threads, file handles) of the process."""
        place = Path(f"/proc/{self.child.pid}")
        pages = int((place / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len([*(place / "task").iterdir()]), len([*(place / "fd").iterdir()])

    def quiet(self, handles=0):
        """What it holds when no client is left; waits for that, but not for ever."""
        end = time.monotonic() + PATIENCE
        time.sleep(0.5)
        while time.monotonic() < end and self.held()[2] > handles:
            time.sleep(0.2)
            if not handles:
                break
        return self.held()

    def ended(self):
        """Failures of its end, after a signal: it must be a good one, with nothing said."""
        try:
            code = self.child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return ["the service did not end"]
        said = self.errors.read_text()
        return [f"the service ended with {code}: {said[-300:]}"] if code or said else []


@contextmanager
def services(folder, names):
    """The services of these names: the command as users run it, a service with tight limits."""
    found = []
    try:
        for name in names:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            told = ["-m", "bbalpha", "serve", str(folder / "prices"), "--port", str(port)]
            if name == "bounded":
                told = ["-c", BOUNDED, str(folder / "prices"), str(port), KEY, json.dumps(LIMITS)]
            found.append(Service([sys.executable, *told], port, folder / f"{name}.err"))
        yield [service.ready() for service in found]
    finally:
        for service in found:
            service.child.kill()
            service.child.wait()


def request(method, path, body=b"", *heads, key=KEY, version="1.1"):
    """A request as bytes."""
    lines = [f"{method} {path} HTTP/{version}".encode(), b"Host: localhost"]
    lines += [f"X-API-Key: {key}".encode()] * (key is not None)
    lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)] * bool(body)
    lines += [head if isinstance(head, bytes) else head.encode() for head in heads]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def connected(port):
    """A connection to the service."""
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def exchange(port, data, methods=("GET",)):
    """The answers to what is sent on one connection, (status, body) each, as many as come up to one a method."""
    with connected(port) as raw:
        with suppress(ConnectionError):  # it may have been refused before it was all sent
            raw.sendall(data)
        return received(raw, methods)


def received(raw, methods=("GET",)):
    """The answers that come on a connection."""
    found = []
    with raw.makefile("rb") as file:
        for method in methods:
            answer = HTTPResponse(SimpleNamespace(makefile=lambda mode: Shared(file)), method=method)
            try:
                answer.begin()
                found.append((answer.status, answer.read()))
            except TimeoutError:
                return [*found, (0, b"no answer came")]
            except (HTTPException, ConnectionError):  # it hung up
                return found
    return found


class Shared:
    """A file that one answer does not close for the next."""

    closed = False

    def __init__(self, file):
        self._file = file

    def __getattr__(self, name):
        return getattr(self._file, name)

    def close(self):
        pass


def judged(what, answers, *, least=1, method="GET", among=None):
    """Failures: an answer that is missing, or neither good nor refused in a sentence."""
    failures = [f"{what}: {len(answers)} of {least} answers"] if len(answers) < least else []
    for status, body in answers:
        told = f"{what}: {status} {body[:80]!r}"
        fine = 200 <= status < 300 or 400 <= status < 500 or status == 503 if among is None else status in among
        if not fine or b"Traceback" in body:
            failures.append(told)
        elif status >= 400 and method != "HEAD" and not sentence(body):
            failures.append(f"{told}: no sentence")
    return failures


def sentence(body):
    """Whether a body says why in one sentence."""
    try:
        found = json.loads(body)
    except ValueError:
        return False
    return [*found] == ["error"] and found["error"].endswith(".") and len(found["error"]) > 10


def good(**asked):
    """A request that is answered."""
    from served import ROW

    return request("POST", "/predict", json.dumps({"rows": [ROW], "n_passes": 5, "seed": 3} | asked).encode())


# ------------------------------------------------------------------------------ odd heads


def odd():
    """(what, bytes, methods of the answers that may come, how many must, statuses that are right or None)."""
    body = json.dumps({"nix": 1}).encode()
    n, chunked = len(body), b"Transfer-Encoding: chunked"
    whole = b"%x\r\n%b\r\n0\r\n\r\n" % (n, body)
    post = b"POST /predict HTTP/1.1\r\nHost: x\r\nX-API-Key: %b\r\n" % KEY.encode()
    bad = (400, 431)
    yield "two lengths", post + b"Content-Length: %d\r\nContent-Length: %d\r\n\r\n" % (n, n + 9) + body, 1, bad
    yield "two equal lengths", post + b"Content-Length: %d, %d\r\n\r\n" % (n, n) + body, 1, None
    yield "two ways to tell the length", post + b"Content-Length: 5\r\n" + chunked + b"\r\n\r\n" + whole, 1, bad
    yield "the same, the other way round", post + chunked + b"\r\nContent-Length: 5\r\n\r\n" + whole, 1, bad
    for coding in (b"gzip, chunked", b"identity", b"chunked, chunked", b"xchunked", b"\x0bchunked"):
        yield f"coding {coding}", post + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + whole, 1, (*bad, 501)
    yield "two codings", post + chunked + b"\r\nTransfer-Encoding: identity\r\n\r\n" + whole, 1, (*bad, 501)
    for length in (b"-1", b"+5", b"1e3", b"0x10", b"5 5", b"9" * 30, b"", b"\xb2"):
        yield f"length {length}", post + b"Content-Length: " + length + b"\r\n\r\n" + body, 1, (*bad, 413)
    for chunks in (b"zz\r\n{}\r\n0\r\n\r\n", b"-2\r\n{}\r\n0\r\n\r\n", b"2\r\n{}xx\r\n0\r\n\r\n", b"f" * 25 + b"\r\n"):
        yield f"chunks {chunks[:8]}", post + chunked + b"\r\n\r\n" + chunks, 1, (*bad, 413)
    yield (
        "a wrong chunk behind a refusal",
        request("POST", "/nix", key=None)[:-2] + chunked + b"\r\n\r\nzz\r\n",
        1,
        None,
    )
    yield "a wrong chunk where none is read", request("PUT", "/predict")[:-2] + chunked + b"\r\n\r\nzz\r\n", 1, None
    yield "a wrong chunk behind HEAD", request("HEAD", "/health")[:-2] + chunked + b"\r\n\r\nzz\r\n", 0, None
    yield "huge header", request("GET", "/health", b"", "X-Long: " + "x" * 200_000), 1, bad
    yield "many headers", request("GET", "/health", b"", *(f"X-{i}: y" for i in range(20_000))), 1, bad
    yield "a hundred headers", request("GET", "/health", b"", *(f"X-{i}: y" for i in range(100))), 1, (200,)
    for name in (b"X A: b", b": b", b"X\0A: b", b" X: b", b"X : b", b"X: a\0b", b"X: \x01", b"\xff\xfe: b", b"X"):
        yield f"header {name}", b"GET /health HTTP/1.1\r\nHost: x\r\n" + name + b"\r\n\r\n", 1, (200, *bad)
    yield "folded header", b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n", 1, (200, *bad)
    yield "carriage return alone", b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\rSet-Cookie: b\r\n\r\n", 1, (200, *bad)
    yield "line feeds alone", b"GET /health HTTP/1.1\nHost: x\n\n", 1, (200, *bad)
    hosts = (b"", b"[", b"[::1", b"a b", b"evil.example:99999", b"x" * 5000, b"\xff", b"a,b", b"..", b"@", b"http://x/")
    for host in hosts:
        for path in (b"/health", b"/nix", b"/predict/", b"//", b"/page/app.js"):
            head = b"GET " + path + b" HTTP/1.1\r\nX-API-Key: " + KEY.encode() + b"\r\nHost: " + host + b"\r\n\r\n"
            yield f"host {host[:20]} at {path}", head, 1, (200, 400, 404, 405)
    yield "no host", b"GET /health HTTP/1.1\r\n\r\n", 1, bad
    yield "two hosts", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 1, bad
    for origin in ("null", "http://evil.example", "x" * 5000, "\xff", ""):
        yield f"origin {origin[:20]!r}", request("GET", "/models", b"", f"Origin: {origin}"), 1, (200, 400)
    for kind in ("text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data", "a;b;c", "\xff/\xfe"):
        head = b"Content-Type: " + kind.encode("latin-1") + b"\r\nContent-Length: %d\r\n\r\n" % n
        yield f"content type {kind!r}", post + head + body, 1, (400, 415, 422)
    paths = (
        "/../../../etc/passwd", "/page/../../app.py", "/page/..%2f..%2fapp.py", "/page/%2e%2e/gate.py", "/page/%00",
        "/%00", "/page/app.js%00.html", "/page/....//app.py", "//evil.example/", "/%ff%fe", "/%", "/%zz",
        "/nix%0d%0aX:y", "/predict/", "/PREDICT", "/predict;x", "/predict%3fx", "/" + "x" * 60_000, "/" + "a/" * 5000,
        "/nix?" + "q=1&" * 4000, "http://evil.example/nix", "*", "nix", "/page/C:\\x", "/page/\\..\\gate.py",
        "/models/../nix", "/docs", "/redoc",
    )  # fmt: skip
    for path in paths:
        yield f"path {path[:30]}", request("GET", path), 1, (400, 404, 405, 414)
    yield "letters beyond ASCII in the path", "GET /ä HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 1, (*bad, 401, 404)
    for method in ("HEAD", "OPTIONS", "TRACE", "DELETE", "PATCH", "PUT", "NIX", "get", "X" * 3000, "CONNECT"):
        for path in ("/", "/health", "/predict", "/models", "/nix"):
            yield f"{method[:10]} {path}", request(method, path), 1, (200, *bad, 404, 405)
    for version in ("1.0", "0.9", "2.0", "1.9", "9.9", "1", "x", "1.1 1.1"):
        yield f"version {version}", request("GET", "/health", version=version), 1, (200, *bad, 505)
    yield "version 1.0 and a body", request("POST", "/predict", body, version="1.0"), 1, (422,)
    yield "no version", b"GET /health\r\n\r\n", 1, (200, *bad)
    yield "HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 1, (*bad, 401)
    yield "TLS", bytes.fromhex("16030100a5010000a10303") + bytes(200), 1, bad
    yield "noise", random.Random(0).randbytes(5000) + b"\r\n\r\n", 1, bad
    yield "empty lines", b"\r\n\r\n" + request("GET", "/health"), 1, (200, *bad)
    for upgrade in ("websocket", "h2c", "TLS/1.0"):
        head = request("GET", "/health", b"", "Connection: upgrade", f"Upgrade: {upgrade}", "Sec-WebSocket-Version: 13")
        yield f"upgrade to {upgrade}", head, 1, (200, 400, 426)
    yield "Expect: 100-continue", request("POST", "/predict", body, "Expect: 100-continue"), 1, (422,)
    yield "Expect: nix", request("POST", "/predict", body, "Expect: nix"), 1, (400, 417, 422)
    yield "a hundred in a row", request("GET", "/health") * 100, 100, (200,)
    yield "a good one, then noise", request("GET", "/health") + b"\0nix\r\n\r\n", 2, (200, *bad)
    yield "a body, then one more", request("POST", "/predict", body) + request("GET", "/health"), 2, (200, 422)
    for range_ in ("bytes=0-", "bytes=" + "0-," * 1000, "nix"):
        yield f"range {range_[:10]}", request("GET", "/page/app.js", b"", f"Range: {range_}"), 1, (200, 206, 404, 416)


def odd_heads(service, share):
    """A share of them, a good request behind each."""
    heads, failures = list(odd())[:: max(1, round(share))], []
    want = exchange(service.port, good())
    for what, data, least, among in heads:
        method = data.partition(b" ")[0].decode("latin-1")
        answers = exchange(service.port, data, [method] * max(1, least))
        failures += judged(what, answers, least=least, method=method, among=among)
        if exchange(service.port, good()) != want:
            failures.append(f"{what}: the next good request has another answer")
    return row("odd heads of requests", "requests", 2 * len(heads), failures)


# ------------------------------------------------------------------------------ keys


def keys(service):
    """Keys that are none: 401, at every route that is not open, and never a crash."""
    wrong = (
        b"", b" ", KEY[:-1].encode(), KEY.encode() + b"x", KEY.upper().encode(), "schlüssel".encode(), b"\xff\xfe\x80",
        "🔑".encode(), b"k" * 10_000, b'"' + KEY.encode() + b'"', b"null", KEY[::-1].encode(), KEY.encode() + b", x",
    )  # fmt: skip
    failures, tried = [], 0
    for path in ("/models", "/metrics", "/openapi.json", "/nix", "//models", "/page/../models", "/health/../models"):
        for key in (None, *wrong):
            heads = [] if key is None else [b"X-API-Key: " + key]
            answers = exchange(service.port, request("GET", path, b"", *heads, key=None))
            open_ = path.startswith("/page/")  # no page has such a name
            failures += judged(f"key {key!r:.20} at {path}", answers, among=(404,) if open_ else (401,))
            tried += 1
    for name in ("Authorization: Bearer", "X_API_Key:", "Cookie: X-API-Key="):
        answers = exchange(service.port, request("GET", "/models", b"", f"{name} {KEY}", key=None))
        failures += judged(f"key as {name}", answers, among=(401,))
        tried += 1
    large = request("POST", "/predict", b"x" * 300_000, key="nix")
    failures += judged("a wrong key and a body", exchange(service.port, large), among=(401,))
    failures += judged("the right key", exchange(service.port, request("GET", "/models")), among=(200,))
    return row("keys that are missing, wrong or odd", "requests", tried + 2, failures)


# ------------------------------------------------------------------------------ huge bodies and floods


def huge(service, n):
    """Bodies that are announced to be huge, or never end: 413, and little of them is taken."""
    failures, taken = [], 0
    part = b"x" * 65_536
    for i in range(n):
        announced = i % 2 == 0
        length = "Content-Length: 10000000000" if announced else "Transfer-Encoding: chunked"
        with connected(service.port) as raw:
            sent = 0
            try:
                raw.sendall(request("POST", "/predict", b"", length, "Content-Type: application/json"))
                while sent < 10_000_000_000:
                    raw.sendall(part if announced else b"10000\r\n" + part + b"\r\n")
                    sent += len(part)
            except OSError:  # it hung up
                pass
            taken = max(taken, sent)
            answers = received(raw)
        if answers:  # who sends on may lose the answer when the service hangs up
            failures += judged("a huge body", answers, among=(413,))
        with connected(service.port) as raw:  # who waits for it has it
            raw.sendall(request("POST", "/predict", b"", length))
            raw.sendall(b"" if announced else 300 * (b"10000\r\n" + part + b"\r\n"))
            failures += judged("a huge body that waits", received(raw), among=(413,))
    if taken > 100_000_000:
        failures.append(f"{taken / 1e6:.0f} MB of a huge body were taken")
    return row("huge bodies", "requests", 2 * n, failures, taken_mb=round(taken / 1e6, 1))


def heavy(service, most=3_990_000):
    """Bodies that are within the limit and made to be hard to read."""
    from served import ROW

    names = b",".join(b'"%d":1' % i for i in range(most // 13))
    bodies = {
        "nested lists": b"[" * most,
        "nested objects": b'{"a":' * (most // 5),
        "empty rows": b'{"rows":[' + b"{}," * (most // 3 - 9) + b"{}]}",
        "rows past the limit": json.dumps({"rows": [ROW] * (most // 75)}).encode(),
        "a row of names": b'{"rows":[{' + names + b"}]}",
        "names": b"{" + names + b"}",
        "one name": b"{" + b'"rows":1,' * (most // 9 - 9) + b'"rows":1}',
        "empty lines": b'{"image":[' + b"[]," * (most // 3 - 9) + b"[]]}",
        "points": b'{"image":[[' + b"0," * (most // 2 - 9) + b"0]]}",
        "digits": b'{"n_passes":' + b"9" * (most - 20) + b"}",
        "an exponent": b'{"coverage":1e' + b"9" * (most - 20) + b"}",
        "letters": b'{"model":"' + b"\\u00e9" * (most // 6 - 9) + b'"}',
        "zeros": bytes(most),
    }
    failures, spans = [], {}
    for what, body in bodies.items():
        start = time.perf_counter()
        failures += judged(f"a body of {what}", exchange(service.port, request("POST", "/predict", body)))
        spans[what] = round(time.perf_counter() - start, 3)
    failures += judged("after heavy bodies", exchange(service.port, good()), among=(200,))
    slowest = max(spans, key=spans.get)
    return row(
        "bodies that are hard to read", "requests", len(bodies) + 1, failures, slowest=slowest, slowest_s=spans[slowest]
    )


def flood(service, n):
    """Many clients at once, past the queue and the connections: some are answered, the others told to come again."""
    failures, counts, lock = [], {}, threading.Lock()
    gate = threading.Barrier(n)

    def client(i):
        answers = []
        with suppress(ConnectionError), connected(service.port) as raw:
            gate.wait()  # until all have come in
            with suppress(ConnectionError):  # it may have been sent away already
                raw.sendall(good(n_passes=1000, seed=i))
            answers = received(raw)
        found = judged("flood", answers, least=0, among=(200, 429, 503, 504))
        with lock:
            status = answers[0][0] if answers else "hung up"
            counts[status] = counts.get(status, 0) + 1
            failures.extend(found)

    run_threads([lambda i=i: client(i) for i in range(n)])
    if not counts.get(200):
        failures.append("nobody was answered in a flood")
    if not {429, 503} <= {*counts}:
        failures.append(f"nobody was sent away in a flood: {counts}")
    failures += judged("after a flood", exchange(service.port, good()), among=(200,))
    told = {f"status_{status}".replace(" ", "_"): count for status, count in counts.items()}
    return row("floods of requests", "requests", n + 1, failures, **told)


def hoard(service, n):
    """Clients that send all of a large body but its last byte: what they hold is bounded, and then they are left."""
    failures, statuses = [], []
    before = service.held()[0]
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(service.port)) for _ in range(n)]
        size = 3_000_000
        for raw in clients:
            with suppress(OSError):
                raw.sendall(request("POST", "/predict", b" " * size)[:-1])
        grown = service.held()[0] - before
        if exchange(service.port, request("GET", "/health"))[:1] == []:
            failures.append("no answer beside bodies that are not finished")
        for raw in clients:
            answers = received(raw)
            failures += judged("a body without its last byte", answers, among=(408, 429))
            statuses += [status for status, _ in answers]
    if n * size > LIMITS["max_bytes"] and 429 not in statuses:
        failures.append("nobody was sent away though too many bytes were under way")
    if grown > 6 * LIMITS["max_bytes"] + FLAT:
        failures.append(f"bodies that are not finished took {grown / 1e6:.0f} MB")
    failures += judged("after bodies that were not finished", exchange(service.port, good()), among=(200,))
    return row("large bodies that are not finished", "requests", n + 2, failures, grown_mb=round(grown / 1e6, 1))


def run_threads(works):
    """Run them all at once, to their end."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ------------------------------------------------------------------------------ slow clients


def slow_clients(service, each):
    """Clients that are slow in every way there is; good ones beside them, and the slow ones are left."""
    base = service.quiet()[2]
    kinds = {
        "says nothing": (b"", b""),
        "says an empty line": (b"\r", b""),
        "a head byte by byte": (b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 10**4),
        "a body byte by byte": (request("POST", "/predict", b"{" * 10**4)[: -(10**4)], b"{" * 10**4),
        "chunks byte by byte": (request("POST", "/predict", b"", "Transfer-Encoding: chunked"), b"1\r\nx\r\n" * 10**4),
        "a second head byte by byte": (request("GET", "/health"), b"GET /" + b"x" * 10**4),
        "a body behind a refusal": (request("POST", "/nix", b"", "Content-Length: 10000", key="x"), b"x" * 10**4),
        "a body that no one reads": (request("PUT", "/nix", b"", "Content-Length: 10000"), b"x" * 10**4),
        "never reads": (request("GET", "/openapi.json") * 2000, b""),
    }
    failures, spans, over = [], {}, threading.Event()
    longest, answered = [0.0], [0]

    def others():
        while not over.is_set():
            start = time.perf_counter()
            try:
                failures.extend(judged("beside slow clients", exchange(service.port, good()), among=(200,)))
            except OSError as error:
                failures.append(f"beside slow clients: {error}")
            longest[0] = max(longest[0], time.perf_counter() - start)
            answered[0] += 1
            time.sleep(0.02)

    def slow(kind, first, rest):
        start = time.monotonic()
        with connected_small(service.port) as raw:
            raw.settimeout(0.2)
            for place in range(0, len(first), 4096):
                with suppress(OSError):
                    raw.send(first[place : place + 4096])
            while time.monotonic() - start < PATIENCE:
                try:
                    if rest:
                        raw.send(rest[:1])
                        rest = rest[1:]
                    if "never" not in kind and raw.recv(4096) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
                if "never" in kind and gone(raw):
                    break
                time.sleep(0.05)
            else:
                failures.append(f"{kind}: not left after {PATIENCE:g} s")
        spans[kind] = max(spans.get(kind, 0.0), time.monotonic() - start)

    beside = threading.Thread(target=others)
    beside.start()
    run_threads([lambda k=k, f=f, r=r: slow(k, f, r) for k, (f, r) in kinds.items() for _ in range(each)])
    over.set()
    beside.join()
    if service.quiet(base)[2] > base:
        failures.append(f"{service.held()[2] - base} connections of slow clients stay")
    return row(
        "slow clients", "requests", each * len(kinds) + answered[0], failures,
        beside=answered[0], longest_beside_s=round(longest[0], 3), longest_slow_s=round(max(spans.values()), 1),
    )  # fmt: skip


def connected_small(port):
    """A connection that takes next to nothing at a time."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.settimeout(PATIENCE)
    raw.connect(("127.0.0.1", port))
    return raw


def gone(raw):
    """Whether the other side has hung up, without reading."""
    state = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state != 1  # established


# ------------------------------------------------------------------------------ soak


def soak(service, seconds, seed):
    """Good and bad requests from several clients; what the service holds after each third."""
    from served import ROW
    from test_fuzz import ROUTES, malformed

    heads = list(odd())
    want = exchange(service.port, good())
    failures, counts, holds = [], [0, 0], []

    def client(number, end):
        rng = random.Random(f"{seed} {number} {end}")
        while time.monotonic() < end and len(failures) < 20:
            kind = rng.random()
            try:
                if kind < 0.35:
                    own = exchange(service.port, good() * 3, ["POST"] * 3)
                    failures.extend([] if own == want * 3 else [f"another answer: {own!r:.200}"])
                    counts[0] += 2
                elif kind < 0.5:
                    rows = [ROW | {"age": rng.uniform(20, 60)}] * rng.randint(1, 200)
                    asked = {"rows": rows, "seed": rng.randrange(9)}
                    failures.extend(judged("good rows", exchange(service.port, good(**asked)), among=(200, 429, 504)))
                elif kind < 0.75:
                    heads_, body = [], malformed(rng)
                    if rng.random() < 0.2:
                        heads_ = [f"X-{rng.random()}: {rng.random()}"]
                    method, route = rng.choice(["POST"] * 8 + ["PUT", "GET"]), rng.choice(ROUTES)
                    answers = exchange(service.port, request(method, route, body, *heads_))
                    failures.extend(judged(f"{method} {route} {body[:40]!r}", answers))
                elif kind < 0.9:
                    what, data, least, among = rng.choice(heads)
                    method = data.partition(b" ")[0].decode("latin-1")
                    answers = exchange(service.port, data, [method] * max(1, least))
                    failures.extend(judged(what, answers, least=least, method=method, among=among))
                elif kind < 0.95:
                    with connected(service.port) as raw:
                        raw.sendall(good()[: rng.randrange(len(good()))])
                else:
                    route = rng.choice(["/metrics", "/models", "/openapi.json", "/", "/page/app.js", "/ready"])
                    failures.extend(judged(route, exchange(service.port, request("GET", route))))
            except OSError as error:
                failures.append(f"{type(error).__name__}: {error}")
            counts[1] += 1

    for _ in range(3):
        end = time.monotonic() + seconds / 3
        run_threads([lambda i=i, end=end: client(i, end) for i in range(6)])
        holds.append(service.quiet(holds[0][2] if holds else 0))
    (first, threads, handles), (last, threads_last, handles_last) = holds[0], holds[-1]
    if last - first > FLAT:
        failures.append(f"memory grew by {(last - first) / 1e6:.0f} MB")
    if threads_last > threads or handles_last > handles:
        failures.append(f"threads from {threads} to {threads_last}, file handles from {handles} to {handles_last}")
    return row(
        "a soak of good and bad requests by six clients", "requests", sum(counts), failures, seconds=round(seconds),
        memory_mb=[round(held[0] / 1e6, 1) for held in holds], threads=[held[1] for held in holds],
        handles=[held[2] for held in holds],
    )  # fmt: skip


def run(size, seed):
    """Rows: the service with tight limits first, then the soak; of the command at size 1."""
    sys.path.append(str(ROOT / "tests" / "serve"))
    from served import table_model

    few, small = max(1, round(5 * size)), size < 0.5
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is trained for a moment
        folder = Path(name)
        table_model("regression").save(folder / "prices")
        with services(folder, ("bounded",) if small else ("bounded", "command")) as found:
            bounded = found[0]
            rows = [
                odd_heads(bounded, 4 if small else 1),
                keys(bounded),
                huge(bounded, 2 * few),
                heavy(bounded),
                hoard(bounded, 8 * few),
                flood(bounded, 80 * few),
                slow_clients(bounded, few),
                soak(found[-1], max(1.5, 600 * size), seed),
            ]
            for service in found:
                service.child.send_signal(signal.SIGTERM)
            ends = [failure for service in found for failure in service.ended()]
            rows.append(row("services that are told to end", "cases", len(found), ends))
    return rows
