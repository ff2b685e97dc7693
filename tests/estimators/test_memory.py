"""A fit that was cut off goes on, finds nothing of another fit, and comes to the same model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbalpha.estimators import BBAlphaRegressor, race
from bbalpha.estimators.memory import Memory, remembering

SETTINGS: dict[str, Any] = {"hidden_layer_sizes": (8,), "epochs": 5, "n_ensemble": 2, "random_state": 0}


def table(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(60, 2))
    return X, X[:, 0] + 0.1 * rng.normal(size=60)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many networks each population had that was trained."""
    counts, train = [], race.fit_population
    monkeypatch.setattr(race, "fit_population", lambda *a, **k: (counts.append(len(a[2])), train(*a, **k))[1])
    return counts


def test_what_was_trained_is_not_trained_again(tmp_path: Path, trained: list[int]) -> None:
    X, y = table()
    plain = BBAlphaRegressor(**SETTINGS).fit(X, y).predict(X)
    n = len(trained)
    with remembering(tmp_path / "part"):
        first = BBAlphaRegressor(**SETTINGS).fit(X, y).predict(X)
        assert len(trained) == 2 * n
        again = BBAlphaRegressor(**SETTINGS).fit(X, y).predict(X)
    assert len(trained) == 2 * n
    assert np.array_equal(plain, first)
    assert np.array_equal(plain, again)


@pytest.mark.parametrize("change", ["rows", "targets", "alpha", "seed"])
def test_another_fit_finds_nothing_of_it(tmp_path: Path, trained: list[int], change: str) -> None:
    X, y = table()
    other = {"alpha": {"alpha": 1.0}, "seed": {"random_state": 1}}.get(change, {})
    with remembering(tmp_path / "part"):
        BBAlphaRegressor(**SETTINGS).fit(X, y)
        n = len(trained)
        X2, y2 = (X + (change == "rows") * np.arange(60)[:, None] % 2, y + (change == "targets") * np.arange(60) % 3)
        BBAlphaRegressor(**{**SETTINGS, **other}).fit(X2, y2)
    assert len(trained) == 2 * n


def test_a_part_that_is_damaged_is_trained_again(tmp_path: Path, trained: list[int]) -> None:
    X, y = table()
    with remembering(tmp_path / "part"):
        first = BBAlphaRegressor(**SETTINGS).fit(X, y).predict(X)
        n = len(trained)
        victim = next((tmp_path / "part").glob("*/weights.safetensors"))
        victim.write_bytes(victim.read_bytes()[:-1])
        assert np.array_equal(BBAlphaRegressor(**SETTINGS).fit(X, y).predict(X), first)
    assert len(trained) == n + 1


def test_nothing_is_kept_outside(tmp_path: Path) -> None:
    assert Memory.of(np.zeros(3)).about is None
    with remembering(tmp_path / "part"):
        assert Memory.of(np.zeros(3)).about is not None
    assert Memory.of(np.zeros(3)).about is None
