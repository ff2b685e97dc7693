"""Divergences against numerical integration, and the energies against each other."""

import json
import math
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats
from torch.distributions import (
    Bernoulli,
    Categorical,
    Exponential,
    Independent,
    Laplace,
    MultivariateNormal,
    Normal,
    Uniform,
    kl_divergence,
)

from bbalpha import divergences as dv

ALPHAS = [-0.7, -0.1, 1e-7, 0.25, 0.5, 0.9, 1 - 1e-7, 1.3, 2.0]


def normal(mean, std):
    return Normal(torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64))


def diagonal(mean, std):
    return Independent(normal(mean, std), 1)


def integral(p, q, alpha):
    """int p^alpha q^(1-alpha) by quadrature, for p and q given as scipy distributions."""

    def f(w):
        return np.exp(alpha * p.logpdf(w) + (1 - alpha) * q.logpdf(w))

    return integrate.quad(f, -60, 60, epsabs=1e-13, epsrel=1e-12, limit=500, points=[-1, 0, 1])[0]


def regression(n=12, d=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    x[:, -1] += 0.8 * x[:, 0]
    y = x @ torch.linspace(1, -1, d, dtype=torch.float64) + torch.randn(n, generator=g, dtype=torch.float64) / 2
    return dv.LinearGaussian(x, y, precision=4.0)


# ------------------------------------------------------------------------------ against quadrature


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("other", [(0.4, 0.8), (-0.3, 1.2)])
def test_gaussian_divergences_are_the_integrals(alpha, other):
    p, q = normal(0.0, 1.0), normal(*other)
    P, Q = stats.norm(0, 1), stats.norm(*other)
    exists = alpha / 1.0 + (1 - alpha) / other[1] ** 2 > 0
    if not exists:
        assert dv.amari(p, q, alpha) == math.inf
        return
    if min(abs(alpha), abs(1 - alpha)) > 1e-3:
        value = integral(P, Q, alpha)
        assert dv.amari(p, q, alpha).item() == pytest.approx((1 - value) / (alpha * (1 - alpha)), abs=1e-8)
        assert dv.renyi(p, q, alpha).item() == pytest.approx(math.log(value) / (alpha - 1), abs=1e-8)
    else:  # next to 0 and 1 the quadrature has no digits left, the closed form has all
        near = dv.kl(p, q) if alpha > 0.5 else dv.kl(q, p)
        assert dv.amari(p, q, alpha).item() == pytest.approx(near.item(), abs=1e-6)


@pytest.mark.parametrize(("a", "b"), [((0.0, 1.0), (0.5, 0.7)), ((-1.0, 0.5), (1.0, 2.0))])
def test_kl_and_hellinger_are_the_integrals(a, b):
    p, q, P, Q = normal(*a), normal(*b), stats.norm(*a), stats.norm(*b)
    inclusive = integrate.quad(lambda w: P.pdf(w) * (P.logpdf(w) - Q.logpdf(w)), -40, 40, limit=300)[0]
    squared = integrate.quad(lambda w: (P.pdf(w) ** 0.5 - Q.pdf(w) ** 0.5) ** 2, -40, 40, limit=300)[0] / 2
    assert dv.kl(p, q).item() == pytest.approx(inclusive, abs=1e-7)
    assert dv.hellinger(p, q).item() == pytest.approx(math.sqrt(squared), abs=1e-7)
    assert dv.amari(p, q, 1.0) == dv.renyi(p, q, 1.0) == dv.kl(p, q)
    assert dv.amari(p, q, 0.0) == dv.kl(q, p)
    assert dv.amari(p, q, 0.5).item() == pytest.approx(4 * dv.hellinger(p, q).item() ** 2, rel=1e-12)


@pytest.mark.parametrize("alpha", [-0.2, 0.3, 0.5, 0.8, 1.2])
def test_correlated_gaussians_by_quadrature_in_the_plane(alpha):
    covariance = torch.tensor([[1.0, 0.6], [0.6, 0.8]], dtype=torch.float64)
    p = MultivariateNormal(torch.tensor([0.2, -0.1], dtype=torch.float64), covariance)
    q = diagonal([0.0, 0.3], [0.9, 0.8])
    grid = torch.linspace(-12, 12, 801, dtype=torch.float64)
    w = torch.cartesian_prod(grid, grid)
    logs = alpha * p.log_prob(w) + (1 - alpha) * q.log_prob(w)
    value = logs.exp().sum() * (24 / 800) ** 2
    assert torch.isclose(dv.renyi(p, q, alpha), value.log() / (alpha - 1), atol=1e-8)
    assert torch.isclose(dv.kl(p, q), (p.log_prob(w).exp() * (p.log_prob(w) - q.log_prob(w))).sum() * 9e-4, atol=1e-6)


def test_full_and_diagonal_forms_agree_where_both_apply():
    p, q = diagonal([0.1, 0.2, -0.3], [0.5, 1.0, 0.8]), diagonal([0.0, 0.5, 0.0], [1.0, 0.7, 0.9])
    wide = [MultivariateNormal(d.mean, torch.diag(d.variance)) for d in (p, q)]
    for alpha in (-0.1, 0.2, 0.5, 1.1):
        assert torch.isclose(dv.renyi(p, q, alpha), dv.renyi(*wide, alpha), atol=1e-12)
    assert torch.isclose(dv.kl(*wide), kl_divergence(p, q), atol=1e-12)
    moments = [d.base_dist for d in (p, q)]  # a batch of three: one value each, and Renyi's adds up
    assert dv.renyi(*moments, 0.3).shape == (3,)
    assert torch.isclose(dv.renyi(*moments, 0.3).sum(), dv.renyi(p, q, 0.3))


def test_discrete_divergences_are_the_sums():
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.25, 0.25, 0.25, 0.25])
    P, Q = Categorical(p), Categorical(q)
    for alpha in (0.2, 0.5, 1.5, 3.0):
        total = (p**alpha * q ** (1 - alpha)).sum()
        assert torch.isclose(dv.amari(P, Q, alpha), (1 - total) / (alpha * (1 - alpha)), rtol=1e-5)
        assert torch.isclose(dv.renyi(P, Q, alpha), total.log() / (alpha - 1), rtol=1e-5)
    assert torch.isclose(dv.kl(P, Q), (p * (p / q).log()).nansum())
    assert torch.isclose(dv.renyi(P, Q, 0.0), -torch.tensor(0.75).log())  # -log q(p > 0)
    assert dv.kl(Q, P) == dv.amari(P, Q, 0.0) == dv.amari(P, Q, -0.5) == dv.amari(Q, P, 1.5) == math.inf
    coins = [Categorical(torch.tensor([1 - b, b])) for b in (0.2, 0.7)]
    assert torch.isclose(dv.amari(Bernoulli(0.2), Bernoulli(0.7), 0.3), dv.amari(*coins, 0.3))


# ------------------------------------------------------------------------------ laws


@given(alpha=st.floats(-2, 3).filter(lambda a: abs(a) > 1e-3), std=st.floats(0.6, 1.5), mean=st.floats(-2, 2))
@settings(max_examples=60, deadline=None)
def test_divergences_convert_and_mirror(alpha, std, mean):
    p, q = normal(0.0, 1.0), normal(mean, std)
    amari, renyi = dv.amari(p, q, alpha), dv.renyi(p, q, alpha)
    assert amari >= -1e-12
    assert torch.isclose(amari, dv.amari(q, p, 1 - alpha), rtol=1e-9)  # D_a[p||q] = D_(1-a)[q||p]
    assert torch.isclose(dv.amari_from_renyi(renyi, alpha), amari, rtol=1e-6, atol=1e-12)
    if amari < 1e3:
        assert torch.isclose(dv.renyi_from_amari(amari, alpha), renyi, rtol=1e-6, atol=1e-9)


def test_divergences_are_zero_only_at_equality_and_differentiable():
    for alpha in ALPHAS:
        assert dv.amari(normal(0.3, 0.5), normal(0.3, 0.5), alpha).item() == pytest.approx(0, abs=1e-12)
    mean, std = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.2, 0.9))
    for alpha in (0.0, 0.3, 1.0):
        assert torch.autograd.gradcheck(lambda m, s, a=alpha: dv.amari(normal(0.0, 1.0), Normal(m, s), a), (mean, std))
    root = torch.tensor([[1.0, 0.0], [0.3, 0.7]], dtype=torch.float64, requires_grad=True)
    p = diagonal([0.0, 0.0], [1.0, 1.0])
    zero = torch.zeros(2, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda r: dv.renyi(p, MultivariateNormal(zero, r @ r.T), 0.4), (root,)
    )  # eigenvalues, not eigenvectors


def test_infinite_where_the_integral_does_not_exist():
    narrow, wide = normal(0.0, 0.5), normal(0.0, 1.0)
    assert dv.renyi(wide, narrow, 2.0) == dv.amari(wide, narrow, 2.0) == math.inf  # 2/1 - 1/0.25 < 0
    assert dv.renyi(narrow, wide, 2.0) < math.inf
    assert dv.amari(narrow, wide, -1.0) == math.inf
    unit, half = Uniform(0.0, 1.0), Uniform(0.0, 0.5)
    assert dv.kl(unit, half) == math.inf
    assert dv.amari(unit, half, 2.0, n_samples=100) == math.inf  # a draw of p where q has no density
    assert dv.renyi(half, unit, 0.5, n_samples=20_000).item() == pytest.approx(math.log(2), abs=0.05)


def test_monte_carlo_finds_what_quadrature_finds():
    p, q, P, Q = Laplace(0.0, 1.0), Normal(0.3, 1.2), stats.laplace(0, 1), stats.norm(0.3, 1.2)
    for alpha in (0.3, 0.5, 0.8):
        want = (1 - integral(P, Q, alpha)) / (alpha * (1 - alpha))
        assert dv.amari(p, q, alpha, n_samples=400_000).item() == pytest.approx(want, rel=0.03)
    want = integrate.quad(lambda w: P.pdf(w) * (P.logpdf(w) - Q.logpdf(w)), -40, 40, points=[0])[0]
    assert dv.kl(p, q, n_samples=400_000).item() == pytest.approx(want, rel=0.03)
    assert dv.renyi(Exponential(1.0), Normal(0.0, 1.0), 0.0, n_samples=20_000).item() == pytest.approx(0.693, abs=0.03)


# ------------------------------------------------------------------------------ the cavity


@given(alpha=st.floats(-1, 3.9), n=st.integers(4, 1000), std=st.floats(0.1, 0.9), mean=st.floats(-2, 2))
@settings(max_examples=60, deadline=None)
def test_cavity_and_back(alpha, n, std, mean):
    q, p0 = diagonal([mean, 0.0], [std, 0.5]), diagonal([0.0, 0.1], [1.0, 2.0])
    there = dv.cavity(q, p0, alpha, n)
    back = dv.from_cavity(there, p0, alpha, n)
    assert type(there) is type(q)
    assert torch.allclose(back.mean, q.mean, atol=1e-10)
    assert torch.allclose(back.variance, q.variance, rtol=1e-9)
    w = torch.tensor([[0.3, -0.2], [1.0, 0.5]], dtype=torch.float64)  # Eq. 6 up to Z_q, at two points
    ratio = q.log_prob(w) - there.log_prob(w) - alpha / (n - alpha) * (there.log_prob(w) - p0.log_prob(w))
    assert torch.isclose(ratio[0], ratio[1], atol=1e-9)


def test_cavity_of_the_prior_is_the_prior_and_of_other_kinds():
    p0 = diagonal([0.0, 0.1], [1.0, 2.0])
    assert torch.allclose(dv.cavity(p0, p0, 0.5, 3).variance, p0.variance)
    q = MultivariateNormal(torch.zeros(2, dtype=torch.float64), torch.tensor([[0.3, 0.1], [0.1, 0.2]]).double())
    back = dv.from_cavity(dv.cavity(q, p0, 1.0, 5), p0, 1.0, 5)
    assert torch.allclose(back.covariance_matrix, q.covariance_matrix)
    coin = dv.from_cavity(dv.cavity(Categorical(torch.tensor([0.3, 0.7])), Categorical(torch.ones(2)), 1.0, 4),
                          Categorical(torch.ones(2)), 1.0, 4)  # fmt: skip
    assert torch.allclose(coin.probs, torch.tensor([0.3, 0.7]))


def test_cavity_refuses_what_is_no_density():
    q, p0 = normal(0.0, 0.5), normal(0.0, 1.0)
    for alpha in (2.0, 5.0):
        with pytest.raises(ValueError, match="`alpha` must be below `n_data`, 2"):
            dv.cavity(q, p0, alpha, 2)
    with pytest.raises(ValueError, match="must be a density; its smallest precision is -2"):
        dv.from_cavity(normal(0.0, 2.0), p0, 3.0, 4)  # 4/4 - 3
    with pytest.raises(ValueError, match="must be a density"):
        dv.cavity(normal(0.0, 2.0), p0, -3.0, 2)
    with pytest.raises(TypeError, match="both be Gaussian or discrete"):
        dv.cavity(Laplace(0.0, 1.0), p0, 0.5, 2)
    with pytest.raises(ValueError, match="`alpha` must be a finite number; got nan"):
        dv.amari(q, p0, math.nan)
    with pytest.raises(ValueError, match="events of one shape"):
        dv.renyi(diagonal([0.0], [1.0]), p0, 0.5)


# ------------------------------------------------------------------------------ the energies


@pytest.mark.parametrize("alpha", [-0.4, 1e-5, 0.3, 0.5, 1.0, 2.5])
def test_the_three_exact_energies_are_one(alpha):
    factors, p0 = regression(), diagonal([0.0, 0.0], [1.0, 1.5])
    for q in (
        diagonal([0.9, -0.8], [0.3, 0.2]),
        MultivariateNormal(torch.tensor([0.9, -0.8]).double(), torch.tensor([[0.08, -0.03], [-0.03, 0.05]]).double()),
    ):
        original = dv.bb_alpha_energy(q, p0, factors, alpha=alpha)
        cavity = dv.cavity(q, p0, alpha, len(factors.y))
        assert torch.isclose(original, dv.reparameterised_energy(cavity, p0, factors, alpha=alpha), rtol=0, atol=1e-10)
        slack = 1e-10 / min(1.0, abs(alpha))  # log Z is divided by alpha
        assert torch.isclose(original, dv.power_ep_energy(q, p0, factors, alpha=alpha), rtol=0, atol=slack)


@pytest.mark.parametrize("alpha", [-0.4, 0.5, 1.0, 2.0])
def test_exact_energies_by_quadrature(alpha):
    x, y = torch.tensor([[1.0], [0.5], [-1.0]]).double(), torch.tensor([0.7, 0.1, -0.4]).double()
    factors, q, p0 = dv.LinearGaussian(x, y, precision=2.0), diagonal([0.4], [0.5]), diagonal([0.0], [1.0])
    w = torch.linspace(-9, 9, 20001, dtype=torch.float64)[:, None]
    log_f, log_q, log_p = factors(w), q.log_prob(w)[:, None], p0.log_prob(w)[:, None]

    def log_mean(values):  # log E_q exp(values)
        return ((log_q + values).exp().sum(0) * 18 / 20000).log()

    original = -log_mean(alpha * (log_f + (log_p - log_q) / 3)).sum() / alpha  # Eq. 3 as printed
    large = (log_q.exp() * (log_q - log_p)).sum() * 18 / 20000 - log_mean(alpha * log_f).sum() / alpha
    assert torch.isclose(dv.bb_alpha_energy(q, p0, factors, alpha=alpha), original, rtol=1e-9)
    assert torch.isclose(dv.large_data_energy(q, p0, factors, alpha=alpha), large, rtol=1e-9)
    free = (log_q.exp() * (log_q - log_p - log_f.sum(1, keepdim=True))).sum() * 18 / 20000
    assert torch.isclose(dv.free_energy(q, p0, factors), free, rtol=1e-9)


def test_all_energies_meet_as_alpha_vanishes():
    factors, p0, q = regression(), diagonal([0.0, 0.0], [1.0, 1.5]), diagonal([0.9, -0.8], [0.3, 0.2])
    free = dv.free_energy(q, p0, factors)
    for energy in (dv.bb_alpha_energy, dv.reparameterised_energy, dv.large_data_energy, dv.power_ep_energy):
        gaps = [(energy(q, p0, factors, alpha=alpha) - free).abs() for alpha in (1e-2, 1e-4, 1e-6)]
        assert gaps[0] > gaps[1] > gaps[2]
        assert gaps[2] < 1e-4
        assert torch.isclose(energy(q, p0, factors, alpha=0.0), free, rtol=1e-12)


def test_the_energy_tends_to_the_kl_form_as_data_grow():
    p0, q = diagonal([0.0, 0.0], [1.0, 1.5]), diagonal([0.9, -0.8], [0.3, 0.2])
    for alpha in (0.5, 1.0):
        gaps = []
        for n in (10, 100, 1000, 10_000):
            factors = regression(n)
            exact = dv.reparameterised_energy(q, p0, factors, alpha=alpha)
            gaps.append(float(exact - dv.large_data_energy(q, p0, factors, alpha=alpha)))
        assert all(0 < b < a / 5 for a, b in pairwise(gaps))  # like alpha / N


def test_monte_carlo_energies_find_the_exact_ones():
    factors, p0, q = regression(6), diagonal([0.0, 0.0], [1.0, 1.5]), diagonal([0.9, -0.8], [0.3, 0.2])
    for energy in (dv.bb_alpha_energy, dv.reparameterised_energy, dv.large_data_energy, dv.power_ep_energy):
        exact = energy(q, p0, factors, alpha=0.5)
        estimate = energy(q, p0, lambda w: factors(w), alpha=0.5, n_samples=200_000)
        assert torch.isclose(estimate, exact, rtol=5e-3)
    mean = torch.tensor([0.9, -0.8], dtype=torch.float64, requires_grad=True)  # a gradient through the draws
    dv.bb_alpha_energy(Laplace(mean, 0.3), Normal(torch.zeros(2).double(), 1.0), factors, alpha=0.5).backward()
    assert mean.grad is not None
    assert mean.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"must return log f of shape \(K, N\)"):
        dv.free_energy(q, p0, lambda w: factors(w).sum(1))


# ------------------------------------------------------------------------------ what alpha does to q


def best_variances(factors, p0, alpha, energy=dv.large_data_energy):
    """The variances of the best factorised Gaussian q."""
    d = factors.x.shape[1]

    def objective(theta):
        t = torch.tensor(theta, requires_grad=True)
        value = energy(diagonal_of(t[:d], t[d:].exp()), p0, factors, alpha=alpha)
        value.backward()
        return value.item(), t.grad.numpy()

    start = np.concatenate([factors.posterior(p0).mean.numpy(), np.full(d, -2.0)])
    found = optimize.minimize(objective, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9})
    return found.x[:d], np.exp(2 * found.x[d:])


def diagonal_of(mean, std):
    return Independent(Normal(mean, std), 1)


def test_alpha_zero_is_mean_field_vi_and_variances_grow_with_alpha():
    factors, p0 = regression(30), diagonal([0.0, 0.0], [1.0, 1.0])
    posterior = factors.posterior(p0)
    mean, variance = best_variances(factors, p0, 0.0)
    assert np.allclose(mean, posterior.mean, atol=1e-5)
    assert np.allclose(variance, 1 / posterior.precision_matrix.diagonal(), rtol=1e-4)
    wider = [best_variances(factors, p0, a)[1] for a in (0.5, 1.0)]
    assert (variance < wider[0]).all()
    assert (wider[0] < wider[1]).all()


def test_one_weight_well_specified():
    """alpha = 0.5 gives about twice the exact posterior variance, alpha = 1 about sqrt(N) times."""
    p0 = diagonal([0.0], [1.0])
    for n in (400, 6400):
        g = torch.Generator().manual_seed(n)
        noise = torch.randn(n, generator=g, dtype=torch.float64)
        noise = (noise - noise.mean()) / noise.std(correction=0)  # as specified: variance 1 exactly
        factors = dv.LinearGaussian(torch.ones(n, 1, dtype=torch.float64), 0.3 + noise)
        exact = factors.posterior(p0).variance.item()
        assert best_variances(factors, p0, 0.5)[1].item() / exact == pytest.approx(2, rel=0.02)
        assert best_variances(factors, p0, 1.0)[1].item() / exact == pytest.approx(math.sqrt(n), rel=0.1)


def test_the_tables_of_the_method_page_come_from_its_json():
    docs = Path(__file__).parents[1] / "docs"
    spec = spec_from_file_location("figures_method", docs / "figures_method.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = json.loads((docs / "figures" / "method.json").read_text())["rows"]
    page = (docs / "method.md").read_text()
    for name, table in script.tables(rows).items():
        assert f"<!-- begin {name} -->\n{table}\n<!-- end {name} -->" in page
