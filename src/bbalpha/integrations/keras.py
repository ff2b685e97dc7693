"""Keras 3: the alpha objective as losses, K passes as a model, and predictions with their uncertainty.

Wrap a Keras network that has dropout; its outputs get an axis of K passes behind the rows, (N, K, C), as in the code
of the paper, and the losses here read that axis. Everything is `keras.ops`: any backend will do.

    model = MonteCarlo(net, n_passes=10)                                   # net: your network, (N, ...) -> (N, C)
    model.compile("adam", loss=CrossEntropy(alpha=0.5), metrics=[Accuracy()])
    model.fit(x, y)
    p = predict_classification(model, x_new)                               # p.probs, p.entropy, p.mutual_information

Losses and metrics see (N, K, ...): K second, where the rest of bbalpha has it first. Inside a compiled step, where no
sentence can be raised, a target that cannot be is answered with a loss of nan.
"""

from collections.abc import Iterator
from typing import Any, Literal

try:
    import keras  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ImportError as error:
    missing = "it is not installed" if error.name == "keras" else f"its backend misses {error.name!r}"
    raise ImportError(
        f"`bbalpha.integrations.keras` needs Keras 3; {missing}. pip install 'bbalpha[keras]', and choose a backend "
        "that is installed before Keras is imported, such as KERAS_BACKEND=torch."
    ) from error
import torch
from keras import ops

from bbalpha.checks import check_any_seed, check_count, check_number, check_share
from bbalpha.integrations._blocks import classification_of_blocks, regression_of_blocks
from bbalpha.integrations._keras_losses import (
    SEVERAL,
    Accuracy,
    AlphaLoss,
    BinaryCrossEntropy,
    CrossEntropy,
    GaussianNLL,
    registered,
    wide,
)
from bbalpha.integrations._keras_passes import drawing_layers, keeps_rows_apart, run_passes, seeded
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction
from bbalpha.priors import weight_decay

__all__ = [
    "Accuracy",
    "AlphaLoss",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "GaussianNLL",
    "MonteCarlo",
    "l2_prior",
    "predict_classification",
    "predict_regression",
]

# ------------------------------------------------------------------------------ the passes


@registered
class MonteCarlo(keras.Model):  # type: ignore[misc, unused-ignore]
    """A Keras model that runs a network K times, with fresh masks: (N, ...) -> (N, K, ...).

    Layers that draw (every kind of dropout, noise, dropout inside attention and recurrent layers) are on in each pass,
    in `fit`, `evaluate` and `predict` alike. Everything else is in the mode that Keras asks for: batch normalisation
    has its own batch in each pass of `fit`, its running statistics move once a step, and they stay in `predict`.

    Args:
        model: Any Keras model or layer with a random layer; its weights are shared, not copied.
        n_passes: K.
        name: As for any Keras model.

    >>> net = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    >>> MonteCarlo(net, n_passes=10)(ops.ones((4, 2))).shape == (4, 10, 3)
    True
    """

    def __init__(self, model: Any, n_passes: int = 10, name: str | None = None) -> None:
        super().__init__(name=name)
        if not isinstance(model, keras.Layer):
            raise TypeError(f"`model` must be a Keras model or layer; got {type(model).__name__}.")
        if model.built:
            drawing_layers(model)  # what is not built shows its layers in the first pass
        self.model = model
        self.n_passes = check_count("n_passes", n_passes)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The outputs of the K passes (N, K, ...)."""
        return run_passes(self.model, inputs, self.n_passes, training=bool(training))

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        network = keras.saving.serialize_keras_object(self.model)
        return {"model": network, "n_passes": self.n_passes, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "MonteCarlo":
        """The model of such a configuration."""
        network = keras.saving.deserialize_keras_object(config["model"], custom_objects=custom_objects)
        return cls(**{**config, "model": network})


# ------------------------------------------------------------------------------ prediction


def predict_classification(
    model: Any,
    x: Any,
    *,
    n_passes: int = 100,
    batch_size: int = 1024,
    from_logits: bool = True,
    seed: int | None = None,
) -> ClassificationPrediction:
    """The predictive distribution over classes of a Keras network, from `n_passes` passes; torch tensors.

    Runs in inference mode, a block of rows at a time; passes are reduced as they come.

    Args:
        model: A `MonteCarlo` (its own `n_passes` are for training) or the network itself, which returns (N, C), or
            (N, ..., C) with positions; one output, (N, 1), means yes or no and gives the classes 0 and 1.
        x: An array, or a list, tuple or dict of arrays, as the network takes them.
        n_passes: K.
        batch_size: How many rows the network sees at a time, a row counted once for each of its passes.
        from_logits: False for a network that ends in a softmax or sigmoid.
        seed: None draws on where the generators of the layers are; an int starts from there and puts them back.

    >>> net = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    >>> p = predict_classification(net, ops.ones((4, 2)), n_passes=20)
    >>> p.probs.shape, p.label.shape, bool((p.mutual_information >= 0).all())
    (torch.Size([4, 3]), torch.Size([4]), True)
    """
    network = _network(model)
    blocks = _blocks(network, x, check_count("n_passes", n_passes), check_count("batch_size", batch_size))
    with seeded(network, check_any_seed(seed)):
        return classification_of_blocks(_as_logits(block, from_logits=from_logits) for block in blocks)


def predict_regression(
    model: Any,
    x: Any,
    *,
    precision: float | Literal["predicted"] | None = None,
    n_passes: int = 100,
    batch_size: int = 1024,
    seed: int | None = None,
) -> RegressionPrediction:
    """The predictive distribution of a real target: a mixture over `n_passes` passes of a Keras network; torch tensors.

    Args:
        model: As in `predict_classification`; returns means (N, D), or with ``precision="predicted"`` means and log
            precisions (N, 2 D).
        x: As in `predict_classification`.
        precision: tau, one over the noise variance, as the loss had it; None knows no noise: aleatoric 0, no density.
        n_passes: K.
        batch_size: As in `predict_classification`.
        seed: As in `predict_classification`.

    >>> net = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    >>> p = predict_regression(net, ops.ones((4, 2)), precision=4.0)
    >>> p.mean.shape, p.aleatoric_std[0]
    (torch.Size([4, 1]), tensor([0.5000]))
    """
    network = _network(model)
    blocks = _blocks(network, x, check_count("n_passes", n_passes), check_count("batch_size", batch_size))
    with seeded(network, check_any_seed(seed)):
        return regression_of_blocks(blocks, precision)


# ------------------------------------------------------------------------------ the prior


def l2_prior(length_scale: float, n_data: int, dropout: float = 0.0) -> Any:
    """The prior N(0, 1/length_scale^2) as the `kernel_regularizer` of a layer behind dropout of rate `dropout`.

    Keras adds l2 * sum(w^2) to the loss, so the KL per data point, l^2 / (2 p N) ||W||^2 with p = 1 - dropout, is
    l2 = l^2 / (2 p N): half of what torch calls weight decay. The loss must be a mean over rows, as it is by default.

    Args:
        length_scale: l; larger pulls the weights closer to 0.
        n_data: N, the rows of the whole training set.
        dropout: The rate of the dropout that feeds the layer; 0 without.

    >>> round(float(l2_prior(1.0, n_data=10, dropout=0.5)(ops.ones((2, 1)))), 4)       # 1/(2 * 0.5) * 2 / 10
    0.2
    """
    decay = weight_decay(
        check_number("length_scale", length_scale, least=0),
        1 - check_share("dropout", dropout),
        check_count("n_data", n_data),
    )
    return keras.regularizers.L2(float(decay) / 2)


# ------------------------------------------------------------------------------ helpers


def _network(model: Any) -> Any:
    """What a MonteCarlo wraps, or the model itself."""
    network = model.model if isinstance(model, MonteCarlo) else model
    if not isinstance(network, keras.Layer):
        raise TypeError(f"`model` must be a Keras model or layer; got {type(network).__name__}.")
    return network


def _blocks(network: Any, x: Any, n_passes: int, batch_size: int) -> Iterator[torch.Tensor]:
    """The passes of blocks of rows (K, n, ...); the network sees no more than `batch_size` rows at a time."""
    n_rows = _count_rows(x)
    if keeps_rows_apart(network, training=False):
        together, rows = min(n_passes, batch_size), max(1, batch_size // n_passes)
    else:
        together, rows = 1, batch_size
    for start in range(0, max(1, n_rows), rows):
        block = keras.tree.map_structure(lambda a: ops.convert_to_tensor(a[start : start + rows]), x)  # noqa: B023
        groups = []
        for _ in range(0, n_passes, together):
            with torch.no_grad():  # the torch backend; to others it says nothing
                groups.append(_as_torch(run_passes(network, block, together, training=False)))
        yield torch.cat(groups, 1)[:, :n_passes].movedim(1, 0)


def _count_rows(x: Any) -> int:
    """The rows of every array in `x`."""
    counts = {len(a) for a in keras.tree.flatten(x)}
    if len(counts) != 1:
        raise ValueError(f"`x` must be arrays with the same number of rows; got {sorted(counts)}.")
    return counts.pop()


def _as_torch(outputs: Any) -> torch.Tensor:
    """A tensor of any backend as one of torch, on its device where it is one; at least float32."""
    if not ops.is_tensor(outputs):
        raise TypeError(
            f"`model` must return one tensor (N, ...); got {type(outputs).__name__}. Make a keras.Model of the output "
            "to predict."
        )
    outputs = wide(outputs)
    return outputs if isinstance(outputs, torch.Tensor) else torch.from_numpy(ops.convert_to_numpy(outputs).copy())


def _as_logits(outputs: torch.Tensor, *, from_logits: bool) -> torch.Tensor:
    """Logits (k, n, ..., C) of what the passes returned."""
    single = outputs.ndim == 2 or outputs.shape[-1] == 1
    far = outputs.clamp(0, 1) - outputs if single else outputs.sum(-1) - 1
    if not from_logits:
        if bool((outputs < 0).any()) or bool((far.abs() > 1e-2).any()):
            raise ValueError(
                "`model` must return probabilities where from_logits=False; got other numbers. Use from_logits=True."
            )
        probs = outputs.double().clamp(1e-30, 1 - 1e-16 if single else 1)
        return (probs.log() - (-probs).log1p() if single else probs.log()).to(outputs.dtype)
    if not single and far.numel() >= SEVERAL and bool((outputs >= 0).all() & (far.abs() < 1e-4).all()):
        raise ValueError("`model` must return logits where from_logits=True; got probabilities. Use from_logits=False.")
    return outputs
