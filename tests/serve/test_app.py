"""The service on a real port: every route, every refusal, and many clients at once."""

import hashlib
import hmac
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from served import ROW, running

from bbalpha.serve import gate
from bbalpha.serve.app import _sentence, create_app
from bbalpha.serve.limits import Limits
from bbalpha.serve.models import ServedTable

IMAGE = np.eye(3, 4).tolist()


def ask(client, route="/predict", **body):
    return client.post(route, json=body)


def count(client, name):
    """The sum of all numbers of one name in /metrics."""
    text = client.get("/metrics").text
    return sum(float(v) for v in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def told(response, status):
    """The sentence of a refusal."""
    assert response.status_code == status, response.text
    body = response.json()
    assert [*body] == ["error"]
    assert body["error"].endswith(".")
    assert "\n" not in body["error"]
    assert response.headers["x-content-type-options"] == "nosniff"
    return body["error"]


# ------------------------------------------------------------------------------ answers


def test_every_answer_has_what_the_contract_says(client, models):
    quantity = ask(client, model="prices", rows=[ROW, ROW | {"town": "Mars"}]).json()
    assert {k: quantity[k] for k in ("model", "n_passes", "seed", "coverage")} == {
        "model": "prices", "n_passes": 20, "seed": models["prices"].seed, "coverage": 0.9,
    }  # fmt: skip
    names = {"mean", "std", "epistemic_std", "aleatoric_std", "low", "high", "unusual"}
    assert [set(p) for p in quantity["predictions"]] == [names, names]
    assert [p["unusual"] for p in quantity["predictions"]] == [False, True]
    classes = ask(client, model="bands", rows=[ROW]).json()["predictions"][0]
    assert set(classes) == {"label", "probs", "entropy", "mutual_information", "unusual"}
    assert sum(classes["probs"].values()) == pytest.approx(1)
    assert classes["label"] == max(classes["probs"], key=classes["probs"].get)
    image = ask(client, model="shapes", image=IMAGE).json()["predictions"][0]
    assert set(image) == {"label", "probs", "entropy", "mutual_information", "unusual", "votes"}


def test_an_answer_sent_back_is_the_same_answer(client):
    first = ask(client, model="prices", rows=[ROW], n_passes=31, coverage=0.5).json()
    again = {k: first[k] for k in ("model", "n_passes", "seed", "coverage")}
    assert ask(client, rows=[ROW], **again).json() == first
    assert ask(client, rows=[ROW], **(again | {"seed": 1})).json() != first


def test_density_map_and_attack(client):
    density = ask(client, "/density", model="prices", row=ROW, n_passes=12, seed=3).json()
    assert (len(density["x"]), len(density["means"])) == (len(density["density"]), 12)
    same = ask(client, model="prices", rows=[ROW], n_passes=12, seed=3).json()["predictions"][0]
    assert {k: density[k] for k in same} == same
    attacked = ask(client, "/attack", model="shapes", image=IMAGE, step=0.2).json()["image"]
    assert 0 < abs(np.array(attacked) - IMAGE).max() <= 0.2 + 1e-9


def test_the_map_has_the_answers_of_its_rows(models):
    from test_models import two_numbers

    one = ServedTable.of("m", two_numbers(models["prices"].model))
    across, up, rows = one.grid({"age": 30.0, "size": 1.0}, "size", "age", 3)
    answers = [{"mean": 10.0 * a + s, "epistemic_std": a} for a, s in rows]

    class Known(ServedTable):
        def answer(self, rows, *, n_passes, seed, coverage):
            return [{"mean": 10.0 * a + s, "epistemic_std": a} for a, s in rows]

    known = Known(one.name, one.model, one.reader)
    with running(create_app({"m": known})) as client:
        found = ask(client, "/map", row={"age": 30, "size": 1}, across="size", up="age", size=3).json()
        assert (found["across"], found["up"], found["label"]) == (across, up, None)
        assert np.ravel(found["prediction"]).tolist() == [a["mean"] for a in answers[:-1]]
        assert found["prediction"][2][0] == pytest.approx(10 * up[2] + across[0])
        assert found["ignorance"][1] == [up[1]] * 3
        told(ask(client, "/map", row={"age": 30, "size": 1}, across="size", up="size"), 422)


def test_models_and_health(client, models):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    assert client.get("/models").json() == {"models": [m.facts() for m in models.values()]}


def test_the_page_is_there_and_nothing_beside_it(client):
    for path in ("/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/app.py", "/page/"):
        told(client.get(path), 404)
    headers = client.get("/health").headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"rows": [ROW]}, 422, "`model` must say which; there are prices, bands, shapes."),
        ({"model": "nix", "rows": [ROW]}, 404, "There is no model 'nix'; there are prices, bands, shapes."),
        ({"model": "prices", "rows": []}, 422, "`rows` is wrong"),
        ({"model": "prices"}, 422, "takes `rows`"),
        ({"model": "prices", "image": IMAGE}, 422, "takes `rows`"),
        ({"model": "shapes", "rows": [ROW], "image": IMAGE}, 422, "takes `image`"),
        ({"model": "shapes", "image": [[1.0]]}, 422, "3 lines of 4"),
        ({"model": "prices", "rows": [ROW, {}]}, 422, "Row 1: 'age' is missing"),
        ({"model": "prices", "rows": [ROW], "n_passes": 1}, 422, "`n_passes` is wrong"),
        ({"model": "prices", "rows": [ROW], "n_passes": 2.5}, 422, "`n_passes` is wrong"),
        ({"model": "prices", "rows": [ROW], "n_passes": 1001}, 422, "`n_passes` must be at most 1000; got 1001."),
        ({"model": "prices", "rows": [ROW] * 10_001}, 422, "`rows` must be at most 10000; got 10001."),
        ({"model": "prices", "rows": [ROW] * 1001, "n_passes": 1000}, 422, "Rows times passes must be at most"),
        ({"model": "prices", "rows": [ROW], "seed": -1}, 422, "`seed` is wrong"),
        ({"model": "prices", "rows": [ROW], "seed": 2**31}, 422, "`seed` is wrong"),
        ({"model": "prices", "rows": [ROW], "coverage": 1}, 422, "`coverage` is wrong"),
        ({"model": "prices", "rows": [ROW], "n_pases": 3}, 422, "`n_pases` is wrong"),
        ([], 422, "The body must be the JSON"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_sentence(client, body, status, sentence):
    assert sentence in told(client.post("/predict", json=body), status)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/density", {"model": "bands", "row": ROW}),
        ("/density", {"model": "shapes", "row": ROW}),
        ("/map", {"model": "prices", "row": ROW, "across": "age", "up": "town"}),
        ("/map", {"model": "prices", "row": ROW, "across": "age", "up": "age"}),
        ("/map", {"model": "prices", "row": ROW, "across": "age", "up": "since", "size": 33}),
        ("/attack", {"model": "prices", "image": IMAGE}),
        ("/attack", {"model": "shapes", "image": IMAGE, "step": 2}),
    ],
)
def test_other_routes_refuse_too(client, route, body):
    told(client.post(route, json=body), 422)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"rows": [{"a": 1e999}]}', b'{"rows": NaN}', b"1" * 5000,
             b'{"model": "\\ud800"}', b'{"\\ud800": 1}', b'{"model": "prices", "rows": [{"\\ud800": 1}]}'],
)  # fmt: skip
def test_a_body_that_is_no_such_json_is_refused(client, body):
    response = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 404, 422)
    told(response, response.status_code)


def test_models_go_by_their_own_names(models):
    for wrong in ({"other": models["prices"]}, {}):
        with pytest.raises(ValueError, match="by their own names"):
            create_app(wrong)


def test_a_sentence_can_be_sent_whatever_is_in_it():
    assert _sentence("half \ud800\n a letter..").encode() == b"half \\ud800 a letter."


def test_routes_and_methods_that_are_not_there(client):
    told(client.get("/nix"), 404)
    response = client.put("/predict")
    told(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.fixture(scope="module")
def tight(models, tmp_path_factory):
    """A server with small limits, a key and an audit log."""
    log = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    app = create_app({"prices": models["prices"]}, Limits(max_body=2000), api_key="s3cret", audit=log)
    with running(app) as client:
        client.headers["X-API-Key"] = "s3cret"
        client.log = log
        yield client


def test_a_body_may_not_be_larger_than_allowed_however_it_is_told(tight):
    row = json.dumps({"rows": [ROW]}).encode()
    for size, status in ((2000, 200), (2001, 413), (7000, 413), (100_000, 413)):
        body = row.ljust(size)
        head = {"content-type": "application/json"}
        assert tight.post("/predict", content=body, headers=head).status_code == status
        parts = (body[i : i + 500] for i in range(0, size, 500))
        if size <= 8000:
            assert tight.post("/predict", content=parts, headers=head).status_code == status


def test_the_key_opens_all_but_what_is_open(tight):
    key = tight.headers.pop("X-API-Key")
    try:
        for wrong in ({}, {"X-API-Key": "s3cre"}, {"X-API-Key": "s3cret2"}, {"X-API-Key": ""}):
            for path in ("/models", "/metrics", "/openapi.json", "/nix"):
                assert "X-API-Key" in told(tight.get(path, headers=wrong), 401)
            told(tight.post("/predict", json={"rows": [ROW]}, headers=wrong), 401)
        assert tight.get("/health").status_code == tight.get("/ready").status_code == 200
        assert tight.get("/").status_code in (200, 404)  # where there is a page
        assert tight.get("/page/none.js").status_code == 404
    finally:
        tight.headers["X-API-Key"] = key
    assert tight.get("/models").status_code == 200


def test_keys_are_compared_in_constant_time_whatever_bytes_they_are(tight, monkeypatch):
    compared = []

    def compare(given, right):
        compared.append((given, right))
        return hmac.compare_digest(given, right)

    monkeypatch.setattr(gate, "hmac", SimpleNamespace(compare_digest=compare))
    wrong = (b"\xff\x80", "schl\u00fcssel".encode(), b"s3cre\xe9", b"")
    for key in wrong:
        told(tight.get("/models", headers={b"X-API-Key": key}), 401)
    assert tight.get("/models").status_code == 200
    assert compared == [(key, b"s3cret") for key in (*wrong, b"s3cret")]


@pytest.mark.parametrize("key", ["", "k\u00e9y", " key", "key\n", "a\tb", "a\0b"])
def test_a_key_that_no_header_can_hold_is_refused(models, key):
    with pytest.raises(ValueError, match="`api_key` must be letters, digits and signs of ASCII"):
        create_app({"prices": models["prices"]}, api_key=key)


@pytest.mark.parametrize("route", ["/predict/", "/models/", "/health/"])
def test_nobody_is_sent_elsewhere(client, route):
    """A redirection would lead to the host that the client names."""
    for response in (client.get(route, headers={"Host": "evil.example"}), client.post(route, json={})):
        told(response, 404)


def test_the_audit_log_has_a_line_for_every_request_and_no_rows(tight):
    before = len(tight.log.read_text().splitlines())
    body = json.dumps({"rows": [ROW | {"town": "Secretville"}] * 2, "seed": 4}).encode()
    tight.post("/predict", content=body, headers={"content-type": "application/json"})
    tight.post("/predict", json={"model": "nix"})
    text = tight.log.read_text()
    first, second = (json.loads(line) for line in text.splitlines()[before:])
    assert first.pop("time").startswith("20")
    assert first == {
        "route": "/predict", "model": "prices", "rows": 2, "n_passes": 20, "seed": 4, "status": 200,
        "sha256": hashlib.sha256(body).hexdigest(),
    }  # fmt: skip
    assert (second["status"], second["model"]) == (404, None)
    assert "Secretville" not in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_no_answer_goes_out_without_its_line_in_the_audit_log(models):
    with running(create_app({"prices": models["prices"]}, audit="/dev/full")) as client:
        for _ in range(20):  # the connection is not used again: the server hangs up on it, sooner or later
            failed = ask(client, rows=[ROW])
            assert (failed.status_code, failed.headers["connection"]) == (500, "close")
            assert client.get("/health").status_code == 200


# ------------------------------------------------------------------------------ many at once


class Slow:
    """A model that can be held up."""

    def __init__(self, model):
        self._model, self.open = model, threading.Event()

    def __getattr__(self, name):
        return getattr(self._model, name)

    def answer(self, rows, **asked):
        self.open.wait(10)
        return self._model.answer(rows, **asked)


def waiting(client, n):
    """Until so many requests are with the service."""
    for _ in range(500):
        if count(client, "bbalpha_under_way") >= n + 1:
            return
        time.sleep(0.01)
    raise AssertionError("the requests did not arrive")


def test_requests_that_wait_are_answered_by_one_pass_as_if_each_were_alone(models):
    slow = Slow(models["prices"])
    rows = [ROW | {"age": age} for age in range(20, 44)]
    with running(create_app({"prices": slow})) as client, ThreadPoolExecutor(24) as pool:
        requests = [pool.submit(ask, client, rows=[row]) for row in rows]
        waiting(client, 24)
        slow.open.set()
        together = [r.result().json()["predictions"][0] for r in requests]
        assert count(client, "bbalpha_batch_requests_count") == 2
        assert count(client, "bbalpha_batch_requests_sum") == count(client, "bbalpha_rows_total") == 24
        assert together == [ask(client, rows=[row]).json()["predictions"][0] for row in rows]


def test_a_full_queue_a_late_answer_and_the_end(models):
    slow = Slow(models["prices"])
    app = create_app({"prices": slow}, Limits(max_queue=2, seconds=1.5))
    with running(app) as client, ThreadPoolExecutor(6) as pool:
        requests = [pool.submit(ask, client, rows=[ROW]) for _ in range(3)]
        waiting(client, 3)
        full = ask(client, rows=[ROW])
        assert "Too many requests" in told(full, 429)
        assert int(full.headers["retry-after"]) >= 1
        told(client.get("/ready"), 503)
        assert client.get("/health").status_code == 200
        assert {told(r.result(), 504)[:24] for r in requests} == {"The answer took longer t"}
        slow.open.set()
        assert ask(client, rows=[ROW]).status_code == 200
        app.state.service.traffic.draining = True
        for response in (ask(client, rows=[ROW]), client.get("/ready")):
            assert "about to end" in told(response, 503)
            assert int(response.headers["retry-after"]) >= 1
        assert client.get("/health").status_code == 200


def test_fifty_clients_and_not_one_failure(client):
    def one(number):
        with httpx.Client(base_url=client.base_url, timeout=30) as own:
            found = []
            for i in range(4):
                name = ("prices", "bands", "shapes")[(number + i) % 3]
                body = {"image": IMAGE} if name == "shapes" else {"rows": [ROW | {"age": number}]}
                found.append((name, ask(own, model=name, **body)))
            return found

    with ThreadPoolExecutor(50) as pool:
        found = [answer for answers in pool.map(one, range(50)) for answer in answers]
    assert {r.status_code for _, r in found} == {200}
    images = {r.text for name, r in found if name == "shapes"}
    assert len(images) == 1


def test_a_request_that_is_cut_off_is_not_taken_for_a_whole_one(client):
    url, before = client.base_url, count(client, "bbalpha_rows_total")
    start = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
    whole = json.dumps({"model": "prices", "rows": [ROW]}).encode()
    for head in (start + whole, start + b"{", b"POST /predi", b"\0\1\2\r\n\r\n"):
        with socket.create_connection((url.host, url.port)) as raw:
            raw.sendall(head)
            time.sleep(0.05)
    for _ in range(100):
        if count(client, "bbalpha_under_way") == 1:
            break
        time.sleep(0.02)
    assert count(client, "bbalpha_under_way") == 1
    assert count(client, "bbalpha_rows_total") == before
    assert ask(client, model="prices", rows=[ROW]).status_code == 200
