"""Results as JSON: what was run, with which versions and seed, how long it took, and flat rows.

write("results/demo.json", command="make demo", seed=0, seconds=60.0, rows=[{"method": "nn", "nll": 0.2}])
"""

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("bbalpha", "torch", "numpy", "scikit-learn")


def write(path: str | Path, *, command: str, seed: int, seconds: float, rows: Sequence[dict[str, Any]]) -> Path:
    """The path of the results file, written under a temporary name and renamed.

    Args:
        path: Where to; its folder is made.
        command: What a person types to get it again.
        seed: Of the whole run.
        seconds: Wall-clock time of the run.
        rows: Flat records; nan and infinite numbers become null.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": command, "versions": versions(), "seed": seed, "seconds": round(seconds, 1)}
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
