"""Switching random sites on, and looking after buffers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from bbalpha._engine.kinds import is_norm
from bbalpha._engine.sites import borrowed_buffers, may_be_random, stochastic, switched_off


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
    net = nn.Sequential(layer, nn.Dropout(1e-12)).eval()
    expected, before = net(x), [b.clone() for b in layer.buffers()]
    with stochastic(net):
        torch.testing.assert_close(net(x), expected)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))
    with stochastic(net.train()):
        assert not torch.equal(net(x), expected)


def test_statistics_follow_the_callers_mode_in_layers_that_are_switched_off():
    x, layer = torch.randn(6, 4) + 3, OwnStatistics().train()
    expected = OwnStatistics().train()(x)
    with switched_off(layer, {""}):
        assert not layer.training
        torch.testing.assert_close(layer(x), expected)
    assert layer.training
    assert any(b.abs().sum() > 0 and not torch.equal(b, torch.ones_like(b)) for b in layer.buffers())  # moved


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


def test_stochastic_is_no_silent_plain_network():
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="add_dropout"), stochastic(nn.Sequential(nn.Linear(4, 3), nn.ReLU())):
        pass
    model = zoo.Functional(p=0.0).eval()
    with pytest.raises(ValueError, match="it was called and drew nothing"), stochastic(model):
        model(x)
    assert not any(m.training for m in model.modules())
    with stochastic(model):
        pass  # not called: nothing to complain of
    with stochastic(zoo.Functional()) as model:
        model(x[:0])  # for no rows nothing is drawn


def test_stochastic_stays_on_after_eval_and_puts_every_flag_back():
    net, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).eval(), torch.ones(5, 4)
    with stochastic(net):
        net.eval()
        assert not torch.equal(net(x), net(x))
        net.train()
    assert not any(m.training for m in net.modules())
    assert not any(m._forward_pre_hooks for m in net.modules())
    net[1].train()
    with pytest.raises(IndexError), stochastic(net):
        net.train()[9]
    assert [m.training for m in net] == [False, True, False]
