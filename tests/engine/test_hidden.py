"""Draws that no Python function of torch shows come from the pass, and torch's global generator is not asked."""

import pytest
import torch

from bbalpha._engine.drawing import Drawing, NotShareableError, Place
from bbalpha._engine.hidden import Hidden
from bbalpha._kernels import Passes

N, D = 5, 40
aten = torch.ops.aten
X = torch.rand(N, D) + 0.5

# straight to the operators, as TorchScript and distributions go
CALLS = {
    "gamma": lambda: torch._standard_gamma(X * 3),
    "dirichlet": lambda: torch._sample_dirichlet(X),
    "binomial": lambda: torch.binomial(torch.full((N, D), 9.0), X / 2),
    "poisson": lambda: aten.poisson(X * 5),
    "bernoulli": lambda: aten.bernoulli(X / 2),
    "uniform_": lambda: aten.uniform_(torch.empty(N, D)),
    "rand": lambda: aten.rand([N, D]),
    "randn": lambda: aten.randn([N, D]),
    "randint": lambda: aten.randint(9, [N, D]),
    "randint with a lower end": lambda: aten.randint.low(3, 9, [N, D]),
    "rand_like": lambda: aten.rand_like(X),
    "randn_like": lambda: aten.randn_like(X),
    "native_dropout": lambda: aten.native_dropout(X, 0.5, True)[0],
}


def drawn(call, *, k=0, **options):
    met = []
    with Hidden(Drawing(Passes(0, k, 1), N, **options), lambda *what: met.append(what)):
        out = call()
    assert len(met) == 1
    assert met[0][1] is False  # served: not from the global generator
    return out


@pytest.fixture(params=CALLS.values(), ids=CALLS)
def call(request):
    return request.param


def test_each_pass_has_its_own_numbers_and_torch_keeps_its(call):
    state = torch.get_rng_state()
    assert torch.equal(drawn(call), drawn(call))
    assert not torch.equal(drawn(call), drawn(call, k=1))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_distribution_is_torchs(call):
    ours = torch.stack([drawn(call, k=k).float() for k in range(200)])
    torch.manual_seed(0)
    torchs = torch.stack([call().float() for _ in range(200)])
    error = ((ours.var((0, 1)) + torchs.var((0, 1))) / 1000).sqrt() + 1e-6
    assert ((ours.mean((0, 1)) - torchs.mean((0, 1))).abs() < 5 * error).all()


def test_rows_that_are_alike_share_their_draws(monkeypatch, call):
    monkeypatch.setitem(globals(), "X", X[:1].expand(N, D).clone())
    out = drawn(call, shared=True, where=lambda _: Place(0))
    assert torch.equal(out, out[:1].expand_as(out))
    assert not torch.equal(out[0, :-1], out[0, 1:])
    with pytest.raises(NotShareableError):
        drawn(call, shared=True, where=lambda _: Place(0, fold=5))


def test_a_permutation_and_a_generator_of_ones_own_are_left_as_they_are():
    order = drawn(lambda: aten.randperm(9), shared=True, where=lambda _: Place(0))
    assert torch.equal(order.sort().values, torch.arange(9))
    own = torch.Generator().manual_seed(3)
    with Hidden(Drawing(Passes(0, 0, 1), N)):
        out = torch.rand(4, generator=own)
    assert torch.equal(out, torch.rand(4, generator=torch.Generator().manual_seed(3)))
