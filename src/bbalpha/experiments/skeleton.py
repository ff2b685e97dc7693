"""What every experiment is made of: a frozen config, units of work, a file of results, a folder of what is unfinished.

    kept = open_ledger(path, command="bbalpha reproduce x", quick=False, seed=0, settings=asdict(config))
    state = state_folder(path, settings=asdict(config))
    run_units(kept, units, partial(run_one, config), state=state, jobs=2)     # run_one(config, unit, folder) -> rows
    with spreading("dask", scheduler=address):
        run_units(kept, units, partial(run_one, config), state=state, jobs=None)      # on a cluster, to the same rows

The rows of a unit are in the results as soon as it is done, and it is not run again. A unit that was cut off finds in
its folder what it left there; the folder goes when the rows are in. New is a config, its units and how one is run.
"""

import hashlib
import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from bbalpha._spread import spread
from bbalpha.experiments import results
from bbalpha.experiments.results import Ledger, Row

_STATE = ".state"


@dataclass(frozen=True)
class Unit:
    """A piece of work that is done whole; those of an experiment have as fields what their rows begin with."""

    @property
    def name(self) -> str:
        """A name for a folder."""
        return "-".join(str(part) for part in asdict(self).values())

    @property
    def label(self) -> str:
        """A name for people."""
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())

    @property
    def part(self) -> str:
        """What its seconds are noted under in the results; empty if they are not told apart."""
        return ""

    def done(self, kept: Ledger) -> bool:
        """Whether its rows are in the results."""
        return kept.has(**asdict(self))


_U = TypeVar("_U", bound=Unit)
Work = Callable[[_U, Path], list[Row]]  # a unit and its folder, which may not exist -> its rows


def open_ledger(
    path: Path, *, command: str, quick: bool, seed: int, settings: Mapping[str, Any] | None = None
) -> Ledger:
    """The results in `path`; a quick run and a whole one do not go into the same file."""
    if path.exists() and ("--quick" in results.read(path)["command"]) != quick:
        kinds = ("a whole run", "a quick run") if quick else ("a quick run", "a whole run")
        raise ValueError(
            f"`out` must not hold results of {kinds[0]} where {kinds[1]} is to go; got {path}: "
            "delete it, or give another --out."
        )
    return Ledger(path, command=command + (" --quick" if quick else ""), seed=seed, settings=settings)


def state_folder(path: Path, *, settings: Mapping[str, Any]) -> Path:
    """Where the unfinished of out/<experiment>/<name>.json is; other settings have another folder, so as not to mix."""
    mark = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return path.parents[1] / _STATE / f"{path.parent.name}-{mark}" / path.stem


def forget(folder: Path) -> None:
    """Remove a folder of a state, and those above it that are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    for above in folder.parents:
        if _STATE not in above.parts or not above.is_dir() or any(above.iterdir()):
            return
        above.rmdir()


def run_units(
    kept: Ledger, units: Sequence[_U], work: Work[_U], *, state: Path, jobs: int | None = 1,
    elsewhere: Ledger | None = None,
) -> None:  # fmt: skip
    """Run the units that are not done, in their order, and put their rows into `kept`.

    A unit that others have made needless by the time it would begin is left out.

    Args:
        kept: The results.
        units: All of them.
        work: How one is run. With several jobs it goes to other processes: a module's function, or a `partial` of one.
        state: The folder of what is unfinished; on a cluster one that all its machines see.
        jobs: Units side by side; nothing new is begun once one has failed. None is as the `joblib.parallel_config`
            around it says.
        elsewhere: Where the rows go in place of `kept`, which then notes the seconds alone.
    """
    missing = [unit for unit in units if not unit.done(kept)]
    begun: deque[_U] = deque()

    def needed() -> Iterator[_U]:
        for unit in missing:
            if unit.done(kept):
                bar.update()
            else:
                begun.append(unit)
                yield unit

    with tqdm(total=len(missing), unit="unit", desc=kept.path.stem, disable=None) as bar:
        for rows, seconds in _made(needed(), work, state, jobs):
            unit = begun.popleft()
            if elsewhere is not None:
                elsewhere.add(rows, seconds=0.0)
            kept.add([] if elsewhere is not None else rows, seconds=seconds, part=unit.part)
            forget(state / unit.name)
            bar.update()
            bar.set_postfix_str(f"last: {unit.label}")


@contextmanager
def threads(n: int) -> Iterator[None]:
    """So many threads of torch inside, as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _made(units: Iterable[_U], work: Work[_U], state: Path, jobs: int | None) -> Iterator[tuple[list[Row], float]]:
    """The rows of each unit and the seconds they took, in their order."""
    return spread(partial(_timed, work, state), units, jobs=jobs)


def _timed(work: Work[_U], state: Path, unit: _U) -> tuple[list[Row], float]:
    start = time.perf_counter()
    return work(unit, state / unit.name), time.perf_counter() - start


def extra(name: str) -> Any:
    """The module `name` of a package that only the baselines need."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the baselines need {name.split('.')[0]}; install it with pip install 'bbalpha[baselines]'.",
            name=error.name,
        ) from error
