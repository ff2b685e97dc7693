"""The classifiers that people would pick instead, on tables as they come, with the defaults of their packages.

    model = classifier("catboost", table, seed).fit(X, y)           # X a DataFrame with words and holes
    model.predict_proba(X_new)

Boosting gets words as categories and holes as they are; the others the usual pipeline: holes filled with the median or
the most frequent word, words one-hot, numbers standardised. All of it is learnt from the training rows. Ours takes the
table as it comes.
"""

from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier, VotingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from versus_peers import MC_DROPOUT, OURS
from versus_tables import ClassTable

from bbalpha import metrics
from bbalpha.estimators import BBAlphaClassifier

CLASSIFIERS = (
    *(name for name in OURS if name != "bbalpha-paper"), "mc-dropout", "ensemble", "logistic", "mlp", "forest",
    "hist-gbm", "lightgbm", "ngboost", "catboost",
)  # fmt: skip


class Categories(TransformerMixin, BaseEstimator):
    """Words as categories that are learnt from the training rows (another word is a hole); columns named c0, c1, ...

    Args:
        as_text: Words stay words, a hole among them becomes one: as CatBoost wants it.
    """

    def __init__(self, as_text: bool = False) -> None:
        self.as_text = as_text

    def fit(self, X: pd.DataFrame, y: Any = None) -> "Categories":
        words = [c for c in X if not pd.api.types.is_numeric_dtype(X[c])]
        self.categories_ = {c: pd.CategoricalDtype(sorted(X[c].dropna().unique())) for c in words}
        return self

    def transform(self, X: pd.DataFrame) -> pd.DataFrame:
        columns: dict[str, Any] = {}
        for c, own in self.categories_.items():
            known = X[c].where(X[c].isin(own.categories))
            columns[c] = X[c].fillna("missing").astype(str) if self.as_text else known.astype(own)
        X = X.assign(**columns)
        return X.set_axis([f"c{i}" for i in range(X.shape[1])], axis=1)


class Behind:
    """A classifier behind a preparation of its rows; scikit-learn's Pipeline takes NGBoost for never fitted."""

    def __init__(self, preparation: Any, model: Any) -> None:
        self.preparation, self.model = preparation, model

    def fit(self, X: pd.DataFrame, y: np.ndarray) -> "Behind":
        self.model.fit(self.preparation.fit_transform(X), y)
        return self

    def predict_proba(self, X: pd.DataFrame) -> np.ndarray:
        return self.model.predict_proba(self.preparation.transform(X))


def one_hot(table: ClassTable) -> Any:
    """Numbers standardised, words one-hot, holes filled."""
    numbers = [c for c in table.X if c not in table.words]
    encode = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return make_column_transformer(
        (make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), numbers),
        (make_pipeline(SimpleImputer(strategy="most_frequent"), encode), table.words),
    )


def classifier(method: str, table: ClassTable, seed: int) -> Any:
    """An estimator of `CLASSIFIERS` that takes rows of the table as they come."""
    if method in OURS:
        return BBAlphaClassifier(**OURS[method], random_state=seed)
    if method == "mc-dropout":
        return BBAlphaClassifier(**MC_DROPOUT, random_state=seed)
    if method == "hist-gbm":
        return Behind(Categories(), HistGradientBoostingClassifier(random_state=seed))
    if method == "lightgbm":
        from lightgbm import LGBMClassifier

        return Behind(Categories(), LGBMClassifier(random_state=seed, n_jobs=1, verbose=-1))
    if method == "catboost":
        from catboost import CatBoostClassifier

        places = [i for i, c in enumerate(table.X) if c in table.words]
        quiet = {"thread_count": 1, "allow_writing_files": False, "verbose": False}
        return Behind(Categories(True), CatBoostClassifier(random_seed=seed, cat_features=places, **quiet))
    if method == "ngboost":
        from ngboost import NGBClassifier
        from ngboost.distns import k_categorical

        model = NGBClassifier(Dist=k_categorical(table.n_classes), random_state=seed, verbose=False)
        return Behind(one_hot(table), model)
    makers = {
        "logistic": lambda: LogisticRegression(random_state=seed),
        "mlp": lambda: MLPClassifier(random_state=seed),
        "forest": lambda: RandomForestClassifier(random_state=seed),
        "ensemble": lambda: VotingClassifier(
            [(f"mlp{i}", MLPClassifier(random_state=1000 * i + seed)) for i in range(5)], voting="soft"
        ),
    }
    return Behind(one_hot(table), makers[method]())


def class_scores(probs: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """log_loss, accuracy and ece (15 bins) of probabilities (N, C).

    A probability of 0 for what happened would cost infinitely much: it counts as the eps of the method's own
    floating-point type (2e-16, or 1e-7 where it answers in single precision), as in scikit-learn's log_loss.
    """
    loss = float(log_loss(target, probs, labels=np.arange(probs.shape[1])))
    p, y = torch.as_tensor(np.asarray(probs, np.float64)), torch.as_tensor(target)
    return {"log_loss": loss, "accuracy": float(metrics.accuracy(p, y)), "ece": float(metrics.ece(p, y))}
