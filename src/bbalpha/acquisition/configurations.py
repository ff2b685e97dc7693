"""The labels that the chosen points may get, and what each outcome says about which function is right.

A configuration m is one label for every chosen point. Under function k it has the probability prod_n p_k(y_n); kept is
the joint distribution J[m, k] = 1/K prod_n p_k(y_n), whose sum is 1 (M, K). Its rows, divided by their sums q_m, are
the weights w_m of the functions after these labels were seen. With them the gain of a further point x is

    I(y_x; k | labels) = sum_m q_m ( H[sum_k w_mk p_k(.|x)] - sum_k w_mk H[p_k(.|x)] )

which is H(y_A, y_x) - H(y_A) - E H[p_k(.|x)], the difference that BatchBALD asks for, without the digits that the
difference of large entropies costs. Configurations whose labels leave little open (q_m H[w_m] is small) can give
little: they are dropped. And information is concave in the weights: merging configurations, which adds up their rows of
J, can only raise the gain. So a few hundred merged ones bound the gain of thousands from above, for a fraction of the
price.
"""

import torch
from torch import Tensor

from bbalpha.acquisition.scores import entropies

_NEGLIGIBLE = 1e-8  # nats, in all, that dropped configurations could still tell
_ROUNDS = 4  # of k-means
_BLOCK = 2**18  # numbers worked on at a time: what stays in the cache


def no_labels(n_passes: int) -> Tensor:
    """Before anything was chosen: one configuration, all functions equally likely (1, K)."""
    return torch.full((1, n_passes), 1 / n_passes, dtype=torch.float64)


def with_label(joint: Tensor, probs: Tensor) -> Tensor:
    """Every configuration with every label of a further point: (M, K), (C, K) -> (M * C, K), but for the negligible."""
    extended = (joint[:, None] * probs).flatten(0, 1)
    open_ = _left_open(extended)
    order = open_.argsort()
    kept: Tensor = extended[order[open_[order].cumsum(0) > _NEGLIGIBLE]]
    # where nothing is left open at all, one is enough to say so
    return kept if len(kept) else extended[order[-1:]]


def sampled(probs: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """About `count` configurations of the chosen points (B, C, K), equally many drawn from each function: (M, K).

    The uniform numbers of each point and function are spread evenly, one in each part of the way. Configurations that
    come up more than once are there once, with the weight of all.
    """
    B, C, K = probs.shape
    each = max(1, count // K)
    seen = torch.zeros(K * each, dtype=torch.long)  # the number of each draw's configuration so far
    labels = torch.empty((B, K * each), dtype=torch.long)
    for b in range(B):
        order = torch.rand((K, each), generator=generator).argsort(1)
        uniform = (order + torch.rand((K, each), generator=generator, dtype=torch.float64)) / each
        ends = probs[b].T.cumsum(1).contiguous()  # (K, C)
        labels[b] = torch.searchsorted(ends, uniform * ends[:, -1:], right=True).clamp_max_(C - 1).flatten()
        seen = torch.unique(seen * C + labels[b], return_inverse=True)[1]
    counts = torch.bincount(seen)
    first = torch.empty(len(counts), dtype=torch.long).scatter_(0, seen, torch.arange(len(seen)))
    logs = probs.clamp_min(1e-300).log()
    likelihood = sum(logs[b][labels[b, first]] for b in range(B))  # (M, K)
    return torch.softmax(torch.as_tensor(likelihood), 1) * (counts / len(seen))[:, None]


def merged(joint: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """At most `count` configurations, those with similar weights added up: (M, K) -> (count, K)."""
    if len(joint) <= count:
        return joint
    points = (joint / joint.sum(1, keepdim=True)).sqrt().float()
    chances = _left_open(joint).clamp_min(1e-30)
    centres = points[torch.multinomial(chances, count, generator=generator)]
    for _ in range(_ROUNDS):
        nearest = torch.addmm(centres.square().sum(1), points, centres.T, alpha=-2).argmin(1)
        sums = torch.zeros((count, joint.shape[1]), dtype=joint.dtype).index_add_(0, nearest, joint)
        sums = sums[sums.sum(1) > 0]
        count = len(sums)
        centres = (sums / sums.sum(1, keepdim=True)).sqrt().float()
    return sums


class Gain:
    """What a further label tells on top of the labels of the chosen points, by their configurations.

    Args:
        joint: (M, K), as `no_labels`, `with_label`, `sampled` and `merged` give it.
        dtype: To compute in.
    """

    def __init__(self, joint: Tensor, dtype: torch.dtype) -> None:
        share = joint.sum(1)
        self.share = share.to(dtype)
        self.weights = (joint / share[:, None]).to(dtype)  # (M, K)
        self.functions = joint.sum(0).to(dtype)  # 1/K each, or about that where configurations were drawn

    def __len__(self) -> int:
        return len(self.weights)

    def __call__(self, block: tuple[Tensor, Tensor]) -> Tensor:
        """Of n candidates, from their probabilities (K, C, n) and the entropies of these (K, n): (n,)."""
        probs, each = block
        C, n = probs.shape[1:]
        flat = probs.reshape(len(probs), C * n)
        total = flat.new_zeros(C * n)
        step = max(1, _BLOCK // (C * n))
        for share, weights in zip(self.share.split(step), self.weights.split(step), strict=True):
            mixed = weights @ flat  # (m, C * n)
            total -= share @ mixed.log().mul_(mixed)
        return total.view(C, n).sum(0) - self.functions @ each


def candidates(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `Gain` is asked for: probabilities, none of them 0, and their entropies: (K, C, n) -> (K, C, n), (K, n)."""
    probs = values.to(dtype).clamp_min(1e-30)
    return probs, entropies(probs, 1)


def _left_open(joint: Tensor) -> Tensor:
    """What each configuration leaves open, times its probability: q_m H[w_m] (M,)."""
    share = joint.sum(1)
    return share * entropies(joint / share.clamp_min(1e-300)[:, None], 1)
