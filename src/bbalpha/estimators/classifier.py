"""`BBAlphaClassifier`: a dropout network for classes.

Inputs are standardised inside. Predictions share the masks of each pass over all rows, from a seed kept at `fit`, so a
row gets the same answer in any company.

    model = BBAlphaClassifier(alpha=0.5).fit(X, y)
    model.predict_proba(X_new), model.predict_mutual_information(X_new)
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor, nn

from bbalpha.checks import check_inner_share
from bbalpha.estimators.base import FEW, DropoutEstimator
from bbalpha.estimators.choices import classification_grid, is_auto
from bbalpha.estimators.dealing import same_records
from bbalpha.estimators.mixing import conformal_level
from bbalpha.estimators.race import Expert
from bbalpha.estimators.soundness import (
    check_converged,
    check_groups,
    check_long_enough,
    diverged,
    one_thread,
    settled,
    some_rows,
    weights,
)
from bbalpha.estimators.storing import Array, Module
from bbalpha.estimators.thinned import is_plain, thinned_passes
from bbalpha.estimators.whole import keep_arguments
from bbalpha.objectives import CrossEntropy
from bbalpha.prediction import predict_classification
from bbalpha.predictive import ClassificationPrediction
from bbalpha.training.bank import Likelihood


class Classification(ClassifierMixin):
    """What a classifier answers, out of its `predictive` distribution and `classes_`."""

    predictive: Callable[[Any], ClassificationPrediction]

    def predict(self, X: Any) -> Array:
        """The likeliest class (N,)."""
        likeliest = self.predict_proba(X).argmax(1)
        label: Array = self.classes_[likeliest]
        return label

    def predict_proba(self, X: Any) -> Array:
        """Mean probabilities over passes, in the order of `classes_` (N, C)."""
        return self.predictive(X).probs.numpy()

    def predict_log_proba(self, X: Any) -> Array:
        """Their logarithm (N, C)."""
        return self.predictive(X).log_probs.numpy()

    def predict_entropy(self, X: Any) -> Array:
        """Entropy of the mean probabilities, in nats: the whole uncertainty (N,)."""
        return self.predictive(X).entropy.numpy()

    def predict_mutual_information(self, X: Any) -> Array:
        """How much the passes disagree, in nats: what more data would settle (N,)."""
        return self.predictive(X).mutual_information.numpy()


class BBAlphaClassifier(Classification, DropoutEstimator):
    """A dropout network for classes, trained with the alpha objective; knows how unsure it is.

    Arguments are those of `BBAlphaRegressor`, but for `noise`; a `module` gives logits (N, C). `class_weight` is as in
    scikit-learn: weights by class, or "balanced".

    >>> X = np.linspace(-1, 1, 64)[:, None]
    >>> model = BBAlphaClassifier(budget="quick", epochs=20, random_state=0).fit(X, X[:, 0] > 0)
    >>> model.predict([[-0.9], [0.9]]), model.predict_proba([[0.0]]).shape
    (array([False,  True]), (1, 2))
    """

    _fitted_names = (*DropoutEstimator._fitted_names, "classes_")

    def __init__(
        self,
        alpha: float = 0.5,
        *,
        hidden_layer_sizes: int | Sequence[int] | Literal["auto"] = "auto",
        dropout: float | Literal["auto"] | None = "auto",
        input_dropout: float | Literal["auto"] | None = "auto",
        length_scale: float | Literal["auto"] = 1.0,
        budget: float | Literal["quick", "standard", "thorough"] = "standard",
        n_passes: int = 10,
        n_predict_passes: int = 100,
        balanced: bool = True,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 0.01,
        n_ensemble: int | None = None,
        validation_fraction: float | None = None,
        patience: int | None = None,
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        module: Module | None = None,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        keep_arguments(self, locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Train on `X` (N, F) and labels `y` (N,); returns self. A row of weight 0 is as if it were not there.

        Rows of one of the `groups` (N,) are held out together, as are rows that are there more than once.
        """
        return self._fit_whole(X, y, sample_weight, groups)

    def _fit(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> None:
        X, y, weight = self._read(X, y, sample_weight)
        check_classification_targets(y)
        if self.class_weight is not None:
            by_class = compute_sample_weight(self.class_weight, y)
            weight = weights(by_class if weight is None else weight * by_class, X)
        groups = check_groups(groups, len(X))
        if weight is not None:
            some = weight > 0
            X, y, weight, groups = X[some], y[some], weight[some], None if groups is None else groups[some]
        self.classes_, index = class_indices(y)
        groups = same_records(X) if groups is None else groups
        if self._automatic():
            self._choose(X, index, weight, groups)
        else:
            self._train(X, torch.as_tensor(index), weight, groups)
        rows = some_rows(len(X))
        shares = np.bincount(index, weight) / (len(index) if weight is None else weight.sum())
        found = self._standard(self._standardised(X[rows])).log_probs.numpy()[np.arange(len(rows)), index[rows]]
        check_converged(self, found - np.log(shares[index[rows]]))
        check_long_enough(self, len(X))

    def _choose(self, X: Array, index: Array, weight: Array | None, groups: Array | None) -> None:
        """The automatic way: a race, and a mixture of its winners."""
        x, target = self._scale(X, weight), torch.as_tensor(index)
        experts = self._race(x, {False: target}, {False: np.zeros(len(x))}, weight, groups, classification_grid(self))
        self.objectives_ = [self._objective() for _ in experts]
        if not all(map(settled, self.networks_, self.objectives_)):
            raise diverged(self)
        self.scores_ = self._held_out_misfit(experts, x, target)

    def _held_out_misfit(self, experts: list[Expert], x: Tensor, target: Tensor) -> Array:
        """1 minus the probability of the class of each row, under the networks that had not seen it (n,)."""
        probs, total = np.zeros(len(target)), np.zeros(len(target))
        for expert, share in zip(experts, self.shares_, strict=True):
            probs[expert.held] += share * np.exp(self._score(expert, x, {False: target}))
            total[expert.held] += share
        held = np.flatnonzero(total)
        found: Array = 1 - probs[held] / total[held]
        return found

    def _score(self, expert: Expert, x: Tensor, targets: dict[bool, Tensor]) -> Array:
        n_passes = max(2, self._passes_asked() // 4)
        part = self._part(expert.network, x[expert.held].double(), n_passes, self.seed_)
        return part.log_prob(targets[False][expert.held]).numpy()

    def predict_set(self, X: Any, coverage: float = 0.9) -> Array:
        """The classes among which the true one is with frequency `coverage`, as bool (N, C); never empty.

        The rows of `fit`, each under the networks that had not trained on it, say how likely the true class must be
        held to be let in: new rows from the same source are covered as often, on average, up to what the choice of
        epochs and weights saw of those rows; whatever the model.
        """
        check_inner_share("coverage", coverage)
        probs = self.predictive(X).probs
        if self.scores_ is None:
            raise ValueError(
                "`predict_set` needs rows that were held out: fit with hidden_layer_sizes='auto', or see "
                "bbalpha.calibration.conformal_sets."
            )
        inside = probs >= 1 - conformal_level(self.scores_[:, None], coverage)[0] - 1e-12
        found: Array = (inside | (probs == probs.amax(1, keepdim=True))).numpy()
        return found

    def predictive(self, X: Any) -> ClassificationPrediction:
        """The predictive distribution itself; classes are indices into `classes_`."""
        return self._standard(self._inputs(X))

    def predict_passes(self, X: Any) -> Array:
        """Probabilities in each of `n_predict_passes` passes, dealt to the networks by their shares (K, N, C).

        Every pass is one function of all rows, which is what `bbalpha.acquisition` asks for.
        """
        x = self._inputs(X)
        parts = [
            self._part(network, x, k, self.seed_ + i, keep=True).pass_probs
            for i, (network, k) in enumerate(zip(self.networks_, self._passes(), strict=True))
            if k
        ]
        return torch.cat(parts).numpy()

    def _standard(self, x: Tensor, n_passes: int | None = None) -> ClassificationPrediction:
        """That of standardised rows; `n_passes` are of each network."""
        passes = [max(2, k) for k in self._passes()] if n_passes is None else [n_passes] * len(self.networks_)
        with one_thread() if len(x) <= FEW else nullcontext():
            parts = [
                self._part(network, x, k, self.seed_ + i)
                for i, (network, k) in enumerate(zip(self.networks_, passes, strict=True))
            ]
        share = torch.as_tensor(self.shares_)
        log_probs = (torch.stack([p.log_probs.double() for p in parts]) + share.log()[:, None, None]).logsumexp(0)
        expected = torch.tensordot(share, torch.stack([p.expected_entropy.double() for p in parts]), 1)
        votes = torch.tensordot(share, torch.stack([p.votes.double() for p in parts]), 1)
        return ClassificationPrediction(log_probs, expected, votes, sum(passes))

    def _part(
        self, network: nn.Module, x: Tensor, n_passes: int, seed: int, *, keep: bool = False
    ) -> ClassificationPrediction:
        """That of one network; its passes one by one, too, to `keep`."""
        if not self.uses_module_ and is_plain(network):
            rows = x.float() if len(x) > FEW else x
            log_probs = thinned_passes(network, rows, n_passes, seed=seed, balanced=self.balanced).log_softmax(-1)
            if bool(log_probs.isfinite().all()):  # if not, the other way tells where
                entropy = -(log_probs.exp() * log_probs).sum(-1).mean(0)
                votes = nn.functional.one_hot(log_probs.argmax(-1), log_probs.shape[-1]).to(log_probs.dtype).mean(0)
                mean, kept = log_probs.logsumexp(0) - np.log(n_passes), log_probs if keep else None
                return ClassificationPrediction(mean, entropy, votes, n_passes, pass_log_probs=kept)
        return predict_classification(
            *self._precise(network, x), n_passes=n_passes, masks="shared", balanced=self.balanced, seed=seed,
            keep_passes=keep, progress=False,
        )  # fmt: skip

    def _objective(self) -> nn.Module:
        return CrossEntropy(0.5 if is_auto(self.alpha) else self.alpha)

    def _likelihood(self) -> Likelihood:
        return "categorical"

    def _n_outputs(self) -> int:
        return len(self.classes_)

    def _shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        return {"classes_": (self._standard(x, 2).log_probs.shape[1],)}


def class_indices(labels: Array) -> tuple[Array, Array]:
    """The classes (C,), at least two, and which of them each label is (N,)."""
    classes, index = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"`y` must hold at least 2 classes; got 1 class: {classes[0]!r}.")
    return classes, index
