"""An interrupt anywhere leaves nothing behind: flags, buffers, hooks, modes of torch, generators."""

import gc
import os
import random
import sys
import threading

import pytest
import torch
from test_threads import Normalised, assert_state, state
from torch import nn

import bbalpha
import zoo
from bbalpha._engine.inputs import Inputs

# a strike while Python throws a generator away is only reported, and harms nothing
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
STRIKES = int(os.environ.get("BBALPHA_INTERRUPTS", "12"))  # of each call


@pytest.fixture(autouse=True)
def _little_to_collect():
    """An interrupt ends with a garbage collection, which takes long where much is loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Struck:
    """Raises KeyboardInterrupt at the n-th step of Python code, as a signal would."""

    def __init__(self, n):
        self.left = n

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename == __file__:
            return None  # strike inside the library, or what it calls
        self.left -= 1
        if self.left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self


def steps(call):
    """How many steps `call` takes."""
    counter = Struck(10**9)
    sys.settrace(counter)
    try:
        call()
    finally:
        sys.settrace(None)
    return 10**9 - counter.left


def torch_modes():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._functorch.maybe_current_level(),
    )


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


CALLS = {
    "sample, planned": lambda m, x: bbalpha.sample(m, x, 3, seed=1),
    "sample in chunks, backward": lambda m, x: bbalpha.sample(m, x, 4, seed=1, chunk_size=2).sum().backward(),
    "sample by vmap": lambda m, x: bbalpha.sample(m, x, 3, seed=1, strategy="vmap"),
    "sample by loop, shared": lambda m, x: bbalpha.sample(m, x, 3, seed=1, strategy="loop", masks="shared"),
    "sample without a seed": lambda m, x: bbalpha.sample(m, x, 2),
    "predict_regression": lambda m, x: bbalpha.predict_regression(m, x, n_passes=3, seed=1, batch_size=2),
    "audit": lambda m, x: bbalpha.audit(m, x),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("build", [Normalised, zoo.Gamma, encoder])
@pytest.mark.parametrize("planned", [False, True])
def test_an_interrupt_leaves_nothing_behind(name, build, planned):
    if name == "sample by vmap" and build is zoo.Gamma:
        pytest.skip("its draws are hidden")
    torch.manual_seed(0)
    call, x = CALLS[name], torch.randn(5, 3, 8) if build is encoder else torch.randn(5, 4)
    made = [build().eval() for _ in range(1 if planned else STRIKES // 4 + 1)]
    if planned:
        call(made[0], x)
    total = steps(lambda: call(made[0], x))
    expected, modes, rng = call(made[0], x), torch_modes(), random.Random(0)
    for i in range(STRIKES if planned else STRIKES // 4):
        model = made[0 if planned else i + 1]  # without a plan: a model of which nothing is known
        before, generator = state(model), torch.get_rng_state()
        sys.settrace(Struck(rng.randrange(1, total - 20)))  # at the very end the work is done
        try:
            call(model, x)
        except KeyboardInterrupt:
            assert torch.equal(torch.get_rng_state(), generator)
        finally:
            sys.settrace(None)
        assert_state(model, before)
        assert torch_modes() == modes
    again = call(made[0], x)
    if isinstance(expected, torch.Tensor) and name != "sample without a seed":
        assert torch.equal(again, expected)


def test_a_model_that_raises_is_left_as_it_was_and_so_is_the_generator():
    class Raises(Normalised):
        def forward(self, x):
            if len(x) == 6:
                raise KeyError("six")
            return super().forward(x)

    model = Raises().eval()
    before, generator = state(model), torch.get_rng_state()
    for call in (bbalpha.sample, lambda m, x, n: bbalpha.predict_classification(m, x, n_passes=n)):
        with pytest.raises(KeyError):
            call(model, torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), 3)
        assert_state(model, before)
        assert torch.equal(torch.get_rng_state(), generator)


def test_no_bar_no_lock_of_tqdm(monkeypatch):
    """tqdm's lock is shared by processes: a worker that is killed while it holds it stops all others for ever."""

    def taken(*_, **__):
        raise AssertionError("tqdm was asked")

    monkeypatch.setattr("bbalpha._engine.batches.tqdm", taken)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    bbalpha.predict_classification(model, torch.randn(5, 4), n_passes=3)
    bbalpha.predict_classification(model, torch.randn(5, 4), n_passes=3, progress=False)


def test_an_interrupt_leaves_no_lock_that_other_threads_wait_for():
    found = []

    def look():
        found.append(Inputs.of(torch.zeros(3, 2)).rows)

    for n in range(1, 1 + steps(look)):
        sys.settrace(Struck(n))
        try:
            look()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        other = threading.Thread(target=look, daemon=True)
        other.start()
        other.join(20)
        assert not other.is_alive(), f"hangs after an interrupt at step {n}"
    assert set(found) == {3}
