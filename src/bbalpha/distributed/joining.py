"""The processes of a job, as torchrun starts them: joined, left, and what is said where one of them is lost.

A rank that dies ends the job: the next collective of the others fails, or torchrun ends them. Whoever notices calls the
roll in the store that brought all together. A thread of every rank answers, while it waits for others too, so that the
error names those that are gone.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined] # documented, and not in its __all__

from bbalpha.checks import check_number

T = TypeVar("T")

_EVERY = 1.0  # seconds: how often a rank looks whether the roll was called
_QUIET = 8.0  # seconds without an answer after which it is closed
_GO_ON = (
    "Start the same command again, on as many ranks as there are now: `fit` with a `checkpoint`, and `bbalpha fit`, go "
    "on from their last state."
)


class RankLostError(RuntimeError):
    """Another rank of the job is gone, or no longer answers."""


class _Terminated(SystemExit):
    """SIGTERM: how torchrun ends the ranks that are left."""


@contextmanager
def processes(*, timeout: float = 600.0) -> Iterator[None]:
    """A context in which this process is one of those that torchrun started; one by itself where nobody did.

    Inside of it a failing collective becomes a `RankLostError` that names the rank that is missing. Processes that are
    joined already, by an outer context or by the caller, stay joined.

    Args:
        timeout: Seconds after which a rank that does not answer counts as lost.

    >>> with processes():
    ...     torch.distributed.get_world_size()
    1
    """
    seconds = check_number("timeout", timeout, above=0)
    if dist.is_initialized():
        with _watched():
            yield
        return
    _join(timedelta(seconds=seconds))
    try:
        with _watched():
            yield
    except BaseException:
        if dist.get_world_size() == 1:  # others may wait for this rank: they are not left in order
            dist.destroy_process_group()
        raise
    dist.barrier()  # gloo may abort at exit without
    dist.destroy_process_group()


def device() -> torch.device:
    """Where the model of this rank belongs: the GPU of its number where every rank of the machine has one, or the CPU.

    >>> device().type in ("cpu", "cuda")
    True
    """
    local, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return torch.device("cuda", local) if torch.cuda.device_count() >= ranks else torch.device("cpu")


def on_main(work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, which alone does it, on every rank; its error too.

    >>> with processes():
    ...     on_main(lambda: 3)
    3
    """
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = work()
        except Exception as error:  # noqa: BLE001 - all ranks raise it
            told[1] = error
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    result: T = told[0]
    return result


# ------------------------------------------------------------------------------ joining


def _join(timeout: timedelta) -> None:
    gpu = device()
    if gpu.type == "cuda":
        torch.cuda.set_device(gpu)
    backend = "cpu:gloo,cuda:nccl" if gpu.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


# ------------------------------------------------------------------------------ a rank is lost


@contextmanager
def _watched() -> Iterator[None]:
    """A context that calls the roll where a collective fails, or where SIGTERM ends this process."""
    if _watching.locked():  # an outer context sees to it
        yield
        return
    main = threading.current_thread() is threading.main_thread()
    handled = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with _watching, _answering() as store:
        if handled:
            signal.signal(signal.SIGTERM, _terminate)
        try:
            yield
        except (RuntimeError, _Terminated) as error:
            if not isinstance(error, _Terminated) and not is_collective(error):
                raise
            if handled:  # to the end of the sentence
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _explain(error, store)
        finally:
            if handled and signal.getsignal(signal.SIGTERM) is _terminate:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


_watching = threading.Lock()


@contextmanager
def _answering() -> Iterator[TCPStore | None]:
    """A context in which this rank answers when the roll is called, also while it waits in a collective; the store."""
    store = _store()
    if store is None:
        yield None
        return
    ended, rank = threading.Event(), dist.get_rank()

    def answer() -> None:
        own = _store()
        with suppress(RuntimeError):  # nobody keeps the store any more
            while own is not None and not ended.wait(_EVERY):
                if own.check([_key("called")]):
                    own.set(_key(rank), "here")
                    return

    thread = threading.Thread(target=answer, name="bbalpha roll", daemon=True)
    thread.start()
    try:
        yield store
    finally:
        ended.set()
        thread.join(_QUIET)


def _store() -> TCPStore | None:
    """A connection to the store that brought all together, where there is one."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port or dist.get_world_size() == 1:
        return None
    with suppress(RuntimeError):  # the caller brought them together in another way
        return TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=_QUIET))
    return None


def _key(name: object) -> str:
    return f"bbalpha/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{name}"


def _terminate(number: int, frame: Any) -> NoReturn:
    raise _Terminated(128 + number)


def is_collective(error: Exception) -> bool:
    """Whether an error is one of a collective; those of gloo are told by their text alone."""
    text = str(error)
    return isinstance(error, dist.DistError) or any(name in text for name in ("gloo", "Gloo", "NCCL"))


def _explain(error: BaseException, store: TCPStore | None) -> NoReturn:
    """Raise what is said of a job that cannot go on."""
    world = dist.get_world_size()
    missing, here = [] if store is None else _missing(store, world), f"rank {dist.get_rank()} of {world}"
    if missing:
        many = len(missing) > 1
        names = f"Rank{'s' if many else ''} {', '.join(map(str, missing))} of {world}"
        told = (
            f"{names} no longer answer{'' if many else 's'} (killed, out of memory, or ended by an error), so {here} "
            f"cannot go on. {_GO_ON}"
        )
    elif isinstance(error, _Terminated):
        told = f"The job was ended from outside while all ranks were there; this was {here}. {_GO_ON}"
    else:
        told = f"The ranks lost touch with each other, so {here} cannot go on. {_GO_ON}"
    if isinstance(error, _Terminated):
        sys.stderr.write(f"{told}\n")
        sys.stderr.flush()
        raise SystemExit(error.code) from None
    raise RankLostError(told) from error


def _missing(store: TCPStore, world: int) -> list[int]:
    """The ranks that do not answer; rank 0 where the store that it keeps is gone."""
    missing, since = list(range(world)), time.monotonic()
    try:
        store.set(_key("called"), "")
        while missing and time.monotonic() - since < _QUIET:
            time.sleep(0.05)
            left = [rank for rank in missing if not store.check([_key(rank)])]
            missing, since = left, since if left == missing else time.monotonic()
    except RuntimeError:
        return [0]
    return missing
