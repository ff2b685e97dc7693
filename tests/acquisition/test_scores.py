"""Scores of single rows: their formulas, their limits, and what cannot be scored."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import bbalpha
import reference
from bbalpha import acquisition
from bbalpha.acquisition import scores


def pool(K=9, N=7, C=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(K, N, C, generator=generator, dtype=torch.float64)).softmax(2)


def test_bald_is_the_mutual_information_of_the_prediction():
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    p = bbalpha.predict_classification(net, torch.randn(30, 3), masks="shared", keep_passes=True)
    torch.testing.assert_close(acquisition.bald(p), p.mutual_information, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(acquisition.entropy(p.pass_probs), p.entropy)
    probs = pool()
    expected = [reference.batch_information(probs, [n]) for n in range(7)]
    assert acquisition.bald(probs).tolist() == pytest.approx(expected)


def test_bald_is_at_most_log_K_and_0_where_all_agree():
    certain = torch.eye(4).unsqueeze(1).double()  # four functions, each sure of another class
    assert acquisition.bald(certain).item() == pytest.approx(math.log(4))
    assert acquisition.bald(pool(K=1).expand(3, -1, -1)).tolist() == pytest.approx([0] * 7, abs=1e-12)


def test_older_scores_are_their_formulas():
    probs = pool()
    torch.testing.assert_close(acquisition.variation_ratio(probs), 1 - probs.mean(0).max(1).values)
    torch.testing.assert_close(acquisition.mean_std(probs), probs.std(0).mean(1))


def test_epig_is_the_information_between_labels():
    probs, targets = pool(), pool(N=5, seed=1)
    assert acquisition.epig(probs, targets).tolist() == pytest.approx(reference.epig(probs, targets))
    assert (acquisition.epig(probs, targets) <= acquisition.bald(probs) + 1e-12).all()  # nothing is told twice over


def test_epig_does_not_depend_on_blocks(monkeypatch):
    probs, targets = pool(), pool(N=5, seed=1)
    whole = acquisition.epig(probs, targets)
    monkeypatch.setattr(scores, "_BLOCK", 100)
    torch.testing.assert_close(acquisition.epig(probs, targets), whole)


def test_epig_ignores_what_the_targets_do_not_hang_on():
    bits = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    on = torch.where(bits == 1, 0.9, 0.1).double()
    probs = torch.stack((on, 1 - on), 2)  # row n hangs on bit n alone
    about_the_first = acquisition.epig(probs, probs[:, :1])
    assert about_the_first[0] > 0.1
    assert about_the_first[1].item() == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="`target_probs` must be of the same 4 passes and 2 classes"):
        acquisition.epig(probs, probs[:3])


def test_top_takes_the_first_of_equals():
    found = acquisition.top(torch.tensor([1.0, 3.0, 3.0, 2.0]), 2)
    assert found.indices.tolist() == [1, 2]
    assert found.scores.tolist() == [3.0, 3.0]
    assert found.decided == 2
    with pytest.raises(ValueError, match=r"`scores` must have one number a row, \(N,\)"):
        acquisition.top(torch.zeros(2, 2), 1)


def test_random_takes_each_row_at_most_once():
    assert acquisition.random(10, 10, seed=3).indices.sort().values.tolist() == list(range(10))


@pytest.mark.parametrize("choose", [acquisition.power_bald, acquisition.softmax_bald])
def test_stochastic_batches_are_drawn_in_proportion(choose):
    probs = pool(N=3)
    weights = acquisition.bald(probs) if choose is acquisition.power_bald else acquisition.bald(probs).exp()
    beta = 2.0
    chances = weights**beta / (weights**beta).sum()
    firsts = torch.tensor([choose(probs, 1, beta=beta, seed=s).indices.item() for s in range(800)])
    torch.testing.assert_close(torch.bincount(firsts, minlength=3) / 800, chances.float(), atol=0.06, rtol=0)
    assert choose(probs, 3, seed=0).indices.sort().values.tolist() == [0, 1, 2]


def test_power_bald_takes_rows_without_a_score_last():
    probs = torch.cat((pool(N=2), pool(K=1, N=3).expand(9, -1, -1)), 1)
    assert {frozenset(acquisition.power_bald(probs, 2, seed=s).indices.tolist()) for s in range(20)} == {
        frozenset((0, 1))
    }
    assert acquisition.power_bald(probs, 2, beta=1e6, seed=0).indices[0] == acquisition.bald(probs).argmax()


@pytest.mark.parametrize(
    ("probs", "told"),
    [
        (torch.randn(5, 4, 3), "must be probabilities that sum to 1 over the classes.*Are these logits"),
        (pool()[:1], "at least 2 passes"),
        (pool()[0], r"must have shape \(K, N, C\) with the K passes first; got \(7, 4\)"),
        (torch.ones(3, 4, 1), "at least 2 classes"),
        (torch.full((3, 2, 2), torch.nan), "must be probabilities"),
        (torch.empty(3, 0, 2), "must have shape"),
    ],
)
def test_what_are_no_probabilities_is_refused(probs, told):
    with pytest.raises(ValueError, match=told):
        acquisition.bald(probs)


def test_arrays_and_half_precision_are_taken():
    probs = pool(N=50).float()
    torch.testing.assert_close(acquisition.bald(probs.numpy()), acquisition.bald(probs))
    torch.testing.assert_close(acquisition.bald(probs.half()), acquisition.bald(probs), atol=5e-3, rtol=0.02)
    with pytest.raises(TypeError, match="must be real floating-point"):
        acquisition.bald(np.ones((3, 4, 2), dtype=int))
    with pytest.raises(TypeError, match="`probs` must be a tensor, an array, a prediction"):
        acquisition.bald([1, 2, 3])
