"""Results as JSON: what was run, with which versions and seed, how long it took, and flat rows.

write("results/demo.json", command="make demo", seed=0, seconds=60.0, rows=[{"method": "nn", "nll": 0.2}])

A long run keeps a `Ledger`: rows are on disk as soon as they are known, and a run that was cut off goes on behind them.
"""

import json
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bbalpha import checkpoint
from bbalpha._files import replace_file, writing

Row = dict[str, Any]
PACKAGES = ("bbalpha", "torch", "numpy", "scikit-learn", "gpytorch", "numpyro", "jax")


def write(
    path: str | Path, *, command: str, seed: int, seconds: float, rows: Sequence[Row],
    parts: dict[str, float] | None = None, settings: Mapping[str, Any] | None = None, releases: Sequence[str] = (),
) -> Path:  # fmt: skip
    """The path of the results file, written under a temporary name and renamed.

    Args:
        path: Where to; its folder is made.
        command: What a person types to get it again.
        seed: Of the whole run.
        seconds: Wall-clock time of the run.
        rows: Flat records; nan and infinite numbers become null.
        parts: What the seconds went into, where that is known: {method: seconds}.
        settings: What is the same for all rows, where that is not in the command: {name: value}.
        releases: Earlier releases of bbalpha that rows are from.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    made_with = versions()
    if releases:
        made_with["bbalpha"] = ", ".join(dict.fromkeys([*releases, made_with["bbalpha"]]))
    content: dict[str, Any] = {"command": command, "versions": made_with, "seed": seed, "seconds": round(seconds, 1)}
    if parts:
        content["seconds_of"] = {part: round(value, 1) for part, value in parts.items()}
    text = json.dumps(content, indent=1)[:-2]
    if settings:
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in settings.items())
        text += f',\n "settings": {{\n{lines}\n }}'
    lines = ",\n".join("  " + json.dumps({k: _plain(v) for k, v in row.items()}) for row in rows)
    text += f',\n "rows": [\n{lines}\n ]\n}}\n'
    with writing(path):
        replace_file(path, text.encode())
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
        seed: Of the whole run; a file of another seed, of other versions or of other settings is refused.
        settings: Of the whole run, {name: what JSON can hold}; a file that was begun without them goes on without.
        any_release: Whether rows of several releases of bbalpha may stand together, all of them named; for comparisons
            whose other rows would be lost.

    >>> import tempfile
    >>> ledger = Ledger(tempfile.mkdtemp() + "/x.json", command="make x", seed=0)
    >>> ledger.add([{"method": "nn", "split": 0, "nll": 0.2}], seconds=1.5)
    >>> ledger.has(method="nn", split=0), ledger.has(method="nn", split=1)
    (True, False)
    """

    def __init__(
        self, path: str | Path, *, command: str, seed: int, settings: Mapping[str, Any] | None = None,
        any_release: bool = False,
    ) -> None:  # fmt: skip
        self.path, self.command, self.seed = Path(path), command, seed
        self.settings: dict[str, Any] = json.loads(json.dumps(dict(settings or {})))  # tuples as lists
        self.rows: list[Row] = []
        self.seconds = 0.0
        self.parts: dict[str, float] = {}
        self.releases: list[str] = []
        if self.path.exists():
            content = read(self.path)
            self.settings = self.settings if "settings" in content else {}
            now = {"seed": seed, **versions(), **self.settings}
            then = {"seed": content["seed"], **content["versions"], **content.get("settings", {})}
            if any_release:
                self.releases = then["bbalpha"].split(", ")
                now["bbalpha"] = then["bbalpha"]
            other = [name for name in {**now, **then} if now.get(name) != then.get(name)]
            if other:
                wanted, got = (", ".join(f"{name} {facts.get(name)}" for name in other) for facts in (now, then))
                raise ValueError(
                    f"`path` must hold results of {wanted}; {self.path} has {got}: delete it, or give another."
                )
            self.rows, self.seconds, self.parts = content["rows"], content["seconds"], content.get("seconds_of", {})

    def has(self, **where: Any) -> bool:
        """Whether there is a row with these values."""
        return any(all(row.get(k) == _plain(v) for k, v in where.items()) for row in self.rows)

    def forget(self, column: str, values: Collection[str]) -> None:
        """Leave out of the file the rows with one of these in a column, and the time that went into these parts."""
        if any(row.get(column) in values for row in self.rows):
            self.rows = [row for row in self.rows if row.get(column) not in values]
            self.add([], seconds=-sum(self.parts.pop(value, 0.0) for value in values))

    def add(self, rows: Sequence[Row], *, seconds: float, part: str = "") -> None:
        """Put rows, and the time they took, into the file; the time also under `part`, if there is one."""
        self.rows = [*self.rows, *rows]
        self.seconds += seconds
        if part:
            self.parts[part] = self.parts.get(part, 0.0) + seconds
        write(
            self.path, command=self.command, seed=self.seed, seconds=self.seconds, rows=self.rows, parts=self.parts,
            settings=self.settings, releases=self.releases,
        )  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that make the numbers."""
    return {"python": platform.python_version(), **checkpoint.versions(PACKAGES)}


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if abs(value) < float("inf") else None
