"""What rows do together: passes with shared masks are functions, and a function answers for all rows at once.

A pass with ``masks="shared"`` drops the same units for every row, so pass k of (seed, K) is one function f_k. Rows are
independent given the function; without it they are not, and their joint distribution is a mean of products:

    log p(y_1 .. y_T) = log 1/K sum_k prod_t p(y_t | f_k(x_t))

    p = bbalpha.predict_classification(net, x, masks="shared", keep_passes=True)
    bbalpha.joint_log_prob(p, y, groups)                                  # (N,), (N,) -> (G,)
    f = bbalpha.Functions(net, n_passes=100, seed=0)
    f[7](x)                                                               # one function, the same for every batch
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha._engine.batches import PassOptions, collect
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.selection import Sites
from bbalpha._kernels import draw_seed
from bbalpha.checks import check_count, check_flag, check_model, check_outputs, check_seed
from bbalpha.lognormal import LogPrediction
from bbalpha.objectives import alpha_loss, cross_entropy, gaussian_nll, logits_of
from bbalpha.prediction import Output, as_logits, pick
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction

Prediction = ClassificationPrediction | RegressionPrediction | LogPrediction


def joint_log_prob(
    prediction: Prediction | Tensor, y: Tensor, groups: Tensor, *, precision: float | Tensor | None = None
) -> Tensor:
    """Log-likelihood of the rows of each group together, under passes that are functions: (N, ...), (N,) -> (G,).

    A group of one row gives what `log_prob` gives. A prediction whose masks were drawn for every row by itself, or
    whose rows had different numbers of passes, is refused: its passes are no functions.

    Args:
        prediction: What `predict_classification` gives with ``masks="shared", keep_passes=True``, `predict_regression`
            with ``masks="shared"``, a regressor's `predictive`; or the outputs of K such passes: logits (K, N, C), with
            a `precision` means (K, N, D) or (K, N).
        y: Class indices (N,), or targets of the shape of a prediction (N, ...).
        groups: The group of each row, whole numbers (N,).
        precision: Of the noise, where `prediction` are means; as in `bbalpha.gaussian_nll`.

    Returns:
        (G,), groups in ascending order.

    >>> logits = torch.tensor([[[2.0, 0.0]] * 2, [[0.0, 2.0]] * 2])    # two functions that disagree, two rows
    >>> y = torch.tensor([0, 0])
    >>> joint_log_prob(logits, y, torch.tensor([0, 1])).exp(), joint_log_prob(logits, y, torch.tensor([0, 0])).exp()
    (tensor([0.5000, 0.5000]), tensor([0.3950]))
    """
    if not isinstance(groups, Tensor):
        raise TypeError(
            f"`groups` must be a tensor of whole numbers, the group of each row; got {type(groups).__name__}."
        )
    if not isinstance(prediction, Tensor):
        if precision is not None:
            raise ValueError("`precision` belongs to outputs; got one beside a prediction, which has its own.")
        check_functions(prediction)
        losses = -prediction.log_likelihood(y).double()
        return -alpha_loss(losses, 1.0, groups=groups, reduction="none").to(_dtype(prediction))
    if precision is not None:
        return -gaussian_nll(prediction, y, 1.0, precision=precision, groups=groups, reduction="none")
    if isinstance(y, Tensor) and y.is_floating_point():
        raise TypeError(
            f"`y` must hold class indices for logits; got {y.dtype}. Where the outputs are means, give a `precision`."
        )
    return -cross_entropy(prediction, y, 1.0, groups=groups, reduction="none")


def covariance(prediction: Prediction | Tensor) -> Tensor:
    """How the rows vary together over the passes, for every output by itself: (..., N, N).

    The diagonal is the epistemic variance; what the noise adds is independent from row to row. Of a classification, the
    covariance of each class's probability (C, N, N).

    Args:
        prediction: As in `joint_log_prob`; or any values of K passes (K, N, ...). N^2 numbers come out: take the rows
            that matter.

    >>> covariance(torch.tensor([[-1.0, -2.0], [1.0, 2.0]]))           # two functions, two rows
    tensor([[1., 2.],
            [2., 4.]])
    """
    if isinstance(prediction, Tensor):
        check_outputs(prediction, least=2)
        values = prediction
    else:
        check_functions(prediction)
        classes = isinstance(prediction, ClassificationPrediction)
        values = prediction.pass_probs if isinstance(prediction, ClassificationPrediction) else prediction.outputs
        values = values.movedim(prediction.class_axis + 1, 2) if classes else values  # type: ignore[union-attr]
    apart = (values - values.mean(0)).movedim((0, 1), (-2, -1))  # (..., K, N)
    return apart.mT @ apart / len(values)


@dataclass(frozen=True, eq=False)
class Functions:
    """K functions drawn from a model: pass k of (seed, K) under masks that all rows share, as something to be called.

    ``functions[k](x)`` is one of them, the same function for every `x` and every batch: what `predict_*` and `sample`
    call pass k with this seed and ``masks="shared"``. ``functions(x)`` are all of them (K, N, ...). The model is run in
    evaluation mode and without gradients, in bounded memory, with the weights that it has when they are called.

    Attributes:
        model: Any model that `bbalpha.sample` takes.
        n_passes: K.
        seed: None draws one from torch's global generator, to be read here.
        balanced: As in `bbalpha.sample`.
        sites: As in `bbalpha.sample`.
        output: What to read of a model that returns several things, as in `bbalpha.predict_classification`.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    >>> f = Functions(net, n_passes=10, seed=0)
    >>> x = torch.randn(6, 2)
    >>> f(x).shape, bool(torch.allclose(f[3](x[:2]), f(x)[3, :2]))
    (torch.Size([10, 6, 1]), True)
    """

    model: nn.Module
    n_passes: int = 100
    seed: int | None = None
    balanced: bool = True
    sites: Sites | None = None
    output: Output = None

    def __post_init__(self) -> None:
        check_model(self.model)
        check_seed(self.seed)
        check_flag("balanced", self.balanced)
        object.__setattr__(self, "n_passes", check_count("n_passes", self.n_passes))
        if self.seed is None:
            object.__setattr__(self, "seed", draw_seed(None))

    def __len__(self) -> int:
        return self.n_passes

    def __getitem__(self, k: int) -> "Function":
        k = operator.index(k)
        if not -self.n_passes <= k < self.n_passes:
            raise IndexError(f"`k` must name one of the {self.n_passes} functions; got {k}.")
        return Function(self, k % self.n_passes)

    def __iter__(self) -> Iterator["Function"]:
        return (Function(self, k) for k in range(self.n_passes))

    def __call__(self, x: Any, *, batch_size: int | None = None, progress: bool | None = None) -> Tensor:
        """The values of all functions (K, N, ...); `x` as in `bbalpha.predict_classification`."""
        return self._run(x, batch_size, progress, None)

    def probs(self, x: Any) -> "Pool":
        """Class probabilities of the rows of `x` (K, N, C), computed when they are read: for `bbalpha.acquisition`.

        Any number of rows takes no more memory than `x`. The model returns logits (N, C), or one logit a row.
        """
        return Pool(self, Inputs.of(x, model=self.model), as_probs=True)

    def values(self, x: Any) -> "Pool":
        """The values of the functions at the rows of `x` (K, N, ...), computed when they are read."""
        return Pool(self, Inputs.of(x, model=self.model), as_probs=False)

    def _run(self, x: Any, batch_size: int | None, progress: bool | None, only: int | None) -> Tensor:
        options = PassOptions(
            self.n_passes, batch_size, "shared", self.seed, self.balanced, progress=progress, sites=self.sites,
            only=only,
        )  # fmt: skip
        return collect(
            self.model, x, options, lambda groups, _: (torch.cat([self._read(g) for g in groups]),), row_axis=1
        )[0]

    def _read(self, outputs: Any) -> Tensor:
        found = logits_of(pick(outputs, self.output))
        if not isinstance(found, Tensor):
            raise TypeError(
                f"`model` must return a tensor; got {type(found).__name__}. Say with `output` which part to read."
            )
        return found


@dataclass(frozen=True, eq=False)
class Function:
    """One of K `Functions`: x -> (N, ...).

    Attributes:
        among: The K functions.
        k: Which of them.
    """

    among: Functions
    k: int

    @property
    def seed(self) -> int:
        """Of the K functions; with `k` and K the address of this one."""
        return self.among.seed or 0

    def __call__(self, x: Any, *, batch_size: int | None = None, progress: bool | None = None) -> Tensor:
        """Its values at `x` (N, ...)."""
        return self.among._run(x, batch_size, progress, self.k)[0]


@dataclass(frozen=True, eq=False)
class Pool:
    """What K functions say of many rows (K, N, ...), computed when it is read, row by row: ``pool[:, rows]``.

    Attributes:
        functions: The functions.
        inputs: The rows.
        as_probs: Whether their values are logits, to be read as probabilities.
    """

    functions: Functions
    inputs: Inputs
    as_probs: bool

    def __post_init__(self) -> None:
        if not self.inputs.rows:
            raise ValueError("`x` must have rows, on the first axis of its tensors; got none.")

    @property
    def shape(self) -> torch.Size:
        """(K, N, ...)."""
        few = self[:, :2]  # a model that is given one row may squeeze it away
        return torch.Size((len(few), self.inputs.rows or 0, *few.shape[2:]))

    def __getitem__(self, key: tuple[slice, slice | Tensor]) -> Tensor:
        passes, rows = key
        if passes != slice(None):
            raise IndexError("rows are read as pool[:, rows], all passes of them.")
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(self.inputs.rows or 0))
        values = self.functions(self.inputs.select(rows).x, progress=False)
        return as_logits(values, None).softmax(2) if self.as_probs else values


# ------------------------------------------------------------------------------ helpers


def check_functions(prediction: Any) -> None:
    """Refuse a prediction whose passes are known to be no functions."""
    if not isinstance(prediction, (ClassificationPrediction, RegressionPrediction, LogPrediction)):
        raise TypeError(
            f"`prediction` must be a prediction of bbalpha, or a tensor of outputs (K, N, ...); got "
            f"{type(prediction).__name__}."
        )
    inner = prediction.log if isinstance(prediction, LogPrediction) else prediction
    if inner.masks == "per_example" and inner.drawn:
        raise ValueError(
            "`prediction` must have passes that are one function for all rows; its masks were drawn for every row by "
            'itself. Predict with masks="shared".'
        )
    n_passes = inner.n_passes if isinstance(inner, ClassificationPrediction) else len(inner.outputs)
    if bool((inner.passes_used < n_passes).any()):
        raise ValueError(
            "`prediction` must have the same passes for all rows; some had fewer, as they were settled to a tolerance. "
            "Predict without `tolerance`."
        )


def _dtype(prediction: Prediction) -> torch.dtype:
    return prediction.log_probs.dtype if isinstance(prediction, ClassificationPrediction) else prediction.outputs.dtype
