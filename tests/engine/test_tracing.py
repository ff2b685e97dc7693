"""One pass of a model, and what it met."""

import torch
from torch import nn

import zoo
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.tracing import same_structure, trace


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
