"""Where the pieces of a command run: `--jobs` here, `--backend` and `--scheduler` on a cluster, or torchrun."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated

import typer

Jobs = Annotated[int, typer.Option(min=0, max=1024, help="Pieces side by side on this machine; 0 is one.")]
Backend = Annotated[str, typer.Option(help="loky is this machine; dask or ray is a cluster that exists.")]
Scheduler = Annotated[str, typer.Option(metavar="ADDRESS", help="Of the cluster, as in tcp://10.0.0.1:8786.")]


def spread_over(backend: str, scheduler: str, jobs: int) -> AbstractContextManager[None]:
    """A context in which pieces of work go where the options say."""
    from bbalpha._spread import spreading

    return spreading(backend, scheduler=scheduler or None, jobs=jobs or None)


def on_ranks(run: Callable[[], int]) -> int:
    """The exit code of a command, which under torchrun rank 0 does, and the others take pieces of its work."""
    job = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if not job or os.environ["WORLD_SIZE"] == "1" or sys.argv[1:2] not in (["fit"], ["reproduce"]):
        return run()
    from bbalpha.distributed import RankLostError
    from bbalpha.distributed.pieces import on_all_ranks

    try:
        return on_all_ranks(run) or 0
    except RankLostError as error:
        typer.echo(f"bbalpha: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        return 130
