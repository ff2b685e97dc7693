"""Optuna's trials over alpha and dropout rates: what is asked, what is reported, and what comes out is `fit`'s."""

import optuna
import pytest
import torch
from optuna.distributions import FloatDistribution
from optuna.trial import FixedTrial, TrialState
from torch import nn

import bbalpha
from bbalpha.integrations.optuna import held_out_nll
from bbalpha.training import History, Progress

optuna.logging.set_verbosity(optuna.logging.ERROR)


def make(dropout, second=None):
    torch.manual_seed(0)
    last = [] if second is None else [nn.Dropout(second)]
    return nn.Sequential(
        nn.Linear(3, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 8), nn.ReLU(), *last, nn.Linear(8, 1)
    )


class Training:
    """What trains, and what came of it."""

    def __init__(self, epochs=4, **options):
        torch.manual_seed(1)
        self.x, self.options, self.histories = torch.randn(80, 3), {"validation": 0.3} | options, []
        self.epochs = epochs

    def __call__(self, net, objective, callback):
        data = self.x, self.x.sum(1, keepdim=True).sin()
        done = bbalpha.fit(net, data, objective=objective, epochs=self.epochs, n_passes=4, learning_rate=0.01, seed=0,
                           callback=callback, **self.options)  # fmt: skip
        self.histories.append(done)
        return done


def test_a_trial_is_worth_the_least_held_out_nll_of_fit():
    trial, train = FixedTrial({"alpha": 0.7, "dropout": 0.2}), Training()
    value = held_out_nll(make, bbalpha.GaussianNLL, train)(trial)
    by_hand = Training()(make(0.2), bbalpha.GaussianNLL(alpha=0.7), None)
    assert value == min(by_hand.nll)
    assert train.histories[0].nll == by_hand.nll
    other = held_out_nll(make, bbalpha.GaussianNLL, Training())(FixedTrial({"alpha": 0.0, "dropout": 0.2}))
    assert other != value  # alpha is heard


def test_the_epoch_whose_weights_are_kept_counts_and_not_the_last():
    def train(net, objective, callback):
        nll = (2.0, 1.0, 3.0)
        for i, value in enumerate(nll):
            assert not callback(Progress(i + 1, i, 0.0, value))
        return History((0.0,) * 3, nll, 2, 3, False, 0.0)

    assert held_out_nll(make, bbalpha.GaussianNLL, train)(FixedTrial({"alpha": 0.7, "dropout": 0.2})) == 1.0


def test_what_is_suggested_and_how():
    trial = FixedTrial({"alpha": 0.2, "dropout": 0.03, "second": 0.3})
    seen = []

    def model(dropout, second):
        seen.append((dropout, second))
        return make(dropout, second)

    objective = held_out_nll(
        model, bbalpha.GaussianNLL, Training(1), alphas=(-1, 2), dropouts=(0.02, 0.4), rates=("dropout", "second")
    )
    objective(trial)
    rate = FloatDistribution(0.02, 0.4, log=True)
    assert trial.distributions == {"alpha": FloatDistribution(-1, 2), "dropout": rate, "second": rate}
    assert seen == [(0.03, 0.3)]


def test_every_epoch_is_reported_and_a_pruned_trial_ends_early():
    class Second(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number == 1 and trial.last_step == 2

    study, train = optuna.create_study(pruner=Second()), Training()
    study.optimize(held_out_nll(make, bbalpha.GaussianNLL, train), n_trials=3)
    assert [t.state for t in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.COMPLETE]
    for trial, history in zip(study.trials, train.histories, strict=True):
        assert list(trial.intermediate_values.values()) == list(history.nll)
    assert [len(h.nll) for h in train.histories] == [4, 2, 4]
    assert study.best_value == min(min(train.histories[i].nll) for i in (0, 2))


def test_a_study_finds_rates_that_predict_better_than_the_worst():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(held_out_nll(make, bbalpha.GaussianNLL, Training(10), dropouts=(0.01, 0.9)), n_trials=6)
    values = [t.value for t in study.trials]
    assert study.best_value < max(values)
    again = held_out_nll(make, bbalpha.GaussianNLL, Training(10), dropouts=(0.01, 0.9))
    assert again(FixedTrial(study.best_params)) == study.best_value


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"alphas": (1.0, 0.0)}, r"`alphas` must be two numbers, the least and the largest; got \(1.0, 0.0\)"),
        ({"alphas": 0.5}, "`alphas` must be two numbers, the least and the largest; got 0.5"),
        ({"alphas": (0, float("nan"))}, "`alphas` must be a finite number; got nan"),
        ({"dropouts": (0.0, 0.5)}, r"`dropouts` must lie between 0 and 1, both left out; got \(0.0, 0.5\)"),
        ({"rates": "dropout"}, "`rates` must be names, each once"),
        ({"rates": ("alpha",)}, "`rates` must be names, each once"),
    ],
)
def test_ranges_that_are_none_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        held_out_nll(make, bbalpha.GaussianNLL, Training(), **options)


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (Training(validation=None), r"as in validation=0\.2; got validation=None"),
        (lambda net, objective, callback: Training(1)(net, objective, None), "it was never called"),
        (lambda net, objective, callback: 0.3, "a History; got float"),
    ],
)
def test_a_training_that_tells_nothing_is_refused(train, told):
    with pytest.raises((ValueError, TypeError), match=told):
        held_out_nll(make, bbalpha.GaussianNLL, train)(FixedTrial({"alpha": 0.5, "dropout": 0.1}))


def test_a_model_without_dropout_is_refused():
    bare = lambda dropout: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))  # noqa: E731
    with pytest.raises(ValueError, match="add_dropout"):
        held_out_nll(bare, bbalpha.GaussianNLL, Training())(FixedTrial({"alpha": 0.5, "dropout": 0.1}))
