"""The networks of benchmarks/passes.py: trained for a short time, as a user would with `fit`, nothing tuned.

Regression on UCI tables (one hidden layer of 50), digits by an MLP, an LSTM and an encoder that read their rows, MNIST
by the paper's dense network and CNN.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from sklearn import datasets
from torch import Tensor, nn

import bbalpha
from bbalpha.data import load_uci
from bbalpha.experiments import mnist
from bbalpha.networks import cnn, mlp
from bbalpha.objectives import CrossEntropy, GaussianNLL
from bbalpha.training import cosine, fit


@dataclass(frozen=True, eq=False)
class Problem:
    """A trained network, the batch that gradients are taken at, and rows that it has not seen.

    Attributes:
        net: Its last dropout, if it is right before the last linear layer, is the attribute or entry `last`.
        x: A batch of training rows.
        y: Their targets.
        held_out: Inputs of the rows that are predicted.
        precision: Of the noise, as it was learned; None for a classifier.
        score: RMSE in deviations of the target, or share right, of the held-out rows, dropout off.
        last: The last dropout by name; None where something that is not linear follows.
        repetitions: How often every estimate is made.
        groups: How many times 100 balanced passes the reference has.
        pairs: Of gradients.
    """

    net: nn.Module
    x: Tensor
    y: Tensor
    held_out: Tensor
    precision: float | None
    score: float
    last: str | None
    repetitions: int = 100
    groups: int = 200
    pairs: int = 150

    def losses(self, outputs: Tensor) -> Tensor:
        """Minus the log-likelihood of the targets in every pass: (..., N, D) -> (..., N)."""
        if self.precision is None:
            return -outputs.log_softmax(-1).gather(-1, self.y.expand(outputs.shape[:-1])[..., None])[..., 0]
        noise = torch.distributions.Normal(outputs[..., 0], self.precision**-0.5)
        return -noise.log_prob(self.y[:, 0])


class Reader(nn.Module):
    """An LSTM of three layers with dropout between them; what the last step says goes to the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 32, num_layers=3, dropout=0.3, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:  # (N, 8, 8)
        return self.head(self.rnn(x)[0][:, -1])


class Encoder(nn.Module):
    """Two encoder layers over the rows of a digit, dropout 0.1 everywhere, the mean of the tokens to the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Linear(8, 32), nn.Parameter(0.1 * torch.randn(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:  # (N, 8, 8)
        return self.head(self.drop(self.encoder(self.embedding(x) + self.place).mean(1)))


def regression(name: str, dropout: float, input_dropout: float) -> Problem:
    if name == "diabetes":
        X, y = datasets.load_diabetes(return_X_y=True)
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0)).numpy()
        train, test = order[50:], order[:50]
    else:
        table = load_uci(name)
        X, y, (train, test) = table.X, table.y, table.split(0)
    x, y = (torch.as_tensor(t, dtype=torch.float32).reshape(len(t), -1) for t in (X, y))
    x, y = ((t - t[train].mean(0)) / t[train].std(0).clamp_min(1e-6) for t in (x, y))
    net, objective = mlp([x.shape[1], 50, 1], dropout=dropout, input_dropout=input_dropout), GaussianNLL(0.5)
    epochs = -(-800 * 32 // len(train))  # about 800 steps
    fit(
        net, (x[train], y[train]), objective=objective, epochs=epochs, batch_size=32, learning_rate=0.01,
        schedule=cosine, seed=0, progress=False,
    )  # fmt: skip
    held = test[:50]
    with torch.no_grad():
        rmse = (bbalpha.sample(net.eval(), x[held], None)[0] - y[held]).square().mean().sqrt().item()
    return Problem(net, x[train[:32]], y[train[:32]], x[held], objective.precision.item(), rmse, str(len(net) - 2))


def digits(make: Callable[[], nn.Module], *, last: str | None, sequence: bool = False) -> Problem:
    """scikit-learn's digits, of 8 x 8 pixels; as sequences, row by row."""
    X, y = datasets.load_digits(return_X_y=True)
    x, y = torch.as_tensor(X, dtype=torch.float32) / 16, torch.as_tensor(y)
    return classifier(make(), x.view(-1, 8, 8) if sequence else x, y, n_test=297, epochs=30, rate=0.005, last=last)


def mnist_digits(make: Callable[[], nn.Module], *, flat: bool, epochs: int, last: str) -> Problem:
    """The first 2,000 digits of MNIST."""
    data = mnist.load(flat=flat, n_train=2000, n_test=500, letters=False)
    x, y = torch.cat([data.x, data.x_test]), torch.cat([data.y, data.y_test])
    return classifier(make(), x, y, n_test=500, epochs=epochs, rate=0.001, last=last)


def classifier(
    net: nn.Module, x: Tensor, y: Tensor, *, n_test: int, epochs: int, rate: float, last: str | None
) -> Problem:
    train, test = (x[:-n_test], y[:-n_test]), (x[-n_test:], y[-n_test:])
    fit(
        net, train, objective=CrossEntropy(0.5), epochs=epochs, n_passes=3, batch_size=64, learning_rate=rate,
        schedule=cosine, seed=0, progress=False,
    )  # fmt: skip
    with torch.no_grad():
        right = bbalpha.sample(net.eval(), test[0], None)[0].argmax(-1) == test[1]
    return Problem(net, train[0][:32], train[1][:32], test[0][:50], None, float(right.float().mean()), last)


def without_last(problem: Problem, copy: nn.Module) -> nn.Module:
    """`copy`, a copy of the network, with its last dropout left out: for a mean, what the linear layer makes of it."""
    if not isinstance(copy.get_submodule(str(problem.last)), nn.Dropout):
        raise TypeError(f"`last` must name a dropout; got {problem.last!r}.")
    setattr(copy, str(problem.last), nn.Identity())
    return copy


def dense_mnist() -> Problem:
    make = partial(mlp, [784, 1000, 1000, 1000, 10], dropout=0.5)
    problem = mnist_digits(make, flat=True, epochs=5, last="9")
    return replace(problem, held_out=problem.held_out[:30], repetitions=30, groups=40, pairs=20)


def cnn_mnist() -> Problem:
    return replace(mnist_digits(cnn, flat=False, epochs=3, last="9"), repetitions=30, groups=40, pairs=20)


def _rates() -> dict[str, Callable[[], Problem]]:
    """The UCI networks by name: rates at hidden units and inputs, those of choices.RATES among them."""
    rates = {"0.05": 0.05, "0.01": 0.01, "13/256": 13 / 256, "5/256": 5 / 256}
    pairs = [("0.05", True), ("0.05", False), ("0.01", True), ("13/256", True), ("13/256", False), ("5/256", False)]
    return {
        f"{name}, {rate}{', inputs too' if inputs else ''}": partial(
            regression, name, rates[rate], rates[rate] if inputs else 0.0
        )
        for name in ("concrete", "boston")
        for rate, inputs in pairs
    }


NETWORKS: dict[str, Callable[[], Problem]] = {
    "diabetes, 0.05, inputs too": partial(regression, "diabetes", 0.05, 0.05),
    **_rates(),
    "digits MLP, 0.5": partial(digits, partial(mlp, [64, 100, 100, 10], dropout=0.5), last="6"),
    "LSTM, 0.3": lambda: replace(digits(Reader, last=None, sequence=True), repetitions=30, groups=40, pairs=100),
    "encoder, 0.1": lambda: replace(digits(Encoder, last="drop", sequence=True), repetitions=30, groups=40, pairs=100),
    "CNN, 0.5": cnn_mnist,
    "MNIST 3 x 1000, 0.5": dense_mnist,
}


def loss(problem: Problem, outputs: Tensor, alpha: float) -> Tensor:
    """The alpha objective of the batch."""
    if problem.precision is None:
        return bbalpha.cross_entropy(outputs, problem.y, alpha)
    return bbalpha.gaussian_nll(outputs, problem.y, alpha, precision=problem.precision)
