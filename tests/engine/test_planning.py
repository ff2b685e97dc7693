"""A plan belongs to a model in a state: whatever changes the computation leads to a new one."""

import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bbalpha
import zoo
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import find_plan, is_random


class Switchable(nn.Module):
    """A forward that plain attributes, containers, configs and tensors steer."""

    def __init__(self):
        super().__init__()
        self.a, self.mid, self.b, self.drop = nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 3), nn.Dropout(0.5)
        self.center, self.steps = False, ["plain"]
        self.config, self.factor = type("Config", (), {})(), torch.zeros(())
        self.config.center = False

    def forward(self, x):
        h = self.drop(torch.tanh(self.mid(self.a(x))))
        if self.center or self.config.center or "center" in self.steps or self.factor > 0:
            h = h - h.mean(0)
        return self.b(h)


CHANGES = {
    "an attribute": lambda m: setattr(m, "center", True),
    "an entry of a list": lambda m: m.steps.append("center"),
    "a config": lambda m: setattr(m.config, "center", True),
    "a tensor in place": lambda m: m.factor.fill_(1.0),
    "a new tensor": lambda m: setattr(m, "factor", torch.ones(())),
    "a forward of its own": lambda m: setattr(m, "forward", lambda x: m.b(m.drop(m.a(x) - m.a(x).mean(0)))),
    "a hook": lambda m: m.a.register_forward_hook(lambda _, __, out: out - out.mean(0)),
    "another submodule": lambda m: setattr(m, "mid", nn.BatchNorm1d(8, track_running_stats=False)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("masks", ["per_example", "shared"])
def test_a_plan_does_not_outlive_the_model_it_was_made_for(name, masks):
    model, x = Switchable().eval(), torch.randn(6, 4)
    bbalpha.sample(model, x, 3, seed=0, masks=masks)
    bbalpha.predict_regression(model, x, n_passes=3, seed=0, masks=masks)
    CHANGES[name](model)
    expected = bbalpha.sample(model, x, 3, seed=0, strategy="loop", masks=masks)
    torch.testing.assert_close(bbalpha.sample(model, x, 3, seed=0, masks=masks), expected)
    options = {"n_passes": 3, "seed": 0, "masks": masks, "batch_size": 2}
    torch.testing.assert_close(bbalpha.predict_regression(model, x, **options).outputs, expected.detach())


def test_a_new_module_at_the_address_of_an_old_one_is_a_new_module():
    wrong = 0
    for _ in range(6):  # collecting garbage takes long in a process of many tests
        model, x = Switchable().train(), torch.randn(6, 4)
        bbalpha.sample(model, x, 2, seed=0)
        del model.mid
        gc.collect()
        model.mid = nn.BatchNorm1d(8)
        expected = bbalpha.sample(model, x, 2, seed=0, strategy="loop")
        wrong += not torch.allclose(bbalpha.sample(model, x, 2, seed=0), expected, atol=1e-5)
    assert wrong == 0


def test_a_rate_set_to_1_later_is_no_silent_lack_of_spread():
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)), torch.randn(5, 4)
    bbalpha.sample(net, x, 3)
    for p in (1.0, 0.0):
        net[2].p = p
        with pytest.raises(ValueError, match="at least one active random site"):
            bbalpha.sample(net, x, 3)
    net[2].p = 0.25
    assert not torch.equal(*bbalpha.sample(net, x, 2))


def test_a_plan_is_made_once():
    model, x = Switchable().eval(), torch.randn(6, 4)
    first = find_plan(model, Inputs.of(x), "auto", False, False)
    assert find_plan(model, Inputs.of(torch.randn(9, 4)), "auto", False, False) is first
    same = torch.zeros(6, 1, dtype=torch.long)  # rows that say nothing of themselves: nothing to remember
    embedded = nn.Sequential(nn.Embedding(3, 4), nn.Dropout(0.5), nn.Flatten())
    plan = find_plan(embedded, Inputs.of(same), "auto", True, True)
    assert not plan.rows.independent
    assert find_plan(embedded, Inputs.of(torch.tensor([[0], [1], [2]])), "auto", True, True).rows.independent


# ------------------------------------------------------------------------------ inside of torch's transforms


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch asks for it itself
@pytest.mark.parametrize("build", [zoo.Functional, lambda: zoo.mlp()[0]])
def test_sample_inside_of_torch_compile_is_a_break_in_the_graph(build):
    torch.compiler.reset()
    net, x, y = build(), torch.randn(6, 4), torch.randint(3, (6,))
    loss = torch.compile(lambda x, y: bbalpha.cross_entropy(bbalpha.sample(net, x, 5, seed=0), y), backend="eager")
    expected = bbalpha.cross_entropy(bbalpha.sample(net, x, 5, seed=0), y)
    for _ in range(3):
        torch.testing.assert_close(loss(x, y), expected)
    loss(x, y).backward()
    assert all(p.grad is not None for p in net.parameters())
    fresh = torch.compile(lambda x: bbalpha.sample(net, x, 2), backend="eager")
    assert not torch.equal(fresh(x), fresh(x))


@pytest.mark.parametrize("build", [zoo.Functional, lambda: zoo.mlp()[0]])
@pytest.mark.parametrize("planned", [False, True])
def test_sample_inside_of_torch_func_transforms(build, planned):
    net, x = build().eval(), torch.randn(6, 4)
    if planned:
        bbalpha.sample(net, x[:1], 3, seed=1)

    def total(row):
        return bbalpha.sample(net, row[None], 3, seed=1).sum()

    grads = torch.func.vmap(torch.func.grad(total))(x)
    rows = [row.clone().requires_grad_() for row in x]
    expected = [torch.autograd.grad(total(row), row)[0] for row in rows]
    torch.testing.assert_close(grads, torch.stack(expected))
    state = torch.get_rng_state()
    torch.func.vmap(lambda row: bbalpha.sample(net, row[None], 3))(x)
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_checkpoint_of_the_callers_own_is_not_the_models():
    net, x = zoo.Functional().train(), torch.randn(5, 4, requires_grad=True)
    torch.manual_seed(3)
    checkpoint(lambda x: bbalpha.sample(net, x, 4).square().sum(), x, use_reentrant=False).backward()
    recomputed, x.grad = x.grad, None
    torch.manual_seed(3)
    bbalpha.sample(net, x, 4).square().sum().backward()
    torch.testing.assert_close(recomputed, x.grad)


# ------------------------------------------------------------------------------ what cannot be planned


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.rng = nn.Linear(4, 3), np.random.default_rng(0)

    def forward(self, x):
        return self.a(x) * float(self.rng.random())


def test_a_generator_of_the_models_own_is_random_and_no_seed_reaches_it():
    model, x = OwnGenerator(), torch.randn(5, 4)
    outputs = bbalpha.sample(model, x, 3)
    assert not torch.equal(outputs[0], outputs[1])
    assert bbalpha.predict_regression(model, x, n_passes=3).epistemic_std.min() > 0
    with pytest.raises(ValueError, match="a generator of its own"):
        bbalpha.sample(model, x, 3, seed=0)


def test_frozen_torchscript_and_the_meta_device_are_refused():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        frozen = torch.jit.freeze(torch.jit.script(zoo.mlp()[0].eval()))
    with pytest.raises(ValueError, match="frozen TorchScript"):
        bbalpha.sample(frozen, torch.randn(5, 4), 3)
    with pytest.raises(ValueError, match="meta device"):
        bbalpha.sample(zoo.Functional().to("meta"), torch.randn(5, 4, device="meta"), 3)


def test_arrays_and_nested_inputs_are_taken():
    x = np.random.default_rng(0).normal(size=(5, 4))
    net = zoo.Functional().eval()
    assert torch.equal(bbalpha.sample(net, x, 3, seed=0), bbalpha.sample(net, torch.as_tensor(x).float(), 3, seed=0))
    assert bbalpha.predict_classification(net, x, n_passes=3).probs.shape == (5, 3)


def test_without_a_seed_an_error_leaves_the_generator_where_it_was():
    class Fails(zoo.Functional):
        def forward(self, x):
            if F.dropout(torch.ones(1)).numel() and self.broken:
                raise KeyError("broken")
            return super().forward(x)

    model, x = Fails(), torch.randn(5, 4)
    model.broken = False
    bbalpha.sample(model, x, 3)
    model.broken = True
    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        bbalpha.sample(model, x, 3)
    assert torch.equal(torch.get_rng_state(), state)


class FunctionalDropout(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return F.dropout(x, self.rate, self.training)


@pytest.mark.parametrize("mode", [True, False])
def test_randomness_is_found_in_either_mode_and_nothing_is_changed(mode):
    x = torch.ones(5, 3)
    for net, answer in (
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), False),
        (FunctionalDropout(0.5), True),
        (FunctionalDropout(0.0), False),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), False),
    ):
        net.train(mode)
        state = {k: v.clone() for k, v in net.state_dict().items()}
        generator = torch.get_rng_state()
        assert is_random(net, Inputs.of(x)) is answer
        assert all(m.training is mode for m in net.modules())
        assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
        assert torch.equal(generator, torch.get_rng_state())


def test_randomness_is_looked_for_anew_only_when_the_model_changes(monkeypatch):
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), Inputs.of(torch.ones(5, 3))
    assert not is_random(net, x)
    with monkeypatch.context() as blind:
        blind.setattr("bbalpha._engine.planning.trace", None)
        assert not is_random(net, x)
    net[1].p = 0.5
    assert is_random(net, x)


def test_without_passes_the_model_is_looked_at_once(monkeypatch):
    net, x = Switchable().train(), torch.randn(6, 4)
    bbalpha.sample(net, x, None)
    monkeypatch.setattr("bbalpha._engine.planning.trace", None)
    monkeypatch.setattr("bbalpha._engine.tracing.trace", None)
    bbalpha.sample(net, x[:4], None)
