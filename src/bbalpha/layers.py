"""Stochastic layers: the families q that torch lacks, as drop-in modules.

net = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), Dropout(0.1), nn.Linear(50, 1))
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bbalpha import masks


class Dropout(nn.Dropout):
    """nn.Dropout with fast masks: same distribution, same switches, a fraction of the time on the CPU.

    >>> Dropout(0.5)(torch.ones(1000)).unique()
    tensor([0., 2.])
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        if not isinstance(p, (int, float)) or not 0 <= p < 1:
            raise ValueError(f"`p` must be a dropout rate in [0, 1); got {p!r}.")
        super().__init__(float(p), inplace)

    def forward(self, input: Tensor) -> Tensor:
        """Dropout of `input`, any shape, in training mode; `input` itself otherwise."""
        if (
            not self.training
            or self.p == 0
            or input.device.type != "cpu"
            or torch.compiler.is_compiling()
            or torch.overrides.has_torch_function_unary(input)
            or torch._C._functorch.maybe_current_level() is not None
        ):
            return F.dropout(input, self.p, self.training, self.inplace)
        noise = masks.draw_noise([None], input.shape, self.p)
        out = masks.dropout(input, replace(noise, values=noise.values[0]))
        return input.copy_(out) if self.inplace else out
