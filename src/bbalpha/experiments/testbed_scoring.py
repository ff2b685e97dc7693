"""The testbed's scores of an agent on a problem: divergence from the true network, for labels alone and together.

score(Exam.of(problem), log_probs)          # {"kl_1": ..., "kl_10": ..., ..., "accuracy": ...}

Groups of 100 are scored by clusters of functions, smaller ones by the plain mean over functions.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from bbalpha.experiments.results import Row
from bbalpha.experiments.testbed_problems import Exam
from bbalpha.metrics.joint import clustered_log_likelihood, joint_kl, joint_log_likelihood

SCORES = ("kl_1", "kl_10", "kl_10_dyadic", "kl_100")


def score(tests: Exam, log_probs: Tensor) -> dict[str, float]:
    """The divergences of every kind of group, and the share of labels guessed right.

    Args:
        tests: The exam of the problem.
        log_probs: Of K functions at all test inputs (K, N, 2).
    """
    found = {}
    for name, (rows, labels) in tests.groups.items():
        joint = clustered_log_likelihood if name == "100" else joint_log_likelihood
        found[f"kl_{name}"] = float(joint_kl(tests.true_log_likelihood(name), joint(log_probs, labels, rows)))
    rows, labels = tests.groups["1"]
    guessed = log_probs.exp().mean(0).argmax(1)[rows]
    return found | {"accuracy": float((guessed == labels).float().mean())}


def mean_and_error(rows: Sequence[Row], key: str) -> tuple[float, float]:
    """The mean of a score over problems, and its standard error from the means of groups of equal seed modulo 10.

    The error is that of the testbed; nan where there is only one group.

    >>> mean_and_error([{"seed": 1, "kl_1": 0.0}, {"seed": 2, "kl_1": 2.0}], "kl_1")
    (1.0, 0.7071067811865475)
    """
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row["seed"] % 10, []).append(row[key])
    means = [sum(values) / len(values) for values in groups.values()]
    middle = sum(means) / len(means)
    spread = math.sqrt(sum((m - middle) ** 2 for m in means) / len(means)) if len(means) > 1 else math.nan
    return sum(row[key] for row in rows) / len(rows), spread / math.sqrt(len(means))


def paired_error(rows: Mapping[str, Sequence[Row]], key: str, agent: str, normaliser: str = "mlp") -> float:
    """The standard error of an agent's ratio over problems, as both stand on the same; rows as `common` has them."""
    unit: float = sum(row[key] for row in rows[normaliser]) / len(rows[normaliser])
    pairs = [(own[key], row[key]) for own, row in zip(rows[agent], rows[normaliser], strict=True)]
    ratio = sum(own for own, _ in pairs) / sum(row for _, row in pairs)
    off: float = sum((own - ratio * row) ** 2 for own, row in pairs) / max(1, len(pairs) - 1)
    return math.sqrt(off / len(pairs)) / unit


def common(rows: Sequence[Row], agents: Sequence[str], normaliser: str = "mlp") -> dict[str, list[Row]]:
    """The rows of each agent on the problems that all have; one that lacks some of the first seed's is left out."""
    own = {agent: {row["seed"]: row for row in rows if row["agent"] == agent} for agent in agents}
    first = {row["seed"] for row in own[normaliser].values() if row["number"] == 0}
    own = {agent: found for agent, found in own.items() if first <= set(found)}
    shared = set.intersection(*(set(found) for found in own.values()))
    return {agent: [found[seed] for seed in sorted(shared)] for agent, found in own.items()}


def ratios(rows: Mapping[str, Sequence[Row]], key: str, normaliser: str = "mlp") -> dict[str, tuple[float, float]]:
    """{agent: (mean over that of the normaliser, standard error over the same)}, of rows as `common` has them."""
    unit, _ = mean_and_error(rows[normaliser], key)
    found = {agent: mean_and_error(own, key) for agent, own in rows.items()}
    return {agent: (mean / unit, error / unit) for agent, (mean, error) in found.items()}
