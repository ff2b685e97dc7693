"""AlphaTrainer: the loss is ours, everything else is Trainer's; adapters of PEFT; what is predicted is a prediction."""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from torch import nn

import bbalpha
from bbalpha.integrations.transformers import AlphaTrainer
from bbalpha.integrations.transformers.noise import Noise

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
    pytest.mark.filterwarnings("ignore:.*'pin_memory' argument.*"),
]

V, T, N = 20, 5, 8
SIZES = {"vocab_size": V, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
GPT2 = {"vocab_size": V, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
T5 = {"vocab_size": V, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}


def bert(kind="SequenceClassification", **options):
    return getattr(hf, f"BertFor{kind}")(hf.BertConfig(max_position_embeddings=16, **SIZES, **options))


def gpt2(**options):
    return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, **SPECIAL, **options))


def arguments(folder, **options):
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    given = {"per_device_train_batch_size": N, "save_strategy": "no", "num_train_epochs": 1, "seed": 3} | quiet
    return hf.TrainingArguments(str(folder), **given | options)


def rows(labels, length=T):
    """One row for each of the labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (len(labels), length), generator=generator)
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]


def batch(data):
    return {name: torch.stack([torch.as_tensor(row[name]) for row in data]) for name in data[0]}


def some_labels():
    labels = torch.randint(3, V, (N, T), generator=torch.Generator().manual_seed(2))
    return labels.masked_fill(torch.rand(N, T, generator=torch.Generator().manual_seed(3)) < 0.3, -100)


CLASSES = torch.arange(N) % 3
NUMBERS = torch.linspace(-1, 1, N)


# ------------------------------------------------------------------------------ the loss


def logits(model, data, **more):
    x = {name: value for name, value in batch(data).items() if name != "labels"} | more
    return bbalpha.sample(model.train(), x, 4).logits


def by_hand_tokens(model, data, shift, **more):
    outputs, labels = logits(model, data, **more), batch(data)["labels"]
    if shift:
        outputs, labels = outputs[:, :, :-1], labels[:, 1:]
    log_p = outputs.log_softmax(-1)[:, labels != -100]  # (K, n, V)
    return bbalpha.alpha_loss(-log_p.gather(-1, labels[labels != -100].expand(4, -1)[..., None])[..., 0], 0.5)


HEADS = {
    "classes": (
        lambda: bert(num_labels=3), CLASSES,
        lambda m, d: bbalpha.cross_entropy(logits(m, d), CLASSES, 0.5),
    ),
    "regression": (
        lambda: bert(num_labels=1), NUMBERS,
        lambda m, d: bbalpha.gaussian_nll(logits(m, d), NUMBERS[:, None], 0.5, precision=4.0),
    ),
    "two numbers": (
        lambda: bert(num_labels=2, problem_type="regression"), torch.stack((NUMBERS, NUMBERS), 1),
        lambda m, d: bbalpha.gaussian_nll(logits(m, d), torch.stack((NUMBERS, NUMBERS), 1), 0.5, precision=4.0),
    ),
    "several labels": (
        lambda: bert(num_labels=2), torch.stack((CLASSES > 0, CLASSES > 1), 1).float(),
        lambda m, d: bbalpha.binary_cross_entropy(
            logits(m, d), torch.stack((CLASSES > 0, CLASSES > 1), 1).float(), 0.5
        ),
    ),
    "tokens": (
        lambda: bert("TokenClassification", num_labels=V), some_labels(), lambda m, d: by_hand_tokens(m, d, False)
    ),
    "masked": (lambda: bert("MaskedLM"), some_labels(), lambda m, d: by_hand_tokens(m, d, False)),
    "causal": (gpt2, some_labels(), lambda m, d: by_hand_tokens(m, d, True)),
    "sequence to sequence": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)), some_labels(),
        lambda m, d: by_hand_tokens(
            m, d, False, decoder_input_ids=m.prepare_decoder_input_ids_from_labels(batch(d)["labels"])
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_the_loss_is_the_one_by_hand(name, tmp_path):
    make, labels, by_hand = HEADS[name]
    model, data = make(), rows(labels)
    trainer = AlphaTrainer(model, arguments(tmp_path), alpha=0.5, n_passes=4, precision=4.0)
    model.train()
    torch.manual_seed(11)
    ours = trainer.compute_loss(model, batch(data))
    torch.manual_seed(11)
    torch.testing.assert_close(ours, by_hand(model, data))
    (grad,) = torch.autograd.grad(ours, model.get_input_embeddings().weight)
    assert bool(grad.isfinite().all())
    assert float(grad.abs().sum()) > 0


@pytest.mark.parametrize("name", ["classes", "regression", "causal"])
def test_a_step_in_parts_is_the_step(name, tmp_path):
    make, labels, _ = HEADS[name]
    model, data = make(), rows(labels)
    trained = []
    for size in (N, N // 2, N // 4):  # uneven numbers of labels a batch
        one = copy.deepcopy(model)
        args = arguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=N // size, optim="sgd",
            learning_rate=1.0, max_grad_norm=0.0, lr_scheduler_type="constant",
        )  # fmt: skip
        prior = {"length_scale": 0.5, "n_data": 10}
        AlphaTrainer(one, args, train_dataset=data, n_passes=None, precision=4.0, **prior).train()
        trained.append(one)
    for other in trained[1:]:
        for a, b, start in zip(trained[0].parameters(), other.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
            assert start.numel() < 9 or not torch.equal(a, start)


def test_the_prior_is_that_of_what_is_trained(tmp_path):
    model, data = bert(num_labels=3), rows(CLASSES)
    x = {"input_ids": batch(data)["input_ids"]}
    losses = []
    for length_scale in (None, 2.0):
        trainer = AlphaTrainer(model, arguments(tmp_path), train_dataset=data, n_passes=4, length_scale=length_scale)
        model.train()
        torch.manual_seed(0)
        losses.append(trainer.compute_loss(model, batch(data)))
    keep = bbalpha.audit(model, x).keep
    assert keep["classifier.weight"] == pytest.approx(0.9)
    expected = bbalpha.prior_kl(model, length_scale=2.0, n_data=N, keep=keep)
    torch.testing.assert_close(losses[1] - losses[0], expected, rtol=1e-4, atol=1e-5)


def test_half_precision(tmp_path):
    model, data = bert(num_labels=3), rows(CLASSES)
    losses = []
    for bf16 in (False, True):
        trainer = AlphaTrainer(
            copy.deepcopy(model), arguments(tmp_path, bf16=bf16), train_dataset=data, eval_dataset=data
        )
        trainer.train()
        assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
        losses.append(trainer.evaluate()["eval_nll"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


# ------------------------------------------------------------------------------ evaluation and prediction


def test_predictions_are_those_of_predict_classification(tmp_path):
    model, data, seen = bert(num_labels=3), rows(CLASSES), []

    def measured(given):
        seen.append(given.predictions)
        return {"accuracy": float((given.predictions.argmax(-1) == given.label_ids).mean())}

    args = arguments(tmp_path, per_device_eval_batch_size=3)
    trainer = AlphaTrainer(model, args, eval_dataset=data, n_predict_passes=12, compute_metrics=measured)
    out = trainer.predict(data)
    x = [{"input_ids": part} for part in batch(data)["input_ids"].split(3)]
    p = bbalpha.predict_classification(model, iter(x), n_passes=12, seed=args.seed)
    for name in ("probs", "entropy", "mutual_information", "variation_ratio"):
        torch.testing.assert_close(getattr(out.prediction, name), getattr(p, name))
    predictions, label_ids, metrics = out  # as everybody unpacks it
    np.testing.assert_allclose(torch.tensor(predictions).softmax(-1), p.probs, rtol=1e-5)
    assert label_ids.tolist() == CLASSES.tolist()
    assert seen[0].shape == (N, 3)
    assert metrics["test_accuracy"] == float((p.label == CLASSES).float().mean())
    nll = -float(p.log_prob(CLASSES).mean())
    assert metrics["test_nll"] == pytest.approx(nll, rel=1e-5)
    given = trainer.evaluate()
    assert given["eval_nll"] == given["eval_loss"] == pytest.approx(nll, rel=1e-5)
    trainer.compute_metrics = None  # probabilities are not kept then
    assert trainer.evaluate()["eval_nll"] == pytest.approx(nll, rel=1e-5)


def test_no_passes(tmp_path):
    model, data = bert(num_labels=3), rows(CLASSES)
    p = AlphaTrainer(model, arguments(tmp_path), n_predict_passes=None).predict(data).prediction
    torch.testing.assert_close(p.probs, model.eval()(batch(data)["input_ids"]).logits.detach().softmax(-1))
    assert float(p.mutual_information.sum()) == 0


def test_rows_without_labels_and_logits_that_are_preprocessed(tmp_path):
    model, data = bert(num_labels=3), [{"input_ids": row["input_ids"]} for row in rows(CLASSES)]
    args = arguments(tmp_path)
    trainer = AlphaTrainer(
        model, args, n_predict_passes=8, preprocess_logits_for_metrics=lambda given, labels: given.argmax(-1)
    )
    out = trainer.predict(data)
    assert out.label_ids is None
    assert out.predictions.tolist() == out.prediction.label.tolist()
    assert trainer.preprocess_logits_for_metrics(torch.zeros(2, 3), None).shape == (2,)  # the caller's own again


@pytest.mark.parametrize("name", ["causal", "tokens"])
def test_tokens_of_any_length(name, tmp_path):
    make, labels, _ = HEADS[name]
    data = [{"input_ids": row["input_ids"][: 3 + n % 3], "labels": row["labels"][: 3 + n % 3]}
            for n, row in enumerate(rows(labels))]  # fmt: skip

    def collated(some):
        length = max(len(row["labels"]) for row in some)
        fill = {"input_ids": 2, "labels": -100}
        return {
            name: torch.stack([nn.functional.pad(row[name], (0, length - len(row[name])), value=v) for row in some])
            for name, v in fill.items()
        }

    args = arguments(tmp_path, per_device_eval_batch_size=1)
    model = make()
    trainer = AlphaTrainer(model, args, eval_dataset=data, n_predict_passes=8, data_collator=collated)
    out = trainer.predict(data)
    p = out.prediction
    assert p.log_probs.shape == (N, T, V)
    assert float(p.expected_entropy[0, 3:].abs().sum()) == 0  # a shorter row
    assert float(p.mutual_information.max()) < 2
    target = torch.as_tensor(out.label_ids)
    if name == "causal":
        target = nn.functional.pad(target[:, 1:], (0, 1), value=-100)
    nll = -float(p.log_prob(target).sum() / (target != -100).sum())  # over all labels, not over batches
    assert out.metrics["test_nll"] == pytest.approx(nll, rel=1e-5)
    assert trainer.evaluate()["eval_nll"] == pytest.approx(nll, rel=1e-5)


def test_numbers_and_several_labels(tmp_path):
    model, data = bert(num_labels=1), rows(NUMBERS)
    trainer = AlphaTrainer(model, arguments(tmp_path), n_predict_passes=8, precision=4.0)
    out = trainer.predict(data)
    p = bbalpha.predict_regression(
        model, {"input_ids": batch(data)["input_ids"]}, n_passes=8, precision=4.0, seed=3, output="logits"
    )
    torch.testing.assert_close(out.prediction.outputs, p.outputs)
    np.testing.assert_allclose(out.predictions, p.mean, rtol=1e-5)
    assert out.metrics["test_nll"] == pytest.approx(-float(p.log_prob(NUMBERS[:, None]).mean()), rel=1e-5)
    make, labels, _ = HEADS["several labels"]
    model, data = make(), rows(labels)
    trainer = AlphaTrainer(model, arguments(tmp_path), eval_dataset=data, n_predict_passes=8)
    out = trainer.predict(data)
    probs = out.prediction.probs[..., 1]  # of yes
    np.testing.assert_allclose(torch.tensor(out.predictions).sigmoid(), probs, rtol=1e-4)
    nll = nn.functional.binary_cross_entropy(probs, labels)
    assert out.metrics["test_nll"] == pytest.approx(float(nll), rel=1e-4)
    assert trainer.evaluate()["eval_nll"] == pytest.approx(float(nll), rel=1e-4)


# ------------------------------------------------------------------------------ checkpoints


def test_a_run_goes_on_where_it_stopped(tmp_path):
    model, data = bert(num_labels=1), rows(torch.linspace(-3, 3, 16))
    steps = {"per_device_train_batch_size": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def run(folder, resume=None, **more):
        one = copy.deepcopy(model)
        args = arguments(folder, learning_rate=1e-2, **steps | more)
        trainer = AlphaTrainer(one, args, train_dataset=data, eval_dataset=data, n_passes=4, n_predict_passes=4)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = run(tmp_path / "a")
    watched = run(tmp_path / "b", eval_strategy="steps", eval_steps=1)  # looking on changes nothing
    resumed = run(tmp_path / "c", resume=str(tmp_path / "a" / "checkpoint-2"))
    for other in (watched, resumed):
        assert other.precision == straight.precision
        for a, b in zip(straight.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)
    facts = json.loads((tmp_path / "a" / "checkpoint-4" / "bbalpha.json").read_text())
    assert facts == {"format": 1, "alpha": 0.5, "n_passes": 4, "precision": straight.precision}
    assert json.loads((tmp_path / "a" / "checkpoint-2" / "bbalpha.json").read_text())["precision"] != straight.precision


def test_the_best_checkpoint_brings_its_precision(tmp_path):
    model, data = bert(num_labels=1), rows(torch.linspace(-3, 3, 16))
    args = arguments(
        tmp_path, max_steps=3, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="nll", greater_is_better=True, learning_rate=1e-2,
    )  # fmt: skip
    trainer = AlphaTrainer(model, args, train_dataset=data, eval_dataset=data, n_passes=2, n_predict_passes=4)
    trainer.train()
    best = json.loads((tmp_path / "checkpoint-1" / "bbalpha.json").read_text())
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert trainer.precision == best["precision"]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_learned_precision_is_where_the_objective_is_stationary(alpha):
    outputs, target = torch.randn(6, 50, 2, dtype=torch.float64), 3 * torch.randn(50, 2, dtype=torch.float64)
    noise = Noise("learned")
    for _ in range(400):
        noise.observe(outputs, target, alpha)
        noise.settle()
    tau = torch.tensor(noise.precision, dtype=torch.float64, requires_grad=True)
    loss = bbalpha.gaussian_nll(outputs, target, alpha, precision=tau)
    (grad,) = torch.autograd.grad(loss, tau)
    assert abs(float(grad) * noise.precision) < 1e-3
    fixed = Noise(2.5)
    fixed.observe(outputs, target, alpha)
    fixed.settle()
    assert fixed.precision == 2.5


# ------------------------------------------------------------------------------ adapters


def adapted(model, dropout=0.3, **options):
    kind = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"], "modules_to_save": ["classifier"]} | options
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=dropout, **kind))


def spread(outputs):
    return float(outputs.logits.detach().std(0).max())


def awake(model):
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.5)
    return model


QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
QUIET |= {"initializer_range": 0.5}


def test_an_adapter_alone_is_trained_and_has_the_prior(tmp_path):
    model, data = awake(adapted(bert(num_labels=3, **QUIET))), rows(CLASSES)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    x = {"input_ids": batch(data)["input_ids"]}
    keep = bbalpha.audit(model, x).keep
    assert {round(p, 3) for name, p in keep.items() if "lora_A" in name} == {0.7}
    parts = [p.square().sum() / (2 * (0.7 if "lora_A" in name else 1.0)) for name, p in trained.items() if p.ndim > 1]
    torch.testing.assert_close(bbalpha.prior_kl(model, length_scale=1.0, n_data=10, keep=keep), sum(parts) / 10)
    groups = bbalpha.param_groups(model, length_scale=1.0, n_data=10, keep=keep)
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in trained.values()}

    losses = []
    for length_scale in (None, 1.0):
        trainer = AlphaTrainer(model, arguments(tmp_path), train_dataset=data, n_passes=4, length_scale=length_scale)
        model.train()
        torch.manual_seed(0)
        losses.append(trainer.compute_loss(model, batch(data)))
    torch.testing.assert_close(losses[1] - losses[0], sum(parts) / N, rtol=1e-3, atol=1e-5)
    before = {name: p.clone() for name, p in trained.items()}
    trainer.train()
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    assert any(not torch.equal(p, before[name]) for name, p in trained.items())
    assert bool((trainer.predict(data).prediction.mutual_information > 0).all())


def test_an_adapter_in_sample_fit_and_predict():
    model, data = awake(adapted(bert(num_labels=3, **QUIET))), rows(CLASSES)
    x = {"input_ids": batch(data)["input_ids"]}
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert spread(bbalpha.sample(model, x, 6)) > 0
    fitted = bbalpha.fit(
        model, (x, CLASSES), objective=bbalpha.CrossEntropy(0.5), epochs=2, n_passes=4, length_scale=0.1, seed=0
    )
    assert fitted.n_steps == 2
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    assert bool((bbalpha.predict_classification(model, x, n_passes=8).mutual_information > 0).all())


def is_lora(name, _):
    return "lora_dropout" in name


def test_the_dropout_of_the_base_can_be_left_out():
    model, data = adapted(bert(num_labels=3)), rows(CLASSES)
    x = {"input_ids": batch(data)["input_ids"]}
    assert spread(bbalpha.sample(model, x, 6)) > 0
    outputs = bbalpha.sample(model, x, 6, sites=is_lora).logits  # B is 0 at the beginning: an adapter says nothing yet
    torch.testing.assert_close(outputs, outputs[:1].expand_as(outputs))
    plain = model.eval()(**x).logits
    torch.testing.assert_close(outputs[0], plain)
    assert spread(bbalpha.sample(awake(model), x, 6, sites=is_lora)) > 0


def test_sites_and_adapters_in_the_trainer(tmp_path):
    model, data = awake(adapted(bert(num_labels=3))), rows(CLASSES)
    args = arguments(tmp_path, save_strategy="epoch")
    trainer = AlphaTrainer(model, args, train_dataset=data, n_passes=4, length_scale=1.0, sites=is_lora)
    trainer.train()
    lively = trainer.predict(data).prediction.mutual_information.mean()
    trainer.sites = None
    assert float(lively) < float(trainer.predict(data).prediction.mutual_information.mean())
    again = adapted(bert(num_labels=3))
    again.load_state_dict(model.state_dict())  # the base is random: no weights to be fetched
    AlphaTrainer(again, args, train_dataset=data, n_passes=4, sites=is_lora).train(resume_from_checkpoint=True)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "`label_smoothing_factor` must be 0"),
        ({"gradient_checkpointing": True}, {}, "`chunk_size` bounds the memory"),
        ({"weight_decay": 0.1}, {"length_scale": 1.0}, "`weight_decay` must be 0"),
        ({}, {"compute_loss_func": lambda *_: None}, "`compute_loss_func` must be None"),
        ({}, {"alpha": math.nan}, "`alpha` must be a finite number"),
        ({}, {"n_passes": 0}, "`n_passes` must be a whole number"),
        ({}, {"precision": "predicted"}, '`precision` must be "learned"'),
    ],
)
def test_what_would_be_wrong_is_refused(args, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        AlphaTrainer(bert(num_labels=3), arguments(tmp_path, **args), **options)


def test_what_cannot_be_known_is_asked_for(tmp_path):
    data = rows(some_labels())
    trainer = AlphaTrainer(gpt2(), arguments(tmp_path), train_dataset=data, n_passes=2, length_scale=1.0)
    with pytest.raises(ValueError, match="`n_data` must be given"):
        trainer.train()
    with pytest.raises(ValueError, match="must have 'labels'"):
        trainer.compute_loss(trainer.model, {"input_ids": torch.zeros(1, 2, dtype=torch.long)})
    with pytest.raises(ValueError, match="`precision` is learned"):
        AlphaTrainer(bert(num_labels=1), arguments(tmp_path)).evaluate(rows(NUMBERS))
    with pytest.raises(ValueError, match="one number for each output"):
        AlphaTrainer(bert(num_labels=1), arguments(tmp_path), precision=1.0).compute_loss(
            bert(num_labels=1), batch(rows(torch.zeros(N, 2)))
        )
    with pytest.raises(ValueError, match="prediction_loss_only=False"):
        AlphaTrainer(gpt2(), arguments(tmp_path, prediction_loss_only=True)).predict(data)


def test_a_module_of_ones_own(tmp_path):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.drop, self.head = nn.Embedding(V, 4), nn.Dropout(0.3), nn.Linear(4, 3)

        def forward(self, input_ids):
            return (self.head(self.drop(self.embedding(input_ids).mean(1))),)  # no ModelOutput

    trainer = AlphaTrainer(
        Plain(), arguments(tmp_path, label_names=["labels"]), train_dataset=rows(CLASSES), n_passes=4
    )
    trainer.train()
    assert trainer.predict(rows(CLASSES)).prediction.probs.shape == (N, 3)
    with pytest.raises(ValueError, match="problem_type"):
        trainer.compute_loss(trainer.model, batch(rows(NUMBERS)))


def test_without_the_extra_the_error_names_it():
    code = "import sys; sys.modules['accelerate'] = None\nimport bbalpha.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'bbalpha[transformers]'" in done.stderr


# ------------------------------------------------------------------------------ several processes

TWO = """
import sys, torch, json
import test_transformers as t
model = t.bert(num_labels=3)
torch.manual_seed(0)
for p in model.parameters():
    torch.nn.init.normal_(p, std=0.3)
steps = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "per_device_train_batch_size": int(sys.argv[2])}
args = t.arguments(sys.argv[1], **steps)
data = t.rows(t.CLASSES)
plain = {"n_passes": None, "n_predict_passes": None, "length_scale": 1.0}
trainer = t.AlphaTrainer(model, args, train_dataset=data, eval_dataset=data[:5], **plain)
trainer.train()
drawn = t.AlphaTrainer(model, args, train_dataset=data, n_passes=4)._training_seed()
found = {"weights": [float(p.detach().double().sum()) for p in model.parameters()], "seed": drawn}
found["nll"] = trainer.evaluate()["eval_nll"]
open(f"{sys.argv[1]}/{args.world_size}-{args.process_index}.json", "w").write(json.dumps(found))
trainer.end()
"""


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO)
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node"]
    for count in (1, 2):
        command = [*launch, str(count), str(script), str(tmp_path), str(N // count)]
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        subprocess.run(command, check=True, timeout=300, env={**os.environ, "PYTHONPATH": path})
    one, first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("1-0", "2-0", "2-1"))
    assert first["weights"] == second["weights"] == pytest.approx(one["weights"], rel=1e-4, abs=1e-4)
    assert first["nll"] == second["nll"] == pytest.approx(one["nll"], rel=1e-4)  # five rows: one process has a filler
    assert one["seed"] is None
    assert first["seed"] != second["seed"]
