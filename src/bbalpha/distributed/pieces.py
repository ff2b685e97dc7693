"""Independent pieces of work on all ranks: rank 0 does the work and deals out its pieces, the others take them.

    on_all_ranks(work)      # `work` runs on rank 0 alone; what it hands to `spread` goes to all ranks

So a program that knows of one process only, such as `bbalpha fit`, uses all that torchrun started. Ranks get a piece
each, and the next when all have ended theirs; a rank that dies ends the job.
"""

import pickle  # nosec B403 # nothing of others is read with it
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch.distributed as dist

from bbalpha._spread import dealing
from bbalpha.distributed.joining import is_collective, processes

T = TypeVar("T")

_PATIENCE = 30 * 86400.0  # seconds a piece may take; a rank that dies is noticed without
_END = "end"


def on_all_ranks(work: Callable[[], T]) -> T | None:
    """What `work` gives on rank 0, whose pieces go to all ranks; None on the others, when it has ended.

    >>> on_all_ranks(lambda: 3)
    3
    """
    with processes(timeout=_PATIENCE):
        if dist.get_rank():
            while _took_part():
                pass
            return None
        try:
            with dealing(_dealt):
                result = work()
        except Exception as error:
            if not is_collective(error):
                _round([_END] * dist.get_world_size())
            raise
        _round([_END] * dist.get_world_size())
    return result


def _dealt(calls: Iterator[Callable[[], T]]) -> Iterator[T]:
    """On rank 0: what each call gives, in their order."""
    while some := list(islice(calls, dist.get_world_size())):
        idle = dist.get_world_size() - len(some)
        for result, error in _round([*some, *[None] * idle])[: len(some)]:
            if error is not None:
                raise error
            yield result


def _took_part() -> bool:
    """On the other ranks: whether there was a round."""
    return bool(_round(None))


def _round(calls: list[Any] | None) -> list[Any]:
    """Each rank does its call, and rank 0 has the results of all; nothing at the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, calls, src=0)
    if mine[0] == _END:
        return []
    found: list[Any] = [None] * world
    dist.gather_object(None if mine[0] is None else _tried(mine[0]), None if rank else found, dst=0)
    return found


def _tried(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a call gives, or its error, as it can be sent."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - rank 0 raises it
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 - what was written in this line # nosec B301
        except Exception:  # noqa: BLE001 - errors of others may be anything
            return None, RuntimeError(f"{type(error).__name__}: {error}")
        return None, error
