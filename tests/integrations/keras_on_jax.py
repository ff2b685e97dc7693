"""What test_keras.py checks on torch, in few words on the JAX backend; run by it in a process of its own."""

import jax
import keras
import numpy as np
import pytest
import torch
from keras import layers

import bbalpha
from bbalpha.integrations import keras as bb

ALPHAS = (-2.0, 1e-6, 50.0)


def numbers():
    """Values and gradients of compiled losses are those of torch."""
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(6, 7, 4))).astype("float32")
    y = rng.integers(4, size=6)

    def values(outputs):
        return jax.numpy.stack([bb.CrossEntropy(alpha)(y, outputs) for alpha in ALPHAS])

    both = jax.jit(lambda outputs: (values(outputs), jax.jacrev(values)(outputs)))
    found, gradients = both(logits)
    for alpha, value, gradient in zip(ALPHAS, found, gradients, strict=True):
        given = torch.tensor(logits, requires_grad=True)
        theirs = bbalpha.cross_entropy(given.movedim(1, 0), torch.tensor(y), alpha)
        theirs.backward()
        np.testing.assert_allclose(value, theirs.item(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(gradient, given.grad, rtol=1e-6, atol=1e-6)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert np.isnan(both(probs)[0]).all()  # no sentence can be raised in there
    with pytest.raises(ValueError, match="class indices from 0 to 3"):
        bb.CrossEntropy()(y + 3, logits)


def model():
    """A compiled model fits, its statistics move once a step, it predicts, and comes back from a file."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=80)
    x = (rng.normal(size=(80, 4)) + 3 * y[:, None]).astype("float32")
    norm = layers.BatchNormalization(momentum=0.5)
    net = keras.Sequential([keras.Input((4,)), norm, layers.Dropout(0.3), layers.Dense(2)])
    mc = bb.MonteCarlo(net, n_passes=2)
    mc.compile(keras.optimizers.SGD(0.3), loss=bb.CrossEntropy(0.5), metrics=[bb.Accuracy()])
    history = mc.fit(x, y, epochs=9, batch_size=80, verbose=0).history
    np.testing.assert_allclose(norm.moving_mean, x.mean(0) * (1 - 0.5**9), rtol=1e-5)
    assert history["accuracy"][-1] > 0.9
    kept = np.asarray(norm.moving_mean)
    mc.save("model.keras")
    again = keras.saving.load_model("model.keras")
    for a, b in zip(mc.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    both = [bb.predict_classification(m, x, n_passes=20, batch_size=1600, seed=3) for m in (mc, again)]
    assert torch.equal(both[0].log_probs, both[1].log_probs)
    assert (both[0].label.numpy() == y).mean() > 0.9
    np.testing.assert_array_equal(kept, norm.moving_mean)


if __name__ == "__main__":
    assert keras.backend.backend() == "jax"
    keras.utils.set_random_seed(0)
    numbers()
    model()
