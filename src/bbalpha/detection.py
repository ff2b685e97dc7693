"""Is this input like the training data? A threshold on uncertainty, with a guaranteed rate of false alarms.

`Detector` scores inputs by how unsure the model is, and raises the alarm above a conformal threshold: the
ceil((n + 1)(1 - a))-th smallest score of n clean rows. A new clean row, from where these come from, is flagged with
probability at most a, whatever the model; how many strange inputs are caught depends on the model, and is reported.

    detector = Detector(net, score="entropy", false_alarm=0.05).fit(x_held_out)
    suspicious = detector.flag(x_new)
    detector.save("model"); Detector.load("model", net)            # detector.json, beside the model's files
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from bbalpha import _files as folders
from bbalpha import metrics
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import is_random
from bbalpha.checks import check_count, check_inner_share, check_model, check_path, check_seed
from bbalpha.metrics.numbers import finite
from bbalpha.prediction import predict_classification
from bbalpha.predictive import ClassificationPrediction

Score = Literal["entropy", "mutual_information", "variation_ratio"]
_SCORES = ("entropy", "mutual_information", "variation_ratio")
_FILE, _FORMAT = "detector.json", 1


@dataclass(frozen=True)
class DetectionReport:
    """How well scores tell other inputs from clean ones.

    Attributes:
        auroc: The chance that one of the others scores higher than a clean row; 0.5 is guessing.
        aupr: Area under precision against recall; depends on how many there are of either.
        fpr95: Share of false alarms with a threshold that catches 95% of the others.
        false_alarms: Share of clean rows that are flagged, at the fitted threshold.
        caught: Share of the others that are flagged, at the fitted threshold.
    """

    auroc: float
    aupr: float
    fpr95: float
    false_alarms: float
    caught: float


class Detector:
    """Flags inputs on which a classifier is less sure than on all but a share `false_alarm` of clean ones.

    Args:
        model: A classifier that returns logits (N, C). One without any random site is scored as it is: it has an
            entropy and nothing else.
        score: "entropy", "mutual_information" or "variation_ratio" of the prediction.
        false_alarm: The largest share of clean inputs to be flagged.
        n_passes: K; None takes any model for one without random sites.
        seed: None draws fresh masks for every row; an int fixes K networks, so that a row always scores the same.
            The guarantee holds with both.
        batch_size: Rows at a time; None chooses by memory.

    Attributes:
        threshold: Scores above it are flagged; None before `fit`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    >>> detector = Detector(net, false_alarm=0.1).fit(torch.randn(200, 2))
    >>> detector.flag(torch.randn(5, 2)).shape
    torch.Size([5])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        score: Score = "entropy",
        false_alarm: float = 0.05,
        n_passes: int | None = 100,
        seed: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        check_model(model)
        if score not in _SCORES:
            raise ValueError(f"`score` must be one of {', '.join(_SCORES)}; got {score!r}.")
        check_inner_share("false_alarm", false_alarm)
        n_passes = None if n_passes is None else check_count("n_passes", n_passes)
        batch_size = None if batch_size is None else check_count("batch_size", batch_size)
        check_seed(seed)
        self.model, self.score, self.false_alarm = model, score, false_alarm
        self.n_passes, self.seed, self.batch_size = n_passes, seed, batch_size
        self.threshold: float | None = None

    def fit(self, x_clean: Any) -> Self:
        """Choose the threshold on clean inputs that were not trained on; returns the detector itself.

        Args:
            x_clean: What `predict_classification` takes: a tensor, a tuple, a mapping, or an iterable of these.
        """
        self.threshold = conformal_threshold(self.scores(x_clean), self.false_alarm)
        return self

    def scores(self, x: Any) -> Tensor:
        """How unsure the model is of every row, larger for the stranger (N,)."""
        scores: Tensor = getattr(self._predict(x), self.score)
        if scores.ndim != 1:
            raise ValueError(
                f"`model` must return logits of one label a row, (N, C); got scores {tuple(scores.shape)}."
            )
        return scores

    def flag(self, x: Any) -> Tensor:
        """Whether every row scores above the threshold, as bool (N,)."""
        return self.scores(x) > self._fitted()

    def report(self, x_clean: Any, x_other: Any) -> DetectionReport:
        """How well the scores tell `x_other` from `x_clean`; neither may have been fitted on."""
        threshold = self._fitted()
        clean, other = self.scores(x_clean), self.scores(x_other)
        scores = torch.cat((clean, other))
        positive = torch.arange(len(scores), device=scores.device) >= len(clean)
        return DetectionReport(
            auroc=metrics.auroc(scores, positive).item(),
            aupr=metrics.aupr(scores, positive).item(),
            fpr95=metrics.fpr95(scores, positive).item(),
            false_alarms=(clean > threshold).double().mean().item(),
            caught=(other > threshold).double().mean().item(),
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the fitted detector into the folder of its model, as detector.json, whole or not at all.

        The file names the weights it belongs to by their hash; a model saved anew in the folder leaves it out.
        """
        state = {
            "format": _FORMAT,
            "score": self.score,
            "false_alarm": self.false_alarm,
            "n_passes": self.n_passes,
            "seed": self.seed,
            "threshold": self._fitted(),
            "weights": _weights_hash(self.model),
        }
        target = Path(os.path.realpath(folder))
        if not target.is_dir():
            raise FileNotFoundError(f"`folder` must exist, from bbalpha.save(model, path); {str(folder)!r} does not.")
        with folders.writing(target):  # while it is replaced by another model, it would be lost
            folders.replace_file(target / _FILE, _file(state))

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: nn.Module) -> "Detector":
        """The detector that was saved in `folder`, for the model of that folder.

        Args:
            folder: A model folder that a detector was saved in.
            model: ``bbalpha.load(folder)``.

        Raises:
            ValueError: If the file has changed, or belongs to other weights than those of `model`.
        """
        path = Path(check_path("folder", folder)) / _FILE
        if not path.is_file():
            raise FileNotFoundError(f"{str(folder)!r} holds no detector; fit one and call save({str(folder)!r}).")
        try:
            data = path.read_bytes()
            state = dict(json.loads(data)["detector"])
            whole = data == _file(state)
        except (ValueError, KeyError, TypeError, RecursionError):  # no JSON any more, or of another shape
            whole = False
        if not whole:
            raise ValueError(f"{str(path)!r} is damaged: it is not what was written. Fit and save the detector again.")
        form, threshold, weights = (state.pop(name, None) for name in ("format", "threshold", "weights"))
        if form != _FORMAT:
            raise ValueError(
                f"{str(path)!r} has format {form!r} and this bbalpha reads {_FORMAT}; fit the detector again."
            )
        if weights != _weights_hash(model):
            raise ValueError("`model` must have the weights the detector was fitted with; got others. Fit it again.")
        if set(state) != {"score", "false_alarm", "n_passes", "seed"} or not isinstance(threshold, float):
            raise ValueError(f"{str(path)!r} is not of the form that bbalpha writes. Fit and save the detector again.")
        detector = cls(model, **state)
        detector.threshold = threshold
        return detector

    def _predict(self, x: Any) -> ClassificationPrediction:
        if isinstance(x, Iterable) and not isinstance(x, (Tensor, tuple, list, Mapping)):
            batches = iter(x)
            first = next(batches, None)
            if first is None:
                raise ValueError("`x` must give at least one batch; got an iterable that is empty or used up.")
            x = chain((first,), batches)
        else:
            first = x
        n_passes = self.n_passes if is_random(self.model, Inputs.of(first, model=self.model)) else None
        if n_passes is None and self.score != "entropy":
            raise ValueError(
                f'`{self.score}` needs at least 2 passes that differ; `model` is run as it is. Use score="entropy".'
            )
        masks: Literal["per_example", "shared"] = "per_example" if self.seed is None else "shared"
        return predict_classification(
            self.model, x, n_passes=n_passes, masks=masks, seed=self.seed, batch_size=self.batch_size, class_axis=2
        )

    def _fitted(self) -> float:
        if self.threshold is None:
            raise RuntimeError("The detector must be fitted first; call fit(x_clean) with clean, held-out inputs.")
        return self.threshold


def conformal_threshold(scores: Tensor, false_alarm: float) -> float:
    """The ceil((n + 1)(1 - false_alarm))-th smallest of n clean scores: (n,) -> float.

    A further score from the same place lies above it with probability at most `false_alarm`; without ties at least
    ``false_alarm - 1 / (n + 1)``.

    >>> conformal_threshold(torch.arange(1.0, 100.0), 0.05)
    95.0
    """
    check_inner_share("false_alarm", false_alarm)
    n = len(finite("scores", scores, infinite=True))
    k = math.ceil((n + 1) * (1 - false_alarm) - 1e-9)
    if k > n:
        least = math.ceil(1 / false_alarm - 1e-9) - 1
        raise ValueError(f"`x_clean` must have at least {least} rows for a false-alarm rate of {false_alarm}; got {n}.")
    return float(scores.sort().values[k - 1])


def _weights_hash(model: nn.Module) -> str:
    """SHA-256 of the names and values of all weights."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _file(state: Mapping[str, Any]) -> bytes:
    """The bytes of detector.json: the state and its hash."""
    told = json.dumps(state, allow_nan=False)
    file = {"detector": state, "sha256": hashlib.sha256(told.encode()).hexdigest()}
    return json.dumps(file, indent=1, allow_nan=False).encode()
