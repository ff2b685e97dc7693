"""A query strategy for scikit-activeml: `BatchBALD`, over the passes of our classifiers.

    clf = SklearnClassifier(BBAlphaClassifier(), classes=np.arange(10))
    rows = BatchBALD().query(X, y, clf, batch_size=10)                    # y is nan where there is no label yet

scikit-activeml has one of its own, for ensembles; this one looks at few candidates of a large pool, and says where the
passes are too few for the batch.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import clone

from bbalpha import acquisition
from bbalpha.checks import check_flag
from bbalpha.integrations.modal import pass_probs

try:
    from skactiveml.base import SingleAnnotatorPoolQueryStrategy  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ImportError as error:
    raise ImportError(
        "`bbalpha.integrations.skactiveml` needs scikit-activeml; it is not installed. "
        "Use pip install 'bbalpha[skactiveml]'."
    ) from error


class BatchBALD(SingleAnnotatorPoolQueryStrategy):
    """The rows whose labels tell most together about a BBAlphaClassifier; see `bbalpha.acquisition.batch_bald`.

    Args:
        missing_label: What stands for a label that is not there.
        random_state: Of the label configurations that are drawn.
    """

    def __init__(self, missing_label: Any = np.nan, random_state: Any = None) -> None:
        super().__init__(missing_label=missing_label, random_state=random_state)

    def query(
        self,
        X: Any,
        y: Any,
        clf: Any,
        fit_clf: bool = True,
        sample_weight: Any = None,
        candidates: Any = None,
        batch_size: int = 1,
        return_utilities: bool = False,
    ) -> Any:
        """The rows to be labelled, in the order they were picked.

        Args:
            X: All rows, labelled or not (n_samples, n_features).
            y: Their labels; `missing_label` where there is none.
            clf: An SklearnClassifier around a BBAlphaClassifier, or a Pipeline that ends in one.
            fit_clf: Whether it is to be fitted on the rows that have a label.
            sample_weight: For that fit.
            candidates: None for all rows without a label; or indices of rows; or rows.
            batch_size: How many to choose.
            return_utilities: Whether to give the gains too (batch_size, n_samples): at each pick that of the chosen
                row, and for the others what theirs cannot exceed.
        """
        X, y, candidates, batch_size, return_utilities = self._validate_data(
            X, y, candidates, batch_size, return_utilities, reset=True
        )
        rows, mapping = self._transform_candidates(candidates, X, y)
        if check_flag("fit_clf", fit_clf):
            clf = clone(clf).fit(X, y) if sample_weight is None else clone(clf).fit(X, y, sample_weight)
        probs = pass_probs(getattr(clf, "estimator_", clf), rows)
        seed = int(self.random_state_.randint(2**31 - 1))
        found = acquisition.batch_bald(probs, batch_size, seed=seed)
        places = np.arange(len(rows)) if mapping is None else mapping
        chosen = places[found.indices.numpy()]
        if not return_utilities:
            return chosen
        return chosen, self._utilities(probs, found, places, len(rows) if mapping is None else len(X))

    @staticmethod
    def _utilities(
        probs: torch.Tensor, found: acquisition.Selection, places: NDArray[np.int64], n_rows: int
    ) -> NDArray[np.float64]:
        """Gains at each pick, and upper bounds of the gains of rows that were not picked (batch_size, n_rows)."""
        utilities = np.full((len(found.indices), n_rows), np.nan)
        bounds = acquisition.bald(probs).double().numpy()
        gains = found.scores.diff(prepend=torch.zeros(1, dtype=torch.float64)).numpy()
        left = np.ones(len(places), dtype=bool)
        for row, pick, gain in zip(utilities, found.indices.tolist(), gains, strict=True):
            row[places[left]] = np.minimum(bounds[left], np.nextafter(gain, -1.0))
            row[places[pick]] = gain
            left[pick] = False
        return utilities
