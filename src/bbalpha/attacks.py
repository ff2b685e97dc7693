"""Adversarial inputs for your own model: fast gradient sign steps through the MC predictive.

What is attacked is what is predicted with, log p(y|x) = log mean_k softmax(f_k(x))_y, the mean over K passes:

    fgsm            x - step * sign(grad max_y log p(y|x))          away from the predicted class, one step
    iterative_fgsm  x + step * sign(grad log p(target|x))           towards a class, again and again

Masks are drawn afresh at every step, or fixed by a `seed`: who predicts with the same seed and shared masks is then
attacked as the deterministic ensemble it is, which is the stronger attack. A net without dropout is attacked as it
is. `Predictive` is that predictive as a plain module, for the attacks of other libraries:

    attack(foolbox.PyTorchModel(Predictive(net, n_passes=10).eval(), bounds=(0, 1)), x, y, epsilons=0.1)
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bbalpha._engine.guards import steady
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import Masks, is_random, run_passes
from bbalpha._kernels import pass_seed
from bbalpha.checks import check_count, check_floating, check_masks, check_model, check_number, check_seed
from bbalpha.prediction import as_logits

Clip = tuple[float, float] | None


def fgsm(
    model: nn.Module,
    x: Tensor,
    *,
    step: float,
    label: int | Tensor | None = None,
    n_passes: int | None = 10,
    clip: Clip = (0, 1),
    evade: float = 0.0,
    masks: Masks = "per_example",
    seed: int | None = None,
    batch_size: int = 128,
) -> Tensor:
    """The inputs after one untargeted fast gradient sign step, of the shape of `x`.

    Args:
        model: A classifier that returns logits (N, C), or a mapping with "logits".
        x: Inputs (N, ...).
        step: How far every entry of `x` moves.
        label: The class to get away from, one or (N,); None takes the predicted one, as the paper does.
        n_passes: K; None attacks the network as it is, random sites off.
        clip: The range of valid inputs; None for any.
        evade: An attacker who knows that uncertainty is watched climbs -log p(label) - evade * entropy.
        masks: "per_example", or "shared" by all rows of a pass.
        seed: None draws fresh masks from torch's global generator; an int fixes them.
        batch_size: Rows at a time.

    >>> net, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 3)), torch.full((4, 2), 0.5)
    >>> (fgsm(net, x, step=0.1) - x).abs().max()
    tensor(0.1000)
    """
    _check_evade(evade)
    classes = None if label is None else _classes("label", label, x)

    def away(log_probs: Tensor, rows: slice) -> Tensor:
        loss = log_probs.max(1).values if classes is None else _at("label", classes[rows], log_probs)
        return _quietly(-loss, log_probs, evade)

    predictive = Predictive(model, n_passes=n_passes, masks=masks, seed=seed)
    return _climb(predictive, x, away, step=step, n_steps=1, clip=clip, batch_size=batch_size)


def iterative_fgsm(
    model: nn.Module,
    x: Tensor,
    *,
    target: int | Tensor,
    step: float = 0.01,
    n_steps: int = 40,
    n_passes: int | None = 10,
    clip: Clip = (0, 1),
    evade: float = 0.0,
    masks: Masks = "per_example",
    seed: int | None = None,
    batch_size: int = 128,
) -> Tensor:
    """The inputs after `n_steps` fast gradient sign steps towards the class `target`, of the shape of `x`.

    Calls can be chained: 40 calls with ``n_steps=1`` walk as one of 40 does, and show the way.

    Args:
        model: A classifier that returns logits (N, C), or a mapping with "logits".
        x: Inputs (N, ...).
        target: The class to be taken for, one or (N,).
        step: How far every entry of `x` moves in a step.
        n_steps: How many steps.
        n_passes: K; None attacks the network as it is, random sites off.
        clip: The range of valid inputs; None for any.
        evade: An attacker who knows that uncertainty is watched climbs log p(target) - evade * entropy. The entropy
            bounds the mutual information, so both are evaded. 0 is the attack of the paper.
        masks: "per_example", or "shared" by all rows of a pass.
        seed: None draws fresh masks at every step; an int fixes them, the same at every step.
        batch_size: Rows at a time.

    >>> net, x = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2)), torch.zeros(4, 2)
    >>> Predictive(net)(iterative_fgsm(net, x, target=1, step=100.0, clip=None)).argmax(1)
    tensor([1, 1, 1, 1])
    """
    _check_evade(evade)
    classes = _classes("target", target, x)

    def towards(log_probs: Tensor, rows: slice) -> Tensor:
        return _quietly(_at("target", classes[rows], log_probs), log_probs, evade)

    predictive = Predictive(model, n_passes=n_passes, masks=masks, seed=seed)
    return _climb(predictive, x, towards, step=step, n_steps=n_steps, clip=clip, batch_size=batch_size)


class Predictive(nn.Module):
    """The MC predictive as a plain module: x (N, ...) -> log of the mean probability over passes (N, C).

    Differentiable, with everything but the random sites in evaluation mode. Log-probabilities are logits, so attack
    libraries take it as it is. More passes, a better mean of the gradient over masks (expectation over transformation).

    Args:
        model: A classifier that returns logits (N, C), or a mapping with "logits"; one that has no random site is
            run once.
        n_passes: K; None is the network as it is, random sites off.
        masks: "per_example", or "shared" by all rows of a pass.
        seed: None draws fresh masks at every call; an int fixes them, with "shared" to K networks.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    >>> Predictive(net, n_passes=20)(torch.zeros(4, 2)).exp().sum(1).allclose(torch.ones(4))
    True
    """

    def __init__(
        self, model: nn.Module, *, n_passes: int | None = 10, masks: Masks = "per_example", seed: int | None = None
    ) -> None:
        super().__init__()
        check_model(model)
        n_passes = None if n_passes is None else check_count("n_passes", n_passes)
        check_masks(masks)
        check_seed(seed)
        self.model, self.n_passes, self.masks, self.seed = model, n_passes, masks, seed

    def forward(self, x: Tensor) -> Tensor:
        """Log of the mean probability over passes (N, C)."""
        inputs = Inputs.of(x, 0, model=self.model)
        n_passes = self.n_passes if is_random(self.model, inputs) else None
        outputs = run_passes(self.model, inputs, n_passes, masks=self.masks, seed=self.seed, evaluation=True)
        logits = as_logits(outputs, 2)
        if logits.ndim != 3:
            raise ValueError(f"`model` must return logits of one label a row, (N, C); got {tuple(logits.shape[1:])}.")
        return F.log_softmax(logits, 2).logsumexp(0) - math.log(len(logits))


# ------------------------------------------------------------------------------ the walk


def _climb(
    predictive: Predictive,
    x: Tensor,
    objective: Callable[[Tensor, slice], Tensor],
    *,
    step: float,
    n_steps: int,
    clip: Clip,
    batch_size: int,
) -> Tensor:
    """`x` after signed gradient steps up `objective`, which takes log_probs (n, C) of some rows and gives (n,)."""
    _check_walk(x, step, n_steps, clip, batch_size)
    seed = predictive.seed
    with steady(), torch.inference_mode(False), torch.enable_grad(), _frozen(predictive):
        walked = x.detach().clone()
        for start in range(0, len(x), batch_size):
            rows = slice(start, start + batch_size)
            if seed is not None and start and predictive.masks == "per_example":
                predictive.seed = pass_seed(seed, start)  # every batch its own masks, as in predict_*
            for _ in range(n_steps):
                here = walked[rows].clone().requires_grad_()
                moved = here.detach() + step * _gradient(objective(predictive(here), rows).sum(), here).sign()
                walked[rows] = moved if clip is None else moved.clamp(*clip)
    return walked


def _quietly(gain: Tensor, log_probs: Tensor, evade: float) -> Tensor:
    """`gain` (n,) minus `evade` times the entropy of log_probs (n, C)."""
    return gain + evade * (log_probs.exp() * log_probs).sum(1) if evade else gain


def _gradient(value: Tensor, x: Tensor) -> Tensor:
    """The gradient of `value` with respect to `x`, finite."""
    grad = torch.autograd.grad(value, x, allow_unused=True)[0] if value.requires_grad else None
    if grad is None:
        raise ValueError(
            "`model` must be differentiable in `x`; its output does not depend on it in a way autograd sees."
        )
    if not bool(grad.isfinite().all()):
        row = int((~grad.isfinite()).nonzero()[0, 0])
        raise ValueError(
            f"`model` must have finite gradients; got {float(grad[~grad.isfinite()][0])} in batch row {row}."
        )
    return grad


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradients for the parameters, which the walk does not need; as they were afterwards."""
    learning = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in learning:
            p.requires_grad_(False)
        yield
    finally:
        for p in learning:
            p.requires_grad_(True)


# ------------------------------------------------------------------------------ checks


def _classes(name: str, y: int | Tensor, x: Tensor) -> Tensor:
    """One class a row (N,)."""
    check_floating("x", x)
    if isinstance(y, int) and not isinstance(y, bool):
        return torch.full((len(x),), y, device=x.device)
    if not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise TypeError(f"`{name}` must hold integer class indices; got {getattr(y, 'dtype', type(y).__name__)}.")
    if y.shape != x.shape[:1]:
        raise ValueError(f"`{name}` must have one class a row, ({len(x)},); got shape {tuple(y.shape)}.")
    return y.long()


def _at(name: str, y: Tensor, log_probs: Tensor) -> Tensor:
    """The log-probability of one class a row: (n,), (n, C) -> (n,)."""
    C = log_probs.shape[1]
    if bool(((y < 0) | (y >= C)).any()):
        raise ValueError(f"`{name}` must hold classes from 0 to {C - 1}; got {int(y[(y < 0) | (y >= C)][0])}.")
    return log_probs.gather(1, y[:, None]).squeeze(1)


def _check_walk(x: Tensor, step: float, n_steps: int, clip: Clip, batch_size: int) -> None:
    check_floating("x", x)
    if not bool(x.isfinite().all()):
        raise ValueError(f"`x` must be finite; got {float(x[~x.isfinite()][0])}.")
    check_number("step", step, least=0)
    check_count("n_steps", n_steps, 0)
    check_count("batch_size", batch_size)
    if clip is None:
        return
    if not isinstance(clip, (tuple, list)) or len(clip) != 2 or not clip[0] < clip[1]:
        raise ValueError(f"`clip` must be the lowest and highest valid input, or None; got {clip!r}.")
    outside = x[(x < clip[0]) | (x > clip[1])]
    if len(outside):
        raise ValueError(
            f"`x` must lie within `clip`, {clip[0]} to {clip[1]}; got {float(outside[0]):.4g}. "
            "Give the range of your inputs, or clip=None."
        )


def _check_evade(evade: float) -> None:
    if isinstance(evade, bool) or not isinstance(evade, (int, float)) or not 0 <= evade < math.inf:
        raise ValueError(f"`evade` must be a finite weight of at least 0; got {evade!r}.")
