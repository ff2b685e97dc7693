"""What must hold on a GPU; skipped where there is none, so none of it has ever been seen to pass."""

import pytest
import torch
from torch import nn

import bbalpha
from bbalpha._kernels import Passes
from bbalpha.distributed import Spread, device, processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

GPU = torch.device("cuda", 0)


def dense(rate=0.5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(rate), nn.Linear(64, 3)).to(GPU)


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(64), nn.Linear(64, 3)).to(GPU)


def rows(n=16):
    return torch.randn(n, 4, device=GPU)


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.05])
@pytest.mark.parametrize("together", [0, 10])
def test_masks_are_drawn_there_at_their_rate(rate, together):
    noise = Passes(0, 0, 10, together=together, device=GPU).noise((100, 100), rate)
    assert noise.values.device == GPU
    kept = noise.keep().float()
    assert kept.mean().item() == pytest.approx(1 - rate, abs=0.01)
    if together:  # each unit in its share of the passes
        assert (kept.sum(0) - 10 * (1 - rate)).abs().max() < 1


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("masks", ["per_example", "shared"])
@pytest.mark.parametrize("make", [dense, normed])
def test_strategies_agree_and_seeds_reproduce(make, masks, balanced):
    net, x = make(), rows()
    found = [
        bbalpha.sample(net, x, 10, masks=masks, balanced=balanced, strategy=way, seed=3)
        for way in ("auto", "auto", "loop", "repeat", "vmap")
    ]
    assert torch.equal(found[0], found[1])
    for other in found[2:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=1e-4)
    assert not torch.equal(found[0][0], found[0][1])


def test_chunks_have_the_gradient_of_all_passes():
    grads = []
    for chunk_size in (None, 3):
        net = normed()
        bbalpha.sample(net, torch.ones(8, 4, device=GPU), 10, chunk_size=chunk_size, seed=0).square().sum().backward()
        grads.append(net[0].weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_the_generators_of_the_process_stay_where_they_are():
    before = torch.get_rng_state(), torch.cuda.get_rng_state(GPU)
    bbalpha.sample(normed(), rows(), 5, seed=0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.cuda.get_rng_state(GPU))


@pytest.mark.parametrize("alpha", [0.5, 0.0, -1.0, 1e-4])
def test_the_objective_is_that_of_the_cpu(alpha):
    outputs, target = torch.randn(10, 6, 3), torch.arange(6) % 3
    found = []
    for where in ("cpu", GPU):
        given = outputs.to(where).requires_grad_()
        loss = bbalpha.cross_entropy(given, target.to(where), alpha)
        loss.backward()
        found.append((loss.cpu(), given.grad.cpu()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_samples_in_half_precision(dtype):
    net, x = dense(), rows()
    with torch.autocast("cuda", dtype=dtype):
        outputs = bbalpha.sample(net, x, 10, seed=0)
    assert outputs.dtype == dtype
    torch.testing.assert_close(outputs.float(), bbalpha.sample(net, x, 10, seed=0), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("distributed", [False, True, Spread(shard=True)])
def test_fit_learns_there_from_pinned_memory(amp, distributed):
    if amp is torch.float16 and isinstance(distributed, Spread):
        pytest.skip("float16 of weights that are cut is refused")
    x = torch.randn(256, 4)
    data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, pin_memory=True)
    net = dense(0.1)
    history = bbalpha.fit(
        net, loader, objective=bbalpha.CrossEntropy(), epochs=10, learning_rate=0.01, length_scale=0.1, seed=0, amp=amp,
        distributed=distributed, validation=data, max_grad_norm=1.0,
    )  # fmt: skip
    assert history.loss[-1] < 0.5 * history.loss[0]
    assert next(net.parameters()).device == GPU


def test_a_run_goes_on_to_the_same_bits(tmp_path):
    x = torch.randn(64, 4)
    runs = []
    for parts in ((4,), (2, 4)):
        net = dense()
        for epochs in parts:
            bbalpha.fit(
                net, (x, x[:, 0].long() % 3), objective=bbalpha.CrossEntropy(), epochs=epochs, seed=0,
                checkpoint=tmp_path / str(len(parts)),
            )  # fmt: skip
        runs.append(net[0].weight)
    assert torch.equal(*runs)


def test_a_capture_is_refused():
    net, x = dense(), rows()
    bbalpha.sample(net, x, 5, seed=0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="must not be captured"), torch.cuda.graph(graph):
        bbalpha.sample(net, x, 5, seed=0)


def test_compiled_models_and_objectives_give_what_plain_ones_give():
    net, x, y = normed(), rows(), torch.arange(16, device=GPU) % 3
    plain = bbalpha.sample(net, x, 5, seed=0).detach()
    torch.testing.assert_close(bbalpha.sample(torch.compile(net), x, 5, seed=0), plain, atol=1e-5, rtol=1e-4)
    loss = torch.compile(bbalpha.cross_entropy)(plain, y, 0.5)
    torch.testing.assert_close(loss, bbalpha.cross_entropy(plain, y, 0.5))


def test_predictions_stay_on_the_device():
    p = bbalpha.predict_classification(dense(), rows(), n_passes=20, seed=0)
    assert p.probs.device == GPU
    assert torch.allclose(p.probs.sum(1), torch.ones(16, device=GPU))


def test_a_rank_has_the_gpu_of_its_number_and_nccl():
    with processes():
        assert device() == GPU
        assert "nccl" in torch.distributed.get_backend_config()


def test_a_model_elsewhere_is_refused():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is no second GPU here")
    with processes(), pytest.raises(ValueError, match="must be on cuda:0"):
        bbalpha.distributed.Step(dense().to("cuda:1"), bbalpha.CrossEntropy())
