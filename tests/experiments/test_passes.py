import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bbalpha.experiments import results
from bbalpha.networks import mlp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import passes
import passes_floor
import tables_passes

ROOT = Path(__file__).resolve().parents[2]


def one_hidden_layer():
    torch.manual_seed(0)
    return mlp([3, 20, 2], dropout=0.2, input_dropout=0).eval(), torch.randn(6, 3)


def test_the_reference_of_a_linear_mean_is_the_network_as_it_is():
    """One hidden layer and dropout behind it: the mean over masks is the output without dropout."""
    net, x = one_hidden_layer()
    groups = passes.draw(net, x, 100, 30, first_seed=0, balanced=True, masks="per_example")
    value, own = passes.reference(groups, None)["mean"]
    with torch.no_grad():
        exact = net(x).double()
    assert (value - exact).square().mean().sqrt() < 4 * own.mean().sqrt() + 1e-5  # rates are multiples of 2^-16
    layer = net[3].weight.double()  # variance: p / (1 - p) times the squared products
    with torch.no_grad():
        hidden = net[1](net[0](x)).double()
    spread, own = passes.reference(groups, None)["variance"]
    assert (spread - 0.25 * hidden.square() @ layer.square().T).square().mean().sqrt() < 4 * own.mean().sqrt()


def test_the_own_error_of_a_reference_is_what_it_is_over_seeds():
    net, x = one_hidden_layer()
    found = [
        passes.reference(passes.draw(net, x, 20, 8, first_seed=100 * i, balanced=False, masks="per_example"), precision)
        for precision in (None, 4.0)
        for i in range(40)
    ]
    for quantity, own in (("mean", found[:40]), ("entropy", found[:40]), ("interval", found[40:])):
        values = torch.stack([f[quantity][0] for f in own])
        told = torch.stack([f[quantity][1] for f in own]).mean()
        assert 0.6 < told / values.var(0).mean() < 1.6, quantity


def test_an_error_has_that_of_the_truth_subtracted():
    generator = torch.Generator().manual_seed(0)
    found = 3.0 + torch.randn(400, 50, generator=generator).double()
    blurred = torch.randn(50, generator=generator).double()  # a truth that is off by as much
    told = passes.error(found, (blurred, torch.ones(50)))
    assert told["square"] == pytest.approx(
        1 + 9 + blurred.square().mean().item() - 6 * blurred.mean().item() - 1, rel=0.1
    )
    assert told["variance"] == pytest.approx(1.0, rel=0.05)
    assert told["bias"] == pytest.approx(3.0 - blurred.mean().item(), abs=0.05)


def test_equal_passes_follow_variance_and_bias():
    noise = {"square": 1.0, "variance": 1.0}
    assert passes.equal_passes(20, 0.01, noise) == pytest.approx(2000)
    assert passes.equal_passes(20, 0.0, noise) is None
    biased = {"square": 1.0, "variance": 0.5}  # K t: 0.5 t + 0.5 t^2
    t = 20 / passes.equal_passes(20, 0.25, biased)
    assert 0.5 * t + 0.5 * t * t == pytest.approx(0.25)
    row = passes.compared(20, noise | {"square_error": 0.1, "bias": 0.0}, noise | {"square_error": 0.1, "bias": 0.0})
    assert (row["ratio"], row["ratio_error"]) == (1.0, pytest.approx(math.sqrt(2) * 0.05))


def test_blocks_are_the_passes_in_their_order():
    pool = torch.arange(600).view(3, 100, 2)
    assert passes.blocks(pool, 100).equal(pool)
    assert passes.blocks(pool, 20).shape == (6, 20, 2)
    assert passes.blocks(pool, 20)[1, 0].tolist() == [40, 41]


def test_numbers_of_passes_are_told_to_two_digits():
    told = [tables_passes.count(n) for n in (None, 0.94, 3.14, 47.3, 1934.2, 250_300.0)]
    assert told == ["over 100,000", "0.9", "3.1", "47", "1,900", "over 100,000"]


def test_goals_name_what_does_not_reach_them():
    rows = [{"network": "a", "ratio": 0.5}, {"network": "b", "ratio": 0.7}]
    assert tables_passes.goal("Low", rows, 0.7) == "- Low: reached, 0.50 to 0.70."
    assert tables_passes.goal("Low", rows, 0.6) == "- Low: not reached by 1 of 2 (b); 0.50 to 0.70."
    assert not tables_passes.is_worse({"ratio": 1.2, "ratio_error": 0.1})
    assert tables_passes.is_worse({"ratio": 1.2, "ratio_error": 0.05})


@pytest.mark.slow
def test_passes_are_measured_by_a_command(tmp_path, monkeypatch):
    out = tmp_path / "results" / "passes.json"
    command = [sys.executable, "benchmarks/passes.py", "--quick", "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    rows = results.read(out)["rows"]
    assert {r["work"] for r in rows} == {"network", "last layer", "error", "gradient", "bias"}
    assert len({r["network"] for r in rows}) == 2
    means = [r["ratio"] for r in rows if r.get("quantity") == "mean" and r["n_passes"] == 100]
    assert max(means) < 1
    monkeypatch.setattr(tables_passes, "ROOT", tmp_path)
    for table in ("errors", "by_passes", "equal", "gradients", "spread", "unsure", "bias", "last_layer"):
        assert "digits MLP, 0.5" in getattr(tables_passes, table)()
    assert "of the 120 ratios" in tables_passes.worst()


@pytest.mark.slow
def test_training_with_either_kind_of_passes_is_measured(data_dir, tmp_path):
    command = [sys.executable, "benchmarks/passes_training.py", "--quick", "--out", str(tmp_path / "found.json")]
    subprocess.run(command, cwd=ROOT, check=True)
    found = results.read(tmp_path / "found.json")
    assert [r["balanced"] for r in found["rows"]] == [False, True]
    assert found["rows"][0]["total_log_likelihood"] != found["rows"][1]["total_log_likelihood"]


def test_differences_of_splits_are_paired():
    rows = [{"method": m, "alpha": a, "split": s} for m in ("bbalpha", "gbm") for a in (0.0, 0.5) for s in (0, 1)]
    assert set(tables_passes._by_split({"rows": rows}, "bbalpha")) == {0, 1}
    assert tables_passes._mean_error([1.0, 3.0]) == (2.0, pytest.approx(1.0))
    assert tables_passes._mean_error([1.0]) == (1.0, 0.0)


class _Problem:
    def __init__(self, net, held_out):
        self.net, self.held_out = net, held_out


def test_the_share_of_single_units_is_what_can_be_worked_out():
    p, v = 0.05, 0.05 / 0.95  # v is the variance of a unit's mask, whose mean is 1
    linear = torch.nn.Sequential(torch.nn.Dropout(p), torch.nn.Linear(3, 1))
    share, error = passes_floor.first_order_share(_Problem(linear, torch.ones(1, 3)), 20 * passes_floor.BLOCK)
    assert share == pytest.approx(1.0, abs=5 * error)
    product = torch.nn.Sequential(torch.nn.Dropout(p), torch.nn.Linear(1, 1, bias=False), torch.nn.Dropout(p))
    share, error = passes_floor.first_order_share(_Problem(product, torch.ones(1, 1)), 100 * passes_floor.BLOCK)
    expected = 2 * v / ((1 + v) ** 2 - 1)  # of the variance of a product of two masks
    assert share == pytest.approx(expected, abs=5 * error)
    assert 5 * error < 1 - expected
