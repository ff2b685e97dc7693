import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bbalpha.cli import app
from bbalpha.data import UCIData
from bbalpha.experiments import regression
from bbalpha.experiments.results import read
from bbalpha.experiments.search import Choice, Config

NETS = (
    "bbalpha", "mc-dropout", "ensemble", "bbalpha-het", "bbalpha-ens", "bbalpha-2x", "bbalpha-balanced", "bbalpha-cv",
)  # fmt: skip


@pytest.fixture
def toy(monkeypatch):
    """A small data set by the name of every one, a config of few steps, a search unit for every split."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    y = 3 + X[:, 0] + 0.1 * rng.normal(size=60)
    orders = [rng.permutation(60) for _ in range(3)]
    data = {"now": UCIData("yacht", X, y, tuple((o[:50], o[50:]) for o in orders))}
    config = Config((8,), 16, (Choice(13 / 256, 0.0, 0.3, 4), Choice(26 / 256, 13 / 256, 1.0, 2)), 1, 2, n_together=1)
    monkeypatch.setattr(regression, "load_uci", lambda name: data["now"])
    monkeypatch.setattr(regression, "config_for", lambda *_, **__: config)
    return data


def run(out, **options):
    given = {"datasets": ["yacht"], "alphas": [0.0, 0.5], "splits": 2, "methods": NETS, "quick": False, "out": out}
    return regression.reproduce(**(given | options))


def rows(out):
    return read(out / "regression" / "yacht.json")["rows"]


def test_every_row_of_the_table_once(toy, tmp_path):
    told = run(tmp_path)
    assert str(tmp_path / "regression") in told
    found = rows(tmp_path)
    keys = [(r["method"], r["alpha"], r["split"]) for r in found]
    alphas = {"bbalpha": (0.0, 0.5), "mc-dropout": (0.0,), "ensemble": (None,), "bbalpha-cv": (None,)}
    expected = [(m, a, s) for m in NETS for s in (0, 1) for a in alphas.get(m, (0.5,))]
    assert sorted(map(str, keys)) == sorted(map(str, expected))
    for row in found:
        assert {"dataset", "nll", "rmse", "coverage90", "dropout", "input_dropout", "length_scale", "epochs"} <= set(
            row
        )
        assert row["dataset"] == "yacht"
    assert not (tmp_path / ".state/regression/yacht.json").exists()
    assert torch.get_num_threads() == 1
    before = (tmp_path / "regression/yacht.json").read_text()
    run(tmp_path)  # nothing is missing
    assert (tmp_path / "regression/yacht.json").read_text() == before


def test_variants_have_the_choice_of_alpha_one_half(toy, tmp_path):
    run(tmp_path)
    by = {(r["method"], r["alpha"], r["split"]): r for r in rows(tmp_path)}
    for split in (0, 1):
        for method in ("bbalpha-het", "bbalpha-ens", "bbalpha-2x", "bbalpha-balanced"):
            for key in ("dropout", "epochs", "length_scale", "validation_nll"):
                assert by[method, 0.5, split][key] == by["bbalpha", 0.5, split][key]
        best = min((by["bbalpha", a, split] for a in (0.0, 0.5)), key=lambda r: r["validation_nll"])
        assert by["bbalpha-cv", None, split]["nll"] == best["nll"]
        assert by["bbalpha-cv", None, split]["chosen_alpha"] == best["alpha"]


@pytest.mark.parametrize(("place", "call"), [("search", 2), ("fit_and_score", 4)])
def test_a_run_that_was_cut_off_goes_on_to_the_same_rows(toy, tmp_path, monkeypatch, place, call):
    run(tmp_path / "whole")
    calls = {"search": 0, "fit_and_score": 0}
    cut = [True]

    def counted(name, work):
        def wrapped(*args, **kwargs):
            calls[name] += 1
            if cut[0] and name == place and calls[name] == call:
                raise KeyboardInterrupt
            return work(*args, **kwargs)

        return wrapped

    for name in calls:
        monkeypatch.setattr(regression, name, counted(name, getattr(regression, name)))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut")
    cut[0] = False
    run(tmp_path / "cut")
    assert calls == {"search": 6 + (place == "search"), "fit_and_score": 7 + (place == "fit_and_score")}
    assert sorted(map(str, rows(tmp_path / "cut"))) == sorted(map(str, rows(tmp_path / "whole")))


def test_test_targets_change_no_hyper_parameter(toy, tmp_path):
    run(tmp_path / "a", splits=1)
    old = toy["now"]
    y = old.y.copy()
    y[old.split(0)[1]] = 1e3 - 50 * y[old.split(0)[1]]
    toy["now"] = UCIData("yacht", old.X, y, old.splits)
    run(tmp_path / "b", splits=1)
    scores = {"nll", "rmse", "coverage90"}
    for a, b in zip(rows(tmp_path / "a"), rows(tmp_path / "b"), strict=True):
        assert {k: v for k, v in a.items() if k not in scores} == {k: v for k, v in b.items() if k not in scores}
        assert a["rmse"] < b["rmse"]


def test_rates_survive_being_rounded_in_a_row(toy, tmp_path):
    run(tmp_path, methods=["bbalpha"])
    run(tmp_path, methods=["bbalpha-het"])  # its choice comes from the rows
    again = [r for r in rows(tmp_path) if r["method"] == "bbalpha-het"]
    run(tmp_path / "whole", methods=["bbalpha", "bbalpha-het"])
    assert again == [r for r in rows(tmp_path / "whole") if r["method"] == "bbalpha-het"]


def test_a_variant_whose_alpha_was_not_asked_for_has_a_search_of_its_own(toy, tmp_path):
    run(tmp_path, alphas=[0.0], methods=["bbalpha", "bbalpha-het"])
    found = [(r["method"], r["alpha"], r["split"]) for r in rows(tmp_path)]
    assert found == [("bbalpha", 0.0, 0), ("bbalpha", 0.0, 1), ("bbalpha-het", 0.5, 0), ("bbalpha-het", 0.5, 1)]


def test_settings_are_in_the_head_and_others_are_refused(toy, tmp_path, monkeypatch):
    run(tmp_path, methods=["bbalpha"], splits=1)
    assert read(tmp_path / "regression" / "yacht.json")["settings"]["candidates"][0] == [13 / 256, 0.0, 0.3, 4, 0.01]
    other = Config((9,), 16, (Choice(13 / 256, 0.0, 0.3, 4),), 1, 2)
    monkeypatch.setattr(regression, "config_for", lambda *_, **__: other)
    with pytest.raises(ValueError, match=r"results of hidden \[9\], .* has hidden \[8\]"):
        run(tmp_path, methods=["bbalpha"])


def test_more_splits_are_added(toy, tmp_path):
    run(tmp_path, methods=["bbalpha"], splits=1)
    first = rows(tmp_path)
    run(tmp_path, methods=["bbalpha"], splits=20)
    assert rows(tmp_path)[: len(first)] == first
    assert {r["split"] for r in rows(tmp_path)} == {0, 1, 2}  # as many as there are


def test_a_baseline_gets_the_rows_of_its_split(toy, tmp_path, monkeypatch):
    from bbalpha.experiments import baselines

    seen = []

    def method(x, y, x_test, y_test, *, seed, quick):
        seen.append((len(x), len(y), len(x_test), len(y_test), seed, quick))
        assert set(map(tuple, x)) & set(map(tuple, x_test)) == set()
        return {"nll": 1.0, "rmse": 2.0, "coverage90": 0.9, "rank": 3.0}

    monkeypatch.setitem(baselines.METHODS, "gp", method)
    monkeypatch.setitem(baselines.METHODS, "hmc", method)
    monkeypatch.setattr(baselines, "HMC_SPLITS", {"yacht": 1})
    run(tmp_path, methods=["hmc", "gp"])
    assert seen == [(50, 50, 10, 10, 0, False), (50, 50, 10, 10, 0, False), (50, 50, 10, 10, 1, False)]
    assert rows(tmp_path)[-1] == {
        "dataset": "yacht", "method": "gp", "alpha": None, "split": 1, "nll": 1.0, "rmse": 2.0, "coverage90": 0.9,
        "rank": 3.0,
    }  # fmt: skip


def test_a_quick_run_keeps_its_rows_apart(toy, tmp_path):
    run(tmp_path, methods=["bbalpha"], quick=True, datasets=[])
    assert {p.name for p in (tmp_path / "regression-quick").iterdir()} == {"yacht.json", "boston.json"}
    assert not (tmp_path / "regression").exists()


def test_names_are_checked_first(tmp_path):
    with pytest.raises(ValueError, match=r"`datasets` must be of boston, .*; got 'bostom'"):
        run(tmp_path, datasets=["bostom"])
    with pytest.raises(ValueError, match=r"`methods` must be of bbalpha, .*; got 'svm'"):
        run(tmp_path, methods=["svm"])


def test_the_command_on_real_data(data_dir, tmp_path):
    done = CliRunner().invoke(
        app, ["reproduce", "regression", "--quick", "--methods", "bbalpha,bbalpha-cv", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    for name in ("yacht", "boston"):
        content = json.loads((tmp_path / "regression-quick" / f"{name}.json").read_text())
        assert [r["alpha"] for r in content["rows"]] == [0.0, 0.5, 1.0, None]
        assert content["command"] == f"bbalpha reproduce regression --datasets {name} --quick"


def test_tables_count_what_was_aimed_at(toy, tmp_path, monkeypatch):
    path = Path(__file__).parents[2] / "docs" / "tables_regression.py"
    tables = module_from_spec(spec_from_file_location("tables_regression", path))
    tables.__spec__.loader.exec_module(tables)
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "regression")
    with pytest.raises(FileNotFoundError):
        tables.full()
    run(tmp_path)
    for name in ("full", "rmse", "short", "verdict", "coverage", "settings"):
        assert "| yacht " in getattr(tables, name)() or name == "verdict"
    content = tables.load()["yacht"]
    mean, error, n = tables.score(content, "bbalpha", 0.5)
    values = [r["nll"] for r in rows(tmp_path) if (r["method"], r["alpha"]) == ("bbalpha", 0.5)]
    assert (mean, n) == (pytest.approx(np.mean(values)), 2)
    assert error == pytest.approx(np.std(values, ddof=1) / 2**0.5)
    for row in content["rows"]:  # the paper has 1.08 +- 0.04, VI-G 1.77, HMC 1.62
        row["nll"] = {0.0: 1.0, 0.5: 1.1, None: 1.7}[row["alpha"]] + row["split"] * 0.02
    monkeypatch.setattr(tables, "load", lambda: {"yacht": content})
    assert tables.distance().splitlines()[-1].split(" | ")[4] == "0.51 better"
    met = [line.split("|")[2].strip() for line in tables.verdict().splitlines()[2:]]
    assert met == ["1 of 1: yacht", "1 of 1: yacht", "0 of 1:", "1 of 1: yacht", "0 of 0:"]
    content["rows"].append({"method": "hmc", "alpha": None, "nll": 1.2, "split": 0})
    assert tables.verdict().splitlines()[-1].split("|")[2].strip() == "1 of 1: yacht"
    for row in content["rows"]:
        row["nll"] += 0.6
    met = [line.split("|")[2].strip() for line in tables.verdict().splitlines()[2:]]
    assert met == ["0 of 1:", "1 of 1: yacht", "0 of 1:", "0 of 1:", "1 of 1: yacht"]
    assert tables.distance().splitlines()[-1].split(" | ")[4] == "0.09 worse"
    assert tables.ours(content, ("bbalpha", 0.5), "nll", 2) == "1.71 ± 0.01"
    content["rows"] = [r for r in content["rows"] if r["split"] == 0 or r["alpha"] != 0.0]
    assert tables.ours(content, ("bbalpha", 0.0), "nll", 2).endswith(", 1 split")
    one = {"method": "bbalpha-het", "alpha": 0.5, "split": 0, "nll": -1.0}
    monkeypatch.setattr(tables, "load", lambda: {"kin8nm": {"rows": [one]}})  # its published error is 0.00
    assert tables.distance().endswith("| 0.35 worse |  |")
    monkeypatch.setattr(tables, "load", lambda: {"yacht": content})
    chain = {"method": "hmc", "accept": 0.8, "divergences": 2, "n_samples": 500, "rhat": 1.1, "rhat_worst": 1.5}
    content["rows"] = [chain, chain | {"accept": 0.7, "rhat_worst": 1.9}]
    content["seconds_of"] = {"hmc": 120.0}
    assert tables.chains().splitlines()[-1] == "| yacht | 2 | 0.75 | 4 of 1000 | 1.10 | 1.90 | 1.0 |"
