"""Tables with a class target that come inside packages: nothing is downloaded.

    table = load("cars")              # .X a DataFrame as it comes, .y class numbers (N,), .source a sentence

Columns of words stay words and holes stay holes; what a method cannot take it has to change by itself, from the
training rows (`versus_peers.py`).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from sklearn import datasets
from sklearn.model_selection import StratifiedKFold

N_FOLDS = 5


@dataclass(frozen=True, eq=False)
class ClassTable:
    """A table of any columns and the class of each row."""

    name: str
    X: pd.DataFrame
    y: np.ndarray  # (N,), 0 to C - 1
    source: str

    @property
    def n_classes(self) -> int:
        return int(self.y.max()) + 1

    @property
    def words(self) -> list[str]:
        """The columns that are no numbers."""
        return [c for c in self.X if not pd.api.types.is_numeric_dtype(self.X[c])]

    def split(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of training and test: fold k % 5 of the stratified shuffle of seed k // 5."""
        folds = StratifiedKFold(N_FOLDS, shuffle=True, random_state=k // N_FOLDS)
        return list(folds.split(self.X, self.y))[k % N_FOLDS]


@cache
def load(name: str) -> ClassTable:
    """A table of `TABLES` by name."""
    frame, target, source = TABLES[name]()
    keep = target.notna().to_numpy()
    frame = frame.loc[keep].reset_index(drop=True)
    y = pd.factorize(target[keep], sort=True)[0]
    for column in frame:
        if not pd.api.types.is_numeric_dtype(frame[column]):
            frame[column] = frame[column].astype(object).where(frame[column].notna(), np.nan)
    return ClassTable(name, frame, y, source)


Loaded = tuple[pd.DataFrame, pd.Series, str]


def _sklearn(name: str) -> Callable[[], Loaded]:
    def loaded() -> Loaded:
        bunch = getattr(datasets, f"load_{name}")(as_frame=True)
        return bunch.data, bunch.target, f"scikit-learn, load_{name}"

    return loaded


def _statsmodels(name: str) -> pd.DataFrame:
    from statsmodels import datasets as tables

    return getattr(tables, name).load_pandas().data


def _vega(name: str) -> pd.DataFrame:
    from vega_datasets import local_data

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it reads its files in a way that pandas will give up
        return getattr(local_data, name)()


def _coded(codes: Any) -> pd.Series:
    """Codes of kinds as words, so that nobody takes them for amounts."""
    return "kind " + codes.astype(int).astype(str)


def fair() -> Loaded:
    data = _statsmodels("fair")
    for column in ("occupation", "occupation_husb"):
        data[column] = _coded(data[column])
    return data.drop(columns="affairs"), data["affairs"] > 0, "statsmodels, fair: any affair; occupations as words"


def anes96() -> Loaded:
    data = _statsmodels("anes96")
    return data.drop(columns="vote"), data["vote"], "statsmodels, anes96: the vote of 1996"


def anes96_holes() -> Loaded:
    X, y, source = anes96()
    holes = np.random.default_rng(0).random(X.shape) < 0.1
    return X.mask(holes), y, f"{source}; we made holes of a tenth of the cells, at random"


def spector() -> Loaded:
    data = _statsmodels("spector")
    return data.drop(columns="GRADE"), data["GRADE"], "statsmodels, spector: a better grade"


def ccard() -> Loaded:
    data = _statsmodels("ccard")
    return data.drop(columns="OWNRENT"), data["OWNRENT"], "statsmodels, ccard: owner or tenant"


def modechoice() -> Loaded:
    data = _statsmodels("modechoice")
    wide = data.pivot(index="individual", columns="mode", values=["ttme", "invc", "invt", "gc"])
    wide.columns = [f"{what}_{int(mode)}" for what, mode in wide.columns]
    person = data.groupby("individual")[["hinc", "psize"]].first()
    chosen = data[data["choice"] == 1].set_index("individual")["mode"]
    return wide.join(person), chosen.loc[wide.index], "statsmodels, modechoice, a row a person: the way of travel"


def randhie() -> Loaded:
    data = _statsmodels("randhie")
    return data.drop(columns="mdvis"), data["mdvis"] > 0, "statsmodels, randhie: any visit to a doctor"


def grunfeld() -> Loaded:
    data = _statsmodels("grunfeld")
    return data.drop(columns="firm"), data["firm"], "statsmodels, grunfeld: which firm"


def cars() -> Loaded:
    data = _vega("cars")
    X = data.drop(columns=["Name", "Origin"]).assign(Year=data["Year"].dt.year, brand=data["Name"].str.split().str[0])
    return X, data["Origin"], "vega_datasets, cars: the origin; brands as words, holes as they come"


def weather() -> Loaded:
    data = _vega("seattle_weather")
    X = data.drop(columns=["date", "weather"]).assign(month=data["date"].dt.month_name())
    return X, data["weather"], "vega_datasets, seattle-weather: the weather; months as words"


def barley() -> Loaded:
    data = _vega("barley")
    return data.drop(columns="site"), data["site"], "vega_datasets, barley: the site; varieties as words"


def airports() -> Loaded:
    data = _vega("airports")
    states = data["state"].value_counts().index[:10]
    target = data["state"].where(data["state"].isin(states))
    return data[["latitude", "longitude"]], target, "vega_datasets, airports: the state, of the ten with the most"


TABLES: dict[str, Callable[[], Loaded]] = {
    "breast-cancer": _sklearn("breast_cancer"), "wine-cultivars": _sklearn("wine"), "iris": _sklearn("iris"),
    "digits": _sklearn("digits"), "spector": spector, "ccard": ccard, "anes96": anes96, "anes96-holes": anes96_holes,
    "modechoice": modechoice, "grunfeld": grunfeld, "fair": fair, "cars": cars, "barley": barley, "weather": weather,
    "airports": airports, "randhie": randhie,
}  # fmt: skip
