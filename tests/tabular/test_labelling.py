"""A person labels rows: what is shown, what is asked for, what is kept, and that it goes on where it was."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_digits, load_iris

from bbalpha import cli
from bbalpha.tabular import labelling
from bbalpha.tabular.labelling import Learner, Task, digits_task, drawn, label, table_task


@pytest.fixture
def flowers(tmp_path):
    """Irises, of which 24 have a label; the path, and all labels."""
    frame = load_iris(as_frame=True).frame.sample(frac=1, random_state=0, ignore_index=True)
    species = frame.pop("target").map({0: "setosa", 1: "versicolor", 2: "virginica"})
    frame["species"] = species.where(frame.index < 24)
    frame.to_csv(tmp_path / "flowers.csv", index=False)
    return tmp_path / "flowers.csv", species.tolist()


class Quick(Learner):
    """Trains in no time: the class whose mean is nearest."""

    def __init__(self, X, y):
        self.labels = np.asarray([str(one) for one in np.asarray(y).tolist()])
        self.model = self if len(set(self.labels)) > 1 else None
        self.names = np.unique(self.labels)
        self.means = np.stack([np.asarray(X)[self.labels == name].mean(0) for name in self.names])

    def predict(self, X):
        return self.names[((np.asarray(X)[:, None] - self.means) ** 2).sum(2).argmin(1)]

    def predict_passes(self, X):
        far = ((np.asarray(X, dtype=float)[:, None] - self.means) ** 2).sum(2)
        logits = -far * np.array([0.1, 1.0, 10.0])[:, None, None]
        p = np.exp(logits - logits.max(2, keepdims=True))
        return p / p.sum(2, keepdims=True)


def answering(truth, asked, dies_at=None):
    """Answers by the place that a task shows."""

    def ask(row, seen):
        if dies_at is not None and len(asked) == dies_at:
            raise KeyboardInterrupt
        asked.append(int(row))
        return truth[int(row)]

    return ask


def by_number(task):
    return Task(task.rows, task.numbers, task.given, task.held_out, lambda place: str(task.numbers[place]))


def test_a_table_is_learnt_from_judged_by_a_part_and_asked_about_where_it_is_empty(flowers, tmp_path):
    path, truth = flowers
    task, asked, told = table_task(path, "species"), [], []
    assert len(task.held_out[1]) == 6
    assert len(task.given) == 18
    assert not set(task.numbers) & set(task.held_out[0].index)
    label(by_number(task), tmp_path / "l.csv", ask=answering(truth, asked), tell=told.append, most=2)
    assert [r.n_labels for r in told] == [18, 19, 20]
    assert told[-1].score > 0.6
    assert len(set(asked)) == 2
    assert min(asked) >= 24
    kept = pd.read_csv(tmp_path / "l.csv")
    assert kept.label.tolist() == [truth[row] for row in kept.row]


def test_what_was_cut_off_goes_on_and_nothing_is_asked_for_twice(flowers, tmp_path, monkeypatch):
    monkeypatch.setattr(labelling, "Learner", Quick)
    path, truth = flowers
    task, asked, whole = by_number(table_task(path, "species")), [], []
    label(task, tmp_path / "whole.csv", ask=answering(truth, whole), tell=id, most=6)
    with pytest.raises(KeyboardInterrupt):
        label(task, tmp_path / "l.csv", ask=answering(truth, asked, dies_at=3), tell=id)
    assert len(pd.read_csv(tmp_path / "l.csv")) == 3
    label(task, tmp_path / "l.csv", ask=answering(truth, asked), tell=id, most=3)
    assert len(set(asked)) == 6
    assert asked == whole


def test_digits_begin_without_a_label_and_end_with_those_that_were_typed(tmp_path, monkeypatch):
    monkeypatch.setattr(labelling, "Learner", Quick)
    truth, asked, told = load_digits(return_X_y=True)[1], [], []
    task = digits_task()
    shown = Task(task.rows, task.numbers, {}, task.held_out, str, task.classes)
    label(shown, tmp_path / "l.csv", ask=answering(truth, asked), tell=told.append, most=20)
    assert len(set(asked)) == 20
    assert max(asked) < 1297  # the rows behind are held out
    assert told[-1].score > told[0].score


def test_all_rows_can_be_labelled_and_then_there_is_nothing_left(flowers, tmp_path, monkeypatch):
    monkeypatch.setattr(labelling, "Learner", Quick)
    path, truth = flowers
    pd.read_csv(path).head(30).to_csv(path, index=False)
    task, asked = by_number(table_task(path, "species")), []
    label(task, tmp_path / "l.csv", ask=answering(truth, asked), tell=id)
    assert sorted(asked) == list(range(24, 30))
    with pytest.raises(ValueError, match="nothing to ask for"):
        label(task, tmp_path / "l.csv", ask=answering(truth, asked), tell=id)


def test_few_labels_are_all_learnt_from(flowers):
    path, _ = flowers
    frame = pd.read_csv(path)
    frame.loc[5:, "species"] = None
    frame.to_csv(path, index=False)
    task = table_task(path, "species")
    assert task.held_out is None
    assert len(task.given) == 5


def test_whole_numbers_stay_whole_where_some_are_missing(tmp_path):
    pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [4, None, 5]}).to_csv(tmp_path / "t.csv", index=False)
    assert table_task(tmp_path / "t.csv", "y").given == {0: 4, 2: 5}


def test_mistakes_are_told(flowers, tmp_path):
    path, _ = flowers
    with pytest.raises(ValueError, match="must be a column"):
        table_task(path, "colour")
    with pytest.raises(ValueError, match="must be empty where"):
        table_task(path, "petal width (cm)")
    (tmp_path / "l.csv").write_text("row,label\n3,setosa\n")
    with pytest.raises(ValueError, match="row 3 is not one of them"):
        label(table_task(path, "species"), tmp_path / "l.csv", ask=lambda *_: "setosa", tell=id)


def test_a_learner_of_one_class_guesses_it():
    model = Learner(np.zeros((2, 3)), [7, 7])
    assert model.accuracy(np.zeros((4, 3)), [7, 7, 1, 7]) == 0.75
    assert model.predict_passes(np.zeros((4, 3))).shape == (2, 4, 2)


def test_pictures_and_fields_can_be_read(flowers):
    assert drawn(np.eye(2)) == "██  \n  ██"
    text = table_task(flowers[0], "species").show(0)
    assert "petal width (cm)  " in text
    assert "species" not in text


# ------------------------------------------------------------------------------ at a terminal


COMMAND = """
import signal
from bbalpha.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
main()
"""


class Terminal:
    """`bbalpha label` at a terminal of its own."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.file, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "label", *args], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.left = ""

    def until(self, text: str) -> str:
        """What has come since the last time, up to this text."""
        end = time.monotonic() + 120
        while text not in self.left and time.monotonic() < end:
            if not select.select([self.file], [], [], 1.0)[0]:
                continue
            try:
                self.left += os.read(self.file, 65536).decode(errors="replace")
            except OSError:  # the other side is gone
                break
        assert text in self.left
        found, self.left = self.left.split(text, 1)
        return found + text

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C; again where nothing follows: one between the prompt and readline's wait for a key is not seen."""
        for _ in range(10):
            self.process.send_signal(signal.SIGINT)
            if select.select([self.file], [], [], 10.0)[0]:
                return

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.file)


@pytest.fixture
def terminal(flowers):
    found = Terminal(flowers[0].parent, "flowers.csv", "--target", "species")
    yield found
    found.close()


def test_at_a_terminal_labels_are_typed_slips_are_asked_about_and_ctrl_c_loses_nothing(terminal, flowers):
    assert "18 labels" in terminal.until("accuracy")
    assert "petal width (cm)" in terminal.until("What is it? [setosa, versicolor, virginica] ")
    terminal.type("setosaa\n")
    terminal.until("'setosaa' is new: type it again to add it.")
    terminal.type("setosa\n")
    terminal.until("19 labels")
    terminal.until("What is it?")
    assert len((flowers[0].parent / "labels.csv").read_text().splitlines()) == 2
    terminal.interrupt()
    terminal.until("Stopped. The labels are in labels.csv")
    assert terminal.process.wait() == 130


def typed(answers, monkeypatch, capsys, folder, *args):
    """The command in this process, with these answers: exit code, stdout, stderr."""
    left = iter(answers)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(labelling, "Learner", Quick)
    monkeypatch.setattr("builtins.input", lambda _: next(left))
    monkeypatch.setattr(sys, "argv", ["bbalpha", "label", *args])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, *capsys.readouterr()


def test_the_command_goes_on_where_it_was_and_tells_how_it_stands(flowers, monkeypatch, capsys):
    folder = flowers[0].parent
    asked = "flowers.csv", "--target", "species", "--most", "1"
    code, out, _ = typed(["setosa"], monkeypatch, capsys, folder, *asked)
    assert (code, "19 labels are known. What was typed is in labels.csv." in out) == (0, True)
    code, out, _ = typed(["", "virginica"], monkeypatch, capsys, folder, *asked)
    assert code == 0
    assert "   19 labels  █" in out
    assert "   20 labels  █" in out
    assert len(pd.read_csv(folder / "labels.csv")) == 2


def test_a_label_of_a_digit_is_a_digit(tmp_path, monkeypatch, capsys):
    code, out, _ = typed(["x", "10", "3"], monkeypatch, capsys, tmp_path, "digits", "-n", "1", "-o", "mine.csv")
    assert code == 0
    assert out.count("It must be one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9; got") == 2
    assert (tmp_path / "mine.csv").read_text().endswith(",3\n")


def test_a_table_without_labels_to_judge_by_says_so(flowers, monkeypatch, capsys):
    frame = pd.read_csv(flowers[0])
    frame.loc[2:, "species"] = None
    frame.to_csv(flowers[0], index=False)
    code, out, _ = typed(["a", "a"], monkeypatch, capsys, flowers[0].parent, "flowers.csv", "-t", "species", "-n", "1")
    assert code == 0
    assert "'a' is new: type it again to add it." in out
    assert "no labelled rows are held out to judge by" in out


@pytest.mark.parametrize("args", [("digits", "--target", "y"), ("flowers.csv",), ("none.csv", "--target", "y")])
def test_mistakes_at_the_command_line_are_one_line(flowers, monkeypatch, capsys, args):
    code, _, err = typed([], monkeypatch, capsys, flowers[0].parent, *args)
    assert (code, err.count("\n"), err[:8]) == (2, 1, "bbalpha:")
