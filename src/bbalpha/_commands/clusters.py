"""Where the independent pieces of a command run: `--jobs` here, `--backend` and `--scheduler` on a cluster."""

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
