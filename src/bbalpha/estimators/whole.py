"""What every estimator does with its settings and its fitted state: kept, checked, changed at once or not at all."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from sklearn.base import BaseEstimator

from bbalpha.checks import RULES, check_settings

_OPTIONAL = ("dropout", "input_dropout", "epochs", "batch_size", "n_ensemble", "validation_fraction", "patience")
_CHOSEN = ("alpha", "hidden_layer_sizes", "dropout", "input_dropout", "length_scale")  # may be "auto"


def keep_arguments(estimator: Any, given: Mapping[str, Any]) -> None:
    """Set what the constructor of `estimator` was given, its `locals()`, as attributes, as scikit-learn wants it."""
    vars(estimator).update({name: value for name, value in given.items() if name not in ("self", "__class__")})


class WholeFit(BaseEstimator, ABC):
    """An estimator whose fitted state changes at once, at the end of `fit`, or not at all."""

    # all that a fit may set: what one of them does not set is not left over from another
    _fitted_names: ClassVar[tuple[str, ...]] = ("n_features_in_", "feature_names_in_", "seed_")

    def _fit_whole(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> Self:
        """Fit another of this kind with the same settings, checked, and take over what it has learnt."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self._unfitted() | self._checked())
        other._fit(X, y, sample_weight, groups)
        learnt = {name: value for name, value in vars(other).items() if name in self._fitted_names}
        self.__dict__ = self._unfitted() | learnt  # one step: an interrupt comes before it or after it
        return self

    def _unfitted(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self._fitted_names}

    def _checked(self) -> dict[str, Any]:
        """The settings that have a rule, as Python's own numbers."""
        left = [k for k in _CHOSEN if k in vars(self) and isinstance(vars(self)[k], str) and vars(self)[k] == "auto"]
        given = {k: v for k, v in vars(self).items() if k in RULES and k not in left}
        return check_settings(given, optional=_OPTIONAL) | {k: None for k in left if "dropout" in k}

    @abstractmethod
    def _fit(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> None:
        """Set all fitted attributes."""
