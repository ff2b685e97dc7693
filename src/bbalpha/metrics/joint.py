"""How good a prediction of several rows together is: joint log-loss, and the scores of the Neural Testbed.

Under pass k, a function, the rows of a group are independent; the mean over passes stands outside their product:

    log p(y_1 .. y_T | x_1 .. x_T) = log 1/K sum_k prod_t p_k(y_t | x_t)

which is more than the sum of the rows' own log-likelihoods where the passes agree on what belongs together. Osband et
al., "The Neural Testbed" (2022): groups of T test inputs, drawn one by one or dyadic (each one of two), scored by the
Kullback-Leibler divergence from the environment that made the labels.

    rows = dyadic_rows(len(x), n_groups=1000, size=10, seed=0)            # (G, T)
    joint_kl(true_log_likelihood, joint_log_likelihood(log_probs, y, rows))
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bbalpha.checks import check_count, check_floating, check_row_groups, check_seed
from bbalpha.metrics.numbers import finite, one_axis, same_shape
from bbalpha.objectives import alpha_loss

_BLOCK = 2**22  # numbers held at a time
_PLANES = 7  # that cut the passes into at most 128 clusters
_PROBIT = 5.0  # probits are clipped to plus and minus this
_PSEUDO = 1e-6  # passes of probability 1 in every cluster


def joint_nll(log_likelihood: Tensor, groups: Tensor) -> Tensor:
    """Minus the mean over groups of the log of their joint predictive density: (K, N), (N,) -> ().

    Groups of one row give `nll`. It is not divided by the size of the groups.

    Args:
        log_likelihood: log p(y_n | x_n, w_k) of passes that share their masks (K, N).
        groups: The group of each row, whole numbers (N,).

    >>> p = torch.tensor([[0.9, 0.9], [0.1, 0.1]])                     # two functions that disagree, two rows
    >>> joint_nll(p.log(), torch.tensor([0, 0]))                       # -log 0.41; row by row it would be -log 0.25
    tensor(0.8916, dtype=torch.float64)
    """
    losses = -finite("log_likelihood", log_likelihood, infinite=True)
    check_row_groups(groups, losses.shape[-1])
    return alpha_loss(losses, 1.0, groups=groups, reduction="none").mean()


def joint_log_likelihood(log_probs: Tensor, y: Tensor, rows: Tensor | None = None) -> Tensor:
    """Log-likelihood of each group of labels under the mean over passes: (K, N, C), (G, T) -> (G,).

    Args:
        log_probs: Log-probabilities of the classes in passes that share their masks (K, N, C).
        y: The labels of each group (G, T).
        rows: Which row each label belongs to (G, T), a row any number of times; None takes the N = G * T rows in order.

    >>> log_probs = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log()   # two passes, one row
    >>> joint_log_likelihood(log_probs, torch.tensor([[0, 0]]), torch.tensor([[0, 0]])).exp()     # 0.9^2/2 + 0.1^2/2
    tensor([0.4100], dtype=torch.float64)
    """
    y, rows = _labelled(log_probs, y, rows)
    parts = []
    for labels, own in _blocks(y, rows, per_group=len(log_probs) * y.shape[1]):
        joint = log_probs[:, own, labels].double().sum(2)  # (K, g)
        parts.append(-alpha_loss(-joint, 1.0, reduction="none"))
    return torch.cat(parts)


def clustered_log_likelihood(log_probs: Tensor, y: Tensor, rows: Tensor | None = None, *, seed: int = 0) -> Tensor:
    """`joint_log_likelihood` by the testbed's estimator for large groups: passes that are alike count as one.

    Of few passes, none may fit all labels of a large group. So the passes are put into at most 128 clusters, by the
    sides of 7 random planes on which their probits of the group fall; within a cluster labels are taken for
    independent, given its mean probabilities. The planes are the same for all groups.

    Args:
        log_probs: As in `joint_log_likelihood` (K, N, C).
        y: The labels of each group (G, T).
        rows: Which row each label belongs to (G, T); None takes the rows in order.
        seed: Of the planes.
    """
    y, rows = _labelled(log_probs, y, rows)
    check_seed(seed)
    K, _, C = log_probs.shape
    generator = torch.Generator().manual_seed(seed)
    shape = (_PLANES, y.shape[1] * C)
    planes, offsets = (torch.randn(s, generator=generator, dtype=torch.float64) for s in (shape, _PLANES))
    planes, offsets = planes.to(log_probs.device), offsets.to(log_probs.device)
    digits = 2 ** torch.arange(_PLANES, device=log_probs.device)
    parts = []
    for labels, own in _blocks(y, rows, per_group=K * y.shape[1] * C):
        probits = torch.special.ndtri(log_probs[:, own].double().exp()).clamp_(-_PROBIT, _PROBIT)  # (K, g, T, C)
        codes = ((probits.flatten(2) @ planes.T + offsets > 0) * digits).sum(2)  # (K, g)
        chosen = labels.expand(K, -1, -1)[..., None]
        seen = torch.special.ndtr(probits.gather(3, chosen)[..., 0])  # (K, g, T)
        parts.append(_of_clusters(codes, seen))
    return torch.cat(parts)


def joint_kl(true: Tensor, predicted: Tensor) -> Tensor:
    """The divergence from the environment to the prediction, per group, as the testbed scores it: (G,), (G,) -> ().

    The mean of L_true - L_predicted. Where a prediction gives a group no chance at all, the largest finite difference
    stands for it; a mean below 0, which is chance, counts as 0.

    Args:
        true: Log-likelihood of each group under the environment that made its labels (G,).
        predicted: The same under the prediction (G,), such as `joint_log_likelihood`.

    >>> joint_kl(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -4.0, -torch.inf]))
    tensor(2.3333, dtype=torch.float64)
    """
    true, predicted = finite("true", true), finite("predicted", predicted, infinite=True)
    one_axis("true", true)
    same_shape("predicted", predicted, "true", true)
    apart = true - predicted
    possible = apart.isfinite()
    if not bool(possible.any()):
        raise ValueError("`predicted` must give at least one group a chance; got none with a finite log-likelihood.")
    return torch.where(possible, apart, apart[possible].max()).mean().clamp_min(0.0)


def dyadic_rows(n_rows: int, n_groups: int, size: int, *, seed: int | None = None) -> Tensor:
    """Groups in which every row is one of two anchors, by the toss of a coin: indices (G, T).

    The anchors are dealt from all rows, each used again only when all have been: with two fresh inputs for every
    group, the law of the testbed. Labels are to be drawn anew for every copy.

    Args:
        n_rows: N, at least 2.
        n_groups: G.
        size: T.
        seed: None draws from torch's global generator; an int leaves it untouched.

    >>> rows = dyadic_rows(100, n_groups=50, size=10, seed=0)
    >>> rows.shape, max(len(group.unique()) for group in rows)
    (torch.Size([50, 10]), 2)
    """
    n_rows, n_groups = check_count("n_rows", n_rows, least=2), check_count("n_groups", n_groups)
    size = check_count("size", size)
    check_seed(seed)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    pairs = n_rows // 2
    deals = [torch.randperm(n_rows, generator=generator)[: 2 * pairs] for _ in range(-(-n_groups // pairs))]
    anchors = torch.cat(deals)[: 2 * n_groups].view(n_groups, 2)
    return anchors.gather(1, torch.randint(2, (n_groups, size), generator=generator))


# ------------------------------------------------------------------------------ helpers


def _of_clusters(codes: Tensor, seen: Tensor) -> Tensor:
    """The log of sum_c nu_c prod_t q_ct, from the cluster of each pass (K, g) and its probabilities (K, g, T)."""
    K, groups, _ = seen.shape
    shape = (2**_PLANES, groups)
    count = seen.new_zeros(shape).scatter_add_(0, codes, torch.ones_like(codes, dtype=seen.dtype))
    total = seen.new_zeros((*shape, seen.shape[2])).scatter_add_(0, codes[..., None].expand_as(seen), seen)
    centre = (_PSEUDO + total) / (_PSEUDO + count)[..., None]
    return ((count / K).log() + centre.log().sum(2)).logsumexp(0)


def _labelled(log_probs: Tensor, y: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Labels and rows of the groups, both (G, T), checked."""
    check_floating("log_probs", log_probs)
    if log_probs.ndim != 3 or not len(log_probs):
        raise ValueError(f"`log_probs` must have shape (K, N, C), passes first; got {tuple(log_probs.shape)}.")
    if not bool((log_probs <= 1e-3).all()):  # nan too
        worst = float(log_probs.nan_to_num(torch.inf).max())
        raise ValueError(f"`log_probs` must be logs of probabilities; got {worst:.4g}. Use log_softmax on logits.")
    N, C = log_probs.shape[1:]
    _check_indices("y", y, C)
    if y.ndim != 2 or not y.numel():
        raise ValueError(f"`y` must have the labels of each group, (G, T); got {tuple(y.shape)}.")
    if rows is None:
        if y.numel() != N:
            raise ValueError(f"`y` must have a label for each of the {N} rows; got {tuple(y.shape)}. Or give `rows`.")
        rows = torch.arange(N).view(y.shape)
    _check_indices("rows", rows, N)
    same_shape("rows", rows, "y", y)
    return y.long().to(log_probs.device), rows.long().to(log_probs.device)


def _check_indices(name: str, index: Tensor, count: int) -> None:
    if not isinstance(index, Tensor) or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(f"`{name}` must hold whole numbers; got {getattr(index, 'dtype', type(index).__name__)}.")
    wrong = index[(index < 0) | (index >= count)]
    if len(wrong):
        raise ValueError(f"`{name}` must hold numbers from 0 to {count - 1}; got {int(wrong[0])}.")


def _blocks(y: Tensor, rows: Tensor, *, per_group: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Groups, so many at a time that their numbers fit into a block."""
    size = max(1, math.floor(_BLOCK / per_group))
    return zip(y.split(size), rows.split(size), strict=True)
