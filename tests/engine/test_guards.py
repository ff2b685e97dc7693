"""What a process and a thread keep for everybody, as it was afterwards."""

import random
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from bbalpha._engine import guards
from bbalpha._engine.guards import Foreign, eager, forked_generators, seed_generators, steady
from bbalpha._kernels import draw_seed


def test_forked_generators_come_back():
    def drawn():
        return torch.rand(()).item(), random.random(), np.random.rand()

    seed_generators(1)
    expected = drawn()
    seed_generators(1)
    with forked_generators():
        seed_generators(2)
        assert drawn() != expected
    assert drawn() == expected


def test_who_drew_from_python_or_numpy():
    before = Foreign()
    assert before.moved() == []
    random.random()
    assert before.moved() == ["random"]
    np.random.rand()
    assert before.moved() == ["random", "numpy.random"]
    before.undo()
    assert before.moved() == []


def test_a_drawn_seed_moves_the_generator_once_and_not_after_an_error():
    state, drawn = torch.get_rng_state(), []

    def draw(*, others=False, fail=False):
        drawn.append(draw_seed(None))
        if others:
            torch.rand(3)
        if fail:
            raise KeyError

    with pytest.raises(KeyError), steady(draws=True):
        draw(fail=True)
    assert torch.equal(torch.get_rng_state(), state)
    with steady(draws=True):
        draw()
    assert drawn[0] == drawn[1] != draw_seed(None)
    state = torch.get_rng_state()
    with pytest.raises(KeyError), steady(draws=True):
        draw(others=True, fail=True)
    assert not torch.equal(torch.get_rng_state(), state)  # somebody else has drawn: nothing is drawn twice


class Mode(torch.overrides.TorchFunctionMode):
    pass


def test_steady_completes_what_an_interrupted_context_left_behind():
    class Interrupted:
        """A context that is struck while it is being left."""

        def __init__(self, context):
            self.context = context

        def __enter__(self):
            self.context.__enter__()

        def __exit__(self, *_):
            raise KeyboardInterrupt

    def vmapped():
        torch._C._functorch._vmap_increment_nesting(2, "same")
        raise KeyError

    for context in (torch.no_grad(), Mode(), torch.utils._python_dispatch.TorchDispatchMode()):
        with pytest.raises(KeyboardInterrupt), steady(), Interrupted(context):
            pass
    with pytest.raises(KeyError), steady():
        vmapped()
    assert torch.is_grad_enabled()
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._functorch.maybe_current_level() is None


def test_compiled_code_is_compiled_again_after_the_last_thread_has_left(monkeypatch):
    monkeypatch.setattr(guards, "_eager_now", set())  # whatever tests of interrupts in this process have left behind
    monkeypatch.setattr(guards, "_eager_setting", ExitStack())
    with torch.compiler.set_stance("default"):
        compiled_when_all_have_left()


def compiled_when_all_have_left():
    calls = []

    def backend(graph, _):
        calls.append(1)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    inside, leave = threading.Event(), threading.Event()

    def other():
        with eager():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with eager():
        thread.start()
        inside.wait()
        compiled(torch.ones(2))
    compiled(torch.ones(2))  # the other is still there
    leave.set()
    thread.join()
    assert not calls
    compiled(torch.ones(2))
    assert calls
