"""The network of the BatchBALD paper on MNIST, its training, and its passes by a short way.

Dropout of channels stands behind pooling and ReLU here, not before them as in the paper: both leave a factor that is
not negative in its place, so each pass is the same function, and all that comes before the first dropout is computed
once. Under shared masks a dropped channel is dropped for all rows: the second convolution goes from kept channels to
kept channels, a quarter of the products.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bbalpha._engine.chains import kept_units
from bbalpha._kernels import Passes, step_seed
from bbalpha.objectives import cross_entropy
from bbalpha.sampling import sample

BATCH = 64
_BLOCK = 500  # rows at a time


@dataclass(frozen=True)
class Training:
    """How a network is trained.

    Attributes:
        alpha: Of the objective; None is the mean loss of one pass a row, as published.
        n_passes: Passes of a row in one step; a step has BATCH passes in all.
        epoch: Rows seen between two looks at the validation rows; the labelled ones come round evenly.
        most_epochs: At most so many.
        patience: Epochs without a better validation accuracy at which to stop; the best weights are kept.
    """

    alpha: float | None
    n_passes: int
    epoch: int
    most_epochs: int
    patience: int = 3


def network() -> nn.Sequential:
    """Two 5 x 5 convolutions and two dense layers, 184,586 parameters, dropout 0.5 behind all but the last."""
    net = nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout2d(0.5),
        nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout2d(0.5), nn.Flatten(),
        nn.Linear(1024, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip
    for p in net.parameters():
        if p.ndim == 4:  # a fifth of a step's time
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return net


def trained(x: Tensor, y: Tensor, validation: tuple[Tensor, Tensor], how: Training, seed: int) -> nn.Sequential:
    """A new network trained on (x, y), with the weights that were best on the validation rows, dropout off."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    best, weights, since, step = -1.0, net.state_dict(), 0, 0
    for _ in range(how.most_epochs):
        net.train()
        for rows in (torch.randperm(how.epoch) % len(x)).split(BATCH // how.n_passes):
            loss = _loss(net, x[rows], y[rows], how, step_seed(seed, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        accuracy = plain_accuracy(net, *validation)
        since += 1
        if accuracy > best:
            best, since = accuracy, 0
            weights = {name: value.clone() for name, value in net.state_dict().items()}
        if since >= how.patience:
            break
    net.load_state_dict(weights)
    return net


def plain_accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right labels with dropout off."""
    net.eval()
    with torch.no_grad():
        found = torch.cat([net(block).argmax(1) for block in x.split(_BLOCK)])
    return float((found == y).float().mean())


class ThinPasses:
    """Class probabilities of K functions of `network()`, the passes of `bbalpha.Functions` with this seed.

    Args:
        net: A network of `network()`.
        n_passes: K.
        seed: Of the masks.
        balanced: As in `bbalpha.sample`; False drops units as torch does.
    """

    def __init__(self, net: nn.Sequential, n_passes: int, seed: int, *, balanced: bool) -> None:
        self.net, self.seed = net.eval(), seed
        self.masks = _masks(n_passes, seed, balanced=balanced)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """(N, 1, 28, 28) -> (K, N, 10)."""
        return torch.cat([self._block(block) for block in x.split(_BLOCK)], 1)

    def mean(self, x: Tensor) -> Tensor:
        """Their mean (N, 10)."""
        return torch.cat([self(block).mean(0) for block in x.split(_BLOCK)])

    def _block(self, x: Tensor) -> Tensor:
        h = self.net[:3](x)  # before any dropout: once for all passes
        return torch.stack(list(self._passes(h)))

    def _passes(self, h: Tensor) -> Iterator[Tensor]:
        w = dict(self.net.named_parameters())
        for first, second, third in zip(*self.masks, strict=True):
            kept, out, units = (mask.nonzero()[:, 0] for mask in (first, second, third))
            weight = w["4.weight"][out][:, kept] * first[kept][:, None, None]
            z = functional.conv2d(h[:, kept], weight, w["4.bias"][out])
            z = functional.relu(functional.max_pool2d(z, 2)) * second[out][:, None, None]
            columns = w["9.weight"].unflatten(1, (64, 16))[units][:, out].flatten(1)
            z = functional.relu(functional.linear(z.flatten(1), columns, w["9.bias"][units])) * third[units]
            yield functional.linear(z, w["12.weight"][:, units], w["12.bias"]).softmax(1)


def _loss(net: nn.Module, x: Tensor, y: Tensor, how: Training, seed: int) -> Tensor:
    if how.alpha is None:
        return functional.cross_entropy(net(x), y)
    return cross_entropy(sample(net, x, how.n_passes, seed=seed), y, how.alpha)


def _masks(n_passes: int, seed: int, *, balanced: bool) -> list[Tensor]:
    """The factors of each dropout in each pass (K, units), drawn as the engine draws them."""
    passes = Passes(seed, 0, n_passes, together=n_passes if balanced else 0)
    drawn = [kept_units(passes, shape, 0.5) for shape in ((1, 32, 1, 1), (1, 64, 1, 1), (1, 128))]
    return [(kept.float() * scale).flatten(1) for kept, scale in drawn]
