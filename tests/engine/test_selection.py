"""`sites=`: those that are live draw as they would alone, the others are off, and what lies before them is shared."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bbalpha
import zoo
from bbalpha import layers
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import find_plan
from bbalpha._torch import tree_leaves
from bbalpha.priors import prior_kl

STRATEGIES = ("auto", "vmap", "repeat", "loop")


class Functional(nn.Module):
    """Dropout as a function in two blocks, and in the model itself."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.p = nn.Linear(6, 6), 0.5

        def forward(self, x):
            return F.dropout(self.linear(x).relu(), self.p, self.training)

    def __init__(self):
        super().__init__()
        self.p, self.first, self.second, self.head = 0.2, self.Block(), self.Block(), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.second(self.first(F.dropout(x, self.p, self.training))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.LSTM(4, 6, 3, dropout=0.5), nn.Dropout(0.4), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(self.body(x.transpose(0, 1))[0][-1]))


class Reused(nn.Module):
    """One dropout at two places."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), nn.Dropout(0.5)

    def forward(self, x):
        return self.c(self.drop(self.b(self.drop(self.a(x)))))


def dense():
    return nn.Sequential(
        nn.Dropout(0.2), nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.4),
        nn.Linear(8, 3),
    )  # fmt: skip


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Dropout2d(0.5), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 3)
    )


# a model, its input, what is live by name, and a switch for a twin in whose other places nothing drops
CASES = {
    "dense": (dense, (5, 6), ["6"], lambda m: [m[0], m[3]]),
    "dense, in the middle": (dense, (5, 6), "3", lambda m: [m[0], m[6]]),
    "convolutional": (convolutional, (5, 1, 6, 6), "4", lambda m: [m[1]]),
    "functional": (Functional, (5, 6), "second", lambda m: [m, m.first]),
    "encoder": (
        Encoder, (5, 4, 8), "encoder.layers.1",
        lambda m: [d for d in m.encoder.layers[0].modules() if isinstance(d, (nn.Dropout, nn.MultiheadAttention))],
    ),
    "recurrent": (Recurrent, (5, 4, 4), "body", lambda m: [m.drop]),
    "behind a recurrent layer": (Recurrent, (5, 4, 4), "drop", lambda m: [m.body]),
}  # fmt: skip


def silenced(model, places):
    """A copy whose other places have rate 0."""
    twin = copy.deepcopy(model)
    for m in places(twin):
        setattr(m, "p" if hasattr(m, "p") else "dropout", 0.0)
    return twin


@pytest.mark.parametrize("masks", ["per_example", "shared"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_live_sites_draw_as_in_a_model_without_the_others(name, training, masks):
    make, shape, sites, places = CASES[name]
    model, x = make().train(training), torch.randn(shape)
    expected = bbalpha.sample(silenced(model, places), x, 4, seed=3, masks=masks, strategy="loop")
    for strategy in STRATEGIES:
        if strategy == "vmap" and isinstance(model, Recurrent):
            continue  # torch's recurrent layers know no vmap
        found = bbalpha.sample(model, x, 4, seed=3, masks=masks, strategy=strategy, sites=sites)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_a_model_without_the_others(name):
    make, shape, sites, places = CASES[name]
    model, x = make(), torch.randn(shape)
    twin = silenced(model, places)
    bbalpha.sample(twin, x, 4, seed=3, strategy="loop").square().mean().backward()
    for options in ({}, {"chunk_size": 3}, {"strategy": "loop"}):
        model.zero_grad()
        bbalpha.sample(model, x, 4, seed=3, sites=sites, **options).square().mean().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_not_touched_and_all_sites_are_live_again_without_the_option(name):
    make, shape, sites, _ = CASES[name]
    model, x = make(), torch.randn(shape)
    modes = [m.training for m in model.modules()]
    before = bbalpha.sample(model, x, 4, seed=3)
    some = bbalpha.sample(model, x, 4, seed=3, sites=sites)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(bbalpha.sample(model, x, 4, seed=3), before)
    assert not torch.equal(some, before)


@pytest.mark.parametrize("name", CASES)
def test_predictions_have_the_same_live_sites(name):
    make, shape, sites, places = CASES[name]
    model, x = make(), torch.randn(shape)
    options = {"n_passes": 6, "seed": 2}
    found = bbalpha.predict_regression(model, x, sites=sites, **options).outputs
    torch.testing.assert_close(found, bbalpha.predict_regression(silenced(model, places), x, **options).outputs)
    probs = bbalpha.predict_classification(model, x, sites=sites, **options).probs
    torch.testing.assert_close(probs, found.softmax(-1).mean(0))


REFUSED = {  # one module at several places, or a script that is one module to everybody
    "one_dropout_under_two_names", "random_numbers_of_its_own", "scripted_by_jit", "t5", "bart_with_layer_drop",
}  # fmt: skip


@pytest.mark.parametrize("case", zoo.CASES, ids=lambda c: c.name)
def test_half_of_the_sites_of_any_model_are_live_by_the_cheapest_strategy_as_by_the_loop(case):
    model, x = case.make()
    options = {"batch_dim": case.batch_dim, "seed": 1, "sites": 0.5}
    if case.name in REFUSED:
        with pytest.raises(ValueError, match=r"^`sites"):
            bbalpha.sample(model.eval(), x, 3, **options)
        return
    found, expected = (bbalpha.sample(model.eval(), x, 3, strategy=s, **options) for s in ("auto", "loop"))
    loose = {"rtol": 5e-2, "atol": 5e-2} if case.name == "half_precision" else {"rtol": 1e-3, "atol": 1e-4}
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, **loose)


# ------------------------------------------------------------------------------ what lies before is computed once


class Counted(nn.Linear):
    rows = 0

    def forward(self, x):
        Counted.rows += x.numel() // x.shape[-1]  # under vmap those of one pass, of all where they are stacked
        return super().forward(x)


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.early, self.body, self.drop, self.head = nn.Dropout(0.5), Counted(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(self.body(self.early(x)).relu()))


@pytest.mark.parametrize("grad", [True, False])
def test_what_lies_before_the_first_live_site_is_computed_once(grad):
    model, x = Tail(), torch.randn(5, 6)
    with torch.set_grad_enabled(grad):
        bbalpha.sample(model, x, 7, sites="drop")
        Counted.rows = 0
        bbalpha.sample(model, x, 7, sites="drop")
        assert Counted.rows == 5
        assert find_plan(model, Inputs.of(x), "auto", False, False, "drop").strategy == "vmap"


def test_a_chain_begins_with_its_first_live_dropout():
    model, x = dense(), torch.randn(5, 6)
    plan = find_plan(model, Inputs.of(x), "auto", False, False, "last")
    assert plan.strategy == "chain"
    assert [type(layer) for layer in plan.layers[:5]] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Dropout]


def test_many_rows_are_predicted_with_all_passes_at_once_so_that_they_share_the_work(monkeypatch):
    monkeypatch.setattr("bbalpha._engine.batches._BUDGET", 2**9)
    model, x = Tail(), torch.randn(200, 6)
    bbalpha.predict_regression(model, x, n_passes=7, sites="drop")
    Counted.rows = 0
    bbalpha.predict_regression(model, x, n_passes=7, sites="drop")
    assert Counted.rows == 200


# ------------------------------------------------------------------------------ what the words mean


def live(model, x, sites):
    """The modules that draw, as the plan has it."""
    off = find_plan(model, Inputs.of(x), "auto", False, False, sites).off
    seen = dict.fromkeys(site.name for site in bbalpha.audit(model, x).sites if site.fired)
    return [name for name in seen if name not in off]


@pytest.mark.parametrize(
    ("make", "shape", "sites", "expected"),
    [
        (dense, (5, 6), "last", ["6"]),
        (dense, (5, 6), 0.1, ["6"]),
        (dense, (5, 6), 2 / 3, ["3", "6"]),
        (dense, (5, 6), 0.99, ["3", "6"]),
        (dense, (5, 6), 1, ["0", "3", "6"]),
        (dense, (5, 6), np.float32(0.5), ["6"]),
        (dense, (5, 6), ("0", "6"), ["0", "6"]),
        (dense, (5, 6), "", ["0", "3", "6"]),
        (dense, (5, 6), lambda _, m: getattr(m, "p", 0) > 0.3, ["3", "6"]),
        (Functional, (5, 6), "last", ["second"]),
        (Functional, (5, 6), 0.7, ["first", "second"]),
        (Functional, (5, 6), lambda name, _: name == "", [""]),
        (Encoder, (5, 4, 8), "last", ["encoder.layers.1.dropout2"]),
        (
            Encoder, (5, 4, 8), 0.5,
            [f"encoder.layers.1.{name}" for name in ("self_attn", "dropout1", "dropout", "dropout2")],
        ),
        (Recurrent, (5, 4, 4), "last", ["drop"]),
        (Recurrent, (5, 4, 4), lambda _, m: isinstance(m, nn.LSTM), ["body"]),
    ],
)  # fmt: skip
def test_what_is_live(make, shape, sites, expected):
    assert live(make(), torch.randn(shape), sites) == expected


def test_a_module_called_last_is_named_in_a_list():
    model = nn.Sequential()
    model.add_module("last", nn.Dropout(0.5))
    model.add_module("linear", nn.Linear(6, 6))
    model.add_module("then", nn.Dropout(0.5))
    x = torch.randn(5, 6)
    assert live(model, x, "last") == ["then"]
    assert live(model, x, ["last"]) == ["last"]


def test_a_site_that_is_not_live_and_drops_everything_is_off_too():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(1.0), nn.Linear(6, 6), nn.Dropout(0.5))
    for strategy in STRATEGIES:
        outputs = bbalpha.sample(model, torch.randn(5, 6), 50, sites="3", strategy=strategy, seed=0)
        assert bool((outputs[:, 0] != outputs[:, 1]).any())


def test_layers_of_our_own_are_off_by_name():
    model = nn.Sequential(
        layers.GaussianLinear(6, 6), nn.Tanh(), layers.DropConnectLinear(6, 6, p=0.5), nn.Tanh(),
        layers.ConcreteDropout(), nn.Linear(6, 6), layers.GaussianDropout(0.3), nn.Linear(6, 3),
    )  # fmt: skip
    x = torch.randn(5, 6)
    before = copy.deepcopy(model).eval()[:6](x)
    expected = bbalpha.sample(nn.Sequential(*model[6:]), before, 4, seed=1)
    torch.testing.assert_close(bbalpha.sample(model, x, 4, seed=1, sites="last"), expected)


def test_compiled_parts_are_named_as_the_model_names_them():
    model = Functional()
    expected = bbalpha.sample(model, torch.ones(5, 6), 4, seed=1, sites="second")
    model.second = torch.compile(model.second, backend="eager")
    assert torch.equal(bbalpha.sample(model, torch.ones(5, 6), 4, seed=1, sites="second"), expected)
    assert torch.equal(bbalpha.sample(model, torch.ones(5, 6), 4, seed=1, sites="last"), expected)


def test_batch_statistics_follow_the_callers_mode():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    x = torch.randn(9, 6)
    bbalpha.sample(model.eval(), x, 3, sites="last")
    assert int(model[2].num_batches_tracked) == 0
    bbalpha.sample(model.train(), x, 3, sites="last")
    assert int(model[2].num_batches_tracked) == 1
    torch.testing.assert_close(model[2].running_mean, 0.1 * model[0](x).mean(0))


def test_a_function_is_asked_at_every_call():
    model, x, chosen = dense(), torch.randn(5, 6), ["6"]
    for name in ("6", "3"):
        chosen[0] = name
        found = bbalpha.sample(model, x, 4, seed=1, sites=lambda n, _: n == chosen[0])
        assert torch.equal(found, bbalpha.sample(model, x, 4, seed=1, sites=name))


def test_what_is_live_follows_the_model():
    model, x = dense(), torch.randn(5, 6)
    bbalpha.sample(model, x, 4, sites="last")
    model[6].p = 0.0
    assert live(model, x, "last") == ["3"]
    expected = bbalpha.sample(silenced(model, lambda m: [m[0]]), x, 4, seed=1, strategy="loop")
    torch.testing.assert_close(bbalpha.sample(model, x, 4, seed=1, sites="last"), expected)


def test_a_network_without_passes_has_no_use_for_sites():
    model, x = dense(), torch.randn(5, 6)
    expected = bbalpha.sample(model, x, None)
    asked = []
    assert torch.equal(bbalpha.sample(model, x, None, sites=lambda *_: asked.append(1)), expected)
    p = bbalpha.predict_regression(model, x, n_passes=None, sites=lambda *_: asked.append(1))
    assert not asked
    torch.testing.assert_close(p.outputs, expected.detach())


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("sites", "error", "words"),
    [
        ("7.inner", ValueError, r"as in model.named_modules\(\); got '7.inner'. Random sites are in '0', '3', '6'"),
        (["6", "1"], ValueError, "with a random site in them; '1' has none that is on"),
        ((), ValueError, r"name at least one module; got \(\)"),
        (lambda *_: False, ValueError, "said no to every module"),
        (lambda _, m: isinstance(m, nn.Linear), ValueError, "said no to all of them: '0', '3', '6'"),
        (0.0, ValueError, "above 0 and at most 1; got 0.0"),
        (1.5, ValueError, "above 0 and at most 1; got 1.5"),
        (float("nan"), ValueError, "above 0 and at most 1; got nan"),
        (True, TypeError, "`sites` must be a name or a sequence of names.*; got True"),
        ([1, "6"], TypeError, "`sites` must be a name or a sequence of names.*got"),
    ],
)
def test_what_asks_for_nothing_is_refused(sites, error, words):
    model, x = dense(), torch.randn(5, 6)
    for call in (bbalpha.sample, bbalpha.predict_regression):
        with pytest.raises(error, match=words):
            call(model, x, n_passes=3, sites=sites)


class Heads(nn.Module):
    """A head with dropout, behind a body that is given."""

    def __init__(self, body):
        super().__init__()
        self.body, self.drop, self.head = body, nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(self.body(x)))


class AlwaysOn(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5)


class Python(nn.Module):
    def forward(self, x):
        return x * random.random()


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x):
        return x * self.rng.random()


class OwnTorchGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = torch.Generator()

    def forward(self, x):
        return x * torch.rand(x.shape, generator=self.rng)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (AlwaysOn, "only what can be switched off; 'body' draws in evaluation mode too"),
        (OwnTorchGenerator, "only what can be switched off; 'body' draws in evaluation mode too"),
        (Python, "draws that belong to a module"),
        (OwnGenerator, "by a generator of its own"),
    ],
)
def test_what_cannot_be_switched_off_is_refused(body, words):
    for sites in ("drop", "last", 0.5):
        with pytest.raises(ValueError, match=words):
            bbalpha.sample(Heads(body()), torch.randn(5, 6), 3, sites=sites)


def test_what_draws_without_being_asked_may_be_live():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), AlwaysOn())
    expected = bbalpha.sample(AlwaysOn(), model[1](torch.ones(5, 6)), 4, seed=0)
    torch.testing.assert_close(bbalpha.sample(model, torch.ones(5, 6), 4, seed=0, sites="last"), expected)


class Passing(nn.Module):
    """Hands its own mode to a child that draws; `keeps` draws itself too."""

    class Inner(nn.Module):
        def forward(self, x, training):
            return F.dropout(x, 0.5, training)

    def __init__(self, keeps):
        super().__init__()
        self.keeps, self.inner, self.then = keeps, self.Inner(), nn.Dropout(0.5)

    def forward(self, x):
        x = F.dropout(x, 0.5, self.training) if self.keeps else x
        return self.then(self.inner(x, self.training))


def test_a_child_that_draws_by_its_parents_mode_is_switched_with_it_or_refused():
    x = torch.randn(5, 6)
    expected = bbalpha.sample(nn.Dropout(0.5), x, 4, seed=0)
    assert torch.equal(bbalpha.sample(Passing(keeps=False), x, 4, seed=0, sites="then"), expected)
    with pytest.raises(ValueError, match="'inner' draws only while a module that is not live is in training mode"):
        bbalpha.sample(Passing(keeps=True), x, 4, seed=0, sites="inner")


def test_one_module_at_live_and_other_places_is_refused():
    x = torch.randn(5, 6)
    for sites in ("last", 0.5):
        with pytest.raises(ValueError, match="part modules that draw early from those that draw late; 'drop' does"):
            bbalpha.sample(Reused(), x, 3, sites=sites)
    shared = nn.Dropout(0.5)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), shared), nn.Sequential(nn.Linear(6, 6), shared))
    with pytest.raises(ValueError, match=r"'0\.1' is also '1\.1', and '0\.1' is not among them"):
        bbalpha.sample(model, x, 3, sites="1")
    assert torch.equal(bbalpha.sample(model, x, 3, seed=0, sites=["0", "1"]), bbalpha.sample(model, x, 3, seed=0))


def test_live_sites_without_effect_are_refused():
    class Ignored(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.ignored = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x):
            self.ignored(x)
            return self.drop(x)

    with pytest.raises(ValueError, match="has an effect on the output; 'ignored' has none"):
        bbalpha.sample(Ignored(), torch.ones(5, 6), 3, sites="ignored")


def test_a_model_that_returns_something_else_with_the_others_off_is_refused():
    class Auxiliary(Functional):
        def forward(self, x):
            out = super().forward(x)
            return (out, out) if self.training else out

    with pytest.raises(ValueError, match="returns another structure"):
        bbalpha.sample(Auxiliary(), torch.ones(5, 6), 3, sites="second")


# ------------------------------------------------------------------------------ training


def test_fit_trains_what_a_model_without_the_others_would_become():
    x, y = torch.randn(40, 6), torch.randint(3, (40,))
    options = {
        "objective": bbalpha.CrossEntropy(0.5), "epochs": 2, "n_passes": 3, "batch_size": 16, "seed": 0,
        "length_scale": 0.5, "validation": 0.2, "progress": False,
    }  # fmt: skip
    for name in ("dense", "functional"):
        make, _, sites, places = CASES[name]
        model = make()
        twin = silenced(model, places)
        histories = [bbalpha.fit(model, (x, y), sites=sites, **options), bbalpha.fit(twin, (x, y), **options)]
        assert histories[0].loss == pytest.approx(histories[1].loss, rel=1e-5)
        assert histories[0].nll == pytest.approx(histories[1].nll, rel=1e-5)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def test_a_prior_with_sites_is_refused_where_it_cannot_be_told():
    model = nn.Sequential(layers.GaussianLinear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    data = (torch.randn(20, 6), torch.randint(3, (20,)))
    assert prior_kl(model, length_scale=1.0, n_data=20) > 0
    with pytest.raises(ValueError, match="`length_scale` with `sites` needs"):
        bbalpha.fit(model, data, objective=bbalpha.CrossEntropy(), epochs=1, length_scale=1.0, sites="1")


def test_a_run_with_other_sites_is_another_run(tmp_path):
    data = (torch.randn(20, 6), torch.randint(3, (20,)))
    options = {"objective": bbalpha.CrossEntropy(), "epochs": 1, "seed": 0, "checkpoint": tmp_path, "progress": False}
    model = dense()
    fresh = copy.deepcopy(model)
    bbalpha.fit(model, data, sites="last", **options)
    for sites in (None, "3"):
        with pytest.raises(ValueError, match="a run with another `masks`"):
            bbalpha.fit(copy.deepcopy(fresh), data, sites=sites, **options)
