"""The K passes of a language model over texts, rows being the texts once for every pass.

Which axes of a random call are texts and positions is found by running the model on more texts and on longer ones;
that a text then comes out the same beside others, and before more tokens come, is tried and not taken on trust.

    run = Run.of(model, n_passes=20, seed=0)
    with run.live(first=0, count=20, targets=positions) as live:         # positions (N, T)
        live(input_ids=ids.repeat(20, 1)).logits
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bbalpha._engine.guards import eager, steady
from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import find_plan
from bbalpha._engine.rows import Finder, near
from bbalpha._engine.running import Plan
from bbalpha._engine.selection import Sites
from bbalpha._engine.shadows import shadowed
from bbalpha._engine.sites import switched_off, switched_on
from bbalpha._engine.tracing import trace
from bbalpha.integrations.transformers.heads import base_model, first_logits
from bbalpha.integrations.transformers.masks import Places, Positioned, Site

Change = Callable[[Any], Any]

# of plans, which the engine finds anew for a model that has changed
_KNOWN: "WeakKeyDictionary[nn.Module, list[tuple[Plan, Mapping[str, tuple[Site, ...]]]]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Run:
    """How the passes of a model are run over texts.

    Attributes:
        model: The caller's, PEFT's too; it is not touched.
        plan: Which of its random sites are on.
        sites: Of every module that draws, in order.
        n_passes: K.
        seed: Of all passes.
    """

    model: nn.Module
    plan: Plan
    sites: Mapping[str, tuple[Site, ...]]
    n_passes: int
    seed: int

    @classmethod
    def of(cls, model: nn.Module, *, n_passes: int, seed: int, sites: Sites | None = None) -> "Run":
        """Find out where `model` draws; refuses draws that cannot be told by text and position."""
        with steady(), torch.no_grad():
            plan = find_plan(model, Inputs.of(_trial(model, 5, 6, 7)), "auto", False, True, sites)
            if plan.hidden or plan.foreign or plan.own:
                raise ValueError(
                    f"`model` must draw by dropout alone; {type(model).__name__} also draws where nobody can tell the "
                    "text. Switch that off in its config."
                )
            known = next((found for of, found in _KNOWN.get(model, []) if of is plan), None)
            run = cls(model, plan, _find_sites(model, plan) if known is None else known, n_passes, seed)
            if known is None:
                run._check()
                _KNOWN[model] = [(plan, run.sites), *_KNOWN.get(model, [])[:3]]
            return run

    @contextmanager
    def live(
        self, first: int, count: int, targets: Tensor, sources: Tensor | None = None, change: Change = lambda out: out
    ) -> Iterator[Any]:
        """A context with the model to call, on the texts of `targets` once for each of the passes first..first+count.

        Args:
            first: The first pass.
            count: How many.
            targets: The position of every column of the texts, of columns to come too (N, T).
            sources: The same for what an encoder reads (N, E).
            change: Is given what the model returns, and says what to return instead.
        """
        finder = Finder(dict.fromkeys(self.sites, ()))
        config, head = base_model(self.model).config, _head_name(self.model)
        places = Places(self.sites, finder, targets, sources, config=config, head=head)
        with ExitStack() as contexts:
            contexts.enter_context(steady())
            contexts.enter_context(torch.no_grad())
            live = contexts.enter_context(shadowed(self.model, evaluation=True, use="again"))
            contexts.enter_context(switched_on(live, self.plan.only))
            contexts.enter_context(switched_off(live, self.plan.off))
            contexts.enter_context(eager())
            contexts.enter_context(finder.listening(live, own=live is not self.model))
            inside = base_model(live)
            contexts.enter_context(_wrapped(inside, places, change))
            contexts.enter_context(Positioned(places, self.n_passes, first, count, self.seed))
            yield inside

    def _check(self) -> None:
        """Refuse a model whose passes give a text another output beside another text, or before more tokens come."""
        writes = base_model(self.model).config.is_encoder_decoder

        def logits(rows: slice, length: int) -> Tensor:
            x = {name: v[rows] if isinstance(v, Tensor) else v for name, v in _trial(self.model, 2, 4, 5).items()}
            for name in ("decoder_input_ids",) if writes else ("input_ids", "attention_mask"):
                x[name] = x[name][:, :length]
            targets, sources = (
                torch.arange(n, device=x["input_ids"].device).expand(len(x["input_ids"]), n) for n in (length, 5)
            )
            with self.live(0, 2, targets, sources if writes else None) as live:
                twice = {name: v.repeat(2, 1) if isinstance(v, Tensor) else v for name, v in x.items()}
                found: Tensor = first_logits(live(**twice)).unflatten(0, (2, -1))
                return found

        whole = logits(slice(0, 2), 4)
        if not near(whole[:, 1:], logits(slice(1, 2), 4)) or not near(whole[:, :, :3], logits(slice(0, 2), 3)):
            raise ValueError(
                "`model` must give a token the same whatever stands beside its text or behind it; "
                f"{type(base_model(self.model)).__name__} does not. Is it a model that reads both ways?"
            )


@contextmanager
def _wrapped(inside: nn.Module, places: Places, change: Change) -> Iterator[None]:
    """A context in which calls of a copy of a model are announced, and their results changed."""
    plain = inside.forward
    own = inside.__dict__.get("forward")  # accelerate puts one there

    @functools.wraps(plain)
    def forward(**given: Any) -> Any:
        with places.call(given):
            return change(plain(**given))

    inside.forward = forward
    try:
        yield
    finally:
        del inside.forward
        if own is not None:
            inside.forward = own


# ------------------------------------------------------------------------------ evidence


def _trial(model: nn.Module, rows: int, targets: int, sources: int) -> dict[str, Any]:
    """Texts to try a model on."""
    inside = base_model(model)
    size = inside.get_input_embeddings().num_embeddings
    device = next(inside.parameters()).device

    def ids(length: int) -> Tensor:
        return (torch.arange(rows * length, device=device) * 7 + 3).remainder(size).view(rows, length)

    if not inside.config.is_encoder_decoder:
        return {"input_ids": ids(targets), "attention_mask": torch.ones_like(ids(targets)), "use_cache": False}
    given = {"input_ids": ids(sources), "attention_mask": torch.ones_like(ids(sources))}
    return {**given, "decoder_input_ids": ids(targets), "use_cache": False}


def _find_sites(model: nn.Module, plan: Plan) -> dict[str, tuple[Site, ...]]:
    """Where texts and positions are in every draw, as more texts, longer ones and longer sources show."""

    def shapes(*sizes: int) -> dict[str, list[torch.Size]]:
        found: dict[str, list[torch.Size]] = {}
        inputs = Inputs.of(_trial(model, *sizes))
        for home, shape in trace(model, inputs, only=plan.only, off=plan.off, evaluation=True).draws:
            found.setdefault(home, []).append(shape)
        return found

    plain, *others = (shapes(*sizes) for sizes in ((2, 4, 5), (3, 4, 5), (2, 6, 5), (2, 4, 8)))
    found: dict[str, tuple[Site, ...]] = {}
    for home, own in plain.items():
        if any(len(other.get(home, [])) != len(own) for other in others):
            raise ValueError(
                f"`model` must draw equally often for every text; {home!r} does not. Are layers skipped at random? Set "
                "layerdrop to 0 in its config."
            )
        each = zip(own, *(other[home] for other in others), strict=True)
        placed = tuple(_site(home, *four) for four in each if four[0])  # what has no axes: whether layers are skipped
        if len({site.query[1] for site in placed}) > 1:
            raise ValueError(
                f"`model` must draw for the source and for the text in different modules; {home!r} does both. Give "
                "each a dropout of its own."
            )
        found[home] = placed
    return found


def _site(home: str, plain: torch.Size, rows: torch.Size, targets: torch.Size, sources: torch.Size) -> Site:
    """The axes of a draw, by what changes its shape: 3 texts for 2, 6 tokens for 4, 8 of the source for 5."""
    sizes = list(zip(plain, rows, targets, sources, strict=True))
    kinds = {  # how the length of an axis goes
        (2, 3, 2, 2): "text", (4, 4, 6, 4): "target", (5, 5, 5, 8): "source", (8, 12, 12, 8): "targets",
        (10, 15, 10, 16): "sources",
    }  # fmt: skip
    found = [(kinds[size], axis) for axis, size in enumerate(sizes) if size in kinds]
    if len(found) == sum(len(set(size)) > 1 for size in sizes):
        axes = [(axis, kind == "source") for kind, axis in sorted(found, key=_later) if kind in ("target", "source")]
        texts = [axis for kind, axis in found if kind == "text"]
        if len(found) == 1 and found[0][0] in ("targets", "sources"):
            return Site(found[0][1], (found[0][1], found[0][0] == "sources"), folded=True)
        if len(texts) == 1 and len(axes) in (1, 2) and len(found) == 1 + len(axes):
            return Site(texts[0], axes[0], axes[1] if axes[1:] else None)
    raise ValueError(
        f"`model` must draw for texts and positions on axes of their own; {home!r} drew for a tensor of shape "
        f"{tuple(plain)} where 2 texts of 4 tokens were given. Leave it out by `sites`."
    )


def _later(found: tuple[str, int]) -> tuple[bool, int]:
    """Queries before keys: of the text before those of the source, and else in the order of the axes."""
    return found[0] == "source", found[1]


def _head_name(model: nn.Module) -> str | None:
    """The name of the layer that gives the logits."""
    head = base_model(model).get_output_embeddings()
    return next((name for name, m in model.named_modules() if m is head), None)
