"""skorch: nets that train on K passes and predict with them, wherever scikit-learn wants an estimator.

    net = AlphaNetClassifier(Module, criterion__alpha=0.5, n_passes=10, max_epochs=20, lr=0.1).fit(X, y)
    net.predict_proba(X), net.predict_entropy(X), net.predict_mutual_information(X)
    GridSearchCV(net, {"criterion__alpha": [0, 0.5, 1], "n_passes": [1, 10]}, scoring="neg_log_loss").fit(X, y)

The criterion is the objective, (outputs, target) -> () with outputs (K, N, ...). Its options go by skorch's names,
``criterion__alpha`` and ``criterion__precision``, and the optimiser trains what it learns. The module returns logits,
or means. "valid_loss" is minus the predictive log-likelihood of held-out rows.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

try:
    from skorch import NeuralNetClassifier, NeuralNetRegressor
    from skorch.dataset import unpack_data
    from skorch.utils import to_tensor
except ImportError as error:
    raise ImportError("bbalpha.integrations.skorch needs skorch: pip install 'bbalpha[skorch]'.") from error

from bbalpha._kernels import draw_seed
from bbalpha.checks import check_count, check_number
from bbalpha.objectives import AlphaLoss, CrossEntropy, GaussianNLL, mean_and_log_precision
from bbalpha.prediction import classification_of, predict_classification, predict_regression
from bbalpha.predictive import ClassificationPrediction, RegressionPrediction
from bbalpha.priors import prior_kl
from bbalpha.sampling import sample
from bbalpha.training.loop import predictive_objective
from bbalpha.training.optimizers import keep_of

if TYPE_CHECKING:
    _Net = Any
else:
    _Net = object

Array = NDArray[Any]
Module = nn.Module | Callable[..., nn.Module]
_VALIDATION_PASSES = 20  # at least, as in `fit`


class _AlphaNet(_Net):
    """What both nets share: K passes in the place of one; stands before skorch's class.

    Predictions go through skorch as tuples of tensors with the rows first, so that its callbacks can keep them: the
    net's `_predicted` gives them of x, its `_summary` of outputs (K, N, ...).
    """

    _objectives: tuple[type[nn.Module], ...]
    keep_: dict[str, float] | None

    def initialize(self) -> Self:
        """skorch's, with a look at the settings; draws the seed that the predictions of this net have."""
        check_count("n_passes", self.n_passes)
        check_count("n_predict_passes", self.n_predict_passes, least=2)
        if self.length_scale is not None:
            check_number("length_scale", self.length_scale, least=0)
        if self.predict_nonlinearity != "auto":
            raise ValueError(
                f'`predict_nonlinearity` must be left at "auto"; got {self.predict_nonlinearity!r}. The module returns '
                "logits, or means; passes are averaged as probabilities, or as means."
            )
        super().initialize()
        if not isinstance(self.criterion_, self._objectives):
            names = " or ".join(f"bbalpha.{objective.__name__}" for objective in self._objectives)
            raise TypeError(f"`criterion` must be {names}; got {type(self.criterion_).__name__}.")
        self.seed_ = draw_seed(None)
        return self

    def get_split_datasets(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """skorch's; the rows to train on are counted, for the prior."""
        train, held = super().get_split_datasets(X, y, **fit_params)
        self.n_data_, self.keep_ = len(train), None
        return train, held

    def infer(self, x: Any, **fit_params: Any) -> Any:
        """The outputs of the passes (K, N, ...): `n_passes` in training, at least 20 in validation."""
        training = self.module_.training
        count = self.n_passes if training else max(self.n_passes, _VALIDATION_PASSES)
        return sample(self.module_, self._inputs(x, fit_params), count, seed=None if training else self.seed_)

    def get_loss(self, y_pred: Any, y_true: Any, X: Any = None, training: bool = False) -> Tensor:
        """The alpha loss with the prior; in validation minus the predictive log-likelihood."""
        target = to_tensor(y_true, device=self.device)
        if not training:
            return predictive_objective(self.criterion_)(y_pred, target)
        loss: Tensor = self.criterion_(y_pred, target)
        return loss + self._prior(X) if self.length_scale else loss

    def train_step_single(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        """skorch's, with what the passes predict in their place."""
        return self._told(super().train_step_single(batch, **fit_params))

    def validation_step(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        """skorch's, with what the passes predict in their place."""
        return self._told(super().validation_step(batch, **fit_params))

    def evaluation_step(self, batch: Any, training: bool = False) -> tuple[Tensor, ...]:
        """What is predicted of a batch, rows first."""
        self.check_is_fitted()
        if training:
            raise ValueError("`training` must be False; got True. Passes are drawn in evaluation mode too.")
        # one function a pass for all rows: a row is predicted alike in any company
        options = {"n_passes": self.n_predict_passes, "masks": "shared", "seed": self.seed_, "progress": False}
        found: tuple[Tensor, ...] = self._predicted(self._inputs(unpack_data(batch)[0], {}), options)
        return found

    def _inputs(self, x: Any, fit_params: Mapping[str, Any]) -> Any:
        """As `sample` takes it: a mapping has the arguments of the module, anything else is its only one."""
        x = to_tensor(x, device=self.device)
        if isinstance(x, Mapping):
            return self._merge_x_and_fit_params(x, fit_params)
        if fit_params:
            raise TypeError(
                f"`fit` takes no arguments for the module beside X; got {', '.join(fit_params)}. Make X a dict of all "
                "arguments."
            )
        return x if isinstance(x, Tensor) else (x,)

    def _prior(self, X: Any) -> Tensor:
        """Its KL a row ()."""
        if self.keep_ is None:
            self.keep_ = keep_of(self.module_, self._inputs(X, {})) or {}
        return prior_kl(self.module_, length_scale=self.length_scale, n_data=self.n_data_, keep=self.keep_)

    def _told(self, step: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            return {**step, "y_pred": self._summary(step["y_pred"])}


class AlphaNetClassifier(_AlphaNet, NeuralNetClassifier):
    """skorch's NeuralNetClassifier with the alpha objective, and predictions that know how sure they are.

    Args:
        module: Returns logits (N, C); labels are the indices 0 to C - 1.
        *args: As in skorch.
        criterion: bbalpha.CrossEntropy or AlphaLoss, with ``criterion__alpha=0.5`` and so on.
        n_passes: K in training.
        n_predict_passes: K in prediction.
        length_scale: l of the prior, whose KL is added to the loss; None or 0 is none.
        **kwargs: As in skorch: max_epochs, lr, optimizer, callbacks, device, options of the module.

    >>> X, y = np.random.default_rng(0).normal(size=(60, 4)).astype("float32"), np.arange(60) % 3
    >>> module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    >>> net = AlphaNetClassifier(module, max_epochs=2, verbose=0).fit(X, y)
    >>> net.predict_proba(X).shape, net.predict(X).shape, net.predict_mutual_information(X).shape
    ((60, 3), (60,), (60,))
    """

    _objectives = (CrossEntropy, AlphaLoss)

    def __init__(
        self,
        module: Module,
        *args: Any,
        criterion: Any = CrossEntropy,
        n_passes: int = 10,
        n_predict_passes: int = 100,
        length_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, *args, criterion=criterion, **kwargs)
        self.n_passes, self.n_predict_passes, self.length_scale = n_passes, n_predict_passes, length_scale

    def predictive(self, X: Any) -> ClassificationPrediction:
        """The predictive distribution of the rows, with everything that it tells."""
        log_probs, expected_entropy, votes = self.forward(X)
        axis = self._class_axis
        axis = 1 if axis is None else axis % (log_probs.ndim + 1) - 1  # that of the criterion counts the passes too
        return ClassificationPrediction(log_probs, expected_entropy, votes, self.n_predict_passes, axis)

    def predict_proba(self, X: Any) -> Array:
        """Mean probability over passes (N, C)."""
        return _array(self.predictive(X).probs)

    def predict_entropy(self, X: Any) -> Array:
        """The whole uncertainty of each row, in nats (N,)."""
        return _array(self.predictive(X).entropy)

    def predict_mutual_information(self, X: Any) -> Array:
        """How much the passes disagree on each row: what more data would settle, in nats (N,)."""
        return _array(self.predictive(X).mutual_information)

    def log_prob(self, X: Any, y: Any) -> Array:
        """Log-probability of the labels (N,)."""
        return _array(self.predictive(X).log_prob(torch.as_tensor(np.asarray(y))))

    @property
    def _class_axis(self) -> int | None:
        return getattr(self.criterion_, "class_axis", None)

    def _summary(self, outputs: Any) -> tuple[Tensor, ...]:
        p = classification_of(outputs, class_axis=self._class_axis)
        return p.log_probs, p.expected_entropy, p.votes

    def _predicted(self, x: Any, options: dict[str, Any]) -> tuple[Tensor, ...]:
        p = predict_classification(self.module_, x, class_axis=self._class_axis, **options)
        return p.log_probs, p.expected_entropy, p.votes


class AlphaNetRegressor(_AlphaNet, NeuralNetRegressor):
    """skorch's NeuralNetRegressor with the alpha objective, and predictions that know how sure they are.

    Args:
        module: Returns means (N, D), as `y` has them; (mean, log_precision) with ``criterion__precision="predicted"``.
        *args: As in skorch.
        criterion: bbalpha.GaussianNLL, whose precision is learned unless ``criterion__precision`` says otherwise; or
            AlphaLoss, which knows no noise.
        n_passes: K in training.
        n_predict_passes: K in prediction.
        length_scale: l of the prior, whose KL is added to the loss; None or 0 is none.
        **kwargs: As in skorch.

    >>> X = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    >>> module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    >>> net = AlphaNetRegressor(module, max_epochs=2, verbose=0).fit(X, X[:, :1])
    >>> mean, std = net.predict(X, return_std=True)
    >>> mean.shape, bool((std > 0).all())
    ((60, 1), True)
    """

    _objectives = (GaussianNLL, AlphaLoss)

    def __init__(
        self,
        module: Module,
        *args: Any,
        criterion: Any = GaussianNLL,
        n_passes: int = 10,
        n_predict_passes: int = 100,
        length_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, *args, criterion=criterion, **kwargs)
        self.n_passes, self.n_predict_passes, self.length_scale = n_passes, n_predict_passes, length_scale

    def predictive(self, X: Any) -> RegressionPrediction:
        """The predictive distribution of the rows, with everything that it tells."""
        found = self.forward(X)
        parts = [t.movedim(1, 0) for t in (found if isinstance(found, tuple) else (found,))]  # (K, N, D)
        if len(parts) == 2:
            return RegressionPrediction(parts[0], parts[1])
        return RegressionPrediction(parts[0], self._precision())

    def predict_proba(self, X: Any) -> Array:
        """The same as `predict`, by skorch's name for it."""
        return _array(self.predictive(X).mean)

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Mean of each row's predictive distribution (N, D), and its standard deviation where it is asked for."""
        p = self.predictive(X)
        return (_array(p.mean), _array(p.std)) if return_std else _array(p.mean)

    def log_prob(self, X: Any, y: Any) -> Array:
        """Log-density of the targets (N, D), those of a row jointly (N,)."""
        p = self.predictive(X)
        return _array(p.log_prob(torch.as_tensor(np.asarray(y), dtype=p.outputs.dtype)))

    def _precision(self) -> Tensor | None:
        if self.criterion_ is None:
            raise ValueError("The noise that was learned went with `trim_for_prediction`; fit the net again.")
        return self.criterion_.precision.detach().cpu() if isinstance(self.criterion_, GaussianNLL) else None

    def _summary(self, outputs: Any) -> tuple[Tensor, ...]:
        if getattr(self.criterion_, "source", None) != "predicted":
            return (outputs.movedim(0, 1),)
        mean, log_precision = mean_and_log_precision("`module` must return", outputs)
        return mean.movedim(0, 1), log_precision.exp().movedim(0, 1)

    def _predicted(self, x: Any, options: dict[str, Any]) -> tuple[Tensor, ...]:
        predicted: Any = "predicted" if getattr(self.criterion_, "source", None) == "predicted" else None
        p = predict_regression(self.module_, x, precision=predicted, **options)
        parts = (p.outputs,) if p.precision is None else (p.outputs, p.precision)
        return tuple(t.movedim(0, 1) for t in parts)  # (N, K, D)


def _array(t: Tensor) -> Array:
    found: Array = t.detach().cpu().numpy()
    return found
