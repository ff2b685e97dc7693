"""The command line: `bbalpha COMMAND`, or `python -m bbalpha COMMAND`. Each command calls one library function.

Mistakes of the user are one line on stderr and exit code 2; a traceback is a bug of ours. torch is imported by
the commands that need it, so that --help is quick.
"""

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
from bbalpha._commands.mistakes import mistakes

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

for command in (tables.fit, tables.predict, tables.evaluate, tables.report, tables.serve):
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

        found = audit(model, x, n_passes=n_passes, batch_dim=batch_dim)
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
) -> None:
    """Run the UCI table: alpha networks, their variants and the baselines, on the published splits.

    Example: bbalpha reproduce regression --datasets boston --splits 5
    """
    with mistakes():
        from bbalpha.experiments.regression import reproduce

        chosen = [_number("--alphas", a) for a in _listed(alphas)]
        done = reproduce(
            datasets=_listed(datasets), alphas=chosen, splits=splits, methods=_listed(methods), quick=quick, out=out
        )
    typer.echo(done)


@reproduce_app.command("classification")
def reproduce_classification(
    models: Annotated[str, typer.Option(help="With commas.")] = "dense,cnn",
    alphas: Annotated[str, typer.Option(help="With commas.")] = "0,0.5,1",
    seeds: Annotated[int, typer.Option(min=1, help="How many networks of each kind.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Networks trained side by side, each on one thread.")] = 1,
    quick: _Quick = False,
    out: _Out = Path("results"),
) -> None:
    """Run MNIST with the dense and the convolutional network.

    Example: bbalpha reproduce classification --quick
    """
    with mistakes():
        from bbalpha.experiments.classification import reproduce

        chosen = [_number("--alphas", a) for a in _listed(alphas)]
        done = reproduce(models=_listed(models), alphas=chosen, seeds=seeds, jobs=jobs, quick=quick, out=out)
    typer.echo(done)


@reproduce_app.command("runtime")
def reproduce_runtime(
    ways: Annotated[
        str, typer.Option(help="With commas: loop, ours, shared, balanced, balanced-shared; all if empty.")
    ] = "",
    passes: Annotated[str, typer.Option(help="K, with commas.")] = "1,10,100",
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time of every way.")] = 20.0,
    quick: _Quick = False,
    out: _Out = Path("results"),
) -> None:
    """Run accuracy and log-likelihood against time, for the authors' way and ours.

    Example: bbalpha reproduce runtime --minutes 5
    """
    with mistakes():
        from bbalpha.experiments.runtime import reproduce

        chosen = [int(_number("--passes", k)) for k in _listed(passes)]
        done = reproduce(ways=_listed(ways), passes=chosen, minutes=minutes, quick=quick, out=out)
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

        done = reproduce(alphas=[_number("--alphas", a) for a in _listed(alphas)], quick=quick, out=out)
    typer.echo(done)


def _listed(text: str) -> list[str]:
    """The parts between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{name} must be numbers with commas between them; got {text!r}.") from error


def _made(factory: str, shape: str, batch_dim: int) -> "tuple[nn.Module, Any]":
    """The model and its input out of "module:factory"."""
    module_name, colon, name = factory.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"MODULE:FACTORY must name a module and a function in it, as in nets:make; got {factory!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of the working directory
    make = getattr(import_module(module_name), name, None)
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


def _tried(what: str, call: Callable[[], Any]) -> Any:
    """What `call` returns; whatever goes wrong in code of the user is the user's."""
    try:
        return call()
    except Exception as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


def _sizes(shape: str) -> list[int]:
    try:
        return [int(size) for size in shape.split(",")]
    except ValueError as error:
        raise ValueError(
            f"--shape must be whole numbers with commas between them, as in 32,784; got {shape!r}."
        ) from error


def main() -> None:
    """Entry point of the `bbalpha` command."""
    try:
        code = app(prog_name="bbalpha", standalone_mode=False)
    except _UsageError as error:
        typer.echo(f"bbalpha: {error.format_message()}", err=True)
        code = 2
    except typer.Abort:
        code = 130
    sys.exit(code or 0)
