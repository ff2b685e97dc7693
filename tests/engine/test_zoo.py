"""Models as people write them: every promise of `sample`, on every case of the zoo."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map

import bbalpha
import zoo
from bbalpha._engine import planning
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.interception import Interception
from bbalpha._kernels import Passes

SLOW_TO_DRAW = ("bart_with_layer_drop", "t5", "bert", "gpt2", "vit", "llama", "bert_attention_dropout_only")


@pytest.fixture(params=zoo.CASES, ids=lambda c: c.name)
def case(request):
    return request.param


def tensors(outputs):
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]


def plan_of(model, strategy="auto"):
    (memory,) = planning._MEMORY[model].values()
    (plan,) = [plan for key, plan in memory.plans.items() if strategy in key]
    return plan


def assert_same(a, b, tolerance=1e-5):
    assert len(tensors(a)) == len(tensors(b)) > 0
    for s, t in zip(tensors(a), tensors(b), strict=True):
        loose = 2e-2 if s.dtype == torch.bfloat16 else tolerance
        torch.testing.assert_close(s, t, rtol=loose, atol=loose)


def sample_or_refuse(model, x, n_passes, **options):
    """The passes, or None where `sample` says that the strategy does not fit."""
    try:
        return bbalpha.sample(model, x, n_passes, **options)
    except ValueError as error:
        if "does not fit this model" not in str(error):
            raise
        return None


def naive_loop(model, x, n_passes):
    """What everybody writes: train mode, statistics frozen, one call after the other."""
    model = copy.deepcopy(model).train()
    for m in model.modules():
        name = getattr(m, "original_name", type(m).__name__)  # jit hides the type
        if isinstance(m, (_NormBase, nn.Linear)) or "SpectralNorm" in name or "BatchNorm" in name:
            m.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        passes = [tensors(_call(model, x)) for _ in range(n_passes)]
    return [torch.stack(ts) for ts in zip(*passes, strict=True)]


def _call(model, x):
    x = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, x)
    return model(x) if isinstance(x, Tensor) else model(**x) if isinstance(x, dict) else model(*x)


# ------------------------------------------------------------------------------ each case, each promise


def test_passes_differ_and_have_their_axis(case):
    model, x = case.make()
    model.eval()
    torch.compiler.reset()
    outputs = bbalpha.sample(model, x, 6, batch_dim=case.batch_dim)
    assert all(t.shape[0] == 6 for t in tensors(outputs))
    assert any(not torch.equal(t[0], t[k]) for t in tensors(outputs) for k in range(1, 6))
    assert plan_of(model).strategy == case.auto


def test_strategies_agree(case):
    model, x = case.make()
    model.eval()
    loop = bbalpha.sample(model, x, 5, seed=1, strategy="loop", batch_dim=case.batch_dim)
    assert_same(loop, bbalpha.sample(model, x, 5, seed=1, batch_dim=case.batch_dim))
    assert_same(loop, bbalpha.sample(model, x, 5, seed=1, chunk_size=2, batch_dim=case.batch_dim))
    for strategy in ("vmap", "repeat"):
        other = sample_or_refuse(model, x, 5, seed=1, strategy=strategy, batch_dim=case.batch_dim)
        if other is not None:
            assert_same(loop, other)


def test_shared_masks_are_one_function_a_pass(case):
    model, x = case.make()
    model.eval()
    outputs = bbalpha.sample(model, x, 3, seed=1, masks="shared", batch_dim=case.batch_dim)
    one = bbalpha.sample(model, _first_row(x, case), 3, seed=1, masks="shared", batch_dim=case.batch_dim)
    for a, b in zip(tensors(outputs), tensors(one), strict=True):
        axis = case.batch_dim + 1
        assert_same(a.narrow(axis, 0, 1), b, 1e-4)


def test_shared_masks_where_rows_are_not_first_inside_whatever_came_before():
    class TimeFirst(nn.Module):
        def forward(self, x):  # (N, T, D)
            return F.dropout(x.transpose(0, 1), 0.5, self.training).transpose(0, 1)

    model, x = TimeFirst().eval(), torch.ones(6, 6, 4)
    alone = bbalpha.sample(model, x[:1], 3, seed=0, masks="shared")
    outputs = bbalpha.sample(model, x, 3, seed=0, masks="shared")
    assert torch.equal(outputs, alone.expand_as(outputs))


def _first_row(x, case):
    return Inputs.of(x, case.batch_dim).narrow(0, 1).x


def test_moments_are_those_of_a_naive_loop(case):
    model, x = case.make()
    model.eval()
    n = 60 if case.name in SLOW_TO_DRAW else 300
    naive = naive_loop(model, x, n)
    ours = tensors(bbalpha.sample(model, x, 400 if n > 60 else 150, seed=0, batch_dim=case.batch_dim))
    for a, b in zip(ours, naive, strict=True):
        a, b = a.detach().double().flatten(1), b.double().flatten(1)
        error = ((a.var(0) + 1e-12) / len(a) + (b.var(0) + 1e-12) / len(b)).sqrt()
        z = (a.mean(0) - b.mean(0)).abs() / (error + 1e-3 * a.std(0) + 1e-6)
        assert z.max() < 6
        spread = a.std(0).mean() / b.std(0).mean().clamp_min(1e-9)
        assert b.std(0).mean() < 1e-9 or 0.8 < spread < 1.25


def test_flags_buffers_inputs_and_generators_are_as_they_were(case):
    model, x = case.make()
    model.eval()
    flags = [m.training for m in model.modules()]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    inputs = [t.clone() for t in tensors(x)]
    state = torch.get_rng_state()
    first = bbalpha.sample(model, x, 3, seed=7, batch_dim=case.batch_dim)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert all(torch.equal(s, t) for s, t in zip(inputs, tensors(x), strict=True))
    assert_same(first, bbalpha.sample(model, x, 3, seed=7, batch_dim=case.batch_dim), 0)
    bbalpha.sample(model, x, 3, batch_dim=case.batch_dim)
    assert not torch.equal(torch.get_rng_state(), state)


def test_gradients_are_those_of_the_loop(case):
    model, x = case.make()
    model.eval()
    if not list(model.parameters()):
        x = x.requires_grad_()
    wanted = [p for p in model.parameters() if p.requires_grad] or [x]
    grads = []
    for options in ({"strategy": "loop"}, {}, {"chunk_size": 2}):
        outputs = tensors(bbalpha.sample(model, x, 3, seed=1, batch_dim=case.batch_dim, **options))
        loss = sum(t.float().square().mean() for t in outputs if t.requires_grad)
        grads.append(torch.autograd.grad(loss, wanted, allow_unused=True))
    assert any(g is not None and g.abs().sum() > 0 for g in grads[0])
    for other in grads[1:]:
        for g, h in zip(grads[0], other, strict=True):
            assert_same(torch.zeros(()) if g is None else g, torch.zeros(()) if h is None else h, 1e-4)


def test_an_empty_batch_gives_no_rows(case):
    model, x = case.make()
    model.eval()
    empty = Inputs.of(x, case.batch_dim).narrow(0, 0).x
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), bbalpha.stochastic(model):
            plain = tensors(_call(model, empty))
    except (RuntimeError, ValueError, AssertionError) as error:
        pytest.skip(f"the model itself takes no empty batch: {error}")
    outputs = tensors(bbalpha.sample(model, empty, 3, batch_dim=case.batch_dim))
    assert [t.shape for t in outputs] == [(3, *t.shape) for t in plain]


# ------------------------------------------------------------------------------ statistics in training mode


def _one_pass(model, x, k, K, seed):
    """Pass k of K by hand, with the draws that `sample` gives it, in the mode the model is in."""
    with Interception(Passes(seed, k, 1, together=K), len(x)):
        return model(x.clone())


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_in_training_mode_moves_once_by_the_mean_over_passes(chunk_size, momentum):
    behind = nn.BatchNorm1d(8, momentum=momentum)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 8), behind, nn.Linear(8, 3)).train()
    x = torch.randn(6, 4) + 2
    alone = [copy.deepcopy(model) for _ in range(5)]
    expected = torch.stack([_one_pass(net, x, k, 5, 3) for k, net in enumerate(alone)])
    outputs = bbalpha.sample(model, x, 5, seed=3, chunk_size=chunk_size)
    outputs.sum().backward()
    assert_same(outputs, expected)
    assert plan_of(model).strategy == "loop"
    for i in (0, 3):
        assert model[i].num_batches_tracked == 1
        mean = torch.stack([net[i].running_mean for net in alone]).mean(0)
        torch.testing.assert_close(model[i].running_mean, mean)
        assert not torch.equal(mean, torch.zeros_like(mean))


def test_instance_norm_in_training_mode_moves_once():
    norm = nn.InstanceNorm1d(4, track_running_stats=True)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Dropout(0.5), norm).train()
    x = torch.randn(5, 2, 6)
    alone = [copy.deepcopy(model) for _ in range(3)]
    expected = torch.stack([_one_pass(net, x, k, len(alone), 0) for k, net in enumerate(alone)])
    assert_same(bbalpha.sample(model, x, 3, seed=0), expected)
    torch.testing.assert_close(norm.running_var, torch.stack([net[2].running_var for net in alone]).mean(0))
    assert not torch.equal(norm.running_var, torch.ones(4))


@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.parametrize("strategy", ["loop", "vmap", "repeat"])
def test_spectral_norm_moves_once_in_training_mode(wrap, strategy):
    model = nn.Sequential(wrap(nn.Linear(4, 8)), nn.Dropout(0.5), wrap(nn.Linear(8, 3))).train()
    x = torch.randn(5, 4)
    alone = copy.deepcopy(model)
    alone(x)
    bbalpha.sample(model, x, 7, strategy=strategy, chunk_size=3).sum().backward()
    for (name, buffer), other in zip(model.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=name)


@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_chunks_are_recomputed_from_the_buffers_the_forward_saw(wrap):
    model = nn.Sequential(wrap(nn.Linear(4, 8)), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    x, twin = torch.randn(5, 4), copy.deepcopy(model)
    bbalpha.sample(model, x, 6, seed=0).square().sum().backward()
    bbalpha.sample(twin, x, 6, seed=0, chunk_size=2).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


class OwnLinear(nn.Linear):
    """A layer of the user's own: sampling cannot know that it is not random, and switches it on."""


class OwnBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=self.training)


@pytest.mark.parametrize(
    "layer",
    [lambda: nn.utils.spectral_norm(OwnLinear(4, 8)), lambda: nn.utils.parametrizations.spectral_norm(OwnLinear(4, 8)),
     lambda: nn.Sequential(nn.Linear(4, 8), OwnBatchNorm())],
)  # fmt: skip
def test_layers_of_ones_own_follow_the_callers_mode(layer):
    model = nn.Sequential(layer(), nn.Dropout(0.5)).eval()
    x = torch.randn(5, 4) + 1
    expected = model(x)
    buffers = [b.clone() for b in model.buffers()]
    outputs = bbalpha.sample(model, x, 20)
    kept = outputs != 0
    assert kept.any()
    assert (~kept).any()
    torch.testing.assert_close(outputs[kept], 2 * expected.expand_as(outputs)[kept])
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))


class Probabilities(zoo.Functional):
    """Logits for the loss while training, probabilities otherwise; the dropout is a module of its own."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        logits = self.b(self.drop(self.a(x)))
        return logits if self.training else logits.softmax(-1)


class HandWrittenNorm(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if self.training else x


class Block(nn.Module):
    """Draws only if its own flag is on, inside a net whose other flags mean something else."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), HandWrittenNorm(), OnlyIfTraining(0.5))

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("strategy", ["loop", "vmap", "repeat", "auto"])
def test_flags_that_mean_something_else_stay_as_the_caller_has_them(strategy):
    x = torch.randn(5, 4) + 1
    sums = bbalpha.sample(Probabilities().eval(), x, 4, strategy=strategy).sum(-1)
    torch.testing.assert_close(sums, torch.ones(4, 5))
    model = Block().eval()
    outputs, expected = bbalpha.sample(model, x, 20, strategy=strategy), model(x)
    kept = outputs != 0
    torch.testing.assert_close(outputs[kept], 2 * expected.expand_as(outputs)[kept])
    assert (~kept).any()


# ------------------------------------------------------------------------------ what cannot be sampled says so


def test_auxiliary_heads_are_an_error():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head, self.aux = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            h = self.drop(self.trunk(x))
            return (self.head(h), self.aux(h)) if self.training else self.head(h)

    model = Net().eval()
    with pytest.raises(ValueError, match="auxiliary head"):
        bbalpha.sample(model, torch.randn(5, 4), 3)
    assert not any(m.training for m in model.modules())
    assert len(bbalpha.sample(model.train(), torch.randn(5, 4), 3)) == 2


def no_randomness_left():
    from transformers import BartConfig, BartModel, LlamaConfig, LlamaForCausalLM

    bart = BartConfig(
        vocab_size=30, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16, use_cache=False,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    ids = {"input_ids": zoo.tokens()}
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    lstm = nn.LSTM(4, 5, dropout=0.0, num_layers=2)
    return {
        "linear": (nn.Linear(4, 3), zoo.rows(5, 4)),
        "p = 0": (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)), zoo.rows(5, 4)),
        "p = 1": (nn.Sequential(nn.Linear(4, 3), nn.Dropout(1.0)), zoo.rows(5, 4)),
        "attention": (zoo.Attention(p=0.0), zoo.rows(3, 6, 8)),
        "encoder": (nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), zoo.rows(3, 6, 8)),
        "lstm": (lstm, zoo.rows(3, 6, 4)),
        "drop path": (zoo.DropPath(0.0), zoo.rows(3, 6)),
        "llama": (LlamaForCausalLM(LlamaConfig(**zoo.SMALL, use_cache=False)), ids),
        "layer drop at rate 0, which draws all the same": (BartModel(bart), ids),
    }


@pytest.mark.parametrize("mode", [True, False])
def test_no_active_randomness_is_an_error_that_names_the_cure(mode):
    for name, (model, x) in no_randomness_left().items():
        model.train(mode)
        for strategy in ("auto", "loop"):
            with pytest.raises(ValueError, match="add_dropout"):
                bbalpha.sample(model, x, 3, strategy=strategy)
        assert all(m.training == mode for m in model.modules()), name


class NoEffect(zoo.Functional):
    """The dropout is on a branch that nobody returns."""

    def forward(self, x):
        F.dropout(self.a(x), self.p)
        return self.b(self.a(x))


def test_dropout_that_reaches_no_output_is_an_error_and_one_behind_zeros_is_not():
    x = torch.randn(5, 4)
    for frozen in (False, True):
        with pytest.raises(ValueError, match="without effect on the output"):
            bbalpha.sample(NoEffect().requires_grad_(not frozen), x, 3)
    model = zoo.Functional()
    nn.init.zeros_(model.b.weight)  # as residual branches begin: equal at first, and it can learn
    outputs = bbalpha.sample(model, x, 3)
    assert torch.equal(outputs[0], outputs[1])
    outputs.sum().backward()
    assert model.b.weight.grad.abs().sum() > 0
    rare = nn.Sequential(nn.Linear(4, 3), nn.Dropout(1e-6))
    assert bbalpha.sample(rare, x, 3).shape == (3, 5, 3)


def test_outputs_that_cannot_be_stacked_are_an_error():
    @dataclass
    class Output:
        logits: Tensor

    class Net(zoo.Functional):
        def forward(self, x):
            return Output(super().forward(x))

    with pytest.raises(TypeError, match="got Output"):
        bbalpha.sample(Net(), torch.randn(5, 4), 3)


def test_dropout_that_jit_traced_away_is_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.trace(zoo.mlp()[0].eval(), torch.randn(5, 4))
    with pytest.raises(ValueError, match="add_dropout"):
        bbalpha.sample(model, torch.randn(5, 4), 3)


def test_a_rate_that_is_raised_after_the_first_call_is_used():
    path = zoo.DropPath(0.0)
    model, x = nn.Sequential(nn.Linear(4, 8), path, nn.Dropout(0.1)).eval(), torch.randn(50, 4)
    bbalpha.sample(model, x, 3)
    path.p = 0.5
    dropped = (bbalpha.sample(model, x, 10) == 0).all(-1).float().mean()
    assert 0.4 < dropped < 0.6


def test_dropout_switched_off_after_the_first_call_is_seen():
    model = zoo.Functional()
    bbalpha.sample(model, torch.randn(5, 4), 3)
    model.p = 0.0
    with pytest.raises(ValueError, match="add_dropout"):
        bbalpha.sample(model, torch.randn(5, 4), 3)


def test_gradient_checkpointing_is_refused_where_it_would_draw_anew():
    class Net(zoo.Functional):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    model, x = Net(), torch.randn(5, 4)
    with pytest.raises(ValueError, match="chunk_size"):
        bbalpha.sample(model, x, 3)
    with torch.no_grad():
        assert_same(bbalpha.sample(model, x, 3, seed=0), bbalpha.sample(model, x, 3, seed=0, strategy="loop"))


def test_an_exception_inside_restores_flags_buffers_and_generators():
    class Fails(nn.Module):
        def forward(self, x):
            if self.training:
                raise RuntimeError("inside")
            return x

    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 8), zoo.DropPath(0.1), OwnBatchNorm(), Fails()).eval()
    model[2].train()
    buffers = [b.clone() for b in model.buffers()]
    flags = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    for strategy in ("auto", "loop", "vmap", "repeat"):
        with pytest.raises(RuntimeError, match="inside"):
            bbalpha.sample(model, torch.ones(20, 4), 3, seed=0, strategy=strategy)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match="inside"), bbalpha.stochastic(model):
        model(torch.ones(5, 4))
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))


def test_stochastic_depth_from_python_and_numpy_is_seeded_and_leaves_no_trace():
    import random

    import numpy as np

    class Net(zoo.Functional):
        def forward(self, x):
            h = torch.tanh(self.a(x))
            if self.training and random.random() + np.random.rand() < 1:
                h = 2 * h
            return self.b(h)

    model, x = Net().eval(), torch.randn(5, 4)
    states = random.getstate(), np.random.get_state()[1].tolist()
    outputs = bbalpha.sample(model, x, 20, seed=0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    assert len({round(o.sum().item(), 4) for o in outputs}) == 2
    assert_same(outputs, bbalpha.sample(model, x, 20, seed=0), 0)


def test_a_model_that_keeps_its_attention_keeps_a_real_tensor():
    class Net(zoo.Functional):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    model = Net()
    bbalpha.sample(model, torch.randn(5, 4), 3)
    assert copy.deepcopy(model.last.detach()).shape[-1] == 3
    assert plan_of(model).strategy == "repeat"


def test_an_extra_input_as_long_as_the_batch_is_not_mistaken_for_rows():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def forward(self, x, mask):
            return self.encoder(x, mask)

    model, length = Net().eval(), 13
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    for rows in (5, length):
        x = torch.randn(rows, length, 8), mask
        loop = bbalpha.sample(model, x, 3, seed=0, strategy="loop")
        assert_same(loop, bbalpha.sample(model, x, 3, seed=0))


def test_a_model_that_returns_its_own_loss():
    model, x = zoo.bert()
    outputs = bbalpha.sample(model.eval(), {**x, "labels": torch.tensor([0, 1, 2])}, 4, seed=0)
    expected = [F.cross_entropy(logits, torch.tensor([0, 1, 2])) for logits in outputs.logits]
    torch.testing.assert_close(outputs.loss, torch.stack(expected))  # (K,)


def test_autocast():
    model, x = zoo.Attention().eval(), torch.randn(3, 6, 8)
    assert bbalpha.sample(model, x, 4, seed=0).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [bbalpha.sample(model, x, 4, seed=0, strategy=s) for s in ("loop", "auto", "repeat")]
    assert all(o.dtype == torch.bfloat16 for o in outputs)
    assert_same(outputs[0], outputs[1])
    assert_same(outputs[0], outputs[2])


def test_inference_mode():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).eval()
    with torch.inference_mode():
        outputs = [bbalpha.sample(model, torch.ones(3, 4), 4, seed=0, strategy=s) for s in ("loop", "vmap", "repeat")]
    assert_same(outputs[0], outputs[1])
    assert_same(outputs[0], outputs[2])


# ------------------------------------------------------------------------------ tokens and pixels


@pytest.mark.parametrize("positions", ["independent", "joint"])
def test_token_loss_on_a_transformer(positions):
    model, x = zoo.bert_attention_dropout_only()
    labels = torch.randint(0, 3, (3, 7))
    labels[0, 4:] = -100
    logits = bbalpha.sample(model, x, 4, seed=0).logits  # (K, N, T, C)
    assert logits.shape == (4, 3, 7, 3)
    loss = bbalpha.cross_entropy(logits, labels, alpha=0.0, class_axis=-1, positions=positions)
    nll = F.cross_entropy(logits.flatten(0, 1).movedim(-1, 1), labels.repeat(4, 1), reduction="none")
    total = nll.sum() / 4
    expected = total / 3 if positions == "joint" else total / (labels != -100).sum()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert model.classifier.weight.grad.abs().sum() > 0


def test_pixel_loss_on_a_segmentation_net():
    model, x = zoo.dropout_2d()
    target = torch.randint(0, 3, (4, 3, 3))
    logits = bbalpha.sample(model, x, 4)  # (K, N, C, H, W)
    loss = bbalpha.cross_entropy(logits, target, alpha=0.5)
    assert loss.shape == ()
    loss.backward()
    assert model[0].weight.grad.abs().sum() > 0


# ------------------------------------------------------------------------------ architectures nobody thought of


class Rows(nn.Module):
    """(N, 6) as (N, 3, 2) for a layer that wants a sequence."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x.unflatten(1, (3, 2)))
        return (y[0] if isinstance(y, tuple) else y).flatten(1)


class SelfAttention(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.p if self.training else 0.0)


class Multihead(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, dropout=p, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


class WeightDrop(nn.Linear):
    def forward(self, x):
        return F.linear(x, F.dropout(self.weight, 0.3, self.training), self.bias)


class OnlyIfTraining(nn.Module):
    """A block of its own that reads the flag and calls a dropout module."""

    def __init__(self, p):
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.drop(x) if self.training else x


QUIET = {
    "linear": lambda: nn.Linear(6, 6),
    "tanh": nn.Tanh,
    "relu in place": lambda: nn.LeakyReLU(0.2, inplace=True),
    "layer norm": lambda: nn.LayerNorm(6),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "attention, quiet": lambda: Rows(SelfAttention(0.0)),
    "dropout at rate 0": lambda: nn.Dropout(0.0),
}
RANDOM = {
    "dropout": lambda: nn.Dropout(0.3),
    "own dropout": lambda: bbalpha.Dropout(0.5),
    "dropout in place": lambda: nn.Dropout(0.25, inplace=True),
    "functional": lambda: OnlyIfTraining(0.4),
    "alpha dropout": lambda: nn.AlphaDropout(0.2),
    "channels": lambda: Rows(nn.Dropout1d(0.4)),
    "rrelu": nn.RReLU,
    "drop path": lambda: zoo.DropPath(0.3),
    "noise": Noise,
    "lstm": lambda: Rows(nn.LSTM(2, 2, num_layers=2, dropout=0.4, batch_first=True)),
    "attention": lambda: Rows(SelfAttention(0.3)),
    "multihead": lambda: Rows(Multihead(0.3)),
    "weights": lambda: WeightDrop(6, 6),
}
LEAVES = st.sampled_from([*QUIET, *RANDOM])
TREES = st.recursive(
    LEAVES,
    lambda parts: st.tuples(st.sampled_from(["chain", "residual", "twice"]), st.lists(parts, min_size=1, max_size=4)),
    max_leaves=8,
)


def build(tree):
    if isinstance(tree, str):
        return (QUIET | RANDOM)[tree]()
    kind, parts = tree
    inner = nn.Sequential(*[build(part) for part in parts])
    if kind == "residual":
        return zoo.Residual(inner, nn.Identity())
    return nn.Sequential(inner, nn.Tanh(), inner) if kind == "twice" else inner


def is_random(tree):
    return tree in RANDOM if isinstance(tree, str) else any(is_random(part) for part in tree[1])


def settle(examples):
    """The same examples on every machine, without the minutes of making a failure smaller."""
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=examples, derandomize=True, phases=[Phase.generate], **quiet)


@settle(70)
@given(tree=TREES.filter(is_random), n=st.integers(2, 7))
def test_random_architectures_agree_with_the_naive_loop(tree, n):
    torch.manual_seed(n)
    model, x = build(tree).eval(), torch.randn(n, 6)
    naive = copy.deepcopy(model).train()
    for m in naive.modules():
        if isinstance(m, nn.BatchNorm1d) or "SpectralNorm" in type(m).__name__:
            m.eval()
    with torch.no_grad():
        expected = torch.stack([_one_pass(naive, x, k, 4, n) for k in range(4)])
        for strategy in ("auto", ("loop", "vmap", "repeat")[n % 3]):
            outputs = sample_or_refuse(model, x, 4, seed=n, strategy=strategy)
            assert outputs is not None or strategy in ("vmap", "repeat")
            if outputs is not None:
                assert_same(outputs, expected, 1e-4)
        ours = bbalpha.sample(model, x, 60, seed=0).flatten(1)
        plain = torch.stack([naive(x.clone()) for _ in range(20)]).flatten(1)
    error = (ours.var(0) / 60 + plain.var(0) / 20).sqrt()
    assert ((ours.mean(0) - plain.mean(0)).abs() <= 6 * error + 1e-5).all()


@settle(20)
@given(tree=TREES.filter(lambda tree: not is_random(tree)))
def test_quiet_architectures_are_refused(tree):
    with pytest.raises(ValueError, match="add_dropout"):
        bbalpha.sample(build(tree), torch.randn(5, 6), 3)


@pytest.mark.parametrize("mode", [False, True])
def test_without_passes_the_network_as_it_is(case, mode):
    model, x = case.make()
    if case.name in ("functional_dropout_always_on", "traced_by_jit"):
        with pytest.raises(ValueError, match="draws nothing with its random sites off"):
            bbalpha.sample(model.train(mode), x, None)
        return
    if mode and case.name == "batch_norm_batch_of_one":  # an error of torch's
        return
    model.train(mode)
    flags, generator = [m.training for m in model.modules()], torch.get_rng_state()
    found = bbalpha.sample(model, x, None, batch_dim=case.batch_dim)
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), generator)
    normed = any(isinstance(m, _NormBase) for m in model.modules()) or "norm" in case.name or "jit" in case.name
    if not (mode and normed):  # those follow the mode
        with torch.no_grad():
            expected = Inputs.of(x, case.batch_dim).fresh().call(model.eval())
        assert_same(tree_map(lambda t: t[0] if isinstance(t, Tensor) else t, found), expected)
