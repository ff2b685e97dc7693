"""Fitted estimators as model folders: written whole, and refused where what they say does not fit together."""

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from bbalpha.checkpoint import build, describe, write_folder
from bbalpha.checks import check_count
from bbalpha.estimators.folders import array_of, plain, read_content, whole
from bbalpha.estimators.soundness import settled
from bbalpha.estimators.tables import TableEncoder
from bbalpha.estimators.whole import WholeFit
from bbalpha.training.bank import Member

Array = NDArray[Any]
Module = nn.Module | Callable[[int, int], nn.Module]
MOST_PASSES = 100_000  # of a prediction; a folder that asks for more is forged or damaged


class Stored(WholeFit):
    """An estimator of networks that can be saved and loaded."""

    networks_: list[nn.Module]
    objectives_: list[Any]
    encoder_: TableEncoder | None
    scores_: Array | None

    def _passes_asked(self) -> int:
        return check_count("n_predict_passes", self.n_predict_passes, most=MOST_PASSES)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator as a model folder: safetensors and JSON, no pickle."""
        write_folder(path, content_of(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, module: Module | None = None) -> Self:
        """The fitted estimator in a folder written by `save`; `module` again where one of your own was used."""
        content = read_content(path)
        if content["kind"] != cls.__name__:
            raise ValueError(f"`path` must hold a {cls.__name__}; {str(path)!r} holds a {content['kind']}.")
        with whole(path):
            # as folders were that do not say
            unbalanced: dict[str, Any] = {"balanced": False}
            model = cls(**(unbalanced | array_of(content["params"])), module=module)
            fitted = array_of(content["fitted"])
            older = {"uses_module_": module is not None, "noise_": getattr(model, "noise", None)}  # folders lack these
            if "encoder_" not in fitted:  # written before there was an automatic choice
                n = len(content["networks"])
                older |= {"shares_": np.full(n, 1 / max(1, n)), "heavy_": np.zeros(n, bool), "log_target_": False}
                older |= {"trials_": (), "scores_": None, "encoder_": None}
            if "x_squash_" not in fitted:
                older |= {"x_squash_": np.zeros((4, len(fitted["x_mean_"])))}
            older = {name: value for name, value in older.items() if name in cls._fitted_names}
            model.__dict__.update({**older, **fitted})
            told_of_columns = vars(model)["encoder_"]
            model.encoder_ = None if told_of_columns is None else TableEncoder.of(told_of_columns)
            told = content["networks"]
            foreign = any(one["architecture"] is None for one in told)
        if foreign and module is None:
            raise ValueError("`module` must be given: the networks in the folder are of an architecture of yours.")
        networks = (
            []
            if module is None
            else [model._network(model.n_features_in_, model._n_outputs(), Member(())) for _ in told]
        )
        with whole(path):
            model.networks_ = networks or [build(one["architecture"], one["state"]) for one in told]
            model.objectives_ = [model._objective() for _ in told]
            for one, network, objective in zip(told, model.networks_, model.objectives_, strict=True):
                network.eval().load_state_dict(one["state"])
                objective.load_state_dict(one["objective"])
            model._check_whole()
        return model

    def _check_whole(self) -> None:
        """Refuse what a folder says if it does not fit together, before anything is predicted with it."""
        kind, needed = type(self).__name__, set(self._fitted_names) - {"feature_names_in_", "precision_"}
        odd = set(vars(self)) - set(self._fitted_names) - set(self.get_params(deep=False)) or needed - set(vars(self))
        if odd or not self.networks_:
            raise ValueError(
                f"A {kind} must hold what its fit sets; {min(odd, default='networks_')!r} is odd or missing."
            )
        if not isinstance(self.uses_module_, bool):
            raise ValueError(f"`uses_module_` of a {kind} must be True or False; got {self.uses_module_!r}.")
        check_count("seed_", self.seed_, least=0)
        self._passes_asked()
        for name in ("x_mean_", "x_scale_", "x_squash_", "y_mean_", "y_scale_", "precision_", "shares_"):
            value = vars(self).get(name, np.ones(1))
            if not isinstance(value, np.ndarray) or value.dtype != np.float64 or not np.isfinite(value).all():
                raise ValueError(f"`{name}` of a {kind} must hold finite numbers; got {value!r}.")
        if (self.shares_ < 0).any() or abs(self.shares_.sum() - 1) > 1e-6:
            raise ValueError(f"`shares_` of a {kind} must be weights that sum to 1; got {self.shares_!r}.")
        columns = (check_count("n_features_in_", self.n_features_in_),)
        features = columns if self.encoder_ is None else (len(self.encoder_.names),)
        shapes: dict[str, tuple[int, ...]] = {"x_mean_": features, "x_scale_": features, "feature_names_in_": columns}
        shapes |= {"x_squash_": (4, *features), "shares_": (len(self.networks_),)}
        self._check_shapes(shapes)  # first: what is only said must not be allocated
        self._check_shapes(self._shapes(torch.zeros(1, *features, dtype=torch.float64)))
        if not all(map(settled, self.networks_, self.objectives_)):
            raise ValueError(f"The weights of a {kind} must be finite; got nan or infinity.")

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            if name in vars(self) and np.shape(vars(self)[name]) != shape:
                got = np.shape(vars(self)[name])
                raise ValueError(f"`{name}` of a {type(self).__name__} must have the shape {shape}; got {got}.")

    @abstractmethod
    def _shapes(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        """Of the fitted arrays of the subclass, as the networks have it at `x` (1, F)."""

    @abstractmethod
    def _n_outputs(self) -> int:
        """Outputs of a network."""

    @abstractmethod
    def _objective(self) -> nn.Module:
        """A fresh objective."""

    @abstractmethod
    def _network(self, n_inputs: int, n_outputs: int, member: Member) -> nn.Module:
        """A fresh network."""


def content_of(estimator: Stored) -> dict[str, Any]:
    """What a model folder holds of the fitted estimator."""
    check_is_fitted(estimator)
    params = {k: v for k, v in estimator.get_params(deep=False).items() if k not in ("module", "random_state")}
    if isinstance(params.get("class_weight"), Mapping):  # JSON has names of text alone; a model is not fitted by it
        params["class_weight"] = None
    names = [k for k in estimator._fitted_names if k in vars(estimator) and k not in ("networks_", "objectives_")]
    networks = [
        {"architecture": describe(n), "state": dict(n.state_dict()), "objective": dict(o.state_dict())}
        for n, o in zip(estimator.networks_, estimator.objectives_, strict=True)
    ]
    content = {"kind": type(estimator).__name__, "params": plain(params), "networks": networks}
    fitted = {k: v.content() if isinstance(v := vars(estimator)[k], TableEncoder) else v for k in names}
    return content | {"fitted": {k: plain(v) for k, v in fitted.items()}}
