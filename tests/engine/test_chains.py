import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import bbalpha
from bbalpha._engine import chains, gathering
from bbalpha._kernels import Passes
from bbalpha.networks import cnn, mlp


def chain(*layers):
    return lambda: nn.Sequential(*layers)


FLAT, IMAGES = (7, 6), (7, 1, 10, 10)
CHAINS = {
    "mlp": (lambda: mlp([6, 20, 15, 3], dropout=0.3), FLAT),
    "mlp of bytes": (lambda: mlp([6, 20, 15, 3], dropout=0.5), FLAT),
    "no dropout at the input": (lambda: mlp([6, 20, 15, 3], dropout=0.5, input_dropout=0), FLAT),
    "mixed rates": (lambda: mlp([6, 20, 3], dropout=0.5, input_dropout=0.1), FLAT),
    "ends in dropout": (
        chain(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5), nn.ReLU(), nn.Dropout(0.2)), FLAT,
    ),
    "no bias, no relu": (
        chain(nn.Dropout(0.2), nn.Linear(6, 8, bias=False), nn.Dropout(0.5), nn.Linear(8, 5, bias=False)), FLAT,
    ),
    "other activations": (
        chain(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 5), nn.Sigmoid(), nn.Dropout(0.2),
              nn.Linear(5, 2)), FLAT,
    ),
    "nested, in place": (
        chain(nn.ReLU(inplace=True), nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 8), nn.Dropout(0.1, inplace=True)),
              nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 2)), FLAT,
    ),
    "p = 0 and p = 1": (
        chain(nn.Dropout(0.0), nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(1.0),
              nn.Linear(8, 2)), FLAT,
    ),
    "one dropout, one linear, used twice": (
        lambda: nn.Sequential(*[nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.3)] * 2, nn.Linear(6, 2)), FLAT,
    ),
    "cnn": (lambda: cnn(filters=4, hidden=10), (3, 1, 28, 28)),
    "channel dropout": (
        chain(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(8, 6, 3, padding=1), nn.Tanh(),
              nn.MaxPool2d(2), nn.Dropout2d(0.5), nn.Conv2d(6, 5, 3, bias=False), nn.ReLU(), nn.Flatten(),
              nn.Dropout(0.2), nn.Linear(20, 4)), IMAGES,
    ),
    "layer norm": (chain(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 2)), FLAT),
}  # fmt: skip


def gradients(net, x, **options):
    x = x.clone().requires_grad_()
    outputs = bbalpha.sample(net, x, 5, seed=3, **options)
    weight = torch.linspace(-1, 1, outputs.numel(), dtype=x.dtype).view_as(outputs)
    grads = torch.autograd.grad(
        (outputs * weight).sum() + outputs.square().sum(), [x, *net.parameters()], allow_unused=True
    )
    return outputs.detach(), [torch.zeros(()) if g is None else g for g in grads]


@pytest.mark.parametrize("gather", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize("masks", ["per_example", "shared"])
@pytest.mark.parametrize("case", CHAINS)
def test_a_chain_gives_what_the_loop_gives(case, masks, gather, monkeypatch):
    """Values and gradients, with small products gathered too."""
    monkeypatch.setattr(gathering, "_WORTH_IT", 1 if gather else 2**62)
    build, shape = CHAINS[case]
    net, x = build().double(), torch.randn(shape, dtype=torch.float64)
    before = x.clone()
    assert chains.find(net)
    outputs, grads = gradients(net, x, masks=masks, strategy="auto")
    expected, expected_grads = gradients(net, x, masks=masks, strategy="loop")
    torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-12)
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        monkeypatch.setattr(chains, "_NEAR_CACHE", 1)  # a pass at a time
        torch.testing.assert_close(bbalpha.sample(net, x, 5, seed=3, masks=masks), expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(x, before)


class Rows(TorchFunctionMode):
    """The rows that each convolution was given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.conv2d:
            self.seen.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masks", ["per_example", "shared"])
@pytest.mark.parametrize("grad", [True, False])
def test_the_convolutions_before_the_first_dropout_run_once_for_all_passes(grad, masks):
    net, x = cnn(filters=2, hidden=5), torch.randn(3, 1, 28, 28)
    bbalpha.sample(net, x, 10, masks=masks)
    with torch.set_grad_enabled(grad), Rows() as rows:
        bbalpha.sample(net, x, 10, masks=masks)
    assert rows.seen == [3, 3]


@pytest.mark.parametrize(
    "model",
    [
        nn.LSTM(3, 3, 2, dropout=0.5),
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(inplace=True), nn.Dropout(0.5)),
        nn.Sequential(nn.Flatten(0), nn.Dropout(0.5)),
    ],
    ids=["lstm", "batch norm", "in place", "flattened rows"],
)
def test_what_is_no_chain(model):
    assert chains.find(model) is None


def test_a_hook_is_not_passed_over():
    net = mlp([3, 4, 2], dropout=0.5)
    assert bbalpha.sample(net, torch.randn(2, 3), 3).shape == (3, 2, 2)
    seen = []
    net[1].register_forward_hook(lambda m, args, out: seen.append(out.shape))
    bbalpha.sample(net, torch.randn(2, 3), 3)
    assert seen


def test_a_forward_of_ones_own_is_not_passed_over():
    net = mlp([3, 4, 2], dropout=0.5)
    net[1].forward = lambda input: torch.zeros(len(input), 4)
    outputs = bbalpha.sample(net, torch.randn(2, 3), 5)
    assert torch.equal(outputs, net[4].bias.expand(5, 2, 2))  # nothing but the last bias comes through


def test_rates_are_read_at_every_call():
    net, x = mlp([3, 4, 2], dropout=0.5), torch.randn(2, 3)
    bbalpha.sample(net, x, 3, seed=0)
    net[0].p = net[3].p = 0.0
    with pytest.raises(ValueError, match="add_dropout"):
        bbalpha.sample(net, x, 3, seed=0)
    net[3].p = 0.9
    loop = bbalpha.sample(net, x, 400, seed=0, strategy="loop")
    torch.testing.assert_close(bbalpha.sample(net, x, 400, seed=0), loop)


def test_autocast_and_transforms_fall_back():
    net, x = mlp([3, 40, 2], dropout=0.5), torch.randn(4, 3)
    for masks in ("per_example", "shared"):
        with torch.autocast("cpu", torch.bfloat16):
            fast = bbalpha.sample(net, x, 3, seed=0, masks=masks)
            loop = bbalpha.sample(net, x, 3, seed=0, masks=masks, strategy="loop")
        assert fast.dtype == loop.dtype == torch.bfloat16
        torch.testing.assert_close(fast, loop, rtol=0.05, atol=0.05)
        slope = torch.func.grad(lambda t, m=masks: bbalpha.sample(net, t, 3, seed=0, masks=m).square().sum())(x)
        y = x.clone().requires_grad_()
        (plain,) = torch.autograd.grad(bbalpha.sample(net, y, 3, seed=0, masks=masks).square().sum(), y)
        torch.testing.assert_close(slope, plain)


# ------------------------------------------------------------------------------ Linear, ReLU and Dropout as one node


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
    assert chains.blocks([nn.Dropout(0.5), nn.Tanh(), nn.Linear(2, 2)]) is None
    assert chains.blocks([nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(2, 2)]) is None
    assert chains.blocks([nn.Dropout(1.0), nn.Linear(2, 2)]) is None
    assert chains.blocks([nn.Linear(2, 2), nn.Dropout(0.5)]) is None


@pytest.mark.parametrize("shared", [False, True])
def test_little_and_much_noise_are_the_same_noise(shared, monkeypatch):
    parts = chains.blocks(mlp([5, 9, 2], dropout=0.3).double())
    x = torch.randn(4, 5, dtype=torch.float64)
    outputs = []
    for little in (0, 2**30):
        monkeypatch.setattr(chains, "_LITTLE", little)
        outputs.append(chains.run_dense(parts, x, Passes(0, 0, 3), shared=shared, again=torch.relu))
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
