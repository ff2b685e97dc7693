"""`BBAlphaRegressor`: a dropout network for real targets.

Inputs and targets are standardised inside; results are in the units of `y`. Predictions share the masks of each pass
over all rows, from a seed kept at `fit`, so a row gets the same answer in any company.

    model = BBAlphaRegressor(alpha=0.5).fit(X, y)
    mean, std = model.predict(X_new, return_std=True)
    low, high = model.predict_interval(X_new, coverage=0.9)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from bbalpha.checks import RULES, check_count, check_flag, check_inner_share
from bbalpha.estimators.base import FEW, DropoutEstimator
from bbalpha.estimators.choices import LIKELIHOODS_OF, is_auto, regression_grid
from bbalpha.estimators.dealing import same_records
from bbalpha.estimators.mixing import conformal_level
from bbalpha.estimators.race import Expert
from bbalpha.estimators.soundness import (
    check_converged,
    check_groups,
    check_long_enough,
    diverged,
    numbers_only,
    one_thread,
    settled,
    some_rows,
    targets,
)
from bbalpha.estimators.storing import Array, Module
from bbalpha.estimators.tails import is_skewed
from bbalpha.estimators.thinned import is_plain, thinned_passes
from bbalpha.estimators.whole import keep_arguments
from bbalpha.lognormal import LogPrediction
from bbalpha.objectives import GaussianNLL
from bbalpha.prediction import predict_regression
from bbalpha.predictive import RegressionPrediction
from bbalpha.training.bank import LOG_PRECISION, Likelihood, SplitNLL, split_heads, standardiser

Answer = Callable[[RegressionPrediction | LogPrediction], tuple[Tensor, ...]]
_ROWS = 2**14  # of a table that are answered at a time: the passes of all of them may not fit into memory


class Regression(RegressorMixin):
    """What a regressor answers, out of its `predictive` distribution and `y_ndim_`, the axes of y."""

    predictive: Callable[[Any], RegressionPrediction | LogPrediction]

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The predictive mean (N,) or (N, D); with `return_std` also its standard deviation."""
        if check_flag("return_std", return_std):
            return self._answer(X, lambda p: (p.mean, p.std))
        return self._answer(X, lambda p: (p.mean,))[0]

    def predict_quantiles(self, X: Any, q: float | Sequence[float]) -> Array:
        """Quantiles of the predictive mixture: (N,) for a number, (N, Q) for several; (N, D, Q) with D targets."""
        with numbers_only("q"):
            levels: Any = q if np.ndim(q) == 0 else list(np.asarray(q, float))
        (quantiles,) = self._answer(X, lambda p: (p.quantile(levels),))
        return quantiles if np.ndim(q) == 0 else np.moveaxis(quantiles, 0, -1)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Array, Array]:
        """The central interval that holds `coverage` of the predictive mixture: (low, high), each like the mean."""
        low, high = self._answer(X, lambda p: p.interval(coverage))
        return low, high

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Draws from the predictive distribution (N, n_samples), or (N, D, n_samples) with D targets."""
        n_samples, seed = check_count("n_samples", n_samples), int(check_random_state(random_state).randint(2**31 - 1))
        return np.moveaxis(self._shaped(self.predictive(X).sample(n_samples, seed=seed)), 0, -1)

    def log_prob(self, X: Any, y: Any) -> Array:
        """Log-density of each row's target, in units of `y` (N,); several targets jointly."""
        target, found = self._targets(X, y), []
        for start, x in _blocks(X):
            prediction = self.predictive(x)
            own = target[start : start + _ROWS].reshape(len(prediction.mean), -1)
            found.append(prediction.log_prob(own))
        return torch.cat(found).numpy()

    def _targets(self, X: Any, y: Any) -> Tensor:
        with numbers_only("y"):
            target = torch.tensor(np.atleast_1d(np.asarray(y, np.float64)))  # a copy: a Series may be read-only
        if hasattr(X, "__len__") and len(target) != len(X):
            raise ValueError(f"`y` must have one target a row, {len(X)}; got {len(target)}.")
        return target

    def _answer(self, X: Any, answer: Answer) -> tuple[Array, ...]:
        """What `answer` says of the predictive distribution, each tensor (..., N, D), block by block of rows."""
        parts = [answer(self.predictive(x)) for _, x in _blocks(X)]
        return tuple(self._shaped(torch.cat(part, -2)) for part in zip(*parts, strict=True))

    def _shaped(self, values: Tensor) -> Array:
        array: Array = values.numpy()
        return array[..., 0] if self.y_ndim_ == 1 else array

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class BBAlphaRegressor(Regression, DropoutEstimator):
    """Dropout networks for real targets, trained with the alpha objective; predicts a distribution.

    By itself it tries architectures, kinds of noise and dropout rates on held-out rows, trains the best in full and
    combines them (`summary()` tells how they fared). ``hidden_layer_sizes=(50,), noise="constant"`` is the paper's
    network. Tables go in as pandas reads them: text, categories, dates and gaps are encoded inside.

    Args:
        alpha: 0 is MC dropout as usual, 0.5 the Hellinger value, 1 the predictive likelihood; "auto" tries all three.
        hidden_layer_sizes: Widths of the hidden layers; a number is one layer; "auto" is (100, 100), with three kinds
            of units.
        noise: "constant" learns one precision for all rows, "heteroscedastic" predicts it from the inputs, "student"
            the same with the heavy tails of Student's t; "auto" tries all three, and the logarithm of skewed targets.
        dropout: The rate of being dropped of hidden units; "auto" tries four pairs of rates at hidden units and inputs.
            Where the rest is given and there are more than 2,000 rows, it is 5/256, 0.02.
        input_dropout: The rate of the inputs; "auto" is chosen with `dropout`, or, where all else is given, equal to it
            up to 2,000 rows and 0 from there on.
        length_scale: l of the prior N(0, 1/l^2), on standardised data; 0 is no prior; "auto" tries 1 and 5.
        budget: How much to try: "quick", "standard" or "thorough", which do the same work on any machine, or about so
            many seconds, which do not. Counts where something is left to choose.
        n_passes: K in training.
        n_predict_passes: K in prediction, over all networks.
        balanced: Draw the masks of the passes together, as in `bbalpha.sample`: less noise at equal K.
        epochs: Times through the data; None chooses by the number of rows and the budget.
        batch_size: Rows a step; None chooses by the number of rows.
        learning_rate: Of Adam, falling to 0 along a cosine.
        n_ensemble: Networks, trained from different seeds, whose predictive distributions are averaged; in the
            automatic way those of each candidate, as many as there are parts of the rows to hold out. None chooses.
        validation_fraction: Share of the rows that a network holds out, each others, if that is at least 5 rows: the
            weights of the epoch with the best log-likelihood there are kept. None is 0.2 up to 2,000 rows and 0.1 from
            there on, or one part in `n_ensemble`; 0 trains on all rows to the last epoch, for fewer epochs where these
            are not given, and leaves nothing to choose by.
        patience: Training stops after so many epochs without a better one; None is a fifth of all, and not fewer than
            20 where `epochs` are given.
        module: A network of your own: an nn.Module (N, F) -> (N, D), or a function of (F, D) that makes one; with
            heteroscedastic noise it returns (mean, log_precision).
        verbose: Tell what is being tried; ten lines a training where there is no terminal.
        random_state: As in scikit-learn.

    >>> X = np.linspace(-1, 1, 64)[:, None]
    >>> model = BBAlphaRegressor(budget="quick", epochs=20, random_state=0).fit(X, X[:, 0])
    >>> mean, std = model.predict(X[:3], return_std=True)
    >>> mean.shape, bool((std > 0).all())
    ((3,), True)
    """

    _fitted_names = (
        *DropoutEstimator._fitted_names, "noise_", "y_ndim_", "y_mean_", "y_scale_", "precision_", "heavy_",
        "log_target_",
    )  # fmt: skip

    def __init__(
        self,
        alpha: float = 0.5,
        *,
        hidden_layer_sizes: int | Sequence[int] | Literal["auto"] = "auto",
        noise: Literal["auto", "constant", "heteroscedastic", "student"] = "auto",
        dropout: float | Literal["auto"] | None = "auto",
        input_dropout: float | Literal["auto"] | None = "auto",
        length_scale: float | Literal["auto"] = 1.0,
        budget: float | Literal["quick", "standard", "thorough"] = "standard",
        n_passes: int = 10,
        n_predict_passes: int = 100,
        balanced: bool = True,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 0.01,
        n_ensemble: int | None = None,
        validation_fraction: float | None = None,
        patience: int | None = None,
        module: Module | None = None,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        keep_arguments(self, locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Train on `X` (N, F) and `y` (N,) or (N, D); returns self.

        Rows of one of the `groups` (N,) are held out together, as are rows that are there more than once.
        """
        return self._fit_whole(X, y, sample_weight, groups)

    def _fit(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> None:
        X, y, weight = self._read(X, y, sample_weight, multi_output=True, y_numeric=True)
        groups = check_groups(groups, len(X))
        self.y_ndim_, table = y.ndim, targets(y)
        if weight is not None:
            some = weight > 0
            X, table, weight, groups = X[some], table[some], weight[some], None if groups is None else groups[some]
        groups = same_records(X, table) if groups is None else groups
        if self._automatic():
            self._choose(X, table, weight, groups)
        else:
            self._train_as_told(X, table, weight, groups)
        rows = some_rows(len(X))
        target = np.log(table[rows]) if self.log_target_ else table[rows]
        standard = torch.as_tensor((target - self.y_mean_) / self.y_scale_)
        check_converged(self, *self._over_constant(self._standardised(X[rows]), standard))
        check_long_enough(self, len(X))

    def _train_as_told(self, X: Array, table: Array, weight: Array | None, groups: Array | None) -> None:
        """One architecture and kind of noise."""
        self.noise_, self.log_target_ = "constant" if self.noise == "auto" else self.noise, False  # of a `module`
        self.y_mean_, self.y_scale_ = standardiser(table, partial(np.average, axis=0, weights=weight))
        target = torch.as_tensor((table - self.y_mean_) / self.y_scale_, dtype=torch.float32)
        self._train(X, target, weight, groups)
        self.heavy_ = np.full(len(self.networks_), self.noise_ == "student")
        if self.noise_ == "constant":
            tau = torch.stack([o.precision.detach() for o in self.objectives_]).double()  # (n_ensemble,)
            self.precision_ = tau.numpy()[:, None] / self.y_scale_**2  # (n_ensemble, D), in units of y

    def predict_interval(self, X: Any, coverage: float = 0.9, *, guarantee: bool = False) -> tuple[Array, Array]:
        """The central interval that holds `coverage` of the predictive mixture: (low, high), each like the mean.

        Args:
            X: Rows.
            coverage: The share of targets that are to lie inside.
            guarantee: Widen or narrow the levels so that the rows of `fit`, each under the networks that had not
                trained on it, were covered as often as asked. New rows from the same source then are, on average, up
                to the chance of so many rows and to what the choice of epochs and weights saw of them; whatever the
                model. Automatic estimators alone hold such rows.
        """
        if not check_flag("guarantee", guarantee):
            return super().predict_interval(X, coverage)
        check_inner_share("coverage", coverage)
        check_is_fitted(self)
        if self.scores_ is None:
            raise ValueError(
                "`guarantee` needs rows that were held out: fit with hidden_layer_sizes='auto', or see "
                "bbalpha.calibration.conformal_intervals."
            )
        half = conformal_level(abs(self.scores_ - 0.5), coverage)  # (D,)

        def ends(p: RegressionPrediction | LogPrediction) -> tuple[Tensor, ...]:
            return tuple(torch.stack([_end(p, 0.5 + s * h, i) for i, h in enumerate(half)], -1) for s in (-1, 1))

        low, high = self._answer(X, ends)
        return low, high

    def _choose(self, X: Array, table: Array, weight: Array | None, groups: Array | None) -> None:
        """The automatic way: a race, and a mixture of its winners, all of which predict mean and log precision."""
        average = partial(np.average, axis=0, weights=weight)
        tables = {False: table} | ({True: np.log(table)} if is_skewed(table) else {})
        scalers = {log: standardiser(t, average) for log, t in tables.items()}
        x = self._scale(X, weight)
        standard = {log: (t - scalers[log][0]) / scalers[log][1] for log, t in tables.items()}
        shifts = {log: np.full(len(x), -np.log(scalers[log][1]).sum()) - log * t.sum(1) for log, t in tables.items()}
        grid = regression_grid(self, skewed=True in tables)
        self.noise_ = "heteroscedastic"
        found = {log: torch.as_tensor(t, dtype=torch.float32) for log, t in standard.items()}
        experts = self._race(x, found, shifts, weight, groups, grid, LIKELIHOODS_OF[self.noise])
        self.log_target_ = experts[0].candidate.log_target
        self.y_mean_, self.y_scale_ = scalers[self.log_target_]
        self.heavy_ = np.array([e.candidate.likelihood == "student" for e in experts])
        self.networks_ = [two_heads(e) for e in experts]
        self.objectives_ = [self._objective() for _ in experts]
        if not all(map(settled, self.networks_, self.objectives_)):
            raise diverged(self)
        self.scores_ = self._held_out_ranks(experts, x, standard[self.log_target_])

    def _held_out_ranks(self, experts: list[Expert], x: Tensor, target: Array) -> Array:
        """P(Y <= y) of rows under the networks that had not seen them (n, D): uniform where the mixture is right."""
        ranks, total = np.zeros_like(target), np.zeros(len(target))
        for expert, share in zip(experts, self.shares_, strict=True):
            found = self._expert(expert, x).cdf(torch.as_tensor(target[expert.held]))
            ranks[expert.held] += share * found.numpy()
            total[expert.held] += share
        held = np.flatnonzero(total)
        return ranks[held] / total[held, None]

    def _score(self, expert: Expert, x: Tensor, targets: dict[bool, Tensor]) -> Array:
        target = targets[expert.candidate.log_target][expert.held].double()
        return self._expert(expert, x).log_prob(target).numpy()

    def _expert(self, expert: Expert, x: Tensor) -> RegressionPrediction:
        """What an expert says of the standardised targets of its held-out rows."""
        n_passes = max(2, self._passes_asked() // 4)
        mean, tau = self._part(two_heads(expert), x[expert.held].double(), n_passes, self.seed_)
        heavy = torch.full((n_passes,), expert.candidate.likelihood == "student")
        return RegressionPrediction(mean, tau, heavy=heavy)

    def _over_constant(self, x: Tensor, target: Tensor) -> tuple[Array, float]:
        """How standardised rows and targets do, beside the mean and deviation of y: as `check_converged` has it."""
        prediction = self._standard(x)
        squares = target.square().sum(1)
        constant = -0.5 * (squares + target.shape[1] * np.log(2 * np.pi))
        gain = prediction.log_prob(target) - constant
        error = (prediction.mean - target).square().sum(1).mean() / (target.shape[1] + squares.mean())
        return gain.numpy(), float(error)

    def predictive(self, X: Any) -> RegressionPrediction | LogPrediction:
        """The predictive distribution itself, in units of `y`."""
        standard = self._standard(self._inputs(X))
        found = standard.rescaled(torch.as_tensor(self.y_scale_), torch.as_tensor(self.y_mean_))
        return LogPrediction(found) if self.log_target_ else found

    def _standard(self, x: Tensor, n_passes: int | None = None) -> RegressionPrediction:
        """The predictive distribution of standardised targets; `n_passes` are of each network."""
        passes = self._passes() if n_passes is None else [n_passes] * len(self.networks_)
        with one_thread() if len(x) <= FEW else nullcontext():
            parts = [
                self._part(network, x, k, self.seed_ + i)
                for i, (network, k) in enumerate(zip(self.networks_, passes, strict=True))
                if k
            ]
        mean = torch.cat([m for m, _ in parts])  # (K, N, D)
        if self.noise_ == "constant":
            tau = torch.as_tensor(self.precision_ * self.y_scale_**2).repeat_interleave(torch.tensor(passes), 0)
            return RegressionPrediction(mean, tau[:, None].expand_as(mean), masks="shared")
        heavy = torch.as_tensor(self.heavy_).repeat_interleave(torch.tensor(passes)) if self.heavy_.any() else None
        precision = torch.cat([tau for _, tau in parts])  # type: ignore[misc]
        return RegressionPrediction(mean, precision, heavy=heavy, masks="shared")

    def _part(self, network: nn.Module, x: Tensor, n_passes: int, seed: int) -> tuple[Tensor, Tensor | None]:
        """Means and precisions of the passes of one network, in double precision (K, N, D)."""
        if not self.uses_module_ and is_plain(network):
            rows = x.float() if len(x) > FEW else x
            outputs = thinned_passes(network, rows, n_passes, seed=seed, balanced=self.balanced)
            if bool(outputs.isfinite().all()):  # if not, the other way tells where
                mean, log_tau = split_heads(outputs) if self._splits() else (outputs, None)
                return mean.double(), None if log_tau is None else log_tau.double().exp()
        found = predict_regression(
            *self._precise(network, x), n_passes=n_passes, precision=None if self.noise_ == "constant" else "predicted",
            output=split_heads if self._splits() else None, masks="shared", balanced=self.balanced, seed=seed,
            progress=False,
        )  # fmt: skip
        return found.outputs.double(), None if found.precision is None else found.precision.double()

    def _objective(self) -> nn.Module:
        alpha = 0.5 if is_auto(self.alpha) else self.alpha  # what was chosen is in `trials_`
        if self.noise_ == "constant":
            return GaussianNLL(alpha)
        return SplitNLL(alpha) if self._splits() else GaussianNLL(alpha, precision="predicted")

    def _likelihood(self) -> Likelihood:
        return LIKELIHOODS_OF[self.noise_][0]

    def _splits(self) -> bool:
        """Whether our own network gives mean and log precision side by side."""
        return self.noise_ != "constant" and not self.uses_module_

    def _n_outputs(self) -> int:
        return len(self.y_mean_) * (2 if self._splits() else 1)

    def _shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        RULES["noise"]("noise", self.noise_)
        if self.noise_ == "auto" or not isinstance(self.log_target_, bool):
            raise ValueError("`noise_` and `log_target_` must be those of a fit; they are not.")
        if self.heavy_.dtype != bool:
            raise ValueError(f"`heavy_` must hold truth values; got {self.heavy_.dtype}.")
        if self.y_ndim_ not in (1, 2) or (self.noise_ == "constant") != ("precision_" in vars(self)):
            raise ValueError("`y_ndim_` and `precision_` must be those of a fit; they do not fit the rest.")
        D = self._standard(x, 2).mean.shape[1]
        n = len(self.networks_)
        return {"y_mean_": (D,), "y_scale_": (D,), "precision_": (n, D), "heavy_": (n,)}


def _blocks(X: Any) -> Iterator[tuple[int, Any]]:
    """A table in blocks of rows, each with the row that it begins at; a small one as it is."""
    shape = getattr(X, "shape", None)
    n_rows = shape[0] if shape else len(X) if isinstance(X, list | tuple) else 0  # what else there is, is refused later
    if n_rows <= _ROWS:
        yield 0, X
        return
    for start in range(0, n_rows, _ROWS):
        rows = slice(start, start + _ROWS)
        yield start, X.iloc[rows] if hasattr(X, "iloc") else X[rows]


def _end(prediction: RegressionPrediction | LogPrediction, level: float, output: int) -> Tensor:
    """A quantile of one output (N,), infinite where all rows together do not reach the level."""
    if not 0 < level < 1:
        return torch.full_like(prediction.mean[:, output], np.inf if level >= 1 else -np.inf)
    return prediction.quantile(level)[:, output]


def two_heads(expert: Expert) -> nn.Module:
    """The network of an expert, with a head for the log precision where it has one noise level."""
    if expert.candidate.likelihood != "gaussian":
        return expert.network
    layers = list(expert.network.children())
    last: Any = layers[-1]
    wide = nn.Linear(last.in_features, 2 * last.out_features)
    bounded = LOG_PRECISION * np.arctanh(np.clip(expert.log_precision / LOG_PRECISION, -0.999999, 0.999999))
    with torch.no_grad():
        wide.weight.zero_()
        wide.weight[: last.out_features] = last.weight
        wide.bias.fill_(float(bounded))
        wide.bias[: last.out_features] = last.bias
    return nn.Sequential(*layers[:-1], wide).eval()
