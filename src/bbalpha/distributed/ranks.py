"""Which rank has which rows and which passes, and how what they have is joined.

Ranks stand in a grid, rows x passes: rank = block of rows * `passes` + block of passes. The ranks of a block of rows
have the same rows and share the K passes of one seed, so that together they run exactly those of one process.

The objective over K passes is one over the ranks' objectives, each counted as often as it has passes: every rank sends
one number a data point, whatever K is, and the log-sum-exp over these is that of `bbalpha.objectives`, as safe for
every alpha. Gradients flow to the passes that are here, times the number of ranks, since the ranks' gradients are then
averaged (DDP and FSDP do so).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from bbalpha._balance import scrambled
from bbalpha._torch import apply_function
from bbalpha.checks import check_count, check_flag, check_number
from bbalpha.distributed.joining import device

if TYPE_CHECKING:  # importing it takes a second
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Spread:
    """How the ranks of a job share the work of a step.

    Attributes:
        passes: So many ranks share the passes of the same rows; the others have other rows. It must divide the number
            of ranks.
        shard: Weights, gradients and the state of the optimiser are cut among all ranks (FSDP2), and whole weights and
            gradients are there only while a step is at work. False keeps all of it on every rank (DDP).
        timeout: Seconds after which a rank that does not answer counts as lost.

    >>> Spread(passes=2)
    Spread(passes=2, shard=False, timeout=600.0)
    """

    passes: int = 1
    shard: bool = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        check_count("passes", self.passes)
        check_flag("shard", self.shard)
        check_number("timeout", self.timeout, above=0)


def rank_seed(seed: int, block: int) -> int:
    """The seed of the masks of a block of rows, where every row has masks of its own; the first block has `seed`.

    Pass k of a row follows from this seed, from k and from the place of the row in its block.

    >>> rank_seed(7, 0), len({rank_seed(7, block) for block in range(1000)})
    (7, 1000)
    """
    return scrambled(scrambled(seed ^ 0x3C6EF372FE94F82B) + block) if block else seed


class Ranks:
    """This process among the others; made by all of them at the same place of the program.

    Args:
        spread: How they share the work.

    Attributes:
        block: Which rows are here.
        blocks: Into how many blocks the rows of a batch are cut.
        place: Which of the passes are here.
        places: By how many ranks the passes are shared.
    """

    def __init__(self, spread: Spread) -> None:
        if not dist.is_initialized():
            raise RuntimeError("Ranks are counted among processes that are joined; do so in `with processes():`.")
        world = dist.get_world_size()
        if world % spread.passes:
            raise ValueError(
                f"`passes` must divide the number of ranks, {world}; got {spread.passes}. Start another number of "
                "processes: torchrun --nproc-per-node."
            )
        self.world, self.places, self.blocks = world, spread.passes, world // spread.passes
        self.block, self.place = divmod(dist.get_rank(), self.places)
        self._groups: tuple[Any, Any] = (None, None)  # of the same place; of the same block
        if 1 < self.places < world:
            from torch.distributed.device_mesh import init_device_mesh

            mesh = init_device_mesh(device().type, (self.blocks, self.places), mesh_dim_names=("rows", "passes"))
            self._groups = mesh.get_group("rows"), mesh.get_group("passes")

    def rows(self, n: int, *, unit: int = 1) -> slice:
        """Which of the `n` rows of a batch are here, next to each other; groups of `unit` rows stay together.

        >>> from bbalpha.distributed import processes
        >>> with processes():
        ...     Ranks(Spread()).rows(100)
        slice(0, 100, 1)
        """
        whole = shares(-(-n // unit), self.blocks)[self.block]
        return slice(min(n, whole.start * unit), min(n, whole.stop * unit), 1)

    def passes(self, n_passes: int) -> range:
        """Which of the passes are here."""
        if n_passes < self.places:
            raise ValueError(
                f"`n_passes` must be at least the number of ranks that share the passes, {self.places}; got {n_passes}."
            )
        return shares(n_passes, self.places)[self.place]

    def seed(self, seed: int, masks: str) -> int:
        """The seed of the passes here: masks that all rows share are the same on all ranks, others are not."""
        return seed if masks == "shared" else rank_seed(seed, self.block)

    # ---- collectives

    def summed(self, t: Tensor, *, over: str = "all") -> Tensor:
        """The sum over "all" ranks, or over those with other "rows"; `t` is overwritten."""
        if (self.blocks if over == "rows" else self.world) > 1:
            dist.all_reduce(t, group=self._groups[0] if over == "rows" else None)
        return t

    def average_gradient(self, p: Tensor) -> None:
        """The gradient of a parameter as the mean over all ranks, where neither DDP nor FSDP sees to it."""
        if p.grad is not None:
            self.summed(p.grad).div_(self.world)

    def of_passes(self, t: Tensor) -> Tensor:
        """What the ranks that share these rows have (places, ...)."""
        found = [torch.empty_like(t) for _ in range(self.places)]
        dist.all_gather(found, t.contiguous(), group=self._groups[1])
        return torch.stack(found)

    def agree(self, told: Any, name: str) -> None:
        """Refuse what is not the same on all ranks."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, told)
        for rank, other in enumerate(found):
            if other != found[0]:
                differing = f": {_first_difference(found[0], other)}" if isinstance(other, dict) else ""
                raise ValueError(
                    f"`{name}` must be the same on all ranks; that of rank {rank} is not that of rank 0{differing}. "
                    "Make it from the same seed on every rank, or read it from the same place."
                )


def shares(n: int, count: int) -> list[range]:
    """`n` things cut into `count` parts in a row, as equal as may be.

    >>> shares(10, 4)
    [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    small, more = divmod(n, count)
    starts = [i * small + min(i, more) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def is_cut(value: Any) -> "TypeGuard[DTensor]":
    """Whether it is a tensor of which this rank has a part.

    >>> is_cut(torch.ones(3))
    False
    """
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


class Joined:
    """`bbalpha._join.Join` of one step: the objectives of this rank as those of all.

    Args:
        ranks: The ranks.
        n_passes: K, of all ranks together; None without passes.
        counts: Whether the rows here count; a rank that has none runs a row that does not.
        device: Where the losses are.
    """

    def __init__(self, ranks: Ranks, n_passes: int | None, *, counts: bool, device: torch.device) -> None:
        self.ranks, self.n_passes, self.counts, self.device = ranks, n_passes, counts, device
        self.met_passes = self.met_rows = False

    def passes(self, values: Tensor, over: Callable[[Tensor], Tensor]) -> Tensor:
        """The objective over all K passes of the rows here, from that over the passes here."""
        self.met_passes = True
        if self.ranks.places == 1:
            return values
        several = apply_function(_OfPasses, values, self.ranks)
        counts = [len(part) for part in shares(self.n_passes or 1, self.ranks.places)]
        if len(set(counts)) > 1:  # who has more passes counts more
            several = several.repeat_interleave(torch.tensor(counts, device=several.device), 0)
        return over(several)

    def total(self, total: Tensor | float) -> Tensor:
        """What the rows of all ranks count."""
        here = torch.as_tensor(total, dtype=torch.float64, device=self.device) * self.counts
        return self.ranks.summed(here, over="rows")

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the rows of all ranks."""
        self.met_rows = True
        return apply_function(_Sum, value if self.counts else value * 0, self.ranks)

    def finish(self, loss: Tensor, here: float) -> Tensor:
        """The loss over all rows and passes, where the objective may have met neither; the rows here count `here`."""
        if self.ranks.places > 1 and not self.met_passes:
            raise ValueError(
                "`objective` must go through bbalpha's (alpha_loss, cross_entropy, CrossEntropy, ...) where passes are "
                "spread over ranks: a mean over passes of one's own knows nothing of the others. Use Spread(passes=1)."
            )
        if self.met_rows:
            return loss
        total = self.total(here)
        return self.sum(loss * (here / total).to(loss.dtype))


class _OfPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:
        ctx.place = ranks.place
        return ranks.of_passes(values.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.place], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: Ranks) -> Tensor:
        ctx.world = ranks.world
        return ranks.summed(value.detach().clone(), over="rows")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.world, None


def _first_difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    part = next(k for k in (*a, *b) if a.get(k) != b.get(k))
    return f"{part} is {b.get(part)} and not {a.get(part)}"
