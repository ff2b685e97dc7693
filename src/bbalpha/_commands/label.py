"""`bbalpha label`: a person at the terminal says what rows are, and watches the accuracy climb."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bbalpha._commands.mistakes import mistakes

if TYPE_CHECKING:
    from bbalpha.acquisition import Round
    from bbalpha.acquisition.labels import Label

_BAR = 40


def label(
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A table (CSV or Parquet); or digits, those of scikit-learn.")
    ],
    target: Annotated[
        str, typer.Option("--target", "-t", help="The column of labels, empty where one is asked for.")
    ] = "",
    out: Annotated[
        Path, typer.Option("-o", "--out", help="The file that labels are appended to, and taken up from.")
    ] = Path("labels.csv"),
    most: Annotated[int, typer.Option("--most", "-n", min=0, help="Stop after so many labels; 0 asks for all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of everything.")] = 0,
) -> None:
    """Show the row whose label tells most, ask for it, train again, and print the accuracy on held-out rows.

    Example: bbalpha label digits --most 20

    Every label is on the disk as soon as it is typed. Ctrl-C or Ctrl-D stops; the same command goes on.
    """
    with mistakes():
        if (data == "digits") == bool(target):
            raise ValueError("--target must name the column of labels of a table, and belongs to tables alone.")
        from bbalpha.tabular.labelling import digits_task, table_task
        from bbalpha.tabular.labelling import label as ask_for_labels

        task = table_task(data, target, seed=seed) if target else digits_task()
        try:
            found = ask_for_labels(
                task, out, ask=_Asking(fixed=task.classes is not None), tell=_tell, most=most or None, seed=seed
            )
        except (KeyboardInterrupt, EOFError, typer.Abort) as error:
            typer.echo(f"\nStopped. The labels are in {out}; the same command goes on.")
            raise typer.Exit(130) from error
    typer.echo(f"{len(found.rows)} labels are known. What was typed is in {out}.")


class _Asking:
    """Asks until the answer can be a label; one that is new is asked for twice, as it may be a slip."""

    def __init__(self, *, fixed: bool) -> None:
        self.fixed = fixed

    def __call__(self, row: str, seen: Sequence["Label"]) -> "Label":
        typer.echo(f"\n{row}\n")
        named = ", ".join(map(str, sorted(seen, key=str)[:12])) + (", ..." if len(seen) > 12 else "")
        before = ""
        while True:
            text = input(f"What is it? [{named}] " if named else "What is it? ").strip()
            if text in map(str, seen) or (text and text == before):
                return text
            before = "" if self.fixed else text
            if self.fixed:
                typer.echo(f"It must be one of {named}; got {text!r}.")
            elif text:
                typer.echo(f"{text!r} is new: type it again to add it.")


def _tell(done: "Round") -> None:
    if done.score is None:
        typer.echo(f"{done.n_labels:>5} labels; no labelled rows are held out to judge by.")
        return
    typer.echo(f"{done.n_labels:>5} labels  {'█' * round(_BAR * done.score):{_BAR}}  accuracy {done.score:.3f}")
