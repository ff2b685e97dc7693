from functools import partial

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from bbalpha._kernels import Passes
from bbalpha.training import bank
from bbalpha.training.bank import Member, initial_network, pad, standardiser
from bbalpha.training.population import fit_population


@pytest.mark.parametrize("together", [0, 3])
def test_members_of_one_key_share_the_masks_of_its_passes(together):
    keys = [(7, 4, 0.0, 0.5), (8, 4, 0.0, 0.5), (7, 4, 0.0, 0.5)]
    draws = bank._Draws.of(keys, n_passes=3, B=4, together=together)
    assert len(draws.sources) == 2
    noise, scale = draws.noise(1, 6)
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(noise[0] > 0, Passes(7, 0, 3, together=together).noise((4, 6), 0.5).keep())
    assert scale.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("together", [0, 2])
def test_rows_that_are_not_there_draw_nothing(together):
    keys = [(1, 4, 0.25), (2, 3, 0.5), (3, 0, 0.5), (4, 4, 0.0)]
    draws = bank._Draws.of(keys, n_passes=2, B=4, together=together)
    noise, scale = draws.noise(0, 5)
    assert torch.equal(noise[1, :, :3] > 0, Passes(2, 0, 2, together=together).noise((3, 5), 0.5).keep())
    assert bool((noise[2:] > 0).all())
    torch.testing.assert_close(scale, torch.tensor([4 / 3, 2.0, 1.0, 1.0]))


@pytest.mark.parametrize("together", [0, 3])
@pytest.mark.parametrize("owners", [[0, 0, 1, 1], [0, 1, 0, 0], [0, 1, 2, 3]])
def test_the_readout_is_the_product_of_what_is_kept(owners, together):
    keys = [(u, 5, 0.0, 0.25) for u in owners]
    draws = bank._Draws.of(keys, n_passes=3, B=6, together=together)  # of 6 rows 5 are real
    h, weight = torch.randn(4, 6, 8), torch.randn(4, 2, 8)
    keep, scale = draws.keep(1, 8)
    assert keep.shape == (max(owners) + 1, 6, 3, 8)
    assert scale.tolist() == pytest.approx([4 / 3] * 4)
    for m, u in enumerate(owners):
        mask = torch.ones(3, 6, 8)
        mask[:, :5] = Passes(u, 0, 3, together=together).noise((5, 8), 0.25).keep().float()
        expected = (mask * h[m]) @ weight[m].T
        torch.testing.assert_close(draws.readout(h, keep, weight)[m], expected)


@pytest.mark.parametrize("together", [0, 200])
def test_masks_of_the_second_site_at_several_rates_are_those_of_the_passes(together):
    """Rates of one seed share random bits; one too small to be balanced draws by itself; 200 passes are two groups."""
    rates = (0.25, 0.05, 1e-5)
    draws = bank._Draws.of([(7, 4, 0.5, p) for p in rates], n_passes=200, B=4, together=together)
    draws.noise(0, 3)
    noise, _ = draws.noise(1, 5)
    for m, p in enumerate(rates):
        passes = Passes(7, 0, 200, together=together)
        passes.noise((4, 3), 0.5)
        assert torch.equal(noise[m] > 0, passes.noise((4, 5), p).keep())


def test_members_that_share_no_mask_learn_as_those_that_do():
    x = torch.randn(40, 2)
    members = [Member(train=range(20), dropout=0.25, alpha=a, seed=s) for a, s in ((0.0, 0), (1.0, 1), (0.5, 0))]
    together = fit_population(x, x[:, 0], members, epochs=5)
    for i, member in enumerate(members):
        alone = fit_population(x, x[:, 0], [member], epochs=5)
        torch.testing.assert_close(together.weights[1][0][i], alone.weights[1][0][0], rtol=1e-4, atol=1e-5)


def test_chunks_of_members_change_nothing(monkeypatch):
    x = torch.randn(40, 2)
    members = [Member(train=range(20), dropout=0.25, seed=s % 2) for s in range(5)]
    whole = fit_population(x, x[:, 0], members, epochs=3)
    monkeypatch.setattr(bank, "_BLOCK", 2 * 10 * 20 * 50)  # two members at a time
    parts = fit_population(x, x[:, 0], members, epochs=3)
    torch.testing.assert_close(whole.weights[0][0], parts.weights[0][0], rtol=1e-5, atol=1e-6)
    assert torch.equal(parts.weights[0][0][0], parts.weights[0][0][2])  # equal members stay equal


def test_pad():
    table, counts = pad([torch.tensor([3, 4]), torch.tensor([5]), torch.tensor([], dtype=torch.long)])
    assert table.tolist() == [[3, 4], [5, 0], [0, 0]]
    assert counts == [2, 1, 0]


def test_standardisation_is_that_of_scikit_learn_weights_included():
    rng = np.random.RandomState(0)
    values, weight = rng.normal(3, 5, (30, 2)), rng.uniform(size=30)
    for w in (None, weight):
        theirs = StandardScaler().fit(values, sample_weight=w)
        mean, scale = standardiser(values, partial(np.average, axis=0, weights=w))
        np.testing.assert_allclose(mean, theirs.mean_)
        np.testing.assert_allclose(scale, theirs.scale_)
    assert standardiser(np.full((5, 1), 0.998), partial(np.average, axis=0))[1] == 1.0  # constant up to rounding


def test_weights_follow_from_the_seed_alone():
    state = torch.get_rng_state()
    a, b, c = (initial_network([2, 3, 1], Member((), dropout=0.1, seed=s)) for s in (1, 1, 2))
    assert torch.equal(a[0].weight, b[0].weight)
    assert not torch.equal(a[0].weight, c[0].weight)
    assert torch.equal(state, torch.get_rng_state())
