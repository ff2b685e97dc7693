"""JAX: values and gradients are those of torch, inside jit and vmap; passes of Flax networks; predictions."""

import importlib
import math
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import bbalpha
from bbalpha.integrations import jax as bb

ALPHAS = (-2.0, -1e-6, 0.0, 1e-6, 1e-4, 0.5, 1.0, 50.0)
K, N, C = 7, 6, 4
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def drawn(*shape, size=3.0):
    return (size * RNG.normal(size=shape)).astype("float32")


@pytest.fixture(autouse=True, scope="module")
def _quickly_compiled():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def same(ours, theirs, given, **tolerance):
    """Values and gradients for every alpha, traced, against torch's own; `ours` is compiled, and takes all alphas."""
    tolerance = tolerance or {"rtol": 1e-6, "atol": 1e-6}
    values, gradients = ours(given, jnp.array(ALPHAS))
    for alpha, value, gradient in zip(ALPHAS, values, gradients, strict=True):
        leaf = torch.tensor(given, requires_grad=True)
        expected = theirs(leaf, alpha)
        expected.backward()
        np.testing.assert_allclose(value, expected.item(), **tolerance)
        np.testing.assert_allclose(gradient, leaf.grad, **tolerance)


def compiled(loss):
    return jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))


# ------------------------------------------------------------------------------ the objective


def test_cross_entropy_is_that_of_torch():
    index, weight = RNG.integers(C, size=N), RNG.random(N).astype("float32")
    soft = RNG.dirichlet(np.ones(C), size=N).astype("float32")
    options = {"sample_weight": weight}
    for target in (index, soft):
        same(
            compiled(lambda o, a, y=target: bb.cross_entropy(o, y, a, **options)),
            lambda o, a, y=target: bbalpha.cross_entropy(o, torch.tensor(y), a, sample_weight=torch.tensor(weight)),
            drawn(K, N, C),
        )


def test_tokens_that_do_not_count():
    target = RNG.integers(C, size=(N, 5))
    target[0], target[1, 2:] = -100, -100
    given, ours = drawn(K, N, 5, C), jax.jit(bb.cross_entropy, static_argnames=("positions", "reduction"))
    for positions in ("independent", "joint"):
        for reduction in ("mean", "none"):
            options = {"positions": positions, "reduction": reduction}
            ours_here = ours(given, target, 0.5, **options)
            theirs = bbalpha.cross_entropy(torch.tensor(given), torch.tensor(target), 0.5, class_axis=-1, **options)
            np.testing.assert_allclose(ours_here, theirs, rtol=1e-5, atol=1e-6)


def test_binary_and_gaussian_are_those_of_torch():
    yes = RNG.integers(2, size=(N, 3)).astype("float32")
    same(
        compiled(lambda o, a: bb.binary_cross_entropy(o, yes, a, positions="joint")),
        lambda o, a: bbalpha.binary_cross_entropy(o, torch.tensor(yes), a, positions="joint"),
        drawn(K, N, 3),
    )
    y, tau = drawn(N, 2), np.exp(drawn(K, N, 2, size=0.3))
    same(
        compiled(lambda o, a: bb.gaussian_nll(o, y, a, precision=tau)),
        lambda o, a: bbalpha.gaussian_nll(o, torch.tensor(y), a, precision=torch.tensor(tau)),
        drawn(K, N, 2), rtol=1e-5, atol=1e-5,
    )  # fmt: skip


def test_alpha_loss_of_losses_of_every_size():
    ours = compiled(bb.alpha_loss)
    for size in (1e-3, 1.0, 1e4, 1e12):
        tolerance = {"rtol": 3e-6, "atol": 3e-7 * max(1.0, size)}
        same(ours, bbalpha.alpha_loss, drawn(K, 40, size=size), **tolerance)


def test_a_number_is_as_good_as_a_traced_alpha():
    losses = drawn(K, N)
    for alpha in (0, np.float32(0.5), jnp.array(-2.0)):
        traced = jax.jit(bb.alpha_loss)(losses, alpha)
        np.testing.assert_allclose(bb.alpha_loss(losses, alpha), traced, rtol=1e-6)


def test_alpha_0_is_the_mean_and_one_pass_ignores_alpha():
    losses = drawn(K, N)
    mean = jax.jit(lambda losses: jnp.mean(losses, 0))(losses)
    np.testing.assert_array_equal(bb.alpha_loss(losses, 0, reduction="none"), mean)
    for alpha in (-1e300, -1.0, 1e-300, 1e-6, 3.0, 1e300):
        np.testing.assert_array_equal(bb.alpha_loss(losses[:1], alpha, reduction="none"), losses[0])
        assert np.isfinite(bb.alpha_loss(losses, alpha))


def test_second_derivatives_are_those_of_torch():
    losses = drawn(4, 2)
    ours = jax.jit(jax.hessian(lambda a: bb.alpha_loss(a, 3.0)))(losses)
    theirs = torch.autograd.functional.hessian(lambda a: bbalpha.alpha_loss(a, 3.0), torch.tensor(losses))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_half_precision_is_reduced_in_float32():
    logits = jnp.asarray(drawn(K, N, C), jnp.bfloat16)
    value = bb.cross_entropy(logits, np.zeros(N, int))
    assert value.dtype == jnp.float32
    np.testing.assert_array_equal(value, bb.cross_entropy(logits.astype(jnp.float32), np.zeros(N, int)))


LOGITS, ROWS = drawn(K, N, C), np.zeros(N, int)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: bb.alpha_loss(LOGITS, 0.5), ValueError, r"`losses` must have shape \(K, N\)"),
        (lambda: bb.alpha_loss(LOGITS[0], math.inf), ValueError, "`alpha` must be a finite number; got inf"),
        (lambda: bb.alpha_loss(LOGITS[0], "half"), TypeError, "`alpha` must be a finite number; got str"),
        (lambda: bb.alpha_loss(ROWS[None], 0.5), TypeError, "`losses` must be real floating-point numbers; got int"),
        (lambda: bb.alpha_loss(LOGITS[0], 0.5, reduction="all"), ValueError, '"mean", "sum" or "none"; got \'all\''),
        (lambda: bb.alpha_loss(LOGITS[0], 0.5, sample_weight=[1.0]), ValueError, r"one weight per data point, \(4,\)"),
        (lambda: bb.alpha_loss(LOGITS[0], 0.5, sample_weight=[-1.0] * 4), ValueError, "finite and not negative"),
        (lambda: bb.alpha_loss(LOGITS[0], 0.5, sample_weight=[0.0] * 4), ValueError, "at least one data point"),
        (lambda: jax.vmap(lambda a: bb.alpha_loss(LOGITS[0], a))(jnp.ones((2, 2))), ValueError, "Use vmap for several"),
        (lambda: bb.cross_entropy(LOGITS[0], ROWS), ValueError, r"must have shape \(K, N, C\).*Use sample\(apply"),
        (lambda: bb.cross_entropy(LOGITS, ROWS[1:]), ValueError, r"class indices \(6,\), whole numbers, or class"),
        (lambda: bb.cross_entropy(LOGITS, ROWS * 1.0), ValueError, "whole numbers.* of float"),
        (lambda: bb.cross_entropy(LOGITS, ROWS + C), ValueError, "class indices from 0 to 3"),
        (lambda: bb.cross_entropy(LOGITS, ROWS, positions="all"), ValueError, '"independent" or "joint"'),
        (lambda: bb.binary_cross_entropy(LOGITS[..., 0], ROWS + 2), ValueError, r"must lie in \[0, 1\]"),
        (lambda: bb.binary_cross_entropy(LOGITS, ROWS), ValueError, r"one pass, \(6, 4\).*never broadcast"),
        (lambda: bb.gaussian_nll(LOGITS[..., 0], ROWS, precision=0), ValueError, "`precision` must be a finite number"),
        (lambda: bb.gaussian_nll(LOGITS[..., 0], ROWS, precision=-np.ones(6)), ValueError, "positive and finite"),
        (lambda: bb.gaussian_nll(LOGITS[..., 0], ROWS, precision=np.ones(5)), ValueError, r"\(7, 6\); got \(5,\)"),
        (lambda: bb.prior_kl({"b": np.ones(3)}, length_scale=1.0, n_data=5), ValueError, "must have weights.*'b'"),
        (lambda: bb.prior_kl(LOGITS, length_scale=1.0, n_data=5, keep={"a": 0.5}), ValueError, "must name weights"),
        (lambda: bb.prior_kl({"w": LOGITS}, length_scale=1.0, n_data=5, keep={"w": 0}), ValueError, r"in \(0, 1\]"),
        (lambda: bb.sample(lambda x, key: x, LOGITS, 3, key=KEY), ValueError, "`apply` must use its key"),
        (lambda: bb.predict_regression(noisy, {"a": LOGITS, "b": ROWS}, key=KEY), ValueError, r"rows; got \[6, 7\]"),
        (lambda: bb.predict_regression(noisy, ROWS, key=KEY, precision="x"), ValueError, "above 0; got 'x'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_inside_jit_what_cannot_be_is_nan():
    assert np.isnan(jax.jit(bb.cross_entropy)(LOGITS, ROWS + C))
    assert np.isfinite(jax.jit(bb.cross_entropy)(LOGITS, ROWS))
    assert np.isnan(jax.jit(lambda tau: bb.gaussian_nll(LOGITS[..., 0], ROWS, precision=tau))(-1.0))


def noisy(x, key):
    return x + jax.random.normal(key, x.shape)


# ------------------------------------------------------------------------------ Flax


class Net(nn.Module):
    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train=False, deterministic=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        return nn.Dense(3)(nn.Dropout(self.rate, deterministic=deterministic)(x))


@pytest.fixture(scope="module")
def network():
    net = Net()
    return net, jax.jit(net.init)({"params": KEY, "dropout": KEY}, jnp.ones((1, 4)))


def test_linen_passes_have_masks_of_their_own_and_statistics_that_can_be_averaged(network):
    net, variables = network
    x = drawn(5, 4)
    apply = jax.jit(lambda x, key: net.apply(variables, x, rngs={"dropout": key}))
    outputs = bb.sample(apply, x, 6, key=KEY)
    assert outputs.shape == (6, 5, 3)
    assert len(np.unique(outputs[:, 0, 0])) == 6
    first = apply(x, jax.random.split(KEY, 6)[0])
    np.testing.assert_allclose(outputs[0], first, rtol=1e-5, atol=1e-6)  # a pass alone is plain Flax

    @jax.jit
    def train(x, key):
        return net.apply(variables, x, train=True, rngs={"dropout": key}, mutable=["batch_stats"])

    outputs, state = bb.sample(train, x, 6, key=KEY)
    means = jax.tree.map(lambda s: s.mean(0), state)
    shapes = jax.tree.map(jnp.shape, means["batch_stats"])
    assert shapes == jax.tree.map(jnp.shape, variables["batch_stats"])


@pytest.mark.parametrize(
    "options", [{"deterministic": True}, {"rate": 0.0}], ids=["deterministic", "rate 0"]
)  # fmt: skip
def test_a_network_that_draws_nothing_is_refused(network, options):
    net, variables = Net(rate=options.pop("rate", 0.5)), network[1]
    apply = jax.jit(lambda x, key: net.apply(variables, x, rngs={"dropout": key}, **options))
    with pytest.raises(ValueError, match=r"K passes would be equal.*deterministic=False"):
        bb.sample(apply, drawn(5, 4), 6, key=KEY)
    with pytest.raises(ValueError, match="K passes would be equal"):
        jax.jit(lambda x: bb.sample(apply, x, 6, key=KEY))(drawn(5, 4))
    with pytest.raises(ValueError, match="K passes would be equal"):
        bb.predict_classification(apply, drawn(5, 4), key=KEY)


def test_what_is_wrong_in_the_network_itself_is_told_as_it_is():
    def broken(x, key):
        raise ValueError("wrong in here")

    with pytest.raises(ValueError, match="wrong in here"):
        bb.sample(broken, drawn(5, 4), 6, key=KEY)


@pytest.mark.slow
def test_a_linen_network_learns(network):
    net, variables = network
    y = RNG.integers(3, size=60)
    x = (RNG.normal(size=(60, 4)) + 3 * np.eye(3, 4)[y]).astype("float32")
    optimizer = optax.adam(0.05)

    def loss(params, key):
        apply = lambda x, key: net.apply({**variables, "params": params}, x, rngs={"dropout": key})  # noqa: E731
        kl = bb.prior_kl(params, length_scale=0.1, n_data=60, keep={"Dense_1/kernel": 0.5})
        return bb.cross_entropy(bb.sample(apply, x, n_passes=4, key=key), y) + kl

    @jax.jit
    def step(params, state, key):
        value, gradient = jax.value_and_grad(loss)(params, key)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    params, state, values = variables["params"], optimizer.init(variables["params"]), []
    for key in jax.random.split(KEY, 30):
        params, state, value = step(params, state, key)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    apply = jax.jit(lambda x, key: net.apply({**variables, "params": params}, x, rngs={"dropout": key}))
    p = bb.predict_classification(apply, x, key=KEY, n_passes=20, batch_size=500)
    assert (p.label.numpy() == y).mean() > 0.85


def test_nnx_networks_are_reseeded_for_each_pass():
    class Stateful(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(nnx.relu(self.first(x))))

    def apply_of(net):
        def apply(x, key):
            copy = nnx.clone(net)
            nnx.reseed(copy, default=key)
            return copy(x)

        return apply

    @nnx.jit
    def outputs_and_gradient(net):
        def loss(net):
            outputs = bb.sample(apply_of(net), x, 6, key=KEY)
            return bb.cross_entropy(outputs, y), outputs

        return nnx.grad(loss, has_aux=True)(net)

    x, y, net = drawn(5, 4), np.array([0, 1, 2, 0, 1]), Stateful(nnx.Rngs(0))
    gradient, outputs = outputs_and_gradient(net)
    assert outputs.shape == (6, 5, 3)
    assert len(np.unique(outputs[:, 0, 0])) == 6
    assert all(bool((g != 0).any()) for g in jax.tree.leaves(gradient))
    kl = bb.prior_kl(nnx.state(net, nnx.Param), length_scale=2.0, n_data=10, keep={"last/kernel": 0.5})
    squares = [float((layer.kernel[...] ** 2).sum()) for layer in (net.first, net.last)]
    np.testing.assert_allclose(kl, (squares[0] + 2 * squares[1]) * 4 / 20, rtol=1e-5)
    net.eval()
    with pytest.raises(ValueError, match="K passes would be equal"):
        bb.sample(apply_of(net), x, 6, key=KEY)


# ------------------------------------------------------------------------------ prior and prediction


def test_the_prior_is_that_of_torch():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 2))
    params = {
        f"Dense_{i}": {"kernel": net[2 * i].weight.detach().numpy().T, "bias": net[2 * i].bias.detach().numpy()}
        for i in range(2)
    }
    ours = jax.jit(lambda p: bb.prior_kl(p, length_scale=0.7, n_data=30, keep={"Dense_1/kernel": 0.8}))(params)
    np.testing.assert_allclose(ours, bbalpha.prior_kl(net, length_scale=0.7, n_data=30).item(), rtol=1e-6)
    heads = {"query": {"kernel": np.ones((2, 2, 2)), "bias": np.ones((2, 2))}}  # biases of attention have two axes
    assert bb.prior_kl(heads, length_scale=1.0, n_data=1) == 4


def test_a_prediction_is_that_of_its_passes(network):
    net, variables = network
    apply = jax.jit(lambda x, key: net.apply(variables, x, rngs={"dropout": key}))
    x = drawn(11, 4)
    p = bb.predict_classification(apply, x, key=KEY, n_passes=40)
    again = bb.predict_classification(apply, x, key=KEY, n_passes=40)
    assert torch.equal(p.log_probs, again.log_probs)
    assert (p.mutual_information > 0).all()
    many = torch.tensor(np.array(bb.sample(apply, x, 500, key=KEY))).softmax(-1).mean(0)
    for size in (100, 2000):
        close = bb.predict_classification(apply, x, key=KEY, n_passes=200, batch_size=size)
        np.testing.assert_allclose(close.probs, many, atol=0.15)
    regression = bb.predict_regression(noisy, np.zeros((30, 4), "float32"), key=KEY, precision=4.0, n_passes=200)
    assert regression.outputs.shape == (200, 30, 4)
    np.testing.assert_allclose(regression.std, np.full((30, 4), math.sqrt(1.25)), atol=0.35)
    predicted = bb.predict_regression(noisy, np.zeros((30, 4), "float32"), key=KEY, precision="predicted", n_passes=200)
    assert torch.equal(predicted.precision, regression.outputs[..., 2:].exp())
    assert bb.predict_regression(noisy, np.zeros((0, 4), "float32"), key=KEY, n_passes=3).mean.shape == (0, 4)


def test_rows_of_different_blocks_have_masks_of_their_own():
    p = bb.predict_regression(noisy, np.zeros((6, 1), "float32"), key=KEY, n_passes=5, batch_size=10)  # two at a time
    assert len(p.outputs.unique()) == 30


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "bbalpha.integrations.jax")
    with pytest.raises(ImportError, match=r"pip install 'bbalpha\[jax\]'"):
        importlib.import_module("bbalpha.integrations.jax")
