"""The public names and how they are called, as text: `make api` writes api/VERSION.txt, and what is new.

A test compares the file of the version in pyproject.toml with the code, so that each change of what users can call is
seen in a diff; the files of earlier versions stay as they were released. Public is what docs/policy.md says: the names
of `bbalpha`, of its modules without an underscore and of the rooms that list theirs, and the command line. The code is
read, not imported.
"""

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from packaging.version import Version

from bbalpha._files import replace_file

ROOT = Path(__file__).resolve().parents[1]
# inside rooms that list no names, what the docs show
SHOWN = ("serve.limits.Limits", "serve.running.serve", "tabular.fitting.fit_table", "tabular.model.TableModel")
INSIDE = ("checks", "cli")  # of use to the house; commands are listed as such


def surface(src: Path) -> Iterator[str]:
    """The lines of the whole public surface of the package under `src`, module by module."""
    package = griffe.load("bbalpha", search_paths=[str(src)])
    modules = dict(_modules(package))
    for name, home in sorted(_homes(package).items()):
        if home in modules:
            yield f"bbalpha.{name} = bbalpha.{home}.{name}"
        else:
            yield from _lines(f"bbalpha.{name}", package[name])
    for name, module in sorted(modules.items()):
        for member in _names(module):
            path, thing = f"bbalpha.{name}.{member}", module.members.get(member)
            where = "" if thing is None else thing.target_path if thing.is_alias else thing.path
            home = where.removeprefix("bbalpha.").rpartition(".")[0]
            if thing is None:  # made when it is asked for
                yield path
            elif thing.is_alias and (not where.startswith("bbalpha.") or home in modules):
                yield f"{path} = {where}"
            else:
                yield from _lines(path, thing)
    for path in SHOWN:
        if path.split(".")[0] in package.members:
            yield from _lines(f"bbalpha.{path}", package[path])


def commands() -> Iterator[str]:
    """The lines of the command line: each command with its arguments, options and defaults."""
    from typer.main import get_command

    from bbalpha.cli import app

    yield from _commands("bbalpha", get_command(app))


def snapshot(version: str) -> str:
    """The text of api/VERSION.txt for the code as it is."""
    lines = [*surface(ROOT / "src"), *commands()]
    return f"# The public names of bbalpha {version} and how they are called: `make api`.\n" + "\n".join(lines) + "\n"


def changes(old: str, new: str) -> Iterator[str]:
    """What is gone, called otherwise, and new in one snapshot beside another: lines to print."""
    before, after = _by_name(old), _by_name(new)
    yield from (f"gone     {name}" for name in before if name not in after)
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            yield f"changed  {before[name]}\n      to {after[name]}"
    yield from (f"new      {name}" for name in after if name not in before)


def current() -> str:
    """The version that is being worked on, as pyproject.toml has it, without what marks it as unfinished."""
    return Version(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]).base_version


def path_of(version: str) -> Path:
    """Where the snapshot of a version is kept."""
    return ROOT / "api" / f"{version}.txt"


def released_before(version: str) -> Path | None:
    """The newest snapshot of an earlier version; None if there is none."""
    found = [p for p in (ROOT / "api").glob("*.txt") if Version(p.stem) < Version(version)]
    return max(found, key=lambda p: Version(p.stem), default=None)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    version = current()
    text, last = snapshot(version), released_before(version)
    path_of(version).parent.mkdir(exist_ok=True)
    replace_file(path_of(version), text.encode())
    if last is None:
        sys.exit(f"{path_of(version)} is the first of its kind: nothing to compare it with.")
    print(f"{version} beside {last.stem}:")
    print("\n".join(sorted(changes(last.read_text(), text))))


# ------------------------------------------------------------------------------ reading


def _homes(package: Any) -> dict[str, str]:
    """{name: module} of what `bbalpha` itself offers: what its type checkers are told."""
    return {
        name: member.target_path.removeprefix("bbalpha.").rpartition(".")[0]
        for name, member in package.members.items()
        if member.is_alias and member.target_path.startswith("bbalpha.")
    }


def _modules(package: Any) -> Iterator[tuple[str, Any]]:
    """Public modules and the rooms that list their names, with those of the integrations."""
    for name, module in package.modules.items():
        if name.startswith("_") or name in INSIDE:
            continue
        if module.exports is not None or not module.is_init_module:
            yield name, module
        if name == "integrations":
            yield from ((f"{name}.{part}", m) for part, m in module.modules.items() if not part.startswith("_"))


def _names(module: Any) -> list[str]:
    """The public names of a module: those it lists, else those it defines or imports as themselves."""
    if module.exports is not None:
        return sorted(str(name) for name in module.exports)
    own = {name for name, m in module.members.items() if not m.is_alias and not m.is_module}
    imports = (node for node in ast.parse(module.source).body if isinstance(node, ast.ImportFrom))
    again = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    return sorted(name for name in own | again if not name.startswith("_"))


def _lines(path: str, thing: Any) -> Iterator[str]:
    """One line for a function, a constant or a name from elsewhere, several for a class."""
    if thing.is_alias:
        thing = thing.final_target
    if thing.is_function:
        yield path.rpartition(".")[0] + "." + thing.signature()
    elif thing.is_class:
        yield f"class {path}"
        for name, member in sorted(thing.all_members.items()):
            if name == "__init__" or not name.startswith("_"):
                yield from _lines(f"{path}.{name}", member)
    elif thing.annotation is not None:
        yield f"{path}: {thing.annotation}"
    elif not thing.parent.is_class:  # what __init__ stores is told by its arguments
        yield f"{path} = {thing.value}"


def _commands(path: str, command: Any) -> Iterator[str]:
    """A command's arguments and options, and those of the commands in it."""
    for parameter in command.params:
        name = max(parameter.opts, key=len)
        if not name.endswith("-completion"):  # typer's own
            yield f"$ {path} {name} " + ("required" if parameter.required else f"= {parameter.default!s:.40}").rstrip()
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield f"$ {path} {name}"
        yield from _commands(f"{path} {name}", inner)


def _by_name(text: str) -> dict[str, str]:
    """{name: line} of a snapshot."""
    return {re.split(r"\(|: | =| required", line.removeprefix("class "))[0]: line for line in text.splitlines()[1:]}


if __name__ == "__main__":
    main()
