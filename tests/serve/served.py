"""Three small models, and a real server on a real port."""

import threading
import time
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import torch

from bbalpha import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.serve.running import _listening, _server
from bbalpha.tabular.fields import describe
from bbalpha.tabular.model import Card, TableModel

pandas = pytest.importorskip("pandas")
pytest.importorskip("uvicorn")

SMALL = {"hidden_layer_sizes": (10,), "epochs": 5, "n_ensemble": 1, "random_state": 0, "n_predict_passes": 20}
ROW = {"age": 40.0, "town": "Rome", "since": "2020-06-01", "member": True}


def houses():
    """Numbers with gaps, text, dates and truth values, and a target that hangs on them."""
    rng = np.random.default_rng(0)
    age = rng.uniform(20, 60, 200)
    frame = pandas.DataFrame(
        {
            "age": np.where(rng.random(200) < 0.1, np.nan, age),
            "town": rng.choice(["Rome", "Oslo", "Lima"], 200),
            "since": pandas.Timestamp("2019-01-01") + pandas.to_timedelta(rng.integers(0, 900, 200), unit="D"),
            "member": rng.random(200) < 0.5,
        }
    )
    return frame, 2.0 * age + 30 * (frame["town"] == "Rome").to_numpy() + rng.normal(size=200)


def table_model(kind):
    frame, y = houses()
    if kind == "regression":
        estimator = BBAlphaRegressor(noise="constant", **SMALL).fit(frame, y)
    else:
        estimator = BBAlphaClassifier(**SMALL).fit(frame, np.where(y > y.mean(), "dear", "cheap"))
    fields = tuple(describe(frame[name], name) for name in frame.columns)
    return TableModel(estimator, Card(kind, "price", fields, threshold=6.0 if kind == "regression" else 0.5))


def image_network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 3)]
        net = torch.nn.Sequential(*layers)
        with torch.no_grad():
            net[3].weight.mul_(6)
    return net


@contextmanager
def running(app):
    """A client of our server in a thread; the server itself is its attribute `server`."""
    server, listening = _server(app, app.state.service.limits, ()), _listening("127.0.0.1", 0)
    port = listening.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            client.server = server
            yield client
    finally:
        server.should_exit = True
        thread.join()
