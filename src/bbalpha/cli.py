"""The command line: `bbalpha COMMAND`, or `python -m bbalpha COMMAND`. Each command calls one library function.

Mistakes of the user are one line on stderr and exit code 2; a traceback is a bug of ours. torch is imported by
the commands that need it, so that --help is quick.
"""

import math
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
except ImportError as error:
    raise SystemExit("The command line needs typer: pip install 'bbalpha[cli]'.") from error

from bbalpha._commands import tables
from bbalpha._commands.clusters import Backend, Jobs, Scheduler, on_ranks
from bbalpha._commands.label import label
from bbalpha._commands.mistakes import listed, mistakes, numbers

if TYPE_CHECKING:
    from torch import nn

# missing arguments and unknown commands too; typer exports no name for it
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="Make the dropout network you already have Bayesian: keep the model, change the loss.",
    pretty_exceptions_enable=False,
)

data_app = typer.Typer(help="The data sets of the paper.")
app.add_typer(data_app, name="data")
reproduce_app = typer.Typer(help="The experiments of the paper; each can be stopped and goes on where it was.")
app.add_typer(reproduce_app, name="reproduce")

for command in (tables.fit, tables.predict, tables.evaluate, tables.report, tables.serve, label):
    app.command()(command)

_Quick = Annotated[bool, typer.Option("--quick", help="A small size that takes a minute, to see it run.")]
_Out = Annotated[Path, typer.Option(help="Folder of the results (JSON) and of the states of unfinished runs.")]


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(version_of("bbalpha"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def doctor(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="A function that returns the model, or (model, x).")
    ],
    shape: Annotated[str, typer.Option(help="Shape of x where FACTORY returns the model alone: 32,784.")] = "",
    n_passes: Annotated[int, typer.Option(min=2, help="How many passes are compared.")] = 8,
    batch_dim: Annotated[int, typer.Option(min=0, help="The axis of x that counts the rows.")] = 0,
) -> None:
    """Print every random site of a model, and whether its passes differ; exit 1 if they do not.

    Example: bbalpha doctor nets:make --shape 32,784
    """
    with mistakes():
        model, x = _made(factory, shape, batch_dim)
        from bbalpha.convert import audit

        try:
            found = audit(model, x, n_passes=n_passes, batch_dim=batch_dim)
        except (RuntimeError, ArithmeticError, LookupError, AttributeError) as error:  # in the code of the model
            raise ValueError(f"the model fails on x: {type(error).__name__}: {error}") from error
    typer.echo(str(found))
    raise typer.Exit(0 if found.differed else 1)


@data_app.command("list")
def data_list() -> None:
    """Print the data sets of the paper, and where each was found.

    Example: bbalpha data list
    """
    with mistakes():
        from bbalpha.data.sets import catalogue

        entries = catalogue()
    for entry in entries:
        place = str(entry.paths[0].parent if len(entry.paths) > 1 else entry.paths[0]) if entry.paths else "not here"
        typer.echo(f"{entry.name:9} {entry.size:21} {entry.what:35} {entry.licence:13} {place}")


@data_app.command("fetch")
def data_fetch(
    names: Annotated[list[str] | None, typer.Argument(help="As `data list` has them; all but year if none.")] = None,
) -> None:
    """Download data sets that are not on this machine into the cache folder, and print where they are.

    Example: bbalpha data fetch boston yacht
    """
    with mistakes():
        from bbalpha.data.sets import catalogue, fetch

        for name in names or [entry.name for entry in catalogue() if entry.name != "year"]:  # year: 200 MB
            for path in fetch(name):
                typer.echo(f"{name:9} {path}")


@reproduce_app.command("regression")
def reproduce_regression(
    datasets: Annotated[str, typer.Option(help="As `data list` has them, with commas; all nine if empty.")] = "",
    alphas: Annotated[str, typer.Option(help="With commas.")] = "0,0.5,1",
    splits: Annotated[int, typer.Option(min=1, help="At most so many of the published splits.")] = 20,
    methods: Annotated[str, typer.Option(help="With commas: bbalpha, its variants and baselines; all if empty.")] = "",
    quick: _Quick = False,
    out: _Out = Path("results"),
    jobs: Jobs = 0,
    backend: Backend = "loky",
    scheduler: Scheduler = "",
) -> None:
    """Run the UCI table: alpha networks, their variants and the baselines, on the published splits.

    Example: bbalpha reproduce regression --datasets boston --splits 5
    """
    with mistakes():
        from bbalpha._commands.clusters import spread_over
        from bbalpha.experiments.regression import reproduce

        chosen = numbers("--alphas", alphas)
        with spread_over(backend, scheduler, jobs):
            done = reproduce(
                datasets=listed("--datasets", datasets, least=0), alphas=chosen, splits=splits,
                methods=listed("--methods", methods, least=0), quick=quick, out=out.resolve(), jobs=None,
            )  # fmt: skip
    typer.echo(done)


@reproduce_app.command("classification")
def reproduce_classification(
    models: Annotated[str, typer.Option(help="With commas.")] = "dense,cnn",
    alphas: Annotated[str, typer.Option(help="With commas.")] = "0,0.5,1",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="How many networks of each kind.")] = 3,
    quick: _Quick = False,
    out: _Out = Path("results"),
    jobs: Jobs = 0,
    backend: Backend = "loky",
    scheduler: Scheduler = "",
) -> None:
    """Run MNIST with the dense and the convolutional network.

    Example: bbalpha reproduce classification --quick
    """
    with mistakes():
        from bbalpha._commands.clusters import spread_over
        from bbalpha.experiments.classification import reproduce

        chosen = numbers("--alphas", alphas)
        alone = backend == "loky" and jobs < 2
        with spread_over(backend, scheduler, jobs):
            done = reproduce(
                models=listed("--models", models), alphas=chosen, seeds=seeds, jobs=1 if alone else None, quick=quick,
                out=out.resolve(),
            )  # fmt: skip
    typer.echo(done)


@reproduce_app.command("runtime")
def reproduce_runtime(
    ways: Annotated[
        str, typer.Option(help="With commas: loop, ours, shared, balanced, balanced-shared; all if empty.")
    ] = "",
    passes: Annotated[str, typer.Option(help="K, with commas.")] = "1,10,100",
    minutes: Annotated[float, typer.Option(min=0.01, max=1e5, help="Training time of every way.")] = 20.0,
    quick: _Quick = False,
    out: _Out = Path("results"),
) -> None:
    """Run accuracy and log-likelihood against time, for the authors' way and ours.

    Example: bbalpha reproduce runtime --minutes 5
    """
    with mistakes():
        from bbalpha.experiments.runtime import reproduce

        chosen = _wholes("--passes", passes, least=1)
        done = reproduce(ways=listed("--ways", ways, least=0), passes=chosen, minutes=minutes, quick=quick, out=out)
    typer.echo(done)


@reproduce_app.command("adversarial")
def reproduce_adversarial(
    alphas: Annotated[str, typer.Option(help="Of the dropout networks, with commas.")] = "0,0.5,1",
    quick: _Quick = False,
    out: _Out = Path("results"),
) -> None:
    """Run the attacks on MNIST, and their detection.

    Example: bbalpha reproduce adversarial --quick
    """
    with mistakes():
        from bbalpha.experiments.adversarial import reproduce

        done = reproduce(alphas=numbers("--alphas", alphas), quick=quick, out=out)
    typer.echo(done)


@reproduce_app.command("active")
def reproduce_active(
    datasets: Annotated[
        str, typer.Option(help="With commas: mnist, repeated_mnist_x2, repeated_mnist_x5.")
    ] = "repeated_mnist_x2,mnist,repeated_mnist_x5",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="How many runs of each method.")] = 5,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Runs side by side, each on one thread.")] = 1,
    quick: _Quick = False,
    out: _Out = Path("results"),
) -> None:
    """Run active learning on MNIST and Repeated MNIST: random, BALD, BatchBALD and ours.

    Example: bbalpha reproduce active --datasets repeated_mnist_x2 --seeds 1
    """
    with mistakes():
        from bbalpha.experiments.active import reproduce

        done = reproduce(datasets=listed("--datasets", datasets), seeds=seeds, jobs=jobs, quick=quick, out=out)
    typer.echo(done)


@reproduce_app.command("testbed")
def reproduce_testbed(
    agents: Annotated[str, typer.Option(help="With commas, as the table has them; all if empty.")] = "",
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Problems of each kind; 10 is the whole sweep.")] = 3,
    choose: Annotated[bool, typer.Option("--choose", help="Compare candidates on problems of other seeds.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Pieces of work side by side, each on one thread.")] = 1,
    quick: _Quick = False,
    out: _Out = Path("results"),
) -> None:
    """Run the Neural Testbed: what agents know about labels of several inputs together.

    Example: bbalpha reproduce testbed --seeds 10
    """
    with mistakes():
        from bbalpha.experiments.testbed import reproduce

        done = reproduce(
            agents=listed("--agents", agents, least=0), seeds=seeds, choose=choose, jobs=jobs, quick=quick, out=out
        )
    typer.echo(done)


def _made(factory: str, shape: str, batch_dim: int) -> "tuple[nn.Module, Any]":
    """The model and its input out of "module:factory"."""
    module_name, colon, name = factory.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"MODULE:FACTORY must name a module and a function in it, as in nets:make; got {factory!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of the working directory
    make = getattr(_imported(module_name), name, None)
    if not callable(make):
        raise ValueError(f"FACTORY must be a function of {module_name}; {name!r} is not.")

    import torch

    made = _tried(f"{factory} fails", make)
    model, x = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"FACTORY must return a torch.nn.Module, or one and its input; got {type(model).__name__}.")
    if x is None:
        if not shape:
            raise ValueError(
                "FACTORY must return (model, x), or --shape must give the shape of x, as in --shape 32,784."
            )
        x = torch.randn(_sizes(shape))

    from bbalpha._engine.inputs import Inputs
    from bbalpha._engine.shadows import shadowed
    from bbalpha._engine.sites import switched_on

    inputs = Inputs.of(x, batch_dim)
    with torch.no_grad(), shadowed(model, evaluation=False, use="trial") as live, switched_on(live):
        _tried("the model fails on x", lambda: inputs.fresh().call(live))
    return model, x


def _imported(name: str) -> Any:
    """A module of the user; whatever goes wrong in it is told in one line."""
    try:
        return import_module(name)
    except ImportError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"the module {name} fails: {type(error).__name__}: {error}") from error


def _tried(what: str, call: Callable[[], Any]) -> Any:
    """What `call` returns; whatever goes wrong in code of the user is the user's."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


def _sizes(shape: str) -> list[int]:
    sizes = _wholes("--shape", shape, least=0)
    if math.prod(sizes) > 2**31:
        raise ValueError(f"--shape must have at most 2^31 numbers; got {shape!r}.")
    return sizes


def _wholes(name: str, text: str, *, least: int) -> list[int]:
    parts = listed(name, text)
    if not all(re.fullmatch(r"\+?[0-9]{1,18}", part) and int(part) >= least for part in parts):
        raise ValueError(f"{name} must be whole numbers of at least {least}, as in 32,784; got {text!r}.")
    return [int(part) for part in parts]


def main() -> None:
    """Entry point of the `bbalpha` command."""
    sys.exit(on_ranks(_run))


def _run() -> int:
    """Do what the arguments of the process say; the exit code."""
    try:
        return app(prog_name="bbalpha", standalone_mode=False) or 0
    except _UsageError as error:
        typer.echo(f"bbalpha: {error.format_message()}", err=True)
        return 2
    except typer.Abort:
        return 130
