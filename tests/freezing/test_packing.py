"""Weights that are laid out once: the same products, whatever becomes of the weights and whoever looks on."""

import copy
import pickle
import threading

import pytest
import torch
import torch.autograd.forward_ad as forward
import torch.nn.functional as F
from torch import nn

import bbalpha
from bbalpha.freezing import packing
from bbalpha.freezing.packing import Packs
from bbalpha.freezing.replaying import Replaying
from bbalpha.networks import mlp

LAYOUT = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no layout here")


def weight(outputs=300, inputs=400):
    return nn.Parameter(torch.randn(outputs, inputs) / 20, requires_grad=False)


def assert_linear(packs, x, w, bias=None):
    with torch.no_grad():
        torch.testing.assert_close(packs.linear(x, w, bias), F.linear(x, w, bias), rtol=1e-5, atol=1e-5)


@LAYOUT
@pytest.mark.parametrize("x", [torch.randn(20, 400), torch.randn(3, 9, 400).transpose(0, 1), torch.randn(99, 400)])
def test_products_are_those_of_linear_and_the_layout_is_kept(x, monkeypatch):
    packs, w, made = Packs(), weight(), []
    monkeypatch.setattr(packing, "pack", lambda *a, real=packing.pack: made.append(1) or real(*a))
    for bias in (None, torch.randn(300), None):
        assert_linear(packs, x, w, bias)
    assert made == [1]


@LAYOUT
@pytest.mark.parametrize(
    ("x", "w"),
    [
        (torch.randn(3, 2000), weight(200, 2000)),  # rows so few
        (torch.randn(20, 40), weight(30, 40)),  # or a weight so small that it does not pay
        (torch.randn(20, 400), weight().data),  # a weight that was computed, gone at the next call
        (torch.randn(20, 400).double(), nn.Parameter(weight().double())),
        (torch.randn(0, 400), weight()),
    ],
)
def test_what_does_not_pay_or_has_no_layout_is_left_alone(x, w):
    packs = Packs()
    assert_linear(packs, x, w)
    assert not packs._known


def test_without_the_layout_products_are_plain(monkeypatch):
    packs, w = Packs(), weight()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert_linear(packs, torch.randn(20, 400), w)
    assert packs._known[w][1] is None


def test_a_weight_that_has_changed_is_laid_out_anew():
    packs, w, x = Packs(), weight(), torch.randn(20, 400)
    assert_linear(packs, x, w)
    with torch.no_grad():
        w.mul_(2)
    assert_linear(packs, x, w)
    w.data = torch.randn(300, 400) / 20
    assert_linear(packs, x, w)


def test_what_is_gone_is_not_kept():
    packs, w = Packs(), weight()
    assert_linear(packs, torch.randn(20, 400), w)
    assert len(packs._known) == torch.backends.mkldnn.is_available()
    del w
    assert not len(packs._known)


def test_whoever_looks_on_meets_the_plain_product():
    packs, w, x = Packs(), weight(), torch.randn(20, 400)
    assert_linear(packs, x, w)
    watched = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(packs.linear(watched, w).sum(), watched)
    torch.testing.assert_close(grad, w.sum(0).expand_as(x))
    with forward.dual_level(), torch.no_grad():
        tangent = forward.unpack_dual(packs.linear(forward.make_dual(x, torch.ones_like(x)), w)).tangent
    torch.testing.assert_close(tangent, F.linear(torch.ones_like(x), w))
    torch.testing.assert_close(torch.func.vmap(lambda row: packs.linear(row, w))(x.unsqueeze(1))[:, 0], F.linear(x, w))
    with torch.autocast("cpu", torch.bfloat16):
        assert packs.linear(x, w).dtype == torch.bfloat16
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda t: packs.linear(t, w))(x)
    assert not any("mkldnn" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize(
    "model", [mlp([400, 300, 300, 3]), nn.Sequential(mlp([400, 300, 300, 3]), nn.Flatten(0), nn.Unflatten(0, (-1, 3)))]
)
def test_frozen_models_use_it_and_give_the_passes_of_sample(model):
    model, x = model.eval(), torch.randn(1, 400)
    frozen = bbalpha.freeze(model, 20, seed=3, x=x)
    live = bbalpha.sample(model, x, 20, masks="shared", seed=3)
    with torch.no_grad():
        torch.testing.assert_close(frozen(x), live, rtol=0, atol=1e-5)
        assert len(frozen._packs._known) == 2
        for twin in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
            assert not twin._packs._known
            torch.testing.assert_close(twin(x), live, rtol=0, atol=1e-5)
        assert torch.equal(frozen.double()(x.double()).float().isfinite(), torch.ones(20, 1, 3) > 0)
        torch.testing.assert_close(frozen.float()(x), live, rtol=0, atol=1e-5)
        for w in frozen.parameters():
            w.zero_()
        assert not frozen(x).any()


def test_sizes_that_are_traced_are_not_asked():
    model, x = mlp([400, 300, 300, 3], input_dropout=0.0).eval(), torch.randn(5, 400)
    frozen = bbalpha.freeze(model, 20, seed=3)
    program = torch.export.export(frozen, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    for some in (x[:1], torch.cat([x, x])):
        with torch.no_grad():
            torch.testing.assert_close(program(some), frozen(some), rtol=1e-5, atol=1e-5)


def test_threads_may_meet_a_weight_together():
    packs, w, x = Packs(), weight(), torch.randn(20, 400)
    out, go = [], threading.Barrier(4)

    def work():
        go.wait()
        with torch.no_grad():
            out.extend(packs.linear(x, w) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(out) == 80
    assert all(torch.equal(o, out[0]) for o in out)


# ------------------------------------------------------------------------------ what all passes share


def recurred(x, states, *, batch_first=True, fired=0):
    """What a layer gives for 4 stacked passes, and with how many rows it was run."""
    mode, rows = Replaying([], [], 4, strategy="repeat"), []
    mode.fired = fired
    weights = list(LAYER.parameters())

    def kernel(x, *rest):
        rows.append(x.shape[0 if batch_first else 1])
        return torch.lstm(x, *rest)

    args = (x, states, weights, True, 1, 0.0, False, False, batch_first)
    with torch.no_grad():
        out, expected = mode.recur(kernel, *args), torch.lstm(*args)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)
    return rows[0]


LAYER = nn.LSTM(3, 5, batch_first=True)


def test_a_recurrent_layer_before_the_first_draw_is_run_for_one_pass_where_all_give_it_the_same():
    x, states = torch.randn(2, 6, 3).repeat(4, 1, 1), [torch.zeros(1, 8, 5), torch.randn(1, 2, 5).repeat(1, 4, 1)]
    assert recurred(x, states) == 2
    assert recurred(x.transpose(0, 1), states, batch_first=False) == 2
    assert recurred(x, states, fired=1) == 8
    assert recurred(x, [states[0], torch.randn(1, 8, 5)]) == 8
    assert recurred(torch.randn(8, 6, 3), states) == 8
    assert recurred(x.repeat_interleave(2, 0)[:8], states) == 8
    assert recurred(x[:7], [s[:, :7] for s in states]) == 7


@pytest.mark.parametrize("x", [torch.randn(2, 3).repeat(4, 1), torch.randn(5, 2, 3).repeat(1, 4, 1), torch.randn(8, 3)])
def test_so_is_a_product(x):
    mode, w = Replaying([], [], 4, strategy="repeat"), torch.randn(2, 3)
    seen = []
    mode.packs.linear = lambda x, *rest: seen.append(x.numel()) or F.linear(x, *rest)
    with mode:
        out = F.linear(x, w)
    torch.testing.assert_close(out, x @ w.t())
    assert seen == [x.numel() if x.ndim == 2 and x[:2].ne(x[2:4]).any() else x.numel() // 4]
