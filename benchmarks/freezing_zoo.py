"""Which models can be frozen and leave torch: the whole zoo of the tests -> results/freezing.json.

    python benchmarks/freezing_zoo.py

Every model of tests/zoo.py is frozen with K = 4 passes, run on other numbers of rows than it was frozen with, traced by
TorchScript, exported through torch.export to ONNX and run by onnxruntime. Each is compared with `bbalpha.sample` of the
model itself; the largest difference is reported, or the first sentence of what was refused. A run that was cut off
goes on where it was.
"""

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bbalpha
from bbalpha import freezing
from bbalpha._engine.inputs import Inputs
from bbalpha.experiments import results
from bbalpha.freezing.onnx import OnTensors
from bbalpha.freezing.thinned import Thinned

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import zoo

N_PASSES, SEED = 4, 3
WAYS = {"repeat": "stacked", "vmap": "vmap", "loop": "one by one"}


def judged(case: zoo.Case) -> dict[str, Any]:
    """What becomes of one model."""
    torch.manual_seed(0)
    model, x = case.make()
    model.eval()
    try:
        frozen = bbalpha.freeze(model, N_PASSES, seed=SEED, x=x, batch_dim=case.batch_dim)
    except ValueError as error:
        return {"model": case.name, "frozen": False, "reason": sentence(error)}
    ways = ("batched", "batched") if isinstance(frozen, Thinned) else (WAYS[frozen.eager], WAYS[frozen.traced])
    inputs = Inputs(dict(x) if isinstance(x, dict) else x, frozen.axes)
    some = [inputs.select(torch.arange(count) % (inputs.rows or 1)) for count in (1, 2, (inputs.rows or 1) + 3)]
    wanted = [outputs(model, i, case.batch_dim) for i in some]
    row = {"model": case.name, "frozen": True, "way": ways[0], "exported": ways[1]}
    row["error"] = away(lambda i: tensors(i.call(frozen)), some, wanted)
    for name, made in (("torchscript", scripted), ("onnx", exported)):
        try:
            row[name] = away(made(frozen, x), some, wanted)
        except (ValueError, RuntimeError) as error:
            row[name], row["reason"] = None, sentence(error)
    return row


def outputs(model: nn.Module, inputs: Inputs, batch_dim: int) -> list[Tensor]:
    return tensors(bbalpha.sample(model, inputs.x, N_PASSES, masks="shared", seed=SEED, batch_dim=batch_dim))


def scripted(frozen: nn.Module, x: Any) -> Callable[[Inputs], list[Tensor]]:
    plain = OnTensors(frozen, None, Inputs.of(x))
    traced = torch.jit.trace(plain, plain.some(2), check_trace=False)
    return lambda i: list(traced(*i.tensors))


def exported(frozen: nn.Module, x: Any) -> Callable[[Inputs], list[Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        freezing.export_onnx(frozen, f"{folder}/net.onnx", x)
        session = onnxruntime.InferenceSession(f"{folder}/net.onnx", providers=["CPUExecutionProvider"])
    names, given = OnTensors(frozen, None, Inputs.of(x)).names()[0], {i.name for i in session.get_inputs()}

    def run(inputs: Inputs) -> list[Tensor]:
        pairs = {n: t.numpy() for n, t in zip(names, inputs.tensors, strict=True) if n in given}
        return [torch.as_tensor(t) for t in session.run(None, pairs)]

    return run


def away(run: Callable[[Inputs], list[Tensor]], some: list[Inputs], wanted: list[list[Tensor]]) -> float:
    """The largest difference of any output on any number of rows."""
    found = [(run(i), want) for i, want in zip(some, wanted, strict=True)]
    pairs = [(a, b) for got, want in found for a, b in zip(got, want, strict=True)]
    if any(a.shape != b.shape for a, b in pairs):
        raise RuntimeError("outputs of another shape")
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def sentence(error: Exception) -> str:
    return str(error).splitlines()[0].split(". Use bbalpha.sample")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/freezing.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    ledger = results.Ledger(args.out, command="python benchmarks/freezing_zoo.py", seed=SEED)
    for case in zoo.CASES:
        if not ledger.has(model=case.name):
            start = time.perf_counter()
            with torch.no_grad():
                row = judged(case)
            ledger.add([row], seconds=time.perf_counter() - start)
            print(row, flush=True)


if __name__ == "__main__":
    main()
