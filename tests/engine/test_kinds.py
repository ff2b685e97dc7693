"""One table: what a module's kind says of a dropped unit is what a trace of the function it calls says."""

import pytest
import torch
from torch import nn

from bbalpha import audit, prior_kl
from bbalpha._engine import kinds
from bbalpha.priors import keep_probabilities

ARGUMENTS = {
    nn.Unflatten: (1, (2, 32)), nn.PixelShuffle: (2,), nn.PixelUnshuffle: (2,), nn.ChannelShuffle: (2,),
}  # fmt: skip


def made(kind):
    """A layer of that kind, and an input for it."""
    name = kind.__name__
    if "Pool" in name:
        arguments = (2,)
    elif "Pad" in name:
        arguments = (1, 0.0) if "Constant" in name else (1,)
    else:
        arguments = ARGUMENTS.get(kind, ())
    axes = int(name[-2]) if name[-1] == "d" and name[-2].isdigit() else 2 if "shuffle" in name.lower() else 0
    return kind(*arguments), torch.rand(3, *([4] * (1 + axes) if axes else [64])) + 0.5


@pytest.mark.parametrize("kind", kinds.ZERO_STAYS + kinds.ZERO_GOES, ids=lambda kind: kind.__name__)
def test_structure_and_trace_agree_on_what_feeds_the_weights(kind):
    layer, x = made(kind)
    with torch.no_grad():
        width = layer(x).shape[-1]
    net = nn.Sequential(nn.Dropout(0.25), layer, nn.Linear(width, 2))
    keep = {name: p for name, p in audit(net, x, n_passes=2).keep.items() if name == "2.weight"}
    assert keep == keep_probabilities(net) == ({"2.weight": 0.75} if kind in kinds.ZERO_STAYS else {})
    prior = {"length_scale": 1.0, "n_data": 1}
    torch.testing.assert_close(prior_kl(net, **prior), prior_kl(net, **prior, keep=keep))


@pytest.mark.parametrize("kind", kinds.ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_what_is_elementwise(kind):
    x = torch.randn(4, 6)
    columns = torch.tensor([4, 1, 2])
    torch.testing.assert_close(kind()(x)[:, columns], kind()(x[:, columns]))
    assert (kind in kinds.ZERO_STAYS) == (kind()(torch.zeros(1)).item() == 0)


@pytest.mark.parametrize("kind", kinds.CHANNELWISE, ids=lambda kind: kind.__name__)
def test_what_is_channelwise(kind):
    layer, x = made(kind)
    channels = torch.tensor([2, 0])
    assert torch.equal(layer(x)[:, channels], layer(x[:, channels]))


def test_lazy_layers_and_subclasses_are_of_their_kind():
    class Mine(nn.BatchNorm2d):
        pass

    assert issubclass(nn.LazyBatchNorm1d, kinds.NORMS)
    assert isinstance(Mine(2), kinds.BATCH_NORMS)
    assert isinstance(nn.AlphaDropout(), kinds.DROPOUT)
    assert not isinstance(nn.LayerNorm(2), kinds.BATCH_NORMS)
