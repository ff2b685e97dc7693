"""Uncertainty for the network you already trained: dropout put in afterwards, if held-out rows are likelier with it.

    found = retrofit(net, (x_held_out, y_held_out), objective=bbalpha.CrossEntropy())
    print(found.summary())                                 # what was tried, what it gained, what is kept
    p = found.predict_classification(x_new)                # p.probs, p.entropy, p.mutual_information

A trained network with dropout before its layers is a posterior of a kind: each pass is a network near the one that was
trained. Whether it is a good one, and how wide it should be, nobody knows beforehand; held-out rows do. So rates and
places are tried, and what is compared is fair: the plain network gets its temperature, or the precision of its noise,
fitted to the held-out rows as every candidate does, unless it is better without. `crossfit` says when one of many is
better; if none is, the plain network is what comes back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bbalpha._files import Restoring
from bbalpha._kernels import draw_seed
from bbalpha.checks import check_any_seed, check_count, check_inner_share, check_model, check_number
from bbalpha.objectives import CrossEntropy, GaussianNLL
from bbalpha.prediction import predict_classification, predict_regression
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction
from bbalpha.training.candidates import PLAIN, Candidate, Search, Tuning
from bbalpha.training.crossfit import judge, standard_error
from bbalpha.training.feed import rng_state, set_rng_state
from bbalpha.training.fitting import epoch_bar
from bbalpha.training.heldout import Classes, Kind, Noisy, kind_of
from bbalpha.training.places import OWN, duplicate

RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Score:
    """How one candidate did on the held-out rows, its calibration fitted on other folds than it is scored on.

    Attributes:
        sites: Where the dropout is, in words.
        dropout: Its rate; None without dropout, and for rates of the model's own.
        epochs: Of fine-tuning; 0 for the weights as they were.
        calibration: The temperature, precision or factor fitted on all rows.
        nll: Mean negative log-likelihood a row.
        error: Its standard error.
        gain: What that is better than the plain network at its best, as given or calibrated; for the best of many
            candidates this is too good.
        gain_error: Its standard error, rows paired.
    """

    sites: str
    dropout: float | None
    epochs: int
    calibration: float
    nll: float
    error: float
    gain: float
    gain_error: float


@dataclass(frozen=True, eq=False)
class Retrofit:
    """A trained network with uncertainty, or without, where held-out rows were no likelier for it.

    Attributes:
        model: A copy of the network, with dropout where it was worth it; what to save.
        sites: Where the dropout is, in words; "none" where the plain network was kept.
        layers: The layers that it was put before, by name; none where it is the model's own.
        dropout: Its rate; None without dropout, and for rates of the model's own.
        fine_tuned: Epochs of fine-tuning that were kept; 0 where the weights are as they were.
        n_passes: What to predict with; None, no passes, where the plain network was kept.
        calibration: Fitted on the held-out rows: the temperature of a classifier, the noise precision of a network of
            means, the factor on precisions that a network predicts.
        gain: Nats a row by which the best dropout beats the plain network, chosen on other rows than it is scored on;
            below 0 where it loses.
        gain_error: Its standard error.
        margin: Standard errors that a candidate had to gain.
        scores: Every candidate, the plain network first; `pandas.DataFrame(found.scores)` is a table.
        kind: How predictions are made and scored.
    """

    model: nn.Module
    sites: str
    layers: tuple[str, ...]
    dropout: float | None
    fine_tuned: int
    n_passes: int | None
    calibration: float
    gain: float
    gain_error: float
    margin: float
    scores: tuple[Score, ...]
    kind: Kind

    @property
    def kept_plain(self) -> bool:
        """Whether no dropout was worth it."""
        return self.n_passes is None

    def predict_classification(
        self, x: Any, *, batch_size: int | None = None, seed: int | None = None, progress: bool | None = None
    ) -> ClassificationPrediction:
        """`bbalpha.predict_classification` with the model, the passes and the temperature that were chosen.

        Args:
            x: New inputs; these and the options are as there.
            batch_size: Rows at a time.
            seed: None draws from torch's global generator.
            progress: Whether a bar is shown.
        """
        if not isinstance(self.kind, Classes):
            raise TypeError("This network was fitted with GaussianNLL: use predict_regression.")
        return predict_classification(
            self.model, x, n_passes=self.n_passes, temperature=self.calibration, class_axis=self.kind.given.class_axis,
            batch_size=batch_size, seed=seed, progress=progress,
        )  # fmt: skip

    def predict_regression(
        self, x: Any, *, batch_size: int | None = None, seed: int | None = None, progress: bool | None = None
    ) -> RegressionPrediction:
        """`bbalpha.predict_regression` with the model, the passes and the precision that were chosen.

        Args:
            x: New inputs; these and the options are as there.
            batch_size: Rows at a time.
            seed: None draws from torch's global generator.
            progress: Whether a bar is shown.
        """
        if isinstance(self.kind, Classes):
            raise TypeError("This network was fitted with CrossEntropy: use predict_classification.")
        p = predict_regression(
            self.model, x, n_passes=self.n_passes, batch_size=batch_size, seed=seed, progress=progress,
            precision="predicted" if isinstance(self.kind, Noisy) else self.calibration,
        )  # fmt: skip
        if p.precision is None or not isinstance(self.kind, Noisy):
            return p
        return replace(p, precision=p.precision * self.calibration)

    def summary(self) -> str:
        """What was kept, what it gains, and what else was tried, each fine-tuning with its best epoch."""
        number = self.kind.number
        lines = [
            f"Kept: {self._kept()} and a {number} of {self.calibration:.4g}.",
            f"{'The best dropout' if self.kept_plain else 'It'} gives {self.gain:+.4f} ± {self.gain_error:.4f} nats a "
            "row over the plain network at its best, on rows that it was not chosen on.",
            f"To be kept a candidate had to gain {self.margin:.1f} standard errors.",
        ]
        runs: dict[tuple[Any, ...], Score] = {}
        for i, score in enumerate(self.scores):
            run = (score.sites, score.dropout, score.epochs > 0 if score.sites != PLAIN.name else i)
            runs[run] = min(runs.get(run, score), score, key=lambda s: s.nll)
        table: list[tuple[str, ...]] = [("dropout before", "rate", "epochs", number, "NLL", "gain on plain")]
        table += [_cells(score) for score in runs.values()]
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        rows = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        return "\n".join([*lines, "", *rows])

    def _kept(self) -> str:
        """In words."""
        if self.kept_plain:
            return "the plain network"
        if self.sites == OWN:
            kept = f"{OWN}, {'rates as they were' if self.dropout is None else f'at rate {self.dropout:g}'},"
        else:
            kept = f"dropout {self.dropout:g} before {self.sites}"
        tuned = f", fine-tuned for {self.fine_tuned} epoch{'s' * (self.fine_tuned > 1)}," if self.fine_tuned else ""
        return f"{kept}{tuned} with {self.n_passes} passes"


def retrofit(
    model: nn.Module,
    held_out: Any,
    *,
    objective: CrossEntropy | GaussianNLL,
    train: Any = None,
    rates: Sequence[float] = RATES,
    n_passes: int = 50,
    epochs: int = 10,
    learning_rate: float = 1e-3,
    batch_size: int = 128,
    progress: bool | None = None,
    seed: int | None = None,
) -> Retrofit:
    """A copy of a trained `model` with the dropout that makes held-out rows likeliest, or the plain one if none does.

    Without dropout of its own, a model has it put before its last linear layer, before the last three and before all
    of them, at each of the rates. One that has some has those rates tried, first as they are. Given training rows, the
    same is tried with a short fine-tuning by the alpha objective; everything but the last three layers stays as it is.

    The plain network has its temperature or precision fitted on the held-out rows, as all candidates have, unless it is
    better without. A candidate replaces it if it gains more than noise explains, given how many were tried
    (`bbalpha.training.crossfit.judge`): on the held-out rows the result is never less likely than the plain network,
    and where no dropout helps, the plain network is kept in about 39 of 40 cases.

    Args:
        model: Any module; not changed.
        held_out: At least 40 rows that were not trained on, independent of each other, as `fit` takes data; kept in
            memory, with the K outputs of one candidate.
        objective: CrossEntropy(...) for logits; GaussianNLL(...) for means, with precision="predicted" for a model that
            returns a precision too. Its alpha is that of fine-tuning; it is not changed.
        train: The rows `model` was trained on, as `fit` takes data; None leaves fine-tuning out.
        rates: Of dropout, in (0, 1). From the smallest up: larger ones are left out after two that do not help.
        n_passes: K, in scoring and in prediction; fine-tuning has 10.
        epochs: Of fine-tuning at most, for each rate; each epoch is a candidate, so that none is too late.
        learning_rate: Of fine-tuning, by Adam.
        batch_size: Of fine-tuning.
        progress: As in `fit`.
        seed: None draws one from torch's global generator; an int leaves that untouched.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> x = torch.randn(100, 2)
    >>> found = retrofit(net, (x, torch.randn(100, 1)), objective=GaussianNLL(), rates=(0.1,), seed=0)
    >>> found.kept_plain, found.predict_regression(x).interval(0.9)[0].shape
    (True, torch.Size([100, 1]))
    """
    check_model(model)
    kind, rates = kind_of(objective), _check_rates(rates)
    n_passes, epochs = check_count("n_passes", n_passes, least=2), check_count("epochs", epochs)
    tuning = Tuning(
        train, epochs, check_number("learning_rate", learning_rate, above=0), check_count("batch_size", batch_size)
    )
    if next(model.parameters(), None) is None:
        raise ValueError(f"`model` must have parameters; {type(model).__name__} has none.")
    if train is not None and train is held_out:
        raise ValueError("`held_out` must be rows that the model was not trained on; got the rows of `train`.")
    seed = check_any_seed(seed)
    before = rng_state()
    put_back: Callable[[], None] = (lambda: None) if seed is None else (lambda: set_rng_state(before))
    with Restoring(put_back), Restoring(put_back):
        base = draw_seed(None) if seed is None else seed
        if seed is not None:
            torch.manual_seed(seed)  # for a DataLoader's order
        search = Search(duplicate(model), held_out, kind, rates, n_passes, tuning, base)
        with epoch_bar(progress, search.most, unit="candidate") as bar:
            search.run(bar)
        return _result(search)


# ------------------------------------------------------------------------------ helpers


def _result(search: Search) -> Retrofit:
    """The best of those that beat the plain network, or that."""
    verdict = judge(search.plain, [c.found for c in search.tried], search.folds, seed=search.seed)
    passed = [c for c, passes in zip(search.tried, verdict.passes.tolist(), strict=True) if passes and c.at_hand]
    best = min(passed, key=lambda c: float(c.found.rows.mean()), default=None)
    chosen = best or Candidate(PLAIN, None, 0, search.plain)
    return Retrofit(
        chosen.made(search.model), chosen.place.name, chosen.place.layers, chosen.rate, chosen.epochs,
        None if best is None else search.n_passes, chosen.found.number, verdict.gain, verdict.error, verdict.margin,
        _scores(search), search.kind,
    )  # fmt: skip


def _scores(search: Search) -> tuple[Score, ...]:
    """Of the plain network, as it is given if it can be scored so, and calibrated; then of all that was tried."""
    plain = search.plain
    every = [*(Candidate(PLAIN, None, 0, found) for found in search.plains), *search.tried]
    return tuple(
        Score(
            c.place.name, c.rate, c.epochs, c.found.number, float(c.found.rows.mean()), standard_error(c.found.rows),
            float((plain.rows - c.found.rows).mean()), standard_error(plain.rows - c.found.rows),
        )
        for c in every
    )  # fmt: skip


def _cells(score: Score) -> tuple[str, ...]:
    """A line of the summary."""
    rate = "" if score.sites == PLAIN.name else "own" if score.dropout is None else f"{score.dropout:g}"
    gain = "" if score.gain == score.gain_error == 0 else f"{score.gain:+.4f} ± {score.gain_error:.4f}"
    epochs = str(score.epochs or "")
    return score.sites, rate, epochs, f"{score.calibration:.4g}", f"{score.nll:.4f} ± {score.error:.4f}", gain


def _check_rates(rates: Any) -> tuple[float, ...]:
    """Rates from the smallest up, each once."""
    try:
        given = list(rates)
    except TypeError:
        given = [rates]
    for rate in given:
        check_inner_share("rates", rate)
    if not given:
        raise ValueError("`rates` must hold at least one dropout rate; got none.")
    return tuple(sorted({float(rate) for rate in given}))
