"""Rows together: laws of the joint likelihood, covariance between rows, and functions with an address."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bbalpha
import reference
from bbalpha import joint
from bbalpha.lognormal import LogPrediction
from bbalpha.networks import mlp
from bbalpha.predictive import RegressionPrediction


def net(outputs=3, **options):
    return mlp([4, 16, outputs], dropout=0.4, **options)


def classified(x, n_passes=20, **options):
    model = net()
    options = {"masks": "shared", "keep_passes": True, "seed": 1} | options
    return bbalpha.predict_classification(model, x, n_passes=n_passes, **options)


# ------------------------------------------------------------------------------ joint_log_prob


@given(st.integers(1, 6), st.lists(st.integers(-3, 3), min_size=1, max_size=7), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_is_the_log_of_the_mean_of_products(K, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(K, len(groups), 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (len(groups),), generator=generator)
    likelihood = logits.softmax(2)[:, torch.arange(len(groups)), y]
    found = bbalpha.joint_log_prob(logits, y, torch.tensor(groups))
    assert found.tolist() == pytest.approx(reference.joint_log_prob(likelihood, groups), rel=1e-12)


def test_a_group_of_one_row_is_log_prob():
    x, y = torch.randn(9, 4), torch.arange(9) % 3
    p = classified(x)
    each = torch.arange(9)
    torch.testing.assert_close(bbalpha.joint_log_prob(p, y, each), p.log_prob(y))
    q = bbalpha.predict_regression(net(2), x, precision=3.0, masks="shared")
    target = torch.randn(9, 2)
    torch.testing.assert_close(bbalpha.joint_log_prob(q, target, each), q.log_prob(target))
    positive = LogPrediction(q)
    torch.testing.assert_close(bbalpha.joint_log_prob(positive, target.exp(), each), positive.log_prob(target.exp()))


def test_predictions_and_outputs_agree():
    x, y, groups = torch.randn(8, 4), torch.arange(8) % 3, torch.arange(8) // 3
    model = net()
    p = bbalpha.predict_classification(model, x, n_passes=12, masks="shared", keep_passes=True, seed=5)
    outputs = bbalpha.sample(model.eval(), x, 12, masks="shared", seed=5).detach()
    torch.testing.assert_close(bbalpha.joint_log_prob(p, y, groups), bbalpha.joint_log_prob(outputs, y, groups))
    q = bbalpha.predict_regression(model, x, n_passes=12, precision=2.0, masks="shared", seed=5)
    target = torch.randn(8, 3)
    torch.testing.assert_close(
        bbalpha.joint_log_prob(q, target, groups), bbalpha.joint_log_prob(outputs, target, groups, precision=2.0)
    )


def test_one_function_gives_a_product_and_independent_functions_factorise():
    y = torch.tensor([0, 1, 1, 0])
    one = torch.randn(1, 4, 2)
    whole = bbalpha.joint_log_prob(one, y, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(whole[0], one[0].log_softmax(1)[torch.arange(4), y].sum())
    # every pair of what the first row says and what the second says comes up equally often
    a, b = torch.randn(3, 2), torch.randn(4, 2)
    pairs = torch.stack([torch.stack((s, t)) for s in a for t in b])  # (12, 2, 2)
    labels = torch.tensor([1, 0])
    apart = bbalpha.joint_log_prob(pairs, labels, torch.tensor([0, 1])).sum()
    torch.testing.assert_close(bbalpha.joint_log_prob(pairs, labels, torch.tensor([0, 0]))[0], apart)


def test_chain_rule():
    """p(y_1, y_2) = p(y_1) p(y_2 | y_1), the second under passes weighed by how well they did on the first."""
    logits, y = torch.randn(30, 2, 4, dtype=torch.float64), torch.tensor([2, 0])
    p = logits.softmax(2)[:, [0, 1], y]  # (K, 2)
    weights = p[:, 0] / p[:, 0].sum()
    chained = p[:, 0].mean().log() + (weights * p[:, 1]).sum().log()
    torch.testing.assert_close(bbalpha.joint_log_prob(logits, y, torch.zeros(2, dtype=torch.long))[0], chained)


def test_all_labellings_of_a_group_have_probability_one():
    logits = torch.randn(7, 3, 2, dtype=torch.float64)
    group = torch.zeros(3, dtype=torch.long)
    labels = torch.cartesian_prod(*[torch.arange(2)] * 3)
    total = sum(bbalpha.joint_log_prob(logits, y, group).exp().item() for y in labels)
    assert total == pytest.approx(1)


def test_does_not_depend_on_the_order_of_rows_or_the_names_of_groups():
    logits, y, groups = torch.randn(5, 10, 3), torch.randint(3, (10,)), torch.arange(10) % 4
    found = bbalpha.joint_log_prob(logits, y, groups)
    order = torch.randperm(10)
    torch.testing.assert_close(bbalpha.joint_log_prob(logits[:, order], y[order], groups[order]), found)
    torch.testing.assert_close(bbalpha.joint_log_prob(logits, y, 100 * groups - 7), found)


def test_positions_of_a_row_count_together_and_ignored_ones_do_not():
    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout2d(0.5)
            self.conv = nn.Conv2d(8, 3, 1)

        def forward(self, x):
            return self.conv(self.dropout(x))

    x, y = torch.randn(4, 8, 2, 2), torch.randint(3, (4, 2, 2))
    y[1, 0, 0] = -100
    p = bbalpha.predict_classification(Pixels(), x, n_passes=9, masks="shared", keep_passes=True)
    assert p.pass_log_probs.shape == (9, 4, 3, 2, 2)
    torch.testing.assert_close(p.pass_probs.mean(0), p.probs)
    each = p.pass_log_probs.movedim(2, -1).gather(-1, y.clamp_min(0).expand(9, -1, -1, -1)[..., None])[..., 0]
    expected = (each * (y != -100)).flatten(2).sum(2).logsumexp(0) - math.log(9)
    torch.testing.assert_close(bbalpha.joint_log_prob(p, y, torch.arange(4)), expected)


def test_what_is_far_too_unlikely_is_told_without_nan():
    logits = torch.tensor([[[0.0, 2000.0]] * 3, [[0.0, 1000.0]] * 3])
    found = bbalpha.joint_log_prob(logits, torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long))
    assert found.item() == pytest.approx(-3000 - math.log(2))


def test_estimators_answer_for_rows_together():
    X = np.linspace(-1, 1, 40)[:, None]
    options = {"hidden_layer_sizes": (8,), "dropout": 0.1, "epochs": 3, "random_state": 0}
    model = bbalpha.BBAlphaRegressor(noise="constant", **options).fit(X, X[:, 0])
    p, y = model.predictive(X[:6]), torch.tensor(X[:6])
    together = bbalpha.joint_log_prob(p, y, torch.zeros(6, dtype=torch.long))
    expected = torch.stack([p.log_likelihood(y)[k].sum() for k in range(len(p.outputs))]).logsumexp(0)
    torch.testing.assert_close(together[0], expected - math.log(len(p.outputs)))
    classifier = bbalpha.BBAlphaClassifier(**options).fit(X, X[:, 0] > 0)
    passes = classifier.predict_passes(X)
    assert passes.shape == (100, 40, 2)
    np.testing.assert_allclose(passes.mean(0), classifier.predict_proba(X), rtol=1e-5)


def test_passes_that_are_no_functions_are_refused():
    x, y, groups = torch.randn(6, 4), torch.zeros(6, dtype=torch.long), torch.zeros(6, dtype=torch.long)
    with pytest.raises(ValueError, match=r'masks were drawn for every row by itself\. Predict with masks="shared"'):
        bbalpha.joint_log_prob(classified(x, masks="per_example"), y, groups)
    with pytest.raises(ValueError, match="kept their mean alone"):
        bbalpha.joint_log_prob(classified(x, keep_passes=False), y, groups)
    with pytest.raises(ValueError, match="`keep_passes` needs the same passes for all rows; got tolerance"):
        classified(x, tolerance=0.5)
    settled = bbalpha.predict_regression(net(1), x, precision=1.0, masks="shared", tolerance=5.0, n_passes=16)
    assert settled.passes_used.min() < 16
    with pytest.raises(ValueError, match="some had fewer"):
        bbalpha.joint_log_prob(settled, torch.zeros(6, 1), groups)
    one = bbalpha.predict_regression(net(1), x, precision=1.0, n_passes=None)  # no masks, no passes: one function
    assert bbalpha.joint_log_prob(one, torch.zeros(6, 1), groups).isfinite().all()


def test_wrong_arguments_are_told():
    logits, y = torch.randn(3, 4, 2), torch.zeros(4, dtype=torch.long)
    with pytest.raises(TypeError, match="`groups` must be a tensor of whole numbers"):
        bbalpha.joint_log_prob(logits, y, 2)
    with pytest.raises(ValueError, match=r"`groups` must have one number a row, \(4,\); got \(3,\)"):
        bbalpha.joint_log_prob(logits, y, torch.zeros(3, dtype=torch.long))
    with pytest.raises(TypeError, match="give a `precision`"):
        bbalpha.joint_log_prob(logits, torch.zeros(4, 2), y)
    with pytest.raises(TypeError, match="`prediction` must be a prediction of bbalpha"):
        bbalpha.joint_log_prob("logits", y, y)
    with pytest.raises(ValueError, match="one beside a prediction"):
        bbalpha.joint_log_prob(RegressionPrediction(logits), y, y, precision=1.0)


# ------------------------------------------------------------------------------ kept passes


@pytest.mark.parametrize("batch_size", [None, 3])
def test_kept_passes_are_those_of_the_prediction(batch_size):
    model, x = net(), torch.randn(7, 4)
    p = bbalpha.predict_classification(
        model, x, n_passes=11, masks="shared", keep_passes=True, seed=2, batch_size=batch_size, temperature=2.0
    )
    outputs = bbalpha.sample(model.eval(), x, 11, masks="shared", seed=2).detach()
    torch.testing.assert_close(p.pass_log_probs, (outputs / 2).log_softmax(2))
    torch.testing.assert_close(p.pass_probs.mean(0), p.probs)
    assert p.masks == "shared"


# ------------------------------------------------------------------------------ covariance


def test_covariance_has_the_epistemic_variance_on_its_diagonal():
    p = bbalpha.predict_regression(net(2), torch.randn(5, 4), masks="shared", n_passes=30)
    c = joint.covariance(p)
    assert c.shape == (2, 5, 5)
    torch.testing.assert_close(c.diagonal(dim1=1, dim2=2).T, p.epistemic_std.square())
    expected = torch.stack([torch.cov(p.outputs[:, :, d].T, correction=0) for d in range(2)])
    torch.testing.assert_close(c, expected)
    torch.testing.assert_close(joint.covariance(p.outputs), c)
    q = classified(torch.randn(5, 4))
    assert joint.covariance(q).shape == (3, 5, 5)
    torch.testing.assert_close(joint.covariance(q)[1], torch.cov(q.pass_probs[:, :, 1].T, correction=0))
    with pytest.raises(ValueError, match="drawn for every row"):
        joint.covariance(bbalpha.predict_regression(net(2), torch.randn(5, 4)))


# ------------------------------------------------------------------------------ functions


class Branching(nn.Module):
    """F.dropout in two places, a tuple as output."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 12), nn.Linear(12, 2)

    def forward(self, x):
        h = nn.functional.dropout(self.a(x).relu(), 0.5, training=True)
        return self.b(h), nn.functional.dropout(h, 0.2, training=True)


@pytest.mark.parametrize("model", [net(), nn.Sequential(net(), nn.BatchNorm1d(3)), Branching()])
@pytest.mark.parametrize("balanced", [True, False])
def test_a_function_is_the_same_alone_among_others_and_in_every_batch(model, balanced):
    x = torch.randn(9, 4)
    f = bbalpha.Functions(
        model, n_passes=7, seed=3, balanced=balanced, output=0 if isinstance(model, Branching) else None
    )
    all_ = f(x)
    assert all_.shape[:2] == (7, 9)
    for k in (0, 4, 6):
        alone = f[k](x)
        torch.testing.assert_close(alone, all_[k])
        torch.testing.assert_close(torch.cat((f[k](x[:4]), f[k](x[4:], batch_size=2))), alone)
    assert not torch.allclose(all_[0], all_[1])
    again = bbalpha.Functions(model, n_passes=7, seed=3, balanced=balanced, output=f.output)
    torch.testing.assert_close(again[5](x), all_[5])


def test_functions_are_the_passes_of_sample_and_predict():
    model, x = net().eval(), torch.randn(5, 4)
    f = bbalpha.Functions(model, n_passes=6, seed=8)
    sampled = bbalpha.sample(model, x, 6, masks="shared", seed=8)
    torch.testing.assert_close(f(x), sampled.detach())
    predicted = bbalpha.predict_regression(model, x, n_passes=6, masks="shared", seed=8).outputs
    torch.testing.assert_close(torch.stack([g(x) for g in f]), predicted)


def test_functions_that_are_reduced_in_groups_keep_their_address(monkeypatch):
    from bbalpha._engine import batches

    monkeypatch.setattr(batches, "_BUDGET", 12)  # of 3 numbers a row: groups of 4 passes
    model, x = net(), torch.randn(3, 4)
    f = bbalpha.Functions(model, n_passes=10, seed=8)
    torch.testing.assert_close(torch.stack([g(x) for g in f]), f(x))
    predicted = bbalpha.predict_regression(model, x, n_passes=10, masks="shared", seed=8).outputs
    torch.testing.assert_close(f(x), predicted)


def test_seeds_tell_functions_apart_and_none_is_drawn_once():
    model, x = net(), torch.randn(4, 4)
    f, g = bbalpha.Functions(model), bbalpha.Functions(model)
    assert (len(f), f.seed != g.seed) == (100, True)
    torch.testing.assert_close(f[0](x), f[0](x))
    assert not torch.allclose(f[0](x), g[0](x))
    assert f[-1].k == 99
    assert (f[2].seed, f[2].k) == (f.seed, 2)
    with pytest.raises(IndexError, match="one of the 100 functions; got 100"):
        f[100]
    with pytest.raises(TypeError, match="Say with `output` which part"):
        bbalpha.Functions(Branching(), 3)(x)


def test_a_pool_is_what_the_functions_say_whichever_rows_are_read():
    model, x = net(), torch.randn(10, 4)
    f = bbalpha.Functions(model, n_passes=5, seed=1)
    pool = f.probs(x)
    assert pool.shape == (5, 10, 3)
    torch.testing.assert_close(pool[:, 3:7], f(x).softmax(2)[:, 3:7])
    torch.testing.assert_close(pool[:, torch.tensor([9, 0])], f(x).softmax(2)[:, [9, 0]])
    torch.testing.assert_close(f.values(x.numpy())[:, ::4], f(x)[:, ::4])
    assert bbalpha.Functions(net(1), 5, seed=1).probs(x).shape == (5, 10, 2)  # one logit: yes or no
    with pytest.raises(IndexError, match="all passes"):
        pool[:2, :3]
    with pytest.raises(ValueError, match="must have rows"):
        f.probs(torch.empty(0, 4))
