"""The digit model of the page: it knows digits, and knows less of what is none."""

import numpy as np
import pytest
import torch

import bbalpha
from bbalpha.attacks import fgsm
from bbalpha.checkpoint import read_folder
from bbalpha.detection import Detector
from bbalpha.experiments.digits import altered, digits, score, scribbles, train_digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("digits") / "model"
    told = train_digits(path, epochs=4, progress=False)
    return path, told


def test_the_folder_holds_a_model_for_images_and_its_detector(folder):
    path, told = folder
    facts = read_folder(path).content["training"]
    assert facts["image"] == {"shape": [8, 8]}
    assert facts["classes"] == [str(c) for c in range(10)]
    assert facts["scores"] == told["scores"]
    net = bbalpha.load(path)
    detector = Detector.load(path, net)
    assert (detector.score, detector.false_alarm, detector.seed) == ("mutual_information", 0.05, 0)
    assert score(detector, *digits().test) == pytest.approx(told["scores"])


def test_held_out_digits_are_recognised_as_they_are_and_altered(folder):
    net, (x, y) = bbalpha.load(folder[0]), digits().test
    p = bbalpha.predict_classification(net, x, seed=0)
    assert (p.label == y).double().mean() > 0.9
    q = bbalpha.predict_classification(net, altered(x, torch.Generator().manual_seed(5)), seed=0)
    assert (q.label == y).double().mean() > 0.7


def test_the_model_knows_less_of_attacked_digits_and_of_scribbles(folder):
    net, (x, _) = bbalpha.load(folder[0]), digits().test

    def ignorance(rows):
        return bbalpha.predict_classification(net, rows, seed=0).mutual_information.mean()

    clean = ignorance(x)
    assert ignorance(fgsm(net, x, step=0.1, seed=0)) > 1.3 * clean
    assert ignorance(scribbles(200)) > 1.3 * clean


def test_no_row_is_in_two_parts():
    from sklearn.datasets import load_digits

    parts = digits(seed=3)
    rows = torch.cat([parts.train[0], parts.clean[0], parts.test[0]])
    images = load_digits().data / 16
    assert np.allclose(np.sort(rows.sum(1).numpy()), np.sort(images.sum(1)), atol=1e-5)
    assert len(rows) == len(images)


def test_the_same_seed_trains_the_same_model_and_leaves_the_generator_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("bbalpha.experiments.digits._COPIES", 1)
    before = torch.random.get_rng_state()
    for name in ("a", "b"):
        train_digits(tmp_path / name, seed=4, epochs=1, progress=False)
    assert torch.equal(before, torch.random.get_rng_state())
    a, b = (bbalpha.load(tmp_path / name).state_dict() for name in ("a", "b"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_altered_and_scribbled_pictures_are_pictures_with_as_much_ink_as_digits():
    x = digits().train[0][:300]
    ink = x.sum(1).mean()
    for rows in (altered(x, torch.Generator().manual_seed(0)), scribbles(100, seed=2)):
        assert rows.min() >= 0
        assert rows.max() <= 1
        assert 0.5 * ink < rows.sum(1).mean() < 2 * ink
    assert torch.equal(scribbles(3, seed=1), scribbles(3, seed=1))
    assert not torch.equal(scribbles(3, seed=1), scribbles(3, seed=2))


def test_wrong_epochs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="epochs"):
        train_digits(tmp_path / "model", epochs=0)
