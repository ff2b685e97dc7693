"""The optimiser of a run, with the prior in its weight decay where that is possible and in the loss where it is not."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import keep_with
from bbalpha._engine.selection import Sites
from bbalpha._engine.tracing import trace
from bbalpha._torch import decay_after_unscaling
from bbalpha.checkpoint import describe
from bbalpha.distributed.ranks import is_cut
from bbalpha.priors import has_quadratic_kl, keep_probabilities, param_groups, prior_kl

Groups = list[dict[str, Any]]


def make_optimizer(
    model: nn.Module,
    objective: Any,
    given: Optimizer | Callable[[Groups], Optimizer] | None,
    *,
    learning_rate: float,
    length_scale: float | None,
    n_data: int | None,
    example: Callable[[], Any],
    sites: Sites | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> tuple[Optimizer, Callable[[], Tensor] | None]:
    """The optimiser, and the prior as a term of the loss where it cannot be weight decay.

    Args:
        model: What is trained.
        objective: Whose parameters are trained too.
        given: None is Adam; a function of parameter groups; an optimiser.
        learning_rate: Of Adam.
        length_scale: Of the prior; None or 0 is none.
        n_data: Rows of the data, where they are known.
        example: Gives a row or two of x, on the device of the model, or None.
        sites: The random sites that draw; a weight behind one that does not is kept whole.
        prepare: Called when the model was looked at; it may put other parameters in their place.
    """
    if length_scale and n_data is None:
        raise ValueError("`length_scale` needs data that tells its length; got an iterable data set. Leave it out.")
    keep = _keep(model, example, sites) if length_scale else None
    prepare()
    extra = [p for p in objective.parameters() if p.requires_grad] if isinstance(objective, nn.Module) else []
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained and not extra:
        raise ValueError("`model` must have parameters to train; all of its parameters have requires_grad=False.")
    penalty: Callable[[], Tensor] | None = None
    groups: Groups = [{"params": trained}]
    if length_scale:
        prior = {"length_scale": length_scale, "n_data": n_data, "keep": keep}
        if not isinstance(given, Optimizer) and has_quadratic_kl(model):
            groups = param_groups(model, **prior)  # type: ignore[arg-type]
        else:
            penalty = lambda: prior_kl(model, **prior)  # type: ignore[arg-type]  # noqa: E731
    if extra:
        groups.append({"params": extra, "weight_decay": 0.0})
    made = _Adam(groups, learning_rate) if given is None else given if isinstance(given, Optimizer) else given(groups)
    _check(made, trained, extra)
    return made, penalty


def keep_of(model: nn.Module, x: Any) -> dict[str, float] | None:
    """The `keep` of `prior_kl` for a model that is run on `x`; None where its structure tells."""
    return _keep(model, lambda: x, None)


def _keep(model: nn.Module, example: Callable[[], Any], sites: Sites | None) -> dict[str, float] | None:
    """Keep probabilities of the units that feed each weight; None where the structure of the model tells them."""
    if sites is None:
        # a network of plain layers tells by its structure which dropout feeds which weight; others are run once
        rows = None if describe(model) else example()
        return None if rows is None else trace(model, Inputs.of(rows, 0)).keep
    rows = example()
    if rows is None or not has_quadratic_kl(model):
        raise ValueError(
            "`length_scale` with `sites` needs data that can be looked at and layers whose prior is quadratic in their "
            "weights; leave one of the two out."
        )
    return dict.fromkeys(keep_probabilities(model), 1.0) | keep_with(model, Inputs.of(rows, 0), sites)


def _check(made: Any, trained: list[nn.Parameter], extra: list[nn.Parameter]) -> None:
    """Refuse an optimiser that moves nothing of the model, or leaves the objective's parameters where they are."""
    if not isinstance(made, Optimizer):
        raise TypeError(
            "`optimizer` must be a torch optimiser, or a function of parameter groups that makes one; "
            f"got {type(made).__name__}."
        )
    known = {id(p) for group in made.param_groups for p in group["params"]}
    if trained and not any(id(p) in known for p in trained):
        raise ValueError(
            "`optimizer` must hold parameters of the model; it holds none of those that are trained, so that nothing "
            "would be learnt. Make it with model.parameters(), after any copy of the model."
        )
    if any(id(p) not in known for p in extra):
        raise ValueError("`optimizer` must hold the parameters of the objective too; add objective.parameters() to it.")


class _Adam(torch.optim.Adam):
    """Adam with the coupled weight decay of every group, its parameters in one group: a group costs time a step."""

    def __init__(self, groups: Groups, learning_rate: float) -> None:
        every = [p for group in groups for p in group["params"]]
        cut = [p for p in every if is_cut(p)]  # among ranks: not to be mixed with others
        apart = [{"params": cut}, {"params": [p for p in every if not is_cut(p)]}] if cut else every
        super().__init__(apart, lr=learning_rate, fused=True)
        decays = [(p, group.get("weight_decay", 0.0)) for group in groups for p in group["params"]]
        self.decayed = [p for p, decay in decays if decay]
        # tensors: multiplying by a number takes longer, which shows where there is little to multiply
        self.decays = [torch.tensor(decay, dtype=torch.float64) for _, decay in decays if decay]
        decay_after_unscaling(self)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.decayed:
            for p, decay in zip(self.decayed, self.decays, strict=True):
                if p.grad is not None:
                    p.grad.add_(p * decay)
        return super().step(closure)
