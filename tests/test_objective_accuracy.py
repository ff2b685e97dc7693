"""The objective against its equation in 60 digits, for every alpha, K and dtype and losses of every size.

The bounds are those of conditioning. A loss l_k moves the value by its weight w_k = softmax(-alpha l)_k, so rounding
the losses alone moves it by eps * sum_k w_k |l_k|, and rounding the result by eps * |L|. A weight moves by its own size
times the error of its exponent, eps * |alpha| * |l_k - L|, and that of the others. Nothing computed in the dtype can do
better.
"""

import decimal
import math
import random
from decimal import Decimal

import pytest
import torch

from bbalpha import GaussianNLL, alpha_loss, gaussian_nll
from bbalpha.checks import check_alpha
from bbalpha.objectives import _log_mean_exp

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FEW_CASES, MANY_CASES, ROWS = 10_000, 50_000, 200
FEW = 4  # eps; of the value, and of a weight


def exact(losses, alpha):
    """L, |L| + sum_k w_k |l_k|, and the w_k of one point's K losses; numbers are a double and what it leaves over."""
    K, a, values = len(losses), Decimal(alpha), [Decimal(v) for v in losses]
    peak = min(values) if alpha > 0 else max(values)
    apart = [v - peak for v in values]
    powers = [a * d for d in apart]  # from 0 up
    if max(powers) < Decimal("1e-20"):  # to the second order, which leaves 40 digits
        mean = sum(apart) / K
        value = peak + mean - a * (sum(d * d for d in apart) / K - mean * mean) / 2
        weights = [(1 - z + sum(powers) / K) / K for z in powers]
    else:
        exps = [(-z).exp() if z < 10_000 else Decimal(0) for z in powers]
        total = sum(exps)
        value, weights = peak - (total / K).ln() / a, [e / total for e in exps]
    condition = abs(value) + sum(w * abs(v) for w, v in zip(weights, values, strict=True))
    return [pair(value), float(condition), [pair(w) for w in weights]]


def pair(number):
    return float(number), float(number - Decimal(float(number)))


def drawn(rng, dtype, K):
    """Losses (K, ROWS) of one kind: equal, positive, of both signs, close together, one alone, of all sizes."""
    largest = torch.finfo(dtype).max * (0.1 if dtype == torch.float64 else 0.99)  # so that bounds are doubles
    largest = largest if rng.random() < 0.3 else min(1e30, largest)
    x = torch.randn(K, ROWS, dtype=torch.float64)
    kinds = (
        lambda: x[:1].expand_as(x),
        lambda: x.abs(),
        lambda: x,
        lambda: 1 + x * 10.0 ** rng.uniform(-12, 0),
        lambda: torch.cat((x[:1], torch.zeros_like(x[1:]))),
        lambda: x.sign() * 10 ** (3 * x),
    )
    sizes = 10 ** torch.empty(ROWS, dtype=torch.float64).uniform_(-10, math.log10(largest))
    return (rng.choice(kinds)() * sizes).clamp(-largest, largest).to(dtype)


def groups(cases):
    """(alpha, losses), so many rows in all: every dtype, few passes and many, alpha of both signs, 0 and absurd."""
    rng = random.Random(20)
    for _ in range(cases // ROWS):
        alpha = rng.choice((-1, 1)) * 10 ** (rng.uniform(-12, 6) if rng.random() < 0.9 else rng.uniform(-300, 300))
        alpha = 0.0 if rng.random() < 0.05 else alpha
        yield alpha, drawn(rng, rng.choice(DTYPES), rng.choice((1, 2, 2, 3, 3, 4, 5, 10, 30)))


def exactly(losses, alpha):
    """`exact` of every column, as tensors: (N, 2), (N,), (K, N, 2)."""
    with decimal.localcontext(prec=80):
        value, condition, weights = zip(*(exact(own, alpha) for own in losses.double().T.tolist()), strict=True)
    tensors = (torch.tensor(t, dtype=torch.float64) for t in (value, condition, weights))
    value, condition, weights = tensors
    return value, condition, weights.transpose(0, 1)


@pytest.mark.parametrize("cases", [FEW_CASES, pytest.param(MANY_CASES, marks=pytest.mark.slow)])
def test_value_and_gradient_are_those_of_the_equation(cases):
    for alpha, losses in groups(cases):
        given = losses.clone().requires_grad_()
        value = alpha_loss(given, alpha, reduction="none")
        (gradient,) = torch.autograd.grad(value.sum(), given)
        case = (alpha, losses.dtype, len(losses))
        assert value.isfinite().all(), case
        assert gradient.isfinite().all(), case
        L, condition, w = exactly(losses, alpha)
        error = ((value.detach().double() - L[:, 0]) - L[:, 1]).abs()
        here = torch.finfo(value.dtype)
        assert (error <= FEW * here.eps * condition + len(losses) * here.tiny).all(), case
        there = torch.finfo(gradient.dtype)  # the gradient is rounded once more where the losses are half precision
        powers = (abs(alpha) * (losses.double() - L[:, 0]).abs()).clamp_max(1e6)
        power = powers + (w[..., 0] * powers).sum(0)
        error = ((gradient.double() - w[..., 0]) - w[..., 1]).abs()
        assert (error <= FEW * w[..., 0] * (there.eps + here.eps * power) + there.tiny).all(), case


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_passes_give_the_loss_itself(dtype):
    largest = torch.finfo(dtype).max
    sizes = 10 ** torch.linspace(-5, math.log10(largest) - 1e-3, 2000, dtype=torch.float64)
    row = torch.cat((sizes, -sizes, torch.tensor([0.0, 0.99 * largest, -0.99 * largest], dtype=torch.float64))).to(
        dtype
    )
    for K in (1, 2, 3, 10, 100):
        losses = row.expand(K, -1)
        for alpha in (-1e6, -0.5, -1e-9, 1e-12, 1e-6, 0.5, 1.0, 30.0, 1e6, 1e-300, 1e300):
            assert torch.equal(alpha_loss(losses, alpha, reduction="none"), losses[0].to(value_dtype(dtype)))
        mean = alpha_loss(losses, 0.0, reduction="none")
        torch.testing.assert_close(mean, row.to(mean.dtype), rtol=(2 + K / 20) * torch.finfo(mean.dtype).eps, atol=0)


def value_dtype(dtype):
    return dtype if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_of_the_largest_numbers_does_not_overflow(dtype):
    largest = torch.finfo(dtype).max
    losses = torch.full((10, 64), largest, dtype=dtype)
    losses[::2] *= 0.5
    for alpha in (0.0, 1e-300, 1e-3, 1.0):
        for weight in (None, torch.ones(64)):
            assert 0.49 * largest <= alpha_loss(losses * 0.999, alpha, sample_weight=weight) <= largest
    turned = losses * torch.tensor([1.0, -1.0], dtype=dtype).repeat(5)[:, None]
    torch.testing.assert_close(
        alpha_loss(turned, 0.0, reduction="none"), torch.full((64,), -0.25 * largest, dtype=dtype)
    )


def test_prices_in_dollars_have_finite_losses_and_gradients():
    """Losses around 1e11, before a learned precision has found the noise."""
    for alpha in (-1.0, 1e-6, 0.5, 1.0, 1e3):
        # passes whose losses differ by an ulp or not at all
        outputs = (1e-3 * torch.randn(10, 500, 1)).requires_grad_()
        target = 1e5 + 9e5 * torch.rand(500, 1)
        objective = GaussianNLL(alpha)
        loss = objective(outputs, target)
        loss.backward()
        assert 1e9 < loss < 1e12
        assert outputs.grad.isfinite().all()
        assert objective.log_precision.grad.isfinite()
        each = gaussian_nll(outputs.detach(), target, alpha, precision=1.0, reduction="none")
        spread = 0.5 * (target - outputs.detach()).square().squeeze(-1)
        assert ((each >= spread.amin(0)) & (each <= spread.amax(0) * (1 + 1e-6))).all()


@pytest.mark.parametrize("alpha", [-1e30, -3.0, 0.5, 1e4, 1e30])
def test_huge_losses_under_torch_func_and_twice_differentiated(alpha):
    losses = torch.tensor([[1.0, 3e37], [2.0, -3e38], [2.0, 3e38]])
    plain = torch.autograd.functional.jacobian(lambda t: alpha_loss(t, alpha, reduction="none"), losses)
    assert plain.isfinite().all()
    torch.testing.assert_close(torch.func.jacrev(lambda t: alpha_loss(t, alpha, reduction="none"))(losses), plain)
    torch.testing.assert_close(torch.func.jacfwd(lambda t: alpha_loss(t, alpha, reduction="none"))(losses), plain)
    both = torch.func.vmap(lambda t: _log_mean_exp(t, check_alpha(alpha)))(torch.stack((losses, losses)))
    assert torch.equal(both[0], _log_mean_exp(losses, alpha))
    twice = torch.autograd.functional.hessian(lambda t: alpha_loss(t, min(alpha, 1e4)), losses)
    assert twice.isfinite().all()
