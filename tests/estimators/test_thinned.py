"""The short way of the estimators to shared passes is that of the engine."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bbalpha
from bbalpha import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.estimators.thinned import is_plain, thinned_passes
from bbalpha.networks import mlp


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
@pytest.mark.parametrize(
    ("sizes", "rates"),
    [
        *product([(3, 2), (3, 40, 2), (3, 40, 7, 30, 1)], [(0.2, 0.1), (0.0, 0.3), (5 / 256, 5 / 256)]),
        *product([(3, 40, 2), (3, 40, 7, 30, 1)], [(0.2, 0.0)]),
    ],
)
def test_passes_are_those_of_sample(sizes: Any, rates: Any, activation: Any, balanced: bool) -> None:
    net = mlp(sizes, dropout=rates[0], input_dropout=rates[1], activation=activation).double().eval()
    x = torch.randn(5, 3, dtype=torch.float64)
    state = torch.get_rng_state()
    found = thinned_passes(net, x, 12, seed=3, balanced=balanced)
    assert torch.equal(torch.get_rng_state(), state)
    expected = bbalpha.sample(net, x, 12, masks="shared", seed=3, balanced=balanced)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_blocks_of_rows_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    net = mlp([3, 20, 2], dropout=0.2)
    x = torch.randn(50, 3)
    whole = thinned_passes(net, x, 4, seed=0, balanced=True)
    monkeypatch.setattr("bbalpha.estimators.thinned._BLOCK", 300)
    torch.testing.assert_close(thinned_passes(net, x, 4, seed=0, balanced=True), whole)


def test_what_is_not_plain_takes_the_long_way() -> None:
    net = mlp([3, 20, 2], dropout=0.2)
    assert is_plain(net)
    assert not is_plain(nn.Sequential(net))
    assert not is_plain(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1), nn.Tanh()))
    net[1].register_forward_hook(lambda module, args, out: out + 1)
    assert not is_plain(net)


@pytest.mark.parametrize("kind", [BBAlphaRegressor, BBAlphaClassifier])
@pytest.mark.parametrize("settings", [{}, {"hidden_layer_sizes": (20,), "dropout": 0.2}])
def test_estimators_answer_the_same_either_way(kind: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    X = np.random.default_rng(0).normal(size=(60, 3))
    y = X[:, 0] if kind is BBAlphaRegressor else X[:, 0] > 0
    model = kind(budget="quick", epochs=3, random_state=0, **settings).fit(X, y)
    names = ("mean", "std") if kind is BBAlphaRegressor else ("probs", "mutual_information", "votes")
    short = [getattr(model.predictive(X), name) for name in names]
    monkeypatch.setattr(f"{kind.__module__}.is_plain", lambda network: False)
    for name, value in zip(names, short, strict=True):
        torch.testing.assert_close(value, getattr(model.predictive(X), name), rtol=1e-9, atol=1e-12)
