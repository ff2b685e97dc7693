"""Batches by chance, the informative rows more likely: as cheap as scoring rows one by one, and spread over the pool.

Kirsch et al., "Stochastic Batch Acquisition: A Simple Baseline for Deep Active Learning" (2023). Drawing without
replacement with chances in proportion to a weight is taking the largest of log weight + Gumbel noise.

    power_bald(probs, 10, seed=0).indices
"""

from typing import Any

import torch
from torch import Tensor

from bbalpha.acquisition.scores import bald
from bbalpha.acquisition.selection import Selection, check_size, new_generator
from bbalpha.checks import check_number


def power_bald(
    probs: Any, size: int, *, beta: float = 1.0, seed: int | None = None, progress: bool | None = None
) -> Selection:
    """Rows drawn without replacement, with chances in proportion to BALD^beta.

    Args:
        probs: Class probabilities of K passes (K, N, C), as in `bald`.
        size: How many to choose.
        beta: How much the score counts: 0 draws evenly, a large number takes the best.
        seed: None draws from torch's global generator; an int leaves it untouched.
        progress: As in `bald`.

    >>> probs = torch.tensor([[[0.9, 0.1], [0.5, 0.5], [0.8, 0.2]], [[0.1, 0.9], [0.5, 0.5], [0.2, 0.8]]])
    >>> power_bald(probs, 2, seed=0).indices.sort().values             # the second row has nothing to tell
    tensor([0, 2])
    """
    scores = bald(probs, progress=progress)
    logs = scores.double().clamp_min(1e-100).log()  # rows without a score are drawn evenly, after all others
    return _drawn(scores, logs, size, beta, seed)


def softmax_bald(
    probs: Any, size: int, *, beta: float = 1.0, seed: int | None = None, progress: bool | None = None
) -> Selection:
    """Rows drawn without replacement, with chances in proportion to exp(beta * BALD); arguments as in `power_bald`.

    Rows that have nothing to tell are drawn too: `power_bald` is the better first choice.
    """
    scores = bald(probs, progress=progress)
    return _drawn(scores, scores.double(), size, beta, seed)


def _drawn(scores: Tensor, logs: Tensor, size: int, beta: float, seed: int | None) -> Selection:
    """The rows with the largest noisy logs, with their scores."""
    size, beta = check_size(size, len(scores)), check_number("beta", beta, least=0)
    uniform = torch.rand(len(scores), dtype=torch.float64, generator=new_generator(seed)).clamp_min(1e-300)
    gumbel = -(-uniform.log()).log().to(scores.device)
    chosen = (beta * logs + gumbel).topk(size).indices
    return Selection(chosen, scores[chosen])
