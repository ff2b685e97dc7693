"""Labels that come one by one: kept in a CSV file, on the disk as soon as each is known.

labels = LabelFile("labels.csv", ask=lambda row: input(f"row {row}: "))
labels([3, 17])                                                       # only what the file lacks is asked for
"""

import csv
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

Label = int | str
_HEAD = ["row", "label"]


class LabelFile:
    """The labels of rows, in a CSV file with the columns `row` and `label`; rows count from 0.

    A label that is there is never asked for again. One that is not is asked for, and on the disk before the next one
    is: whoever stops in between goes on there. Labels that are whole numbers are ints, others text.

    Args:
        path: The file; made with its first label.
        ask: A row -> its label; None refuses rows that the file lacks, and names them.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "labels.csv"
    >>> LabelFile(path, ask=lambda row: row % 2)([4, 7]), LabelFile(path)([7])
    ([0, 1], [1])
    """

    def __init__(self, path: str | os.PathLike[str], *, ask: Callable[[int], Label] | None = None) -> None:
        self.path, self.ask = Path(path), ask
        self.known: dict[int, Label] = {}
        self._whole = True  # the last line ends as it should
        if self.path.exists():
            self._read()

    @property
    def rows(self) -> list[int]:
        """The rows whose labels are there, in the order they came."""
        return list(self.known)

    def __call__(self, rows: Sequence[int]) -> list[Label]:
        """The labels of these rows."""
        missing = [row for row in rows if row not in self.known]
        if missing and self.ask is None:
            named = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            raise ValueError(f"{str(self.path)!r} must have a label for every row asked for; it lacks rows {named}.")
        for row in dict.fromkeys(missing):
            if self.ask is not None:
                self._keep(row, self.ask(row))
        return [self.known[row] for row in rows]

    def _keep(self, row: int, label: Label) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self.path.exists() or not self.path.stat().st_size:
            writer.writerow(_HEAD)
        writer.writerow([row, label])
        with self.path.open("ab") as file:
            file.write((("" if self._whole else "\n") + text.getvalue()).encode())
            file.flush()
            os.fsync(file.fileno())
        self._whole, self.known[row] = True, _label(str(label))

    def _read(self) -> None:
        text = self.path.read_text()
        self._whole = not text or text.endswith("\n")
        lines = list(csv.reader(io.StringIO(text)))
        if lines and lines[0] != _HEAD:
            raise ValueError(f"{str(self.path)!r} must begin with the line `row,label`; got {','.join(lines[0])!r}.")
        for number, line in enumerate(lines[1:], 2):
            if len(line) != 2 or not line[0].isdecimal() or not line[1]:
                raise ValueError(f"Line {number} of {str(self.path)!r} must be a row and its label; got {line}.")
            row, label = int(line[0]), _label(line[1])
            if self.known.setdefault(row, label) != label:
                raise ValueError(f"{str(self.path)!r} has two labels for row {row}: {self.known[row]} and {label}.")


def _label(text: str) -> Label:
    try:
        return int(text)
    except ValueError:
        return text
