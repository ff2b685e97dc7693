"""The reference, made from docstrings: a page for every public module, an index of all names, a page of the commands.

Pages are written to docs/reference before Sphinx reads its sources, and only where they changed. A module that is new
enters by itself: at the end of the index until `GROUPS` says where it belongs.
"""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

import bbalpha

GROUPS = {
    "The method": ["objectives", "priors", "layers", "networks", "divergences"],
    "Passes and predictions": ["sampling", "convert", "prediction", "predictive", "lognormal", "freezing"],
    "What to do with them": ["calibration", "conformal", "detection", "metrics", "attacks", "acquisition", "plots"],
    "Training": ["training", "checkpoint", "distributed"],
    "Tables": ["estimators", "tabular.files", "tabular.fields", "tabular.fitting", "tabular.model", "data"],
    "Reports and the service": ["report", "serve.running", "serve.limits"],
}
INSIDE = {"checks", "cli", "experiments"}  # public by place, and nobody calls them from outside
PARTS = {"tabular": (), "serve": (), "integrations": None}  # rooms whose modules have pages: these, or None for all
ALSO = {"sampling": ["stochastic"]}  # names that live behind a door
SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:", "Example:", "Examples:", "Note:", "Notes:")

log = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.connect("builder-inited", _write)
    app.connect("autodoc-process-docstring", _as_written, priority=400)  # napoleon has 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# ------------------------------------------------------------------------------ what is public


def public_modules() -> dict[str, ModuleType]:
    """Every module with a page, by its name without `bbalpha.`; an integration only where its package is installed."""
    names = [name for group in GROUPS.values() for name in group]
    for found in iter_modules(bbalpha.__path__):
        if found.name in PARTS and PARTS[found.name] is None:
            room = import_module(f"bbalpha.{found.name}")
            names += [f"{found.name}.{m.name}" for m in iter_modules(room.__path__) if not m.name.startswith("_")]
        elif not found.name.startswith("_") and found.name not in INSIDE | PARTS.keys():
            names.append(found.name)
    modules = {}
    for name in dict.fromkeys(names):
        try:
            modules[name] = import_module(f"bbalpha.{name}")
        except ImportError as error:  # an extra that is not installed
            log.info("bbalpha.%s has no page: %s", name, error)
    return modules


def public_names(name: str, module: ModuleType) -> list[str]:
    """The names to document of a module, as a user would write them, in the order of the source."""
    listed = getattr(module, "__all__", None) or [
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]  # fmt: skip
    written = []
    for key in [*listed, *ALSO.get(name, ())]:
        home = bbalpha._HOME.get(key)
        if home == name or key in ALSO.get(name, ()):
            written.append(f"bbalpha.{key}")
        elif home is None or getattr(bbalpha, key) is not getattr(module, key):  # else on the page of its home
            written.append(f"{module.__name__}.{key}")
    return written


def members(cls: type) -> list[str]:
    """Methods and properties of a class that we wrote and described, its own and those of our classes below it."""
    found = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] == "bbalpha":
            for key, value in vars(base).items():
                inner = getattr(value, "__func__", value)
                if not key.startswith("_") and callable(inner) | isinstance(inner, property) and inner.__doc__:
                    found[key] = None
    return [key for key in found if not inspect.isclass(getattr(cls, key))]


# ------------------------------------------------------------------------------ pages


def _write(app: Sphinx) -> None:
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    modules = public_modules()
    pages = {f"{name}.rst": _page(name, module) for name, module in modules.items()}
    pages |= {"index.rst": _index(modules), "commands.rst": _commands()}
    for path in folder.glob("*.rst"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


def _index(modules: dict[str, ModuleType]) -> str:
    names = [n for name, module in modules.items() for n in public_names(name, module) if n.count(".") == 1]
    lines = [
        _title("All names"),
        "Made from the docstrings. What is called as ``bbalpha.NAME``:",
        "",
        *_table(sorted(names)),
    ]
    lines += ["By module:", ""]
    rest = [name for name in modules if not any(name in group for group in GROUPS.values())]
    for title, group in [*GROUPS.items(), ("More", rest)]:
        here = [name for name in group if name in modules]
        if here:
            lines += [_title(title, "-"), ".. toctree::", "   :maxdepth: 1", "", *(f"   {n}" for n in here), ""]
    lines += [_title("Command line", "-"), ".. toctree::", "   :maxdepth: 1", "", "   commands", ""]
    return "\n".join(lines)


def _page(name: str, module: ModuleType) -> str:
    """The docstring of a module, its names that `bbalpha` has too, and its others."""
    lines = [_title(module.__name__), f".. automodule:: {module.__name__}", "   :no-members:", ""]
    names = public_names(name, module)
    lines += _table(names) if len(names) > 1 else []
    short = [n for n in names if n.count(".") == 1]
    for title, group in (("", short), ("More of this module" if short else "", [n for n in names if n not in short])):
        lines += [_title(title, "-")] if title and group else []
        for written in group:
            lines += _entry(written)
    return "\n".join(lines)


def _entry(written: str) -> list[str]:
    value = _value(written)
    kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
    lines = [f".. auto{kind}:: {written}", ""]
    for member in members(value) if kind == "class" else ():
        is_property = isinstance(inspect.getattr_static(value, member), property)
        lines += [f"   .. auto{'property' if is_property else 'method'}:: {written}.{member}", ""]
    return lines


def _table(names: list[str]) -> list[str]:
    """Names with the first sentence of what they say of themselves."""
    rows = [(n, (inspect.getdoc(_value(n)) or "").split("\n\n")[0].replace("\n", " ")) for n in names]
    return [
        ".. list-table::", "   :widths: 30 70", "",
        *(line for n, told in rows for line in (f"   * - :py:obj:`~{n}`", f"     - {told or '..'}")), "",
    ]  # fmt: skip


def _value(written: str) -> Any:
    module, _, name = written.rpartition(".")
    return getattr(import_module(module), name)


def _commands() -> str:
    """Every command with its arguments and options, as --help has them."""
    import typer.main

    from bbalpha import cli

    lines = [_title("The commands"), "``bbalpha COMMAND --help`` prints the same.", ""]
    for path, command in _leaves("bbalpha", typer.main.get_command(cli.app)):
        told, _, example = (command.help or "").partition("Example:")
        lines += [_title(path, "-"), " ".join(told.split()), ""]
        lines += [".. code-block:: console", "", f"   $ {example.strip()}", ""] if example else []
        rows = [_option(p) for p in command.params if p.name != "help"]
        if rows:
            lines += [".. list-table::", "   :widths: 30 70", ""]
            lines += [line for left, right in rows for line in (f"   * - ``{left}``", f"     - {right}")]
            lines += [""]
    return "\n".join(lines)


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    for name, child in getattr(command, "commands", {}).items():
        yield from _leaves(f"{path} {name}", child)
    if not hasattr(command, "commands"):
        yield path, command


def _option(parameter: Any) -> tuple[str, str]:
    argument = parameter.param_type_name == "argument"
    name = (parameter.metavar or parameter.name.upper()) if argument else ", ".join(parameter.opts)
    told = re.sub(r"`([^`]+)`", r"``\1``", parameter.help or "")
    default = parameter.default
    shown = default not in (None, "", False, True, ...) and not callable(default) and not argument
    return name, (f"{told} Default: ``{default}``." if shown else told) or "\\ "


def _title(text: str, line: str = "=") -> str:
    return f"{text}\n{line * len(text)}\n"


# ------------------------------------------------------------------------------ docstrings


def _as_written(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Blocks that our docstrings set apart by four spaces are shown as they stand, as Markdown does."""
    out: list[str] = []
    section = block = False
    for i, line in enumerate(lines):
        if line and not line.startswith(" "):
            section, block = line.strip() in SECTIONS, False
        before = i == 0 or not lines[i - 1].strip()
        if line.startswith("    ") and before and not section and not block and not _doctest_above(lines[:i]):
            out += ["::", ""]
            block = True
        out.append(line)
    lines[:] = out


def _doctest_above(lines: list[str]) -> bool:
    above = [line for line in lines if line.strip()]
    return bool(above) and above[-1].lstrip().startswith(">>>")
