"""K passes of a Keras network: its random layers on, everything else in the mode of the caller.

A layer draws if it holds a `keras.random.SeedGenerator` (Keras asks that of every random layer) and a rate above 0.
While the passes run, the layers that draw are called with training=True, whatever mode the network is in; batch
normalisation and the rest get the mode of the caller. Every private part of Keras that we use is in this file.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras  # type: ignore[import-untyped, import-not-found, unused-ignore]
import numpy as np
import torch
from keras import ops
from keras.src import backend  # type: ignore[import-untyped, import-not-found, unused-ignore]

_RATES = ("rate", "dropout", "recurrent_dropout", "stddev")
_SWITCHED = threading.RLock()  # the layers of a network are switched by one thread at a time, for that thread alone


def run_passes(model: Any, inputs: Any, n_passes: int, *, training: bool) -> Any:
    """The outputs of `n_passes` passes with fresh masks (N, K, ...), in the structure that `model` returns."""
    layers = model._flatten_layers()
    repeated = keeps_rows_apart(model, training=training)
    with _drawing(model, layers, training=training, share=1 if repeated else n_passes) as drew:
        if repeated:
            rows = keras.tree.map_structure(lambda x: ops.repeat(x, n_passes, axis=0), inputs)
            outputs = keras.tree.map_structure(
                lambda y: _stacked_rows(y, n_passes), model(rows, **_mode(model, training))
            )
        else:
            passes = _one_by_one(model, layers, inputs, n_passes, training=training)
            outputs = keras.tree.map_structure(_stacked_passes, *passes)
    if not drew:
        raise ValueError(
            f"`model` must use its random layers; {model.name!r} has {_names(drawing_layers(model))} and calls none of "
            "them. Call them in the network."
        )
    return outputs


def drawing_layers(model: Any) -> list[Any]:
    """The layers that draw; refuses a network that has none, or one that Keras cannot look into."""
    found = []
    for layer in model._flatten_layers():
        if isinstance(layer, (keras.layers.TorchModuleWrapper, keras.layers.JaxLayer)):
            raise ValueError(
                f"`model` must be made of Keras layers; {layer.name!r} is a {type(layer).__name__}, whose dropout "
                "cannot be told from the rest of it. Use bbalpha.sample or bbalpha.integrations.jax on what it wraps."
            )
        cell = layer.cell if isinstance(layer, keras.layers.RNN) else layer
        cells = cell.cells if isinstance(cell, keras.layers.StackedRNNCells) else [cell]
        if any(_draws(c) for c in cells):
            found.append(layer)
    if not found:
        raise ValueError(
            f"`model` must have a random layer with a rate above 0; {model.name!r} has none, and K passes would be "
            "equal. Put keras.layers.Dropout before the layers whose weights are uncertain."
        )
    return found


def keeps_rows_apart(model: Any, *, training: bool) -> bool:
    """Whether a row's output is known to depend on that row alone, so that K passes are one of K times the rows."""
    if any(x.shape[0] is not None for x in getattr(model, "inputs", None) or []):
        return False  # made for so many rows
    if type(model).__module__.partition(".")[0] != "keras":
        return False  # who knows
    if isinstance(model, keras.Model):
        parts = getattr(model, "operations", model.layers)
        return all(isinstance(part, keras.Layer) and keeps_rows_apart(part, training=training) for part in parts)
    noise_shape = getattr(model, "noise_shape", None)
    mixes = (
        isinstance(model, keras.layers.Lambda)
        or (training and isinstance(model, keras.layers.BatchNormalization) and model.trainable)
        or (training and _augments(model))
        or getattr(model, "stateful", False)
        or (noise_shape is not None and noise_shape[0] is not None)
    )
    return not mixes and all(keeps_rows_apart(part, training=training) for part in model._layers)


@contextmanager
def seeded(model: Any, seed: int | None) -> Iterator[None]:
    """The generators of the network start from `seed`, and are as they were afterwards; None leaves them alone."""
    if seed is None:
        yield
        return
    found = {id(g): g for layer in model._flatten_layers() for g in _generators(layer)}
    before = [ops.copy(g.state.value) for g in found.values()]
    start, *starts = np.random.SeedSequence(seed % 2**64).generate_state(1 + len(found)) >> 1
    torch_backend = keras.backend.backend() == "torch"  # its dropout draws from torch unless its layer has a seed
    with torch.random.fork_rng(enabled=torch_backend):
        if torch_backend:
            torch.manual_seed(int(start))
        try:
            for generator, own in zip(found.values(), starts, strict=True):
                generator.state.assign([int(own), 0])
            yield
        finally:
            for generator, value in zip(found.values(), before, strict=True):
                generator.state.assign(value)


def readable(t: Any) -> bool:
    """Whether the values of a tensor may steer Python here: not while a step is traced or shapes are worked out."""
    if backend.common.symbolic_scope.in_symbolic_scope():
        return False
    name = keras.backend.backend()
    if name == "torch":
        return not torch.compiler.is_compiling()
    if name == "jax":
        import jax

        return not isinstance(t, jax.core.Tracer)
    return name != "tensorflow" or hasattr(t, "numpy")


# ------------------------------------------------------------------------------ which layers


def _draws(layer: Any) -> bool:
    """Whether a layer draws when it trains: not at a rate of 0, and augmentation of the data is none of the passes."""
    rates = [getattr(layer, name) for name in _RATES if isinstance(getattr(layer, name, None), (int, float))]
    return bool(_generators(layer)) and not _augments(layer) and (not rates or any(rates))


def _generators(layer: Any) -> list[Any]:
    return [value for value in vars(layer).values() if isinstance(value, keras.random.SeedGenerator)]


def _augments(layer: Any) -> bool:
    """Whether it is one of Keras's layers for data: RandomFlip, MixUp and the like."""
    return hasattr(layer, "_get_seed_generator")


def _names(layers: list[Any]) -> str:
    return ", ".join(repr(layer.name) for layer in layers)


# ------------------------------------------------------------------------------ while the passes run


@contextmanager
def _drawing(model: Any, layers: list[Any], *, training: bool, share: int) -> Iterator[list[Any]]:
    """Layers that draw are on, what is inside them is not; yields those that were called.

    `share`: how many passes run one after the other; each adds so much less of its activity losses.
    """
    on = drawing_layers(model)
    inside = {id(part) for layer in on for part in layer._flatten_layers(include_self=False)}
    thread, drew = threading.get_ident(), []

    def switched(layer: Any, draws: bool) -> Callable[..., Any]:
        call, takes = layer.call, _takes_training(layer)

        def call_switched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                if draws:
                    drew.append(layer)
                if takes:
                    kwargs["training"] = draws or (training and bool(kwargs.get("training")))
            return call(*args, **kwargs)

        return call_switched

    def shared(add_loss: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda loss: add_loss(keras.tree.map_structure(lambda part: part / share, loss))

    with _SWITCHED:
        own: list[tuple[Any, str]] = []
        try:
            for layer in layers:
                if layer in on or id(layer) in inside:
                    _put(layer, "call", switched(layer, layer in on), own)
                if share > 1:
                    _put(layer, "add_loss", shared(layer.add_loss), own)
            yield drew
        finally:
            for layer, name in own:
                del vars(layer)[name]


def _put(layer: Any, name: str, value: Any, own: list[tuple[Any, str]]) -> None:
    """Hide a method of one layer; in its __dict__, so that Keras tracks nothing."""
    if name in vars(layer):
        raise ValueError(
            f"`model` must be in no other pass; {layer.name!r} has a `{name}` of its own. Is MonteCarlo inside another?"
        )
    vars(layer)[name] = value
    own.append((layer, name))


def _takes_training(layer: Any) -> bool:
    return "training" in inspect.signature(layer.call).parameters


def _mode(model: Any, training: bool) -> dict[str, bool]:
    return {"training": training} if _takes_training(model) else {}


def _one_by_one(model: Any, layers: list[Any], inputs: Any, n_passes: int, *, training: bool) -> list[Any]:
    """The passes one after the other; what they change, as running statistics, moves once: by their mean."""
    states = [v for layer in layers if training and layer.trainable for v in layer._non_trainable_variables]
    before = [ops.copy(v.value) for v in states]
    passes, after = [], []
    for _ in range(n_passes):
        passes.append(model(inputs, **_mode(model, training)))
        after.append([ops.copy(v.value) for v in states])
        for v, value in zip(states, before, strict=True):
            v.assign(value)
    for v, values in zip(states, zip(*after, strict=True), strict=True):
        counts = not backend.is_float_dtype(backend.standardize_dtype(v.dtype))
        v.assign(values[0] if counts else ops.mean(ops.stack(values), axis=0))
    return passes


def _stacked_rows(y: Any, n_passes: int) -> Any:
    """Outputs of rows repeated n_passes times each as (N, K, ...), with the mask of one pass."""
    mask = backend.get_keras_mask(y)
    stacked = ops.reshape(y, (-1, n_passes, *ops.shape(y)[1:]))
    if mask is not None:
        backend.set_keras_mask(stacked, mask[::n_passes])
    return stacked


def _stacked_passes(*ys: Any) -> Any:
    """Outputs of the passes (N, ...) as (N, K, ...), with the mask of the first."""
    mask = backend.get_keras_mask(ys[0])
    stacked = ops.stack(ys, axis=1)
    if mask is not None:
        backend.set_keras_mask(stacked, mask)
    return stacked
