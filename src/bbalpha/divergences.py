"""The theory behind the loss: Amari's and Renyi's divergences, the cavity map, and the energies of the paper.

For distributions that have a density, as `torch.distributions` objects. Closed forms for Gaussians (Normal,
Independent of it, MultivariateNormal) and for discrete distributions (Categorical, Bernoulli); Monte Carlo from
the log densities otherwise. Batches are handled as torch handles them: a divergence has the batch shape.

    D_a[p||q] = (1 - int p^a q^(1-a)) / (a (1-a))     0: KL[q||p] (VI), 0.5: 4 Hellinger^2, 1: KL[p||q] (EP)
    R_a[p||q] = log int p^a q^(1-a) / (a - 1)         1: KL[p||q]

The energies take q, the prior p0 and the factors f_n(w) = p(y_n | x_n, w): a function w (K, D) -> log f (K, N),
or `LinearGaussian`, for which Gaussian q have exact energies.

    q, p0 = Normal(mean, std), Normal(torch.zeros(2), 1.0)                  # a q of two weights
    energy = large_data_energy(q, p0, LinearGaussian(x, y, precision=4.0), alpha=0.5)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, MultivariateNormal, Normal
from torch.distributions.kl import kl_divergence

from bbalpha.checks import check_count, check_floating, check_number
from bbalpha.objectives import alpha_loss

Factors = Callable[[Tensor], Tensor]  # w (K, D) -> log f_n(w) (K, N)


# ------------------------------------------------------------------------------ divergences


def amari(p: Distribution, q: Distribution, alpha: float, *, n_samples: int = 10_000) -> Tensor:
    """Amari's alpha-divergence D_alpha[p||q], for any real alpha; 0 is KL[q||p], 1 is KL[p||q].

    Args:
        p: The distribution that is approximated.
        q: The approximation.
        alpha: Any finite number.
        n_samples: Draws where there is no closed form: from q for alpha <= 0.5, from p above.

    Returns:
        The batch shape; inf where the integral does not exist. An estimate sees this only where one of the
        two has no density at all.

    >>> amari(Normal(0.0, 1.0), Normal(1.0, 1.0), 0.5)                 # 4 (1 - exp(-1/8))
    tensor(0.4700)
    """
    check_number("alpha", alpha)
    check_count("n_samples", n_samples)
    if alpha in (0.0, 1.0):
        return kl(p, q, n_samples=n_samples) if alpha else kl(q, p, n_samples=n_samples)
    return -_log_integral(p, q, alpha, n_samples).expm1() / (alpha * (1 - alpha))


def renyi(p: Distribution, q: Distribution, alpha: float, *, n_samples: int = 10_000) -> Tensor:
    """Renyi's divergence R_alpha[p||q] of order alpha; 1 is KL[p||q].

    Returns:
        The batch shape; inf where the integral does not exist.

    >>> renyi(Normal(0.0, 1.0), Normal(1.0, 1.0), 0.5)
    tensor(0.2500)
    """
    check_number("alpha", alpha)
    check_count("n_samples", n_samples)
    if alpha == 1.0:
        return kl(p, q, n_samples=n_samples)
    return _log_integral(p, q, alpha, n_samples) / (alpha - 1)


def amari_from_renyi(value: Tensor, alpha: float) -> Tensor:
    """D_alpha from R_alpha: (1 - exp((alpha - 1) R)) / (alpha (1 - alpha)); the same at alpha 1, undefined at 0.

    >>> amari_from_renyi(torch.tensor(0.25), 0.5)
    tensor(0.4700)
    """
    _check_order(alpha)
    return value if alpha == 1 else -((alpha - 1) * value).expm1() / (alpha * (1 - alpha))


def renyi_from_amari(value: Tensor, alpha: float) -> Tensor:
    """R_alpha from D_alpha: log(1 - alpha (1 - alpha) D) / (alpha - 1); the same at alpha 1, undefined at 0.

    >>> renyi_from_amari(torch.tensor(0.47), 0.5)
    tensor(0.2500)
    """
    _check_order(alpha)
    return value if alpha == 1 else (-alpha * (1 - alpha) * value).log1p() / (alpha - 1)


def kl(p: Distribution, q: Distribution, *, n_samples: int = 10_000) -> Tensor:
    """The Kullback-Leibler divergence E_p log p/q.

    Inclusive (mass-covering) when p is the target, exclusive (zero-forcing) when p is the approximation.

    >>> kl(Normal(0.0, 1.0), Normal(1.0, 1.0))
    tensor(0.5000)
    """
    _check_pair(p, q)
    check_count("n_samples", n_samples)
    if _is_gaussian(p) and _is_gaussian(q):
        ratios, quadratic, event_dims = _whitened(p, q, 1.0)
        return _sum(ratios - 1 - ratios.log(), event_dims) / 2 + quadratic / 2
    try:
        return kl_divergence(p, q)
    except NotImplementedError:
        w = _draw(p, n_samples)
        return (p.log_prob(w) - _log_prob(q, w)).mean(0)


def hellinger(p: Distribution, q: Distribution, *, n_samples: int = 10_000) -> Tensor:
    """The Hellinger distance sqrt(1 - int sqrt(p q)), between 0 and 1; D_0.5 is four times its square.

    >>> hellinger(Normal(0.0, 1.0), Normal(1.0, 1.0))                  # sqrt(1 - exp(-1/8))
    tensor(0.3428)
    """
    check_count("n_samples", n_samples)
    return (-_log_integral(p, q, 0.5, n_samples).expm1()).sqrt()


# ------------------------------------------------------------------------------ the cavity


def cavity(q: Distribution, p0: Distribution, alpha: float, n_data: int) -> Distribution:
    """The cavity q^(1 - alpha/N) p0^(alpha/N), normalised: what is left of q without alpha of one data point.

    Args:
        q: Gaussian or discrete.
        p0: The prior, of the same kind.
        alpha: Below `n_data`.
        n_data: N.

    Returns:
        A distribution like `q`; MultivariateNormal where one of the two is.

    >>> cavity(Normal(0.0, 0.1), Normal(0.0, 1.0), alpha=1.0, n_data=2).variance     # precision (100 + 1) / 2
    tensor(0.0198)
    """
    _check_cavity(alpha, n_data)
    return _geometric(q, p0, alpha / n_data, "the cavity of `q`")


def from_cavity(cavity: Distribution, p0: Distribution, alpha: float, n_data: int) -> Distribution:
    """The q whose cavity this is, Eq. 6: q = c (c / p0)^(alpha / (N - alpha)) / Z_q.

    >>> from_cavity(cavity(Normal(0.0, 0.1), Normal(0.0, 1.0), 1.0, 2), Normal(0.0, 1.0), 1.0, 2).stddev
    tensor(0.1000)
    """
    _check_cavity(alpha, n_data)
    return _geometric(cavity, p0, -alpha / (n_data - alpha), "the q of this `cavity`")


# ------------------------------------------------------------------------------ the energies


@dataclass(frozen=True)
class LinearGaussian:
    """The factors N(y_n; x_n . w, 1/precision) of Bayesian linear regression.

    Attributes:
        x: (N, D).
        y: (N,).
        precision: tau.

    >>> LinearGaussian(torch.ones(3, 2), torch.zeros(3))(torch.zeros(5, 2)).shape    # log f (K, N)
    torch.Size([5, 3])
    """

    x: Tensor
    y: Tensor
    precision: float = 1.0

    def __post_init__(self) -> None:
        """Refuse rows and targets that do not belong together."""
        check_floating("x", self.x)
        check_floating("y", self.y)
        if self.x.ndim != 2 or self.y.shape != self.x.shape[:1]:
            raise ValueError(f"`x` must be (N, D) and `y` (N,); got {tuple(self.x.shape)} and {tuple(self.y.shape)}.")
        check_number("precision", self.precision, above=0)

    def __call__(self, w: Tensor) -> Tensor:
        """The log factors at w: (K, D) -> (K, N)."""
        residual = self.y - w.reshape(len(w), -1) @ self.x.T
        return (math.log(self.precision / (2 * math.pi)) - self.precision * residual.square()) / 2

    def alpha_losses(self, q: Distribution, alpha: float) -> Tensor:
        """-1/alpha log E_q[f_n^alpha] for a Gaussian q, exactly: (N,); inf where the mean does not exist."""
        mean, covariance = _moments(q)
        variance = (self.x @ covariance * self.x).sum(-1)  # of x_n . w
        width = 1 + alpha * self.precision * variance
        log_width = (alpha * self.precision * variance).log1p() / alpha if alpha else self.precision * variance
        fit = self.precision * (self.y - self.x @ mean).square() / width
        losses = (fit + log_width - math.log(self.precision / (2 * math.pi))) / 2
        return torch.where(width > 0, losses, math.inf)

    def posterior(self, p0: Distribution) -> MultivariateNormal:
        """The exact posterior p0 prod_n f_n / Z for a Gaussian prior."""
        precision, shift = _natural(p0, full=True)
        precision = precision + self.precision * self.x.T @ self.x
        shift = shift + self.precision * self.x.T @ self.y
        return MultivariateNormal(torch.linalg.solve(precision, shift), precision_matrix=precision)


def free_energy(q: Distribution, p0: Distribution, factors: Factors, *, n_samples: int = 1000) -> Tensor:
    """The variational free energy KL[q||p0] - sum_n E_q log f_n, Eq. 5: what VI minimises ().

    Args:
        q: The approximation: one distribution over all weights, whose batch axes are independent weights.
        p0: The prior.
        factors: w (K, D) -> log f_n(w) (K, N), or `LinearGaussian`.
        n_samples: K, where there is no closed form.

    >>> x, prior = torch.ones(2, 1), Normal(torch.zeros(1), 1.0)
    >>> free_energy(prior, prior, LinearGaussian(x, torch.zeros(2)))   # log 2 pi + 1
    tensor(2.8379)
    """
    return large_data_energy(q, p0, factors, alpha=0.0, n_samples=n_samples)


def bb_alpha_energy(
    q: Distribution, p0: Distribution, factors: Factors, *, alpha: float, n_samples: int = 1000
) -> Tensor:
    """The original BB-alpha energy -1/alpha sum_n log E_q[(f_n p0^(1/N) / q^(1/N))^alpha], Eq. 3 ().

    Exact for a Gaussian q and prior with `LinearGaussian` factors, else the paper's estimate, Eq. 4. Because
    q^(1 - alpha/N) p0^(alpha/N) is the cavity times exp(-alpha/N R_(1 - alpha/N)[q||p0]), the exact energy is
    R_(1 - alpha/N)[q||p0] - 1/alpha sum_n log E_cavity[f_n^alpha].
    """
    _check_energy(alpha, n_samples, q=q, p0=p0)
    q, p0 = _joint(q), _joint(p0)
    if isinstance(factors, LinearGaussian) and _is_gaussian(q) and _is_gaussian(p0):
        n_data = len(factors.x)
        losses = factors.alpha_losses(cavity(q, p0, alpha, n_data), alpha)
        return renyi(q, p0, 1 - alpha / n_data) + losses.sum()
    w = _draw(q, n_samples)
    log_factors = _evaluate(factors, w)  # (K, N)
    prior_share = (_log_prob(p0, w) - q.log_prob(w)).unsqueeze(-1) / log_factors.shape[1]
    return alpha_loss(-(log_factors + prior_share), alpha, reduction="sum")


def reparameterised_energy(
    cavity: Distribution, p0: Distribution, factors: Factors, *, alpha: float, n_samples: int = 1000
) -> Tensor:
    """The energy in terms of the cavity: R_beta[cavity||p0] - 1/alpha sum_n log E_cavity[f_n^alpha] ().

    beta = N / (N - alpha). Equals `bb_alpha_energy` of the q that belongs to the cavity.
    """
    _check_energy(alpha, n_samples, cavity=cavity, p0=p0)
    cavity, p0 = _joint(cavity), _joint(p0)
    losses = _alpha_losses(cavity, factors, alpha, n_samples)
    _check_cavity(alpha, len(losses))
    beta = len(losses) / (len(losses) - alpha)
    return renyi(cavity, p0, beta, n_samples=n_samples) + losses.sum()


def large_data_energy(
    q: Distribution, p0: Distribution, factors: Factors, *, alpha: float, n_samples: int = 1000
) -> Tensor:
    """What the library minimises: KL[q||p0] - 1/alpha sum_n log E_q[f_n^alpha], the energy for alpha/N -> 0 ().

    >>> x, prior = torch.ones(2, 1), Normal(torch.zeros(1), 1.0)
    >>> large_data_energy(prior, prior, LinearGaussian(x, torch.zeros(2)), alpha=1.0)      # log 2 pi + log 2
    tensor(2.5310)
    """
    _check_energy(alpha, n_samples, q=q, p0=p0)
    q, p0 = _joint(q), _joint(p0)
    return kl(q, p0, n_samples=n_samples) + _alpha_losses(q, factors, alpha, n_samples).sum()


def power_ep_energy(
    q: Distribution, p0: Distribution, factors: Factors, *, alpha: float, n_samples: int = 1000
) -> Tensor:
    """The power-EP energy, Eq. 11, with all N sites tied, in natural parameters, for a Gaussian q and prior ().

    log Z(l0) + (N/alpha - 1) log Z(lq) - 1/alpha sum_n log int f_n^alpha exp((lq - alpha l) phi), with the site
    l = (lq - l0) / N. Differences of log Z are divided by alpha, so digits are lost where alpha is tiny.
    """
    _check_energy(alpha, n_samples, q=q, p0=p0)
    q, p0 = _joint(q), _joint(p0)
    if alpha == 0:
        return free_energy(q, p0, factors, n_samples=n_samples)
    n_data = len(_alpha_losses(q, factors, alpha, 1))
    rest = cavity(q, p0, alpha, n_data)  # natural parameters lq - alpha l
    log_z0, log_zq, log_z = (_log_partition(d) for d in (p0, q, rest))
    losses = _alpha_losses(rest, factors, alpha, n_samples)
    return log_z0 + (n_data / alpha - 1) * log_zq - n_data / alpha * log_z + losses.sum()


# ------------------------------------------------------------------------------ integrals


def _log_integral(p: Distribution, q: Distribution, alpha: float, n_samples: int) -> Tensor:
    """The log of int p^alpha q^(1-alpha), exact to rounding also near alpha = 0 and 1, where it tends to 0."""
    _check_pair(p, q)
    if alpha > 0.5:  # the same with p and q, alpha and 1 - alpha exchanged
        p, q, alpha = q, p, 1 - alpha
    if _is_gaussian(p) and _is_gaussian(q):
        ratios, quadratic, event_dims = _whitened(p, q, alpha)
        logs = _sum((alpha * (1 / ratios - 1)).log1p() + alpha * ratios.log(), event_dims)
        exists = _sum(alpha + (1 - alpha) * ratios <= 0, event_dims) == 0
        return torch.where(exists, -(alpha * (1 - alpha) * quadratic + logs) / 2, math.inf)
    outside = -1.0 if alpha >= 0 else math.inf  # (p/q)^alpha - 1 where p is 0
    if isinstance(p, (Categorical, Bernoulli)) and isinstance(q, (Categorical, Bernoulli)):
        P, Q = _probs(p), _probs(q)
        log_ratio = torch.where(P > 0, P, 1.0).log() - torch.where(Q > 0, Q, 1.0).log()
        powers = torch.where(P > 0, (alpha * log_ratio).expm1(), outside)
        return torch.where(Q > 0, Q * powers, 0.0).sum(-1).log1p()
    w = _draw(q, n_samples)
    log_p = _log_prob(p, w)
    losses = q.log_prob(w) - log_p  # (K, ...)
    if alpha == 0:
        return (log_p > -math.inf).to(losses.dtype).mean(0).log()
    values = alpha_loss(losses.reshape(len(losses), -1), alpha, reduction="none")
    return -alpha * values.reshape(losses.shape[1:])


def _whitened(p: Distribution, q: Distribution, alpha: float) -> tuple[Tensor, Tensor, int]:
    """Two Gaussians in the coordinates in which q is N(0, I), and p is N(d, S).

    Returns:
        The eigenvalues of S, d' (alpha I + (1 - alpha) S)^-1 d, and how many axes of the eigenvalues are events.
    """
    (p_base, event_dims), (q_base, _) = _base(p), _base(q)
    if isinstance(p_base, Normal) and isinstance(q_base, Normal):
        ratios = (p_base.scale / q_base.scale).square()
        distance = ((p_base.loc - q_base.loc) / q_base.scale).square()
        return ratios, _sum(distance / (alpha + (1 - alpha) * ratios), event_dims), event_dims
    (p_mean, p_covariance), (q_mean, q_covariance) = _moments(p), _moments(q)
    root = torch.linalg.cholesky(q_covariance)
    half = torch.linalg.solve_triangular(root, p_covariance, upper=False)
    S = torch.linalg.solve_triangular(root, half.mT, upper=False)
    d = torch.linalg.solve_triangular(root, (p_mean - q_mean).unsqueeze(-1), upper=False)
    mixed = alpha * torch.eye(S.shape[-1], dtype=S.dtype, device=S.device) + (1 - alpha) * S
    return torch.linalg.eigvalsh(S), (d * torch.linalg.solve(mixed, d)).sum((-2, -1)), 1


def _alpha_losses(q: Distribution, factors: Factors, alpha: float, n_samples: int) -> Tensor:
    """-1/alpha log E_q[f_n^alpha], exactly or from draws: (N,)."""
    if isinstance(factors, LinearGaussian) and _is_gaussian(q):
        return factors.alpha_losses(q, alpha)
    return alpha_loss(-_evaluate(factors, _draw(q, n_samples)), alpha, reduction="none")


def _evaluate(factors: Factors, w: Tensor) -> Tensor:
    log_factors = factors(w)
    if log_factors.ndim != 2 or len(log_factors) != len(w):
        raise ValueError(
            f"`factors` must return log f of shape (K, N) for {len(w)} draws; got {tuple(log_factors.shape)}."
        )
    return log_factors


def _draw(q: Distribution, n_samples: int) -> Tensor:
    size = torch.Size((check_count("n_samples", n_samples),))
    return q.rsample(size) if q.has_rsample else q.sample(size)


def _log_prob(p: Distribution, w: Tensor) -> Tensor:
    """The log density at w (K, ...), -inf outside of its support (where torch raises)."""
    inside = p.support.check(w)  # type: ignore[union-attr]
    if bool(inside.all()):
        return p.log_prob(w)
    wide = inside.reshape(*inside.shape, *[1] * (w.ndim - inside.ndim))
    return torch.where(inside, p.log_prob(torch.where(wide, w, p.sample(w.shape[:1]))), -math.inf)


def _probs(p: Categorical | Bernoulli) -> Tensor:
    """Probabilities (..., C)."""
    return p.probs if isinstance(p, Categorical) else torch.stack([1 - p.probs, p.probs], -1)


# ------------------------------------------------------------------------------ Gaussians


def _base(q: Distribution) -> tuple[Distribution, int]:
    """What Independent wraps, and how many of its batch axes are events."""
    dims = 0
    while isinstance(q, Independent):
        dims += q.reinterpreted_batch_ndims
        q = q.base_dist
    return q, dims


def _is_gaussian(q: Distribution) -> bool:
    return isinstance(_base(q)[0], (Normal, MultivariateNormal))


def _joint(q: Distribution) -> Distribution:
    """Q as one distribution over all weights, a Gaussian with independent weights over a vector of them."""
    base, _ = _base(q)
    if isinstance(base, Normal):
        return Independent(Normal(base.loc.flatten(), base.scale.flatten()), 1)
    return Independent(q, len(q.batch_shape)) if q.batch_shape else q


def _moments(q: Distribution) -> tuple[Tensor, Tensor]:
    """Mean (..., D) and covariance (..., D, D) of a Gaussian over vectors."""
    if isinstance(q, MultivariateNormal):
        return q.loc, q.covariance_matrix
    return q.mean, torch.diag_embed(q.variance)


def _natural(q: Distribution, *, full: bool) -> tuple[Tensor, Tensor]:
    """Precision, (..., D, D) if `full` and of the shape of the mean else, and precision times mean."""
    if isinstance(q, MultivariateNormal):
        return q.precision_matrix, (q.precision_matrix @ q.loc.unsqueeze(-1)).squeeze(-1)
    precision = 1 / q.variance
    return torch.diag_embed(precision) if full else precision, precision * q.mean


def _log_partition(q: Distribution) -> Tensor:
    """The log Z of a Gaussian over a vector as a member of its exponential family."""
    full = isinstance(q, MultivariateNormal)
    precision, shift = _natural(q, full=full)
    logs = torch.logdet(precision) if full else precision.log().sum()
    return ((shift * q.mean).sum() - logs + len(shift) * math.log(2 * math.pi)) / 2


def _geometric(q: Distribution, p0: Distribution, weight: float, what: str) -> Distribution:
    """q^(1 - weight) p0^weight, normalised."""
    _check_distributions(q=q, p0=p0)
    _check_pair(q, p0)
    if isinstance(q, (Categorical, Bernoulli)) and type(q) is type(p0):
        return type(q)(logits=(1 - weight) * q.logits + weight * p0.logits)
    if not (_is_gaussian(q) and _is_gaussian(p0)):
        raise TypeError(f"`q` and `p0` must both be Gaussian or discrete; got {q} and {p0}.")
    full = isinstance(q, MultivariateNormal) or isinstance(p0, MultivariateNormal)
    naturals = zip(_natural(q, full=full), _natural(p0, full=full), strict=True)
    precision, shift = ((1 - weight) * a + weight * b for a, b in naturals)
    smallest = torch.linalg.eigvalsh(precision).amin() if full else precision.amin()
    if not smallest > 0:
        raise ValueError(f"{what} must be a density; its smallest precision is {float(smallest):g}.")
    if full:
        mean = torch.linalg.solve(precision, shift.unsqueeze(-1)).squeeze(-1)
        return MultivariateNormal(mean, precision_matrix=precision)
    factorised = Normal(shift / precision, precision.rsqrt())
    return Independent(factorised, _base(q)[1]) if isinstance(q, Independent) else factorised


def _sum(values: Tensor, dims: int) -> Tensor:
    """The sum over the last `dims` axes."""
    return values.sum(list(range(-dims, 0))) if dims else values


def _check_distributions(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, Distribution):
            raise TypeError(f"`{name}` must be a torch distribution; got {type(value).__name__}.")


def _check_pair(p: Distribution, q: Distribution) -> None:
    _check_distributions(p=p, q=q)
    if p.event_shape != q.event_shape:
        shapes = f"{tuple(p.event_shape)} and {tuple(q.event_shape)}"
        raise ValueError(f"both distributions must be over events of one shape; got {shapes}.")


def _check_order(alpha: float) -> None:
    check_number("alpha", alpha)
    if alpha == 0:
        raise ValueError("`alpha` must not be 0: D_0 is KL[q||p] while R_0 is 0 wherever p has a density; got 0.")


def _check_energy(alpha: float, n_samples: int, **distributions: Any) -> None:
    check_number("alpha", alpha)
    check_count("n_samples", n_samples)
    _check_distributions(**distributions)


def _check_cavity(alpha: float, n_data: int) -> None:
    check_number("alpha", alpha)
    check_count("n_data", n_data, most=2**63)
    if alpha >= n_data:
        raise ValueError(f"`alpha` must be below `n_data`, {n_data}, for a cavity to exist; got {alpha}.")
