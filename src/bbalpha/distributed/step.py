"""K passes and the objective as one forward, whose gradients the ranks average, by DDP or by FSDP2."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bbalpha._engine.inputs import Inputs
from bbalpha._engine.planning import Masks, run_passes
from bbalpha._engine.selection import Sites
from bbalpha._join import joined
from bbalpha._torch import version_of
from bbalpha.checks import check_count, check_flag, check_masks, check_model, check_seed
from bbalpha.distributed.joining import device
from bbalpha.distributed.ranks import Joined, Ranks, Spread, is_cut


class Step(nn.Module):
    """The loss of K passes over the rows of all ranks, for a training loop of one's own: ``step(x, y, seed=t)``.

    Every rank gives the rows that it has (`rows` says which of a batch) and gets the loss of them all; after
    ``backward`` every rank has the same gradients. The weights are those of rank 0. The optimiser is made behind it,
    with ``step.parameters()``, among which are those of the objective.

    Args:
        model: As in `bbalpha.sample`, on `device()`.
        objective: (outputs, target) -> (), as in `bbalpha.fit`.
        spread: How the ranks share the work.
        masks: As in `bbalpha.sample`; shared masks are the same on all ranks.
        balanced: As in `bbalpha.sample`: over the passes of all ranks.
        sites: As in `bbalpha.sample`.
        amp: torch.bfloat16 or torch.float16 for automatic mixed precision of the passes.

    >>> from bbalpha.distributed import processes
    >>> from bbalpha.objectives import CrossEntropy
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    >>> with processes():
    ...     Step(net, CrossEntropy())(torch.randn(6, 2), torch.zeros(6).long(), n_passes=10, seed=0).shape
    torch.Size([])
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Callable[..., Tensor],
        *,
        spread: Spread | None = None,
        masks: Masks = "per_example",
        balanced: bool = True,
        sites: Sites | None = None,
        amp: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_model(model)
        check_masks(masks)
        spread = Spread() if spread is None else spread
        _check_place(model)
        self.ranks = Ranks(spread)
        options = {"masks": masks, "balanced": check_flag("balanced", balanced), "sites": sites}
        self.inner = _spread(_Loss(model, objective, self.ranks, options, amp), spread)

    def forward(
        self,
        x: Any,
        target: Any,
        weight: Tensor | None = None,
        *,
        n_passes: int | None = 10,
        seed: int,
        counts: bool = True,
    ) -> Tensor:
        """The loss () of all ranks; differentiable.

        Args:
            x: The rows of this rank; as in `bbalpha.sample`.
            target: Of these rows.
            weight: A weight for each of them.
            n_passes: K, of all ranks together.
            seed: The same on all ranks, another one in every step.
            counts: False on a rank that has no rows of this batch: it gives any row instead, which does not count.
        """
        n_passes = None if n_passes is None else check_count("n_passes", n_passes)
        check_seed(seed)
        loss: Tensor = self.inner(x, target, weight, n_passes, seed, counts)
        return loss

    def rows(self, n: int) -> slice:
        """Which of the `n` rows of a batch are here, next to each other."""
        return self.ranks.rows(n)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which every rank has all weights of a model that is cut among them, to run it or to read it."""
        inner: Any = self.inner
        if not hasattr(inner, "unshard"):
            yield
            return
        inner.unshard()
        try:
            yield
        finally:
            inner.reshard()


class _Loss(nn.Module):
    """Passes and objective of one rank, joined with those of the others."""

    def __init__(
        self,
        model: nn.Module,
        objective: Callable[..., Tensor],
        ranks: Ranks,
        options: dict[str, Any],
        amp: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.model, self.objective, self.ranks, self.options, self.amp = model, objective, ranks, options, amp
        self.hooks: list[Any] = []  # of parameters that FSDP leaves alone

    def forward(
        self, x: Any, target: Any, weight: Tensor | None, n_passes: int | None, seed: int, counts: bool
    ) -> Tensor:
        ranks, inputs = self.ranks, Inputs.of(x, 0, model=self.model)
        part = None if n_passes is None and ranks.places == 1 else ranks.passes(n_passes or 1)
        own = ranks.seed(seed, self.options["masks"])
        before = {name: version_of(b) for name, b in self.model.named_buffers()}
        with nullcontext() if self.amp is None else torch.autocast(inputs.device.type, dtype=self.amp):
            outputs = run_passes(self.model, inputs, n_passes, seed=own, only=part, **self.options)
        here = float(inputs.rows or 0) if weight is None else float(weight.sum())
        share = float(inputs.rows or 0) * counts * (1 if part is None else len(part) / (n_passes or 1))
        self._settle([b for name, b in self.model.named_buffers() if version_of(b) != before[name]], share)
        join = Joined(ranks, n_passes, counts=counts, device=inputs.device)
        with joined(join):
            loss = self.objective(outputs, target) if weight is None else self.objective(outputs, target, weight)
        loss = join.finish(loss, here)
        if weight is None:
            return loss
        # the mean of weight times loss, as in `fit`
        return loss * (join.total(here) / join.total(weight.numel())).to(loss.dtype)

    @torch.no_grad()
    def _settle(self, moved: list[Tensor], share: float) -> None:
        """Buffers that the passes moved, such as running statistics, become their mean over rows and passes."""
        moved = [b for b in moved if b.is_floating_point()]
        if not moved or self.ranks.world == 1:
            return
        total = float(self.ranks.summed(torch.tensor(share, dtype=torch.float64, device=moved[0].device)))
        for b in moved:
            b.copy_(self.ranks.summed(b.double() * (share / total)))


def _spread(loss: _Loss, spread: Spread) -> nn.Module:
    """The loss with gradients that are averaged over the ranks."""
    if spread.shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        _share_weights(loss)
        alone = {p for p in loss.parameters() if not p.ndim}  # FSDP takes no numbers, such as a learned precision
        fully_shard(loss, mesh=init_device_mesh(device().type, (loss.ranks.world,)), ignored_params=alone)
        loss.hooks += [
            p.register_post_accumulate_grad_hook(loss.ranks.average_gradient) for p in alone if p.requires_grad
        ]
        return loss
    if loss.ranks.world == 1:
        return loss
    here = next(loss.model.parameters()).device
    # buffers are joined by `_settle`: of those that DDP would hand out rank 0's alone would count
    return nn.parallel.DistributedDataParallel(
        loss, device_ids=[here] if here.type == "cuda" else None, forward_sync_buffers=False
    )  # fmt: skip


def _share_weights(loss: nn.Module) -> None:
    """The weights and buffers of rank 0 on all ranks, as DDP does by itself."""
    with torch.no_grad():
        for t in (*loss.parameters(), *loss.buffers()):
            torch.distributed.broadcast(t.detach(), src=0)


def _check_place(model: nn.Module) -> None:
    """Refuse a model that is not where this rank computes, or that is cut among ranks already."""
    for p in model.parameters():
        if is_cut(p):
            raise ValueError(
                "`model` must be whole: passes are run by a copy that hooks of FSDP do not reach. Give it as it was "
                "before fully_shard, with Spread(shard=True)."
            )
        if p.device.type == "cuda" and p.device != device():
            raise ValueError(
                f"`model` must be on {device()}, the GPU of this rank; got {p.device}. Move it there: "
                "model.to(bbalpha.distributed.device())."
            )
