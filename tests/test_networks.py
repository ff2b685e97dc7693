import itertools

import pytest
import torch
from torch import nn

from bbalpha import Dropout
from bbalpha.networks import cnn, mlp


def test_dropout_before_every_weight_layer():
    net = mlp([5, 7, 6, 2], dropout=0.4, input_dropout=0.1)
    rates = [m.p for m in net if isinstance(m, nn.Dropout)]
    assert rates == [0.1, 0.4, 0.4]
    for before, layer in itertools.pairwise(net):
        assert not isinstance(layer, nn.Linear) or isinstance(before, nn.Dropout)
    assert net(torch.randn(3, 5)).shape == (3, 2)


def test_the_papers_cnn():
    net = cnn()
    assert net(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert sum(p.numel() for p in net.parameters()) == 32 * 10 + 32 * (32 * 9 + 1) + 100 * 4609 + 10 * 101


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_rates_outside_the_unit_interval(rate):
    for build in (lambda: mlp([2, 2], dropout=rate), lambda: Dropout(rate)):
        with pytest.raises(ValueError, match=rf"; got {rate}"):
            build()


def test_too_few_sizes():
    with pytest.raises(ValueError, match="`sizes` must hold at least two positive widths"):
        mlp([3])
