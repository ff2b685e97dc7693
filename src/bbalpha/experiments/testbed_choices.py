"""Which agents stand in the testbed's table, and the candidates that ours were chosen from.

The field's agents have the settings that the testbed publishes. Ours are those of `CANDIDATES` that did best on
problems of other seeds, by the rule of `best`: results/testbed_chosen.json has what all of them did there.
"""

from collections.abc import Sequence

from bbalpha.experiments.results import Row
from bbalpha.experiments.testbed_agents import Agent
from bbalpha.experiments.testbed_scoring import common, ratios

FIELD: dict[str, Agent | None] = {
    "uniform": None,
    "mlp": Agent("ensemble"),
    "mc-dropout": Agent("dropout"),
    "ensemble+": Agent("ensemble", members=100, prior=3.0),
    "ensemble+ 20": Agent("ensemble", members=20, prior=3.0),
    "ensemble": Agent("ensemble", members=100),
    "bbb": Agent("bayes", n_passes=8, prior=1.0, learning_rate=3e-3),
}


def _dropout(rate: float, alpha: float, group_size: int = 1) -> Agent:
    return Agent("dropout", rate=rate, n_passes=8, alpha=alpha, group_size=group_size)


def _blocks(prior: float, alpha: float, group_size: int = 1, *, blocks: int = 16) -> Agent:
    return Agent("blocks", blocks=blocks, n_passes=8, prior=prior, alpha=alpha, group_size=group_size)


CANDIDATES: dict[str, Agent | None] = {
    "mlp": FIELD["mlp"],
    "mc-dropout": FIELD["mc-dropout"],
    "dropout 0.1 alpha 0.5": _dropout(0.1, 0.5),
    "prior 0.5 alpha 0": _blocks(0.5, 0.0),
    "prior 1 alpha 0": _blocks(1.0, 0.0),
    "prior 0.5 alpha 0.5": _blocks(0.5, 0.5),
    "prior 0.25 alpha 0": _blocks(0.25, 0.0),
    "prior 1 alpha 0.5": _blocks(1.0, 0.5),
    "prior 3 alpha 0": _blocks(3.0, 0.0),
    "prior 0.5 alpha 0.5 by 100": _blocks(0.5, 0.5, 100),
    "prior 0.5 alpha 1": _blocks(0.5, 1.0),
    "dropout 0.1 alpha 0": _dropout(0.1, 0.0),
    "dropout 0.1 alpha 1": _dropout(0.1, 1.0),
    "dropout 0.1 alpha 1 by 100": _dropout(0.1, 1.0, 100),
    "dropout 0.5 alpha 1 by 100": _dropout(0.5, 1.0, 100),
}
CHOSEN = {"alpha dropout": "dropout 0.1 alpha 1 by 100", "alpha dropout+": "prior 0.5 alpha 0"}
AGENTS: dict[str, Agent | None] = {
    **FIELD,
    **{name: CANDIDATES[candidate] for name, candidate in CHOSEN.items()},
    "dropout alpha 0": CANDIDATES["dropout 0.1 alpha 0"],
    "dropout alpha 0.5": CANDIDATES["dropout 0.1 alpha 0.5"],
    "dropout alpha 1": CANDIDATES["dropout 0.1 alpha 1"],
    "dropout+ alpha 0.5": CANDIDATES["prior 0.5 alpha 0.5"],
    "dropout+ alpha 1": CANDIDATES["prior 0.5 alpha 1"],
}


def best(rows: Sequence[Row], name: str) -> str:
    """The candidate that "alpha dropout" or, with a prior function, "alpha dropout+" takes, from their scores.

    That with the least divergence at 100 labels of those whose divergence at one label is not above MC dropout's; where
    there is none, that with the least at one label.
    """
    family = "prior" if name.endswith("+") else "dropout"
    scored = common(rows, list(CANDIDATES))
    single, joint = ratios(scored, "kl_1"), ratios(scored, "kl_100")
    own = [candidate for candidate in scored if candidate.startswith(family)]
    fine = [candidate for candidate in own if single[candidate][0] <= single["mc-dropout"][0]]
    return min(fine or own, key=lambda candidate: (joint if fine else single)[candidate][0])
