import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch import nn

from bbalpha.experiments import mnist, results
from bbalpha.networks import mlp
from bbalpha.objectives import CrossEntropy
from bbalpha.prediction import predict_classification
from bbalpha.predictive import ClassificationPrediction


def test_digits_are_real_and_settings_are_chosen_on_rows_of_training(data_dir):
    whole = mnist.load(flat=True, n_test=100)
    assert whole.x.shape == (60_000, 784)
    assert whole.x_test.shape == whole.strange.shape == (100, 784)
    assert abs(float(whole.x.mean()) - 0.1307) < 1e-3
    held = mnist.load(flat=False, n_train=10, n_test=50, validation=True)
    assert held.x.shape == (10, 1, 28, 28)
    assert torch.equal(held.x_test.flatten(1), whole.x[50_000:50_050])
    assert torch.equal(held.y_test, whole.y[50_000:50_050])


def test_scores_are_those_of_scikit_learn():
    probs, target = torch.rand(200, 4).double().softmax(1), torch.randint(4, (200,))
    p = ClassificationPrediction(probs.log(), torch.zeros(200), probs, 1)
    found = mnist.scores(p, target)
    assert found["accuracy"] == pytest.approx(accuracy_score(target, probs.argmax(1)))
    assert found["total_log_likelihood"] == pytest.approx(-200 * log_loss(target, probs))
    assert found["auroc_error"] == pytest.approx(roc_auc_score(probs.argmax(1) != target, p.entropy))
    assert mnist.scores(p, probs.argmax(1))["auroc_error"] is None  # no error to be found


def test_strangers_are_found_by_entropy_and_by_disagreement():
    net = mlp([3, 8, 4], dropout=0.5)
    p, q = (predict_classification(net, scale * torch.randn(60, 3), n_passes=20, seed=0) for scale in (1.0, 4.0))
    found, strange = mnist.strangers(p, q), [0] * 60 + [1] * 60
    assert found["auroc_ood_entropy"] == pytest.approx(roc_auc_score(strange, torch.cat((p.entropy, q.entropy))))
    by_mi = torch.cat((p.mutual_information, q.mutual_information))
    assert found["auroc_ood_mi"] == pytest.approx(roc_auc_score(strange, by_mi))
    once = predict_classification(nn.Linear(3, 4), torch.randn(5, 3), n_passes=None)
    assert mnist.strangers(once, once)["auroc_ood_mi"] is None


def trainer(**options):
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    options = {"learning_rate": 0.1, "seed": 5, "batch_size": 20} | options
    passes = lambda net, x, seed: net(x)[None]  # noqa: E731
    return mnist.Trainer(net, (x, (x[:, 0] > 0).long()), passes, CrossEntropy(0.0), **options)


def test_a_trainer_takes_the_steps_of_adam_with_decay_on_weights():
    made = trainer()
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    seen = []
    made.passes = lambda net, x, seed: seen.append((x, seed)) or net(x)[None]
    for _ in range(7):
        made.step()
        x = seen[-1][0]
        loss = nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long()) + 1e-6 * net.weight.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(made.net.weight, net.weight)
    torch.testing.assert_close(made.net.bias, net.bias)
    assert made.steps_an_epoch == 3
    epochs = [torch.cat([x for x, _ in seen[i : i + 3]]) for i in (0, 3)]
    assert all(torch.equal(e.sort(0).values, made.data[0].sort(0).values) for e in epochs)  # every row once
    assert not torch.equal(*epochs)
    assert len({seed for _, seed in seen}) == 7


def test_a_trainer_counts_steps_alone_and_goes_on_where_it_was(tmp_path):
    ticks = iter(range(1000))
    made, other = trainer(clock=lambda: next(ticks)), trainer()
    for _ in range(4):
        made.step()
        next(ticks)  # something else takes time
        other.step()
    assert made.seconds == 4
    made.save(tmp_path)
    again = trainer(clock=lambda: next(ticks))
    again.resume(tmp_path)
    assert (again.n_steps, again.seconds) == (4, 4)
    assert [again.step() for _ in range(4)] == [other.step() for _ in range(4)]
    fresh = trainer()
    fresh.resume(tmp_path / "nothing")
    assert fresh.n_steps == 0


def test_curves_are_drawn_with_their_errors():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    curves = {"a": ([0, 1, 2, 3], [0.0, 90.0, 95.0, 96.0], [1.0, 1.0, 1.0, 1.0])}
    mnist.draw(ax, curves, xlabel="epoch", ylabel="accuracy")
    assert ax.get_xlabel() == "epoch"
    assert ax.lines[0].get_ydata().tolist() == [0.0, 90.0, 95.0, 96.0]
    heights = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (-1.0, 97.0)
    mnist.zoom(ax, curves)
    assert ax.get_ylim()[0] > 80  # the start is left out


@pytest.mark.slow
def test_settings_are_chosen_by_a_command(data_dir, tmp_path):
    root, out = Path(__file__).resolve().parents[2], tmp_path / "x.json"
    command = [sys.executable, "benchmarks/choose_mnist.py", "--quick", "--parts", "dense,runtime", "--out", str(out)]
    for _ in range(2):  # the second time there is nothing to do
        subprocess.run(command, check=True, cwd=root, capture_output=True)
        rows = results.read(out)["rows"]
        assert [(row["model"], row["learning_rate"]) for row in rows] == [("dense", 1e-3), ("runtime", 3e-4)]


def test_a_unit_is_dead_if_no_digit_wakes_it():
    path = Path(__file__).resolve().parents[2] / "benchmarks/dead_units.py"
    spec = importlib.util.spec_from_file_location("dead_units", path)
    dead_units = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(dead_units)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(6 * 4, 5), nn.ReLU())
    with torch.no_grad():
        for layer, bias in ((net[0], [-100.0] * 2 + [1.0] * 4), (net[4], [-100.0] * 3 + [1.0] * 2)):
            layer.weight *= 0.1
            layer.bias[:] = torch.tensor(bias)
    x = torch.rand(8, 1, 4, 4)
    assert dead_units.dead(net, x) == [(6, 2), (5, 3)]
    with torch.no_grad():
        net[0].weight[0], x[7] = 100.0, 1.0  # 9 pixels of weight 100 outweigh the bias, in this one digit
        net[0].bias[0] = -899.5
    assert dead_units.dead(net, x) == [(6, 1), (5, 3)]


@pytest.mark.slow
def test_dead_units_are_counted_by_a_command(data_dir, tmp_path):
    root, out = Path(__file__).resolve().parents[2], tmp_path / "x.json"
    command = [sys.executable, "benchmarks/dead_units.py", "--quick", "--out", str(out)]
    for _ in range(2):  # the second time there is nothing to do
        subprocess.run(command, check=True, cwd=root, capture_output=True)
        rows = results.read(out)["rows"]
        assert [(row["warm_up"], row["units"]) for row in rows] == [(w, n) for w in (None, 0.1) for n in (32, 32, 100)]
        assert all(0 <= row["dead"] < row["units"] for row in rows)
