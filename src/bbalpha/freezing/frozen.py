"""`freeze`: a model and a seed become K thinned networks, one plain module."""

from typing import Any

import torch
from torch import Tensor, nn

from bbalpha._engine import kinds
from bbalpha._engine.chains import find
from bbalpha._engine.drawing import NotShareableError
from bbalpha._engine.guards import steady
from bbalpha._engine.inputs import BatchDim, Inputs
from bbalpha._engine.planning import Masks, find_plan
from bbalpha._engine.rows import Rows, refused
from bbalpha._engine.running import Plan
from bbalpha._engine.shadows import NoShadowError
from bbalpha._torch import outside_transforms
from bbalpha.checks import check_count, check_masks, check_model, check_seed
from bbalpha.freezing.recording import NotFreezableError
from bbalpha.freezing.replayed import replayed
from bbalpha.freezing.thinned import Thinned


def freeze(
    model: nn.Module,
    n_passes: int,
    *,
    seed: int,
    x: Any = None,
    masks: Masks = "shared",
    batch_dim: BatchDim = 0,
) -> nn.Module:
    """`n_passes` thinned networks as one module without randomness: x -> what the model returns, tensors (K, N, ...).

    Its outputs are those of ``sample(model, x, n_passes, masks="shared", seed=seed)`` in evaluation mode. It is a copy
    with weights and masks of its own: training the model later does not change it. It is called like the model, with
    any number of rows, and can be moved, differentiated in `x`, exported and traced as any other module.

    Args:
        model: Any nn.Module with at least one active random site whose draws can be kept as constants.
        n_passes: K.
        seed: Of the passes.
        x: An example of what the model is called with, as in `bbalpha.sample`: one row will do. None for a network of
            nn.Sequential that begins with a dense layer, whose inputs are known. Masks have a shape: where they hang on
            more of the shape of `x` than its rows (the length of a text, for attention dropout), that is fixed.
        masks: "shared". Masks of every row cannot be kept: the rows to come are not known.
        batch_dim: As in `bbalpha.sample`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    >>> frozen, x = freeze(net, 10, seed=0), torch.randn(3, 2)
    >>> frozen(x).shape, torch.equal(frozen(x), frozen(x))
    (torch.Size([10, 3, 1]), True)
    """
    check_model(model)
    n_passes = check_count("n_passes", n_passes)
    _check_options(masks, seed)
    inputs = Inputs.of(_example(model) if x is None else x, batch_dim, model=model)
    if inputs.rows == 0:
        raise ValueError("`x` must have at least one row, to see what is drawn for it; got none.")
    try:
        with steady(), outside_transforms(), torch.no_grad():
            plan = find_plan(model, inputs.concrete(), "auto", True, True)
            if plan.strategy == "chain":
                return Thinned(plan.layers, inputs.x, n_passes, seed)
            return replayed(model, inputs, plan, _check_plan(model, plan), n_passes, seed)
    except NotShareableError as error:
        raise ValueError(refused(error)) from error
    except NotFreezableError as error:
        raise ValueError(_cannot(model, str(error))) from error
    except NoShadowError as error:
        raise ValueError(_cannot(model, "TorchScript draws where nobody can put constants")) from error


def _check_options(masks: Any, seed: Any) -> None:
    check_masks(masks)
    if masks != "shared":
        raise ValueError(
            '`masks` must be "shared" for a frozen model: masks of every row would be fixed to the rows it was frozen '
            f"with, and it takes any number of them; got {masks!r}."
        )
    if seed is None:
        raise TypeError("`seed` must be an int: a frozen model is the K passes of one seed; got None.")
    check_seed(seed)


def _example(model: nn.Module) -> Tensor:
    """A row for a chain of layers of which the first with weights is dense."""
    for layer in find(model) or ():
        if isinstance(layer, nn.Linear):
            return torch.zeros(1, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
        if type(layer) not in (*kinds.UNIT_DROPOUT, *kinds.ELEMENTWISE):
            break
    raise ValueError(
        "`x` must be given for a model whose inputs are not known from its layers: an example of what it is called "
        f"with, one row will do; got None for a {type(model).__name__}."
    )


def _check_plan(model: nn.Module, plan: Plan) -> Rows:
    """Where the rows are, if the draws of the plan can be kept."""
    if plan.own:
        raise ValueError(_cannot(model, "its passes differ by a generator of its own"))
    if plan.foreign:
        raise ValueError(_cannot(model, "it draws from the generators of Python, numpy or torch itself"))
    if plan.hidden:
        raise ValueError(_cannot(model, "it draws by operators that no Python function of torch shows"))
    if plan.rows is None:
        raise ValueError(_cannot(model, "nobody knows which axis of `x` counts its rows"))
    if plan.rows.ragged:
        raise ValueError(_cannot(model, "its rows decide which of them a mask is for"))
    if plan.moves:
        raise ValueError(_cannot(model, "a pass changes its buffers, so that the next one would come out differently"))
    return plan.rows


def _cannot(model: nn.Module, reason: str) -> str:
    return (
        f"`model` must draw numbers that can be kept as constants, to be frozen; {type(model).__name__} cannot be: "
        f"{reason}. Use bbalpha.sample, or freeze the part of it that can be."
    )
