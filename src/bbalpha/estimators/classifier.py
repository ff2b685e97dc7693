"""`BBAlphaClassifier`: a dropout network for classes.

Inputs are standardised inside. Predictions share the masks of each pass over all rows, from a seed kept at `fit`, so a
row gets the same answer in any company.

    model = BBAlphaClassifier(alpha=0.5).fit(X, y)
    model.predict_proba(X_new), model.predict_mutual_information(X_new)
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from bbalpha.estimators.base import Array, DropoutEstimator, Module, check_converged, keep_arguments, some_rows, weights
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

    Arguments are those of `BBAlphaRegressor`, but for `noise`; `dropout` is 0.05, `n_ensemble` 1, and no rows are held
    out, unless asked for otherwise; a `module` gives logits (N, C).

    >>> X = np.linspace(-1, 1, 64)[:, None]
    >>> model = BBAlphaClassifier(epochs=20, random_state=0).fit(X, X[:, 0] > 0)
    >>> model.predict([[-0.9], [0.9]]), model.predict_proba([[0.0]]).shape
    (array([False,  True]), (1, 2))
    """

    _fitted_names = (*DropoutEstimator._fitted_names, "classes_")

    def __init__(
        self,
        alpha: float = 0.5,
        *,
        hidden_layer_sizes: int | Sequence[int] = (50,),
        dropout: float | None = 0.05,
        input_dropout: float | None = None,
        length_scale: float = 1.0,
        n_passes: int = 10,
        n_predict_passes: int = 100,
        balanced: bool = True,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float = 0.01,
        n_ensemble: int | None = 1,
        validation_fraction: float | None = 0.0,
        patience: int | None = None,
        module: Module | None = None,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        keep_arguments(self, locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on `X` (N, F) and labels `y` (N,); returns self. A row of weight 0 is as if it were not there."""
        return self._fit_whole(X, y, sample_weight)

    def _fit(self, X: Any, y: Any, sample_weight: Any) -> None:
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        weight = weights(sample_weight, X)
        if weight is not None:
            X, y, weight = X[weight > 0], y[weight > 0], weight[weight > 0]
        self.classes_, index = class_indices(y)
        self._train(X, torch.as_tensor(index), weight)
        rows = some_rows(len(X))
        shares = np.bincount(index, weight) / (len(index) if weight is None else weight.sum())
        found = self._standard(self._standardised(X[rows])).log_probs.numpy()[np.arange(len(rows)), index[rows]]
        check_converged(self, found - np.log(shares[index[rows]]))

    def predictive(self, X: Any) -> ClassificationPrediction:
        """The predictive distribution itself; classes are indices into `classes_`."""
        return self._standard(self._inputs(X))

    def _standard(self, x: Tensor, n_passes: int | None = None) -> ClassificationPrediction:
        """That of standardised rows; `n_passes` are of each network."""
        n_passes = n_passes or self._passes()
        parts = [
            predict_classification(
                network, x.float() if self.uses_module_ else x, n_passes=n_passes, masks="shared",
                balanced=self.balanced, seed=self.seed_ + i, progress=False,
            )
            for i, network in enumerate(self._predictors())
        ]  # fmt: skip
        log_probs = torch.stack([p.log_probs for p in parts]).logsumexp(0) - np.log(len(parts))
        expected = torch.stack([p.expected_entropy for p in parts]).mean(0)
        votes = torch.stack([p.votes for p in parts]).mean(0)
        return ClassificationPrediction(log_probs, expected, votes, n_passes * len(parts))

    def _objective(self) -> nn.Module:
        return CrossEntropy(self.alpha)

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
