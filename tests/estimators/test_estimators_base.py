import numpy as np
import torch
from sklearn.preprocessing import StandardScaler

from bbalpha.estimators.base import seeded_mlp, standardiser


def test_standardisation_is_that_of_scikit_learn_weights_included():
    rng = np.random.RandomState(0)
    values, weight = rng.normal(3, 5, (30, 2)), rng.uniform(size=30)
    for w in (None, weight):
        theirs = StandardScaler().fit(values, sample_weight=w)
        mean, scale = standardiser(values, w)
        np.testing.assert_allclose(mean, theirs.mean_)
        np.testing.assert_allclose(scale, theirs.scale_)
    assert standardiser(np.full((5, 1), 0.998))[1] == 1.0  # a constant column up to rounding


def test_weights_follow_from_the_seed_alone():
    state = torch.get_rng_state()
    a, b, c = (seeded_mlp([2, 3, 1], s, dropout=0.1, input_dropout=0.0) for s in (1, 1, 2))
    assert torch.equal(a[0].weight, b[0].weight)
    assert not torch.equal(a[0].weight, c[0].weight)
    assert torch.equal(state, torch.get_rng_state())
