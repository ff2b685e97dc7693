import copy

import numpy as np
import torch
from torch import nn

from bbalpha.estimators import BBAlphaRegressor
from bbalpha.estimators.soundness import in_double
from bbalpha.networks import mlp


def test_a_network_in_double_precision_is_a_copy_of_all_its_numbers():
    network = nn.Sequential(mlp([3, 5, 2], dropout=0.1), nn.BatchNorm1d(2), nn.Identity()).eval()
    network[1].running_mean.add_(0.5)
    before, x = copy.deepcopy(network.state_dict()), torch.randn(4, 3, dtype=torch.float64)
    twin = in_double(network)
    assert torch.equal(twin(x), copy.deepcopy(network).double()(x))
    for t in (*twin.parameters(), *twin.buffers()):
        t.zero_()
    assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
    assert twin[0][1] is not network[0][1]


def test_networks_changed_after_a_fit_predict_as_they_are():
    X = np.linspace(-1, 1, 30)[:, None]
    model = BBAlphaRegressor(epochs=2, n_ensemble=2, random_state=0, hidden_layer_sizes=(50,), noise="constant").fit(
        X, X[:, 0]
    )
    mean, std = model.predict(X, return_std=True)
    for network in model.networks_:
        network[-1].bias.data += 1  # which no version counter of torch notices
    moved, same = model.predict(X, return_std=True)
    np.testing.assert_allclose(moved, mean + model.y_scale_, atol=1e-6)
    np.testing.assert_allclose(same, std, atol=1e-6)
    for network in model.networks_:
        for layer in network:
            if isinstance(layer, nn.Dropout):
                layer.p = 0.5
    assert (model.predict(X, return_std=True)[1] > std).all()
    assert (model.fit(X, X[:, 0]).predict(X) == mean).all()
