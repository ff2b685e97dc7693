"""What runs in the place of a model: its own flags and buffers, the same weights, and no way back to the original."""

import functools
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bbalpha
import zoo
from bbalpha._engine.shadows import NoShadowError, Shadow, shadowed


class Links(nn.Module):
    """A model that reaches its dropout in one of many ways other than as a child."""

    def __init__(self, way):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        drop = self.drop
        self.way = {
            "list": [drop],
            "tuple in a dict": {"x": (drop,)},
            "closure": lambda h: drop(h),
            "closure over the model": lambda h: self.drop(h),
            "bound method": drop.forward,
            "partial": functools.partial(F.dropout, p=0.5) if way == "none" else functools.partial(_call, drop),
            "weak reference": weakref.ref(drop),
            "object": type("Holder", (), {"__init__": lambda o: setattr(o, "inner", [drop])})(),
        }[way]
        self.kind = way

    def forward(self, x):
        h = torch.tanh(self.a(x))
        way = self.way
        if self.kind == "list":
            way = way[0]
        elif self.kind == "tuple in a dict":
            way = way["x"][0]
        elif self.kind == "weak reference":
            way = way()
        elif self.kind == "object":
            way = way.inner[0]
        return self.b(way(h))


def _call(module, h):
    return module(h)


WAYS = ("list", "tuple in a dict", "closure", "closure over the model", "bound method", "partial", "weak reference",
        "object")  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_lead_to_the_copies(way):
    model, x = Links(way).eval(), torch.randn(5, 4)
    outputs = bbalpha.sample(model, x, 8, seed=0)
    assert not torch.equal(outputs[0], outputs[1])
    assert not any(m.training for m in model.modules())
    by_hand = Links("list")
    by_hand.load_state_dict(model.state_dict())
    torch.testing.assert_close(outputs, bbalpha.sample(by_hand.eval(), x, 8, seed=0))


def test_flags_buffers_hooks_and_attributes_are_the_shadows_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    with shadowed(model, evaluation=True) as live:
        assert not any(m.training for m in live.modules())
        live[0].extra = 1
        live[1].running_mean = torch.ones(4)
        live.train()
        assert live[0].weight is model[0].weight
    assert all(m.training for m in model.modules())
    assert torch.equal(Shadow.of(model, evaluation=False).model[1].running_mean, model[1].running_mean)
    assert not hasattr(model[0], "extra")  # torch's own layers keep nothing


def test_what_a_model_writes_down_is_handed_back():
    class Experts(zoo.Functional):
        def forward(self, x):
            out = super().forward(x)
            self.aux_loss = out.square().mean()
            self.seen = self.__dict__.get("seen", 0) + len(x)
            self.used, self.history = [self.a], [*self.__dict__.get("history", []), "call"]
            return out

    model, x = Experts().eval(), torch.randn(5, 4)
    bbalpha.sample(model, x, 3, strategy="loop")
    model.aux_loss.backward()
    assert model.a.weight.grad.abs().sum() > 0
    assert model.seen == 15
    assert model.history == ["call"] * 3
    assert not hasattr(model, "used")  # layers of the shadow are nothing for the model


@pytest.mark.parametrize("evaluation", [False, True])
def test_buffers_that_are_assigned_anew_are_handed_back_in_training_mode_alone(evaluation):
    model = nn.BatchNorm1d(3).train()
    with shadowed(model, evaluation=evaluation) as live:
        live.running_mean = torch.ones(3)
    assert bool(model.running_mean.any()) != evaluation


def test_a_trial_hands_back_nothing_and_wakes_weights_of_0():
    class Counts(zoo.Functional):
        def forward(self, x):
            self.calls = self.__dict__.get("calls", 0) + 1
            return super().forward(x)

    model = Counts()
    nn.init.zeros_(model.b.weight)
    with shadowed(model, evaluation=True, use="trial") as live:
        live(torch.ones(2, 4))
        assert live.b.weight.any()
    assert not model.b.weight.any()
    assert not hasattr(model, "calls")


def test_a_gate_of_0_does_not_hide_that_rows_look_at_each_other():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop, self.gate = nn.Linear(4, 3), nn.Dropout(0.5), nn.Parameter(torch.zeros(3))

        def forward(self, x):
            h = self.drop(self.a(x))
            return h + self.gate * h.mean(0)

    model, x = Gated().eval(), torch.randn(6, 4)
    bbalpha.predict_regression(model, x, n_passes=3, seed=0, masks="shared")
    nn.init.ones_(model.gate)  # learnt in the meantime
    whole = bbalpha.predict_regression(model, x, n_passes=3, seed=0, masks="shared").outputs
    cut = bbalpha.predict_regression(model, x, n_passes=3, seed=0, masks="shared", batch_size=2).outputs
    torch.testing.assert_close(cut, whole)
    torch.testing.assert_close(whole, bbalpha.sample(model, x, 3, seed=0, masks="shared", strategy="loop"))


def test_models_without_a_shadow_are_run_by_one_thread_at_a_time():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(NoShadowError):
        Shadow.of(model, evaluation=False)
    order = []

    def other():
        with shadowed(model, evaluation=False):
            order.append("other")

    thread = threading.Thread(target=other)
    with shadowed(model, evaluation=True) as live:
        assert live is model
        assert not model.training
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]
    assert model.training
