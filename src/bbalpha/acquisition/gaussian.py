"""Where to measure next in regression: what measurements would tell about which function is right.

Given function k, a measurement at x is f_k(x) plus Gaussian noise. What measurements y_A tell about k is the entropy of
a mixture of K Gaussians less that of the noise, and a mixture has no closed form. In its place stands the Gaussian with
the same mean and covariance, which has the largest entropy of all that share these:

    I(y_A; k) <= 1/2 log det(I + S^-1/2 C S^-1/2),     C = covariance of the f_k at A, S = variances of the noise

That is the information gain of a Gaussian process whose covariance is the one of the K functions. It is an upper bound;
the truth is at most log K, and C has rank K - 1, so after about K picks there is nothing left to tell apart.

    batch_information_gain(bbalpha.predict_regression(net, x, precision=4.0, masks="shared"), 10).indices
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from bbalpha._engine.batches import progress_bar
from bbalpha.acquisition.greedy import Search, Stage
from bbalpha.acquisition.pools import Values
from bbalpha.acquisition.selection import Selection, check_size
from bbalpha.checks import check_number, check_precision
from bbalpha.predictive import RegressionPrediction

_STAGE = 2**12  # candidates looked at together


def information_gain(outputs: Any, *, precision: float | Tensor | None = None, progress: bool | None = None) -> Tensor:
    """What a measurement at each row would tell about the function: 1/2 log det(I + S^-1/2 C S^-1/2) (N,).

    Args:
        outputs: A `RegressionPrediction` with shared masks; or the values of K functions (K, N, D) or (K, N): a tensor,
            an array, on disk too, or ``Functions(net, K).values(x)``.
        precision: One over the variance of the noise, a number or a tensor that broadcasts to (N, D); a prediction has
            its own.
        progress: True or False; None shows a bar on a terminal when it takes more than a few seconds.

    >>> information_gain(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), precision=1.0)      # the functions differ; they agree
    tensor([0.3466, 0.0000], dtype=torch.float64)
    """
    pool = _measured(outputs, precision)
    return pool.scored(_Gain(pool.n_passes), progress)


def batch_information_gain(
    outputs: Any, size: int, *, precision: float | Tensor | None = None, progress: bool | None = None
) -> Selection:
    """The rows whose measurements tell most about the function together, picked one after the other.

    Greedy, and as good as a search through the whole pool at every pick. The score, that of the Gaussian with the same
    moments, is no promise: the mixture itself cannot tell more than log K.

    Args:
        outputs: As in `information_gain`. Of a pool that is not in memory, a block is read at a time, and the best rows
            are kept (256 MB).
        size: How many to choose.
        precision: As in `information_gain`.
        progress: As in `information_gain`.

    >>> f = torch.tensor([[-1.0, -1.0, 0.1], [1.0, 1.0, -0.3], [0.5, 0.5, 0.9]])
    >>> batch_information_gain(f, 2, precision=100.0).indices         # the second row tells what the first one did
    tensor([0, 2])
    """
    pool = _measured(outputs, precision)
    size = check_size(size, pool.n_rows)
    if size >= pool.n_passes:
        warnings.warn(
            f"The covariance of {pool.n_passes} functions has rank {pool.n_passes - 1}: of {size} picks those after "
            f"the first {pool.n_passes - 1} are decided by noise. Use more passes, or a smaller batch.",
            UserWarning,
            stacklevel=2,
        )
    gain = _Gain(pool.n_passes)
    search = Search(pool.scored_for_choice(gain, progress), lambda rows: (pool.read(rows),))
    rows: list[int] = []
    scores: list[float] = []
    with progress_bar(size, progress, desc="choose", unit="pick") as bar:
        for _ in range(size):
            close = search.best_rows([Stage(lambda block: gain(block[0]), _STAGE)], most=1)
            values = pool.read(close)
            rows.append(int(close[0]))
            scores.append(float(gain(values)[0]) + (scores[-1] if scores else 0.0))
            gain.observe(values[..., 0])
            search.leave_out(rows[-1])
            bar.update(1)
    return Selection(torch.tensor(rows), torch.tensor(scores, dtype=torch.float64))


# ------------------------------------------------------------------------------ helpers


def _measured(outputs: Any, precision: float | Tensor | None) -> Values:
    """Values of K functions in units of the noise, centred, in double precision (K, D, n)."""

    def standard(rows: Tensor, block: Tensor) -> Tensor:
        wide = block.double()
        return (wide - wide.mean(0)) * scale[rows].T

    pool = Values(outputs, "outputs", change=standard)
    shape = tuple(pool.source.shape[1:])
    if precision is None and isinstance(outputs, RegressionPrediction) and outputs.precision is not None:
        tau = outputs.aleatoric_std.double().pow(-2)
    elif precision is None:
        raise ValueError(
            "`precision` must say how noisy a measurement is, one over its variance; got None. Without noise, one "
            "measurement would tell all there is."
        )
    elif isinstance(precision, Tensor):
        tau = torch.as_tensor(check_precision(precision.detach(), torch.empty(shape, device="meta"))).double()
    else:
        tau = torch.tensor(check_number("precision", precision, above=0), dtype=torch.float64)
    scale = tau.sqrt().broadcast_to(shape).reshape(pool.n_rows, -1)
    return pool


class _Gain:
    """1/2 log det(I + C given what was measured), of values in units of the noise.

    In the space of the K functions: C = F' S F / K, with S the identity at first, and a step towards what is left
    unknown at each measurement.
    """

    def __init__(self, n_passes: int) -> None:
        self.left = torch.eye(n_passes, dtype=torch.float64)  # S (K, K)

    def __call__(self, values: Tensor) -> Tensor:
        """Of n candidates: (K, D, n) -> (n,)."""
        K, D, n = values.shape
        reduced = (self.left @ values.flatten(1)).view(K, D, n)
        if D == 1:
            return 0.5 * torch.log1p((values * reduced).sum((0, 1)) / K)
        covariance = torch.einsum("kdn,ken->nde", values, reduced) / K
        return 0.5 * torch.logdet(torch.eye(D, dtype=torch.float64) + covariance)

    def observe(self, values: Tensor) -> None:
        """A measurement of one candidate (K, D)."""
        K, D = values.shape
        reduced = self.left @ values  # (K, D)
        seen = torch.eye(D, dtype=torch.float64) + values.T @ reduced / K
        self.left -= reduced @ torch.linalg.solve(seen, reduced.T) / K
