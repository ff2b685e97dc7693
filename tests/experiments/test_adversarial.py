"""The adversarial experiment: curves that mean what they say, resumed to the same rows, and verdicts that can be no."""

import sys
from dataclasses import asdict, replace

import pytest
import torch

from bbalpha.attacks import fgsm, iterative_fgsm
from bbalpha.experiments import adversarial, results
from bbalpha.experiments import adversarial_figures as figures
from bbalpha.experiments.adversarial_victims import QUICK, Victim, load_digits, seeded, trained
from bbalpha.experiments.mnist import Digits
from bbalpha.prediction import predict_classification

TINY = replace(
    QUICK, model="tiny", sizes=(784, 20, 10), epochs=1, n_train=300, n_held_out=100, n_test=60, n_few=40,
    steps=(0.0, 0.2, 0.5), few_steps=(0.2,), n_targeted=4, block=2, few_targeted=(2,), radii=(0.01,), batch_size=50,
)  # fmt: skip
KEYS = "model method alpha attack attacker step accuracy target_rate entropy entropy_stderr auroc_entropy auroc_mi"


@pytest.fixture(scope="module")
def digits():
    """Blobs for digits: class c is bright in the rows of pixels around 2c + 4."""
    generator = torch.Generator().manual_seed(0)

    def some(n):
        y = torch.arange(n) % 10
        x = 0.1 * torch.rand(n, 28, 28, generator=generator)
        for i, c in enumerate(y.tolist()):
            x[i, 2 * c + 4 : 2 * c + 6] += 0.7
        return x.flatten(1), y

    (x, y), (held, y_held), (test, y_test) = some(300), some(100), some(60)
    return Digits(x, y, test, y_test, x_held_out=held, y_held_out=y_held)


@pytest.fixture(scope="module")
def victims(digits, tmp_path_factory):
    """A plain and a dropout network that have learnt the blobs."""
    config = replace(TINY, epochs=15, learning_rate=1e-2)
    folder = tmp_path_factory.mktemp("victims")
    nets = {alpha: trained(config, alpha, digits, folder / adversarial.name(alpha)) for alpha in (None, 0.5)}
    return {alpha: Victim(net, config, digits, plain=alpha is None) for alpha, net in nets.items()}


# ------------------------------------------------------------------------------ the networks and what is measured


def test_both_kinds_of_network_learn(victims):
    for victim in victims.values():
        assert (victim.clean.label == victim.digits.y_test).double().mean() > 0.95


def test_training_is_taken_from_its_folder(digits, tmp_path):
    net = trained(TINY, 0.5, digits, tmp_path)
    again = trained(TINY, 0.5, digits, tmp_path)
    other = trained(replace(TINY, seed=1), 0.5, digits, tmp_path / "other")
    for a, b, c in zip(net.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_scores_are_those_of_the_prediction(victims):
    victim, rows = victims[0.5], torch.arange(3, 33)
    x = victim.digits.x_test[rows].flip(1)
    p, found = victim.predict(x, "w"), victim.scores(x, rows, "w", target=0)
    y, clean, threshold = victim.digits.y_test[rows], victim.clean.entropy[rows], victim.thresholds[False]
    wins = (p.entropy[:, None] > clean).double() + 0.5 * (p.entropy[:, None] == clean).double()
    expected = {
        "accuracy": (p.label == y).double().mean(),
        "target_rate": (p.label == 0).double().mean(),
        "entropy": p.entropy.mean(),
        "entropy_stderr": p.entropy.std() / 30**0.5,
        "auroc_entropy": wins.mean(),
        "false_alarm": (clean > threshold).double().mean(),
        "caught": (p.entropy > threshold).double().mean(),
        "unnoticed": ((p.label != y) & (p.entropy <= threshold)).double().mean(),
        "change": (x - victim.digits.x_test[rows]).abs().mean(),
    }
    for key, value in expected.items():
        assert found[key] == pytest.approx(float(value), abs=1e-6), key
    assert found["n"] == 30
    assert 0 <= found["auroc_mi"] <= 1


def test_a_plain_network_has_an_entropy_and_no_spread(victims):
    found = victims[None].scores(victims[None].digits.x_test, torch.arange(60), "w")
    assert found["auroc_entropy"] == 0.5  # the same images, the same prediction
    assert found["auroc_mi"] is None
    assert found["target_rate"] is None


def test_fixed_masks_are_the_same_for_everything(victims):
    x, victim = victims[0.5].digits.x_test[:10], victims[0.5]
    fixed, fresh = ([victim.predict(x, word, fixed=f).log_probs for word in "ab"] for f in (True, False))
    assert torch.equal(*fixed)
    assert not torch.equal(*fresh)
    by_hand = predict_classification(victim.net, x, n_passes=10, masks="shared", seed=victim.fixed_seed)
    assert torch.equal(fixed[0], by_hand.log_probs)


def test_what_an_image_looks_like_is_judged_by_its_nearest_digit(victims):
    digits = victims[None].digits
    assert torch.equal(victims[None]._nearest(digits.x_test), digits.y_test)  # blobs: no two classes are near


# ------------------------------------------------------------------------------ the attacks


def test_one_direction_serves_all_sizes_of_a_step(victims, tmp_path):
    attacks = adversarial.Attacks(victims[None], tmp_path, None)
    rows = torch.arange(60)
    direction = attacks._direction(adversarial.Case("fgsm", "fresh", 0.3), rows)
    x = attacks.digits.x_test
    expected = fgsm(victims[None].net, x, step=0.3)
    torch.testing.assert_close((x + 0.3 * direction).clamp(0, 1), expected)


def test_walks_go_on_from_their_state_to_the_same_images(victims, tmp_path):
    attacks = adversarial.Attacks(victims[0.5], tmp_path, victims[None])
    x = attacks.digits.x_test[attacks.digits.y_test != 0]
    whole = attacks._walked("fresh", x, 4, None)
    assert torch.equal(attacks._walked("fresh", x, 2, tmp_path), attacks._walked("fresh", x, 2, None))
    assert torch.equal(attacks._walked("fresh", x, 4, tmp_path), whole)
    assert torch.equal(attacks._walked("fresh", x, 0, tmp_path), x)  # rows deleted, state not
    assert not torch.equal(attacks._walked("fixed", x, 4, None), whole)


def test_a_walk_through_the_plain_network_is_its_own_attack(victims, tmp_path):
    attacks = adversarial.Attacks(victims[0.5], tmp_path, victims[None])
    x = attacks.digits.x_test[:20]
    expected = iterative_fgsm(victims[None].net, x, target=0, step=0.01, n_steps=3)
    torch.testing.assert_close(attacks._walked("transfer", x, 3, None), expected)


def test_the_attacker_who_knows_stays_within_reach_and_gets_nearer_the_second_class(victims, tmp_path):
    attacks = adversarial.Attacks(victims[0.5], tmp_path, victims[None])
    case = adversarial.Case("targeted", "adaptive", 6, 1.0, 0.03)
    moved, target = attacks._quiet_walk(case, "w")
    x = attacks.digits.x_test[attacks.few]
    assert (moved - x).abs().max() <= 0.03 + 1e-6
    assert moved.min() >= 0
    assert moved.max() <= 1
    assert (target != victims[0.5].clean.label[attacks.few]).all()
    before, after = (victims[0.5].predict(images, "w").log_prob(target).mean() for images in (x, moved))
    assert after > before + 0.1


def test_zeros_are_not_walked_towards_zero(victims, tmp_path):
    attacks = adversarial.Attacks(victims[0.5], tmp_path, victims[None])
    others = attacks.digits.y_test != 0
    for attacker, n in (("fresh", others.sum()), ("transfer", others[: len(attacks.few)].sum())):
        assert attacks.scores(adversarial.Case("targeted", attacker, 0))["n"] == n
    assert len(attacks.few) < len(others)


# ------------------------------------------------------------------------------ the run


@pytest.fixture
def small_run(digits, tmp_path, monkeypatch):
    """The whole experiment on blobs, into a folder of that name, without its figures."""
    monkeypatch.setattr(adversarial, "load_digits", lambda config: digits)
    monkeypatch.setattr(figures, "draw", lambda folder, to: [])
    return lambda folder, alphas=(0.5,), config=TINY: adversarial.run(config, alphas, tmp_path / folder)


def rows_of(folder):
    return {path.name: results.read(path)["rows"] for path in sorted((folder / "adversarial").glob("*.json"))}


def test_every_point_has_a_row_with_the_keys_of_the_contract(small_run, tmp_path):
    said = small_run("a")
    rows = rows_of(tmp_path / "a")
    assert set(rows) == {"nn.json", "bbalpha-0.5.json"}
    for name, own in rows.items():
        expected = [asdict(case) for case in adversarial.cases(TINY, plain=name == "nn.json")]
        assert [{key: row[key] for key in expected[0]} for row in own] == expected
        assert all(set(KEYS.split()) <= set(row) for row in own)
    attackers = {row["attacker"] for row in rows["bbalpha-0.5.json"]}
    assert attackers == {"fresh", "fixed", "adaptive", "transfer"}
    assert "at every step from 0.1" in said
    assert not (tmp_path / "a" / ".state").exists()


def test_a_run_that_was_cut_off_ends_with_the_same_rows(small_run, tmp_path, monkeypatch):
    small_run("whole")
    scores, calls = adversarial.Attacks.scores, []

    def failing(self, case):
        calls.append(case)
        if len(calls) in (5, 14):  # among the steps of the plain network, among those of the other
            raise KeyboardInterrupt
        return scores(self, case)

    monkeypatch.setattr(adversarial.Attacks, "scores", failing)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            small_run("cut")
    monkeypatch.setattr(adversarial.Attacks, "scores", scores)
    assert (tmp_path / "cut" / ".state").exists()
    small_run("cut")
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert not (tmp_path / "cut" / ".state").exists()


def test_a_run_that_is_done_trains_nothing(small_run, tmp_path, monkeypatch):
    config = replace(TINY, steps=(0.2,), n_targeted=0, evades=())
    said = small_run("a", (0.5,), config)
    monkeypatch.setattr(adversarial, "trained", None)
    assert small_run("a", (0.5,), config) == said


def test_networks_can_be_run_one_by_one(small_run, tmp_path):
    config = replace(TINY, steps=(0.2,), n_targeted=0, evades=())
    small_run("both", (0.0, 0.5), config)
    for alphas in ((), (0.5,), (0.0,)):
        small_run("one by one", alphas, config)
    assert rows_of(tmp_path / "one by one") == rows_of(tmp_path / "both")


def test_results_of_another_network_are_refused(small_run):
    small_run("a", ())
    with pytest.raises(ValueError, match=r"results of model other; .* has model tiny: delete it"):
        small_run("a", (), replace(TINY, model="other"))
    with pytest.raises(ValueError, match="`alphas` must be finite numbers; got nan"):
        small_run("b", (0.5, float("nan")))


def test_seeded_leaves_the_callers_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with seeded(0, "word"):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with seeded(0, "word"):
        assert torch.equal(torch.rand(2), inside)
    with seeded(0, "other"):
        assert not torch.equal(torch.rand(2), inside)


# ------------------------------------------------------------------------------ verdicts and figures


def record(alpha, attack="fgsm", attacker="fresh", step=0.0, **values):
    filled = {
        "alpha": alpha, "attack": attack, "attacker": attacker, "step": step, "accuracy": 0.5, "entropy": 0.5,
        "entropy_stderr": 0.01, "auroc_entropy": 0.9, "false_alarm": 0.05, "allowed": 0.05, "n": 100, "caught": 0.5,
        "unnoticed": 0.1, "nearest_target": 0.3, "target_rate": 0.2,
    }  # fmt: skip
    return filled | values


def answers(rows):
    return [v.answer for v in figures.verdicts(rows)]


def test_verdicts_follow_the_numbers():
    def rows(**changes):
        plain = [record(None, step=s, accuracy=0.1, entropy=0.2) for s in (0.0, 0.1, 0.2, 0.5)]
        own = [record(0.5, step=s, auroc_entropy=0.95 + s / 100, entropy=0.5 + s) for s in (0.0, 0.1, 0.2, 0.5)]
        walks = [record(None, "targeted", step=9), record(0.5, "targeted", step=9, nearest_target=0.4)]
        own[3] = own[3] | changes
        return [*plain, *own, *walks]

    assert answers(rows()) == ["yes"] * 7
    assert answers(rows(accuracy=0.1)) == ["no"] + ["yes"] * 6
    assert answers(rows(entropy=0.6)) == ["yes", "no"] + ["yes"] * 5
    assert answers(rows(auroc_entropy=0.951)) == ["yes"] * 4 + ["no"] + ["yes"] * 2
    assert answers([r | {"false_alarm": 0.062} for r in rows()]) == ["yes"] * 5 + ["no"] * 2
    assert answers([r | {"auroc_entropy": 0.93} for r in rows()]) == ["yes"] * 3 + ["no"] + ["yes"] * 3
    assert answers([r | {"nearest_target": 0.3} for r in rows()]) == ["yes"] * 2 + ["no"] + ["yes"] * 4


def test_the_strongest_attacker_is_the_one_least_noticed():
    rows = [record(0.5, "targeted", "adaptive", 40, evade=e, unnoticed=u) for e, u in ((0, 0.1), (1, 0.4), (3, 0.2))]
    assert figures.strongest(rows, "targeted")["evade"] == 1
    assert figures.strongest(rows, "targeted", evade=3)["unnoticed"] == 0.2
    assert figures.strongest(rows, "fgsm") is None


def test_no_results_are_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        figures.read(tmp_path)


def test_digits_of_the_detector_are_not_trained_on(data_dir):
    config = replace(QUICK, n_train=59_000, n_held_out=1_000)
    digits = load_digits(config)
    assert digits.x.shape == (59_000, 784)
    assert (digits.x.min(), digits.x_test.max()) == (0, 1)
    every = torch.cat((digits.y, digits.y_held_out)).bincount()
    assert every.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # all of MNIST, once
    assert torch.equal(load_digits(replace(config, n_train=5)).x_held_out, digits.x_held_out)


def test_the_command_runs_small(data_dir, tmp_path, monkeypatch, capsys):
    from bbalpha import cli

    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", f"bbalpha reproduce adversarial --quick --alphas 0.5 --out {out}".split())
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 0
    assert str(out) in capsys.readouterr().out
    assert len(list((out / "adversarial").glob("*.png"))) == 5
    clean, *_, far = figures.curve(figures.networks(figures.read(out / "adversarial"))["alpha = 0.5"], "fgsm").values()
    assert clean["accuracy"] > 0.8
    assert far["accuracy"] < clean["accuracy"] - 0.5
    assert abs(clean["auroc_entropy"] - 0.5) < 0.1
    walk = figures.curve(figures.read(out / "adversarial"), "targeted")
    assert walk[8]["target_rate"] > walk[0]["target_rate"]
