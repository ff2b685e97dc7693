"""Optuna: alpha and dropout rates chosen by the likelihood of held-out rows, hopeless trials pruned.

    def train(net, objective, callback):                   # your training, as you have it
        return bbalpha.fit(net, (x, y), objective=objective, epochs=50, validation=(x_held, y_held), callback=callback)

    study = optuna.create_study(pruner=optuna.pruners.MedianPruner())
    study.optimize(held_out_nll(make_net, bbalpha.CrossEntropy, train), n_trials=50)
    study.best_params                                      # {"alpha": ..., "dropout": ...}

A trial is asked for "alpha", evenly between the ends of `alphas`, and for each name of `rates` a dropout rate, evenly
in its logarithm between the ends of `dropouts`. Its value, to be made small, is the least validation negative
log-likelihood of the run, that of the weights `fit` keeps; the one of every epoch is reported for the pruner. The rows
that chose are no rows to tell how good the choice is: keep others for that.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

try:
    import optuna
except ImportError as error:
    raise ImportError("bbalpha.integrations.optuna needs Optuna: pip install 'bbalpha[optuna]'.") from error

from bbalpha.checks import check_number
from bbalpha.training.loop import History, Objective, Progress

Callback = Callable[[Progress], bool | None]
Train = Callable[[nn.Module, Objective, Callback], History]


def held_out_nll(
    model: Callable[..., nn.Module],
    objective: Callable[[float], Objective],
    train: Train,
    *,
    alphas: tuple[float, float] = (0.0, 1.0),
    dropouts: tuple[float, float] = (0.01, 0.5),
    rates: Sequence[str] = ("dropout",),
) -> Callable[[optuna.Trial], float]:
    """What ``study.optimize`` calls: a trial -> the negative log-likelihood of held-out rows.

    Args:
        model: Makes a fresh network; called with a keyword for each of `rates`.
        objective: Makes the loss, called with alpha: bbalpha.CrossEntropy, bbalpha.GaussianNLL, or a function.
        train: Trains a network: (model, objective, callback) -> what `bbalpha.fit` returns. It must give `fit` some
            `validation`, and the callback.
        alphas: The least and the largest alpha to try; twice the same fixes it.
        dropouts: The least and the largest rate to try, between 0 and 1, both left out.
        rates: The names of the rates, each chosen by itself.

    >>> import torch, bbalpha
    >>> x = torch.randn(64, 4)
    >>> make = lambda dropout: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
    >>> def train(net, objective, callback):
    ...     return bbalpha.fit(net, (x, x[:, :1]), objective=objective, epochs=2, validation=0.2, callback=callback)
    >>> optuna.logging.set_verbosity(optuna.logging.ERROR)
    >>> study = optuna.create_study()
    >>> study.optimize(held_out_nll(make, bbalpha.GaussianNLL, train), n_trials=2)
    >>> sorted(study.best_params)
    ['alpha', 'dropout']
    """
    low, high = _ends("alphas", alphas)
    least, most = _ends("dropouts", dropouts)
    if not 0 < least <= most < 1:
        raise ValueError(f"`dropouts` must lie between 0 and 1, both left out; got {dropouts!r}.")
    if isinstance(rates, str) or "alpha" in rates or len(set(rates)) < len(rates):
        raise ValueError(f'`rates` must be names, each once, and none of them "alpha"; got {rates!r}.')

    def value(trial: optuna.Trial) -> float:
        alpha = trial.suggest_float("alpha", low, high)
        chosen = {name: trial.suggest_float(name, least, most, log=True) for name in rates}
        return _run(trial, train, model(**chosen), objective(alpha))

    return value


def _run(trial: optuna.Trial, train: Train, model: nn.Module, objective: Objective) -> float:
    """The best validation likelihood of a run, which is left where the trial is to be pruned."""
    verdicts: list[bool] = []

    def callback(progress: Progress) -> bool:
        if progress.nll is None:
            raise ValueError("`train` must give `fit` held-out rows, as in validation=0.2; got validation=None.")
        trial.report(progress.nll, progress.epoch)
        verdicts.append(trial.should_prune())
        return verdicts[-1]

    history: Any = train(model, objective, callback)
    if not isinstance(history, History):
        raise TypeError(f"`train` must return what `bbalpha.fit` returns, a History; got {type(history).__name__}.")
    if not verdicts:
        raise ValueError("`train` must give `fit` the callback, as in callback=callback; it was never called.")
    if verdicts[-1]:
        raise optuna.TrialPruned
    return min(history.nll)


def _ends(name: str, value: Any) -> tuple[float, float]:
    """The two ends of a range, the smaller first."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"`{name}` must be two numbers, the least and the largest; got {value!r}.")
    low, high = (check_number(name, end) for end in value)
    if low > high:
        raise ValueError(f"`{name}` must be two numbers, the least and the largest; got {value!r}.")
    return low, high
