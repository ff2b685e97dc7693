"""How good a prediction is: of rows one by one (`marginal.py`), and of what groups of rows do together (`joint.py`).

p = bbalpha.predict_classification(net, x)
metrics.ece(p.probs, y), metrics.auroc(p.entropy, p.label != y)
metrics.joint_nll(log_likelihood, groups)                             # (K, N), (N,): passes with shared masks
"""

from bbalpha.metrics.joint import clustered_log_likelihood, dyadic_rows, joint_kl, joint_log_likelihood, joint_nll
from bbalpha.metrics.marginal import (
    Reliability,
    RiskCoverage,
    accuracy,
    aupr,
    auroc,
    brier,
    crps,
    ece,
    fpr95,
    interval_coverage,
    interval_width,
    nll,
    reliability,
    risk_coverage,
    rmse,
)

__all__ = [
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "aupr",
    "auroc",
    "brier",
    "clustered_log_likelihood",
    "crps",
    "dyadic_rows",
    "ece",
    "fpr95",
    "interval_coverage",
    "interval_width",
    "joint_kl",
    "joint_log_likelihood",
    "joint_nll",
    "nll",
    "reliability",
    "risk_coverage",
    "rmse",
]
