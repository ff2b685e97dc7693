import math

import pytest
import torch
from torch.func import vmap

from bbalpha import _kernels as kernels
from bbalpha._kernels import Noise, Passes


def noise_of(shape, rate, count=1, seed=0):
    return Passes(seed, 0, count).noise(shape, rate)


# ------------------------------------------------------------------------------ drawing


@pytest.mark.parametrize("rate", [0.5, 0.25, 1 / 256, 255 / 256, 0.05, 0.1, 1 / 3, 0.001])
def test_units_are_dropped_at_the_rate_and_scaled_by_what_is_realised(rate):
    n = 400_000
    noise = noise_of((n,), rate)
    dropped = 1 - noise.keep().double().mean().item()
    assert abs(dropped - rate) < 5 * math.sqrt(rate * (1 - rate) / n)
    assert abs(1 - 1 / noise.scale - rate) < 1e-9  # the error of the realised rate


@pytest.mark.parametrize("rate", [0.5, 0.25, 0.1])
def test_every_position_in_a_word_is_dropped_at_the_rate(rate):
    n = 800_000
    kept = noise_of((n,), rate).keep().view(-1, 8).double().mean(0)
    assert (kept - (1 - rate)).abs().max() < 5 * math.sqrt(rate * (1 - rate) / (n / 8))


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_neighbours_are_uncorrelated(rate):
    n = 400_000
    kept = noise_of((n,), rate).keep().double() - (1 - rate)
    for lag in (1, 2, 3, 4, 7, 8, 16, 64):
        correlation = (kept[0, lag:] * kept[0, :-lag]).mean() / (rate * (1 - rate))
        assert abs(correlation) < 5 / math.sqrt(n)


def test_passes_are_uncorrelated_and_addressed_by_seed_and_index():
    both = Passes(7, 0, 20).noise((5000,), 0.5).keep().double() - 0.5
    correlation = both @ both.T / 5000 * 4
    assert (correlation - torch.eye(20)).abs().max() < 5 / math.sqrt(5000)
    later = Passes(7, 12, 3).noise((5000,), 0.5).keep().double() - 0.5
    assert torch.equal(later, both[12:15])
    assert torch.equal(Passes(7, 10, 10).part(2, 3).noise((5000,), 0.5).keep().double() - 0.5, later)
    assert not torch.equal(Passes(8, 0, 20).noise((5000,), 0.5).keep().double() - 0.5, both)


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.1, 0.1), (0.5, 0.1), (0.25, 0.5)])
def test_several_sites_at_once_are_the_sites_one_by_one(rates):
    shapes = [(3, 5), (7,)]
    at_once = Passes(0, 0, 4).noises(list(zip(shapes, rates, strict=True)))
    passes = Passes(0, 0, 4)
    for noise, shape, rate in zip(at_once, shapes, rates, strict=True):
        alone = passes.noise(shape, rate)
        assert torch.equal(noise.keep(), alone.keep())
        assert noise.values.shape == (4, *shape)


def test_orders_of_the_epochs_of_a_run_differ():
    for seed in (0, 1, -5, 2**63 - 1):
        assert len({kernels.order_seed(seed, k) for k in range(100_000)}) == 100_000


# ------------------------------------------------------------------------------ applying


def obvious(x, noise, relu):
    y = x.relu() if relu else x
    return torch.where(noise.keep(), y * noise.scale, 0.0)


SHAPES = [((4, 6), (4, 6)), ((4, 6), (3, 4, 6)), ((3, 4, 6), (3, 1, 6)), ((6,), (6,))]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("x_shape", "noise_shape"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_kernels_are_where(relu, x_shape, noise_shape, dtype):
    noise = Noise(*noise_of(noise_shape, 0.3).apart)
    noise = Noise(noise.values[0], noise.threshold, noise.scale)
    x = torch.randn(x_shape, dtype=dtype)
    out = (kernels.relu_dropout if relu else kernels.dropout)(x, noise)
    assert out.dtype == dtype
    torch.testing.assert_close(out, obvious(x, noise, relu))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    ("x_shape", "noise_shape"), [((600, 700), (600, 700)), ((300, 500), (3, 300, 500)), ((3, 400, 500), (3, 1, 500))]
)
def test_large_operands_go_through_in_blocks(relu, x_shape, noise_shape):
    noise = noise_of(noise_shape, 0.5)
    noise = Noise(noise.values[0], noise.threshold, noise.scale)
    x = torch.randn(x_shape, requires_grad=True)
    out = (kernels.relu_dropout if relu else kernels.dropout)(x, noise)
    torch.testing.assert_close(out, obvious(x, noise, relu))
    weight = torch.randn_like(out)
    got, want = (torch.autograd.grad((o * weight).sum(), x)[0] for o in (out, obvious(x, noise, relu)))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kernel", [kernels.dropout, kernels.relu_dropout])
@pytest.mark.parametrize(("x_shape", "noise_shape"), SHAPES)
def test_gradients_of_every_kind(kernel, x_shape, noise_shape):
    noise = noise_of(noise_shape, 0.3)
    noise = Noise(noise.values[0], noise.threshold, noise.scale)
    x = torch.randn(x_shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: kernel(t, noise), x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: kernel(t, noise).square(), x)


def test_under_vmap_and_torch_func():
    noise = noise_of((5, 6), 0.5, count=3)
    x = torch.randn(5, 6, requires_grad=True)

    def one(values):
        return kernels.relu_dropout(x, Noise(values, noise.threshold, noise.scale))

    torch.testing.assert_close(vmap(one)(noise.values), kernels.relu_dropout(x, noise))
    slope = torch.func.grad(lambda t: kernels.dropout(t, noise).square().sum())(x.detach())
    (plain,) = torch.autograd.grad(kernels.dropout(x, noise).square().sum(), x)
    torch.testing.assert_close(slope, plain)


def test_in_place_is_out_of_place():
    noise = noise_of((50, 60), 0.5, count=4)
    x = torch.randn(4, 50, 60, requires_grad=True)
    weight = torch.randn(4, 50, 60)

    def through(overwrite):
        z = x * 1.0
        y = kernels.relu_dropout(z, noise, overwrite=overwrite)
        assert (y.data_ptr() == z.data_ptr()) == overwrite
        return y, torch.autograd.grad(((y * 1.0) * weight).sum(), x)[0]

    for got, want in zip(through(True), through(False), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_the_fused_kernel_keeps_its_output_and_nothing_else():
    noise = noise_of((100, 100), 0.5)
    kept = []
    x = torch.randn(1, 100, 100, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = kernels.relu_dropout(x, noise)
    assert [t.data_ptr() for t in kept] == [out.data_ptr()]
