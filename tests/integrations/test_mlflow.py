"""Models in MLflow: what comes back is what bbalpha predicts, out of its own folders, and nothing is pickled."""

import logging
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from torch import nn

import bbalpha
from bbalpha.integrations import mlflow as flavour
from bbalpha.integrations.mlflow import log_epoch, log_history, log_model, log_scores, save_model
from bbalpha.tabular.model import TableModel

SHARED = {"masks": "shared", "seed": 0, "progress": False}


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """A store of its own for every test, in files: a database takes ten seconds to set up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(logging.getLogger("mlflow"), "level", logging.ERROR)
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    yield
    mlflow.set_tracking_uri(None)


def network(outputs=3):
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, outputs))


class Own(nn.Module):
    """An architecture of somebody's own: mean and log precision."""

    def __init__(self):
        super().__init__()
        self.net = network(2)

    def forward(self, x):
        return self.net(x).chunk(2, -1)


def make_own():
    return Own()


def frame(n=6):
    return pd.DataFrame(torch.randn(n, 4).numpy(), columns=list("abcd"), index=[f"row{i}" for i in range(n)])


def loaded(model, **options):
    save_model(model, "saved", **options)
    return mlflow.pyfunc.load_model("saved")


@pytest.fixture(scope="module")
def estimators():
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"size": rng.normal(size=60), "town": rng.choice(["Rome", "Oslo"], 60)})
    settings = {"hidden_layer_sizes": (8,), "dropout": 0.1, "epochs": 3, "random_state": 0, "n_predict_passes": 20}
    y = X["size"] + (X["town"] == "Rome")
    quantities = bbalpha.BBAlphaRegressor(noise="constant", **settings).fit(X, y)
    return X, quantities, bbalpha.BBAlphaClassifier(**settings).fit(X, np.where(y > 0.5, "much", "little"))


# ------------------------------------------------------------------------------ networks


@pytest.mark.parametrize("classes", [None, ("no", "perhaps", "yes")])
def test_a_network_of_classes_says_what_predict_classification_says(classes):
    net, rows = network(), frame()
    found = loaded(net, objective=bbalpha.CrossEntropy(), classes=classes).predict(rows)
    p = bbalpha.predict_classification(net, torch.tensor(rows.to_numpy()), **SHARED)
    names = classes or ("0", "1", "2")
    assert list(found) == ["label", *(f"p_{c}" for c in names), "entropy", "mutual_information"]
    assert list(found.index) == list(rows.index)
    np.testing.assert_allclose(found[[f"p_{c}" for c in names]], p.probs, atol=1e-6)
    np.testing.assert_allclose(found["entropy"], p.entropy, atol=1e-5)
    np.testing.assert_allclose(found["mutual_information"], p.mutual_information, atol=1e-5)
    assert list(found["label"]) == [names[i] for i in p.label]


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_network_of_quantities_says_what_predict_regression_says(outputs):
    net, rows, objective = network(outputs), frame(), bbalpha.GaussianNLL(precision=4.0)
    found = loaded(net, objective=objective).predict(rows, params={"coverage": 0.5, "n_passes": 30})
    p = bbalpha.predict_regression(net, torch.tensor(rows.to_numpy()), n_passes=30, precision=4.0, **SHARED)
    ends = "" if outputs == 1 else "_1"
    for name in ("mean", "std", "epistemic_std", "aleatoric_std"):
        np.testing.assert_allclose(found[f"{name}{ends}"], getattr(p, name)[:, -1], atol=1e-5)
    for name, end in zip(("low", "high"), p.interval(0.5), strict=True):
        np.testing.assert_allclose(found[f"{name}{ends}"], end[:, -1], atol=1e-5)
    assert len(found.columns) == 6 * outputs


def test_a_learned_noise_is_saved():
    objective = bbalpha.GaussianNLL()
    nn.init.constant_(objective.log_precision, np.log(25.0))
    assert loaded(network(1), objective=objective).predict(frame())["aleatoric_std"].to_numpy() == pytest.approx(0.2)


def test_a_row_is_answered_alike_in_any_company_and_as_an_array():
    rows, model = frame(), loaded(network(), objective=bbalpha.CrossEntropy())
    whole = model.predict(rows)
    pd.testing.assert_frame_equal(model.predict(rows.iloc[2:3]), whole.iloc[2:3], atol=1e-6)
    again = model.predict(rows.to_numpy())
    pd.testing.assert_frame_equal(again.set_index(rows.index), whole)


def test_columns_are_taken_by_name_where_they_are_known():
    rows, model = frame(), loaded(network(), objective=bbalpha.CrossEntropy(), columns=list("abcd"))
    pd.testing.assert_frame_equal(model.predict(rows[list("dbca")].assign(more=1)), model.predict(rows))
    with pytest.raises(ValueError, match="columns of the network; 'c' is missing"):
        model.predict(rows.drop(columns="c"))


def test_an_architecture_of_ones_own_is_made_by_its_factory():
    net, rows = Own(), frame()
    options = {"objective": bbalpha.GaussianNLL(precision="predicted")}
    with pytest.raises(ValueError, match=r"`factory` must name a function .* got None for a Own"):
        save_model(net, "none", **options)
    found = loaded(net, factory=f"{__name__}:make_own", **options).predict(rows)
    p = bbalpha.predict_regression(net, torch.tensor(rows.to_numpy()), precision="predicted", **SHARED)
    np.testing.assert_allclose(found["std"], p.std[:, 0], atol=1e-5)
    for wrong in (__name__, f"{__name__}:nothing"):
        with pytest.raises(ValueError, match=r"as 'package.module:function'; got"):
            save_model(net, "wrong", factory=wrong, **options)
    assert not Path("wrong").exists()


def test_a_network_without_dropout_is_refused():
    model = loaded(nn.Sequential(nn.Linear(4, 2)), objective=bbalpha.CrossEntropy())
    with pytest.raises(ValueError, match="add_dropout"):
        model.predict(frame())


# ------------------------------------------------------------------------------ models of tables


@pytest.mark.parametrize("which", [1, 2], ids=["quantities", "classes"])
@pytest.mark.parametrize("form", ["estimator", "table", "folder"])
def test_a_model_of_a_table_says_what_it_says_itself(estimators, which, form):
    X, estimator = estimators[0], estimators[which]
    estimator.save("folder")
    table = TableModel.load("folder")
    model = loaded({"estimator": estimator, "table": table, "folder": "folder"}[form])
    pd.testing.assert_frame_equal(model.predict(X), table.predict(X))
    expected = table.asked(n_passes=7).predict(X, coverage=0.5)
    pd.testing.assert_frame_equal(model.predict(X, params={"n_passes": 7, "coverage": 0.5}), expected)


def test_a_folder_of_a_network_that_says_its_task(tmp_path):
    net, rows = network(), frame()
    bbalpha.save(net, "bare")
    with pytest.raises(ValueError, match="must say what its network predicts; it has task None"):
        save_model("bare", "saved")
    bbalpha.save(net, "told", training={"task": "classification"})
    pd.testing.assert_frame_equal(
        loaded(tmp_path / "told").predict(rows), _other(net, objective=bbalpha.CrossEntropy()).predict(rows)
    )


def _other(net, **options):
    save_model(net, "other", **options)
    return mlflow.pyfunc.load_model("other")


def test_no_file_is_a_pickle(estimators):
    save_model(estimators[1], "saved")
    names = {p.relative_to("saved").as_posix() for p in Path("saved").rglob("*") if p.is_file()}
    assert names == {
        "MLmodel", "conda.yaml", "python_env.yaml", "requirements.txt",
        "data/model/config.json", "data/model/weights.safetensors", "data/model/checksums.sha256",
    }  # fmt: skip
    conf = yaml.safe_load(Path("saved/MLmodel").read_text())["flavors"]
    assert list(conf) == ["python_function"]
    assert conf["python_function"]["loader_module"] == flavour.__name__
    needs = Path("saved/requirements.txt").read_text().split()
    assert all("==" in line and "+" not in line for line in needs)
    assert {"torch", "safetensors", "mlflow-skinny"} <= {line.partition("==")[0] for line in needs}


def test_a_changed_byte_is_an_error():
    save_model(network(), "saved", objective=bbalpha.CrossEntropy())
    weights = Path("saved/data/model/weights.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        mlflow.pyfunc.load_model("saved")


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        (network(), {}, "`objective` must be the CrossEntropy or GaussianNLL .* got NoneType"),
        (network(), {"objective": nn.CrossEntropyLoss()}, "got CrossEntropyLoss"),
        (3, {}, "`model` must be a TableModel, .* got int"),
        ("nowhere", {}, "'nowhere' does not exist"),
        ("nowhere", {"classes": ["a"]}, "`classes` is told of a network alone; got it with a str"),
    ],
)
def test_what_is_no_model_is_refused_and_nothing_is_written(model, options, told):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=told):
        save_model(model, "saved", **options)
    assert not Path("saved").exists()


@pytest.mark.parametrize(
    ("params", "told"), [({"coverage": 1.5}, "`coverage` must lie"), ({"n_passes": 1}, "at least 2")]
)
def test_what_cannot_be_asked_is_refused(params, told):
    with pytest.raises(ValueError, match=told):
        loaded(network(), objective=bbalpha.CrossEntropy()).predict(frame(), params=params)


# ------------------------------------------------------------------------------ runs


def logged(run):
    return mlflow.get_run(run.info.run_id).data.metrics


def curve(run, name):
    return [(m.step, m.value) for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, name)]


def test_a_logged_model_is_loaded_by_its_address(tmp_path):
    rows, net = frame(), network()
    with mlflow.start_run():
        info = log_model(net, "net", objective=bbalpha.CrossEntropy(), registered_model_name="known")
    expected = _other(net, objective=bbalpha.CrossEntropy()).predict(rows)
    for uri in (info.model_uri, "models:/known/1"):
        pd.testing.assert_frame_equal(mlflow.pyfunc.load_model(uri).predict(rows), expected)
    assert {p.name for p in tmp_path.iterdir()} == {"store", "other"}


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("validation", [0.3, None])
def test_the_epochs_of_fit_are_logged(live, validation):
    x = torch.randn(40, 4)
    with mlflow.start_run() as run:
        history = bbalpha.fit(network(1), (x, x[:, :1]), objective=bbalpha.GaussianNLL(), epochs=3,
                              validation=validation, callback=log_epoch if live else None)  # fmt: skip
        if not live:
            log_history(history)
    assert curve(run, "train_loss") == list(enumerate(history.loss, 1))
    assert curve(run, "val_nll") == list(enumerate(history.nll, 1))
    if not live:
        told = logged(run)
        assert told["n_steps"] == history.n_steps
        assert told.get("best_epoch") == history.best_epoch


def test_scores_of_classes_are_logged():
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    p = bbalpha.predict_classification(network(), x, seed=0)
    with mlflow.start_run() as run:
        scores = log_scores(p, y)
    assert list(scores) == ["nll", "accuracy", "brier", "ece"]
    assert scores["nll"] == pytest.approx(-p.log_prob(y).mean().item())
    assert scores["accuracy"] == pytest.approx((p.label == y).float().mean().item())
    assert logged(run) == {f"held_out_{name}": value for name, value in scores.items()}


@pytest.mark.parametrize("precision", [4.0, None])
def test_scores_of_quantities_are_logged(precision):
    x = torch.randn(30, 4)
    p = bbalpha.predict_regression(network(1), x, precision=precision, seed=0)
    with mlflow.start_run() as run:
        scores = log_scores(p, x[:, :1], prefix="test_")
    low, high = p.interval(0.9)
    assert scores["coverage90"] == pytest.approx(((low <= x[:, :1]) & (x[:, :1] <= high)).float().mean().item())
    assert scores["rmse"] == pytest.approx((p.mean - x[:, :1]).square().mean().sqrt().item())
    assert ("nll" in scores) == (precision is not None)
    assert logged(run) == {f"test_{name}": value for name, value in scores.items()}
