import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from bbalpha.training import fingerprint
from bbalpha.training.fingerprint import digest, evenly, structure, told


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("n", [7, 2500])
def test_one_changed_number_anywhere_changes_the_hash(dtype, n):
    x = (torch.randn(n, 3) * 10).to(dtype)
    for row in (0, 1, n // 2 + 1, n - 2, n - 1):
        y = x.clone()
        y[row, 1] = ~x[row, 1] if dtype == torch.bool else x[row, 1] + 1
        assert digest(x) != digest(y)
    assert digest(x) == digest(x.clone()) == digest(x.T.contiguous().T)


def test_shapes_types_and_names_count_too():
    x = torch.zeros(4, 2)
    other = [x.flatten(), x.double(), x.T, {"a": x}, {"b": x}, (x, x), [x, None], torch.zeros(()), "x", 3, b"x"]
    assert len({digest(v) for v in [x, *other]}) == len(other) + 1
    assert digest(np.arange(3)) != digest(np.arange(4))


def test_evenly_spaced_numbers_have_both_ends():
    for n in (1, 2, 999, 1000, 1001, 123_456_789_012):
        found = evenly(n, 1000)
        assert found[0] == 0
        assert found[-1] == n - 1
        assert len(set(found)) == len(found) == min(n, 1000)


SCRIPT = """
import functools, torch
from torch import nn
from bbalpha.training.fingerprint import told, structure, objective
from bbalpha.objectives import GaussianNLL
def named(x, k={"a", "b", "c"}): return x in {"p", "q", "r", "s"}
class Scale:
    def __init__(self): self.by, self.inner = 2, named
    def __call__(self, x): return x * self.by
    def method(self, x): return x
w = 3.0
def make(v): return lambda x: [y * v for y in x if y in ("a", "b")]
values = [named, lambda x: x + 1, make(2), make([1, named]), functools.partial(named, 1, k=2), Scale(), Scale().method,
          torch.nn.functional.relu, nn.ReLU(), {"a", "b", "c", "d"}, print, GaussianNLL(precision=2.0).forward]
print([told(v) for v in values])
print(structure(nn.TransformerEncoderLayer(4, 2, 8)), objective(GaussianNLL(precision=2.0)))
"""


def test_every_process_tells_the_same():
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONHASHSEED": s}, stdout=subprocess.PIPE
        )
        for s in ("1", "2")
    ]
    first, second = (run.communicate()[0] for run in runs)
    assert first == second
    assert len(first) > 1000
    assert b"0x" not in first


def test_functions_that_do_other_things_are_told_apart():
    def close(v):
        return lambda x: x * v

    def default(x, k=1):
        return x * k

    def other(x, k=2):
        return x * k

    functions = [
        lambda x: x + 1, lambda x: x + 2, lambda x: x.sin(), lambda x: x.cos(), close(1), close(2), default, other,
        functools.partial(default, k=3), functools.partial(default, k=4), torch.sin, torch.cos,
        lambda x: [y + 1 for y in x],
        lambda x: [y + 2 for y in x], close(close(1)), close(close(2)),
    ]  # fmt: skip
    assert len({told(f) for f in functions}) == len(functions)


def test_what_holds_itself_ends():
    held = []
    held.append(held)
    assert told(held)
    module = nn.Linear(1, 1)
    module.notes = {"self": module}
    assert structure(module)


def test_layers_are_told_by_their_numbers_and_not_by_weights_or_modes():
    layers = [
        nn.Dropout(0.1), nn.Dropout(0.2), nn.LayerNorm(2), nn.LayerNorm(2, eps=1e-3), nn.LeakyReLU(), nn.LeakyReLU(0.2),
        nn.LSTM(1, 2, 2, dropout=0.1), nn.LSTM(1, 2, 2, dropout=0.2), nn.GELU(), nn.GELU("tanh"),
        nn.TransformerEncoderLayer(2, 1), nn.TransformerEncoderLayer(2, 1, activation=torch.nn.functional.gelu),
    ]  # fmt: skip
    assert len({str(structure(layer)) for layer in layers}) == len(layers)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = structure(net)
    net(torch.randn(3, 2))
    net.eval()
    with torch.no_grad():
        net[0].weight.zero_()
    assert structure(net) == before
    assert fingerprint.parameters(net) != fingerprint.parameters(net.requires_grad_(False))
