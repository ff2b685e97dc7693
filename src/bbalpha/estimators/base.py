"""What the scikit-learn estimators share: whole fits, standardisation, networks and their training, model folders."""

import copy
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data
from torch import Tensor, nn

from bbalpha.estimators.choices import (
    best_candidate,
    candidates,
    duration,
    effort_of,
    held_out_share,
    is_auto,
    promise,
    train_together,
)
from bbalpha.estimators.dealing import deal
from bbalpha.estimators.folders import read_content
from bbalpha.estimators.memory import Memory
from bbalpha.estimators.mixing import in_shares
from bbalpha.estimators.race import Candidate, Expert, Race
from bbalpha.estimators.screening import is_wide, telling_columns
from bbalpha.estimators.soundness import diverged, in_double, numbers_only, one_thread, settled, weights
from bbalpha.estimators.storing import Array, Module, Stored
from bbalpha.estimators.tables import TableEncoder, needs_encoding
from bbalpha.estimators.tails import fit_squash, squashed
from bbalpha.estimators.telling import telling
from bbalpha.training.bank import Likelihood, Member, initial_network, standardiser
from bbalpha.training.fitting import cosine, fit

_BLOCK = 2**16  # rows standardised at a time
FEW = 2000  # rows up to which one thread is quicker than two, and double precision costs little


class DropoutEstimator(Stored):
    """Standardisation, networks and their training; the likelihood is the subclass's."""

    _fitted_names = (
        *Stored._fitted_names, "networks_", "objectives_", "uses_module_", "x_mean_", "x_scale_", "x_squash_",
        "dropout_", "input_dropout_", "validation_curves_", "n_iter_", "shares_", "trials_", "scores_", "encoder_",
    )  # fmt: skip

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
            with numbers_only():
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
        scalers = [_scaler(X[:, [i]].astype(np.float64), average) for i in range(X.shape[1])]
        self.x_mean_, self.x_scale_ = (np.concatenate(part) for part in zip(*scalers, strict=True))
        self.x_squash_ = np.zeros((4, X.shape[1]))
        x = torch.empty(X.shape, dtype=torch.float32)
        for start in range(0, len(X), _BLOCK):
            x[start : start + _BLOCK] = self._standardised(X[start : start + _BLOCK])
        return x

    def _race(
        self, x: Tensor, targets: dict[bool, Tensor], shifts: dict[bool, Array], weight: Array | None,
        groups: Array | None, grid: list[Candidate], likelihoods: Sequence[Likelihood] = (),
    ) -> list[Expert]:  # fmt: skip
        """Choose among the candidates in `grid` and combine the winners, as `Race` has it.

        Long tails of `x` are squashed in place where that helps. `likelihoods` are those that the best candidates are
        tried under too.
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
        known = [targets[log].numpy() for log in sorted(targets)]
        asked = sorted((k, v) for k, v in self.get_params().items() if k != "verbose")
        memory = Memory.of(x.numpy(), *known, weight, asked, self.seed_, *folds)
        with one_thread(), telling(bool(self.verbose)) as teller:
            columns = self._columns(x, targets[False], folds) if is_wide(*x.shape) else None
            race = Race(
                x, targets, shifts, weight, folds, effort, self, self._score, self.seed_, teller.tell, memory, columns
            )
            self._squash_tails(race, sorted(grid, key=promise)[0])
            if not isinstance(self.budget, str):
                race.fit_into(float(self.budget), grid)
            teller.expect(sum(race.networks(grid)))
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

    def _squash_tails(self, race: Race, candidate: Candidate) -> None:
        """Put columns with long tails through asinh, in place, if one candidate does better by it on held-out rows."""
        squash = fit_squash(race.x.numpy())
        if not squash[1].any():
            return
        race.tell("columns with long tails: as they are, or through asinh", 0)
        bent = replace(race, x=torch.as_tensor(squashed(race.x.numpy(), squash)), memory=race.memory.part("asinh"))
        steps = race.effort.final_steps // 2  # short trainings favour what is squashed
        if bent.tried([candidate], steps)[0] < race.tried([candidate], steps)[0]:
            race.x.copy_(bent.x)
            race.memory, self.x_squash_ = bent.memory, squash
            race.__post_init__()

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
        width = max(len("candidate"), *(len(t["candidate"]) for t in rows))
        lines = [f"{'candidate':<{width}} {'heats':>9} {'final':>9} {'weight':>7}"]
        for t in rows:
            cells = [f"{t[k]:9.3f}" if np.isfinite(t[k]) else " " * 8 + "-" for k in ("nll", "final_nll")]
            lines.append(f"{t['candidate']:<{width}} {' '.join(cells)} {t['weight']:7.2f}")
        bent = int((self.x_squash_[1] > 0).sum())
        lines += [f"{bent} columns with long tails go in through asinh."] * bool(bent)
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
        every = members.ravel().tolist()
        population = train_together(self, x, target, every, self._likelihood(), weight, standardise=False)
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
    def _score(self, expert: Expert, x: Tensor, targets: dict[bool, Tensor]) -> Array:
        """Log-density of its held-out rows under an expert (n,)."""

    @abstractmethod
    def _likelihood(self) -> Likelihood:
        """As a population has it."""

    def _inputs(self, X: Any) -> Tensor:
        """Validated, standardised rows in double precision (N, F)."""
        check_is_fitted(self)
        if self.encoder_ is None:
            with numbers_only():
                rows = validate_data(self, X, reset=False, dtype=np.float64)
            return self._standardised(rows)
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
        return torch.as_tensor(squashed((X - self.x_mean_) / self.x_scale_, self.x_squash_))

    def _passes(self) -> list[int]:
        """Passes of each network, by its share."""
        return in_shares(max(self._passes_asked(), 2 * len(self.shares_)), self.shares_)

    def __sklearn_is_fitted__(self) -> bool:
        return "networks_" in vars(self)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = self.module is None
        return tags


def _scaler(column: Array, average: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Mean and scale of a column (N, 1), each (1,); of two values half their distance, however rare one is.

    A gap in one row of a hundred would stand ten deviations out, and a network goes anywhere out there.
    """
    mean, scale = standardiser(column, average)
    low, high = column.min(), column.max()
    two = low < high and bool(((column == low) | (column == high)).all())
    return mean, np.full(1, (high - low) / 2) if two else scale


def load_estimator(path: str | os.PathLike[str], *, module: Module | None = None) -> Any:
    """The estimator in a folder written by `save`, of whichever class it is."""
    kind = read_content(path)["kind"]
    for estimator in DropoutEstimator.__subclasses__():
        if kind == estimator.__name__:
            return estimator.load(path, module=module)
    raise ValueError(f"`path` must hold an estimator; {str(path)!r} holds a {kind}.")
