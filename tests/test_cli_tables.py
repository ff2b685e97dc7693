"""The installed command on tables: three commands from a file to an answer, in pipes, cut off, and with mistakes."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from vega_datasets import data

from bbalpha import cli

COMMAND = [sys.executable, "-m", "bbalpha"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def run(*args: Any, cwd: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, args)], cwd=cwd, input=text, capture_output=True, text=True, env=ENVIRONMENT, timeout=300
    )


def call(
    args: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[Any, str, str]:
    """The command in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["bbalpha", *args])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, *capsys.readouterr()


# `bbalpha`, with Ctrl-C as soon as the first part of a fit is on disk
CUT_OFF = """
import os, signal
from bbalpha.cli import main
from bbalpha.estimators import memory

def write_and_stop(path, content, write=memory.write_folder):
    write(path, content)
    os.kill(os.getpid(), signal.SIGINT)

memory.write_folder = write_and_stop
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
main()
"""
FIT = ["fit", "cars.csv", "--target", "Miles_per_Gallon", "--budget", "quick", "-o"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table of text, dates and gaps, a model whose fit was cut off and went on, and what both said."""
    folder = tmp_path_factory.mktemp("work")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package, about pandas to come
        data.cars()[::2].to_csv(folder / "cars.csv", index=False)
    cut = subprocess.run(
        [sys.executable, "-c", CUT_OFF, *FIT, "model"], cwd=folder, capture_output=True, text=True, env=ENVIRONMENT
    )
    part = folder / "model.part"
    (folder / "cut off.txt").write_text(f"{cut.returncode}\n{cut.stderr}")
    (folder / "kept.txt").write_text(str(len(list(part.glob("[0-9a-f]*/config.json")))))
    done = run(*FIT, "model", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "said.txt").write_text(done.stdout + done.stderr)
    return folder


def test_a_fit_that_is_cut_off_goes_on(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (work / "cut off.txt").read_text()
    assert said.startswith("130\n")
    assert "the same command goes on" in said
    assert int((work / "kept.txt").read_text()) >= 1
    assert not (work / "model.part").exists()
    assert call([*FIT, "whole", "--json"], work, monkeypatch, capsys)[0] == 0
    for name in ("weights.safetensors", "config.json"):
        assert (work / "model" / name).read_bytes() == (work / "whole" / name).read_bytes()


def test_fit_says_what_it_did(work: Path) -> None:
    said = (work / "said.txt").read_text()
    assert "a regression on 18" in said
    assert "left out: identifiers or free text" in said
    assert "% missing" in said
    assert "bbalpha predict model" in said


def test_from_a_table_to_answers(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["predict", "model", "cars.csv", "-o", "out.parquet", "--inputs", "--coverage", "0.5"]
    assert call(args, work, monkeypatch, capsys)[0] == 0
    found = pd.read_parquet(work / "out.parquet")
    assert len(found) == 203
    inside = (found["low"] <= found["Miles_per_Gallon"]) & (found["Miles_per_Gallon"] <= found["high"])
    assert 0.35 < inside[found["Miles_per_Gallon"].notna()].mean() < 0.75
    assert {"mean", "std", "unusual", "Origin"} <= set(found)


def test_in_a_pipe_whose_reader_has_seen_enough(work: Path) -> None:
    command = " ".join(["cat cars.csv |", *COMMAND, "predict model - --seed 3 --n-passes 20 | head -2"])
    done = subprocess.run(["bash", "-c", command], cwd=work, capture_output=True, text=True, env=ENVIRONMENT)
    head, first = done.stdout.splitlines()
    assert head == "mean,std,epistemic_std,aleatoric_std,low,high,unusual"
    assert len(first.split(",")) == 7
    assert "Traceback" not in done.stderr


def test_answers_as_json(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["predict", "model", "cars.csv", "--json", "--seed", "3", "--n-passes", "20"]
    code, told, _ = call(args, work, monkeypatch, capsys)
    assert code == 0
    assert len(json.loads(told)) == 203
    assert told == call(args, work, monkeypatch, capsys)[1]


def test_evaluate(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scores = json.loads(call(["evaluate", "model", "cars.csv", "--json"], work, monkeypatch, capsys)[1])
    assert 190 < scores["n_rows"] < 203
    assert scores["rmse"] < 5
    said = call(["evaluate", "model", "cars.csv"], work, monkeypatch, capsys)[1]
    assert "share of targets inside the 90 % intervals" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fit", "nope.csv", "--target", "y"], "There is no file 'nope.csv'"),
        (["fit", "cars.csv", "--target", "y"], "no column 'y'"),
        (["fit", "cars.csv", "--target", "Year"], "numbers or classes"),
        (["fit", "cars.csv", "--target", "Name", "--budget", "soon"], "--budget must be"),
        (["fit", "cars.csv", "--target", "Name", "--alpha", "x"], "--alpha must be a finite number"),
        (["fit", "cars.csv", "--target", "Name", "--task", "x"], "--task must be"),
        (["fit", "cars.csv", "--target", "Name", "-o", "."], "something else"),
        (["predict", "nope", "cars.csv"], "does not exist"),
        (["predict", "model", "bad.csv"], "is missing"),
        (["predict", "model", "cars.csv", "--coverage", "2"], "coverage"),
        (["evaluate", "model", "bad.csv"], "no column 'Miles_per_Gallon'"),
        (["fit", "cars.csv"], "target"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    work: Path, args: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "bad.csv").write_text("a,b\n1,2\n")
    code, out, err = call(args, work, monkeypatch, capsys)
    assert code == 2
    assert said in err
    assert not out
    assert err.splitlines()[-1].startswith("bbalpha: ")


@pytest.mark.parametrize("command", ["fit", "predict", "evaluate", "report", "serve", "doctor"])
def test_help_has_an_example(
    work: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"Example: bbalpha {command}" in call([command, "--help"], work, monkeypatch, capsys)[1]


def test_a_key_that_is_set_and_empty_is_no_open_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BBALPHA_API_KEY", "")
    code, out, err = call(["serve", "model"], tmp_path, monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert err == "bbalpha: BBALPHA_API_KEY is set, and empty: give it a key, or unset it to serve without one.\n"
