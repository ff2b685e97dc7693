import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bbalpha.objectives import AlphaLoss, CrossEntropy, GaussianNLL
from bbalpha.prediction import predict_classification, predict_regression
from bbalpha.training.heldout import HeldOut, kind_of

X, Y, C = torch.randn(60, 2), torch.randn(60, 2), torch.randint(3, (60,))
CPU = torch.device("cpu")


def held(*data):
    return HeldOut.of(data, torch.float32, CPU)


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.drop(self.body(x).relu())).chunk(2, -1)


def classifier(out=3):
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, out))


@pytest.mark.parametrize("n_passes", [None, 7])
def test_rows_of_classes_are_those_of_the_prediction(n_passes):
    net, kind, rows = classifier(), kind_of(CrossEntropy(0.0)), held(X, C)
    nll, start = kind.likelihood(kind.passes(net, rows.x, n_passes=n_passes, seed=3), rows)
    for temperature in (start, 2.0):
        p = predict_classification(net, iter([X]), n_passes=n_passes, temperature=temperature, seed=3)
        assert torch.allclose(nll(temperature).float(), -p.log_prob(C), atol=1e-6)


def test_rows_of_means_are_those_of_the_prediction_and_begin_at_the_error():
    net, kind, rows = classifier(2), kind_of(GaussianNLL()), held(X, Y)
    nll, start = kind.likelihood(kind.passes(net, rows.x, n_passes=7, seed=3), rows)
    p = predict_regression(net, iter([X]), n_passes=7, precision=start, seed=3)
    assert torch.allclose(nll(start).float(), -p.log_prob(Y), atol=1e-5)
    assert start == pytest.approx(1 / float((p.mean - Y).square().mean()), rel=1e-5)


def test_rows_of_predicted_noise_are_those_of_the_prediction_with_its_precision_multiplied():
    net, kind, rows = Noise(), kind_of(GaussianNLL(precision="predicted")), held(X, Y)
    nll, _ = kind.likelihood(kind.passes(net, rows.x, n_passes=7, seed=3), rows)
    p = predict_regression(net, iter([X]), n_passes=7, precision="predicted", seed=3)
    assert torch.allclose(nll(1.0).float(), -p.log_prob(Y), atol=1e-5)
    wider = type(p)(p.outputs, p.precision / 4)
    assert torch.allclose(nll(0.25).float(), -wider.log_prob(Y), atol=1e-5)


@pytest.mark.parametrize("positions", ["independent", "joint"])
def test_the_mean_of_rows_with_positions_is_that_of_the_objective(positions):
    objective = CrossEntropy(1.0, class_axis=-1, positions=positions, ignore_index=-7)
    target = torch.randint(3, (60, 5))
    target[:10, 2:] = -7  # padding
    kind, rows = kind_of(objective), held(torch.randn(60, 5, 2), target)
    outputs = kind.passes(classifier(), rows.x, n_passes=4, seed=0)
    nll, _ = kind.likelihood(outputs, rows)
    assert nll(1.0).shape == (60,)
    assert float(nll(1.0).mean()) == pytest.approx(objective(outputs[0], target).item(), rel=1e-5)


def test_soft_targets_and_a_single_logit_are_taken_as_elsewhere():
    soft = torch.nn.functional.one_hot(C, 3).float()
    net, kind = classifier(), kind_of(CrossEntropy())
    outputs = kind.passes(net, [X], n_passes=None, seed=0)
    by_index, by_weight = (kind.likelihood(outputs, held(X, t))[0](1.0) for t in (C, soft))
    assert torch.allclose(by_index, by_weight)
    one, yes = classifier(1), (C > 0).long()
    nll, _ = kind.likelihood(kind.passes(one, [X], n_passes=None, seed=0), held(X, yes))
    expected = nn.functional.binary_cross_entropy_with_logits(one.eval()(X)[:, 0], yes.float(), reduction="none")
    assert torch.allclose(nll(1.0).float(), expected, atol=1e-6)
    outputs = torch.randn(3, 60, 1)
    assert torch.isfinite(kind.objective(1.0)(outputs, yes))


def test_weights_have_mean_one_and_multiply_rows():
    kind = kind_of(CrossEntropy())
    weight = torch.rand(60) + 0.5
    plain, weighted = held(X, C), held(X, C, weight)
    outputs = kind.passes(classifier(), plain.x, n_passes=3, seed=0)
    a, b = (kind.likelihood(outputs, rows)[0](1.0) for rows in (plain, weighted))
    assert float(weighted.weight.mean()) == pytest.approx(1)
    assert torch.allclose(b, a * weight.double() / weight.double().mean(), rtol=1e-5)


def test_rows_keep_one_order_whoever_looks_at_them():
    data = TensorDataset(X, C)
    for given in (data, DataLoader(data, batch_size=7, shuffle=True), {"input": X, "labels": C}):
        rows = HeldOut.of(given, torch.float32, CPU)
        x = torch.cat([b["input"] if isinstance(b, dict) else b for b in rows.x])
        order = [int((row == X).all(1).nonzero()) for row in x]
        assert sorted(order) == list(range(60))
        assert torch.equal(rows.target, C[order])


def test_rows_of_several_lengths_stay_in_their_batches():
    batches = [({"ids": torch.ones(20, n, dtype=torch.int64)}, torch.zeros(20, dtype=torch.int64)) for n in (5, 7)]
    rows = HeldOut.of(DataLoader(batches, batch_size=None), torch.float32, CPU)
    assert [x["ids"].shape for x in rows.x] == [(20, 5), (20, 7)]
    shared = [((torch.ones(20, 2), torch.ones(3)), torch.zeros(20)) for _ in range(2)]  # the same for all rows
    assert len(HeldOut.of(DataLoader(shared, batch_size=None), torch.float32, CPU).x) == 2


def test_a_precision_that_is_learned_begins_where_it_is_told_and_the_callers_is_left_alone():
    mine = GaussianNLL(0.5)
    theirs = kind_of(mine).objective(9.0)
    assert theirs.precision.item() == pytest.approx(9)
    assert mine.precision.item() == 1
    assert theirs.alpha == 0.5
    assert kind_of(GaussianNLL(0.5, precision=4.0)).objective(9.0).precision.item() == pytest.approx(4)


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(TypeError, match=r"must be CrossEntropy\(...\) or GaussianNLL\(...\).*; got AlphaLoss"):
        kind_of(AlphaLoss(nn.MSELoss(reduction="none")))
    with pytest.raises(ValueError, match="at least 40 rows to tell a gain from noise; got 39"):
        held(X[:39], C[:39])
    kind = kind_of(GaussianNLL())
    outputs = kind.passes(classifier(2), [X], n_passes=None, seed=0)
    with pytest.raises(ValueError, match="never broadcast"):
        kind.likelihood(outputs, held(X, Y[:, :1]))
    with pytest.raises(ValueError, match="not predicted exactly"):
        kind.likelihood(outputs, held(X, outputs[0][0]))
    with pytest.raises(ValueError, match="squared error of inf"):
        kind.likelihood(outputs, held(X, torch.full_like(Y, math.inf)))
