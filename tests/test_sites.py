"""Switching random sites on, looking after buffers, and recording what a pass meets."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from bbalpha.sites import (
    Inputs,
    borrowed_buffers,
    forked_generators,
    is_norm,
    may_be_random,
    same_structure,
    seed_generators,
    stochastic,
    trace,
)


class Own(nn.Module):
    pass


class OwnLinear(nn.Linear):
    pass


class OwnBatchNorm(nn.BatchNorm1d):
    pass


class OwnStatistics(nn.Module):
    """Batch norm by hand, with running statistics in buffers of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=self.training)


@pytest.mark.parametrize(
    ("module", "switched"),
    [
        (nn.Dropout(), True),
        (nn.AlphaDropout(), True),
        (nn.RReLU(), True),
        (nn.LSTM(2, 2), True),
        (nn.MultiheadAttention(2, 1), True),
        (nn.TransformerEncoderLayer(2, 1), True),
        (Own(), True),
        (nn.utils.parametrizations.weight_norm(nn.LSTM(2, 2), "weight_hh_l0"), True),
        (nn.utils.parametrizations.weight_norm(OwnLinear(2, 2)), True),
        (nn.Linear(2, 2), False),
        (nn.Sequential(), False),
        (nn.BatchNorm1d(2), False),
        (OwnBatchNorm(2), False),
        (nn.LayerNorm(2), False),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), False),
        (torch.compile(nn.BatchNorm1d(2), backend="eager"), False),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_what_is_switched_on(module, switched):
    assert may_be_random(module) == switched


def test_is_norm():
    assert all(is_norm(m) for m in (nn.BatchNorm1d(2), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.RMSNorm(2)))
    assert not is_norm(nn.Linear(2, 2))


def test_stochastic_switches_random_sites_alone_and_back():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), zoo.DropPath(0.5)).eval()
    net[1].train()
    with stochastic(net) as same:
        assert same is net
        assert [m.training for m in net] == [False, True, True, True]
        assert not torch.equal(net(torch.ones(9, 2)), net(torch.ones(9, 2)))
    assert [m.training for m in net] == [False, True, False, False]


def test_stochastic_takes_the_fast_path_off():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).eval()
    net, x = nn.TransformerEncoder(layer, 1), torch.randn(3, 5, 8)
    with torch.no_grad():
        assert torch.equal(net(x), net(x))
        with stochastic(net):
            assert not torch.equal(net(x), net(x))


@pytest.mark.parametrize("layer", [OwnStatistics(), nn.utils.spectral_norm(OwnLinear(4, 4))])
def test_statistics_follow_the_callers_mode_in_layers_that_are_switched_on(layer):
    x = torch.randn(6, 4) + 3
    assert may_be_random(layer)
    layer.eval()
    expected, before = layer(x), [b.clone() for b in layer.buffers()]
    with stochastic(layer):
        torch.testing.assert_close(layer(x), expected)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))
    with stochastic(layer.train()):
        assert not torch.equal(layer(x), expected)


def test_buffers_of_quiet_modules_come_back_and_others_move():
    quiet, loud = nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2).train()
    net = nn.Sequential(quiet, loud, nn.Dropout(0.5))
    with stochastic(net):
        quiet.running_mean.add_(5)
        net(torch.randn(8, 2))
    assert torch.equal(quiet.running_mean, torch.zeros(2))
    assert loud.num_batches_tracked == 1


def test_borrowed_buffers_are_copies_even_if_assigned_anew():
    net = nn.BatchNorm1d(2)
    originals = dict(net.named_buffers())
    with borrowed_buffers([net]) as copies:
        net.running_mean.add_(1)
        net.running_var = torch.full((2,), 7.0)
    assert all(net.get_buffer(name) is b for name, b in originals.items())
    assert torch.equal(net.running_mean, torch.zeros(2))
    assert torch.equal(copies[originals["running_mean"]], torch.ones(2))
    assert torch.equal(copies[originals["running_var"]], torch.full((2,), 7.0))


def test_one_buffer_under_two_names_stays_one():
    a, b = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    b.running_mean = a.running_mean
    with borrowed_buffers([a, b]):
        assert a.running_mean is b.running_mean
    assert a.running_mean is b.running_mean


def test_forked_generators_come_back():
    def drawn():
        return torch.rand(()).item(), random.random(), np.random.rand()

    seed_generators(1)
    expected = drawn()
    seed_generators(1)
    with forked_generators():
        seed_generators(2)
        assert drawn() != expected
    assert drawn() == expected


def test_trace_changes_nothing():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    x = torch.randn(6, 4)
    state, kept = torch.get_rng_state(), x.clone()
    seen = trace(net, Inputs.of(x, 0))
    assert seen.moved
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, kept)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())


def test_trace_without_switching_sees_what_fires_by_itself():
    net = nn.Sequential(zoo.Functional(), nn.Tanh()).eval()
    x = Inputs.of(torch.randn(6, 4), 0)
    assert trace(net, x).fired
    assert not trace(net, x, switch=False).fired
    assert trace(zoo.AlwaysOn().eval(), x, switch=False).fired


def test_trace_tells_what_comes_before_the_first_draw():
    net = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 4))
    seen = trace(net, Inputs.of(torch.zeros(3, 2, dtype=torch.long), 0))
    assert (seen.prefix, seen.worth_sharing) == (("0", "1"), False)
    assert trace(zoo.Functional(), Inputs.of(torch.randn(3, 4), 0)).worth_sharing


def test_attention_without_dropout_is_no_hidden_randomness():
    seen = trace(zoo.Attention(p=0.0), Inputs.of(torch.randn(3, 6, 8), 0))
    assert not seen.hidden
    assert not seen.fired


def test_hidden_operators_are_named():
    assert trace(zoo.Gamma(), Inputs.of(torch.randn(3, 4), 0)).hidden == ("aten._standard_gamma.default",)


def test_same_structure():
    a, b = torch.zeros(3), torch.zeros(3, 1)
    assert same_structure({"x": a, "y": "name"}, {"x": a + 1, "y": "name"})
    assert not same_structure(a, (a,))
    assert not same_structure((a, a), (a, b))
    assert not same_structure((a,), [a])
