"""The common scores: their definition, on numpy's terms, and shapes that would broadcast refused."""

import numpy as np
import pytest
import torch

from bbalpha.experiments.scoring import scores


def test_scores_are_their_definitions() -> None:
    rng = np.random.default_rng(0)
    log_prob, mean, target = rng.normal(size=(3, 50))
    found = scores(*(torch.tensor(a) for a in (log_prob, mean, mean - 1, mean + 0.5, target)))
    assert found["nll"] == pytest.approx(-log_prob.mean())
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((mean - target) ** 2)))
    assert found["coverage90"] == pytest.approx(np.mean((target >= mean - 1) & (target <= mean + 0.5)))


@pytest.mark.parametrize("place", range(4))
def test_a_column_beside_a_row_is_refused(place: int) -> None:
    given = [torch.zeros(5)] * 5
    given[place] = torch.zeros(5, 1)
    with pytest.raises(ValueError, match=r"must be \(N,\) as `target` is; got \(5, 1\)"):
        scores(*given)
