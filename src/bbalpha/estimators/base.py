"""What the scikit-learn estimators share: whole fits, standardisation, networks and their training, model folders."""

import copy
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data
from torch import Tensor, nn
from tqdm.auto import tqdm

from bbalpha.checkpoint import build, describe, write_folder
from bbalpha.checks import RULES, check_count, check_settings
from bbalpha.estimators.choices import (
    best_candidate,
    candidates,
    duration,
    effort_of,
    held_out_share,
    is_auto,
    train_together,
)
from bbalpha.estimators.folders import array_of, plain, read_content, whole
from bbalpha.estimators.race import Candidate, Expert, Race, deal, in_shares
from bbalpha.estimators.screening import is_wide, telling_columns
from bbalpha.estimators.soundness import diverged, in_double, one_thread, settled, weights
from bbalpha.estimators.tables import TableEncoder, needs_encoding
from bbalpha.training.bank import Likelihood, Member, initial_network, standardiser
from bbalpha.training.fitting import cosine, fit

Array = NDArray[Any]
Module = nn.Module | Callable[[int, int], nn.Module]
_OPTIONAL = ("dropout", "input_dropout", "epochs", "batch_size", "n_ensemble", "validation_fraction", "patience")
_BLOCK = 2**16  # rows standardised at a time
FEW = 2000  # rows up to which one thread is quicker than two, and double precision costs little
_CHOSEN = ("alpha", "hidden_layer_sizes", "dropout", "input_dropout", "length_scale")  # may be "auto"


def keep_arguments(estimator: Any, given: Mapping[str, Any]) -> None:
    """Set what the constructor of `estimator` was given, its `locals()`, as attributes, as scikit-learn wants it."""
    vars(estimator).update({name: value for name, value in given.items() if name not in ("self", "__class__")})


class WholeFit(BaseEstimator, ABC):
    """An estimator whose fitted state changes at once, at the end of `fit`, or not at all."""

    # all that a fit may set: what one of them does not set is not left over from another
    _fitted_names: ClassVar[tuple[str, ...]] = ("n_features_in_", "feature_names_in_", "seed_")

    def _fit_whole(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> Self:
        """Fit another of this kind with the same settings, checked, and take over what it has learnt."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self._unfitted() | self._checked())
        other._fit(X, y, sample_weight, groups)
        learnt = {name: value for name, value in vars(other).items() if name in self._fitted_names}
        self.__dict__ = self._unfitted() | learnt  # one step: an interrupt comes before it or after it
        return self

    def _unfitted(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._fitted_names}

    def _checked(self) -> dict[str, Any]:
        """The settings that have a rule, as Python's own numbers."""
        left = [k for k in _CHOSEN if k in vars(self) and isinstance(vars(self)[k], str) and vars(self)[k] == "auto"]
        given = {k: v for k, v in vars(self).items() if k in RULES and k not in left}
        return check_settings(given, optional=_OPTIONAL) | {k: None for k in left if "dropout" in k}

    @abstractmethod
    def _fit(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> None:
        """Set all fitted attributes."""


class DropoutEstimator(WholeFit):
    """Standardisation, networks and their training; the likelihood is the subclass's."""

    _fitted_names = (
        *WholeFit._fitted_names, "networks_", "objectives_", "uses_module_", "x_mean_", "x_scale_", "dropout_",
        "input_dropout_", "validation_curves_", "n_iter_", "shares_", "trials_", "scores_", "encoder_",
    )  # fmt: skip
    networks_: list[nn.Module]
    objectives_: list[Any]
    encoder_: TableEncoder | None
    scores_: Array | None

    def _checked(self) -> dict[str, Any]:
        if self.module is not None and not callable(self.module):
            raise ValueError(f"`module` must be an nn.Module or a function that makes one; got {self.module!r}.")
        return super()._checked()

    def _automatic(self) -> bool:
        """Whether anything of the network is left to the race."""
        chosen = (self.hidden_layer_sizes, self.alpha, self.length_scale, getattr(self, "noise", "constant"))
        return self.module is None and any(map(is_auto, chosen))

    def _read(self, X: Any, y: Any, sample_weight: Any, **rules: Any) -> tuple[Array, Array, Array | None]:
        """The table as numbers (N, F), by an encoder where it holds anything else, the targets, and weights."""
        self.encoder_ = None
        if self.module is not None or not needs_encoding(X):
            rows, y = validate_data(self, X, y, dtype=[np.float64, np.float32], **rules)
            return rows, y, weights(sample_weight, rows)
        validate_data(self, X, y, skip_check_array=True)  # notes the names
        weight = weights(sample_weight, np.empty((len(X), 1)))
        self.encoder_ = TableEncoder.fit(X, weight)
        rows, y = check_X_y(self.encoder_.transform(X), y, dtype=[np.float64, np.float32], **rules)
        return rows, y, weight

    def _scale(self, X: Array, weight: Array | None) -> Tensor:
        """Fit the scalers of X; standardised rows (N, F)."""
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 2**10))
        average = partial(np.average, axis=0, weights=weight)
        # column by column: a table in single precision is not copied to double
        scalers = [standardiser(X[:, [i]].astype(np.float64), average) for i in range(X.shape[1])]
        self.x_mean_, self.x_scale_ = (np.concatenate(part) for part in zip(*scalers, strict=True))
        x = torch.empty(X.shape, dtype=torch.float32)
        for start in range(0, len(X), _BLOCK):
            x[start : start + _BLOCK] = self._standardised(X[start : start + _BLOCK])
        return x

    def _race(
        self, x: Tensor, targets: dict[bool, Tensor], shifts: dict[bool, Array], weight: Array | None,
        groups: Array | None, grid: list[Candidate], likelihoods: Sequence[Likelihood] = (),
    ) -> list[Expert]:  # fmt: skip
        """Choose among the candidates in `grid` and combine the winners, as `Race` has it.

        `likelihoods` are those that the best candidates are tried under too.
        """
        self.uses_module_ = False
        effort = effort_of(self.budget).on_rows(len(x))
        if self.validation_fraction == 0:
            raise ValueError("`validation_fraction` must be above 0 where anything is left to choose; got 0.")
        if len(x) < 2:
            raise ValueError("`X` must have at least 2 rows, so that one can be held out; got n_samples=1.")
        n_parts = round(1 / self.validation_fraction) if self.validation_fraction else effort.n_networks
        n_units = len(x) if groups is None else len(np.unique(groups))
        n_parts = max(2, min(max(n_parts, self.n_ensemble or 0), n_units))
        folds = deal(len(x), n_parts, self.seed_, groups)[: self.n_ensemble or n_parts]
        effort = replace(effort, n_networks=len(folds))
        tell = partial(tqdm.write, file=sys.stderr) if self.verbose else lambda text: None
        with one_thread():
            columns = self._columns(x, targets[False], folds) if is_wide(*x.shape) else None
            score = self._score(x, targets)
            race = Race(x, targets, shifts, weight, folds, effort, self, score, self.seed_, tell, columns)
            if not isinstance(self.budget, str):
                race.fit_into(float(self.budget), grid)
            experts, self.shares_ = race.run(grid, likelihoods)
        if not experts:
            raise diverged(self)
        self.networks_ = [e.network for e in experts]
        self.validation_curves_ = [e.curve for e in experts]
        self.n_iter_ = max(len(e.curve) for e in experts)
        best = experts[int(self.shares_.argmax())].candidate
        self.dropout_, self.input_dropout_ = best.dropout, best.input_dropout
        self.trials_ = [trial.told() for trial in race.trials]
        return experts

    def _columns(self, x: Tensor, target: Tensor, folds: list[Array]) -> list[Array]:
        """Of a wide table, the columns that the rows which a network trains on speak for, by fold."""
        wanted = target if target.is_floating_point() else nn.functional.one_hot(target).float()
        found = []
        for held in folds:
            seen = np.setdiff1d(np.arange(len(x)), held)
            found.append(telling_columns(x[seen].numpy(), wanted[seen].reshape(len(seen), -1).numpy()))
        return found

    def summary(self) -> str:
        """What was tried and how it fared, as a table: held-out NLL a row after the heats and the final, and weight."""
        check_is_fitted(self)
        head = f"{type(self).__name__}: {len(self.networks_)} networks"
        if not self.trials_:
            return f"{head} of one kind; nothing was left to choose but dropout ({self.dropout_:.3f})."
        rows = sorted(self.trials_, key=lambda t: (-t["weight"], np.nan_to_num(t["final_nll"], nan=np.inf), t["nll"]))
        lines = [f"{'candidate':<66} {'heats':>9} {'final':>9} {'weight':>7}"]
        for t in rows:
            cells = [f"{t[k]:9.3f}" if np.isfinite(t[k]) else " " * 8 + "-" for k in ("nll", "final_nll")]
            lines.append(f"{t['candidate']:<66} {' '.join(cells)} {t['weight']:7.2f}")
        return "\n".join([f"{head}, held-out NLL a row:", *lines])

    def _train(self, X: Array, target: Tensor, weight: Array | None, groups: Array | None) -> None:
        """Fit scalers of X and the networks to standardised rows."""
        x = self._scale(X, weight)
        self.trials_, self.scores_ = [], None
        members = candidates(self, np.arange(len(x)), self.seed_, alpha=self.alpha, groups=groups)
        self.dropout_, self.input_dropout_ = members[0, 0].dropout, members[0, 0].input_dropout
        self.uses_module_ = self.module is not None
        if members.size > 1 and not self.uses_module_:
            self._train_together(x, target, weight, members)
        else:
            data = (x, target) if weight is None else (x, target, torch.as_tensor(weight, dtype=torch.float32))
            self._train_apart(data, members[:, 0].tolist(), groups)
        blind = any(len(curve) and not np.isfinite(curve).any() for curve in self.validation_curves_)
        if blind or not all(map(settled, self.networks_, self.objectives_)):
            raise diverged(self)
        self.shares_ = np.full(len(self.networks_), 1 / len(self.networks_))

    def _train_apart(self, data: tuple[Tensor, ...], members: Sequence[Member], groups: Array | None) -> None:
        """Networks of any kind, one after the other."""
        n_rows, n_inputs = data[0].shape
        batch_size, epochs, patience = duration(self, n_rows)
        self.networks_, self.objectives_, histories = [], [], []
        for member in members:
            seed, train = member.seed, data
            held: Any = None if patience is None else held_out_share(self, n_rows)
            if groups is not None and member.validation is not None:
                train, held = (tuple(t[rows] for t in data) for rows in (member.train, member.validation))
            network, objective = self._network(n_inputs, self._n_outputs(), member), self._objective()
            try:
                history = fit(
                    network, train, objective=objective, epochs=epochs, n_passes=self.n_passes, batch_size=batch_size,
                    length_scale=self.length_scale, learning_rate=self.learning_rate, schedule=cosine,
                    validation=held, patience=patience if held is not None else None,
                    balanced=self.balanced, progress=bool(self.verbose), seed=seed,
                )  # fmt: skip
            except ValueError as error:
                if settled(network, objective):
                    raise
                raise diverged(self) from error
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

    def _network(self, n_inputs: int, n_outputs: int, member: Member) -> nn.Module:
        if self.module is None:
            sizes = [n_inputs, *self.hidden_layer_sizes, n_outputs]
            return initial_network(sizes, member)
        if isinstance(self.module, nn.Module):
            return copy.deepcopy(self.module)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(member.seed)
            made: nn.Module = copy.deepcopy(self.module(n_inputs, n_outputs))  # it may keep the one that it made
        return made

    @abstractmethod
    def _objective(self) -> nn.Module:
        """A fresh objective."""

    @abstractmethod
    def _score(self, x: Tensor, targets: dict[bool, Tensor]) -> Callable[[Expert], Array]:
        """Log-density of its held-out rows under an expert (n,)."""

    @abstractmethod
    def _likelihood(self) -> Likelihood:
        """As a population has it."""

    def _inputs(self, X: Any) -> Tensor:
        """Validated, standardised rows in double precision (N, F)."""
        check_is_fitted(self)
        if self.encoder_ is None:
            return self._standardised(validate_data(self, X, reset=False, dtype=np.float64))
        validate_data(self, X, reset=False, skip_check_array=True)
        return self._standardised(self.encoder_.transform(X).astype(np.float64, copy=False))

    def _precise(self, network: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
        """A network and rows as they predict: in double precision, so that a row alone is as it is among others.

        A network of the user's is left as it is; many rows at once go in single precision, 2.5 times as fast.
        """
        if self.uses_module_ or len(x) > FEW:
            return network, x.float()
        return in_double(network), x

    def unseen(self, X: Any) -> Array:
        """How many cells of each row are of a kind that no row had at `fit`: new categories, new gaps (N,)."""
        rows = self._inputs(X)
        return np.zeros(len(rows), dtype=np.int64) if self.encoder_ is None else self.encoder_.unseen(X)

    def _standardised(self, X: Array) -> Tensor:
        return torch.as_tensor((X - self.x_mean_) / self.x_scale_)

    def _passes(self) -> list[int]:
        """Passes of each network, by its share."""
        total = check_count("n_predict_passes", self.n_predict_passes)
        return in_shares(max(total, 2 * len(self.shares_)), self.shares_)

    def __sklearn_is_fitted__(self) -> bool:
        return "networks_" in vars(self)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = self.module is None
        return tags

    # ---- folders

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator as a model folder: safetensors and JSON, no pickle."""
        check_is_fitted(self)
        params = {k: v for k, v in self.get_params(deep=False).items() if k not in ("module", "random_state")}
        if isinstance(params.get("class_weight"), Mapping):  # JSON has names of text alone; a model is not fitted by it
            params["class_weight"] = None
        names = [k for k in self._fitted_names if k in vars(self) and k not in ("networks_", "objectives_")]
        networks = [
            {"architecture": describe(n), "state": dict(n.state_dict()), "objective": dict(o.state_dict())}
            for n, o in zip(self.networks_, self.objectives_, strict=True)
        ]
        content = {"kind": type(self).__name__, "params": plain(params), "networks": networks}
        fitted = {k: v.content() if isinstance(v := vars(self)[k], TableEncoder) else v for k in names}
        write_folder(path, content | {"fitted": {k: plain(v) for k, v in fitted.items()}})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, module: Module | None = None) -> Self:
        """The fitted estimator in a folder written by `save`; `module` again where one of your own was used."""
        content = read_content(path)
        if content["kind"] != cls.__name__:
            raise ValueError(f"`path` must hold a {cls.__name__}; {str(path)!r} holds a {content['kind']}.")
        with whole(path):
            # as folders were that do not say
            unbalanced: dict[str, Any] = {"balanced": False}
            model = cls(**(unbalanced | array_of(content["params"])), module=module)
            fitted = array_of(content["fitted"])
            older = {"uses_module_": module is not None, "noise_": getattr(model, "noise", None)}  # folders lack these
            if "encoder_" not in fitted:  # written before there was an automatic choice
                n = len(content["networks"])
                older |= {"shares_": np.full(n, 1 / max(1, n)), "heavy_": np.zeros(n, bool), "log_target_": False}
                older |= {"trials_": (), "scores_": None, "encoder_": None}
            older = {name: value for name, value in older.items() if name in cls._fitted_names}
            model.__dict__.update({**older, **fitted})
            told_of_columns = vars(model)["encoder_"]
            model.encoder_ = None if told_of_columns is None else TableEncoder.of(told_of_columns)
            told = content["networks"]
            foreign = any(one["architecture"] is None for one in told)
        if foreign and module is None:
            raise ValueError("`module` must be given: the networks in the folder are of an architecture of yours.")
        networks = (
            []
            if module is None
            else [model._network(model.n_features_in_, model._n_outputs(), Member(())) for _ in told]
        )
        with whole(path):
            model.networks_ = networks or [build(one["architecture"], one["state"]) for one in told]
            model.objectives_ = [model._objective() for _ in told]
            for one, network, objective in zip(told, model.networks_, model.objectives_, strict=True):
                network.eval().load_state_dict(one["state"])
                objective.load_state_dict(one["objective"])
            model._check_whole()
        return model

    def _check_whole(self) -> None:
        """Refuse what a folder says if it does not fit together, before anything is predicted with it."""
        kind, needed = type(self).__name__, set(self._fitted_names) - {"feature_names_in_", "precision_"}
        odd = set(vars(self)) - set(self._fitted_names) - set(self.get_params(deep=False)) or needed - set(vars(self))
        if odd or not self.networks_:
            raise ValueError(
                f"A {kind} must hold what its fit sets; {min(odd, default='networks_')!r} is odd or missing."
            )
        if not isinstance(self.uses_module_, bool):
            raise ValueError(f"`uses_module_` of a {kind} must be True or False; got {self.uses_module_!r}.")
        check_count("seed_", self.seed_, least=0)
        check_count("n_predict_passes", self.n_predict_passes)
        for name in ("x_mean_", "x_scale_", "y_mean_", "y_scale_", "precision_", "shares_"):
            value = vars(self).get(name, np.ones(1))
            if not isinstance(value, np.ndarray) or value.dtype != np.float64 or not np.isfinite(value).all():
                raise ValueError(f"`{name}` of a {kind} must hold finite numbers; got {value!r}.")
        if (self.shares_ < 0).any() or abs(self.shares_.sum() - 1) > 1e-6:
            raise ValueError(f"`shares_` of a {kind} must be weights that sum to 1; got {self.shares_!r}.")
        columns = (check_count("n_features_in_", self.n_features_in_),)
        features = columns if self.encoder_ is None else (len(self.encoder_.names),)
        shapes = {"x_mean_": features, "x_scale_": features, "feature_names_in_": columns}
        shapes["shares_"] = (len(self.networks_),)
        for name, shape in (shapes | self._shapes(torch.zeros(1, *features, dtype=torch.float64))).items():
            if np.shape(vars(self).get(name, np.empty(shape))) != shape:
                raise ValueError(f"`{name}` of a {kind} must have the shape {shape}; got {np.shape(vars(self)[name])}.")
        if not all(map(settled, self.networks_, self.objectives_)):
            raise ValueError(f"The weights of a {kind} must be finite; got nan or infinity.")

    @abstractmethod
    def _shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        """Of the fitted arrays of the subclass, as the networks have it at `x` (1, F)."""

    @abstractmethod
    def _n_outputs(self) -> int:
        """Outputs of a network."""


def load_estimator(path: str | os.PathLike[str], *, module: Module | None = None) -> Any:
    """The estimator in a folder written by `save`, of whichever class it is."""
    kind = read_content(path)["kind"]
    for estimator in DropoutEstimator.__subclasses__():
        if kind == estimator.__name__:
            return estimator.load(path, module=module)
    raise ValueError(f"`path` must hold an estimator; {str(path)!r} holds a {kind}.")
