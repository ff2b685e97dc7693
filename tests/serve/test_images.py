"""Models of images: labels, votes and what is unusual; attacks; folders that do not say what they take."""

import numpy as np
import pytest
import torch
from served import image_network

import bbalpha
from bbalpha import Detector
from bbalpha.serve.images import ImageModel

ASKED = {"n_passes": 30, "seed": 7, "coverage": 0.9}


@pytest.fixture(scope="module")
def model(folders):
    return ImageModel.load(folders["shapes"])


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(1).random((40, 3, 4))


def test_an_answer_is_the_prediction_of_the_network(model, images):
    x = torch.as_tensor(images.reshape(40, 12))
    expected = bbalpha.predict_classification(image_network().double(), x, n_passes=30, masks="shared", seed=7)
    got = model.answer(model.read(images.tolist()), **ASKED)
    assert [model.classes.index(a["label"]) for a in got] == expected.label.tolist()
    np.testing.assert_allclose([[*a["probs"].values()] for a in got], expected.probs, atol=1e-9)
    np.testing.assert_allclose([a["mutual_information"] for a in got], expected.mutual_information, atol=1e-9)
    np.testing.assert_allclose(model.predict(images, 30, 7).entropy, [a["entropy"] for a in got], atol=1e-9)


def test_each_pass_has_a_vote(model, images):
    for answer in model.answer(model.read(images.tolist()), **ASKED):
        assert sum(answer["votes"].values()) == 30
        assert [*answer["votes"]] == ["ring", "bar", "dot"]


def test_the_detector_of_the_folder_says_what_is_unusual(folders, model, images):
    network = bbalpha.load(folders["shapes"])
    flags = Detector.load(folders["shapes"], network).flag(torch.as_tensor(images.reshape(40, 12), dtype=torch.float32))
    got = [a["unusual"] for a in model.answer(model.read(images.tolist()), **ASKED)]
    assert got == flags.tolist()
    assert any(a["unusual"] for a in model.answer(model.read(3 * [np.eye(3, 4).tolist()]), **ASKED)) or any(got)


def test_an_attack_moves_every_point_by_its_step_away_from_the_label(model, images):
    for image in images[:5]:
        before = model.predict(image[None], 20)
        moved = model.attack(image, 0.05)
        assert moved.shape == (3, 4)
        assert abs(moved - image).max() <= 0.05 + 1e-9
        assert (moved >= 0).all()
        assert (moved <= 1).all()
        after = model.predict(moved[None], 20)
        assert after.probs[0, before.label] < before.probs[0, before.label]
        np.testing.assert_array_equal(model.attack(image, 0.05), moved)
    np.testing.assert_allclose(model.attack(images[0], 0.0), images[0], atol=1e-9)


@pytest.mark.parametrize(
    "image", [[], [[0.1] * 4] * 2, [[0.1] * 3] * 3, [[0.1] * 4, [0.1] * 3, [0.1] * 4], [[2.0] * 4] * 3,
              [[-0.1] * 4] * 3, [[float("nan")] * 4] * 3, [["a"] * 4] * 3, [[[0.1]] * 4] * 3],
)  # fmt: skip
def test_what_is_no_image_of_its_kind_is_refused(model, image):
    with pytest.raises(ValueError, match="`image` must"):
        model.read([image])


@pytest.mark.parametrize(
    "told",
    [
        {"image": {}, "classes": ["a", "b", "c"]},
        {"image": {"shape": [3, 4]}},
        {"image": {"shape": [3, 4]}, "classes": ["a", "a", "b"]},
        {"image": {"shape": [3, 4]}, "classes": ["a", "b"]},
        {"image": {"shape": [12]}, "classes": ["a", "b", "c"]},
    ],
)
def test_a_folder_must_say_what_it_takes(tmp_path, told):
    bbalpha.save(image_network(), tmp_path / "odd", training=told)
    with pytest.raises(ValueError, match=r"must (say|have|give)"):
        ImageModel.load(tmp_path / "odd")


def test_without_a_detector_nothing_is_unusual(tmp_path, images):
    bbalpha.save(image_network(), tmp_path / "net", training={"image": {"shape": [3, 4]}, "classes": ["a", "b", "c"]})
    model = ImageModel.load(tmp_path / "net")
    assert not any(a["unusual"] for a in model.answer(model.read(images.tolist()), **ASKED))
    assert (model.name, model.n_passes, model.seed, model.facts()["scores"]) == ("net", 100, 0, {})
