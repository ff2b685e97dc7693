import copy

import pytest
import torch
from torch import nn

from bbalpha.objectives import GaussianNLL
from bbalpha.training import fit


def net():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 1))


def train(model, **options):
    x = torch.randn(16, 3)
    return fit(model, (x, x[:, :1]), objective=GaussianNLL(precision=1.0), epochs=2, **options)


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: lambda groups: o], ids=["given", "made"])
def test_an_optimiser_of_another_model_is_refused(wrap):
    model = net()
    with pytest.raises(ValueError, match="`optimizer` must hold parameters of the model"):
        train(model, optimizer=wrap(torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)))


def test_an_optimiser_of_a_part_trains_that_part():
    model = net()
    before = copy.deepcopy(model)
    train(model, optimizer=torch.optim.SGD(model[3].parameters(), lr=0.1))
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[3].weight, before[3].weight)


def test_a_frozen_model_may_learn_its_precision_alone():
    model, objective, x = net().requires_grad_(False), GaussianNLL(), torch.randn(16, 3)
    fit(model, (x, x[:, :1]), objective=objective, epochs=2)
    assert objective.precision != 1.0


def test_what_is_no_optimiser_or_schedules_another_one_is_refused():
    model = net()
    with pytest.raises(TypeError, match=r"`optimizer` must be a torch optimiser.*got NoneType"):
        train(model, optimizer=lambda groups: None)
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(ValueError, match="`schedule` must be made for the optimiser"):
        train(model, optimizer=one, schedule=torch.optim.lr_scheduler.StepLR(other, 1))
    with pytest.raises(ValueError, match="`schedule` must be made for the optimiser"):
        train(model, schedule=torch.optim.lr_scheduler.StepLR(other, 1))
