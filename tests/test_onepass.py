"""A plain net beside dropout nets: told apart, and its one pass read like the passes of the others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bbalpha
from bbalpha.onepass import is_random, logits_once, predict_once


class Functional(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return F.dropout(x, self.rate, self.training)


@pytest.mark.parametrize("mode", [True, False])
def test_randomness_is_found_in_either_mode_and_nothing_is_changed(mode):
    x = torch.ones(5, 3)
    for net, answer in (
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)), False),
        (Functional(0.5), True),
        (Functional(0.0), False),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), False),
    ):
        net.train(mode)
        state = {k: v.clone() for k, v in net.state_dict().items()}
        generator = torch.get_rng_state()
        assert is_random(net, x) is answer
        assert all(m.training is mode for m in net.modules())
        assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
        assert torch.equal(generator, torch.get_rng_state())


def test_logits_are_those_of_evaluation_mode():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    x = torch.randn(7, 3)
    found = logits_once(net, x)
    assert net[1].num_batches_tracked == 0
    torch.testing.assert_close(found, net.eval()(x)[None])
    assert found.requires_grad


def test_the_prediction_is_the_limit_of_dropout_at_a_vanishing_rate():
    linear = nn.Linear(3, 4)
    x = torch.randn(50, 3)
    once = predict_once(linear, x, batch_size=7)
    many = bbalpha.predict_classification(nn.Sequential(nn.Dropout(1e-4), linear), x, n_passes=20, seed=0)
    torch.testing.assert_close(once.log_probs, many.log_probs, atol=5e-3, rtol=0)
    torch.testing.assert_close(once.expected_entropy, many.expected_entropy, atol=5e-3, rtol=0)
    torch.testing.assert_close(once.entropy, once.expected_entropy)
    assert torch.equal(once.label, once.votes.argmax(1))
    with pytest.raises(ValueError, match="`mutual_information` needs at least 2 passes"):
        _ = once.mutual_information


def test_batches_tuples_and_mappings_give_the_same():
    linear, x = nn.Linear(3, 4), torch.randn(10, 3)
    whole = predict_once(linear, x).log_probs
    for other in ((x,), {"input": x}, iter(x.split(4)), torch.utils.data.DataLoader(x, batch_size=3)):
        torch.testing.assert_close(predict_once(linear, other, batch_size=6).log_probs, whole)
    assert predict_once(linear, torch.zeros(0, 3)).log_probs.shape == (0, 4)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="`x` must give at least one batch"):
        predict_once(nn.Linear(3, 4), iter([]))
    with pytest.raises(ValueError, match="`model` must return numbers; got nan in row 1"):
        predict_once(nn.Linear(1, 2), torch.tensor([[0.0], [float("nan")]]))
    with pytest.raises(TypeError, match="`model` must return a tensor of logits"):
        logits_once(nn.LSTM(3, 4), torch.randn(2, 5, 3))
