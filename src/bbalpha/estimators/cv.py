"""`BBAlphaRegressorCV` and `BBAlphaClassifierCV`: alpha, dropout and prior chosen by cross-validation.

All candidates on all folds are trained at once, as one population; the best by held-out log-likelihood is
fitted again on all rows, the way RidgeCV does. With a network of one's own they are trained one after the other. Those,
and the folds of a large table, are handed to joblib: a `joblib.parallel_config` spreads them, to the same bits.

    model = BBAlphaRegressorCV(alphas=(0, 0.5, 1), dropouts=(0.01, 0.05)).fit(X, y)
    model.alpha_, model.dropout_, model.cv_results_["mean_test_score"]
    model.save("model"); BBAlphaRegressorCV.load("model")
"""

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold, check_cv
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from bbalpha._spread import spread
from bbalpha.checkpoint import read_folder, write_folder
from bbalpha.checks import RULES, check_count
from bbalpha.estimators.base import DropoutEstimator
from bbalpha.estimators.choices import LIKELIHOODS_OF, member, random_rates, train_together
from bbalpha.estimators.classifier import BBAlphaClassifier, Classification, class_indices
from bbalpha.estimators.dealing import same_records
from bbalpha.estimators.folders import read_content
from bbalpha.estimators.regressor import BBAlphaRegressor, Regression
from bbalpha.estimators.soundness import check_groups, diverged, targets, weights
from bbalpha.estimators.storing import Array, Module
from bbalpha.estimators.whole import WholeFit, keep_arguments
from bbalpha.training.bank import Likelihood
from bbalpha.training.population import Member

DROPOUTS = (0.01, 0.05, 0.2)
_LARGE = 20_000  # rows from which on a fold fills the products by itself, and is trained apart
Folds = Sequence[tuple[Array, Array]]
Candidates = Sequence[dict[str, Any]]


class _Search(WholeFit):
    """The search; what is fitted in the end is the subclass's."""

    _fitted_names = (
        *WholeFit._fitted_names, "best_estimator_", "best_score_", "cv_results_", "alpha_", "dropout_", "length_scale_",
    )  # fmt: skip
    best_estimator_: Any
    _kind: ClassVar[type[DropoutEstimator]]

    def _checked(self) -> dict[str, Any]:
        if self.module is not None and not callable(self.module):
            raise ValueError(f"`module` must be an nn.Module or a function that makes one; got {self.module!r}.")
        if self.module is not None and self.dropouts is not None:
            raise ValueError(
                f"`dropouts` must be None with a `module`, whose rates are its own; got {self.dropouts!r}."
            )
        lists: dict[str, Any] = {}
        for name, one in (("alphas", "alpha"), ("dropouts", "dropout"), ("length_scales", "length_scale")):
            values = getattr(self, name)
            if name == "dropouts" and values is None:
                lists[name] = DROPOUTS if self.module is None else None
                continue
            lists[name] = list(values) if isinstance(values, Iterable) else []
            if not lists[name]:
                raise ValueError(f"`{name}` must be a list that holds at least one value; got {values!r}.")
            lists[name] = [RULES[one](f"{name}[{i}]", value) for i, value in enumerate(lists[name])]
        if isinstance(self.cv, (int, np.integer)):
            lists["cv"] = check_count("cv", self.cv, least=2)
        return super()._checked() | lists

    def _search(
        self, X: Array, y: Array, weight: Array | None, likelihood: Likelihood, groups: Array | None
    ) -> dict[str, float]:
        """Score every candidate on every fold; sets `cv_results_` and returns the best candidate."""
        candidates: list[dict[str, Any]] = [
            {"alpha": a, "dropout": p, "length_scale": s}
            for a, p, s in product(self.alphas, self.dropouts or (None,), self.length_scales)
        ]
        self.seed_ = int(check_random_state(self.random_state).randint(2**30))
        folds = self._folds(X, y, likelihood, groups)
        score = self._scores if self.module is None else self._scores_apart
        means = score(X, y, weight, likelihood, folds, candidates, groups)
        scores = np.reshape(means, (len(folds), len(candidates))).T
        scores = np.where(np.isfinite(scores), scores, -np.inf)  # what diverged loses
        if not np.isfinite(scores.mean(1).max()):
            raise diverged(self)
        self._tell(candidates, scores)
        return candidates[int(scores.mean(1).argmax())]

    def _tell(self, candidates: Candidates, scores: Array) -> None:
        """Set what the search has found: scores (candidates, folds)."""
        self.cv_results_ = _results(candidates, scores)
        mean = scores.mean(1)
        best, self.best_score_ = candidates[int(mean.argmax())], float(mean.max())
        self.alpha_, self.dropout_, self.length_scale_ = best["alpha"], best["dropout"], best["length_scale"]

    def _scores(
        self, X: Array, y: Array, weight: Array | None, likelihood: Likelihood, folds: Folds, candidates: Candidates,
        groups: Array | None,
    ) -> list[float]:  # fmt: skip
        """Mean held-out log-likelihood of every candidate, fold by fold, all trained at once."""
        # candidates of a fold side by side: those of one rate share their masks
        work = [
            [(member(self, train, self.seed_ + i, c, groups), test) for c in candidates]
            for i, (train, test) in enumerate(folds)
        ]
        for one, _ in chain(*work):
            random_rates(self, [(one.dropout, one.input_dropout)])
        parts = work if len(X) >= _LARGE else [list(chain(*work))]
        return list(chain(*spread(partial(_trained_scores, self, X, y, weight, likelihood), parts)))

    def _scores_apart(
        self, X: Array, y: Array, weight: Array | None, likelihood: Likelihood, folds: Folds, candidates: Candidates,
        groups: Array | None,
    ) -> list[float]:  # fmt: skip
        """The same for a network of one's own: as `_kind` trains each, one after the other."""
        pieces = [(i, *fold, c) for i, fold in enumerate(folds) for c in candidates]
        return list(spread(partial(self._score_apart, X, y, weight, groups), pieces))

    def _score_apart(
        self, X: Array, y: Array, weight: Array | None, groups: Array | None,
        piece: tuple[int, Array, Array, dict[str, Any]],
    ) -> float:  # fmt: skip
        """Of a fold, its training and held-out rows and a candidate."""
        i, train, test, candidate = piece
        model = self._kind(**self._final(candidate) | {"random_state": self.seed_ + i, "n_ensemble": 1})
        try:
            parts = (None if part is None else part[train] for part in (weight, groups))
            model.fit(X[train], y[train], *parts)
        except ValueError as error:
            if str(error) != str(diverged(model)):
                raise
            return -np.inf
        return _mean(self._log_prob(model, X[test], y[test]), weight, test)

    @abstractmethod
    def _log_prob(self, model: Any, X: Array, y: Array) -> Array:
        """Of rows under an estimator of `_kind` (N,)."""

    def _folds(self, X: Array, y: Array, likelihood: Likelihood, groups: Array | None) -> Folds:
        """Training and held-out rows of every fold; an overlap is an error, whoever made the folds."""
        cv = self.cv
        if isinstance(cv, int):
            by_class = likelihood == "categorical"
            kind: Any = StratifiedKFold if by_class else KFold
            if groups is not None and len(np.unique(groups)) >= cv:
                kind = StratifiedGroupKFold if by_class else GroupKFold
            cv = kind(cv, shuffle=True, random_state=self.seed_)
        folds = list(check_cv(cv, y, classifier=likelihood == "categorical").split(X, y, groups))
        _check_folds(folds, len(X))
        _check_apart(folds)
        return folds

    def _final(self, best: dict[str, float]) -> dict[str, Any]:
        """Arguments of the estimator that is fitted on all rows."""
        own = ("alphas", "dropouts", "length_scales", "cv")
        shared = {name: value for name, value in self.get_params(deep=False).items() if name not in own}
        return shared | best | {"random_state": self.seed_}

    def predictive(self, X: Any) -> Any:
        """The predictive distribution itself, of the estimator that was fitted on all rows."""
        return self._fitted().predictive(X)

    def __sklearn_is_fitted__(self) -> bool:
        return "best_estimator_" in vars(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the estimator that was fitted on all rows, which `load_estimator` reads, and what the search found."""
        best = self._fitted()
        search = {
            "kind": type(self).__name__,
            "candidates": self.cv_results_["params"],
            "scores": torch.as_tensor(np.stack(_splits(self.cv_results_), 1)),
            "seed": self.seed_,
            "cv": int(self.cv) if isinstance(self.cv, (int, np.integer)) else None,
        }
        with TemporaryDirectory() as place:
            best.save(os.path.join(place, "best"))
            content = read_folder(os.path.join(place, "best")).content
        write_folder(path, content | {"search": search})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, module: Module | None = None) -> Self:
        """The fitted search in a folder written by `save`; `module` again where one of your own was used.

        `random_state`, and `cv` where it is no number, are not kept.
        """
        content = read_content(path)
        search: Any = content.get("search")
        held = search.get("kind") if isinstance(search, dict) else content["kind"]
        if held != cls.__name__:
            raise ValueError(f"`path` must hold a {cls.__name__}; {str(path)!r} holds a {held}.")
        best = cls._kind.load(path, module=module)
        try:
            candidates, scores = search["candidates"], search["scores"].numpy()
            lists = {f"{name}s": tuple(dict.fromkeys(c[name] for c in candidates)) for name in candidates[0]}
            if lists["dropouts"] == (None,):
                lists["dropouts"] = None  # type: ignore[assignment]
            shared = {k: v for k, v in best.get_params(deep=False).items() if k in cls().get_params(deep=False)}
            found = cls(**shared | lists | {"cv": 5 if search["cv"] is None else search["cv"]})
            found._tell(candidates, scores)
            found.seed_ = check_count("seed", search["seed"], least=0)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"`path` must hold a whole {cls.__name__}; {str(path)!r} does not: {error!r}.") from error
        found.best_estimator_ = best
        rest = set(cls._fitted_names) & set(vars(best)) - set(vars(found))
        found.__dict__.update({name: vars(best)[name] for name in rest})
        return found

    def _fitted(self) -> Any:
        """The estimator that was fitted on all rows."""
        check_is_fitted(self)
        return self.best_estimator_


class BBAlphaRegressorCV(Regression, _Search):
    """`BBAlphaRegressor` with alpha, dropout and prior chosen by cross-validated log-likelihood.

    Args:
        alphas: Candidates.
        dropouts: Candidates for the rate at hidden units; None is (0.01, 0.05, 0.2), and what is wanted with a
            `module`, whose rates are its own.
        length_scales: Candidates for l of the prior.
        cv: Number of folds (shuffled), or a scikit-learn splitter.
        hidden_layer_sizes: This and what follows as in `BBAlphaRegressor`, in the search too, where a candidate is one
            network; those of a `module` are trained one after the other.

    Attributes:
        alpha_: The best of the candidates; `dropout_` and `length_scale_` likewise.
        best_score_: Its mean held-out log-likelihood a row, in units of y.
        cv_results_: As in GridSearchCV.
        best_estimator_: The BBAlphaRegressor fitted on all rows.

    >>> X = np.linspace(-1, 1, 60)[:, None]
    >>> model = BBAlphaRegressorCV(alphas=(0, 1), dropouts=(0.01, 0.5), cv=3, epochs=20, random_state=0)
    >>> model.fit(X, X[:, 0]).dropout_
    0.01
    """

    _fitted_names = (*_Search._fitted_names, "y_ndim_")
    _kind = BBAlphaRegressor

    def __init__(
        self,
        alphas: Sequence[float] = (0.0, 0.5, 1.0),
        dropouts: Sequence[float] | None = None,
        *,
        length_scales: Sequence[float] = (1.0,),
        cv: Any = 5,
        hidden_layer_sizes: int | Sequence[int] = (50,),
        input_dropout: float | None = None,
        n_passes: int = 10,
        n_predict_passes: int = 100,
        balanced: bool = True,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 0.01,
        noise: Literal["constant", "heteroscedastic"] = "constant",
        n_ensemble: int | None = None,
        validation_fraction: float | None = None,
        patience: int | None = None,
        module: Module | None = None,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        keep_arguments(self, locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Choose by cross-validation within `X` (N, F) and `y` (N,) or (N, D), then fit on all of it.

        Rows of one of the `groups` (N,) are held out together, as are rows that are there more than once.
        """
        return self._fit_whole(X, y, sample_weight, groups)

    def _fit(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> None:
        rows, target = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        weight = weights(sample_weight, rows)
        table, groups = targets(target), check_groups(groups, len(rows))
        groups = same_records(rows, table) if groups is None else groups
        best = self._search(rows, table, weight, LIKELIHOODS_OF[self.noise][0], groups)
        self.y_ndim_ = target.ndim
        self.best_estimator_ = BBAlphaRegressor(**self._final(best)).fit(X, y, weight, groups)

    def _log_prob(self, model: Any, X: Array, y: Array) -> Array:
        scores: Array = model.log_prob(X, y)
        return scores


class BBAlphaClassifierCV(Classification, _Search):
    """`BBAlphaClassifier` with alpha, dropout and prior chosen by cross-validated log-likelihood.

    Arguments and attributes are those of `BBAlphaRegressorCV`; folds are stratified.

    >>> X = np.linspace(-1, 1, 60)[:, None]
    >>> model = BBAlphaClassifierCV(alphas=(0, 1), dropouts=(0.05,), cv=3, epochs=20, random_state=0)
    >>> model.fit(X, X[:, 0] > 0).predict([[-0.9], [0.9]])
    array([False,  True])
    """

    _fitted_names = (*_Search._fitted_names, "classes_")
    _kind = BBAlphaClassifier

    def __init__(
        self,
        alphas: Sequence[float] = (0.0, 0.5, 1.0),
        dropouts: Sequence[float] | None = None,
        *,
        length_scales: Sequence[float] = (1.0,),
        cv: Any = 5,
        hidden_layer_sizes: int | Sequence[int] = (50,),
        input_dropout: float | None = None,
        n_passes: int = 10,
        n_predict_passes: int = 100,
        balanced: bool = True,
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
        keep_arguments(self, locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Choose by cross-validation within `X` (N, F) and labels `y` (N,), then fit on all of it; as the regressor."""
        return self._fit_whole(X, y, sample_weight, groups)

    def _fit(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> None:
        rows, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        weight = weights(sample_weight, rows)
        groups = same_records(rows) if groups is None else check_groups(groups, len(rows))
        best = self._search(rows, class_indices(labels)[1], weight, "categorical", groups)
        self.best_estimator_ = BBAlphaClassifier(**self._final(best)).fit(X, y, weight, groups)
        self.classes_ = self.best_estimator_.classes_

    def predict_passes(self, X: Any) -> Array:
        """As in `BBAlphaClassifier`, of the estimator that was fitted on all rows (K, N, C)."""
        passes: Array = self._fitted().predict_passes(X)
        return passes

    def _log_prob(self, model: Any, X: Array, y: Array) -> Array:
        unknown = np.setdiff1d(y, model.classes_)
        if len(unknown):
            raise ValueError("`cv` must train on every class that it holds out; a fold lacks one.")
        scores: Array = model.predict_log_proba(X)[np.arange(len(y)), np.searchsorted(model.classes_, y)]
        return scores


def _trained_scores(
    settings: _Search, X: Array, y: Array, weight: Array | None, likelihood: Likelihood,
    work: Sequence[tuple[Member, Array]],
) -> list[float]:  # fmt: skip
    """The mean held-out log-likelihood of each of these networks, trained at once."""
    members = [one for one, _ in work]
    population = train_together(settings, X, y, members, likelihood, weight, standardise=True)
    held = [test for _, test in work]
    values = population.log_likelihood(X, y, held, n_passes=settings.n_predict_passes)
    return [_mean(v.double().numpy(), weight, test) for v, test in zip(values, held, strict=True)]


def _mean(values: Array, weight: Array | None, rows: Array) -> float:
    """Of held-out rows, by their weights."""
    return float(np.average(values, weights=None if weight is None else weight[rows] + 1e-300))


def _splits(results: Mapping[str, Any]) -> list[Array]:
    """The scores of all candidates, one array a fold."""
    n = sum(name.startswith("split") for name in results)
    return [results[f"split{i}_test_score"] for i in range(n)]


def _results(candidates: Candidates, scores: Array) -> dict[str, Any]:
    """Scores (candidates, folds) in the form GridSearchCV gives them."""
    results: dict[str, Any] = {f"param_{name}": np.array([c[name] for c in candidates]) for name in candidates[0]}
    results["params"] = list(candidates)
    results |= {f"split{i}_test_score": column for i, column in enumerate(scores.T)}
    mean = scores.mean(1)
    with np.errstate(invalid="ignore"):  # of a candidate that diverged
        results["mean_test_score"], results["std_test_score"] = mean, scores.std(1)
    results["rank_test_score"] = (mean[:, None] < mean[None]).sum(1) + 1
    return results


def _check_folds(folds: Folds, n_rows: int) -> None:
    if not folds:
        raise ValueError("`cv` must give at least one fold; got none.")
    for i, fold in enumerate(folds):
        for part in map(np.asarray, fold):
            if part.dtype.kind not in "iu" or not part.size or not 0 <= part.min() <= part.max() < n_rows:
                raise ValueError(
                    f"`cv` must give row numbers from 0 to {n_rows - 1}, at least one to train on and one to hold out; "
                    f"fold {i} does not."
                )


def _check_apart(folds: Folds) -> None:
    for i, (train, test) in enumerate(folds):
        both = np.intersect1d(train, test)
        if len(both):
            raise ValueError(
                f"`cv` must hold out rows that it does not train on; fold {i} has row {both[0]} in both parts."
            )
