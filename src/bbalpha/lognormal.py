"""The prediction of a positive target whose logarithm was modelled: a mixture of log-normal distributions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bbalpha.predictive import RegressionPrediction

_MOST = 80.0  # of a logarithm: exp stays finite in single precision


@dataclass(frozen=True, eq=False)
class LogPrediction:
    """What a `RegressionPrediction` of log y says of y; the same questions can be asked.

    Attributes:
        log: The prediction of the logarithm, a mixture of Gaussians.

    >>> p = LogPrediction(RegressionPrediction(torch.zeros(2, 1), torch.tensor(1.0)))
    >>> p.mean, p.quantile(0.5)
    (tensor([1.6487]), tensor([1.]))
    """

    log: RegressionPrediction

    @property
    def passes_used(self) -> Tensor:
        """As in `RegressionPrediction`."""
        return self.log.passes_used

    @property
    def masks(self) -> str | None:
        """As in `RegressionPrediction`."""
        return self.log.masks

    @property
    def outputs(self) -> Tensor:
        """The means of the passes (K, N, ...)."""
        return (self.log.outputs + self.log._variance() / 2).clamp(max=_MOST).exp()

    @property
    def mean(self) -> Tensor:
        """Mean of the mixture (N, ...)."""
        return self.outputs.mean(0)

    @property
    def std(self) -> Tensor:
        """Standard deviation of the mixture (N, ...)."""
        return (self.epistemic_std.square() + self.aleatoric_std.square()).sqrt()

    @property
    def epistemic_std(self) -> Tensor:
        """Standard deviation over passes of their means (N, ...)."""
        return self.outputs.std(0, correction=0)

    @property
    def aleatoric_std(self) -> Tensor:
        """Root of the mean variance of the passes (N, ...)."""
        variance = self.log._variance()
        return (self.outputs.square() * torch.expm1(variance.clamp(max=_MOST))).mean(0).sqrt()

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of `y` (N, ...), outputs of a row jointly -> (N,); minus infinity for what is not positive."""
        return self._in_units_of(y, self.log.log_prob)

    def log_likelihood(self, y: Tensor) -> Tensor:
        """The same in each pass (K, N)."""
        return self._in_units_of(y, self.log.log_likelihood)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) for every output by itself (N, ...)."""
        return torch.where(y > 0, self.log.cdf(torch.where(y > 0, y, 1.0).log()), 0.0)

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """The values below which a share `q` lies: (N, ...), or (Q, N, ...) for Q shares."""
        return self.log.quantile(q).clamp(max=_MOST).exp()

    def interval(self, coverage: float) -> tuple[Tensor, Tensor]:
        """The central interval that holds `coverage`: (low, high), each (N, ...)."""
        low, high = self.log.interval(coverage)
        return low.clamp(max=_MOST).exp(), high.clamp(max=_MOST).exp()

    def sample(self, n: int, *, seed: int | None = None) -> Tensor:
        """`n` draws for every row (n, N, ...)."""
        return self.log.sample(n, seed=seed).clamp(max=_MOST).exp()

    @staticmethod
    def _in_units_of(y: Tensor, density: Callable[[Tensor], Tensor]) -> Tensor:
        """Log-density of `y` (N, ...) from that of its logarithm, which gives (..., N)."""
        inside = (y > 0).reshape(len(y), -1).all(1)
        logs = torch.where(y > 0, y, 1.0).log()
        return torch.where(inside, density(logs) - logs.reshape(len(y), -1).sum(1), -torch.inf)
