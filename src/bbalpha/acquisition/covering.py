"""Rows that cover the pool: a cheap control that asks no model what it is unsure of.

k_center(features, 10, labelled=features_of_labelled).indices
"""

import torch
from torch import Tensor

from bbalpha._engine.batches import progress_bar
from bbalpha.acquisition.selection import Selection, check_size
from bbalpha.checks import check_floating

_BLOCK = 2**22  # numbers worked on at a time


def k_center(features: Tensor, size: int, *, labelled: Tensor | None = None, progress: bool | None = None) -> Selection:
    """Rows, each the farthest from all that are labelled or were picked before it: k-centre, greedily.

    At most twice as far from every row as the best choice could be (Gonzalez 1985); Sener & Savarese (2018) call it the
    core-set. Far is Euclidean: the features should be comparable, such as activations of a layer.

    Args:
        features: Of the rows of the pool (N, D).
        size: How many to choose.
        labelled: Features of rows that are labelled already (M, D); without any, the first pick is the row nearest to
            the mean.
        progress: True or False; None shows a bar on a terminal when it takes more than a few seconds.

    Returns:
        The rows, and how far each was from all others that are labelled or picked (0 for a first one without any).

    >>> k_center(torch.tensor([[0.0], [1.0], [9.0], [10.0]]), 2, labelled=torch.tensor([[0.0]])).indices
    tensor([3, 1])
    """
    features = _checked("features", features)
    size = check_size(size, len(features))
    distance = torch.full((len(features),), torch.inf, dtype=features.dtype, device=features.device)
    if labelled is not None:
        labelled = _checked("labelled", labelled)
        if labelled.shape[1] != features.shape[1]:
            raise ValueError(f"`labelled` must have the {features.shape[1]} features; got {labelled.shape[1]}.")
        for centre in labelled.to(features):
            distance = torch.minimum(distance, _distances(features, centre))
    rows: list[int] = []
    scores: list[float] = []
    with progress_bar(size, progress, desc="choose", unit="pick") as bar:
        for _ in range(size):
            first = bool(distance.isinf().all())
            row = int(_distances(features, features.mean(0)).argmin() if first else distance.argmax())
            rows.append(row)
            scores.append(0.0 if first else float(distance[row]))
            distance = torch.minimum(distance, _distances(features, features[row]))
            distance[row] = -1.0  # a copy of a pick may follow, the pick itself not
            bar.update(1)
    return Selection(torch.tensor(rows), torch.tensor(scores, dtype=torch.float64))


def _distances(features: Tensor, centre: Tensor) -> Tensor:
    """Of every row from one place (N,), by blocks of rows."""
    blocks = features.split(max(1, _BLOCK // features.shape[1]))
    return torch.cat([(block - centre).square().sum(1).sqrt() for block in blocks])


def _checked(name: str, features: Tensor) -> Tensor:
    check_floating(name, features)
    if features.ndim != 2 or not features.numel() or not bool(features.isfinite().all()):
        shape = tuple(features.shape)
        raise ValueError(f"`{name}` must be finite numbers of the rows, (N, D); got shape {shape}. Use flatten(1).")
    return features.detach()
