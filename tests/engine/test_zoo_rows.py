"""What a row is, is known for every case here: as many come out as go in, and draws are shared as they should be."""

import copy

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import bbalpha
import zoo_rows

K = 4


@pytest.fixture(params=zoo_rows.CASES, ids=lambda c: c.name)
def case(request):
    return request.param


@pytest.fixture
def made(case):
    model, x = case.make()
    return model.eval(), x


def rows_first(case, outputs):
    return outputs.movedim(1 + case.out_axis, 1)  # (K, N, ...)


def shared_or_refused(case, call, *args, **options):
    """What `call` gives with shared masks; None where it says why not, if it may."""
    try:
        return call(*args, masks="shared", **options)
    except ValueError as error:
        if not (case.may_refuse and "shared" in str(error)):
            raise
        return None


def fitting(model, x, n_passes, **options):
    """The passes; None where the strategy does not fit."""
    try:
        return bbalpha.sample(model, x, n_passes, **options)
    except ValueError as error:
        if "does not fit this model" not in str(error):
            raise
        return None


def assert_near(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def kept(model, x):
    """Everything that must be as it was."""
    held = [vars(x)] if isinstance(x, zoo_rows.Data) else [x]
    tensors = [t.clone() for t in tree_leaves(held) if isinstance(t, Tensor)]
    tensors += [t.clone() for t in model.state_dict().values()] + [torch.get_rng_state()]
    return [m.training for m in model.modules()], tensors


# ------------------------------------------------------------------------------ sample


def test_each_strategy_gives_the_passes_drawn_by_hand(case, made):
    model, x = made
    given = {"loop": bbalpha.sample(model, x, K, seed=3, strategy="loop", **case.options)}
    given["auto"] = bbalpha.sample(model, x, K, seed=3, **case.options)
    for strategy in ("vmap", "repeat"):
        given[strategy] = fitting(model, x, K, seed=3, strategy=strategy, **case.options)
    for outputs in given.values():
        if outputs is not None:
            assert_near(outputs, given["loop"])
    if case.sites is not None:
        assert_near(given["loop"], case.passes(model, x, 3, K, shared=False))


@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_a_pass_with_shared_masks_is_one_function_of_the_whole_batch(case, made, strategy):
    model, x = made
    outputs = shared_or_refused(case, bbalpha.sample, model, x, K, seed=3, strategy=strategy, **case.options)
    if outputs is not None and case.sites is not None:
        assert_near(outputs, case.passes(model, x, 3, K, shared=True))


def test_rows_that_are_alike_get_the_same_where_masks_are_shared(case, made):
    model, x = made
    if case.interacts or case.whole:
        pytest.skip("rows have more than themselves to look at")
    same = (case.alike or zoo_rows.same_rows)(x)
    outputs = shared_or_refused(case, bbalpha.sample, model, same, K, seed=3, **case.options)
    if outputs is not None:
        outputs = rows_first(case, outputs)
        assert_near(outputs, outputs[:, :1].expand_as(outputs))


def test_nothing_is_touched(case, made):
    model, x = made
    before = kept(model, x)
    bbalpha.sample(model, x, K, seed=3, **case.options)
    shared_or_refused(case, bbalpha.sample, model, x, K, seed=3, **case.options)
    bbalpha.predict_regression(model, x, n_passes=K, seed=3, **case.options)
    flags, tensors = kept(model, x)
    assert flags == before[0]
    assert all(torch.equal(a, b) for a, b in zip(before[1], tensors, strict=True))
    left = [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor)]
    assert not any(torch._C._functorch.is_batchedtensor(t) for t in left)
    copy.deepcopy(model)


# ------------------------------------------------------------------------------ predict


def test_as_many_rows_come_out_as_go_in(case, made):
    model, x = made
    assert (
        bbalpha.predict_classification(model, x, n_passes=K, class_axis=2, **case.options).probs.shape[0] == case.rows
    )
    assert bbalpha.predict_regression(model, x, n_passes=K, **case.options).mean.shape[0] == case.rows


def test_predictions_are_the_passes_of_sample_put_together(case, made):
    model, x = made
    for masks in ("per_example", "shared"):
        options = {**case.options, "seed": 3}
        if masks == "shared":
            passes = shared_or_refused(case, bbalpha.sample, model, x, K, **options)
        else:
            passes = bbalpha.sample(model, x, K, **options)
        if passes is None:
            continue
        passes = rows_first(case, passes)  # (K, N, ...)
        regression = bbalpha.predict_regression(model, x, n_passes=K, masks=masks, **options)
        assert_near(regression.outputs, passes)
        wide = passes if passes.shape[2] > 1 else torch.cat((torch.zeros_like(passes), passes), 2)
        probs = bbalpha.predict_classification(model, x, n_passes=K, masks=masks, class_axis=2, **options).probs
        assert_near(probs, wide.softmax(2).mean(0))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_shared_predictions_do_not_hang_on_the_batch_size(case, made, batch_size):
    model, x = made
    if case.sites is None:
        pytest.skip("nobody has laid down what is drawn")
    options = {**case.options, "seed": 3, "n_passes": K, "batch_size": batch_size}
    predicted = shared_or_refused(case, bbalpha.predict_regression, model, x, **options)
    if predicted is not None:
        assert_near(predicted.outputs, rows_first(case, case.passes(model, x, 3, K, shared=True)))


# ------------------------------------------------------------------------------ what was seen in earnest


def test_noise_on_units_has_the_spread_it_has_by_hand():
    model, x = zoo_rows.noise_on_twice_as_many_units_as_rows()
    with torch.no_grad():
        outputs = bbalpha.sample(model.eval(), x[:1].expand(64, -1), 2000, masks="shared", seed=0)[:, 0, 0]
    weights = (model.b.weight * torch.tanh(model.a(x[:1]))).detach()
    assert float(outputs.std()) == pytest.approx(float(weights.square().sum().sqrt()), rel=0.1)


def test_hand_drawn_passes_without_sharing_differ_by_row(case, made):
    """The oracle of this file: where a draw belongs to rows, rows that are alike differ unless it is shared."""
    model, x = made
    if case.interacts or case.whole or case.sites in (None, [None]):
        pytest.skip("nothing is drawn for a row alone")
    same = (case.alike or zoo_rows.same_rows)(x)
    apart, together = (rows_first(case, case.passes(model, same, 3, K, shared)) for shared in (False, True))
    assert_near(together, together[:, :1].expand_as(together))
    assert not torch.allclose(apart, apart[:, :1].expand_as(apart), atol=1e-3)


def test_both_experts_have_rows():
    torch.manual_seed(0)
    model, x = zoo_rows.mixture_of_experts()
    assert 0 < int(model.gate(x).argmax(-1).sum()) < len(x)
