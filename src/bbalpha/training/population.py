"""Many networks of one shape trained as one batched computation: splits x alphas x dropout rates x priors x seeds.

Weights stand side by side, (M, out, in), and a step is a handful of batched products over all M members. Each member
has its own rows, standardisation, hyper-parameters, noise precision and early stopping. Its order of rows and its masks
are those that `fit` would take with its seed, so it is the network that `fit` would give, up to rounding.

    members = [Member(train=rows, alpha=a, dropout=p, seed=0) for a in (0, 0.5, 1) for p in (0.01, 0.05)]
    population = fit_population(X, y, members, epochs=100)
    population.network(3)                                            # nn.Sequential, as from mlp
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha._kernels import step_seed
from bbalpha.checks import check_call, check_count, check_flag, check_settings, check_weight
from bbalpha.priors import weight_decay
from bbalpha.training.bank import ACTIVATIONS, LIKELIHOODS, Activation, Bank, Likelihood, initial_network, pad, tables
from bbalpha.training.bank import Member as Member  # also a name of this module
from bbalpha.training.feed import order
from bbalpha.training.fitting import cosine, epoch_bar


@dataclass(frozen=True, eq=False)
class Population:
    """M trained networks, side by side.

    Attributes:
        members: What each was trained with.
        weights: For every layer its weight (M, out, in) and bias (M, 1, out).
        log_precision: Of the noise, on standardised targets (M,); zeros for classes and where it is predicted.
        x_mean: Of each member's inputs, those for early stopping too (M, 1, F); zeros where they are left as they are.
        x_scale: Their deviation (M, 1, F), or ones.
        y_mean: Of its targets (M, 1, D); zeros for classes and where they are left as they are.
        y_scale: Their deviation (M, 1, D), or ones.
        likelihood: As in `fit_population`.
        nll: Validation NLL a row after every epoch, in units of y (E, M); nan where there is none.
        best_epoch: The epoch (from 1) whose weights a member has (M,).
        activation: As in `fit_population`.
        balanced: As in `fit_population`.
    """

    members: tuple[Member, ...]
    weights: tuple[tuple[Tensor, Tensor], ...]
    log_precision: Tensor
    x_mean: Tensor
    x_scale: Tensor
    y_mean: Tensor
    y_scale: Tensor
    likelihood: Likelihood
    nll: Tensor
    best_epoch: Tensor
    activation: Activation = "relu"
    balanced: bool = True

    def network(self, index: int) -> nn.Sequential:
        """Member `index` as a network of its own, on standardised inputs, in evaluation mode."""
        member = self.members[index]
        sizes = [self.weights[0][0].shape[2], *(w.shape[1] for w, _ in self.weights)]
        net = initial_network(sizes, member, self.activation)
        linears = [layer for layer in net if isinstance(layer, nn.Linear)]
        with torch.no_grad():
            for layer, (weight, bias) in zip(linears, self.weights, strict=True):
                layer.weight.copy_(weight[index])
                layer.bias.copy_(bias[index, 0])
        return net.eval()

    def log_likelihood(self, x: Any, y: Any, rows: Sequence[Any], *, n_passes: int = 100) -> list[Tensor]:
        """Log-density of the predictive distribution at each member's own `rows`, in units of y: M tensors."""
        network, n_passes = Bank.of(self), check_count("n_passes", n_passes)
        inputs, target = tables(x, y, self.likelihood)
        return network.log_likelihood(inputs, target, [_indices("rows", r, len(inputs)) for r in rows], n_passes)


def fit_population(
    x: Any,
    y: Any,
    members: Sequence[Member],
    *,
    epochs: int,
    hidden_layer_sizes: Sequence[int] = (50,),
    likelihood: Likelihood = "gaussian",
    activation: Activation = "relu",
    n_passes: int = 10,
    batch_size: int = 32,
    schedule: Callable[[float], float] | None = cosine,
    patience: int | None = None,
    sample_weight: Any = None,
    n_validation_passes: int = 20,
    balanced: bool = True,
    epoch_rows: int | None = None,
    standardise: bool = True,
    progress: bool = False,
) -> Population:
    """Train all `members` at once on rows of one table.

    Args:
        x: Inputs (N, F), not standardised: each member does so by its rows.
        y: Targets (N,) or (N, D), or class indices (N,).
        members: Rows and hyper-parameters of each network.
        epochs: Times through a member's rows.
        hidden_layer_sizes: Widths of the hidden layers.
        likelihood: "gaussian" with a learned precision; "heteroscedastic", the network predicts it: 2 D outputs, means
            and log precisions, the latter bounded (`bank.split_heads`); "student", the same under Student's t of four
            degrees of freedom; or "categorical".
        activation: "relu", or "silu", which is smooth.
        n_passes: K.
        batch_size: Rows of a member a step.
        schedule: Multiplies the learning rates, as in `fit`.
        patience: A member stops after so many epochs without a better validation NLL.
        sample_weight: A weight per row (N,).
        n_validation_passes: K of the validation NLL.
        balanced: As in `bbalpha.sample`.
        epoch_rows: An epoch goes through at most so many of a member's rows, the next one on from there: many rows
            are looked at more than once a round.
        standardise: False takes inputs and targets as they are, and `network` gives networks for inputs as these.
        progress: Show a bar: epochs, networks that still move, and the mean of their validation NLL.

    >>> x = torch.randn(40, 2)
    >>> members = [Member(train=range(20), alpha=a) for a in (0.0, 1.0)] + [Member(train=range(20, 40))]
    >>> population = fit_population(x, x[:, 0], members, epochs=2)
    >>> population.weights[0][0].shape, population.network(2)(x).shape
    (torch.Size([3, 50, 2]), torch.Size([40, 1]))
    """
    if not members:
        raise ValueError("`members` must hold at least one Member; got none.")
    if not isinstance(likelihood, str) or likelihood not in LIKELIHOODS:
        raise ValueError(f"`likelihood` must be one of {', '.join(LIKELIHOODS)}; got {likelihood!r}.")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"`activation` must be one of {', '.join(ACTIVATIONS)}; got {activation!r}.")
    given: dict[str, Any] = {
        "epochs": epochs, "hidden_layer_sizes": hidden_layer_sizes, "n_passes": n_passes, "batch_size": batch_size,
        "patience": patience, "n_validation_passes": n_validation_passes, "epoch_rows": epoch_rows,
    }  # fmt: skip
    given = check_settings(given, optional=("patience", "epoch_rows"))
    inputs, target = tables(x, y, likelihood)
    weight = None
    if sample_weight is not None:
        weight = check_weight(sample_weight, torch.empty(len(inputs)))
    if schedule is not None:
        check_call("schedule", schedule)
    members = [_checked(m, len(inputs), weight) for m in members]
    bank = Bank.start(
        inputs, target, members, given.pop("hidden_layer_sizes"), likelihood, activation, weight,
        check_flag("balanced", balanced), check_flag("standardise", standardise),
    )  # fmt: skip
    run = _Training(bank, inputs, target, weight, schedule=schedule, **given)
    _check_finite({"x": bank.x_scale, "y": bank.y_scale} if standardise else {"x": inputs, "y": target})
    return run(progress)


# ------------------------------------------------------------------------------ what can be wrong


def _checked(member: Any, n_rows: int, weight: Tensor | None) -> Member:
    if not isinstance(member, Member):
        raise TypeError(f"`members` must be of Member; got {type(member).__name__}.")
    held = None if member.validation is None else _indices("validation", member.validation, n_rows)
    settings = check_settings({k: v for k, v in vars(member).items() if k not in ("train", "validation", "columns")})
    train = _indices("train", member.train, n_rows)
    if not len(_used(train, weight)):
        raise ValueError("`members` must each have at least one training row of positive weight; one has none.")
    return replace(member, train=train, validation=held, **settings)


def _used(rows: Tensor, weight: Tensor | None) -> Tensor:
    """The rows that have a weight."""
    return rows if weight is None else rows[weight[rows] > 0]


def _indices(name: str, rows: Any, n_rows: int) -> Tensor:
    """Indices of rows of a table as a tensor (n,)."""
    try:
        index = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"`{name}` must hold indices of rows; got {type(rows).__name__}.") from error
    if index.ndim != 1 or (len(index) and (index.is_floating_point() or index.dtype == torch.bool)):
        raise ValueError(f"`{name}` must hold the whole numbers of rows (n,); got {tuple(index.shape)}, {index.dtype}.")
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < n_rows:
        raise ValueError(
            f"`{name}` must hold rows from 0 to {n_rows - 1}; got {int(index.min())} to {int(index.max())}."
        )
    return index.long()


def _check_finite(found: dict[str, Tensor]) -> None:
    """Refuse members that are given a nan or an infinity: their scalers tell, or the tables where these have none."""
    for name, values in found.items():
        if not bool(values.isfinite().all()):
            raise ValueError(f"`{name}` must be finite in the rows of every member; got nan or infinity.")


# ------------------------------------------------------------------------------ the run


@dataclass
class _Training:
    """Adam over all members at once."""

    bank: Bank
    x: Tensor
    y: Tensor
    weight: Tensor | None
    epochs: int
    n_passes: int
    batch_size: int
    schedule: Callable[[float], float] | None
    patience: int | None
    n_validation_passes: int
    epoch_rows: int | None
    curve: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        members, flat = self.bank.members, self.bank.flat
        self.rows = [_used(torch.as_tensor(m.train), self.weight) for m in members]
        self.mean_weight = [1.0 if self.weight is None else float(self.weight[r].mean()) for r in self.rows]
        self.alpha = torch.tensor([m.alpha for m in members])[:, None, None]
        self.rate = torch.tensor([m.learning_rate for m in members])[:, None]
        self.decay, self.mask = self._decay(), self.bank.mask()
        self.first, self.second = torch.zeros_like(flat), torch.zeros_like(flat)
        self.steps = torch.zeros(len(members), 1)
        self.alive = torch.ones(len(members), dtype=torch.bool)
        held = [torch.as_tensor([] if m.validation is None else m.validation, dtype=torch.long) for m in members]
        self.held = [h if len(_used(h, self.weight)) else h[:0] for h in held]  # without weight they tell nothing
        self.best, self.best_nll = flat.clone(), torch.full((len(members),), math.inf)
        self.best_epoch = torch.full((len(members),), self.epochs)

    def __call__(self, progress: bool) -> Population:
        self.spans = [min(len(rows), self.epoch_rows or len(rows)) for rows in self.rows]
        per_epoch = [-(-span // self.batch_size) for span in self.spans]
        with epoch_bar(progress, self.epochs) as bar:
            for epoch in range(self.epochs):
                self._epoch(epoch, per_epoch)
                if any(len(h) for h in self.held):
                    self._validate(epoch)
                    bar.set_postfix(nll=f"{float(self.curve[-1].nanmean()):.3f}", moving=int(self.alive.sum()))
                bar.update()
                if not bool(self.alive.any()):
                    break
        return self._population()

    def _epoch(self, epoch: int, per_epoch: list[int]) -> None:
        orders = [self._order(m, epoch) if alive else self.rows[m][:0] for m, alive in enumerate(self.alive.tolist())]
        for i in range(max(per_epoch)):
            chosen, counts = pad([o[i * self.batch_size : (i + 1) * self.batch_size] for o in orders])
            share = torch.tensor([(epoch + i / n) / self.epochs for n in per_epoch])
            self._step(chosen, counts, share, [epoch * n + i for n in per_epoch])

    def _order(self, index: int, epoch: int) -> Tensor:
        """The rows of a member in an epoch: all of them, or its part of a longer round."""
        rows, span, seed = self.rows[index], self.spans[index], self.bank.members[index].seed
        parts = len(rows) // max(1, span)  # whole parts of a round; what is left over comes up in another
        shuffled = order(len(rows), seed=seed, epoch=epoch // max(1, parts))
        first = epoch % max(1, parts) * span
        return rows[shuffled[first : first + span]]

    def _step(self, rows: Tensor, counts: list[int], share: Tensor, steps: list[int]) -> None:
        bank = self.bank
        seeds = [step_seed(m.seed, t) for m, t in zip(bank.members, steps, strict=True)]
        weight = self._row_weight(rows, counts)[:, None]
        grad = torch.zeros_like(bank.flat)
        for c in bank.chunks(self.n_passes * rows.shape[1], counts):
            x, target = bank.batch(self.x, self.y, rows[c], c)
            flat = bank.flat[c].detach().requires_grad_()
            outputs = bank.forward(flat, x, seeds, counts, self.n_passes, c)
            losses = bank.losses(outputs, target, bank.layers(flat)[1])  # (M, K, B)
            # the gradient of the alpha objective is that of the losses weighted by softmax(-alpha l) over k
            share_k = torch.softmax(-self.alpha[c] * losses.detach(), 1) * weight[c]
            (grad[c],) = torch.autograd.grad(losses, flat, share_k)
        if self.mask is not None:
            grad *= self.mask
        self._adam(grad, share, (torch.tensor(counts) > 0)[:, None])

    def _adam(self, grad: Tensor, share: Tensor, moving: Tensor) -> None:
        """Adam as torch has it, with coupled decay, for the members that move."""
        grad = grad + self.decay * self.bank.flat
        self.steps += moving
        rate = self.rate
        if self.schedule is not None:
            rate = rate * torch.tensor([self.schedule(float(s)) for s in share])[:, None]
        first = self.first.lerp(grad, 0.1)
        second = torch.addcmul(self.second * 0.999, grad, grad, value=0.001)
        step = rate / (1 - 0.9**self.steps) * first
        root = (second / (1 - 0.999**self.steps)).sqrt() + 1e-8
        self.first = torch.where(moving, first, self.first)
        self.second = torch.where(moving, second, self.second)
        self.bank.flat = torch.where(moving, self.bank.flat - step / root, self.bank.flat)

    def _row_weight(self, rows: Tensor, counts: list[int]) -> Tensor:
        """One over the rows of a member's batch, times their weights; 0 for padding (M, B)."""
        n = torch.tensor(counts)[:, None]
        share = (torch.arange(rows.shape[1]) < n) / n.clamp_min(1)
        if self.weight is not None:
            share = share * self.weight[rows] / torch.tensor(self.mean_weight)[:, None]
        return share

    def _decay(self) -> Tensor:
        """l^2 / (p N) for weights, 0 for biases and the precision (M, P)."""
        decay = torch.zeros_like(self.bank.flat)
        layers, _ = self.bank.layers(decay)
        for (weight, _), rates in zip(layers, self.bank.rates(), strict=True):
            for m, (member, rate) in enumerate(zip(self.bank.members, rates, strict=True)):
                weight[m] = weight_decay(member.length_scale, 1 - rate, len(self.rows[m]))
        return decay

    def _validate(self, epoch: int) -> None:
        held = [h if alive else h[:0] for h, alive in zip(self.held, self.alive.tolist(), strict=True)]
        values = self.bank.log_likelihood(self.x, self.y, held, self.n_validation_passes)
        nll = torch.tensor([-self._mean(v, h) if len(v) else math.nan for v, h in zip(values, held, strict=True)])
        better = self.alive & (nll < self.best_nll)
        self.best = torch.where(better[:, None], self.bank.flat, self.best)
        self.best_nll = torch.where(better, nll, self.best_nll)
        self.best_epoch = torch.where(better, epoch + 1, self.best_epoch)
        self.curve.append(nll)
        if self.patience is not None:
            watched = torch.tensor([len(h) > 0 for h in self.held])
            self.alive &= ~(watched & (epoch + 1 - self.best_epoch >= self.patience) & self.best_nll.isfinite())

    def _mean(self, values: Tensor, rows: Tensor) -> float:
        weight = torch.ones(len(rows)) if self.weight is None else self.weight[rows]
        return float((values * weight).sum() / weight.sum().clamp_min(1e-30))

    def _population(self) -> Population:
        bank = self.bank
        kept = self.best_nll.isfinite()  # one that never had a finite NLL keeps what it ended with, and shows it
        layers, log_precision = bank.layers(torch.where(kept[:, None], self.best, bank.flat))
        curve = torch.stack(self.curve) if self.curve else torch.empty(0, len(bank.members))
        return Population(
            bank.members, layers, log_precision, bank.x_mean, bank.x_scale, bank.y_mean, bank.y_scale,
            bank.likelihood, curve, self.best_epoch, bank.activation, bank.balanced,
        )  # fmt: skip
