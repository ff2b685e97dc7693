"""BatchBALD: it is what enumeration gives, greedy over the whole pool, and knows its bound."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bbalpha
import reference
from bbalpha import acquisition
from bbalpha.acquisition import batch, configurations, pools
from bbalpha.acquisition.configurations import Gain, candidates, merged, no_labels, sampled, with_label

pytestmark = pytest.mark.filterwarnings("ignore:The score of .* passes cannot exceed")


def pool(K=6, N=8, C=3, seed=0, spread=2.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(K, N, C, generator=generator, dtype=dtype)).softmax(2)


# ------------------------------------------------------------------------------ against enumeration


@given(st.integers(2, 7), st.integers(2, 4), st.integers(0, 10_000), st.floats(0.1, 8.0))
@settings(max_examples=10, deadline=None)
def test_is_greedy_over_enumerated_configurations(K, C, seed, spread):
    probs = pool(K, 6, C, seed, spread)
    found = acquisition.batch_bald(probs, 4)
    scores = [reference.batch_information(probs, found.indices[: i + 1].tolist()) for i in range(4)]
    assert found.scores.tolist() == pytest.approx(scores, abs=1e-6)  # of these picks
    assert found.scores.tolist() == pytest.approx(reference.greedy_batch(probs, 4)[1], abs=1e-6)  # none were better
    assert found.bound == math.log(K)


def test_single_precision_is_as_exact_as_its_inputs():
    probs = pool(5, 7, 3).float()
    found = acquisition.batch_bald(probs, 4)
    assert found.scores.tolist() == pytest.approx(reference.greedy_batch(probs.double(), 4)[1], abs=1e-6)


def test_drawn_configurations_are_within_their_error():
    probs = pool(8, 6, 3, seed=3)
    rows = [3, 1, 5, 0, 2]
    chosen = probs[:, rows[:4]].permute(1, 2, 0)
    truth = reference.batch_information(probs, rows) - reference.batch_information(probs, rows[:4])
    found = []
    for seed in range(20):
        joint = sampled(chosen, 2000, torch.Generator().manual_seed(seed))
        torch.testing.assert_close(joint.sum(), torch.tensor(1.0, dtype=torch.float64))
        block = candidates(probs[:, rows[4:5]].transpose(1, 2).contiguous(), torch.float64)
        found.append(float(Gain(joint, torch.float64)(block)))
    error = np.std(found) / math.sqrt(len(found))
    assert error < 0.001
    assert abs(np.mean(found) - truth) < 4 * error + 1e-9
    # a whole batch, sampled from its third pick on
    drawn = acquisition.batch_bald(probs, 5, n_configurations=9 * 8, seed=0)
    assert drawn.scores.tolist() == pytest.approx(
        [reference.batch_information(probs, drawn.indices[: i + 1].tolist()) for i in range(5)], abs=0.05
    )


def test_drawn_configurations_are_those_of_the_mixture():
    """Each configuration's weight tends to its probability; equally many draws come from each function."""
    probs = pool(4, 2, 2, seed=1)
    joint = sampled(probs.permute(1, 2, 0), 40_000, torch.Generator().manual_seed(0))
    exact = with_label(with_label(no_labels(4), probs[:, 0].T), probs[:, 1].T)
    assert len(joint) == 4
    torch.testing.assert_close(joint.sum(1).sort().values, exact.sum(1).sort().values, atol=0.01, rtol=0)
    torch.testing.assert_close(joint.sum(0), torch.full((4,), 0.25, dtype=torch.float64), atol=0.01, rtol=0)


# ------------------------------------------------------------------------------ laws


def test_the_first_pick_is_the_best_of_bald():
    probs = pool(N=50)
    found = acquisition.batch_bald(probs, 1)
    scores = acquisition.bald(probs)
    assert found.indices.item() == scores.argmax().item()
    assert found.scores.item() == pytest.approx(scores.max().item())


def test_scores_are_monotone_and_their_gains_shrink():
    found = acquisition.batch_bald(pool(K=30, N=60), 6)
    gains = found.scores.diff(prepend=torch.zeros(1))
    assert (gains > 0).all()
    assert (gains.diff() <= 1e-9).all()
    assert (found.scores <= found.bound).all()
    assert found.scores[-1] < acquisition.bald(pool(K=30, N=60))[found.indices].sum()  # counted one by one: too much


def test_labels_that_share_nothing_add_up():
    """Rows that depend on different bits of the function are independent, and BALD is the whole truth."""
    bits = torch.cartesian_prod(*[torch.arange(2)] * 3)  # 8 functions
    on = torch.where(bits == 1, 0.9, 0.2).double()
    probs = torch.stack((on, 1 - on), 2)  # (8, 3, 2)
    assert acquisition.batch_bald(probs, 3).scores[-1].item() == pytest.approx(acquisition.bald(probs).sum().item())


def test_copies_are_asked_for_once_where_bald_asks_for_them_all():
    generator = torch.Generator().manual_seed(0)
    rows = torch.where(torch.rand(40, 10, generator=generator) < 0.5, 0.999, 0.001).double()
    rows[:, 0] = torch.where(torch.arange(40) % 2 == 0, 0.9999, 0.0001)  # the best row
    probs = torch.stack((rows, 1 - rows), 2)
    copied = torch.cat((probs, probs[:, :1], probs[:, :1], probs[:, :1]), 1)  # rows 10 to 12 are row 0 again
    copies = {0, 10, 11, 12}
    assert set(acquisition.top(acquisition.bald(copied), 4).indices.tolist()) == copies
    assert len(copies & set(acquisition.batch_bald(copied, 4).indices.tolist())) == 1


def test_the_order_of_the_pool_and_of_the_passes_does_not_matter():
    probs = pool(K=12, N=40)
    found = acquisition.batch_bald(probs, 5)
    order = torch.randperm(40)
    other = acquisition.batch_bald(probs[:, order], 5)
    assert torch.equal(order[other.indices], found.indices)
    torch.testing.assert_close(other.scores, found.scores)
    again = acquisition.batch_bald(probs[torch.randperm(12)], 5)
    assert torch.equal(again.indices, found.indices)


def test_the_whole_pool_may_be_asked_for_and_no_row_twice():
    probs = pool(K=4, N=6)
    assert acquisition.batch_bald(probs, 6).indices.sort().values.tolist() == list(range(6))
    with pytest.raises(ValueError, match="`size` must be at most the 6 rows of the pool; got 7"):
        acquisition.batch_bald(probs, 7)


def test_certain_labels_and_functions_that_agree_tell_nothing():
    agree = pool(K=1, N=5).expand(4, -1, -1)
    assert acquisition.batch_bald(agree, 3).scores.tolist() == pytest.approx([0, 0, 0], abs=1e-9)
    certain = torch.nn.functional.one_hot(torch.randint(3, (4, 5)), 3).double()
    found = acquisition.batch_bald(certain, 3)
    assert found.scores.tolist() == pytest.approx(
        [reference.batch_information(certain, found.indices[: i + 1].tolist()) for i in range(3)], abs=1e-6
    )


# ------------------------------------------------------------------------------ the search


def test_merged_configurations_bound_the_gain_from_above():
    probs = pool(K=20, N=30, C=4)
    joint = no_labels(20)
    for row in (3, 11, 17, 5):
        joint = with_label(joint, probs[:, row].T)
    assert len(joint) > 200
    block = candidates(probs.transpose(1, 2).contiguous(), torch.float64)
    truth = Gain(joint, torch.float64)(block)
    bounds = [Gain(merged(joint, n, None), torch.float64)(block) for n in (1, 10, 100)]
    assert all((bound >= truth - 1e-12).all() for bound in bounds)
    torch.testing.assert_close(bounds[0], acquisition.bald(probs))  # all in one: nothing was seen
    assert (bounds[2] - truth).mean() < 0.3 * (bounds[0] - truth).mean()


def test_few_candidates_are_looked_at_and_the_picks_are_those_of_looking_at_all(monkeypatch):
    probs = pool(K=40, N=3000, C=5, spread=1.0)
    asked = []
    monkeypatch.setattr(batch, "Gain", lambda joint, dtype: Counted(Gain(joint, dtype), asked))
    found = acquisition.batch_bald(probs, 6, seed=0)
    assert 0 < sum(asked) < 0.2 * 3000  # through more than a thousand configurations, at the last pick
    joint = no_labels(40)
    block = candidates(probs.transpose(1, 2).contiguous(), torch.float64)
    for i, row in enumerate(found.indices.tolist()):
        gains = Gain(joint, torch.float64)(block)
        gains[found.indices[:i]] = -1
        assert gains[row] >= gains.max() - 1e-9
        joint = with_label(joint, probs[:, row].T)


class Counted:
    def __init__(self, gain, asked):
        self.gain, self.asked = gain, asked

    def __len__(self):
        return len(self.gain)

    def __call__(self, block):
        self.asked.append(block[0].shape[2] if len(self) > 1000 else 0)
        return self.gain(block)


def test_what_is_dropped_is_negligible(monkeypatch):
    probs = pool(K=10, N=12, C=4, spread=6.0)
    found = acquisition.batch_bald(probs, 5)
    dropped = no_labels(10)
    for row in found.indices[:4]:
        dropped = with_label(dropped, probs[:, row].T)
    monkeypatch.setattr(configurations, "_NEGLIGIBLE", -1.0)
    whole = no_labels(10)
    for row in found.indices[:4]:
        whole = with_label(whole, probs[:, row].T)
    assert len(dropped) < len(whole) == 4**4
    assert acquisition.batch_bald(probs, 5).scores.tolist() == pytest.approx(found.scores.tolist(), abs=1e-7)


# ------------------------------------------------------------------------------ pools of every kind


def test_pools_on_disk_and_pools_that_are_computed_give_the_same(tmp_path, monkeypatch):
    net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    x = 3 * torch.randn(300, 3)
    f = bbalpha.Functions(net, n_passes=20, seed=0)
    probs = f(x).softmax(2)
    found = acquisition.batch_bald(probs, 5, seed=0)
    np.save(tmp_path / "probs.npy", probs.numpy())
    on_disk = np.load(tmp_path / "probs.npy", mmap_mode="r")
    kept = bbalpha.predict_classification(net, x, n_passes=20, seed=0, masks="shared", keep_passes=True)
    monkeypatch.setattr(pools, "_BLOCK", 20 * 4 * 64)
    monkeypatch.setattr(pools, "_KEPT", 20 * 4 * 50)  # fifty rows are kept, the others read again
    for other in (on_disk, f.probs(x), kept, kept.pass_probs, probs.transpose(0, 1).contiguous().transpose(0, 1)):
        again = acquisition.batch_bald(other, 5, seed=0)
        assert torch.equal(again.indices, found.indices)
        torch.testing.assert_close(again.scores, found.scores, rtol=1e-5, atol=1e-6)


def test_rows_that_were_not_kept_are_read_again(monkeypatch):
    probs = pool(K=6, N=200, C=3, dtype=torch.float32).numpy()
    monkeypatch.setattr(pools, "_BLOCK", 6 * 3 * 16)
    monkeypatch.setattr(pools, "_KEPT", 6 * 3 * 4)  # four rows: of eight picks some are none of these
    values = pools.probabilities(probs)
    values.scored_for_choice(lambda block: block[0, 0], None)
    numbers, kept = values.kept
    assert len(numbers) == 4
    assert set(numbers.tolist()) == set(torch.as_tensor(probs[0, :, 0]).topk(4).indices.tolist())
    rows = torch.tensor([7, int(numbers[2]), 150, int(numbers[0])])
    torch.testing.assert_close(values.read(rows), torch.as_tensor(probs[:, rows.numpy()]).transpose(1, 2))
    torch.testing.assert_close(kept, torch.as_tensor(probs[:, numbers.numpy()]).transpose(1, 2))


def test_per_example_masks_are_refused():
    net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    p = bbalpha.predict_classification(net, torch.randn(9, 3), keep_passes=True)
    with pytest.raises(ValueError, match='Predict with masks="shared"'):
        acquisition.batch_bald(p, 2)


# ------------------------------------------------------------------------------ the bound


def test_a_batch_that_has_reached_log_K_says_so_once():
    probs = pool(K=3, N=30, C=4, spread=6.0)
    with pytest.warns(
        UserWarning, match=r"3 passes cannot exceed log 3 = 1.099, and \d picks have reached 1.09"
    ) as told:
        found = acquisition.batch_bald(probs, 8)
    assert len(told) == 1
    assert told[0].filename == __file__
    reached = found.scores >= 0.99 * math.log(3)
    assert found.decided == int(reached.nonzero()[0]) + 1 < 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few = acquisition.batch_bald(pool(K=50, N=30), 3)
    assert few.decided == 3


def test_seeds():
    probs = pool(K=20, N=30)
    state = torch.get_rng_state()
    found = acquisition.batch_bald(probs, 5, n_configurations=60, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(acquisition.batch_bald(probs, 5, n_configurations=60, seed=1).scores, found.scores)
    torch.manual_seed(0)
    first = acquisition.batch_bald(probs, 5, n_configurations=60)
    torch.manual_seed(0)
    assert torch.equal(acquisition.batch_bald(probs, 5, n_configurations=60).scores, first.scores)
