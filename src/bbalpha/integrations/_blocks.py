"""Predictions of passes that ran in another framework, block of rows by block of rows: (K, n, ...) each."""

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from bbalpha.checks import check_number
from bbalpha.prediction import classification_of
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction


def classification_of_blocks(blocks: Iterable[Tensor]) -> ClassificationPrediction:
    """The predictive distribution over classes, from logits (K, n, ..., C) with the classes last.

    >>> classification_of_blocks([torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)]).probs.shape
    torch.Size([8, 4])
    """
    parts = [classification_of(block, class_axis=-1) for block in _checked(blocks)]
    return ClassificationPrediction(
        torch.cat([part.log_probs for part in parts]),
        torch.cat([part.expected_entropy for part in parts]),
        torch.cat([part.votes for part in parts]),
        parts[0].n_passes,
        parts[0].class_axis,
    )


def regression_of_blocks(
    blocks: Iterable[Tensor], precision: float | Literal["predicted"] | None
) -> RegressionPrediction:
    """The predictive distribution of a real target, from means (K, n, D).

    With a predicted precision the last axis holds the means and after them their log precisions (K, n, 2 D).

    >>> regression_of_blocks([torch.zeros(2, 3, 2)], "predicted").aleatoric_std.squeeze()
    tensor([1., 1., 1.])
    """
    if precision is not None and precision != "predicted":
        precision = check_number("precision", precision, above=0)
    outputs = torch.cat(list(_checked(blocks)), 1)
    if precision != "predicted":
        return RegressionPrediction(outputs, None if precision is None else outputs.new_tensor(precision))
    if outputs.ndim < 3 or outputs.shape[-1] % 2:
        raise ValueError(
            'the model must return means and log precisions (N, 2 D) where precision="predicted"; got '
            f"{tuple(outputs.shape[1:])}. Give its last layer two units an output."
        )
    mean, log_precision = outputs.chunk(2, -1)
    return RegressionPrediction(mean.contiguous(), log_precision.exp())


def _checked(blocks: Iterable[Tensor]) -> Iterator[Tensor]:
    """The blocks; the first number that is none is told with its pass and row."""
    start = 0
    for block in blocks:
        bad = ~block.isfinite()
        if bool(bad.any()):
            place = bad.nonzero()[0].tolist()
            value, k, n = float(block[tuple(place)]), place[0], start + place[1]
            raise ValueError(f"the model must return finite numbers; got {value} in pass {k}, row {n}.")
        yield block
        start += block.shape[1]
