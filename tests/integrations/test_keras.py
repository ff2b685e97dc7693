"""Keras: losses with the numbers of bbalpha.objectives, passes with dropout alone on, models that fit and come back."""

import importlib
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import bbalpha
from bbalpha import objectives
from bbalpha.integrations import keras as bb
from bbalpha.integrations._keras_passes import keeps_rows_apart

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # Keras on torch
    pytest.mark.skipif(keras.backend.backend() != "torch", reason="gradients are those of torch"),
]

ALPHAS = (-2.0, -0.5, -1e-6, 0.0, 1e-6, 1e-4, 0.5, 1.0, 5.0, 50.0)
N, K, C = 6, 7, 4


@pytest.fixture(autouse=True)
def _keras_seed():
    keras.utils.set_random_seed(0)


def outputs(*shape, size=3.0):
    return (size * torch.randn(*shape)).requires_grad_()


def same(ours, theirs, y_pred, **tolerance):
    """Value and gradient agree, a call of ours with (N, K, ...) and one of bbalpha's with (K, N, ...)."""
    tolerance = tolerance or {"rtol": 1e-6, "atol": 1e-6}
    values, gradients = [], []
    for loss, outputs in ((ours, y_pred), (theirs, y_pred.movedim(1, 0))):
        values.append(loss(outputs))
        gradients.append(torch.autograd.grad(values[-1], y_pred)[0])
    torch.testing.assert_close(*values, **tolerance)
    torch.testing.assert_close(*gradients, **tolerance)


# ------------------------------------------------------------------------------ losses


@pytest.mark.parametrize("alpha", ALPHAS)
def test_cross_entropy_is_that_of_bbalpha(alpha):
    y = torch.randint(C, (N,))
    targets = (y, y, torch.nn.functional.one_hot(y, C).float(), torch.rand(N, C).softmax(1))
    for given, target in zip((y, y[:, None], *targets[2:]), targets, strict=True):
        same(
            lambda o, y=given: bb.CrossEntropy(alpha)(y, o), lambda o, y=target: bbalpha.cross_entropy(o, y, alpha),
            outputs(N, K, C),
        )  # fmt: skip
    tokens, y = outputs(N, K, 5, C), torch.randint(C, (N, 5))
    same(
        lambda o: bb.CrossEntropy(alpha)(y, o), lambda o: bbalpha.cross_entropy(o, y, alpha, class_axis=-1), tokens,
    )  # fmt: skip


@pytest.mark.parametrize("alpha", ALPHAS)
def test_binary_gaussian_and_generic_losses_are_those_of_bbalpha(alpha):
    y = torch.randint(2, (N, 3)).float()
    same(
        lambda o: bb.BinaryCrossEntropy(alpha)(y, o), lambda o: bbalpha.binary_cross_entropy(o, y, alpha),
        outputs(N, K, 3),
    )  # fmt: skip
    y = torch.randn(N, 2)
    same(
        lambda o: bb.GaussianNLL(alpha, precision=2.5)(y, o),
        lambda o: bbalpha.gaussian_nll(o, y, alpha, precision=2.5),
        outputs(N, K, 2), rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    same(
        lambda o: bb.GaussianNLL(alpha, precision="predicted")(y, o),
        lambda o: objectives.GaussianNLL(alpha, "predicted")(o.chunk(2, -1), y),
        outputs(N, K, 4, size=1.0), rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    keras_mean = bbalpha.AlphaLoss(lambda p, t: (p - t).square().mean(-1), alpha)
    for loss in ("mse", keras.losses.MeanSquaredError(), lambda t, p: ops.mean(ops.square(t - p), -1)):
        same(lambda o, loss=loss: bb.AlphaLoss(loss, alpha)(y, o), lambda o: keras_mean(o, y), outputs(N, K, 2))


@pytest.mark.parametrize("alpha", [*ALPHAS, 1e-12, -1e-12, 1e3, 1e300, 1e-300])
def test_passes_far_apart_and_close_together(alpha):
    """Squared errors from 0 to 1e8, and passes that hardly differ: values to a few digits of float32."""
    for y_pred in (outputs(N, K, 1, size=1e4), (1 + 1e-4 * torch.randn(N, K, 1)).requires_grad_()):
        y = torch.zeros(N, 1)
        large = float(y_pred.detach().abs().max())
        same(
            lambda o, y=y: bb.GaussianNLL(alpha, precision=2.0)(y, o),
            lambda o, y=y: bbalpha.gaussian_nll(o, y, alpha, precision=2.0), y_pred, rtol=2e-6, atol=2e-6 * large,
        )  # fmt: skip


def test_half_precision_is_reduced_in_float32():
    logits, y = torch.randn(64, 20, C), torch.randint(C, (64,))
    for dtype in (torch.float16, torch.bfloat16):
        half = logits.to(dtype)
        value = bb.CrossEntropy(0.5)(y, half)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, bbalpha.cross_entropy(half.float().movedim(1, 0), y, 0.5))


def test_probabilities_give_the_loss_of_their_logits():
    y, logits = torch.randint(C, (N,)), torch.randn(N, K, C)
    a = bb.CrossEntropy(0.5)(y, logits), bb.CrossEntropy(0.5, from_logits=False)(y, logits.softmax(-1))
    torch.testing.assert_close(*a)
    y = torch.randint(2, (N, C)).float()
    b = bb.BinaryCrossEntropy(2.0)(y, logits), bb.BinaryCrossEntropy(2.0, from_logits=False)(y, logits.sigmoid())
    torch.testing.assert_close(*b, rtol=1e-5, atol=1e-5)


def test_weights_of_rows_stand_outside_the_log():
    y, y_pred, weight = torch.randint(C, (N,)), torch.randn(N, K, C), torch.rand(N)
    ours = bb.CrossEntropy(0.5, reduction="mean_with_sample_weight")(y, y_pred, weight)
    theirs = bbalpha.cross_entropy(y_pred.movedim(1, 0), y, 0.5, sample_weight=weight)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "loss",
    [
        bb.CrossEntropy(0.3, from_logits=False, name="mine"),
        bb.BinaryCrossEntropy(-1.0, reduction="sum"),
        bb.GaussianNLL(0.0, precision=3.0),
        bb.GaussianNLL(0.5, precision="predicted"),
        bb.AlphaLoss("huber", 0.7),
        bb.AlphaLoss(keras.losses.Huber(delta=2.0)),
    ],
    ids=lambda loss: loss.name,
)
def test_losses_are_serialised(loss):
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again) is type(loss)
    assert again.get_config() == loss.get_config()


LOGITS, ROWS = torch.randn(5, 3, 4), torch.zeros(5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: bb.CrossEntropy(math.nan), ValueError, "`alpha` must be a finite number; got nan"),
        (lambda: bb.CrossEntropy()(ROWS, LOGITS[:, 0]), ValueError, r"`y_pred` must have shape \(N, K, C\)"),
        (lambda: bb.CrossEntropy()(ROWS[:, None], LOGITS[..., :1]), ValueError, "use BinaryCrossEntropy"),
        (lambda: bb.CrossEntropy()(ROWS + 4, LOGITS), ValueError, "class indices from 0 to 3"),
        (lambda: bb.CrossEntropy()(ROWS + 0.5, LOGITS), ValueError, "class indices from 0 to 3"),
        (lambda: bb.CrossEntropy()(ROWS[:4], LOGITS), ValueError, r"class indices \(N,\) or class weights \(N, 4\)"),
        (lambda: bb.CrossEntropy()(ROWS, LOGITS.softmax(-1)), ValueError, "got probabilities.* Use from_logits=False"),
        (lambda: bb.CrossEntropy(from_logits=False)(ROWS, LOGITS), ValueError, "do not sum to 1"),
        (lambda: bb.BinaryCrossEntropy()(ROWS + 2, LOGITS[..., :1]), ValueError, r"`y_true` must lie in \[0, 1\]"),
        (lambda: bb.BinaryCrossEntropy()(ROWS, LOGITS), ValueError, r"shape of one pass, \(N, 4\).*never broadcast"),
        (lambda: bb.BinaryCrossEntropy(from_logits=False)(ROWS, LOGITS[..., :1]), ValueError, "outside"),
        (lambda: bb.GaussianNLL(precision=-1.0), ValueError, "`precision` must be a finite number above 0"),
        (lambda: bb.GaussianNLL(precision="learned"), ValueError, '"predicted" or a positive number'),
        (lambda: bb.GaussianNLL(precision="predicted")(ROWS, LOGITS[..., :3]), ValueError, r"\(N, K, 2 D\)"),
        (lambda: bb.GaussianNLL(precision=1.0)(ROWS, LOGITS), ValueError, "never broadcast"),
        (lambda: bb.AlphaLoss(None), TypeError, "`loss` must be a Keras loss"),
        (lambda: bb.AlphaLoss(lambda t, p: ops.mean(p))(ROWS, LOGITS), ValueError, "one value for each of the 15"),
        (
            lambda: bb.AlphaLoss(lambda t, p: ops.square(t - p[:, 0]) + ops.mean(p))(ROWS, LOGITS),
            ValueError,
            "mixes rows",
        ),
        (lambda: bb.MonteCarlo(LOGITS), TypeError, "`model` must be a Keras model or layer; got Tensor"),
        (lambda: bb.MonteCarlo(layers.Dropout(0.5), 0), ValueError, "`n_passes` must be a whole number"),
        (lambda: bb.l2_prior(1.0, 10, dropout=1.0), ValueError, "`dropout` must be at least 0 and less than 1"),
        (lambda: bb.predict_classification(LOGITS, LOGITS), TypeError, "`model` must be a Keras model or layer"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()


# ------------------------------------------------------------------------------ passes


def mlp(*middle, inputs=4, units=3):
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(16), *middle, layers.Dense(units)])


class Written(keras.Model):
    """A network of somebody's own: who knows what it does to rows."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = list(parts)

    def call(self, x, training=None):
        for part in self.parts:
            x = part(x, training=training) if "training" in part._call_signature.parameters else part(x)
        return x


@keras.saving.register_keras_serializable("test")
class DropPath(layers.Layer):
    """As people write it: a generator of its own, and the whole row kept or dropped."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x, training=None):
        if not training:
            return x
        return x * ops.cast(keras.random.uniform((ops.shape(x)[0], 1), seed=self.seed_generator) < 0.5, x.dtype) * 2


def attention(i):
    words = layers.Reshape((2, 2))(i)
    return keras.Model(i, layers.Flatten()(layers.MultiHeadAttention(2, 4, dropout=0.5)(words, words)))


NETWORKS = {
    "dropout": lambda: mlp(layers.Dropout(0.5)),
    "gaussian": lambda: mlp(layers.GaussianDropout(0.5)),
    "alpha": lambda: mlp(layers.AlphaDropout(0.5)),
    "noise": lambda: mlp(layers.GaussianNoise(1.0)),
    "nested": lambda: mlp(keras.Sequential([layers.Dense(8), keras.Sequential([layers.Dropout(0.5)])])),
    "spatial": lambda: mlp(layers.Reshape((4, 4)), layers.SpatialDropout1D(0.5), layers.Flatten()),
    "attention": lambda: attention(keras.Input((4,))),
    "lstm": lambda: mlp(layers.Reshape((4, 4)), layers.LSTM(5, dropout=0.5)),
    "recurrent": lambda: mlp(layers.Reshape((4, 4)), layers.Bidirectional(layers.GRU(5, recurrent_dropout=0.5))),
    "own": lambda: mlp(DropPath()),
    "written": lambda: Written(layers.Dense(16), layers.Dropout(0.5), layers.Dense(3)),
    "shared by rows": lambda: mlp(layers.Dropout(0.5, noise_shape=(1, 16))),
    "batch norm": lambda: mlp(layers.BatchNormalization(), layers.Dropout(0.5)),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_pass_has_masks_of_its_own_in_either_mode(name, training):
    net, x = NETWORKS[name](), ops.convert_to_tensor(np.random.default_rng(0).normal(size=(5, 4)).astype("float32"))
    plain = net(x)
    drawn = bb.MonteCarlo(net, n_passes=4)(x, training=training)
    assert drawn.shape == (5, 4, plain.shape[-1])
    for i in range(4):
        for j in range(i):
            assert not torch.equal(drawn[:, i], drawn[:, j])
    if not training:
        assert torch.equal(net(x), plain)  # as it was: neither dropout nor statistics


@pytest.mark.parametrize("name", ["dropout", "written", "own", "shared by rows"])
def test_the_passes_are_those_of_the_network_in_training(name):
    """Mean and spread over many passes agree with the network called again and again; rows keep their places."""
    net, x = NETWORKS[name](), np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    with torch.no_grad():
        ours = bb.MonteCarlo(net, n_passes=80)(x)
        theirs = torch.stack([net(x, training=True) for _ in range(80)], 1)
    error = (ours.var(1) + theirs.var(1)).div(80).sqrt()
    assert ((ours.mean(1) - theirs.mean(1)).abs() < 5 * error).all()
    torch.testing.assert_close(ours.std(1), theirs.std(1), rtol=0.5, atol=0)


def test_rows_are_repeated_only_where_they_are_known_to_be_apart():
    apart = {name: keeps_rows_apart(net(), training=True) for name, net in NETWORKS.items()}
    assert {name for name, known in apart.items() if not known} == {"own", "written", "shared by rows", "batch norm"}
    assert keeps_rows_apart(NETWORKS["batch norm"](), training=False)
    i = keras.Input((4,))
    mixed = keras.Model(i, layers.Dropout(0.5)(i - ops.mean(i, axis=0)))
    fixed = keras.Sequential([keras.Input(batch_shape=(5, 4)), layers.Dropout(0.5)])
    for net in (mixed, fixed):
        assert not keeps_rows_apart(net, training=False)
        assert bb.MonteCarlo(net, 3)(ops.ones((5, 4))).shape == (5, 3, 4)
    assert float(ops.max(ops.abs(bb.MonteCarlo(mixed, 3)(ops.ones((5, 4)))))) == 0.0


def test_rows_share_a_mask_where_the_layer_says_so():
    drawn = bb.MonteCarlo(layers.Dropout(0.5, noise_shape=(1, 8)), 20)(ops.ones((6, 8)))
    assert torch.equal(drawn, drawn[:1].expand(6, -1, -1))
    assert len({tuple(row.tolist()) for row in drawn[0]}) > 10


def test_batch_norm_follows_the_caller_and_moves_once_a_call():
    def network():
        keras.utils.set_random_seed(3)
        return mlp(layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5))

    x = np.random.default_rng(0).normal(3, 2, size=(50, 4)).astype("float32")
    once, often = network(), network()
    once(x, training=True)
    drawn = bb.MonteCarlo(often, 5)(x, training=True)
    statistics = [net.layers[1].non_trainable_variables for net in (once, often)]
    for a, b in zip(*statistics, strict=True):
        torch.testing.assert_close(a.value, b.value)
        assert a.value.abs().sum() > 0.1
    before = [v.value.clone() for v in statistics[1]]
    inferred = bb.MonteCarlo(often, 5)(x, training=False)
    assert all(torch.equal(v.value, b) for v, b in zip(statistics[1], before, strict=True))
    assert (drawn.mean((0, 1)) - inferred.mean((0, 1))).abs().max() > 0.1  # statistics of the batch, and those kept


def test_statistics_behind_dropout_move_by_the_mean_of_the_passes():
    net = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5), layers.BatchNormalization(momentum=0.0)])
    x = np.random.default_rng(0).normal(size=(20, 8)).astype("float32")
    seen, inner = [], net.layers[1]
    moments = inner._moments
    inner._moments = lambda *args: seen.append(moments(*args)) or seen[-1]
    bb.MonteCarlo(net, 6)(x, training=True)
    assert len(seen) == 6
    torch.testing.assert_close(inner.moving_mean.value, torch.stack([mean for mean, _ in seen]).mean(0))
    torch.testing.assert_close(inner.moving_variance.value, torch.stack([var for _, var in seen]).mean(0))


def test_a_frozen_batch_norm_stays():
    net = mlp(layers.BatchNormalization(), layers.Dropout(0.5))
    net.layers[1].trainable = False
    bb.MonteCarlo(net, 3)(ops.ones((5, 4)) * 7, training=True)
    assert not net.layers[1].moving_mean.value.any()


@keras.saving.register_keras_serializable("test")
class Block(layers.Layer):
    """Draws by itself and has a batch norm inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator, self.norm = keras.random.SeedGenerator(1), layers.BatchNormalization()

    def call(self, x, training=None):
        x = self.norm(x, training=training)
        return keras.random.dropout(x, 0.5, seed=self.seed_generator) if training else x


def test_what_is_inside_a_layer_that_draws_is_not_switched_with_it():
    block = Block()
    x = np.random.default_rng(0).normal(5, 1, size=(40, 8)).astype("float32")
    drawn = bb.MonteCarlo(block, 50)(x)
    assert (drawn == 0).float().mean().sub(0.5).abs() < 0.05
    assert not block.norm.moving_mean.value.any()
    bb.MonteCarlo(block, 2)(x, training=True)
    assert block.norm.moving_mean.value.all()


def test_losses_of_activities_count_once():
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    for make in (keras.Sequential, lambda parts: Written(*parts)):
        net = make([layers.Dense(3, activity_regularizer="l2"), layers.Dropout(0.5)])
        net(x)
        (alone,) = net.losses
        model = bb.MonteCarlo(net, 6)
        model(x)
        torch.testing.assert_close(sum(model.losses), alone)


def test_masks_of_tokens_reach_the_loss():
    net = keras.Sequential([layers.Embedding(9, 8, mask_zero=True), layers.Dropout(0.5), layers.Dense(3)])
    x, y = np.array([[1, 2, 0, 0], [3, 0, 0, 0]]), np.array([[0, 1, 2, 2], [1, 0, 0, 0]])
    for model in (bb.MonteCarlo(net, 4), bb.MonteCarlo(Written(*net.layers), 4)):
        outputs = model(x)
        value = bb.CrossEntropy(0.5)(y, outputs)
        each = bb.CrossEntropy(0.5, reduction="none")(y, outputs.clone())
        torch.testing.assert_close(value, each[[0, 0, 1], [0, 1, 0]].mean())


def test_other_threads_and_errors_leave_the_network_as_it_was():
    seen, fails = [], []

    class Peek(layers.Layer):
        def call(self, x):
            thread = threading.Thread(target=lambda: seen.append(float(ops.mean(dropout(ops.ones((9, 9)))))))
            thread.start()
            thread.join()
            if fails:
                raise RuntimeError("on the way")
            return x

    dropout = layers.Dropout(0.5)
    net = Written(dropout, Peek())
    bb.MonteCarlo(net, 1)(ops.ones((3, 4)))
    fails.append(True)
    with pytest.raises(RuntimeError, match="on the way"):
        bb.MonteCarlo(net, 2)(ops.ones((3, 4)))
    assert len(seen) > 1
    assert set(seen) == {1.0}
    assert float(ops.min(dropout(ops.ones((9, 9))))) == 1.0
    assert "call" not in vars(dropout)


@pytest.mark.parametrize(
    "middle",
    [
        [],
        [layers.Dropout(0.0)],
        [layers.Reshape((4, 4)), layers.LSTM(3)],
        [layers.Reshape((4, 4, 1)), layers.RandomFlip(), layers.Flatten()],
    ],
    ids=["plain", "rate 0", "lstm", "augmented"],
)
def test_a_network_that_draws_nothing_is_refused(middle):
    net = mlp(*middle)
    with pytest.raises(ValueError, match=r"must have a random layer with a rate above 0; .*keras.layers.Dropout"):
        bb.MonteCarlo(net)
    with pytest.raises(ValueError, match="must have a random layer"):
        bb.predict_classification(net, np.ones((2, 4)))


def test_dropout_that_is_never_called_is_refused():
    class Idle(keras.Model):
        def __init__(self):
            super().__init__()
            self.dropout, self.dense = layers.Dropout(0.5), layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    with pytest.raises(ValueError, match=r"'dropout[_0-9]*' and calls none of them"):
        bb.MonteCarlo(Idle())(ops.ones((2, 3)))


def test_a_torch_module_inside_is_refused():
    wrapped = layers.TorchModuleWrapper(torch.nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"TorchModuleWrapper, whose dropout.*Use bbalpha.sample"):
        bb.MonteCarlo(keras.Sequential([keras.Input((4,)), wrapped, layers.Dropout(0.5)]))


# ------------------------------------------------------------------------------ models


def two_classes(n=200):
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=n)
    return (rng.normal(size=(n, 4)) + 3 * y[:, None]).astype("float32"), y


def test_fit_evaluate_predict_save_and_load(tmp_path):
    x, y = two_classes()
    net = mlp(layers.BatchNormalization(momentum=0.5), layers.ReLU(), layers.Dropout(0.3), units=2)
    model = bb.MonteCarlo(net, n_passes=5)
    nll = keras.metrics.MeanMetricWrapper(bb.CrossEntropy(1.0), name="nll")
    model.compile(keras.optimizers.Adam(0.02), loss=bb.CrossEntropy(0.5), metrics=[bb.Accuracy(), nll])
    history = model.fit(x, y, epochs=3, batch_size=50, validation_data=(x, y), verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert history["val_accuracy"][-1] > 0.95
    scores = model.evaluate(x, y, verbose=0, return_dict=True)
    assert scores["accuracy"] > 0.95
    assert scores["nll"] <= scores["loss"] + 0.02  # the loss falls as alpha grows
    assert model.predict(x, verbose=0).shape == (200, 5, 2)

    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(again, bb.MonteCarlo)
    assert (again.n_passes, again.loss.alpha) == (5, 0.5)
    for a, b in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    both = [bb.predict_classification(m, x, n_passes=20, seed=3) for m in (model, again)]
    assert torch.equal(both[0].log_probs, both[1].log_probs)
    assert again.evaluate(x, y, verbose=0, return_dict=True)["accuracy"] > 0.95


def test_a_model_inside_a_functional_one_with_several_outputs():
    i, j = keras.Input((4,), name="i"), keras.Input((4,), name="j")
    h = layers.Dropout(0.5)(layers.Concatenate()([i, j]))
    net = keras.Model({"i": i, "j": j}, {"a": layers.Dense(2)(h), "b": layers.Dense(3)(h)})
    outer = keras.Model([i, j], bb.MonteCarlo(net, 6)({"i": i, "j": j}))
    found = outer([np.ones((5, 4)), np.zeros((5, 4))])
    assert (tuple(found["a"].shape), tuple(found["b"].shape)) == ((5, 6, 2), (5, 6, 3))
    single = keras.Model(net.input, net.output["a"])
    p = bb.predict_classification(single, {"i": np.ones((5, 4)), "j": np.zeros((5, 4))}, n_passes=7)
    assert p.probs.shape == (5, 2)
    with pytest.raises(TypeError, match=r"must return one tensor .* got dict. Make a keras.Model of the output"):
        bb.predict_classification(net, {"i": np.ones((5, 4)), "j": np.zeros((5, 4))})
    with pytest.raises(ValueError, match=r"same number of rows; got \[4, 5\]"):
        bb.predict_classification(single, {"i": np.ones((5, 4)), "j": np.zeros((4, 4))})


def test_accuracy_is_that_of_the_mean_probability():
    y_pred, y = torch.randn(50, K, C) * 3, torch.randint(C, (50,))
    expected = (y_pred.softmax(-1).mean(1).argmax(-1) == y).float().mean()
    for target in (y, y[:, None], torch.nn.functional.one_hot(y, C)):
        assert bb.Accuracy()(target, y_pred) == expected
        assert bb.Accuracy(from_logits=False)(target, y_pred.softmax(-1)) == expected
    yes, logits = torch.randint(2, (50,)), y_pred[..., 0]
    expected = ((logits.sigmoid().mean(1) > 0.5) == yes).float().mean()
    for target in (yes, yes[:, None]):
        assert bb.Accuracy()(target, logits) == expected
        assert bb.Accuracy(from_logits=False)(target, logits.sigmoid()[..., None]) == expected
    assert bb.Accuracy()(y, y_pred, sample_weight=(y == y[0]).float()) != expected
    config = keras.saving.serialize_keras_object(bb.Accuracy(from_logits=False))
    assert not keras.saving.deserialize_keras_object(config).from_logits


# ------------------------------------------------------------------------------ prediction


@pytest.mark.parametrize("name", ["dropout", "written"])
def test_a_prediction_is_that_of_the_passes(name):
    net, x = NETWORKS[name](), np.random.default_rng(0).normal(size=(11, 4)).astype("float32")
    p = bb.predict_classification(net, x, n_passes=30, batch_size=64, seed=1)
    again = bb.predict_classification(bb.MonteCarlo(net, 3), x, n_passes=30, batch_size=64, seed=1)
    assert torch.equal(p.log_probs, again.log_probs)
    assert p.n_passes == 30
    assert (p.mutual_information > 0).all()
    torch.testing.assert_close(p.probs.sum(1), torch.ones(11))
    with torch.no_grad():
        many = bb.MonteCarlo(net, 80)(x).softmax(-1).mean(1)
    for size in (7, 10_000) if name == "dropout" else (64,):
        close = bb.predict_classification(net, x, n_passes=80, batch_size=size).probs
        torch.testing.assert_close(close, many, rtol=0, atol=0.25)


def test_a_prediction_asks_for_no_more_rows_at_a_time_than_allowed():
    seen = []

    for net in (mlp(layers.Dropout(0.5)), Written(layers.Dense(3), layers.Dropout(0.5))):
        net(np.ones((1, 4)))
        net.layers[0].call = lambda x, training=None, call=net.layers[0].call: seen.append(x.shape[0]) or call(x)
        for size in (3, 20, 500):
            del seen[:]
            assert bb.predict_classification(net, np.ones((11, 4)), n_passes=8, batch_size=size).probs.shape == (11, 3)
            assert max(seen) <= size
            assert sum(seen) >= 11 * 8


def test_a_seed_leaves_the_generators_as_they_were():
    for net in (mlp(layers.Dropout(0.5)), mlp(layers.Dropout(0.5, seed=7)), mlp(DropPath())):
        x, state = np.ones((3, 4), "float32"), net.layers[1].seed_generator.state
        before = state.value.clone(), torch.get_rng_state()
        one, two = (bb.predict_classification(net, x, n_passes=5, seed=-2).log_probs for _ in range(2))
        assert torch.equal(one, two)
        assert torch.equal(state.value, before[0])
        assert torch.equal(torch.get_rng_state(), before[1])
        one, two = (bb.predict_classification(net, x, n_passes=5).log_probs for _ in range(2))
        assert not torch.equal(one, two)


def test_probabilities_and_yes_or_no_are_predicted_as_their_logits():
    x = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")
    for units, activation in ((3, "softmax"), (1, "sigmoid")):
        net = mlp(layers.Dropout(0.5), units=units)
        ended = keras.Sequential([*net.layers, layers.Activation(activation)])
        p = bb.predict_classification(net, x, n_passes=20, seed=0)
        q = bb.predict_classification(ended, x, n_passes=20, seed=0, from_logits=False)
        torch.testing.assert_close(p.log_probs, q.log_probs, rtol=1e-4, atol=1e-5)
        assert p.probs.shape == (9, max(2, units))
        with pytest.raises(ValueError, match=r"got other numbers. Use from_logits=True"):
            bb.predict_classification(net, 9 * x, n_passes=20, from_logits=False)
    softmax = keras.Sequential([*mlp(layers.Dropout(0.5)).layers, layers.Softmax()])
    with pytest.raises(ValueError, match=r"got probabilities. Use from_logits=False"):
        bb.predict_classification(softmax, x, n_passes=5)


def test_regression_with_every_kind_of_noise():
    x = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")
    net = mlp(layers.Dropout(0.5), units=4)
    p = bb.predict_regression(net, x, n_passes=40, precision=4.0, seed=0)
    assert p.outputs.shape == (40, 9, 4)
    torch.testing.assert_close(p.aleatoric_std, torch.full((9, 4), 0.5))
    assert (p.epistemic_std > 0).all()
    assert p.log_prob(torch.zeros(9, 4)).shape == (9,)
    assert not bb.predict_regression(net, x, n_passes=4).aleatoric_std.any()
    q = bb.predict_regression(net, x, n_passes=40, precision="predicted", seed=0)
    assert torch.equal(q.outputs, p.outputs[..., :2])
    torch.testing.assert_close(q.precision, p.outputs[..., 2:].exp())
    with pytest.raises(ValueError, match="`precision` must be a finite number above 0; got 'known'"):
        bb.predict_regression(net, x, precision="known")
    with pytest.raises(ValueError, match=r"means and log precisions \(N, 2 D\).*got \(9, 3\)"):
        bb.predict_regression(mlp(layers.Dropout(0.5)), x, precision="predicted")


def test_numbers_that_are_none_are_told_with_their_row():
    net = mlp(layers.Dropout(0.5))
    x = np.ones((40, 4), "float32")
    x[37] = np.nan
    for predict in (bb.predict_classification, bb.predict_regression):
        with pytest.raises(ValueError, match="finite numbers; got nan in pass 0, row 37"):
            predict(net, x, n_passes=10, batch_size=100)


def test_the_prior_is_the_kl_per_data_point():
    net = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(5, 2, bias=False))
    theirs = bbalpha.prior_kl(net, length_scale=0.7, n_data=30)
    layer = layers.Dense(2, use_bias=False, kernel_regularizer=bb.l2_prior(0.7, 30, dropout=0.3))
    layer.build((None, 5))
    layer.set_weights([net[1].weight.detach().numpy().T])
    torch.testing.assert_close(layer.losses[0], theirs)


# ------------------------------------------------------------------------------ other backends, or none


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    monkeypatch.delitem(sys.modules, "bbalpha.integrations.keras")
    with pytest.raises(ImportError, match=r"not installed. pip install 'bbalpha\[keras\]'.*KERAS_BACKEND=torch"):
        importlib.import_module("bbalpha.integrations.keras")


def test_everything_works_on_the_jax_backend(tmp_path):
    code = Path(__file__).with_name("keras_on_jax.py")
    env = os.environ | {"KERAS_BACKEND": "jax", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(code)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
