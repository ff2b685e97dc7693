"""Every figure draws what it was given, on the axes it was given."""

import numpy as np
import pytest
import torch

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402

from bbalpha import metrics, plots  # noqa: E402
from bbalpha.predictive import RegressionPrediction  # noqa: E402


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def bands(ax=None, precision=4.0):
    x = torch.linspace(-2, 2, 40)[torch.randperm(40)]
    outputs = x.sin() + 0.1 * (1 + x.abs()) * torch.randn(50, 40)
    prediction = RegressionPrediction(outputs, None if precision is None else torch.tensor(precision))
    return x, prediction, plots.regression_bands(x, prediction, data=(x[:10], x[:10].sin()), ax=ax)


def reliability(ax=None):
    probs = torch.randn(500, 3).softmax(-1)
    r = metrics.reliability(probs, torch.multinomial(probs, 1).squeeze(-1))
    return plots.reliability_diagram({"one": r, "two": r}, ax=ax)


def rows():
    return [
        {"dataset": d, "method": m, "alpha": a, "split": s, "nll": v + s, "rmse": 1.0}
        for d in ("boston", "wine")
        for m, a, v in (("bbalpha", 0.5, 2.0), ("bbalpha", 1.0, 3.0), ("gp", None, 4.0))
        for s in range(3)
    ]


FIGURES = {
    "bands": lambda ax=None: bands(ax)[2],
    "reliability": reliability,
    "risk": lambda ax=None: plots.risk_coverage(
        {k: metrics.risk_coverage(torch.rand(50), torch.rand(50)) for k in "ab"}, ax=ax
    ),
    "entropy": lambda ax=None: plots.entropy_histogram({"in": torch.rand(50), "out": 2 * torch.rand(70)}, ax=ax),
    "learning": lambda ax=None: plots.learning_curves({"train": [3, 2, 1.5], "validation": [3, 2.5, 2.6]}, ax=ax),
    "scores": lambda ax=None: plots.method_scores(rows(), dataset="boston", ax=ax),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_have_title_units_and_go_where_they_are_told(name, tmp_path):
    _, mine = plt.subplots()
    assert FIGURES[name](mine) is mine
    ax = FIGURES[name]()
    assert ax is not mine
    assert ax.get_title()
    assert ax.get_ylabel()
    assert ax.get_xlabel() or name == "scores"
    ax.figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_bands_hold_the_mean_in_order_of_x():
    x, prediction, ax = bands()
    mean = next(line for line in ax.lines if line.get_label() == "mean")
    assert (np.diff(mean.get_xdata()) >= 0).all()
    assert np.allclose(mean.get_ydata(), prediction.mean[x.argsort()], atol=1e-6)
    assert len(ax.collections) == 2  # total behind epistemic
    total, epistemic = (c.get_paths()[0].get_extents().height for c in ax.collections)
    assert total > epistemic
    assert len(bands(precision=None)[2].collections) == 1


def test_scores_are_mean_and_standard_error():
    ax = plots.method_scores(rows(), dataset="wine", metric="nll")
    containers = ax.containers
    assert [float(c[0].get_ydata()[0]) for c in containers] == pytest.approx([3.0, 4.0, 5.0])
    low, high = containers[0][2][0].get_segments()[0][:, 1]
    assert (high - low) / 2 == pytest.approx(1 / np.sqrt(3))  # values 2, 3, 4
    assert [t.get_text() for t in ax.get_xticklabels()] == ["bbalpha\nalpha 0.5", "bbalpha\nalpha 1", "gp"]


def test_a_method_far_above_the_others_does_not_flatten_them():
    more = [{"dataset": "wine", "method": "gbm", "alpha": None, "split": i, "nll": 100.0 + i} for i in range(3)]
    ax = plots.method_scores([*rows(), *more], dataset="wine")
    assert ax.get_ylim()[1] < 8
    assert [t.get_text() for t in ax.texts] == ["101 ± 0.58"]
    assert not plots.method_scores(rows(), dataset="wine").texts


def test_panels_of_the_same_rows_agree_on_colours():
    only = {"dataset": "other", "method": "gp", "alpha": None, "split": 0, "nll": 1.0}
    colours = [
        plots.method_scores([*rows(), only], dataset=name).containers[-1][0].get_color() for name in ("wine", "other")
    ]
    assert colours[0] == colours[1]


def test_histogram_shares_sum_to_one():
    ax = plots.entropy_histogram({"in": torch.rand(50), "out": 2 * torch.rand(70)})
    for patch in ax.patches:
        assert patch.get_data().values.sum() == pytest.approx(1.0)


def test_lines_differ_without_colour():
    for i in range(7):
        for j in range(i):
            assert plots._DASHES[i] != plots._DASHES[j]
            assert plots._MARKERS[i] != plots._MARKERS[j]
    grey = [np.dot(to_rgb(c), (0.299, 0.587, 0.114)) for c in ("#5B8DB8", "#C9DCEB")]
    assert grey[1] - grey[0] > 0.2  # the bands


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.reliability_diagram({}), "at least one; got none"),
        (lambda: plots.learning_curves([1, 2]), "got list"),
        (lambda: plots.method_scores(rows(), dataset="naval"), "got the data sets .'boston', 'wine'."),
        (
            lambda: plots.regression_bands(torch.zeros(3, 2), RegressionPrediction(torch.zeros(2, 3, 2))),
            "one number a row",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
