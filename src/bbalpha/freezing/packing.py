"""Products with the weights of a frozen model, these laid out for the processor once and not at every call.

For the few rows of a request that layout is much of the work. It is made when a weight is first met, takes as much
memory as the weight, and is made anew when the weight has changed. It is for plain calls on a CPU: what is exported,
traced, compiled or differentiated meets the plain product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from bbalpha._torch import is_watched, pack, product_with_packed, version_of

_MUCH = 2**20  # multiply-adds of a product from which it pays
_SEVERAL = 4  # rows: with fewer it does not


class Packs:
    """The weights of a module, laid out; a copy of the module begins with none."""

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()  # weight -> what it looked like, and its layout

    def __reduce__(self) -> tuple[type["Packs"], tuple[()]]:
        return Packs, ()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear(x, weight, bias)``."""
        if not is_watched() and _is_plain(x, weight):  # first: sizes that are traced must not be asked
            rows = x.numel() // weight.shape[-1]
            packed = self._packed(weight, rows) if rows >= _SEVERAL and rows * weight.numel() >= _MUCH else None
            if packed is not None:
                return product_with_packed(x, packed, bias)
        return F.linear(x, weight, bias)

    def _packed(self, weight: Tensor, rows: int) -> Tensor | None:
        looks = (weight.data_ptr(), version_of(weight))
        known = self._known.get(weight)
        if known is None or known[0] != looks:
            known = self._known[weight] = looks, pack(weight.detach(), rows)
        packed: Tensor | None = known[1]
        return packed


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether numbers on the CPU are multiplied with a weight that will be there at the next call."""
    if type(x) is not Tensor or type(weight) is not nn.Parameter or weight.is_inference():
        return False
    kinds = {(t.dtype, t.device.type) for t in (x, weight)}
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return kinds == {(torch.float32, "cpu")} and not wanted
