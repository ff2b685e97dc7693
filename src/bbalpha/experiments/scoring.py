"""How a predictive distribution did on test rows: the one scoring code of every method of the regression table."""

from torch import Tensor

from bbalpha import metrics


def scores(log_prob: Tensor, mean: Tensor, low: Tensor, high: Tensor, target: Tensor) -> dict[str, float]:
    """nll, rmse and coverage90 of test rows, in units of the target.

    Args:
        log_prob: Log-density of the predictive distribution at the target (N,).
        mean: Of the predictive distribution (N,).
        low: Lower end of its central 90 % interval (N,).
        high: Upper end (N,).
        target: What was observed (N,).

    >>> import torch
    >>> y = torch.tensor([0.0, 2.0])
    >>> found = scores(torch.tensor([-1.0, -2.0]), torch.zeros(2), y - 1, torch.ones(2), y)
    >>> {name: round(value, 4) for name, value in found.items()}
    {'nll': 1.5, 'rmse': 1.4142, 'coverage90': 0.5}
    """
    shape = target.shape
    for name, value in {"log_prob": log_prob, "mean": mean, "low": low, "high": high}.items():
        if value.shape != shape or value.ndim != 1:  # (N, 1) against (N,) would broadcast
            raise ValueError(f"`{name}` must be (N,) as `target` is; got {tuple(value.shape)} and {tuple(shape)}.")
    return {
        "nll": -float(log_prob.double().mean()),
        "rmse": float(metrics.rmse(mean.double(), target.double())),
        "coverage90": float(metrics.interval_coverage(low.double(), high.double(), target.double())),
    }
