"""Choices without classes: measurements that tell most, rows that cover the pool, rows that may be the best."""

import pytest
import torch
from torch import nn

import bbalpha
import reference
from bbalpha import acquisition
from bbalpha.acquisition import pools
from bbalpha.predictive import RegressionPrediction


def functions(K=12, N=9, seed=0):
    return torch.randn(K, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------ information


def test_gains_are_those_of_the_determinant():
    f = functions()
    expected = [reference.gaussian_information(f, 3.0, [n]) for n in range(9)]
    assert acquisition.information_gain(f, precision=3.0).tolist() == pytest.approx(expected)
    found = acquisition.batch_information_gain(f, 5, precision=3.0)
    rows: list[int] = []
    for i in range(5):
        left = [n for n in range(9) if n not in rows]
        best = max(left, key=lambda n: reference.gaussian_information(f, 3.0, [*rows, n]))
        rows.append(best)
        assert found.indices[i] == best
        assert found.scores[i].item() == pytest.approx(reference.gaussian_information(f, 3.0, rows))


def test_several_outputs_count_together():
    f = torch.randn(15, 6, 2, dtype=torch.float64)
    tau = torch.tensor([2.0, 5.0], dtype=torch.float64)
    found = acquisition.batch_information_gain(f, 3, precision=tau)
    flat = (f * tau.sqrt()).flatten(1)  # row n is columns 2n and 2n + 1
    for i in range(3):
        columns = [c for n in found.indices[: i + 1].tolist() for c in (2 * n, 2 * n + 1)]
        assert found.scores[i].item() == pytest.approx(reference.gaussian_information(flat, 1.0, columns))
    each = [reference.gaussian_information(flat, 1.0, [2 * n, 2 * n + 1]) for n in range(6)]
    assert acquisition.information_gain(f, precision=tau).tolist() == pytest.approx(each)


def test_a_row_that_was_measured_has_little_more_to_tell():
    f = functions(N=1).repeat(1, 3)
    f[:, 2] = 0.5 * functions(N=1, seed=1)[:, 0]
    assert acquisition.batch_information_gain(f, 2, precision=100.0).indices.tolist() == [0, 2]


def test_a_prediction_brings_its_noise():
    outputs, tau = functions().float(), torch.rand(12, 9) + 0.5
    p = RegressionPrediction(outputs, tau, masks="shared")
    noise = tau.reciprocal().mean(0)
    expected = 0.5 * torch.log1p(outputs.double().var(0, correction=0) / noise.double())
    torch.testing.assert_close(acquisition.information_gain(p), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="`precision` must say how noisy"):
        acquisition.information_gain(RegressionPrediction(outputs))
    with pytest.raises(ValueError, match="drawn for every row"):
        acquisition.information_gain(RegressionPrediction(outputs, tau, masks="per_example"))


def test_more_picks_than_functions_can_tell_apart_are_told():
    with pytest.warns(UserWarning, match="The covariance of 4 functions has rank 3"):
        found = acquisition.batch_information_gain(functions(K=4), 5, precision=1e6)
    gains = found.scores.diff(prepend=torch.zeros(1))
    assert gains[3] < 0.1 * gains[2]  # what is left is the noise of what was measured already


def test_computed_pools_give_the_same(monkeypatch):
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))
    x = torch.randn(200, 2)
    f = bbalpha.Functions(net, n_passes=30, seed=0)
    found = acquisition.batch_information_gain(f(x), 6, precision=10.0)
    monkeypatch.setattr(pools, "_BLOCK", 30 * 64)
    monkeypatch.setattr(pools, "_KEPT", 30 * 20)
    again = acquisition.batch_information_gain(f.values(x), 6, precision=10.0)
    assert torch.equal(again.indices, found.indices)
    torch.testing.assert_close(again.scores, found.scores, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("precision", "told"),
    [(0.0, "`precision` must be a finite number above 0"), (torch.zeros(9), "`precision` must be positive and finite")],
)
def test_noise_must_make_sense(precision, told):
    with pytest.raises(ValueError, match=told):
        acquisition.information_gain(functions(), precision=precision)


# ------------------------------------------------------------------------------ covering


def test_k_center_takes_the_farthest_row_each_time():
    x, labelled = torch.randn(60, 3), torch.randn(4, 3)
    found = acquisition.k_center(x, 10, labelled=labelled)
    known = labelled
    for row, score in zip(found.indices.tolist(), found.scores.tolist(), strict=True):
        far = torch.cdist(x, known).amin(1)
        assert score == pytest.approx(far.max().item(), rel=1e-4)
        assert far[row].item() == pytest.approx(far.max().item(), rel=1e-4)
        known = torch.cat((known, x[row : row + 1]))
    assert (found.scores.diff() <= 1e-6).all()


def test_k_center_without_labels_begins_in_the_middle_and_takes_no_row_twice():
    x = torch.tensor([[-5.0], [0.1], [5.0], [5.0]])
    found = acquisition.k_center(x, 4)
    assert found.indices.tolist()[0] == 1 or abs(x.mean() - x[found.indices[0]]) == (x - x.mean()).abs().min()
    assert found.indices.sort().values.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"`features` must be finite numbers of the rows, \(N, D\)"):
        acquisition.k_center(torch.randn(3, 2, 2), 1)
    with pytest.raises(ValueError, match="`labelled` must have the 1 features; got 2"):
        acquisition.k_center(x, 1, labelled=torch.randn(3, 2))


# ------------------------------------------------------------------------------ improvement


def test_thompson_takes_the_best_row_of_each_function(monkeypatch):
    f = functions(K=30, N=500)
    found = acquisition.thompson(f, 10, seed=0)
    assert len(set(found.indices.tolist())) == 10
    least = {(int(row), float(value)) for row, value in zip(f.argmin(1), f.min(1).values, strict=True)}
    assert set(zip(found.indices.tolist(), found.scores.tolist(), strict=True)) <= least
    monkeypatch.setattr(pools, "_BLOCK", 30 * 64)
    assert torch.equal(acquisition.thompson(f, 10, seed=0).indices, found.indices)


def test_thompson_explores_as_much_as_the_functions_disagree():
    certain = torch.linspace(1, 0, 9, dtype=torch.float64).expand(20, -1)  # all know that the last row is best
    assert acquisition.thompson(certain, 3, seed=0).indices.tolist() == [8, 7, 6]
    picks = [acquisition.thompson(functions(K=200), 1, seed=s).indices.item() for s in range(60)]
    assert len(set(picks)) == 9
    many = acquisition.thompson(functions(K=3), 9, seed=0)  # more rows than functions
    assert many.indices.sort().values.tolist() == list(range(9))


def test_expected_improvement_is_the_mean_of_what_is_gained():
    f = functions(K=50)
    expected = (0.3 - f).clamp_min(0).mean(0)
    torch.testing.assert_close(acquisition.expected_improvement(f, 0.3), expected)
    with pytest.raises(ValueError, match="`outputs` must have one value a row"):
        acquisition.expected_improvement(torch.randn(3, 4, 2), 0.0)
