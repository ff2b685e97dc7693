"""What `retrofit` tries: every place, rate and epoch of fine-tuning, each scored on the held-out rows as it comes.

    search = Search(net, (x, y), kind_of(CrossEntropy()), rates=(0.1, 0.2), n_passes=50, tuning=tuning, seed=0)
    search.run(bar)
    search.plain, search.tried                       # what they scored; `crossfit.judge` compares them

Rates are climbed from the smallest up. What is left out, of rates as of epochs, is left out only where no fold asks for
it, so that the scores of a fold never hang on its own rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha._engine.inputs import Inputs
from bbalpha.training.crossfit import Fitted, Patience, deal, fitted
from bbalpha.training.feed import source
from bbalpha.training.fitting import fit
from bbalpha.training.heldout import HeldOut, Kind
from bbalpha.training.places import Place, all_features, features, places

PLAIN = Place("none")
_PASSES = 10  # of a step of fine-tuning
_MORE_RATES, _MORE_EPOCHS = 2, 3  # in a row that are the best so far for no fold

Rate = float | None  # None: the rates of the model's own


@dataclass(frozen=True)
class Tuning:
    """How fine-tuning is done.

    Attributes:
        train: Data as `fit` takes it; None for no fine-tuning.
        epochs: At most.
        learning_rate: Of Adam.
        batch_size: Rows a step.
    """

    train: Any
    epochs: int
    learning_rate: float
    batch_size: int


@dataclass(eq=False)
class Candidate:
    """Something that was tried.

    Attributes:
        place: Where the dropout is.
        rate: Of it.
        epochs: Of fine-tuning.
        found: How it scored.
        weights: Of the layers that were fine-tuned, {layer: state}; kept for the best epoch of a run alone.
    """

    place: Place
    rate: Rate
    epochs: int
    found: Fitted
    weights: dict[str, dict[str, Any]] | None = None

    @property
    def at_hand(self) -> bool:
        """Whether it can be made again."""
        return not self.epochs or self.weights is not None

    def made(self, model: nn.Module) -> nn.Module:
        """The network itself, of the plain one."""
        net = self.place.made(model, self.rate)
        for name, state in (self.weights or {}).items():
            net.get_submodule(name).load_state_dict(state)
        return net


class Search:
    """The plain network, what can be done to it, and what came of it.

    The plain one is taken as it is given or calibrated, whichever is likelier on rows that it was not calibrated on.

    Args:
        model: A copy that nobody else has; not changed.
        held_out: Data as `fit` takes it.
        kind: Of likelihood.
        rates: From the smallest up.
        n_passes: K.
        tuning: How fine-tuning is done, if it is.
        seed: Of masks, folds and training.
    """

    def __init__(
        self, model: nn.Module, held_out: Any, kind: Kind, rates: tuple[float, ...], n_passes: int, tuning: Tuning,
        seed: int,
    ) -> None:  # fmt: skip
        self.model, self.kind, self.rates, self.n_passes, self.seed = model, kind, rates, n_passes, seed
        self.tuning, self.tried = tuning, list[Candidate]()
        parameter = next(model.parameters())
        self.held = HeldOut.of(held_out, parameter.dtype, parameter.device)
        self.folds = deal(len(self.held.target), seed=seed)
        self.places = places(model, _few(self.held.x[0], model))
        self.outputs = kind.passes(model, self.held.x, n_passes=None, seed=seed)  # of the plain network
        self.plains = self._plains()
        self.plain = min(self.plains, key=lambda found: float(found.rows.mean()))
        if tuning.train is not None and not any(place.trained for place in self.places):
            raise ValueError(
                f"`train` needs a linear layer or a convolution to fine-tune; {type(model).__name__} calls none. "
                "Leave `train` out."
            )

    @property
    def most(self) -> int:
        """How many candidates there can be."""
        tuned = 0 if self.tuning.train is None else self.tuning.epochs
        return sum(len(self._rates(place)) * (1 + tuned * bool(place.trained)) for place in self.places)

    def run(self, bar: Any) -> None:
        """Try everything; the bar is told of every candidate, also of those that are left out."""
        for place in self.places:
            short, x = self._shortened(place)
            self._climb(place, 1, partial(self._as_it_is, short, x), bar)
            if self.tuning.train is not None and place.trained:
                short, x, data = self._training(short, x)
                self._climb(place, self.tuning.epochs, partial(self._tuned, short, x, data), bar)

    def _rates(self, place: Place) -> list[Rate]:
        given: list[Rate] = [None] if place.own else []
        return [*given, *self.rates] if place.layers or place.rates else given

    def _climb(self, place: Place, each: int, attempt: Callable[[Rate, Any], Tensor], bar: Any) -> None:
        """Try rates from the smallest up, until two in a row are the best so far for no fold; its own stand apart."""
        patience, rates = Patience(_MORE_RATES), self._rates(place)
        for i, rate in enumerate(rates):
            scores = attempt(rate, bar)
            if rate is not None and patience.out(scores):
                bar.update(each * (len(rates) - i - 1))
                return

    def _as_it_is(self, place: Place, x: list[Any], rate: Rate, bar: Any) -> Tensor:
        """Dropout put in, weights as they are; the scores of the folds (F,)."""
        candidate = Candidate(place, rate, 0, self._score(place.run(place.made(self.model, rate)), x))
        self.tried.append(candidate)
        self._tell(bar, 1)
        return candidate.found.without

    def _tuned(self, place: Place, x: list[Any], data: Any, rate: Rate, bar: Any) -> Tensor:
        """Dropout put in and the last layers trained with it, every epoch a candidate; the best scores of the folds."""
        net = place.made(self.model, rate)
        layers = {name: net.get_submodule(name) for name in place.trained}
        for p in net.parameters():
            p.requires_grad_(False)
        for p in (p for layer in layers.values() for p in layer.parameters()):
            p.requires_grad_(True)
        patience, run = Patience(_MORE_EPOCHS), list[Candidate]()

        def look(_: Any) -> bool:
            candidate = Candidate(place, rate, len(run) + 1, self._score(place.run(net), x))
            if all(candidate.found.nll < other.found.nll for other in run):
                for other in run:
                    other.weights = None
                candidate.weights = {name: _state(layer) for name, layer in layers.items()}
            run.append(candidate)
            self.tried.append(candidate)
            self._tell(bar, 1)
            return patience.out(candidate.found.without)

        fit(
            _InEvaluation(place.run(net)), data, objective=self.kind.objective(self.plain.number), n_passes=_PASSES,
            epochs=self.tuning.epochs, learning_rate=self.tuning.learning_rate, batch_size=self.tuning.batch_size,
            callback=look, progress=False, seed=self.seed,
        )  # fmt: skip
        bar.update(self.tuning.epochs - len(run))
        return torch.stack([candidate.found.without for candidate in run]).amin(0)

    def _plains(self) -> list[Fitted]:
        """The plain network as it is given, where that says how likely a row is, and with a number fitted."""
        rows, start = self.kind.likelihood(self.outputs, self.held)
        calibrated = fitted(rows, start, self.folds, reach=self.kind.reach)
        if not self.kind.as_given:
            return [calibrated]
        given = rows(1.0).double()
        return [replace(calibrated, number=1.0, nll=float(given.mean()), rows=given), calibrated]

    def _score(self, net: nn.Module, x: list[Any]) -> Fitted:
        outputs = self.kind.passes(net, x, n_passes=self.n_passes, seed=self.seed)
        return fitted(*self.kind.likelihood(outputs, self.held), self.folds, reach=self.kind.reach)

    def _tell(self, bar: Any, count: int) -> None:
        best = min(c.found.nll for c in self.tried)
        bar.set_postfix({"plain": f"{self.plain.nll:.4g}", "best": f"{best:.4g}"}, refresh=False)
        bar.update(count)

    # ---- the part of a network that has to be run

    def _shortened(self, place: Place) -> tuple[Place, list[Any]]:
        """A place and the held-out inputs of what is run: the last layer alone, if that gives what the network does."""
        if place.alone is not None:
            x: list[Any] = [features(self.model, place.alone, batch) for batch in self.held.x]
            same = self.kind.passes(self.model.get_submodule(place.alone), x, n_passes=None, seed=self.seed)
            if all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip(same, self.outputs, strict=True)):
                return place, x
        return replace(place, alone=None), self.held.x

    def _training(self, place: Place, x: list[Any]) -> tuple[Place, list[Any], Any]:
        """A place, the held-out inputs and the training data of what is run; features are kept if there is room."""
        if place.alone is not None:
            dtype = next(self.model.parameters()).dtype
            rows = source(self.tuning.train, batch_size=1024, dtype=dtype, shuffle=False, name="train")
            kept = all_features(self.model, place.alone, rows.epoch(self.seed, 0))
            if kept is not None:
                return place, x, kept
        return replace(place, alone=None), self.held.x, self.tuning.train


class _InEvaluation(nn.Module):
    """A network that stays in evaluation mode while it is trained: statistics of batch norm do not move."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        return self.model(*args, **kwargs)

    def train(self, mode: bool = True) -> "_InEvaluation":
        """The model inside takes no notice."""
        self.training = mode
        return self


def _few(x: Any, model: nn.Module) -> Any:
    """Two rows to look at a model with."""
    inputs = Inputs.of(x, 0, model=model)
    return inputs.narrow(0, 2).x if (inputs.rows or 0) > 2 else inputs.x


def _state(layer: nn.Module) -> dict[str, Any]:
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in layer.state_dict().items()}
