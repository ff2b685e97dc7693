"""What people would pick instead, with the defaults of their packages, and how each becomes a distribution.

    predict = REGRESSORS["forest"](x, y, seed)         # trained on these rows and nothing else
    forecast = predict(x_new)                          # .mean, .low, .high (90 %), and a density or quantiles

Set are only seeds, one thread, and what keeps a package quiet. docs/versus.md says the same in words.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bbalpha import metrics
from bbalpha.data import UCIData
from bbalpha.estimators import BBAlphaRegressor
from bbalpha.experiments import baselines
from bbalpha.experiments.search import Choice, config_for
from bbalpha.experiments.variants import Job, Variant, fit_jobs, mixture
from bbalpha.predictive import RegressionPrediction

Array = np.ndarray
LEVELS = (np.arange(10) + 0.5) / 10  # 0.05 to 0.95: the ends of the 90 % interval are among them
FINE = (np.arange(20) + 0.5) / 20


@dataclass(frozen=True, eq=False)
class Forecast:
    """What a method says about rows; what it does not say is None.

    Attributes:
        low: Lower end of the 90 % interval (N,).
        high: Upper end (N,).
        mean: (N,).
        mixture: The whole distribution, (K, N, 1).
        quantiles: Where there is no mixture: levels (Q,) and values (N, Q).
        log_prob: Where there is no mixture: targets (N,) -> log-densities (N,).
    """

    low: Array
    high: Array
    mean: Array | None = None
    mixture: RegressionPrediction | None = None
    quantiles: Callable[[], tuple[Array, Array]] | None = None
    log_prob: Callable[[Array], Array] | None = None


Predictor = Callable[[Array], Forecast]
Fit = Callable[[Array, Array, int], Predictor]  # x (N, F), y (N,), seed


# ------------------------------------------------------------------------------ distributions and their scores


def of_mixture(p: RegressionPrediction) -> Forecast:
    """The forecast of a mixture (K, N, 1) in units of y."""
    low, high = p.interval(0.9)
    return Forecast(low[:, 0].numpy(), high[:, 0].numpy(), p.mean[:, 0].numpy(), mixture=p)


def of_gaussian(mean: Array, variance: Array | float) -> Forecast:
    """The forecast of a Gaussian for each row, (N,) and (N,) or a number."""
    mean = np.asarray(mean, np.float64)
    variance = np.maximum(np.broadcast_to(variance, mean.shape).astype(np.float64), np.finfo(np.float64).tiny)
    half = 1.6448536 * np.sqrt(variance)
    p = RegressionPrediction(torch.as_tensor(mean)[None, :, None], torch.as_tensor(1 / variance)[None, :, None])
    return Forecast(mean - half, mean + half, mean, mixture=p)


def of_quantiles(levels: Array, values: Array, mean: Array) -> Forecast:
    """The forecast of quantiles (N, Q) that were fitted apart: put in order where they cross."""
    values = np.sort(values, axis=1)
    return Forecast(values[:, 0], values[:, -1], mean, quantiles=lambda: (levels, values))


def quantile_crps(levels: Array, values: Array, target: Array) -> Array:
    """CRPS from quantiles, twice the mean pinball loss: (Q,), (N, Q), (N,) -> (N,).

    Levels (i + 1/2) / Q: of a Gaussian it is too high by 0.7 % with ten levels and 0.2 % with twenty.
    """
    over = target[:, None] - values
    return 2 * np.maximum(levels * over, (levels - 1) * over).mean(1)


def score(forecast: Forecast, target: Array, unit: float) -> dict[str, float | None]:
    """nll, rmse, crps, coverage90 and width90 (in `unit`) of test rows; None where the method does not say it."""
    y = torch.as_tensor(np.asarray(target, np.float64))
    low, high = (torch.as_tensor(np.asarray(end, np.float64)) for end in (forecast.low, forecast.high))
    nll = rmse = crps = None
    if forecast.mean is not None:
        rmse = float(metrics.rmse(torch.as_tensor(np.asarray(forecast.mean, np.float64)), y))
    if forecast.mixture is not None:
        p = forecast.mixture
        nll = -float(p.log_prob(y[:, None]).mean())
        crps = float(metrics.crps(p.outputs, y[:, None], precision=p.precision).mean())
    elif forecast.quantiles is not None:
        crps = float(quantile_crps(*forecast.quantiles(), target).mean())
    if forecast.log_prob is not None:
        nll = -float(np.mean(forecast.log_prob(target)))
    covered = float(metrics.interval_coverage(low, high, y))
    width = float(metrics.interval_width(low, high)) / unit
    return {"nll": nll, "rmse": rmse, "crps": crps, "coverage90": covered, "width90": width}


# ------------------------------------------------------------------------------ peers


def _with_residuals(make: Callable[[int], Any]) -> Fit:
    """A Gaussian with the mean squared residual of 5-fold cross-validation inside the training rows."""

    def fit(x: Array, y: Array, seed: int) -> Predictor:
        folds = KFold(5, shuffle=True, random_state=seed)
        variance = float(np.mean((cross_val_predict(make(seed), x, y, cv=folds) - y) ** 2))
        model = make(seed).fit(x, y)
        return lambda new: of_gaussian(model.predict(new), variance)

    return fit


def _with_quantiles(make: Callable[[int, float | None], Any]) -> Fit:
    """One model for the mean and one for each of ten quantiles."""

    def fit(x: Array, y: Array, seed: int) -> Predictor:
        mean, *others = (make(seed, level).fit(x, y) for level in (None, *LEVELS))
        return lambda new: of_quantiles(LEVELS, np.stack([m.predict(new) for m in others], 1), mean.predict(new))

    return fit


def _boosting(seed: int, level: float | None = None) -> Any:
    if level is None:
        return HistGradientBoostingRegressor(random_state=seed)
    return HistGradientBoostingRegressor(loss="quantile", quantile=level, random_state=seed)


def _mlp(seed: int) -> Any:
    network = make_pipeline(StandardScaler(), MLPRegressor(random_state=seed))
    return TransformedTargetRegressor(network, transformer=StandardScaler())


def _lightgbm(seed: int, level: float | None) -> Any:
    from lightgbm import LGBMRegressor

    kind = {} if level is None else {"objective": "quantile", "alpha": level}
    return LGBMRegressor(random_state=seed, n_jobs=1, verbose=-1, **kind)


def forest(x: Array, y: Array, seed: int) -> Predictor:
    """A Gaussian around the forest's mean whose variance is, on average, that of the out-of-bag residuals.

    Half of it is the same for all rows, half in proportion to the spread of the trees at a row; the spread is compared
    with that of the out-of-bag trees at the training rows. (Spread and residuals both hold the noise: their sum
    would count it twice.)
    """
    model = RandomForestRegressor(random_state=seed).fit(x, y)
    trees = np.stack([tree.predict(x) for tree in model.estimators_])  # (T, N)
    for own, rows in zip(trees, model.estimators_samples_, strict=True):
        own[rows] = np.nan  # in the bag
    seen = np.isfinite(trees).sum(0) > 1
    residual = float(np.mean((np.nanmean(trees[:, seen], 0) - y[seen]) ** 2))
    spread = float(np.mean(np.nanvar(trees[:, seen], 0)))

    def predict(new: Array) -> Forecast:
        votes = np.stack([tree.predict(new) for tree in model.estimators_])
        share = votes.var(0) / spread if spread > 0 else np.ones(len(new))
        return of_gaussian(votes.mean(0), residual * (1 + share) / 2)

    return predict


def ngboost(x: Array, y: Array, seed: int) -> Predictor:
    """NGBoost's Gaussian."""
    from ngboost import NGBRegressor

    model = NGBRegressor(random_state=seed, verbose=False).fit(x, y)

    def predict(new: Array) -> Forecast:
        found = model.pred_dist(new).params
        return of_gaussian(found["loc"], found["scale"] ** 2)

    return predict


def catboost(x: Array, y: Array, seed: int) -> Predictor:
    """CatBoost's Gaussian, of the loss RMSEWithUncertainty."""
    from catboost import CatBoostRegressor

    model = CatBoostRegressor(
        loss_function="RMSEWithUncertainty", random_seed=seed, thread_count=1, allow_writing_files=False, verbose=False
    ).fit(x, y)

    def predict(new: Array) -> Forecast:
        found = model.predict(new)  # mean and variance
        return of_gaussian(found[:, 0], found[:, 1])

    return predict


def mapie(x: Array, y: Array, seed: int) -> Predictor:
    """MAPIE's intervals (CV+ with five folds, its default) around histogram boosting, and nothing else."""
    from mapie.regression import CrossConformalRegressor

    model = CrossConformalRegressor(_boosting(seed), confidence_level=0.9, random_state=seed).fit_conformalize(x, y)

    def predict(new: Array) -> Forecast:
        parts = [model.predict_interval(rows)[1][..., 0] for rows in np.array_split(new, max(1, len(new) // 200))]
        ends = np.sort(np.concatenate(parts), axis=1)  # by parts: training rows x new rows are held at once
        return Forecast(ends[:, 0], ends[:, 1])

    return predict


def _standardised(prediction: Callable[..., tuple[RegressionPrediction, float]]) -> Fit:
    """A baseline of the regression table, which is trained and asked in one go."""

    def fit(x: Array, y: Array, seed: int) -> Predictor:
        def predict(new: Array) -> Forecast:
            data = baselines.Standardised.of(x, y, new, np.zeros(len(new)))
            p, _ = prediction(data, seed=seed)
            outputs = p.outputs.double()[..., None]
            tau = torch.as_tensor(p.precision).double()
            tau = (tau[..., None] if tau.ndim else tau).expand_as(outputs).contiguous()
            return of_mixture(RegressionPrediction(outputs, tau).rescaled(data.unit, data.centre))

        return predict

    return fit


def ensemble(x: Array, y: Array, seed: int) -> Predictor:
    """Five networks of 50 units (100 over 20,000 rows) that predict mean and noise, mixed.

    Width, batches of 100 and 40 epochs as published (Lakshminarayanan et al., 2017), without adversarial training; Adam
    has the rate of the networks here, 0.01 along a cosine where theirs had 0.1, and hardly a prior.
    """
    wide = len(x) > baselines.LARGE
    variant = Variant(n_networks=None, dropout=False, likelihood="heteroscedastic")
    config = replace(config_for(len(x), "protein" if wide else ""), batch_size=min(100, len(x)))
    config = variant.config(config)
    data = UCIData("", x, y, ((np.arange(len(x)), np.arange(0)),) * (seed + 1))  # a job's seed is that of its split
    job = Job(seed, 0.0, Choice(0.0, 0.0, length_scale=1e-3, epochs=40))
    population, _ = fit_jobs(data, variant, [job], config)
    return lambda new: of_mixture(mixture(population, range(config.n_ensemble), torch.as_tensor(new), config))


def bbalpha(**arguments: Any) -> Fit:
    """Our regressor with these arguments and nothing else set."""

    def fit(x: Array, y: Array, seed: int) -> Predictor:
        model = BBAlphaRegressor(**arguments, random_state=seed).fit(x, y)

        def predict(new: Array) -> Forecast:
            low, high = model.predict_interval(new, coverage=0.9)
            return Forecast(
                low, high, model.predict(new), log_prob=lambda target: model.log_prob(new, target),
                quantiles=lambda: (FINE, np.asarray(model.predict_quantiles(new, FINE))),
            )  # fmt: skip

        return predict

    return fit


PAPER = {"hidden_layer_sizes": (50,), "noise": "constant"}
OURS: dict[str, dict[str, Any]] = {
    "bbalpha": {}, "bbalpha-quick": {"budget": "quick"}, "bbalpha-alpha0": {"alpha": 0.0},
    "bbalpha-alpha0.5": {"alpha": 0.5}, "bbalpha-alpha1": {"alpha": 1.0}, "bbalpha-paper": PAPER,
}  # fmt: skip
MC_DROPOUT = {"alpha": 0.0, "hidden_layer_sizes": (50,), "dropout": 0.05, "n_ensemble": 1}
TOGETHER = ("gp", "vi-g")  # trained and asked in one go

REGRESSORS: dict[str, Fit] = {
    **{name: bbalpha(**arguments) for name, arguments in OURS.items()},
    "mc-dropout": bbalpha(**MC_DROPOUT, noise="constant"),
    "ensemble": ensemble,
    "vi-g": _standardised(baselines.vi_prediction),
    "gp": _standardised(baselines.gp_prediction),
    "mlp": _with_residuals(_mlp),
    "forest": forest,
    "hist-gbm": _with_residuals(_boosting),
    "hist-gbm-quantiles": _with_quantiles(_boosting),
    "lightgbm-quantiles": _with_quantiles(_lightgbm),
    "ngboost": ngboost,
    "catboost": catboost,
    "mapie": mapie,
}
NEEDS = {"lightgbm-quantiles": "lightgbm", "lightgbm": "lightgbm", "ngboost": "ngboost", "catboost": "catboost",
         "mapie": "mapie", "gp": "gpytorch"}  # fmt: skip


def alpha_of(method: str) -> float | None:
    """The alpha that a method of ours is trained with; None of the others, and where it is not a number."""
    arguments = OURS | {"mc-dropout": MC_DROPOUT}
    if method not in arguments:
        return None
    alpha = arguments[method].get("alpha", inspect.signature(BBAlphaRegressor).parameters["alpha"].default)
    return float(alpha) if isinstance(alpha, int | float) else None


def why_not(method: str, estimator: Any) -> str | None:
    """Why a method of ours cannot or need not be run with this estimator; None if it can."""
    known = inspect.signature(estimator).parameters
    lacking = [name for name in OURS.get(method, {}) if name not in known]
    if lacking:
        return f"{estimator.__name__} has no `{lacking[0]}`"
    if method == "bbalpha-alpha0.5" and known["alpha"].default == 0.5:
        return "it is what bbalpha is already"
    return None
