"""Which likelihood a head of transformers has, K passes in front: the rules of the library, for K passes.

    classes     logits (K, N, C) and labels (N,); tokens (K, N, T, C) and labels (N, T), those of -100 left out
    numbers     one output a label (``num_labels=1``, or ``problem_type="regression"``), Gaussian noise
    yes_no      several labels a row, each by itself (``problem_type="multi_label_classification"``)

The label of position t of a causal language model is the token after it: labels are moved by one, as the models do.

    head = head_of(model)
    head.losses(logits, labels, alpha=0.5)               # (N,) or (N, T), 0 where a label does not count
    head.counts(labels)                                  # which of them do
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bbalpha._engine.batches import PassOptions, collect
from bbalpha._engine.settling import Where
from bbalpha.objectives import alpha_loss, binary_cross_entropy, cross_entropy, gaussian_nll, logits_of
from bbalpha.prediction import predict_classification, predict_regression
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction

Kind = Literal["classes", "numbers", "yes_no"]
Prediction = ClassificationPrediction | RegressionPrediction

IGNORED = -100
_PROBLEMS: dict[str, Kind] = {
    "regression": "numbers",
    "single_label_classification": "classes",
    "multi_label_classification": "yes_no",
}


@dataclass(frozen=True)
class Head:
    """The likelihood of a model's labels.

    Attributes:
        problem: The ``problem_type`` of its config.
        n_labels: The ``num_labels`` of its config; None where there is no config.
        shifted: Whether the label of a position is that of the next one.
    """

    problem: str | None
    n_labels: int | None
    shifted: bool

    def kind(self, labels: Tensor) -> Kind:
        """What the labels are, by the rules of transformers."""
        if self.problem in _PROBLEMS:
            return _PROBLEMS[self.problem]
        if self.n_labels == 1:
            return "numbers"
        if not labels.is_floating_point():
            return "classes"
        if self.n_labels is None:
            raise ValueError(
                f"`labels` of {labels.dtype} can be numbers or shares of yes and no; got a model without a config that "
                'says which. Give it one with problem_type="regression" or "multi_label_classification".'
            )
        return "yes_no"

    def target(self, labels: Tensor) -> Tensor:
        """The labels where they are predicted: those of a causal language model one position earlier."""
        if not self.shifted:
            return labels
        return torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)), 1)

    def counts(self, labels: Tensor) -> Tensor:
        """Which values of `losses` are those of a label (N,) or (N, ...)."""
        kind = self.kind(labels)
        if kind == "classes":
            return self.target(labels) != IGNORED
        return torch.ones_like(labels if kind == "yes_no" else labels.reshape(len(labels), -1)[:, 0], dtype=torch.bool)

    def losses(self, logits: Tensor, labels: Tensor, alpha: float, precision: float | None = None) -> Tensor:
        """The alpha objective of every label, 0 where it does not count: (K, N, ...) -> (N,) or (N, ...)."""
        kind = self.kind(labels)
        if kind == "classes":
            axis = -1 if labels.ndim > 1 else None
            return cross_entropy(logits, self.target(labels), alpha, class_axis=axis, reduction="none")
        if kind == "yes_no":
            return binary_cross_entropy(logits, labels.to(logits.dtype), alpha, reduction="none")
        target = numbers_like(logits[0], labels)
        return gaussian_nll(logits, target, alpha, precision=_known(precision), reduction="none")

    # ---- prediction

    def predict(self, model: nn.Module, x: Any, passes: PassOptions, kind: Kind, precision: float | None) -> Prediction:
        """The predictive distribution of a batch."""
        given: dict[str, Any] = {"n_passes": passes.n_passes, "sites": passes.sites, "seed": passes.seed}
        given |= {"progress": False}
        if kind == "numbers":
            return predict_regression(model, x, precision=precision, output=first_logits, **given)
        if kind == "yes_no":
            return predict_classification(model, x, output=_two_classes, class_axis=-1, **given)
        return predict_classification(model, x, output=first_logits, class_axis=-1, **given)

    def scores(self, prediction: Prediction, labels: Tensor) -> Tensor:
        """Minus the log-probability of every label under the prediction, 0 where it does not count."""
        if isinstance(prediction, RegressionPrediction):
            _known(None if prediction.precision is None else 1.0)
            return -prediction.log_prob(numbers_like(prediction.mean, labels))
        if self.kind(labels) == "yes_no":
            no, yes = prediction.log_probs.unbind(-1)
            return -torch.where(labels > 0, labels * yes, 0.0) - torch.where(labels < 1, (1 - labels) * no, 0.0)
        return -prediction.log_prob(self.target(labels).to(prediction.log_probs.device))

    def scored(self, model: nn.Module, x: Any, labels: Tensor, passes: PassOptions, precision: float | None) -> Tensor:
        """`scores` of the prediction for a batch, whose probabilities are not kept: a vocabulary may be large."""

        def reduce(groups: Iterator[Any], where: Where) -> tuple[Tensor, ...]:
            own = None
            losses = []
            for group in groups:
                logits = first_logits(group)
                own = labels[where.rows(logits.shape[1]).to(labels.device)] if own is None else own
                losses += [self.losses(one[None], own, 0.0, precision) for one in logits]
            return (torch.stack(losses),)  # (K, n, ...)

        (losses,) = collect(model, x, passes, reduce, row_axis=1)
        return alpha_loss(losses.flatten(1), 1.0, reduction="none").view(losses.shape[1:])


def head_of(model: nn.Module) -> Head:
    """The head of a model of transformers, PEFT's around it too, or of any module that returns logits.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> sizes = {"vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_labels": 1}
    >>> head_of(BertForSequenceClassification(BertConfig(**sizes))).kind(torch.zeros(2))
    'numbers'
    """
    base = base_model(model)
    config = getattr(base, "config", None)
    causal = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    causal |= getattr(base, "loss_type", None) == "ForCausalLM"
    shifted = causal and not getattr(config, "is_encoder_decoder", False)
    return Head(getattr(config, "problem_type", None), getattr(config, "num_labels", None), shifted)


def base_model(model: nn.Module) -> Any:
    """The model of transformers inside of PEFT's; any other module as it is."""
    inside = getattr(model, "get_base_model", None)
    return inside() if callable(inside) else model


def first_logits(outputs: Any) -> Tensor:
    """The logits of a ModelOutput, or the first of a tuple."""
    found = logits_of(outputs)
    found = found[0] if isinstance(found, (tuple, list)) and found else found
    if not isinstance(found, Tensor):
        raise TypeError(f"`model` must return logits, first or by name; got {type(found).__name__}.")
    return found


def numbers_like(mean: Tensor, labels: Tensor) -> Tensor:
    """Labels as numbers of the shape of the means (N, D)."""
    if labels.numel() != mean.numel():
        raise ValueError(
            f"`labels` must have one number for each output of the model, {tuple(mean.shape)}; "
            f"got {tuple(labels.shape)}."
        )
    return labels.reshape(mean.shape).to(mean.device, torch.promote_types(mean.dtype, torch.float32))


# ------------------------------------------------------------------------------ helpers


def _two_classes(outputs: Any) -> Tensor:
    """Logits of yes as those of no and yes (..., 2)."""
    logits = first_logits(outputs)
    return torch.stack((torch.zeros_like(logits), logits), -1)


def _known(precision: float | None) -> float:
    if precision is None:
        raise ValueError(
            "`precision` is learned in training, and nothing was trained; got no number to score labels by. Give "
            "precision=..., one over the variance of the noise."
        )
    return precision
