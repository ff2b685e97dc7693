"""What the regression table is compared with: HMC, a sparse GP, Gaussian VI, and gradient boosting with quantiles.

    METHODS["gp"](x_train, y_train, x_test, y_test, seed=0, quick=False)      # {"nll": ..., "rmse": ..., ...}

Each takes rows in the units of their source, standardises them by the training rows, and scores the test rows with the
code that scores everybody else (`scoring.scores`), in units of y. Settings depend on the number of rows alone; they
were found by a few trials on held-out training rows of the first split (published splits overlap: these rows are test
rows of other splits).

HMC lives in `hmc.py`. All need the extra: pip install 'bbalpha[baselines]'.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bbalpha.experiments.hmc import Settings, sample_posterior
from bbalpha.experiments.scoring import scores
from bbalpha.experiments.skeleton import extra
from bbalpha.layers import GaussianLinear
from bbalpha.objectives import GaussianNLL
from bbalpha.prediction import predict_regression
from bbalpha.predictive import RegressionPrediction
from bbalpha.training.fitting import cosine, fit

Rows = npt.NDArray[np.float64] | Tensor
Method = Callable[..., dict[str, float]]

HIDDEN, HIDDEN_LARGE, LARGE = 50, 100, 20_000  # units of the hidden layer; the paper has 100 for protein and year

# {data set: splits that are run}. A leapfrog step is a pass over all rows: half a minute for a thousand rows is
# five for ten thousand, and posteriors of so many rows are narrower, so that more steps are needed on top.
HMC_SPLITS = dict.fromkeys(("boston", "concrete", "energy", "wine", "yacht"), 20)


@dataclass(frozen=True, eq=False)
class Standardised:
    """Rows with mean 0 and deviation 1 on the training part, in double precision, and the way back.

    >>> import numpy as np
    >>> data = Standardised.of(np.array([[1.0], [3.0]]), np.array([10.0, 30.0]), np.array([[5.0]]), np.array([0.0]))
    >>> data.x.ravel().tolist(), data.x_test.tolist(), data.centre, data.unit
    ([-1.0, 1.0], [[3.0]], 20.0, 10.0)
    """

    x: Tensor  # (N, d)
    y: Tensor  # (N,)
    x_test: Tensor  # (M, d)
    target: Tensor  # (M,), in its own units
    centre: float
    unit: float

    @classmethod
    def of(cls, x_train: Rows, y_train: Rows, x_test: Rows, y_test: Rows) -> "Standardised":
        """Standardised by the training rows; a column without spread is only centred."""
        x, y, new, target = (torch.as_tensor(a, dtype=torch.float64) for a in (x_train, y_train, x_test, y_test))
        y, target = y.reshape(len(x)), target.reshape(len(new))
        shift, spread = x.mean(0), x.std(0, correction=0)
        spread = torch.where(spread > 1e-12 * shift.abs(), spread, 1.0)  # a constant has a spread of rounding errors
        centre, unit = float(y.mean()), float(y.std(correction=0)) or 1.0
        return cls((x - shift) / spread, (y - centre) / unit, (new - shift) / spread, target, centre, unit)

    @property
    def hidden(self) -> int:
        """Units of the hidden layer for so many rows."""
        return HIDDEN_LARGE if len(self.x) > LARGE else HIDDEN

    def scores(self, prediction: RegressionPrediction) -> dict[str, float]:
        """Scores of a mixture (K, M) over the standardised test rows, in the units of the target."""
        p = RegressionPrediction(prediction.outputs.double(), prediction.precision).rescaled(self.unit, self.centre)
        return scores(_log_prob(p, self.target), p.mean, *p.interval(0.9), self.target)


def gp(x_train: Rows, y_train: Rows, x_test: Rows, y_test: Rows, *, seed: int, quick: bool = False) -> dict[str, float]:
    """Scores of a sparse GP: Titsias' bound with 50 inducing points, one length scale an input, learned noise.

    The bound is maximised on all rows at once, inducing points too (from k-means), by Adam.
    """
    data = Standardised.of(x_train, y_train, x_test, y_test)
    prediction, noise = gp_prediction(data, seed=seed, quick=quick)
    return data.scores(prediction) | {"noise": noise * data.unit}


def gp_prediction(data: Standardised, *, seed: int, quick: bool = False) -> tuple[RegressionPrediction, float]:
    """The sparse GP's distribution of the standardised test targets (1, M), and its deviation of the noise."""
    n_steps = 30 if quick else 400 if len(data.x) <= LARGE else 150
    with warnings.catch_warnings():
        numerical = extra("linear_operator.utils.warnings").NumericalWarning
        warnings.simplefilter("ignore", numerical)  # a Cholesky that was tried again with more jitter
        model = fit_gp(data.x, data.y, n_inducing=50, n_steps=n_steps, seed=seed)
        mean, variance = predict_gp(model, data.x_test)
    return RegressionPrediction(mean[None], variance.reciprocal()[None]), model.likelihood.noise.item() ** 0.5


def fit_gp(x: Tensor, y: Tensor, *, n_inducing: int, n_steps: int, seed: int) -> Any:
    """A GPyTorch model of standardised rows x (N, d), y (N,), its hyper-parameters and inducing points learned."""
    gpytorch, cluster = extra("gpytorch"), extra("sklearn.cluster")
    if n_inducing < len(x):
        found = cluster.KMeans(n_inducing, n_init=1, random_state=seed).fit(x.numpy()).cluster_centers_
        points = torch.as_tensor(found, dtype=x.dtype)
    else:
        points = x.clone()
    noise = gpytorch.likelihoods.GaussianLikelihood()  # at least 1e-4, a deviation of 0.01: below, digits run out
    rbf = gpytorch.kernels.RBFKernel(ard_num_dims=x.shape[1])
    kernel = gpytorch.kernels.InducingPointKernel(gpytorch.kernels.ScaleKernel(rbf), points, noise)

    class SparseGP(gpytorch.models.ExactGP):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(x, y, noise)
            self.mean, self.kernel = gpytorch.means.ConstantMean(), kernel

        def forward(self, rows: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(rows), self.kernel(rows))

    model = SparseGP().to(x.dtype)
    rbf.lengthscale, noise.noise = math.sqrt(x.shape[1]), 0.1  # rows are about sqrt(2 d) from each other
    bound = gpytorch.mlls.ExactMarginalLogLikelihood(noise, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    for step in range(n_steps):
        optimizer.param_groups[0]["lr"] = 0.1 * cosine(step / n_steps)
        optimizer.zero_grad()
        (-bound(model(x), y)).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def predict_gp(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of new observations at x (M, d): (M,), (M,)."""
    parts = [model.likelihood(model(rows)) for rows in x.split(1000)]
    return torch.cat([p.mean for p in parts]), torch.cat([p.variance for p in parts])


def vi_g(
    x_train: Rows, y_train: Rows, x_test: Rows, y_test: Rows, *, seed: int, quick: bool = False
) -> dict[str, float]:
    """Scores of fully factorised Gaussian VI: alpha = 0, exact KL to N(0, 1) on the weights, learned precision.

    One hidden layer of ReLU units. The prior's length scale stays 1: inputs and targets are standardised, and the
    weights have that prior in HMC too (which has it on biases as well, point estimates here). One pass a step: rows
    have draws of their own, which average out over a large batch.
    """
    data = Standardised.of(x_train, y_train, x_test, y_test)
    prediction, noise = vi_prediction(data, seed=seed, quick=quick)
    return data.scores(prediction) | {"noise": noise * data.unit}


def vi_prediction(data: Standardised, *, seed: int, quick: bool = False) -> tuple[RegressionPrediction, float]:
    """The distribution of `vi_g` of the standardised test targets (K, M), and its deviation of the noise."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = (data.x.shape[1], data.hidden, 1)
        # small deviations to begin with: with those of the prior the noise of 50 units drowns the signal
        net = nn.Sequential(
            GaussianLinear(*sizes[:2], initial_std=0.01), nn.ReLU(), GaussianLinear(*sizes[1:], initial_std=0.01)
        )
    objective = fit_vi(net, data.x, data.y, n_steps=300 if quick else 3000, seed=seed)
    tau = objective.precision.item()
    p = predict_regression(
        net, data.x_test.float(), n_passes=50 if quick else 200, precision=tau, seed=seed, progress=False
    )
    return RegressionPrediction(p.outputs[..., 0], p.precision), tau**-0.5


def fit_vi(net: nn.Module, x: Tensor, y: Tensor, *, n_steps: int, seed: int) -> GaussianNLL:
    """Train the weights' means and deviations on x (N, d), y (N,); the objective, which holds the precision."""
    objective = GaussianNLL(alpha=0.0)
    batch = min(len(x), 1000)
    fit(
        net, (x.float(), y.float()[:, None]), objective=objective, n_passes=1, batch_size=batch, length_scale=1.0,
        epochs=max(1, round(n_steps / math.ceil(len(x) / batch))), learning_rate=0.01, schedule=cosine,
        progress=False, seed=seed,
    )  # fmt: skip
    return objective


def gbm(
    x_train: Rows, y_train: Rows, x_test: Rows, y_test: Rows, *, seed: int, quick: bool = False
) -> dict[str, float]:
    """Scores of scikit-learn's gradient boosting, all defaults: what a user would pick instead.

    Three models: squared error for the mean, the 5 % and 95 % quantiles for the interval. They give no density; the
    likelihood is that of a Gaussian with the mean of the first and the deviation (q95 - q05) / 3.29 that such an
    interval has, at least 1 % of the deviation of the training targets. Over 5,000 rows the histogram variant, which
    scikit-learn has for large sets.
    """
    ensemble = extra("sklearn.ensemble")
    data = Standardised.of(x_train, y_train, x_test, y_test)

    def predicted(loss: str, quantile: float | None = None) -> Tensor:
        if len(data.x) > 5000:
            model = ensemble.HistGradientBoostingRegressor(
                loss=loss, quantile=quantile, max_iter=20 if quick else 100, random_state=seed
            )
        else:
            level = {} if quantile is None else {"alpha": quantile}
            model = ensemble.GradientBoostingRegressor(
                loss=loss, n_estimators=20 if quick else 100, random_state=seed, **level
            )
        return torch.as_tensor(model.fit(data.x.numpy(), data.y.numpy()).predict(data.x_test.numpy()))

    with extra("threadpoolctl").threadpool_limits(1):
        mean, ends = predicted("squared_error"), (predicted("quantile", 0.05), predicted("quantile", 0.95))
    low, high = torch.minimum(*ends), torch.maximum(*ends)  # fitted apart, they cross now and then
    std = ((high - low) / (2 * 1.6448536)).clamp_min(0.01)
    p = RegressionPrediction(mean[None], std.square().reciprocal()[None]).rescaled(data.unit, data.centre)
    low, high = low * data.unit + data.centre, high * data.unit + data.centre
    return scores(_log_prob(p, data.target), p.mean, low, high, data.target)


def hmc(
    x_train: Rows, y_train: Rows, x_test: Rows, y_test: Rows, *, seed: int, quick: bool = False
) -> dict[str, float]:
    """Scores of Hamiltonian Monte Carlo on the network of `vi_g`, and how well the chains mixed.

    Extra keys: accept (mean acceptance), divergences, n_samples, and of the predicted means at the test inputs rhat
    (split R-hat, median over rows) and rhat_worst. R-hat of weights would say nothing: hidden units can change places
    without a change of the function, and two chains that agree on all predictions differ in every weight.
    """
    data = Standardised.of(x_train, y_train, x_test, y_test)
    settings = Settings(hidden=data.hidden)
    if quick:
        settings = Settings(hidden=10, n_start=500, n_warmup=20, n_samples=20, n_leapfrog=20)
    posterior = sample_posterior(data.x, data.y, data.x_test, settings=settings, seed=seed)
    p = RegressionPrediction(posterior.outputs.flatten(0, 1), posterior.precision.flatten()[:, None])
    return data.scores(p) | posterior.diagnostics | {"noise": float(p.aleatoric_std[0]) * data.unit}


METHODS: dict[str, Method] = {"hmc": hmc, "gp": gp, "vi-g": vi_g, "gbm": gbm}


# ------------------------------------------------------------------------------ helpers


def _log_prob(p: RegressionPrediction, target: Tensor) -> Tensor:
    """Log-density of a mixture (K, M) at each target (M,)."""
    return RegressionPrediction(p.outputs[..., None], None if p.precision is None else p.precision[..., None]).log_prob(
        target[:, None]
    )
