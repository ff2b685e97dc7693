"""Scores of single candidates, from the class probabilities of K functions: (K, N, C) -> (N,), natural logs.

Which of them? `bald` is what a label would tell about the model; `epig` what it would tell about the inputs that count;
`entropy`, `variation_ratio` and `mean_std` are older and cheaper, and the first two also high where classes overlap by
nature. For several labels at once see `batch_bald`.

    top(bald(probs), 10).indices
"""

from typing import Any

import torch
from torch import Tensor

from bbalpha.acquisition.pools import probabilities

_BLOCK = 2**22  # numbers held at a time


def bald(probs: Any, *, progress: bool | None = None) -> Tensor:
    """What the label of each row would tell about which function is right: its mutual information (N,).

    H[mean_k p_k] - mean_k H[p_k], of Houlsby et al. (2011); at most log K.

    Args:
        probs: Class probabilities of K passes (K, N, C): a tensor, an array, on disk too, a prediction that kept its
            passes, or ``Functions(net, K).probs(x)``.
        progress: True or False; None shows a bar on a terminal when it takes more than a few seconds.

    >>> bald(torch.tensor([[[0.9, 0.1], [0.5, 0.5]], [[0.1, 0.9], [0.5, 0.5]]]))      # disagree; agree that it is open
    tensor([0.3681, 0.0000])
    """
    return probabilities(probs).scored(information, progress)


def entropy(probs: Any, *, progress: bool | None = None) -> Tensor:
    """The entropy of the mean probabilities (N,); arguments as in `bald`.

    >>> entropy(torch.tensor([[[0.9, 0.1], [0.5, 0.5]], [[0.1, 0.9], [0.5, 0.5]]]))
    tensor([0.6931, 0.6931])
    """
    return probabilities(probs).scored(lambda block: entropies(block.mean(0), 0), progress)


def variation_ratio(probs: Any, *, progress: bool | None = None) -> Tensor:
    """1 minus the largest mean probability (N,); arguments as in `bald`.

    (`ClassificationPrediction.variation_ratio` counts the votes of the passes instead.)
    """
    return probabilities(probs).scored(lambda block: 1 - block.mean(0).amax(0), progress)


def mean_std(probs: Any, *, progress: bool | None = None) -> Tensor:
    """The standard deviation of a class's probability over passes, averaged over classes (N,); as in `bald`."""
    return probabilities(probs).scored(lambda block: block.std(0).mean(0), progress)


def epig(probs: Any, target_probs: Any, *, progress: bool | None = None) -> Tensor:
    """What the label of each row would tell about those of the target rows, on average: (K, N, C), (K, M, C) -> (N,).

    Bickford Smith et al., "Prediction-Oriented Bayesian Active Learning" (2023). Where the pool holds much that will
    never be asked for, `bald` still wants to know it; this does not. It costs N * M * K * C^2: a hundred targets do.

    Args:
        probs: Class probabilities of the candidates, as in `bald`.
        target_probs: Those of rows as they will be asked for, in the same K passes (K, M, C).
        progress: As in `bald`.

    >>> probs = torch.tensor([[[0.9, 0.1], [0.9, 0.1]], [[0.1, 0.9], [0.9, 0.1]]])
    >>> epig(probs, probs[:, :1])                                      # a row tells most about itself
    tensor([0.2218, 0.0000])
    """
    pool, targets = probabilities(probs), probabilities(target_probs, "target_probs")
    if (targets.n_passes, targets.width) != (pool.n_passes, pool.width):
        raise ValueError(
            f"`target_probs` must be of the same {pool.n_passes} passes and {pool.width} classes as `probs`; got "
            f"{targets.n_passes} and {targets.width}."
        )
    sums = _Targets([block for _, block in targets.blocks(progress=False)])
    size = max(1, _BLOCK // (pool.width * targets.width * targets.n_rows))
    return pool.scored(sums.information, progress, size=size)


# ------------------------------------------------------------------------------ the mathematics


def entropies(probs: Tensor, axis: int) -> Tensor:
    """Entropies over an axis; 0 log 0 = 0."""
    return -(probs.clamp_min(torch.finfo(probs.dtype).tiny).log_().mul_(probs)).sum(axis)


def information(block: Tensor) -> Tensor:
    """Mutual information of label and function: (K, C, n) -> (n,)."""
    found = entropies(block.mean(0), 0) - entropies(block, 1).mean(0)
    return found.clamp_min_(0.0)  # Jensen; below 0 by rounding alone


class _Targets:
    """Target rows, ready to be compared with any number of candidates."""

    def __init__(self, blocks: list[Tensor]) -> None:
        values = torch.cat(blocks, 2)  # (K, C, M)
        self.flat = values.flatten(1) / len(values)  # (K, C * M)
        self.count = values.shape[2]
        self.entropy = entropies(values.mean(0), 0).mean()

    def information(self, block: Tensor) -> Tensor:
        """Mean over the targets of the information between their label and a candidate's: (K, C, n) -> (n,)."""
        C, n = block.shape[1:]
        joint = block.flatten(1).T @ self.flat.to(block.dtype)  # (C * n, C * M): 1/K sum_k p_k p*_k
        apart = entropies(joint, 1).view(C, n).sum(0) / self.count
        found = entropies(block.mean(0), 0) + self.entropy - apart
        return found.clamp_min_(0.0)
