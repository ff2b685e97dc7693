"""Numbers at their ends: likelihoods of huge and of hardly different passes in every precision, what is no number, and
the same result again: under deterministic algorithms, in another process, on another number of threads."""

import json
import math
import os
import subprocess
import sys

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

import bbalpha
from bbalpha import acquisition
from bbalpha.networks import mlp

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALPHAS = (-1e4, -1.0, -1e-3, -1e-12, 0.0, 1e-12, 1e-6, 1e-3, 0.5, 1.0, 30.0, 1e4, 1e30)
inf, nan = math.inf, math.nan


# ------------------------------------------------------------------------------ likelihoods against 60 digits


def reference(losses, alpha):
    """The alpha objective of one point's K losses and the weight of each pass, in 60 digits."""
    alpha = mpmath.mpf(alpha)
    mean = mpmath.fsum(losses) / len(losses)
    apart = [alpha * (loss - mean) for loss in losses]
    if max(map(abs, apart)) < mpmath.mpf("1e-25"):
        return mean, [mpmath.mpf(1) / len(losses)] * len(losses)
    top = max(-z for z in apart)
    exps = [mpmath.exp(-z - top) for z in apart]
    total = mpmath.fsum(exps)
    return mean - (top + mpmath.log(total / len(losses))) / alpha, [e / total for e in exps]


def class_loss(logits, target):
    top = max(logits)
    return top + mpmath.log(mpmath.fsum(mpmath.exp(z - top) for z in logits)) - logits[target]


def gaussian_loss(output, target, precision):
    tau = mpmath.mpf(precision)
    return (tau * (target - output) ** 2 - mpmath.log(tau) + mpmath.log(2 * mpmath.pi)) / 2


def exact(numbers):
    return [mpmath.mpf(number) for number in numbers.double().tolist()]


def check(value, gradient, losses, alpha, *, size, precise):
    """The value within a few digits of the losses' rounding; the gradient of the losses that of the weights' rounding.

    Args:
        value: Of one point.
        gradient: How the value moves with each of the K losses.
        losses: In 60 digits.
        alpha: Of the objective.
        size: The largest number on the way to a loss.
        precise: What one rounding does.
    """
    want, weights = reference(losses, alpha)
    slack = 8 * precise * (size + float(max(map(abs, losses))))
    assert abs(value - want) <= slack, (alpha, value, float(want))
    off = max(abs(float(w) - g) for w, g in zip(weights, gradient, strict=True))
    assert off <= min(1.0, 8 * precise + 2 * abs(alpha) * slack), (alpha, gradient, list(map(float, weights)))


def logit_cases(dtype):
    """(K, C) logits; class 0 is the target."""
    top = 3e4 if dtype == torch.float16 else 1e4
    x = torch.randn(5, 3, dtype=torch.float64)
    near = torch.ones(4, 3, dtype=torch.float64) + 1e-8 * torch.randn(4, 3, dtype=torch.float64)
    yield "losses of 1e4", torch.tensor([[-top, 0.0, 0.0], [-top, top, 0.0], [0.0, top, 1.0]], dtype=torch.float64)
    yield "hardly different", near
    yield "all equal", x[:1].expand(5, 3)
    yield "one pass", x[:1]
    yield "one alone", torch.cat((x[:1] + torch.tensor([-50.0, 0, 0]), x[1:] * 1e-3))
    yield "as usual", x


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_at_the_ends(dtype):
    precise = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    with mpmath.workdps(60):
        for name, given in logit_cases(dtype):
            logits = given.to(dtype)
            losses = [class_loss(exact(row), 0) for row in logits]
            for alpha in ALPHAS:
                outputs = logits[:, None].clone().requires_grad_()  # (K, 1, C)
                value = bbalpha.cross_entropy(outputs, torch.tensor([0]), alpha)
                (grad,) = torch.autograd.grad(value, outputs)
                assert value.isfinite(), (name, alpha)
                assert grad.isfinite().all(), (name, alpha)
                # -d/d logit of the target is w_k (1 - p_k): the weight where the target is unlikely, 0 where it is sure
                share = [float(1 - mpmath.exp(-loss)) for loss in losses]
                _, weights = reference(losses, alpha)
                size = float(logits.abs().max())
                off = [abs(-g - float(w) * s) for g, w, s in zip(grad[:, 0, 0].tolist(), weights, share, strict=True)]
                slack = 8 * precise * (size + float(max(losses)))
                bound = 2 * torch.finfo(dtype).eps + min(1.0, 8 * precise + 2 * abs(alpha) * slack)
                assert max(off) <= bound, (name, alpha)
                whole = bbalpha.alpha_loss(torch.tensor([[float(v)] for v in losses], dtype=value.dtype), alpha)
                assert abs(value.item() - whole.item()) <= 2 * slack, (name, alpha)
                check(value.item(), list(map(float, weights)), losses, alpha, size=size, precise=precise)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", [1e-6, 1.0, 1e8])
def test_gaussian_nll_at_the_ends(dtype, precision):
    precise = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    cases = (
        torch.tensor([0.0, 100.0, -100.0]), torch.tensor([1.0, 1.0 + 1e-8, 1.0 - 1e-8]), torch.full((4,), 2.0),
        torch.tensor([0.5]), torch.randn(10, dtype=torch.float64),
    )  # fmt: skip
    with mpmath.workdps(60):
        for given in cases:
            outputs, target = given.double().to(dtype), torch.tensor(1.0, dtype=dtype)
            losses = [gaussian_loss(f, mpmath.mpf(1), precision) for f in exact(outputs)]
            size = precision * float(outputs.double().abs().max() + 1) ** 2
            for alpha in ALPHAS:
                leaf = outputs[:, None].clone().requires_grad_()
                value = bbalpha.gaussian_nll(leaf, target[None], alpha, precision=precision)
                (grad,) = torch.autograd.grad(value, leaf)
                assert value.isfinite(), alpha
                assert grad.isfinite().all() or dtype == torch.float16, alpha  # 1e10 is no number of float16
                _, weights = reference(losses, alpha)
                check(value.item(), list(map(float, weights)), losses, alpha, size=size, precise=precise)


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_cross_entropy_at_the_ends(dtype):
    precise = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    with mpmath.workdps(60):
        for given in ([1e4, -1e4, 0.0], [1e-8, -1e-8, 0.0], [3.0] * 4, [-2.0], [-80.0, 1.0, 90.0]):
            logits = torch.tensor(given, dtype=torch.float64).to(dtype)
            losses = [mpmath.log1p(mpmath.exp(-z)) for z in exact(logits)]  # of a yes
            for alpha in ALPHAS:
                leaf = logits[:, None].clone().requires_grad_()
                value = bbalpha.binary_cross_entropy(leaf, torch.ones(1), alpha)
                (grad,) = torch.autograd.grad(value, leaf)
                assert grad.isfinite().all(), alpha
                share = [float(-mpmath.expm1(-loss)) for loss in losses]
                gradient = [-g / s if s > 1e-3 else float(w) for g, s, w in
                            zip(grad[:, 0].tolist(), share, reference(losses, alpha)[1], strict=True)]  # fmt: skip
                rough = precise if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps
                check(value.item(), gradient, losses, alpha, size=float(logits.abs().max()), precise=rough)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [1e-9, 1e-3, 0.5, 1.0, 30.0, 1e30])
def test_a_pass_that_is_impossible_costs_what_the_others_leave(dtype, alpha):
    """A loss of infinity is a likelihood of 0: for alpha > 0 it takes its share of the mean and has no gradient."""
    losses = torch.tensor([[1.0], [inf], [3.0]], dtype=dtype).requires_grad_()
    value = bbalpha.alpha_loss(losses, alpha)
    (grad,) = torch.autograd.grad(value, losses)
    wide = torch.tensor([1.0, 3.0], dtype=torch.float64)
    want = -(torch.logsumexp(-alpha * wide, 0).item() - math.log(3)) / alpha
    assert value.item() == pytest.approx(want, rel=1e-5)
    assert torch.allclose(grad[[0, 2], 0].double(), torch.softmax(-alpha * wide, 0), atol=5e-3)
    assert grad[1, 0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_losses_stay_infinite_where_the_mean_is(dtype):
    for alpha in (-1e30, -1.0, -1e-9, 0.0):
        assert bbalpha.alpha_loss(torch.tensor([[1.0], [inf]], dtype=dtype), alpha).item() == inf
    for alpha in (0.0, 1e-9, 1.0, 1e30):
        assert bbalpha.alpha_loss(torch.tensor([[1.0], [-inf]], dtype=dtype), alpha).item() == -inf
    for alpha in ALPHAS:
        for end in (inf, -inf):
            assert bbalpha.alpha_loss(torch.full((3, 1), end, dtype=dtype), alpha).item() == end


# ------------------------------------------------------------------------------ what is no number


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_nan_in_one_pass_is_a_nan_in_the_loss_of_its_row_alone(dtype, alpha):
    outputs = torch.randn(4, 3, 5).to(dtype)
    outputs[2, 1, 0] = nan
    for value in (
        bbalpha.alpha_loss(outputs[..., 0], alpha, reduction="none"),
        bbalpha.cross_entropy(outputs, torch.tensor([1, 1, 1]), alpha, reduction="none"),
        bbalpha.binary_cross_entropy(outputs, torch.ones(3, 5), alpha, positions="joint", reduction="none"),
        bbalpha.gaussian_nll(outputs, torch.zeros(3, 5), alpha, precision=1.0, reduction="none"),
    ):
        assert value.isnan().tolist() == [False, True, False]
        assert value.mean().isnan()
    grouped = bbalpha.alpha_loss(outputs[..., 0], alpha, groups=torch.tensor([0, 0, 1]), reduction="none")
    assert grouped.isnan().tolist() == [True, False]


class Slips(nn.Module):
    """Now and then one entry of what it returns in a pass is `value`."""

    def __init__(self, out, value):
        super().__init__()
        self.drop, self.linear, self.value = nn.Dropout(0.5), nn.Linear(4, out), value

    def forward(self, x):
        out = self.linear(self.drop(x))
        slips = self.drop(torch.ones_like(out[:, :1])) > 0  # about half of rows and passes
        return torch.where(slips & (torch.arange(len(x)) == 7)[:, None], self.value, out)


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_prediction_with_a_pass_that_is_no_number_is_refused(value):
    x = torch.randn(20, 4)
    said = r"`model` must return finite numbers; got (nan|inf|-inf) in pass \d+, row 7"
    for masks in ("per_example", "shared"):
        with pytest.raises(ValueError, match=said):
            bbalpha.predict_regression(Slips(1, value), x, n_passes=20, masks=masks, seed=0)
        if value != -inf:  # a class that cannot be, and no mistake
            with pytest.raises(ValueError, match=said):
                bbalpha.predict_classification(Slips(3, value), x, n_passes=20, masks=masks, seed=0)
    with pytest.raises(ValueError, match=said):
        bbalpha.predict_regression(Slips(1, value), x, n_passes=100, tolerance=0.1, batch_size=20, seed=0)
    with pytest.raises(ValueError, match="finite"):
        bbalpha.Detector(Slips(3, value), n_passes=20, seed=0).fit(x)


@pytest.mark.parametrize(("alpha", "value"), [(0.0, nan), (0.5, nan), (1.0, nan), (0.0, -inf)])
def test_a_fit_with_a_pass_that_is_no_number_ends(alpha, value):
    data = torch.randn(8, 4), torch.randn(8, 1)
    with pytest.raises(ValueError, match=r"The loss of epoch 1, step 1 is (nan|inf): outputs or losses overflow"):
        bbalpha.fit(Slips(1, value), data, objective=bbalpha.GaussianNLL(alpha, 1.0), epochs=1, seed=1, progress=False)


def test_a_fit_whose_passes_overflow_ends_where_the_loss_is_finite():
    """For alpha > 0 the objective of an infinite loss is finite, and its gradient is none."""

    class Overflows(Slips):
        def forward(self, x):
            out = super().forward(x)
            return torch.where(out == self.value, self.linear(x) * self.value, out)

    data = torch.randn(8, 4), torch.randn(8, 1)
    with pytest.raises(ValueError, match=r"the weights are no longer finite|The loss of epoch 2, step 2 is nan"):
        bbalpha.fit(Overflows(1, inf), data, objective=bbalpha.GaussianNLL(0.5, 1.0), epochs=2, seed=1, progress=False)


@pytest.mark.parametrize(
    "ask",
    [acquisition.bald, lambda p: acquisition.batch_bald(p, 2), lambda p: acquisition.epig(p, p)],
    ids=["bald", "batch_bald", "epig"],
)
def test_rows_are_not_chosen_by_what_is_no_number(ask):
    probs = torch.softmax(torch.randn(10, 6, 3), -1)
    probs[4, 2, 1] = nan
    with pytest.raises(ValueError, match="probs` must be probabilities"):
        ask(probs)


# ------------------------------------------------------------------------------ the same again


def small():
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(32, 3))
    return {"mlp": (mlp([8, 16, 3]), torch.randn(30, 8)), "conv": (conv, torch.randn(30, 1, 8))}


def worked(name, masks):
    """What a short training and a prediction come to."""
    model, x = small()[name]
    y = torch.arange(30) % 3
    history = bbalpha.fit(
        model, (x, y), objective=bbalpha.CrossEntropy(0.5), epochs=2, n_passes=4, batch_size=10, validation=0.2,
        masks=masks, seed=3, progress=False,
    )  # fmt: skip
    p = bbalpha.predict_classification(model, x, n_passes=20, masks=masks, batch_size=7, seed=1)
    return [*history.loss, *history.nll, *p.probs.flatten().tolist()]


@pytest.mark.parametrize("masks", ["per_example", "shared"])
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_deterministic_algorithms_train_and_predict_the_same(name, masks):
    want = worked(name, masks)
    torch.use_deterministic_algorithms(True)
    try:
        assert worked(name, masks) == want
        assert worked(name, masks) == want
    finally:
        torch.use_deterministic_algorithms(False)


def test_estimators_train_and_predict_under_deterministic_algorithms():
    X, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
    torch.use_deterministic_algorithms(True)
    try:
        for made, target in ((bbalpha.BBAlphaClassifier, y), (bbalpha.BBAlphaRegressor, X[:, 0])):
            model = made(hidden_layer_sizes=(8,), epochs=5, n_ensemble=1, random_state=0)
            first, again = (model.fit(X, target).predict(X) for _ in range(2))
            assert (first == again).all()
    finally:
        torch.use_deterministic_algorithms(False)


def elsewhere(threads):
    """`worked` of every model in another process, on so many threads, with another hash seed."""
    code = (
        "import json, sys, torch\n"
        f"torch.set_num_threads({threads})\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import test_extreme_numbers as t\n"
        "print(json.dumps([t.worked(n, m) for n in ('mlp', 'conv') for m in ('per_example', 'shared')]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_trains_and_predicts_the_same_and_another_number_of_threads_nearly():
    """To the bit on as many threads; on others sums may come in another order, draws may not."""
    want = [worked(name, masks) for name in ("mlp", "conv") for masks in ("per_example", "shared")]
    assert elsewhere(1) == want
    for there, here in zip(elsewhere(2), want, strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-4, atol=1e-6)


def test_threads_draw_the_same_masks():
    """Of layers that are large enough for torch to share them out among threads."""
    layers = nn.Sequential(nn.Dropout(0.5)), nn.Sequential(bbalpha.layers.GaussianDropout(0.3)), bare_relu()
    x, threads = torch.ones(300, 500), torch.get_num_threads()
    try:
        for layer in layers:
            for masks in ("per_example", "shared"):
                for balanced in (True, False):
                    found = []
                    for n in (1, 2):
                        torch.set_num_threads(n)
                        found.append(bbalpha.sample(layer, x, 6, masks=masks, balanced=balanced, seed=2))
                    assert torch.equal(*found)
    finally:
        torch.set_num_threads(threads)


def bare_relu():
    return nn.Sequential(nn.ReLU(), nn.Dropout(0.1))


# ------------------------------------------------------------------------------ noise that is not there


def test_networks_of_targets_without_noise_have_a_precision_that_is_a_number():
    """Their own jitter bounds it: the standardised noise stays above 1e-4, however long they train."""
    from bbalpha.training import Member, fit_population

    x = torch.randn(32, 2)
    for y in (torch.full((32,), 2.0), x[:, 0]):
        members = [Member(range(32), dropout=0.0, learning_rate=rate, length_scale=1e-3) for rate in (0.01, 0.1)]
        p = fit_population(x, y, members, epochs=400, hidden_layer_sizes=(10,), n_passes=2, schedule=None)
        assert p.log_precision.abs().max() < 2 * math.log(1e4)
