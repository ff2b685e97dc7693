"""Connections have an end: clients that are silent, slow, greedy or speak no HTTP are told why, and left."""

import json
import logging
import socket
import threading
import time
from http.client import HTTPResponse

import httpx
import pytest
from served import ROW, running

from bbalpha.serve.app import create_app
from bbalpha.serve.connection import KEEP_ALIVE
from bbalpha.serve.limits import Limits

SECONDS = 0.6
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def bounded(models):
    """A client of a server that is soon out of patience."""
    limits = Limits(max_connections=4, max_body=50_000, max_bytes=80_000, seconds=SECONDS)
    with running(create_app({"prices": models["prices"]}, limits)) as client:
        yield client


def raw(client):
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=20)


def answer(connection, method="GET"):
    """(status, headers, sentence)."""
    found = HTTPResponse(connection, method=method)
    found.begin()
    with found:
        return found.status, found.headers, json.loads(found.read() or '{"error": ""}').get("error")


def ended(connection):
    """Whether the server hangs up, within the time that a test has."""
    try:
        while connection.recv(65_536):
            pass
    except ConnectionError:
        return True
    return True


def send_without_end(connection, part, most=200_000_000):
    """How many bytes the other side takes before it takes no more or hangs up."""
    sent = 0
    try:
        while sent < most:
            connection.sendall(part)
            sent += len(part)
    except OSError:
        pass
    return sent


def alive(client):
    """A good request is answered."""
    with httpx.Client(base_url=client.base_url, timeout=30) as own:
        return own.post("/predict", json={"rows": [ROW]}).status_code == 200


def later(client, seconds):
    """Ask all connections to check themselves, as if so many seconds had passed; twice, since they look for changes."""
    done = threading.Event()

    def check():
        for k in (1, 2):
            for connection in list(client.server.server_state.connections):
                connection.check(connection.loop.time() + k * seconds)
        done.set()

    (one, *_) = client.server.server_state.connections
    one.loop.call_soon_threadsafe(check)
    assert done.wait(10)


def test_who_says_nothing_is_left(bounded):
    with raw(bounded) as silent:
        assert alive(bounded)
        assert ended(silent)


@pytest.mark.parametrize("before", [b"", HEAD + b"\r\n"])
def test_a_head_that_does_not_come_is_waited_for_no_longer_than_told(bounded, before):
    with raw(bounded) as slow:
        slow.sendall(before)
        if before:
            assert answer(slow)[0] == 200
        slow.sendall(b"GET /he")
        status, headers, why = answer(slow)
        assert (status, headers["connection"]) == (408, "close")
        assert why == "The head of the request must be sent within 0.6 s; send it again."
        assert ended(slow)


def test_a_body_that_does_not_come_is_told_and_left(bounded):
    with raw(bounded) as slow:
        slow.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        assert answer(slow)[0] == 408
        assert ended(slow)


def test_who_does_not_take_answers_is_left(bounded):
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.settimeout(0.5)
        slow.connect((bounded.base_url.host, bounded.base_url.port))
        send_without_end(slow, b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        for _ in range(400):
            if not any(c.transport.get_write_buffer_size() for c in list(bounded.server.server_state.connections)):
                break
            time.sleep(0.05)
        else:
            pytest.fail("what nobody takes is kept")
    assert alive(bounded)


def test_an_idle_connection_is_closed_even_behind_a_refused_body(bounded):
    """Uvicorn sets its clock when the answer is out, and forgets it when the rest of the body comes."""
    with raw(bounded) as idle:
        idle.sendall(b"PUT /nix HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        assert answer(idle)[0] == 404
        idle.sendall(b"abcd" + HEAD + b"\r\n")
        assert answer(idle)[0] == 200, "it can be used again"
        idle.sendall(b"PUT /nix HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        assert answer(idle)[0] == 404
        idle.sendall(b"abcd")
        time.sleep(0.2)
        later(bounded, KEEP_ALIVE + 6)
        assert ended(idle)


@pytest.mark.parametrize("length", [b"Content-Length: 10000000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_what_is_sent_on_behind_a_refusal_is_not_read_without_end(bounded, length):
    with raw(bounded) as greedy:
        greedy.sendall(POST + length)
        sent = send_without_end(greedy, b"4000\r\n" + b"x" * 16_384 + b"\r\n")
    assert sent < 20_000_000  # what is under way between two ends counts too
    assert alive(bounded)


def test_too_many_clients_are_sent_away_and_come_back(bounded):
    clients = [raw(bounded) for _ in range(4)]
    try:
        with raw(bounded) as over:
            status, headers, why = answer(over)
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            assert why == "There are 4 connections already; try again in 1 s, or another copy."
            assert ended(over)
    finally:
        for client in clients:
            client.close()
    for _ in range(200):
        if not bounded.server.server_state.connections:
            break
        time.sleep(0.02)
    assert alive(bounded)


def test_far_too_many_clients_are_left_at_once(bounded):
    clients = [raw(bounded) for _ in range(9)]
    try:
        assert ended(clients[-1])
        assert len(bounded.server.server_state.connections) <= 8
    finally:
        for client in clients:
            client.close()
        time.sleep(0.2)


BAD = {
    "noise": b"\0\1\2\r\n\r\n", "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a long head": HEAD + b"X: " + b"y" * 100_000, "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a wrong chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "behind HEAD": b"HEAD /nix HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}  # fmt: skip


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_no_http_gets_a_sentence(bounded, data, caplog):
    with raw(bounded) as client, caplog.at_level(logging.ERROR):
        client.sendall(data)
        status, headers, why = answer(client, data.partition(b" ")[0].decode("latin-1"))
        assert (status, headers["connection"]) == (400, "close")
        assert why == "" or why.startswith("The request must be HTTP/1.1 with a head of at most 16384 bytes")
        assert ended(client)
    assert alive(bounded)
    assert not caplog.records, "nothing is logged as if it were our fault"


def test_a_wrong_chunk_behind_an_answer_is_no_error_of_ours(bounded, caplog):
    with raw(bounded) as client, caplog.at_level(logging.ERROR):
        client.sendall(b"PUT /nix HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        assert answer(client, "PUT")[0] == 404
        client.sendall(b"zz\r\n")
        assert ended(client)
    assert not caplog.records


@pytest.mark.parametrize(
    "lengths", [b"Content-Length: 2\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 2"]
)
def test_a_length_told_in_two_ways_is_refused_and_nothing_behind_it_is_read(bounded, lengths):
    with raw(bounded) as client:
        client.sendall(POST + lengths + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + HEAD + b"\r\n")
        status, headers, why = answer(client)
        assert (status, headers["connection"]) == (400, "close")
        assert why == "The request must tell its length once: Content-Length or Transfer-Encoding."
        assert client.recv(10) == b""


def test_bytes_of_all_requests_together_are_bounded(bounded):
    start = POST + b"Content-Length: 50000\r\n\r\n" + b" " * 49_999
    with raw(bounded) as first, raw(bounded) as second:
        for client in (first, second):
            client.sendall(start)
        told = sorted(answer(client)[::2] for client in (first, second))
        assert [status for status, _ in told] == [408, 429]
        assert told[1][1] == "More than 80000 bytes of requests are under way; try again in 1 s."
    assert alive(bounded)
    for _ in range(200):
        if bounded.server.config.app.state.service.traffic.held == 0:
            break
        time.sleep(0.02)
    assert bounded.server.config.app.state.service.traffic.held == 0
