"""Laws of frozen models: they are the passes of `sample`, for good, and nothing in them is random."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bbalpha
import zoo
from bbalpha import freezing
from bbalpha._engine.inputs import Inputs
from bbalpha.freezing.recording import Work
from bbalpha.freezing.replayed import Replayed
from bbalpha.freezing.thinned import CutLinear, Pick, Thinned
from bbalpha.networks import cnn, mlp

REFUSED = {
    "hidden_random_operators": "draws by operators",
    "traced_by_jit": "draws by operators",
    "scripted_by_jit": "draws by operators",
}
QUICK = {
    "dropout_on_the_input", "dropout_2d", "fused_attention", "lstm_time_first", "multihead_attention", "rrelu",
    "drop_path", "in_place_on_the_input", "batch_norm", "spectral_norm_of_old", "several_inputs_in_a_mapping",
    "random_numbers_of_its_own", "dropped_weights", "half_precision", "bare_dropout", "alpha_dropout",
    *REFUSED,
}  # fmt: skip
CASES = [pytest.param(c, id=c.name, marks=[] if c.name in QUICK else [pytest.mark.slow]) for c in zoo.CASES]
OWN = {
    "gaussian": lambda: nn.Sequential(nn.Linear(4, 8), bbalpha.GaussianDropout(0.3), nn.Linear(8, 3)),
    "concrete": lambda: nn.Sequential(nn.Linear(4, 8), bbalpha.ConcreteDropout(0.3), nn.Linear(8, 3)),
    "drop connect": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), bbalpha.DropConnectLinear(8, 3, p=0.3)),
    "gaussian weights": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), bbalpha.GaussianLinear(8, 3)),
    "fast": lambda: nn.Sequential(nn.Linear(4, 8), bbalpha.Dropout(0.3), nn.Linear(8, 3)),
    "dropped for sure": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(1.0)),
}


def called(module, x):
    with torch.no_grad():
        return Inputs.of(x).call(module)


def sampled(model, x, n_passes=5, seed=3, batch_dim=0):
    with torch.no_grad():
        return bbalpha.sample(model, x, n_passes, masks="shared", seed=seed, batch_dim=batch_dim)


def assert_same(a, b, atol=1e-5):
    pairs = list(zip(tree_leaves(a), tree_leaves(b), strict=True))
    assert any(isinstance(s, Tensor) for s, _ in pairs)
    for s, t in pairs:
        if isinstance(s, Tensor):
            assert s.dtype == t.dtype
            loose = 0.02 if s.dtype == torch.bfloat16 else 0.0  # which has three digits
            torch.testing.assert_close(s, t, rtol=max(1e-5, loose), atol=max(atol, loose))


def net(*sizes, rate=0.5):
    return mlp(sizes or (4, 20, 20, 3), dropout=rate, input_dropout=0).eval()


# ------------------------------------------------------------------------------ the passes of sample


@pytest.mark.parametrize("case", CASES)
def test_a_frozen_model_gives_the_passes_of_sample_for_any_number_of_rows(case):
    model, x = case.make()
    model.eval()
    if case.name in REFUSED:
        with pytest.raises(ValueError, match=f"^`model` must draw numbers.*{REFUSED[case.name]}"):
            bbalpha.freeze(model, 5, seed=3, x=x, batch_dim=case.batch_dim)
        return
    frozen = bbalpha.freeze(model, 5, seed=3, x=x, batch_dim=case.batch_dim)
    inputs = Inputs(dict(x) if isinstance(x, dict) else x, frozen.axes)
    for rows in (inputs.rows, 1, inputs.rows + 2):
        some = inputs.select(torch.arange(rows) % inputs.rows).x
        assert_same(called(frozen, some), sampled(model, some, batch_dim=case.batch_dim))


@pytest.mark.parametrize("name", OWN)
def test_layers_of_our_own(name):
    model, x = OWN[name]().eval(), torch.randn(5, 4)
    assert_same(called(bbalpha.freeze(model, 5, seed=3, x=x), x), sampled(model, x))


def test_pass_k_follows_from_seed_and_k_and_seeds_differ():
    model, x = net(), torch.randn(3, 4)
    outputs = called(bbalpha.freeze(model, 6, seed=1), x)
    assert_same(outputs, sampled(model, x, 6, seed=1))
    assert len(outputs.unique(dim=0)) == 6
    assert not torch.allclose(outputs, called(bbalpha.freeze(model, 6, seed=2), x))


@pytest.mark.parametrize("mode", [True, False])
def test_the_mode_of_the_model_and_of_the_frozen_one_change_nothing(mode):
    for model, x in (zoo.batch_norm(), zoo.transformer_encoder(), zoo.mlp()):
        expected = sampled(model.eval(), x)
        frozen = bbalpha.freeze(model.train(mode), 5, seed=3, x=x)
        assert_same(called(frozen, x), expected)
        assert_same(called(frozen.train(not mode), x), expected)
        assert_same(called(nn.Sequential(frozen).train(mode), x), expected)
        assert all(m.training == mode for m in model.modules())


def test_what_the_example_is_does_not_matter():
    model, x = zoo.Functional().eval(), torch.randn(5, 4)
    for example in (x[:1], torch.zeros(1, 4), torch.randn(50, 4)):
        assert_same(called(bbalpha.freeze(model, 5, seed=3, x=example), x), sampled(model, x))


def test_an_empty_batch():
    for model in (net(4, 8, 3), zoo.Functional().eval()):
        assert called(bbalpha.freeze(model, 5, seed=3, x=torch.zeros(1, 4)), torch.empty(0, 4)).shape == (5, 0, 3)


# ------------------------------------------------------------------------------ nothing random, for good


def test_nothing_is_drawn():
    for model, x in (zoo.mlp(), zoo.fused_attention()):
        before = torch.get_rng_state()
        frozen = bbalpha.freeze(model, 5, seed=3, x=x)
        outputs = called(frozen, x)
        torch.manual_seed(7)
        again = called(frozen, x)
        torch.set_rng_state(before)
        called(frozen, x)
        assert torch.equal(outputs, again)
        assert torch.equal(before, torch.get_rng_state())


class Aliased(zoo.Functional):
    """Keeps its weights in a list too, and runs on those."""

    def __init__(self):
        super().__init__()
        self.weights = [self.a.weight, {"b": self.b.weight}]

    def forward(self, x):
        hidden = nn.functional.dropout(torch.tanh(x @ self.weights[0].t()), self.p, self.training)
        return hidden @ self.weights[1]["b"].t()


@pytest.mark.parametrize("make", [net, zoo.Functional, Aliased, lambda: zoo.lstm_batch_first()[0]])
def test_later_training_changes_nothing_and_freezing_leaves_the_model_as_it_was(make):
    model = make()
    x = torch.randn(4, 6, 4) if hasattr(model, "rnn") else torch.randn(5, 4)
    state, flags = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    frozen = bbalpha.freeze(model, 5, seed=3, x=x)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*model.modules(), *frozen.modules()))
    outputs = called(frozen, x)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert torch.equal(called(frozen, x), outputs)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in frozen.parameters())


@pytest.mark.parametrize("make", [net, zoo.Functional, lambda: mlp([4, 30, 30, 3], dropout=0.9)])
def test_gradients_to_x_are_those_of_sample(make):
    model = make().double().eval()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    frozen = bbalpha.freeze(model, 4, seed=3, x=x)
    (grad,) = torch.autograd.grad(frozen(x).square().sum(), x)
    (expected,) = torch.autograd.grad(bbalpha.sample(model, x, 4, masks="shared", seed=3).square().sum(), x)
    torch.testing.assert_close(grad, expected)
    assert torch.autograd.gradcheck(frozen, x)


@pytest.mark.parametrize("make", [net, zoo.Functional, lambda: mlp([4, 30, 30, 3], dropout=0.9)])
def test_constants_move_with_the_module(make):
    model, x = make().eval(), torch.randn(3, 4)
    frozen = bbalpha.freeze(model, 4, seed=3, x=x)
    outputs = called(frozen, x)
    assert {b.dtype for b in frozen.double().buffers() if b.is_floating_point()} <= {torch.float64}
    torch.testing.assert_close(called(frozen, x.double()), outputs.double(), rtol=1e-5, atol=1e-5)
    assert {b.device.type for b in frozen.to("meta").buffers()} <= {"meta"}


@pytest.mark.parametrize("make", [net, zoo.Functional, lambda: mlp([4, 30, 30, 3], dropout=0.9)])
def test_the_state_holds_weights_and_masks(make, tmp_path):
    model, x = make().eval(), torch.randn(3, 4)
    frozen, other = (bbalpha.freeze(model, 4, seed=seed, x=x) for seed in (3, 4))
    assert not torch.allclose(called(frozen, x), called(other, x))
    torch.save(frozen.state_dict(), tmp_path / "state.pt")
    if any(isinstance(m, CutLinear) for m in frozen.modules()):  # whose widths are those of the seed
        other = bbalpha.freeze(make(), 4, seed=3, x=x)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(called(frozen, x), called(other, x))


@pytest.mark.parametrize("make", [net, zoo.Functional])
def test_saved_and_loaded_like_any_module(make, tmp_path):
    model, x = make().eval(), torch.randn(3, 4)
    frozen = bbalpha.freeze(model, 4, seed=3, x=x)
    bbalpha.save(frozen, tmp_path / "model")
    blank = bbalpha.freeze(make(), 4, seed=3, x=x)  # other weights, the same masks: cut weights have their widths
    assert torch.equal(called(bbalpha.load(tmp_path / "model", model=blank), x), called(frozen, x))
    twin = copy.deepcopy(frozen)
    with torch.no_grad():
        for t in (*twin.parameters(), *twin.buffers()):
            t.zero_()
    assert called(frozen, x).abs().sum() > 0


def test_threads_can_share_one():
    model, x = zoo.transformer_encoder()
    frozen = bbalpha.freeze(model, 5, seed=3, x=x)
    outputs, found = called(frozen, x), []
    threads = [threading.Thread(target=lambda: found.extend(called(frozen, x) for _ in range(10))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 30
    assert all(torch.equal(f, outputs) for f in found)


# ------------------------------------------------------------------------------ as one batched network


def test_the_inputs_of_a_dense_network_are_known():
    x = torch.randn(5, 4)
    for model in (net(), nn.Sequential(nn.Dropout(0.3), nn.Tanh(), nn.Linear(4, 3))):
        assert_same(called(bbalpha.freeze(model, 5, seed=3), x), sampled(model.eval(), x))
    for model in (cnn(), zoo.Functional(), nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 2))):
        with pytest.raises(ValueError, match="`x` must be given"):
            bbalpha.freeze(model, 5, seed=3)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid])
@pytest.mark.parametrize("rates", [(0.9, 0.9), (0.97, 0.5), (0.9, 0.0)])
def test_units_are_cut_out_where_that_makes_the_weights_no_more_than_twice_as_large(rates, activation):
    model = mlp([30, 40, 50, 3], dropout=rates[0], input_dropout=rates[1], activation=activation).eval()
    x = torch.randn(6, 30)
    frozen = bbalpha.freeze(model, 5, seed=3)
    cuts = [m for m in frozen.modules() if isinstance(m, CutLinear)]
    dense = sum(m.weight.numel() for m in model if isinstance(m, nn.Linear))
    assert cuts
    assert sum(p.numel() for p in frozen.parameters()) < 2.5 * dense
    assert_same(called(frozen, x), sampled(model, x))
    whole = bbalpha.freeze(mlp([30, 40, 50, 3], dropout=0.1), 5, seed=3)
    assert not any(isinstance(m, (CutLinear, Pick)) for m in whole.modules())


def test_a_pass_that_loses_every_unit_gives_the_bias():
    model, x = mlp([3, 4, 2], dropout=0.97, input_dropout=0).eval(), torch.randn(5, 3)
    outputs = called(bbalpha.freeze(model, 8, seed=0), x)
    assert_same(outputs, sampled(model, x, 8, seed=0))
    assert (outputs == model[-1].bias).all(-1).all(-1).any()


@pytest.mark.parametrize("make", [lambda: mlp([400, 300, 300, 3]), lambda: mlp([400, 300, 3]).to(torch.bfloat16)])
def test_many_rows_leave_units_out(make, monkeypatch):
    model = make().eval()
    x = torch.randn(600, 400, dtype=model[-1].weight.dtype)
    frozen = bbalpha.freeze(model, 7, seed=3)
    plain = called(frozen, x)  # 600 * 120,000 multiply-adds: by the engine's way
    assert frozen._leaves_out(x)
    assert not frozen._leaves_out(x[:3])
    assert_same(plain, sampled(model, x, 7), 1e-4)
    monkeypatch.setattr(Thinned, "_leaves_out", lambda self, x: False)
    loose = 0.05 if x.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(called(frozen, x), plain, rtol=loose, atol=loose)


def test_a_layer_that_stands_twice_is_copied_once():
    twice = nn.Linear(4, 4)
    model = nn.Sequential(twice, nn.Dropout(0.5), twice, nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    frozen = bbalpha.freeze(model, 5, seed=3)
    assert len(list(frozen.parameters())) == 4
    assert_same(called(frozen, x), sampled(model, x))


# ------------------------------------------------------------------------------ what is computed once


class Trunk(nn.Module):
    """Much before the first draw, little after it."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.trunk(x)
        return self.head(nn.functional.dropout(hidden, 0.5, self.training)) + hidden[:, :3]


def test_what_comes_before_the_first_draw_is_computed_once():
    model, x = Trunk().eval(), torch.randn(4, 300)
    frozen = bbalpha.freeze(model, 5, seed=3, x=x)
    assert (frozen.eager, frozen.traced, frozen.shares) == ("vmap", "loop", True)
    for way in ("vmap", "loop"):
        frozen.eager = way
        with Work() as work:
            outputs = called(frozen, x)
        assert work.total == 4 * (300 * 300 + 300 * 8) + 5 * 4 * 8 * 3
        assert_same(outputs, sampled(model, x))


class InPlace(zoo.Functional):
    """Changes what it has computed before the first draw, without using what the call returns."""

    def forward(self, x):
        hidden = self.a(x)
        hidden.tanh_()
        hidden = nn.functional.dropout(hidden, self.p, self.training)
        return self.b(hidden)


def test_nothing_is_shared_where_that_would_be_wrong():
    model, x = InPlace().eval(), torch.randn(4, 4)
    frozen = bbalpha.freeze(model, 5, seed=3, x=x)
    frozen.eager = "loop"
    assert_same(called(frozen, x), sampled(model, x))


# ------------------------------------------------------------------------------ what is refused


def test_wrong_arguments_get_one_sentence():
    model, x = net(), torch.randn(3, 4)
    with pytest.raises(
        ValueError, match=r'`masks` must be "shared" for a frozen model: masks of every row.*per_example'
    ):
        bbalpha.freeze(model, 5, seed=0, masks="per_example")
    with pytest.raises(ValueError, match='`masks` must be "per_example" or "shared"'):
        bbalpha.freeze(model, 5, seed=0, masks="none")
    with pytest.raises(TypeError, match=r"`seed` must be an int.*got None"):
        bbalpha.freeze(model, 5, seed=None)
    with pytest.raises(ValueError, match="`n_passes` must be a whole number"):
        bbalpha.freeze(model, 0, seed=0)
    with pytest.raises(TypeError, match="`model` must be a"):
        bbalpha.freeze(lambda x: x, 5, seed=0)
    with pytest.raises(ValueError, match="`x` must have at least one row"):
        bbalpha.freeze(model, 5, seed=0, x=x[:0])
    with pytest.raises(ValueError, match="add_dropout"):
        bbalpha.freeze(nn.Sequential(nn.Linear(4, 3)), 5, seed=0)


class Sentence(nn.Module):
    """Draws of its own for the length it is given."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 8), nn.Linear(8, 3), nn.Dropout(0.3)

    def forward(self, x):  # (N, T, 4)
        return self.b(self.drop(self.a(x)))


def test_another_length_than_the_frozen_one_is_refused_where_masks_hang_on_it():
    frozen = bbalpha.freeze(Sentence(), 5, seed=0, x=torch.randn(2, 6, 4))
    with pytest.raises(ValueError, match=r"made for \(N, 7, 8\) and was frozen for \(N, 6, 8\)"):
        frozen(torch.randn(2, 7, 4))
    short = bbalpha.freeze(Sentence(), 5, seed=0, x=torch.randn(2, 1, 4))
    with pytest.raises(ValueError, match="Freeze the model again"):
        short(torch.randn(2, 6, 4))  # not stretched
    model = nn.Sequential(nn.Conv1d(4, 8, 1), nn.BatchNorm1d(8), nn.Dropout1d(0.5)).eval()
    channels = bbalpha.freeze(model, 5, seed=3, x=torch.randn(2, 4, 6))
    x = torch.randn(3, 4, 9)
    assert isinstance(channels, Replayed)
    assert_same(called(channels, x), sampled(model, x))  # whole channels have no length


class Choosing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.a, self.draw = nn.Linear(4, 8), draw

    def forward(self, x):
        hidden = self.a(x).sigmoid()
        return self.draw(hidden) if self.training else hidden


def test_draws_that_hang_on_the_rows_are_refused():
    import random

    draws = {
        "poisson draws by the numbers": lambda h: h * torch.poisson(10 * h),
        "randperm draws for all rows": lambda h: h[:, torch.randperm(8)],
        "generators of Python": lambda h: h * (1 + (random.random() < 0.5)),
    }
    for reason, draw in draws.items():
        with pytest.raises(ValueError, match=rf"^`model` must draw numbers that can be kept.*{reason}"):
            bbalpha.freeze(Choosing(draw), 5, seed=0, x=torch.randn(3, 4))


class Counting(zoo.Functional):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.steps += 1
        return super().forward(x) + self.steps


def test_a_model_that_changes_with_every_pass_is_refused():
    with pytest.raises(ValueError, match="a pass changes its buffers"):
        bbalpha.freeze(Counting(), 5, seed=0, x=torch.randn(3, 4))


class ByLength(nn.Module):
    """One more dropout for large inputs."""

    def __init__(self):
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x):
        x = self.drop(self.layer(x))
        return self.drop(x) if x.abs().max() > 100 else x


def test_rows_that_lead_to_other_random_calls_are_refused():
    x = torch.randn(3, 4)
    frozen = bbalpha.freeze(ByLength(), 5, seed=0, x=x)
    with pytest.raises(ValueError, match="`x` leads to more random calls"):
        frozen(1e6 * x)
    with pytest.raises(ValueError, match="`x` leads to fewer random calls"):
        bbalpha.freeze(ByLength(), 5, seed=0, x=1e6 * x)(x)


def test_arguments_in_another_structure_are_refused():
    model, x = zoo.several_inputs_in_a_mapping()
    frozen = bbalpha.freeze(model, 5, seed=0, x=x)
    with pytest.raises(ValueError, match="`x` must have the arguments left, right, scale"):
        frozen(left=x["left"])
    assert_same(called(frozen, x), called(frozen, tuple(x.values())))


def test_summaries_are_those_of_predict():
    model, x = net(4, 30, 3), torch.randn(6, 4)
    frozen = bbalpha.freeze(model, 20, seed=3)
    probs, entropy, information = called(nn.Sequential(frozen, freezing.ClassificationSummary(temperature=2.0)), x)
    p = bbalpha.predict_classification(model, x, n_passes=20, masks="shared", seed=3, temperature=2.0)
    assert_same((probs, entropy, information), (p.probs, p.entropy, p.mutual_information), 1e-6)
    for precision in (None, 4.0):
        mean, std, spread = called(nn.Sequential(frozen, freezing.RegressionSummary(precision=precision)), x)
        r = bbalpha.predict_regression(model, x, n_passes=20, masks="shared", seed=3, precision=precision)
        assert_same((mean, std, spread), (r.mean, r.std, r.epistemic_std), 1e-6)
