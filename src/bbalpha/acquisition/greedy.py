"""One pick after the other, each the best on top of those before, without looking at every candidate again.

Where gains can only shrink as more is chosen (the score is submodular, as information about one thing is), an old gain
is an upper bound of the new one. Candidates are looked at in the order of their bounds, and as soon as the next bound
is not above the best gain found, the search is over: the pick is that of a search through the whole pool. Where a gain
is expensive, cheaper upper bounds come first: only who passes those is asked the next question.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bbalpha.acquisition.pools import taken

Block = tuple[Tensor, ...]  # of candidates, which are on the last axis
_CLOSE = 1e-5  # gains that single precision may have put into the wrong order


@dataclass(frozen=True)
class Stage:
    """A question to candidates.

    Attributes:
        ask: Gains of a block, or upper bounds of them (n,).
        size: How many candidates at a time.
    """

    ask: Callable[[Block], Tensor]
    size: int


class Search:
    """The best candidates, found again and again.

    Args:
        bounds: What no gain can exceed (N,).
        read: Gives the block of some rows (n,).
    """

    def __init__(self, bounds: Tensor, read: Callable[[Tensor], Block]) -> None:
        self.bounds, self.read = bounds.double().clone(), read
        self.gains: list[tuple[Tensor, Tensor]] = []  # rows and gains of this search
        self.best = -torch.inf

    def leave_out(self, row: int) -> None:
        """Never look at this row again."""
        self.bounds[row] = -torch.inf

    def best_rows(self, stages: Sequence[Stage], most: int = 32) -> Tensor:
        """The row with the largest gain and those as good up to rounding, at most so many; in ascending order (n,).

        Args:
            stages: Upper bounds, the cheapest first; the last stage gives the gains.
            most: Rows.
        """
        self.gains, self.best = [], -torch.inf
        order = self.bounds.argsort(descending=True, stable=True)
        for rows in order.split(stages[0].size):
            if float(self.bounds[rows[0]]) <= self.best:
                break
            rows = rows[self.bounds[rows] > self.best]
            self._ask(rows, self.read(rows), stages)
        rows, gains = (torch.cat(part) for part in zip(*self.gains, strict=True))
        top = gains.topk(min(most, len(gains)))
        return rows[top.indices[top.values >= self.best - _CLOSE]].sort().values

    def _ask(self, rows: Tensor, block: Block, stages: Sequence[Stage]) -> None:
        """Put the questions to these rows, the next ones to those that may still be the best."""
        answers = stages[0].ask(block).double()
        self.bounds[rows] = torch.minimum(self.bounds[rows], answers)
        if len(stages) == 1:
            self.gains.append((rows, answers))
            self.best = max(self.best, float(answers.max()))
            return
        for places in answers.argsort(descending=True).split(stages[1].size):
            places = places[answers[places] > self.best]
            if not len(places):
                break
            self._ask(rows[places], tuple(taken(t, places) for t in block), stages[1:])
