import dataclasses
import math

import pytest
import torch

from bbalpha.experiments import search as search_module
from bbalpha.experiments.search import HUGE, LARGE, SMALL, Choice, Config, config_for, plain, search, validation_fold


def table(n=90):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=g)
    return x, 3 * x[:, 0] + 0.1 * torch.randn(n, generator=g)


CHOICES = (Choice(5 / 256, 0.0, 0.3, 1), Choice(5 / 256, 0.0, 0.3, 30), Choice(0.5, 0.5, 0.3, 30))
CONFIG = Config((20,), 16, CHOICES, n_folds=2, n_passes=3, n_validation_passes=20)


def test_folds_are_parts_of_the_training_part():
    train = torch.arange(100, 153)
    held = []
    for fold in range(5):
        inner, own = validation_fold(train, 3, fold)
        assert sorted([*inner.tolist(), *own.tolist()]) == train.tolist()
        held += own.tolist()
    assert sorted(held) == train.tolist()
    assert validation_fold(train, 4, 0)[1].tolist() != validation_fold(train, 3, 0)[1].tolist()


def test_the_best_candidate_is_chosen_for_every_part_and_alpha():
    x, y = table()
    found = search(x, y, [range(60), range(20, 80)], CONFIG, alphas=(0.0, 0.5), seeds=[0, 1])
    assert list(found) == [(0, 0.0), (0, 0.5), (1, 0.0), (1, 0.5)]
    for choice in found.values():
        assert dataclasses.replace(choice, validation_nll=math.nan).row() == pytest.approx(
            CHOICES[1].row(), nan_ok=True
        )
        assert choice.validation_nll < 2.2  # of the deviation of y alone: 2.5


def test_rows_outside_the_training_part_are_not_looked_at():
    x, y = table()
    first = search(x, y, [range(60)], CONFIG, alphas=(0.5, 1.0), seeds=[0])
    y[60:], x[60:] = math.nan, math.nan
    assert search(x, y, [range(60)], CONFIG, alphas=(0.5, 1.0), seeds=[0]) == first


def test_other_alphas_do_not_change_what_one_finds():
    x, y = table()
    both = search(x, y, [range(60)], CONFIG, alphas=(0.0, 1.0), seeds=[0])
    alone = search(x, y, [range(60)], CONFIG, alphas=(1.0,), seeds=[0])
    assert alone[0, 1.0].validation_nll == pytest.approx(both[0, 1.0].validation_nll, abs=0.01)


def test_a_candidate_that_went_astray_is_not_chosen(monkeypatch):
    x, y = table()
    fit = search_module.fit_population

    def astray(*args, epochs, **kwargs):
        population = fit(*args, epochs=1, **kwargs)
        population.weights[0][0][:] *= math.nan if epochs == 30 else 1
        return population

    monkeypatch.setattr(search_module, "fit_population", astray)
    assert search(x, y, [range(60)], CONFIG, alphas=(0.5,), seeds=[0])[0, 0.5].epochs == 1


@pytest.mark.parametrize(
    ("n", "name", "hidden", "grid"),
    [(455, "boston", 50, SMALL), (7373, "kin8nm", 50, LARGE), (41157, "protein", 100, HUGE)],
)
def test_plans(n, name, hidden, grid):
    config = config_for(n, name)
    assert config.hidden == (hidden,)
    assert config.n_passes == 10
    assert config.n_test_passes >= 100
    steps = [c.epochs * -(-n // config.batch_size) for c in config.candidates]
    assert steps == pytest.approx([g[3] for g in grid], rel=0.1)
    assert all(c.dropout * 256 % 1 == 0 and c.input_dropout * 256 % 1 == 0 for c in config.candidates)
    bare = plain(config)
    assert {(c.length_scale, c.epochs) for c in bare.candidates} == {
        (c.length_scale, c.epochs) for c in config.candidates
    }
    assert all(c.dropout == c.input_dropout == 0 for c in bare.candidates)
