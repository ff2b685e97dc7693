"""Lightning: the steps of a LightningModule as bbalpha has them, by one base class in front of the others.

    class Net(AlphaSteps, L.LightningModule):              # 1. the base class, in the place of your training_step
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Dropout(0.1), nn.Linear(100, 10))
            self.objective = bbalpha.CrossEntropy(alpha=0.5)               # 2. the loss
        ...                                                # forward and configure_optimizers as they are

    trainer.fit(net, loader, held_out)                     # logs "train_loss", and "val_nll" after every epoch
    p = joined(trainer.predict(net, loader))               # p.probs, p.entropy, p.mutual_information

Batches are (x, target), (x, target, weight), or mappings with "labels". Everything else is Lightning's: checkpoints,
accumulated gradients, precision, devices. The objective is a part of the module, so that a noise that it learns is in
``self.parameters()`` and in every checkpoint. Nothing of Lightning is imported here: modules of `lightning`, which is
what ``pip install 'bbalpha[lightning]'`` brings, and of `pytorch_lightning` may be used alike.
"""

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from bbalpha._engine.inputs import Inputs
from bbalpha._kernels import draw_seed, held_out_seed, step_seed
from bbalpha.objectives import CrossEntropy, GaussianNLL
from bbalpha.prediction import predict_classification, predict_regression
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction
from bbalpha.priors import prior_kl
from bbalpha.sampling import sample
from bbalpha.training.feed import parts_of
from bbalpha.training.loop import Objective, predictive_objective
from bbalpha.training.optimizers import keep_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as _Module
else:
    _Module = object

Prediction = TypeVar("Prediction", ClassificationPrediction, RegressionPrediction)
_VALIDATION_PASSES = 20  # at least, as in `fit`


class AlphaSteps(_Module):
    """The training, validation, test and prediction steps of a LightningModule, by K passes of its own `forward`.

    Name it before LightningModule (or before a module of your own that has steps) and set `objective` in `__init__`;
    the others are set there too, or in the class.

    Attributes:
        objective: (outputs, target) -> (), such as CrossEntropy or GaussianNLL: outputs (K, N, ...), target (N, ...).
        n_passes: K in training; validation and test take at least 20.
        n_predict_passes: K in prediction.
        length_scale: l of the prior, whose KL is added to the loss; None or 0 is none. Leave it so where
            `configure_optimizers` has the prior in its weight decay, by `bbalpha.param_groups`.
        n_data: Rows of the training data, for the prior; None asks the DataLoader.
        seed: None draws from torch's global generator. With an int the masks follow from the epoch, the batch and the
            rank, so that a run that is resumed has those of one that was not interrupted.
    """

    objective: Objective
    n_passes: int = 10
    n_predict_passes: int = 100
    length_scale: float | None = None
    n_data: int | None = None
    seed: int | None = None
    _keep: dict[str, float] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class whose own training step, or order of bases, would leave the alpha loss out."""
        super().__init_subclass__(**options)
        if cls.training_step is not AlphaSteps.training_step:
            raise TypeError(
                f"`{cls.__name__}` must have the `training_step` of AlphaSteps; another one hides it. Name AlphaSteps "
                "first, as in class Net(AlphaSteps, LightningModule), and leave out a training_step of its own; what "
                "it logs besides can be logged in on_train_batch_end."
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The alpha loss of a batch, with the prior; logged as "train_loss" without it."""
        if not self.automatic_optimization:
            raise ValueError(
                "`automatic_optimization` must be True for AlphaSteps; got False. Call bbalpha.sample in a "
                "training_step of your own instead."
            )
        x, target, weight = parts_of(batch)
        seed = self._seed_of(batch_idx, epoch=self.current_epoch)
        loss = self._loss(self._objective(), sample(self, x, self.n_passes, seed=seed), target, weight)
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=_rows(x))
        return loss + self._prior(x, batch_idx) if self.length_scale else loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Minus the predictive log-likelihood a row, logged as "val_nll".

        An objective without `alpha` is taken as it is, and logged as "val_loss".
        """
        return self._scored("val", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """As in validation, logged as "test_nll" or "test_loss"."""
        return self._scored("test", batch, batch_idx)

    def predict_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> ClassificationPrediction | RegressionPrediction:
        """The predictive distribution of a batch: that of the objective, CrossEntropy or GaussianNLL.

        The masks are shared by all rows of a pass. With a `seed` they are by all batches too, and the predictions are
        those of ``predict_classification(net, x, masks="shared", seed=seed)`` for all rows at once.
        """
        objective, x = self._objective(), _inputs_of(batch)
        options: dict[str, Any] = {
            "n_passes": self.n_predict_passes, "masks": "shared", "seed": self.seed, "progress": False
        }  # fmt: skip
        if isinstance(objective, CrossEntropy):
            return predict_classification(self, x, class_axis=objective.class_axis, **options)
        if isinstance(objective, GaussianNLL):
            precision: Any = "predicted" if objective.source == "predicted" else objective.precision
            return predict_regression(self, x, precision=precision, **options)
        raise TypeError(
            f"`objective` must be CrossEntropy or GaussianNLL for trainer.predict; got {type(objective).__name__}. "
            "Write a predict_step that returns bbalpha.predict_classification(self, x) or predict_regression."
        )

    # ---- parts of the steps

    def _objective(self) -> Objective:
        objective: Any = getattr(self, "objective", None)
        if not callable(objective):
            raise TypeError(
                f"`objective` must be set in the __init__ of {type(self).__name__}, as in self.objective = "
                f"bbalpha.CrossEntropy(alpha=0.5); got {objective!r}."
            )
        found: Objective = objective
        return found

    def _scored(self, stage: str, batch: Any, batch_idx: int) -> Tensor:
        """The objective at alpha = 1, logged."""
        x, target, weight = parts_of(batch)
        objective, seed = self._objective(), self._seed_of(batch_idx)
        outputs = sample(self, x, max(self.n_passes, _VALIDATION_PASSES), seed=seed)
        value = self._loss(predictive_objective(objective), outputs, target, weight)
        name = f"{stage}_nll" if hasattr(objective, "alpha") else f"{stage}_loss"
        self.log(name, value, prog_bar=True, batch_size=_rows(x), sync_dist=True)
        return value

    def _loss(self, objective: Objective, outputs: Any, target: Any, weight: Tensor | None) -> Tensor:
        return objective(outputs, target) if weight is None else objective(outputs, target, weight) * weight.mean()

    def _prior(self, x: Any, batch_idx: int) -> Tensor:
        """Its KL a row ()."""
        if batch_idx == 0 or self._keep is None:  # rates may be others in another epoch
            self._keep = keep_of(self, x) or {}
        n_data = self.n_data or _n_data(self)
        return prior_kl(self, length_scale=float(self.length_scale or 0.0), n_data=n_data, keep=self._keep)

    def _seed_of(self, batch_idx: int, epoch: int | None = None) -> int | None:
        """The seed of the passes of a batch; that of validation is the same in every epoch, ranks draw their own."""
        rank = self.global_rank
        if self.seed is None:
            return None if rank == 0 else step_seed(draw_seed(None), rank)
        own = held_out_seed(self.seed, batch_idx)
        if epoch is not None:
            own = step_seed(step_seed(self.seed, epoch), batch_idx)
        return own if rank == 0 else step_seed(own, rank)


def joined(predictions: Sequence[Prediction]) -> Prediction:
    """One prediction of all rows out of those of the batches, as ``trainer.predict`` returns them.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    >>> joined([predict_regression(net, torch.zeros(n, 2), precision=4.0) for n in (3, 2)]).mean.shape
    torch.Size([5, 1])
    """
    if not predictions or not isinstance(predictions[0], (ClassificationPrediction, RegressionPrediction)):
        got = f"a list of {type(predictions[0]).__name__}" if predictions else "none"
        raise TypeError(f"`predictions` must be predictions of bbalpha, one a batch, at least one; got {got}.")
    parts: Sequence[Any] = predictions
    first, found = parts[0], dict(vars(parts[0]))
    if isinstance(first, ClassificationPrediction):
        for name in ("log_probs", "expected_entropy", "votes"):
            found[name] = torch.cat([getattr(p, name) for p in parts])
    else:
        found["outputs"] = torch.cat([p.outputs for p in parts], 1)
        if first.precision is not None and first.precision.ndim:  # one a row
            found["precision"] = torch.cat([p.precision.expand_as(p.outputs) for p in parts], 1)
    return type(predictions[0])(**found)


# ------------------------------------------------------------------------------ helpers


def _inputs_of(batch: Any) -> Any:
    """The x of a batch to predict: of a pair, of a mapping, or all of it."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}
    if isinstance(batch, (tuple, list)):
        return batch[0] if len(batch) == 1 else parts_of(batch)[0]
    return batch


def _rows(x: Any) -> int | None:
    return Inputs.of(x, 0).rows


def _n_data(module: Any) -> int:
    """Rows that an epoch goes through, on all ranks."""
    sampler = getattr(module.trainer.train_dataloader, "sampler", None)
    if not isinstance(sampler, Sized):
        raise ValueError(
            "`length_scale` needs the number of training rows, which the training data do not tell; set `n_data` too, "
            "or leave `length_scale` out."
        )
    return len(sampler) * int(getattr(sampler, "num_replicas", 1))
