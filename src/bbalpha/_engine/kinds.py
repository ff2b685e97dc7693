"""Kinds of layers, as modules and as the functions they call: the one table that the whole library reads.

What is asked of a layer is which unit of its output hangs on which unit of its input (may it run on kept units alone?)
and whether a unit that dropout made 0 is still 0 behind it, so that the weights that come next have its keep
probability. `priors` asks by module, `lineage` by the name of the function that is called; a test sees to it that the
answers agree.
"""

from torch import nn

from bbalpha.layers import ConcreteDropout, Dropout, GaussianDropout

Modules = tuple[type[nn.Module], ...]

# ------------------------------------------------------------------------------ what becomes of a unit that is 0

_KEEP_ZERO: dict[type[nn.Module], tuple[str, ...]] = {  # f(0) = 0, one unit at a time
    nn.Identity: (), nn.ReLU: ("relu", "relu_"), nn.ReLU6: ("relu6",), nn.LeakyReLU: ("leaky_relu", "leaky_relu_"),
    nn.ELU: ("elu", "elu_"), nn.CELU: ("celu", "celu_"), nn.SELU: ("selu", "selu_"), nn.GELU: ("gelu",),
    nn.SiLU: ("silu",), nn.Mish: ("mish",), nn.Tanh: ("tanh", "tanh_"), nn.Softsign: ("softsign",),
    nn.Hardtanh: ("hardtanh", "hardtanh_"), nn.Hardswish: ("hardswish",), nn.Hardshrink: ("hardshrink",),
    nn.Softshrink: ("softshrink",), nn.Tanhshrink: ("tanhshrink",),
}  # fmt: skip
_KEEP_ZERO_WITH_MORE: dict[type[nn.Module], tuple[str, ...]] = {  # the same, with weights or draws of their own
    nn.PReLU: ("prelu",), nn.RReLU: ("rrelu", "rrelu_"),
}  # fmt: skip
_LOSE_ZERO: Modules = (nn.Sigmoid, nn.Softplus, nn.Hardsigmoid, nn.LogSigmoid)  # one unit at a time too

_MAX_POOLS: dict[type[nn.Module], tuple[str, ...]] = {  # of what was kept, the largest
    getattr(nn, f"{how}MaxPool{n}d"): (f"{name}max_pool{n}d",)
    for how, name in (("", ""), ("Adaptive", "adaptive_"))
    for n in (1, 2, 3)
}
_MEAN_POOLS: Modules = (  # of kept and dropped units: no unit is 0 any more
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
_MOVES: dict[type[nn.Module], tuple[str, ...]] = {  # units stand elsewhere, and are what they were
    nn.Flatten: ("flatten",), nn.Unflatten: ("unflatten",), nn.PixelShuffle: ("pixel_shuffle",),
    nn.PixelUnshuffle: ("pixel_unshuffle",), nn.ChannelShuffle: ("channel_shuffle",),
    **{getattr(nn, f"{how}Pad{n}d"): ("pad",) for n in (1, 2, 3)
       for how in ("Zero", "Constant", "Reflection", "Replication", "Circular")},
}  # fmt: skip

_TABLES = (_KEEP_ZERO, _KEEP_ZERO_WITH_MORE, _MAX_POOLS, _MOVES)
ZERO_STAYS: Modules = tuple(module for table in _TABLES for module in table)
ZERO_STAYS_BY_NAME = frozenset(name for table in _TABLES for names in table.values() for name in names) | {
    "view", "view_as", "reshape", "transpose", "permute", "contiguous", "squeeze", "unsqueeze", "clone", "detach", "to",
    "type_as", "float", "half", "bfloat16", "double", "t", "movedim", "swapaxes", "expand", "repeat",
    "repeat_interleave", "chunk", "split", "unbind", "__getitem__", "__get__", "neg", "__neg__", "div", "div_",
    "__truediv__",
}  # fmt: skip
ZERO_GOES: Modules = (*_LOSE_ZERO, *_MEAN_POOLS)

# ------------------------------------------------------------------------------ which unit hangs on which

ELEMENTWISE: Modules = (*_KEEP_ZERO, *_LOSE_ZERO)  # one unit at a time: may run on the kept units alone
CHANNELWISE: Modules = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, *_MEAN_POOLS)  # one channel at a time

CONVOLUTIONS: Modules = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ANY_CONVOLUTION: Modules = (*CONVOLUTIONS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
ROWWISE: Modules = (*ELEMENTWISE, *CHANNELWISE, *CONVOLUTIONS, nn.Linear, nn.Flatten, nn.LayerNorm, nn.GroupNorm)

# where units meet weights, or each other
WEIGHTS: Modules = (nn.Linear, nn.Bilinear, *ANY_CONVOLUTION)
WEIGHTS_BY_NAME = frozenset(
    ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "matmul",
     "__matmul__", "__rmatmul__", "mm", "addmm", "bmm", "baddbmm", "bilinear")
)  # fmt: skip
RECURRENT_BY_NAME = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
PRODUCTS_BY_NAME = frozenset(("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"))
JOINS_BY_NAME = frozenset(("cat", "stack", "concat", "hstack", "vstack"))

# ------------------------------------------------------------------------------ what draws, and what normalises

UNIT_DROPOUT: Modules = (nn.Dropout, Dropout)
CHANNEL_DROPOUT: Modules = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUT: Modules = (*UNIT_DROPOUT, *CHANNEL_DROPOUT, nn.AlphaDropout, nn.FeatureAlphaDropout)
DROPOUT_BY_NAME = frozenset(
    f"{name}{end}"
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for end in ("", "_")
)
NOISE: Modules = (*DROPOUT, GaussianDropout, ConcreteDropout)
RANDOM: Modules = (  # torch's own whose randomness, or whose way around it (the fast path), hangs on `training`
    *DROPOUT, nn.RReLU, nn.RNNBase, nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer,
)  # fmt: skip

BATCH_NORMS: Modules = (  # whose statistics are those of the rows, and move
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d, nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d,
)  # fmt: skip
NORMS: Modules = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a normalisation layer: no prior on its parameters, never switched on."""
    return isinstance(module, NORMS) or "norm" in type(module).__name__.lower()
