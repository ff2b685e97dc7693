"""Values that an argument of a kind must refuse, and the kind of an argument by its name: one concept, one name."""

import functools
import math
from decimal import Decimal

import numpy as np
import torch
from torch import nn

NAN, INF = math.nan, math.inf
THING = object()

COUNT = [0, -1, 1.5, "3", NAN, INF, -(2**70), 2**70, [], THING, 1j, "", b"3", {}, torch.tensor([1, 2]), np.array([])]
LARGE = [v for v in COUNT if not (isinstance(v, int) and v == 2**70)] + [2**64]
INTEGER = [0.5, "1", [], THING, NAN, True, 2**64]
WHOLE = [-1, 1.5, "3", NAN, INF, 2**70, [], THING, 1j]
NUMBER = [NAN, INF, -INF, "x", "0.5", [], [1.0, 2.0], THING, 1j, torch.tensor([1.0, 2.0]), {}, b"1", nn.ReLU()]
ABOVE_ZERO = [*NUMBER, 0, -1.0, -1e-300]
NOT_NEGATIVE = [*NUMBER, -1.0]
RATE = [*NUMBER, -0.1, 1.5, 2]
INNER = [*NUMBER, 0, 1, -0.1, 1.5]
FLAG = ["no", 2, None, [], THING, 0.5, torch.tensor([1, 2]), NAN]
SEED = [1.5, "7", [], THING, NAN, 1j, {}]
CHOICE = ["nonsense", 3, None, [], THING, "", b"mean", NAN, ("mean",)]
MODEL = [None, "net", 3, THING, [], nn.Linear, nn.ReLU, lambda x: x, {}, torch.zeros(3)]
ARRAY = [None, "text", THING, 3.0, {}, set(), lambda: 0, b"12", NAN]
TENSOR = [*ARRAY, [1.0, 2.0], np.zeros((2, 3)), torch.zeros((), dtype=torch.complex64)]
PATH = [None, 3, THING, [], 1.5, {}, "", "\0", "a\0b", "x" * 5000]
CALL = [3, "relu", THING, [], 0.5]
AXIS = [0.5, "1", [], THING, 99, -99, NAN, True]
TEXT = [None, 3, THING, [], {}, NAN, b"x"]
SIZES = ["x", THING, [0], [-1], [1.5], ["a"], [None], None, NAN, [2**70], {}]

KINDS = {
    "count": COUNT, "whole": WHOLE,
    "large": LARGE,
    "integer": INTEGER, "number": NUMBER, "above_zero": ABOVE_ZERO, "not_negative": NOT_NEGATIVE,
    "rate": RATE, "inner": INNER, "flag": FLAG, "seed": SEED, "choice": CHOICE, "model": MODEL, "array": ARRAY,
    "tensor": TENSOR, "path": PATH, "call": CALL, "axis": AXIS, "text": TEXT, "sizes": SIZES,
}  # fmt: skip

NAMES = {
    "count": "n_passes epochs batch_size chunk_size n_bins n_samples size n_groups n_rows n_steps n_configurations "
    "n_predict_passes n_ensemble patience n_validation_passes checkpoint_every n n_classes filters hidden "
    "group_size epoch_rows",
    "number": "alpha best beta",
    "above_zero": "learning_rate temperature precision tolerance max_grad_norm initial_std",
    "not_negative": "length_scale step evade",
    "rate": "dropout input_dropout p",
    "inner": "coverage false_alarm q",
    "flag": "balanced biases adaptive keep_passes return_std column verbose",
    "seed": "seed",
    "choice": "masks strategy reduction positions score likelihood activation part noise budget",
    "model": "model frozen",
    "array": "x x_clean x_other X data train held_out",
    "tensor": "outputs target probs losses log_probs scores positive groups mean low high uncertainty loss features "
    "log_likelihood true predicted sample_weight y target_probs rows entropies",
    "path": "path folder",
    "call": "optimizer schedule callback layer objective",
    "axis": "class_axis batch_dim",
    "integer": "ignore_index",
    "large": "n_data",
    "text": "name html html",
    "sizes": "hidden_layer_sizes sizes",
}  # fmt: skip
KIND_OF = {name: kind for kind, names in NAMES.items() for name in names.split()}


def strategies():
    """For hypothesis: by kind, values that are wrong whatever they are."""
    from hypothesis import strategies as st

    odd = st.one_of(st.text(max_size=8), st.binary(max_size=4), st.complex_numbers(), st.lists(st.none(), max_size=2))
    not_finite = st.sampled_from([NAN, INF, -INF, Decimal("nan"), np.float32("inf"), torch.tensor(NAN)])
    broken = st.floats(allow_nan=True).filter(lambda v: not float(v).is_integer())
    below = st.one_of(st.integers(max_value=-1), st.floats(max_value=-1e-9, allow_nan=False))
    count = st.one_of(st.integers(max_value=0), st.integers(min_value=2**31 + 1), broken, odd, st.sampled_from(COUNT))
    number = st.one_of(not_finite, odd, st.sampled_from(NUMBER))
    return {
        "count": count,
        "number": number,
        "above_zero": st.one_of(number, below),
        "not_negative": st.one_of(number, below),
        "rate": st.one_of(number, below, st.floats(min_value=1.0000001)),
        "inner": st.one_of(number, below, st.floats(min_value=1)),
        "flag": st.one_of(st.text(), st.integers(min_value=2), broken, st.sampled_from(FLAG)),
        "seed": st.one_of(broken, odd),
        "choice": st.one_of(st.text(max_size=4), st.integers(), odd),
        "array": st.one_of(st.text(), st.sampled_from(ARRAY)),
        "tensor": st.one_of(odd, st.sampled_from(TENSOR)),
        "path": st.sampled_from(PATH),
    }


@functools.cache
def drawn(kind, n, seed):
    """`n` values of a kind, the same every time."""
    import hypothesis

    strategy, found = strategies().get(kind), []
    if strategy is None or not n:
        return []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=n, database=None, phases=[hypothesis.Phase.generate], deadline=None,
        suppress_health_check=[*hypothesis.HealthCheck],
    )  # fmt: skip
    @hypothesis.given(strategy)
    def collect(value):
        found.append(value)

    collect()
    return found[:n]
