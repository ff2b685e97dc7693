"""A folder is gone on from by the same run and by no other."""

import functools
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bbalpha
from bbalpha import checkpoint
from bbalpha._files import FolderInUseError
from bbalpha.objectives import CrossEntropy, GaussianNLL, gaussian_nll
from bbalpha.training import cosine, fit


def rows(n=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g)
    return x, x[:, :1] + 0.1 * torch.randn(n, 1, generator=g)


def net(p=0.25, activation=nn.ReLU, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), activation(**options), nn.Dropout(p), nn.Linear(8, 1))


def run(folder, *, model=None, data=None, **options):
    given = {"objective": GaussianNLL(0.5), "epochs": 2, "seed": 0, "batch_size": 16} | options
    model = net() if model is None else model
    fit(model, rows() if data is None else data, checkpoint=folder, **given)
    return model


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def sgd(lr=0.01, **options):
    return lambda groups: torch.optim.SGD(groups, lr=lr, **options)


def scaled(x, y, column=0):
    x = x.clone()
    x[-1, column] += 1e-6
    return x, y


def closing_over(value):
    return lambda outputs, target: gaussian_nll(outputs, target, precision=value)


class Rate:
    def __init__(self, end):
        self.end = end

    def __call__(self, share):
        return 1 - share * (1 - self.end)


CHANGES = {  # what a run is changed in, from and to: the name that the error must tell
    "learning_rate": ({"learning_rate": 1e-3}, {"learning_rate": 2e-3}),
    "masks": ({"masks": "per_example"}, {"masks": "shared"}),
    "amp": ({"amp": None}, {"amp": torch.bfloat16}),
    "max_grad_norm": ({"max_grad_norm": 1.0}, {"max_grad_norm": 2.0}),
    "patience": ({"validation": rows(9), "patience": 3}, {"validation": rows(9), "patience": 4}),
    "batch_size": ({"batch_size": 16}, {"batch_size": 8}),
    "length_scale": ({"length_scale": 1.0}, {"length_scale": None}),
    "seed": ({"seed": 0}, {"seed": 1}),
    "n_passes": ({"n_passes": lambda share: 2 + int(share)}, {"n_passes": lambda share: 3 + int(share)}),
    "n_passes ": ({"n_passes": 1}, {"n_passes": None}),
    "schedule": ({"schedule": None}, {"schedule": cosine}),
    "schedule ": ({"schedule": Rate(0.1)}, {"schedule": Rate(0.2)}),
    "epochs": ({"schedule": cosine}, {"schedule": cosine, "epochs": 3}),
    "model": ({"model": net(0.25)}, {"model": net(0.5)}),
    "model ": ({"model": net()}, {"model": net(activation=nn.Tanh)}),
    "model  ": (
        {"model": net(activation=nn.LeakyReLU)},
        {"model": net(activation=nn.LeakyReLU, negative_slope=0.2)},
    ),
    "parameters": ({"model": net()}, {"model": net().requires_grad_(False)}),
    "optimizer": ({"optimizer": sgd()}, {"optimizer": sgd(lr=0.02)}),
    "optimizer ": ({"optimizer": sgd()}, {"optimizer": sgd(momentum=0.5)}),
    "optimizer  ": ({"optimizer": sgd()}, {"optimizer": lambda groups: torch.optim.RMSprop(groups, lr=0.01)}),
    "objective": ({"objective": GaussianNLL(precision=1.0)}, {"objective": GaussianNLL(precision=2.0)}),
    "objective ": ({"objective": closing_over(1.0)}, {"objective": closing_over(2.0)}),
    "objective  ": (
        {"objective": lambda o, y: (o - y).square().mean()},
        {"objective": lambda o, y: (o - y).abs().mean()},
    ),
    "objective   ": (
        {"objective": functools.partial(gaussian_nll, precision=1.0)},
        {"objective": functools.partial(gaussian_nll, precision=1.0, alpha=0.1)},
    ),
    "data": ({}, {"data": scaled(*rows())}),
    "data ": ({}, {"data": (rows()[0], rows()[1].flip(0))}),
    "data  ": ({"data": (*rows(), torch.arange(40) + 1.0)}, {"data": (*rows(), torch.arange(40).flip(0) + 1.0)}),
    "data   ": ({"data": TensorDataset(*rows())}, {"data": TensorDataset(*scaled(*rows()))}),
    "data    ": (
        {"data": DataLoader(TensorDataset(*rows()), batch_size=8)},
        {"data": DataLoader(TensorDataset(*scaled(*rows())), batch_size=8)},
    ),
    "data     ": (
        {"data": DataLoader(TensorDataset(*rows()), batch_size=8)},
        {"data": DataLoader(TensorDataset(*rows()), batch_size=8, shuffle=True)},
    ),
    "validation": ({"validation": rows(9)}, {"validation": scaled(*rows(9))}),
    "validation ": ({"validation": rows(9)}, {"validation": None}),
}


@pytest.mark.parametrize("name", CHANGES, ids=lambda name: name.replace(" ", "'"))
def test_a_run_with_anything_changed_is_refused(name, tmp_path):
    before, now = CHANGES[name]
    run(tmp_path, **before)
    run(tmp_path, **before)  # the same one goes on
    model = now.get("model")
    weights = [p.detach().clone() for p in model.parameters()] if model else []
    with pytest.raises(ValueError, match=f"another `{name.strip()}`"):
        run(tmp_path, **now)
    if model:
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_new_data_are_not_answered_with_old_weights(tmp_path):
    x, y = rows(3000)
    run(tmp_path, data=(x, y))
    x[1234, 1] += 1.0  # one number among 9,000
    with pytest.raises(ValueError, match="another `data`"):
        run(tmp_path, data=(x, y))


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda outputs, target: (outputs - target).square().mean(),
        lambda: closing_over(2.0),
        lambda: functools.partial(closing_over(3.0)),
        lambda: CrossEntropyOf(0.5).of_first,
    ],
    ids=["lambda", "closure", "partial", "method"],
)
def test_a_run_with_a_function_as_objective_is_resumed(make, tmp_path):
    first, second = make(), make()
    assert first is not second
    whole = run(None, objective=make(), epochs=4)
    run(tmp_path, objective=first)
    assert same(whole, run(tmp_path, objective=second, epochs=4))


class CrossEntropyOf:
    def __init__(self, alpha):
        self.loss = CrossEntropy(alpha)

    def of_first(self, outputs, target):
        logits = torch.cat((outputs, -outputs), -1)
        return self.loss(logits, (target[:, 0] > 0).long())


def test_more_epochs_are_the_same_run_and_fewer_are_not(tmp_path):
    run(tmp_path, epochs=2)
    assert same(run(tmp_path, epochs=4), run(None, epochs=4))
    with pytest.raises(ValueError, match="`epochs` must be at least 4"):
        run(tmp_path, epochs=3)


def test_an_interrupted_cell_goes_on_with_the_objects_it_has(tmp_path):
    def interrupt(progress):
        if progress.epoch == 2:
            raise KeyboardInterrupt

    def cell(folder, model, optimizer, schedule, callback=None):
        run(folder, model=model, optimizer=optimizer, schedule=schedule, epochs=4, callback=callback)
        return model

    for torchs in (False, True):
        objects = []
        for _ in range(2):
            model, objective = net(), GaussianNLL(precision=1.0)
            optimizer = torch.optim.SGD([*model.parameters(), *objective.parameters()], lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12) if torchs else cosine
            objects.append((model, optimizer, schedule))
        options = {"objective": GaussianNLL(precision=1.0)}
        whole = run(None, model=objects[0][0], optimizer=objects[0][1], schedule=objects[0][2], epochs=4, **options)
        again = {"model": objects[1][0], "optimizer": objects[1][1], "schedule": objects[1][2], "epochs": 4} | options
        folder = tmp_path / str(torchs)
        with pytest.raises(KeyboardInterrupt):
            run(folder, callback=interrupt, **again)
        assert same(whole, run(folder, **again))
        if not torchs:
            assert objects[1][1].param_groups[0]["lr"] == 0.1  # the schedule leaves what was given


def test_a_run_without_a_seed_holds_out_the_same_rows_again(tmp_path):
    seen = []

    class Spy(GaussianNLL):
        def forward(self, outputs, target, sample_weight=None):
            if not torch.is_grad_enabled():
                seen.append(tuple(target.flatten().tolist()))
            return super().forward(outputs, target, sample_weight)

    first, second = net(), net()
    run(tmp_path, model=first, objective=Spy(), seed=None, validation=0.25, epochs=1)
    torch.manual_seed(99)
    run(tmp_path, model=second, objective=Spy(), seed=None, validation=0.25, epochs=3)
    assert len(seen) == 3
    assert len(set(seen)) == 1


class Augmented(Dataset):
    """Noise on x from a generator of its own that nobody seeds; counts what it is asked for."""

    def __init__(self, shift=0.0):
        self.x, self.y = rows()
        self.y = self.y + shift
        self.rng = np.random.default_rng()
        self.read = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.read += 1
        return {"x": self.x[i] + 0.1 * self.rng.random(), "labels": self.y[i]}


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x.float())


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: DataLoader(d, batch_size=16)], ids=["dataset", "loader"])
def test_random_items_do_not_stop_a_run_and_their_targets_still_tell(wrap, tmp_path):
    run(tmp_path, model=Named(), data=wrap(Augmented()))
    run(tmp_path, model=Named(), data=wrap(Augmented()), epochs=3)
    with pytest.raises(ValueError, match="another `data`"):
        run(tmp_path, model=Named(), data=wrap(Augmented(shift=1.0)))


@pytest.mark.filterwarnings("ignore:.*os.fork", "ignore::pytest.PytestUnraisableExceptionWarning")  # of jax, if loaded
def test_a_loader_with_workers_is_looked_at_in_a_worker(tmp_path):
    datasets = [Augmented(), Augmented(), Augmented(shift=1.0)]
    loaders = [DataLoader(d, batch_size=20, num_workers=1) for d in datasets]
    run(tmp_path, model=Named(), data=loaders[0])
    run(tmp_path, model=Named(), data=loaders[1])
    with pytest.raises(ValueError, match="another `data`"):
        run(tmp_path, model=Named(), data=loaders[2])
    assert [d.read for d in datasets] == [0, 0, 0]  # files that are opened on first use stay the worker's own


def rewrite(folder, change):
    path = sorted(folder.glob("step-*"))[-1]
    content = checkpoint.read_folder(path).content
    change(content)
    checkpoint.write_folder(path, content)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: c["fingerprint"].pop("data"), ValueError, "older bbalpha, which did not note its `data`"),
        (lambda c: c.update(kind="model"), ValueError, "holds something else"),
        (lambda c: c.update(fingerprint=3), ValueError, "holds something else"),
        (lambda c: c.pop("rng"), checkpoint.CorruptModelError, "not of the form"),
        (lambda c: c.update(epoch="2"), checkpoint.CorruptModelError, "not of the form"),
        (lambda c: c.update(loss=None), checkpoint.CorruptModelError, "not of the form"),
        (lambda c: c.update(rng={}), checkpoint.CorruptModelError, "not of the form"),
        (lambda c: c["weights"]["model"].popitem(), ValueError, "not in the file"),
        (lambda c: c["optimizer"].pop("param_groups"), checkpoint.CorruptModelError, "not of the form"),
    ],
)
def test_a_state_of_another_form_is_refused_and_changes_nothing(change, error, message, tmp_path):
    run(tmp_path)
    rewrite(tmp_path, change)
    model = net()
    with pytest.raises(error, match=message):
        run(tmp_path, model=model)
    assert same(model, net())


# ------------------------------------------------------------------------------ several in one folder


def test_a_second_run_in_a_folder_is_refused_while_the_first_goes_on(tmp_path):
    seen = []

    def second(progress):
        with pytest.raises(FolderInUseError, match="`checkpoint` must be a folder that no other run is using"):
            run(tmp_path)
        seen.append(progress.epoch)

    run(tmp_path, callback=second)
    run(tmp_path, epochs=3)  # it is free again
    assert seen == [1, 2]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-000000006", "step-000000009"]


SLEEPER = """
import sys, time, torch
from torch import nn
from bbalpha.training import fit
from bbalpha.objectives import GaussianNLL
x = torch.zeros(4, 1)
net = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))
fit(net, (x, x + 1), objective=GaussianNLL(), epochs=9, checkpoint=sys.argv[1],
    callback=lambda p: (print("running", flush=True), time.sleep(60)))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_a_killed_run_does_not_keep_its_folder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "running\n"
        with pytest.raises(FolderInUseError):
            run(tmp_path)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    run(tmp_path)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-000000003", "step-000000006"]


def test_leftovers_of_kills_go_and_stop_nothing(tmp_path):
    left = [".step-000000003.gone", f".step-000000003.{'a' * 32}.tmp", f".step-000000001.{'b' * 32}.gone"]
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / ".step-000000002.lock").touch()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-by-step").mkdir()
    run(tmp_path, epochs=5)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "notes.txt", "step-000000012", "step-000000015", "step-by-step",
    ]  # fmt: skip


def test_saving_into_the_folder_of_a_run_is_refused(tmp_path):
    bbalpha.save(net(), tmp_path)
    model = run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="Choose another name"):
        bbalpha.save(model, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="`checkpoint` must be a folder"):
        run(tmp_path / "run")


def test_states_without_finite_weights_are_not_written(tmp_path):
    class Breaks(nn.Module):  # a finite loss whose gradient is none
        def forward(self, outputs, target):
            return (outputs - outputs.detach()).abs().sqrt().mean() + (outputs - target).square().mean()

    with pytest.raises(ValueError, match="weights are no longer finite"):
        run(tmp_path, objective=Breaks(), batch_size=40)
    assert not list(tmp_path.glob("step-*"))


def test_a_run_that_breaks_leaves_the_state_before(tmp_path):
    def breaks(outputs, target):
        calls.append(0)
        return (outputs - target).square().mean() * (float("nan") if len(calls) > 5 else 1.0)

    calls = []
    with pytest.raises(ValueError, match="The loss of epoch 2, step 6 is nan"):
        run(tmp_path, objective=breaks, epochs=3)
    content = checkpoint.newest_state(tmp_path)
    assert content["step"] == 3
    assert all(v.isfinite().all() for v in content["weights"]["model"].values())


def test_a_run_without_passes_goes_on_to_the_same_bits(tmp_path):
    class StopError(Exception):
        pass

    def stop(progress):
        if progress.epoch == 2:
            raise StopError

    def plain():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    options = {"epochs": 4, "n_passes": None, "validation": rows(9)}
    whole = run(tmp_path / "whole", model=plain(), **options)
    with pytest.raises(StopError):
        run(tmp_path / "cut", model=plain(), callback=stop, checkpoint_every=2, **options)
    resumed = run(tmp_path / "cut", model=plain(), checkpoint_every=2, **options)
    assert same(whole, resumed)
    assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), resumed.buffers(), strict=True))
