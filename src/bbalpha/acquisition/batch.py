"""Which labels to ask for together: BatchBALD, exactly greedy, over pools of any size.

Kirsch, van Amersfoort, Gal, "BatchBALD" (2019). The score of a batch is what all its labels together tell about which
of the K functions is right, I(y_1 .. y_b; k): a near copy of a row tells little that the row did not. Greedy picks
reach at least 1 - 1/e of the best batch's score.

    batch_bald(p.pass_probs, 10).indices
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from bbalpha._engine.batches import progress_bar
from bbalpha.acquisition.configurations import Gain, candidates, merged, no_labels, sampled, with_label
from bbalpha.acquisition.greedy import Search, Stage
from bbalpha.acquisition.pools import Values, probabilities
from bbalpha.acquisition.scores import information
from bbalpha.acquisition.selection import Selection, check_size, new_generator
from bbalpha.checks import check_count

_COARSE = (64, 512)  # configurations that bound the gain of all
_WORK = 2**22  # numbers that a question to a block of candidates takes


def batch_bald(
    probs: Any,
    size: int,
    *,
    n_configurations: int = 40_000,
    seed: int | None = None,
    progress: bool | None = None,
) -> Selection:
    """The rows whose labels tell most about the model together, picked one after the other.

    While the chosen points have at most `n_configurations` label configurations that matter, scores are exact; after
    that so many are drawn for each pick, equally many from each pass. A score cannot exceed log K: a warning says where
    a batch has come so near to it that further picks are decided by noise.

    Args:
        probs: Class probabilities of K passes with shared masks (K, N, C), as in `bald`. Of a pool that is not in
            memory, a block is read at a time, and the best rows are kept (256 MB).
        size: How many to choose.
        n_configurations: Label configurations looked at.
        seed: Of the configurations that are drawn: None takes torch's global generator, an int leaves it untouched.
        progress: True or False; None shows bars on a terminal when it takes more than a few seconds.

    Returns:
        The rows in the order they were picked, the score of the batch after each of them, and log K.

    >>> first, other = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1]]), torch.tensor([[0.8, 0.2]] * 2 + [[0.2, 0.8]])
    >>> batch_bald(torch.stack((first, first, other), 1), 2).indices   # a copy tells less than what is new
    tensor([0, 2])
    """
    pool = probabilities(probs)
    size = check_size(size, pool.n_rows)
    n_configurations = check_count("n_configurations", n_configurations)
    generator = new_generator(seed)
    search = Search(
        pool.scored_for_choice(information, progress), lambda rows: candidates(pool.read(rows), torch.float32)
    )
    joint, exact = no_labels(pool.n_passes), True
    rows: list[int] = []
    scores: list[float] = []
    chosen = torch.empty((0, pool.width, pool.n_passes), dtype=torch.float64)
    with progress_bar(size, progress, desc="choose", unit="pick") as bar:
        while True:
            row, gain, own = _pick(search, pool, joint, generator)
            rows.append(row)
            scores.append(min(gain + (scores[-1] if scores else 0.0), math.log(pool.n_passes)))
            bar.update(1)
            if len(rows) == size:
                break
            search.leave_out(row)
            chosen = torch.cat((chosen, own))
            exact = exact and len(joint) * pool.width <= n_configurations
            joint = with_label(joint, own[0]) if exact else sampled(chosen, n_configurations, generator)
    found = Selection(torch.tensor(rows), torch.tensor(scores, dtype=torch.float64), math.log(pool.n_passes))
    _tell_bound(found, pool.n_passes)
    return found


def _pick(search: Search, pool: Values, joint: Tensor, generator: torch.Generator | None) -> tuple[int, float, Tensor]:
    """The best row on top of what the configurations stand for, its gain, and its probabilities (1, C, K)."""
    counts = [count for count in _COARSE if 2 * count < len(joint)]
    kinds = [Gain(merged(joint, count, generator), torch.float32) for count in counts]
    kinds.append(Gain(joint, torch.float32))
    stages = [Stage(kind, max(16, min(2**12, _WORK // (len(kind) * pool.width)))) for kind in kinds]  # type: ignore[arg-type]
    close = search.best_rows(stages)
    block = candidates(pool.read(close), torch.float64)  # found in single precision, weighed in double
    gains = Gain(joint, torch.float64)(block)
    best = int(gains.argmax())
    return int(close[best]), max(0.0, float(gains[best])), block[0][..., best].T[None]


def _tell_bound(found: Selection, n_passes: int) -> None:
    if found.decided < len(found.indices):
        warnings.warn(
            f"The score of {n_passes} passes cannot exceed log {n_passes} = {found.bound:.3f}, and {found.decided} "
            f"picks have reached {float(found.scores[found.decided - 1]):.3f}: picks after them are decided by noise. "
            "Use more passes, or a smaller batch.",
            UserWarning,
            stacklevel=3,
        )
