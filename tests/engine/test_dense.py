"""Values and gradients against the loop are in test_chains.py, where every chain is."""

import pytest
import torch
from torch import nn

import bbalpha
from bbalpha._engine import dense
from bbalpha._kernels import Passes
from bbalpha.networks import mlp


@pytest.mark.parametrize("masks", ["per_example", "shared"])
def test_second_derivatives(masks):
    net = mlp([3, 6, 2], dropout=0.5).double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def penalty(strategy):
        outputs = bbalpha.sample(net, x, 3, seed=0, masks=masks, strategy=strategy)
        (slope,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [x, net[1].weight, net[4].weight])

    for got, want in zip(penalty("auto"), penalty("loop"), strict=True):
        torch.testing.assert_close(got, want)


def test_blocks_know_what_they_cannot_do():
    assert dense.blocks([nn.Dropout(0.5), nn.Tanh(), nn.Linear(2, 2)]) is None
    assert dense.blocks([nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(2, 2)]) is None
    assert dense.blocks([nn.Dropout(1.0), nn.Linear(2, 2)]) is None
    assert dense.blocks([nn.Linear(2, 2), nn.Dropout(0.5)]) is None


@pytest.mark.parametrize("shared", [False, True])
def test_little_and_much_noise_are_the_same_noise(shared, monkeypatch):
    parts = dense.blocks(mlp([5, 9, 2], dropout=0.3).double())
    x = torch.randn(4, 5, dtype=torch.float64)
    outputs = []
    for little in (0, 2**30):
        monkeypatch.setattr(dense, "_LITTLE", little)
        outputs.append(dense.run(parts, x, Passes(0, 0, 3), shared=shared, again=torch.relu))
    torch.testing.assert_close(*outputs)


def test_the_mask_is_written_over_the_activation():
    """One saved activation a layer: what enters the next product."""
    net = mlp([5, 300, 300, 2], dropout=0.5)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel() * t.element_size()) or t, lambda t: t
    ):
        bbalpha.sample(net, torch.randn(64, 5), 10)
    weights = sum(p.numel() * 4 for p in net.parameters())
    activations = 10 * 64 * (5 + 300 + 300) * 4
    noise_at_the_input = 10 * 64 * 5
    assert sum(sizes) == weights + activations + noise_at_the_input + 64 * 5 * 4


@pytest.mark.parametrize("frozen", [(), (1,), (4,), (1, 4), (7,)])
@pytest.mark.parametrize("needs_x", [False, True])
def test_only_what_is_asked_for_gets_a_gradient(frozen, needs_x):
    net = mlp([3, 5, 4, 2], dropout=0.5).double()
    for i in frozen:
        net[i].requires_grad_(False)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=needs_x)
    wanted = [p for p in (x, *net.parameters()) if p.requires_grad]
    grads = []
    for strategy in ("auto", "loop"):
        loss = bbalpha.sample(net, x, 3, seed=0, strategy=strategy).square().sum()
        grads.append(torch.autograd.grad(loss, wanted))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)
