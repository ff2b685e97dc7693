import numpy as np
import pytest
import torch

from bbalpha.estimators import BBAlphaRegressor
from bbalpha.estimators.choices import default_input_dropout, duration, held_out_share, member, n_held_out
from bbalpha.training import feed


@pytest.mark.parametrize("n_rows", [1, 20, 300, 2000, 2001, 10_000, 10**6])
def test_defaults_by_rows_are_usable(n_rows):
    batch, epochs, patience = duration(BBAlphaRegressor(), n_rows)
    assert 1 <= batch <= 128
    assert 40 <= epochs <= 500
    assert patience is None if n_rows < 23 else 1 <= patience < epochs
    shorter = duration(BBAlphaRegressor(validation_fraction=0, hidden_layer_sizes=(50,), noise="constant"), n_rows)
    assert shorter[1] <= epochs  # nothing would notice that it has become too long
    assert shorter[2] is None
    assert default_input_dropout(n_rows, 0.05) in (0.05, 0.0)
    assert 0 <= n_held_out(BBAlphaRegressor(), n_rows) < n_rows
    assert n_held_out(BBAlphaRegressor(validation_fraction=0, hidden_layer_sizes=(50,), noise="constant"), n_rows) == 0


def test_what_is_given_is_taken():
    given = BBAlphaRegressor(batch_size=7, epochs=3, patience=2, hidden_layer_sizes=(50,), noise="constant")
    assert duration(given, 100) == (7, 3, 2)
    assert duration(given.set_params(validation_fraction=0), 100) == (7, 3, None)


def test_a_member_holds_out_the_rows_that_fit_holds_out():
    X = np.arange(60.0)[:, None]
    model = BBAlphaRegressor(epochs=1, random_state=0, hidden_layer_sizes=(50,), noise="constant").fit(X, X[:, 0])
    one = member(model, np.arange(60), model.seed_, {"alpha": 0.5, "dropout": 0.05, "length_scale": 1.0})
    data, held = feed.held_out((torch.arange(60), torch.arange(60)), held_out_share(model, 60), model.seed_)
    assert one.train.tolist() == data[0].tolist()
    assert one.validation.tolist() == held[0].tolist()
    whole = member(model.set_params(validation_fraction=0), np.arange(60), 0, {"alpha": 0.5, "dropout": 0.05})
    assert whole.validation is None
    assert sorted(whole.train.tolist()) == list(range(60))


def test_held_out_fractions_are_checked():
    tenth = BBAlphaRegressor(validation_fraction=0.1, hidden_layer_sizes=(50,), noise="constant")
    assert n_held_out(tenth, 49) == 5
    assert n_held_out(tenth, 40) == 0  # too few to tell anything
    assert [n_held_out(BBAlphaRegressor(), n) for n in (50, 2000, 3000)] == [10, 400, 300]
    with pytest.raises(ValueError, match=r"at least 0 and less than 1; got 1\.0"):
        n_held_out(BBAlphaRegressor(validation_fraction=1.0, hidden_layer_sizes=(50,), noise="constant"), 10)
