"""Requests that nobody sane would send: no answer is the service's fault, and none costs it anything."""

import json
import os
import random
import signal
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
import schemathesis
from served import ROW, running
from test_serve_running import process

from bbalpha.serve.app import create_app

VALUES = (
    None, True, 0, -1, 2, 0.5, -0.0, 1e308, 1e-320, 10**30, "", "x", "Rome", "2020-06-01", "\ud800", "\0", "é" * 50, [],
    {}, [[]], [[1e308] * 4] * 3, {"age": 1}, "prices", float("nan"), float("inf"), "9" * 400,
)  # fmt: skip
ROUTES = ("/predict", "/predict", "/density", "/map", "/attack", "/models", "/page/x", "/nix")


def malformed(rng):
    """A body: a good one with parts taken out, changed or broken."""
    body = {"model": rng.choice(["prices", "bands", "shapes", "nix"]), "n_passes": 2}
    body |= {"rows": [dict(ROW)]} if rng.random() < 0.5 else {"row": dict(ROW), "across": "age", "up": "since"}
    for _ in range(rng.randint(1, 3)):
        place = rng.choice(["top", "row", "new"])
        value = rng.choice(VALUES)
        if place == "top":
            body[rng.choice([*body, "seed", "coverage", "image", "step", "size"])] = value
        elif (
            place == "row" and isinstance(body.get("rows"), list) and body["rows"] and isinstance(body["rows"][0], dict)
        ):
            body["rows"][0][rng.choice([*ROW])] = value
        else:
            body[rng.choice(["\ud800", "x" * 200, "rowz", ""])] = value
    data = json.dumps(body).encode()
    if rng.random() < 0.3:
        data = bytearray(data)
        for _ in range(rng.randint(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = bytes(data[: rng.randint(0, len(data))])
    return data


def resident(pid):
    """Bytes that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_malformed_requests(folders):
    rng, statuses = random.Random(0), []
    with process("127.0.0.1", *folders.values()) as (child, address, _):
        with (
            httpx.Client(base_url=address, timeout=30) as client,
            closing(HTTPConnection(address.removeprefix("http://"), timeout=30)) as raw,
        ):

            def send(n):
                for _ in range(n):
                    kind = rng.choice(["application/json"] * 6 + ["text/plain", "application/x-www-form-urlencoded"])
                    method = rng.choice(["POST"] * 8 + ["PUT", "GET"])
                    route = rng.choice(ROUTES)
                    raw.request(method, route, malformed(rng), {"content-type": kind})
                    found = raw.getresponse()
                    statuses.append(found.status)
                    body = json.loads(found.read(), parse_constant=pytest.fail)
                    assert found.status < 400 or [*body] == ["error"]

            good = {"model": "prices", "rows": [ROW]}
            first = client.post("/predict", json=good).json()
            send(300)  # what is kept for the next time is kept by then
            before = resident(child.pid)
            send(700)
            grown = resident(child.pid) - before
            assert client.post("/predict", json=good).json() == first
            assert "bbalpha_under_way 1\n" in client.get("/metrics").text
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
        assert child.stderr.read() == ""
    assert max(statuses) < 500
    assert sum(status >= 400 for status in statuses) > 800
    assert grown < 20e6


def test_the_service_keeps_to_its_own_description(models):
    with running(create_app(models)) as client:
        schema = schemathesis.openapi.from_url(f"{client.base_url}/openapi.json")
        seen = set()
        checks = [
            schemathesis.checks.CHECKS.get_one(name)
            for name in (
                "not_a_server_error", "status_code_conformance", "content_type_conformance",
                "response_schema_conformance", "negative_data_rejection",
            )
        ]  # fmt: skip
        for operation in schema.get_all_operations():
            seen.add(operation.ok().path)
            for case in cases(operation.ok(), 8):
                case.call_and_validate(checks=checks)
        assert seen == {"/health", "/ready", "/models", "/metrics", "/predict", "/density", "/map", "/attack"}


def cases(operation, n):
    """A few requests for one operation: such as the description allows, and others."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    found = []
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    for mode in modes if operation.body else modes[:1]:

        @seed(0)
        @settings(
            max_examples=n, database=None, phases=[Phase.generate], deadline=None, suppress_health_check=[*HealthCheck]
        )
        @given(operation.as_strategy(generation_mode=mode))
        def collect(case):
            found.append(case)

        collect()
    return found
