"""Environments to try things in and throw away, and the examples of a page to try there.

with environment(folder) as python:
    install(python, f"{wheel}[keras]")
    run(python, first_example(page.read_text()))
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 1800  # seconds that a program may take, an installation on a busy machine too
_CODE = re.compile(r"^<!-- run\n(?P<hidden>.*?)^-->|^```python\n(?P<shown>.*?)^```", re.S | re.M)


@contextmanager
def environment(folder: Path) -> Iterator[Path]:
    """The Python of a new, empty environment in `folder`, which is removed at the end, and before if it is there."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        yield folder / "bin" / "python"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(python: Path, what: str) -> None:
    """Install a package, in the versions that are tested."""
    call(python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), what)


def run(python: Path, code: str) -> str:
    """What `code` prints in an empty folder."""
    return call(python, "-c", code)


def call(program: Path, *arguments: str) -> str:
    """What a program prints in an empty folder; a program that fails is a FailedError with what it said."""
    command = [str(program), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, env=_plain(), capture_output=True, text=True, timeout=PATIENCE, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise FailedError(f"{program.name}: not done after {PATIENCE} seconds.") from error
    if done.returncode:
        raise FailedError(done.stderr.strip() or done.stdout.strip() or f"{program.name}: exit {done.returncode}")
    return done.stdout


class FailedError(Exception):
    """What a program said when it failed."""


def examples(text: str) -> list[str]:
    r"""The Python that a page shows, block by block.

    >>> examples("Words.\n```python\na = 1\n```\n```text\nb\n```\n```python\nc = 2\n```\n")
    ['a = 1\n', 'c = 2\n']
    """
    return [found["shown"] for found in _CODE.finditer(text) if found["shown"] is not None]


def first_example(text: str) -> str | None:
    r"""The first Python that a page shows, after the preparation that it does not show; None if it shows none.

    >>> first_example("<!-- run\na = 1\n-->\n```python\nb = a\n```\n```python\nc = b\n```\n")
    'a = 1\nb = a\n'
    """
    code = ""
    for found in _CODE.finditer(text):
        code += found["hidden"] or found["shown"] or ""
        if found["shown"] is not None:
            return code
    return None


def megabytes(folder: Path) -> float:
    """The size of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def _plain() -> dict[str, str]:
    """The surroundings of a command: nothing of ours is found but what was installed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1", "MPLBACKEND": "agg"}
