"""Training rows that do not fit into memory: Parquet files, shuffled as they are read, from any batch on.

    rows = Shards("rows/", x=["size", "rooms"], target=["price"], batch_size=128)
    fit(net, rows, objective=..., epochs=3, checkpoint="run", checkpoint_every=1000)

The order of an epoch follows from (seed, epoch) alone: row groups in a random order, then the rows of so many
neighbours in it as fill the buffer. Where a batch begins is known from the files' footers, so that a run that is
resumed reads from there on, one buffer too much at most.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bbalpha._kernels import epoch_seed
from bbalpha._parquet import check_columns, damage_named, group_sizes, parquet_files, told_apart
from bbalpha.checks import check_count, check_flag

Group = tuple[Path, int, int]  # file, number of a row group there, its rows


@dataclass
class Shards:
    """Batches (x, target) out of Parquet, in bounded memory; `fit` takes it as data.

    Going through it in a loop of one's own is one epoch, or what is left of it; `state_dict` and `load_state_dict` keep
    and set where it is.

    Args:
        source: A Parquet file, or a folder whose files are taken by their names.
        x: Columns of the inputs (N, F), all numbers.
        target: The columns of the target (N, D); a name alone gives (N,), such as classes.
        batch_size: Rows a batch.
        buffer: Rows that are shuffled among each other, about.
        shuffle: Whether the order is random; else it is that of the files.
        rank: Which of `world_size` readers this is: each has row groups of its own and as many rows as the others, the
            few that this leaves over are others in every epoch.
        world_size: How many there are.
        seed: Of the order, in a loop of one's own; `fit` gives its own.
    """

    source: str | os.PathLike[str]
    x: Sequence[str]
    target: str | Sequence[str]
    batch_size: int = 32
    buffer: int = 65_536
    shuffle: bool = True
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    _at: dict[str, int] = field(default_factory=lambda: {"epoch": 0, "batch": 0}, init=False)

    def __post_init__(self) -> None:
        self.batch_size, self.buffer = (check_count(n, getattr(self, n)) for n in ("batch_size", "buffer"))
        self.world_size = check_count("world_size", self.world_size)
        self.rank = check_count("rank", self.rank, least=0, most=self.world_size - 1)
        self.shuffle = check_flag("shuffle", self.shuffle)
        if isinstance(self.x, str) or not self.x or not self.target:
            raise ValueError(
                f"`x` must be a list of columns and `target` one or more; got {self.x!r}, {self.target!r}."
            )
        self._targets = [self.target] if isinstance(self.target, str) else list(self.target)
        self.files = parquet_files(self.source)
        self.groups = group_sizes(self.files)
        check_columns(self.files, [*self.x, *self._targets])
        if len(self.groups) < self.world_size:
            raise ValueError(
                f"`source` must have a row group for each of {self.world_size} readers; it has {len(self.groups)}. "
                "Write it with smaller row groups."
            )

    @property
    def n_rows(self) -> int:
        """Of the files, for all readers together."""
        return sum(rows for _, _, rows in self.groups)

    @property
    def n_batches(self) -> int | None:
        """Batches of an epoch; None where that differs from epoch to epoch, as it may for one of several readers."""
        return -(-self.n_rows // self.batch_size) if self.world_size == 1 else None

    def batches(self, seed: int, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from number `start` on."""
        groups, rows = self._order(seed, epoch)
        at, end = start * self.batch_size, rows
        left: list[tuple[Tensor, Tensor]] = []  # read and not yet given, less than a batch
        first = 0
        for i, window in enumerate(_windows(groups, self.buffer)):
            size = sum(n for _, _, n in window)
            if first + size > at and first < end:
                x, target = (part[max(0, at - first) : end - first] for part in self._read(window, seed, epoch, i))
                if left:
                    x, target = torch.cat([left[0][0], x]), torch.cat([left[0][1], target])
                whole = len(x) - (len(x) % self.batch_size if first + size < end else 0)
                for j in range(0, whole, self.batch_size):
                    yield x[j : min(j + self.batch_size, whole)], target[j : min(j + self.batch_size, whole)]
                left = [(x[whole:], target[whole:])] if whole < len(x) else []
            first += size

    def example(self) -> Tensor:
        """Two rows of x."""
        return self._columns(self.groups[0])[0][:2]

    def fingerprint(self) -> dict[str, str]:
        """What tells these rows, and their order, from others."""
        names = ("x", "target", "batch_size", "buffer", "shuffle", "rank", "world_size")
        files = "; ".join(" ".join(map(str, told.values())) for told in told_apart(self.files))
        return {"files": files} | {name: str(getattr(self, name)) for name in names}

    # ---- a loop of one's own

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches that are left of the epoch; the next time those of the next one."""
        for batch in self.batches(self.seed, self._at["epoch"], self._at["batch"]):
            self._at["batch"] += 1
            yield batch
        self._at = {"epoch": self._at["epoch"] + 1, "batch": 0}

    def state_dict(self) -> dict[str, Any]:
        """Where it is: the batch after the last one that was given."""
        return {"seed": self.seed, **self._at, "rows": self.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if state["rows"] != self.fingerprint():
            raise ValueError("`state` must be of the same rows in the same order; it is of others.")
        self.seed, self._at = state["seed"], {"epoch": state["epoch"], "batch": state["batch"]}

    # ---- rows

    def _order(self, seed: int, epoch: int) -> tuple[list[Group], int]:
        """The row groups of this reader in their order, and how many rows of them it gives."""
        groups = self.groups
        if self.shuffle:
            groups = [groups[i] for i in torch.randperm(len(groups), generator=_generator(seed, epoch)).tolist()]
        shares = [groups[r :: self.world_size] for r in range(self.world_size)]
        return shares[self.rank], min(sum(n for _, _, n in share) for share in shares)

    def _read(self, window: Sequence[Group], seed: int, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        x, target = (torch.cat(parts) for parts in zip(*map(self._columns, window), strict=True))
        if not self.shuffle:
            return x, target
        rows = torch.randperm(len(x), generator=_generator(seed, epoch, number + 1))
        return x[rows], target[rows]

    def _columns(self, group: Group) -> tuple[Tensor, Tensor]:
        """Inputs (n, F) and target of a row group."""
        from pyarrow import parquet

        path, number, _ = group
        with damage_named(path), parquet.ParquetFile(path) as file:
            table = file.read_row_group(number, columns=[*self.x, *self._targets])
        try:
            x = np.stack([np.asarray(table[name].to_numpy(), np.float32) for name in self.x], 1)
            targets = [table[name].to_numpy() for name in self._targets]
            kept = np.int64 if all(t.dtype.kind in "iub" for t in targets) else np.float32
            target = np.stack([np.asarray(t, kept) for t in targets], 1)
        except (TypeError, ValueError) as error:
            raise ValueError(f"The columns of `x` and `target` must hold numbers in {str(path)!r}; {error}.") from error
        return torch.from_numpy(x), torch.from_numpy(target[:, 0] if isinstance(self.target, str) else target)


def _generator(seed: int, epoch: int, window: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(epoch_seed(epoch_seed(seed, epoch), window))


def _windows(groups: Sequence[Group], buffer: int) -> Iterator[list[Group]]:
    """Neighbours that fill the buffer, or are the last."""
    window: list[Group] = []
    for group in groups:
        window.append(group)
        if sum(n for _, _, n in window) >= buffer:
            yield window
            window = []
    if window:
        yield window
