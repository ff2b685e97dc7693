"""Scores of rows together: they agree with enumeration and with the testbed's formulas written out."""

import math

import pytest
import torch

import reference
from bbalpha import metrics
from bbalpha.metrics import joint


def passes(K=20, N=12, C=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(K, N, C, generator=generator, dtype=torch.float64).log_softmax(2)


def test_joint_nll_of_single_rows_is_nll_and_of_groups_the_mean_over_groups():
    likelihood = torch.rand(5, 6, dtype=torch.float64)
    torch.testing.assert_close(metrics.joint_nll(likelihood.log(), torch.arange(6)), metrics.nll(likelihood.log()))
    groups = [0, 0, 1, 1, 1, 2]
    expected = -sum(reference.joint_log_prob(likelihood, groups)) / 3
    assert metrics.joint_nll(likelihood.log(), torch.tensor(groups)).item() == pytest.approx(expected)
    impossible = likelihood.log()
    impossible[:, 0] = -torch.inf
    assert metrics.joint_nll(impossible, torch.tensor(groups)) == torch.inf


@pytest.mark.parametrize("block", [2**22, 50])
def test_joint_log_likelihood_is_that_of_rows_however_often_they_come(block, monkeypatch):
    monkeypatch.setattr(joint, "_BLOCK", block)
    log_probs, y = passes(), torch.randint(3, (4, 3))
    found = metrics.joint_log_likelihood(log_probs, y)
    each = log_probs.exp()[:, torch.arange(12), y.flatten()]
    assert found.tolist() == pytest.approx(reference.joint_log_prob(each, [n // 3 for n in range(12)]))
    rows = torch.tensor([[0, 0, 5], [1, 2, 2]])
    again = metrics.joint_log_likelihood(log_probs, y[:2], rows)
    each = log_probs.exp()[:, rows.flatten(), y[:2].flatten()]
    assert again.tolist() == pytest.approx(reference.joint_log_prob(each, [0, 0, 0, 1, 1, 1]))


@pytest.mark.parametrize("block", [2**22, 200])
def test_the_clustered_estimator_is_the_one_of_the_testbed(block, monkeypatch):
    monkeypatch.setattr(joint, "_BLOCK", block)
    log_probs, y = passes(K=40, N=20, C=2), torch.randint(2, (4, 5))
    log_probs[3, 2] = torch.tensor([0.0, -torch.inf])  # clipped probits
    found = metrics.clustered_log_likelihood(log_probs.clamp_min(-700), y, seed=4)
    generator = torch.Generator().manual_seed(4)
    planes = torch.randn(7, 10, generator=generator, dtype=torch.float64)
    offsets = torch.randn(7, generator=generator, dtype=torch.float64)
    for group in range(4):
        own = log_probs.exp()[:, 5 * group : 5 * group + 5].clamp(1e-300, 1 - 1e-16)
        expected = reference.clustered_log_likelihood(own, y[group].tolist(), planes, offsets)
        assert found[group].item() == pytest.approx(expected, rel=1e-9)


def test_clusters_of_equal_passes_change_nothing():
    log_probs, y = passes(K=1, N=6).expand(9, -1, -1), torch.randint(3, (2, 3))
    exact = metrics.joint_log_likelihood(log_probs, y)
    torch.testing.assert_close(metrics.clustered_log_likelihood(log_probs, y), exact, rtol=1e-4, atol=1e-4)


def test_joint_kl_puts_the_largest_finite_difference_for_infinite_ones_and_no_less_than_0():
    true = torch.tensor([-1.0, -2.0, -3.0])
    assert metrics.joint_kl(true, true) == 0
    assert metrics.joint_kl(true, true + 1) == 0
    assert metrics.joint_kl(true, torch.tensor([-4.0, -2.0, -torch.inf])).item() == pytest.approx((3 + 0 + 3) / 3)
    with pytest.raises(ValueError, match="at least one group a chance"):
        metrics.joint_kl(true, torch.full((3,), -torch.inf))


def test_the_kl_of_many_labels_is_the_divergence():
    """Labels drawn from the truth: the mean of log true - log predicted tends to the divergence of the joint laws."""
    generator = torch.Generator().manual_seed(0)
    true = torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=torch.float64)  # two rows
    agent = torch.randn(6, 2, 2, generator=generator, dtype=torch.float64).log_softmax(2)
    rows = torch.tensor([[0, 1]]).expand(20_000, -1)
    y = torch.stack([torch.multinomial(p, 20_000, replacement=True, generator=generator) for p in true], 1)
    kl = metrics.joint_kl(true.log()[rows, y].sum(1), metrics.joint_log_likelihood(agent, y, rows))
    mixture = torch.einsum("ki,kj->ij", agent[:, 0].exp(), agent[:, 1].exp()) / 6
    law = torch.outer(true[0], true[1])
    assert kl.item() == pytest.approx((law * (law / mixture).log()).sum().item(), abs=0.02)


def test_dyadic_rows_are_two_anchors_by_the_toss_of_a_coin():
    rows = metrics.dyadic_rows(2000, n_groups=1000, size=10, seed=1)
    anchors = [set(group.tolist()) for group in rows]
    assert max(map(len, anchors)) == 2
    assert len(set().union(*anchors)) == sum(map(len, anchors))  # two fresh ones for every group
    firsts = torch.tensor([float((group == group[0]).sum()) - 1 for group in rows]) / 9
    assert firsts.mean().item() == pytest.approx(0.5, abs=0.03)
    torch.testing.assert_close(metrics.dyadic_rows(2000, 1000, 10, seed=1), rows)
    few = metrics.dyadic_rows(
        7, n_groups=9, size=50, seed=0
    )  # dealt again and again, never one anchor twice in a group
    assert {len(set(group.tolist())) for group in few} == {2}


def test_wrong_groups_are_told():
    log_probs, y = passes(), torch.zeros(4, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="must be logs of probabilities"):
        metrics.joint_log_likelihood(log_probs + 5, y)
    with pytest.raises(ValueError, match="a label for each of the 12 rows"):
        metrics.joint_log_likelihood(log_probs, y[:3])
    with pytest.raises(ValueError, match="`rows` must hold numbers from 0 to 11; got 12"):
        metrics.joint_log_likelihood(log_probs, y, y + 12)
    with pytest.raises(ValueError, match="`y` must hold numbers from 0 to 2"):
        metrics.clustered_log_likelihood(log_probs, y + 3)
    with pytest.raises(TypeError, match="`y` must hold whole numbers"):
        metrics.joint_log_likelihood(log_probs, y.double())
    with pytest.raises(ValueError, match="`n_rows` must be a whole number of at least 2"):
        metrics.dyadic_rows(1, 2, 3)
    assert math.isfinite(metrics.joint_log_likelihood(log_probs, y).sum())
