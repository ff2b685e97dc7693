import pytest
import torch
from torch import nn

from bbalpha.networks import mlp
from bbalpha.objectives import CrossEntropy
from bbalpha.training.candidates import Search, Tuning
from bbalpha.training.fitting import epoch_bar
from bbalpha.training.heldout import kind_of

X = torch.randn(120, 3)
Y = (X[:, 0] * X[:, 1] > 0).long()


def search(net, *, rates=(0.3,), epochs=3, train=True):
    data = (X[60:], Y[60:]) if train else None
    found = Search(net, (X[:60], Y[:60]), kind_of(CrossEntropy()), rates, 8, Tuning(data, epochs, 0.01, 16), 5)
    found.run(epoch_bar(False, 1))
    return found


class Bar:
    """Counts what it is told."""

    def __init__(self):
        self.done = 0

    def update(self, n=1):
        self.done += n

    def set_postfix(self, told, refresh):
        assert set(told) == {"plain", "best"}


def test_what_is_made_again_is_what_was_scored():
    found = search(mlp([3, 16, 16, 16, 2], dropout=0.0), rates=(0.3,))
    for candidate in found.tried:
        if candidate.at_hand:
            net = candidate.place.run(candidate.made(found.model))
            x = found._shortened(candidate.place)[1] if candidate.place.alone else found.held.x
            again = found._score(net, x)
            assert again.nll == pytest.approx(candidate.found.nll, rel=1e-6)
            assert torch.allclose(again.rows, candidate.found.rows, atol=1e-6)


def test_of_every_fine_tuning_the_best_epoch_is_at_hand():
    found = search(mlp([3, 16, 2], dropout=0.0), rates=(0.1, 0.3))
    runs = {}
    for c in found.tried:
        if c.epochs:
            runs.setdefault((c.place.name, c.rate), []).append(c)
    assert len(runs) == 4
    for run in runs.values():
        assert [c.epochs for c in run] == list(range(1, len(run) + 1))
        assert [c for c in run if c.at_hand] == [min(run, key=lambda c: c.found.nll)]


def test_the_bar_is_full_whatever_is_left_out(monkeypatch):
    for limit in ("_MORE_EPOCHS", "_MORE_RATES"):
        monkeypatch.setattr(f"bbalpha.training.candidates.{limit}", 1)
    bar = Bar()
    net = mlp([3, 16, 2], dropout=0.0)
    tuning = Tuning((X[60:], Y[60:]), 4, 0.3, 32)
    found = Search(net, (X[:60], Y[:60]), kind_of(CrossEntropy()), (0.3, 0.9, 0.95), 8, tuning, 5)
    assert found.most == 2 * 3 * (1 + 4)
    found.run(bar)
    assert len(found.tried) < found.most == bar.done


def test_the_plain_network_is_the_better_of_as_given_and_calibrated():
    found = search(mlp([3, 16, 2], dropout=0.0), train=False)
    given, calibrated = found.plains
    assert given.number == 1
    assert calibrated.nll <= given.nll
    assert float(found.plain.rows.mean()) == min(float(p.rows.mean()) for p in found.plains)


def test_a_model_without_anything_to_train_takes_no_training_rows():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.values, self.drop = nn.Embedding(4, 2), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.values(x))

    rows = torch.randint(4, (60,)), Y[:60]
    for train in (None, rows):
        tuning = Tuning(train, 1, 0.01, 16)
        if train is None:
            Search(Table(), rows, kind_of(CrossEntropy()), (0.1,), 8, tuning, 0).run(Bar())
            continue
        with pytest.raises(ValueError, match="`train` needs a linear layer or a convolution to fine-tune"):
            Search(Table(), rows, kind_of(CrossEntropy()), (0.1,), 8, tuning, 0)
