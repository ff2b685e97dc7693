"""audit and add_dropout: what they report is what happens, and what they change can be undone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bbalpha
import zoo
from bbalpha.convert import add_dropout, audit, remove_dropout
from bbalpha.layers import DropConnect, DropConnectConv1d, DropConnectLSTM
from bbalpha.priors import keep_probabilities


def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def images(n=5):
    return torch.randn(n, 1, 4, 4)


# ------------------------------------------------------------------------------ audit


@pytest.mark.parametrize("case", zoo.CASES, ids=lambda c: c.name)
def test_audit_of_the_zoo(case):
    model, x = case.make()
    model.eval()
    buffers = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    found = audit(model, x, batch_dim=case.batch_dim)
    assert found.differed
    assert found.strategy == case.auto
    assert found.silent == {}
    assert found.hidden or any(s.fired for s in found.sites)
    assert str(found).count("\n") >= 4
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m.training for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    names = dict(model.named_parameters())
    assert all(name in names and 0 < p < 1 for name, p in found.keep.items())


def test_audit_tells_rates_counts_and_what_comes_first():
    found = audit(zoo.one_dropout_under_two_names()[0].eval(), zoo.rows(5, 4))
    assert [(s.name, s.kind, s.rate, s.fired) for s in found.sites] == [("drop", "dropout", 0.3, True)]
    assert found.calls == (2,)
    assert found.prefix == ("first.0",)
    assert "dropout x 2" in str(found)


def test_audit_moves_no_statistics_in_training_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    found = audit(model, zoo.rows(5, 4))
    assert model[2].num_batches_tracked == 0
    assert found.strategy == "loop"
    assert any("training mode" in w for w in found.warnings)
    assert any("batch statistics" in r for r in found.reasons)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.spare, self.head = nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.drop(x))


class NoEffect(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x):
        self.drop(x)
        return self.head(x)


class Zeros(zoo.Functional):
    def forward(self, x):
        return 0 * super().forward(x)


class Recomputed(zoo.Functional):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("model", "warning"),
    [
        (zoo.AlwaysOn(), "draws in evaluation mode too"),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0), nn.Dropout(0.5)), "1 (dropout, rate 0) has rate 0"),
        (nn.Sequential(nn.Dropout(0.5), nn.Dropout(1.0), nn.Linear(4, 3)), "1 (dropout, rate 1) has rate 1"),
        (torch.compile(zoo.Functional(), backend="eager"), "is compiled"),
        (zoo.traced_by_jit()[0], "the model is traced or scripted"),
        (zoo.Gamma(), "draws from a global generator"),
        (Unused(), "spare (Dropout, rate 0.5) was not called"),
        (NoEffect(), "without effect on the output"),
        (Zeros(), "gave the same"),
        (Recomputed(), "recomputed"),
        (nn.Linear(4, 3), "add_dropout"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_warnings(model, warning):
    found = audit(model.eval(), zoo.rows(5, 4))
    assert sum(warning in w for w in found.warnings) == 1
    assert f"warning         {found.warnings[0]}" in str(found)


def test_a_quiet_model_is_reported_not_raised():
    found = audit(nn.Linear(4, 3), zoo.rows(5, 4))
    assert not found.differed
    assert found.strategy is None
    assert found.sites == ()


def test_audit_refuses_what_is_no_model():
    with pytest.raises(TypeError, match=r"nn\.Module"):
        audit(lambda x: x, torch.zeros(1))


# ------------------------------------------------------------------------------ keep


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Dropout(0.1), nn.Flatten(), nn.Linear(16, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 3)),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.2), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Conv2d(4, 3, 1)),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5, inplace=True), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(16, 3)),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.LayerNorm(16), nn.Linear(16, 3)),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(16, 3)),
        nn.Sequential(nn.Flatten(), bbalpha.GaussianDropout(0.25), nn.Linear(16, 4), bbalpha.DropConnectLinear(4, 2)),
        nn.Sequential(nn.Flatten(), bbalpha.Dropout(0.25), nn.Sequential(nn.Linear(16, 4)), nn.Linear(4, 2)),
    ],
)
def test_keep_agrees_with_what_the_structure_tells(model):
    keep = audit(model, images()).keep
    assert keep == keep_probabilities(model)
    kl = bbalpha.prior_kl(model, length_scale=1.0, n_data=10, keep=keep)
    torch.testing.assert_close(kl, bbalpha.prior_kl(model, length_scale=1.0, n_data=10))


def test_keep_is_found_where_the_structure_tells_nothing():
    assert audit(zoo.Functional(0.3), zoo.rows(5, 4)).keep == {"b.weight": 0.7}
    lstm = nn.LSTM(4, 5, num_layers=3, dropout=0.4, bidirectional=True)
    keep = audit(nn.Sequential(nn.Dropout(0.5), lstm), zoo.rows(5, 2, 4)).keep
    assert keep == {
        **{f"1.weight_ih_l0{side}": 0.5 for side in ("", "_reverse")},
        **{f"1.weight_ih_l{k}{side}": 0.6 for k in (1, 2) for side in ("", "_reverse")},
    }

    class Tied(nn.Module):
        """A weight used by hand, transposed, behind a mask of one's own and a concatenation."""

        def __init__(self):
            super().__init__()
            self.weight, self.other = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            mask = x.new_empty(x.shape).bernoulli_(0.75)
            h = torch.cat([x * mask / 0.75] * 2, -1).relu() @ self.weight.T
            return torch.cat([h, F.dropout(h)], -1) @ self.other

    assert audit(Tied(), zoo.rows(5, 4)).keep == {"weight": 0.75}


def test_an_addition_ends_the_lineage_of_zeros():
    class Net(zoo.Functional):
        def forward(self, x):
            h = F.dropout(self.a(x), 0.5, self.training)
            h += 1
            return self.b(h)

    assert audit(Net(), zoo.rows(5, 4)).keep == {}


# ------------------------------------------------------------------------------ add_dropout


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("linear", ["3", "5"]),
        ("all", ["0", "3", "5"]),
        (lambda module: isinstance(module, nn.Conv2d), ["0"]),
        (lambda name, module: name == "5" and isinstance(module, nn.Linear), ["5"]),
    ],
)
def test_dropout_is_added_where_it_was_asked_for(before, expected):
    model = net()
    names, parameters = list(model.state_dict()), list(model.parameters())
    x = images()
    plain = model(x)
    assert add_dropout(model, 0.25, before=before) is model
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    found = audit(model.eval(), x)
    assert [s.name for s in found.sites] == [f"{name}.inserted_dropout" for name in expected]
    assert found.differed
    assert found.keep == {f"{name}.weight": 0.75 for name in expected}
    torch.testing.assert_close(model(x), plain)
    loop = bbalpha.sample(model, x, 4, seed=0, strategy="loop")
    torch.testing.assert_close(bbalpha.sample(model, x, 4, seed=0), loop)
    remove_dropout(model)
    assert str(model) == str(net())
    torch.testing.assert_close(model.train()(x), plain)
    with pytest.raises(ValueError, match="add_dropout"):
        bbalpha.sample(model, x, 4)


def test_added_dropout_is_that_of_a_net_written_with_it():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), zoo.rows(5, 4)
    written = nn.Sequential(nn.Dropout(0.1), model[0], model[1], nn.Dropout(0.1), model[2])
    expected = bbalpha.sample(written, x, 6, seed=0)
    torch.testing.assert_close(bbalpha.sample(add_dropout(model, 0.1), x, 6, seed=0), expected)


def test_a_copy_and_a_loaded_state_keep_their_dropout():
    model = add_dropout(net(), 0.5)
    twin = copy.deepcopy(model)
    other = add_dropout(net(), 0.5)
    other.load_state_dict(model.state_dict())
    x = images()
    expected = bbalpha.sample(model, x, 3, seed=0)
    torch.testing.assert_close(bbalpha.sample(twin, x, 3, seed=0), expected)
    torch.testing.assert_close(bbalpha.sample(other, x, 3, seed=0), expected)
    remove_dropout(twin)
    assert audit(model, x).differed


@pytest.mark.parametrize("layer", [bbalpha.Dropout, nn.Dropout, bbalpha.GaussianDropout, bbalpha.ConcreteDropout])
def test_any_dropout_may_be_added(layer):
    model = add_dropout(net(), 0.25, layer=layer)
    assert isinstance(model[3].inserted_dropout, layer)
    keep = audit(model, images()).keep
    assert keep["3.weight"] == pytest.approx(0.75)
    assert keep == keep_probabilities(model)
    kl = bbalpha.prior_kl(model, length_scale=1.0, n_data=10)
    torch.testing.assert_close(kl, bbalpha.prior_kl(model, length_scale=1.0, n_data=10, keep=keep))
    bbalpha.sample(model, images(), 3).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("layer", [bbalpha.DropConnectLinear, bbalpha.GaussianLinear])
def test_linear_layers_become_stochastic_ones_and_back(layer):
    model, x = net().eval(), images()
    parameters, names, plain = list(model.parameters()), set(model.state_dict()), model(x)
    add_dropout(model, 0.2, layer=layer)
    assert all(type(model[i]) is layer for i in (3, 5))
    assert names <= set(model.state_dict())
    torch.testing.assert_close(model(x), plain)
    outputs = bbalpha.sample(model, x, 4000, seed=0, masks="shared")
    torch.testing.assert_close(outputs.mean(0), plain, rtol=0.1, atol=0.05)
    remove_dropout(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert type(model[3]) is nn.Linear
    assert str(model) == str(net())


class Mixed(nn.Module):
    """A convolution, a recurrent layer and a linear one."""

    def __init__(self):
        super().__init__()
        self.conv, self.lstm = nn.Conv1d(2, 4, 3), nn.LSTM(4, 5, 2, dropout=0.1, batch_first=True)
        self.gru, self.head = nn.GRU(5, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):  # (N, 2, T)
        h = self.lstm(self.conv(x).transpose(1, 2))[0]
        return self.head(self.gru(h)[0][:, -1])


def test_every_layer_with_weights_becomes_one_that_drops_them_and_back():
    model, x = Mixed().eval(), zoo.rows(4, 2, 7)
    parameters, state, plain = list(model.parameters()), list(model.state_dict()), model(x)
    assert add_dropout(model, 0.2, layer=DropConnect) is model
    names = [type(m).__name__ for m in model.children()]
    assert names == ["DropConnectConv1d", "DropConnectLSTM", "DropConnectGRU", "DropConnectLinear"]
    assert list(model.state_dict()) == state
    torch.testing.assert_close(model(x), plain)
    found = audit(model, x)
    weights = [name for name, p in model.named_parameters() if p.ndim > 1]
    assert {name: found.keep[name] for name in weights} == pytest.approx(
        {name: 0.8 * (0.9 if name == "lstm.weight_ih_l1" else 1.0) for name in weights}
    )
    assert found.keep == pytest.approx(keep_probabilities(model))
    outputs = bbalpha.sample(model, x, 3, seed=0)
    assert not torch.allclose(outputs[0], outputs[1])
    torch.testing.assert_close(bbalpha.sample(copy.deepcopy(model), x, 3, seed=0), outputs)
    with pytest.raises(ValueError, match="already"):
        add_dropout(model, 0.2, layer=DropConnect)
    remove_dropout(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert str(model) == str(Mixed())
    torch.testing.assert_close(model(x), plain)


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"layer": DropConnectConv1d}, ["conv"]),
        ({"layer": DropConnectLSTM}, ["lstm"]),
        ({"layer": bbalpha.DropConnectLinear}, ["head"]),
        ({"layer": DropConnect, "before": "linear"}, ["head"]),
        ({"layer": DropConnect, "before": "all"}, ["conv", "head"]),
        ({"layer": DropConnect, "before": lambda name, _: name == "gru"}, ["gru"]),
    ],
)
def test_weights_are_dropped_where_it_was_asked_for(options, changed):
    model = add_dropout(Mixed(), 0.2, **options)
    assert [name for name, m in model.named_children() if isinstance(m, DropConnect)] == changed


@pytest.mark.parametrize(
    ("layer", "odd"),
    [
        (DropConnect, nn.ConvTranspose1d(2, 2, 3)),
        (DropConnect, nn.RNN(2, 2)),
        (bbalpha.DropConnectLinear, nn.Conv1d(2, 2, 1)),
    ],
)
def test_what_cannot_have_its_weights_dropped_is_refused_and_nothing_is_changed(layer, odd):
    model = nn.ModuleList([nn.Linear(2, 2), odd])
    with pytest.raises(ValueError, match=rf"takes the place of nn.Linear.*1 is a {type(odd).__name__}"):
        add_dropout(model, 0.1, layer=layer, before=lambda m: True)
    assert type(model[0]) is nn.Linear
    with pytest.raises(ValueError, match="layer=DropConnectLSTM picks none"):
        add_dropout(model, 0.1, layer=DropConnectLSTM)


def test_keep_of_weights_dropped_by_hand():
    model, x = zoo.DropConnect(), zoo.rows(5, 4)
    assert audit(model, x).keep == {"a.weight": pytest.approx(0.7)}


def test_gaussian_weights_begin_with_the_spread_of_dropout():
    model, x = nn.Sequential(nn.Linear(16, 3)), zoo.rows(5, 16)
    nn.init.uniform_(model[0].weight, 0.5, 1.0)
    dropped = bbalpha.sample(add_dropout(model, 0.2, layer=bbalpha.DropConnectLinear), x, 4000, seed=0).std(0)
    remove_dropout(model)
    gaussian = bbalpha.sample(add_dropout(model, 0.2, layer=bbalpha.GaussianLinear), x, 4000, seed=0).std(0)
    torch.testing.assert_close(dropped, gaussian, rtol=0.1, atol=0.01)


def test_transformers_get_dropout_too():
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2Config(vocab_size=30, n_positions=16, n_embd=8, n_layer=1, n_head=2, use_cache=False, **off)
    ids = {"input_ids": zoo.tokens()}
    for model in (LlamaForCausalLM(LlamaConfig(**zoo.SMALL, use_cache=False)), GPT2LMHeadModel(gpt2)):
        with pytest.raises(ValueError, match="add_dropout"):
            bbalpha.sample(model, ids, 3)
        found = audit(add_dropout(model, 0.1), ids)
        assert found.differed
        assert not any("inserted_dropout" in w for w in found.warnings)


def test_attention_never_calls_its_output_layer_so_it_gets_none():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    found = audit(add_dropout(layer, 0.2), zoo.rows(3, 6, 8))
    assert [s.name for s in found.sites if s.fired] == ["linear1.inserted_dropout", "linear2.inserted_dropout"]


def test_mistakes():
    for p in (0, 1, -0.1, float("nan"), "0.5", True):
        with pytest.raises(ValueError, match="`p` must be"):
            add_dropout(net(), p)
    with pytest.raises(ValueError, match="`before` must be"):
        add_dropout(net(), 0.1, before="conv")
    with pytest.raises(ValueError, match="picks none"):
        add_dropout(nn.Conv2d(1, 1, 1), 0.1)
    with pytest.raises(ValueError, match="already"):
        add_dropout(add_dropout(net(), 0.1), 0.1)
    with pytest.raises(ValueError, match="takes the place of"):
        add_dropout(net(), 0.1, layer=bbalpha.DropConnectLinear, before="all")
