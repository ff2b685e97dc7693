"""Plain networks beside dropout networks: one pass of a net that never draws gives what K passes of another give.

`sample` and `predict_*` refuse such a net, whose lack of spread would be taken for knowledge. Attacks and detection
compare both kinds on purpose, and come here for the plain one.

    if not is_random(net, x):
        prediction = predict_once(net, x)            # entropy, but no mutual information: one pass has no spread
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import look_at
from bbalpha._engine.shadows import shadowed
from bbalpha.prediction import as_logits
from bbalpha.predictive import ClassificationPrediction


def is_random(model: nn.Module, x: Any) -> bool:
    """Whether a pass of `model` on a few rows of `x` draws anything with its random sites switched on.

    >>> is_random(nn.Dropout(0.5), torch.ones(2, 3)), is_random(nn.Linear(3, 2), torch.ones(2, 3))
    (True, False)
    """
    return look_at(model, Inputs.of(x, 0, model=model), evaluation=True)[1].fired


def logits_once(model: nn.Module, x: Any) -> Tensor:
    """The logits of one pass in evaluation mode, with the axis that passes have (1, N, C); differentiable.

    >>> logits_once(nn.Linear(3, 2), torch.ones(4, 3)).shape
    torch.Size([1, 4, 2])
    """
    with shadowed(model, evaluation=True) as live:
        output = Inputs.of(x, 0, model=model).fresh().call(live)
    if isinstance(output, Mapping):
        output = output.get("logits", output)
    return as_logits(output[None] if isinstance(output, Tensor) else output, 2)


def predict_once(model: nn.Module, x: Any, *, batch_size: int = 1024) -> ClassificationPrediction:
    """The prediction of a plain classifier, in evaluation mode and without gradients.

    Args:
        model: Returns logits (N, C), or a mapping with "logits".
        x: A tensor, a tuple (``model(*x)``), a mapping (``model(**x)``), or an iterable of these (a DataLoader).
        batch_size: Rows at a time.

    >>> predict_once(nn.Linear(3, 2), torch.ones(4, 3)).entropy.shape
    torch.Size([4])
    """
    whole = isinstance(x, (Tensor, tuple, list, Mapping)) or not isinstance(x, Iterable)
    with torch.no_grad():
        parts = [
            F.log_softmax(logits_once(model, batch)[0], 1)
            for part in ([x] if whole else x)
            for batch in _batches(Inputs.of(part, 0, model=model), batch_size)
        ]
    if not parts:
        raise ValueError("`x` must give at least one batch; got an iterable that is empty or used up.")
    log_probs = torch.cat(parts)  # (N, C)
    if bool(log_probs.isnan().any()):
        raise ValueError(f"`model` must return numbers; got nan in row {int(log_probs.isnan().nonzero()[0, 0])}.")
    entropy = torch.special.entr(log_probs.exp()).sum(1)
    votes = torch.zeros_like(log_probs).scatter(1, log_probs.argmax(1, keepdim=True), 1.0)
    return ClassificationPrediction(log_probs, entropy, votes, n_passes=1)


def _batches(inputs: Inputs, size: int) -> list[Any]:
    """The inputs, at most `size` rows at a time."""
    starts = range(0, max(1, inputs.rows or 0), size)
    return [inputs.map(lambda t, _, a=a: t[a : a + size]).x for a in starts]  # type: ignore[misc]
