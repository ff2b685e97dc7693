"""`ImageModel`: a classifier of small grey images out of a model folder, with the K votes behind each answer.

The folder is one of `bbalpha.save(net, path, training={"image": {"shape": [8, 8]}, "classes": ["0", ...]})`; images go
in row by row as one vector of numbers in [0, 1], logits come out. A `Detector` saved in it says what is unusual.

model = ImageModel.load("digits")
model.predict(images, n_passes=100, seed=1)        # images (N, 8, 8)
model.attack(image, step=0.1)                      # the image, a step away from its label
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bbalpha.attacks import fgsm
from bbalpha.checkpoint import load, read_folder
from bbalpha.detection import Detector
from bbalpha.prediction import predict_classification
from bbalpha.predictive import ClassificationPrediction

Answer = dict[str, Any]
N_PASSES, SEED = 100, 0  # of a folder without a detector
_ATTACK_PASSES = 20


@dataclass(frozen=True)
class ImageModel:
    """A network for images, its classes, and what is usual.

    Attributes:
        name: By which it is asked for.
        network: Images as rows (N, H * W) -> logits (N, C), in double precision.
        shape: Of an image, (H, W).
        classes: Their names.
        score: What `threshold` is of.
        threshold: Scores above it are unusual; None where no detector was saved.
        n_passes: Where a request does not say: those of the detector.
        seed: Where a request does not say: that of the detector.
        scores: How good it is, as the folder has it.
    """

    name: str
    network: nn.Module
    shape: tuple[int, int]
    classes: tuple[str, ...]
    score: str = "mutual_information"
    threshold: float | None = None
    n_passes: int = N_PASSES
    seed: int = SEED
    scores: Mapping[str, float] = field(default_factory=dict)
    task: str = "image"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ImageModel":
        """The model in a folder, named like it."""
        facts = read_folder(path).content.get("training", {})
        shape, classes = _told(facts, path)
        network = load(path)
        settings: dict[str, Any] = {"scores": _numbers(facts.get("scores"))}
        if (Path(path) / "detector.json").is_file():
            detector = Detector.load(path, network)
            settings |= {"score": detector.score, "threshold": detector.threshold}
            settings |= {"n_passes": detector.n_passes or N_PASSES, "seed": detector.seed or SEED}
        model = cls(Path(path).resolve().name, network.double(), shape, classes, **settings)
        got = model.passes(torch.zeros(1, shape[0] * shape[1], dtype=torch.float64), 2, 0).probs.shape
        if got != (1, len(classes)):
            raise ValueError(f"{str(path)!r} must give logits (N, {len(classes)}), one a class; got {tuple(got)}.")
        return model

    def passes(self, x: Tensor, n_passes: int, seed: int) -> ClassificationPrediction:
        """The predictive distribution of images as rows (N, H * W)."""
        # masks shared by all rows, in double precision: an image is answered alike in any company
        return predict_classification(self.network, x, n_passes=n_passes, masks="shared", seed=seed, progress=False)

    def predict(self, images: Any, n_passes: int | None = None, seed: int | None = None) -> ClassificationPrediction:
        """The predictive distribution of images (N, H, W) with numbers from 0 to 1."""
        x = torch.stack([torch.as_tensor(image) for image in self.read(images)])
        return self.passes(x, n_passes or self.n_passes, self.seed if seed is None else seed)

    def attack(self, image: Any, step: float) -> NDArray[Any]:
        """The image (H, W) after one step of the fast gradient sign method away from the label that it is given."""
        (moved,) = self.attacked(self.read([image]), step)
        return np.asarray(moved)

    def attacked(self, rows: Sequence[NDArray[Any]], step: float) -> list[list[list[float]]]:
        """Each of the images that were read after such a step, as nested lists (H, W)."""
        x = torch.as_tensor(np.stack(rows))
        moved = fgsm(self.network, x, step=step, n_passes=_ATTACK_PASSES, masks="shared", seed=self.seed)
        found: list[list[list[float]]] = moved.reshape(-1, *self.shape).tolist()
        return [[[float(f"{v:.10g}") for v in line] for line in image] for image in found]

    def facts(self) -> Answer:
        """What GET /models says of it."""
        return {
            "name": self.name, "task": self.task, "target": "label", "classes": list(self.classes), "fields": [],
            "scores": dict(self.scores), "guess": {}, "threshold": self.threshold, "n_passes": self.n_passes,
            "seed": self.seed, "image": {"shape": list(self.shape)},
        }  # fmt: skip

    def example(self) -> list[list[float]]:
        """An empty image."""
        return np.zeros(self.shape).tolist()

    def read(self, rows: Sequence[Any]) -> list[NDArray[Any]]:
        """Images as JSON has them, each as one vector (H * W,).

        Raises:
            ValueError: If one has another shape, or numbers that are not between 0 and 1.
        """
        found = []
        for image in rows:
            lines = [np.asarray(line) for line in image]
            height, width = self.shape
            if len(lines) != height or any(line.shape != (width,) or line.dtype.kind not in "iuf" for line in lines):
                raise ValueError(f"`image` must be {height} lines of {width} numbers; it is not.")
            values = np.concatenate(lines).astype(np.float64)
            outside = values[~((values >= 0) & (values <= 1))]
            if len(outside):
                raise ValueError(f"`image` must hold numbers from 0 to 1; got {float(outside[0]):.6g}.")
            found.append(values)
        return found

    def answer(self, rows: Sequence[NDArray[Any]], *, n_passes: int, seed: int, coverage: float) -> list[Answer | None]:
        """What it says of each image: label, probabilities and votes; `coverage` is of no use for classes."""
        prediction = self.passes(torch.as_tensor(np.stack(rows)), n_passes, seed)
        scores = getattr(prediction, self.score).tolist()
        counts = (prediction.votes * n_passes).round().long().tolist()
        probs, entropy = prediction.probs.tolist(), prediction.entropy.tolist()
        columns = (probs, entropy, prediction.mutual_information.tolist(), counts, scores)
        return [self._told(*row) for row in zip(*columns, strict=True)]

    def _told(self, probs: list[float], entropy: float, mutual: float, votes: list[int], score: float) -> Answer | None:
        if not all(map(math.isfinite, (*probs, entropy, mutual))):
            return None
        best = max(range(len(probs)), key=probs.__getitem__)
        return {
            "label": self.classes[best],
            "probs": {c: round(p, 10) for c, p in zip(self.classes, probs, strict=True)},
            "entropy": round(entropy, 10),
            "mutual_information": round(mutual, 10),
            "votes": dict(zip(self.classes, votes, strict=True)),
            "unusual": self.threshold is not None and score > self.threshold,
        }


def is_image_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a model folder holds a network of our own saving that says of itself that it takes images."""
    content = read_folder(path).content
    training = content.get("training")
    return content.get("kind") == "model" and isinstance(training, dict) and "image" in training


def _numbers(told: Any) -> dict[str, float]:
    """What of it is finite numbers by name."""
    items = told.items() if isinstance(told, Mapping) else ()
    return {str(k): float(v) for k, v in items if type(v) in (int, float) and math.isfinite(v)}


def _told(facts: Any, path: Any) -> tuple[tuple[int, int], tuple[str, ...]]:
    """The shape of images and the names of the classes, as the folder has them."""
    try:
        height, width = (int(size) for size in facts["image"]["shape"])
        classes = tuple(str(c) for c in facts["classes"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} must say what it takes; save it with training="
            '{"image": {"shape": [8, 8]}, "classes": ["0", "1"]}.'
        ) from error
    if height < 1 or width < 1 or len(classes) < 2 or len(set(classes)) != len(classes):
        raise ValueError(f"{str(path)!r} must have an image with lines and two classes of different names.")
    return (height, width), classes
