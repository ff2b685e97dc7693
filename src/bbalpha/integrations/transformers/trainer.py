"""A Trainer of transformers whose loss is the alpha objective of K passes, and whose predictions know what they do not.

    trainer = AlphaTrainer(model, args, train_dataset=train, eval_dataset=held_out, alpha=0.5, n_passes=10)
    trainer.train()                                     # data, optimiser, schedule, checkpoints: as Trainer has them
    trainer.evaluate()["eval_nll"]                      # minus the log of the mean probability of a label
    trainer.predict(test).prediction.mutual_information

Sequence classification, regression, several labels, token classification, masked, causal and encoder-decoder language
models (`heads.py`). The loss is the mean over all labels of an optimiser step, however it is cut into batches.
"""

import json
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, get_last_checkpoint

from bbalpha._engine.batches import PassOptions
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import keep_with
from bbalpha._engine.selection import Sites
from bbalpha._engine.tracing import trace
from bbalpha._files import replace_file
from bbalpha._kernels import draw_seed, pass_seed, step_seed
from bbalpha.checks import check_alpha, check_count, check_number
from bbalpha.integrations.transformers.heads import Head, Kind, base_model, first_logits, head_of, numbers_like
from bbalpha.integrations.transformers.noise import Noise
from bbalpha.integrations.transformers.outputs import AlphaPredictionOutput, joined, of_parts, parts_of, shown
from bbalpha.priors import keep_probabilities, prior_kl
from bbalpha.sampling import sample

_FILE, _FORMAT = "bbalpha.json", 1

Batch = dict[str, Any]


class _Passes(nn.Module):
    """The passes of a model, as a module."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, **x: Any) -> Any:
        return sample(self.model, x, **self.options)


class AlphaTrainer(Trainer):
    """`transformers.Trainer` with the alpha objective; everything that is not named here goes to Trainer.

    Args:
        *args: As in Trainer.
        alpha: Any finite number; 0 is MC dropout as usual.
        n_passes: K in training; None trains the network as it is.
        n_predict_passes: K in `evaluate` and `predict`, whose masks follow from the seed of the arguments; None
            predicts by the network as it is.
        length_scale: l of the prior on the weights that are trained; None trains without one.
        n_data: What the prior is divided by, the labels of the training set that count. None: one a row of the
            training set; with a label a token it has to be given.
        precision: Of a regression head: one over the variance of the noise, or "learned" from the residuals.
        sites: The random sites that draw, the others off; as in `bbalpha.sample`.
        chunk_size: At most so many passes at a time in training; as in `bbalpha.sample`.
        **kwargs: As in Trainer.

    >>> import tempfile
    >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> rows = [{"input_ids": torch.tensor([1, 2, i]), "labels": i % 2} for i in range(8)]
    >>> args = TrainingArguments(tempfile.mkdtemp(), report_to="none", use_cpu=True)
    >>> trainer = AlphaTrainer(BertForSequenceClassification(BertConfig(**sizes)), args, n_predict_passes=8)
    >>> trainer.predict(rows).prediction.mutual_information.shape
    torch.Size([8])
    """

    compute_metrics: Any
    preprocess_logits_for_metrics: Any

    loss_is_scaled_for_ga = True  # the mean is over all labels of a step

    def __init__(
        self,
        *args: Any,
        alpha: float = 0.5,
        n_passes: int | None = 10,
        n_predict_passes: int | None = 50,
        length_scale: float | None = None,
        n_data: int | None = None,
        precision: float | Literal["learned"] = "learned",
        sites: Sites | None = None,
        chunk_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.alpha = check_alpha(alpha)
        self.n_passes = None if n_passes is None else check_count("n_passes", n_passes)
        self.n_predict_passes = None if n_predict_passes is None else check_count("n_predict_passes", n_predict_passes)
        self.length_scale = None if length_scale is None else check_number("length_scale", length_scale, least=0)
        self.n_data = None if n_data is None else check_count("n_data", n_data, most=2**63)
        self.noise = Noise(precision, lambda t: self.accelerator.reduce(t, "sum"))
        self.sites, self.chunk_size = sites, chunk_size
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # before 5.22: the same as loss_is_scaled_for_ga
        self._keep: dict[str, float] | None = None
        self._step = 0
        self._scores: list[Tensor] = []  # of the rows of an evaluation: sum, and how many labels (n, 2)
        self._rows, self._predicting = 0, False
        self._kind: Kind = "classes"
        self._check()

    @property
    def core(self) -> Any:
        """The model itself, whatever it is wrapped in to be trained."""
        return self.model

    @property
    def head(self) -> Head:
        """The likelihood of the model's labels."""
        return head_of(self.core)

    @property
    def precision(self) -> float | None:
        """One over the variance of the noise of a regression head, as it stands; None before anything was learned."""
        return self.noise.precision

    # ---- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, as Trainer does; a checkpoint, and the best one at the end, bring their precision along."""
        begun = resume_from_checkpoint
        folder = get_last_checkpoint(str(self.args.output_dir)) if begun is True else begun or None
        self._read_noise(folder)
        done = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        self.noise.settle()
        self._read_noise(self.state.best_model_checkpoint if self.args.load_best_model_at_end else None)
        return done

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The batches of an optimiser step, and the number of their labels that count."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        labels = [batch["labels"] for batch in batches if batch.get("labels") is not None]
        items = sum((self.head.counts(y).sum() for y in labels), torch.tensor(0)).to(device)
        if self._averages():
            items = self.accelerator.gather(items).sum()
        return batches, items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The alpha objective of a batch, divided by the labels of the whole step, and its share of the prior."""
        x, labels = self._parted(inputs)
        if labels is None:
            raise ValueError(f"`inputs` must have 'labels' to train on; got {', '.join(map(repr, inputs))}.")
        outputs = self._passes(model, x)
        logits = first_logits(outputs)
        self._know(labels)
        self._see(logits, labels)
        values, counts = self.head.losses(logits, labels, self.alpha, self.precision), self.head.counts(labels)
        count = counts.sum()
        items = count if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=values.device)
        items = items.clamp_min(1)
        loss = values.sum() / items
        if self.length_scale:
            loss = loss + self._prior(x, labels) * (count / items)
        if num_items_in_batch is not None and self._averages():
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes
        return (loss, outputs) if return_outputs else loss

    def _passes(self, model: nn.Module, x: Batch) -> Any:
        """The outputs of the passes (K, N, ...); gradients are averaged over processes where these are several."""
        shared = isinstance(model, DistributedDataParallel)
        inside: Any = model.module if shared else model
        passes = _Passes(
            inside, n_passes=self.n_passes, sites=self.sites, chunk_size=self.chunk_size, seed=self._training_seed()
        )
        if not shared:
            return passes(**x)
        model.module = passes  # who averages has to see one call, not the calls of the passes
        try:
            return model(**x)
        finally:
            model.module = inside

    def _see(self, logits: Tensor, labels: Tensor) -> None:
        """Let the noise of a regression follow the residuals, a step of the optimiser at a time."""
        if self._kind != "numbers":
            return
        if self._step != self.state.global_step:
            self.noise.settle()
            self._step = self.state.global_step
        self.noise.observe(logits, numbers_like(logits[0], labels), self.alpha)

    def _prior(self, x: Batch, labels: Tensor) -> Tensor:
        """The KL to the prior for each label of the training set."""
        if self._keep is None:
            inputs = Inputs.of(x, model=self.core)
            known = dict.fromkeys(keep_probabilities(self.core), 1.0)
            self._keep = (
                {} if self.n_passes is None
                else trace(self.core, inputs).keep if self.sites is None
                else known | keep_with(self.core, inputs, self.sites)
            )  # fmt: skip
        n_data = self.n_data or self._count_data(labels)
        return prior_kl(self.core, length_scale=self.length_scale or 0.0, n_data=n_data, keep=self._keep)

    def _count_data(self, labels: Tensor) -> int:
        """The labels of the training set, where each row has as many as these."""
        counts = self.head.counts(labels)
        if self._kind == "classes" and labels.ndim > 1:
            raise ValueError(
                "`n_data` must be given with `length_scale` where each token has a label: the number of labels of the "
                "training set that count, those that are not -100; got None."
            )
        if not isinstance(self.train_dataset, Sized):
            raise ValueError("`n_data` must be given with `length_scale` for data of unknown length; got None.")
        return len(self.train_dataset) * (counts.numel() // len(counts))

    # ---- evaluation

    def evaluation_loop(
        self,
        dataloader: "DataLoader[Any]",
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As in Trainer; "loss" and "nll" are the predictive negative log-likelihood, the mean over all labels."""
        self._scores, self._rows = [], 0
        with torch.random.fork_rng(devices=[]):  # loaders draw a seed: training goes on as if nobody had looked
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        total, count = torch.cat(self._scores).double().sum(0).tolist() if self._scores else (0.0, 0.0)
        if count and output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = output.metrics[f"{metric_key_prefix}_nll"] = total / count
        self._scores = []
        return output

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Tensor | None]:
        """The predictive negative log-likelihood of a batch, what stands for its logits, and its labels."""
        x, labels = self._parted(self._prepare_inputs(inputs))
        passes = PassOptions(self.n_predict_passes, seed=self._evaluation_seed(), sites=self.sites, progress=False)
        loss, parts = None, None
        if labels is not None and prediction_loss_only:
            loss = self._note(self.head.scored(model, x, labels, passes, self.precision), labels)
        elif not prediction_loss_only:
            self._know(labels)
            prediction = self.head.predict(model, x, passes, self._kind, self.precision)
            loss = None if labels is None else self._note(self.head.scores(prediction, labels), labels)
            parts = parts_of(prediction)
        self._rows += len(next(v for v in x.values() if isinstance(v, Tensor)))
        if parts is None:
            return loss, None, None
        first = shown(self._kind, parts)
        return loss, (first, *parts) if self._predicting else first, labels

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> AlphaPredictionOutput:
        """As in Trainer, with the prediction of all rows as `prediction`."""
        if not self.args.eval_do_concat_batches or self.args.prediction_loss_only:
            raise ValueError(
                "`args` must have eval_do_concat_batches=True and prediction_loss_only=False for `predict`, which "
                f"joins batches; got {self.args.eval_do_concat_batches} and {self.args.prediction_loss_only}."
            )
        self._predicting = True
        own: tuple[Any, Any] = self.compute_metrics, self.preprocess_logits_for_metrics
        self.compute_metrics, self.preprocess_logits_for_metrics = of_parts(*own)
        try:
            output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._predicting = False
            self.compute_metrics, self.preprocess_logits_for_metrics = own
        first, *parts = output.predictions
        found = AlphaPredictionOutput(first, output.label_ids, output.metrics)
        found.prediction = joined(self._kind, parts, self.n_predict_passes, self.precision)
        return found

    def _note(self, values: Tensor, labels: Tensor) -> Tensor:
        """Remember the scores of a batch by row; their mean."""
        counts = self.head.counts(labels).to(values.device)
        rows = torch.stack(
            (values.flatten(1).sum(1), counts.flatten(1).sum(1)) if values.ndim > 1 else (values, counts), 1
        )
        self._scores.append(self.gather_function(rows).cpu())
        return rows[:, 0].sum() / rows[:, 1].sum().clamp_min(1)

    # ---- files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Trainer, with what is ours in bbalpha.json."""
        self.noise.settle()
        if self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            facts = {"format": _FORMAT, "alpha": self.alpha, "n_passes": self.n_passes, "precision": self.precision}
            replace_file(folder / _FILE, json.dumps(facts).encode())
        super().save_model(output_dir, _internal_call)

    def _read_noise(self, folder: str | None) -> None:
        if folder is not None and self.noise.learned and (Path(folder) / _FILE).exists():
            self.noise.precision = json.loads((Path(folder) / _FILE).read_text())["precision"]

    # ---- helpers

    def _parted(self, inputs: Batch) -> tuple[Batch, Tensor | None]:
        """What the model is called with, and the labels; a decoder is given the labels before each as its inputs."""
        x = {name: value for name, value in inputs.items() if name != "labels" and value is not None}
        labels = inputs.get("labels")
        prepare = getattr(base_model(self.core), "prepare_decoder_input_ids_from_labels", None)
        if prepare is not None and labels is not None and "decoder_input_ids" not in x:
            x["decoder_input_ids"] = prepare(labels=labels)
        return x, labels

    def _know(self, labels: Tensor | None) -> None:
        """Remember what labels there are; rows without labels have those of the others."""
        if labels is not None or self.head.problem is not None or self.head.n_labels == 1:
            self._kind = self.head.kind(torch.zeros(0) if labels is None else labels)

    def _averages(self) -> bool:
        """Whether the labels of all processes are counted together."""
        return bool(self.args.average_tokens_across_devices) and self.args.world_size > 1

    def _training_seed(self) -> int | None:
        """None: from torch's global generator, as nn.Dropout does. Processes that have one seed draw masks apart."""
        if self.args.world_size == 1 or self.n_passes is None:
            return None
        return step_seed(draw_seed(None), self.args.process_index)

    def _evaluation_seed(self) -> int:
        """That of `predict_*` for batches one after the other: training draws what it would without evaluation."""
        base = self.args.seed if self.args.world_size == 1 else step_seed(self.args.seed, self.args.process_index)
        return base if self._rows == 0 else pass_seed(base, self._rows)

    def _check(self) -> None:
        """Refuse what would be ignored, or be wrong."""
        args = self.args
        refused = [
            (self.compute_loss_func is not None, "`compute_loss_func` must be None: the loss is the alpha objective"),
            (args.label_smoothing_factor != 0, "`label_smoothing_factor` must be 0: passes are what smooths here"),
            (
                args.gradient_checkpointing,
                "`gradient_checkpointing` must be False: its backward would draw other masks. `chunk_size` bounds the "
                "memory instead",
            ),
            (
                bool(self.length_scale) and args.weight_decay != 0,
                f"`weight_decay` must be 0 with a `length_scale`, which is a decay itself; got {args.weight_decay}",
            ),
            (args.n_gpu > 1, f"`args` must have one device a process; got {args.n_gpu}. Start it with torchrun"),
            (
                self.is_fsdp_enabled or self.is_deepspeed_enabled,
                "`args` must not shard the model (FSDP, DeepSpeed): passes run the weights of one process",
            ),
        ]
        for wrong, why in refused:
            if wrong:
                raise ValueError(f"{why}.")
