"""Slow, obvious oracles: written from the equations, with nothing shared with the package."""

import math

import mpmath
import torch


def alpha_loss(losses, alpha):
    """-1/alpha log mean exp(-alpha l) of one data point's K losses, in 60 digits."""
    with mpmath.workdps(60):
        values = [mpmath.mpf(float(v)) for v in losses]
        if alpha == 0:
            return float(sum(values) / len(values))
        a = mpmath.mpf(alpha)
        return float(-mpmath.log(sum(mpmath.e ** (-a * v) for v in values) / len(values)) / a)


def softmax(losses, alpha):
    """Gradient of the alpha loss: softmax(-alpha l)."""
    with mpmath.workdps(60):
        weights = [mpmath.e ** (-mpmath.mpf(alpha) * mpmath.mpf(float(v))) for v in losses]
        return [float(w / sum(weights)) for w in weights]


def power_loss(logits, target, alpha):
    """The paper's classification form: cross entropy of mean_k p_k^alpha, divided by alpha. (K, N, C), (N,)."""
    powered = logits.softmax(2).pow(alpha).mean(0)  # (N, C)
    return (-powered[torch.arange(len(target)), target].log() / alpha).mean()


def gaussian_log_density(y, mean, precision):
    return 0.5 * (math.log(precision) - math.log(2 * math.pi) - precision * (y - mean) ** 2)


def loop(model, x, n_passes):
    """K passes as everybody writes them: training mode, one after the other."""
    was = [(m, m.training) for m in model.modules()]
    model.train()
    out = torch.stack([model(x) for _ in range(n_passes)])
    for m, flag in was:
        m.training = flag
    return out
