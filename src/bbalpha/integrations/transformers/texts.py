"""Texts as a tokenizer gives them, and what `generate` goes by; what cannot be read or written is refused here.

texts = Texts.of(model, tokenizer(["a text", "and a longer one"], return_tensors="pt", padding=True))
texts.positions                                                          # of every column in its text (N, T)
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from bbalpha.checks import check_count, check_model
from bbalpha.integrations.transformers.heads import base_model


@dataclass(frozen=True)
class Texts:
    """Texts as they were given, and where their tokens are.

    Attributes:
        inside: The model of transformers.
        ids: Tokens (N, T).
        mask: 1 for tokens, 0 for padding (N, T).
    """

    inside: Any
    ids: Tensor
    mask: Tensor

    @classmethod
    def of(cls, model: nn.Module, inputs: Mapping[str, Tensor] | Tensor) -> "Texts":
        """The texts of a tokenizer, or ids alone."""
        check_model(model)
        inside = base_model(model)
        prompts = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
        if not isinstance(inside, PreTrainedModel) or prompts:
            raise TypeError(
                f"`model` must be a language model of transformers, or an adapter inside of one; got "
                f"{type(model).__name__}."
            )
        given = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        other = given.keys() - {"input_ids", "attention_mask", "token_type_ids"}
        if "input_ids" not in given or other:
            raise ValueError(
                f"`inputs` must hold 'input_ids', and 'attention_mask' where there is padding; got "
                f"{', '.join(map(repr, given))}."
            )
        ids = given["input_ids"]
        mask = given.get("attention_mask", torch.ones_like(ids))
        if ids.ndim != 2 or mask.shape != ids.shape or ids.is_floating_point() or not bool(mask.any(1).all()):
            raise ValueError(
                f"`inputs` must hold whole numbers (N, T) and a mask of that shape with a token in every row; got "
                f"{tuple(ids.shape)} and {tuple(mask.shape)}."
            )
        device = inside.device
        return cls(inside, ids.to(device), mask.to(device).long())

    @property
    def writes(self) -> bool:
        """Whether the model reads these texts and writes others."""
        return bool(self.inside.config.is_encoder_decoder)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are to choose from."""
        return int(self.inside.get_input_embeddings().num_embeddings)

    @property
    def positions(self) -> Tensor:
        """The place of every column in its text (N, T)."""
        return (self.mask.cumsum(1) - 1).clamp_min(0)

    def rows(self, rows: slice) -> "Texts":
        """Some of them."""
        return Texts(self.inside, self.ids[rows], self.mask[rows])

    def check_padding(self) -> None:
        """Refuse texts to be continued that end in padding."""
        if not self.writes and not bool((self.mask.diff(dim=1) >= 0).all() & (self.mask[:, -1] == 1).all()):
            row = int(((self.mask.diff(dim=1) < 0).any(1) | (self.mask[:, -1] == 0)).nonzero()[0])
            raise ValueError(
                f"`inputs` must be padded on the left, so that texts can be continued; row {row} has padding behind a "
                'token. Use tokenizer.padding_side = "left".'
            )

    def scored(self, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """The tokens to score, -100 for none, and what the model (or its decoder) is called with."""
        if self.writes:
            if labels is None or labels.ndim != 2 or len(labels) != len(self.ids):
                raise ValueError(
                    "`labels` must hold the texts that an encoder-decoder writes, one for each that it reads, (N, T); "
                    f"got {None if labels is None else tuple(labels.shape)}."
                )
            labels = labels.to(self.ids.device)
            prepared: Tensor = self.inside.prepare_decoder_input_ids_from_labels(labels=labels)
            return labels, prepared
        if labels is not None and labels.shape != self.ids.shape:
            raise ValueError(
                f"`labels` must have the shape of the ids, {tuple(self.ids.shape)}; got {tuple(labels.shape)}."
            )
        target = self.ids if labels is None else labels.to(self.ids.device)
        return target.masked_fill((self.mask == 0) | (self.positions == 0), -100), self.ids

    def repeated(self, count: int) -> dict[str, Tensor]:
        """What the model is called with, once for every pass, one pass after the other."""
        return {"input_ids": self.ids.repeat(count, 1), "attention_mask": self.mask.repeat(count, 1)}


def generation_of(inside: Any, given: GenerationConfig | None, max_new_tokens: int | None) -> GenerationConfig:
    """What `generate` goes by, checked for what one text of several passes cannot be written with."""
    if not hasattr(inside, "generate") or not isinstance(getattr(inside, "generation_config", None), GenerationConfig):
        raise TypeError(f"`model` must be a model that can write, with `generate`; got {type(inside).__name__}.")
    own: GenerationConfig = inside.generation_config
    config = copy.deepcopy(own if given is None else given)
    if max_new_tokens is not None:
        config.max_new_tokens = check_count("max_new_tokens", max_new_tokens)
    if config.eos_token_id is None:
        config.eos_token_id = own.eos_token_id
    if config.pad_token_id is None:
        config.pad_token_id = own.pad_token_id if own.pad_token_id is not None else next(iter(ends_of(config)), None)
    several = [getattr(config, name) for name in ("num_beams", "num_return_sequences")]
    if any(n not in (None, 1) for n in several) or config.get_generation_mode().value not in (
        "greedy_search",
        "sample",
    ):
        raise ValueError(
            "`generation_config` must be greedy or sampling, one text for each of the given; got num_beams="
            f"{config.num_beams}, num_return_sequences={config.num_return_sequences}. Repeat a text to have it "
            "continued several times."
        )
    if config.guidance_scale not in (None, 1, 1.0) or config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            "`generation_config` must leave guidance and the kind of cache as they are; got guidance_scale="
            f"{config.guidance_scale}, cache_implementation={config.cache_implementation!r}."
        )
    config.return_dict_in_generate = False
    return config


def ends_of(config: GenerationConfig) -> list[int]:
    """The tokens that end a text."""
    ends = config.eos_token_id
    return [] if ends is None else [int(ends)] if not isinstance(ends, (list, tuple)) else [int(e) for e in ends]
