import copy
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bbalpha
import reference
from bbalpha import sample
from bbalpha._engine import gathering
from bbalpha.networks import mlp

STRATEGIES = ["loop", "repeat", "vmap", "auto"]


def net_and_x(rows=5):
    return mlp([4, 20, 2], dropout=0.3), torch.randn(rows, 4)


# ------------------------------------------------------------------------------ one result, many ways


@pytest.mark.parametrize("masks", ["per_example", "shared"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_and_chunks_agree(strategy, masks):
    net, x = net_and_x()
    expected = sample(net, x, 7, seed=1, masks=masks, strategy="loop")
    torch.testing.assert_close(sample(net, x, 7, seed=1, masks=masks, strategy=strategy), expected)
    for size in (1, 3, 7, 100):
        chunked = sample(net, x, 7, seed=1, masks=masks, strategy=strategy, chunk_size=size)
        torch.testing.assert_close(chunked, expected)


@pytest.mark.parametrize("masks", ["per_example", "shared"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_gradient_of_chunks_is_the_plain_one(strategy, masks):
    net, x = net_and_x()
    x.requires_grad_()
    target = torch.tensor([0, 1, 1, 0, 1])

    def gradient(**options):
        loss = bbalpha.cross_entropy(sample(net, x, 7, seed=1, masks=masks, **options), target)
        return torch.autograd.grad(loss, [x, *net.parameters()])

    for got, want in zip(gradient(strategy=strategy, chunk_size=3), gradient(strategy="loop"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_weights_changed_before_the_backward_of_chunks_are_noticed():
    net, x = net_and_x()
    loss = sample(net, x, 4, chunk_size=2).sum()
    with torch.no_grad():
        net[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_shared_masks_are_one_function_a_pass():
    net, x = net_and_x(rows=11)
    whole = sample(net, x, 6, seed=5, masks="shared")
    parts = [sample(net, rows, 6, seed=5, masks="shared") for rows in x.split(4)]  # a short last batch too
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    same = sample(net, x[:1].expand(11, -1), 6, seed=5, masks="shared")
    torch.testing.assert_close(same, same[:, :1].expand_as(same))
    each = sample(net, x[:1].expand(11, -1), 6, seed=5)
    assert each.std(1).min() > 0


def test_another_process_draws_the_same():
    code = """
import torch, bbalpha
from bbalpha.networks import mlp
torch.manual_seed(0)
net, x = mlp([4, 20, 2], dropout=0.3), torch.linspace(-1, 1, 12).view(3, 4)
print(bbalpha.sample(net, x, 4, seed=9, masks="shared").sum(1).tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    torch.manual_seed(0)
    net, x = mlp([4, 20, 2], dropout=0.3), torch.linspace(-1, 1, 12).view(3, 4)
    here = sample(net, x, 4, seed=9, masks="shared").sum(1)
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), here.detach(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------ the same law as torch's dropout


@pytest.mark.parametrize("gather", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize("masks", ["per_example", "shared"])
def test_moments_are_those_of_torchs_dropout(masks, gather, monkeypatch):
    """Mean, variance and covariance over outputs of 20,000 draws."""
    monkeypatch.setattr(gathering, "_WORTH_IT", 1 if gather else 2**62)
    net, x = mlp([6, 12, 12, 3], dropout=0.5), torch.randn(1, 6)
    n = 20_000
    with torch.no_grad():
        ours = sample(net, x, n, masks=masks, seed=0)[:, 0].double()
        torchs = reference.loop(net, x.expand(n, -1), 1)[0].double()
    error = torch.sqrt((ours.var(0) + torchs.var(0)) / n)
    assert ((ours.mean(0) - torchs.mean(0)).abs() < 5 * error).all()
    for i in range(3):
        for j in range(i, 3):
            products = [(t[:, i] - t[:, i].mean()) * (t[:, j] - t[:, j].mean()) for t in (ours, torchs)]
            error = math.sqrt(sum(float(p.var()) for p in products) / n)
            assert abs(float(products[0].mean() - products[1].mean())) < 5 * error


@pytest.mark.parametrize("masks", ["per_example", "shared"])
def test_rows_are_independent_or_tied_as_asked(masks):
    net = mlp([6, 12, 1], dropout=0.5)
    with torch.no_grad():
        a, b = sample(net, torch.randn(1, 6).expand(2, -1), 5000, masks=masks, seed=0)[..., 0].T
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
    assert abs(correlation) < 5 / math.sqrt(5000) if masks == "per_example" else correlation > 0.999


# ------------------------------------------------------------------------------ seeds


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seeds(strategy):
    net, x = net_and_x()
    sample(net, x, 2, strategy=strategy)  # the plan is made
    state = torch.get_rng_state()
    one, two, other = (sample(net, x, 3, seed=s, strategy=strategy) for s in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    torch.manual_seed(1)
    first, second = sample(net, x, 3, strategy=strategy), sample(net, x, 3, strategy=strategy)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(sample(net, x, 3, strategy=strategy), first)


def test_making_the_plan_leaves_the_generator_alone():
    net, x = net_and_x()
    state = torch.get_rng_state()
    sample(net, x, 2, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------ memory


def test_a_chunk_of_activations_at_a_time():
    """What the graph of a chunked run keeps does not grow with the passes, but for the outputs."""

    def kept(n_passes, **options):
        net, x = mlp([8, 64, 64, 1], dropout=0.5), torch.randn(16, 8)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            bbalpha.gaussian_nll(sample(net, x, n_passes, **options), torch.zeros(16, 1), precision=1.0)
        return sum(sizes)

    outputs = 16 * 190  # ten numbers an output and pass more than enough
    assert kept(200, chunk_size=10) - kept(10, chunk_size=10) < 10 * outputs
    assert kept(200) - kept(10) > 64 * outputs


# ------------------------------------------------------------------------------ bad input


class Deaf(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_passes": 0}, "`n_passes` must be a whole number of at least 1; got 0"),
        ({"n_passes": 2.5}, "`n_passes` must be a whole number"),
        ({"chunk_size": 0}, "`chunk_size` must be a whole number"),
        ({"masks": "same"}, '`masks` must be "per_example" or "shared"'),
        ({"strategy": "fast"}, "`strategy` must be"),
        ({"batch_dim": 2}, "`batch_dim` must be an axis of `x`"),
        ({"seed": 1.5}, "`seed` must be an int or None"),
        ({"x": [[1.0]]}, "`x` must hold at least one tensor"),
        ({"x": "rows"}, "`x` must be a tensor"),
        ({"model": print}, "`model` must be a torch.nn.Module"),
        ({"model": Deaf()}, "add_dropout"),
        ({"model": nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.0))}, "off"),
    ],
)
def test_bad_input_is_one_clear_sentence(change, message):
    net, x = net_and_x()
    arguments = {"model": net, "x": x, "n_passes": 2} | change
    with pytest.raises((ValueError, TypeError), match=message):
        sample(**arguments)


def test_a_batch_of_nothing():
    net, x = net_and_x()
    for masks in ("per_example", "shared"):
        for size in (None, 2):
            assert sample(net, x[:0], 5, masks=masks, chunk_size=size).shape == (5, 0, 2)


# ------------------------------------------------------------------------------ no passes: the network as it is


class Normed(nn.Module):
    """Batch norm between a module that drops and a forward that does."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.rate, self.drop = rate, nn.Dropout(rate)
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.drop(self.norm(self.a(x)).relu())
        return self.b(F.dropout(h, self.rate, self.training))


@pytest.mark.parametrize("mode", [True, False])
def test_without_passes_all_but_the_random_sites_follow_the_callers_mode(mode):
    net, x = Normed().train(mode), torch.randn(9, 4, requires_grad=True)
    plain = Normed(rate=0.0).train(mode)
    plain.load_state_dict(net.state_dict())
    generator = torch.get_rng_state()
    outputs, expected = sample(net, x, None), plain(x)
    assert outputs.shape == (1, 9, 3)
    assert torch.equal(outputs[0], expected)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(m.training is mode for m in net.modules())
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), plain.buffers(), strict=True))  # moved once
    assert net.norm.num_batches_tracked == int(mode)
    got = torch.autograd.grad(outputs.square().sum(), [x, *net.parameters()])
    want = torch.autograd.grad(expected.square().sum(), [x, *plain.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "option", [{"masks": "shared"}, {"strategy": "vmap"}, {"strategy": "loop"}, {"chunk_size": 1}, {"seed": 3}]
)
def test_without_passes_the_options_of_passes_change_nothing(option):
    net, x = net_and_x()
    assert torch.equal(sample(net, x, None, **option)[0], net.eval()(x))


def test_without_passes_everything_that_sample_takes():
    linear, x = nn.Linear(4, 2), torch.randn(5, 4)
    whole = linear(x)
    for same in ((x,), {"input": x}, x.numpy()):
        assert torch.equal(sample(linear, same, None)[0], whole)
    assert sample(linear, x[:0], None).shape == (1, 0, 2)
    out, (h, _) = sample(nn.LSTM(4, 3, 2, dropout=0.5), x[:, None], None, batch_dim=1)
    assert (out.shape, h.shape) == ((1, 5, 1, 3), (1, 2, 1, 3))
    inplace, before = nn.Sequential(nn.ReLU(inplace=True), linear), x.clone()
    sample(inplace, x, None)
    assert torch.equal(x, before)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch asks for it itself
def test_without_passes_inside_transforms_and_compiled_code():
    net, x = net_and_x()
    plain = copy.deepcopy(net).eval()
    jacobian = torch.func.jacrev(lambda x: sample(net, x, None)[0])(x)
    torch.testing.assert_close(jacobian, torch.func.jacrev(plain)(x))
    stacked = torch.stack((x, 2 * x))
    torch.testing.assert_close(torch.func.vmap(lambda x: sample(net, x, None)[0])(stacked), plain(stacked))
    compiled = torch.compile(lambda x: 2 * sample(net, x, None), backend="eager")
    torch.testing.assert_close(compiled(x)[0], 2 * plain(x))


class Stubborn(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


class Harmless(nn.Module):
    """Draws whether it trains or not, and uses what it drew only where it trains, as layer drop is often written."""

    def forward(self, x):
        one, two = torch.rand(()), np.random.rand()
        return x * (one < 0.5) * (two < 0.5) if self.training else x


def test_without_passes_what_cannot_be_switched_off_is_an_error():
    x = torch.randn(5, 4)
    for model in (Stubborn(), nn.Sequential(nn.Dropout(0.5), Stubborn()).eval()):
        with pytest.raises(ValueError, match=r"`n_passes=None` needs a model that draws nothing.* \(dropout\)"):
            sample(model, x, None)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert torch.equal(sample(Harmless(), x, None)[0], x)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()


def test_a_model_without_randomness_is_told_the_way_out():
    with pytest.raises(ValueError, match=r"add_dropout\(model, p=0.1\)\. For the network as it is.*n_passes=None"):
        sample(nn.Linear(4, 2), torch.randn(5, 4), 3)


class Experts(nn.Module):
    """Rows choose an expert; the one with dropout is not needed for the first batch."""

    def __init__(self):
        super().__init__()
        self.drops = nn.Dropout(0.5)

    def forward(self, x):
        return self.drops(x) if bool((x > 10).any()) else 2 * x


def test_without_passes_a_site_that_was_not_met_before_is_off_too():
    net = Experts()
    sample(net, torch.zeros(5, 4), None)
    x = torch.full((5, 4), 11.0)
    assert torch.equal(sample(net, x, None)[0], x)


# ------------------------------------------------------------------------------ balanced passes


def linear_in_its_masks(p):
    """A network whose outputs are linear in the masks: balanced passes have its mean exactly."""
    return nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Dropout(p), nn.Linear(30, 2)).double().requires_grad_(False)


@pytest.mark.parametrize("strategy", ["auto", "vmap", "repeat", "loop"])
@pytest.mark.parametrize("masks", ["per_example", "shared"])
@pytest.mark.parametrize(("p", "K"), [(0.5, 10), (0.25, 4), (0.25, 200)])
def test_the_mean_of_balanced_passes_has_no_first_order_error(strategy, masks, p, K):
    net, x = linear_in_its_masks(p), torch.randn(5, 4).double()
    exact = net.eval()(x)
    balanced = bbalpha.sample(net, x, K, masks=masks, strategy=strategy, seed=0)
    torch.testing.assert_close(balanced.mean(0), exact)
    alone = bbalpha.sample(net, x, K, masks=masks, strategy=strategy, seed=0, balanced=False)
    assert float((alone.mean(0) - exact).abs().max()) > 1e-3
    assert float(balanced.std(0).min()) > 1e-3  # the passes themselves differ as ever


def test_balanced_passes_spread_as_independent_ones_do():
    net, x = linear_in_its_masks(0.3), torch.randn(6, 4).double()
    spreads = [
        torch.stack([bbalpha.sample(net, x, 10, seed=s, balanced=b).var(0, correction=0) for s in range(400)]).mean(0)
        for b in (True, False)
    ]
    # to first order the K passes of a unit hold all of its spread: divided by K, not by K - 1
    torch.testing.assert_close(spreads[0], spreads[1] * 10 / 9, rtol=0.1, atol=0)


def test_gradients_of_balanced_passes_agree_in_chunks():
    net, x = mlp([4, 20, 20, 3], dropout=0.25), torch.randn(5, 4)
    grads = []
    for options in ({}, {"chunk_size": 3}, {"strategy": "loop"}, {"strategy": "vmap"}, {"strategy": "repeat"}):
        net.zero_grad()
        bbalpha.cross_entropy(bbalpha.sample(net, x, 10, seed=4, **options), torch.arange(5) % 3).backward()
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], rtol=1e-4, atol=1e-6)


def test_a_draw_path_of_bernoulli_numbers_is_balanced_too():
    class DropPath(nn.Module):
        def forward(self, x):
            return x * x.new_empty(len(x), 1).bernoulli_(0.5).div_(0.5) if self.training else x

    outputs = bbalpha.sample(DropPath(), torch.ones(7, 3), 10, seed=0)
    assert torch.equal(outputs.mean(0), torch.ones(7, 3))


def test_balanced_must_be_a_flag():
    with pytest.raises(ValueError, match="`balanced` must be True or False; got 'no'"):
        bbalpha.sample(linear_in_its_masks(0.5), torch.zeros(2, 4).double(), 3, balanced="no")
