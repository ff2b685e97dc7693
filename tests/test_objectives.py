import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bbalpha
import reference
from bbalpha import AlphaLoss, CrossEntropy, GaussianNLL, alpha_loss, binary_cross_entropy, cross_entropy, gaussian_nll

ALPHAS = (-2.0, -1.0, -1e-6, 0.0, 1e-12, 1e-6, 1e-4, 0.5, 1.0, 2.0, 50.0)
SPREADS = (1e-6, 1e-3, 0.3, 1.0, 30.0, 1e4)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


def losses_of(K, spread, dtype, N=3):
    """Losses of both signs, spread around 0, around a large value and around a negative one."""
    return (torch.randn(K, N, dtype=torch.float64) + torch.tensor([0.0, 5.0, -5.0])).mul(spread).to(dtype)


# ------------------------------------------------------------------------------ laws of the objective


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_value_and_gradient_are_those_of_the_equation(alpha, dtype):
    for spread, K in itertools.product(SPREADS, (1, 2, 10, 200)):
        losses = losses_of(K, spread, dtype).requires_grad_()
        value = alpha_loss(losses, alpha, reduction="none")
        (gradient,) = torch.autograd.grad(value.sum(), losses)
        for n in range(3):
            own = losses[:, n].detach()
            scale = float(own.abs().max())
            assert abs(value[n].item() - reference.alpha_loss(own, alpha)) <= TOLERANCE[dtype] * scale
        if K <= 10:
            # alpha * loss is rounded to the accuracy of the dtype before it is exponentiated
            limit = max(TOLERANCE[dtype], 4 * torch.finfo(dtype).eps * abs(alpha) * float(losses.detach().abs().max()))
            for n in range(3):
                expected = torch.tensor(reference.softmax(losses[:, n].detach(), alpha), dtype=dtype)
                torch.testing.assert_close(gradient[:, n], expected, rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_thousand_passes(dtype):
    losses = losses_of(1000, 1.0, dtype)
    for alpha in ALPHAS:
        got = alpha_loss(losses, alpha, reduction="none")
        want = torch.tensor([reference.alpha_loss(losses[:, n], alpha) for n in range(3)], dtype=dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype] * float(losses.abs().max()))


def test_alpha_zero_is_the_mean_and_alpha_one_the_log_mean():
    losses = torch.randn(10, 4, dtype=torch.float64)
    torch.testing.assert_close(alpha_loss(losses, 0.0, reduction="none"), losses.mean(0), rtol=0, atol=1e-15)
    torch.testing.assert_close(alpha_loss(losses, 1.0, reduction="none"), -(-losses).exp().mean(0).log())


@pytest.mark.parametrize("alpha", ALPHAS)
def test_one_pass_ignores_alpha(alpha):
    losses = torch.randn(1, 5) * 100
    assert torch.equal(alpha_loss(losses, alpha, reduction="none"), losses[0])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=8),
    st.floats(-60, 60),
    st.floats(-60, 60),
)
def test_never_grows_with_alpha_and_lies_between_the_losses(values, a, b):
    losses = torch.tensor(values, dtype=torch.float64)[:, None]
    slack = 1e-10 * max(1e-300, float(losses.abs().max()))
    low, high = sorted((a, b))
    at_low, at_high = (float(alpha_loss(losses, alpha)) for alpha in (low, high))
    assert at_high <= at_low + slack
    assert min(values) - slack <= at_high <= max(values) + slack


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_continuous_across_zero(dtype):
    losses = losses_of(10, 1.0, dtype)
    at_zero = alpha_loss(losses, 0.0, reduction="none")
    for tiny in (1e-40, 1e-12, 1e-8, 1e-6):
        for alpha in (tiny, -tiny):
            near = alpha_loss(losses, alpha, reduction="none")
            atol = TOLERANCE[dtype] * float(losses.abs().max()) + tiny * float(losses.var(0).max())
            torch.testing.assert_close(near, at_zero, rtol=0, atol=atol)


@pytest.mark.parametrize("alpha", [-2.0, 1e-6, 0.5, 50.0])
def test_gradcheck(alpha):
    losses = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: alpha_loss(t, alpha), losses, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda t: alpha_loss(t, alpha), losses)


def test_works_under_torch_func_and_compile():
    losses = torch.randn(5, 3, dtype=torch.float64)
    plain = torch.autograd.functional.jacobian(lambda t: alpha_loss(t, 0.5), losses)
    torch.testing.assert_close(torch.func.grad(lambda t: alpha_loss(t, 0.5))(losses), plain)
    many = torch.func.vmap(lambda t: alpha_loss(t, 0.5))(torch.stack([losses, 2 * losses]))
    torch.testing.assert_close(many, torch.stack([alpha_loss(losses, 0.5), alpha_loss(2 * losses, 0.5)]))
    compiled = torch.compile(lambda t: cross_entropy(t, torch.tensor([0, 1])), backend="eager")
    logits = torch.randn(5, 2, 3)
    torch.testing.assert_close(compiled(logits), cross_entropy(logits, torch.tensor([0, 1])))


@pytest.mark.parametrize(("alpha", "sign"), [(0.5, -1), (1.0, -1), (-1.0, 1)])
def test_expected_loss_falls_with_k_for_positive_alpha(alpha, sign):
    """The paper's bias: E[L_K] falls towards the exact energy for alpha > 0 and rises for alpha < 0."""
    draws = torch.randn(64, 4000, dtype=torch.float64)
    means = torch.stack([alpha_loss(draws[:K], alpha, reduction="none").mean() for K in (1, 4, 16, 64)])
    assert (means.diff() * sign > 0.005).all()


def test_a_loss_of_infinity_in_one_pass():
    losses = torch.tensor([[math.inf, math.inf], [1.0, math.inf]])
    torch.testing.assert_close(alpha_loss(losses, 1.0, reduction="none"), torch.tensor([1 + math.log(2), math.inf]))
    assert alpha_loss(losses, -1.0, reduction="none").isposinf().all()
    assert alpha_loss(losses, 0.0, reduction="none").isposinf().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_reduced_in_float32(dtype):
    losses = torch.rand(100, 3, dtype=dtype)
    value = alpha_loss(losses, 1e-4, reduction="none")
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, alpha_loss(losses.float(), 1e-4, reduction="none"), rtol=0, atol=0)


def test_reductions_and_weights():
    losses = torch.randn(4, 3, dtype=torch.float64)
    weight = torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64)
    each = alpha_loss(losses, 0.5, reduction="none")
    torch.testing.assert_close(alpha_loss(losses, 0.5), each.mean())
    torch.testing.assert_close(alpha_loss(losses, 0.5, reduction="sum"), each.sum())
    repeated = torch.cat([losses[:, 1:2], losses[:, 1:2], losses[:, 2:]], 1)  # a weight of 2 is the row twice
    torch.testing.assert_close(alpha_loss(losses, 0.5, sample_weight=weight), alpha_loss(repeated, 0.5))
    torch.testing.assert_close(
        alpha_loss(losses, 0.5, sample_weight=weight, reduction="sum"), alpha_loss(repeated, 0.5, reduction="sum")
    )
    torch.testing.assert_close(alpha_loss(losses, 0.5, sample_weight=weight, reduction="none"), each * weight)


# ------------------------------------------------------------------------------ classification


@pytest.mark.parametrize("alpha", [-1.0, 1e-3, 0.5, 1.0, 2.0])
def test_equals_the_papers_power_loss_for_index_and_one_hot_targets(alpha):
    logits = torch.randn(6, 5, 4, dtype=torch.float64) * 3
    target = torch.tensor([0, 3, 1, 1, 2])
    expected = reference.power_loss(logits, target, alpha)
    torch.testing.assert_close(cross_entropy(logits, target, alpha), expected)
    for one_hot in (F.one_hot(target, 4), F.one_hot(target, 4).double(), F.one_hot(target, 4).bool()):
        torch.testing.assert_close(cross_entropy(logits, one_hot, alpha), expected)


def test_alpha_zero_is_torchs_cross_entropy():
    logits, target = torch.randn(6, 5, 4), torch.tensor([0, 3, 1, 1, 2])
    torch.testing.assert_close(
        cross_entropy(logits, target, 0), F.cross_entropy(logits.flatten(0, 1), target.repeat(6))
    )


def test_soft_targets_put_the_expected_loss_inside_the_log():
    logits, soft = torch.randn(6, 5, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64).softmax(1)
    inner = -(soft * logits.log_softmax(2)).sum(2)
    torch.testing.assert_close(cross_entropy(logits, soft, 0.7), alpha_loss(inner, 0.7))


def test_pixels_and_tokens():
    pixels, labels = torch.randn(3, 2, 4, 5, 6), torch.randint(4, (2, 5, 6))
    each = cross_entropy(pixels, labels, reduction="none")
    assert each.shape == (2, 5, 6)
    torch.testing.assert_close(each[1, 2, 3], cross_entropy(pixels[:, 1:2, :, 2, 3], labels[1:2, 2, 3]))
    tokens = pixels.movedim(2, -1)
    torch.testing.assert_close(cross_entropy(tokens, labels, class_axis=-1, reduction="none"), each)
    soft = F.one_hot(labels, 4).float()
    torch.testing.assert_close(cross_entropy(tokens, soft, class_axis=-1), each.mean())
    torch.testing.assert_close(cross_entropy(pixels, soft.movedim(-1, 1)), each.mean())
    torch.testing.assert_close(CrossEntropy()({"logits": pixels, "hidden": None}, labels), each.mean())
    joint = cross_entropy(pixels, labels, positions="joint", reduction="none")
    summed = F.cross_entropy(pixels.flatten(0, 1), labels.repeat(3, 1, 1), reduction="none").view(3, 2, -1).sum(2)
    torch.testing.assert_close(joint, alpha_loss(summed, 0.5, reduction="none"))


@pytest.mark.parametrize(("A", "B"), [(4, 6), (6, 4), (5, 5)])
def test_the_class_axis_is_never_guessed(A, B):
    """(K, N, A, B) is (N, C, L) or (N, T, C): the target tells, or the caller."""
    outputs = torch.randn(3, 2, A, B)
    by_axis = {2: torch.randint(A, (2, B)), -1: torch.randint(B, (2, A))}
    for axis, labels in by_axis.items():
        given = cross_entropy(outputs, labels, class_axis=axis)
        each = F.cross_entropy(outputs.movedim(axis, 2).flatten(0, 1), labels.repeat(3, 1), reduction="none")
        torch.testing.assert_close(given, alpha_loss(each.view(3, -1), 0.5))
        if axis == 2 and A != B:
            assert torch.equal(cross_entropy(outputs, labels), given)
            continue
        with pytest.raises(ValueError, match=r"`class_axis` must be given .* class_axis=-1 .* class_axis=2"):
            cross_entropy(outputs, labels)
    with pytest.raises(ValueError, match="`class_axis` must be given"):
        CrossEntropy()(outputs, outputs[0].softmax(-1))
    pixels = outputs.unsqueeze(-1)
    torch.testing.assert_close(
        cross_entropy(pixels, by_axis[2].unsqueeze(-1)), cross_entropy(outputs, by_axis[2], class_axis=2)
    )
    if A != B:
        with pytest.raises(ValueError, match="on the last axis"):
            cross_entropy(pixels.movedim(2, -1), by_axis[2].unsqueeze(-1))


@pytest.mark.parametrize("positions", ["independent", "joint"])
def test_ignored_positions_do_not_count(positions):
    logits, labels = torch.randn(3, 2, 5, 4, requires_grad=True), torch.randint(4, (2, 5))
    labels[0, 1] = labels[1, 4] = -100
    loss = cross_entropy(logits, labels, class_axis=-1, positions=positions)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient[:, 0, 1].eq(0).all()
    assert gradient[:, 0, 0].ne(0).any()
    changed = logits.detach().clone()
    changed[:, 0, 1] += 100
    torch.testing.assert_close(cross_entropy(changed, labels, class_axis=-1, positions=positions), loss.detach())
    if positions == "independent":
        counts = labels != -100
        each = cross_entropy(logits, labels, class_axis=-1, reduction="none")
        torch.testing.assert_close(loss, each[counts].mean())


def test_binary():
    logits, target = torch.randn(4, 3, 2), torch.tensor([[0, 1], [1, 1], [0, 0]])
    each = F.binary_cross_entropy_with_logits(logits, target.float().expand(4, 3, 2), reduction="none")
    torch.testing.assert_close(binary_cross_entropy(logits, target), alpha_loss(each.flatten(1), 0.5))
    torch.testing.assert_close(binary_cross_entropy(logits, target, positions="joint"), alpha_loss(each.sum(2), 0.5))
    two = torch.stack([torch.zeros_like(logits[..., :1]), logits[..., :1]], 2).squeeze(
        -1
    )  # (K, N, 2): class 1 by logit
    torch.testing.assert_close(binary_cross_entropy(logits[..., 0], target[:, 0]), cross_entropy(two, target[:, 0]))


# ------------------------------------------------------------------------------ regression


def test_gaussian_density():
    outputs, target = torch.randn(3, 2, 2, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    expected = torch.stack(
        [
            torch.stack(
                [
                    -sum(reference.gaussian_log_density(target[n, d], outputs[k, n, d], 2.5) for d in range(2))
                    for n in range(2)
                ]
            )
            for k in range(3)
        ]
    )
    torch.testing.assert_close(gaussian_nll(outputs, target, 0.3, precision=2.5), alpha_loss(expected, 0.3))
    as_tensor = torch.full((3, 2, 2), 2.5, dtype=torch.float64)
    torch.testing.assert_close(
        gaussian_nll(outputs, target, 0.3, precision=as_tensor), gaussian_nll(outputs, target, 0.3, precision=2.5)
    )
    torch.testing.assert_close(
        gaussian_nll(outputs[..., 0], target[..., 0], precision=1.0),
        gaussian_nll(outputs[..., :1], target[..., :1], precision=1),
    )


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_learned_precision_finds_the_noise(alpha):
    """With the paper's printed sign (+ log tau) the precision would run to 0 instead."""
    target = 0.2 * torch.randn(4000, 1)
    objective = GaussianNLL(alpha)
    optimizer = torch.optim.Adam(objective.parameters(), lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        objective(torch.zeros(1, 4000, 1), target).backward()
        optimizer.step()
    assert objective.precision.item() ** -0.5 == pytest.approx(0.2, rel=0.03)


def test_modules_are_the_functions():
    outputs, target = torch.randn(4, 3, 2), torch.randn(3, 2)
    torch.testing.assert_close(
        GaussianNLL(0.3, 2.0)(outputs, target), gaussian_nll(outputs, target, 0.3, precision=2.0)
    )
    assert not list(GaussianNLL(0.3, 2.0).parameters())
    log_precision = torch.randn(4, 3, 2)
    torch.testing.assert_close(
        GaussianNLL(0.3, "predicted")((outputs, log_precision), target),
        gaussian_nll(outputs, target, 0.3, precision=log_precision.exp()),
    )
    named = {"loc": outputs, "scale": (-0.5 * log_precision).exp()}
    torch.testing.assert_close(
        GaussianNLL(0.3, "predicted")(named, target), GaussianNLL(0.3, "predicted")((outputs, log_precision), target)
    )
    labels = torch.tensor([0, 1, 1])
    torch.testing.assert_close(CrossEntropy(0.3)(outputs, labels), cross_entropy(outputs, labels, 0.3))
    torch.testing.assert_close(
        AlphaLoss(nn.CrossEntropyLoss(reduction="none"), 0.3)(outputs, labels), cross_entropy(outputs, labels, 0.3)
    )
    constant = math.log(2 * math.pi) - math.log(2.0)  # nn.MSELoss stands for a precision of 2, without its constants
    torch.testing.assert_close(
        AlphaLoss(nn.MSELoss(reduction="none"), 0.3)(outputs, target) + constant,
        gaussian_nll(outputs, target, 0.3, precision=2.0),
    )
    weight = torch.tensor([1.0, 0.0, 3.0])
    torch.testing.assert_close(
        CrossEntropy()(outputs, labels, weight), cross_entropy(outputs, labels, sample_weight=weight)
    )


OWN = {  # (loss, shape of a row of outputs, shape of a row of the target, classes or None)
    "cross entropy": (nn.CrossEntropyLoss(reduction="none"), (4,), (), 4),
    "pixels": (nn.CrossEntropyLoss(reduction="none"), (4, 3, 2), (3, 2), 4),
    "soft": (nn.CrossEntropyLoss(reduction="none"), (4,), (4,), None),
    "squared": (nn.MSELoss(reduction="none"), (2,), (2,), None),
    "one number": (nn.MSELoss(reduction="none"), (), (), None),
    "squeezed": (lambda o, t: F.mse_loss(o.squeeze(), t, reduction="none"), (1,), (), None),
    "mean and log": (lambda o, t: 0.5 * (o[:, 1].exp() * (t - o[:, 0]) ** 2 - o[:, 1]), (2,), (), None),
    "quantiles": (lambda o, t: torch.maximum(0.1 * (t - o), 0.9 * (o - t)), (3,), (1,), None),
    "tokens": (lambda o, t: F.cross_entropy(o.mT, t, reduction="none"), (5, 4), (5,), 4),
    "count": (nn.PoissonNLLLoss(reduction="none"), (), (), 4),
}
MIXED = {
    "elementwise": (lambda o, t: (o - t) ** 2, (1,), (), None),
    "summed": (lambda o, t: (o - t).square().sum(-1), (1,), (), None),
    "averaged": (lambda o, t: (o - t).square().mean(-1), (1,), (), None),
    "counts": (lambda o, t: (o.exp() - t * o).mean(1), (1,), (), 4),
    "yes or no": (lambda o, t: (F.softplus(o) - t * o).mean(1), (1,), (), 2),
    "target wider": (lambda o, t: (o - t).square().mean(1), (), (1,), None),
    "centred": (lambda o, t: (o - o.mean(0) - t).square(), (2,), (2,), None),
}


def rows_of(K, N, row, target_row, classes):
    target = torch.randn(N, *target_row) if classes is None else torch.arange(N * math.prod(target_row)) % classes
    return torch.randn(K, N, *row), target.reshape(N, *target_row)


@pytest.mark.parametrize("case", OWN)
def test_a_loss_of_ones_own_is_summed_over_each_row(case):
    loss, *shapes = OWN[case]
    objective = AlphaLoss(loss, 0.3)
    for K, N in ((1, 2), (2, 1), (5, 8), (5, 1)):
        outputs, target = rows_of(K, N, *shapes)
        each = torch.stack([torch.stack([loss(o[[n, n]], target[[n, n]])[0].sum() for n in range(N)]) for o in outputs])
        torch.testing.assert_close(objective(outputs, target), alpha_loss(each, 0.3))


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("alike_first", [False, True])
def test_a_loss_that_mixes_rows_is_refused(case, alike_first):
    """Broadcasting above all: (R, 1) against (R,) is (R, R). Also after rows that were all alike."""
    loss, *shapes = MIXED[case]
    objective = AlphaLoss(loss)
    outputs, target = rows_of(5, 64, *shapes)
    if alike_first and case in ("averaged", "counts", "yes or no", "target wider"):
        objective(torch.zeros_like(outputs), torch.ones_like(target))  # no harm done yet, and none to be seen
    with pytest.raises(ValueError, match=r"`loss` must give each row a value of its own; .*broadcasting"):
        objective(outputs, target)


def test_rows_are_looked_at_once_for_each_shape():
    calls = []
    objective = AlphaLoss(lambda o, t: calls.append(len(o)) or (o - t).square())
    for _ in range(3):
        objective(*rows_of(5, 8, (2,), (2,), None))
    assert calls[0] == 40
    assert calls[-2:] == [40, 40]


# ------------------------------------------------------------------------------ bad input

K, N, C = 4, 3, 2
LOGITS, LABELS, MEANS, TARGET = (
    torch.zeros(K, N, C),
    torch.zeros(N, dtype=torch.long),
    torch.zeros(K, N, 1),
    torch.zeros(N, 1),
)
BAD = {
    "alpha nan": (lambda: alpha_loss(torch.zeros(K, N), math.nan), "`alpha` must be a finite number; got nan"),
    "alpha inf": (lambda: cross_entropy(LOGITS, LABELS, math.inf), "`alpha` must be a finite number; got inf"),
    "alpha text": (lambda: cross_entropy(LOGITS, LABELS, "half"), "`alpha` must be a finite number; got str"),
    "module alpha": (lambda: CrossEntropy(math.nan), "`alpha`"),
    "no K axis, losses": (lambda: alpha_loss(torch.zeros(N), 0.5), r"`losses` must have shape \(K, N\)"),
    "no K axis, logits": (lambda: cross_entropy(LOGITS[0], LABELS), "K passes first"),
    "no passes": (lambda: alpha_loss(torch.zeros(0, N), 0.5), "at least one pass"),
    "would broadcast": (lambda: gaussian_nll(MEANS, TARGET[:, 0], precision=1.0), "never broadcast"),
    "would broadcast binary": (lambda: binary_cross_entropy(MEANS, TARGET[:, 0]), "never broadcast"),
    "wrong rows": (lambda: cross_entropy(LOGITS, LABELS[:2]), "`target` must hold class indices"),
    "integer outputs": (lambda: cross_entropy(LOGITS.long(), LABELS), "floating-point"),
    "complex outputs": (lambda: gaussian_nll(MEANS.cfloat(), TARGET, precision=1.0), "floating-point"),
    "complex target": (lambda: gaussian_nll(MEANS, TARGET.cfloat(), precision=1.0), "`target` must be .* real"),
    "float labels": (lambda: cross_entropy(LOGITS, LABELS.float()), "integer class indices"),
    "class too large": (lambda: cross_entropy(LOGITS, LABELS + C), "class indices from 0 to 1; got 2"),
    "class negative": (lambda: cross_entropy(LOGITS, LABELS - 1), "got -1"),
    "zero precision": (
        lambda: gaussian_nll(MEANS, TARGET, precision=0.0),
        "`precision` must be a finite number above 0; got 0.0",
    ),
    "negative precision": (lambda: gaussian_nll(MEANS, TARGET, precision=-torch.ones(())), "got -1.0"),
    "precision shape": (lambda: gaussian_nll(MEANS, TARGET, precision=torch.ones(7)), "`precision` must broadcast"),
    "precision widens": (lambda: gaussian_nll(MEANS, TARGET, precision=torch.ones(N, N)), "`precision` must broadcast"),
    "precision word": (lambda: GaussianNLL(0.5, "known"), '"learned", "predicted" or a positive number'),
    "precision sign": (lambda: GaussianNLL(0.5, -1.0), "`precision` must be a finite number above 0; got -1.0"),
    "scale sign": (
        lambda: GaussianNLL(0.5, "predicted")({"loc": MEANS, "scale": MEANS - 1}, TARGET),
        "`scale` must be positive and finite; got -1.0",
    ),
    "no scale": (lambda: GaussianNLL(0.5, "predicted")({"loc": MEANS}, TARGET), '"loc" and "scale"'),
    "class axis word": (lambda: cross_entropy(LOGITS, LABELS, class_axis="last"), "`class_axis` must be a whole"),
    "mapping": (lambda: CrossEntropy()({"hidden": LOGITS}, LABELS), "`outputs` must be a torch tensor; got dict"),
    "empty batch": (lambda: cross_entropy(LOGITS[:, :0], LABELS[:0]), "at least one data point"),
    "all ignored": (lambda: cross_entropy(LOGITS, LABELS - 100), "at least one data point"),
    "reduction": (lambda: alpha_loss(torch.zeros(K, N), 0.5, reduction="avg"), '`reduction` must be "mean"'),
    "positions": (lambda: cross_entropy(LOGITS, LABELS, positions="all"), "`positions` must be"),
    "class axis": (lambda: cross_entropy(LOGITS, LABELS, class_axis=1), "`class_axis` must name"),
    "weights": (lambda: alpha_loss(torch.zeros(K, N), 0.5, sample_weight=torch.ones(K)), "one weight per data point"),
    "weight sign": (lambda: alpha_loss(torch.zeros(K, N), 0.5, sample_weight=-torch.ones(N)), "not negative"),
    "weight sum": (lambda: alpha_loss(torch.zeros(K, N), 0.5, sample_weight=torch.zeros(N)), "a positive weight"),
    "reduced loss": (lambda: AlphaLoss(nn.MSELoss()), 'reduction="none"'),
    "binary range": (lambda: binary_cross_entropy(MEANS, TARGET + 2), r"\[0, 1\]"),
    "not a tensor": (lambda: alpha_loss([[1.0]], 0.5), "torch tensor; got list"),
    "predicted": (lambda: GaussianNLL(0.5, "predicted")(MEANS, TARGET), r"\(mean, log_precision\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_sentence(case):
    call, message = BAD[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_an_empty_batch_sums_to_nothing():
    assert cross_entropy(LOGITS[:, :0], LABELS[:0], reduction="sum") == 0
    assert cross_entropy(LOGITS[:, :0], LABELS[:0], reduction="none").shape == (0,)


# ------------------------------------------------------------------------------ the package


def test_names_for_type_checkers_are_the_names_resolved_lazily():
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(bbalpha))
    block = next(n for n in tree.body if isinstance(n, ast.If))
    shown = {a.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert shown == {name: f"bbalpha.{home}" for name, home in bbalpha._HOME.items()}
    for name in bbalpha.__all__:
        assert getattr(bbalpha, name).__name__ == name
    assert bbalpha.__version__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = bbalpha.nonsense


# ------------------------------------------------------------------------------ rows together


def groups_of(sizes):
    return torch.cat([torch.full((n,), g) for g, n in enumerate(sizes)])


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 1e-6, 0.5, 1.0, 3.0])
def test_losses_of_a_group_are_summed_inside_the_log(alpha):
    losses, groups = torch.randn(6, 7, dtype=torch.float64), groups_of((3, 1, 3))
    order = torch.randperm(7)
    found = alpha_loss(losses[:, order], alpha, groups=groups[order], reduction="none")
    sums = [losses[:, :3].sum(1), losses[:, 3], losses[:, 4:].sum(1)]
    expected = torch.tensor([reference.alpha_loss(s, alpha) for s in sums], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    mean = alpha_loss(losses, alpha, groups=groups)
    torch.testing.assert_close(mean, expected.sum() / 7)  # by data points, not by groups


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_groups_of_one_row_are_the_paper(alpha):
    losses = torch.randn(5, 6)
    weight = torch.rand(6)
    for reduction in ("mean", "sum", "none"):
        options = {"sample_weight": weight, "reduction": reduction}
        alone = alpha_loss(losses, alpha, groups=torch.arange(6), **options)
        assert torch.equal(alone, alpha_loss(losses, alpha, **options))


def test_without_alpha_or_with_one_pass_the_grouping_does_not_matter():
    losses, groups = torch.randn(5, 8, dtype=torch.float64), groups_of((3, 5))
    torch.testing.assert_close(alpha_loss(losses, 0.0, groups=groups), losses.mean())
    torch.testing.assert_close(alpha_loss(losses[:1], 0.7, groups=groups), losses[0].mean())
    # together the passes are told apart more sharply: the loss is below that of single rows for alpha > 0 on average
    whole = alpha_loss(losses, 1.0, groups=groups_of((8,)))
    assert whole <= alpha_loss(losses, 0.0) + 1e-12


def test_the_gradient_of_a_group_is_its_softmax():
    losses = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    groups = groups_of((2, 3))
    assert torch.autograd.gradcheck(lambda t: alpha_loss(t, 0.5, groups=groups), losses)
    alpha_loss(losses, 0.5, groups=groups, reduction="sum").backward()
    weights = torch.softmax(-0.5 * torch.stack((losses[:, :2].sum(1), losses[:, 2:].sum(1)), 1), 0)
    torch.testing.assert_close(losses.grad, weights[:, groups].detach())


def test_likelihoods_take_groups():
    logits, y, groups = torch.randn(4, 6, 3), torch.randint(3, (6,)), groups_of((2, 4))
    losses = F.cross_entropy(logits.flatten(0, 1), y.repeat(4), reduction="none").view(4, 6)
    torch.testing.assert_close(cross_entropy(logits, y, 0.5, groups=groups), alpha_loss(losses, 0.5, groups=groups))
    yes = torch.randint(2, (6,)).float()
    losses = F.binary_cross_entropy_with_logits(logits[..., 0], yes.expand(4, -1), reduction="none")
    torch.testing.assert_close(
        binary_cross_entropy(logits[..., 0], yes, groups=groups), alpha_loss(losses, 0.5, groups=groups)
    )
    target = torch.randn(6, 3)
    losses = -torch.distributions.Normal(logits, 0.5).log_prob(target).sum(2)
    found = gaussian_nll(logits, target, precision=4.0, groups=groups)
    torch.testing.assert_close(found, alpha_loss(losses, 0.5, groups=groups))


def test_rows_that_do_not_count_do_not_in_groups_either():
    logits, y, groups = torch.randn(4, 6, 3), torch.randint(3, (6,)), groups_of((2, 4))
    y[[0, 1, 5]] = -100
    kept = y != -100
    found = cross_entropy(logits, y, groups=groups)
    torch.testing.assert_close(found, cross_entropy(logits[:, kept], y[kept], groups=groups[kept]))
    tokens = torch.randn(4, 6, 2, 3)
    labels = torch.randint(3, (6, 2))
    with pytest.raises(ValueError, match=r"one likelihood a data point; got \(2,\) positions of each\. Use positions"):
        cross_entropy(tokens, labels, class_axis=-1, groups=groups)
    joint = cross_entropy(tokens, labels, class_axis=-1, positions="joint", groups=groups)
    losses = cross_entropy(tokens.flatten(1, 2), labels.flatten(), groups=groups.repeat_interleave(2))
    torch.testing.assert_close(joint, 2 * losses)


def test_modules_group_the_rows_of_a_batch_as_they_come():
    logits, y = torch.randn(4, 7, 3), torch.randint(3, (7,))
    groups = torch.arange(7) // 3
    torch.testing.assert_close(CrossEntropy(0.5, group_size=3)(logits, y), cross_entropy(logits, y, groups=groups))
    target = torch.randn(7, 3)
    found = GaussianNLL(0.5, precision=2.0, group_size=3)(logits, target)
    torch.testing.assert_close(found, gaussian_nll(logits, target, precision=2.0, groups=groups))
    own = AlphaLoss(torch.nn.MSELoss(reduction="none"), group_size=3)(logits, target)
    losses = (logits - target).square().sum(2)
    torch.testing.assert_close(own, alpha_loss(losses, 0.5, groups=groups))
    assert "group_size=3" in repr(CrossEntropy(group_size=3))
    assert "group_size" not in repr(CrossEntropy())
    assert "group_size" not in vars(CrossEntropy())  # a run of before goes on: it is told by what it has


def test_weights_within_a_group_must_agree():
    losses, groups = torch.randn(4, 5), groups_of((2, 3))
    weight = torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0])
    found = alpha_loss(losses, 0.5, groups=groups, sample_weight=weight)
    each = alpha_loss(losses, 0.5, groups=groups, reduction="none")
    torch.testing.assert_close(found, (2 * each[0] + each[1]) / 7)
    with pytest.raises(ValueError, match="`sample_weight` must be the same for all data points of a group"):
        alpha_loss(losses, 0.5, groups=groups, sample_weight=torch.arange(5.0))


def test_groups_in_half_precision_are_summed_in_single():
    losses = torch.full((2, 3000), 100.0, dtype=torch.float16)
    found = alpha_loss(losses, 0.5, groups=torch.zeros(3000, dtype=torch.long), reduction="none")
    assert found.item() == 300_000
