"""Make the dropout network you already have Bayesian: keep the model, change the loss."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

# fmt: off
if TYPE_CHECKING:
    from bbalpha._engine.sites import stochastic
    from bbalpha.attacks import fgsm, iterative_fgsm
    from bbalpha.checkpoint import load, save
    from bbalpha.convert import Audit, add_dropout, audit, remove_dropout
    from bbalpha.detection import Detector
    from bbalpha.estimators import (
        BBAlphaClassifier, BBAlphaClassifierCV, BBAlphaRegressor, BBAlphaRegressorCV, load_estimator
    )
    from bbalpha.exploration import Explorer
    from bbalpha.freezing import freeze
    from bbalpha.joint import Functions, joint_log_prob
    from bbalpha.layers import (
        ConcreteDropout, DropConnect, DropConnectConv1d, DropConnectConv2d, DropConnectConv3d, DropConnectGRU,
        DropConnectLinear, DropConnectLSTM, Dropout, GaussianDropout, GaussianLinear
    )
    from bbalpha.objectives import (
        AlphaLoss, CrossEntropy, GaussianNLL, alpha_loss, binary_cross_entropy, cross_entropy, gaussian_nll
    )
    from bbalpha.prediction import predict_classification, predict_regression
    from bbalpha.predictive import ClassificationPrediction, RegressionPrediction
    from bbalpha.priors import param_groups, prior_kl
    from bbalpha.sampling import sample
    from bbalpha.training import History, Retrofit, fit, retrofit
# fmt: on

_HOMES = {
    "_engine.sites": "stochastic",
    "attacks": "fgsm iterative_fgsm",
    "checkpoint": "load save",
    "convert": "Audit add_dropout audit remove_dropout",
    "detection": "Detector",
    "estimators": "BBAlphaClassifier BBAlphaClassifierCV BBAlphaRegressor BBAlphaRegressorCV load_estimator",
    "exploration": "Explorer",
    "freezing": "freeze",
    "joint": "Functions joint_log_prob",
    "layers": "ConcreteDropout DropConnect DropConnectConv1d DropConnectConv2d DropConnectConv3d "
    "DropConnectGRU DropConnectLSTM DropConnectLinear Dropout GaussianDropout GaussianLinear",
    "objectives": "AlphaLoss CrossEntropy GaussianNLL alpha_loss binary_cross_entropy cross_entropy gaussian_nll",
    "prediction": "predict_classification predict_regression",
    "predictive": "ClassificationPrediction RegressionPrediction",
    "priors": "param_groups prior_kl",
    "sampling": "sample",
    "training": "History Retrofit fit retrofit",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Public names and modules are resolved on first use, so that `import bbalpha` costs next to nothing."""
    if name == "__version__":
        from importlib.metadata import version

        return version("bbalpha")
    if name in _HOME:
        value = getattr(import_module(f"bbalpha.{_HOME[name]}"), name)
    elif name in _modules():
        value = import_module(f"bbalpha.{name}")
    else:
        raise AttributeError(f"module 'bbalpha' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_modules(), "__version__"})


def _modules() -> list[str]:
    """The modules that are not private."""
    return [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
