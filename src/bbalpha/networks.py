"""The networks of the paper: a multilayer perceptron and a small CNN, as plain nn.Sequential.

net = mlp([784, 1000, 1000, 1000, 10], dropout=0.5)
"""

from collections.abc import Callable, Sequence

from torch import nn

from bbalpha.checks import check_call, check_count, check_share, check_widths


def mlp(
    sizes: Sequence[int],
    *,
    dropout: float = 0.5,
    input_dropout: float | None = None,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Dense layers with dropout before each of them.

    Args:
        sizes: Widths from the inputs to the outputs, at least two.
        dropout: The rate of being dropped, in [0, 1).
        input_dropout: The rate at the inputs; None takes `dropout`. A rate of 0 puts no layer.
        activation: Makes the module after each hidden layer.

    >>> mlp([4, 50, 1], dropout=0.1, input_dropout=0)
    Sequential(
      (0): Linear(in_features=4, out_features=50, bias=True)
      (1): ReLU()
      (2): Dropout(p=0.1, inplace=False)
      (3): Linear(in_features=50, out_features=1, bias=True)
    )
    """
    sizes = check_widths("sizes", sizes)
    if len(sizes) < 2:
        raise ValueError(f"`sizes` must hold at least two positive widths, inputs to outputs; got {list(sizes)}.")
    dropout = check_share("dropout", dropout)
    input_dropout = None if input_dropout is None else check_share("input_dropout", input_dropout)
    check_call("activation", activation)
    rates = [dropout if input_dropout is None else input_dropout] + [dropout] * (len(sizes) - 2)
    layers: list[nn.Module] = []
    for i, rate in enumerate(rates):
        if i:
            layers.append(activation())
        if rate:
            layers.append(nn.Dropout(rate))
        layers.append(nn.Linear(sizes[i], sizes[i + 1]))
    return nn.Sequential(*layers)


def cnn(*, n_classes: int = 10, dropout: float = 0.5, filters: int = 32, hidden: int = 100) -> nn.Sequential:
    """The paper's CNN for 28 x 28 grey images (N, 1, 28, 28): dropout before each dense layer.

    Two 3 x 3 convolutions, 2 x 2 max pooling, one hidden dense layer.
    """
    n_classes, filters = check_count("n_classes", n_classes), check_count("filters", filters)
    hidden, dropout = check_count("hidden", hidden), check_share("dropout", dropout)
    return nn.Sequential(
        nn.Conv2d(1, filters, 3),
        nn.ReLU(),
        nn.Conv2d(filters, filters, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(filters * 12 * 12, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, n_classes),
    )
