"""Passes until a row is settled: the laws of stages, of rows that drop out, and of what is said to be settled."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bbalpha
from bbalpha import networks
from bbalpha._engine import batches, settling
from bbalpha._engine.batches import PassOptions
from bbalpha._engine.settling import classes_settled, mixture_settled, stages
from bbalpha._kernels import pass_seed
from bbalpha.predictive import RegressionPrediction


class Mixed(nn.Module):
    """Rows with a small x[:, 0] hardly feel the dropout, others do; `dims` outputs."""

    def __init__(self, dims=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, dims))
        self.plain = nn.Linear(4, dims)
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        return self.plain(x) + x[:, :1] * self.net(x)


def rows(n=30):
    """A third of them nearly without spread, a third with a little, a third with more and more."""
    x = torch.randn(n, 4)
    x[:, 0] = torch.tensor([1e-4, 0.3, 0.0]).repeat(n // 3)
    x[2::3, 0] = torch.linspace(0.4, 4.0, n // 3)
    return x


def by_hand(model, x, seed, end):
    """The passes of the stages up to `end` of 100, with shared masks (end, N, ...)."""
    parts, first = [], 0
    for stop in (10, 20, 50, 100):
        if stop <= end:
            own = pass_seed(pass_seed(seed, first), 1) if first else seed
            parts.append(bbalpha.sample(model.eval(), x, stop - first, seed=own, masks="shared").detach())
        first = stop
    return torch.cat(parts)


PREDICT = [bbalpha.predict_classification, bbalpha.predict_regression]


def answers(p):
    """What a prediction holds, whichever it is."""
    return p.outputs if isinstance(p, RegressionPrediction) else p.log_probs


# ------------------------------------------------------------------------------ stages


@pytest.mark.parametrize("n_passes", [*range(1, 40), 50, 60, 64, 97, 100, 101, 128, 200, 360, 1000])
def test_stages_end_at_growing_divisors_and_at_all_passes(n_passes):
    ends = stages(n_passes)
    assert ends[-1] == n_passes
    assert all(n_passes % k == 0 for k in ends)
    assert all(b >= 2 * a for a, b in pairwise(ends))
    assert len(ends) == 1 or ends[0] >= 8


def test_a_hundred_passes_may_end_after_10_20_and_50():
    assert stages(100) == (10, 20, 50, 100)


# ------------------------------------------------------------------------------ what comes out


@pytest.mark.parametrize("predict", PREDICT)
def test_a_tiny_tolerance_gives_the_mixture_of_all_passes(predict):
    model, x = Mixed(), rows()
    p = predict(model, x, tolerance=1e-12, masks="shared", seed=3)
    assert p.passes_used.tolist() == [100] * 30
    assert p.passes_used.dtype == torch.int64
    passes = by_hand(model, x, 3, 100)
    if predict is bbalpha.predict_regression:
        torch.testing.assert_close(p.outputs, passes)
    else:
        probs = passes.double().softmax(-1)
        torch.testing.assert_close(p.probs.double(), probs.mean(0), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            p.expected_entropy.double(), -(probs * probs.log()).sum(-1).mean(0), rtol=1e-5, atol=0
        )
        votes = nn.functional.one_hot(probs.argmax(-1), 3).double().mean(0)
        torch.testing.assert_close(p.votes.double(), votes, atol=1e-6, rtol=0)


@pytest.mark.parametrize("predict", PREDICT)
@pytest.mark.parametrize("batch_size", [None, 7, 1])
def test_each_row_has_the_answer_of_the_passes_it_had(predict, batch_size):
    model, x = Mixed(), rows()
    options = {"precision": 1.0} if predict is bbalpha.predict_regression else {}
    p = predict(model, x, tolerance=0.1, masks="shared", seed=3, batch_size=batch_size, **options)
    assert (p.passes_used[::3] == 10).all()  # hardly any spread
    assert p.passes_used.max() == 100
    assert len(p.passes_used.unique()) > 2
    for k in p.passes_used.unique().tolist():
        own = p.passes_used == k
        passes = by_hand(model, x, 3, k)[:, own]
        if options:
            whole, part = RegressionPrediction(passes, torch.tensor(1.0)), p
            y = torch.randn(30, 3)
            torch.testing.assert_close(part.outputs[:k, own], passes)
            for name in ("mean", "std", "epistemic_std"):
                torch.testing.assert_close(getattr(part, name)[own], getattr(whole, name))
            torch.testing.assert_close(part.log_prob(y)[own], whole.log_prob(y[own]))
            torch.testing.assert_close(part.quantile([0.05, 0.9])[:, own], whole.quantile([0.05, 0.9]))
        else:
            torch.testing.assert_close(p.probs[own], passes.softmax(-1).mean(0))


@pytest.mark.parametrize("predict", PREDICT)
def test_without_a_tolerance_all_rows_have_all_passes(predict):
    p = predict(Mixed(), rows(), n_passes=20, seed=0)
    assert p.passes_used.tolist() == [20] * 30
    assert predict(Mixed(), rows(), n_passes=None).passes_used.tolist() == [1] * 30
    assert predict(Mixed(), torch.zeros(0, 4), n_passes=20, tolerance=0.1).passes_used.shape == (0,)


def test_quantiles_without_noise_are_those_of_the_passes_a_row_had():
    model, x = Mixed(2), rows()
    p = bbalpha.predict_regression(model, x, tolerance=0.4, masks="shared", seed=1)
    assert len(p.passes_used.unique()) > 1
    assert p.passes_used.min() < 100
    for n, k in enumerate(p.passes_used.tolist()):
        alone = RegressionPrediction(by_hand(model, x, 1, k)[:, n : n + 1])
        for q in (0.05, [0.3, 0.5]):
            expected = alone.quantile(q)
            torch.testing.assert_close(p.quantile(q).select(-2, n), expected.select(-2, 0), rtol=1e-4, atol=1e-6)
    scaled = p.rescaled(2.0, 1.0)
    assert torch.equal(scaled.passes_used, p.passes_used)


@pytest.mark.parametrize("predict", PREDICT)
@pytest.mark.parametrize("n_passes", [1, 2, 7, 12, 36, 37, 40])
def test_any_number_of_passes(predict, n_passes):
    p = predict(Mixed(), rows(), n_passes=n_passes, tolerance=0.2, seed=0)
    assert set(p.passes_used.tolist()) <= set(stages(n_passes))
    assert answers(p).isfinite().all()
    assert len(getattr(p, "outputs", [None] * n_passes)) == n_passes
    if n_passes == 1:
        name = "mutual_information" if predict is bbalpha.predict_classification else "epistemic_std"
        with pytest.raises(ValueError, match="at least 2 passes"):
            getattr(p, name)


@pytest.mark.parametrize("predict", PREDICT)
@pytest.mark.parametrize("masks", ["shared", "per_example"])
def test_a_seed_repeats_everything(predict, masks):
    model, x = Mixed(), rows()
    a, b = (predict(model, x, tolerance=0.1, seed=5, masks=masks, batch_size=9) for _ in range(2))
    assert torch.equal(answers(a), answers(b))
    assert torch.equal(a.passes_used, b.passes_used)
    assert not torch.equal(answers(a), answers(predict(model, x, tolerance=0.1, seed=6, masks=masks, batch_size=9)))


def test_no_stage_draws_what_another_batch_draws():
    model, x = Mixed(1), torch.ones(20, 4)
    p = bbalpha.predict_regression(model, x, tolerance=1e-12, seed=0, batch_size=10)  # stage two begins at pass 10
    assert not torch.equal(p.outputs[10:20, :10], p.outputs[:10, 10:])


@pytest.mark.parametrize("predict", PREDICT)
def test_streams_tuples_and_mappings_give_the_same(predict):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Mixed()

        def forward(self, a, b):
            return self.net(a + b)

    model, x = Two(), rows()
    options = {"tolerance": 0.1, "masks": "shared", "seed": 2}
    whole = predict(model.net, x, **options)
    a, b = x / 4, 3 * x / 4
    for given in ((a, b), {"a": a, "b": b}, DataLoader(TensorDataset(a, b), batch_size=8), iter([(a, b)])):
        p = predict(model, given, **options)
        assert torch.equal(p.passes_used, whole.passes_used)
        torch.testing.assert_close(answers(p), answers(whole), rtol=1e-4, atol=1e-5)


def test_groups_and_blocks_of_passes_change_nothing(monkeypatch):
    model, x = Mixed(), rows()
    options = {"tolerance": 0.1, "masks": "shared", "seed": 2}
    monkeypatch.setattr(batches, "_BUDGET", 30)  # 10 passes at a time: the same groups in the first stage
    p = bbalpha.predict_classification(model, x, **options)
    monkeypatch.setattr(bbalpha.prediction, "_BLOCK", 100)
    q = bbalpha.predict_classification(model, x, **options)
    assert torch.equal(p.passes_used, q.passes_used)
    torch.testing.assert_close(p.log_probs, q.log_probs)


def test_pixels_and_tokens_wait_for_their_slowest():
    model = nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.5), nn.Linear(8, 5))
    with torch.no_grad():
        model[0].weight[:19] *= 1e-6  # nothing to drop
    tokens = torch.randint(19, (4, 6))
    tokens[2, 3] = 19
    p = bbalpha.predict_classification(model, tokens, tolerance=1e-3, class_axis=-1, seed=0)
    assert p.passes_used.tolist() == [10, 10, 100, 10]
    image = nn.Sequential(nn.Dropout2d(0.5), nn.Conv2d(3, 5, 1))
    x = torch.zeros(3, 3, 4, 4)
    x[1, :, 2, 2] = 1.0
    assert bbalpha.predict_classification(image, x, tolerance=1e-6, seed=0).passes_used.tolist() == [10, 100, 10]
    assert bbalpha.predict_regression(image, x, tolerance=1e-6, seed=0).passes_used.tolist() == [10, 100, 10]


# ------------------------------------------------------------------------------ which rows are run


def test_rows_that_are_settled_are_not_run_again():
    model, x = Mixed(), rows()
    p = bbalpha.predict_classification(model, x, tolerance=0.1, seed=0)
    model.seen.clear()
    again = bbalpha.predict_classification(model, x, tolerance=0.1, seed=0)
    assert torch.equal(p.passes_used, again.passes_used)
    assert model.seen == [int((p.passes_used > end).sum()) for end in (0, 10, 20, 50)]  # all passes of a stage at once


class Squeezed(Mixed):
    def forward(self, x):
        return super().forward(x).squeeze()


def test_a_last_row_is_not_run_alone():
    model, x = Squeezed(1), rows(9)
    x[:, 0] = 1e-4
    x[4, 0] = 4.0
    p = bbalpha.predict_regression(model, x, tolerance=0.05, precision=1.0, masks="shared", seed=0)
    assert p.passes_used.tolist() == [10] * 4 + [100] + [10] * 4
    torch.testing.assert_close(p.outputs[:, 4], by_hand(model, x, 0, 100)[:, 4])


class Centred(Mixed):
    def forward(self, x):
        out = super().forward(x)
        return out - 1e-3 * out.mean(0)


@pytest.mark.parametrize("predict", PREDICT)
def test_rows_that_depend_on_each_other_stay_together(predict):
    model, x = Centred(), rows()
    p = predict(model, x, tolerance=0.1, masks="shared", seed=3)
    assert p.passes_used.tolist() == [100] * 30
    if predict is bbalpha.predict_regression:
        torch.testing.assert_close(p.outputs, by_hand(model, x, 3, 100))
    x[:, 0] = 1e-6
    assert predict(model, x, tolerance=0.1, seed=3, **_noise(predict)).passes_used.tolist() == [10] * 30


def _noise(predict):
    return {"precision": 1.0} if predict is bbalpha.predict_regression else {}


def test_batches_may_differ_in_the_passes_they_need_but_not_in_what_draws():
    options, witness = PassOptions(n_passes=4, masks="shared"), batches._Witness()
    for drawn in (["a"], ["a", "b"], ["a", "b", "a"], ["a"]):
        witness.begin(options)
        for name in drawn:
            witness((name,))
    witness.begin(options)
    witness(("a",))
    with pytest.raises(batches._NotOneFunctionError):
        witness(("c",))


# ------------------------------------------------------------------------------ noise


def test_precision_of_each_row_follows_the_rows():
    model, x = Mixed(1), rows()
    tau = torch.full((30, 1), 1e4)
    tau[2::3] = 1e-6  # beside so much noise the passes do not matter
    loose = bbalpha.predict_regression(model, x, tolerance=0.05, precision=tau, seed=0, batch_size=7)
    assert (loose.passes_used[2::3] == 10).all()
    assert (loose.passes_used[1::3] == 100).all()
    tight = bbalpha.predict_regression(model, x, tolerance=0.05, precision=1e4, seed=0)
    assert (tight.passes_used[2::3] == 100).all()


class Heads(nn.Module):
    """The same mean in every pass; the noise differs from pass to pass by a factor that is large for large x."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x, x * self.drop(torch.ones_like(x))


def test_predicted_noise_has_to_settle_too():
    x = torch.tensor([[1e-5], [3.0]])
    p = bbalpha.predict_regression(Heads(), x, tolerance=0.05, precision="predicted", seed=0)
    assert p.passes_used.tolist() == [10, 100]
    assert p.precision.shape == p.outputs.shape == (100, 2, 1)


# ------------------------------------------------------------------------------ is it settled?


@pytest.mark.parametrize("balanced", [True, False])
def test_rules_are_those_of_the_module(balanced):
    share = 0.5 if balanced else 1.0
    mean = torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [0.4, 0.35, 0.25]])
    error = torch.tensor([[0.05], [0.051], [0.05]]).expand(3, 3) / share / 2
    options = {"balanced": balanced}
    # two errors fit into the tolerance; the third row's gap, 0.05, is less than three errors of both classes
    assert classes_settled(mean, error, 1, tolerance=0.0501, **options).tolist() == [True, False, False]
    assert classes_settled(mean.T, error.T, 0, tolerance=0.0501, **options).all(-1).ndim == 0
    torch.manual_seed(0)
    outputs = torch.randn(100_000, 1, dtype=torch.float64)
    needed = 2 * share * math.sqrt((1 + 1.645**2 / 2) / 1e5)  # of the ends of a Gaussian, for k passes
    zero = outputs.new_zeros(())
    assert mixture_settled(outputs, zero, tolerance=1.02 * needed, **options).tolist() == [True]
    assert mixture_settled(outputs, zero, tolerance=0.98 * needed, **options).tolist() == [False]


@pytest.mark.parametrize("balanced", [True, False])
def test_a_mean_near_the_number_that_decides_is_not_settled(balanced):
    torch.manual_seed(0)
    outputs = torch.randn(100_000, 1, dtype=torch.float64)
    error = (0.5 if balanced else 1.0) * float(outputs.std()) / math.sqrt(1e5)
    for side in (-1, 1):
        for errors, done in ((2.9, False), (3.1, True)):
            limit = float(outputs.mean()) + side * errors * error
            args = {"tolerance": 1.0, "balanced": balanced, "threshold": limit}
            assert mixture_settled(outputs, outputs.new_zeros(()), **args).tolist() == [done]


def test_rows_that_a_threshold_parts_go_on_and_are_decided_as_by_all_passes():
    model, x = networks.mlp([4, 50, 50, 1], dropout=0.1), torch.randn(300, 4)
    options = {"precision": 0.01, "masks": "shared", "seed": 0}
    whole = bbalpha.predict_regression(model, x, tolerance=1e-12, **options).mean[:, 0]
    limit = float(whole[150])  # the mean of a row
    plain = bbalpha.predict_regression(model, x, tolerance=0.5, **options)
    p = bbalpha.predict_regression(model, x, tolerance=0.5, threshold=limit, **options)
    wrong = ((plain.mean[:, 0] > limit) != (whole > limit)).sum()
    assert ((p.mean[:, 0] > limit) != (whole > limit)).sum() < wrong / 2  # some are wrong without it
    assert p.passes_used[150] == 100
    assert plain.passes_used.max() == 10 < p.passes_used.double().mean() < 80
    same = p.passes_used == plain.passes_used
    assert torch.equal(p.mean[same], plain.mean[same])


def test_a_threshold_goes_with_a_tolerance_and_is_a_number():
    with pytest.raises(ValueError, match=r"`threshold` goes with `tolerance`; got 0\.0 without one"):
        bbalpha.predict_regression(Mixed(), rows(), threshold=0.0)
    with pytest.raises(ValueError, match="`threshold` must be a finite number; got nan"):
        bbalpha.predict_regression(Mixed(), rows(), threshold=math.nan, tolerance=0.1)


def test_passes_that_agree_are_settled_however_small_the_tolerance():
    outputs = torch.ones(10, 4, 2)
    assert mixture_settled(outputs, torch.zeros(()), tolerance=1e-30, balanced=True).all()
    mean = torch.tensor([[0.5, 0.5]])
    assert classes_settled(mean, torch.zeros(1, 2), 1, tolerance=1e-30, balanced=True).all()


def test_settled_answers_are_within_the_tolerance_for_most_rows():
    model, x = Mixed(), torch.randn(300, 4)
    many = bbalpha.predict_classification(model, x, n_passes=4000, masks="shared", seed=0)
    p = bbalpha.predict_classification(model, x, tolerance=0.1, seed=1)
    off = (p.probs - many.probs).abs().amax(1)
    assert (off <= 0.1).double().mean() > 0.9
    assert p.passes_used.double().mean() < 60
    noisy = bbalpha.predict_classification(model, x, tolerance=0.1, seed=1, balanced=False)
    assert noisy.passes_used.double().mean() > 1.3 * p.passes_used.double().mean()  # independent passes settle later


# ------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("predict", PREDICT)
@pytest.mark.parametrize("tolerance", [0, -0.1, math.nan, math.inf, "much", True])
def test_what_is_no_tolerance_is_named(predict, tolerance):
    with pytest.raises(ValueError, match="`tolerance` must be a finite number above 0; got "):
        predict(Mixed(), rows(), tolerance=tolerance)


@pytest.mark.parametrize("predict", PREDICT)
def test_a_tolerance_without_passes_is_refused(predict):
    with pytest.raises(ValueError, match=r"`tolerance` needs passes .* n_passes=None. Give a number"):
        predict(Mixed(), rows(), n_passes=None, tolerance=0.1)


def test_precisions_that_do_not_fit_are_named():
    x, predict = rows(), bbalpha.predict_regression
    with pytest.raises(ValueError, match="must not differ from pass to pass"):
        predict(Mixed(), x, tolerance=0.1, precision=torch.ones(100, 1, 1))
    with pytest.raises(ValueError, match=r"one value a row; got \(20, 1\) for row 29"):
        predict(Mixed(), x, tolerance=0.1, precision=torch.ones(20, 1))
    with pytest.raises(ValueError, match="`precision` must broadcast"):
        predict(Mixed(), x, tolerance=0.1, precision=torch.ones(2))


class Late(nn.Module):
    """Nan in the row that is marked, once a net has so few rows to run that some must have dropped out."""

    def __init__(self):
        super().__init__()
        self.net, self.few = Mixed(), 0

    def forward(self, x):
        out = self.net(x)
        return torch.where((len(x) <= self.few) & (x[:, :1] == 4.0), math.nan, out)


@pytest.mark.parametrize("predict", PREDICT)
@pytest.mark.parametrize("alone", [False, True])
def test_nan_in_a_later_stage_is_reported_with_pass_and_row(predict, alone):
    x, model = rows(90), Late()
    x[:, 0] = 1e-4
    x[33, 0], x[70, 0] = 1e-4 if alone else 3.0, 4.0
    model.few = 2  # fewer than are tried
    with pytest.raises(ValueError, match="got nan in pass 10, row 70"):
        predict(model, x, tolerance=1e-3, seed=0, batch_size=50, **_noise(predict))


def test_stages_are_not_looked_at_without_a_tolerance(monkeypatch):
    def fail(*_, **__):
        raise AssertionError

    for name in ("stages", "classes_settled", "mixture_settled"):
        monkeypatch.setattr(settling, name, fail)
    monkeypatch.setattr(batches, "run_until_settled", fail)
    bbalpha.predict_classification(Mixed(), rows(), n_passes=20)
