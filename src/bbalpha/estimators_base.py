"""What the scikit-learn estimators share: standardisation, networks and their training, model folders."""

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from bbalpha.checkpoint import build, describe, read_folder, write_folder
from bbalpha.feed import order
from bbalpha.networks import mlp
from bbalpha.population import Member, Population, fit_population
from bbalpha.stacked import Likelihood
from bbalpha.training import cosine, fit

Array = NDArray[Any]
Module = nn.Module | Callable[[int, int], nn.Module]


class DropoutEstimator(BaseEstimator, ABC):
    """Standardisation, networks and their training; the likelihood is the subclass's."""

    networks_: list[nn.Module]
    objectives_: list[Any]

    def __init__(
        self,
        alpha: float = 0.5,
        *,
        hidden_layer_sizes: Sequence[int] = (50,),
        dropout: float | None = 0.05,
        input_dropout: float | None = None,
        length_scale: float = 1.0,
        n_passes: int = 10,
        n_predict_passes: int = 100,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 0.01,
        n_ensemble: int | None = 1,
        validation_fraction: float | None = 0.0,
        patience: int | None = None,
        module: Module | None = None,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.alpha = alpha
        self.hidden_layer_sizes = hidden_layer_sizes
        self.dropout = dropout
        self.input_dropout = input_dropout
        self.length_scale = length_scale
        self.n_passes = n_passes
        self.n_predict_passes = n_predict_passes
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.n_ensemble = n_ensemble
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.module = module
        self.verbose = verbose
        self.random_state = random_state

    def _train(self, X: Array, target: Tensor, weight: Array | None, n_outputs: int) -> None:
        """Fit scalers of X and the networks to standardised rows."""
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 2**10))
        if weight is not None:
            X, target, weight = X[weight > 0], target[torch.as_tensor(weight > 0)], weight[weight > 0]
        self.x_mean_, self.x_scale_ = standardiser(X, weight)
        x = torch.as_tensor((X - self.x_mean_) / self.x_scale_, dtype=torch.float32)
        members = candidates(self, np.arange(len(x)), self.seed_, alpha=self.alpha)
        self.dropout_, self.input_dropout_ = members[0, 0].dropout, members[0, 0].input_dropout
        if members.size > 1 and self.module is None:
            self._train_together(x, target, weight, members)
            return
        batch_size, epochs, patience = duration(self, len(X))
        data = (x, target) if weight is None else (x, target, torch.as_tensor(weight, dtype=torch.float32))
        self.networks_, self.objectives_, histories = [], [], []
        for one in members[:, 0]:
            network, objective = self._network(X.shape[1], n_outputs, one.seed), self._objective()
            history = fit(
                network,
                data,
                objective=objective,
                epochs=epochs,
                n_passes=self.n_passes,
                batch_size=batch_size,
                length_scale=self.length_scale,
                learning_rate=self.learning_rate,
                schedule=cosine,
                validation=None if patience is None else held_out_share(self, len(X)),
                patience=patience,
                progress=bool(self.verbose),
                seed=one.seed,
            )
            self.networks_.append(network.eval())
            self.objectives_.append(objective)
            histories.append(history)
        self.validation_curves_ = [np.array(h.nll) for h in histories]
        self.n_iter_ = max(len(h.loss) for h in histories)

    def _train_together(self, x: Tensor, target: Tensor, weight: Array | None, members: Array) -> None:
        """The same networks for several candidates, trained at once; those of the best candidate are kept."""
        population = train_together(self, x, target, members.ravel().tolist(), self._likelihood(), weight)
        chosen = best_candidate(population.nll, members.shape)
        best = population.members[chosen[0]]
        self.dropout_, self.input_dropout_ = best.dropout, best.input_dropout
        self.networks_ = [population.network(i) for i in chosen]
        self.objectives_ = [self._objective() for _ in chosen]
        for i, objective in zip(chosen, self.objectives_, strict=True):
            if objective.state_dict():
                objective.load_state_dict({"log_precision": population.log_precision[i]})
        curves = [population.nll[:, i].numpy() for i in chosen]
        self.validation_curves_ = [c[~np.isnan(c)] for c in curves]
        self.n_iter_ = max(len(c) for c in self.validation_curves_) or duration(self, len(x))[1]

    def _network(self, n_inputs: int, n_outputs: int, seed: int) -> nn.Module:
        if self.module is None:
            sizes = [n_inputs, *self.hidden_layer_sizes, n_outputs]
            return seeded_mlp(sizes, seed, dropout=self.dropout_, input_dropout=self.input_dropout_)
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.module(n_inputs, n_outputs)

    @abstractmethod
    def _objective(self) -> nn.Module:
        """A fresh objective."""

    @abstractmethod
    def _likelihood(self) -> Likelihood:
        """As a population has it."""

    def _inputs(self, X: Any) -> Tensor:
        """Validated, standardised rows in double precision (N, F)."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return torch.as_tensor((X - self.x_mean_) / self.x_scale_)

    def _predictors(self) -> list[nn.Module]:
        """The networks as they predict; ours in double precision, where a row's result cannot depend on its batch."""
        if self.module is not None:
            return self.networks_
        return [copy.deepcopy(network).double() for network in self.networks_]

    def _passes(self) -> int:
        """Passes of each network, so that all together give `n_predict_passes`."""
        return max(2, -(-self.n_predict_passes // len(self.networks_)))

    # ---- folders

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator as a model folder: safetensors and JSON, no pickle."""
        check_is_fitted(self)
        params = {k: v for k, v in self.get_params(deep=False).items() if k not in ("module", "random_state")}
        fitted = {k: v for k, v in vars(self).items() if k.endswith("_") and k not in ("networks_", "objectives_")}
        networks = [
            {"architecture": describe(n), "state": dict(n.state_dict()), "objective": dict(o.state_dict())}
            for n, o in zip(self.networks_, self.objectives_, strict=True)
        ]
        content = {"kind": type(self).__name__, "params": _plain(params), "networks": networks}
        write_folder(path, content | {"fitted": {k: _plain(v) for k, v in fitted.items()}})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, module: Module | None = None) -> Self:
        """The fitted estimator in a folder written by `save`; `module` again where one of your own was used."""
        content = read_folder(path).content
        if content["kind"] != cls.__name__:
            raise ValueError(f"`path` must hold a {cls.__name__}; {str(path)!r} holds a {content['kind']}.")
        model = cls(**_array(content["params"]), module=module)
        for name, value in content["fitted"].items():
            setattr(model, name, _array(value))
        model.networks_, model.objectives_ = [], []
        for told in content["networks"]:
            if told["architecture"] is None or module is not None:
                if module is None:
                    raise ValueError(
                        "`module` must be given: the networks in the folder are of an architecture of yours."
                    )
                network = model._network(model.n_features_in_, model._n_outputs(), 0)
            else:
                network = build(told["architecture"])
            network.load_state_dict(told["state"])
            objective = model._objective()
            objective.load_state_dict(told["objective"])
            model.networks_.append(network.eval())
            model.objectives_.append(objective)
        return model

    @abstractmethod
    def _n_outputs(self) -> int:
        """Outputs of a network."""


# ------------------------------------------------------------------------------ helpers


_MANY = 2000  # rows from which on data regularise by themselves
# at hidden units and inputs, tried on few rows; masks of multiples of 1/256 cost the least
RATES = tuple((p / 256, q / 256) for p, q in ((13, 13), (13, 0), (5, 0), (1, 0)))
RATE_OF_MANY = 5 / 256
N_OF_FEW = 5  # networks where rows are few; one of many rows takes as long


def duration(settings: Any, n_rows: int) -> tuple[int, int, int | None]:
    """Batch size, epochs and patience of a training on `n_rows` rows; what an estimator has as None is chosen here.

    Few rows want small batches, as many small steps are then needed. Where rows are held out to pick the best epoch
    training may be long; where none are, few rows are best trained for about 2,000 steps.
    """
    held = n_held_out(settings, n_rows)
    batch_size, epochs, patience = settings.batch_size, settings.epochs, settings.patience
    if batch_size is None:
        batch_size = 32 if n_rows <= _MANY else 128
    if epochs is None:
        steps = 8000 if n_rows > _MANY else 4000 if held else 2000
        epochs = int(np.clip(round(steps * batch_size / n_rows), 40, 500))
    if patience is None:
        patience = max(1, epochs // 5)
    return batch_size, epochs, patience if held else None


def default_input_dropout(n_rows: int, dropout: float) -> float:
    """The rate at the inputs: that of the hidden units for few rows, 0 for many."""
    return dropout if n_rows <= _MANY else 0.0


def held_out_share(settings: Any, n_rows: int) -> float:
    """The share of the rows that early stopping looks at."""
    share: float | None = settings.validation_fraction
    if share is None:
        return 0.2 if n_rows <= _MANY else 0.1
    if not 0 <= share < 1:
        raise ValueError(f"`validation_fraction` must be None, or at least 0 and less than 1; got {share!r}.")
    return share


def n_held_out(settings: Any, n_rows: int) -> int:
    """Rows that early stopping looks at; none where they would be too few to tell anything."""
    held = round(n_rows * held_out_share(settings, n_rows))
    return held if held >= 5 else 0


def candidates(settings: Any, rows: Array, seed: int, *, alpha: float) -> Array:
    """The networks that an estimator of these settings chooses from, as members (networks, pairs of rates).

    There is one pair unless `dropout` is None and rows are few: many rows tell the rates less from each other, and
    trying them takes longer; without rows held out nothing tells. Each network has a seed and held-out rows of its own.
    """
    few, held = len(rows) <= _MANY, n_held_out(settings, len(rows))
    n = settings.n_ensemble
    if n is None:
        n = N_OF_FEW if few else 1
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 2**10:
        raise ValueError(f"`n_ensemble` must be None or a whole number from 1 to 1024; got {n!r}.")
    if settings.dropout is not None:
        pairs: Sequence[tuple[float, float]] = [(settings.dropout, default_input_dropout(len(rows), settings.dropout))]
    else:
        pairs = [(RATE_OF_MANY, 0.0)] if not few else RATES if held else RATES[:1]
    rates = dict.fromkeys((p, q if settings.input_dropout is None else settings.input_dropout) for p, q in pairs)
    facts = {"alpha": alpha, "length_scale": settings.length_scale}
    found = np.empty((n, len(rates)), dtype=object)
    for i, j in np.ndindex(found.shape):
        p, q = list(rates)[j]
        found[i, j] = replace(member(settings, rows, seed + i, facts | {"dropout": p}), input_dropout=q)
    return found


def train_together(
    settings: Any, x: Any, y: Any, members: Sequence[Member], likelihood: Likelihood, weight: Array | None = None
) -> Population:
    """The members, trained at once as an estimator of these settings would train each."""
    n_rows = max(len(m.train) + (0 if m.validation is None else len(m.validation)) for m in members)
    batch_size, epochs, patience = duration(settings, n_rows)
    return fit_population(
        x, y, members, epochs=epochs, hidden_layer_sizes=settings.hidden_layer_sizes, likelihood=likelihood,
        n_passes=settings.n_passes, batch_size=batch_size, patience=patience, sample_weight=weight,
        progress=bool(getattr(settings, "verbose", False)),
    )  # fmt: skip


def best_candidate(nll: Tensor, shape: tuple[int, ...]) -> list[int]:
    """Where, in a population of `candidates` of that shape, the networks stand whose held-out rows do best in the mean.

    Args:
        nll: Of the held-out rows after every epoch (E, M).
        shape: Networks, pairs of rates.

    >>> best_candidate(torch.tensor([[3.0, 2.0, 1.0, 5.0], [4.0, 1.0, 1.0, 2.0]]), (2, 2))
    [1, 3]
    """
    best = nll.nan_to_num(nan=torch.inf).amin(0).view(shape) if len(nll) else torch.zeros(shape)
    return (torch.arange(shape[0]) * shape[1] + best.mean(0).argmin()).tolist()


def member(settings: Any, rows: Array, seed: int, candidate: Mapping[str, float]) -> Member:
    """The network that an estimator of these settings would train on `rows`, as a member of a population.

    Args:
        settings: An estimator: its `input_dropout`, `learning_rate` and `validation_fraction` are taken.
        rows: Indices of its training rows; early stopping looks at those of them that `fit` would hold out.
        seed: The estimator's.
        candidate: alpha, dropout and length_scale.
    """
    shuffled = torch.as_tensor(rows)[order(len(rows), seed=seed, epoch=-1)]
    held = n_held_out(settings, len(rows))
    rate = settings.input_dropout
    return Member(
        train=shuffled[held:] if held else torch.as_tensor(rows), validation=shuffled[:held] if held else None,
        input_dropout=default_input_dropout(len(rows), candidate["dropout"]) if rate is None else rate,
        learning_rate=settings.learning_rate, seed=seed, **candidate,
    )  # fmt: skip


def standardiser(values: Array, weight: Array | None = None) -> tuple[Array, Array]:
    """Mean and standard deviation of every column; 1 for a column that is constant."""
    mean = np.average(values, axis=0, weights=weight)
    scale = np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weight))
    constant = scale <= 1e-12 * np.abs(mean) + 1e-300
    return mean, np.where(constant, 1.0, scale)


def seeded_mlp(sizes: Sequence[int], seed: int, *, dropout: float, input_dropout: float) -> nn.Sequential:
    """An `mlp` whose weights follow from `seed`, torch's generator untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mlp(sizes, dropout=dropout, input_dropout=input_dropout)


def _plain(value: Any) -> Any:
    """Arrays as what a model folder holds."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "fiub":
            return {"array": torch.as_tensor(value)}
        return {"strings": [str(v) for v in value], "object": value.dtype == object}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return tuple(_plain(v) for v in value) if isinstance(value, (tuple, list)) else value


def _array(value: Any) -> Any:
    """What `_plain` was given."""
    if isinstance(value, dict):
        if "array" in value:
            return value["array"].numpy()
        if "strings" in value:
            return np.array(value["strings"], dtype=object if value["object"] else None)
        return {k: _array(v) for k, v in value.items()}
    return value
