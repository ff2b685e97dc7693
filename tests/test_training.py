import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bbalpha
from bbalpha.feed import order, step_seed
from bbalpha.networks import mlp
from bbalpha.objectives import CrossEntropy, GaussianNLL
from bbalpha.training import Progress, cosine, fit


def rows(n=96, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g)
    return x, (x[:, :1] + 0.1 * torch.randn(n, 1, generator=g))


def net(seed=0, **options):
    torch.manual_seed(seed)
    return mlp([3, 16, 1], **({"dropout": 0.25, "input_dropout": 0.0} | options))


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# ------------------------------------------------------------------------------ the steps it takes


@pytest.mark.parametrize("length_scale", [None, 0.5])
def test_equals_the_loop_one_would_write(length_scale):
    x, y = rows(50)
    ours, theirs = net(), net()
    objective, learned = GaussianNLL(0.5), GaussianNLL(0.5)
    fit(
        ours,
        (x, y),
        objective=objective,
        epochs=3,
        batch_size=16,
        length_scale=length_scale,
        learning_rate=0.01,
        seed=7,
    )
    parameters = [*theirs.parameters(), *learned.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    step = 0
    for epoch in range(3):
        for chosen in order(50, seed=7, epoch=epoch).split(16):
            outputs = bbalpha.sample(theirs, x[chosen], 10, seed=step_seed(7, step))
            loss = learned(outputs, y[chosen])
            if length_scale:
                loss = loss + bbalpha.prior_kl(theirs, length_scale=length_scale, n_data=50)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    for p, q in zip([*ours.parameters(), *objective.parameters()], parameters, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_a_given_optimizer_gets_the_prior_in_the_loss():
    x, y = rows(32)
    ours, theirs = net(), net()
    groups = bbalpha.param_groups(theirs, length_scale=2.0, n_data=32)
    fit(
        ours, (x, y), objective=GaussianNLL(precision=1.0), epochs=4, batch_size=32, length_scale=2.0, seed=1,
        optimizer=torch.optim.SGD(ours.parameters(), lr=0.1),
    )  # fmt: skip
    assert len(groups) == 3
    fit(
        theirs, (x, y), objective=GaussianNLL(precision=1.0), epochs=4, batch_size=32, length_scale=2.0, seed=1,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    )  # fmt: skip
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="parameters of the objective too"):
        fit(ours, (x, y), objective=GaussianNLL(), epochs=1, optimizer=torch.optim.SGD(ours.parameters(), lr=0.1))


def test_learns_and_finds_the_precision():
    x, y = rows(400)
    model, objective = net(dropout=0.02), GaussianNLL(0.5)
    fit(model, (x.numpy(), y.numpy()), objective=objective, epochs=60, batch_size=32, learning_rate=0.01, seed=0)
    assert 30 < objective.precision.item() < 150  # noise 0.1: 100
    labels = (x[:, 0] > 0).long()
    classes = mlp([3, 16, 2], dropout=0.1)
    history = fit(classes, (x, labels), objective=CrossEntropy(1.0), epochs=30, batch_size=32, learning_rate=0.01)
    assert history.loss[-1] < 0.2 < history.loss[0]


def test_weights_act_as_repeated_rows_in_full_batches():
    x, y = rows(20)
    weight = torch.ones(20)
    weight[3], weight[5] = 2.0, 0.0
    repeated = torch.tensor([*range(5), *range(6, 20), 3])
    fixed = {"objective": GaussianNLL(precision=1.0), "epochs": 1, "n_passes": 400, "seed": 0}
    gradients = []
    for data in ((x, y, weight), (x[repeated], y[repeated])):
        model = net(dropout=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = [p.detach().clone() for p in model.parameters()]
        fit(model, data, optimizer=optimizer, **fixed)
        gradients.append(torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before, strict=True)]))
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[0].norm()


def test_loss_in_the_history_is_the_mean_over_rows():
    x, y = rows(10)
    model = net(dropout=1e-9)
    history = fit(model, (x, y), objective=GaussianNLL(precision=1.0), epochs=1, batch_size=4, learning_rate=0.0)
    expected = bbalpha.gaussian_nll(model(x)[None], y, precision=1.0)
    assert history.loss[0] == pytest.approx(expected.item(), rel=1e-5)


# ------------------------------------------------------------------------------ options


def test_early_stopping_restores_the_best_epoch():
    x, y = rows(40)
    told = []
    kept = {}

    def callback(progress: Progress):
        told.append(progress)
        kept[progress.epoch] = [p.detach().clone() for p in model.parameters()]

    model = net(dropout=0.1)
    history = fit(
        model, (x, y), objective=GaussianNLL(), epochs=200, learning_rate=0.05, validation=rows(30, seed=1),
        patience=5, callback=callback, seed=3,
    )  # fmt: skip
    assert history.stopped
    assert len(history.nll) == history.best_epoch + 5 < 200
    assert history.nll[history.best_epoch - 1] == min(history.nll) == told[history.best_epoch - 1].nll
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept[history.best_epoch], strict=True))


def test_validation_score_is_the_predictive_likelihood():
    x, y = rows(30)
    model = net()
    history = fit(
        model, (x, y), objective=GaussianNLL(0.0, precision=2.0), epochs=1, learning_rate=0.0, validation=(x, y), seed=0
    )
    passes = bbalpha.sample(model.eval(), x, 20, seed=step_seed(1, 0)).detach()  # seeds of its own
    exact, mean = (bbalpha.gaussian_nll(passes, y, alpha=a, precision=2.0).item() for a in (1.0, 0.0))
    assert history.nll[0] == pytest.approx(exact, rel=1e-5)
    assert mean > exact + 0.01


def test_a_fraction_is_held_out():
    seen = []

    class Spy(GaussianNLL):
        def forward(self, outputs, target, sample_weight=None):
            seen.append((torch.is_grad_enabled(), target))
            return super().forward(outputs, target, sample_weight)

    x, y = rows(50)
    fit(net(), (x, y), objective=Spy(), epochs=2, validation=0.2, seed=0)
    train = {float(v) for grad, t in seen if grad for v in t}
    held = {float(v) for grad, t in seen if not grad for v in t}
    assert len(train) == 40
    assert len(held) == 10
    assert not train & held


def test_schedules_and_rising_passes():
    rates, shapes = [], []

    class Spy(GaussianNLL):
        def forward(self, outputs, target, sample_weight=None):
            shapes.append(outputs.shape[0])
            return super().forward(outputs, target, sample_weight)

    def factory(groups):
        optimizer = torch.optim.SGD(groups, lr=1e-3)
        optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
        return optimizer

    fit(
        net(), rows(40), objective=Spy(), epochs=2, batch_size=10, optimizer=factory, schedule=cosine,
        n_passes=lambda share: 1 + int(4 * share), seed=0,
    )  # fmt: skip
    assert rates == pytest.approx([1e-3 * cosine(i / 8) for i in range(8)])
    assert shapes == [1, 1, 2, 2, 3, 3, 4, 4]
    model = net()
    optimizer = torch.optim.SGD([*model.parameters()], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    fit(
        model, rows(40), objective=GaussianNLL(precision=1.0), epochs=2, batch_size=10, optimizer=optimizer,
        schedule=scheduler, max_grad_norm=1e-4,
    )  # fmt: skip
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_gradients_are_clipped_and_mixed_precision_trains():
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x, y = rows(40)
    fit(model, (x, 100 * y), objective=GaussianNLL(precision=1.0), epochs=1, optimizer=optimizer, max_grad_norm=1e-3)
    moved = torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before, strict=True)]).norm()
    assert float(moved.detach()) == pytest.approx(1e-3, rel=1e-2)
    seen = []
    model[-1].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    history = fit(model, (x, y), objective=GaussianNLL(), epochs=20, amp=torch.bfloat16, learning_rate=0.01)
    assert history.loss[-1] < history.loss[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_mixed_precision_takes_the_same_steps_prior_included(amp):
    plain, mixed = net(), net()
    options = {"objective": GaussianNLL(precision=1.0), "epochs": 10, "length_scale": 20.0, "seed": 0}
    fit(plain, rows(40), **options)
    fit(mixed, rows(40), amp=amp, **options)
    for p, q, start in zip(plain.parameters(), mixed.parameters(), net().parameters(), strict=True):
        assert (p - q).norm() < 0.1 * (p - start).norm()


def test_seeded_runs_agree_and_leave_the_generator_alone():
    data = rows()
    a, b, c = net(), net(), net()
    state = torch.get_rng_state()
    fit(a, data, objective=GaussianNLL(), epochs=2, seed=5)
    fit(b, DataLoader(TensorDataset(*data), batch_size=32, shuffle=True), objective=GaussianNLL(), epochs=2, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    fit(c, data, objective=GaussianNLL(), epochs=2, seed=5)
    assert same(a, c)
    assert not same(a, b)
    fit(c, data, objective=GaussianNLL(), epochs=1)
    assert not torch.equal(state, torch.get_rng_state())


def test_modes_are_as_they_were():
    model = net().eval()
    model[1].train()
    fit(model, rows(), objective=GaussianNLL(), epochs=1, validation=0.3)
    assert [m.training for m in model] == [False, True, False, False]


def test_several_inputs_and_datasets():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(3, 1), nn.Linear(3, 1), nn.Dropout(0.5)

        def forward(self, left, right):
            return self.a(self.drop(left)) + self.b(right)

    class Pairs(Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, i):
            return {"left": x[i], "right": x[i]}, y[i], torch.tensor(1.0)

    x, y = rows(20)
    torch.manual_seed(0)
    first, second, third = Two(), Two(), Two()
    second.load_state_dict(first.state_dict())
    third.load_state_dict(first.state_dict())
    options = {"objective": GaussianNLL(precision=1.0), "epochs": 2, "batch_size": 8, "length_scale": 1.0, "seed": 0}
    fit(first, ((x, x), y), **options)
    fit(second, ({"left": x, "right": x}, y), **options)
    fit(third, Pairs(), **options)
    assert same(first, second)
    assert same(first, third)


def test_the_bar_is_quiet_in_pipes(capsys):
    fit(net(), rows(), objective=GaussianNLL(), epochs=1, progress=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "`epochs` must be a whole number of at least 1; got 0"),
        ({"data": torch.zeros(3)}, TypeError, "`data` must be"),
        ({"data": (torch.zeros(3, 3), torch.zeros(2, 1))}, ValueError, r"as many rows.*\[2, 3\]"),
        ({"data": (torch.zeros(2, 3), torch.zeros(2, 1), [-1.0, 1.0])}, ValueError, "none negative"),
        ({"validation": 1.5}, ValueError, "fraction between 0 and 1; got 1.5"),
        ({"objective": None}, TypeError, "`objective` must be callable"),
        ({"model": nn.Dropout(0.5)}, ValueError, "must have parameters"),
        ({"model": len}, TypeError, r"torch\.nn\.Module"),
        ({"amp": torch.float64}, ValueError, "`amp`"),
        ({"model": nn.Linear(3, 1)}, ValueError, "at least one active random site"),
    ],
)
def test_errors_name_what_was_wrong(options, error, message):
    given = {"model": net(), "data": rows(8), "objective": GaussianNLL(), "epochs": 1} | options
    model, data = given.pop("model"), given.pop("data")
    with pytest.raises(error, match=message):
        fit(model, data, **given)


# ------------------------------------------------------------------------------ resuming


class Noisy(Dataset):
    """Draws from every generator there is."""

    def __init__(self):
        self.x, self.y = rows(24)

    def __len__(self):
        return 24

    def __getitem__(self, i):
        noise = torch.rand(()) + random.random() + np.random.rand()
        return self.x[i] + 0.1 * noise, self.y[i]


def resumable(kind, folder, crash_at=None):
    """One run of ten epochs; `crash_at` raises in the middle of it."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    calls = []

    class Crashing(GaussianNLL):
        def forward(self, outputs, target, sample_weight=None):
            if self.training and torch.is_grad_enabled():
                calls.append(0)
                if len(calls) == crash_at:
                    raise KeyboardInterrupt
            return super().forward(outputs, target, sample_weight)

        def __repr__(self):
            return "Crashing"

    data = {
        "arrays": lambda: rows(24),
        "dataset": Noisy,
        "loader": lambda: DataLoader(Noisy(), batch_size=5, shuffle=True),
        "generator": lambda: DataLoader(
            Noisy(), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3)
        ),
    }[kind]()
    objective = Crashing(0.5)
    history = fit(
        model, data, objective=objective, epochs=10, batch_size=5, length_scale=0.1, validation=rows(10, seed=2),
        patience=6, checkpoint=folder, checkpoint_every=3, schedule=cosine,
    )  # fmt: skip
    return [*model.state_dict().values(), *objective.parameters()], history


@pytest.mark.parametrize("kind", ["arrays", "dataset", "loader", "generator"])
@pytest.mark.parametrize("crash_at", [2, 14, 21])
def test_a_crashed_run_ends_in_the_same_bits(kind, crash_at, tmp_path):
    whole, history = resumable(kind, None)
    with pytest.raises(KeyboardInterrupt):
        resumable(kind, tmp_path / "run", crash_at)
    if crash_at > 3:
        assert list((tmp_path / "run").iterdir())
    again, resumed = resumable(kind, tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    assert (resumed.loss, resumed.nll, resumed.best_epoch) == (history.loss, history.nll, history.best_epoch)
    third, _ = resumable(kind, tmp_path / "run", crash_at=1)  # finished: not a single step more
    assert all(torch.equal(a, b) for a, b in zip(whole, third, strict=True))


def test_a_damaged_newest_state_gives_way_to_the_one_before(tmp_path):
    whole, _ = resumable("arrays", None)
    with pytest.raises(KeyboardInterrupt):
        resumable("arrays", tmp_path, 17)
    newest = sorted(tmp_path.glob("step-*"))[-1] / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    again, _ = resumable("arrays", tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_another_run_in_the_same_folder_is_refused(tmp_path):
    options = {"objective": GaussianNLL(0.5), "epochs": 2, "checkpoint": tmp_path, "seed": 0}
    fit(net(), rows(), **options)
    with pytest.raises(ValueError, match=r"another `objective`.*alpha=0\.5.*alpha=1\.0"):
        fit(net(), rows(), **(options | {"objective": GaussianNLL(1.0)}))
    model, longer = net(), net()
    assert fit(model, rows(), **(options | {"epochs": 4})).n_steps == 4  # going on is not another run
    fit(longer, rows(), objective=GaussianNLL(0.5), epochs=4, seed=0)
    assert same(model, longer)


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from torch import nn
import bbalpha
from bbalpha.training import fit
torch.manual_seed(0)
x = torch.randn(256, 4)
net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
print("ready", flush=True)
fit(net, (x, x[:, :1]), objective=bbalpha.GaussianNLL(0.5), epochs=int(sys.argv[2]), batch_size=32, seed=0,
    checkpoint=None if sys.argv[1] == "none" else sys.argv[1], checkpoint_every=5)
bbalpha.save(net, sys.argv[3])
"""


def kill_and_resume(tmp_path, kills, epochs, longest):
    def start(folder, out):
        command = [sys.executable, "-c", SCRIPT, str(folder), str(epochs), str(out)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        process.stdout.close()
        return process

    whole = start("none", tmp_path / "whole")
    killed = 0
    for _ in range(kills):
        process = start(tmp_path / "run", tmp_path / "resumed")
        time.sleep(random.uniform(0, longest))
        os.kill(process.pid, signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    process = start(tmp_path / "run", tmp_path / "resumed")
    assert process.wait() == whole.wait() == 0
    names = [p.name for p in sorted((tmp_path / "whole").iterdir())]
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes()
    return killed


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_kill_9_and_resume_end_in_the_same_bytes(tmp_path):
    assert kill_and_resume(tmp_path, kills=2, epochs=40, longest=0.8)


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments(tmp_path):
    assert kill_and_resume(tmp_path, kills=20, epochs=300, longest=1.0) >= 15


def test_the_last_two_states_are_kept(tmp_path):
    fit(net(), rows(), objective=GaussianNLL(), epochs=9, checkpoint=tmp_path)
    assert [p.name for p in sorted(Path(tmp_path).iterdir())] == ["step-000000008", "step-000000009"]
