"""JAX: the alpha objective as pure functions, K passes by `vmap` over keys, and predictions with their uncertainty.

Shapes and names are those of `bbalpha.objectives`: K passes first, outputs (K, N, ...), targets (N, ...); classes are
last, as in Flax. A network is a function of the rows and a key, (x, key) -> (N, ...):

    def loss(params, x, y, key):
        apply = lambda x, key: net.apply(params, x, deterministic=False, rngs={"dropout": key})
        return cross_entropy(sample(apply, x, n_passes=10, key=key), y, alpha=0.5)

Everything may stand inside jit, grad and vmap. alpha may be a number or a traced array (): vmap trains several alphas
at once. Values are checked where they can be read; inside jit a target that cannot be makes the loss nan.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

try:
    import jax
except ImportError as error:
    raise ImportError("`bbalpha.integrations.jax` needs JAX. pip install 'bbalpha[jax]'.") from error
import jax.numpy as jnp
import numpy as np
import torch

from bbalpha.checks import check_alpha, check_count, check_number
from bbalpha.integrations._blocks import classification_of_blocks, regression_of_blocks
from bbalpha.integrations._numbers import MOST, log_mean_exp
from bbalpha.objectives import Positions, Reduction
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction

Apply = Callable[[Any, jax.Array], Any]

# ------------------------------------------------------------------------------ the passes


def sample(apply: Apply, x: Any, n_passes: int, *, key: jax.Array) -> Any:
    """The outputs of `n_passes` passes with fresh masks, (K, N, ...) in the structure that `apply` returns.

    Args:
        apply: The network as a function of the rows and a key, dropout on: ``net.apply(params, x,
            deterministic=False, rngs={"dropout": key})``. What it returns beside the outputs (batch statistics, with
            ``mutable=``) gets the axis K too: take its mean.
        x: What `apply` takes; the rows are its first axis.
        n_passes: K.
        key: One key for all passes; each gets one of its own.

    >>> dropout = lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape) * 2
    >>> sample(dropout, jnp.ones((3, 2)), n_passes=10, key=jax.random.key(0)).shape
    (10, 3, 2)
    """
    keys = jax.random.split(key, check_count("n_passes", n_passes))
    _check_draws(apply, x, keys)
    return jax.vmap(apply, (None, 0))(x, keys)


# ------------------------------------------------------------------------------ the objective


def alpha_loss(
    losses: jax.Array, alpha: float | jax.Array, *, sample_weight: Any = None, reduction: Reduction = "mean"
) -> jax.Array:
    """The alpha objective of per-pass losses, Eq. 7 without the prior term.

    Args:
        losses: l(y_n, f_k), minus the log-likelihood of data point n in pass k, up to a constant (K, N).
        alpha: Any finite number, or an array (), traced or not; 0 is the mean over passes.
        sample_weight: A weight per data point, applied outside the log (N,). "mean" is then the weighted mean.
        reduction: "mean" or "sum" over data points, or "none" for (N,).

    Returns:
        () or (N,). The gradient with respect to `losses` is softmax(-alpha * losses) over the passes.

    >>> losses = jnp.array([[1.0, 0.0], [3.0, 0.0]])                   # K = 2 passes, N = 2 points
    >>> [round(value, 4) for value in alpha_loss(losses, 1.0, reduction="none").tolist()]
    [1.5662, 0.0]
    """
    losses = _wide("losses", losses)
    if losses.ndim != 2 or not losses.shape[0]:
        raise ValueError(f"`losses` must have shape (K, N), K at least 1: passes first; got {losses.shape}.")
    return _objective(losses, alpha, sample_weight, reduction)


def cross_entropy(
    outputs: jax.Array,
    target: Any,
    alpha: float | jax.Array = 0.5,
    *,
    positions: Positions = "independent",
    ignore_index: int = -100,
    sample_weight: Any = None,
    reduction: Reduction = "mean",
) -> jax.Array:
    """The alpha objective for classification, from the logits of K passes.

    Args:
        outputs: Logits (K, N, C), or (K, N, ..., C) with positions: tokens, pixels. Classes are last.
        target: Class indices (N, ...), or one-hot or soft targets (N, ..., C).
        alpha: Any finite number, or an array (), traced or not; 0 is MC dropout as usual.
        positions: "independent" puts every position through its own log-sum-exp, "joint" first sums the
            log-likelihood over a data point's positions.
        ignore_index: Positions with this class index do not count.
        sample_weight: A weight per data point (N,), outside the log.
        reduction: "mean" (over data points, or over positions that count), "sum" or "none".

    >>> round(float(cross_entropy(jnp.zeros((10, 3, 4)), jnp.array([0, 1, 3]))), 4)            # log 4
    1.3863
    """
    logits, target = _wide("outputs", outputs, least=3), jnp.asarray(target)
    log_probs, counts = jax.nn.log_softmax(logits, -1), None
    if target.shape == logits.shape[1:]:
        losses = -(target.astype(logits.dtype) * log_probs).sum(-1)  # as in the paper's code: inside the log-sum-exp
    elif target.shape == logits.shape[1:-1] and jnp.issubdtype(target.dtype, jnp.integer):
        counts = target != ignore_index
        bad = counts & ((target < 0) | (target >= logits.shape[-1]))
        losses = -jnp.take_along_axis(log_probs, jnp.where(counts, target, 0)[None, ..., None], -1, mode="clip")[..., 0]
        losses = jnp.where(counts, losses, 0.0)
        losses = _unless(bad, losses, f"`target` must hold class indices from 0 to {logits.shape[-1] - 1}; got others.")
    else:
        raise ValueError(
            f"`target` must hold class indices {logits.shape[1:-1]}, whole numbers, or class weights "
            f"{logits.shape[1:]} for `outputs` {logits.shape}; got {target.shape} of {target.dtype}."
        )
    return _over_positions(losses, counts, alpha, positions, sample_weight, reduction)


def binary_cross_entropy(
    outputs: jax.Array,
    target: Any,
    alpha: float | jax.Array = 0.5,
    *,
    positions: Positions = "independent",
    sample_weight: Any = None,
    reduction: Reduction = "mean",
) -> jax.Array:
    """The alpha objective for yes/no targets, from the logits of K passes.

    Args:
        outputs: Logits (K, N, ...).
        target: 0 or 1, or a probability between, of the shape of ``outputs[0]`` (N, ...).
        alpha: Any finite number, or an array (), traced or not; 0 is MC dropout as usual.
        positions: With more axes than N (several labels, pixels): as in `cross_entropy`.
        sample_weight: A weight per data point (N,), outside the log.
        reduction: "mean", "sum" or "none".

    >>> round(float(binary_cross_entropy(jnp.zeros((5, 3)), jnp.array([0, 1, 1]))), 4)         # log 2
    0.6931
    """
    logits = _wide("outputs", outputs)
    y = _like_one_pass(target, logits)
    losses = y * jax.nn.softplus(-logits) + (1 - y) * jax.nn.softplus(logits)
    losses = _unless((y < 0) | (y > 1), losses, "`target` must lie in [0, 1]; got values outside.")
    return _over_positions(losses, None, alpha, positions, sample_weight, reduction)


def gaussian_nll(
    outputs: jax.Array,
    target: Any,
    alpha: float | jax.Array = 0.5,
    *,
    precision: Any,
    sample_weight: Any = None,
    reduction: Reduction = "mean",
) -> jax.Array:
    """The alpha objective for regression with Gaussian noise, normalising constant included.

    Args:
        outputs: Predicted means (K, N, D) or (K, N).
        target: Of the shape of ``outputs[0]``; never broadcast.
        alpha: Any finite number, or an array (), traced or not; 0 is MC dropout as usual.
        precision: tau, one over the noise variance: a number, or an array (learned, or predicted per point) that
            broadcasts to the shape of `outputs`.
        sample_weight: A weight per data point (N,), outside the log.
        reduction: "mean", "sum" or "none" over data points; output dimensions are always summed.

    >>> round(float(gaussian_nll(jnp.zeros((10, 3, 1)), jnp.zeros((3, 1)), precision=1.0)), 4)  # log(2 pi) / 2
    0.9189
    """
    mean = _wide("outputs", outputs)
    if isinstance(precision, (int, float, str)):
        precision = check_number("precision", precision, above=0)
    y, tau = _like_one_pass(target, mean), jnp.asarray(precision, mean.dtype)
    try:
        fits = jnp.broadcast_shapes(tau.shape, mean.shape) == mean.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"`precision` must broadcast to the shape of `outputs`, {mean.shape}; got {tau.shape}.")
    losses = 0.5 * (tau * (y - mean) ** 2 - jnp.log(tau) + math.log(2 * math.pi))
    losses = losses.reshape(*losses.shape[:2], -1).sum(2)  # (K, N)
    losses = _unless(~((tau > 0) & (tau < math.inf)), losses, "`precision` must be positive and finite; got others.")
    return _objective(losses, alpha, sample_weight, reduction)


# ------------------------------------------------------------------------------ the prior


def prior_kl(params: Any, *, length_scale: float, n_data: int, keep: Mapping[str, float] | None = None) -> jax.Array:
    """KL of q to the prior N(0, 1/length_scale^2) per data point, up to a constant: add it to the loss.

    Args:
        params: The parameters, any tree (of nnx: ``nnx.state(net, nnx.Param)``). Weights are its arrays of two or more
            axes that are not called "bias".
        length_scale: l; larger pulls the weights closer to 0.
        n_data: N, the rows of the whole training set.
        keep: {name of a weight: keep probability of the dropout that feeds it}, names joined by "/", such as
            {"params/Dense_1/kernel": 0.9}; 1 elsewhere. JAX does not say which dropout feeds which weight.

    >>> params = {"dense": {"kernel": jnp.ones((2, 1)), "bias": jnp.ones(1)}}
    >>> prior_kl(params, length_scale=1.0, n_data=10, keep={"dense/kernel": 0.5}).item()       # 1/(2 * 0.5) * 2 / 10
    0.20000000298023224
    """
    factor = check_number("length_scale", length_scale, least=0) ** 2 / (2 * check_count("n_data", n_data))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): leaf  # of an nnx.Param
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    weights = {name: leaf for name, leaf in leaves.items() if jnp.ndim(leaf) > 1 and not _is_bias(name)}
    if not weights:
        raise ValueError(f"`params` must have weights, arrays of two or more axes; got {sorted(leaves) or 'nothing'}.")
    for name, p in (keep or {}).items():
        if name not in weights:
            raise ValueError(f"`keep` must name weights; got {name!r}, and there are {', '.join(sorted(weights))}.")
        if not 0 < p <= 1:
            raise ValueError(f"`keep` must hold probabilities in (0, 1]; got {p} for {name!r}.")
    squares = [jnp.sum(jnp.square(w)) / (keep or {}).get(name, 1.0) for name, w in weights.items()]
    return factor * jnp.sum(jnp.stack(squares))


# ------------------------------------------------------------------------------ prediction


def predict_classification(
    apply: Apply, x: Any, *, key: jax.Array, n_passes: int = 100, batch_size: int = 1024
) -> ClassificationPrediction:
    """The predictive distribution over classes, from the logits of `n_passes` passes; torch tensors.

    Args:
        apply: As in `sample`, batch normalisation on its running statistics; returns logits (N, C), or (N, ..., C)
            with positions; one logit, (N, 1), means yes or no. Jit it where it is large.
        x: An array, or a tree of arrays with the rows first.
        key: The same key gives the same prediction.
        n_passes: K.
        batch_size: How many rows run at a time, a row counted once for each of its passes.

    >>> noisy = lambda x, key: x + jax.random.normal(key, x.shape)
    >>> p = predict_classification(noisy, jnp.zeros((4, 3)), key=jax.random.key(0))
    >>> p.probs.shape, bool((p.mutual_information > 0).all())
    (torch.Size([4, 3]), True)
    """
    return classification_of_blocks(_blocks(apply, x, key, n_passes, batch_size))


def predict_regression(
    apply: Apply,
    x: Any,
    *,
    key: jax.Array,
    precision: float | Literal["predicted"] | None = None,
    n_passes: int = 100,
    batch_size: int = 1024,
) -> RegressionPrediction:
    """The predictive distribution of a real target: a mixture over `n_passes` passes; torch tensors.

    Args:
        apply: As in `predict_classification`; returns means (N, D), or with ``precision="predicted"`` means and log
            precisions (N, 2 D).
        x: As in `predict_classification`.
        key: The same key gives the same prediction.
        precision: tau, one over the noise variance; None knows no noise: aleatoric 0, no density.
        n_passes: K.
        batch_size: As in `predict_classification`.

    >>> noisy = lambda x, key: x + jax.random.normal(key, x.shape)
    >>> predict_regression(noisy, jnp.zeros((4, 1)), key=jax.random.key(0), precision=4.0).aleatoric_std[0]
    tensor([0.5000])
    """
    return regression_of_blocks(_blocks(apply, x, key, n_passes, batch_size), precision)


# ------------------------------------------------------------------------------ helpers


def _check_draws(apply: Apply, x: Any, keys: jax.Array) -> None:
    """Refuse a network whose output does not hang on the key: then vmap has nothing to map."""
    try:
        jax.eval_shape(jax.vmap(apply, (None, 0), out_axes=None), x, keys)
    except ValueError:  # an output has the axis of the keys; what else is wrong shows when it runs
        return
    raise ValueError(
        "`apply` must use its key; got outputs that do not depend on it, and K passes would be equal. Hand it on as "
        'rngs={"dropout": key}, with deterministic=False and a dropout rate above 0.'
    )


def _blocks(apply: Apply, x: Any, key: jax.Array, n_passes: int, batch_size: int) -> Iterator[torch.Tensor]:
    """The passes of blocks of rows (K, n, ...), all of one shape so that nothing is compiled twice."""
    counts = {len(a) for a in jax.tree.leaves(x)}
    if len(counts) != 1:
        raise ValueError(f"`x` must be arrays with the same number of rows; got {sorted(counts)}.")
    n_rows, batch_size = counts.pop(), check_count("batch_size", batch_size)
    together = min(check_count("n_passes", n_passes), batch_size)
    rows = max(1, min(n_rows, batch_size // n_passes))
    for start in range(0, max(1, n_rows), rows):
        index = np.minimum(np.arange(start, start + rows), n_rows - 1)
        block = jax.tree.map(lambda a: a[index] if n_rows else a, x)  # noqa: B023
        groups = []
        for first in range(0, n_passes, together):
            keys = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, start), first), together)
            if start == first == 0:
                _check_draws(apply, block, keys)
            outputs = _wide("outputs", jax.vmap(apply, (None, 0))(block, keys))
            groups.append(torch.from_numpy(np.array(outputs)))
        yield torch.cat(groups)[:n_passes, : n_rows - start]


def _objective(
    losses: jax.Array, alpha: Any, sample_weight: Any, reduction: Reduction, counts: jax.Array | None = None
) -> jax.Array:
    """Eq. 7 of (K, N, ...), reduced; `counts` (N, ...) says which values are real."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'`reduction` must be "mean", "sum" or "none"; got {reduction!r}.')
    values = _log_mean_exp(losses, _alpha(alpha, losses))  # (N, ...)
    weight = jnp.ones_like(values) if counts is None else counts.astype(values.dtype)
    if sample_weight is not None:
        own = jnp.asarray(sample_weight, values.dtype)
        if own.shape != values.shape[:1]:
            raise ValueError(
                f"`sample_weight` must have one weight per data point, {values.shape[:1]}; got {own.shape}."
            )
        values = _unless(~((own >= 0) & (own < math.inf)), values, "`sample_weight` must be finite and not negative.")
        weight = weight * own.reshape(-1, *[1] * (values.ndim - 1))
    if reduction == "none":
        return values * weight
    if reduction == "sum":
        return jnp.sum(values * weight)
    total: jax.Array = jnp.sum(weight)
    return _unless(
        ~(total > 0),
        jnp.sum(values * (weight / total)),
        'reduction="mean" needs at least one data point that counts, with a positive weight; got none.',
    )


def _over_positions(
    losses: jax.Array,
    counts: jax.Array | None,
    alpha: Any,
    positions: Positions,
    sample_weight: Any,
    reduction: Reduction,
) -> jax.Array:
    """The alpha objective of (K, N, ...) losses whose trailing axes are positions of a data point."""
    if positions not in ("independent", "joint"):
        raise ValueError(f'`positions` must be "independent" or "joint"; got {positions!r}.')
    if positions == "joint" and losses.ndim > 2:
        losses = losses.reshape(*losses.shape[:2], -1).sum(2)  # (K, N): one likelihood a data point
        counts = None if counts is None else counts.reshape(len(counts), -1).any(1)
    return _objective(losses, alpha, sample_weight, reduction, counts)


_log_mean_exp = jax.jit(partial(log_mean_exp, axis=0, xp=jnp, hold=jax.lax.stop_gradient))  # (K, ...), () -> (...)


def _alpha(alpha: Any, losses: jax.Array) -> jax.Array:
    """An array () of the dtype of the losses; what is not traced is checked."""
    if not isinstance(alpha, jax.core.Tracer):
        number = alpha.item() if isinstance(alpha, (jax.Array, np.ndarray)) and alpha.size == 1 else alpha
        return jnp.asarray(max(-MOST, min(MOST, check_alpha(number))), losses.dtype)
    if alpha.shape:
        raise ValueError(f"`alpha` must be a number; got an array {alpha.shape}. Use vmap for several.")
    return jnp.clip(alpha.astype(losses.dtype), -MOST, MOST)


def _wide(name: str, values: Any, least: int = 2) -> jax.Array:
    """Floating-point values (K, N, ...) with at least one pass; half precision in float32."""
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"`{name}` must be real floating-point numbers; got {array.dtype}.")
    if array.ndim < least or not array.shape[0]:
        want = "(K, N, C)" if least == 3 else "(K, N, ...)"
        raise ValueError(
            f"`{name}` must have shape {want}, K at least 1: passes first; got {array.shape}. Use sample(apply, x, "
            "n_passes=K, key=key), or outputs[None] for a single pass."
        )
    return array if array.dtype == jnp.float64 else array.astype(jnp.float32)


def _like_one_pass(target: Any, outputs: jax.Array) -> jax.Array:
    y = jnp.asarray(target)
    if y.shape != outputs.shape[1:]:
        raise ValueError(
            f"`target` must have the shape of one pass, {outputs.shape[1:]}, for `outputs` {outputs.shape}; got "
            f"{y.shape}. It is never broadcast: reshape it."
        )
    return y.astype(outputs.dtype)


def _unless(bad: jax.Array, values: jax.Array, sentence: str) -> jax.Array:
    """`values`; where anything is `bad` a ValueError, or nan inside jit."""
    if isinstance(bad, jax.core.Tracer):
        return jnp.where(bad.any(), math.nan, values)
    if bool(bad.any()):
        raise ValueError(sentence)
    return values


def _is_bias(name: str) -> bool:
    return "bias" in name.rpartition("/")[2]
