"""Slow, obvious oracles: written from the equations, with nothing shared with the package."""

import itertools
import math
import statistics

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


# ------------------------------------------------------------------------------ rows together


def joint_log_prob(probs, groups):
    """log mean_k prod_{n in group} p_k(y_n), group by group in ascending order. (K, N) likelihoods, N group numbers."""
    found = []
    for group in sorted(set(groups)):
        products = [math.prod(float(row[n]) for n in range(len(groups)) if groups[n] == group) for row in probs]
        found.append(math.log(sum(products) / len(products)))
    return found


def batch_information(probs, rows):
    """I(y_rows; k) of (K, N, C) probabilities, by going through every configuration of labels."""
    K, _, C = probs.shape
    probs, total = probs.tolist(), 0.0
    for labels in itertools.product(range(C), repeat=len(rows)):
        each = [math.prod(probs[k][n][c] for n, c in zip(rows, labels, strict=True)) for k in range(K)]
        mean = sum(each) / K
        total += sum(p / K * math.log(p / mean) for p in each if p > 0)
    return total


def greedy_batch(probs, size):
    """The rows that batch_information picks one after the other, looking at all of them each time, and the scores."""
    rows, scores = [], []
    for _ in range(size):
        left = [n for n in range(probs.shape[1]) if n not in rows]
        found = [batch_information(probs, [*rows, n]) for n in left]
        scores.append(max(found))
        rows.append(left[found.index(max(found))])
    return rows, scores


def epig(probs, targets):
    """Mean over targets of the mutual information between two labels, from their joint table. (K, N, C), (K, M, C)."""
    scores = []
    for n in range(probs.shape[1]):
        total = 0.0
        for m in range(targets.shape[1]):
            table = sum(torch.outer(p[n], t[m]) for p, t in zip(probs, targets, strict=True)) / len(probs)
            apart = torch.outer(table.sum(1), table.sum(0))
            total += float((table * (table / apart).log()).sum())
        scores.append(total / targets.shape[1])
    return scores


def clustered_log_likelihood(probs, labels, planes, offsets):
    """The testbed's estimator for one group: (K, T, C) probabilities, T labels, planes (7, T * C), offsets (7,)."""
    normal = statistics.NormalDist()
    clusters = {}
    for table in probs.tolist():
        probits = [[max(-5.0, min(5.0, normal.inv_cdf(p))) for p in row] for row in table]
        flat = [value for row in probits for value in row]
        code = tuple(
            sum(a * v for a, v in zip(plane, flat, strict=True)) + offset > 0
            for plane, offset in zip(planes.tolist(), offsets.tolist(), strict=True)
        )
        clusters.setdefault(code, []).append([normal.cdf(row[c]) for row, c in zip(probits, labels, strict=True)])
    total = 0.0
    for members in clusters.values():
        centre = [(1e-6 + sum(m[t] for m in members)) / (1e-6 + len(members)) for t in range(len(labels))]
        total += len(members) / len(probs) * math.prod(centre)
    return math.log(total)


def gaussian_information(values, precision, rows):
    """1/2 log det(I + tau C) of the covariance C of K functions (K, N) at some rows."""
    apart = values[:, rows] - values[:, rows].mean(0)
    covariance = apart.T @ apart / len(values)
    return 0.5 * float(torch.logdet(torch.eye(len(rows), dtype=values.dtype) + precision * covariance))
