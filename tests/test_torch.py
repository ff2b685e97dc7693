"""torch's private parts are named in one file, and do what the library needs of them."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import bbalpha
from bbalpha import _torch

SRC = Path(bbalpha.__file__).parent
PRIVATE = re.compile(
    r"torch(\.\w+)*\._[a-zA-Z]"  # torch._C, torch.utils._pytree, torch._foreach_mul
    r"|from torch[\w.]* import [^\n]*\b_[a-zA-Z]"
    r"|torch\.ops\.aten\.\w+_backward"
    r"|super\(torch"
    r"|\bfunc\.__code__|has_torch_function_variadic"
    # what modules, tensors, operators and compiled models keep inside
    r"|\b_(parameters|buffers|(forward|backward)(_pre)?_hooks|forward_hooks_always_called|orig_mod|compiled_call_impl"
    r"|conv_forward|flat_weights(_names)?|schema|step_supports_amp_scaling)\b"
    r"|\._(modules|base|version)\b(?!\()|nn\.Module\(\)\.__dict__"
)


def test_no_other_file_names_a_private_part_of_torch():
    found = [
        f"{path.relative_to(SRC)}:{i}: {line.strip()}"
        for path in sorted(SRC.rglob("*.py"))
        if path.name != "_torch.py"
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._len_torch_function_stack()", "from torch.utils._pytree import tree_map", "torch._foreach_mul(a, b)",
        "from torch.nn.modules.conv import _ConvNd", "torch.ops.aten.threshold_backward", "module._modules.items()",
        "hook = m._forward_pre_hooks", "t._version", "func._schema.name",
    ],
)  # fmt: skip
def test_private_parts_are_known(line):
    assert PRIVATE.search(line)


def test_one_function_with_two_ways_to_apply_it():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(x, factor):
            return x * factor

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.factor = inputs[1]

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.factor, None

    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(_torch.apply_function(Twice, x, 2.0).sum(), x)
    assert grad.tolist() == [2.0] * 3
    assert torch.func.grad(lambda t: _torch.apply_function(Twice, t, 2.0).sum())(x).tolist() == [2.0] * 3


def test_hooks_for_all_modules_are_seen():
    assert not _torch.has_global_hooks()
    for register in ("forward_pre", "forward", "full_backward", "full_backward_pre"):
        handle = getattr(nn.modules.module, f"register_module_{register}_hook")(lambda *_: None)
        try:
            assert _torch.has_global_hooks()
        finally:
            handle.remove()


def test_a_kernel_that_is_gone_is_a_name():
    assert _torch.native("dropout") is torch.dropout
    assert _torch.native("no_such_kernel") == "no_such_kernel"
