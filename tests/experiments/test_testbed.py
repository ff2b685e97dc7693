"""The testbed: problems of the specified law, agents that are what they are called, scores that are 0 for the truth."""

import json
import math
from pathlib import Path

import pytest
import torch

from bbalpha.experiments import results, testbed
from bbalpha.experiments.testbed_agents import Agent, _batches, fit, log_probs, objective
from bbalpha.experiments.testbed_choices import AGENTS, CANDIDATES, CHOSEN, best
from bbalpha.experiments.testbed_networks import Ensemble, initial, through
from bbalpha.experiments.testbed_problems import N_DATA, TEMPERATURES, Exam, Problem, seed_of
from bbalpha.experiments.testbed_scoring import SCORES, common, mean_and_error, paired_error, ratios, score

UNIFORM = {0.01: 0.6673, 0.1: 0.4591, 0.5: 0.1153}  # expected divergence of equal chances at D = 2, of 3000 networks


def problems(n_data, number=0):
    return [Problem.make(n_data, t, seed_of(n_data, t, number, validation=True)) for t in TEMPERATURES]


def test_seeds_of_the_sweep_are_1_to_210_and_others_for_choosing():
    every = [seed_of(n, t, s) for n in N_DATA for t in TEMPERATURES for s in range(10)]
    assert every == list(range(1, 211))
    assert seed_of(10, 0.1, 5) == 76  # as the testbed's own tutorial has it
    assert seed_of(10, 0.1, 5, validation=True) not in every


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_equal_chances_are_as_far_from_the_truth_as_specified(temperature):
    g = torch.Generator().manual_seed(0)
    x, far = torch.randn(200, 2, generator=g), []
    for seed in range(200):
        true = Problem.make(1, temperature, seed).log_probs(x)
        far.append(float((true.exp() * (true + math.log(2))).sum(1).mean()))
    spread = torch.tensor(far).std() / math.sqrt(len(far))
    assert abs(sum(far) / len(far) - UNIFORM[temperature]) < 4 * float(spread)


def test_the_truth_scores_0_and_equal_chances_what_the_labels_say():
    problem = problems(10)[1]
    tests = Exam.of(problem, n_hundreds=20, n_pairs=100)
    true, half = score(tests, tests.true[None]), score(tests, torch.full((1, len(tests.x), 2), 0.5).log())
    assert [true[f"kl_{size}"] for size in ("1", "10", "10_dyadic")] == pytest.approx([0, 0, 0], abs=1e-5)
    assert true["kl_100"] == pytest.approx(0, abs=0.02)  # probits are cut at 5 deviations
    assert half["kl_10"] == pytest.approx(10 * half["kl_1"], rel=1e-4)
    assert half["kl_100"] == pytest.approx(100 * half["kl_1"], rel=1e-4)
    assert true["accuracy"] > 0.8


def test_groups_are_of_the_sizes_they_are_called_and_dyadic_ones_of_two_inputs():
    tests = Exam.of(problems(3)[0], n_hundreds=3, n_pairs=7)
    shapes = {name: tuple(rows.shape) for name, (rows, _) in tests.groups.items()}
    assert shapes == {"1": (300, 1), "10": (30, 10), "100": (3, 100), "10_dyadic": (7, 10)}
    rows, labels = tests.groups["10_dyadic"]
    assert all(len(group.unique()) <= 2 for group in rows)
    assert int(rows.min()) >= 300  # anchors are not among the others
    single, tens = tests.groups["1"], tests.groups["10"]
    assert torch.equal(single[0].flatten(), tens[0].flatten())
    assert torch.equal(single[1].flatten(), tens[1].flatten())
    assert labels.shape == rows.shape


def test_a_member_of_an_ensemble_learns_as_it_would_alone(monkeypatch):
    """So an ensemble of one is the mlp."""
    own = problems(10)
    together = fit(Agent("ensemble", members=3, steps=20), own, seed=1)
    first = initial(3, 3, torch.Generator().manual_seed(3), bias=False)  # what `fit` began with

    def second_alone(*args, **kwargs):
        networks = Ensemble(*args, **kwargs)
        networks.parameters = []
        networks.layers = networks.hold([(w[:, 1:2].clone(), b[:, 1:2].clone()) for w, b in first])
        return networks

    monkeypatch.setattr("bbalpha.experiments.testbed_agents.Ensemble", second_alone)
    alone = fit(Agent("ensemble", steps=20), own, seed=1)
    x = torch.randn(3, 5, 2)
    torch.testing.assert_close(together.logits(x, [])[:, 1:2], alone.logits(x, []))


def test_prior_functions_stay_what_they_were_and_grow_as_temperature_falls():
    own = problems(10)
    networks = fit(Agent("ensemble", members=2, prior=3.0, steps=5), own, seed=2)
    g = torch.Generator().manual_seed(6)
    initial(3, 2, g, bias=True)
    fixed = initial(3, 2, g, bias=True)
    x = torch.randn(3, 4, 2)
    prior = networks.logits(x, []) - through(networks.layers, x[:, None])
    wanted = torch.stack([3 / t**0.5 * f for t, f in zip(TEMPERATURES, through(fixed, x[:, None]), strict=True)])
    torch.testing.assert_close(prior, wanted)


def test_blocks_part_in_pairs_and_each_pays_its_share_of_the_decay():
    own = problems(10)
    networks = fit(Agent("blocks", blocks=4, prior=2.0, n_passes=3, steps=5), own, seed=2)
    x, signs = torch.randn(3, 6, 2), networks.draw(5, torch.Generator().manual_seed(0))[0]
    common = through(networks.layers, x[:, None])[:, :1]
    torch.testing.assert_close(
        networks.logits(x, [signs]) + networks.logits(x, [-signs]), 2 * common.expand(3, 5, 6, 2)
    )
    assert (networks.logits(x, [signs]) - common).abs().max() > 0.1
    squares = torch.stack([t.square().flatten(2).sum(2) for layer in networks.layers for t in layer]).sum(0)  # (Z, 5)
    torch.testing.assert_close(networks.penalty(), networks.strength * (squares[:, 0] + squares[:, 1:].mean(1)))


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_groups_of_one_row_are_the_paper_and_larger_ones_joint(alpha):
    g = torch.Generator().manual_seed(0)
    logits, y = torch.randn(2, 4, 6, 2, generator=g), torch.randint(2, (2, 6), generator=g)
    losses = -logits.log_softmax(-1).gather(3, y[:, None, :, None].expand(2, 4, 6, 1))[..., 0]  # (Z, K, B)
    for size in (1, 3, 6, 4):
        parts = [part.sum(2) for part in losses.split(size, 2)]
        wanted = sum(-((-alpha * part).exp().mean(1).log()) / alpha for part in parts) / 6
        found = objective(Agent("dropout", alpha=alpha, group_size=size), logits, y)
        torch.testing.assert_close(found, wanted)
    mean = objective(Agent("dropout", alpha=0.0, group_size=3), logits, y)
    torch.testing.assert_close(mean, losses.mean((1, 2)))


@pytest.mark.parametrize("name", [*AGENTS, *CANDIDATES])
def test_every_agent_draws_functions_and_keeps_problems_apart(name):
    """One draw is one function of all rows; the second problem does not see the first."""
    agent = {**CANDIDATES, **AGENTS}[name]
    if agent is None:
        return
    agent = Agent(**{**vars(agent), "steps": 4, "members": min(agent.members, 3)})
    own = problems(3)
    networks = fit(agent, own, seed=1)
    x = torch.randn(3, 150, 2)
    whole, apart = (log_probs(networks, part, n_draws=30, seed=3) for part in (x, x[:, 120:]))
    torch.testing.assert_close(whole[:, :, 120:], apart)
    assert whole.shape[1] == (agent.members if agent.kind == "ensemble" else 30)
    torch.testing.assert_close(whole.exp().sum(3), torch.ones(whole.shape[:3]))
    other = [Problem.make(3, TEMPERATURES[0], 5), *own[1:]]
    torch.testing.assert_close(log_probs(fit(agent, other, seed=1), x, n_draws=30, seed=3)[1:], whole[1:])


def test_every_row_comes_up_once_a_round():
    batches = _batches(250, torch.Generator().manual_seed(0))
    dealt = torch.cat([next(batches) for _ in range(5)])
    assert [len(dealt[i : i + 250].unique()) for i in (0, 250)] == [250, 250]
    assert sorted(next(_batches(3, torch.Generator())).tolist()) == [0, 1, 2]


def test_errors_come_from_groups_of_seeds():
    values = ((1, 1.0), (11, 3.0), (2, 4.0), (12, 4.0))
    rows = [{"agent": "mlp", "number": s % 10 - 1, "seed": s, "kl_1": v} for s, v in values]
    assert mean_and_error(rows, "kl_1") == (3.0, 0.5 / math.sqrt(2) * 2)
    half = [{**row, "agent": "half", "kl_1": row["kl_1"] / 2} for row in rows[:3]]
    begun = [{**row, "agent": "begun"} for row in rows[:1]]
    shared = common([*rows, *half, *begun], ["mlp", "half", "begun", "never"])
    assert {agent: len(own) for agent, own in shared.items()} == {"mlp": 3, "half": 3}
    assert ratios(shared, "kl_1")["half"][0] == pytest.approx(0.5)


def test_an_agent_that_is_half_as_far_everywhere_has_no_paired_error():
    def rows(agent, values):
        return [{"agent": agent, "number": 0, "seed": s, "kl_1": v} for s, v in enumerate(values)]

    found = {name: rows(name, v) for name, v in (("mlp", (1.0, 3.0)), ("half", (0.5, 1.5)), ("level", (2.0, 2.0)))}
    assert paired_error(found, "kl_1", "half") == 0
    assert paired_error(found, "kl_1", "level") == pytest.approx(0.5)  # off by +1 and -1, over a mean of 2
    assert math.isnan(mean_and_error(found["mlp"][:1], "kl_1")[1])


def test_the_best_is_the_best_at_100_labels_that_is_no_worse_at_one():
    def row(agent, one, hundred):
        return {"agent": agent, "number": 0, "seed": 1, "kl_1": one, "kl_100": hundred}

    names = [name for name in CANDIDATES if name.startswith("prior")][:3]
    rows = [row("mlp", 1.0, 1.0), row("mc-dropout", 1.0, 1.0)]
    mixed = [row(*parts) for parts in zip(names, (1.1, 0.9, 0.8), (0.2, 0.5, 0.7), strict=True)]
    assert best(rows + mixed, "alpha dropout+") == names[1]
    worse = [row(*parts) for parts in zip(names, (1.3, 1.1, 1.2), (0.2, 0.5, 0.7), strict=True)]
    assert best(rows + worse, "alpha dropout+") == names[1]


@pytest.mark.parametrize("name", list(CHOSEN))
def test_ours_are_those_that_validation_took(name):
    path = Path(__file__).parents[2] / "results/testbed_chosen.json"
    assert best(json.loads(path.read_text())["rows"], name) == CHOSEN[name]


def test_a_small_run_ends_and_goes_on_where_it_was(tmp_path, monkeypatch):
    agents = ["uniform", "mlp", "mc-dropout"]
    arguments = {"seeds": 1, "choose": False, "jobs": 1, "quick": True, "out": tmp_path}
    testbed.reproduce(agents=agents[:2], **arguments)
    before = results.read(tmp_path / "testbed-quick.json")["rows"]
    assert len(before) == 2 * 2 * 3
    ran = []
    work = testbed.run_cell
    monkeypatch.setattr(testbed, "run_cell", lambda *a: ran.append(a[3].agent) or work(*a))
    testbed.reproduce(agents=agents, **arguments)
    rows = results.read(tmp_path / "testbed-quick.json")["rows"]
    assert set(ran) == {"mc-dropout"}
    assert rows[: len(before)] == before
    assert all(math.isfinite(row[key]) for row in rows for key in SCORES)
    assert not (tmp_path / ".state").exists()


def test_rows_of_an_agent_that_has_changed_are_made_anew(tmp_path, monkeypatch):
    arguments = {"agents": ["uniform", "mlp"], "seeds": 1, "choose": False, "jobs": 1, "quick": True, "out": tmp_path}
    testbed.reproduce(**arguments)
    monkeypatch.setitem(AGENTS, "mlp", Agent("ensemble", members=2))
    ran = []
    work = testbed.run_cell
    monkeypatch.setattr(testbed, "run_cell", lambda *a: ran.append(a[3].agent) or work(*a))
    testbed.reproduce(**arguments)
    rows = results.read(tmp_path / "testbed-quick.json")["rows"]
    assert set(ran) == {"mlp"}
    assert [row["agent"] for row in rows] == ["uniform"] * 6 + ["mlp"] * 6
    assert all("members=2" in row["made"] for row in rows[6:])


@pytest.mark.parametrize(
    ("given", "message"),
    [({"agents": ["gp"]}, "`agents` must be of uniform, mlp"), ({"seeds": 11}, "`seeds` must be from 1 to 10; got 11")],
)
def test_wrong_arguments_get_one_sentence(given, message, tmp_path):
    arguments = {"agents": [], "seeds": 1, "choose": False, "jobs": 1, "quick": True, "out": tmp_path}
    with pytest.raises(ValueError, match=message):
        testbed.reproduce(**(arguments | given))
