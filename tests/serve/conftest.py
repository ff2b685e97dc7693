"""Three small models in folders, and a client of a server of them."""

import pytest
import torch
from served import image_network, running, table_model

import bbalpha
from bbalpha import Detector
from bbalpha.serve.app import create_app
from bbalpha.serve.models import load_models


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Paths of "prices" (a quantity), "bands" (classes), "shapes" (images of 3 lines of 4 points)."""
    root = tmp_path_factory.mktemp("models")
    table_model("regression").save(root / "prices")
    table_model("classification").save(root / "bands")
    net = image_network()
    told = {"image": {"shape": [3, 4]}, "classes": ["ring", "bar", "dot"]}
    bbalpha.save(net, root / "shapes", alpha=0.5, training=told)
    generator = torch.Generator().manual_seed(0)
    detector = Detector(net, score="mutual_information", n_passes=30, seed=7)
    detector.fit(torch.rand(100, 12, generator=generator)).save(root / "shapes")
    return {name: root / name for name in ("prices", "bands", "shapes")}


@pytest.fixture(scope="session")
def models(folders):
    return load_models(folders.values())


@pytest.fixture(scope="module")
def client(models):
    with running(create_app(models)) as client:
        yield client
