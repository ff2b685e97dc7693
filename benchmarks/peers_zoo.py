"""The models of `benchmarks/peers.py`: the zoo of the tests, one for every block of its random architectures, and more.

`prepare` puts a model in evaluation mode into the state of the yardstick: every random site on, all else as it was.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import architectures
import zoo

MOVING = ("BatchNorm", "InstanceNorm", "SpectralNorm")  # what keeps numbers that move in training mode


@dataclass(frozen=True)
class Case:
    """A model and its input, where its rows are, and how the yardstick is set."""

    name: str
    kind: str
    make: Callable[[], tuple[nn.Module, Any]]
    batch_dim: int = 0
    prepare: Callable[[nn.Module], object] = lambda model: sites_on(model)


def sites_on(model: nn.Module) -> None:
    """Training mode, but for what would move."""
    model.train()
    for module in model.modules():
        name = getattr(module, "original_name", type(module).__name__)  # of a scripted module
        hooks = module._forward_pre_hooks.values()  # spectral_norm of old is one
        if any(word in name for word in MOVING) or any("SpectralNorm" in type(h).__name__ for h in hooks):
            module.eval()


# ------------------------------------------------------------------------------ one model for every block


SIZES = architectures.Sizes(n=4, t=3, d=6, heads=2, axis=0)


def block(kind: type[architectures.Block]) -> tuple[nn.Module, Tensor]:
    """A network of one block between two linear layers; its dropout, if it has any, is torch's."""
    part = kind(random.Random(0), SIZES)
    part.drop = nn.Dropout(part.p) if "drop" in kind.run.__code__.co_names else nn.Identity()
    net, x = architectures.Net(SIZES, [part], 5, 3, "rows", nn.Identity()), torch.randn(SIZES.n, SIZES.t, 5)
    net.norm, net.side_drop = nn.Identity(), nn.Identity()  # batch norm is in the zoo; a kind of output that is not
    return net, x


# ------------------------------------------------------------------------------ more


class AuxiliaryHead(nn.Module):
    """A second head that exists only in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.aux, self.drop = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        h = self.drop(self.trunk(x))
        return (self.head(h), self.aux(h)) if self.training else self.head(h)


class HalfFunctional(nn.Module):
    """One dropout is a module, the other a function: the first alone makes passes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.drop = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(torch.tanh(self.a(x)), 0.5, self.training)
        return self.c(self.drop(torch.tanh(self.b(h))))


def auxiliary_head() -> tuple[nn.Module, Tensor]:
    return AuxiliaryHead(), torch.randn(5, 4)


def module_and_function() -> tuple[nn.Module, Tensor]:
    return HalfFunctional(), torch.randn(5, 4)


def no_dropout_at_all() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 4)


CASES = [
    *(Case(c.name, "zoo", c.make, c.batch_dim) for c in zoo.CASES),
    *(Case(f"block {k.__name__}", "blocks", lambda k=k: block(k)) for k in architectures.BLOCKS),
    Case("module_and_function", "more", module_and_function),
    Case("auxiliary_head_in_training_mode", "more", auxiliary_head, prepare=lambda model: model.drop.train()),
    Case("no_dropout_at_all", "more", no_dropout_at_all),
]
