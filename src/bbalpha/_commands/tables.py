"""The commands for tables and models: fit, predict, evaluate, report, serve."""

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bbalpha._commands.clusters import Backend, Jobs, Scheduler, spread_over
from bbalpha._commands.mistakes import mistakes, number

if TYPE_CHECKING:
    from bbalpha.tabular.model import TableModel

_Data = Annotated[
    str, typer.Argument(metavar="DATA", help="CSV (or .tsv, .csv.gz) or Parquet; - reads CSV from stdin.")
]
_Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A folder that `bbalpha fit` wrote.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for scripts.")]
_BUDGETS = ("quick", "standard", "thorough")
_WORDS = {
    "nll": "negative log-likelihood a row; smaller is better", "rmse": "typical error", "mae": "mean absolute error",
    "r2": "share of the variance explained", "coverage90": "share of targets inside the 90 % intervals",
    "width90": "mean width of the 90 % intervals", "accuracy": "share of right labels",
    "brier": "squared error of the probabilities", "ece": "how far confidence is from accuracy",
    "unusual": "share of rows flagged as unusual",
}  # fmt: skip


def fit(
    data: _Data,
    target: Annotated[str, typer.Option("--target", "-t", help="The column to predict.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")] = Path("model"),
    task: Annotated[str, typer.Option(help="auto, regression or classification.")] = "auto",
    alpha: Annotated[str, typer.Option(help="A number, or auto to choose among 0, 0.5 and 1.")] = "0.5",
    budget: Annotated[str, typer.Option(help="quick, standard, thorough, or a time: 90s, 2m, 1h.")] = "standard",
    held_out: Annotated[float, typer.Option(help="The share of rows held out to judge the model by.")] = 0.1,
    group: Annotated[str, typer.Option(help="Rows equal in this column are held out together.")] = "",
    time: Annotated[str, typer.Option(help="The last rows by this column are held out.")] = "",
    drop: Annotated[str, typer.Option(help="Columns not to use, with commas.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of everything.")] = 0,
    jobs: Jobs = 0,
    backend: Backend = "loky",
    scheduler: Scheduler = "",
    as_json: _Json = False,
) -> None:
    """Fit a model to a table: numbers, text, dates and gaps as they come.

    Example: bbalpha fit houses.csv --target price -o model

    Ctrl-C leaves what was trained so far; the same command goes on.
    """
    with mistakes():
        from bbalpha._files import remove
        from bbalpha.checkpoint import check_replaceable
        from bbalpha.estimators.memory import remembering
        from bbalpha.tabular.files import read_table
        from bbalpha.tabular.fitting import fit_table

        check_replaceable(Path(os.path.realpath(out)))
        frame = read_table(data)
        part = out.with_name(f"{out.name}.part")
        typer.echo(f"{data}: {len(frame)} rows, {frame.shape[1]} columns.", err=True)
        try:
            with remembering(part), spread_over(backend, scheduler, jobs):
                model = fit_table(
                    frame, target, task=_task(task), alpha="auto" if alpha == "auto" else number("--alpha", alpha),
                    budget=_budget(budget), held_out=held_out, group=group or None, time_column=time or None,
                    leave_out=[name.strip() for name in drop.split(",") if name.strip()], seed=seed,
                    verbose=True, source=Path(data).name,
                )  # fmt: skip
        except KeyboardInterrupt as error:
            typer.echo(f"bbalpha: stopped. What was trained is in {part}; the same command goes on.", err=True)
            raise typer.Exit(130) from error
        model.save(out)
        remove(part)
    typer.echo(_json(_facts(model, out)) if as_json else _fitted(model, out, data))


def predict(
    model: _Model,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="CSV or Parquet, or a folder of Parquet; - reads CSV from stdin.")
    ],
    out: Annotated[
        str,
        typer.Option("-o", "--out", help="CSV or Parquet; - is stdout. With a folder or --jobs, a folder of parts."),
    ] = "-",
    coverage: Annotated[float, typer.Option(help="Of the interval from low to high.")] = 0.9,
    n_passes: Annotated[int, typer.Option(min=0, help="0 takes those of the model.")] = 0,
    seed: Annotated[int, typer.Option(min=-1, help="Of the passes; -1 takes that of the model.")] = -1,
    inputs: Annotated[bool, typer.Option("--inputs", help="Write the columns of DATA too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON records instead of a table.")] = False,
    jobs: Annotated[
        int, typer.Option(min=0, help="Parquet larger than memory: parts, so many side by side. The same call goes on.")
    ] = 0,
    rank: Annotated[int, typer.Option(min=-1, help="Which of --world-size callers this is.")] = -1,
    world_size: Annotated[int, typer.Option(min=0, help="Callers of the same; torchrun tells without.")] = 0,
) -> None:
    """Predict the rows of a table: mean, std and interval, or class probabilities, and what is unusual.

    Example: bbalpha predict model new.csv -o out.csv
    """
    if jobs or world_size or os.path.isdir(data) or os.environ.get("WORLD_SIZE", "1") != "1":
        options: dict[str, Any] = {"coverage": coverage, "inputs": inputs, "n_passes": n_passes or None}
        place = {"rank": rank, "world_size": world_size} if world_size else {}
        _predict_parts(model, data, out, as_json, options | place | {"seed": None if seed < 0 else seed}, jobs or 1)
        return
    with mistakes():
        from bbalpha.tabular.files import read_table, write_table
        from bbalpha.tabular.model import TableModel

        loaded = TableModel.load(model).asked(n_passes=n_passes or None, seed=None if seed < 0 else seed)
        frame = read_table(data, dates=False)
        found = loaded.predict(frame, coverage=coverage)
        unusual = int(found["unusual"].sum())
        if inputs:
            found = frame.join(found.rename(columns=lambda name: name + " (predicted)" * (name in frame)))
        if as_json:
            _write_text(found.to_json(orient="records", indent=1, date_format="iso") + "\n", out)
        else:
            write_table(found, out)
    where = "" if out == "-" else f" -> {out}"
    typer.echo(f"{len(found)} rows, {unusual} of them unusual{where}", err=True)


def _predict_parts(
    model: Path, data: str, out: str, as_json: bool, options: dict[str, Any], jobs: int
) -> None:  # fmt: skip
    with mistakes():
        from bbalpha.tabular.large import predict_parquet

        if as_json or out == "-" or Path(out).suffix.lower() == ".csv":
            raise ValueError(
                f"--out must name a folder of Parquet parts where rows are predicted in parts; got {out!r}."
            )
        done = predict_parquet(model, data, out, jobs=jobs, **options)
    left = f"; {done.missing} of {done.parts} parts are for other callers" if done.missing else ""
    typer.echo(f"{done.written} of {done.rows} rows predicted now -> {out}{left}", err=True)


def evaluate(model: _Model, data: _Data, as_json: _Json = False) -> None:
    """Score a model on rows that have a target and that it has not seen.

    Example: bbalpha evaluate model test.csv
    """
    with mistakes():
        from bbalpha.tabular.files import read_table
        from bbalpha.tabular.fitting import evaluate as judge
        from bbalpha.tabular.model import TableModel

        loaded = TableModel.load(model)
        scores = judge(loaded, read_table(data, dates=False))
    typer.echo(_json(scores) if as_json else _table(scores, loaded.card.guess))


def report(
    model: Annotated[Path | None, typer.Argument(metavar="[MODEL]", help="A model; none reports on the paper.")] = None,
    data: Annotated[str, typer.Option(help="Judge on these rows in place of the held-out ones.")] = "",
    results: Annotated[Path, typer.Option(help="Where `bbalpha reproduce` wrote.")] = Path("results"),
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page: of a model, or, without one, of the reproduced paper.

    Example: bbalpha report model -o report.html
    """
    with mistakes():
        from bbalpha.report import model_report, paper_report, write_report

        if model is None:
            page = paper_report(results)
        else:
            from bbalpha.tabular.files import read_table
            from bbalpha.tabular.model import TableModel

            page = model_report(TableModel.load(model), frame=read_table(data, dates=False) if data else None)
        write_report(page, out)
    typer.echo(f"Open {out}")


def serve(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="Folders of models.")],
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines in.")] = "127.0.0.1",
    api_key: Annotated[
        str | None, typer.Option(envvar="BBALPHA_API_KEY", help="Asked of clients as X-API-Key.")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="In one request.")] = 10_000,
    max_passes: Annotated[int, typer.Option(min=2, help="In one request.")] = 1000,
    audit: Annotated[Path | None, typer.Option(help="Append a line of JSON for every answer to this file.")] = None,
) -> None:
    """Serve models over HTTP, with a web page to try them on.

    Example: bbalpha serve model --port 8000
    """
    with mistakes():
        from bbalpha.serve.limits import Limits
        from bbalpha.serve.running import serve as run

        limits = Limits(max_rows=max_rows, max_passes=max_passes)
        if api_key is None and os.environ.get("BBALPHA_API_KEY") == "":
            raise ValueError("BBALPHA_API_KEY is set, and empty: give it a key, or unset it to serve without one.")
        run(models, host=host, port=port, limits=limits, api_key=api_key, audit=audit)


# ------------------------------------------------------------------------------ what is said


def _fitted(model: "TableModel", out: Path, data: str) -> str:
    card = model.card
    task = "classes" if card.task == "classification" else "numbers"
    lines = [f"{card.target!r} holds {task}: a {card.task} on {card.n_rows} rows.", "", "Columns:"]
    for f in card.fields:
        about = f"{f.n_levels} levels" if f.kind == "level" else f"{_short(f.low)} to {_short(f.high)}"
        lines.append(f"  {f.name:30} {f.kind:8} {about}" + f", {f.missing:.1%} missing" * (f.missing > 0))
    lines += [f"  {name:30} left out: {why}" for name, why in card.left_out.items()]
    if card.scores:
        lines += [
            "",
            f"On {card.n_held_out} rows that it has not seen ({card.split}):",
            _table(card.scores, card.guess),
        ]
    lines += ["", *(f"Mind: {' '.join(w.split())}" for w in card.facts["warnings"])] if card.facts["warnings"] else []
    best = card.candidates[0]["candidate"] if card.candidates else ""
    lines += ["", f"Best of {len(card.candidates)} candidates: {best}", f"Written to {out}. Next:"]
    lines += [f"  bbalpha predict {out} new{Path(data).suffix or '.csv'} -o out.csv", f"  bbalpha report {out}"]
    return "\n".join([*lines, f"  bbalpha serve {out}"])


def _short(value: Any) -> str:
    """A number with four figures, a day without its midnight."""
    return f"{value:.4g}" if isinstance(value, float) else str(value).removesuffix("T00:00:00")


def _table(scores: Any, guess: Any) -> str:
    lines = []
    for name, value in scores.items():
        if name in _WORDS:
            beside = f"(guess {guess[name]:.4g})" if name in guess else ""
            lines.append(f"  {name:11} {value:10.4g} {beside:18} {_WORDS[name]}")
    return "\n".join(lines)


def _facts(model: "TableModel", out: Path) -> dict[str, Any]:
    told = model.card.told()
    names = ("task", "target", "n_rows", "n_held_out", "split", "scores", "guess", "left_out", "facts")
    return {"model": str(out)} | {name: told[name] for name in names}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1)


def _write_text(text: str, out: str) -> None:
    if out == "-":
        sys.stdout.write(text)
    else:
        from bbalpha._files import replace_file

        replace_file(Path(out).resolve(), text.encode())


# ------------------------------------------------------------------------------ what is asked


def _task(text: str) -> Any:
    if text not in ("auto", "regression", "classification"):
        raise ValueError(f"--task must be auto, regression or classification; got {text!r}.")
    return text


def _budget(text: str) -> Any:
    """A name, or seconds.

    >>> _budget("quick"), _budget("2m"), _budget("90")
    ('quick', 120.0, 90.0)
    """
    if text in _BUDGETS:
        return text
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not found or not 0 < float(found[1]) < 1e9:
        raise ValueError(f"--budget must be quick, standard, thorough or a time such as 90s, 2m or 1h; got {text!r}.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]
