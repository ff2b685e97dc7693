"""Where the exact posterior is known: q is it at alpha = 0 if it can be, and as narrow as theory says if it cannot."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bbalpha.experiments.results import Ledger

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import figures_inference
import inference
import tables_inference


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    ledger = Ledger(tmp_path_factory.mktemp("inference") / "inference.json", command="x", seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "NETS_EPOCHS", 3)
        patch.setattr(inference, "PASSES", 25)
        inference.measure(ledger, sets=60, nets=2, steps=200)
    return ledger


@pytest.fixture(scope="module")
def rows(kept):
    return {(r["work"], r["alpha"]): r for r in kept.rows}


def test_q_is_the_posterior_where_it_can_be(rows):
    own = rows["orthogonal", 0.0]
    assert own["width"] == pytest.approx(1, abs=0.02)
    assert own["off"] < 0.06
    assert own["uniform_p"] > 1e-3
    assert own["coverage50"] == pytest.approx(0.5, abs=0.16)  # 3.5 deviations of 120 weights
    assert own["coverage90"] == pytest.approx(0.9, abs=0.1)


def test_alpha_0_is_too_narrow_where_weights_are_tied_to_each_other(rows):
    own = rows["correlated", 0.0]
    assert own["vi"] == pytest.approx(0.458, abs=1e-3)
    assert own["width"] == pytest.approx(own["vi"], rel=0.02)
    assert own["coverage90"] < 0.75
    assert own["uniform_p"] < 1e-3


@pytest.mark.parametrize("work", inference.CORRELATIONS)
def test_a_larger_alpha_is_wider(rows, work):
    own = [rows[work, alpha] for alpha in inference.ALPHAS]
    for narrow, wide in pairwise(own):
        assert wide["width"] > 1.2 * narrow["width"]
        assert wide["coverage90"] > narrow["coverage90"]


def test_too_wide_where_there_was_nothing_to_mend(rows):
    assert rows["orthogonal", 1.0]["uniform_p"] < 1e-3
    assert rows["orthogonal", 1.0]["coverage90"] > 0.95


def test_the_exact_posterior_is_that_of_the_prior_and_the_likelihood():
    x = inference.design(0.9)
    weights, y, _ = inference.simulated(x, 3, seed=0)
    mean, covariance = inference.exact(x, y)
    at = mean[0].clone().requires_grad_()

    def log_joint(w):
        return -0.5 * w.square().sum() - 0.5 * ((y[:, 0] - x @ w) / inference.NOISE).square().sum()

    (gradient,) = torch.autograd.grad(log_joint(at), at)
    assert gradient.abs().max() < 1e-9
    hessian = torch.autograd.functional.hessian(log_joint, mean[0])
    torch.testing.assert_close(-hessian, torch.linalg.inv(covariance))
    assert weights.shape == (3, 2)


def test_what_is_there_is_not_measured_again(kept):
    before = list(kept.rows)
    inference.measure(kept, sets=60, nets=2)
    assert kept.rows == before
    assert sum(r["work"] == "dropout" for r in before) == len(inference.ALPHAS)


def test_tables_and_figure(kept, monkeypatch, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/inference.json").write_text(kept.path.read_text())
    monkeypatch.setattr(tables_inference, "ROOT", tmp_path)
    assert "| orthogonal | 0 | 1.0" in tables_inference.gaussian()
    assert "over 2 data sets" in tables_inference.networks()
    picture = figures_inference.ranks_figure([r for r in kept.rows if "ranks" in r])
    assert len(picture.axes) == 6
