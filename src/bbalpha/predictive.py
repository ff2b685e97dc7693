"""What a prediction knows: the distribution of K passes, and the parts of its uncertainty.

Classification: p(y) = mean_k softmax(f_k). Its entropy is the whole uncertainty, the mean entropy of the passes
what the data leave open, and the difference, the mutual information, what more training data would settle.

Regression: p(y) = mean_k N(y; f_k, 1/tau_k), a mixture. Its density, quantiles and intervals are those of the
mixture, not of a Gaussian with the same moments; its variance is epistemic (of the f_k) plus aleatoric (mean 1/tau_k).

    p = RegressionPrediction(outputs, precision=torch.tensor(4.0))      # outputs (K, N, D)
    p.mean, p.epistemic_std, p.interval(0.9), p.log_prob(y)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from bbalpha import _student
from bbalpha.checks import check_any_seed, check_count, check_inner_share, check_precision, check_whole
from bbalpha.objectives import alpha_loss, class_losses, gaussian_losses

_BLOCK = 2**18  # numbers worked on at a time: what stays in the cache


@dataclass(frozen=True, eq=False)
class ClassificationPrediction:
    """A distribution over classes for every row (and pixel, token), with the parts of its uncertainty, in nats.

    Attributes:
        log_probs: Log of the mean probability over passes (N, C, ...).
        expected_entropy: Mean entropy of the passes: what stays unsure however much is known of the weights (N, ...).
        votes: Share of the passes whose likeliest class this is (N, C, ...).
        n_passes: K.
        class_axis: The axis of `log_probs` and `votes` that holds the classes.
        drawn: Whether passes were drawn; where none were asked for, there is no spread, rather than an unknown one.
        used: How many passes each row had (N,); None if all had K.
        masks: "shared" by all rows, then every pass is one function; "per_example"; None where nobody knows.
        pass_log_probs: Log-probabilities of each pass (K, N, C, ...), where they were kept.

    >>> probs = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]])             # two passes that contradict each other
    >>> p = ClassificationPrediction(probs.mean(0).log(), torch.tensor([0.3251]), torch.tensor([[0.5, 0.5]]), 2)
    >>> p.entropy, p.mutual_information
    (tensor([0.6931]), tensor([0.3680]))
    """

    log_probs: Tensor
    expected_entropy: Tensor
    votes: Tensor
    n_passes: int
    class_axis: int = 1
    drawn: bool = True
    used: Tensor | None = None
    masks: str | None = None
    pass_log_probs: Tensor | None = None

    @property
    def passes_used(self) -> Tensor:
        """How many passes each row had: K, or fewer where it was settled to a tolerance (N,)."""
        return _passes_used(self.used, self.log_probs, 0, self.n_passes)

    @property
    def probs(self) -> Tensor:
        """Mean probability over passes (N, C, ...)."""
        return self.log_probs.exp()

    @property
    def label(self) -> Tensor:
        """The likeliest class (N, ...)."""
        return self.log_probs.argmax(self.class_axis)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the mean probabilities: the whole uncertainty, from 0 to log C (N, ...)."""
        entropy: Tensor = torch.special.entr(self.probs).sum(self.class_axis)
        return entropy

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus expected entropy: how much the passes disagree; large far from the training data (N, ...)."""
        _check_spread("mutual_information", self.n_passes, self.drawn)
        if not self.drawn:
            return torch.zeros_like(self.expected_entropy)
        return (self.entropy - self.expected_entropy).clamp_min(0.0)  # Jensen; below 0 by rounding alone

    @property
    def variation_ratio(self) -> Tensor:
        """The share of passes that do not vote for the most voted class (N, ...)."""
        _check_spread("variation_ratio", self.n_passes, self.drawn)
        return 1 - self.votes.amax(self.class_axis)

    @property
    def pass_probs(self) -> Tensor:
        """Probabilities of each pass (K, N, C, ...); for `bbalpha.acquisition`."""
        return self._passes("pass_probs").exp()

    def log_prob(self, y: Tensor, *, ignore_index: int = -100) -> Tensor:
        """Log-probability of the classes `y` (N, ...) -> (N, ...).

        Positions whose class is `ignore_index` do not count and give 0, as in `bbalpha.cross_entropy`; over the
        others the mean is ``p.log_prob(y).sum() / (y != -100).sum()``.
        """
        classes = self.log_probs.movedim(self.class_axis, -1)
        ignored = _check_labels(y, classes, ignore_index)
        return -class_losses(classes, y.long().masked_fill(ignored, 0)).masked_fill(ignored, 0.0)

    def log_likelihood(self, y: Tensor, *, ignore_index: int = -100) -> Tensor:
        """Log-probability of `y` (N, ...) in each pass, that of all positions of a row together (K, N)."""
        classes = self._passes("log_likelihood").movedim(self.class_axis + 1, -1)  # (K, N, ..., C)
        ignored = _check_labels(y, classes[0], ignore_index)
        losses = class_losses(classes, y.long().masked_fill(ignored, 0)).masked_fill(ignored, 0.0)
        return -(losses.flatten(2).sum(2) if losses.ndim > 2 else losses)

    def to(self, device: torch.device | str) -> Self:
        """The same prediction on another device."""
        moved: dict[str, Any] = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def prediction_set(self, coverage: float) -> Tensor:
        """The fewest classes that hold `coverage` of the probability, as bool (N, C, ...); never empty.

        As good as the model's probabilities; `bbalpha.calibration.conformal_sets` gives a guarantee.
        """
        check_inner_share("coverage", coverage)
        probs = self.probs.movedim(self.class_axis, -1)
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # a class is needed while those above it hold too little
        inside = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, index, before < coverage)
        return inside.movedim(-1, self.class_axis)

    def _passes(self, name: str) -> Tensor:
        if self.pass_log_probs is None:
            raise ValueError(
                f"`{name}` needs the passes one by one; got a prediction that kept their mean alone. Use "
                'predict_classification(..., masks="shared", keep_passes=True).'
            )
        return self.pass_log_probs


@dataclass(frozen=True, eq=False)
class RegressionPrediction:
    """A mixture of K Gaussians (or Student's t) for every row and output.

    Attributes:
        outputs: The means of the passes (K, N, ...); of a row that had k of them, each K / k times.
        precision: tau, broadcasting to `outputs`; None if the noise is not known.
        drawn: Whether passes were drawn; where none were asked for, there is no spread, rather than an unknown one.
        used: How many passes each row had (N,), numbers that divide K; None if all had K.
        heavy: Passes whose noise is Student's t of four degrees of freedom, of scale tau^-1/2 (K,); None has none.
        masks: "shared" by all rows, then every pass is one function; "per_example"; None where nobody knows.

    >>> p = RegressionPrediction(torch.tensor([[-1.0], [1.0]]), torch.tensor(100.0))   # two passes, one row
    >>> p.mean, p.epistemic_std, p.aleatoric_std
    (tensor([0.]), tensor([1.]), tensor([0.1000]))
    >>> p.quantile(0.25)                                               # of a mixture with two peaks
    tensor([-1.])
    """

    outputs: Tensor
    precision: Tensor | None = None
    drawn: bool = True
    used: Tensor | None = None
    heavy: Tensor | None = None
    masks: str | None = None

    def __post_init__(self) -> None:
        if self.precision is not None:
            check_precision(self.precision, self.outputs)

    @property
    def passes_used(self) -> Tensor:
        """How many passes each row had: K, or fewer where it was settled to a tolerance (N,)."""
        return _passes_used(self.used, self.outputs, 1, len(self.outputs))

    @property
    def mean(self) -> Tensor:
        """Mean of the mixture (N, ...)."""
        return self.outputs.mean(0)

    @property
    def std(self) -> Tensor:
        """Standard deviation of the mixture: epistemic and aleatoric together (N, ...)."""
        return (self.epistemic_std.square() + self.aleatoric_std.square()).sqrt()

    @property
    def epistemic_std(self) -> Tensor:
        """Standard deviation over passes: what more data would settle; large far from the training data (N, ...)."""
        _check_spread("epistemic_std", len(self.outputs), self.drawn)
        if not self.outputs.numel():  # torch warns
            return self.outputs.new_zeros(self.outputs.shape[1:])
        return self.outputs.std(0, correction=0)

    @property
    def aleatoric_std(self) -> Tensor:
        """Standard deviation of the noise: what more data would not settle; 0 if the precision is None (N, ...)."""
        if self.precision is None:
            return torch.zeros_like(self.outputs[0])
        return self._variance().mean(0).sqrt()

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of `y` (N, ...) under the mixture; outputs of a row jointly -> (N,)."""
        parts = [-alpha_loss(losses, 1.0, reduction="none") for losses in self._losses_by_block("log_prob", y)]
        return torch.cat(parts).to(self.outputs.dtype)

    def log_likelihood(self, y: Tensor) -> Tensor:
        """Log-density of `y` (N, ...) in each pass; outputs of a row jointly -> (K, N)."""
        return -torch.cat([t.to(self.outputs.dtype) for t in self._losses_by_block("log_likelihood", y)], 1)

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y <= y) for every output by itself: uniform on [0, 1] where the model is right (N, ...) -> (N, ...)."""
        self._check_target(y)
        scale = self._squared_scale()
        parts = [
            _cdf((target - outputs).double() / noise.double().sqrt(), self._heavy(outputs)).mean(0)
            if self.precision is not None
            else (outputs <= target).double().mean(0)
            for outputs, noise, target in self._blocks(scale, y)
        ]
        return torch.cat(parts).to(self.outputs.dtype)

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """The values below which a share `q` of every output's mixture lies: (N, ...), or (Q, N, ...) for Q shares.

        Without a precision: of the K passes, interpolated.
        """
        try:
            levels = torch.as_tensor(q, dtype=torch.float64, device=self.outputs.device)
        except (TypeError, ValueError, RuntimeError):
            levels = self.outputs.new_full((), torch.nan)
        if levels.ndim > 1 or not levels.numel() or not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(f"`q` must be a number between 0 and 1, or several, both ends left out; got {q!r}.")
        if self.precision is None:
            _check_spread("quantile", len(self.outputs), self.drawn)
        if self.used is not None:
            whole = self.outputs.new_empty((*levels.shape, *self.outputs.shape[1:]))
            for rows, part in self._by_passes(self.used):
                whole.index_copy_(levels.ndim, rows, part.quantile(levels))
            return whole
        parts = [
            _mixture_quantile(
                outputs.double().flatten(1), noise.double().sqrt().flatten(1), levels.reshape(-1), self.heavy
            )
            for outputs, noise, _ in self._blocks(self._squared_scale(), None, copies=max(1, levels.numel()))
        ]
        return torch.cat(parts, 1).to(self.outputs.dtype).reshape(*levels.shape, *self.outputs.shape[1:])

    def interval(self, coverage: float) -> tuple[Tensor, Tensor]:
        """The central interval that holds `coverage` of every output's mixture: (low, high), each (N, ...).

        As good as the model; `bbalpha.calibration.conformal_intervals` gives a guarantee.
        """
        check_inner_share("coverage", coverage)
        low, high = self.quantile([(1 - coverage) / 2, (1 + coverage) / 2])
        return low, high

    def sample(self, n: int, *, seed: int | None = None) -> Tensor:
        """`n` draws for every row, outputs of a row jointly (n, N, ...); of the means alone without a precision."""
        n, seed = check_count("n", n), check_any_seed(seed)
        K, N = self.outputs.shape[:2]
        device = self.outputs.device
        generator = None if seed is None else torch.Generator(device).manual_seed(seed % 2**64)
        k = torch.randint(K, (n, N), generator=generator, device=device)  # a pass for every draw of a row
        rows = torch.arange(N, device=device)
        mean, scale = self.outputs[k, rows], self._squared_scale()[k, rows].sqrt()
        noise = torch.randn(mean.shape, generator=generator, device=device, dtype=mean.dtype)
        if self.heavy is not None:  # t is a Gaussian over the root of a gamma variable of mean 1
            uniform = torch.rand((2, *mean.shape), generator=generator, device=device, dtype=torch.float64)
            gamma = uniform.clamp_min(1e-300).log().sum(0).neg().div_(2).to(mean.dtype)
            noise = torch.where(self.heavy[k].view(n, N, *[1] * (mean.ndim - 2)), noise / gamma.sqrt(), noise)
        return mean + scale * noise

    def rescaled(self, scale: float | Tensor, shift: float | Tensor = 0.0) -> "RegressionPrediction":
        """The prediction of ``scale * y + shift``: back to the units of a target that was standardised.

        >>> p = RegressionPrediction(torch.tensor([[[-1.0]], [[1.0]]]), None)          # of (target - 50) / 10
        >>> p.rescaled(scale=10.0, shift=50.0).mean
        tensor([[50.]])
        """
        factor = torch.as_tensor(scale, dtype=self.outputs.dtype, device=self.outputs.device)
        if not bool((factor > 0).all()):
            raise ValueError(f"`scale` must be positive; got {scale}.")
        precision = None if self.precision is None else self.precision / factor.square()
        return RegressionPrediction(
            self.outputs * factor + shift, precision, self.drawn, self.used, self.heavy, self.masks
        )

    def to(self, device: torch.device | str) -> Self:
        """The same prediction on another device."""
        moved: dict[str, Any] = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def _by_passes(self, used: Tensor) -> Iterator[tuple[Tensor, "RegressionPrediction"]]:
        """Rows that had equally many passes, and their prediction with each pass once."""
        for k in used.unique().tolist():
            rows = (used == k).nonzero()[:, 0]
            tau = None if self.precision is None else self.precision.expand_as(self.outputs)[:k].index_select(1, rows)
            heavy = None if self.heavy is None else self.heavy[:k]
            yield rows, RegressionPrediction(self.outputs[:k].index_select(1, rows), tau, heavy=heavy)

    def _heavy(self, outputs: Tensor) -> Tensor:
        """Which passes have heavy tails, with the axes of `outputs` (K, 1, ...)."""
        heavy = outputs.new_zeros(len(self.outputs), dtype=torch.bool) if self.heavy is None else self.heavy
        return heavy.view(-1, *[1] * (outputs.ndim - 1))

    def _losses_by_block(self, name: str, y: Tensor) -> Iterator[Tensor]:
        """Minus the log-density of `y` in each pass, in double precision, by blocks of rows (K, n)."""
        if self.precision is None:
            raise ValueError(
                f"`{name}` needs the precision of the noise; got precision=None. Give predict_regression a number "
                "(see bbalpha.calibration.fit_precision), or train a model that predicts it."
            )
        self._check_target(y)
        for outputs, precision, target in self._blocks(self.precision, y):
            yield self._losses(outputs.double(), target.double(), precision.double())

    def _losses(self, outputs: Tensor, target: Tensor, tau: Tensor) -> Tensor:
        """Minus the log-density of the targets of each row, jointly (K, N)."""
        losses = gaussian_losses(outputs, target, tau, tau.log())
        if self.heavy is not None:
            losses = torch.where(self._heavy(outputs), _student.student_losses(outputs, target, tau, tau.log()), losses)
        return losses.flatten(2).sum(2) if losses.ndim > 2 else losses

    def _squared_scale(self) -> Tensor:
        """1 / tau, 0 without, as a view of the shape of the outputs (K, N, ...)."""
        squares = self.outputs.new_zeros(()) if self.precision is None else self.precision.reciprocal()
        return squares.to(self.outputs.dtype).expand_as(self.outputs)

    def _variance(self) -> Tensor:
        """Of the noise (K, N, ...)."""
        squares = self._squared_scale()
        return squares if self.heavy is None else squares * torch.where(self._heavy(squares), _student.VARIANCE, 1.0)

    def _blocks(
        self, values: Tensor, target: Tensor | None, copies: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Outputs, `values` and target by blocks of rows: no copy of a whole (K, N, ...) is made."""
        target = self.outputs[0] if target is None else target
        size = max(1, _BLOCK // max(1, copies * self.outputs[:, :1].numel()))
        split = (self.outputs.split(size, 1), values.expand_as(self.outputs).split(size, 1), target.split(size))
        return zip(*split, strict=True)

    def _check_target(self, y: Tensor) -> None:
        if not isinstance(y, Tensor) or y.shape != self.outputs.shape[1:]:
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"`y` must have the shape of the prediction, {tuple(self.outputs.shape[1:])}; got {got}.")
        if bool(y.isnan().any()):
            raise ValueError(f"`y` must not be nan; got nan at index {y.isnan().nonzero()[0].tolist()}.")


# ------------------------------------------------------------------------------ the mathematics


def _mixture_quantile(mean: Tensor, std: Tensor, levels: Tensor, heavy: Tensor | None) -> Tensor:
    """Quantiles of mixtures: (K, P), (Q,) -> (Q, P)."""
    if not bool((std > 0).any()):
        return torch.quantile(mean, levels, dim=0) if mean.numel() else mean.new_zeros(len(levels), mean.shape[1])
    heavy = None if heavy is None else heavy[:, None]
    return torch.stack([_solved(mean, std, level, heavy) for level in levels])


def _solved(mean: Tensor, std: Tensor, level: Tensor, heavy: Tensor | None) -> Tensor:
    """One quantile, by Newton's method inside a bracket that bisection shrinks: (K, P), () -> (P,).

    What is solved leaves: most mixtures take five steps, a few with far peaks take fifty.
    """
    # the smaller tail is solved for: 1 - F keeps its digits where F is near 1
    sign = 1.0 if level <= 0.5 else -1.0
    tail = torch.minimum(level, 1 - level)
    units = torch.special.ndtri(level)
    if heavy is not None:
        units = torch.where(heavy, _student.quantile(level), units)
    ends = mean + std * units  # (K, P): the quantile lies between those of the components
    low, high = ends.amin(0), ends.amax(0)
    # a Gaussian of the mixture's moments is nearly there
    x = mean.mean(0) + (mean.var(0, correction=0) + std.square().mean(0)).sqrt() * units.mean()
    x = torch.where((x > low) & (x < high), x, (low + high) / 2)
    step: Tensor = (high - low) / 2
    tolerance = 1e-10 * (step + std.amin(0))
    found, places = torch.empty_like(x), torch.arange(len(x), device=x.device)
    for _ in range(200):
        u = (x - mean) / std  # (K, P)
        excess = sign * (_cdf(sign * u, heavy).mean(0) - tail)
        density = (_density(u, heavy) / std).mean(0)
        low, high = torch.where(excess <= 0, x, low), torch.where(excess > 0, x, high)
        newton = x - excess / density
        good = (newton >= low) & (newton <= high) & ((newton - x).abs() < 0.6 * step.abs())
        moved = torch.where(good, newton, (low + high) / 2)
        x, step = moved, moved - x
        open_ = step.abs() > tolerance
        n_open = int(open_.sum())
        if 2 * n_open < len(x):
            found[places] = x
            if not n_open:
                return found
            mean, std = mean[:, open_], std[:, open_]
            x, step, low, high, tolerance, places = (t[open_] for t in (x, step, low, high, tolerance, places))
    found[places] = x
    return found


def _cdf(u: Tensor, heavy: Tensor | None) -> Tensor:
    """P(noise <= u) of a Gaussian, or of Student's t where `heavy` says so."""
    share = torch.special.ndtr(u)
    return share if heavy is None else torch.where(heavy, _student.cdf(u), share)


def _density(u: Tensor, heavy: Tensor | None) -> Tensor:
    values = (-0.5 * u.square()).exp() / math.sqrt(2 * math.pi)
    return values if heavy is None else torch.where(heavy, _student.density(u), values)


def _passes_used(used: Tensor | None, t: Tensor, axis: int, n_passes: int) -> Tensor:
    """(N,), N counted by an axis of `t`."""
    return torch.full((t.shape[axis],), n_passes, device=t.device) if used is None else used


# ------------------------------------------------------------------------------ checks


def _check_labels(y: Tensor, classes: Tensor, ignore_index: int) -> Tensor:
    """Which of the labels (N, ...) do not count, if the others are classes of (N, ..., C)."""
    if not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise TypeError(f"`y` must hold integer class indices; got {getattr(y, 'dtype', type(y).__name__)}.")
    if y.shape != classes.shape[:-1]:
        raise ValueError(f"`y` must have the shape of the labels, {tuple(classes.shape[:-1])}; got {tuple(y.shape)}.")
    ignored = y == check_whole("ignore_index", ignore_index)
    unseen = y[((y < 0) | (y >= classes.shape[-1])) & ~ignored]
    if len(unseen):
        raise ValueError(f"`y` must hold classes from 0 to {classes.shape[-1] - 1}; got {int(unseen[0])}.")
    return ignored


def _check_spread(name: str, n_passes: int, drawn: bool) -> None:
    if drawn and n_passes < 2:
        raise ValueError(f"`{name}` needs at least 2 passes to see a spread; got n_passes={n_passes}.")
