"""Where to look for a smaller value: draws of Thompson and expected improvement, from what K functions say.

Smaller is better here; to look for large values, give minus the outputs.

    f = bbalpha.Functions(net, n_passes=100, seed=0)
    thompson(f.values(x), 4, seed=1).indices                              # four rows to try at once
"""

from typing import Any

import torch
from torch import Tensor

from bbalpha.acquisition.pools import Values
from bbalpha.acquisition.selection import Selection, check_size, new_generator
from bbalpha.checks import check_number


def thompson(outputs: Any, size: int, *, seed: int | None = None, progress: bool | None = None) -> Selection:
    """Rows, each the best one under a function of its own, drawn at random: it explores as much as it is unsure.

    Functions are drawn without replacement, all of them before one comes again; a row that was picked before gives way
    to the function's next best.

    Args:
        outputs: Values of K functions (K, N) or (K, N, 1): a `RegressionPrediction` with shared masks, a tensor, an
            array, on disk too, or ``Functions(net, K).values(x)``.
        size: How many rows to choose.
        seed: None draws from torch's global generator; an int leaves it untouched.
        progress: True or False; None shows a bar on a terminal when it takes more than a few seconds.

    Returns:
        The rows, and the value that each has under its function.

    >>> thompson(torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 2.0]]), 2, seed=0).indices.sort().values
    tensor([0, 1])
    """
    pool = _one_output(outputs)
    size = check_size(size, pool.n_rows)
    rounds = -(-size // pool.n_passes)
    generator = new_generator(seed)
    functions = torch.cat([torch.randperm(pool.n_passes, generator=generator) for _ in range(rounds)])[:size]
    best = _Best(size)
    for rows, block in pool.blocks(progress):
        best.look_at(rows, block[functions, 0])
    return best.distinct()


def expected_improvement(outputs: Any, best: float, *, progress: bool | None = None) -> Tensor:
    """By how much each row is expected to be below `best`: mean_k max(best - f_k, 0) (N,).

    Args:
        outputs: Values of K functions, as in `thompson`.
        best: The smallest value that is known.
        progress: As in `thompson`.

    >>> expected_improvement(torch.tensor([[1.0, 3.0], [2.0, 1.5]]), best=2.0)
    tensor([0.5000, 0.2500])
    """
    best = check_number("best", best)
    return _one_output(outputs).scored(lambda block: (best - block[:, 0]).clamp_min(0.0).mean(0), progress)


class _Best:
    """The rows with the smallest values under each of `size` functions, as many as there are functions."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows = torch.empty((size, 0), dtype=torch.long)
        self.values = torch.empty((size, 0), dtype=torch.float64)

    def look_at(self, rows: Tensor, values: Tensor) -> None:
        """Further rows (n,) and their values under the functions (size, n)."""
        all_rows = torch.cat((self.rows, rows.expand(self.size, -1)), 1)
        all_values = torch.cat((self.values, values.double()), 1)
        least = all_values.topk(min(self.size, all_values.shape[1]), dim=1, largest=False)
        self.rows, self.values = all_rows.gather(1, least.indices), least.values

    def distinct(self) -> Selection:
        """One row for each function, none twice."""
        chosen: list[int] = []
        scores: list[float] = []
        for own, values in zip(self.rows.tolist(), self.values.tolist(), strict=True):
            row, value = next((r, v) for r, v in zip(own, values, strict=True) if r not in chosen)
            chosen.append(row)
            scores.append(value)
        return Selection(torch.tensor(chosen), torch.tensor(scores, dtype=torch.float64))


def _one_output(outputs: Any) -> Values:
    pool = Values(outputs, "outputs")
    if pool.width != 1:
        raise ValueError(
            f"`outputs` must have one value a row, (K, N) or (K, N, 1); got {pool.width}. Pick one, or weigh them."
        )
    return pool
