import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from bbalpha.cli import app
from bbalpha.experiments import classification, mnist, results
from bbalpha.experiments.classification import Config, Unit, reproduce, run, units
from bbalpha.training import cosine

TINY = Config(learning_rate=3e-3, epochs=3, batch_size=50, n_predict_passes=10, every=2)


@pytest.fixture
def digits():
    """Noise around ten patterns, and noise alone."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 784, generator=generator)
    y = torch.randint(10, (300,), generator=generator)
    x = (patterns[y] + 0.3 * torch.randn(300, 784, generator=generator)).clamp(0, 1)
    return mnist.Digits(x[:200], y[:200], x[200:], y[200:], torch.rand(50, 784, generator=generator))


def timeless(rows):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.mark.parametrize("unit", units("dense", [0.5], 1), ids=lambda unit: unit.label)
def test_a_row_an_epoch_with_everything_in_the_last(unit, digits, tmp_path):
    rows = run(unit, TINY, digits, tmp_path)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["accuracy"] is None for row in rows] == [True, False, False]
    assert rows[0]["seconds"] < rows[1]["seconds"] < rows[2]["seconds"]
    assert rows[2]["total_log_likelihood"] > rows[1]["total_log_likelihood"] > -100 * 2.4
    assert rows[2]["loss"] < rows[0]["loss"]
    assert rows[1]["auroc_ood_entropy"] is None
    assert 0 <= rows[2]["auroc_ood_entropy"] <= 1
    assert (rows[2]["auroc_ood_mi"] is None) == (unit.method == "nn")
    wanted = "model method alpha masks n_passes seed epoch seconds accuracy total_log_likelihood ece auroc_error"
    assert set(wanted.split()) < rows[2].keys()


def test_the_rate_rises_and_falls():
    config = Config(learning_rate=1.0, epochs=10, warm_up=0.2)
    assert [config.schedule(share) for share in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx(
        [0.0, 0.5 * cosine(0.1), cosine(0.2), cosine(0.6), 0.0]
    )
    assert replace(config, warm_up=None).schedule(0.0) == 1.0


@pytest.mark.parametrize("unit", units("dense", [0.5], 1), ids=lambda unit: unit.label)
def test_every_network_is_warmed_up(unit, digits, tmp_path):
    rows = run(unit, replace(TINY, warm_up=1e9), digits, tmp_path)  # the rate stays next to 0
    assert rows[-1]["loss"] == pytest.approx(rows[0]["loss"], rel=0.02)


def test_what_the_units_are():
    found = units("dense", [0.0, 0.5, 1.0], 3)
    assert len(found) == len(set(found)) == len({unit.name for unit in found}) == 18
    assert [unit.alpha for unit in found if unit.method == "mc-dropout" and unit.n_passes == 1] == [0.0] * 3
    assert sum(unit.masks == "shared" for unit in found) == 3
    assert all(unit.masks != "shared" for unit in units("cnn", [0.0, 0.5, 1.0], 1) + units("dense", [1.0], 1))
    assert len(units("cnn", [0.0, 0.5, 1.0], 3)) == 15


def test_the_networks_are_the_papers():
    rates = [m.p for m in classification.network("dense") if isinstance(m, torch.nn.Dropout)]
    assert rates == [0.5, 0.5, 0.5]  # the inputs too
    assert sum(p.numel() for p in classification.network("dense").parameters()) == 784 * 100 + 100 * 110 + 210
    assert not any(isinstance(m, torch.nn.Dropout) for m in classification.network("dense", dropout=0.0))
    plain = classification.network("cnn", dropout=0.0).train()
    x = torch.rand(2, 1, 28, 28)
    assert torch.equal(plain(x), plain(x))


@pytest.fixture
def small(monkeypatch, digits):
    """`reproduce` on few rows."""
    monkeypatch.setitem(classification.QUICK, "dense", TINY)
    monkeypatch.setattr(mnist, "load", lambda **options: digits)


@pytest.mark.parametrize("written", [False, True], ids=["before its row", "after its row"])
def test_a_run_that_was_cut_off_gives_the_same_rows(small, tmp_path, monkeypatch, written):
    options = {"models": ["dense"], "alphas": [0.5], "seeds": 1, "quick": True}
    reproduce(**options, out=tmp_path / "whole")
    note, calls = classification._Log.note, []

    def cut(log, progress):
        calls.append((log.unit.method, progress.epoch))
        if len(calls) in (2, 7, 10) and not written:  # inside bbalpha, mc-dropout and the plain network
            raise KeyboardInterrupt
        note(log, progress)
        if len(calls) in (2, 7, 10) and written:
            raise KeyboardInterrupt

    monkeypatch.setattr(classification._Log, "note", cut)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            reproduce(**options, out=tmp_path / "cut")
    text = reproduce(**options, out=tmp_path / "cut")
    whole, again = (results.read(tmp_path / out / "classification/dense.json") for out in ("whole", "cut"))
    assert timeless(again["rows"]) == timeless(whole["rows"])
    assert len(whole["rows"]) == 4 * TINY.epochs
    assert len(calls) == 4 * TINY.epochs + 3  # one epoch was repeated after every cut, no more
    assert {method for method, _ in calls} == {"bbalpha", "mc-dropout", "nn"}
    assert not (tmp_path / "cut/.state").exists()
    assert str(tmp_path / "cut/classification/dense.png") in text
    assert "alpha = 0.5, shared masks" in text


def test_finished_networks_are_not_trained_again(small, tmp_path, monkeypatch):
    options = {"models": ["dense"], "seeds": 1, "quick": True, "out": tmp_path}
    reproduce(**options, alphas=[1.0])
    trained = []
    monkeypatch.setattr(classification, "run", lambda unit, *rest, **options: trained.append(unit) or run(unit, *rest))
    reproduce(**options, alphas=[1.0, 0.0])
    assert [(unit.method, unit.alpha) for unit in trained] == [("bbalpha", 0.0)]
    with pytest.raises(ValueError, match="a quick run where a whole run"):
        reproduce(**options | {"quick": False}, alphas=[1.0])
    with pytest.raises(ValueError, match="some of dense, cnn; got rnn"):
        reproduce(**options | {"models": ["rnn"]}, alphas=[1.0])


def test_networks_of_other_settings_are_not_gone_on_with(small, tmp_path, monkeypatch):
    options = {"models": ["dense"], "alphas": [0.5], "seeds": 1, "quick": True}
    other = replace(TINY, learning_rate=1e-3)
    with monkeypatch.context() as patch:
        patch.setitem(classification.QUICK, "dense", other)
        reproduce(**options, out=tmp_path / "whole")
    note = classification._Log.note

    def cut(log, progress):
        if progress.epoch == 2:
            raise KeyboardInterrupt
        note(log, progress)

    with monkeypatch.context() as patch:
        patch.setattr(classification._Log, "note", cut)
        with pytest.raises(KeyboardInterrupt):
            reproduce(**options, out=tmp_path / "cut")
    monkeypatch.setitem(classification.QUICK, "dense", other)
    reproduce(**options, out=tmp_path / "cut")
    whole, again = (results.read(tmp_path / out / "classification/dense.json") for out in ("whole", "cut"))
    assert timeless(again["rows"]) == timeless(whole["rows"])
    monkeypatch.setitem(classification.QUICK, "dense", TINY)
    with pytest.raises(ValueError, match=r"results of learning_rate 0.003; .* has learning_rate 0.001"):
        reproduce(**options, out=tmp_path / "cut")


def rows_of(label_alpha, values):
    unit = Unit("dense", "bbalpha", label_alpha, "per_example", 10, 0)
    facts = {k: getattr(unit, k) for k in Unit.__dataclass_fields__}
    return [
        facts | {"seed": seed, "epoch": e + 1, "accuracy": v, "total_log_likelihood": -v, "auroc_ood_mi": None}
        for seed, own in enumerate(values)
        for e, v in enumerate(own)
    ]


def test_means_and_errors_over_seeds():
    rows = rows_of(0.5, [[0.5, 0.7], [0.7, 0.9]])
    rows.append(rows[0] | {"seed": 0, "epoch": 3, "accuracy": None})
    found = classification.curves(rows, "accuracy", 100)
    epochs, means, errors = found["alpha = 0.5"]
    assert epochs == [1, 2]
    assert means == pytest.approx((60, 80))
    assert errors == pytest.approx((10, 10))
    assert classification.last(rows) == rows[-1:]
    assert "80.00 ± 10.00" in classification.table(rows[:-1])


def test_the_command_on_real_digits(data_dir, tmp_path):
    command = ["reproduce", "classification", "--models", "dense", "--alphas", "0.5", "--quick", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "classification/dense.json").read_text())
    assert content["command"] == "bbalpha reproduce classification --models dense --quick"
    ends = [row for row in content["rows"] if row["epoch"] == 2]
    assert len(ends) == 4
    assert all(row["accuracy"] > 0.7 for row in ends)
    assert (tmp_path / "classification/dense.png").stat().st_size > 10_000


@pytest.mark.slow
def test_two_networks_side_by_side_are_those_one_after_the_other(data_dir, tmp_path):
    command = ["reproduce", "classification", "--models", "dense", "--alphas", "0.5", "--quick", "--out"]
    found = []
    for jobs in ("1", "2"):
        done = CliRunner().invoke(app, [*command, str(tmp_path / jobs), "--jobs", jobs])
        assert done.exit_code == 0, done.output
        found.append(timeless(results.read(tmp_path / jobs / "classification/dense.json")["rows"]))
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_command_with_the_cnn(data_dir, tmp_path):
    command = ["reproduce", "classification", "--models", "cnn", "--alphas", "0.5", "--quick", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = results.read(tmp_path / "classification/cnn.json")["rows"]
    assert len(rows) == 3
    assert all(row["accuracy"] > 0.9 for row in rows)
