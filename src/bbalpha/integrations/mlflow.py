"""MLflow: models with their uncertainty as pyfunc models, and how well training and held-out rows went as metrics.

    with mlflow.start_run():
        log_history(bbalpha.fit(net, (x, y), objective=objective, epochs=20, validation=0.2))
        log_scores(bbalpha.predict_classification(net, x_held), y_held)
        info = log_model(net, "net", objective=objective)
    mlflow.pyfunc.load_model(info.model_uri).predict(frame)     # label, p_0, p_1, ..., entropy, mutual_information

What is saved is a model folder of bbalpha, safetensors and JSON, with MLflow's own files around it: nothing is pickled.
Tables come with the columns of `bbalpha predict`: mean, std, epistemic_std, aleatoric_std, low and high, or label,
probabilities, entropy and mutual_information; models of tables tell what is unusual too. A row is answered alike in any
company and at any time. ``predict(frame, params={"coverage": 0.5, "n_passes": 400})`` asks for another interval, or
more passes.
"""

import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*inferred as AnyType")  # MLflow, of types of its own
        import mlflow.pyfunc
    import pandas
    from mlflow.models import ModelSignature
    from mlflow.types import ParamSchema, ParamSpec
except ImportError as error:
    raise ImportError("bbalpha.integrations.mlflow needs MLflow: pip install 'bbalpha[mlflow]'.") from error

from bbalpha import metrics
from bbalpha.checkpoint import describe, load, read_folder, save, versions
from bbalpha.checks import check_count, check_inner_share
from bbalpha.objectives import CrossEntropy, GaussianNLL
from bbalpha.prediction import predict_classification, predict_regression
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction
from bbalpha.training.loop import History, Progress

if TYPE_CHECKING:
    from mlflow.models.model import ModelInfo
    from pandas import DataFrame

    from bbalpha.tabular.model import TableModel

Array = NDArray[Any]
Tell = Callable[[Tensor, float, Mapping[str, Any]], Mapping[str, Array]]
N_PASSES, COVERAGE, SEED = 100, 0.9, 0
_NEEDED = (
    "bbalpha",
    "torch",
    "numpy",
    "safetensors",
    "pandas",
    "scikit-learn",
    "mlflow-skinny",
)  # those installed here


# ------------------------------------------------------------------------------ models


def save_model(
    model: Any,
    path: str | os.PathLike[str],
    *,
    objective: CrossEntropy | GaussianNLL | None = None,
    classes: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    factory: str | None = None,
) -> None:
    """Write `model` as an MLflow model into the folder `path`, which must be new or empty.

    Args:
        model: A `TableModel`, a fitted estimator of bbalpha, a folder that `bbalpha fit`, `save` of one of these or
            `bbalpha.save` wrote, or a network.
        path: For ``mlflow.pyfunc.load_model(path)``.
        objective: Of a network: what it was trained with, which says what it predicts, and its noise.
        classes: Of a network that classifies: the names of its classes; None is "0", "1" and so on.
        columns: Of a network: the columns that it takes, in their order; None takes those of a table as they come.
        factory: Of a network that is not made of torch's plain layers: the function that makes one, which is then
            loaded with the saved weights, as "package.module:function". It must be importable where it is loaded.
    """
    about = _About(objective, classes, columns, factory)
    with _packed(model, about) as packed:
        mlflow.pyfunc.save_model(os.fspath(path), **packed)


def log_model(
    model: Any,
    name: str,
    *,
    objective: CrossEntropy | GaussianNLL | None = None,
    classes: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    factory: str | None = None,
    registered_model_name: str | None = None,
) -> "ModelInfo":
    """Log `model` to the active run, or to a new one; its `model_uri` is what `mlflow.pyfunc.load_model` takes.

    Args:
        model: As in `save_model`, and so are the others that are not told of here.
        name: Of the logged model.
        objective: As in `save_model`.
        classes: As in `save_model`.
        columns: As in `save_model`.
        factory: As in `save_model`.
        registered_model_name: Where it is to be a version of a registered model: the name of that.
    """
    about = _About(objective, classes, columns, factory)
    with _packed(model, about) as packed:
        info: ModelInfo = mlflow.pyfunc.log_model(name=name, registered_model_name=registered_model_name, **packed)
        return info


# ------------------------------------------------------------------------------ metrics


def log_epoch(progress: Progress) -> None:
    """Log an epoch as it ends, "train_loss" and "val_nll": ``bbalpha.fit(..., callback=log_epoch)``."""
    told = {"train_loss": progress.loss} | ({} if progress.nll is None else {"val_nll": progress.nll})
    mlflow.log_metrics(told, step=progress.epoch)


def log_history(history: History) -> None:
    """Log a run of `fit` when it is over: every epoch as `log_epoch` does, "best_epoch", "n_steps" and "seconds"."""
    for i, loss in enumerate(history.loss):
        log_epoch(Progress(i + 1, 0, loss, history.nll[i] if history.nll else None))
    best = {} if history.best_epoch is None else {"best_epoch": float(history.best_epoch)}
    mlflow.log_metrics(best | {"n_steps": float(history.n_steps), "seconds": history.seconds})


def log_scores(
    prediction: ClassificationPrediction | RegressionPrediction, target: Tensor, *, prefix: str = "held_out_"
) -> dict[str, float]:
    """Log how good a prediction is, and return it: nll, and what else is asked of a distribution.

    Args:
        prediction: Of rows that the model has not seen.
        target: Their classes (N, ...), or values (N, ...).
        prefix: Goes before the names: nll, accuracy, brier and ece, or nll (where the noise is known), rmse, and
            coverage90 and width90 of the 90 % interval.
    """
    scores: dict[str, float]
    if isinstance(prediction, ClassificationPrediction):
        probs, axis = prediction.probs, prediction.class_axis
        ways = {"accuracy": metrics.accuracy, "brier": metrics.brier, "ece": metrics.ece}
        scores = {name: float(way(probs, target, class_axis=axis)) for name, way in ways.items()}
        scores = {"nll": -float(prediction.log_prob(target).mean())} | scores
    else:
        low, high = prediction.interval(0.9)
        known = prediction.precision is not None
        scores = {"nll": -float(prediction.log_prob(target).mean())} if known else {}
        scores |= {
            "rmse": float(metrics.rmse(prediction.mean, target)),
            "coverage90": float(metrics.interval_coverage(low, high, target)),
            "width90": float(metrics.interval_width(low, high)),
        }
    mlflow.log_metrics({f"{prefix}{name}": value for name, value in scores.items()})
    return scores


# ------------------------------------------------------------------------------ as MLflow loads them


@dataclass(frozen=True)
class PyFunc:
    """A model behind MLflow's `predict`: tables in, tables out.

    Attributes:
        answer: (data, coverage, n_passes) -> what the model says of every row.
        n_passes: Where nobody asks for a number.
    """

    answer: Callable[[Any, float, int], "DataFrame"]
    n_passes: int = N_PASSES

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> "DataFrame":
        """What the model says of every row.

        Args:
            data: A table with the model's columns; for a network an array, too.
            params: "coverage" of the interval from low to high, and "n_passes".
        """
        asked = {"coverage": COVERAGE, "n_passes": self.n_passes, **(params or {})}
        check_inner_share("coverage", asked["coverage"])
        return self.answer(data, float(asked["coverage"]), check_count("n_passes", asked["n_passes"], least=2))


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> PyFunc:
    """By which `mlflow.pyfunc.load_model` loads what is in a model's data folder; the name is MLflow's."""
    content = read_folder(path).content
    if content.get("kind") != "model":
        from bbalpha.tabular.model import TableModel

        model = TableModel.load(path)
        return PyFunc(partial(_answer_of_table, model), max(2, int(model.estimator.n_predict_passes)))
    facts = content["training"]
    if facts.get("task") not in ("classification", "regression"):
        raise ValueError(
            f"{path!r} must say what its network predicts; it has task {facts.get('task')!r}. Write it with "
            'bbalpha.save(net, path, training={"task": "classification"}), or "regression".'
        )
    factory = (model_config or {}).get("factory")
    network = load(path) if factory is None else load(path, model=_made(factory))
    if facts["task"] == "classification":
        tell = partial(_classes, network, facts.get("classes"))
    else:
        tell = partial(_quantities, network, facts.get("precision", content["precision"]))
    return PyFunc(partial(_answer_of_network, network, facts.get("columns"), tell))


def _made(factory: str) -> nn.Module:
    """A network by the function that is named as "package.module:function"."""
    module, _, name = factory.partition(":")
    make = getattr(importlib.import_module(module), name, None) if name else None
    if not callable(make):
        raise ValueError(f"`factory` must name a function, as 'package.module:function'; got {factory!r}.")
    made: nn.Module = make()
    return made


def _answer_of_table(model: "TableModel", data: Any, coverage: float, n_passes: int) -> "DataFrame":
    frame = data if isinstance(data, pandas.DataFrame) else pandas.DataFrame(data, columns=model.columns)
    return model.asked(n_passes=n_passes).predict(frame, coverage=coverage)


def _answer_of_network(
    network: nn.Module, columns: Sequence[str] | None, tell: Tell, data: Any, coverage: float, n_passes: int
) -> "DataFrame":
    """The parts of a prediction, column by column; whole numbers of an array stay as they are."""
    index = None
    if isinstance(data, pandas.DataFrame):
        missing = [name for name in columns or () if name not in data.columns]
        if missing:
            raise ValueError(f"The table must have the columns of the network; {missing[0]!r} is missing.")
        index, data = data.index, (data if columns is None else data[list(columns)]).to_numpy(dtype=np.float64)
    x = torch.tensor(np.asarray(data))
    if x.is_floating_point():
        x = x.to(next((p.dtype for p in network.parameters() if p.is_floating_point()), x.dtype))
    # masks shared by all rows: a row is answered alike in any company
    options = {"n_passes": n_passes, "masks": "shared", "seed": SEED, "progress": False}
    return pandas.DataFrame(tell(x, coverage, options), index=index)


def _classes(
    network: nn.Module, names: Sequence[str] | None, x: Tensor, coverage: float, options: Mapping[str, Any]
) -> dict[str, Array]:
    p = predict_classification(network, x, **options)
    known = np.array([str(c) for c in range(p.probs.shape[1])] if names is None else list(names))
    if p.probs.shape != (len(x), len(known)):
        raise ValueError(f"The network must give logits (N, {len(known)}), one a class; got {tuple(p.probs.shape)}.")
    probs = {f"p_{name}": p.probs[:, c].numpy() for c, name in enumerate(known)}
    unsure = {name: getattr(p, name).numpy() for name in ("entropy", "mutual_information")}
    return {"label": known[p.label.numpy()]} | probs | unsure


def _quantities(
    network: nn.Module, precision: Any, x: Tensor, coverage: float, options: Mapping[str, Any]
) -> dict[str, Array]:
    p = predict_regression(network, x, precision=precision, **options)
    names = ("mean", "std", "epistemic_std", "aleatoric_std")
    parts = [getattr(p, name) for name in names] + list(p.interval(coverage))
    columns = {name: t.reshape(len(t), -1) for name, t in zip((*names, "low", "high"), parts, strict=True)}
    D = columns["mean"].shape[1]
    return {name if D == 1 else f"{name}_{d}": t[:, d].numpy() for name, t in columns.items() for d in range(D)}


# ------------------------------------------------------------------------------ as MLflow is given them


@dataclass(frozen=True)
class _About:
    """What is said of a network beside its weights."""

    objective: CrossEntropy | GaussianNLL | None
    classes: Sequence[str] | None
    columns: Sequence[str] | None
    factory: str | None

    def check_unsaid(self, model: Any, but: str = "") -> None:
        said = [name for name, value in vars(self).items() if value is not None and name != but]
        if said:
            raise ValueError(f"`{said[0]}` is told of a network alone; got it with a {type(model).__name__}.")


@contextmanager
def _packed(model: Any, about: _About) -> Iterator[dict[str, Any]]:
    """What MLflow is to write: the folder of the model, how it is loaded, with what, and what may be asked."""
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        # a table of another form gets a better answer from the model than from MLflow
        warnings.filterwarnings("ignore", message=".*An input example was not provided")
        folder = Path(scratch) / "model"
        _write(model, folder, about)
        config = None if about.factory is None else {"factory": about.factory}
        found = _load_pyfunc(os.fspath(folder), config)  # what cannot be loaded is not saved
        params = [ParamSpec("coverage", "double", COVERAGE), ParamSpec("n_passes", "long", found.n_passes)]
        yield {
            "loader_module": __name__,
            "data_path": os.fspath(folder),
            "model_config": config,
            "signature": ModelSignature(params=ParamSchema(params)),
            "pip_requirements": [f"{name}=={v.partition('+')[0]}" for name, v in versions(_NEEDED).items()],
        }


def _write(model: Any, folder: Path, about: _About) -> None:
    """Write the model as a folder of bbalpha."""
    if isinstance(model, nn.Module):
        _write_network(model, folder, about)
    elif isinstance(model, (str, os.PathLike)):
        about.check_unsaid(model, but="factory")
        read_folder(model)  # whole, or an error that says what is wrong
        shutil.copytree(model, folder)
    elif hasattr(model, "save") and (hasattr(model, "card") or hasattr(model, "predictive")):
        about.check_unsaid(model)
        model.save(folder)
    else:
        raise TypeError(
            "`model` must be a TableModel, a fitted estimator of bbalpha, a network or a model folder; "
            f"got {type(model).__name__}."
        )


def _write_network(model: nn.Module, folder: Path, about: _About) -> None:
    objective = about.objective
    if not isinstance(objective, (CrossEntropy, GaussianNLL)):
        raise TypeError(
            "`objective` must be the CrossEntropy or GaussianNLL that the network was trained with; "
            f"got {type(objective).__name__}."
        )
    if about.factory is None and describe(model) is None:
        raise ValueError(
            "`factory` must name a function that makes the network, as 'package.module:function', where it is not of "
            f"torch's plain layers alone; got None for a {type(model).__name__}."
        )
    facts: dict[str, Any] = {"task": "classification" if isinstance(objective, CrossEntropy) else "regression"}
    facts |= {name: [str(v) for v in value] for name in ("classes", "columns") if (value := getattr(about, name))}
    precision = None
    if isinstance(objective, GaussianNLL) and objective.source == "predicted":
        facts["precision"] = "predicted"
    elif isinstance(objective, GaussianNLL):
        precision = objective.precision.item()
    save(model, folder, alpha=objective.alpha, precision=precision, training=facts)
