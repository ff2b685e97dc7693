"""A frozen model as an ONNX file, for any number of rows, seen to give in onnxruntime what it gives here.

`torch.onnx.export` takes a frozen model as any other module. What is added here: the axis of rows is free, inputs and
outputs have names, what is no tensor among them is left out, and the file appears only after onnxruntime gave the same
numbers for one row and for several.
"""

import copy
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha import _files
from bbalpha._engine.inputs import Inputs
from bbalpha._torch import tree_flatten
from bbalpha.freezing.replayed import Replayed
from bbalpha.freezing.thinned import Thinned

_MOST = 2**31 - 2**24  # bytes that a file of one piece can hold
_NEAR = 1e-4  # of the largest output


def export_onnx(
    frozen: nn.Module, path: str | os.PathLike[str], x: Any, *, summary: nn.Module | None = None
) -> tuple[str, ...]:
    """Write what `freeze` gave as the ONNX file `path`; an older file is replaced. Needs ``bbalpha[onnx]``.

    Args:
        frozen: From `bbalpha.freeze`.
        path: The file.
        x: An example of what it is called with, as in `freeze`: one row will do.
        summary: What to hand out in the place of all passes, such as `ClassificationSummary()`.

    Returns:
        The names of the outputs of the file: the fields of the summary, the keys of a mapping, or "outputs", numbered
        where there are several. Its inputs are named as in a mapping, or "x", numbered where there are several.
    """
    runtime = _runtime()
    if not isinstance(frozen, (Thinned, Replayed)):
        raise TypeError(f"`frozen` must be what bbalpha.freeze gives; got {type(frozen).__name__}.")
    plain = OnTensors(copy.deepcopy(frozen).cpu(), copy.deepcopy(summary), Inputs.of(x))
    size = sum(t.numel() * t.element_size() for t in (*plain.parameters(), *plain.buffers()))
    if size > _MOST:
        raise ValueError(
            f"`frozen` must be smaller than 2 GB to go into one file; got {size / 1e9:.1f} GB. Use torch.onnx.export "
            "with external_data=True."
        )
    inputs, outputs = plain.names()
    data = _exported(plain, inputs, outputs)
    for rows in (1, plain.rows + 1):
        _check(runtime, data, plain, rows, inputs)
    _files.replace_file(Path(path), data)
    return outputs


class OnTensors(nn.Module):
    """A frozen model on tensors alone: those of its arguments in order -> those of what it returns."""

    def __init__(self, frozen: Any, summary: nn.Module | None, inputs: Inputs) -> None:
        super().__init__()
        self.frozen, self.summary = frozen, summary
        self._inputs = replace(inputs, axes=frozen.axes)
        self.rows = self._inputs.rows or 1

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the output."""
        output = self._called(tensors)
        return tuple(t for t in tree_flatten(output)[0] if isinstance(t, Tensor))

    def some(self, rows: int) -> tuple[Tensor, ...]:
        """The tensors of the example with so many rows."""
        return tuple(t.detach().cpu() for t in self._inputs.select(torch.arange(rows) % self.rows).tensors)

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of inputs and outputs."""
        with torch.no_grad():
            output = self._called(self.some(self.rows))
        return _named(self._inputs.x, "x"), _named(output, "outputs")

    def axes(self) -> tuple[Any, ...]:
        """What is free in the shapes of the inputs."""
        return tuple({} if axis is None else {axis: "rows"} for axis in self._inputs.axes)

    def _called(self, tensors: tuple[Tensor, ...]) -> Any:
        output = self._inputs.holding(list(tensors)).call(self.frozen)
        return output if self.summary is None else self.summary(output)


def _named(value: Any, kind: str) -> tuple[str, ...]:
    """A name for each tensor in `value`."""
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        parts = value
    elif hasattr(value, "_asdict"):
        parts = value._asdict()
    count = sum(isinstance(t, Tensor) for t in tree_flatten(value)[0])
    own = tuple(str(key) for key, part in parts.items() if isinstance(part, Tensor))
    if len(own) == count:
        return own
    return (kind,) if count == 1 else tuple(f"{kind}_{i}" for i in range(count))


def _exported(plain: OnTensors, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> bytes:
    """The bytes of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and onnxscript, about themselves
        program = torch.onnx.export(
            plain.eval(), plain.some(max(2, plain.rows)), dynamo=True, dynamic_shapes=(plain.axes(),), verbose=False,
            input_names=inputs, output_names=outputs,
        )  # fmt: skip
    if program is None:
        raise RuntimeError("torch.onnx.export gave no program.")
    data: bytes = program.model_proto.SerializeToString()
    return data


def _check(runtime: Any, data: bytes, plain: OnTensors, rows: int, names: tuple[str, ...]) -> None:
    """Refuse a file that onnxruntime cannot run, or runs to other numbers."""
    tensors = plain.some(rows)
    with torch.no_grad():
        wanted = plain(*tensors)
    try:
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
        given = {i.name for i in session.get_inputs()}
        found = session.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True) if n in given})
    except Exception as error:
        first = str(error).splitlines()[0][:200]
        raise ValueError(f"`frozen` was exported, but onnxruntime cannot run it: {first}") from error
    for want, got in zip(wanted, found, strict=True):
        other = torch.as_tensor(got)
        away = float((want.double() - other.double()).abs().max()) if want.numel() else 0.0
        if want.shape != other.shape or not away <= _NEAR * max(1.0, float(want.abs().max() if want.numel() else 0)):
            raise ValueError(
                f"`frozen` was exported, but gives other numbers in onnxruntime: off by {away:.2g} on {rows} rows. No "
                "file was written; please report it."
            )


def _runtime() -> Any:
    try:
        import_module("onnxscript")
        return import_module("onnxruntime")
    except ImportError as error:
        raise ImportError("`export_onnx` needs onnxscript and onnxruntime: pip install 'bbalpha[onnx]'.") from error
