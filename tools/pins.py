"""The versions we test with, read off the environment this runs in: `make pins` writes constraints.txt.

Pinned is what `bbalpha[dev,versus]` needs, directly or through others, and nothing else that happens to be installed.
"""

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bbalpha._files import replace_file

ROOT = Path(__file__).resolve().parents[1]
HEAD = "# The versions we test with. Use: pip install --constraint constraints.txt bbalpha\n"


def pins(name: str = "bbalpha", extras: Sequence[str] = ("dev", "versus")) -> list[str]:
    """The lines `name==version` of everything that a package with these extras needs, in the order of the alphabet."""
    found: dict[str, str] = {}
    waiting, seen = [(name, extra) for extra in ("", *extras)], set()
    while waiting:
        package, extra = waiting.pop()
        if (package, extra) in seen:
            continue
        seen.add((package, extra))
        there = distribution(package)
        found[package] = f"{there.metadata['Name']}=={Version(there.version).public}"
        for needed in map(Requirement, there.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                _check(package, needed)
                waiting += [(canonicalize_name(needed.name), more) for more in ("", *needed.extras)]
    return sorted((line for package, line in found.items() if package != name), key=str.lower)


def _check(package: str, needed: Requirement) -> None:
    """Refuse an environment that is not what its packages ask for."""
    try:
        got = version(needed.name)
    except PackageNotFoundError:
        got = "none"
    if got == "none" or not needed.specifier.contains(got, prereleases=True):
        raise SystemExit(f"{package} needs {needed.name}{needed.specifier}; {got} is installed. Install it first.")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    replace_file(ROOT / "constraints.txt", (HEAD + "\n".join(pins()) + "\n").encode())


if __name__ == "__main__":
    main()
