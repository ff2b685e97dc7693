"""`fit` on many ranks: every rank its rows of each batch, one state of the run, written by rank 0.

Batches are those of one process, whatever the number of ranks, and each is cut into blocks of rows in a row. So a run
goes on at the right row where it is taken up on another number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from bbalpha._torch import tree_leaves, tree_map
from bbalpha.distributed.joining import device, on_main
from bbalpha.distributed.ranks import Ranks, is_cut
from bbalpha.distributed.step import Step
from bbalpha.training.feed import Batch, Source, parts_of, pick, rng_state, set_rng_state
from bbalpha.training.fingerprint import digest


@dataclass(frozen=True)
class Part:
    """What a rank has of a batch.

    Attributes:
        here: Its rows.
        rows: How many the batch has on all ranks.
        counts: False where it has none: it runs the first row, which does not count.
    """

    here: Batch
    rows: int
    counts: bool


class Together:
    """This rank of a run.

    Args:
        step: What the ranks do together.
        unit: Rows of the data that stay together, those of a group of the objective.
    """

    def __init__(self, step: Step, unit: int) -> None:
        self.step, self.unit = step, unit
        self.ranks: Ranks = step.ranks
        self.main = dist.get_rank() == 0

    # ---- rows

    def epoch(self, data: Source, seed: int, epoch: int) -> Iterator[Part]:
        """This rank's part of every batch of an epoch."""
        loader = data.indexed(seed, epoch) if hasattr(data, "indexed") else None
        if loader is None:
            yield from self._cut(data.epoch(seed, epoch))
            return
        dealt = _Dealt(loader.batch_sampler, self._part)
        reader: DataLoader[Any] = _with_batches(loader, dealt)
        for place, batch in enumerate(reader):
            n, counts = dealt.seen[place]
            if not place:
                self.ranks.agree(dealt.first, "data")
            yield Part(parts_of(batch), n, counts)

    def _cut(self, batches: Iterator[Batch]) -> Iterator[Part]:
        for place, (x, target, weight) in enumerate(batches):
            if not place:
                self.ranks.agree(digest(x, target, weight), "data")
            n = len(tree_leaves(target)[0])
            rows, counts = self._part(n)
            own = pick(x, rows), pick(target, rows), None if weight is None else weight[rows]
            yield Part(own, n, counts)

    def _part(self, n: int) -> tuple[slice, bool]:
        rows = self.ranks.rows(n, unit=self.unit)
        return (rows, True) if rows.start < rows.stop else (slice(0, 1), False)

    # ---- one state on all ranks

    def generators(self) -> dict[str, Any]:
        """The state of the generators of this process, without those of GPUs, which nothing here draws from."""
        return {**rng_state(), "cuda": []}

    def same_generators(self) -> None:
        """The generators of the process as they are on rank 0: loaders shuffle alike."""
        set_rng_state(on_main(self.generators))

    def has(self, place: int) -> bool:
        """Whether this rank scores the batch at `place`."""
        return place % self.ranks.world == dist.get_rank()

    def total(self, *numbers: float) -> list[float]:
        """Sums over all ranks."""
        sums = self.ranks.summed(torch.tensor(numbers, dtype=torch.float64, device=device()))
        return [float(number) for number in sums]

    # ---- weights that are cut among ranks

    def gathered(self, content: Any) -> Any:
        """`content` with tensors that are whole, on the CPU of every rank."""
        return tree_map(lambda t: t.full_tensor().cpu() if is_cut(t) else t, content)

    def like(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """A state cut as the model's `own` is."""
        return {name: _cut_like(value, own.get(name)) for name, value in state.items()}

    def optimizer_like(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
        """The state of an optimiser, cut as its parameters are."""
        moments = {
            i: {name: _cut_like(v, parameters[i]) for name, v in held.items()} for i, held in state["state"].items()
        }
        return {**state, "state": moments}

    def restore_whole(self) -> None:
        """The weights of the model and the objective as ordinary parameters again, on every rank."""
        for hook in getattr(self.step.inner, "hooks", ()):
            hook.remove()
        for module in self.step.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                if is_cut(p):
                    setattr(module, name, nn.Parameter(p.full_tensor().detach(), requires_grad=p.requires_grad))


def check_spread(optimizer: Any, amp: Any, *, shard: bool) -> None:
    """Refuse what cannot be cut among ranks."""
    if shard and isinstance(optimizer, Optimizer):
        raise ValueError(
            "`optimizer` must be a function of parameter groups where weights are cut among ranks: these are other "
            "parameters than the model's own. Give lambda groups: AdamW(groups), or Spread(shard=False)."
        )
    if shard and amp is torch.float16:
        raise ValueError("`amp` must be torch.bfloat16 where weights are cut among ranks; got torch.float16.")


def whole(value: Tensor) -> Tensor:
    """A number that was computed from weights that are cut among ranks, as an ordinary tensor."""
    return value.full_tensor() if is_cut(value) else value


def local(value: Tensor) -> Tensor:
    """What is here of a tensor that may be cut among ranks."""
    return value.to_local() if is_cut(value) else value


def clip(parameters: Sequence[Tensor], most: float) -> None:
    """Gradients, some of them cut among ranks, clipped to a norm."""
    if not any(is_cut(p) for p in parameters):
        nn.utils.clip_grad_norm_(parameters, most)
        return
    norms = [whole(torch.linalg.vector_norm(p.grad)) for p in parameters if p.grad is not None]
    nn.utils.clip_grads_with_norm_(parameters, most, torch.stack(norms).norm(), foreach=False)


# ------------------------------------------------------------------------------ helpers

_SETTINGS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
)  # fmt: skip


class _Dealt:
    """The batches of a loader, numbers of rows, this rank's part of each."""

    def __init__(self, batches: Any, part: Callable[[int], tuple[slice, bool]]) -> None:
        self.batches, self.part = batches, part
        self.seen: dict[int, tuple[int, bool]] = {}
        self.first: list[Any] = []

    def __iter__(self) -> Iterator[list[Any]]:
        for place, numbers in enumerate(self.batches):
            numbers = list(numbers)
            rows, counts = self.part(len(numbers))
            self.seen[place] = len(numbers), counts
            self.first = self.first or numbers
            yield numbers[rows]

    def __len__(self) -> int:
        return len(self.batches)


def _with_batches(loader: Any, batches: Any) -> Any:
    """A loader with the settings of another one, and other batches."""
    given = {name: getattr(loader, name) for name in _SETTINGS}
    if loader.num_workers:
        given |= {"prefetch_factor": loader.prefetch_factor}
    return DataLoader(loader.dataset, batch_sampler=batches, **given)


def _cut_like(value: Any, own: Any) -> Any:
    if not is_cut(own) or not isinstance(value, Tensor) or is_cut(value) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
