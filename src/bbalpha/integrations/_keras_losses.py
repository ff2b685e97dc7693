"""The alpha objective as Keras losses, and accuracy as a metric, on outputs (N, K, ...): K passes behind the rows.

    loss = CrossEntropy(alpha=0.5)(y_true, y_pred)          # (N,), (N, K, C) -> ()

They are named in `bbalpha.integrations.keras`. Inside a compiled step no sentence can be raised: there a target that
cannot be makes the loss nan.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import keras  # type: ignore[import-untyped, import-not-found, unused-ignore]
from keras import ops

from bbalpha.checks import check_alpha, check_number
from bbalpha.integrations._keras_passes import readable
from bbalpha.integrations._numbers import log_mean_exp

SEVERAL = 4  # sums of 1 that are no chance any more
registered: Callable[[type], Any] = keras.saving.register_keras_serializable(package="bbalpha")


class _Objective(keras.losses.Loss):  # type: ignore[misc, unused-ignore]
    """The alpha objective, Eq. 7, of the losses of K passes; a subclass says what these are."""

    def __init__(self, alpha: float, reduction: str, name: str) -> None:
        super().__init__(name=name, reduction=reduction, dtype=_real_dtype())
        self.alpha = check_alpha(alpha)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """The objective of every row (and position) by itself: (N, ...), (N, K, ...) -> (N, ...)."""
        if len(y_pred.shape) < 2:
            raise ValueError(f"`y_pred` must have shape (N, K, ...), passes second; got {tuple(y_pred.shape)}.")
        losses = self.pass_losses(wide(y_true), wide(y_pred))
        return log_mean_exp(losses, self.alpha, 1, ops, ops.stop_gradient)

    def pass_losses(self, y_true: Any, y_pred: Any) -> Any:
        """The loss of every pass (N, K, ...)."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        return {**super().get_config(), "alpha": self.alpha}


@registered
class CrossEntropy(_Objective):
    """The alpha objective for classification.

    Args:
        alpha: Any finite number; 0 is MC dropout as usual, 1 the log of the mean probability.
        from_logits: False for a network that ends in a softmax. Taking one for the other is refused.
        reduction: As in every Keras loss; with `sample_weight`, "mean_with_sample_weight" is what the rest of
            bbalpha calls "mean".
        name: As for any Keras loss.

    `y_pred` is (N, K, C), or (N, K, ..., C) with positions, each of which has a log-sum-exp of its own; `y_true` holds
    class indices (N, ...) or (N, ..., 1), or one-hot or soft targets (N, ..., C).

    >>> round(float(CrossEntropy(alpha=0.5)(ops.array([0, 1, 3]), ops.zeros((3, 10, 4)))), 4)      # log 4
    1.3863
    """

    def __init__(
        self,
        alpha: float = 0.5,
        *,
        from_logits: bool = True,
        reduction: str = "sum_over_batch_size",
        name: str = "cross_entropy",
    ) -> None:
        super().__init__(alpha, reduction, name)
        self.from_logits = from_logits

    def pass_losses(self, y_true: Any, y_pred: Any) -> Any:
        """Minus the log-probability of the target in every pass (N, K, ...)."""
        if len(y_pred.shape) < 3 or y_pred.shape[-1] == 1:
            raise ValueError(
                f"`y_pred` must have shape (N, K, C), classes last, at least 2; got {tuple(y_pred.shape)}. Wrap the "
                "network in MonteCarlo; for one logit a row use BinaryCrossEntropy."
            )
        log_probs = _log_probs(y_pred, from_logits=self.from_logits)
        passes = ops.expand_dims(y_true, 1)
        if _fits(passes, y_pred, but=1):
            return -ops.sum(passes * log_probs, -1)  # the paper's code: y_c log p_c inside the log-sum-exp
        index = _class_index(y_true, y_pred)  # (N, ...)
        bad = ops.any((index < 0) | (index >= y_pred.shape[-1]) | (index != ops.floor(index)))
        place = ops.cast(ops.clip(index, 0, y_pred.shape[-1] - 1), "int32")
        place = ops.expand_dims(ops.repeat(ops.expand_dims(place, 1), y_pred.shape[1], axis=1), -1)
        losses = -ops.squeeze(ops.take_along_axis(log_probs, place, axis=-1), -1)
        return _unless(bad, losses, f"`y_true` must hold class indices from 0 to {y_pred.shape[-1] - 1}; got others.")

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        return {**super().get_config(), "from_logits": self.from_logits}


@registered
class BinaryCrossEntropy(_Objective):
    """The alpha objective for yes/no targets.

    Args:
        alpha: Any finite number; 0 is MC dropout as usual.
        from_logits: False for a network that ends in a sigmoid. Unlike those of a softmax, such outputs cannot be
            told from logits: say so.
        reduction: As in `CrossEntropy`.
        name: As for any Keras loss.

    `y_pred` is (N, K) or (N, K, ...), with one log-sum-exp for each label of a row; `y_true` is of the shape of one
    pass, from 0 to 1; a last axis of 1 may be left out.

    >>> round(float(BinaryCrossEntropy()(ops.array([0, 1, 1]), ops.zeros((3, 5, 1)))), 4)          # log 2
    0.6931
    """

    def __init__(
        self,
        alpha: float = 0.5,
        *,
        from_logits: bool = True,
        reduction: str = "sum_over_batch_size",
        name: str = "binary_cross_entropy",
    ) -> None:
        super().__init__(alpha, reduction, name)
        self.from_logits = from_logits

    def pass_losses(self, y_true: Any, y_pred: Any) -> Any:
        """Minus the log-probability of the target in every pass (N, K, ...)."""
        y = _like_one_pass(y_true, y_pred)
        logits = y_pred if self.from_logits else _logit(y_pred)
        losses = y * ops.softplus(-logits) + (1 - y) * ops.softplus(logits)
        return _unless(ops.any((y < 0) | (y > 1)), losses, "`y_true` must lie in [0, 1]; got values outside.")

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        return {**super().get_config(), "from_logits": self.from_logits}


@registered
class GaussianNLL(_Objective):
    """The alpha objective for regression with Gaussian noise, normalising constant included.

    Args:
        alpha: Any finite number; 0 is MC dropout as usual.
        precision: tau, one over the noise variance: a number, or "predicted" by the network, whose last axis then
            holds the D means and after them their D log precisions.
        reduction: As in `CrossEntropy`.
        name: As for any Keras loss.

    `y_pred` is (N, K, D) or (N, K), with a predicted precision (N, K, 2 D); `y_true` is (N, D) or, for one output,
    (N,). It is never broadcast.

    >>> round(float(GaussianNLL(precision=1.0)(ops.zeros((3, 1)), ops.zeros((3, 10, 1)))), 4)      # log(2 pi) / 2
    0.9189
    """

    def __init__(
        self,
        alpha: float = 0.5,
        *,
        precision: float | Literal["predicted"],
        reduction: str = "sum_over_batch_size",
        name: str = "gaussian_nll",
    ) -> None:
        super().__init__(alpha, reduction, name)
        self.precision: float | Literal["predicted"] = "predicted"
        if precision != "predicted":
            if isinstance(precision, str):
                raise ValueError(f'`precision` must be "predicted" or a positive number; got {precision!r}.')
            self.precision = check_number("precision", precision, above=0)

    def pass_losses(self, y_true: Any, y_pred: Any) -> Any:
        """Minus the log-density of the target in every pass (N, K)."""
        mean, tau, log_tau = y_pred, self.precision, 0.0
        if isinstance(tau, str):
            if len(y_pred.shape) < 3 or y_pred.shape[-1] % 2:
                raise ValueError(
                    f"`y_pred` must have shape (N, K, 2 D), means and log precisions; got {tuple(y_pred.shape)}. "
                    "Give the last layer two units an output."
                )
            mean, log_tau = ops.split(y_pred, 2, axis=-1)
            tau = ops.exp(log_tau)
        else:
            log_tau = math.log(tau)
        errors = ops.square(_like_one_pass(y_true, mean) - mean)
        losses = 0.5 * (tau * errors - log_tau + math.log(2 * math.pi))
        return ops.sum(losses, axis=tuple(range(2, len(losses.shape)))) if len(losses.shape) > 2 else losses

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        return {**super().get_config(), "precision": self.precision}


@registered
class AlphaLoss(_Objective):
    """The alpha objective around any Keras loss.

    The loss sees the K passes of N rows as N * K rows, unreduced, and what it returns is summed to one number a row.
    It should be minus a log-likelihood: the objective is not scale-invariant, and Keras takes the mean over outputs
    ("mse" of D outputs stands for a noise precision of 2 / D). A loss that mixes rows is refused.

    Args:
        loss: A name ("huber"), an instance or a function (y_true, y_pred) -> (rows, ...).
        alpha: Any finite number; 0 is MC dropout as usual.
        reduction: As in `CrossEntropy`; that of `loss` is not used.
        name: As for any Keras loss.

    >>> float(AlphaLoss("huber", alpha=0.5)(ops.ones((3, 2)), ops.zeros((3, 10, 2))))
    0.5
    """

    def __init__(
        self, loss: Any, alpha: float = 0.5, *, reduction: str = "sum_over_batch_size", name: str = "alpha_loss"
    ) -> None:
        super().__init__(alpha, reduction, name)
        self.loss = keras.losses.get(loss)
        if self.loss is None:
            raise TypeError("`loss` must be a Keras loss, its name or a function; got None.")

    def pass_losses(self, y_true: Any, y_pred: Any) -> Any:
        """What the loss says of every pass (N, K)."""
        K = y_pred.shape[1]
        target = ops.squeeze(_like_one_pass(y_true, y_pred), 1) if _of_one_pass(y_true, y_pred) else y_true
        rows = ops.repeat(target, K, axis=0), ops.reshape(y_pred, (-1, *y_pred.shape[2:]))  # (N * K, ...)
        loss = self.loss.call if isinstance(self.loss, keras.losses.Loss) else self.loss
        losses = loss(*rows)
        if not losses.shape or losses.shape[0] != rows[1].shape[0]:
            raise ValueError(
                f"`loss` must return one value for each of the {rows[1].shape[0]} rows; got {tuple(losses.shape)}."
            )
        _check_rows(loss, rows, losses)
        return ops.sum(ops.reshape(losses, (-1, K, math.prod(losses.shape[1:]))), -1)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        return {**super().get_config(), "loss": keras.saving.serialize_keras_object(self.loss)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AlphaLoss":
        """The loss of such a configuration."""
        return cls(**{**config, "loss": keras.saving.deserialize_keras_object(config["loss"])})


# ------------------------------------------------------------------------------ a metric


@registered
class Accuracy(keras.metrics.MeanMetricWrapper):  # type: ignore[misc, unused-ignore]
    """How often the likeliest class is right, by the mean probability of the K passes.

    Keras's own "accuracy" does not read (N, K, C). One logit a row, (N, K) or (N, K, 1), is yes or no.

    Args:
        from_logits: False for a network that ends in a softmax or sigmoid.
        name: As for any Keras metric.

    >>> float(Accuracy()(ops.array([1, 0]), ops.array([[[0.0, 1.0], [0.0, 1.0]], [[0.0, 9.0], [1.0, 0.0]]])))
    0.5
    """

    def __init__(self, *, from_logits: bool = True, name: str = "accuracy") -> None:
        super().__init__(self._hits, name=name)
        self.from_logits = from_logits

    def _hits(self, y_true: Any, y_pred: Any) -> Any:
        """1 where the likeliest class is that of the target: (N, ...), (N, K, ...) -> (N, ...)."""
        y_true, y_pred = wide(ops.convert_to_tensor(y_true)), wide(ops.convert_to_tensor(y_pred))
        if len(y_pred.shape) == 2 or y_pred.shape[-1] == 1:
            target = ops.squeeze(_like_one_pass(y_true, y_pred), 1) > 0.5
            probs = ops.sigmoid(y_pred) if self.from_logits else y_pred
            return ops.cast((ops.mean(probs, 1) > 0.5) == target, "float32")
        probs = ops.mean(ops.exp(_log_probs(y_pred, from_logits=self.from_logits)), 1)  # (N, ..., C)
        soft = _fits(ops.expand_dims(y_true, 1), y_pred, but=1)
        target = ops.argmax(y_true, -1) if soft else ops.cast(_class_index(y_true, y_pred), "int32")
        return ops.cast(ops.argmax(probs, -1) == ops.cast(target, "int32"), "float32")

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        return {"from_logits": self.from_logits, "name": self.name}


# ------------------------------------------------------------------------------ what the network returned


def _log_probs(y_pred: Any, *, from_logits: bool) -> Any:
    """Log-probabilities of the classes on the last axis; refuses logits for probabilities, and the other way round."""
    far = ops.abs(ops.sum(y_pred, -1) - 1)
    if not from_logits:
        return _unless(
            ops.any(y_pred < 0) | ops.any(far > 1e-2),
            ops.log(ops.maximum(y_pred, keras.config.epsilon())),
            "`y_pred` must hold probabilities where from_logits=False; got values that do not sum to 1 in every pass. "
            "Use from_logits=True, or end the network in a softmax.",
        )
    log_probs = ops.log_softmax(y_pred, axis=-1)
    if math.prod(d or SEVERAL for d in far.shape) < SEVERAL:
        return log_probs  # a few logits may sum to 1 by chance
    return _unless(
        ops.all(y_pred >= 0) & ops.all(far < 1e-4),
        log_probs,
        "`y_pred` must hold logits; got probabilities, which sum to 1 in every pass. Use from_logits=False, or leave "
        "the softmax out.",
    )


def _logit(probs: Any) -> Any:
    """Logits of the probabilities of yes."""
    least = keras.config.epsilon()
    inner = ops.clip(probs, least, 1 - least)
    return _unless(
        ops.any((probs < 0) | (probs > 1)),
        ops.log(inner) - ops.log1p(-inner),
        "`y_pred` must hold probabilities where from_logits=False; got values outside [0, 1]. Use from_logits=True.",
    )


# ------------------------------------------------------------------------------ what it is compared with


def _class_index(y_true: Any, y_pred: Any) -> Any:
    """Class indices (N, ...), from (N, ...) or (N, ..., 1)."""
    column = len(y_true.shape) == len(y_pred.shape) - 1 and y_true.shape[-1] == 1
    index = ops.squeeze(y_true, -1) if column else y_true
    if not _fits(ops.expand_dims(index, 1), y_pred[..., 0], but=1):
        want = ("N", *y_pred.shape[2:-1])
        raise ValueError(
            f"`y_true` must hold class indices {_shown(want)} or class weights {_shown((*want, y_pred.shape[-1]))} for "
            f"`y_pred` {tuple(y_pred.shape)}; got {tuple(y_true.shape)}."
        )
    return index


def _like_one_pass(y_true: Any, y_pred: Any) -> Any:
    """The target with an axis of 1 for the passes (N, 1, ...); a last axis of 1 may be one too few, or one too many."""
    if not _of_one_pass(y_true, y_pred):
        raise ValueError(
            f"`y_true` must have the shape of one pass, {_shown(('N', *y_pred.shape[2:]))}, for `y_pred` "
            f"{tuple(y_pred.shape)}; got {tuple(y_true.shape)}. It is never broadcast: reshape it."
        )
    y = ops.expand_dims(y_true, 1)
    if len(y.shape) < len(y_pred.shape):
        return ops.expand_dims(y, -1)
    return ops.squeeze(y, -1) if len(y.shape) > len(y_pred.shape) else y


def _of_one_pass(y_true: Any, y_pred: Any) -> bool:
    """Whether the target has the shape of one pass, but for a last axis of 1."""
    y = ops.expand_dims(y_true, 1)
    if len(y.shape) == len(y_pred.shape) - 1 and y_pred.shape[-1] == 1:
        y = ops.expand_dims(y, -1)
    elif len(y.shape) == len(y_pred.shape) + 1 and y.shape[-1] == 1:
        y = ops.squeeze(y, -1)
    return _fits(y, y_pred, but=1)


def _fits(a: Any, b: Any, *, but: int) -> bool:
    """Whether two shapes are the same, one axis left out, as far as they are known."""
    if len(a.shape) != len(b.shape):
        return False
    pairs = [pair for axis, pair in enumerate(zip(a.shape, b.shape, strict=True)) if axis != but]
    return all(m is None or n is None or m == n for m, n in pairs)


def _shown(shape: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _check_rows(loss: Callable[[Any, Any], Any], rows: tuple[Any, Any], losses: Any) -> None:
    """Refuse a loss that gives a row another value beside other rows, where values can be read."""
    if not readable(losses) or losses.shape[0] < 3:
        return
    first = loss(*(r[:2] for r in rows))
    same = first.shape[1:] == losses.shape[1:] and not bool(
        ops.any(ops.abs(first - losses[:2]) > 1e-4 * (1 + ops.abs(first)))
    )
    if not same:
        raise ValueError(
            f"`loss` must give each row a value of its own; got {tuple(losses.shape)} that mixes rows, as by "
            "broadcasting. Give `y_true` the axes of one pass."
        )


def _unless(bad: Any, values: Any, sentence: str) -> Any:
    """`values`; where `bad` holds a ValueError, or nan inside a compiled step."""
    if not readable(bad):
        return ops.where(bad, ops.cast(math.nan, values.dtype), values)
    if bool(bad):
        raise ValueError(sentence)
    return values


def wide(t: Any) -> Any:
    """Half precision, and whole numbers, in float32."""
    double = keras.backend.standardize_dtype(t.dtype) == "float64"
    return t if double else ops.cast(t, "float32")


def _real_dtype() -> str:
    """That of Keras, or float32 where that is half precision."""
    return "float64" if keras.config.floatx() == "float64" else "float32"
