"""The network of the BatchBALD paper on MNIST, its training, and its passes by a short way.

Dropout of channels stands behind pooling and ReLU here, not before them as in the paper: both leave a factor that is
not negative in its place, so each pass is the same function, and all that comes before the first dropout is computed
once. Under shared masks a dropped channel is dropped for all rows, and the second convolution is linear: what each of
its inputs gives to each of its outputs is computed once too, and a pass only adds up what it keeps.
"""

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
_SHORT = 64  # rows of all passes: what they add up stays near the processor


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
        w = {name: p.detach() for name, p in net.named_parameters()}
        first, second, third = _masks(n_passes, seed, balanced=balanced)
        channels, units = second > 0, third > 0
        C, U = int(channels.sum(1).max()), int(units.sum(1).max())
        self.sums = w["4.weight"].permute(1, 0, 2, 3).reshape(32, 64, 25)
        self.bias = w["4.bias"]
        self.takes = [channels[:, o].nonzero()[:, 0] for o in range(64)]  # the passes that keep a channel
        self.place = channels.cumsum(1) - 1  # where it stands among those that a pass keeps
        self.first = [first[passes] for passes in self.takes]
        self.dense = torch.zeros(n_passes, C, 16, U)  # the last two layers of every pass, of what it keeps
        self.dense_bias, self.readout = torch.zeros(n_passes, 1, U), torch.zeros(n_passes, U, 10)
        columns = w["9.weight"].unflatten(1, (64, 16))
        for k, (kept, own) in enumerate(zip(channels, units, strict=True)):
            c, u = int(kept.sum()), int(own.sum())
            self.dense[k, :c, :, :u] = (columns[own][:, kept] * second[k, kept][:, None]).permute(1, 2, 0)
            self.dense_bias[k, 0, :u] = w["9.bias"][own]
            self.readout[k, :u] = (w["12.weight"][:, own] * third[k, own]).T
        self.readout_bias = w["12.bias"]

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """(N, 1, 28, 28) -> (K, N, 10)."""
        return torch.cat([self._block(block) for block in x.split(_SHORT)], 1)

    def mean(self, x: Tensor) -> Tensor:
        """Their mean (N, 10)."""
        return torch.cat([self(block).mean(0) for block in x.split(_BLOCK)])

    def _block(self, x: Tensor) -> Tensor:
        n = len(x)
        h = self.net[0](x).reshape(n, 32, 12, 2, 12, 2).amax((3, 5)).relu()  # before any dropout: once for all passes
        # 5 x 5 patches, those that are pooled together in one of four parts: (32, 25, 4 n 16)
        patches = h.unfold(2, 5, 1).unfold(3, 5, 1).reshape(n, 32, 4, 2, 4, 2, 25)
        patches = patches.permute(1, 6, 3, 5, 0, 2, 4).reshape(32, 25, 4 * n * 16)
        sums = torch.bmm(self.sums, patches)  # what each channel gives to each of the next: (32, 64, 4 n 16)
        K, C = self.dense.shape[:2]
        kept = torch.zeros(K, n, C, 16)
        for o, (passes, mask) in enumerate(zip(self.takes, self.first, strict=True)):
            z = (mask @ sums[:, o]).view(len(passes), 4, n, 16).amax(1)
            kept[passes, :, self.place[passes, o]] = (z + self.bias[o]).relu()
        z = torch.baddbmm(self.dense_bias, kept.flatten(2), self.dense.flatten(1, 2)).relu()
        return torch.baddbmm(self.readout_bias, z, self.readout).softmax(-1)


def _loss(net: nn.Module, x: Tensor, y: Tensor, how: Training, seed: int) -> Tensor:
    if how.alpha is None:
        return functional.cross_entropy(net(x), y)
    return cross_entropy(sample(net, x, how.n_passes, seed=seed), y, how.alpha)


def _masks(n_passes: int, seed: int, *, balanced: bool) -> list[Tensor]:
    """The factors of each dropout in each pass (K, units), drawn as the engine draws them."""
    passes = Passes(seed, 0, n_passes, together=n_passes if balanced else 0)
    drawn = [kept_units(passes, shape, 0.5) for shape in ((1, 32, 1, 1), (1, 64, 1, 1), (1, 128))]
    return [(kept.float() * scale).flatten(1) for kept, scale in drawn]
