"""Columns with long tails: found, squashed where held-out rows ask for it, and saved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bbalpha.estimators import BBAlphaClassifier, BBAlphaRegressor
from bbalpha.estimators.tails import FAR, fit_squash, squashed


def standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / x.std(0)


def test_only_long_tails_are_squashed() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 5))
    x[:, 1] = np.exp(2 * x[:, 1])
    x[:, 2] = 0.0
    x[:3, 2] = 1.0  # rare, and a code
    x[:, 3] = rng.standard_t(1, 400)
    x[:, 4] = np.where(rng.random(400) < 0.8, 0.0, np.exp(3 * x[:, 4]))  # most are one number
    z = standard(x)
    squash = fit_squash(z)
    assert (squash[1] > 0).tolist() == [False, True, False, True, True]
    found = squashed(z, squash)
    assert np.array_equal(found[:, [0, 2]], z[:, [0, 2]])
    for i in (1, 3, 4):
        assert np.array_equal(np.argsort(found[:, i], kind="stable"), np.argsort(z[:, i], kind="stable"))
        assert abs(found[:, i]).max() < abs(z[:, i]).max() / 2
        assert found[:, i].mean() == pytest.approx(0, abs=1e-9)
        assert found[:, i].std() == pytest.approx(1)
    assert squashed(z, np.zeros((4, 5))) is z


def logarithmic(n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """A target of the logarithms of its inputs."""
    rng = np.random.default_rng(1)
    logs = 1.5 * rng.normal(size=(n, 3))
    return np.exp(logs), logs[:, 0] * logs[:, 1] + 0.1 * rng.normal(size=n)


QUICK: dict[str, Any] = {"budget": "quick", "hidden_layer_sizes": (20,), "n_ensemble": 2, "random_state": 0}


def test_held_out_rows_ask_for_it_and_it_is_saved(tmp_path: Path) -> None:
    X, y = logarithmic()
    model = BBAlphaRegressor(**QUICK).fit(X[:250], y[:250])
    assert (model.x_squash_[1] > 0).all()
    assert "3 columns with long tails" in model.summary()
    assert model.score(X[250:], y[250:]) > 0.5
    model.save(tmp_path / "m")
    again = BBAlphaRegressor.load(tmp_path / "m")
    assert np.array_equal(again.predict(X), model.predict(X))


def test_a_linear_target_is_left_as_it_is() -> None:
    rng = np.random.default_rng(2)
    X = rng.standard_t(3, (300, 2))
    assert abs(standard(X)).max() > FAR
    model = BBAlphaRegressor(**QUICK).fit(X, X @ [1.0, -1.0] + 0.1 * rng.normal(size=300))
    assert not model.x_squash_.any()


def test_classes_too() -> None:
    X, _ = logarithmic(200)
    model = BBAlphaClassifier(budget="quick", n_ensemble=2, random_state=0).fit(X, np.log(X).sum(1) > 0)
    assert (model.x_squash_[1] > 0).all()


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01])
def test_a_rare_flag_stands_no_further_out_than_a_common_one(share: float) -> None:
    """Standardised by its deviation, a gap in one row of 100 stands at 10, where networks go anywhere."""
    rng = np.random.default_rng(3)
    X = np.column_stack([rng.normal(size=200), rng.permutation(np.arange(200) < 200 * share)])
    model = BBAlphaRegressor(hidden_layer_sizes=(5,), noise="constant", epochs=1, random_state=0).fit(X, X[:, 0])
    assert model._inputs(X)[:, 1].unique().diff().item() == pytest.approx(2)


def test_a_network_that_is_told_keeps_its_inputs() -> None:
    X, y = logarithmic(100)
    model = BBAlphaRegressor(hidden_layer_sizes=(20,), noise="constant", epochs=20, random_state=0).fit(X, y)
    assert not model.x_squash_.any()
