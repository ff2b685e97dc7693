"""K passes of any model: `sample(model, x, n_passes)` -> (K, N, ...), differentiable.

What pass k of K draws follows from (seed, k, K), whatever the strategy, so all strategies agree; the masks of the K
passes are drawn together, so that each unit is dropped in its share of them (`_balance.py`):

    chain    nn.Sequential of plain layers: kernels of our own (`bbalpha._engine.chains`), picked by "auto"
    loop     the model is called K times; always right
    repeat   the batch is repeated K times and the model called once
    vmap     `torch.func.vmap` over the pass: what does not depend on a random draw is computed once

"auto" traces the model once, tries the cheaper strategies on a few rows, keeps the first that gives what the
loop gives, and remembers the choice for the next call (`_engine/planning.py`). The model itself is never touched:
what runs is a shadow of it (`_engine/shadows.py`).
"""

from typing import Any

import torch
from torch import nn

from bbalpha._engine.inputs import BatchDim, Inputs
from bbalpha._engine.planning import Masks, StrategyChoice, run_passes
from bbalpha._engine.selection import Sites
from bbalpha.checks import check_count, check_flag, check_masks, check_model, check_seed


def sample(
    model: nn.Module,
    x: Any,
    n_passes: int | None,
    *,
    masks: Masks = "per_example",
    strategy: StrategyChoice = "auto",
    balanced: bool = True,
    sites: Sites | None = None,
    chunk_size: int | None = None,
    batch_dim: BatchDim = 0,
    seed: int | None = None,
) -> Any:
    """The outputs of `n_passes` stochastic passes of `model` on `x`, stacked: (K, N, ...).

    Random sites (dropout of every kind) are sampled whether the model is in training or evaluation mode;
    everything else follows the mode it is in. Gradients flow to the parameters and to `x`.

    Args:
        model: Any nn.Module with at least one active random site; with ``n_passes=None`` any nn.Module.
        x: A tensor, a tuple (called as ``model(*x)``), a mapping (``model(**x)``), or any other object (``model(x)``);
            arrays are taken for tensors.
        n_passes: K. None asks for no passes: the network as it is, random sites off, run once (1, N, ...); the options
            of the passes have nothing to do then, and nothing is drawn.
        masks: "per_example" draws anew for every row; "shared" draws one function a pass for all rows, and
            pass k of one `seed` is the same function for every batch.
        strategy: "auto", or one of "vmap", "repeat", "loop".
        balanced: Draw the masks of the passes together: each unit is dropped in pK of the K passes, rounded up or down
            at random. Each pass alone is plain dropout; what is averaged over passes has less noise. False draws
            every pass by itself.
        sites: The random sites that draw; the others are off, as in evaluation mode, and what lies before the first of
            these is computed once for all passes. None is all of them. Names of modules as in ``named_modules()``, one
            or several, each standing for what is inside of it too; a function (name, module) -> bool; "last" for the
            last site that draws in a pass (a module of that name is ``["last"]``); or a share of the sites, from the
            last one back: 0.25 for the last quarter, rounded down, at least one.
        chunk_size: At most so many passes at a time; their activations are computed again in the backward. It bounds
            what lies between inputs and outputs: the outputs of all K passes are held, for a moment twice.
        batch_dim: The axis of `x` that counts the rows; or, in the structure of `x`, one for every input, None for
            inputs that are the same for all rows.
        seed: None draws from torch's global generator; an int leaves it untouched.

    Returns:
        What the model returns (tensor, tuple, mapping), every tensor with a first axis of K passes.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    >>> sample(net, torch.zeros(3, 2), n_passes=10).shape
    torch.Size([10, 3, 1])
    """
    if torch.compiler.is_compiling():  # a break in the graph: plans and shadows are nothing to compile
        return torch.compiler.disable(sample)(
            model, x, n_passes, masks=masks, strategy=strategy, balanced=balanced, sites=sites,
            chunk_size=chunk_size, batch_dim=batch_dim, seed=seed,
        )  # fmt: skip
    check_model(model)
    check_masks(masks)
    if strategy not in ("auto", "vmap", "repeat", "loop"):
        raise ValueError(f'`strategy` must be "auto", "vmap", "repeat" or "loop"; got {strategy!r}.')
    n_passes = None if n_passes is None else check_count("n_passes", n_passes)
    chunk_size = None if chunk_size is None else check_count("chunk_size", chunk_size)
    check_flag("balanced", balanced)
    check_seed(seed)
    inputs = Inputs.of(x, batch_dim, model=model)
    return run_passes(
        model, inputs, n_passes, masks=masks, strategy=strategy, balanced=balanced, chunk_size=chunk_size, seed=seed,
        sites=sites,
    )  # fmt: skip
