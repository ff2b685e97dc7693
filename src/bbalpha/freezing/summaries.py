"""What is wanted of K passes, as modules to put behind a frozen model: nothing but that has to leave it.

net = nn.Sequential(freeze(model, 20, seed=0), ClassificationSummary())
net(x)                              # probs (N, C), entropy (N,), mutual_information (N,)
"""

import math
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from bbalpha.checks import check_number, check_whole
from bbalpha.prediction import Output, as_logits, as_means, pick


class Classes(NamedTuple):
    """Of every row (pixel, token), in nats; as `bbalpha.predict_classification` gives them.

    Attributes:
        probs: Mean probability over passes (N, C, ...).
        entropy: Of these, the whole uncertainty (N, ...).
        mutual_information: The part of it that more training data would settle (N, ...).
    """

    probs: Tensor
    entropy: Tensor
    mutual_information: Tensor


class Numbers(NamedTuple):
    """Of every row and output, as `bbalpha.predict_regression` gives them.

    Attributes:
        mean: Of the mixture (N, ...).
        std: Of the mixture: epistemic and aleatoric together (N, ...).
        epistemic_std: Over passes alone (N, ...).
    """

    mean: Tensor
    std: Tensor
    epistemic_std: Tensor


class ClassificationSummary(nn.Module):
    """Logits of passes (K, N, C, ...) -> `Classes`.

    Args:
        temperature: As in `bbalpha.predict_classification`.
        class_axis: As there: -1 for tokens (K, N, T, C).
        output: As there: what to read of a model that returns several things.

    >>> import torch
    >>> probs, entropy, mutual_information = ClassificationSummary()(torch.tensor([[[5.0, 0.0]], [[0.0, 5.0]]]))
    >>> probs, mutual_information > 0.5
    (tensor([[0.5000, 0.5000]]), tensor([True]))
    """

    def __init__(self, *, temperature: float = 1.0, class_axis: int | None = None, output: Output = None) -> None:
        super().__init__()
        self.temperature = check_number("temperature", temperature, above=0)
        if class_axis is not None:
            check_whole("class_axis", class_axis)
        self.class_axis, self.output = class_axis, output

    def forward(self, outputs: Any) -> Classes:
        """The summary of the outputs of a frozen model."""
        logits = as_logits(pick(outputs, self.output), self.class_axis) / self.temperature
        _check_passes(logits)
        axis = 2 if self.class_axis is None else self.class_axis % logits.ndim
        log_p = logits.log_softmax(axis)  # (K, N, C, ...)
        log_probs = log_p.logsumexp(0) - math.log(len(log_p))
        entropy = _entropy(log_probs, axis - 1)
        return Classes(log_probs.exp(), entropy, (entropy - _entropy(log_p, axis).mean(0)).clamp_min(0.0))


class RegressionSummary(nn.Module):
    """Outputs of passes (K, N, ...) -> `Numbers`.

    Args:
        precision: As in `bbalpha.predict_regression`: tau, "predicted" by the model, or None for no noise.
        output: As there: what to read of a model that returns several things.

    >>> import torch
    >>> mean, std, epistemic_std = RegressionSummary(precision=1.0)(torch.tensor([[[-1.0]], [[1.0]]]))
    >>> mean, std, epistemic_std
    (tensor([[0.]]), tensor([[1.4142]]), tensor([[1.]]))
    """

    def __init__(self, *, precision: float | Literal["predicted"] | None = None, output: Output = None) -> None:
        super().__init__()
        predicted = isinstance(precision, str)
        if predicted and precision != "predicted":
            raise ValueError(f'`precision` must be None, a number or "predicted"; got {precision!r}.')
        known = precision is not None and not predicted
        self.precision = check_number("precision", precision, above=0) if known else precision
        self.output = output

    def forward(self, outputs: Any) -> Numbers:
        """The summary of the outputs of a frozen model."""
        mean, *log_precision = as_means(pick(outputs, self.output), predicted=self.precision == "predicted")
        _check_passes(mean)
        if log_precision:
            noise: Any = log_precision[0].neg().exp().mean(0)
        else:
            noise = 0.0 if self.precision is None else 1 / float(self.precision)
        spread = (mean - mean.mean(0)).square().mean(0)
        return Numbers(mean.mean(0), (spread + noise).sqrt(), spread.sqrt())


def _entropy(log_p: Tensor, axis: int) -> Tensor:
    return -(log_p.exp() * log_p.clamp_min(-1e30)).sum(axis)  # 0 log 0 = 0


def _check_passes(outputs: Tensor) -> None:
    if len(outputs) < 2:
        raise ValueError(f"`outputs` must have at least 2 passes to see a spread; got {len(outputs)}.")
