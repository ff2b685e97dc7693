"""Results as JSON: what was run, with which versions and seed, how long it took, and flat rows.

write("results/demo.json", command="make demo", seed=0, seconds=60.0, rows=[{"method": "nn", "nll": 0.2}])

A long run keeps a `Ledger`: rows are on disk as soon as they are known, and a run that was cut off goes on behind them.
"""

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("bbalpha", "torch", "numpy", "scikit-learn", "gpytorch", "numpyro", "jax")


def write(
    path: str | Path, *, command: str, seed: int, seconds: float, rows: Sequence[dict[str, Any]],
    parts: dict[str, float] | None = None,
) -> Path:  # fmt: skip
    """The path of the results file, written under a temporary name and renamed.

    Args:
        path: Where to; its folder is made.
        command: What a person types to get it again.
        seed: Of the whole run.
        seconds: Wall-clock time of the run.
        rows: Flat records; nan and infinite numbers become null.
        parts: What the seconds went into, where that is known: {method: seconds}.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": command, "versions": versions(), "seed": seed, "seconds": round(seconds, 1)}
    if parts:
        content["seconds_of"] = {part: round(value, 1) for part, value in parts.items()}
    lines = ",\n".join("  " + json.dumps({k: _plain(v) for k, v in row.items()}) for row in rows)
    text = json.dumps(content, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n'
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
    return path


def read(path: str | Path) -> dict[str, Any]:
    """The content of a results file."""
    content: dict[str, Any] = json.loads(Path(path).read_text())
    missing = {"command", "versions", "seed", "seconds", "rows"} - content.keys()
    if missing:
        raise ValueError(f"`path` must be a results file of bbalpha; {path} lacks {', '.join(sorted(missing))}.")
    return content


class Ledger:
    """The results file of a run that may be cut off and taken up again.

    Args:
        path: The file; rows that it has are kept.
        command: What a person types to get it whole.
        seed: Of the whole run; a file of another seed, or of other versions, is refused.

    >>> import tempfile
    >>> ledger = Ledger(tempfile.mkdtemp() + "/x.json", command="make x", seed=0)
    >>> ledger.add([{"method": "nn", "split": 0, "nll": 0.2}], seconds=1.5)
    >>> ledger.has(method="nn", split=0), ledger.has(method="nn", split=1)
    (True, False)
    """

    def __init__(self, path: str | Path, *, command: str, seed: int) -> None:
        self.path, self.command, self.seed = Path(path), command, seed
        self.rows: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.parts: dict[str, float] = {}
        if self.path.exists():
            content = read(self.path)
            now = {"seed": seed, "versions": versions()}
            for name, value in now.items():
                if content[name] != value:
                    raise ValueError(
                        f"`path` must hold results of this {name}, {value}; {self.path} has {content[name]}: "
                        "delete it, or give another."
                    )
            self.rows, self.seconds, self.parts = content["rows"], content["seconds"], content.get("seconds_of", {})

    def has(self, **where: Any) -> bool:
        """Whether there is a row with these values."""
        return any(all(row.get(k) == _plain(v) for k, v in where.items()) for row in self.rows)

    def add(self, rows: Sequence[dict[str, Any]], *, seconds: float, part: str = "") -> None:
        """Put rows, and the time they took, into the file; the time also under `part`, if there is one."""
        self.rows = [*self.rows, *rows]
        self.seconds += seconds
        if part:
            self.parts[part] = self.parts.get(part, 0.0) + seconds
        write(
            self.path, command=self.command, seed=self.seed, seconds=self.seconds, rows=self.rows, parts=self.parts
        )  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that make the numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if abs(value) < float("inf") else None
