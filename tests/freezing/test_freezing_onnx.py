"""Frozen models leave torch: TorchScript, torch.export and ONNX, for any number of rows."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import bbalpha
import zoo
from bbalpha import freezing
from bbalpha._engine.inputs import Inputs
from bbalpha.networks import mlp

onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX files are run by onnxruntime")
pytest.importorskip("onnxscript", reason="ONNX files are written by onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:onnxscript", "ignore::UserWarning:torch.onnx")

REFUSED = {"hidden_random_operators", "traced_by_jit", "scripted_by_jit"}
NOT_RUN = {"half_precision": "onnxruntime cannot run it"}  # it has no kernels for bfloat16 on the CPU
CASES = [pytest.param(c, id=c.name) for c in zoo.CASES if c.name not in REFUSED]
SCRIPTED = ("mlp", "multihead_attention", "lstm_batch_first", "batch_norm", "dropped_weights")


def tensors(value):
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def of_rows(frozen, x, count):
    """What `x` is with so many rows."""
    inputs = Inputs(dict(x) if isinstance(x, dict) else x, frozen.axes)
    return inputs.select(torch.arange(count) % inputs.rows)


def run(path, names, values):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {i.name for i in session.get_inputs()}
    pairs = zip(names, values, strict=True)
    return [torch.as_tensor(t) for t in session.run(None, {n: v.numpy() for n, v in pairs if n in given})]


def test_a_classifier_as_a_file(tmp_path):
    model, x = mlp([4, 20, 20, 3], input_dropout=0).eval(), torch.randn(5, 4)
    frozen, path = bbalpha.freeze(model, 20, seed=0), tmp_path / "net.onnx"
    path.write_text("of old")
    names = freezing.export_onnx(frozen, path, x[:1], summary=freezing.ClassificationSummary())
    assert names == ("probs", "entropy", "mutual_information")
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]
    for rows in (1, 2, 5):
        p = bbalpha.predict_classification(model, x[:rows], n_passes=20, masks="shared", seed=0)
        found = run(path, ["x"], [x[:rows]])
        for got, want in zip(found, (p.probs, p.entropy, p.mutual_information), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert found[2].min() > 0.001  # and not one network that is always sure


@pytest.mark.slow
def test_a_file_that_gives_other_numbers_is_not_written(tmp_path, monkeypatch):
    frozen, x = bbalpha.freeze(mlp([4, 8, 3]), 3, seed=0), torch.randn(2, 4)
    exported = torch.onnx.export

    def broken(module, *args, **options):
        other = copy.deepcopy(module)
        other.frozen.layers[-1].bias.add_(0.01)
        return exported(other, *args, **options)

    monkeypatch.setattr(torch.onnx, "export", broken)
    with pytest.raises(ValueError, match=r"gives other numbers in onnxruntime: off by 0\.01"):
        freezing.export_onnx(frozen, tmp_path / "net.onnx", x)
    assert not list(tmp_path.iterdir())


def test_what_was_not_frozen_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"`frozen` must be what bbalpha.freeze gives; got Sequential"):
        freezing.export_onnx(mlp([4, 8, 3]), tmp_path / "net.onnx", torch.randn(2, 4))


@pytest.mark.parametrize("name", SCRIPTED)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of layers of torch
def test_torchscript_takes_it_for_any_number_of_rows(name):
    model, x = next(c for c in zoo.CASES if c.name == name).make()
    frozen = bbalpha.freeze(model, 4, seed=3, x=x)
    traced = torch.jit.trace(frozen, x, check_trace=False)
    for count in (1, 2, 7):
        some = of_rows(frozen, x, count).x
        with torch.no_grad():
            for got, want in zip(tensors(traced(some)), tensors(frozen(some)), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The tensor attributes self:UserWarning")  # of torch, for any nn.LSTM
@pytest.mark.parametrize("name", SCRIPTED)
def test_torch_export_takes_it_for_any_number_of_rows(name):
    model, x = next(c for c in zoo.CASES if c.name == name).make()
    frozen = bbalpha.freeze(model, 4, seed=3, x=x)
    program = torch.export.export(frozen, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    for count in (1, 2, 7):
        some = of_rows(frozen, x, count).x
        with torch.no_grad():
            for got, want in zip(tensors(program(some)), tensors(frozen(some)), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_zoo_as_files(case, tmp_path):
    model, x = case.make()
    frozen, path = bbalpha.freeze(model.eval(), 4, seed=3, x=x, batch_dim=case.batch_dim), tmp_path / "net.onnx"
    if case.name in NOT_RUN:
        with pytest.raises(ValueError, match=NOT_RUN[case.name]):
            freezing.export_onnx(frozen, path, x)
        return
    freezing.export_onnx(frozen, path, x)
    names = ["x"] if isinstance(x, Tensor) else [f"x_{i}" for i in range(len(x))]
    names = [name for name, t in x.items() if isinstance(t, Tensor)] if isinstance(x, dict) else names
    for count in (1, 6):
        some = of_rows(frozen, x, count)
        with torch.no_grad():
            wanted = bbalpha.sample(model, some.x, 4, masks="shared", seed=3, batch_dim=case.batch_dim)
        for got, want in zip(run(path, names, some.tensors), tensors(wanted), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_onnxruntime_removes_the_dropout_of_a_model_that_was_not_frozen(tmp_path):
    model, x = mlp([4, 20, 3], input_dropout=0).train(), torch.randn(5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), tmp_path / "net.onnx", dynamo=True, input_names=["x"], verbose=False)
    (one,), (other,) = (run(tmp_path / "net.onnx", ["x"], [x]) for _ in range(2))
    assert torch.equal(one, other)
    with torch.no_grad():
        torch.testing.assert_close(one, model.eval()(x))
    assert isinstance(model[2], nn.Dropout)
