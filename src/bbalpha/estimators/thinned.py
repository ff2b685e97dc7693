"""The passes of a plain network under shared masks, without the engine's way there: for one row a tenth of the time.

With masks that all rows share, a pass is one thinned network. Which units it lacks follows from rates, widths and seed:
it is drawn once as the engine draws it, and remembered, so that these passes are those of any other way.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bbalpha._engine.chains import kept_units
from bbalpha._kernels import Passes
from bbalpha._torch import is_hooked

_PLAIN = (nn.Linear, nn.ReLU, nn.SiLU, nn.Dropout)
_BLOCK = 2**20  # activations worked on together
Site = tuple[int, float]  # width, rate


def is_plain(network: nn.Module) -> bool:
    """Whether a network is a chain of dense layers, ReLU or SiLU, and dropout, and nothing hangs on to it."""
    if type(network) is not nn.Sequential or is_hooked(vars(network)):
        return False
    return all(type(m) in _PLAIN and not is_hooked(vars(m)) for m in network)


def thinned_passes(network: Any, x: Tensor, n_passes: int, *, seed: int, balanced: bool) -> Tensor:
    """Outputs (K, N, D) of a plain network for rows (N, F), in their precision, as `sample` with shared masks has them.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.SiLU(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    >>> x = torch.zeros(3, 2, dtype=torch.float64)
    >>> a = thinned_passes(net, x, 4, seed=1, balanced=True)
    >>> from bbalpha import sample
    >>> torch.allclose(a, sample(net, x, 4, masks="shared", seed=1))
    True
    """
    sites, width = [], x.shape[1]
    for layer in network:
        if type(layer) is nn.Linear:
            width = layer.out_features
        elif type(layer) is nn.Dropout:
            sites.append((width, layer.p))
    masks = [kept.to(x.dtype) * scale for kept, scale in _masks(tuple(sites), n_passes, seed, balanced)]
    parameters = [(m.weight.detach().to(x.dtype), m.bias.detach().to(x.dtype)) for m in network if type(m) is nn.Linear]
    widest = max(width, *(w for w, _ in sites), *(len(b) for _, b in parameters))
    with torch.no_grad():
        rows = x.split(max(1, _BLOCK // (n_passes * widest)))
        return torch.cat([_run(network, block, masks, parameters, n_passes) for block in rows], 1)


def _run(network: Any, h: Tensor, masks: list[Tensor], parameters: list[Any], n_passes: int) -> Tensor:
    site = dense = 0
    for layer in network:
        if type(layer) is nn.Linear:
            h = F.linear(h, *parameters[dense])
            dense += 1
        elif type(layer) is nn.Dropout:
            h = h * masks[site]  # (K, N, width) from the first of them on
            site += 1
        else:
            h = F.silu(h) if type(layer) is nn.SiLU else h.relu()
    return h if h.ndim == 3 else h.expand(n_passes, *h.shape)


@lru_cache(maxsize=256)
def _masks(sites: tuple[Site, ...], n_passes: int, seed: int, balanced: bool) -> tuple[tuple[Tensor, float], ...]:
    """Which units at each site are kept in each pass (K, 1, width), and what these are multiplied by."""
    passes = Passes(seed, 0, n_passes, together=n_passes if balanced else 0)
    return tuple(kept_units(passes, (1, width), rate) for width, rate in sites)  # a byte a unit: many seeds are asked
