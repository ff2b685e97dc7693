"""The families q: their distributions, their KL, and how they behave under `sample`."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import optimize
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence

import bbalpha
from bbalpha import ConcreteDropout, DropConnectLinear, Dropout, GaussianDropout, GaussianLinear, sample
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.tracing import trace
from bbalpha._kernels import Passes
from bbalpha.divergences import LinearGaussian, large_data_energy
from bbalpha.layers import DropConnectConv1d, DropConnectConv2d, DropConnectConv3d, DropConnectGRU, DropConnectLSTM
from bbalpha.priors import keep_probabilities, param_groups, prior_kl


def behind(layer, width=8):
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), layer, nn.Linear(width, 2))


NETS = {
    "dropout": lambda: behind(Dropout(0.3)),
    "gaussian dropout": lambda: behind(GaussianDropout(0.3)),
    "concrete dropout": lambda: behind(ConcreteDropout(0.3)),
    "dropconnect": lambda: nn.Sequential(DropConnectLinear(3, 8, p=0.3), nn.Tanh(), DropConnectLinear(8, 2, p=0.5)),
    "gaussian linear": lambda: nn.Sequential(GaussianLinear(3, 8, initial_std=0.3), nn.Tanh(), GaussianLinear(8, 2)),
}
WEIGHTS = {  # what is dropped, what it takes the place of, an input whose rows are as many as its units
    "conv 1d": (lambda p: DropConnectConv1d(2, 4, 3, p=p), lambda: nn.Conv1d(2, 4, 3), (4, 2, 6), 0),
    "conv 2d": (
        lambda p: DropConnectConv2d(2, 4, 3, 2, 1, 1, 2, False, "circular", p=p),
        lambda: nn.Conv2d(2, 4, 3, 2, 1, 1, 2, False, "circular"),
        (4, 2, 5, 5),
        0,
    ),
    "conv 3d": (lambda p: DropConnectConv3d(1, 2, 2, p=p), lambda: nn.Conv3d(1, 2, 2), (2, 1, 3, 3, 3), 0),
    "lstm": (lambda p: DropConnectLSTM(3, 2, p=p), lambda: nn.LSTM(3, 2), (5, 8, 3), 1),
    "deep lstm": (
        lambda p: DropConnectLSTM(3, 2, 2, batch_first=True, bidirectional=True, p=p),
        lambda: nn.LSTM(3, 2, 2, batch_first=True, bidirectional=True),
        (8, 5, 3),
        0,
    ),
    "gru": (lambda p: DropConnectGRU(3, 2, bias=False, p=p), lambda: nn.GRU(3, 2, bias=False), (5, 6, 3), 1),
}
OWN = [name for name in NETS if name != "dropout"]


@pytest.fixture(params=NETS)
def net(request):
    return NETS[request.param]()


# ------------------------------------------------------------------------------ under sample


@pytest.mark.parametrize("masks", ["per_example", "shared"])
@pytest.mark.parametrize("shape", [(5, 3), (8, 3), (5, 4, 3), (1, 3)])  # 8 rows: as many as units
def test_all_strategies_give_the_same_passes(net, masks, shape):
    x = torch.randn(*shape)
    loop = sample(net, x, 4, masks=masks, strategy="loop", seed=1)
    assert loop.shape == (4, *shape[:-1], 2)
    assert (loop.std(0) > 0).all()  # every row of every output is random
    for strategy in ("repeat", "vmap", "auto"):
        assert torch.allclose(sample(net, x, 4, masks=masks, strategy=strategy, seed=1), loop, atol=1e-6)
    assert torch.allclose(sample(net, x, 4, masks=masks, chunk_size=3, seed=1), loop, atol=1e-6)
    assert not torch.allclose(sample(net, x, 4, masks=masks, seed=2), loop)


@pytest.mark.parametrize("strategy", ["loop", "repeat", "vmap"])
def test_shared_draws_are_one_function_for_all_rows(net, strategy):
    x = torch.randn(6, 3)
    together = sample(net, x, 3, masks="shared", strategy=strategy, seed=1)
    for n in (0, 4):
        alone = sample(net, x[n : n + 1], 3, masks="shared", strategy=strategy, seed=1)
        assert torch.allclose(together[:, n : n + 1], alone, atol=1e-6)
    equal = x[:1].expand(6, 3)
    assert torch.allclose(sample(net, equal, 3, masks="shared", strategy=strategy).std(1), torch.zeros(3, 2), atol=1e-6)
    assert (sample(net, equal, 3, strategy=strategy).std(1) > 0).all()  # per example: rows differ


@pytest.mark.parametrize("masks", ["per_example", "shared"])
def test_rows_may_be_on_another_axis(net, masks):
    x = torch.randn(4, 5, 3)
    kwargs = {"masks": masks, "batch_dim": 1, "seed": 1}
    loop = sample(net, x, 3, strategy="loop", **kwargs)
    for strategy in ("repeat", "vmap"):
        assert torch.allclose(sample(net, x, 3, strategy=strategy, **kwargs), loop, atol=1e-6)
    if masks == "shared":
        alone = sample(net, x[:, 2:3], 3, strategy="loop", **kwargs)
        assert torch.allclose(loop[:, :, 2:3], alone, atol=1e-6)


class Flattened(nn.Module):
    """Tokens (N, T, D) run as one batch of N T rows."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.flatten(0, 1)).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("masks", ["per_example", "shared"])
def test_rows_may_be_flattened_with_positions(net, masks):
    model, x = Flattened(net), torch.randn(5, 4, 3)
    loop = sample(model, x, 3, masks=masks, strategy="loop", seed=1)
    for strategy in ("repeat", "vmap"):
        assert torch.allclose(sample(model, x, 3, masks=masks, strategy=strategy, seed=1), loop, atol=1e-6)
    if masks == "shared":
        assert torch.allclose(sample(model, x[2:3], 3, masks=masks, seed=1), loop[:, 2:3], atol=1e-6)


def test_gradients_agree_whatever_the_strategy(net):
    x = torch.randn(5, 3)

    def gradients(**kwargs):
        net.zero_grad()
        sample(net, x, 4, seed=1, **kwargs).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    loop = gradients(strategy="loop")
    assert (loop != 0).any()
    for kwargs in ({"strategy": "repeat"}, {"strategy": "vmap"}, {"chunk_size": 3}):
        assert torch.allclose(gradients(**kwargs), loop, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OWN)
def test_layers_are_their_mean_when_asleep_and_are_reported(name):
    net = NETS[name]().eval()
    x = torch.randn(5, 3)
    assert torch.equal(net(x), net(x))
    plain = [m for m in net if isinstance(m, (nn.Linear, nn.Tanh))]
    out = x
    for m in plain:
        out = F.linear(out, m.weight, m.bias) if isinstance(m, nn.Linear) else m(out)
    assert torch.allclose(net(x), out)
    seen = trace(net, Inputs.of(x, 0))
    assert {s.kind for s in seen.sites} == {"gaussian weights" if name == "gaussian linear" else name}
    assert all(s.fired for s in seen.sites)
    assert not seen.hidden
    assert not any(s.fired for s in trace(net, Inputs.of(x, 0), switch=False).sites)
    assert not any(m.training for m in net.modules())


def test_empty_batches_single_vectors_and_half_precision(net):
    assert sample(net, torch.zeros(0, 3), 2).shape == (2, 0, 2)
    assert net.train()(torch.zeros(0, 3)).shape == (0, 2)
    assert net(torch.randn(3)).shape == (2,)
    out = sample(net.bfloat16(), torch.randn(4, 3).bfloat16(), 2)
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


def test_population_of_weights_under_vmap(net):
    """Plain torch calls outside of `sample`, so that many sets of weights can be trained as one."""
    members = {k: torch.stack([v.detach(), v.detach()]) for k, v in net.named_parameters()}
    x = torch.randn(5, 3)
    run = torch.func.vmap(lambda p: torch.func.functional_call(net, p, (x,)), randomness="different")
    out = run(members)
    assert out.shape == (2, 5, 2)
    assert not torch.allclose(out[0], out[1])


# ------------------------------------------------------------------------------ distributions


@pytest.mark.parametrize("inside_sample", [False, True])
def test_first_two_moments(inside_sample):
    """Dropout, Gaussian dropout and DropConnect at one rate have one mean and variance; Gaussian weights theirs."""
    p, x = 0.3, torch.tensor([[1.0, -2.0, 0.5]])
    gaussian, linear = GaussianLinear(3, 2, initial_std=0.7), nn.Linear(3, 2)
    drop_connect = DropConnectLinear(3, 2, p=p)
    drop_connect.load_state_dict(linear.state_dict())
    mean = linear(x)
    noise = (x**2) @ (linear.weight**2).T * p / (1 - p)
    expected = {
        nn.Sequential(Dropout(p), linear): (mean, noise),
        nn.Sequential(GaussianDropout(p), linear): (mean, noise),
        nn.Sequential(ConcreteDropout(p, temperature=1e-3), linear): (mean, noise),
        drop_connect: (mean, noise),
        gaussian: (gaussian.eval()(x), (x**2).sum() * torch.full((1, 2), 0.49)),
    }
    gaussian.train()
    for model, (first, second) in expected.items():
        for masks in ("per_example", "shared"):
            if inside_sample:
                draws = sample(model, x, 10_000, masks=masks, seed=0)
            else:
                draws = model(x.expand(10_000, 3))[:, None]
            assert torch.allclose(draws.mean(0), first, atol=0.08)
            assert torch.allclose(draws.var(0), second, rtol=0.08)


def test_gaussian_linear_outputs_are_correlated_only_through_shared_weights():
    layer, x = GaussianLinear(3, 1, bias=False, initial_std=1.0), torch.tensor([[1.0, 2.0, 0.5], [1.0, -1.0, -2.0]])
    local = sample(layer, x, 10_000, seed=0).squeeze(-1)  # (K, 2)
    shared = sample(layer, x, 10_000, masks="shared", seed=0).squeeze(-1)
    covariance = torch.cov(shared.T)
    assert torch.allclose(covariance, x @ x.T, rtol=0.1, atol=0.1)
    assert torch.cov(local.T)[0, 1].abs() < 0.1 < covariance[0, 1].abs()
    tokens = sample(layer, x[None], 10_000, seed=0).squeeze(-1).squeeze(1)  # (1, 2, 3): both in one row
    assert torch.allclose(torch.cov(tokens.T), x @ x.T, rtol=0.1, atol=0.1)


def test_a_row_of_zeros_has_a_gradient():
    layer = GaussianLinear(3, 2)
    x = torch.zeros(2, 3, requires_grad=True)
    layer(x).sum().backward()
    assert all(g.isfinite().all() for g in (x.grad, layer.weight.grad, layer.log_std.grad))


# ------------------------------------------------------------------------------ the prior


def test_quadratic_layers_have_the_kl_of_dropout():
    linear = nn.Linear(4, 3)
    l2, n = 2.5, 7
    want = l2 / (2 * 0.8) * linear.weight.square().sum() / n
    connect = DropConnectLinear(4, 3, p=0.2)
    connect.load_state_dict(linear.state_dict())
    models = [nn.Sequential(noise, linear) for noise in (nn.Dropout(0.2), Dropout(0.2), GaussianDropout(0.2))]
    for model in (*models, connect, nn.ModuleList([connect])):
        assert torch.isclose(prior_kl(model, length_scale=math.sqrt(l2), n_data=n), want)
        (decay, *_) = [g["weight_decay"] for g in param_groups(model, length_scale=math.sqrt(l2), n_data=n)]
        assert decay == pytest.approx(l2 / (0.8 * n))
    both = nn.Sequential(Dropout(0.5), connect)
    assert keep_probabilities(both) == {"1.weight": pytest.approx(0.4)}
    twice = Dropout(0.5)  # one object in two places
    used = nn.Sequential(twice, nn.Linear(2, 2), nn.ReLU(), twice, nn.Linear(2, 2))
    assert keep_probabilities(used) == {"1.weight": 0.5, "4.weight": 0.5}


@pytest.mark.parametrize("name", ["dropout", "gaussian dropout", "dropconnect"])
def test_tracing_a_pass_finds_what_the_structure_tells(name):
    net = NETS[name]()
    seen = trace(net, Inputs.of(torch.randn(4, 3), 0)).keep
    assert {k: v for k, v in seen.items() if v < 1} == pytest.approx(keep_probabilities(net))
    kwargs = {"length_scale": 1.3, "n_data": 5}
    assert torch.isclose(prior_kl(net, keep=seen, **kwargs), prior_kl(net, **kwargs))


def test_second_moment_is_what_the_kl_says():
    """KL is about l^2/2 E||W||^2: the mean square of the drawn weights, seen through unit inputs."""
    for model in (
        nn.Sequential(GaussianDropout(0.4), nn.Linear(3, 2, bias=False)),
        DropConnectLinear(3, 2, False, p=0.4),
    ):
        drawn = sample(model, torch.eye(3), 10_000, masks="per_example", seed=0)  # (K, 3, 2): weights
        kl = prior_kl(model, length_scale=1.0, n_data=1)
        assert torch.isclose(drawn.square().mean(0).sum() / 2, kl, rtol=0.05)


def test_gaussian_linear_has_its_exact_kl():
    layer = GaussianLinear(4, 3, initial_std=0.2)
    for length_scale in (0.1, 1.0, 5.0):
        q = Normal(layer.weight, layer.std)
        want = kl_divergence(q, Normal(0.0, 1 / length_scale)).sum()
        assert torch.isclose(layer.prior_kl(length_scale), want, rtol=1e-5)
        net = nn.Sequential(Dropout(0.5), layer)
        assert torch.isclose(prior_kl(net, length_scale=length_scale, n_data=10), want / 10, rtol=1e-5)
    nn.init.ones_(layer.bias)
    with_bias = prior_kl(layer, length_scale=2.0, n_data=1, biases=True) - prior_kl(layer, length_scale=2.0, n_data=1)
    assert torch.isclose(with_bias, torch.tensor(6.0))  # l^2/2 * 3
    with pytest.raises(ValueError, match="`length_scale` must be positive where q is Gaussian; got 0"):
        prior_kl(layer, length_scale=0, n_data=10)


def test_concrete_dropout_has_the_kl_of_its_rate():
    drop, linear = ConcreteDropout(0.2), nn.Linear(5, 3)
    net = nn.Sequential(drop, linear)
    p = torch.tensor(0.2)
    entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    want = linear.weight.square().sum() * 4 / (2 * 0.8) - 5 * entropy
    assert torch.isclose(drop.entropy, entropy)
    assert torch.isclose(prior_kl(net, length_scale=2.0, n_data=1), want)
    seen = trace(net, Inputs.of(torch.randn(4, 5), 0)).keep
    assert seen["1.weight"] == pytest.approx(0.8)
    value = prior_kl(net, length_scale=2.0, n_data=1, keep=seen)  # a rate seen is a number; ours has a gradient
    assert torch.isclose(value, want)
    (gradient,) = torch.autograd.grad(value, drop.logit)
    rate = drop.rate.detach().requires_grad_()
    by_hand = linear.weight.detach().square().sum() * 4 / (2 * (1 - rate))
    by_hand = by_hand + 5 * (rate * rate.log() + (1 - rate) * (1 - rate).log())
    by_hand.backward()
    assert torch.isclose(gradient, rate.grad * 0.2 * 0.8)
    convolution = nn.Sequential(ConcreteDropout(0.5), nn.Conv2d(4, 6, 3))
    nn.init.zeros_(convolution[1].weight)
    assert torch.isclose(prior_kl(convolution, length_scale=1.0, n_data=1), torch.tensor(-4 * math.log(2)))


def test_what_has_no_quadratic_kl_is_refused():
    for layer in (ConcreteDropout(0.2), GaussianLinear(2, 2)):
        with pytest.raises(ValueError, match=f"needs a quadratic KL, and that of {type(layer).__name__}"):
            param_groups(nn.Sequential(layer, nn.Linear(2, 2)), length_scale=1.0, n_data=3)
    for model in (
        nn.ModuleList([ConcreteDropout(), nn.Linear(2, 2)]),
        nn.Sequential(ConcreteDropout(), GaussianLinear(2, 2)),
    ):
        with pytest.raises(ValueError, match=r"ConcreteDropout \(0\) must stand before a Linear or Conv"):
            prior_kl(model, length_scale=1.0, n_data=3)


@pytest.mark.parametrize(
    "make",
    [
        Dropout,
        GaussianDropout,
        ConcreteDropout,
        lambda p: DropConnectLinear(2, 2, p=p),
        *(w[0] for w in WEIGHTS.values()),
    ],
)
@pytest.mark.parametrize("p", [-0.1, 1.0, "0.5", True, math.nan])
def test_rates_are_checked(make, p):
    with pytest.raises(ValueError, match=r"`p` must be a dropout rate in \[0, 1\)"):
        make(p)


def test_other_arguments_are_checked():
    with pytest.raises(ValueError, match="`p` must be above 0"):
        ConcreteDropout(0.0)
    with pytest.raises(ValueError, match="`temperature` must be a finite number above 0; got 0"):
        ConcreteDropout(0.1, temperature=0)
    with pytest.raises(ValueError, match="`initial_std` must be a finite number above 0; got -1"):
        GaussianLinear(2, 2, initial_std=-1)


# ------------------------------------------------------------------------------ learning


def test_concrete_dropout_gradient():
    """With the noise held, the output is a smooth function of the rate."""
    drop = ConcreteDropout(0.3, temperature=0.5).double()
    x = torch.randn(4, 3, dtype=torch.float64)

    def relaxed(logit):
        return torch.func.functional_call(seeded, {"0.logit": logit}, (x,))

    class Seeded(nn.Sequential):
        def forward(self, input):
            torch.manual_seed(0)
            return super().forward(input)

    seeded = Seeded(drop)
    logit = drop.logit.detach().requires_grad_()
    assert torch.autograd.gradcheck(relaxed, (logit,))
    # the mean over the noise does not move with the rate, the second moment does as dropout's 1/(1-rate)
    sharp = ConcreteDropout(0.3, temperature=0.02)
    ones = torch.ones(400_000)
    slope = torch.autograd.grad(sharp(ones).square().mean(), sharp.logit)[0]
    assert slope.item() == pytest.approx(0.3 / 0.7, abs=0.1)  # d/dlogit 1/(1-p) = p/(1-p)


def learned_rate(n):
    """The rate learnt by VI for fixed weights on n points, and the rate at the minimum of the exact energy."""
    x = torch.randn(n, 4)
    x = x / x.square().mean().sqrt()
    net = nn.Sequential(ConcreteDropout(0.2), nn.Linear(4, 1, bias=False))
    net[1].weight.requires_grad_(False).fill_(0.5)
    y = net[1](x) + torch.randn(n, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    rates = []
    for _ in range(200):
        loss = bbalpha.gaussian_nll(sample(net, x, 64), y, alpha=0.0, precision=1.0)
        loss = loss + prior_kl(net, length_scale=0.5, n_data=n)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.append(net[0].rate.item())

    def energy(p):  # the terms of the free energy in which the rate is: likelihood, prior, entropy of the masks
        entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
        return float(x.square().sum()) * 0.25 / 2 * p / (1 - p) + 0.25 * 1.0 / (2 * (1 - p)) - 4 * entropy

    best = optimize.minimize_scalar(energy, bounds=(1e-4, 0.9), method="bounded").x
    return sum(rates[-100:]) / 100, best  # a single step is noisy


def test_the_learned_rate_falls_as_data_grow():
    (few, want_few), (some, want_some), (many, want_many) = (learned_rate(n) for n in (2, 8, 20))
    assert few > some > many
    assert (few, some, many) == pytest.approx((want_few, want_some, want_many), rel=0.2)  # the masks are relaxed


def line(n=20):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64)
    x[:, 1] += 0.7 * x[:, 0]
    y = x @ torch.tensor([0.8, -0.5], dtype=torch.float64) + 0.5 * torch.randn(n, generator=g, dtype=torch.float64)
    return x, y


def trained(alpha, x, y, steps=300, n_passes=128):
    """Mean and variances of GaussianLinear after training as a user would."""
    layer = GaussianLinear(2, 1, bias=False, initial_std=0.2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    X, Y = x.float(), y.float()[:, None]
    for _ in range(steps):
        loss = bbalpha.gaussian_nll(sample(layer, X, n_passes), Y, alpha=alpha, precision=4.0)
        loss = loss + prior_kl(layer, length_scale=1.0, n_data=len(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return layer.weight.detach().flatten().double(), layer.std.detach().flatten().square().double()


def minimised(alpha, factors, p0):
    """Mean and variances at the minimum of the closed-form energy."""

    def objective(theta):
        t = torch.tensor(theta, requires_grad=True)
        value = large_data_energy(Independent(Normal(t[:2], t[2:].exp()), 1), p0, factors, alpha=alpha)
        value.backward()
        return value.item(), t.grad.numpy()

    found = optimize.minimize(objective, np.array([0.0, 0.0, -1.5, -1.5]), jac=True, method="L-BFGS-B")
    return torch.from_numpy(found.x[:2]), torch.from_numpy(found.x[2:]).mul(2).exp()


def test_bayesian_linear_regression():
    """alpha -> 0 finds the posterior mean and 1/Lambda_ii; other alphas what the closed-form energy has."""
    x, y = line()
    factors = LinearGaussian(x, y, precision=4.0)
    p0 = Independent(Normal(torch.zeros(2, dtype=torch.float64), 1.0), 1)
    posterior = factors.posterior(p0)
    variances = []
    for alpha in (0.0, 0.5, 1.0):
        mean, variance = trained(alpha, x, y)
        if alpha == 0:
            want = (posterior.mean, 1 / posterior.precision_matrix.diagonal())
        else:
            want = minimised(alpha, factors, p0)
        assert torch.allclose(mean, want[0], atol=0.02)
        assert torch.allclose(variance, want[1], rtol=0.05)
        variances.append(variance)
    assert (variances[0] < variances[1]).all()
    assert (variances[1] < variances[2]).all()


# ------------------------------------------------------------------------------ convolutions and recurrent layers


class First(nn.Module):
    """Of what a recurrent layer returns, the output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = self.layer(x)
        return out if isinstance(out, torch.Tensor) else out[0]


@pytest.fixture(params=WEIGHTS)
def pair(request):
    """A layer with dropped weights, torch's with the same weights, and an input with its rows."""
    make, plain, shape, axis = WEIGHTS[request.param]
    layer, twin = make(0.3), plain()
    twin.load_state_dict(layer.state_dict())
    return layer, twin, torch.randn(shape), axis


def dropped_by_hand(layer, twin, x, seed, k):
    """torch's layer with the weights of pass k."""
    passes = Passes(seed, k, 1, together=3)
    with torch.no_grad():
        for name, w in layer.named_parameters():
            if w.ndim > 1:
                noise = passes.noise(w.shape, layer.p)
                twin.get_parameter(name).copy_(w * noise.keep()[0] * noise.scale)
        return First(twin)(x)


@pytest.mark.parametrize("masks", ["per_example", "shared"])
def test_weights_of_any_layer_are_dropped_anew_in_each_pass_for_all_rows(pair, masks):
    layer, twin, x, axis = pair
    expected = torch.stack([dropped_by_hand(layer, twin, x, 1, k) for k in range(3)])
    model = First(layer).eval()
    for strategy in ("auto", "loop"):
        outputs = sample(model, x, 3, seed=1, masks=masks, strategy=strategy, batch_dim=axis)
        assert torch.allclose(outputs, expected, atol=1e-5)


def test_a_layer_with_dropped_weights_is_the_plain_one_in_evaluation_mode(pair):
    layer, twin, x, _ = pair
    layer.eval()
    assert torch.equal(First(layer)(x), First(twin)(x))
    layer.train()
    assert not torch.equal(First(layer)(x), First(layer)(x))
    layer.p = 0.0
    assert torch.equal(First(layer)(x), First(twin)(x))


def test_a_pass_changes_no_attribute(pair):
    """Threads share the layer."""
    layer, _, x, _ = pair
    before = {name: id(value) for name, value in vars(layer).items()}
    inside = [[id(v) for v in values] for values in (layer._parameters.values(), getattr(layer, "_flat_weights", ()))]
    First(layer)(x).sum().backward()
    assert {name: id(value) for name, value in vars(layer).items()} == before
    assert [
        [id(v) for v in values] for values in (layer._parameters.values(), getattr(layer, "_flat_weights", ()))
    ] == inside


def test_weights_that_are_dropped_have_gradients_and_may_be_swapped(pair):
    layer, _, x, _ = pair
    First(layer)(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in layer.parameters())
    zeros = {f"layer.{name}": torch.zeros_like(p) for name, p in layer.named_parameters()}
    assert not torch.func.functional_call(First(layer), zeros, (x,)).any()


def test_recurrent_layers_take_what_torchs_take():
    layer, twin = DropConnectLSTM(3, 4, p=0.5).eval(), nn.LSTM(3, 4)
    twin.load_state_dict(layer.state_dict())
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    state = torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    for args in ((packed,), (packed, state), (torch.randn(5, 3),), (torch.randn(5, 2, 3), state)):
        (out, (h, c)), (other, (g, d)) = layer(*args), twin(*args)
        assert torch.equal(h, g)
        assert torch.equal(c, d)
        assert torch.equal(getattr(out, "data", out), getattr(other, "data", other))


def test_the_kl_of_dropped_weights_is_that_of_dropout(pair):
    layer, *_ = pair
    l2, n, weights = 2.5, 7, [p for p in layer.parameters() if p.ndim > 1]
    want = l2 / (2 * 0.7) * sum(w.square().sum() for w in weights) / n
    for model in (layer, nn.ModuleList([layer]), nn.Sequential(layer)):
        assert torch.isclose(prior_kl(model, length_scale=math.sqrt(l2), n_data=n), want)
        decay, *_ = param_groups(model, length_scale=math.sqrt(l2), n_data=n)
        assert decay["weight_decay"] == pytest.approx(l2 / (0.7 * n))
        assert {id(p) for p in decay["params"]} == {id(w) for w in weights}


def test_a_pass_finds_what_the_structure_tells_of_dropped_weights(pair):
    layer, _, x, axis = pair
    for model in (layer, nn.Sequential(layer), nn.Sequential(Dropout(0.5), layer)):
        seen = bbalpha.audit(model, x, batch_dim=axis)
        assert seen.keep == pytest.approx(keep_probabilities(model))
        assert len(seen.keep) == sum(p.ndim > 1 for p in layer.parameters())
        assert seen.differed
        assert not any(vars(p) for p in layer.parameters())  # nothing sticks to the weights


def test_dropout_before_and_between_layers_counts_for_the_weights_it_feeds():
    model = nn.Sequential(Dropout(0.5), DropConnectLSTM(3, 4, 2, dropout=0.2, p=0.1))
    expected = {"weight_ih_l0": 0.45, "weight_hh_l0": 0.9, "weight_ih_l1": 0.72, "weight_hh_l1": 0.9}
    expected = {f"1.{name}": keep for name, keep in expected.items()}
    assert keep_probabilities(model) == pytest.approx(expected)
    assert bbalpha.audit(model, torch.randn(5, 6, 3), batch_dim=1).keep == pytest.approx(expected)
    with pytest.raises(ValueError, match="must stand before a Linear or Conv"):
        prior_kl(nn.Sequential(ConcreteDropout(0.5), model[1]), length_scale=1.0, n_data=1)
