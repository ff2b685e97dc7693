"""The automatic choice: candidates race on held-out rows, the best are trained in full, and a mixture of them predicts.

Rows are dealt into folds; a network holds one of them out, picks its epoch by it, and is scored by it. In the heats
every candidate trains two networks for a short time, as one population an architecture; then the best of them once more
under other likelihoods. The best of all go to the final, with a network for every fold. The weights of the mixture are
those under which the held-out rows are likeliest ("stacking"). The populations of a stage hang on no other: under a
`joblib.parallel_config` they are trained side by side.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bbalpha._spread import spread
from bbalpha.checkpoint import build, describe
from bbalpha.estimators.memory import Memory
from bbalpha.estimators.mixing import stacked
from bbalpha.training.bank import Activation, Likelihood
from bbalpha.training.population import Member, Population, fit_population

Array = NDArray[Any]


@dataclass(frozen=True)
class Candidate:
    """One way to set up a network.

    Attributes:
        hidden_layer_sizes: Widths; none is a linear model.
        likelihood: As in `fit_population`.
        dropout: The rate at hidden units.
        input_dropout: The rate at the inputs.
        alpha: Of the objective.
        length_scale: l of the prior.
        log_target: Whether it predicts the logarithm of the target.
        activation: Of the hidden units.
        spread: As in `Member`.
    """

    hidden_layer_sizes: tuple[int, ...]
    likelihood: Likelihood
    dropout: float
    input_dropout: float
    alpha: float = 0.5
    length_scale: float = 1.0
    log_target: bool = False
    activation: Activation = "relu"
    spread: float = 1.0

    @property
    def kind(self) -> tuple[Any, ...]:
        """What its units are and how they begin."""
        return self.hidden_layer_sizes, self.activation, self.spread

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.hidden_layer_sizes)) or "linear"
        shape += f" {self.activation}" * bool(self.hidden_layer_sizes) + f" from {self.spread:g}" * (self.spread != 1)
        noise = {"gaussian": "one noise level", "heteroscedastic": "predicted noise", "student": "Student t"}
        parts = [shape, noise.get(self.likelihood, "classes"), f"dropout {self.dropout:.3f} / {self.input_dropout:.3f}"]
        parts += [f"alpha {self.alpha:g}", f"l {self.length_scale:g}"] + ["log target"] * self.log_target
        return ", ".join(parts)


@dataclass(frozen=True)
class Effort:
    """How much work a budget buys.

    Attributes:
        heat_steps: Steps of every candidate in the heats; 0 has none.
        final_steps: Steps in the final.
        finalists: Candidates in the final, at most.
        n_networks: Of each finalist: the number of folds.
        most_passes: K in the final, if the estimator has more.
    """

    heat_steps: int
    final_steps: int
    finalists: int
    n_networks: int
    most_passes: int

    def on_rows(self, n_rows: int) -> "Effort":
        """The same for so many rows, by degrees.

        Many want more steps, each with fewer passes, and a smaller mixture; few want more folds, as then less is held
        out from each network.
        """
        share = max(1.0, n_rows / MANY)
        folds = max(3, self.n_networks / share**0.25)
        if self.heat_steps:
            folds *= min(2.0, max(1.0, MANY / n_rows) ** 0.5)
        return Effort(
            round(self.heat_steps * min(share**0.5, 2.5)), round(self.final_steps * min(share**0.5, 2.5)),
            max(2, round(self.finalists / share**0.25)), round(folds), max(3, round(self.most_passes / share**0.5)),
        )  # fmt: skip

    def scaled(self, factor: float) -> "Effort":
        """The work of `factor` times the time: shorter or longer training, fewer or more finalists."""
        share = float(np.sqrt(factor))
        return Effort(
            int(np.clip(self.heat_steps * share, 100, 4000)), int(np.clip(self.final_steps * share, 200, 40_000)),
            int(np.clip(round(self.finalists * share), 1, 8)), self.n_networks, self.most_passes,
        )  # fmt: skip


EFFORTS = {
    "quick": Effort(heat_steps=0, final_steps=320, finalists=4, n_networks=3, most_passes=4),
    "standard": Effort(heat_steps=300, final_steps=2000, finalists=3, n_networks=5, most_passes=10),
    "thorough": Effort(heat_steps=1500, final_steps=8000, finalists=5, n_networks=10, most_passes=100),
}
N_VARIED = 2  # candidates that are tried under other likelihoods too
N_HEATS = 2  # networks of a candidate in the heats
HEAT_PASSES = 4  # K in the heats, at most: passes are worth the least at the beginning
FEW_EPOCHS = 20  # of a user: training is not stopped sooner, as the first of them may teach little
MANY = 2000  # rows from which on data regularise by themselves


@dataclass(frozen=True, eq=False)
class Trial:
    """How a candidate fared.

    Attributes:
        candidate: It.
        nll: Of held-out rows, a row, in units of y, after the heats; nan without.
        final_nll: The same after the final; nan if it was not in it.
        weight: In the mixture.
    """

    candidate: Candidate
    nll: float
    final_nll: float = float("nan")
    weight: float = 0.0

    def told(self) -> dict[str, Any]:
        """As numbers and words."""
        facts = {"hidden_layer_sizes": list(self.candidate.hidden_layer_sizes), "candidate": str(self.candidate)}
        return vars(self.candidate) | facts | {"nll": self.nll, "final_nll": self.final_nll, "weight": self.weight}


@dataclass(frozen=True, eq=False)
class Expert:
    """A trained network of the mixture, and the rows that it has not seen."""

    candidate: Candidate
    network: nn.Module
    held: Array
    curve: Array
    log_precision: float


@dataclass
class Race:
    """Candidates on one table.

    Attributes:
        x: Standardised inputs (N, F).
        targets: Targets by `log_target`: standardised (N, D), or classes (N,).
        shifts: What is added to a row's log-density, by `log_target`, to have it in units of y (N,).
        weight: Of the rows (N,).
        folds: Held-out rows of each network.
        effort: How much work.
        settings: An estimator: `n_passes`, `balanced`, `learning_rate`, `batch_size`.
        score: Log-density of its held-out rows (n,), of an expert, inputs and targets, in the units of the targets.
        seed: Of everything.
        tell: Is told what is being tried, and of how many networks.
        memory: Keeps what was trained, for a race that is cut off.
        columns: Of a wide table, those that the networks of a fold are given; None gives all.
    """

    x: Tensor
    targets: dict[bool, Tensor]
    shifts: dict[bool, Array]
    weight: Array | None
    folds: list[Array]
    effort: Effort
    settings: Any
    score: Callable[[Expert, Tensor, dict[bool, Tensor]], Array]
    seed: int
    tell: Callable[[str, int], None]
    memory: Memory
    columns: list[Array] | None = None
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.used = None if self.columns is None else np.unique(np.concatenate(self.columns))
        self.n_heats = N_HEATS if len(self.x) <= N_HEATS * MANY else 1  # many rows need but one fold to rank
        self.narrow = self.x if self.used is None else self.x[:, self.used]

    def run(
        self, candidates: Sequence[Candidate], likelihoods: Sequence[Likelihood] = ()
    ) -> tuple[list[Expert], Array]:
        """The networks of the mixture and their weights, which sum to 1; `trials` tells how everyone fared.

        `likelihoods` are those that the best of the candidates are tried under too.
        """
        chosen = list(candidates)
        if self.effort.heat_steps and len(chosen) > self.effort.finalists:
            chosen = self._heats(chosen)
            others = [replace(c, likelihood=kind) for c, kind in product(chosen[:N_VARIED], likelihoods)]
            if others := [c for c in others if c not in chosen and not (c.log_target and c.likelihood == "student")]:
                chosen = self._heats(others)
        else:
            self.trials = [Trial(c, float("nan")) for c in chosen]
        experts = list(self._trained(chosen, self.folds, self.effort.final_steps, self.effort.most_passes, "final"))
        held = np.concatenate(self.folds)
        values = np.full((len(chosen), len(self.x)), -np.inf)  # of every row under those who have not seen it
        for expert in experts:
            row = values[chosen.index(expert.candidate)]
            row[expert.held] = self._log_density(expert)
        share = None if self.weight is None else self.weight[held]
        means = np.average(values[:, held], axis=1, weights=share)
        means[~np.isfinite(means)] = -np.inf
        log = chosen[int(means.argmax())].log_target  # a mixture has one kind of target
        if not np.isfinite(means).any():
            return [], np.empty(0)
        alike = np.array([c.log_target == log for c in chosen])
        weights = np.zeros(len(chosen))
        weights[alike] = stacked(values[alike][:, held], share)
        for c, w, v in zip(chosen, weights, means, strict=True):
            i = next(i for i, trial in enumerate(self.trials) if trial.candidate == c)
            self.trials[i] = replace(self.trials[i], final_nll=-float(v), weight=float(w))
        by_network = np.array([weights[chosen.index(e.candidate)] / len(self.folds) for e in experts])
        kept = by_network > 0
        return [e for e, k in zip(experts, kept, strict=True) if k], by_network[kept] / by_network[kept].sum()

    def fit_into(self, seconds: float, candidates: Sequence[Candidate]) -> None:
        """Scale the work to what `seconds` allow, by the time that the largest candidate takes for a few steps."""
        largest = max(candidates, key=lambda c: sum(c.hidden_layer_sizes))
        members = [self._member(largest, self.folds[0], 0)] * 4
        start = time.perf_counter()
        self._population(members, largest, 60, HEAT_PASSES)
        step = (time.perf_counter() - start) / (60 * len(members))
        heats, final = self.networks(candidates)
        work = heats * self.effort.heat_steps + final * self.effort.final_steps
        factor = self.memory.recalled("effort", lambda: {"factor": seconds / (step * work)})["factor"]
        self.effort = self.effort.scaled(factor)

    def networks(self, candidates: Sequence[Candidate]) -> tuple[int, int]:
        """How many networks are trained in the heats and in the final, about."""
        finalists = min(len(candidates), self.effort.finalists)
        heats = bool(self.effort.heat_steps) and len(candidates) > finalists
        return heats * (len(candidates) + 2 * N_VARIED) * self.n_heats, finalists * self.effort.n_networks

    def tried(self, candidates: list[Candidate], steps: int) -> Array:
        """The NLL of held-out rows, a row, of each candidate after a training of so many steps (C,)."""
        folds = self.folds[: self.n_heats]
        held = np.concatenate(folds)
        share = None if self.weight is None else self.weight[held]
        values = np.full((len(candidates), len(self.x)), -np.inf)
        for expert in self._trained(candidates, folds, steps, HEAT_PASSES, "heats"):
            values[candidates.index(expert.candidate), expert.held] = self._log_density(expert)
        nll: Array = -np.average(values[:, held], axis=1, weights=share)
        nll[~np.isfinite(nll)] = np.inf
        return nll

    def _heats(self, candidates: list[Candidate]) -> list[Candidate]:
        """Try the candidates; the finalists: the best so far by held-out likelihood, all of one kind of target."""
        nll = self.tried(candidates, self.effort.heat_steps)
        self.trials += [Trial(c, float(v)) for c, v in zip(candidates, nll, strict=True)]
        ranked = [t.candidate for t in sorted(self.trials, key=lambda t: t.nll)]
        found: list[Candidate] = []
        for c in ranked:  # short heats favour one kind of unit over another: the final sees more than one
            alike = sum(c.kind == f.kind for f in found)
            if c.log_target == ranked[0].log_target and alike < max(2, self.effort.finalists // 2):
                found.append(c)
        return found[: self.effort.finalists]

    def _log_density(self, expert: Expert) -> Array:
        """Of the rows that an expert has not seen, in units of y (n,)."""
        return self.score(expert, self.x, self.targets) + self.shifts[expert.candidate.log_target][expert.held]

    def _trained(
        self, candidates: list[Candidate], folds: list[Array], steps: int, most_passes: int, stage: str
    ) -> Iterator[Expert]:
        """The networks of all candidates on all folds; those of one architecture and likelihood at once."""
        groups: dict[tuple[Any, ...], list[Candidate]] = {}
        for c in candidates:
            groups.setdefault((c.hidden_layer_sizes, c.likelihood, c.log_target, c.activation), []).append(c)
        pairs = [list(product(range(len(folds)), group)) for group in groups.values()]
        sizes = [len(f) for f in folds]
        names = [f"{stage} {steps} {most_passes} {list(map(str, group))} {sizes}" for group in groups.values()]

        def told(i: int) -> list[tuple[int, Candidate]]:
            group = list(groups.values())[i]
            more = f" and {len(group) - 1} more" if len(group) > 1 else ""
            self.tell(f"{stage}, {i + 1} of {len(groups)}: {group[0]}{more}", len(pairs[i]))
            return pairs[i]

        train = partial(self._alone()._networks, steps=steps, most_passes=most_passes)
        contents = self.memory.recalled_each(names, lambda missing: spread(train, map(told, missing)))
        for pair, content in zip(pairs, contents, strict=True):
            for (i, c), one in zip(pair, content["networks"], strict=True):
                network = self._widened(build(one["architecture"], one["state"]).eval())
                yield Expert(c, network, folds[i], np.asarray(one["curve"]), one["log_precision"])

    def _alone(self) -> "Race":
        """What training needs of this race, for another process."""
        bare: Any = copy.copy(self)
        bare.score = bare.tell = bare.shifts = None
        bare.memory, bare.trials = Memory(None), []
        names = ("batch_size", "epochs", "learning_rate", "n_passes", "balanced", "patience")
        bare.settings = SimpleNamespace(**{name: getattr(self.settings, name) for name in names})
        return cast(Race, bare)

    def _networks(self, pairs: list[tuple[int, Candidate]], *, steps: int, most_passes: int) -> dict[str, Any]:
        """What a fold and a candidate each come to, as plain values and tensors."""
        members = [self._member(c, self.folds[i], i) for i, c in pairs]
        population = self._population(members, pairs[0][1], steps, most_passes)
        found = []
        for m in range(len(pairs)):
            network, curve = population.network(m), population.nll[:, m]
            about = {"curve": curve[~curve.isnan()].tolist(), "log_precision": float(population.log_precision[m])}
            found.append({"architecture": describe(network), "state": dict(network.state_dict())} | about)
        return {"networks": found}

    def _widened(self, network: nn.Module) -> nn.Module:
        """A network of the used columns as one of all columns, whose other weights are 0."""
        if self.used is None:
            return network
        layers: list[Any] = list(network.children())
        place = next(i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear))
        first = layers[place]
        wide = nn.Linear(self.x.shape[1], first.out_features)
        with torch.no_grad():
            wide.weight.zero_()
            wide.weight[:, self.used] = first.weight
            wide.bias.copy_(first.bias)
        return nn.Sequential(*layers[:place], wide, *layers[place + 1 :]).eval()

    def _member(self, c: Candidate, held: Array, fold: int) -> Member:
        seen = np.ones(len(self.x), dtype=bool)
        seen[held] = False
        return Member(
            train=torch.as_tensor(np.flatnonzero(seen)), validation=torch.as_tensor(held), alpha=c.alpha,
            dropout=c.dropout, input_dropout=c.input_dropout, length_scale=c.length_scale, spread=c.spread,
            learning_rate=self.settings.learning_rate, seed=self.seed + fold,
            columns=self._places(fold),
        )  # fmt: skip

    def _places(self, fold: int) -> list[int] | None:
        """Where the columns of a fold stand among those that are used."""
        if self.columns is None or self.used is None:
            return None
        places: list[int] = np.searchsorted(self.used, self.columns[fold]).tolist()
        return places

    def _population(self, members: list[Member], kind: Candidate, steps: int, most_passes: int) -> Population:
        """Networks of the architecture, likelihood and target of a candidate."""
        n_rows = len(members[0].train)
        batch_size = self.settings.batch_size or batch_of(n_rows)
        if self.settings.epochs is not None:
            epochs, rows, least = self.settings.epochs, n_rows, FEW_EPOCHS
        else:
            n_looks = min(50, max(10, steps // (16 if n_rows <= MANY else 40)))  # at the held-out rows, at least
            rows = min(n_rows, max(batch_size, steps * batch_size // n_looks))
            epochs, least = max(1, round(steps * batch_size / rows)), 5
        return fit_population(
            self.narrow, self.targets[kind.log_target], members, epochs=epochs, likelihood=kind.likelihood,
            hidden_layer_sizes=kind.hidden_layer_sizes, activation=kind.activation,
            n_passes=min(self.settings.n_passes, most_passes), batch_size=batch_size,
            patience=self.settings.patience or max(least, epochs // 5), sample_weight=self.weight,
            n_validation_passes=int(np.clip(10_000 / len(self.folds[0]), 4, 20)),
            balanced=self.settings.balanced, epoch_rows=rows, standardise=False,
        )  # fmt: skip


def batch_of(n_rows: int) -> int:
    """Rows a step: 32 for few, and more, by powers of 2, for many.

    >>> [batch_of(n) for n in (100, 1000, 5000, 100_000, 10_000_000)]
    [32, 32, 64, 256, 512]
    """
    return int(2 ** np.clip(np.round(np.log2(np.sqrt(n_rows))), 5, 9))
