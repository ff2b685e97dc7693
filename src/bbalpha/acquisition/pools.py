"""Pools of candidates, read by rows: a tensor, an array (one on disk too), or what K functions say when they are asked.

What is read has the shape (K, N, C) and gives rows by ``[:, rows]``. Whatever the pool, a block of rows is held at a
time; of one that is not in memory, the most promising rows are kept, as these are asked for again.

    probabilities(bbalpha.Functions(net, 100, seed=0).probs(x))           # a million rows, computed when read
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bbalpha._engine.batches import progress_bar
from bbalpha.joint import check_functions
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction

_BLOCK = 2**22  # numbers read at a time
_KEPT = 2**26  # numbers of promising rows that are kept: 256 MB


class Values:
    """Values of K functions at N candidates, each of D numbers: (K, N, D), or (K, N) for one.

    Args:
        values: The pool.
        name: What it is called.
        probabilities: Whether they are those of D classes.
        change: What is done to the values (K, D, n) of rows (n,) whenever they are read.
    """

    def __init__(
        self, values: Any, name: str, *, probabilities: bool = False,
        change: Callable[[Tensor, Tensor], Tensor] = lambda _, block: block,
    ) -> None:  # fmt: skip
        self.name, self.source, self.probabilities, self.change = name, _held(values, name), probabilities, change
        shape = tuple(self.source.shape)
        if len(shape) not in ((3,) if probabilities else (2, 3)) or not all(shape):
            form = "(K, N, C)" if probabilities else "(K, N) or (K, N, D)"
            raise ValueError(f"`{name}` must have shape {form} with the K passes first; got {shape}.")
        if shape[0] < 2:
            raise ValueError(f"`{name}` must hold at least 2 passes: one does not disagree with itself; got 1.")
        self.n_passes, self.n_rows = shape[0], shape[1]
        self.width = shape[2] if len(shape) == 3 else 1
        if probabilities and self.width < 2:
            raise ValueError(
                f"`{name}` must have at least 2 classes; got 1. Give the probability of the other one too."
            )
        self.kept: tuple[Tensor, Tensor] | None = None  # rows in ascending order, and their values (K, D, n)

    def blocks(self, progress: bool | None, *, size: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows (n,) and their values (K, D, n), all of them in order."""
        size = size or max(1, _BLOCK // (self.n_passes * self.width))
        with progress_bar(self.n_rows, progress, desc="score", unit="row") as bar:
            for start in range(0, self.n_rows, size):
                rows = torch.arange(start, min(start + size, self.n_rows))
                block = self._arranged(self.source[:, start : start + len(rows)])
                self._check(block, start)
                yield rows, self.change(rows, block)
                bar.update(len(rows))

    def scored(self, score: Callable[[Tensor], Tensor], progress: bool | None, *, size: int | None = None) -> Tensor:
        """What `score` says of each row, from its values (K, D, n) -> (n,): (N,)."""
        return torch.cat([score(block) for _, block in self.blocks(progress, size=size)])

    def scored_for_choice(self, score: Callable[[Tensor], Tensor], progress: bool | None) -> Tensor:
        """`scored`; the rows that score highest are kept, where reading them again would be slow."""
        if isinstance(self.source, Tensor):
            return self.scored(score, progress)
        reserve = _Reserve(max(1, _KEPT // (self.n_passes * self.width)))
        scores = []
        for rows, block in self.blocks(progress):
            scores.append(score(block))
            reserve.add(rows, scores[-1], block)
        self.kept = reserve.rows_and_values()
        return torch.cat(scores)

    def read(self, rows: Tensor) -> Tensor:
        """The values of some rows (K, D, n)."""
        if self.kept is None:
            return self.change(rows, self._arranged(self._taken(rows)))
        numbers, values = self.kept
        place = torch.searchsorted(numbers, rows).clamp_max(len(numbers) - 1)
        here = numbers[place] == rows
        found = taken(values, place)
        if not bool(here.all()):
            others = rows[~here]
            found[..., ~here] = self.change(others, self._arranged(self._taken(others)))
        return found

    def _taken(self, rows: Tensor) -> Any:
        """(K, n, D); index_select takes a fifth of the time of an index, where the rows it takes lie together."""
        if isinstance(self.source, np.ndarray):
            return self.source[:, rows.numpy()]
        if not isinstance(self.source, Tensor):
            return self.source[:, rows]
        rows = rows.to(self.source.device)
        by_rows = self.source.transpose(0, 1)
        if by_rows.is_contiguous():
            return by_rows.index_select(0, rows).transpose(0, 1)
        return self.source.index_select(1, rows)

    def _arranged(self, part: Any) -> Tensor:
        """(K, n, D) as (K, D, n): sums over a short last axis are slow."""
        values = part if isinstance(part, Tensor) else torch.as_tensor(np.array(part))
        if not values.is_floating_point():
            raise TypeError(f"`{self.name}` must be real floating-point numbers; got {values.dtype}.")
        values = values.detach()
        values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        return (values.unsqueeze(2) if values.ndim == 2 else values).transpose(1, 2).contiguous()

    def _check(self, block: Tensor, start: int) -> None:
        if not self.probabilities:
            bad = ~block.isfinite()
            if bool(bad.any()):
                k, d, n = bad.nonzero()[0].tolist()
                value = float(block[k, d, n])
                raise ValueError(f"`{self.name}` must be finite; got {value} in pass {k} of row {start + n}.")
            return
        total = block.sum(1)
        if not bool((block >= 0).all()) or not bool(((total - 1).abs() < 1e-3).all()):
            raise ValueError(
                f"`{self.name}` must be probabilities that sum to 1 over the classes; got sums from "
                f"{float(total.min()):.4g} to {float(total.max()):.4g}. Are these logits? Use softmax."
            )


def probabilities(probs: Any, name: str = "probs") -> Values:
    """Class probabilities of K functions at N candidates (K, N, C)."""
    return Values(probs, name, probabilities=True)


def taken(t: Tensor, places: Tensor) -> Tensor:
    """``t[..., places]``, in less than half of its time."""
    found: Tensor = t.flatten(0, -2).index_select(1, places).unflatten(0, t.shape[:-1])
    return found


class _Reserve:
    """The rows that score highest so far, at most so many, with their values."""

    def __init__(self, most: int) -> None:
        self.most, self.least = most, -torch.inf  # the score that lets a row in
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self.count = 0

    def add(self, rows: Tensor, scores: Tensor, values: Tensor) -> None:
        """Look at further rows (n,), their scores and values (K, D, n)."""
        better = (scores > self.least).nonzero()[:, 0]
        if len(better):
            self.parts.append((rows[better], scores[better], taken(values, better)))
            self.count += len(better)
        if self.count > 1.25 * self.most:  # not at every block: each time all are copied
            self._tidy()

    def rows_and_values(self) -> tuple[Tensor, Tensor]:
        """Their numbers in ascending order (n,), and their values (K, D, n)."""
        self._tidy()
        rows, _, values = self.parts[0]
        return rows, values

    def _tidy(self) -> None:
        rows, scores, values = (torch.cat(part, -1) for part in zip(*self.parts, strict=True))
        if len(rows) > self.most:
            best = scores.topk(self.most)
            self.least = float(best.values[-1])
            places = best.indices.sort().values
            rows, scores, values = rows[places], scores[places], taken(values, places)
        self.parts, self.count = [(rows, scores, values)], len(rows)


def _held(values: Any, name: str) -> Any:
    """What gives rows by [:, rows]; the passes of a prediction, if they are functions."""
    if isinstance(values, (ClassificationPrediction, RegressionPrediction)):
        check_functions(values)
        return values.pass_probs if isinstance(values, ClassificationPrediction) else values.outputs
    if not hasattr(values, "shape") or not hasattr(values, "__getitem__"):
        raise TypeError(
            f"`{name}` must be a tensor, an array, a prediction, or what Functions(...) gives for rows; got "
            f"{type(values).__name__}."
        )
    return values
