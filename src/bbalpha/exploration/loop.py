"""Suggest, measure, observe: the least (or largest) value of something that is dear to measure.

    explorer = bbalpha.Explorer([(-5, 10), (0, 15)], seed=0)             # or Explorer(candidates=table)
    for _ in range(60):
        x = explorer.suggest()                                            # (1, 2)
        explorer.observe(x, measure(x))
    explorer.best_x, explorer.best_y

The first rows are a scrambled Sobol design. From then on a Gaussian process is fitted to what is known
(`surrogate.py`), and asked is for where improvement is expected (`climbing.py`). What is suggested follows from the
seed and from what was observed, in its order, and from nothing else: a run that was saved goes on as if it had not
been.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from bbalpha._kernels import draw_seed, step_seed
from bbalpha.checks import check_count, check_flag, check_seed
from bbalpha.exploration.climbing import promise
from bbalpha.exploration.storing import read_folder, write_folder
from bbalpha.exploration.surrogate import Draws, Passes, fit_passes

Model = Callable[[Tensor, Tensor, int], Draws | Passes]  # rows in [0, 1] (N, F), values to be small (N,), a seed
_EVERYWHERE, _NEAR, _AROUND = 600, 60, 3  # candidates in the box, near each of the best rows, and how many of these


class Explorer:
    """A loop that looks for the best row with few measurements: `suggest`, measure, `observe`.

    Args:
        bounds: (low, high) of every coordinate, for rows in a box.
        candidates: Instead of bounds, the rows that can be measured (M, F); none is suggested once it is observed.
        maximise: Look for the largest value instead of the least.
        first: Rows of the first design; None takes 2 F + 2, at least 5. Any rows that were observed count.
        model: What functions are drawn from: called with rows scaled to [0, 1] (N, F), values that are to be small
            (N,) and a seed, it returns a function of rows (n, F) with the values of K functions (K, n), through which
            gradients flow. None takes a Gaussian process.
        seed: Of the design and of all that is drawn; None draws one from torch's global generator, to be read here.

    Attributes:
        x: What was observed, in its order (N, F).
        y: Its values (N,).

    >>> explorer = Explorer([(-1.0, 1.0)], seed=0)
    >>> for _ in range(8):
    ...     x = explorer.suggest()
    ...     explorer.observe(x, (x[:, 0] - 0.3) ** 2)
    >>> abs(float(explorer.best_x[0]) - 0.3) < 0.1
    True
    """

    def __init__(
        self,
        bounds: Sequence[tuple[float, float]] | Tensor | None = None,
        *,
        candidates: Tensor | None = None,
        maximise: bool = False,
        first: int | None = None,
        model: Model | None = None,
        seed: int | None = None,
    ) -> None:
        if (bounds is None) == (candidates is None):
            raise ValueError("`bounds` or `candidates` must say where to look, one of them; got both, or none.")
        check_seed(seed)
        self.maximise = check_flag("maximise", maximise)
        self.model = model
        self.seed = draw_seed(None) if seed is None else seed
        self.candidates = None if candidates is None else _candidates(candidates)
        self.low, self.high = _box(bounds) if self.candidates is None else _span(self.candidates)
        F = len(self.low)
        self.first = max(5, 2 * F + 2) if first is None else check_count("first", first)
        self.x = torch.empty((0, F), dtype=torch.float64)
        self.y = torch.empty(0, dtype=torch.float64)

    @property
    def best_x(self) -> Tensor:
        """The best row observed so far (F,)."""
        return self.x[self._best()]

    @property
    def best_y(self) -> float:
        """Its value."""
        return float(self.y[self._best()])

    def suggest(self, n: int = 1) -> Tensor:
        """Rows to measure next (n, F), chosen to be measured together; asked again before `observe`, the same ones."""
        n = check_count("n", n)
        seen = len(self.y)
        left = None if self.candidates is None else self._unseen(self.candidates)
        if left is not None and len(left) < n:
            raise ValueError(f"`n` must be at most the {len(left)} candidates that were not observed; got {n}.")
        designed = min(n, max(0, self.first - seen))
        rows = self._design(seen, designed, left)
        if n > designed:
            rows = torch.cat((rows, self._chosen(n - designed, rows, left)))
        return rows

    def observe(self, x: Tensor, y: Tensor | float) -> None:
        """Tell the values y (n,) that were measured at rows x (n, F); any rows, suggested or not."""
        rows = torch.as_tensor(x, dtype=torch.float64).detach()
        values = torch.as_tensor(y, dtype=torch.float64).detach()
        rows = rows[None] if rows.ndim == 1 else rows
        values = values.reshape(-1) if values.ndim < 2 or values.shape[1:] == (1,) else values
        if rows.ndim != 2 or rows.shape[1] != len(self.low) or values.shape != rows.shape[:1]:
            raise ValueError(
                f"`x` must be rows (n, {len(self.low)}) and `y` a value for each, (n,); got {tuple(rows.shape)} and "
                f"{tuple(values.shape)}."
            )
        if not bool(rows.isfinite().all()) or not bool(values.isfinite().all()):
            raise ValueError("`x` and `y` must be finite; got nan or infinity. Leave out what could not be measured.")
        self._check_inside(rows)
        self.x, self.y = torch.cat((self.x, rows)), torch.cat((self.y, values))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the loop into a folder, whole or not at all; a `model` of the caller's is not in it."""
        state = {
            "bounds": None if self.candidates is not None else torch.stack((self.low, self.high), 1).tolist(),
            "candidates": None if self.candidates is None else self.candidates.tolist(),
            "maximise": self.maximise, "first": self.first, "seed": self.seed, "own_model": self.model is not None,
            "x": self.x.tolist(), "y": self.y.tolist(),
        }  # fmt: skip
        write_folder(Path(folder), state)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, model: Model | None = None) -> Self:
        """The loop that was saved in a folder; it goes on as if it had not been interrupted.

        Args:
            folder: As given to `save`.
            model: The caller's own, where there was one.
        """
        state = read_folder(Path(folder))
        if state.get("own_model") != (model is not None):
            raise ValueError("`model` must be given where, and only where, the saved loop had one of its own.")
        try:
            return cls._of(state, model)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:  # it may say anything
            told = " ".join(str(error).split())
            raise ValueError(f"{str(folder)!r} is not of the form that bbalpha writes: {told}") from error

    @classmethod
    def _of(cls, state: dict[str, Any], model: Model | None) -> Self:
        x, y, candidates = (state[name] for name in ("x", "y", "candidates"))
        held = None if candidates is None else torch.tensor(candidates, dtype=torch.float64)
        settings = {name: state[name] for name in ("maximise", "first", "seed")}
        explorer = cls(state["bounds"], candidates=held, model=model, **settings)
        if y:
            explorer.observe(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64))
        return explorer

    # ------------------------------------------------------------------------------ helpers

    def _best(self) -> int:
        if not len(self.y):
            raise RuntimeError("Nothing was observed yet; call observe(x, y) first.")
        return int(self.y.argmax() if self.maximise else self.y.argmin())

    def _design(self, seen: int, n: int, left: Tensor | None) -> Tensor:
        """The next n rows of the first design."""
        if left is not None:
            generator = torch.Generator().manual_seed(step_seed(self.seed, seen))
            return left[torch.randperm(len(left), generator=generator)[:n]]
        rows = SobolEngine(len(self.low), scramble=True, seed=self.seed % 2**63).draw(seen + n, dtype=torch.float64)
        return self._placed(rows[seen:])

    def _chosen(self, n: int, designed: Tensor, left: Tensor | None) -> Tensor:
        """N rows that the functions promise most of, in the order they are picked."""
        if not len(self.y):
            raise ValueError(f"`n` must be at most the {self.first} rows of the first design; got {n + len(designed)}.")
        seed = step_seed(self.seed, len(self.y))
        generator = torch.Generator().manual_seed(seed)
        seen = self._scaled(self.x)
        known = (self.model or process)(seen, -self.y if self.maximise else self.y, seed)
        climb = promise(known, seen, generator)
        taken = self._scaled(designed)
        for row in taken:
            climb.take(row)
        rows = []
        for _ in range(n):
            if left is None:
                at = climb.refine(*self._pool(generator))
                rows.append(self._placed(at[None])[0])
            else:
                others = left[~_among(left, torch.cat((designed, *(r[None] for r in rows))))]
                rows.append(others[int(climb.scores(self._scaled(others)).argmax())])
                at = self._scaled(rows[-1])
            climb.take(at)
        return torch.stack(rows)

    def _pool(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Candidates in the unit cube: everywhere, and at all distances from the best rows."""
        F = len(self.low)
        everywhere = torch.rand((_EVERYWHERE, F), generator=generator, dtype=torch.float64)
        best = self._scaled(self.x)[self.y.argsort(descending=self.maximise)[:_AROUND]]
        centres = best.repeat_interleave(_NEAR, 0)
        reach = 0.2 * 10 ** (-3 * torch.rand((len(centres), 1), generator=generator, dtype=torch.float64))
        steps = torch.randn((len(centres), F), generator=generator, dtype=torch.float64)
        return everywhere, (centres + reach * steps).clamp(0, 1)

    def _unseen(self, rows: Tensor) -> Tensor:
        return rows[~_among(rows, self.x)]

    def _scaled(self, x: Tensor) -> Tensor:
        return (x - self.low) / (self.high - self.low)

    def _placed(self, x: Tensor) -> Tensor:
        return torch.minimum(self.low + x * (self.high - self.low), self.high)

    def _check_inside(self, rows: Tensor) -> None:
        if self.candidates is not None:
            known = _among(rows, self.candidates)
            if not bool(known.all()):
                raise ValueError(
                    f"`x` must be rows of the candidates; got {rows[~known][0].tolist()}, which is none of them."
                )
        outside = (rows < self.low) | (rows > self.high)
        if bool(outside.any()):
            n, f = outside.nonzero()[0].tolist()
            raise ValueError(
                f"`x` must lie within the bounds; got {float(rows[n, f])} in coordinate {f}, whose bounds are "
                f"{float(self.low[f])} and {float(self.high[f])}."
            )


def process(x: Tensor, y: Tensor, seed: int) -> Passes:
    """What `Explorer` knows by itself of values y (N,) at rows x (N, F)."""
    return fit_passes(x, eased(y), seed=seed)


def eased(y: Tensor) -> Tensor:
    """Values, with those above the median drawn together: how large the large ones are tells little about the least.

    >>> eased(torch.tensor([0.0, 1.0, 2.0, 100.0]).double())
    tensor([0.0000, 1.0000, 1.6931, 5.6052], dtype=torch.float64)
    """
    unit = y.median() - y.min()
    if not bool(unit > 0):
        return y
    z = (y - y.min()) / unit
    return torch.where(z < 1, z, 1 + z.clamp_min(1).log())


def _among(rows: Tensor, others: Tensor) -> Tensor:
    """Which rows (N, F) are equal to one of the others (M, F)."""
    if not len(others):
        return torch.zeros(len(rows), dtype=torch.bool)
    known = {tuple(row) for row in others.tolist()}
    return torch.tensor([tuple(row) in known for row in rows.tolist()], dtype=torch.bool)


def _box(bounds: Any) -> tuple[Tensor, Tensor]:
    table = torch.as_tensor(bounds, dtype=torch.float64).detach()
    if table.ndim != 2 or table.shape[1] != 2 or not len(table):
        raise ValueError(f"`bounds` must be (low, high) for every coordinate, (F, 2); got {tuple(table.shape)}.")
    low, high = table.unbind(1)
    bad = ~(table.isfinite().all(1) & (low < high))
    if bool(bad.any()):
        f = int(bad.nonzero()[0])
        raise ValueError(
            f"`bounds` must be finite, each low below its high; got {tuple(table[f].tolist())} in coordinate {f}."
        )
    return low, high


def _candidates(rows: Any) -> Tensor:
    table = torch.as_tensor(rows, dtype=torch.float64).detach()
    if table.ndim != 2 or not table.numel() or not bool(table.isfinite().all()):
        raise ValueError(f"`candidates` must be finite rows (M, F), at least one; got shape {tuple(table.shape)}.")
    return torch.tensor(list(dict.fromkeys(map(tuple, table.tolist()))), dtype=torch.float64)  # equal rows are one


def _span(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest of every column; a constant one has length 1."""
    low, high = rows.amin(0), rows.amax(0)
    return low, torch.where(high > low, high, low + 1)
