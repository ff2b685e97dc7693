"""How sure a language model is of every token: of texts that it writes, and of texts that it is given.

The predictive of the next token is the mean of K passes, p(y_t) = mean_k p_k(y_t | y_<t), each pass a function of its
own that drops the same units of a token whenever it meets it (`masks.py`). So a text scores the same while it is
written, with cached keys and values, and when it is read; alone, and in a batch with padding.

    p = generate_tokens(model, tokenizer(prompts, return_tensors="pt", padding=True), max_new_tokens=20)
    p.tokens, p.prob, p.entropy, p.mutual_information                   # each (N, T), where p.counts
    score_tokens(model, tokenizer(texts, return_tensors="pt", padding=True)).log_prob
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from bbalpha._engine.selection import Sites
from bbalpha._kernels import draw_seed
from bbalpha.checks import check_count, check_seed
from bbalpha.integrations.transformers.heads import base_model, first_logits
from bbalpha.integrations.transformers.running import Run
from bbalpha.integrations.transformers.texts import Texts, ends_of, generation_of
from bbalpha.objectives import alpha_loss

_BUDGET = 2**24  # numbers of one tensor of logits: 64 MB of float32


@dataclass(frozen=True, eq=False)
class TokenPrediction:
    """Tokens, and what K passes together say of each, in nats; 0 where there is no token.

    Attributes:
        tokens: Their numbers (N, T).
        counts: Where there is a token that was predicted: not padding, nor the first of a text (N, T).
        pass_log_probs: The log-probability that each pass gives to the token (K, N, T).
        entropy: Of the mean probabilities of all tokens that could stand there: the whole uncertainty (N, T).
        expected_entropy: The mean entropy of the passes: what stays unsure however much is known of the weights (N, T).

    >>> both = torch.tensor([0.2, 0.6]).log().reshape(2, 1, 1)         # two passes, one token
    >>> p = TokenPrediction(torch.tensor([[7]]), torch.tensor([[True]]), both, torch.ones(1, 1), torch.zeros(1, 1))
    >>> p.prob, p.mutual_information
    (tensor([[0.4000]]), tensor([[1.]]))
    """

    tokens: Tensor
    counts: Tensor
    pass_log_probs: Tensor
    entropy: Tensor
    expected_entropy: Tensor

    @property
    def n_passes(self) -> int:
        """K."""
        return len(self.pass_log_probs)

    @property
    def log_prob(self) -> Tensor:
        """The log of the mean probability of the token (N, T)."""
        each = -alpha_loss(-self.pass_log_probs.flatten(1), 1.0, reduction="none")
        return each.view(self.tokens.shape).masked_fill(~self.counts, 0.0)

    @property
    def prob(self) -> Tensor:
        """The mean probability of the token; 0 where there is none (N, T)."""
        return self.log_prob.exp().masked_fill(~self.counts, 0.0)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus expected entropy: how much the passes disagree on what comes here (N, T)."""
        return (self.entropy - self.expected_entropy).clamp_min(0.0)

    @property
    def joint_log_prob(self) -> Tensor:
        """The log of the mean over passes of the probability of the whole text: each pass writes all of it (N,)."""
        return -alpha_loss(-self.pass_log_probs.sum(2), 1.0, reduction="none")


def score_tokens(
    model: nn.Module,
    inputs: Mapping[str, Tensor] | Tensor,
    *,
    labels: Tensor | None = None,
    n_passes: int = 20,
    sites: Sites | None = None,
    seed: int | None = None,
) -> TokenPrediction:
    """How likely, and how uncertain, each token of given texts is behind those before it.

    Args:
        model: A language model of transformers with dropout, in any mode, or PEFT's adapter around one; a causal one
            reads its texts from left to right, an encoder-decoder writes `labels`.
        inputs: What a tokenizer returns, "input_ids" and "attention_mask" (N, T), padded on either side; or ids alone.
        labels: Which tokens to score (N, T), -100 for those that are not; None is all but the first of each text. For
            an encoder-decoder the texts that it writes.
        n_passes: K, at least 2.
        sites: The random sites that draw, the others off; as in `bbalpha.sample`.
        seed: None draws from torch's global generator; an int leaves it untouched. Pass k of one seed is the same
            function for every text.

    Returns:
        One entry for every column of the ids, or of `labels` for an encoder-decoder.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    >>> p = score_tokens(GPT2LMHeadModel(GPT2Config(**sizes)), torch.tensor([[1, 2, 3, 4]]), seed=0)
    >>> p.prob.shape, p.counts
    (torch.Size([1, 4]), tensor([[False,  True,  True,  True]]))
    """
    texts = Texts.of(model, inputs)
    run = _run(model, n_passes, sites, seed)
    target, given = texts.scored(labels)
    size = max(1, _BUDGET // max(1, target.shape[1] * texts.vocabulary))
    parts = [_read(run, texts.rows(rows), target[rows], given[rows]) for rows in _spans(len(target), size)]
    tokens = torch.where(target >= 0, target, 0 if texts.writes else texts.ids)
    return _joined(tokens, target != -100, parts)


def generate_tokens(
    model: nn.Module,
    inputs: Mapping[str, Tensor] | Tensor,
    *,
    max_new_tokens: int | None = None,
    generation_config: GenerationConfig | None = None,
    n_passes: int = 20,
    sites: Sites | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
) -> TokenPrediction:
    """Texts written by the mean predictive of K passes, with the uncertainty of every token.

    The passes write one text together: ``model.generate`` is given the mean of their probabilities in the place of
    logits, the likeliest token (or a sampled one) follows for all of them. Each keeps its own keys and values.

    Args:
        model: As in `score_tokens`.
        inputs: As in `score_tokens`; texts that a causal model continues are padded on the left.
        max_new_tokens: At most so many; None as the config has it.
        generation_config: What `model.generate` goes by, None as the model has it: greedy or sampling, tokens that end
            a text, penalties. Probabilities are reported as the passes give them, before temperature and the like.
        n_passes: K, at least 2.
        sites: The random sites that draw, the others off; as in `bbalpha.sample`.
        batch_size: Texts at a time, each with K sets of keys and values; None is all of them.
        seed: As in `score_tokens`; sampled tokens follow from it too.

    Returns:
        The new tokens alone; a text that has ended counts up to and with the token that ends it.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": None}
    >>> p = generate_tokens(GPT2LMHeadModel(GPT2Config(**sizes)), torch.tensor([[1, 2]]), max_new_tokens=3, seed=0)
    >>> p.tokens.shape, bool((p.mutual_information >= 0).all())
    (torch.Size([1, 3]), True)
    """
    texts = Texts.of(model, inputs)
    texts.check_padding()
    config = generation_of(base_model(model), generation_config, max_new_tokens)
    run = _run(model, n_passes, sites, seed)
    size = len(texts.ids) if batch_size is None else check_count("batch_size", batch_size)
    written = [_write(run, texts.rows(rows), config) for rows in _spans(len(texts.ids), size)]
    longest = max(tokens.shape[1] for tokens, _ in written)
    pad = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
    tokens = torch.cat([nn.functional.pad(t, (0, longest - t.shape[1]), value=pad) for t, _ in written])
    lengths = torch.cat([torch.full((len(t),), t.shape[1], device=t.device) for t, _ in written])
    ended = torch.isin(tokens, torch.tensor(ends_of(config), device=tokens.device))
    before = ended.cumsum(1) - ended.long()  # tokens that end a text, in front of each
    counts = (before == 0) & (torch.arange(longest, device=tokens.device) < lengths[:, None])
    widened = [tuple(nn.functional.pad(v, (0, longest - v.shape[-1])) for v in values) for _, values in written]
    return _joined(tokens, counts, widened)


Values = tuple[Tensor, ...]  # log-probabilities of the passes (K, n, T), entropy and expected entropy (n, T)


def _spans(total: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, total)) for i in range(0, total, size)]


def _run(model: nn.Module, n_passes: int, sites: Sites | None, seed: int | None) -> Run:
    check_seed(seed)
    n_passes = check_count("n_passes", n_passes, least=2)
    return Run.of(model, n_passes=n_passes, seed=draw_seed(None) if seed is None else seed, sites=sites)


def _joined(tokens: Tensor, counts: Tensor, parts: list[Values]) -> TokenPrediction:
    values = [torch.cat(part, -2).masked_fill(~counts, 0.0) for part in zip(*parts, strict=True)]
    return TokenPrediction(tokens, counts, *values)


# ------------------------------------------------------------------------------ reading


def _read(run: Run, texts: Texts, target: Tensor, given: Tensor) -> Values:
    """What the passes say of texts that are given, as many passes at a time as there is room for."""
    count = max(1, _BUDGET // max(1, given.numel() * texts.vocabulary))
    moments = _Moments(target)
    sources = texts.positions if texts.writes else None
    columns = torch.arange(given.shape[1], device=given.device).expand_as(given) if texts.writes else texts.positions
    for first in range(0, run.n_passes, count):
        now = min(count, run.n_passes - first)
        x: dict[str, Any] = texts.repeated(now) | {"use_cache": False}
        if texts.writes:
            x["decoder_input_ids"] = given.repeat(now, 1)
        elif not bool(texts.mask.all()) and "position_ids" in inspect.signature(texts.inside.forward).parameters:
            x["position_ids"] = columns.repeat(now, 1)
        with run.live(first, now, columns, sources) as live:
            logits = first_logits(live(**x)).unflatten(0, (now, -1))  # (k, n, T, V)
        if not texts.writes:  # the token of a column is predicted by the column before it
            logits = torch.cat((logits[:, :, :1], logits[:, :, :-1]), 2)
        moments.add(logits)
    return moments.values()


class _Moments:
    """Sums over passes of what their logits say of tokens (n, T)."""

    def __init__(self, tokens: Tensor | None = None) -> None:
        self.tokens = tokens
        self.log_sum: Tensor | None = None  # of the probabilities (n, T, V)
        self.entropy: Tensor | float = 0.0
        self.each: list[Tensor] = []
        self.n_passes = 0

    def add(self, logits: Tensor) -> Tensor:
        """Some passes more (k, n, T, V); their log-probabilities."""
        log_p = logits.float().log_softmax(-1)
        log_sum = log_p.logsumexp(0)
        self.log_sum = log_sum if self.log_sum is None else torch.logaddexp(self.log_sum, log_sum)
        self.entropy = self.entropy + torch.special.entr(log_p.exp()).sum(-1).sum(0)
        self.n_passes += len(log_p)
        if self.tokens is not None:
            self.each.append(_picked(log_p, self.tokens))
        return log_p

    @property
    def mean(self) -> Tensor:
        """The log of the mean probability of every token there is (n, T, V)."""
        if self.log_sum is None:
            raise RuntimeError("nothing was added")
        return self.log_sum - math.log(self.n_passes)

    def values(self) -> Values:
        entropy = torch.special.entr(self.mean.exp()).sum(-1)
        return torch.cat(self.each), entropy, torch.as_tensor(self.entropy) / self.n_passes


def _picked(log_p: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of tokens (k, n, T), of all there are (k, n, T, V)."""
    index = tokens.clamp_min(0).expand(len(log_p), *tokens.shape).unsqueeze(-1)
    return log_p.gather(-1, index).squeeze(-1)


# ------------------------------------------------------------------------------ writing


def _write(run: Run, texts: Texts, config: GenerationConfig) -> tuple[Tensor, Values]:
    """The new tokens of texts (n, T), and what the passes said of each while they wrote it."""
    record = _Record(run.n_passes)
    sources = texts.positions if texts.writes else None
    start = texts.positions[:, :0] if texts.writes else texts.positions
    most = (config.max_new_tokens or config.max_length or 0) + 2
    ahead = torch.arange(most, device=start.device) + (0 if texts.writes else texts.mask.sum(1, keepdim=True))
    columns = torch.cat((start, ahead.expand(len(start), -1)), 1)
    with run.live(0, run.n_passes, columns, sources, record.listen) as live:
        stopping = StoppingCriteriaList([record])
        given = texts.repeated(run.n_passes)
        live.generate(**given, generation_config=config, stopping_criteria=stopping)
    tokens = torch.stack(record.tokens, 1)
    return tokens, tuple(torch.cat(part, -1) for part in zip(*record.values, strict=True))


class _Record(StoppingCriteria):
    """Stands between the passes and `generate`: gives it their mean, and notes what it chose. It never stops a text."""

    def __init__(self, n_passes: int) -> None:
        self.n_passes = n_passes
        self.tokens: list[Tensor] = []  # (n,) each
        self.values: list[Values] = []  # of one column each

    def listen(self, outputs: Any) -> Any:
        """The outputs of the model, with the log of the mean probabilities for all passes in the place of logits."""
        logits = first_logits(outputs)[:, -1:].unflatten(0, (self.n_passes, -1))  # (K, n, 1, V)
        self.moments = _Moments()
        self.log_p = self.moments.add(logits)
        outputs.logits = self.moments.mean.repeat(self.n_passes, 1, 1)  # (K n, 1, V)
        return outputs

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """A token was chosen for every text."""
        chosen = input_ids[: len(input_ids) // self.n_passes, -1]
        self.moments.each = [_picked(self.log_p, chosen[:, None])]
        self.tokens.append(chosen)
        self.values.append(self.moments.values())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
