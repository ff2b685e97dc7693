"""Random calls served from the passes: the right distribution, by every strategy the same draws."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bbalpha._engine.drawing import NotStackableError, Place
from bbalpha._engine.interception import Interception
from bbalpha._kernels import Passes

N, D, K = 6, 4, 5


def first(_):
    """Rows are on the first axis."""
    return Place(0)


def single(call, x, *, k=0, where=first, **options):
    """Pass k of `call` on `x`."""
    with Interception(Passes(0, k, 1), len(x), where=where, **options):
        return call(x)


def stacked(call, x, where=first, **options):
    with Interception(Passes(0, 0, K), len(x), strategy="repeat", where=where, **options):
        return call(x.repeat(K, *[1] * (x.ndim - 1))).unflatten(0, (K, len(x)))


def vmapped(call, x, **options):
    mode = Interception(Passes(0, 0, K), len(x), strategy="vmap", where=first, **options)

    def one(index):
        mode.index = index
        with mode:
            return call(x)

    return torch.func.vmap(one, randomness="same")(torch.arange(K))


CALLS = {
    "F.dropout": lambda x: F.dropout(x, 0.3),
    "F.dropout at a rate that is a tensor": lambda x: F.dropout(x, torch.tensor(0.3)),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "F.dropout of its mean": lambda x: F.dropout(x * 1.0 + x.mean(0), 0.25),
    "F.dropout1d": lambda x: F.dropout1d(x.unsqueeze(-1).expand(-1, -1, 3), 0.3),
    "F.dropout2d": lambda x: F.dropout2d(x[..., None, None].expand(-1, -1, 3, 2), 0.3),
    "F.dropout3d": lambda x: F.dropout3d(x[..., None, None, None].expand(-1, -1, 3, 2, 2), 0.3),
    "F.feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.unsqueeze(-1).expand(-1, -1, 3), 0.3, True),
    "F.alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "F.rrelu": lambda x: F.rrelu(x, training=True),
    "in place": lambda x: F.dropout(x * 2, 0.3).relu_(),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape),
    "rand with a column": lambda x: x * torch.rand(x.shape[0], 1),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.7),
    "new_empty": lambda x: x * x.new_empty(x.shape[0], 1).bernoulli_(0.7).div_(0.7),
    "normal": lambda x: torch.normal(x, 0.5),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(1, 2),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(2.0),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.5),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.unsqueeze(-1)] * 3, dropout_p=0.3),
    "many": lambda x: F.dropout(torch.relu(F.dropout(x, 0.5)) + torch.randn_like(x), 0.125),
}


@pytest.fixture(params=CALLS.values(), ids=CALLS)
def call(request):
    return request.param


def test_all_strategies_draw_the_same(call):
    x = torch.randn(N, D)
    loop = torch.stack([single(call, x, k=k) for k in range(K)])
    torch.testing.assert_close(stacked(call, x), loop)
    torch.testing.assert_close(vmapped(call, x), loop)
    assert not torch.equal(loop[0], loop[1])


def test_shared_draws_are_one_for_all_rows(call):
    x = torch.randn(1, D).expand(N, D).clone()
    loop = torch.stack([single(call, x, k=k, shared=True) for k in range(K)])
    torch.testing.assert_close(loop, loop[:, :1].expand_as(loop))
    torch.testing.assert_close(stacked(call, x, shared=True), loop)
    torch.testing.assert_close(vmapped(call, x, shared=True), loop)


def test_moments_are_those_of_torch(call):
    x = torch.randn(D).expand(20_000, D).clone()
    if call is CALLS["F.dropout of its mean"]:
        x += 1e-6
    ours, torchs = single(call, x).flatten(1), call(x).flatten(1)
    error = ((ours.var(0) + torchs.var(0)) / len(x)).sqrt()
    assert ((ours.mean(0) - torchs.mean(0)).abs() <= 5 * error + 1e-6).all()
    torch.testing.assert_close(ours.std(0), torchs.std(0), rtol=0.06, atol=1e-5)


def test_torchs_generator_is_left_alone(call):
    state = torch.get_rng_state()
    single(call, torch.ones(N, D))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("both", [False, True])
def test_recurrent_layers_one_by_one_are_the_whole(kind, both):
    """With nearly no dropout, running layer by layer must give what torch's kernel gives."""
    net = kind(3, 4, num_layers=3, dropout=1e-9, bidirectional=both, batch_first=True)
    x = torch.randn(N, 7, 3)
    ours, state = single(net, x)
    expected, expected_state = net.eval()(x)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(state, expected_state)


def test_recurrent_layers_of_packed_sequences():
    net = nn.LSTM(3, 4, num_layers=2, dropout=1e-9)
    lengths = [5, 3, 1]
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 3) for n in lengths])
    with Interception(Passes(0, 0, 1), 3) as mode:
        ours, (h, c) = net(packed)
    assert mode.fired == 1
    expected, (expected_h, expected_c) = net.eval()(packed)
    torch.testing.assert_close(ours.data, expected.data)
    torch.testing.assert_close((h, c), (expected_h, expected_c))


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "grouped"])
def test_attention_spelt_out_is_torchs(mask):
    q, k, v = torch.randn(3, N, 2, 5, 4).unbind(0)
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(N, 1, 5, 5) < 0.5},  # some queries see nothing
        "float": {"attn_mask": torch.randn(N, 1, 5, 5), "scale": 0.3},
        "grouped": {"enable_gqa": True},
    }[mask]
    if mask == "grouped":
        k, v = k[:, :1], v[:, :1]
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    with Interception(Passes(0, 0, 1), N):
        ours = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, **options)
    torch.testing.assert_close(ours, expected)


def test_gradients_past_a_query_that_sees_nothing_are_finite():
    q = torch.randn(N, 5, 4, requires_grad=True)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    with Interception(Passes(0, 0, 1), N):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.5).sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_rates_0_and_1_are_not_random(p):
    seen = []
    x = torch.randn(N, D)
    with Interception(Passes(0, 0, 1), N, observer=lambda *site: seen.append(site)) as mode:
        out = F.dropout(x, p)
    assert mode.fired == 0
    assert seen == [("dropout", p, False)]
    assert torch.equal(out, x * (1 - p))


def test_the_observer_hears_kind_rate_and_whether_it_fired():
    seen = []
    x = torch.randn(N, D)
    with Interception(Passes(0, 0, 1), N, observer=lambda *site: seen.append(site)):
        nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.25).eval(), nn.RReLU())(x)
        torch.empty(3).bernoulli_(0.9)
    kinds = [("dropout", 0.5, True), ("dropout", 0.25, False), ("rrelu", None, True)]
    assert seen[:3] == kinds
    assert seen[3][0] == "bernoulli_"
    assert math.isclose(seen[3][1], 0.1)


@pytest.mark.parametrize("name", ["randperm", "poisson", "multinomial"])
def test_draws_for_the_whole_batch_are_refused_where_passes_are_run_together(name):
    calls = {
        "randperm": lambda x: x[torch.randperm(len(x))],
        "poisson": lambda x: torch.poisson(x.exp()),
        "multinomial": lambda x: x[torch.multinomial(torch.ones(len(x)), 2)],
    }
    x = torch.randn(N, D)
    assert torch.equal(single(calls[name], x), single(calls[name], x))
    for run in (stacked, vmapped):
        with pytest.raises(NotStackableError):
            run(calls[name], x)


@pytest.mark.parametrize(
    "call",
    [lambda x: torch.multinomial(x.abs() + 1, 2), lambda x: torch.poisson(x.abs() * 5),
     lambda x: torch.randint(7, (len(x), 9)), lambda x: torch.randint(low=3, high=9, size=(len(x), 9)),
     lambda x: torch.normal(0.0, 1.0, (len(x), 3)), lambda x: torch.empty(len(x), 9).bernoulli_(torch.full((9,), 0.5))],
)  # fmt: skip
def test_equal_rows_share_whatever_is_drawn(call):
    x = torch.randn(1, D).expand(N, D).clone()
    out = single(call, x, shared=True)
    assert torch.equal(out, out[:1].expand_as(out))
    assert not torch.equal(single(call, x), single(call, x)[:1].expand_as(out))


@pytest.mark.parametrize("size", [(7, (5, 3)), (2, 8, (5, 3))])
def test_randint_is_torchs(size):
    generator = Passes(0, 0, 1).generators[0]
    assert torch.equal(single(lambda x: torch.randint(*size), torch.zeros(5, 1)),
                       torch.randint(*size, generator=generator))  # fmt: skip


def test_weights_have_no_rows_to_tell_passes_apart():
    weight = torch.randn(3, D)
    with pytest.raises(NotStackableError, match="no axis of rows"):
        stacked(lambda x: F.linear(x, F.dropout(weight, 0.5)), torch.randn(N, D), where=lambda _: Place(None))


def test_a_generator_of_the_models_own_is_used_as_it_is():
    def fixed(x):
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(3))

    x = torch.randn(N, D)
    assert torch.equal(single(fixed, x, k=0), single(fixed, x, k=1))
    assert torch.equal(single(fixed, x), fixed(x))


def test_wrong_rates_are_torchs_own_error():
    with pytest.raises(ValueError, match="between 0 and 1"):
        single(lambda x: F.dropout(x, 1.5), torch.ones(N, D))
