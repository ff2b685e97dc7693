"""Many networks of one shape trained as one batched computation: splits x alphas x dropout rates x priors x seeds.

Weights are stacked, (M, out, in), and every step is a handful of batched products over all M members. Each member
has its own rows, standardisation, hyper-parameters, noise precision and early stopping. Its order of rows and its masks
are those that `fit` would take with its seed, so it is the network that `fit` would give, up to rounding.

    members = [Member(train=rows, alpha=a, dropout=p, seed=0) for a in (0, 0.5, 1) for p in (0.01, 0.05)]
    population = fit_population(X, y, members, epochs=100)
    population.network(3)                                            # nn.Sequential, as from mlp
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bbalpha.feed import order, step_seed
from bbalpha.masks import draw_noise, pass_seed
from bbalpha.networks import mlp
from bbalpha.training import cosine

Likelihood = Literal["gaussian", "categorical"]
_BLOCK = 2**20  # activations worked on together: 4 MiB
_threshold = torch.ops.aten.threshold_backward  # (x, noise, t): x where noise > t, else 0


@dataclass(frozen=True)
class Member:
    """One network of a population.

    Attributes:
        train: Indices of its training rows.
        validation: Indices of rows that early stopping looks at; None has none.
        alpha: Of the objective.
        dropout: The rate at hidden units.
        input_dropout: The rate at the inputs.
        length_scale: l of the prior, on standardised data.
        learning_rate: Of Adam.
        seed: Of initial weights, order and masks.
    """

    train: Sequence[int] | Tensor
    validation: Sequence[int] | Tensor | None = None
    alpha: float = 0.5
    dropout: float = 0.05
    input_dropout: float = 0.0
    length_scale: float = 1.0
    learning_rate: float = 0.01
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Population:
    """M trained networks, stacked.

    Attributes:
        members: What each was trained with.
        weights: For every layer its weight (M, out, in) and bias (M, 1, out).
        log_precision: Of the noise, on standardised targets (M,); zeros for classes.
        x_mean: Of each member's training inputs (M, 1, F).
        x_scale: Their deviation (M, 1, F).
        y_mean: Of its targets (M, 1, D); zeros for classes.
        y_scale: Their deviation (M, 1, D); ones for classes.
        likelihood: "gaussian" or "categorical".
        nll: Validation NLL a row after every epoch, in units of y (E, M); nan where there is none.
        best_epoch: The epoch (from 1) whose weights a member has (M,).
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

    def network(self, index: int) -> nn.Sequential:
        """Member `index` as a network of its own, on standardised inputs, in evaluation mode."""
        member = self.members[index]
        sizes = [self.weights[0][0].shape[2], *(w.shape[1] for w, _ in self.weights)]
        net = _initial(sizes, member)
        linears = [layer for layer in net if isinstance(layer, nn.Linear)]
        with torch.no_grad():
            for layer, (weight, bias) in zip(linears, self.weights, strict=True):
                layer.weight.copy_(weight[index])
                layer.bias.copy_(bias[index, 0])
        return net.eval()

    def log_likelihood(self, x: Any, y: Any, rows: Sequence[Any], *, n_passes: int = 100) -> list[Tensor]:
        """Log-density of the predictive distribution at each member's own `rows`, in units of y: M tensors."""
        network = _Stack.of(self)
        return network.log_likelihood(*_tables(x, y, self.likelihood), [torch.as_tensor(r) for r in rows], n_passes)


def fit_population(
    x: Any,
    y: Any,
    members: Sequence[Member],
    *,
    epochs: int,
    hidden_layer_sizes: Sequence[int] = (50,),
    likelihood: Likelihood = "gaussian",
    n_passes: int = 10,
    batch_size: int = 32,
    schedule: Callable[[float], float] | None = cosine,
    patience: int | None = None,
    sample_weight: Any = None,
    n_validation_passes: int = 20,
) -> Population:
    """Train all `members` at once on rows of one table.

    Args:
        x: Inputs (N, F), not standardised: each member does so by its training rows.
        y: Targets (N,) or (N, D), or class indices (N,).
        members: Rows and hyper-parameters of each network.
        epochs: Times through a member's rows.
        hidden_layer_sizes: Widths of the hidden layers.
        likelihood: "gaussian" with a learned precision, or "categorical".
        n_passes: K.
        batch_size: Rows of a member a step.
        schedule: Multiplies the learning rates, as in `fit`.
        patience: A member stops after so many epochs without a better validation NLL.
        sample_weight: A weight per row (N,).
        n_validation_passes: K of the validation NLL.

    >>> x = torch.randn(40, 2)
    >>> members = [Member(train=range(20), alpha=a) for a in (0.0, 1.0)] + [Member(train=range(20, 40))]
    >>> population = fit_population(x, x[:, 0], members, epochs=2)
    >>> population.weights[0][0].shape, population.network(2)(x).shape
    (torch.Size([3, 50, 2]), torch.Size([40, 1]))
    """
    if not members:
        raise ValueError("`members` must hold at least one Member; got none.")
    if likelihood not in ("gaussian", "categorical"):
        raise ValueError(f'`likelihood` must be "gaussian" or "categorical"; got {likelihood!r}.')
    inputs, target = _tables(x, y, likelihood)
    weight = None if sample_weight is None else torch.as_tensor(sample_weight, dtype=torch.float32)
    stack = _Stack.start(inputs, target, members, hidden_layer_sizes, likelihood, weight)
    run = _Run(stack, inputs, target, weight, epochs, n_passes, batch_size, schedule, patience, n_validation_passes)
    return run()


# ------------------------------------------------------------------------------ the stacked network


@dataclass
class _Stack:
    """Parameters of M networks and what they compute."""

    members: tuple[Member, ...]
    flat: Tensor  # (M, P): all parameters of a member in one row
    sizes: list[int]
    x_mean: Tensor
    x_scale: Tensor
    y_mean: Tensor
    y_scale: Tensor
    likelihood: Likelihood

    @classmethod
    def start(
        cls,
        x: Tensor,
        y: Tensor,
        members: Sequence[Member],
        hidden: Sequence[int],
        likelihood: Likelihood,
        weight: Tensor | None,
    ) -> "_Stack":
        outputs = y.shape[1] if likelihood == "gaussian" else int(y.max()) + 1
        sizes = [x.shape[1], *hidden, outputs]
        nets = [_initial(sizes, m) for m in members]
        rows = [torch.cat([p.detach().flatten() for p in net.parameters()] + [torch.zeros(1)]) for net in nets]
        scalers = [_standardiser(x, m, weight) for m in members]
        if likelihood == "gaussian":
            targets = [_standardiser(y, m, weight) for m in members]
        else:
            targets = [(torch.zeros(1, 1), torch.ones(1, 1))] * len(members)
        x_mean, x_scale = (torch.stack(part) for part in zip(*scalers, strict=True))
        y_mean, y_scale = (torch.stack(part) for part in zip(*targets, strict=True))
        return cls(tuple(members), torch.stack(rows), sizes, x_mean, x_scale, y_mean, y_scale, likelihood)

    @classmethod
    def of(cls, population: Population) -> "_Stack":
        p = population
        parts = [t.flatten(1) for layer in p.weights for t in layer] + [p.log_precision[:, None]]
        sizes = [p.weights[0][0].shape[2], *(w.shape[1] for w, _ in p.weights)]
        return cls(p.members, torch.cat(parts, 1), sizes, p.x_mean, p.x_scale, p.y_mean, p.y_scale, p.likelihood)

    def layers(self, flat: Tensor) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
        """Views of `flat` (M, P): weight (M, out, in) and bias (M, 1, out) of each layer, and log precision (M,)."""
        found, at = [], 0
        for n_in, n_out in zip(self.sizes, self.sizes[1:], strict=False):
            weight = flat[:, at : at + n_in * n_out].view(-1, n_out, n_in)
            at += n_in * n_out
            found.append((weight, flat[:, at : at + n_out].view(-1, 1, n_out)))
            at += n_out
        return tuple(found), flat[:, at]

    def rates(self) -> list[list[float]]:
        """For every layer the dropout rate of its inputs, by member."""
        hidden = [[m.dropout for m in self.members]] * (len(self.sizes) - 2)
        return [[m.input_dropout for m in self.members], *hidden]

    def forward(
        self, flat: Tensor, x: Tensor, seeds: Sequence[int], counts: Sequence[int], n_passes: int, part: slice
    ) -> Tensor:
        """Outputs (M, K, B, D) of the members in `part` for standardised inputs (M, B, F).

        Of a member's rows the first `counts` are real.
        """
        M, B, _ = x.shape
        layers, _ = self.layers(flat)
        by_layer = [rates[part] for rates in self.rates()]
        draws = _Draws.of(list(zip(seeds, counts, *by_layer, strict=True)), n_passes, B)
        h = x.unsqueeze(1)  # (M, 1 or K, B, in): what all passes share is computed once
        for i, (weight, bias) in enumerate(layers):
            if any(by_layer[i]):
                noise, scale = draws.noise(i, h.shape[-1])
                h = _drop(h, noise, relu=i > 0)
                weight = weight * scale[:, None, None]
            elif i:
                h = h.relu()
            rows = h.flatten(1, 2)
            if weight.shape[1] == 1:  # a batched product with one column is slower than this
                out = (rows * weight).sum(-1, keepdim=True) + bias
            else:
                out = torch.baddbmm(bias, rows, weight.transpose(1, 2))
            h = out.view(M, -1, B, weight.shape[1])
        return h.expand(M, n_passes, B, h.shape[-1])

    def chunks(self, rows: int) -> list[slice]:
        """Members that are worked on together: as many as stay in the cache, at `rows` passes times rows each."""
        size = max(1, _BLOCK // (rows * max(self.sizes)))
        return [slice(i, i + size) for i in range(0, len(self.members), size)]

    def losses(self, outputs: Tensor, target: Tensor, log_precision: Tensor) -> Tensor:
        """Minus the log-likelihood of every pass: (M, K, B, D), (M, B, D) or (M, B) -> (M, K, B)."""
        if self.likelihood == "categorical":
            index = target[:, None, :, None].expand(*outputs.shape[:3], 1)
            return -F.log_softmax(outputs, -1).gather(-1, index).squeeze(-1)
        tau = log_precision[:, None, None]
        squares = (target.unsqueeze(1) - outputs).square().sum(-1)
        return 0.5 * (tau.exp() * squares + outputs.shape[-1] * (math.log(2 * math.pi) - tau))

    def batch(self, x: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Standardised inputs (M, B, F) and targets of the rows (M, B)."""
        inputs = (x[rows] - self.x_mean) / self.x_scale
        target = y[rows] if self.likelihood == "categorical" else (y[rows] - self.y_mean) / self.y_scale
        return inputs.float(), target if self.likelihood == "categorical" else target.float()

    def log_likelihood(self, x: Tensor, y: Tensor, rows: list[Tensor], n_passes: int, size: int = 256) -> list[Tensor]:
        """Of the predictive distribution, for each member's rows, in units of y."""
        parts: list[list[Tensor]] = [[] for _ in rows]
        _, log_precision = self.layers(self.flat)
        shift = self.y_scale.log().sum((1, 2))
        with torch.no_grad():
            for start in range(0, max((len(r) for r in rows), default=0), size):
                chosen, counts = _pad([r[start : start + size] for r in rows])
                inputs, target = self.batch(x, y, chosen)
                seeds = [step_seed(m.seed + 1, start // size) for m in self.members]
                for c in self.chunks(n_passes * chosen.shape[1]):
                    outputs = self.forward(self.flat[c], inputs[c], seeds[c], counts[c], n_passes, c)
                    losses = self.losses(outputs, target[c], log_precision[c])
                    values = (-losses).logsumexp(1) - math.log(n_passes) - shift[c, None]  # (M, B)
                    for part, value, n in zip(parts[c], values, counts[c], strict=True):
                        part.append(value[:n])
        return [torch.cat(part) if part else torch.empty(0) for part in parts]


@dataclass(frozen=True)
class _Draws:
    """The generators of members; those that would draw the same masks (seed, rows and rates agree) share one.

    Attributes:
        keys: The distinct (seed, rows, rate of each layer).
        owner: Which of the keys each member has.
        generators: K of them for each key.
        B: Rows of a batch.
    """

    keys: list[tuple[Any, ...]]
    owner: list[int]
    generators: list[list[torch.Generator]]
    B: int

    @classmethod
    def of(cls, members: list[tuple[Any, ...]], n_passes: int, B: int) -> "_Draws":
        index = {key: i for i, key in enumerate(dict.fromkeys(members))}
        generators = [[torch.Generator().manual_seed(pass_seed(key[0], k)) for k in range(n_passes)] for key in index]
        return cls(list(index), [index[m] for m in members], generators, B)

    def noise(self, layer: int, width: int) -> tuple[Tensor, Tensor]:
        """What is positive where a unit is kept (M, K, B, width), and the scale of what is kept (M,)."""
        groups: dict[tuple[float, int], list[int]] = {}  # one rate and one number of rows are drawn together
        for u, key in enumerate(self.keys):
            groups.setdefault((key[2 + layer], key[1]), []).append(u)
        K = len(self.generators[0])
        scale = torch.ones(len(self.keys))
        noise: Tensor | None = None
        for (rate, count), chosen in groups.items():
            if rate == 0 or count == 0:
                continue
            (drawn,) = draw_noise([g for u in chosen for g in self.generators[u]], [((count, width), rate)])
            scale[chosen] = drawn.scale
            kept = drawn.values.view(len(chosen), K, count, width).float().sub_(drawn.threshold or 0)
            if len(groups) == 1 and count == self.B:
                noise = kept
                break
            noise = torch.ones(len(self.keys), K, self.B, width) if noise is None else noise
            for u, part in zip(chosen, kept, strict=True):
                noise[u, :, :count] = part
        noise = torch.ones(len(self.keys), K, self.B, width) if noise is None else noise
        if len(self.keys) == len(self.owner):
            return noise, scale
        return noise[self.owner], scale[self.owner]


def _drop(x: Tensor, noise: Tensor, *, relu: bool) -> Tensor:
    out: Tensor = _Drop.apply(x, noise, relu)
    return out


class _Drop(torch.autograd.Function):
    """x (or its positive part) where noise > 0, else 0; the scale of what is kept is in the next weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, relu: bool) -> Tensor:
        ctx.shape = x.shape
        out: Tensor = _threshold((x.relu() if relu else x).expand_as(noise), noise, 0)
        ctx.save_for_backward(out if relu else noise)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (positive,) = ctx.saved_tensors
        return _threshold(grad, positive, 0).sum_to_size(ctx.shape), None, None


# ------------------------------------------------------------------------------ the run


@dataclass
class _Run:
    """Adam over all members at once."""

    stack: _Stack
    x: Tensor
    y: Tensor
    weight: Tensor | None
    epochs: int
    n_passes: int
    batch_size: int
    schedule: Callable[[float], float] | None
    patience: int | None
    n_validation_passes: int
    step: int = 0
    curve: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        members, flat = self.stack.members, self.stack.flat
        self.rows = [self._used(torch.as_tensor(m.train)) for m in members]
        if any(len(rows) == 0 for rows in self.rows):
            raise ValueError("`members` must each have at least one training row of positive weight; one has none.")
        self.mean_weight = [1.0 if self.weight is None else float(self.weight[r].mean()) for r in self.rows]
        self.alpha = torch.tensor([m.alpha for m in members])[:, None, None]
        self.rate = torch.tensor([m.learning_rate for m in members])[:, None]
        self.decay = self._decay()
        self.first, self.second = torch.zeros_like(flat), torch.zeros_like(flat)
        self.steps = torch.zeros(len(members), 1)
        self.alive = torch.ones(len(members), dtype=torch.bool)
        self.held = [torch.empty(0, dtype=torch.long) if m.validation is None else torch.as_tensor(m.validation)
                     for m in members]  # fmt: skip
        self.best, self.best_nll = flat.clone(), torch.full((len(members),), math.inf)
        self.best_epoch = torch.full((len(members),), self.epochs)

    def __call__(self) -> Population:
        per_epoch = [-(-len(rows) // self.batch_size) for rows in self.rows]
        for epoch in range(self.epochs):
            orders = [rows[order(len(rows), seed=m.seed, epoch=epoch)]
                      for m, rows in zip(self.stack.members, self.rows, strict=True)]  # fmt: skip
            for i in range(max(per_epoch)):
                chosen, counts = _pad([o[i * self.batch_size : (i + 1) * self.batch_size] for o in orders])
                share = torch.tensor([(epoch + i / n) / self.epochs for n in per_epoch])
                steps = [epoch * n + i for n in per_epoch]
                self._step(chosen, counts, share, steps)
            if any(len(h) for h in self.held):
                self._validate(epoch)
            if not bool(self.alive.any()):
                break
        return self._population()

    def _step(self, rows: Tensor, counts: list[int], share: Tensor, steps: list[int]) -> None:
        stack = self.stack
        x, target = stack.batch(self.x, self.y, rows)
        seeds = [step_seed(m.seed, t) for m, t in zip(stack.members, steps, strict=True)]
        weight = self._row_weight(rows, counts)[:, None]
        grads: list[Tensor] = []
        for c in stack.chunks(self.n_passes * rows.shape[1]):
            flat = stack.flat[c].detach().requires_grad_()
            outputs = stack.forward(flat, x[c], seeds[c], counts[c], self.n_passes, c)
            losses = stack.losses(outputs, target[c], stack.layers(flat)[1])  # (M, K, B)
            # the gradient of the alpha objective is that of the losses weighted by softmax(-alpha l) over k
            share_k = torch.softmax(-self.alpha[c] * losses.detach(), 1) * weight[c]
            grads += torch.autograd.grad(losses, flat, share_k)
        moving = (self.alive & (torch.tensor(counts) > 0))[:, None]
        self._adam(torch.cat(grads), share, moving)

    def _adam(self, grad: Tensor, share: Tensor, moving: Tensor) -> None:
        """Adam as torch has it, with coupled decay, for the members that move."""
        grad = grad + self.decay * self.stack.flat
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
        self.stack.flat = torch.where(moving, self.stack.flat - step / root, self.stack.flat)

    def _row_weight(self, rows: Tensor, counts: list[int]) -> Tensor:
        """One over the rows of a member's batch, times their weights; 0 for padding (M, B)."""
        n = torch.tensor(counts)[:, None]
        share = (torch.arange(rows.shape[1]) < n) / n.clamp_min(1)
        if self.weight is not None:
            share = share * self.weight[rows] / torch.tensor(self.mean_weight)[:, None]
        return share

    def _decay(self) -> Tensor:
        """l^2 / (p N) for weights, 0 for biases and the precision (M, P)."""
        decay = torch.zeros_like(self.stack.flat)
        layers, _ = self.stack.layers(decay)
        for (weight, _), rates in zip(layers, self.stack.rates(), strict=True):
            for m, (member, rate) in enumerate(zip(self.stack.members, rates, strict=True)):
                weight[m] = member.length_scale**2 / ((1 - rate) * len(self.rows[m]))
        return decay

    def _used(self, rows: Tensor) -> Tensor:
        return rows if self.weight is None else rows[self.weight[rows] > 0]

    def _validate(self, epoch: int) -> None:
        values = self.stack.log_likelihood(self.x, self.y, self.held, self.n_validation_passes)
        nll = torch.tensor([-float(v.mean()) if len(v) else math.nan for v in values])
        better = self.alive & (nll < self.best_nll)
        self.best = torch.where(better[:, None], self.stack.flat, self.best)
        self.best_nll = torch.where(better, nll, self.best_nll)
        self.best_epoch = torch.where(better, epoch + 1, self.best_epoch)
        self.curve.append(nll.masked_fill(~self.alive, math.nan))
        if self.patience is not None:
            watched = torch.tensor([len(h) > 0 for h in self.held])
            self.alive &= ~(watched & (epoch + 1 - self.best_epoch >= self.patience) & self.best_nll.isfinite())

    def _population(self) -> Population:
        stack = self.stack
        watched = torch.tensor([len(h) > 0 for h in self.held])
        layers, log_precision = stack.layers(torch.where(watched[:, None], self.best, stack.flat))
        curve = torch.stack(self.curve) if self.curve else torch.empty(0, len(stack.members))
        return Population(
            stack.members, layers, log_precision, stack.x_mean, stack.x_scale, stack.y_mean, stack.y_scale,
            stack.likelihood, curve, self.best_epoch,
        )  # fmt: skip


# ------------------------------------------------------------------------------ helpers


def _initial(sizes: Sequence[int], member: Member) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(member.seed)
        return mlp(sizes, dropout=member.dropout, input_dropout=member.input_dropout)


def _tables(x: Any, y: Any, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    """Inputs (N, F) and targets (N, D) in double precision; class indices (N,) as they are."""
    inputs, target = _own(x).double(), _own(y)
    if inputs.ndim != 2 or len(target) != len(inputs):
        raise ValueError(
            f"`x` must be (N, F) with a row for each of `y`; got {tuple(inputs.shape)}, {tuple(target.shape)}."
        )
    return inputs, target.long() if likelihood == "categorical" else target.double().reshape(len(inputs), -1)


def _own(values: Any) -> Tensor:
    """A tensor; a copy of an array that may not be written to."""
    return values if isinstance(values, Tensor) else torch.tensor(np.asarray(values))


def _standardiser(values: Tensor, member: Member, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the member's training rows, each (1, F)."""
    rows = torch.as_tensor(member.train)
    share = torch.ones(len(rows), 1, dtype=torch.float64) if weight is None else weight[rows].double()[:, None]
    share = share / share.sum()
    mean = (values[rows] * share).sum(0, keepdim=True)
    scale = ((values[rows] - mean).square() * share).sum(0, keepdim=True).sqrt()
    return mean, torch.where(scale <= 1e-12 * mean.abs() + 1e-300, 1.0, scale)


def _pad(rows: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Rows of different numbers as one table (M, B), and how many of each are real."""
    counts = [len(r) for r in rows]
    if len(set(counts)) == 1:
        return torch.stack(list(rows)), counts
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True), counts
