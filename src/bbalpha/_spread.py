"""Independent pieces of work, side by side: on the cores of this machine or on a cluster that exists.

    with spreading("dask", scheduler="tcp://10.0.0.1:8786"):
        for result in spread(train, pieces):        # in the order of the pieces
            ...

All goes through joblib, so that a `joblib.parallel_config` of the caller does the same. The pieces hang neither on the
backend nor on the number of workers, and each runs with as many threads as its sender has: results are equal bit for
bit wherever versions and processors are. A Dask cluster gives the pieces of a worker that dies to another one.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import RLock
from typing import Any, TypeVar

import torch

from bbalpha.checks import check_count

BACKENDS = ("loky", "dask", "ray")  # what can be asked for
_P = TypeVar("_P")
_R = TypeVar("_R")
_Deal = Callable[[Iterator[Callable[[], Any]]], Iterator[Any]]  # calls -> what they give, in their order
_DEAL: ContextVar[_Deal | None] = ContextVar("who else takes pieces", default=None)
_ALONE = RLock()  # generators of torch belong to the whole process: no two pieces at once in one


def spread(work: Callable[[_P], _R], pieces: Iterable[_P], *, jobs: int | None = None) -> Iterator[_R]:
    """The result of `work` for every piece, in their order, as they come; nothing new is begun once one has failed.

    Args:
        work: A function of a module, or a `partial` of one.
        pieces: Whatever pickle can carry; taken one by one.
        jobs: So many at once; 1 is here and now, None as the `joblib.parallel_config` around it says. Inside of
            `dealing` all but 1 is as that says. A process of this machine that dies is a ChildProcessError.

    >>> list(spread(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    if jobs == 1:
        return map(work, pieces)
    joblib = _joblib()
    threads = torch.get_num_threads()
    # one call without arguments a piece: joblib would leave large arguments with one worker, and lose them with it
    alone = (partial(_alone, work, piece, threads) for piece in pieces)
    deal = _DEAL.get()
    if deal is not None:
        return deal(alone)
    calls = (joblib.delayed(call)() for call in alone)
    backend, _ = joblib.parallel.get_active_backend()
    form = "generator" if backend.supports_return_generator else "list"  # Ray's gives all at the end
    return _whole(iter(joblib.Parallel(n_jobs=jobs, batch_size=1, return_as=form)(calls)))


@contextmanager
def dealing(deal: _Deal | None) -> Iterator[None]:
    """A context in which `deal` does the pieces of `spread`, in place of joblib; with None nobody else does.

    >>> with dealing(lambda calls: (call() for call in calls)):
    ...     list(spread(abs, [-1, 2]))
    [1, 2]
    """
    token = _DEAL.set(deal)
    try:
        yield
    finally:
        _DEAL.reset(token)


@contextmanager
def spreading(backend: str = "loky", *, scheduler: str | None = None, jobs: int | None = None) -> Iterator[None]:
    """A context in which `spread` hands its pieces to a backend of joblib.

    Args:
        backend: "loky" is processes of this machine; "dask" and "ray" are clusters that exist.
        scheduler: The address of the cluster; None with "ray" is a cluster of this machine alone.
        jobs: Pieces at once with "loky"; None is 1. A cluster has as many as its workers have threads.

    >>> with spreading("loky", jobs=1):
    ...     list(spread(abs, [-1, 2]))
    [1, 2]
    """
    if backend not in BACKENDS:
        raise ValueError(f"`backend` must be loky, dask or ray; got {backend!r}.")
    if (scheduler is not None) and backend == "loky":
        raise ValueError(f"`scheduler` is of a cluster: give `backend` as dask or ray with it; got {scheduler!r}.")
    if jobs is not None and backend != "loky":
        raise ValueError(f"`jobs` must be left out with {backend}, whose workers are counted; got {jobs}.")
    if _DEAL.get() is not None and (backend != "loky" or jobs is not None):
        raise ValueError("`jobs` and `backend` must be left out under torchrun, whose processes take the pieces.")
    if backend == "loky":
        with _joblib().parallel_config("loky", n_jobs=check_count("jobs", 1 if jobs is None else jobs)):
            yield
    elif backend == "dask":
        with _dask(scheduler) as client, _joblib().parallel_config("dask", client=client):
            yield
    else:
        with _ray(scheduler), _joblib().parallel_config("ray", n_jobs=-1):
            yield


def _alone(work: Callable[[_P], _R], piece: _P, threads: int) -> _R:
    """The result of a piece, with so many threads; what it hands on in turn stays in this process."""
    with _ALONE, _joblib().parallel_config("sequential"), dealing(None):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return work(piece)
        finally:
            torch.set_num_threads(before)


def _whole(results: Iterator[_R]) -> Iterator[_R]:
    """`results`; where a process of this machine has died, a sentence."""
    try:
        yield from results
    except BrokenExecutor as error:
        raise ChildProcessError(
            "A process that worked on a piece has died, killed or out of memory. Start the same again; fewer jobs need "
            "less memory."
        ) from error


@contextmanager
def _dask(scheduler: str | None) -> Iterator[Any]:
    if scheduler is None:
        raise ValueError("`scheduler` must be the address of a Dask scheduler, as in tcp://10.0.0.1:8786; got none.")
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError("Dask clusters need distributed: pip install 'bbalpha[cluster]'.") from error
    try:
        client = Client(scheduler, set_as_default=False, timeout=20)
    except (OSError, ValueError) as error:
        raise ConnectionError(f"`scheduler` must be a Dask scheduler that answers; {scheduler!r} does not.") from error
    with client:
        yield client


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError as error:
        raise ImportError("Ray clusters need ray: pip install 'ray>=2.60'.") from error
    ours = not ray.is_initialized()
    if ours:
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    register_ray()
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


def _joblib() -> Any:
    try:
        import joblib
    except ImportError as error:
        raise ImportError("Work side by side needs joblib: pip install 'bbalpha[sklearn]'.") from error
    return joblib
