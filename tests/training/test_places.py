import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bbalpha
from bbalpha.training.places import OWN, all_features, duplicate, features, places


class Heads(nn.Module):
    """A mean and a precision of two layers, which are written before the body that they follow."""

    def __init__(self):
        super().__init__()
        self.precision, self.mean, self.body = nn.Linear(8, 1), nn.Linear(8, 1), nn.Linear(2, 8)

    def forward(self, x):
        h = self.body(x).relu_()
        return self.mean(h), self.precision(h)


class Backwards(nn.Module):
    """Layers in another order than they are called in, and a head whose output is changed once more."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.head, self.body, self.unused, self.scale = nn.Linear(4, 3), nn.Linear(2, 4), nn.Linear(2, 2), scale

    def forward(self, x):
        out = self.head(self.body(x).relu())
        return out if self.scale == 1 else self.scale * out


class Functional(nn.Module):
    def __init__(self, p=0.3):
        super().__init__()
        self.a, self.b, self.rate = nn.Linear(2, 8), nn.Linear(8, 3), p

    def forward(self, x):
        return self.b(F.dropout(self.a(x), self.rate, self.training))


def deep(n=5):
    return nn.Sequential(*(layer for _ in range(n) for layer in (nn.Linear(2, 2), nn.Tanh())), nn.Linear(2, 1))


X = torch.randn(3, 2)


def test_the_last_layer_three_and_all():
    found = places(deep(), X)
    assert [p.name for p in found] == ["the last linear layer", "the last 3 linear layers", "all 6 linear layers"]
    assert [len(p.layers) for p in found] == [1, 3, 6]
    assert [p.trained for p in found] == [("10",), ("6", "8", "10"), ()]  # fine-tuning is of the last layers


def test_a_place_that_is_another_one_is_tried_once():
    assert [p.layers for p in places(nn.Linear(2, 1), X)] == [("",)]
    assert [p.layers for p in places(deep(1), X)] == [("2",), ("0", "2")]
    assert places(deep(2), X)[1].trained == ("0", "2", "4")


def test_last_is_what_reaches_the_output_by_itself():
    last, everything = places(Heads(), X)
    assert set(last.layers) == {"mean", "precision"}
    assert last.name == "the last linear layers"
    assert last.alone is None
    assert everything.layers == ("body", "mean", "precision")
    assert [p.layers for p in places(Backwards(), X)] == [("head",), ("body", "head")]  # in the order of the calls


def test_convolutions_have_dropout_where_there_is_nothing_linear():
    net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Conv1d(4, 1, 3))
    assert [p.name for p in places(net, torch.randn(2, 1, 8))] == ["the last convolution", "all 2 convolutions"]


def test_dropout_of_its_own_is_what_is_tried_where_there_is_some():
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 8), bbalpha.Dropout(0.4), nn.Linear(8, 1))
    (place,) = places(net, X)
    assert (place.name, place.rates, place.trained) == (OWN, ("1", "3"), ("0", "2", "4"))
    assert [m.p for m in place.made(net, 0.1).modules() if isinstance(m, nn.Dropout)] == [0.1, 0.1]
    assert [m.p for m in place.made(net, None).modules() if isinstance(m, nn.Dropout)] == [0.2, 0.4]
    assert net[1].p == 0.2


def test_dropout_that_was_added_before_counts_as_its_own():
    net = bbalpha.add_dropout(deep(), 0.1, before=lambda name, _: name == "4")
    (place,) = places(net, X)
    assert place.rates == ("4.inserted_dropout",)
    assert place.made(net, 0.3)[4].inserted_dropout.p == 0.3


def test_rates_that_no_module_holds_stay_as_they_are():
    (place,) = places(Functional(), X)
    assert place.own
    assert place.rates == ()


def test_dropout_that_is_switched_off_by_its_rate_is_none():
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.0), nn.Linear(8, 1))
    assert [p.own for p in places(net, X)] == [False, False]


def test_a_copy_gets_the_dropout_and_the_model_is_left_alone():
    net = deep()
    before = {name: p.clone() for name, p in net.state_dict().items()}
    for place in places(net, X):
        made = place.made(net, 0.5)
        assert bbalpha.audit(made, X).differed
        assert sum(isinstance(m, nn.Dropout) for m in made.modules()) == len(place.layers)
    assert not any(isinstance(m, nn.Dropout) or m._forward_pre_hooks for m in net.modules())
    assert all(torch.equal(v, before[name]) for name, v in net.state_dict().items())
    assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_last_layer_is_run_alone_only_where_its_answer_is_that_of_the_network(scale):
    net = Backwards(scale).eval()
    place = places(net, X)[0]
    assert place.alone == ("head" if scale == 1 else None)
    x = torch.randn(600, 2)  # more than are computed together
    assert torch.allclose(scale * net.head(features(net, "head", x)), net(x), atol=1e-6)


def test_features_are_those_of_evaluation_mode_and_move_no_statistics():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).train()
    x = 3 + torch.randn(10, 2)
    found = features(net, "2", x)
    assert torch.equal(net[1].running_mean, torch.zeros(4))
    assert net.training
    assert torch.allclose(found, net.eval()[:2](x))


def test_features_of_batches_go_with_targets_and_weights_unless_there_are_too_many(monkeypatch):
    net = Backwards().eval()
    x, y, w = torch.randn(8, 2), torch.arange(8), torch.rand(8)
    batches = [(x[:5], y[:5], w[:5]), (x[5:], y[5:], w[5:])]
    kept = all_features(net, "head", batches)
    assert torch.equal(kept[1], y)
    assert torch.equal(kept[2], w)
    assert torch.allclose(kept[0], net.body(x).relu(), atol=1e-6)
    assert len(all_features(net, "head", [(x, y, None)])) == 2
    monkeypatch.setattr("bbalpha.training.places._ROOM", 10)
    assert all_features(net, "head", batches) is None


class AlwaysOn(Functional):
    def forward(self, x):
        return self.b(F.dropout(self.a(x), self.rate))


class Table(nn.Module):
    """Nothing that is multiplied by a weight."""

    def __init__(self):
        super().__init__()
        self.values = nn.Embedding(4, 3)

    def forward(self, x):
        return self.values(x)


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (AlwaysOn(), X, "must have a plain network to compare with; the model draws in evaluation mode too"),
        (Table(), torch.zeros(2, dtype=torch.int64), "must have a linear layer or a convolution .* Table calls none"),
        (torch.jit.trace(deep(), X), X, "must not be TorchScript"),
    ],
)
def test_what_cannot_have_dropout_is_refused(model, x, message):
    with pytest.raises(ValueError, match=message):
        places(model, x)


def test_a_model_that_cannot_be_copied_is_refused():
    net = nn.Linear(2, 1)
    net.cache = net(X)  # with a history
    with pytest.raises(ValueError, match=r"must be one that copy\.deepcopy can copy"):
        duplicate(net)
