"""Requests with bodies, headers and routes gone bad: a 4xx with one sentence, and the next good answer is as before."""

import json
import random
import sys
import tempfile
from pathlib import Path

from .rows import row

ROOT = Path(__file__).resolve().parents[2]
HEADERS = (
    {}, {"content-type": "text/plain"}, {"content-type": ""}, {"content-length": "-1"}, {"x-api-key": "x" * 5000},
    {"accept": "nix/nix"}, {"content-encoding": "gzip"}, {"content-type": "application/json; charset=utf-16"},
)  # fmt: skip


def run(size, seed):
    """One row: every request that was sent."""
    sys.path.append(str(ROOT / "tests" / "serve"))
    from fastapi.testclient import TestClient
    from served import ROW, table_model
    from test_fuzz import ROUTES, malformed

    from bbalpha.serve.app import create_app
    from bbalpha.serve.models import load_models

    n, rng, failures = max(60, round(5000 * size)), random.Random(seed), []
    good = {"model": "prices", "rows": [ROW], "n_passes": 5, "seed": 3}
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in (("prices", "regression"), ("bands", "classification")):
            table_model(kind).save(Path(folder) / name)
        app = create_app(load_models([Path(folder) / "prices", Path(folder) / "bands"]))
        with TestClient(app, raise_server_exceptions=False) as client:
            first = client.post("/predict", json=good).json()
            for _ in range(n):
                method, route = rng.choice(["POST"] * 8 + ["PUT", "GET", "DELETE"]), rng.choice(ROUTES)
                body, headers = malformed(rng), {"content-type": "application/json"} | rng.choice(HEADERS)
                failures += judged(client.request(method, route, content=body, headers=headers), method, route, body)
            if client.post("/predict", json=good).json() != first:
                failures.append("the same request has another answer afterwards")
    return [row("bad bodies, headers and routes of the service", "requests", n, failures)]


def judged(answer, method, route, body):
    """A failure if an answer is neither a good one nor one sentence with a status of 4xx."""
    told = f"{method} {route} {body[:60]!r}: {answer.status_code}"
    if answer.status_code >= 500:
        return [told]
    if answer.status_code >= 400:
        try:
            error = json.loads(answer.content)
        except ValueError:
            return [f"{told}, no JSON"]
        return [] if [*error] == ["error"] and error["error"] else [f"{told}, {answer.text[:60]!r}"]
    return [f"{told}, a number that is none"] * ("NaN" in answer.text or "Infinity" in answer.text)
