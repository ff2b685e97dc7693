import os
import random
import re
import shutil
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
from bbalpha._kernels import held_out_seed, step_seed
from bbalpha.networks import mlp
from bbalpha.objectives import CrossEntropy, GaussianNLL
from bbalpha.training import Progress, cosine, fit
from bbalpha.training.feed import order
from bbalpha.training.population import Member, fit_population


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


def test_rows_are_only_grouped_under_masks_that_they_share():
    x, y = torch.randn(30, 3), torch.randint(2, (30,))
    objective = CrossEntropy(1.0, group_size=5)
    with pytest.raises(ValueError, match=r'group_size=5 needs passes that are one function.*Use masks="shared"'):
        fit(mlp([3, 8, 2], dropout=0.5), (x, y), objective=objective, epochs=1)
    history = fit(
        mlp([3, 8, 2], dropout=0.5), (x, x[:, 0].gt(0).long()), objective=objective, epochs=60, masks="shared"
    )
    assert history.loss[-1] < history.loss[0]


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
    passes = bbalpha.sample(model.eval(), x, 20, seed=held_out_seed(0, 0)).detach()
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
        ({"epochs": 2**70}, ValueError, r"`epochs` must be at most 2\^31"),
        ({"epochs": True}, ValueError, "`epochs` must be a whole number"),
        ({"batch_size": 2.5}, ValueError, "`batch_size` must be a whole number"),
        ({"n_passes": 0}, ValueError, "`n_passes` must be a whole number of at least 1; got 0"),
        ({"patience": 0}, ValueError, "`patience` must be a whole number"),
        ({"checkpoint_every": -1}, ValueError, "`checkpoint_every` must be a whole number"),
        ({"learning_rate": float("nan")}, ValueError, "`learning_rate` must be a finite number of at least 0; got nan"),
        ({"learning_rate": -1e-3}, ValueError, "`learning_rate` must be a finite number of at least 0"),
        ({"length_scale": float("inf")}, ValueError, "`length_scale` must be a finite number of at least 0"),
        ({"max_grad_norm": -1}, ValueError, "`max_grad_norm` must be a finite number above 0; got -1"),
        ({"max_grad_norm": 0}, ValueError, "`max_grad_norm` must be a finite number above 0"),
        ({"seed": 0.5}, TypeError, "`seed` must be None or a whole number; got 0.5"),
        ({"schedule": 0.5}, TypeError, "`schedule` must be a function"),
        ({"data": rows(1), "validation": 0.5}, ValueError, "at least two rows"),
        ({"data": TensorDataset(*rows(0))}, ValueError, "`data` must have at least one row"),
        ({"data": DataLoader(TensorDataset(*rows(0)))}, ValueError, "`data` must have at least one row"),
        ({"data": DataLoader(TensorDataset(*rows(3)), 4, drop_last=True)}, ValueError, "at least one batch"),
        ({"validation": TensorDataset(*rows(0))}, ValueError, "`validation` must have at least one row"),
        ({"data": {"x": rows(8)[0], "label": rows(8)[1]}}, ValueError, r"'labels'; got \['label', 'x'\]"),
        ({"model": net().requires_grad_(False), "objective": CrossEntropy()}, ValueError, "requires_grad=False"),
    ],
)
def test_errors_name_what_was_wrong(options, error, message):
    given = {"model": net(), "data": rows(8), "objective": GaussianNLL(), "epochs": 1} | options
    model, data = given.pop("model"), given.pop("data")
    with pytest.raises(error, match=message):
        fit(model, data, **given)


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8])
def test_whole_numbers_of_numpy_are_whole_numbers(number, tmp_path):
    plain, numpys = net(), net()
    options = {"epochs": 2, "batch_size": 16, "n_passes": 3, "patience": 2, "checkpoint_every": 2, "seed": 3}
    options |= {"objective": GaussianNLL(precision=1.0), "validation": 0.25}
    fit(plain, rows(), **options)
    options = {k: number(v) if type(v) is int else v for k, v in options.items()} | {"validation": np.float32(0.25)}
    fit(numpys, rows(), checkpoint=tmp_path / "run", **options)
    assert same(plain, numpys)


# ------------------------------------------------------------------------------ mappings as Hugging Face has them


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.drop, self.out = nn.Embedding(7, 4), nn.Dropout(0.2), nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask):
        seen = self.table(input_ids) * attention_mask[..., None]
        return self.out(self.drop(seen.sum(1)))


class DictItems(Dataset):
    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays["labels"])

    def __getitem__(self, i):
        return {name: a[i] for name, a in self.arrays.items()}


class ForeignItems:
    """As datasets.Dataset: items by number, no torch Dataset."""

    def __init__(self, arrays):
        self.items = DictItems(arrays)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]

    def __getitems__(self, chosen):
        return [self.items[i] for i in chosen]


@pytest.mark.parametrize("validation", [None, 0.25])
def test_mappings_with_labels_are_x_and_target(validation):
    from transformers import BatchEncoding

    ids = torch.randint(7, (24, 5))
    arrays = {"input_ids": ids, "attention_mask": (ids > 0).float(), "labels": (ids[:, 0] > 3).long()}
    x = {name: a for name, a in arrays.items() if name != "labels"}
    kinds = [(x, arrays["labels"]), arrays, BatchEncoding(arrays), DictItems(arrays), ForeignItems(arrays)]
    found = []
    for data in kinds:
        torch.manual_seed(0)
        model = Tokens()
        fit(model, data, objective=CrossEntropy(), epochs=2, batch_size=8, seed=0, validation=validation)
        found.append(model)
    assert all(same(found[0], model) for model in found[1:])
    if validation is None:
        model = Tokens()
        model.load_state_dict(found[0].state_dict())
        for collate in (None, lambda items: BatchEncoding(torch.utils.data.default_collate(items))):
            loader = DataLoader(DictItems(arrays), batch_size=8, collate_fn=collate)
            assert fit(model, loader, objective=CrossEntropy(), epochs=1, validation=arrays).n_steps == 3


# ------------------------------------------------------------------------------ numbers that are none


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("place", ["data", "validation"])
def test_arrays_that_are_not_finite_are_refused_at_once(bad, place):
    x, y = rows(5000)
    x = x.double()
    x[4321, 1] = bad
    model, given = net(), {"data": rows(8), "validation": rows(8)}
    given[place] = (x, y)
    with pytest.raises(ValueError, match=f"`{place}` must hold finite numbers; x has .* in row 4321"):
        fit(model, given["data"], validation=given["validation"], objective=GaussianNLL(), epochs=1)
    assert same(model, net())


def test_a_mask_of_minus_infinity_is_an_input_like_others():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, mask):
            return self.net(x * mask.exp())

    x, y = rows(16)
    mask = torch.zeros(16, 3)
    mask[:, 2] = -torch.inf
    fit(Masked(), ((x, mask), y), objective=GaussianNLL(), epochs=1)
    mask[3, 1] = torch.nan
    with pytest.raises(ValueError, match="nan in row 3"):
        fit(Masked(), ((x, mask), y), objective=GaussianNLL(), epochs=1)


@pytest.mark.parametrize("part", ["x", "target"])
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: DataLoader(d, batch_size=8)], ids=["dataset", "loader"])
def test_items_that_are_not_finite_stop_the_run_before_they_reach_the_weights(part, wrap):
    x, y = rows(24)
    {"x": x, "target": y}[part][20] = torch.nan
    model, objective = net(), GaussianNLL()
    with pytest.raises(ValueError, match=rf"The loss of epoch 1, step \d is nan: {part} of this batch holds"):
        fit(model, wrap(TensorDataset(x, y)), objective=objective, epochs=3, batch_size=8)
    assert all(p.isfinite().all() for p in [*model.parameters(), *objective.parameters()])


def test_a_gradient_that_is_no_number_does_not_pass_for_a_result():
    def breaks(outputs, target):  # finite, its gradient is not
        return (outputs - outputs.detach()).abs().sqrt().mean() + (outputs - target).square().mean()

    for epochs in (1, 2):
        with pytest.raises(ValueError, match="weights are no longer finite"):
            fit(net(), rows(8), objective=breaks, epochs=epochs)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("validation", [None, 0.5])
def test_a_precision_without_bound_is_told_in_words_of_the_caller(validation):
    x = torch.randn(8, 3)
    model, objective = net(), GaussianNLL()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": 0.0}, {"params": objective.parameters()}], lr=20)
    with torch.no_grad():
        model[-1].bias.zero_()
        model[-1].weight.mul_(1e-30)  # constant and fitted exactly
    with pytest.raises(ValueError, match="learned precision grows without bound, because `target` is constant"):
        fit(model, (x, torch.zeros(8, 1)), objective=objective, epochs=40, optimizer=optimizer, validation=validation)


def perfect(rate, dtype, size):
    """A network that has its constant target exactly, and what `fit` needs to learn nothing but the precision."""
    model, objective = net().to(dtype), GaussianNLL()
    with torch.no_grad():
        model[-1].weight.zero_()
        model[-1].bias.fill_(size)
    optimizer = torch.optim.Adam(
        [{"params": model.parameters(), "lr": 0.0}, {"params": objective.parameters()}], lr=rate
    )
    data = torch.randn(8, 3, dtype=dtype), torch.full((8, 1), size, dtype=dtype)
    return model, objective, {"data": data, "optimizer": optimizer, "epochs": 60, "seed": 0}


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_precision_of_a_perfect_fit_is_held_where_the_digits_end_and_said(dtype, size):
    model, objective, options = perfect(1.5, dtype, size)
    with pytest.warns(UserWarning, match=r"precision was held at .*, beyond which `target` has no digits: .*constant"):
        fit(model, objective=objective, **options)
    digit = torch.finfo(dtype).eps * size
    assert objective.precision.item() == pytest.approx(digit**-2, rel=1e-3)


def test_a_precision_within_the_digits_is_left_alone():
    model, objective, options = perfect(0.2, torch.float32, 1.0)
    fit(model, objective=objective, **options)
    assert 11.9 < objective.log_precision.item() < 12.1


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_no_epoch_is_chosen_by_a_likelihood_that_is_no_number(value):
    def broken_later(outputs, target):
        if not torch.is_grad_enabled():
            calls.append(0)
            if len(calls) == 2:
                return torch.tensor(value)
        return (outputs - target).square().mean()

    calls = []
    with pytest.raises(ValueError, match="The validation likelihood after epoch 2 is"):
        fit(net(), rows(16), objective=broken_later, epochs=4, validation=rows(8))


@pytest.mark.parametrize("infinite", [(1,), (1, 2), (2, 4), (1, 2, 3, 4)])
def test_an_epoch_of_probability_0_is_never_the_best(infinite):
    def sometimes(outputs, target):
        if not torch.is_grad_enabled():
            calls.append(0)
            if len(calls) in infinite:
                return torch.tensor(torch.inf)
        return (outputs - target).square().mean()

    calls = []
    history = fit(net(), rows(16), objective=sometimes, epochs=4, validation=rows(8))
    finite = [(nll, i + 1) for i, nll in enumerate(history.nll) if nll < float("inf")]
    assert len(finite) == 4 - len(infinite)
    assert history.best_epoch == (min(finite)[1] if finite else None)


def test_an_iterable_that_is_used_up_is_told():
    class Once(torch.utils.data.IterableDataset):
        def __init__(self):
            self.rows = iter(list(zip(*rows(8), strict=True)))

        def __iter__(self):
            return self.rows

    with pytest.raises(ValueError, match="epoch 2 had none"):
        fit(net(), DataLoader(Once(), batch_size=4), objective=GaussianNLL(), epochs=2)


# ------------------------------------------------------------------------------ the way out


def interrupted(call, at, files):
    """How many lines of `files` are run in `call`; a KeyboardInterrupt strikes at the line numbered `at`.

    None where it struck and never came out of the call.
    """
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            count += 1
            if count == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert count == at
        return count
    finally:
        sys.settrace(before)
    return None if count == at else count


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that the collector closes
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
def test_an_interrupt_anywhere_leaves_modes_gradients_and_generators(amp, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    ours = ("training", "loop", "feed", "restoring", "folders")
    torchs = ("autograd/grad_mode", "random", "amp/autocast_mode")
    files = (*(f"bbalpha/{name}.py" for name in ours), *(f"torch/{name}.py" for name in torchs))
    model = net().eval()
    model[1].train()
    folder = tmp_path / "run" if amp is None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def call():
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        fit(
            model, rows(16), objective=GaussianNLL(precision=1.0), epochs=2, batch_size=8, validation=rows(4), seed=0,
            n_passes=2, amp=amp, optimizer=optimizer, schedule=cosine, checkpoint=folder,
        )  # fmt: skip

    state = torch.get_rng_state()
    call()  # the first time, more is looked at, and after the first interrupt a little less
    assert interrupted(call, 5, files) == 5
    total = min(interrupted(call, -1, files) for _ in range(3))
    struck, places = 0, [*range(5, total - 50, max(1, total // 15)), *range(total - 50, total + 1)]
    for at in places:
        ends = [interrupted(call, at, files) for _ in range(3)]  # how many lines there are varies a little
        assert any(end is not None for end in ends), f"swallowed at {at}"
        struck += at in ends
        assert [m.training for m in model] == [False, True, False, False], at
        assert torch.is_grad_enabled(), at
        assert not torch.is_autocast_enabled("cpu"), at
        assert torch.equal(torch.get_rng_state(), state), at
        assert optimizer.param_groups[0]["lr"] == 0.1, at
    assert struck > 0.9 * len(places), (struck, len(places))


def test_no_bar_is_made_where_none_is_shown(monkeypatch):
    import tqdm

    def refuse(*_, **__):
        raise AssertionError("tqdm takes a lock of all processes")

    monkeypatch.setattr(tqdm.tqdm, "__new__", refuse)
    fit(net(), rows(8), objective=GaussianNLL(), epochs=1, progress=True)
    fit(net(), rows(8), objective=GaussianNLL(), epochs=1, progress=False)


def shown(capsys, **options):
    """The lines on the error stream, which is no terminal here."""
    capsys.readouterr()
    fit(net(), rows(40), objective=GaussianNLL(), learning_rate=0.01, seed=0, **options)
    found = capsys.readouterr()
    assert not found.out
    return found.err.splitlines()


def test_where_there_is_no_terminal_a_few_plain_lines_tell(capsys, monkeypatch):
    lines = shown(capsys, epochs=57, progress=True, validation=0.25)
    assert len(lines) == 10
    assert all(re.fullmatch(r"epoch \d+/57: loss [-\d.e+]+, nll [-\d.e+]+", line) for line in lines)
    assert lines[-1].startswith("epoch 57/57")
    assert [line.split(":")[0] for line in shown(capsys, epochs=3, progress=True)] == [
        f"epoch {i}/3" for i in (1, 2, 3)
    ]
    monkeypatch.setenv("CI", "1")
    assert len(shown(capsys, epochs=20, progress=True)) == 10


def test_nothing_is_told_where_nobody_asks(capsys):
    assert shown(capsys, epochs=20) == shown(capsys, epochs=20, progress=False) == []


def test_the_last_line_is_that_of_the_epoch_where_training_stopped(capsys):
    lines = shown(capsys, epochs=100, progress=True, callback=lambda told: told.epoch == 13)
    assert [line.split(":")[0] for line in lines] == ["epoch 10/100", "epoch 13/100"]


def test_a_run_that_goes_on_tells_where(capsys, tmp_path):
    shown(capsys, epochs=5, checkpoint=tmp_path / "run")
    lines = shown(capsys, epochs=10, checkpoint=tmp_path / "run", progress=True)
    assert [line.split(":")[0] for line in lines] == [f"epoch {i}/10" for i in range(5, 11)]


def test_a_population_tells_too(capsys):
    x, y = rows(40)
    capsys.readouterr()
    fit_population(x, y, [Member(train=range(40))], epochs=20, progress=True)
    assert capsys.readouterr().err.splitlines() == [f"epoch {i}/20" for i in range(2, 21, 2)]


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
    assert kill_and_resume(tmp_path, kills=1, epochs=30, longest=0.8)


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments(tmp_path):
    assert kill_and_resume(tmp_path, kills=20, epochs=300, longest=1.0) >= 15


def test_the_last_two_states_are_kept(tmp_path):
    fit(net(), rows(), objective=GaussianNLL(), epochs=9, checkpoint=tmp_path)
    assert [p.name for p in sorted(Path(tmp_path).iterdir())] == ["step-000000008", "step-000000009"]


# ------------------------------------------------------------------------------ no passes: the network as it is


def normed(dropout=0.5, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))


def test_without_passes_it_equals_the_loop_of_torch():
    x, y = rows(50)
    ours, theirs = normed(), normed(dropout=0.0)
    history = fit(
        ours, (x, y), objective=GaussianNLL(0.5, precision=2.0), epochs=3, batch_size=16, n_passes=None, seed=7,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.01),
    )  # fmt: skip
    optimizer, losses = torch.optim.SGD(theirs.parameters(), lr=0.01), []
    for epoch in range(3):
        losses.append(0.0)
        for chosen in order(50, seed=7, epoch=epoch).split(16):
            loss = -torch.distributions.Normal(theirs(x[chosen]), 0.5**0.5).log_prob(y[chosen]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1] += loss.item() * len(chosen) / 50
    assert history.loss == pytest.approx(losses, rel=1e-5)
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert ours[1].num_batches_tracked == 12


def test_without_passes_validation_is_in_evaluation_mode():
    (x, y), held = rows(64), rows(20, seed=1)
    model, seen = normed(), []

    def told(progress):
        mean = model.eval()(held[0])
        seen.append(-torch.distributions.Normal(mean, 0.5**0.5).log_prob(held[1]).mean().item())

    options = {"objective": GaussianNLL(0.5, precision=2.0), "epochs": 4, "batch_size": 16, "n_passes": None}
    history = fit(model, (x, y), validation=held, callback=told, seed=0, **options)
    assert history.nll == pytest.approx(seen, rel=1e-5)
    assert history.best_epoch == 1 + seen.index(min(seen))


def test_without_passes_a_net_that_draws_all_the_same_is_refused():
    class Stubborn(nn.Linear):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5)

    with pytest.raises(ValueError, match="still draws"):
        fit(Stubborn(3, 1), rows(), objective=GaussianNLL(), epochs=1, n_passes=None)
