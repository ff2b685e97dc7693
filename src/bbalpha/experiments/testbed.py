"""The Neural Testbed: do agents know what inputs will do together? Mean fields, ensembles and alpha dropout.

    bbalpha reproduce testbed                       # 3 seeds, 63 problems; --seeds 10 is the whole sweep of 210
    bbalpha reproduce testbed --choose              # candidates on problems of other seeds: results/testbed_chosen.json

Problems as in `testbed_problems`, networks in `testbed_networks`, agents in `testbed_agents`, scores in
`testbed_scoring`. The same trained agent is scored on groups of 1, 10 and 100 on every problem. Writes
out/testbed.json, a row for each agent and problem.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bbalpha.experiments import skeleton
from bbalpha.experiments.results import Ledger, Row
from bbalpha.experiments.testbed_agents import Agent, fit, log_probs
from bbalpha.experiments.testbed_choices import AGENTS, CANDIDATES
from bbalpha.experiments.testbed_problems import N_DATA, N_SEEDS, TEMPERATURES, Exam, Problem, seed_of
from bbalpha.experiments.testbed_scoring import score

SEED = 0
_CHOOSING = (1, 10, 100), 2  # numbers of training points and seeds of the problems that candidates are compared on
_QUICK_N = (1, 10)


@dataclass(frozen=True)
class Config:
    """How agents are scored.

    Attributes:
        n_draws: Functions of an agent that is no ensemble.
        n_hundreds: Groups of 100 test inputs.
        n_pairs: Dyadic groups.
        most_steps: Of training, at most.
    """

    n_draws: int = 300
    n_hundreds: int = 40
    n_pairs: int = 500
    most_steps: int = 100_000


_QUICK = Config(n_draws=30, n_hundreds=4, n_pairs=20, most_steps=60)


@dataclass(frozen=True)
class Cell(skeleton.Unit):
    """An agent on the problems of one number of training points that are missing, side by side: all temperatures."""

    agent: str
    n_data: int
    numbers: tuple[int, ...]

    @property
    def part(self) -> str:
        """Seconds are told by agent."""
        return self.agent

    def done(self, kept: Ledger) -> bool:
        """Whether nothing is missing."""
        return not self.numbers


def reproduce(*, agents: Sequence[str], seeds: int, choose: bool, jobs: int, quick: bool, out: Path) -> str:
    """Run what is missing of the sweep; returns where it is.

    Args:
        agents: Of `AGENTS`, with `choose` of `CANDIDATES`; empty is all.
        seeds: Problems of each kind, at most 10.
        choose: Compare the candidates on problems of other seeds instead, into testbed_chosen.json.
        jobs: Pieces of work side by side, each on one thread.
        quick: Few points and steps, into testbed-quick.json.
        out: The folder of results.
    """
    known = CANDIDATES if choose else AGENTS
    wrong = [name for name in agents if name not in known]
    if wrong:
        raise ValueError(f"`agents` must be of {', '.join(known)}; got {wrong[0]!r}.")
    if not 1 <= seeds <= N_SEEDS:
        raise ValueError(f"`seeds` must be from 1 to {N_SEEDS}; got {seeds}.")
    config = _QUICK if quick else Config()
    name = ("testbed_chosen" if choose else "testbed") + "-quick" * quick
    command = "bbalpha reproduce testbed" + " --choose" * choose
    settings = asdict(config)
    kept = skeleton.open_ledger(out / f"{name}.json", command=command, quick=quick, seed=SEED, settings=settings)
    made = {agent: repr(known[agent]) for agent in known}  # rows of an agent that was another then are no longer its
    kept.forget("agent", {row["agent"] for row in kept.rows if row.get("made") != made.get(row["agent"])})
    sizes: Sequence[int]
    sizes, seeds = (_QUICK_N, 1) if quick else _CHOOSING if choose else (N_DATA, seeds)
    cells = [
        Cell(agent, n, tuple(s for s in range(seeds) if not kept.has(agent=agent, n_data=n, number=s)))
        for agent in known
        for n in sizes
        if agent in (agents or known)
    ]
    skeleton.run_units(kept, cells, partial(run_cell, known, config, choose), state=out / ".state/testbed", jobs=jobs)
    return f"{len(cells) * seeds * len(TEMPERATURES)} problems of agents in {kept.path}; tables: make tables."


def run_cell(known: dict[str, Agent | None], config: Config, validation: bool, cell: Cell, _: Path) -> list[Row]:
    """The rows of an agent on the problems of a cell."""
    where = [(number, t) for number in cell.numbers for t in TEMPERATURES]
    seeds = [seed_of(cell.n_data, t, number, validation=validation) for number, t in where]
    problems = [Problem.make(cell.n_data, t, seed) for (_, t), seed in zip(where, seeds, strict=True)]
    exams = [Exam.of(p, n_hundreds=config.n_hundreds, n_pairs=config.n_pairs) for p in problems]
    with skeleton.threads(1):  # products this small are faster so
        predicted = _predicted(known[cell.agent], problems, torch.stack([exam.x for exam in exams]), config)
    return [
        {
            "agent": cell.agent,
            "made": repr(known[cell.agent]),
            "n_data": cell.n_data,
            "number": number,
            "temperature": t,
            "seed": seed,
            **score(exam, own),
        }
        for (number, t), seed, exam, own in zip(where, seeds, exams, predicted, strict=True)
    ]


def _predicted(agent: Agent | None, problems: Sequence[Problem], x: Tensor, config: Config) -> Tensor:
    """Log-probabilities of both classes at the test inputs (Z, K, N, 2); no agent says one half."""
    if agent is None:
        return x.new_full((len(x), 1, x.shape[1], 2), 0.5).log()
    agent = replace(agent, steps=min(agent.steps, config.most_steps))
    seed = problems[0].seed
    return log_probs(fit(agent, problems, seed=seed), x, n_draws=config.n_draws, seed=seed)
