"""The zoo: models as people write them, each with an input and the strategy that "auto" must settle on."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    auto: str  # the strategy recorded for evaluation mode
    batch_dim: int = 0
    options: dict[str, Any] = field(default_factory=dict)


CASES: list[Case] = []


def case(auto: str, *, batch_dim: int = 0) -> Callable[[Callable[[], tuple[nn.Module, Any]]], Any]:
    def add(make: Callable[[], tuple[nn.Module, Any]]) -> Any:
        CASES.append(Case(make.__name__, make, auto, batch_dim))
        return make

    return add


# ------------------------------------------------------------------------------ small modules people write


class Functional(nn.Module):
    """F.dropout with self.training."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.a, self.b, self.p = nn.Linear(4, 8), nn.Linear(8, 3), p

    def forward(self, x):
        return self.b(F.dropout(torch.tanh(self.a(x)), self.p, self.training))


class AlwaysOn(Functional):
    def forward(self, x):
        return self.b(F.dropout(torch.tanh(self.a(x)), self.p))


class DropPath(nn.Module):
    """Stochastic depth in timm's manner: whole branches are dropped, row by row."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x):
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask.div_(keep)


class Residual(nn.Module):
    def __init__(self, branch: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.branch, self.drop = branch, drop

    def forward(self, x):
        return x + self.drop(self.branch(x))


class Attention(nn.Module):
    """Fused attention whose dropout is a number."""

    def __init__(self, heads: int = 2, p: float = 0.3) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.p = nn.Linear(8, 24), nn.Linear(8, 3), heads, p

    def forward(self, x):  # (N, T, 8)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), self.drop)
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), self.drop, nn.Linear(8, 3))

    def forward(self, x):
        return self.second(self.first(x))


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 5, num_layers=3, dropout=0.3, **options)
        self.head = nn.LazyLinear(3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Tower(nn.Module):
    """Several inputs, one of them without rows; several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop, self.head = nn.Linear(4, 8), nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, left, right, scale):
        hidden = self.drop(torch.tanh(self.a(left) + self.b(right)) * scale)
        return {"logits": self.head(hidden), "hidden": (hidden, "tanh")}


class Drawing(nn.Module):
    """Noise from torch.randn_like and torch.bernoulli, only while training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if self.training:
            h = h + 0.1 * torch.randn_like(h)
            h = h * torch.bernoulli(torch.full_like(h, 0.8)) / 0.8
        return self.b(h)


class DropConnect(nn.Module):
    """Dropout of the weights: one draw for all rows of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.tanh(F.linear(x, F.dropout(self.a.weight, 0.3, self.training), self.a.bias)))


class Gamma(nn.Module):
    """Noise from a distribution that draws where no Python function of torch can be overridden."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if self.training:
            h = h * torch.distributions.Gamma(torch.full_like(h, 10.0), 10.0).sample()
        return self.b(h)


# ------------------------------------------------------------------------------ the cases


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@case("chain")
def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)), rows(5, 4)


@case("chain")
def dropout_on_the_input():
    return nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)), rows(5, 4)


@case("vmap")
def functional_dropout():
    return Functional(), rows(5, 4)


@case("vmap")
def functional_dropout_always_on():
    return AlwaysOn(), rows(5, 4)


@case("vmap")
def fused_attention():
    return Attention(), rows(3, 6, 8)


@case("repeat")
def lstm_batch_first():
    return _built(Tagger(nn.LSTM, batch_first=True), rows(4, 6, 4))


@case("repeat", batch_dim=1)
def lstm_time_first():
    return _built(Tagger(nn.LSTM, bidirectional=True), rows(6, 4, 4))


@case("repeat")
def gru_batch_first():
    return _built(Tagger(nn.GRU, batch_first=True, bidirectional=True), rows(4, 6, 4))


@case("repeat", batch_dim=1)
def rnn_time_first():
    return _built(Tagger(nn.RNN), rows(6, 4, 4))


@case("repeat")
def multihead_attention():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            y, weights = self.attention(x, x, x)
            return self.head(y), weights

    return Net(), rows(3, 6, 8)


@case("repeat")
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), rows(3, 6, 8)


@case("repeat", batch_dim=1)
def transformer_encoder_time_first():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), rows(4, 4, 8)  # as long as it is wide


@case("repeat")
def transformer():
    return nn.Transformer(8, 2, 1, 1, 16, dropout=0.2, batch_first=True), (rows(3, 6, 8), rows(3, 4, 8))


@case("chain")
def dropout_1d():
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.Dropout1d(0.3), nn.Flatten(), nn.Linear(16, 3)), rows(5, 2, 6)


@case("chain")
def dropout_2d():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(4, 3, 1)), rows(4, 2, 5, 5)


@case("chain")
def dropout_3d():
    return nn.Sequential(nn.Conv3d(1, 4, 2), nn.Dropout3d(0.3), nn.Conv3d(4, 2, 2)), rows(4, 1, 3, 3, 3)


@case("vmap")
def alpha_dropout():
    return nn.Sequential(nn.Linear(4, 8), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(8, 3)), rows(5, 4)


@case("vmap")
def feature_alpha_dropout():
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.SELU(), nn.FeatureAlphaDropout(0.2), nn.Conv1d(4, 3, 1)), rows(5, 2, 6)


@case("vmap")
def rrelu():
    return nn.Sequential(nn.Linear(4, 8), nn.RReLU(), nn.Linear(8, 3)), rows(5, 4)


@case("vmap")
def drop_path():
    branch = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 8), Residual(branch, DropPath(0.4)), nn.Linear(8, 3)), rows(5, 4)


@case("vmap")
def one_dropout_under_two_names():
    return TwoNames(), rows(5, 4)


@case("repeat")
def bare_dropout():
    return nn.Dropout(0.3), rows(5, 4)


@case("chain")
def in_place_behind_a_shared_prefix():
    layers = nn.Linear(4, 8), nn.Dropout(0.3, inplace=True), nn.ReLU(inplace=True), nn.Linear(8, 3)
    return nn.Sequential(*layers), rows(5, 4)


@case("repeat")
def in_place_on_the_input():
    return nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Dropout(0.3, inplace=True), nn.Linear(4, 3)), rows(5, 4)


@case("vmap")
def batch_norm():
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    return nn.Sequential(*layers), rows(6, 4)


@case("vmap")
def batch_norm_batch_of_one():
    return batch_norm()[0], rows(1, 4)


@case("vmap")
def instance_norm():
    norm = nn.InstanceNorm2d(4, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.3), norm, nn.Conv2d(4, 3, 1)), rows(4, 2, 5, 5)


@case("vmap")
def weight_norm():
    layers = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    return nn.Sequential(*layers), rows(5, 4)


@case("vmap")
def spectral_norm():
    wrap = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(wrap(nn.Linear(4, 8)), nn.Tanh(), nn.Dropout(0.3), wrap(nn.Linear(8, 3))), rows(5, 4)


@case("vmap")
def spectral_norm_of_old():
    wrap = nn.utils.spectral_norm
    return nn.Sequential(wrap(nn.Linear(4, 8)), nn.Tanh(), nn.Dropout(0.3), wrap(nn.Linear(8, 3))), rows(5, 4)


@case("vmap")
def several_inputs_in_a_tuple():
    return Tower(), (rows(5, 4), rows(5, 2), torch.rand(8))


@case("vmap")
def several_inputs_in_a_mapping():
    return Tower(), {"left": rows(5, 4), "right": rows(5, 2), "scale": 0.7}


@case("vmap")
def random_numbers_of_its_own():
    return Drawing(), rows(5, 4)


@case("vmap")
def dropped_weights():
    return DropConnect(), rows(5, 4)


@case("loop")
def hidden_random_operators():
    return Gamma(), rows(5, 4)


@case("loop")
def traced_by_jit():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch would rather have us compile
        return torch.jit.trace(mlp()[0].train(), rows(5, 4), check_trace=False), rows(5, 4)


@case("loop")
def scripted_by_jit():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(batch_norm()[0]), rows(6, 4)


@case("vmap")
def compiled():
    return torch.compile(Functional(), backend="eager"), rows(5, 4)


@case("vmap")
def compiled_in_place():
    net = Functional()
    net.compile(backend="eager")
    return net, rows(5, 4)


@case("vmap")
def half_precision():
    return Functional().to(torch.bfloat16), rows(5, 4).to(torch.bfloat16)


@case("vmap")
def double_precision():
    return Functional().double(), rows(5, 4).double()


# ------------------------------------------------------------------------------ transformers, from small configs


def tokens(n: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 30, (n, length))


SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30}


@case("repeat")
def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**SMALL, max_position_embeddings=16, num_labels=3)
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    return BertForSequenceClassification(config), {"input_ids": tokens(), "attention_mask": mask}


@case("vmap")
def bert_attention_dropout_only():
    from transformers import BertConfig, BertForTokenClassification

    config = BertConfig(
        **SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5, classifier_dropout=0.0, num_labels=3
    )
    return BertForTokenClassification(config), {"input_ids": tokens()}


@case("repeat")
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=30, n_positions=16, n_embd=8, n_layer=2, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), {"input_ids": tokens()}


@case("vmap")
def vit():
    from transformers import ViTConfig, ViTForImageClassification

    options = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    config = ViTConfig(
        **options, image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2
    )
    return ViTForImageClassification(config), rows(3, 3, 8, 8)


@case("repeat")
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=30, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, use_cache=False, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), {"input_ids": tokens(), "decoder_input_ids": tokens(length=5)}


@case("vmap")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.3, use_cache=False)), {"input_ids": tokens()}


@case("loop")
def bart_with_layer_drop():
    from transformers import BartConfig, BartForSequenceClassification

    config = BartConfig(
        vocab_size=30, d_model=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16, use_cache=False,
        encoder_layerdrop=0.3, num_labels=3, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    ids = tokens()
    ids[:, -1] = 2
    return BartForSequenceClassification(config), {"input_ids": ids}


def _built(model: nn.Module, x: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """With its lazy layers made."""
    with torch.no_grad():
        model(x)
    return model, x
