"""Keep probabilities followed from where they arise to the weights they feed."""

import pytest
import torch
import torch.nn.functional as F

from bbalpha._engine.lineage import Lineage
from bbalpha._kernels import Passes

W = torch.nn.Parameter(torch.randn(4, 4))


def keep_of(forward):
    """The keep probability of W in `forward(x, W)`."""
    mode = Lineage(Passes(0, 0, 1), observer=lambda *_: None, where=lambda _: None, parameters={"w": W})
    x = torch.randn(3, 4)
    with torch.no_grad(), mode:
        forward(x, W)
    return mode.keep.get("w", 1.0)


@pytest.mark.parametrize(
    ("forward", "keep"),
    [
        (F.linear, 1.0),
        (lambda x, w: F.linear(F.dropout(x, 0.25), w), 0.75),
        (lambda x, w: F.dropout(x, 0.25) @ w, 0.75),
        (lambda x, w: F.dropout(x, 0.25) @ w.T, 0.75),
        (lambda x, w: F.dropout(x, 0.25)[:, :2] @ w[:2], 0.75),
        (lambda x, w: F.linear(F.dropout(F.dropout(x, 0.5), 0.5).relu(), w), 0.25),
        (lambda x, w: F.linear(F.dropout(x, 0.25).view(3, 2, 2).flatten(1).tanh(), w), 0.75),
        (lambda x, w: F.linear(F.dropout(x, 0.25) * torch.sigmoid(x), w), 0.75),
        (lambda x, w: F.linear(F.dropout(x, 0.5) * F.dropout(x, 0.5), w), 0.25),
        (lambda x, w: F.linear(torch.cat([F.dropout(x[:, :2]), F.dropout(x[:, 2:])], 1), w), 0.5),
        (lambda x, w: F.linear(torch.cat([x[:, :2], F.dropout(x[:, 2:])], 1), w), 1.0),
        (lambda x, w: F.linear(F.dropout(x.clone(), 0.25, True, True), w), 0.75),
        (lambda x, w: F.linear(x * torch.empty_like(x).bernoulli_(0.75) / 0.75, w), 0.75),
        (lambda x, w: F.linear(F.dropout(x) + 1, w), 1.0),
        (lambda x, w: F.linear(F.dropout(x).add_(1), w), 1.0),
        (lambda x, w: F.linear(x + F.dropout(x), w), 1.0),
        (lambda x, w: F.linear(F.dropout(x).sigmoid(), w), 1.0),
        (lambda x, w: F.linear(F.layer_norm(F.dropout(x), (4,)), w), 1.0),
        (lambda x, w: F.linear(F.dropout(x, training=False), w), 1.0),
        (lambda x, w: F.linear(F.dropout(x, 1.0), w), 1.0),
        (lambda x, w: F.conv1d(F.dropout1d(x.unsqueeze(-1), 0.25), w.unsqueeze(-1)), 0.75),
        (lambda x, w: F.linear(F.linear(F.dropout(x), torch.eye(4)), w), 1.0),
    ],
)
def test_keep(forward, keep):
    assert keep_of(forward) == pytest.approx(keep)
