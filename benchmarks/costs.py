"""What training and prediction cost, as a formula: seconds, bytes in memory, bytes on the wire.

K passes, N rows, W weights, U units with dropout, R ranks. A step of training takes

    base + moved weight + K N (6 W keep operation + U unit)

seconds, a prediction the same with 2 in place of 6. `keep` is the share of the weights that is used: 1, or p^2 under
shared masks; `moved` are the weights that are read and written however few rows there are: W, or K W keep under shared
masks, where each pass has weights of its own. The coefficients are fitted to measurements, relative errors counting
alike; `Machine` has those of machines that we do not have, named as assumptions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

OPERATIONS = {"train": 6.0, "predict": 2.0}


@dataclass(frozen=True)
class Cost:
    """Seconds of a call, of a weight that is moved, of an operation, and of a unit in a pass of a row."""

    base: float
    weight: float
    operation: float
    unit: float

    def seconds(self, row: Mapping[str, Any]) -> float:
        """Of a row with work, n_passes, batch, weights, units, keep and moved."""
        return float(np.dot(_terms(row), (self.base, self.weight, self.operation, self.unit)))


def fitted(rows: Sequence[dict[str, Any]]) -> Cost:
    """The cost that these measurements follow best: rows of one work, relative errors counting alike."""
    a = np.array([_terms(r) for r in rows])
    seconds = np.array([r["seconds"] for r in rows])
    scale = a.max(0) / seconds.max()
    found = nnls(a / seconds[:, None] / scale, np.ones(len(rows)))[0] / scale
    return Cost(*map(float, found))


def _terms(row: Mapping[str, Any]) -> list[float]:
    """What each coefficient is multiplied with."""
    passed = row["n_passes"] * row["batch"]
    return [1.0, row["moved"], passed * OPERATIONS[row["work"]] * row["weights"] * row["keep"], passed * row["units"]]


def memory(K: float, N: float, weights: float, units: float) -> float:
    """Bytes of a training step: weights, gradients and two moments of Adam, and what backward needs of every unit."""
    return 16 * weights + 4 * K * N * units


def wire(weights: float, ranks: int, *, rows: float = 0.0) -> float:
    """Bytes that a rank sends in a step: a ring for the gradient; with sample parallelism two numbers a row more."""
    return 2 * (ranks - 1) / ranks * 4 * (weights + 2 * rows)


@dataclass(frozen=True)
class Machine:
    """A processor and its link; assumptions where we have none.

    Attributes:
        flops: Operations a second that products reach.
        bandwidth: Bytes a second and rank in a ring.
        latency: Seconds of a message.
        memory: Bytes.
    """

    flops: float
    bandwidth: float
    latency: float
    memory: float

    def step(self, K: float, N: float, weights: float, ranks: int, *, split: str) -> dict[str, float]:
        """Seconds of a training step of N rows and K passes in all, spread over ranks.

        split: "rows" gives each rank rows, "passes" passes of all rows, "both" as even a grid of the two as there is.
        """
        own = {"rows": K * math.ceil(N / ranks), "passes": math.ceil(K / ranks) * N, "both": math.ceil(K * N / ranks)}[
            split
        ]  # passes of rows that the busiest rank runs
        compute = OPERATIONS["train"] * weights * own / self.flops
        sent = wire(weights, ranks, rows=0 if split == "rows" else N)
        talk = sent / self.bandwidth + 2 * math.ceil(math.log2(max(2, ranks))) * self.latency * (ranks > 1)
        return {"compute": compute, "talk": talk, "seconds": compute + talk, "efficiency": K * N * OPERATIONS["train"]
                * weights / self.flops / ranks / (compute + talk), "bytes": sent}  # fmt: skip
