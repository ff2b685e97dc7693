"""Attacks: the paper's steps exactly, through the mean over passes; foolbox agrees and runs on our predictive."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import bbalpha
from bbalpha.attacks import Predictive, fgsm, iterative_fgsm
from bbalpha.networks import mlp

with warnings.catch_warnings():  # foolbox imports names that scipy has moved
    warnings.simplefilter("ignore")
    import foolbox


@pytest.fixture(scope="module")
def digits():
    """Test images in [0, 1] with their labels, and a dropout net and a plain net trained on the others."""
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    nets = []
    for rate in (0.3, 0.0):
        torch.manual_seed(0)
        net = mlp([64, 100, 10], dropout=rate, input_dropout=0.0)
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        for i in range(250):
            rows = torch.arange(128) + 128 * i
            rows = rows % 1400
            outputs = bbalpha.sample(net, x[rows], 5) if rate else net(x[rows])[None]
            loss = bbalpha.cross_entropy(outputs, y[rows], alpha=0.5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        nets.append(net)
    return x[1400:], y[1400:], *nets


def small(rate=0.5, classes=4):
    return mlp([6, 16, classes], dropout=rate, input_dropout=0.0)


def by_hand(net, x, seed, masks="per_example", n_passes=10):
    """Log of the mean probability, from separate passes (N, C)."""
    outputs = bbalpha.sample(net, x, n_passes, seed=seed, masks=masks, strategy="loop")
    return outputs.softmax(-1).mean(0).log()


# ------------------------------------------------------------------------------ the steps themselves


@pytest.mark.parametrize("label", [None, 2])
def test_fgsm_is_one_signed_step_down_the_log_of_the_mean_probability(label):
    net, x = small().double(), torch.rand(7, 6, dtype=torch.float64)
    value = by_hand(net, x, seed=3)
    y = value.argmax(1) if label is None else torch.full((7,), label)
    slope = torch.empty_like(x)  # by finite differences
    for i in range(6):
        h = torch.zeros_like(x)
        h[:, i] = 1e-6
        up, down = (by_hand(net, x + s * h, seed=3).gather(1, y[:, None]).squeeze(1) for s in (1, -1))
        slope[:, i] = up - down
    expected = (x - 0.2 * slope.sign()).clamp(0, 1)
    torch.testing.assert_close(fgsm(net, x, step=0.2, label=label, seed=3), expected)


def test_fgsm_can_descend_the_entropy_too():
    net, x = small().double(), torch.rand(7, 6, dtype=torch.float64, requires_grad=True)
    log_p = by_hand(net, x, seed=3)
    entropy = torch.distributions.Categorical(logits=log_p).entropy()
    (grad,) = torch.autograd.grad((-log_p[:, 2] - 50 * entropy).sum(), x)
    found = fgsm(net, x.detach(), step=0.2, label=2, evade=50.0, seed=3)
    torch.testing.assert_close(found, (x.detach() + 0.2 * grad.sign()).clamp(0, 1))
    assert not torch.equal(found, fgsm(net, x.detach(), step=0.2, label=2, seed=3))


@pytest.mark.parametrize("evade", [0.0, 2.0])
def test_the_iterative_attack_climbs_the_target_and_descends_the_entropy(evade):
    net, x, target = small().double(), torch.rand(7, 6, dtype=torch.float64), torch.arange(7) % 4
    expected = x.clone()
    for _ in range(3):
        here = expected.clone().requires_grad_()
        log_p = by_hand(net, here, seed=3)
        entropy = torch.distributions.Categorical(logits=log_p).entropy()
        value = log_p[torch.arange(7), target] - evade * entropy
        (grad,) = torch.autograd.grad(value.sum(), here)
        expected = (expected + 0.1 * grad.sign()).clamp(0, 1)
    found = iterative_fgsm(net, x, target=target, step=0.1, n_steps=3, evade=evade, seed=3)
    torch.testing.assert_close(found, expected)


def test_steps_can_be_walked_one_by_one():
    net, x = small(), torch.rand(7, 6)
    for seed in (None, 5):
        torch.manual_seed(1)
        together = iterative_fgsm(net, x, target=1, step=0.05, n_steps=4, seed=seed)
        torch.manual_seed(1)
        walked = x
        for _ in range(4):
            walked = iterative_fgsm(net, walked, target=1, step=0.05, n_steps=1, seed=seed)
        assert torch.equal(together, walked)
        assert not torch.equal(walked, x)


def test_no_step_changes_nothing_and_every_step_stays_within_clip():
    net, x = small(), torch.rand(50, 6)
    assert torch.equal(fgsm(net, x, step=0), x)
    assert torch.equal(iterative_fgsm(net, x, target=0, n_steps=0), x)
    moved = fgsm(net, x, step=0.3, clip=(-0.1, 1.1))
    assert moved.min() >= -0.1
    assert moved.max() <= 1.1
    assert moved.min() < 0
    assert (fgsm(net, x - 5, step=0.3, clip=None) - (x - 5)).abs().max() == pytest.approx(0.3, abs=1e-5)


# ------------------------------------------------------------------------------ the predictive


@pytest.mark.parametrize("masks", ["per_example", "shared"])
def test_the_predictive_is_what_is_predicted_with(masks):
    net, x = small(), torch.randn(9, 6)
    prediction = bbalpha.predict_classification(net, x, n_passes=20, masks=masks, seed=4)
    torch.testing.assert_close(Predictive(net, n_passes=20, masks=masks, seed=4)(x), prediction.log_probs)


def test_masks_are_fresh_or_fixed_by_a_seed():
    net, x = small(), torch.randn(9, 6)
    fresh, fixed = Predictive(net), Predictive(net, seed=1)
    assert not torch.equal(fresh(x), fresh(x))
    before = torch.get_rng_state()
    assert torch.equal(fixed(x), fixed(x))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(fixed(x), Predictive(net, seed=2)(x))


def test_the_gradient_of_the_predictive_is_right():
    predictive = Predictive(small().double(), n_passes=4, seed=0)
    x = torch.rand(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(predictive, x)


def test_far_from_the_boundary_the_predictive_keeps_its_digits():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[500.0, 500.0], [-500.0, -500.0]]))
    x = torch.ones(1, 2, requires_grad=True)
    log_p = Predictive(net, n_passes=3, seed=0)(x)
    assert log_p.isfinite().all()
    assert torch.autograd.grad(log_p[0, 1], x)[0].isfinite().all()


def test_a_net_without_randomness_is_its_one_pass():
    net, x = small(rate=0.0), torch.randn(9, 6)
    torch.testing.assert_close(Predictive(net, n_passes=7)(x), F.log_softmax(net(x), 1))


def test_without_passes_the_network_as_it_is_is_attacked():
    net, x = small(), torch.rand(9, 6)
    torch.testing.assert_close(Predictive(net, n_passes=None)(x), F.log_softmax(net.eval()(x), 1))
    bare = nn.Sequential(*(layer for layer in net if not isinstance(layer, nn.Dropout)))
    assert torch.equal(fgsm(net.train(), x, step=0.1, n_passes=None), fgsm(bare, x, step=0.1))


class Wordy(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return {"logits": self.net(x), "hidden": x}


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_mappings_single_logits_and_images_are_taken(rate):
    x = torch.rand(5, 6)
    net = small(rate)
    torch.testing.assert_close(fgsm(Wordy(net), x, step=0.1, seed=0), fgsm(net, x, step=0.1, seed=0))
    assert Predictive(small(rate, classes=1))(x).exp().sum(1).allclose(torch.ones(5))
    image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Dropout2d(rate), nn.Flatten(), nn.Linear(8, 3))
    assert fgsm(image, torch.rand(5, 1, 4, 4), step=0.1).shape == (5, 1, 4, 4)


# ------------------------------------------------------------------------------ what is left behind


def test_the_model_and_the_inputs_are_as_they_were():
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)).train()
    net[2].eval()
    net[0].bias.requires_grad_(False)
    x = torch.rand(9, 6)
    held, state = x.clone(), {k: v.clone() for k, v in net.state_dict().items()}
    flags = [m.training for m in net.modules()], [p.requires_grad for p in net.parameters()]
    iterative_fgsm(net, x, target=1, n_steps=2)
    with pytest.raises(ValueError, match="`target` must hold classes from 0 to 3; got 7"):
        iterative_fgsm(net, x, target=7)
    assert flags == ([m.training for m in net.modules()], [p.requires_grad for p in net.parameters()])
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert torch.equal(x, held)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_batch_norm_is_in_evaluation_mode_whatever_the_caller_left(rate):
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(rate), nn.Linear(8, 4))
    net[1].running_mean.normal_()
    x = torch.rand(9, 6)
    asleep = fgsm(net.eval(), x, step=0.1, seed=0)
    assert torch.equal(fgsm(net.train(), x, step=0.1, seed=0), asleep)


class Watching(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.seen = []

    def forward(self, x):
        if x.requires_grad:
            self.seen.append(self.weight.requires_grad)
        return F.linear(F.dropout(x, 0.5), self.weight)


def test_no_time_is_spent_on_gradients_of_the_weights():
    net = Watching()
    fgsm(net, torch.rand(9, 6), step=0.1)
    assert net.seen
    assert not any(net.seen)


def test_layers_that_work_in_place_spare_the_inputs():
    net, x = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 4)), torch.rand(9, 6) - 0.5
    plain = nn.Sequential(nn.ReLU(), net[1])
    assert torch.equal(fgsm(net, x, step=0.1, clip=None), fgsm(plain, x, step=0.1, clip=None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_of_the_inputs_is_kept(dtype):
    moved = fgsm(small().to(dtype), torch.full((9, 6), 0.5, dtype=dtype), step=0.25)
    assert moved.dtype == dtype
    assert ((moved - 0.5).abs() == 0.25).double().mean() > 0.9


def test_callers_without_gradients_can_attack():
    net, x = small(), torch.rand(9, 6)
    expected = fgsm(net, x, step=0.1, seed=0)
    assert not expected.requires_grad
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(fgsm(net, x.clone(), step=0.1, seed=0), expected)


def test_rows_do_not_depend_on_the_batches():
    x = torch.rand(23, 6)
    for net, options in ((small(0.0), {}), (small(0.5), {"masks": "shared", "seed": 3})):
        whole = iterative_fgsm(net, x, target=1, n_steps=3, batch_size=23, **options)
        torch.testing.assert_close(iterative_fgsm(net, x, target=1, n_steps=3, batch_size=5, **options), whole)
    assert fgsm(small(), torch.rand(0, 6), step=0.1).shape == (0, 6)


def test_batches_of_one_seed_draw_their_own_masks():
    net, x = small(), torch.full((8, 6), 0.5)
    moved = fgsm(net, x, step=0.1, n_passes=1, seed=3, batch_size=4)
    assert not torch.equal(moved[:4], moved[4:])
    assert torch.equal(moved, fgsm(net, x, step=0.1, n_passes=1, seed=3, batch_size=4))


# ------------------------------------------------------------------------------ on trained nets


def accuracy(net, x, y):
    with torch.no_grad():
        return (Predictive(net, n_passes=20, seed=9)(x).argmax(1) == y).double().mean().item()


def test_a_step_costs_more_accuracy_than_noise_of_its_size(digits):
    x, y, *nets = digits
    for net in nets:
        noise = (x + 0.15 * torch.randn_like(x).sign()).clamp(0, 1)
        assert accuracy(net, x, y) > 0.85
        assert accuracy(net, fgsm(net, x, step=0.15), y) < accuracy(net, noise, y) - 0.3


def test_targeted_steps_arrive(digits):
    x, y, *nets = digits
    for net in nets:
        moved = iterative_fgsm(net, x[y != 0][:100], target=0, step=0.02, n_steps=30)
        assert (Predictive(net)(moved).argmax(1) == 0).double().mean() > 0.95


def test_fixed_masks_are_the_stronger_attack_on_who_predicts_with_them(digits):
    x, y, net, _ = digits
    x = x[y != 0][:200]
    options = {"target": 0, "step": 0.02, "n_steps": 8, "n_passes": 3, "masks": "shared"}
    victim = Predictive(net, n_passes=3, masks="shared", seed=11)
    with torch.no_grad():
        fixed, fresh = (victim(iterative_fgsm(net, x, seed=s, **options))[:, 0] for s in (11, None))
    gain = fixed - fresh
    assert gain.mean() > 4 * gain.std() / math.sqrt(len(gain))


def test_an_attacker_who_knows_of_the_detector_is_less_unsure_on_the_way(digits):
    x, y, net, _ = digits
    x = x[y != 0][:200]
    entropies = []
    for evade in (0.0, 2.0):
        moved = iterative_fgsm(net, x, target=0, step=0.02, n_steps=8, evade=evade, seed=1)
        entropies.append(bbalpha.predict_classification(net, moved, seed=2).entropy)
    gain = entropies[0] - entropies[1]
    assert gain.mean() > 4 * gain.std() / math.sqrt(len(gain))


# ------------------------------------------------------------------------------ foolbox


def of_foolbox(model, **options):
    return foolbox.PyTorchModel(model.eval(), bounds=(0, 1), **options)


@pytest.mark.parametrize("step", [0.02, 0.3])
def test_fgsm_equals_foolbox_on_a_plain_net(digits, step):
    x, y, _, net = digits
    _, theirs, _ = foolbox.attacks.LinfFastGradientAttack()(of_foolbox(net), x, y, epsilons=step)
    torch.testing.assert_close(fgsm(net, x, step=step, label=y), theirs)


def test_targeted_steps_equal_foolbox_on_a_plain_net(digits):
    x, _, _, net = digits
    goal = foolbox.criteria.TargetedMisclassification(torch.zeros(len(x), dtype=torch.long))
    attack = foolbox.attacks.LinfBasicIterativeAttack(abs_stepsize=0.01, steps=10, random_start=False)
    _, theirs, _ = attack(of_foolbox(net), x, goal, epsilons=1.0)
    ours = iterative_fgsm(net, x, target=0, step=0.01, n_steps=10)
    same = (ours - theirs).abs() < 1e-5  # a slope of nearly 0 may round to either sign
    assert same.double().mean() > 0.999


def test_fgsm_equals_foolbox_through_fixed_masks(digits):
    x, y, net, _ = digits
    predictive = Predictive(net, n_passes=5, masks="shared", seed=3)
    _, theirs, _ = foolbox.attacks.LinfFastGradientAttack()(of_foolbox(predictive), x, y, epsilons=0.1)
    ours = fgsm(net, x, step=0.1, label=y, n_passes=5, masks="shared", seed=3)
    assert ((ours - theirs).abs() < 1e-5).double().mean() > 0.999


def test_stronger_attacks_of_foolbox_run_on_the_stochastic_predictive(digits):
    x, y, net, _ = digits
    x, y = x[:100], y[:100]
    attack = foolbox.attacks.LinfPGD(rel_stepsize=0.25, steps=10)
    _, moved, _ = attack(of_foolbox(Predictive(net, n_passes=10)), x, y, epsilons=0.15)
    assert (moved - x).abs().max() <= 0.15 + 1e-6
    assert accuracy(net, moved, y) < accuracy(net, fgsm(net, x, step=0.15, label=y), y) + 0.05
    assert accuracy(net, moved, y) < accuracy(net, x, y) - 0.4


def test_expectation_over_transformation_of_foolbox_runs_and_agrees_with_more_passes(digits):
    x, y, net, _ = digits
    x, y = x[:100], y[:100]
    attack = foolbox.attacks.LinfPGD(rel_stepsize=0.25, steps=10)
    wrapped = foolbox.models.ExpectationOverTransformationWrapper(of_foolbox(Predictive(net, n_passes=1)), n_steps=10)
    _, moved, _ = attack(wrapped, x, y, epsilons=0.15)
    _, averaged, _ = attack(of_foolbox(Predictive(net, n_passes=10)), x, y, epsilons=0.15)
    assert accuracy(net, moved, y) < accuracy(net, x, y) - 0.4
    assert accuracy(net, moved, y) == pytest.approx(accuracy(net, averaged, y), abs=0.15)


def test_more_passes_point_closer_to_the_expectation_over_masks(digits):
    x, y, net, _ = digits
    x, y = x[:50], y[:50]

    def direction(n_passes, seed):
        here = x.clone().requires_grad_()
        log_p = Predictive(net, n_passes=n_passes, seed=seed)(here)
        return torch.autograd.grad(log_p[torch.arange(50), y].sum(), here)[0]

    truth = direction(2000, 0)
    closeness = [F.cosine_similarity(direction(k, 1), truth).mean().item() for k in (1, 10, 100)]
    assert closeness[0] + 0.02 < closeness[1] < closeness[2]
    assert closeness[2] > 0.95


# ------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": -0.1}, ValueError, "`step` must be a finite number of at least 0; got -0.1"),
        ({"step": math.nan}, ValueError, "`step` must be a finite number of at least 0; got nan"),
        ({"clip": (1, 0)}, ValueError, "`clip` must be the lowest and highest valid input, or None; got"),
        ({"clip": (0.9, 1)}, ValueError, "`x` must lie within `clip`, 0.9 to 1; got 0.5"),
        ({"label": torch.zeros(3)}, TypeError, "`label` must hold integer class indices; got torch.float32"),
        ({"label": torch.zeros(3).long()}, ValueError, r"`label` must have one class a row, \(5,\); got shape \(3,\)"),
        ({"label": -1}, ValueError, "`label` must hold classes from 0 to 3; got -1"),
        ({"evade": math.inf}, ValueError, "`evade` must be a finite weight of at least 0; got inf"),
        ({"n_passes": 0}, ValueError, "`n_passes` must be a whole number of at least 1; got 0"),
        ({"batch_size": 2.5}, ValueError, "`batch_size` must be a whole number of at least 1; got 2.5"),
    ],
)
def test_mistakes_are_named(options, error, message):
    with pytest.raises(error, match=message):
        fgsm(small(), torch.full((5, 6), 0.5), **{"step": 0.1} | options)


def test_mistakes_of_inputs_and_models_are_named():
    with pytest.raises(TypeError, match=r"`x` must be real floating-point numbers; got torch.int64"):
        fgsm(small(), torch.zeros(5, 6).long(), step=0.1)
    with pytest.raises(ValueError, match="`x` must be finite; got nan"):
        fgsm(small(), torch.full((5, 6), math.nan), step=0.1)
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module; got str"):
        fgsm("net", torch.rand(5, 6), step=0.1)
    with pytest.raises(ValueError, match="`evade` must be a finite weight of at least 0; got -1"):
        iterative_fgsm(small(), torch.rand(5, 6), target=0, evade=-1)
    with pytest.raises(ValueError, match=r"logits of one label a row, \(N, C\); got \(5, 6, 4\)"):
        fgsm(nn.Conv1d(1, 6, 3), torch.rand(5, 1, 6), step=0.1)


class Rounded(nn.Module):
    def forward(self, x):
        return F.dropout(x.detach(), 0.5)


def test_a_model_without_a_gradient_is_an_error():
    with pytest.raises(ValueError, match="`model` must be differentiable in `x`"):
        fgsm(Rounded(), torch.rand(5, 6), step=0.1)
