"""Any number of threads give the results of one after the other, and leave models and generators alone."""

import os
import threading
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bbalpha
import zoo

SECONDS = float(os.environ.get("BBALPHA_THREAD_SECONDS", "2"))


class Normalised(nn.Module):
    """Dropout, batch norm and spectral norm: flags, buffers and hooks to trip over."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.utils.spectral_norm(nn.Linear(4, 8)), nn.BatchNorm1d(8)
        self.drop, self.b = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(F.dropout(self.drop(self.norm(self.a(x))), 0.2, self.training))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(24, 3))


MODELS = {
    "module": (zoo.Functional, (6, 4)),
    "batch and spectral norm": (Normalised, (6, 4)),
    "chain": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)), (6, 4)),
    "encoder": (encoder, (5, 3, 8)),
    "hidden draws": (zoo.Gamma, (6, 4)),
    "TorchScript": (lambda: torch.jit.script(zoo.batch_norm()[0]), (6, 4)),
}


@pytest.fixture(params=MODELS)
def made(request):
    build, shape = MODELS[request.param]
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
        return build(), torch.randn(*shape)


def calls(model, x, seed):
    """What a thread does: predictions, samples of both kinds, and a look at the model."""
    p = bbalpha.predict_classification(model, x, n_passes=5, seed=seed)
    q = bbalpha.predict_regression(model, x, n_passes=3, masks="shared", batch_size=4, seed=seed)
    s = bbalpha.sample(model, x, 3, seed=seed)
    sites = len(bbalpha.audit(model, x).sites)
    return [p.probs, q.outputs, s.detach(), torch.tensor(sites)]


def in_threads(jobs, seconds=0.0):
    """All of `jobs` at once, each again and again for `seconds`; what they raise is raised here."""
    wrong, start, end = [], threading.Barrier(len(jobs)), time.monotonic() + seconds

    def work(job):
        start.wait()
        try:
            job()
            while time.monotonic() < end and not wrong:
                job()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the test is to see it
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if wrong:
        raise wrong[0]


def state(model):
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules() if hasattr(m, "_forward_hooks")
    ]
    return [m.training for m in model.modules()], [t.clone() for t in model.state_dict().values()], hooks


def assert_state(model, before):
    flags, tensors, hooks = state(model)
    assert flags == before[0]
    assert all(torch.equal(a, b) for a, b in zip(tensors, before[1], strict=True))
    assert hooks == before[2]


@pytest.mark.parametrize("mode", [False, True])
def test_eight_threads_on_one_model_give_what_one_gives(made, mode):
    model, x = made
    model.train(mode)

    def work(seed):  # samples in training mode move statistics, so there only predictions are the same
        return calls(model, x, seed) if not mode else [bbalpha.predict_regression(model, x, seed=seed).outputs]

    alone, before, generator = [work(s) for s in range(8)], state(model), torch.get_rng_state()

    def job(seed):
        assert all(torch.equal(a, b) for a, b in zip(work(seed), alone[seed], strict=True))

    in_threads([lambda s=s: job(s) for s in range(8)], SECONDS / 2)
    assert_state(model, before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_eight_models_and_an_unrelated_one_beside_them():
    """The unrelated model draws from torch's generator, in the same order as if it were alone."""
    models = [(build(), torch.randn(*shape)) for build, shape in (MODELS["module"], MODELS["encoder"])] * 4
    unrelated, x = nn.Dropout(0.5), torch.ones(1000)
    torch.manual_seed(7)
    expected = [unrelated(x) for _ in range(50)]
    drawn = []

    # making a network draws its weights: that is done before the unrelated one begins
    prepared = [[MODELS[name][0]() for _ in range(40)] for name in ("module", "encoder", "module", "encoder")]
    shapes = [MODELS[name][1] for name in ("module", "encoder", "module", "encoder")]

    def planning(nets, shape):
        rows = torch.randn(*shape, generator=torch.Generator().manual_seed(0))

        def job():
            if nets:
                net = nets.pop()
                bbalpha.predict_classification(net, rows, n_passes=3, seed=0)
                bbalpha.audit(net, rows)

        return job

    def drawing():
        while len(drawn) < 50:
            drawn.append(unrelated(x))
            time.sleep(SECONDS / 200)

    torch.manual_seed(7)
    jobs = [planning(nets, shape) for nets, shape in zip(prepared, shapes, strict=True)]
    jobs += [lambda m=m, r=r: bbalpha.sample(m, r, 4, seed=1) for m, r in models[:4]]
    in_threads([*jobs, drawing], SECONDS / 2)
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))


def test_who_calls_the_model_meanwhile_finds_it_as_it_is():
    model, x = Normalised().eval(), torch.randn(6, 4)
    expected = model(x)

    def plain():
        assert torch.equal(model(x), expected)
        assert not any(m.training for m in model.modules())

    in_threads([plain, plain, lambda: calls(model, x, 0), lambda: bbalpha.fgsm(model, x, step=0.1, clip=None)], SECONDS)


def test_unseeded_calls_in_threads_never_draw_the_same():
    model, x, drawn = zoo.Functional(), torch.randn(50, 4), []
    in_threads([lambda: drawn.append(bbalpha.sample(model, x, 2).detach())] * 8, SECONDS / 4)
    assert len({t.sum().item() for t in drawn}) == len(drawn) > 8


@pytest.mark.slow
def test_a_minute_of_it():
    model, x = Normalised().eval(), torch.randn(6, 4)
    alone, before = [calls(model, x, s) for s in range(8)], state(model)

    def job(seed):
        assert all(torch.equal(a, b) for a, b in zip(calls(model, x, seed), alone[seed], strict=True))

    in_threads([lambda s=s: job(s) for s in range(8)], 60.0)
    assert_state(model, before)
