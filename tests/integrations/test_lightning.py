"""LightningModules with alpha steps: the losses and predictions are bbalpha's, the loop is Lightning's."""

import logging
import subprocess
import sys

import lightning as L
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import bbalpha
from bbalpha._engine import planning
from bbalpha._kernels import held_out_seed, step_seed
from bbalpha.integrations.lightning import AlphaSteps, joined

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own, of torch's trees
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),  # steps that are called by hand
    pytest.mark.filterwarnings("ignore:.*number of training batches.*smaller than the logging interval"),
]
SEED = 7


class Theirs(L.LightningModule):
    """A module as somebody has it."""

    def __init__(self, width=16, rate=0.1):
        super().__init__()
        self.first, self.last, self.rate = nn.Linear(4, width), nn.Linear(width, 3), rate

    def forward(self, x):
        return self.last(nn.functional.dropout(torch.relu(self.first(x)), self.rate, self.training))

    def training_step(self, batch, batch_idx):
        raise AssertionError("not the alpha loss")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Net(AlphaSteps, Theirs):
    seed = SEED

    def __init__(self, objective=None, rate=0.1):
        super().__init__(rate=rate)
        self.objective = objective or bbalpha.CrossEntropy(alpha=0.5)


class Regression(AlphaSteps, L.LightningModule):
    seed = SEED

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
        self.objective = bbalpha.GaussianNLL(alpha=0.5)

    def forward(self, x):
        return self.net(x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.ERROR)


def trainer(made=L.Trainer, **options):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return made(**{"max_epochs": 1, "accelerator": "cpu", "num_sanity_val_steps": 0, **quiet, **options})


def rows(n=20):
    return torch.randn(n, 4), torch.randint(3, (n,))


def loader(*tensors, size=20, **options):
    return DataLoader(TensorDataset(*tensors), size, **options)


def by_hand(net, x, y, *, epoch=0, batch=0, alpha=0.5, n_passes=10):
    outputs = bbalpha.sample(net, x, n_passes, seed=step_seed(step_seed(SEED, epoch), batch))
    return bbalpha.cross_entropy(outputs, y, alpha=alpha)


# ------------------------------------------------------------------------------ training


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_loss_is_bbalphas_of_the_same_passes(alpha):
    x, y = rows()
    net = Net(bbalpha.CrossEntropy(alpha=alpha)).train()
    expected = by_hand(net, x, y, alpha=alpha)
    run = trainer()
    run.fit(net, loader(x, y))
    torch.testing.assert_close(run.callback_metrics["train_loss"], expected.detach())


def test_alpha_0_is_the_mean_of_the_plain_losses():
    x, y = rows()
    net = Net(bbalpha.CrossEntropy(alpha=0.0))
    outputs = bbalpha.sample(net, x, 10, seed=step_seed(step_seed(SEED, 0), 0))
    mean = torch.stack([nn.functional.cross_entropy(f, y) for f in outputs]).mean()
    torch.testing.assert_close(net.training_step((x, y), 0), mean)


def test_without_a_seed_passes_come_from_the_global_generator():
    x, y = rows()
    net = Net()
    net.seed = None
    torch.manual_seed(3)
    loss = net.training_step((x, y), 0)
    torch.manual_seed(3)
    assert torch.equal(loss, bbalpha.cross_entropy(bbalpha.sample(net, x, 10), y))


def test_every_epoch_batch_and_rank_has_masks_of_its_own(monkeypatch):
    net, seeds = Net(), set()
    for rank in range(3):
        monkeypatch.setattr(Net, "global_rank", rank)
        seeds |= {net._seed_of(i, epoch=e) for i in range(5) for e in range(5)}
        seeds |= {net._seed_of(i) for i in range(5)}
    assert len(seeds) == 3 * (25 + 5)
    net.seed = None
    assert net._seed_of(0) != net._seed_of(0)


def test_the_prior_takes_the_steps_of_param_groups():
    x, y = rows()
    one, other = Net(rate=0.5), Net(rate=0.5)
    other.load_state_dict(one.state_dict())
    one.length_scale = 2.0
    keep = bbalpha.audit(other, x).keep
    assert keep["last.weight"] == 0.5
    groups = bbalpha.param_groups(other, length_scale=2.0, n_data=20, keep=keep)
    other.configure_optimizers = lambda: torch.optim.SGD(groups, lr=0.1)
    for net in (one, other):
        trainer(max_epochs=2).fit(net, loader(x, y, size=10))
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_the_prior_is_added_to_the_loss_and_not_to_what_is_logged():
    x, y = rows()
    net, run = Net(), trainer()
    net.length_scale, net.n_data = 1.0, 1000
    kl = bbalpha.prior_kl(net, length_scale=1.0, n_data=1000, keep=bbalpha.audit(net, x).keep)
    torch.testing.assert_close(net.training_step((x, y), 0), by_hand(net, x, y) + kl)
    expected = by_hand(net, x, y).detach()
    run.fit(net, loader(x, y))
    torch.testing.assert_close(run.callback_metrics["train_loss"], expected)


def test_rows_of_all_ranks_count_for_the_prior():
    x, y = rows()
    data = TensorDataset(x, y)
    net = Net()
    net.length_scale = 1.0
    sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    run = trainer(use_distributed_sampler=False)
    run.fit(net, DataLoader(data, 10, sampler=sampler))
    a = net._prior(x, 0)
    net.n_data = 20
    assert torch.equal(a, net._prior(x, 0))


def test_data_of_unknown_length_need_n_data_for_the_prior():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*rows(), strict=True)

    net = Net()
    net.length_scale = 1.0
    with pytest.raises(ValueError, match=r"set `n_data` too"):
        trainer().fit(net, DataLoader(Stream(), 10))


def test_accumulated_gradients_are_those_of_the_mean_of_the_losses():
    x, y = rows()
    net, copy = Net(), Net()
    copy.load_state_dict(net.state_dict())
    loss = sum(by_hand(copy.train(), x[10 * i : 10 * i + 10], y[10 * i : 10 * i + 10], batch=i) for i in range(2)) / 2
    loss.backward()
    trainer(accumulate_grad_batches=2).fit(net, loader(x, y, size=10))
    for p, q in zip(net.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(p, q - 0.1 * q.grad)


def test_bfloat16_passes_are_reduced_in_single_precision():
    x, y = rows()
    losses = {}
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        torch.manual_seed(0)
        run, net = trainer(precision=precision), Net()
        run.fit(net, loader(x, y), loader(x, y))
        losses[precision] = run.callback_metrics["train_loss"]
        assert run.callback_metrics["val_nll"].isfinite()
    assert losses["bf16-mixed"].dtype == torch.float32
    for precision in ("bf16-mixed", "bf16-true"):
        torch.testing.assert_close(losses[precision], losses["32-true"], atol=0.02, rtol=0)
    assert losses["bf16-mixed"] != losses["32-true"]


def test_weights_and_mappings_as_in_fit():
    x, y = rows()
    net, weight = Net(), torch.rand(20)
    outputs = bbalpha.sample(net, x, 10, seed=step_seed(step_seed(SEED, 0), 0))
    expected = bbalpha.cross_entropy(outputs, y, sample_weight=weight) * weight.mean()
    torch.testing.assert_close(net.training_step((x, y, weight), 0), expected)
    assert torch.equal(net.training_step({"x": x, "labels": y}, 0), by_hand(net, x, y))


def test_the_trainer_and_its_data_are_not_copied():
    class Heavy(TensorDataset):
        def __deepcopy__(self, memo):
            raise AssertionError("the data were copied")

    run, net = trainer(), Net()
    run.fit(net, DataLoader(Heavy(*rows()), 10), DataLoader(Heavy(*rows()), 10))
    assert net.trainer is run


def test_how_to_run_the_module_is_found_out_once(monkeypatch):
    made, make = [], planning._make_plan
    monkeypatch.setattr(planning, "_make_plan", lambda *given: made.append(1) or make(*given))
    run, data = trainer(max_epochs=5), loader(*rows())
    run.fit(Net(), data, data)
    assert len(made) <= 3  # in training, in the first step and the others, and in validation


@pytest.mark.parametrize("package", [L, pytorch_lightning], ids=lambda p: p.__name__)
def test_modules_of_both_packages_train_and_predict(package):
    class Own(AlphaSteps, package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.05), nn.Linear(16, 2))
            self.objective = bbalpha.GaussianNLL(alpha=0.5)

        forward, configure_optimizers = Regression.forward, Regression.configure_optimizers

    x = torch.randn(40, 4)
    net, run = Own(), trainer(package.Trainer, max_epochs=30)
    data = loader(x, x[:, :2])
    run.fit(net, data, data)
    assert run.callback_metrics["val_nll"] < 2.5  # about 2.8 at the start
    p = joined(run.predict(net, data))
    assert (p.mean - x[:, :2]).square().mean() < 0.5 * x[:, :2].var()


_TWO = """
import lightning, torch, bbalpha
from torch.utils.data import DataLoader, TensorDataset
from bbalpha.integrations.lightning import AlphaSteps
from bbalpha.networks import mlp

class Net(AlphaSteps, lightning.LightningModule):
    length_scale = 0.1
    def __init__(self):
        super().__init__()
        self.net, self.objective, self.losses = mlp([2, 16, 2], dropout=0.2), bbalpha.CrossEntropy(), []
    def forward(self, x):
        return self.net(x)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

lightning.seed_everything(0, verbose=False)
x = torch.ones(40, 2)  # the rows are all the same: losses differ by the masks alone
data = DataLoader(TensorDataset(x, torch.zeros(40).long()), batch_size=10)
off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", **off)
net = Net()
trainer.fit(net, data, data)
told = torch.tensor([*net.losses, trainer.callback_metrics["val_nll"]])
torch.save(torch.cat([told, *(p.detach().flatten() for p in net.parameters())]), f"{net.global_rank}.pt")
"""


@pytest.mark.slow
def test_two_processes_draw_apart_and_learn_together(tmp_path):
    (tmp_path / "two.py").write_text(_TWO)
    done = subprocess.run([sys.executable, "two.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    losses = 4
    assert not torch.isclose(one[:losses], other[:losses]).any()
    assert torch.equal(one[losses:], other[losses:])  # val_nll of both together, and the weights


# ------------------------------------------------------------------------------ validation and prediction


def test_val_nll_is_that_of_the_predictive_distribution_over_all_rows():
    x, y = rows(25)
    net, run = Net(), trainer()
    (found,) = run.validate(net, loader(x, y, size=20), verbose=False)
    total = 0.0
    for i, part in enumerate((slice(0, 20), slice(20, 25))):
        probs = bbalpha.sample(net.eval(), x[part], 20, seed=held_out_seed(SEED, i)).softmax(-1).mean(0)
        total -= probs[torch.arange(len(probs)), y[part]].log().sum()
    assert found == {"val_nll": pytest.approx(float(total.detach()) / 25, rel=1e-5)}
    assert run.test(net, loader(x, y, size=20), verbose=False) == [{"test_nll": found["val_nll"]}]


def test_a_loss_without_alpha_is_logged_under_its_name():
    x, y = rows()
    run = trainer()
    net = Net(lambda outputs, target: bbalpha.cross_entropy(outputs, target, alpha=0.3))
    assert list(run.validate(net, loader(x, y), verbose=False)[0]) == ["val_loss"]
    with pytest.raises(TypeError, match=r"CrossEntropy or GaussianNLL for trainer.predict; got function"):
        run.predict(net, loader(x))


@pytest.mark.parametrize("with_target", [True, False])
def test_predictions_are_those_of_predict_classification(with_target):
    x, y = rows(30)
    net = Net()
    p = joined(trainer().predict(net, loader(x, y) if with_target else loader(x)))
    q = bbalpha.predict_classification(net, x, masks="shared", seed=SEED)
    for name in ("probs", "expected_entropy", "votes"):
        torch.testing.assert_close(getattr(p, name), getattr(q, name))
    assert p.n_passes == 100
    assert p.log_prob(y).shape == (30,)


@pytest.mark.parametrize("source", ["learned", "predicted"])
def test_predictions_are_those_of_predict_regression(source):
    class Both(Regression):
        def forward(self, x):
            mean = self.net(x)
            return (mean, torch.tanh(mean)) if source == "predicted" else mean

    x = torch.randn(30, 4)
    net = Both()
    net.objective = bbalpha.GaussianNLL(precision=source)
    p = joined(trainer().predict(net, loader(x, size=20)))
    precision = "predicted" if source == "predicted" else 1.0
    q = bbalpha.predict_regression(net, x, precision=precision, masks="shared", seed=SEED)
    torch.testing.assert_close(p.outputs, q.outputs)
    torch.testing.assert_close(p.std, q.std)


def test_joining_nothing_is_refused():
    for wrong in ([], [torch.zeros(3)]):
        with pytest.raises(TypeError, match="`predictions` must be predictions of bbalpha"):
            joined(wrong)


# ------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_has_the_noise_and_predicts_the_same(tmp_path):
    x = torch.randn(20, 4)
    net, data = Regression(), loader(x, x[:, :2])
    keeper = ModelCheckpoint(tmp_path, monitor="val_nll")
    run = trainer(enable_checkpointing=True, callbacks=[keeper], max_epochs=3)
    run.fit(net, data, data)
    back = Regression.load_from_checkpoint(keeper.best_model_path)
    assert back.objective.log_precision != 0
    best, loaded = (joined(trainer().predict(model, data)) for model in (net, back))
    assert torch.equal(best.outputs, loaded.outputs)
    assert torch.equal(best.precision, loaded.precision)


def test_a_resumed_run_is_the_one_that_was_not_interrupted(tmp_path):
    x, y = rows()
    nets = []
    for stops in ([4], [2, 4]):
        torch.manual_seed(0)
        net, path = Net(), None
        for epochs in stops:
            run = trainer(max_epochs=epochs)
            run.fit(net, loader(x, y, size=10), ckpt_path=path)
            path = tmp_path / "run.ckpt"
            run.save_checkpoint(path)
            net = Net()
        nets.append(torch.load(path)["state_dict"])
    assert all(torch.equal(nets[0][name], nets[1][name]) for name in nets[0])


# ------------------------------------------------------------------------------ what is refused


def test_a_module_without_dropout_is_refused():
    with pytest.raises(ValueError, match="add_dropout"):
        trainer().fit(Net(rate=0.0), loader(*rows()))


def test_a_training_step_that_would_hide_the_loss_is_refused():
    with pytest.raises(TypeError, match=r"`Last` must have the `training_step` of AlphaSteps"):

        class Last(L.LightningModule, AlphaSteps):
            pass

    with pytest.raises(TypeError, match=r"leave out a training_step of its own"):

        class Own(AlphaSteps, L.LightningModule):
            def training_step(self, batch, batch_idx):
                return 0


def test_no_objective_and_manual_optimisation_are_refused():
    net = Net()
    net.automatic_optimization = False
    with pytest.raises(ValueError, match="`automatic_optimization` must be True"):
        net.training_step(rows(), 0)
    del (other := Net()).objective
    with pytest.raises(TypeError, match=r"self.objective = bbalpha.CrossEntropy\(alpha=0.5\); got None"):
        other.training_step(rows(), 0)
