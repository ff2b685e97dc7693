"""Is one of many candidates really better than what there is? Comparisons on held-out rows that noise does not decide.

Every candidate has one number of its own to be fitted (a temperature, the precision of the noise). Rows are dealt into
folds; what a row is scored by was fitted on the other folds, the number as well as, for the gain, the choice among the
candidates. So a gain is no winner's curse, and so many numbers fitted are no advantage.

    folds = deal(len(y), seed=0)
    plain, *others = (fitted(nll, 1.0, folds, reach=6) for nll in candidates)     # nll: number -> (N,)
    verdict = judge(plain, others, folds, seed=0)
    verdict.gain, verdict.error, verdict.passes                                  # nats a row; who beats the first
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bbalpha._kernels import order_seed

LEAST_ROWS = 40
_FOLDS = 10
_LEVEL = 0.975
_DRAWS = 1000  # of the largest of all errors
_STEP = 0.5  # of the logarithm of a number, in looking for it; a tenth of that in the end


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a candidate scores on held-out rows.

    Attributes:
        number: Under which all rows together are likeliest.
        nll: Their mean negative log-likelihood with it.
        rows: Negative log-likelihood of every row, with the number fitted on the other folds (N,).
        without: Mean over all rows but those of a fold, with the number fitted on just these (F,).
    """

    number: float
    nll: float
    rows: Tensor
    without: Tensor


@dataclass(frozen=True, eq=False)
class Verdict:
    """How candidates compare with the one that is there.

    Attributes:
        gain: What the best candidate gains a row, chosen for every fold on the others.
        error: Its standard error.
        margin: How many standard errors a candidate has to gain: more, the more there are and the less alike.
        passes: Which of them do (C,).
    """

    gain: float
    error: float
    margin: float
    passes: Tensor


def deal(n: int, *, seed: int) -> Tensor:
    """The fold of each of `n` rows, dealt at random (n,).

    >>> deal(40, seed=0).bincount()
    tensor([4, 4, 4, 4, 4, 4, 4, 4, 4, 4])
    """
    return torch.randperm(n, generator=_generator(seed, 0)) % _FOLDS


def fitted(nll: Callable[[float], Tensor], start: float, folds: Tensor, *, reach: int) -> Fitted:
    """A candidate with its number fitted: on all rows, and for every fold on the rows of the others.

    Looked for downhill from `start` in steps of a factor of 1.65, then in steps of 1.05 around the best.

    Args:
        nll: Negative log-likelihood of every row, given the number (N,).
        start: Where to begin.
        folds: The fold of every row (N,).
        reach: How many large steps to go at most, either way.

    >>> y = torch.arange(40.0) - 19.5
    >>> variance = fitted(lambda v: 0.5 * (y.square() / v + math.log(v)), 1.0, deal(40, seed=0), reach=20).number
    >>> round(variance / float(y.square().mean()), 1)
    1.0
    """
    counts = folds.bincount(minlength=_FOLDS)
    table: dict[int, Tensor] = {}  # tenths of a step from `start`: NLL of every row

    def ensure(places: Iterable[int]) -> bool:
        new = {k for k in places if abs(k) <= 10 * reach} - table.keys()
        table.update({k: nll(start * math.exp(_STEP * k / 10)).double() for k in sorted(new)})
        return bool(new)

    def best() -> tuple[list[int], Tensor, Tensor]:
        """The places, and by row of these where each fold, all of them last, is likeliest without its own rows."""
        rows = torch.stack(list(table.values()))  # (G, N)
        sums = torch.zeros(len(rows), _FOLDS, dtype=rows.dtype).index_add_(1, folds, rows)
        total = sums.sum(1, keepdim=True)
        means = torch.cat(((total - sums) / (len(folds) - counts), total / len(folds)), 1)  # (G, F + 1)
        lowest, at = means.min(0)
        return list(table), lowest, at

    ensure([0])
    places, lowest, at = best()
    while ensure(places[i] + step for i in at.tolist() for step in (-10, 10)):
        places, lowest, at = best()
    ensure(places[i] + step for i in at.tolist() for step in range(-9, 10))
    places, lowest, at = best()
    rows = torch.stack(list(table.values())).gather(0, at[:-1][folds][None])[0]
    return Fitted(start * math.exp(_STEP * places[int(at[-1])] / 10), float(lowest[-1]), rows, lowest[:-1])


def judge(plain: Fitted, others: Sequence[Fitted], folds: Tensor, *, seed: int) -> Verdict:
    """What the best of `others` gains over `plain`, and which of them gain more than noise explains.

    Differences are taken row by row. If no candidate were better than `plain`, the largest of their gains in standard
    errors would be the largest of correlated normal numbers; its 97.5 % point, found by redrawing the rows' deviations
    with random factors, is the margin. So with a chance of about one in forty somebody passes who should not, however
    many are tried; it is more where few rows hide rare, large losses. Candidates that are clearly worse do not widen
    the margin (Hansen's test for superior predictive ability, 2005).

    Args:
        plain: What there is.
        others: The candidates, at least one.
        folds: As they were fitted with (N,).
        seed: Of the redrawing.
    """
    gains = plain.rows - torch.stack([o.rows for o in others])  # (C, N)
    n = gains.shape[1]
    mean, spread = gains.mean(1), gains.std(1)
    units = (gains - mean[:, None]) / (spread.clamp_min(1e-300) * math.sqrt(n))[:, None]
    hopeless = mean < -math.sqrt(2 * math.log(math.log(n)) / n) * spread
    units = units[~hopeless] if not bool(hopeless.all()) else units
    generator, draws = _generator(seed, 1), []
    for _ in range(_DRAWS // 100):
        factors = torch.randn(n, 100, dtype=torch.float64, generator=generator)
        draws.append((units @ factors).amax(0))
    margin = float(torch.cat(draws).quantile(_LEVEL))
    chosen = torch.stack([o.without for o in others]).argmin(0)  # (F,): for every fold by the others
    honest = gains.gather(0, chosen[folds][None])[0]
    better = torch.tensor([o.nll < plain.nll for o in others])
    return Verdict(
        float(honest.mean()), standard_error(honest), margin, (mean > margin * spread / math.sqrt(n)) & better
    )


def standard_error(values: Tensor) -> float:
    """Of the mean of independent values (N,).

    >>> standard_error(torch.tensor([1.0, 3.0]))
    1.0
    """
    return float(values.double().std()) / math.sqrt(len(values))


class Patience:
    """Whether it is worth going on: no, once so many in a row were the best so far for no fold.

    >>> patience = Patience(1)
    >>> [patience.out(torch.tensor(scores)) for scores in ([2.0, 2.0], [1.0, 3.0], [1.0, 2.0])]
    [False, False, True]
    """

    def __init__(self, most: int) -> None:
        self.most, self.left = most, most
        self.best: Tensor | None = None

    def out(self, without: Tensor) -> bool:
        """Whether to stop, after a candidate with these scores of the folds (F,)."""
        better = self.best is None or bool((without < self.best).any())
        self.best = without if self.best is None else torch.minimum(self.best, without)
        self.left = self.most if better else self.left - 1
        return self.left == 0


def _generator(seed: int, use: int) -> torch.Generator:
    return torch.Generator().manual_seed(order_seed(seed, use))
