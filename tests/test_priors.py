import math

import pytest
import torch
from torch import nn

import bbalpha
from bbalpha import Dropout, param_groups, prior_kl
from bbalpha.networks import cnn, mlp
from bbalpha.priors import keep_probabilities


def numerical_kl(weight, keep, length_scale, width=0.01, points=200_001):
    """KL of the dropout mixture to N(0, 1/l^2) for one torch weight, by integration.

    Kept: N(M / p, s^2) with probability p (torch divides by the keep probability); dropped: N(0, s^2).
    """
    high = abs(weight) / keep + 12 * width
    w = torch.linspace(-high, high, points, dtype=torch.float64)

    def density(mean, std):
        return torch.exp(-0.5 * ((w - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))

    q = keep * density(weight / keep, width) + (1 - keep) * density(0.0, width)
    log_prior = -0.5 * (w * length_scale) ** 2 + math.log(length_scale) - 0.5 * math.log(2 * math.pi)
    inside = torch.where(q > 1e-300, q * (q.clamp_min(1e-300).log() - log_prior), 0.0)
    return torch.trapezoid(inside, w).item()


@pytest.mark.parametrize("keep", [0.5, 0.9])
@pytest.mark.parametrize("length_scale", [0.5, 3.0])
def test_agrees_with_the_integral_up_to_its_constant(keep, length_scale):
    net = nn.Sequential(Dropout(1 - keep), nn.Linear(1, 1, bias=False))

    def ours(value):
        nn.init.constant_(net[1].weight, value)
        return prior_kl(net, length_scale=length_scale, n_data=1).item()

    for low, high in ((0.5, 1.0), (1.0, 3.0)):
        exact = numerical_kl(high, keep, length_scale) - numerical_kl(low, keep, length_scale)
        assert ours(high) - ours(low) == pytest.approx(exact, rel=0.01)


def test_coefficients():
    net = mlp([3, 4, 2], dropout=0.2, input_dropout=0.5)
    squares = [net[i].weight.square().sum() for i in (1, 4)]
    expected = 2.0**2 / 2 * (squares[0] / 0.5 + squares[1] / 0.8) / 100
    torch.testing.assert_close(prior_kl(net, length_scale=2.0, n_data=100), expected)
    with_biases = expected + 2.0**2 / 2 * sum(net[i].bias.square().sum() for i in (1, 4)) / 100
    torch.testing.assert_close(prior_kl(net, length_scale=2.0, n_data=100, biases=True), with_biases)
    forced = prior_kl(net, length_scale=2.0, n_data=100, keep={"1.weight": 1.0, "4.weight": 1.0})
    torch.testing.assert_close(forced, 2.0**2 / 2 * sum(squares) / 100)


def test_which_dropout_feeds_which_weight():
    assert keep_probabilities(cnn()) == {"7.weight": 0.5, "10.weight": 0.5}
    nested = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.ReLU(), nn.Dropout(0.5), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert keep_probabilities(nested) == {"1.2.weight": 0.25}
    stopped = nn.Sequential(nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(2, 2))  # sigmoid(0) is not 0
    assert keep_probabilities(stopped) == {}
    channels = nn.Sequential(nn.Dropout2d(0.25), nn.Conv2d(1, 1, 3))
    assert keep_probabilities(channels) == {"1.weight": 0.75}


def test_normalisation_layers_and_shared_weights():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.LayerNorm((2, 2)))
    net.append(net[0])
    expected = net[0].weight.square().sum() / 2 / 5
    torch.testing.assert_close(prior_kl(net, length_scale=1.0, n_data=5, biases=True), expected)
    decayed = [g for g in param_groups(net, length_scale=1.0, n_data=5) if g["weight_decay"]]
    assert len(decayed) == 1
    assert decayed[0]["params"] == [net[0].weight]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_weight_decay_takes_the_steps_of_the_penalty(optimizer):
    options = {"length_scale": 1.5, "n_data": 20}
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    nets = []
    for decay in (True, False):
        torch.manual_seed(0)
        net = mlp([3, 5, 2], dropout=0.3, input_dropout=0.1).double()
        step = optimizer(param_groups(net, **options) if decay else net.parameters(), lr=0.01)
        for i in range(10):
            outputs = bbalpha.sample(net, x, 4, seed=i)
            loss = bbalpha.gaussian_nll(outputs, y, precision=1.0)
            step.zero_grad()
            (loss if decay else loss + prior_kl(net, **options)).backward()
            step.step()
        nets.append(net)
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("length_scale", [0.0, 1.0])
def test_every_parameter_is_in_one_group(length_scale):
    net = mlp([3, 4, 2], dropout=0.2, input_dropout=0.5)
    listed = [p for g in param_groups(net, length_scale=length_scale, n_data=10) for p in g["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, net.parameters()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length_scale": -1.0}, "`length_scale` must be"),
        ({"length_scale": math.nan}, "`length_scale` must be"),
        ({"n_data": 0}, "`n_data` must be"),
        ({"keep": {"nothing": 0.5}}, "`keep` must name parameters"),
        ({"keep": {"1.weight": 0.0}}, r"\(0, 1\]"),
    ],
)
def test_bad_input_is_one_clear_sentence(change, message):
    net = mlp([3, 4, 2], dropout=0.2)
    for call in (prior_kl, param_groups):
        with pytest.raises(ValueError, match=message):
            call(net, **{"length_scale": 1.0, "n_data": 10} | change)


def test_a_model_without_weights():
    with pytest.raises(ValueError, match="must have weights"):
        prior_kl(nn.ReLU(), length_scale=1.0, n_data=10)


def test_frozen_weights_have_no_prior():
    net = mlp([3, 4, 2], dropout=0.2)
    first, last = (m for m in net if isinstance(m, nn.Linear))
    first.requires_grad_(False)
    expected = 1.0 / (2 * 0.8) * last.weight.square().sum() / 10
    torch.testing.assert_close(prior_kl(net, length_scale=1.0, n_data=10), expected)
    groups = param_groups(net, length_scale=1.0, n_data=10)
    listed = [p for g in groups for p in g["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, last.parameters()))
    assert [g["weight_decay"] for g in groups if g["params"][0] is last.weight] == [1 / (0.8 * 10)]
    last.requires_grad_(False)
    with pytest.raises(ValueError, match="weights that are not frozen"):
        prior_kl(net, length_scale=1.0, n_data=10)


def test_a_learned_rate_in_front_of_frozen_weights_keeps_its_prior():
    net = nn.Sequential(bbalpha.ConcreteDropout(0.2), nn.Linear(3, 2))
    net[1].requires_grad_(False)
    (grad,) = torch.autograd.grad(prior_kl(net, length_scale=1.0, n_data=10), net[0].logit)
    net[1].requires_grad_(True)
    torch.testing.assert_close(grad, torch.autograd.grad(prior_kl(net, length_scale=1.0, n_data=10), net[0].logit)[0])
