"""Batches for the training loop out of whatever the caller has: arrays, tensors, a Dataset, a DataLoader, Parquet.

A batch is (x, target, weight): x a tensor, a tuple or a mapping as `sample` takes it, weight None or (N,). A mapping
that has "labels", as with Hugging Face, is x and target in one. The order of epoch e of arrays and Datasets follows
from (seed, e) alone, so any epoch can be gone through again.
"""

import random
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate

from bbalpha._files import Restoring
from bbalpha._kernels import epoch_seed
from bbalpha._torch import tree_leaves, tree_map
from bbalpha.training.fingerprint import digest, evenly, told
from bbalpha.training.shards import Shards

Batch = tuple[Any, Any, Tensor | None]

_LOOKED_AT = 16  # items of a Dataset, to tell it from another one


def order(n: int, *, seed: int, epoch: int) -> Tensor:
    """The order in which epoch `epoch` goes through `n` rows (n,).

    >>> torch.equal(order(5, seed=0, epoch=1).sort().values, torch.arange(5))
    True
    """
    generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
    return torch.randperm(n, generator=generator)


class Source(Protocol):
    """Where batches come from; one that can begin an epoch at any batch has `epoch_from(seed, epoch, batch)` too."""

    @property
    def n_data(self) -> int | None:
        """Rows of an epoch, where that is known."""

    @property
    def n_batches(self) -> int | None:
        """Batches of an epoch, where that is known."""

    def epoch(self, seed: int, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch, in its order."""

    def example(self) -> Any | None:
        """A row or two of x to look at the model with, where they can be had without side effects."""

    def fingerprint(self) -> dict[str, str]:
        """What tells these data from others, as far as it can be had without side effects."""

    def rng(self) -> dict[str, Any]:
        """The state of generators of its own."""

    def set_rng(self, state: Mapping[str, Any]) -> None:
        """Go back to that state."""


def source(data: Any, *, batch_size: int, dtype: torch.dtype, shuffle: bool = True, name: str = "data") -> Source:
    """What `fit` draws its batches from.

    Args:
        data: (x, target) or (x, target, weight) of arrays or tensors; a Dataset or DataLoader of such pairs; mappings
            with "labels" in place of pairs; `Shards`.
        batch_size: Rows a batch; a DataLoader and `Shards` have their own.
        dtype: Floating-point arrays are cast to it.
        shuffle: Whether rows are gone through in a new order every epoch.
        name: What errors call it.
    """
    found: Source
    if isinstance(data, DataLoader):
        found = _Loader(data)
    elif isinstance(data, Shards):
        found = _Parts(data if shuffle else replace(data, shuffle=False, rank=0, world_size=1), dtype)
    elif _is_dataset(data):
        found = _Items(data, batch_size, shuffle)
    elif isinstance(data, Mapping) or (isinstance(data, (tuple, list)) and len(data) in (2, 3)):
        found = _arrays(parts_of(data), batch_size, dtype, shuffle, name)
    else:
        raise TypeError(
            f"`{name}` must be (x, target), (x, target, weight), a torch Dataset, a DataLoader or Shards; "
            f"got {type(data).__name__}{f' of {len(data)}' if isinstance(data, (tuple, list)) else ''}."
        )
    if found.n_data == 0 or found.n_batches == 0:
        raise ValueError(f"`{name}` must have at least one row, and give at least one batch; got none.")
    return found


def held_out(data: Any, fraction: float, seed: int) -> tuple[Any, Any]:
    """Arrays or a Dataset split at random in training and validation rows."""
    if isinstance(data, (DataLoader, Shards)):
        kind = type(data).__name__
        raise TypeError(f"`validation` must be data of its own where `data` is a {kind}; got a fraction.")
    if not 0 < fraction < 1:
        raise ValueError(f"`validation` must be data or a fraction between 0 and 1; got {fraction}.")
    whole = data if _is_dataset(data) else parts_of(data)
    n = len(whole) if _is_dataset(data) else len(tree_leaves(whole)[0])
    if n < 2:
        raise ValueError(f"`data` must have at least two rows for some to be held out; got {n}.")
    rows = order(n, seed=seed, epoch=-1)
    cut = min(max(round(n * fraction), 1), n - 1)
    if _is_dataset(data):
        return Subset(data, rows[cut:].tolist()), Subset(data, rows[:cut].tolist())
    tensors = tuple(tree_map(torch.as_tensor, part) for part in whole if part is not None)
    return tuple(pick(t, rows[cut:]) for t in tensors), tuple(pick(t, rows[:cut]) for t in tensors)


def _is_dataset(data: Any) -> bool:
    """Whether these are items by number: torch's Datasets, and those of Hugging Face, which are none of them."""
    return isinstance(data, Dataset) or (hasattr(data, "__getitems__") and isinstance(data, Sized))


# ------------------------------------------------------------------------------ the three kinds


@dataclass(frozen=True)
class _Arrays:
    """Rows in memory."""

    x: Any
    target: Any
    weight: Tensor | None
    batch_size: int
    shuffle: bool
    n_data: int

    @property
    def n_batches(self) -> int:
        return -(-self.n_data // self.batch_size)

    def epoch(self, seed: int, epoch: int) -> Iterator[Batch]:
        rows = order(self.n_data, seed=seed, epoch=epoch) if self.shuffle else torch.arange(self.n_data)
        for chosen in rows.split(self.batch_size * 32):  # gathered by the dozen: batches are then slices
            x, target = pick(self.x, chosen), pick(self.target, chosen)
            weight = None if self.weight is None else self.weight[chosen]
            for i in range(0, len(chosen), self.batch_size):
                part = slice(i, i + self.batch_size)
                yield pick(x, part), pick(target, part), None if weight is None else weight[part]

    def example(self) -> Any:
        return pick(self.x, torch.arange(min(self.n_data, 2)))

    def fingerprint(self) -> dict[str, str]:
        return {"x": digest(self.x), "target": digest(self.target), "weight": digest(self.weight)}

    def rng(self) -> dict[str, Any]:
        return {}

    def set_rng(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class _Items:
    """A Dataset, in our order."""

    dataset: Any
    batch_size: int
    shuffle: bool

    @property
    def n_data(self) -> int:
        return len(self.dataset)

    @property
    def n_batches(self) -> int:
        return -(-self.n_data // self.batch_size)

    def epoch(self, seed: int, epoch: int) -> Iterator[Batch]:
        yield from map(parts_of, self.indexed(seed, epoch))

    def indexed(self, seed: int, epoch: int) -> DataLoader[Any]:
        """A loader of an epoch whose batches are numbers of rows before they are read."""
        rows: Sequence[int] = range(self.n_data)
        if self.shuffle:
            rows = order(self.n_data, seed=seed, epoch=epoch).tolist()
        return DataLoader(self.dataset, batch_size=self.batch_size, sampler=rows)

    def example(self) -> Any:
        return parts_of(default_collate([self.dataset[i] for i in range(min(self.n_data, 2))]))[0]

    def fingerprint(self) -> dict[str, str]:
        return _told_items(self.dataset, DataLoader(self.dataset))

    def rng(self) -> dict[str, Any]:
        return {}

    def set_rng(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class _Loader:
    """A DataLoader, which has an order of its own."""

    loader: Any

    @property
    def n_data(self) -> int | None:
        sampler = self.loader.sampler
        return len(sampler) if isinstance(sampler, Sized) else None

    @property
    def n_batches(self) -> int | None:
        return None if self.n_data is None else len(self.loader)

    def epoch(self, seed: int, epoch: int) -> Iterator[Batch]:
        self._begin(epoch)
        yield from map(parts_of, self.loader)

    def indexed(self, seed: int, epoch: int) -> Any | None:
        """The loader, if its batches are numbers of rows before they are read."""
        if isinstance(self.loader.sampler, DistributedSampler):
            raise ValueError(
                "`data` must be the loader of a single process: its batches are dealt to the ranks by `fit`. Leave the "
                "DistributedSampler out."
            )
        if self.n_data is None or self.loader.batch_sampler is None:
            return None
        self._begin(epoch)
        return self.loader

    def _begin(self, epoch: int) -> None:
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(epoch)

    def example(self) -> Any | None:
        if self.n_data is None:
            return None
        items = [self.loader.dataset[i] for i in range(min(len(self.loader.dataset), 2))]
        return parts_of(self.loader.collate_fn(items))[0]

    def fingerprint(self) -> dict[str, str]:
        loader = self.loader
        sampler = type(loader.batch_sampler if loader.batch_size is None else loader.sampler)
        facts = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "collate_fn": loader.collate_fn}
        found = {name: told(value) for name, value in (facts | {"sampler": sampler}).items()}
        return found if self.n_data is None else found | _told_items(loader.dataset, loader)

    def rng(self) -> dict[str, Any]:
        return {name: g.get_state() for name, g in self._generators().items()}

    def set_rng(self, state: Mapping[str, Any]) -> None:
        for name, generator in self._generators().items():
            generator.set_state(state[name])

    def _generators(self) -> dict[str, torch.Generator]:
        found = {"loader": self.loader.generator, "sampler": getattr(self.loader.sampler, "generator", None)}
        return {name: g for name, g in found.items() if g is not None}


@dataclass(frozen=True)
class _Parts:
    """Parquet, read as it is gone through."""

    shards: Shards
    dtype: torch.dtype

    @property
    def n_data(self) -> int:
        return self.shards.n_rows

    @property
    def n_batches(self) -> int | None:
        return self.shards.n_batches

    def epoch(self, seed: int, epoch: int) -> Iterator[Batch]:
        return self.epoch_from(seed, epoch, 0)

    def epoch_from(self, seed: int, epoch: int, batch: int) -> Iterator[Batch]:
        """The batches from number `batch` on, without reading those before."""
        for x, target in self.shards.batches(seed, epoch, batch):
            yield x.to(self.dtype), target.to(self.dtype) if target.is_floating_point() else target, None

    def example(self) -> Tensor:
        return self.shards.example().to(self.dtype)

    def fingerprint(self) -> dict[str, str]:
        return self.shards.fingerprint()

    def rng(self) -> dict[str, Any]:
        return {}

    def set_rng(self, state: Mapping[str, Any]) -> None:
        pass


def _arrays(data: Batch, batch_size: int, dtype: torch.dtype, shuffle: bool, name: str) -> _Arrays:
    def tensor(value: Any) -> Tensor:
        t = torch.as_tensor(value)
        return t.to(dtype) if t.is_floating_point() else t

    x, target = tree_map(tensor, data[0]), tree_map(tensor, data[1])
    rows = {len(t) for t in tree_leaves((x, target)) if t.ndim}
    if len(rows) != 1 or rows == {0}:
        raise ValueError(f"`{name}` must hold as many rows of x as of target, at least 1; got {sorted(rows)}.")
    _check_finite(x, name)
    n = rows.pop()
    if data[2] is None:
        return _Arrays(x, target, None, batch_size, shuffle, n)
    weight = tensor(data[2]).to(dtype)
    if weight.shape != (n,) or not bool((weight >= 0).all() & weight.isfinite().all()) or not bool((weight > 0).any()):
        raise ValueError(f"The weights of `{name}` must be {n} numbers, none negative, not all 0.")
    used = weight > 0
    weight = weight[used] / weight[used].mean()
    return _Arrays(pick(x, used), pick(target, used), weight, batch_size, shuffle, int(used.sum()))


def _check_finite(x: Any, name: str) -> None:
    """Refuse nan in x, and infinity where x is one tensor; one of several inputs may be a mask with -inf."""
    good = torch.isfinite if isinstance(x, Tensor) else lambda t: ~t.isnan()
    for t in tree_leaves(x):
        if not t.is_floating_point() or t.ndim == 0:
            continue
        size = max(1, (1 << 22) // max(1, t[0].numel()))  # in blocks: no second copy of the data
        for i, part in enumerate(t.split(size)):
            fine = good(part)
            if not bool(fine.all()):
                row = i * size + int((~fine.reshape(len(part), -1)).any(1).nonzero()[0])
                raise ValueError(
                    f"`{name}` must hold finite numbers; x has {float(part[~fine][0])} in row {row} as {t.dtype}. "
                    "Leave such rows out, or fill them in."
                )


def pick(value: Any, rows: Tensor | slice) -> Any:
    """Those rows of nested tensors."""
    return value[rows] if isinstance(value, Tensor) else tree_map(lambda t: t[rows], value)


def parts_of(batch: Any) -> Batch:
    """What a batch holds: x, target and, where there is one, weight; x is as `sample` takes it."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise ValueError(f"A batch that is a mapping must have its target as 'labels'; got {sorted(batch)}.")
        return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"], None
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        raise TypeError(
            f"A batch must be (x, target), (x, target, weight) or a mapping with 'labels'; got {type(batch).__name__}."
        )
    return batch[0], batch[1], batch[2] if len(batch) == 3 else None


# ------------------------------------------------------------------------------ items of a data set


def _told_items(dataset: Any, loader: Any) -> dict[str, str]:
    """A few items by number, hashed part by part, and the length; the generators of the process stay as they are.

    Each is read twice, in the worker of a loader that has workers. A part that then differs anywhere is random beyond
    our reach and left out; generators of the process are set to the same state first.
    """
    found = {"dataset": told(type(dataset))}
    if not isinstance(dataset, Sized):
        return found
    found["length"] = str(len(dataset))
    before = rng_state()
    with Restoring(lambda: set_rng_state(before)), Restoring(lambda: set_rng_state(before)):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        chosen = evenly(len(dataset), _LOOKED_AT)
        reader: DataLoader[Any] = DataLoader(
            cast(Any, dataset), batch_size=None, sampler=list(chain(*zip(chosen, chosen, strict=True))),
            num_workers=min(loader.num_workers, 1), multiprocessing_context=loader.multiprocessing_context,
            worker_init_fn=loader.worker_init_fn,
        )  # fmt: skip
        try:
            items = [[digest(part) for part in tree_leaves(item)] for item in reader]
        except (LookupError, TypeError):  # its items have other names than numbers
            return found
    first, second = items[::2], items[1::2]
    for i in range(min(map(len, items))):
        if all(a[i] == b[i] for a, b in zip(first, second, strict=True)):
            found[f"part {i}"] = digest([a[i] for a in first])
    return found


# ------------------------------------------------------------------------------ generators of the process


def rng_state() -> dict[str, Any]:
    """The state of every generator a model or a data set may draw from: torch, numpy, Python."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, python_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else [],
        "numpy": [str(name), torch.from_numpy(np.array(keys, np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(words, dtype=torch.int64), python_gauss],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put all generators back to `state`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
