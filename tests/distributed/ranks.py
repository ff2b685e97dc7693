"""What a rank does for test_distributed.py: torchrun ranks.py NAME,NAME FOLDER; rank 0 writes what was found."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import bbalpha
from bbalpha import _spread
from bbalpha.distributed import Spread, Step, processes, rank_seed
from bbalpha.distributed.pieces import on_all_ranks
from bbalpha.distributed.ranks import shares

torch.set_num_threads(1)
FOLDER = Path(sys.argv[-1])  # of `main`; whoever only imports this has another
K, N = 5, 7  # neither is divided by 2 or 4
ALPHAS = (0.5, 0.0, 1.0, -1.0, 1e-4, 1e-7, 40.0)


def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)).double()


class Odd(nn.Module):
    """A model that is no chain: its passes are run by vmap or one by one."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.drop(self.first(x).tanh()) + 1)


def odd():
    torch.manual_seed(0)
    return Odd().double()


def rows():
    made = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, generator=made, dtype=torch.float64)
    return x, torch.arange(N) % 3, torch.rand(N, generator=made, dtype=torch.float64) + 0.1


def blocks_of(spread):
    """The rows and the seed of each block, as one process would go through them."""
    count = torch.distributed.get_world_size() // spread.passes
    return [(slice(r.start, r.stop), block) for block, r in enumerate(shares(N, count))]


def alone(net, objective, spread, masks, weight, seed, n_passes=K):
    """The loss of one process with the same masks; its gradients are in `net`."""
    x, y, w = rows()
    parts = [
        bbalpha.sample(net, x[part], n_passes, masks=masks, seed=seed if masks == "shared" else rank_seed(seed, block))
        for part, block in blocks_of(spread)
        if part.start < part.stop
    ]
    outputs = torch.cat(parts, 1)
    loss = objective(outputs, y, w) * w.mean() if weight else objective(outputs, y)
    loss.backward()
    return loss


def together(net, objective, spread, masks, weight, seed, n_passes=K):
    """The loss of all ranks."""
    x, y, w = rows()
    step = Step(net, objective, spread=spread, masks=masks)
    own = step.rows(N)
    counts = own.start < own.stop
    own = own if counts else slice(0, 1)
    loss = step(x[own], y[own], w[own] if weight else None, n_passes=n_passes, seed=seed, counts=counts)
    loss.backward()
    return loss


def apart(make, objective, spread, masks="per_example", weight=False, n_passes=K):
    """How far loss and gradients are from those of one process, the gradients relative to their size."""
    ours, theirs = make(), make()
    a = together(ours, objective, spread, masks, weight, 11, n_passes)
    b = alone(theirs, objective, spread, masks, weight, 11, n_passes)
    worst = 0.0
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        worst = max(worst, float((grad - q.grad).abs().max() / q.grad.abs().max()))
    return [abs(float(a.detach()) - float(b.detach())), worst]


def laws():
    """Loss and gradients of every way to spread, beside those of one process."""
    found, world = {}, torch.distributed.get_world_size()
    grids = [Spread(), Spread(passes=2)] + ([Spread(passes=4)] if world == 4 else [])
    for spread in grids:
        for alpha in ALPHAS if spread.passes > 1 else ALPHAS[:2]:
            found[f"passes={spread.passes} alpha={alpha}"] = apart(dense, bbalpha.CrossEntropy(alpha), spread)
        for masks in ("per_example", "shared"):
            for weight in (False, True):
                told = f"passes={spread.passes} odd {masks} {'weights' if weight else ''}"
                found[told] = apart(odd, bbalpha.CrossEntropy(0.5), spread, masks, weight)
    found["sharded"] = apart(dense, bbalpha.CrossEntropy(0.5), Spread(shard=True))
    found["sharded, passes"] = apart(odd, bbalpha.CrossEntropy(0.5), Spread(passes=2, shard=True))
    ours, theirs = (
        nn.Sequential(nn.BatchNorm1d(4), *dense()).double(),
        nn.Sequential(nn.BatchNorm1d(4), *dense()).double(),
    )
    together(ours, bbalpha.CrossEntropy(), Spread(passes=world), "per_example", False, 3)
    alone(theirs, bbalpha.CrossEntropy(), Spread(passes=world), "per_example", False, 3)
    moved = (ours[0].running_mean - theirs[0].running_mean).abs().max(), theirs[0].running_mean.abs().max()
    found["running statistics"] = [float(moved[0]), 0.0 if moved[1] > 1e-3 else 1.0]
    found["no passes"] = apart(dense, bbalpha.CrossEntropy(0.5), Spread(), n_passes=None)
    found["a mean of one's own"] = apart(dense, lambda o, y: nn.functional.cross_entropy(o[0], y), Spread())
    found["a sum"] = apart(dense, lambda o, y: bbalpha.cross_entropy(o, y, reduction="sum"), Spread(passes=2))
    found["two terms"] = apart(
        odd, lambda o, y: bbalpha.cross_entropy(o, y) + bbalpha.cross_entropy(o, 2 - y, 0.0), Spread(passes=2)
    )
    return found


# ------------------------------------------------------------------------------ fit


def table(n=50):
    made = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, generator=made)
    return x, x[:, :1] * 2 + 1, torch.rand(n, generator=made) + 0.1


def regressor():
    torch.manual_seed(torch.distributed.get_rank())  # rank 0's weights are everybody's
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def concrete():
    torch.manual_seed(torch.distributed.get_rank())
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), bbalpha.ConcreteDropout(0.2), nn.Linear(8, 1))


def trained(data, spread, make=regressor, group_size=1, **options):
    """A run beside that of one process: how far its losses, its likelihoods and its weights are from it."""
    runs = []
    for distributed in (spread, False):
        net = make()
        if not distributed:
            broadcast(net)
        objective = bbalpha.GaussianNLL(0.5, group_size=group_size)
        given = {
            "epochs": 3,
            "batch_size": 16,
            "learning_rate": 0.05,
            "length_scale": 1.0,
            "seed": 3,
            "validation": 0.2,
        }
        history = bbalpha.fit(net, data(), objective=objective, distributed=distributed, **{**given, **options})
        runs.append((history, net, objective))
        if torch.distributed.get_rank() == 0:  # by itself again: nothing of the job is left on the weights
            copied = bbalpha.sample(net, table()[0], 2)
            objective(copied, table()[1]).backward()
    (a, net, one), (b, other, two) = runs
    pairs = zip((*net.parameters(), *one.parameters()), (*other.parameters(), *two.parameters()), strict=True)
    far = [abs(x - y) for x, y in zip(a.loss + a.nll, b.loss + b.nll, strict=True)]
    return [max(far), max(float((p - q).detach().abs().max()) for p, q in pairs), a.loss[-1], b.loss[-1]]


def broadcast(net):
    for p in net.parameters():
        torch.distributed.broadcast(p.detach(), src=0)


def fits():
    """Runs of `fit` that must be those of one process: with masks that all rows share, or all passes of each row."""
    world = torch.distributed.get_world_size()
    x, y, w = table()
    dataset = torch.utils.data.TensorDataset(x, y)

    def loader():
        return torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)

    def stream():
        return torch.utils.data.DataLoader(Stream(), batch_size=16)

    shared = {"masks": "shared"}
    found = {
        "arrays": trained(lambda: (x, y), True, **shared),
        "passes": trained(lambda: (x, y), Spread(passes=world)),
        "weights": trained(lambda: (x, y, w), Spread(passes=2), **shared),
        "dataset": trained(lambda: dataset, True, max_grad_norm=0.5, **shared),
        "loader": trained(loader, True, validation=None, **shared),
        "stream": trained(stream, True, validation=None, length_scale=None, **shared),
        "groups": trained(lambda: (x, y), True, group_size=3, **shared),
        "cut": trained(lambda: (x, y), Spread(shard=True), max_grad_norm=0.5, **shared),
        "a prior in the loss": trained(lambda: (x, y), True, make=concrete, **shared),
        "cut, a prior in the loss": trained(lambda: (x, y), Spread(shard=True), make=concrete, **shared),
        "schedule": trained(lambda: (x, y), True, schedule=lambda share: 1 - share, **shared),
        "one row in the last batch": trained(lambda: (x[:33], y[:33]), True, validation=None, **shared),
    }  # fmt: skip
    free = trained(lambda: (x, y), True, epochs=30, masks="per_example")
    found["other masks"] = [abs(free[2] - free[3]) / 4, 0.0]  # to 0.04 of a loss that has fallen from 3
    return found


LEFT = {"steps": None}  # no part of the function below, by which a run is told from others


def passes_or_death(share):
    """K; where so many steps are done, the last rank dies."""
    if LEFT["steps"] is not None:
        LEFT["steps"] -= 1
        if LEFT["steps"] < 0 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return 10


def resumable(folder, epochs, steps_to_die=None, every=None):
    """A run with a checkpoint, in which a rank may die."""

    LEFT["steps"] = steps_to_die
    x, y, _ = table(200)
    net = regressor()
    history = bbalpha.fit(
        net, (x, y), objective=bbalpha.GaussianNLL(0.5), epochs=epochs, batch_size=16, learning_rate=0.05, seed=3,
        masks="shared", n_passes=passes_or_death, checkpoint=folder, checkpoint_every=every, distributed=True,
    )  # fmt: skip
    return {"loss": history.loss, "weights": torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()}


def killed():
    """The last rank dies in the third of four epochs."""
    return resumable(FOLDER / "run", 4, steps_to_die=30, every=5)


def resumed():
    """The same run once more."""
    return resumable(FOLDER / "run", 4, every=5)


def uninterrupted():
    """The run that nobody killed."""
    return resumable(FOLDER / "whole", 4)


def refused():
    """What cannot be done, and what every rank is told of it."""
    x, y, _ = table()
    rank, found = torch.distributed.get_rank(), {}

    def tried(name, work):
        try:
            work()
            told = "nothing"
        except (ValueError, OSError) as error:
            told = str(error)
        both = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(both, told)
        found[name] = both

    def run(data=(x, y), distributed=True, **options):
        given = {"objective": bbalpha.GaussianNLL(0.5), "epochs": 1, "seed": 0, **options}
        bbalpha.fit(regressor(), data, distributed=distributed, **given)

    sampler = torch.utils.data.DistributedSampler(torch.utils.data.TensorDataset(x, y))
    own = torch.utils.data.DataLoader(sampler.dataset, sampler=sampler)
    tried("data", lambda: run(data=(x + rank, y)))
    tried("sampler", lambda: run(data=own))
    tried("passes", lambda: run(n_passes=1, distributed=Spread(passes=2)))
    tried("grid", lambda: run(distributed=Spread(passes=3)))
    tried("objective", lambda: run(objective=lambda o, t: (o - t).square().mean(), distributed=Spread(passes=2)))
    tried("optimizer", lambda: run(optimizer=torch.optim.SGD(regressor().parameters()), distributed=Spread(shard=True)))
    tried("half", lambda: run(amp=torch.float16, distributed=Spread(shard=True)))
    tried("folder", lambda: run(checkpoint=__file__))
    tried("nan", lambda: run(data=(x, y * float("nan"))))
    stopped = bbalpha.fit(
        regressor(), (x, y), objective=bbalpha.GaussianNLL(), epochs=5, seed=0, distributed=True,
        callback=lambda told: told.epoch == 2 if rank == 0 else 1 / 0,
    )  # fmt: skip
    found["epochs of the callback"] = len(stopped.loss)
    return found


def here(_):
    return torch.distributed.get_rank()


def place(number):
    """Where a piece is done, and those inside of it; one fails."""
    if number == 4:
        raise LookupError(number)
    return number, here(number), list(_spread.spread(here, [0, 1]))


def pieces():
    """What rank 0 deals out goes to all, and the error of a piece comes back."""

    def work():
        found, told = list(_spread.spread(place, [0, 1, 2])), ""
        begun = _spread.spread(place, [3, 4, 5])
        found.append(next(begun))
        try:
            next(begun)
        except LookupError as error:
            told = str(error)
        return {"found": found, "told": told, "none": list(_spread.spread(place, []))}

    with suppress(KeyError):  # on rank 0; the others go on too
        on_all_ranks(lambda: {}["mine"])
    return on_all_ranks(work)


class Stream(torch.utils.data.IterableDataset):
    """Rows one after the other, their number unknown."""

    def __iter__(self):
        x, y, _ = table()
        return iter(zip(x, y, strict=True))


def main():
    with processes(timeout=60):
        for name in sys.argv[1].split(","):
            found = globals()[name]()
            if torch.distributed.get_rank() == 0:
                (FOLDER / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
