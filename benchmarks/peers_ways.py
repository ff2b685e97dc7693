"""The ways to run K passes that `benchmarks/peers.py` compares: by hand, other libraries', ours.

A way takes a model in evaluation mode, its input, K and the axis of its rows, does what its documentation says, and
gives the outputs as a list of tensors (K, ...). What a peer cannot do is left to raise.
"""

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bbalpha

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from zoo_rows import call

Way = Callable[[nn.Module, Any, int, int], list[Tensor]]


def stacked(passes: Sequence[Any]) -> list[Tensor]:
    """Outputs of passes that were run one by one, each leaf (K, ...)."""
    return [torch.stack(leaf) for leaf in zip(*map(leaves, passes), strict=True)]


def leaves(outputs: Any) -> list[Tensor]:
    """What is a number in an output of any structure."""
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]


# ------------------------------------------------------------------------------ by hand


def training_mode(model: nn.Module, x: Any, n_passes: int, batch_dim: int) -> list[Tensor]:
    """The whole model in training mode, a loop, and back."""
    model.train()
    passes = [call(model, x) for _ in range(n_passes)]
    model.eval()
    return stacked(passes)


def dropout_modules(model: nn.Module, x: Any, n_passes: int, batch_dim: int) -> list[Tensor]:
    """The snippet that is copied most: nn.Dropout modules in training mode, a loop, and back."""
    for module in model.modules():
        if module.__class__.__name__.startswith("Dropout"):
            module.train()
    passes = [call(model, x) for _ in range(n_passes)]
    model.eval()
    return stacked(passes)


# ------------------------------------------------------------------------------ baal


def baal_wrapper(model: nn.Module, x: Any, n_passes: int, batch_dim: int) -> list[Tensor]:
    """MCDropoutModule in ModelWrapper, as in its tutorials; `with` puts the layers back."""
    modules, wrappers = importlib.import_module("baal.bayesian.dropout"), importlib.import_module("baal.modelwrapper")
    with modules.MCDropoutModule(model) as patched:
        wrapper = wrappers.ModelWrapper(patched, wrappers.TrainingArgs(use_cuda=False))
        wrapper.eval()
        return [leaf.movedim(-1, 0) for leaf in leaves(wrapper.predict_on_batch(x, iterations=n_passes))]


def baal_patch(model: nn.Module, x: Any, n_passes: int, batch_dim: int) -> list[Tensor]:
    """patch_module on a copy, and a loop."""
    patched = importlib.import_module("baal.bayesian.dropout").patch_module(model, inplace=False)
    return stacked([call(patched.eval(), x) for _ in range(n_passes)])


# ------------------------------------------------------------------------------ torch-uncertainty


def uncertainty_batch(model: nn.Module, x: Any, n_passes: int, batch_dim: int, on_batch: bool = True) -> list[Tensor]:
    """mc_dropout as it comes: the batch is repeated."""
    mc_dropout = part("torch_uncertainty.methods.mc_dropout").mc_dropout
    wrapped = mc_dropout(model, num_estimators=n_passes, on_batch=on_batch).eval()
    return [leaf.reshape(n_passes, -1) for leaf in leaves(call(wrapped, x))]


def uncertainty_loop(model: nn.Module, x: Any, n_passes: int, batch_dim: int) -> list[Tensor]:
    """mc_dropout with a loop inside."""
    return uncertainty_batch(model, x, n_passes, batch_dim, on_batch=False)


# ------------------------------------------------------------------------------ lightning-uq-box


def uq_box(model: nn.Module, x: Any, n_passes: int, batch_dim: int) -> list[Tensor]:
    """MCDropoutRegression.predict_step, which asks least of a model; the passes are seen where it averages them."""
    module = part("lightning_uq_box.uq_methods.mc_dropout")
    box = module.MCDropoutRegression(model, n_passes, nn.MSELoss()).eval()
    average = module.process_regression_prediction
    with mock.patch.object(module, "process_regression_prediction", side_effect=average) as seen:
        box.predict_step(x)
    return [seen.call_args.args[0].movedim(-1, 0)]  # (..., K)


# ------------------------------------------------------------------------------ ours


def ours(model: nn.Module, x: Any, n_passes: int, batch_dim: int) -> list[Tensor]:
    return leaves(bbalpha.sample(model, x, n_passes, batch_dim=batch_dim))


WAYS: dict[str, Way] = {
    "model.train()": training_mode,
    "nn.Dropout on": dropout_modules,
    "baal, ModelWrapper": baal_wrapper,
    "baal, patch_module": baal_patch,
    "torch-uncertainty": uncertainty_batch,
    "torch-uncertainty, loop": uncertainty_loop,
    "lightning-uq-box": uq_box,
    "bbalpha": ours,
}
OURS = "bbalpha"
PEERS = ("baal", "torch-uncertainty", "lightning-uq-box")


# ------------------------------------------------------------------------------ what is installed


def peer(way: str) -> str | None:
    """The package that a way needs."""
    return next((name for name in PEERS if way.startswith(name)), None)


def installed() -> dict[str, str]:
    """{peer: its version} of those that are here."""
    found = {}
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def part(module: str) -> Any:
    """A module of a package whose own import fails here: its parents are left empty, only what it needs is run.

    torch-uncertainty and lightning-uq-box import torchvision at their roots; their MC dropout does not need it.
    """
    if module not in sys.modules:
        names = module.split(".")
        root = Path(str(distribution(names[0].replace("_", "-")).locate_file("")))
        for i in range(1, len(names)):
            empty = types.ModuleType(".".join(names[:i]))
            empty.__path__ = [str(root.joinpath(*names[:i]))]
            sys.modules[empty.__name__] = empty
    return importlib.import_module(module)


def whole(name: str) -> str:
    """Whether the parts of a peer that are used import as its documentation says: "yes", or what stops them."""
    module = {"baal": "baal.modelwrapper", "torch-uncertainty": "torch_uncertainty.methods",
              "lightning-uq-box": "lightning_uq_box.uq_methods"}[name]  # fmt: skip
    try:
        importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return "yes"
