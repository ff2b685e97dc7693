"""`serve` as a process: where it says it is, how it ends, what it refuses before it begins."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from served import ROW

from bbalpha.serve import running
from bbalpha.serve.running import serve

PROGRAM = """
import sys, time
from bbalpha.serve import models, running
answer = models.ServedTable.answer
def slowly(self, rows, **asked):
    time.sleep(1.0 if asked["seed"] == 99 else 0)
    return answer(self, rows, **asked)
models.ServedTable.answer = slowly
running.serve(sys.argv[2:], host=sys.argv[1], port=0)
"""


@contextmanager
def process(*arguments):
    """The server, its address and the lines that it began with."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        lines = [child.stdout.readline(), child.stdout.readline()]
        found = re.search(r"http://(\S+):(\d+)", lines[0])
        assert found, (lines, child.stderr.read())
        yield child, f"http://127.0.0.1:{found[2]}", lines
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()


def test_it_says_where_it_is_and_ends_well_when_told(folders):
    with process("127.0.0.1", folders["prices"]) as (child, address, lines):
        assert lines[0].startswith("bbalpha serves prices at http://127.0.0.1:")
        assert f"the page is at {address}/" in lines[1]
        found = {}

        def slow():
            found["slow"] = httpx.post(f"{address}/predict", json={"rows": [ROW], "seed": 99}, timeout=30)

        thread = threading.Thread(target=slow)
        thread.start()
        with httpx.Client(base_url=address, timeout=30) as client:
            while "bbalpha_under_way 2" not in client.get("/metrics").text:
                time.sleep(0.01)
            child.send_signal(signal.SIGTERM)
            while client.get("/ready").status_code == 200:  # the signal is on its way
                time.sleep(0.01)
            assert client.get("/ready").status_code == 503
            refused = client.post("/predict", json={"rows": [ROW]})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        thread.join()
        assert found["slow"].status_code == 200, "what is under way is finished"
        assert child.wait(20) == 0
        assert child.stderr.read() == ""
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("0.0.0.0", None, True), ("0.0.0.0", "k", False), ("127.0.0.1", None, False)]
)
def test_whoever_listens_to_all_without_a_key_is_told(folders, monkeypatch, host, key, warned):
    told = []

    class Server:
        def run(self, sockets):
            for one in sockets:
                one.close()

    monkeypatch.setattr(running, "_server", lambda app, limits, lines: told.extend(lines) or Server())
    running.serve([folders["shapes"]], host=host, port=0, api_key=key)
    assert any("no key is set" in line for line in told) == warned
    assert told[0].startswith(f"bbalpha serves shapes at http://{host}:")


def test_bodies_are_read_without_a_search_through_all_memory(folders, monkeypatch):
    frozen = []

    class Server:
        def run(self, sockets):
            frozen.append(gc.get_freeze_count())
            for one in sockets:
                one.close()

    monkeypatch.setattr(running, "_server", lambda *_: Server())
    running.serve([folders["shapes"]], port=0)
    assert frozen[0] > 100_000
    assert gc.get_freeze_count() == 0


def test_what_cannot_begin_is_one_error(folders, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"Cannot listen at 127.0.0.1 port {port}"):
            serve([folders["prices"]], port=port)
    with pytest.raises(OSError, match="Cannot listen at nowhere"):
        serve([folders["prices"]], host="nowhere.invalid")
    with pytest.raises(FileNotFoundError, match="no model folder"):
        serve([tmp_path / "none"])
    with pytest.raises(ValueError, match="api_key"):
        serve([folders["prices"]], api_key="")
