"""`predict_*` over models, batches, streams and seeds."""

import math
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bbalpha
from bbalpha import prediction
from bbalpha._engine import batches
from bbalpha._engine.settling import Where

net = lambda C=3: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, C))  # noqa: E731


class TwoHeads(nn.Module):
    """Mean and log precision."""

    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5)), nn.Linear(16, 4)

    def forward(self, x):
        return self.heads(self.body(x)).chunk(2, -1)


# ------------------------------------------------------------------------------ against the definition


@pytest.mark.parametrize("class_axis", [None, -1])
def test_passes_that_were_run_already_give_the_same_prediction(class_axis):
    model, x = net().eval(), torch.randn(9, 4)
    p = bbalpha.predict_classification(model, x, n_passes=30, seed=3, class_axis=class_axis)
    q = prediction.classification_of(bbalpha.sample(model, x, 30, seed=3).detach(), class_axis=class_axis)
    for name in ("log_probs", "expected_entropy", "votes"):
        torch.testing.assert_close(getattr(q, name), getattr(p, name))
    assert (q.n_passes, q.class_axis) == (p.n_passes, p.class_axis)


def test_classification_is_the_mean_over_passes():
    model, x, y = net().requires_grad_(False), torch.randn(9, 4), torch.arange(9) % 3
    p = bbalpha.predict_classification(model, x, n_passes=30, seed=3)
    probs = bbalpha.sample(model.eval(), x, 30, seed=3).double().softmax(-1)
    mean = probs.mean(0)
    assert torch.allclose(p.probs.double(), mean, atol=1e-6)
    assert torch.equal(p.label, mean.argmax(-1))
    assert torch.allclose(p.entropy.double(), -(mean * mean.log()).sum(-1), atol=1e-6)
    assert torch.allclose(p.expected_entropy.double(), -(probs * probs.log()).sum(-1).mean(0), atol=1e-6)
    assert torch.allclose(p.mutual_information, p.entropy - p.expected_entropy, atol=1e-7)
    top = probs.argmax(-1).mode(0)
    share = (probs.argmax(-1) == top.values).double().mean(0)
    assert torch.allclose(p.variation_ratio.double(), 1 - share, atol=1e-6)
    assert torch.allclose(p.log_prob(y).double(), mean[torch.arange(9), y].log(), atol=1e-6)
    assert float(-p.log_prob(y).mean()) == pytest.approx(
        float(bbalpha.cross_entropy(bbalpha.sample(model, x, 30, seed=3), y, alpha=1.0)), abs=1e-6
    )


def test_probabilities_that_underflow_keep_their_logarithm():
    class Far(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(torch.ones_like(x), 0.01) * torch.tensor([0.0, 500.0])

    p = bbalpha.predict_classification(Far(), torch.zeros(3, 2), n_passes=3, seed=0)
    assert p.log_prob(torch.zeros(3, dtype=torch.long)).isfinite().all()
    assert (p.entropy == 0).all()
    assert (p.mutual_information >= 0).all()


def test_classes_that_are_masked_out_have_probability_0():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x).masked_fill(torch.tensor([False, True, False]), -math.inf)

    p = bbalpha.predict_classification(Masked(), torch.randn(5, 4), n_passes=7)
    assert (p.probs[:, 1] == 0).all()
    assert torch.allclose(p.probs.sum(-1), torch.ones(5), atol=1e-6)
    assert p.entropy.isfinite().all()
    assert p.mutual_information.isfinite().all()
    assert not p.prediction_set(0.999)[:, 1].any()


def test_temperature_divides_the_logits_of_every_pass():
    model, x = net(), torch.randn(5, 4)
    p = bbalpha.predict_classification(model, x, n_passes=10, seed=0, temperature=2.0)
    expected = (bbalpha.sample(model.eval(), x, 10, seed=0) / 2).softmax(-1).mean(0)
    assert torch.allclose(p.probs, expected, atol=1e-6)
    of_numpy = bbalpha.predict_classification(model, x, n_passes=10, seed=0, temperature=np.float32(2))
    assert torch.equal(of_numpy.probs, p.probs)


def test_regression_keeps_the_passes():
    model, x, y = net(2).requires_grad_(False), torch.randn(9, 4), torch.randn(9, 2)
    p = bbalpha.predict_regression(model, x, n_passes=30, precision=2.0, seed=3)
    outputs = bbalpha.sample(model.eval(), x, 30, seed=3)
    assert torch.equal(p.outputs, outputs)
    nll = bbalpha.gaussian_nll(outputs, y, 1.0, precision=2.0)
    assert float(-p.log_prob(y).mean()) == pytest.approx(float(nll), abs=1e-5)


def test_predicted_precision_is_part_of_the_mixture():
    model, x, y = TwoHeads().requires_grad_(False), torch.randn(9, 4), torch.randn(9, 2)
    p = bbalpha.predict_regression(model, x, n_passes=20, precision="predicted", seed=1, batch_size=4, masks="shared")
    mean, log_precision = bbalpha.sample(model.eval(), x, 20, seed=1, masks="shared")
    assert torch.allclose(p.outputs, mean, atol=1e-6)
    assert torch.allclose(p.aleatoric_std, (-log_precision).exp().mean(0).sqrt(), atol=1e-6)
    expected = bbalpha.GaussianNLL(alpha=1.0, precision="predicted")((mean, log_precision), y)
    assert float(-p.log_prob(y).mean()) == pytest.approx(float(expected), abs=1e-5)


def test_precision_may_be_one_a_output_or_one_a_row():
    model, x = net(2), torch.randn(9, 4)
    each = bbalpha.predict_regression(model, x, precision=torch.tensor([1.0, 4.0]), batch_size=2)
    assert torch.allclose(each.aleatoric_std, torch.tensor([1.0, 0.5]).expand(9, 2))
    rows = bbalpha.predict_regression(model, x, precision=torch.arange(1.0, 10.0)[:, None], batch_size=2)
    assert torch.allclose(rows.aleatoric_std[:, 0], torch.arange(1.0, 10.0).rsqrt())


def test_a_learned_precision_leaves_no_graph_behind():
    objective = bbalpha.GaussianNLL()
    p = bbalpha.predict_regression(net(1), torch.randn(3, 4), n_passes=5, precision=objective.precision)
    assert not p.std.requires_grad
    assert not p.log_prob(torch.zeros(3, 1)).requires_grad


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_a_single_logit_is_yes_or_no(shape):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1), nn.Flatten(len(shape) - 2))
    x = torch.randn(6, 4)
    p = bbalpha.predict_classification(model, x, n_passes=10, seed=0)
    yes = bbalpha.sample(model.eval(), x, 10, seed=0).sigmoid().mean(0).flatten()
    assert p.probs.shape == (6, 2)
    assert torch.allclose(p.probs[:, 1], yes, atol=1e-6)


# ------------------------------------------------------------------------------ axes


def test_pixels_keep_their_axes():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Dropout2d(0.5), nn.Conv2d(8, 5, 1))
    x, y = torch.randn(4, 3, 6, 7), torch.randint(5, (4, 6, 7))
    p = bbalpha.predict_classification(model, x, n_passes=8, batch_size=3, seed=0)
    assert p.probs.shape == p.votes.shape == p.prediction_set(0.9).shape == (4, 5, 6, 7)
    assert p.label.shape == p.entropy.shape == p.mutual_information.shape == p.log_prob(y).shape == (4, 6, 7)
    assert torch.allclose(p.probs.sum(1), torch.ones(4, 6, 7), atol=1e-5)
    assert torch.allclose(p.votes.sum(1), torch.ones(4, 6, 7), atol=1e-5)


def test_tokens_keep_their_axes():
    model = nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.5), nn.Linear(8, 20))
    tokens = torch.randint(20, (4, 6))
    p = bbalpha.predict_classification(model, tokens, n_passes=8, class_axis=-1, seed=0)
    assert p.probs.shape == p.prediction_set(0.5).shape == (4, 6, 20)
    assert p.label.shape == p.log_prob(tokens).shape == p.variation_ratio.shape == (4, 6)
    assert torch.allclose(p.probs.sum(-1), torch.ones(4, 6), atol=1e-5)


@pytest.mark.parametrize("T", [6, 20])
def test_the_class_axis_is_never_guessed(T):
    model = nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.5), nn.Linear(8, 20))
    tokens = torch.randint(20, (4, T))
    with pytest.raises(ValueError, match=r"`class_axis` must be given .* class_axis=-1 .* class_axis=2"):
        bbalpha.predict_classification(model, tokens, n_passes=3)
    options = {"n_passes": 3, "seed": 0, "masks": "shared"}
    p = bbalpha.predict_classification(model, tokens, class_axis=-1, **options)
    turned = bbalpha.predict_classification(model, tokens, class_axis=2, output=lambda logits: logits.mT, **options)
    torch.testing.assert_close(turned.probs, p.probs.mT)


def test_ignored_positions_have_log_probability_0():
    model = nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.5), nn.Linear(8, 20)).requires_grad_(False)
    tokens = torch.randint(20, (4, 6))
    p = bbalpha.predict_classification(model, tokens, n_passes=8, class_axis=-1, seed=0)
    labels = tokens.clone()
    labels[0, 2] = labels[3, 5] = -100
    outputs = bbalpha.sample(model.eval(), tokens, 8, seed=0)
    expected = bbalpha.cross_entropy(outputs, labels, alpha=1.0, class_axis=-1, reduction="none")
    torch.testing.assert_close(p.log_prob(labels), -expected, rtol=0, atol=1e-5)
    assert p.log_prob(labels)[labels == -100].eq(0).all()
    assert torch.equal(p.log_prob(tokens.masked_fill(labels == -100, 21), ignore_index=21), p.log_prob(labels))
    with pytest.raises(ValueError, match="0 to 19; got -100"):
        p.log_prob(labels, ignore_index=7)


# ------------------------------------------------------------------------------ what a model returns


class Several(nn.Module):
    """A model of whose outputs one is wanted; `form` says how they come."""

    def __init__(self, form):
        super().__init__()
        self.net, self.form = net(), form

    def forward(self, x):
        logits = self.net(x)
        return self.form(logits, x)


Named = namedtuple("Named", ["hidden", "scores"])


@pytest.mark.parametrize(
    ("form", "output"),
    [
        (lambda logits, h: (logits, h), 0),
        (lambda logits, h: (h, logits), 1),
        (lambda logits, h: [h, logits], -1),
        (lambda logits, h: {"scores": logits, "hidden": h}, "scores"),
        (lambda logits, h: {"logits": h, "scores": logits}, "scores"),
        (lambda logits, h: Named(h, logits), "scores"),
        (lambda logits, h: (h, {"a": [logits - 1]}), lambda outputs: outputs[1]["a"][0] + 1),
    ],
)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_one_of_several_outputs_is_picked(form, output, batch_size):
    model, x = Several(form), torch.randn(9, 4)
    options = {"n_passes": 6, "masks": "shared", "seed": 0, "batch_size": batch_size}
    p = bbalpha.predict_classification(model, x, output=output, **options)
    torch.testing.assert_close(p.probs, bbalpha.predict_classification(model.net, x, **options).probs)
    r = bbalpha.predict_regression(model, x, output=output, **options)
    torch.testing.assert_close(r.outputs, bbalpha.predict_regression(model.net, x, **options).outputs)


@pytest.mark.parametrize("predict", [bbalpha.predict_classification, bbalpha.predict_regression])
def test_which_of_several_outputs_is_not_guessed(predict):
    x = torch.zeros(2, 4)
    for form in (lambda logits, h: (logits, h), lambda logits, h: {"scores": logits, "hidden": h}):
        with pytest.raises(TypeError, match="Say with `output` which part to read: output=0"):
            predict(Several(form), x, n_passes=3)
    two = Several(lambda logits, h: (logits, h))
    for wrong in (2, -3, "logits"):
        with pytest.raises(ValueError, match=rf"`output` must name a part .* got {wrong!r} for a tuple of 2"):
            predict(two, x, n_passes=3, output=wrong)
    with pytest.raises(ValueError, match="a mapping with 'scores'"):
        predict(Several(lambda logits, h: {"scores": logits}), x, n_passes=3, output="logits")
    with pytest.raises(ValueError, match="for a tensor"):
        predict(net(), x, n_passes=3, output="T")
    for wrong in (True, 1.5):
        with pytest.raises(TypeError, match="`output` must be a number, a name, a function or None"):
            predict(two, x, n_passes=3, output=wrong)


def test_loc_and_scale_are_mean_and_noise():
    heads, x, y = TwoHeads().requires_grad_(False), torch.randn(9, 4), torch.randn(9, 2)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = heads

        def forward(self, x):
            mean, log_precision = self.heads(x)
            return {"loc": mean, "scale": (-0.5 * log_precision).exp()}

    options = {"n_passes": 20, "precision": "predicted", "seed": 1, "masks": "shared", "batch_size": 4}
    p = bbalpha.predict_regression(Named(), x, **options)
    q = bbalpha.predict_regression(heads, x, **options)
    torch.testing.assert_close(p.log_prob(y), q.log_prob(y))
    torch.testing.assert_close(p.std, q.std)
    outputs = bbalpha.sample(Named().eval(), x, 20, seed=1, masks="shared")
    torch.testing.assert_close(p.aleatoric_std, outputs["scale"].square().mean(0).sqrt())
    with pytest.raises(TypeError, match=r'"loc" and "scale" .* Use precision="predicted"'):
        bbalpha.predict_regression(Named(), x, n_passes=3)
    negative = Several(lambda logits, h: {"loc": logits, "scale": -logits.abs()})
    with pytest.raises(ValueError, match="`scale` must be positive and finite; got -"):
        bbalpha.predict_regression(negative, x, n_passes=3, precision="predicted")


def test_rows_on_another_axis_come_first_in_the_result():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, num_layers=2, dropout=0.5), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    model, x = Recurrent(), torch.randn(5, 7, 4)  # (T, N, F)
    p = bbalpha.predict_classification(model, x, n_passes=4, batch_dim=1, class_axis=-1, batch_size=3)
    assert p.probs.shape == (7, 5, 3)
    assert bbalpha.predict_regression(model, x, n_passes=4, batch_dim=1, batch_size=2).mean.shape == (7, 5, 3)


# ------------------------------------------------------------------------------ batches, streams, seeds


@pytest.mark.parametrize("batch_size", [1, 4, 64, None])
def test_shared_masks_do_not_depend_on_the_batches(batch_size, monkeypatch):
    model, x = net(), torch.randn(23, 4)
    whole = bbalpha.predict_classification(model, x, n_passes=12, masks="shared", seed=0, batch_size=23)
    options = {"n_passes": 12, "masks": "shared", "seed": 0, "batch_size": batch_size}
    for budget in (2**22, 16 * 12):  # the second: 12 rows-times-passes at a time
        monkeypatch.setattr(batches, "_BUDGET", budget)
        p = bbalpha.predict_classification(model, x, **options)
        assert torch.allclose(p.log_probs, whole.log_probs, atol=1e-5)
        assert torch.allclose(p.votes, whole.votes)
        r = bbalpha.predict_regression(model, x, **options)
        assert torch.allclose(r.outputs, bbalpha.sample(model.eval(), x, 12, masks="shared", seed=0), atol=1e-5)


def test_groups_of_passes_do_not_depend_on_the_batches(monkeypatch):
    monkeypatch.setattr(batches, "_BUDGET", 16 * 5)  # 5 passes of one row at a time
    model, x = net(), torch.randn(7, 4)
    a, b = (
        bbalpha.predict_regression(model, x, n_passes=12, masks="shared", seed=0, batch_size=size) for size in (2, 7)
    )
    assert torch.allclose(a.outputs, b.outputs, atol=1e-6)
    assert len({tuple(o.flatten().tolist()) for o in a.outputs}) == 12  # no pass is drawn twice


def test_per_example_masks_differ_between_batches_and_repeat_with_the_seed():
    model, x = net(), torch.ones(6, 4)
    a, b = (bbalpha.predict_regression(model, x, n_passes=5, seed=0, batch_size=2).outputs for _ in range(2))
    assert torch.equal(a, b)
    assert len({tuple(row.flatten().tolist()) for row in a.unbind(1)}) == 6


def test_groups_of_passes_are_reduced_as_one(monkeypatch):
    monkeypatch.setattr(batches, "_BUDGET", 16 * 5)  # 5 passes of one row at a time
    monkeypatch.setattr(prediction, "_BLOCK", 8)  # 2 of these
    model, x = net(), torch.randn(3, 4)
    options = {"n_passes": 12, "masks": "shared", "seed": 0}
    probs = bbalpha.predict_regression(model, x, **options).outputs.softmax(-1)
    p = bbalpha.predict_classification(model, x, **options)
    assert torch.allclose(p.probs, probs.mean(0), atol=1e-6)
    assert torch.allclose(p.expected_entropy, -(probs * probs.log()).sum(-1).mean(0), atol=1e-6)
    assert torch.allclose(p.votes, nn.functional.one_hot(probs.argmax(-1), 3).float().mean(0))


@pytest.mark.parametrize("block", [2**22, 30])
def test_groups_blocks_and_stages_know_how_far_all_passes_are_from_their_mean(block, monkeypatch):
    monkeypatch.setattr(prediction, "_BLOCK", block)  # the second: two passes
    logits = 3 * torch.randn(12, 5, 3, dtype=torch.float64)
    expected = logits.softmax(-1).var(0, correction=0) * 12
    part = lambda *groups: prediction._sum_logits(iter(groups), 2, Where(0), with_squares=True)  # noqa: E731
    torch.testing.assert_close(part(logits)[3], expected)
    torch.testing.assert_close(part(logits[:5], logits[5:])[3], expected)
    settling = prediction._settling_classes(0.1, batches.PassOptions(n_passes=12), None)
    torch.testing.assert_close(settling.joined(part(logits[:4]), part(logits[4:]), 4, 8)[3], expected)


def test_streams_give_what_the_tensor_gives():
    model, x = net(), torch.randn(23, 4)
    options = {"n_passes": 6, "masks": "shared", "seed": 0}
    whole = bbalpha.predict_classification(model, x, **options).probs
    loader = DataLoader(TensorDataset(x), batch_size=5)
    for stream in (loader, (part for part in x.split(4)), iter([x])):
        assert torch.allclose(bbalpha.predict_classification(model, stream, **options).probs, whole, atol=1e-6)
    again = bbalpha.predict_regression(model, loader, batch_size=2, **options)
    assert torch.allclose(again.outputs, bbalpha.predict_regression(model, x, **options).outputs, atol=1e-6)


def test_tuples_and_mappings_are_arguments():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, a, b):
            return {"logits": self.net(a + b)}

    a, b = torch.randn(9, 4), torch.randn(9, 4)
    options = {"n_passes": 6, "masks": "shared", "seed": 0}
    model = Two()
    whole = bbalpha.predict_classification(model.net, a + b, **options).probs
    for x in ((a, b), {"a": a, "b": b}, DataLoader(TensorDataset(a, b), batch_size=4)):
        assert torch.allclose(bbalpha.predict_classification(model, x, batch_size=2, **options).probs, whole, atol=1e-6)


def test_seed_leaves_the_generator_alone_and_none_advances_it():
    model, x = net(), torch.randn(3, 4)
    state = torch.get_rng_state()
    bbalpha.predict_regression(model, x, n_passes=3, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    a, b = (bbalpha.predict_regression(model, x, n_passes=3).outputs for _ in range(2))
    assert not torch.equal(a, b)
    torch.manual_seed(0)
    c = bbalpha.predict_regression(model, x, n_passes=3).outputs
    torch.manual_seed(0)
    assert torch.equal(c, bbalpha.predict_regression(model, x, n_passes=3).outputs)


def test_evaluation_mode_for_the_call_alone():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).train()
    model[0].eval()
    flags, x = [m.training for m in model.modules()], torch.randn(5, 4) * 10
    mean = model[1].running_mean.clone()
    p = bbalpha.predict_regression(model, x, n_passes=4, seed=0, masks="shared")
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(model[1].running_mean, mean)
    alone = bbalpha.predict_regression(model, x[:1], n_passes=4, seed=0, masks="shared")  # no batch statistics
    assert torch.allclose(alone.outputs, p.outputs[:, :1], atol=1e-5)
    with pytest.raises(ValueError, match="does not fit"):
        bbalpha.predict_regression(model, torch.randn(5, 3), n_passes=4)
    assert [m.training for m in model.modules()] == flags
    assert not p.outputs.requires_grad


def test_progress_is_quiet_unless_asked(capsys):
    model, x = net(), torch.randn(40, 4)
    bbalpha.predict_classification(model, x, n_passes=4, batch_size=5)
    assert capsys.readouterr().err == ""
    bbalpha.predict_classification(model, x, n_passes=4, batch_size=5, progress=True)
    shown = capsys.readouterr().err
    assert "predict" in shown
    assert "/40.0" in shown
    bbalpha.predict_classification(model, DataLoader(TensorDataset(x), batch_size=5), n_passes=4, progress=True)
    assert "/8.00" in capsys.readouterr().err


def test_half_precision_is_reduced_in_float32():
    model, x = net().bfloat16(), torch.randn(6, 4).bfloat16()
    p = bbalpha.predict_classification(model, x, n_passes=10)
    assert p.probs.dtype == torch.float32
    assert torch.allclose(p.probs.sum(-1), torch.ones(6), atol=1e-5)
    assert bbalpha.predict_regression(model, x, n_passes=10).mean.dtype == torch.float32


def test_no_rows_give_an_empty_prediction():
    p = bbalpha.predict_classification(net(), torch.zeros(0, 4), n_passes=4)
    assert p.probs.shape == (0, 3)
    assert p.mutual_information.shape == (0,)
    assert bbalpha.predict_regression(net(), torch.zeros(0, 4), n_passes=4, precision=1.0).std.shape == (0, 3)


# ------------------------------------------------------------------------------ bad input


class Nan(nn.Module):
    """Returns nan in row 5 where its first unit is dropped."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        out = self.drop(x)
        return torch.where((x == 5.0) & (out == 0.0), math.nan, out)


@pytest.mark.parametrize("predict", [bbalpha.predict_classification, bbalpha.predict_regression])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_model_that_emits_nan_is_reported_with_pass_and_row(predict, batch_size):
    x = torch.arange(8.0)[:, None].repeat(1, 2)
    outputs = bbalpha.sample(Nan().eval(), x, 40, masks="shared", seed=0)
    k, n = outputs.isnan().any(-1).nonzero()[0].tolist()
    assert k > 0
    assert n == 5
    with pytest.raises(ValueError, match=f"got nan in pass {k}, row {n}"):
        predict(Nan(), x, n_passes=40, masks="shared", seed=0, batch_size=batch_size)


@pytest.mark.parametrize("predict", [bbalpha.predict_classification, bbalpha.predict_regression])
@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.tensor([[0.0] * 4, [0.0, math.nan, 0, 0]]), {}, ValueError, "got nan in row 1"),
        (torch.tensor([[0.0] * 4, [0.0, math.inf, 0, 0]]), {"batch_size": 1}, ValueError, "got inf in row 1"),
        (torch.zeros(2, 5), {}, ValueError, "layer '0' takes 4 features and got 5"),
        (
            torch.zeros(2, 4, dtype=torch.float64),
            {},
            ValueError,
            r"takes torch.float32 and got torch.float64; use x.to",
        ),
        (torch.zeros(2, 4, dtype=torch.long), {}, ValueError, "takes torch.float32 and got torch.int64"),
        ((torch.zeros(2, 4), torch.zeros(2)), {}, ValueError, "2 arguments .* leave it out"),
        (iter([]), {}, ValueError, "at least one batch"),
        (3.0, {}, TypeError, "got float"),
        (torch.zeros(2, 4), {"n_passes": 0}, ValueError, "`n_passes`"),
        (torch.zeros(2, 4), {"batch_size": 0}, ValueError, "`batch_size`"),
        (torch.zeros(2, 4), {"masks": "none"}, ValueError, "`masks`"),
        (torch.zeros(2, 4), {"seed": "a"}, TypeError, "`seed`"),
    ],
)
def test_bad_input_is_named(predict, x, options, error, message):
    with pytest.raises(error, match=message):
        predict(net(), x, **{"n_passes": 3, **options})


def test_bad_outputs_and_options_are_named():
    x = torch.zeros(2, 4)
    with pytest.raises(TypeError, match='Use precision="predicted"'):
        bbalpha.predict_regression(TwoHeads(), x, n_passes=3)
    with pytest.raises(TypeError, match="must return "):
        bbalpha.predict_regression(net(), x, n_passes=3, precision="predicted")
    with pytest.raises(ValueError, match="got 'learned'"):
        bbalpha.predict_regression(net(), x, n_passes=3, precision="learned")
    with pytest.raises(ValueError, match="`precision` must be a finite number above 0; got 0"):
        bbalpha.predict_regression(net(), x, n_passes=3, precision=0)
    with pytest.raises(ValueError, match="`temperature`"):
        bbalpha.predict_classification(net(), x, temperature=0.0)
    with pytest.raises(ValueError, match="`class_axis`"):
        bbalpha.predict_classification(net(), x, class_axis=1)
    with pytest.raises(ValueError, match="at least one active random site"):
        bbalpha.predict_classification(nn.Linear(4, 2), x)
    with pytest.raises(ValueError, match="one shape in all batches"):
        bbalpha.predict_classification(
            nn.Sequential(nn.Dropout(0.5)),
            iter([torch.zeros(1, 3, 4), torch.zeros(1, 3, 5)]),
            n_passes=2,
            class_axis=-1,
        )


def test_errors_of_the_model_itself_are_not_reworded():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("a bug of mine")

    with pytest.raises(RuntimeError, match="a bug of mine"):
        bbalpha.predict_classification(Broken(), torch.zeros(2, 4))


# ------------------------------------------------------------------------------ no passes: the network as it is


def test_without_passes_classes_are_those_of_evaluation_mode():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    model[1].running_mean.normal_()
    x, y, generator = torch.randn(50, 4), torch.arange(50) % 3, torch.get_rng_state()
    p = bbalpha.predict_classification(model, x, n_passes=None, batch_size=7)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(m.training for m in model.modules())
    assert model[1].num_batches_tracked == 0
    log_probs = model.eval()(x).log_softmax(1).detach()
    torch.testing.assert_close(p.log_probs, log_probs)
    torch.testing.assert_close(p.log_prob(y), log_probs[torch.arange(50), y])
    torch.testing.assert_close(p.entropy, p.expected_entropy)
    assert torch.equal(p.label, p.votes.argmax(1))
    assert p.n_passes == 1
    assert torch.equal(p.mutual_information, torch.zeros(50))
    assert torch.equal(p.variation_ratio, torch.zeros(50))


def test_without_passes_is_the_limit_of_dropout_at_a_vanishing_rate():
    linear, x = nn.Linear(3, 4), torch.randn(50, 3)
    once = bbalpha.predict_classification(linear, x, n_passes=None)
    many = bbalpha.predict_classification(nn.Sequential(nn.Dropout(1e-4), linear), x, n_passes=20, seed=0)
    torch.testing.assert_close(once.log_probs, many.log_probs, atol=5e-3, rtol=0)
    torch.testing.assert_close(once.expected_entropy, many.expected_entropy, atol=5e-3, rtol=0)


@pytest.mark.parametrize("precision", [None, 4.0, "predicted"])
def test_without_passes_regression_has_the_noise_alone(precision):
    model, x = TwoHeads() if precision == "predicted" else net(C=2), torch.randn(9, 4)
    p = bbalpha.predict_regression(model, x, n_passes=None, precision=precision)
    out = model.eval()(x)
    mean = out[0] if precision == "predicted" else out
    assert p.outputs.shape == (1, 9, 2)
    torch.testing.assert_close(p.mean, mean.detach())
    assert torch.equal(p.epistemic_std, torch.zeros(9, 2))
    noise = {None: torch.zeros(9, 2), 4.0: torch.full((9, 2), 0.5)}.get(precision)
    torch.testing.assert_close(p.std, (-0.5 * out[1]).exp().detach() if noise is None else noise)
    if precision is None:
        torch.testing.assert_close(p.interval(0.9)[0], p.mean)


def test_without_passes_batches_tuples_and_mappings_give_the_same():
    linear, x = nn.Linear(3, 4), torch.randn(10, 3)
    whole = bbalpha.predict_classification(linear, x, n_passes=None).log_probs
    for other in ((x,), {"input": x}, iter(x.split(4)), DataLoader(x, batch_size=3), x.numpy()):
        found = bbalpha.predict_classification(linear, other, n_passes=None, batch_size=6, masks="shared", seed=1)
        torch.testing.assert_close(found.log_probs, whole)
    assert bbalpha.predict_classification(linear, torch.zeros(0, 3), n_passes=None).log_probs.shape == (0, 4)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_without_passes_rows_that_depend_on_each_other_stay_together():
    x = torch.randn(20, 3)
    p = bbalpha.predict_regression(Centred(), x, n_passes=None, batch_size=4)
    torch.testing.assert_close(p.mean, x - x.mean(0))


def test_without_passes_memory_is_bounded(monkeypatch):
    seen, linear = [], nn.Linear(3, 4)
    linear.register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
    monkeypatch.setattr(batches, "_BUDGET", 400)
    bbalpha.predict_classification(linear, torch.randn(1000, 3), n_passes=None)
    assert max(seen) <= 100


def test_without_passes_mistakes_are_named():
    with pytest.raises(ValueError, match="`x` must give at least one batch"):
        bbalpha.predict_classification(nn.Linear(3, 4), iter([]), n_passes=None)
    with pytest.raises(ValueError, match="`x` must be finite; got nan in row 1"):
        bbalpha.predict_classification(nn.Linear(1, 2), torch.tensor([[0.0], [float("nan")]]), n_passes=None)
    with pytest.raises(TypeError, match="`model` must return a tensor of logits"):
        bbalpha.predict_classification(nn.LSTM(3, 4), torch.randn(2, 5, 3), n_passes=None)
    with pytest.raises(ValueError, match="takes 3 features and got 5"):
        bbalpha.predict_classification(nn.Linear(3, 4), torch.randn(2, 5), n_passes=None)
