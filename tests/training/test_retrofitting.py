import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bbalpha
from bbalpha.networks import mlp
from bbalpha.objectives import CrossEntropy, GaussianNLL
from bbalpha.training.retrofitting import RATES, retrofit

FEW = {"rates": (0.1,), "n_passes": 10, "epochs": 2, "seed": 0}


def truth(seed, out=3):
    """A network, and rows that it has made: no other one can be likelier in the long run."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, out)).requires_grad_(False)
    net[2].weight *= 4
    x = torch.randn(100, 3)
    if out == 1:
        return net, (x, net(x) + 0.3 * torch.randn(100, 1))
    return net, (x, torch.distributions.Categorical(logits=net(x)).sample())


@pytest.fixture(scope="module")
def overfitted():
    """A network that knows forty noisy rows by heart, those rows, and two hundred others twice."""
    torch.manual_seed(0)

    def rows(n):
        x = torch.randn(n, 4)
        return x, x[:, :1].sin() + x[:, 1:2] * x[:, 2:3] + 0.3 * torch.randn(n, 1)

    net, train = mlp([4, 64, 64, 1], dropout=0.0), rows(40)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(300):
        optimizer.zero_grad()
        F.mse_loss(net(train[0]), train[1]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return net, train, rows(200), rows(1000)


def nll(p, y):
    return -float(p.log_prob(y).mean())


def same_state(a, b):
    return all(torch.equal(v, w) for v, w in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# ------------------------------------------------------------------------------ what is kept


@pytest.mark.parametrize(("out", "objective"), [(3, CrossEntropy()), (1, GaussianNLL())])
def test_a_network_that_dropout_cannot_help_is_kept_plain_almost_always(out, objective):
    found = [retrofit(*truth(seed, out), objective=objective, **FEW) for seed in range(6)]
    assert sum(f.kept_plain for f in found) >= 5
    for f in found:
        if f.kept_plain:
            assert (f.sites, f.dropout, f.fine_tuned, f.n_passes) == ("none", None, 0, None)


@pytest.mark.slow
def test_a_network_that_dropout_cannot_help_is_kept_plain_in_39_of_40_cases():
    found = [retrofit(*truth(seed), objective=CrossEntropy(), n_passes=20, seed=seed) for seed in range(80)]
    assert sum(f.kept_plain for f in found) >= 75


def test_a_network_that_dropout_helps_gets_it_and_test_rows_are_likelier(overfitted):
    net, _, held, (x, y) = overfitted
    found = retrofit(net, held, objective=GaussianNLL(), seed=0)
    assert not found.kept_plain
    assert found.dropout in RATES
    assert found.gain > 2 * found.gain_error
    plain = bbalpha.predict_regression(net, x, n_passes=None, precision=found.scores[0].calibration)
    gained = nll(plain, y) - nll(found.predict_regression(x, seed=1), y)
    assert gained > 0
    assert abs(gained - found.gain) < 4 * found.gain_error  # as it was told
    assert same_state(found.model, net)  # weights as they were, and names too


@pytest.mark.parametrize("tuned", [False, True])
def test_held_out_rows_are_never_less_likely_than_with_the_plain_network(overfitted, tuned):
    net, train, (x, y), _ = overfitted
    objective = GaussianNLL()
    found = retrofit(net, (x, y), objective=objective, train=train if tuned else None, **FEW)
    p = bbalpha.predict_regression(net, x, n_passes=None, precision=found.scores[0].calibration)
    assert nll(found.predict_regression(x, seed=0), y) <= nll(p, y)
    plain, *others = found.scores
    assert plain.gain == 0
    assert not found.kept_plain
    best = min(others, key=lambda s: s.nll)
    assert best.nll < plain.nll
    assert best.gain == pytest.approx(plain.nll - best.nll)


def test_an_overconfident_classifier_is_compared_with_its_temperature():
    net, (x, y) = truth(0)
    net[2].weight *= 5
    net[2].bias *= 5
    found = retrofit(net, (x, y), objective=CrossEntropy(), **FEW)
    given, calibrated = found.scores[:2]
    assert given.calibration == 1 < calibrated.calibration
    assert given.gain < 0 == calibrated.gain  # what candidates have to beat
    assert found.kept_plain
    assert 2.5 < found.calibration < 10
    p = found.predict_classification(x)
    assert nll(p, y) < nll(bbalpha.predict_classification(net, x, n_passes=None), y)
    assert not p.mutual_information.any()


def test_what_is_kept_can_be_built_again_from_its_state_and_the_names_of_its_layers(overfitted):
    net, train, held, (x, _) = overfitted
    found = retrofit(net, held, objective=GaussianNLL(), train=train, **FEW)
    again = mlp([4, 64, 64, 1], dropout=0.0)
    bbalpha.add_dropout(again, found.dropout, before=lambda name, _: name in found.layers)
    again.load_state_dict(found.model.state_dict())
    a, b = (bbalpha.sample(m, x, n_passes=5, seed=0) for m in (found.model, again))
    assert torch.equal(a, b)


# ------------------------------------------------------------------------------ fine-tuning


def test_fine_tuning_trains_the_last_layers_only_and_moves_no_statistics(overfitted):
    _, _, held, train = overfitted
    net = nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(),
        nn.Linear(16, 1),
    )  # fmt: skip
    found = retrofit(net, held, objective=GaussianNLL(), train=train, learning_rate=0.03, **(FEW | {"epochs": 5}))
    assert found.fine_tuned
    moved = {n for n, p in found.model.state_dict().items() if not torch.equal(p, net.state_dict()[n])}
    assert moved
    assert moved <= {f"{i}.{part}" for i in (3, 5, 7) for part in ("weight", "bias")}
    assert all(p.requires_grad for p in found.model.parameters())


def test_every_epoch_is_a_candidate(overfitted):
    net, train, held, _ = overfitted
    found = retrofit(net, held, objective=GaussianNLL(), train=train, **FEW)
    tried = {(s.sites, s.dropout, s.epochs) for s in found.scores}
    assert len(tried) == len(found.scores) == 1 + 2 * (1 + 2)
    kept = (found.sites, found.dropout, found.fine_tuned)
    score = next(s for s in found.scores if (s.sites, s.dropout, s.epochs) == kept)
    assert score.calibration == found.calibration


def test_the_last_layer_alone_gives_what_the_whole_network_does(overfitted, monkeypatch):
    net, train, held, _ = overfitted
    options = {"objective": GaussianNLL(), "train": train} | FEW
    short = retrofit(net, held, **options)
    monkeypatch.setattr("bbalpha.training.candidates.features", lambda model, layer, x: torch.zeros(len(held[0]), 64))
    long = retrofit(net, held, **options)  # features that do not give the answers of the network are not used
    for a, b in zip(short.scores, long.scores, strict=True):
        assert (a.sites, a.dropout, a.epochs) == (b.sites, b.dropout, b.epochs)
        assert a.nll == pytest.approx(b.nll, abs=0.03)  # masks differ


# ------------------------------------------------------------------------------ models and data as they come


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.log_precision = nn.Linear(3, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        h = self.body(x).relu()
        return self.mean(h), self.log_precision(h)


def test_predicted_noise_has_a_factor_of_its_own():
    net = Noise()
    x = torch.randn(100, 3)
    y = net(x)[0].detach() + 3 * torch.randn(100, 1)
    found = retrofit(net, (x, y), objective=GaussianNLL(precision="predicted"), train=(x + 0.1, y), **FEW)
    assert found.scores[0].calibration == 1
    assert found.scores[1].calibration < 0.5  # errors are larger than was predicted
    p = found.predict_regression(x, seed=0)
    assert p.precision.shape == p.outputs.shape
    assert nll(p, y) < found.scores[0].nll


@pytest.mark.parametrize("rate", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_a_classifier_of_transformers(rate):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
    net = BertForSequenceClassification(BertConfig(**sizes, **dropout, vocab_size=30, num_labels=3))
    data = {"input_ids": torch.randint(3, 30, (48, 7)), "labels": torch.randint(3, (48,))}
    train = Items(data) if rate else None
    found = retrofit(net, data, objective=CrossEntropy(), train=train, **FEW)
    assert found.predict_classification({"input_ids": data["input_ids"]}, seed=0).probs.shape == (48, 3)
    added = [("the last linear layer", 0.1), ("the last 3 linear layers", 0.1), ("all 8 linear layers", 0.1)]
    own = [("its own dropout", r) for r in (None, 0.1)]
    assert {(s.sites, s.dropout) for s in found.scores[2:]} == set(own if rate else added)


class Items(torch.utils.data.Dataset):
    """Items as mappings."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data["labels"])

    def __getitem__(self, i):
        return {name: value[i] for name, value in self.data.items()}


def test_rates_of_its_own_dropout_are_tried_and_set(overfitted):
    net, _, held, _ = overfitted
    rate = 0.2
    own = mlp([4, 64, 64, 1], dropout=rate)
    own.load_state_dict(dict(zip(own.state_dict(), net.state_dict().values(), strict=True)))
    found = retrofit(own, held, objective=GaussianNLL(), n_passes=20, seed=0)
    assert {s.sites for s in found.scores[1:]} == {"its own dropout"}
    assert [s.dropout for s in found.scores[1:5]] == [None, 0.01, 0.02, 0.05]  # its own do not end the climb
    assert not found.kept_plain
    assert {m.p for m in found.model.modules() if isinstance(m, nn.Dropout)} == {found.dropout or rate}
    assert {m.p for m in own.modules() if isinstance(m, nn.Dropout)} == {rate}
    assert "its own dropout" in found.summary()


def test_data_of_any_kind_give_the_same_plain_network():
    net, (x, y) = truth(1)
    kinds = [(x, y), (x.numpy(), y.numpy()), TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=9)]
    scores = [retrofit(net, data, objective=CrossEntropy(), **FEW).scores[0] for data in kinds]
    assert all(s.nll == pytest.approx(scores[0].nll, rel=1e-5) for s in scores)
    assert scores[0].nll == pytest.approx(F.cross_entropy(net(x), y).item(), rel=1e-5)


def test_weights_of_rows_count():
    net, (x, y) = truth(1)
    weight = torch.cat((torch.ones(50), torch.zeros(50)))
    half, weighted = (
        retrofit(net, data, objective=CrossEntropy(), **FEW).scores[0] for data in ((x[:50], y[:50]), (x, y, weight))
    )
    assert half.nll == pytest.approx(weighted.nll)


def test_a_single_logit_can_be_fine_tuned():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(80, 3)
    y = (x[:, 0] > 0).long()
    found = retrofit(net, (x[:40], y[:40]), objective=CrossEntropy(), train=(x[40:], y[40:]), **FEW)
    assert found.predict_classification(x, seed=0).probs.shape == (80, 2)


# ------------------------------------------------------------------------------ what stays as it was


def test_the_callers_model_objective_flags_and_generators_are_left_alone(overfitted):
    net, train, held, _ = overfitted
    net = copy.deepcopy(net)
    net.insert(2, nn.BatchNorm1d(64))
    net[0].eval()
    objective = GaussianNLL()
    before = copy.deepcopy(net), [m.training for m in net.modules()], torch.get_rng_state()
    found = retrofit(net, DataLoader(TensorDataset(*held), shuffle=True), objective=objective, train=train, **FEW)
    assert same_state(net, before[0])
    assert [m.training for m in net.modules()] == before[1]
    assert [m.training for m in found.model.modules() if not isinstance(m, nn.Dropout)] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert objective.precision.item() == 1
    assert not any(m._forward_pre_hooks for m in net.modules())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def test_a_seed_repeats_everything_and_without_one_it_is_drawn(overfitted):
    net, train, held, _ = overfitted
    options = {"objective": GaussianNLL(), "train": train, **FEW}
    loader = DataLoader(TensorDataset(*held), shuffle=True, batch_size=16)
    a, b = (retrofit(net, loader, **options) for _ in range(2))
    assert a.scores == b.scores
    assert same_state(a.model, b.model)
    assert (a.gain, a.gain_error, a.margin) == (b.gain, b.gain_error, b.margin)
    torch.manual_seed(1)
    c, d = (retrofit(net, held, **(options | {"seed": None, "train": None})) for _ in range(2))
    torch.manual_seed(1)
    e = retrofit(net, held, **(options | {"seed": None, "train": None}))
    assert c.scores == e.scores != d.scores


# ------------------------------------------------------------------------------ what is told


def test_the_summary_tells_what_was_kept_and_what_was_tried(overfitted, capsys):
    net, train, held, _ = overfitted
    found = retrofit(net, held, objective=GaussianNLL(), train=train, progress=True, **FEW)
    lines = found.summary().splitlines()
    assert f"dropout {found.dropout:g} before {found.sites}" in lines[0]
    assert f"{found.gain:+.4f} ± {found.gain_error:.4f} nats a row" in lines[1]
    assert len(lines) == 5 + 1 + 2 * 2  # of a fine-tuning its best epoch alone
    assert "candidate 6/6" in capsys.readouterr().err
    plain = retrofit(*truth(0), objective=CrossEntropy(), **FEW).summary()
    assert plain.startswith("Kept: the plain network and a temperature of")


def test_the_scores_are_a_table(overfitted):
    pandas = pytest.importorskip("pandas")
    net, _, held, _ = overfitted
    table = pandas.DataFrame(retrofit(net, held, objective=GaussianNLL(), **FEW).scores)
    assert {"sites", "dropout", "epochs", "calibration", "nll", "error", "gain", "gain_error"} == set(table.columns)
    assert len(table) == 3


def test_rates_that_do_not_help_any_more_are_left_out(overfitted):
    net, _, held, _ = overfitted
    found = retrofit(net, held, objective=GaussianNLL(), rates=(0.02, 0.5, 0.6, 0.7, 0.8), n_passes=10, seed=0)
    of_all = [s.dropout for s in found.scores if s.sites == "all 3 linear layers"]
    assert of_all == [0.02, 0.5, 0.6]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rates": (0.1, 1.0)}, ValueError, "`rates` must lie between 0 and 1"),
        ({"rates": ()}, ValueError, "`rates` must hold at least one"),
        ({"n_passes": 1}, ValueError, "`n_passes` must be a whole number of at least 2"),
        ({"epochs": 0}, ValueError, "`epochs` must be a whole number of at least 1"),
        ({"learning_rate": 0}, ValueError, "`learning_rate` must be a finite number above 0"),
        ({"objective": F.cross_entropy}, TypeError, "`objective` must be CrossEntropy"),
        ({"model": nn.ReLU()}, ValueError, "`model` must have parameters; ReLU has none"),
        ({"model": len}, TypeError, "`model` must be a torch.nn.Module"),
        ({"held_out": None}, TypeError, "`held_out` must be"),
    ],
)
def test_wrong_arguments_are_refused(change, error, message):
    net, held = truth(0)
    given = {"model": net, "held_out": held, "objective": CrossEntropy()} | change
    with pytest.raises(error, match=message):
        retrofit(given.pop("model"), given.pop("held_out"), **given)


def test_rows_that_were_trained_on_and_the_wrong_prediction_are_refused():
    net, held = truth(0)
    with pytest.raises(ValueError, match="not trained on; got the rows of `train`"):
        retrofit(net, held, objective=CrossEntropy(), train=held)
    found = retrofit(net, held, objective=CrossEntropy(), **FEW)
    with pytest.raises(TypeError, match="use predict_classification"):
        found.predict_regression(held[0])
    net, held = truth(0, 1)
    with pytest.raises(TypeError, match="use predict_regression"):
        retrofit(net, held, objective=GaussianNLL(), **FEW).predict_classification(held[0])
