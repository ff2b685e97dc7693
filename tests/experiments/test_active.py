"""Active learning on MNIST, small: the network's passes are the engine's, runs go on, and tables say what was seen."""

from functools import partial

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import bbalpha
from bbalpha.experiments import active, active_network, mnist, skeleton
from bbalpha.experiments.active import COPIES, METHODS, Config, Unit, needed, prepare, units
from bbalpha.experiments.active_network import ThinPasses, Training, network, trained
from bbalpha.experiments.results import Ledger

SMALL = Config(n_pool=60, n_validation=30, n_test=60, size=4, stages=(24, 28), epoch=64, most_epochs=2, n_test_passes=2)


@pytest.fixture(scope="module")
def digits():
    """scikit-learn's digits, as large as those of MNIST."""
    images, labels = load_digits(return_X_y=True)
    x = functional.interpolate(torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), size=28)
    y = torch.tensor(labels)
    return mnist.Digits(x[:300], y[:300], x[300:400], y[300:400])


@pytest.mark.parametrize("balanced", [True, False])
def test_the_short_way_gives_the_passes_of_the_engine(balanced):
    torch.manual_seed(0)
    net, x = network(), torch.randn(7, 1, 28, 28)
    engine = bbalpha.Functions(net, 4, seed=3, balanced=balanced).probs(x)[:, :]
    short = ThinPasses(net, 4, 3, balanced=balanced)
    torch.testing.assert_close(short(x), engine, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(short.mean(x), engine.mean(0), rtol=1e-4, atol=1e-6)


def test_the_network_is_the_published_one():
    assert sum(p.numel() for p in network().parameters()) == 184_586


@pytest.mark.parametrize("how", [Training(None, 1, 128, 2), Training(0.5, 4, 128, 2)])
def test_training_keeps_the_weights_that_were_best_on_the_validation_rows(digits, how, monkeypatch):
    seen, answers = [], iter([0.5, 0.3])

    def accuracy(net, x, y):
        seen.append({name: value.clone() for name, value in net.state_dict().items()})
        return next(answers)

    monkeypatch.setattr(active_network, "plain_accuracy", accuracy)
    net = trained(digits.x[:20], digits.y[:20], (digits.x[20:], digits.y[20:]), how, 0)
    assert all(torch.equal(value, seen[0][name]) for name, value in net.state_dict().items())
    assert not torch.equal(seen[0]["0.weight"], seen[1]["0.weight"])


@pytest.mark.parametrize("dataset", COPIES)
def test_a_pool_holds_every_digit_as_often_as_it_is_repeated(digits, dataset):
    data, copies = prepare(dataset, SMALL, 0, digits), COPIES[dataset]
    n = 60 // copies
    assert data.pool.shape == (60, 1, 28, 28)
    assert torch.equal(data.y_pool, data.y_pool[:n].repeat(copies))
    first = data.pool[:n]
    for copy in data.pool.split(n)[1:]:
        assert 0.12 < (copy - first).std() < 0.16  # two noises of 0.1
    assert data.pool[:n].flatten(1).unique(dim=0).shape[0] == n
    validation = {tuple(row) for row in data.validation[0].flatten(1).tolist()}
    assert len(validation) == 30
    if copies == 1:
        assert not validation & {tuple(row) for row in data.pool.flatten(1).tolist()}


def test_seeds_have_pools_of_their_own(digits):
    a, b = (prepare("mnist", SMALL, seed, digits).pool for seed in (0, 1))
    assert torch.equal(a[:20], b[:20])
    assert not torch.equal(a[20:], b[20:])


def ran(digits, folder, todo):
    kept = Ledger(folder / "active/x.json", command="make x", seed=0)

    def work(unit, own):
        return active.run(unit, METHODS[unit.method], SMALL, prepare(unit.dataset, SMALL, unit.seed, digits), own)

    skeleton.run_units(kept, todo, work, state=folder / ".state/active")
    return kept


def test_the_experiment_from_end_to_end(digits, tmp_path):
    todo = units("repeated_mnist_x2", SMALL, 1)
    kept = ran(digits, tmp_path, todo)
    assert [(r["labels"], r["until"]) for r in kept.rows if r["method"] == "bald"] == [(20, 24), (24, 24), (28, 28)]
    assert {r["method"] for r in kept.rows} == set(METHODS)
    assert all(0 <= r["accuracy"] <= 1 and r["train_seconds"] > 0 for r in kept.rows)
    assert all(unit.done(kept) for unit in todo)
    assert not (tmp_path / ".state").exists()  # runs that have ended leave nothing behind
    assert "batch-bald" in active.table(kept.rows)


def test_a_stage_goes_on_where_the_one_before_it_ended(digits, tmp_path):
    unit = Unit("mnist", 28, 0, "bald")
    data = prepare("mnist", SMALL, 0, digits)
    run = partial(active.run, method=METHODS["bald"], config=SMALL, data=data)
    whole = run(unit, folder=tmp_path / "a" / unit.name)
    first = run(Unit("mnist", 24, 0, "bald"), folder=tmp_path / "b" / "x")
    second = run(unit, folder=tmp_path / "b" / "y")
    facts = [[(r["labels"], r["accuracy"]) for r in rows] for rows in (whole, first, second)]
    assert facts[0][-1:] == facts[2]
    assert len(facts[1]) == 2
    assert [r["ended"] for r in second] == [True]


def test_a_run_that_reached_its_target_has_no_further_stages():
    kept = Ledger("nowhere.json", command="make x", seed=0)
    kept.rows = [{"dataset": "mnist", "until": 100, "seed": 0, "method": "bald", "ended": True}]
    assert Unit("mnist", 300, 0, "bald").done(kept)
    assert not Unit("mnist", 300, 1, "bald").done(kept)
    assert not Unit("mnist", 300, 0, "random").done(kept)


def test_labels_needed_are_those_of_the_first_time():
    rows = [
        {"method": "bald", "seed": seed, "labels": n, "accuracy": accuracy}
        for seed, accuracies in ((0, (0.5, 0.91, 0.93)), (1, (0.5, 0.6, 0.7)))
        for n, accuracy in zip((20, 30, 40), accuracies, strict=True)
    ]
    assert needed(rows, "bald", 0.9) == [30, float("inf")]
    assert active.curves(rows, "bald")[30] == [0.91, 0.6]


def test_sets_that_are_not_known_are_refused(tmp_path):
    with pytest.raises(ValueError, match="some of mnist, repeated_mnist_x2"):
        active.reproduce(datasets=["cifar"], seeds=1, quick=True, out=tmp_path)
