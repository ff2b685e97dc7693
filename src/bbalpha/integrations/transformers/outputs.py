"""Predictions through the arrays of a Trainer: taken apart batch by batch, joined in the end, shown as logits are.

parts = parts_of(prediction)                             # tensors, rows first
joined("classes", parts, n_passes=50, precision=None)    # the prediction again, of arrays too
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import EvalPrediction
from transformers.trainer_utils import PredictionOutput

from bbalpha.integrations.transformers.heads import IGNORED, Kind, Prediction
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction


class AlphaPredictionOutput(PredictionOutput):
    """What `Trainer.predict` returns, three things to unpack, and our prediction beside them.

    Attributes:
        predictions: What stands for logits: log-probabilities of classes, log-odds of yes/no labels, means of numbers.
        label_ids: As in Trainer.
        metrics: As in Trainer, with the predictive negative log-likelihood as "test_nll".
        prediction: A ClassificationPrediction or RegressionPrediction of all rows.
    """

    prediction: Prediction


def parts_of(prediction: Prediction) -> tuple[Tensor, ...]:
    """What a prediction is made of, rows first, so that batches can be joined."""
    if isinstance(prediction, RegressionPrediction):
        return (prediction.outputs.movedim(0, 1),)
    return prediction.log_probs, prediction.expected_entropy, prediction.votes


def shown(kind: Kind, parts: Sequence[Any]) -> Any:
    """What stands in the place of logits: log-probabilities, log-odds or means, of tensors or of arrays."""
    if kind == "numbers":
        return parts[0].mean(1)
    return parts[0][..., 1] - parts[0][..., 0] if kind == "yes_no" else parts[0]


def joined(kind: Kind, parts: Sequence[Any], n_passes: int | None, precision: float | None) -> Prediction:
    """The prediction of all rows, of arrays; positions that fill up shorter rows are certain of nothing, and 0."""
    tensors, drawn = [torch.as_tensor(part) for part in parts], n_passes is not None
    if kind == "numbers":
        tau = None if precision is None else torch.tensor(precision)
        return RegressionPrediction(tensors[0].movedim(1, 0).contiguous(), tau, drawn)
    log_probs, entropy, votes = tensors
    filled = entropy == IGNORED
    return ClassificationPrediction(
        log_probs, entropy.masked_fill(filled, 0.0), votes.masked_fill(filled.unsqueeze(-1), 0.0), n_passes or 1,
        log_probs.ndim - 1, drawn,
    )  # fmt: skip


def of_parts(metrics: Callable[..., Any] | None, preprocess: Callable[..., Any] | None) -> tuple[Any, Any]:
    """The functions of a caller who knows of logits, where a batch gives what stands for them, and its parts behind."""

    def measured(given: EvalPrediction, **options: Any) -> Any:
        of_first = EvalPrediction(given.predictions[0], given.label_ids, given.inputs, given.losses)
        return metrics and metrics(of_first, **options)

    def preprocessed(given: tuple[Tensor, ...], labels: Any) -> tuple[Any, ...]:
        return (preprocess(given[0], labels) if preprocess else given[0], *given[1:])

    return metrics and measured, preprocessed
