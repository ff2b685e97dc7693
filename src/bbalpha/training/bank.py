"""A bank of networks: M of one shape side by side, the weights of a layer in one tensor (M, out, in).

Every layer is one batched product over the members. Members whose seed, rows and rates agree draw the same masks,
and draw them once; the scale of what dropout keeps is put into the next weights, M numbers instead of an activation.
Where the passes differ in the last layer alone, its outputs are products of the masks with activations times weights,
for all members of a mask at once: nothing of the size K x rows x units but the masks themselves.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from bbalpha._balance import Tape, is_balanced
from bbalpha._kernels import Noise, draw_balanced, draw_rates, held_out_seed, streams, units_per_word
from bbalpha._student import student_losses
from bbalpha._torch import where_above
from bbalpha.checks import check_real
from bbalpha.networks import mlp
from bbalpha.objectives import GaussianNLL, class_losses, gaussian_losses

Table = TypeVar("Table", NDArray[Any], Tensor)
Likelihood = Literal["gaussian", "heteroscedastic", "student", "categorical"]
LIKELIHOODS = get_args(Likelihood)
Activation = Literal["relu", "silu"]
ACTIVATIONS: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU}
_TWO_HEADS = ("heteroscedastic", "student")  # mean and log precision are predicted
LOG_PRECISION = 12.0  # a predicted log precision stays between minus and plus this
_BLOCK = 2**20  # activations worked on together: 4 MiB


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
        spread: The first weights and biases start out so many times as large: functions then begin with more bends.
        columns: The inputs that it looks at; None is all. The weights of the others are and stay 0.
    """

    train: Sequence[int] | Tensor
    validation: Sequence[int] | Tensor | None = None
    alpha: float = 0.5
    dropout: float = 0.05
    input_dropout: float = 0.0
    length_scale: float = 1.0
    learning_rate: float = 0.01
    seed: int = 0
    spread: float = 1.0
    columns: Sequence[int] | None = None


@dataclass
class Bank:
    """Parameters of M networks and what they compute."""

    members: tuple[Member, ...]
    flat: Tensor  # (M, P): all parameters of a member in one row
    sizes: list[int]
    x_mean: Tensor
    x_scale: Tensor
    y_mean: Tensor
    y_scale: Tensor
    likelihood: Likelihood
    activation: Activation
    balanced: bool

    @classmethod
    def start(
        cls, x: Tensor, y: Tensor, members: Sequence[Member], hidden: Sequence[int], likelihood: Likelihood,
        activation: Activation, weight: Tensor | None, balanced: bool, standardise: bool,
    ) -> "Bank":  # fmt: skip
        """Fresh members, standardised by their own rows or not at all."""
        outputs = int(y.max()) + 1 if likelihood == "categorical" else y.shape[1]
        outputs *= 2 if likelihood in _TWO_HEADS else 1
        sizes = [x.shape[1], *hidden, outputs]
        nets = [initial_network(sizes, m, activation) for m in members]
        rows = [torch.cat([p.detach().flatten() for p in net.parameters()] + [torch.zeros(1)]) for net in nets]
        scalers = [_scaler(x, m, weight) if standardise else _plain(x.shape[1]) for m in members]
        if likelihood == "categorical":
            targets = [_plain(1)] * len(members)
        else:
            targets = [_scaler(y, m, weight) if standardise else _plain(y.shape[1]) for m in members]
        x_mean, x_scale = (torch.stack(part) for part in zip(*scalers, strict=True))
        y_mean, y_scale = (torch.stack(part) for part in zip(*targets, strict=True))
        flat = torch.stack(rows)
        bank = cls(tuple(members), flat, sizes, x_mean, x_scale, y_mean, y_scale, likelihood, activation, balanced)
        if (mask := bank.mask()) is not None:
            bank.flat = flat * mask
        return bank

    @classmethod
    def of(cls, p: Any) -> "Bank":
        """The bank of a trained `Population`."""
        parts = [t.flatten(1) for layer in p.weights for t in layer] + [p.log_precision[:, None]]
        sizes = [p.weights[0][0].shape[2], *(w.shape[1] for w, _ in p.weights)]
        scalers = p.x_mean, p.x_scale, p.y_mean, p.y_scale
        return cls(p.members, torch.cat(parts, 1), sizes, *scalers, p.likelihood, p.activation, p.balanced)

    def mask(self) -> Tensor | None:
        """1 for the parameters that move, 0 for weights of inputs that a member does not look at (M, P)."""
        if all(m.columns is None for m in self.members):
            return None
        mask = torch.ones_like(self.flat)
        weight = self.layers(mask)[0][0][0]
        for m, member in enumerate(self.members):
            if member.columns is not None:
                unused = torch.ones(self.sizes[0], dtype=torch.bool)
                unused[torch.as_tensor(member.columns, dtype=torch.long)] = False
                weight[m, :, unused] = 0.0
        return mask

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
        self, flat: Tensor, x: Tensor, seeds: Sequence[int], counts: Sequence[int], n_passes: int, part: list[int]
    ) -> Tensor:
        """Outputs (M, K, B, D) of the M members in `part`, parameters `flat` (M, P), for standardised inputs (M, B, F).

        `seeds` and `counts` are of all members; of a member's rows the first `counts` are real.
        """
        M, B, _ = x.shape
        layers, _ = self.layers(flat)
        by_layer = [[rates[i] for i in part] for rates in self.rates()]
        mine = [(seeds[i], counts[i]) for i in part]
        keys = [(*a, *b) for a, b in zip(mine, zip(*by_layer, strict=True), strict=True)]
        draws = _Draws.of(keys, n_passes, B, together=n_passes if self.balanced else 0)
        h = x.unsqueeze(1)  # (M, 1 or K, B, in): what all passes share is computed once
        for i, (weight, bias) in enumerate(layers):
            drops, reads = any(by_layer[i]), i == len(layers) - 1 and h.shape[1] == 1
            if i and self.activation != "relu":
                h = F.silu(h)
            elif i and (reads or not drops):  # where units are dropped the two are one step
                h = h.relu()
            if drops and reads:
                keep, scale = draws.keep(i, h.shape[-1])
                return draws.readout(h[:, 0], keep, weight * scale[:, None, None]) + bias[:, None]
            if drops:
                noise, scale = draws.noise(i, h.shape[-1])
                h = _drop(h, noise, relu=i > 0 and self.activation == "relu")
                weight = weight * scale[:, None, None]
            rows = h.flatten(1, 2)
            if weight.shape[1] == 1:  # a batched product with one column is slower than this
                out = (rows * weight).sum(-1, keepdim=True) + bias
            else:
                out = torch.baddbmm(bias, rows, weight.transpose(1, 2))
            h = out.view(M, -1, B, weight.shape[1])
        return h.expand(M, n_passes, B, h.shape[-1])

    def chunks(self, rows: int, counts: Sequence[int]) -> list[list[int]]:
        """Members that are worked on together, those that have rows, at `rows` passes times rows each.

        As many as stay in the cache; those with dropout at the inputs apart, as the others take a shorter way.
        """
        size = max(1, _BLOCK // (rows * max(self.sizes)))
        kinds: list[list[int]] = [[], []]
        for i, (member, count) in enumerate(zip(self.members, counts, strict=True)):
            if count:
                kinds[member.input_dropout > 0].append(i)
        return [kind[i : i + size] for kind in kinds for i in range(0, len(kind), size)]

    def losses(self, outputs: Tensor, target: Tensor, log_precision: Tensor) -> Tensor:
        """Minus the log-likelihood of every pass: (M, K, B, D), (M, B, D) or (M, B) -> (M, K, B)."""
        if self.likelihood == "categorical":
            return class_losses(F.log_softmax(outputs, -1), target.unsqueeze(1))
        if self.likelihood in _TWO_HEADS:
            mean, predicted = split_heads(outputs)
            each = gaussian_losses if self.likelihood == "heteroscedastic" else student_losses
            return each(mean, target.unsqueeze(1), predicted.exp(), predicted).sum(-1)
        tau = log_precision[:, None, None]  # one a member: `gaussian_losses` of D outputs at the cost of one
        squares = (target.unsqueeze(1) - outputs).square().sum(-1)
        return 0.5 * (tau.exp() * squares + outputs.shape[-1] * (math.log(2 * math.pi) - tau))

    def batch(self, x: Tensor, y: Tensor, rows: Tensor, part: list[int]) -> tuple[Tensor, Tensor]:
        """Standardised inputs (M, B, F) and targets of the rows (M, B) of the M members in `part`."""
        inputs = (x[rows] - self.x_mean[part]) / self.x_scale[part]
        target = y[rows] if self.likelihood == "categorical" else (y[rows] - self.y_mean[part]) / self.y_scale[part]
        return inputs.float(), target if self.likelihood == "categorical" else target.float()

    def log_likelihood(self, x: Tensor, y: Tensor, rows: list[Tensor], n_passes: int, size: int = 256) -> list[Tensor]:
        """Of the predictive distribution, for each member's rows, in units of y."""
        parts: list[list[Tensor]] = [[] for _ in rows]
        _, log_precision = self.layers(self.flat)
        shift = self.y_scale.log().sum((1, 2))
        with torch.no_grad():
            for start in range(0, max((len(r) for r in rows), default=0), size):
                chosen, counts = pad([r[start : start + size] for r in rows])
                seeds = [held_out_seed(m.seed, start // size) for m in self.members]
                for c in self.chunks(n_passes * chosen.shape[1], counts):
                    inputs, target = self.batch(x, y, chosen[c], c)
                    outputs = self.forward(self.flat[c], inputs, seeds, counts, n_passes, c)
                    losses = self.losses(outputs, target, log_precision[c])
                    values = (-losses).logsumexp(1) - math.log(n_passes) - shift[c, None]  # (M, B)
                    for i, value in zip(c, values, strict=True):
                        parts[i].append(value[: counts[i]])
        return [torch.cat(part) if part else torch.empty(0) for part in parts]


@dataclass(frozen=True)
class _Draws:
    """What the masks of members are drawn by.

    Those that would draw the same masks (seed, rows and rates agree) share them; where rates alone differ they share
    the random bits that masks are cut from.

    Attributes:
        keys: The distinct (seed, rows, rate of each layer).
        owner: Which of the keys each member has.
        source: Which of the `sources` each key draws from.
        sources: The distinct (seed, rows, kind of draw of each layer).
        n_passes: K.
        B: Rows of a batch.
        together: As in `Passes`.
        generators: K of them for each source that was asked for passes that are not balanced.
        tapes: One for each source and group of passes that was asked for those that are.
    """

    keys: list[tuple[Any, ...]]
    owner: list[int]
    source: list[int]
    sources: list[tuple[Any, ...]]
    n_passes: int
    B: int
    together: int
    generators: dict[int, list[torch.Generator]]
    tapes: dict[tuple[int, int], Tape]

    @classmethod
    def of(cls, members: list[tuple[Any, ...]], n_passes: int, B: int, *, together: int = 0) -> "_Draws":
        index = {key: i for i, key in enumerate(dict.fromkeys(members))}
        drawn = [(*key[:2], *(_kind(rate, together) for rate in key[2:])) for key in index]
        sources = {source: i for i, source in enumerate(dict.fromkeys(drawn))}
        owner, source = [index[m] for m in members], [sources[s] for s in drawn]
        return cls(list(index), owner, source, list(sources), n_passes, B, together, {}, {})

    def noise(self, layer: int, width: int) -> tuple[Tensor, Tensor]:
        """What is positive where a unit is kept (M, K, B, width), and the scale of what is kept (M,)."""
        drawn, scale = self._drawn(layer, width)
        if len(drawn) == 1 and drawn[0][1].values.shape[2] == self.B and len(drawn[0][0]) == len(self.keys):
            noise = drawn[0][1].values.float().sub_(drawn[0][1].threshold or 0)
        else:
            noise = torch.ones(len(self.keys), self.n_passes, self.B, width)
            for chosen, own in drawn:
                noise[chosen, :, : own.values.shape[2]] = own.values.float().sub_(own.threshold or 0)
        if len(self.keys) == len(self.owner):
            return noise, scale
        return noise[self.owner], scale[self.owner]

    def keep(self, layer: int, width: int) -> tuple[Tensor, Tensor]:
        """1 where a unit is kept, else 0, for the distinct keys (U, B, K, width), and the scale of members (M,)."""
        drawn, scale = self._drawn(layer, width)
        keep = torch.ones(len(self.keys), self.B, self.n_passes, width)
        for chosen, own in drawn:
            keep[chosen, : own.values.shape[2]] = own.keep().transpose(1, 2).float()
        return keep, scale[self.owner]

    def readout(self, h: Tensor, keep: Tensor, weight: Tensor) -> Tensor:
        """Outputs (M, K, B, D) of the units (M, B, H) that `keep` lets through, under `weight` (M, D, H)."""
        B, D, H = h.shape[1], *weight.shape[1:]
        terms = h.unsqueeze(2) * weight.unsqueeze(1)  # (M, B, D, H)
        taken = [0] * len(self.keys)
        places = []  # of a member among those of its mask
        for u in self.owner:
            places.append(taken[u])
            taken[u] += 1
        size = max(taken)
        slots = [u * size + place for u, place in zip(self.owner, places, strict=True)]
        even = slots == list(range(len(taken) * size))
        if not even:
            terms = terms.new_zeros(len(taken) * size, B, D, H).index_copy(0, torch.tensor(slots), terms)
        terms = terms.view(-1, size, B, D, H).transpose(1, 2).reshape(-1, size * D, H)  # (U B, size D, H)
        out = torch.bmm(keep.view(-1, *keep.shape[2:]), terms.transpose(1, 2))  # (U B, K, size D)
        out = out.view(-1, B, out.shape[1], size, D).permute(0, 3, 2, 1, 4).flatten(0, 1)  # (U size, K, B, D)
        return out if even else out[slots]

    def _drawn(self, layer: int, width: int) -> tuple[list[tuple[list[int], Noise]], Tensor]:
        """Noise (n, K, rows, width) of the keys that drop units, one rate and number of rows at a time; scale (U,)."""
        groups: dict[tuple[int, int], dict[float, list[int]]] = {}
        for u, key in enumerate(self.keys):
            count, rate = key[1], key[2 + layer]
            if count and rate:
                groups.setdefault((count, _kind(rate, self.together)), {}).setdefault(rate, []).append(u)
        scale = torch.ones(len(self.keys))
        found = []
        for (count, kind), by_rate in groups.items():
            sources = list(dict.fromkeys(self.source[u] for chosen in by_rate.values() for u in chosen))
            noises = self._cut(sources, (count, width), list(by_rate), balanced=kind == _BALANCED)
            for chosen, drawn in zip(by_rate.values(), noises, strict=True):
                values = drawn.values
                places = [sources.index(self.source[u]) for u in chosen]
                if places != list(range(len(sources))):
                    values = values[places]
                scale[chosen] = drawn.scale
                found.append((chosen, Noise(values, drawn.threshold, drawn.scale)))
        return found, scale

    def _cut(self, sources: list[int], shape: tuple[int, int], rates: list[float], *, balanced: bool) -> list[Noise]:
        """Noise (sources, K, *shape) for each of the rates."""
        if balanced:
            return draw_balanced(partial(self._words, sources), shape, rates, self.n_passes)
        for s in sources:
            if s not in self.generators:
                self.generators[s] = streams(self.sources[s][0], 0, self.n_passes)
        drawn = draw_rates([g for s in sources for g in self.generators[s]], shape, rates)
        return [Noise(d.values.view(len(sources), -1, *shape), d.threshold, d.scale) for d in drawn]

    def _words(self, sources: list[int], group: int, span: int) -> Tensor:
        """The next words of a group of balanced passes of each source (sources, span)."""
        for s in sources:
            if (s, group) not in self.tapes:
                self.tapes[s, group] = Tape(self.sources[s][0], group)
        return torch.stack([self.tapes[s, group].draw(span) for s in sources])


_BALANCED = 16  # bits of a unit, as a kind of draw


def _kind(rate: float, together: int) -> int:
    """What tells draws apart that cannot be cut from the same bits; 0 for none."""
    return 0 if not rate else _BALANCED if is_balanced(together, rate) else units_per_word(rate)


def _drop(x: Tensor, noise: Tensor, *, relu: bool) -> Tensor:
    out: Tensor = _Drop.apply(x, noise, relu)
    return out


class _Drop(torch.autograd.Function):
    """x (or its positive part) where noise > 0, else 0; the scale of what is kept is in the next weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, relu: bool) -> Tensor:
        ctx.shape = x.shape
        out: Tensor = where_above((x.relu() if relu else x).expand_as(noise), noise, 0)
        ctx.save_for_backward(out if relu else noise)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (positive,) = ctx.saved_tensors
        return where_above(grad, positive, 0).sum_to_size(ctx.shape), None, None


# ------------------------------------------------------------------------------ helpers


def initial_network(sizes: Sequence[int], member: Member, activation: Activation = "relu") -> nn.Sequential:
    """A member as it starts out: its weights follow from its seed, torch's generator is untouched."""
    made = ACTIVATIONS[activation]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(member.seed)
        net = mlp(sizes, dropout=member.dropout, input_dropout=member.input_dropout, activation=made)
    if member.spread != 1:
        first = next(layer for layer in net if isinstance(layer, nn.Linear))
        with torch.no_grad():
            first.weight.mul_(member.spread)
            first.bias.mul_(member.spread)
    return net


def split_heads(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log precision (..., D), side by side in the last axis; the latter kept where exp is harmless."""
    mean, log_precision = outputs.chunk(2, -1)
    return mean, LOG_PRECISION * torch.tanh(log_precision / LOG_PRECISION)


class SplitNLL(GaussianNLL):
    """GaussianNLL of a network whose outputs (K, N, 2 D) are means and log precisions."""

    def __init__(self, alpha: float) -> None:
        super().__init__(alpha, precision="predicted")

    def forward(self, outputs: Any, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Mean alpha loss."""
        return super().forward(split_heads(outputs), target, sample_weight)


def tables(x: Any, y: Any, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    """Inputs (N, F) and targets (N, D) in double precision (inputs in single if so given); class indices (N,)."""
    inputs, target = _own("x", x), _own("y", y)
    if inputs.dtype != torch.float32:  # what comes in single precision is not copied
        inputs = inputs.double()
    if inputs.ndim != 2 or target.ndim == 0 or len(target) != len(inputs):
        raise ValueError(
            f"`x` must be (N, F) with a row for each of `y`; got {tuple(inputs.shape)}, {tuple(target.shape)}."
        )
    if likelihood != "categorical":
        return inputs, target.double().reshape(len(inputs), -1)
    classes = target.long()
    if target.ndim != 1 or not bool((classes == target).all() & (classes >= 0).all()):
        raise ValueError("`y` must hold class indices (N,), whole numbers from 0 on; got something else.")
    return inputs, classes


def _own(name: str, values: Any) -> Tensor:
    """A tensor; a copy of an array that may not be written to."""
    try:
        own = values if isinstance(values, Tensor) else torch.tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"`{name}` must hold numbers; got {type(values).__name__}.") from error
    check_real(name, own)
    return own


def standardiser(values: Table, average: Callable[[Table], Table]) -> tuple[Table, Table]:
    """Mean and standard deviation of every column, by `average` over rows; 1 for a column constant up to rounding.

    >>> standardiser(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), lambda table: table.mean(0))
    (tensor([2., 5.]), tensor([1., 1.]))
    """
    mean = average(values)
    scale = average((values - mean) ** 2) ** 0.5
    scale[scale <= 1e-12 * abs(mean) + 1e-300] = 1.0
    return mean, scale


def _scaler(values: Tensor, member: Member, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the rows that the member is given, those for early stopping too, each (1, F)."""
    rows = torch.as_tensor(member.train)
    if member.validation is not None:
        rows = torch.cat([rows, torch.as_tensor(member.validation)])
    share = torch.ones(len(rows), 1, dtype=torch.float64) if weight is None else weight[rows].double()[:, None]
    share = share / share.sum()
    return standardiser(values[rows], lambda table: (table * share).sum(0, keepdim=True))


def _plain(n: int) -> tuple[Tensor, Tensor]:
    """The mean and deviation under which n columns stay as they are, each (1, n)."""
    return torch.zeros(1, n), torch.ones(1, n)


def pad(rows: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Rows of different numbers as one table (M, B), and how many of each are real."""
    counts = [len(r) for r in rows]
    if len(set(counts)) == 1:
        return torch.stack(list(rows)), counts
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True), counts
