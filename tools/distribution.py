"""Wheel and sdist, built, looked into and tried: `make dist` puts them into dist/ or says what is wrong with them.

The wheel holds the package and nothing else, the sdist the whole repository, and out of the sdist comes the same wheel.
In an empty environment the wheel runs README's first example, with `sklearn` the estimator's, with `cli` the command.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

from environments import ROOT, call, environment, examples, install, run

KINDS = {".py", ".typed", ".j2", ".css", ".csv", ".html", ".js", ".svg"}  # what a package of code and pages is made of
LARGEST = 200_000  # bytes of one file; data sets are larger


def build(source: Path, out: Path, *kinds: str) -> list[Path]:
    """The files that the tree `source` is built into, in `out`; kinds: "wheel", "sdist"."""
    out.mkdir(parents=True, exist_ok=True)
    flags = [f"--{kind}" for kind in kinds]
    call(Path(sys.executable), "-m", "build", *flags, "--outdir", str(out), str(source))
    ends = {"wheel": "*.whl", "sdist": "*.tar.gz"}
    return [next(out.glob(ends[kind])) for kind in kinds]


def clean_copy(folder: Path) -> Path:
    """A copy of what belongs to the repository: no leftovers of earlier builds can get into a wheel."""
    for name in tracked():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return folder


def tracked() -> list[str]:
    """The files of the repository, new ones included, ignored ones not."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted(name for name in found if name and (ROOT / name).is_file())


def faults_of_wheel(names: dict[str, int], files: list[str]) -> list[str]:
    """What is wrong with a wheel of `names` {path: bytes}, given the files of the repository: sentences."""
    inside = {name for name in names if ".dist-info/" not in name}
    wanted = {name.removeprefix("src/") for name in files if name.startswith("src/bbalpha/")}
    notes = {PurePosixPath(name).name for name in names.keys() - inside}
    return [
        *(f"{name} is missing." for name in sorted(wanted - inside)),
        *(f"{name} does not belong into a wheel." for name in sorted(inside - wanted)),
        *(f"{name} is no code and no page." for name in sorted(inside) if PurePosixPath(name).suffix not in KINDS),
        *(f"{name} has {names[name]:,} bytes: is it data?" for name in sorted(inside) if names[name] > LARGEST),
        *(f"{name} is missing." for name in ("METADATA", "entry_points.txt", "LICENSE") if name not in notes),
    ]


def faults_of_sdist(names: set[str], files: list[str]) -> list[str]:
    """What is wrong with an sdist of `names`, given the files of the repository: sentences."""
    made = {"PKG-INFO", "setup.cfg"}
    extra = {name for name in names - set(files) - made if ".egg-info/" not in name}
    wanted = {name for name in files if not name.startswith(".")}
    return [
        *(f"{name} is missing from the sdist: see MANIFEST.in." for name in sorted(wanted - names)),
        *(f"{name} does not belong into the sdist." for name in sorted(extra)),
    ]


def in_wheel(path: Path) -> dict[str, int]:
    """{name: bytes} of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {entry.filename: entry.file_size for entry in archive.infolist() if not entry.is_dir()}


def in_sdist(path: Path) -> set[str]:
    """The files of an sdist, without the folder that all are in."""
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def content(path: Path) -> dict[str, str]:
    """{name: digest} of a wheel; its own list of digests left out."""
    with zipfile.ZipFile(path) as archive:
        names = (name for name in archive.namelist() if not name.endswith("/RECORD"))
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def again(sdist: Path, folder: Path) -> Path:
    """The wheel that comes out of an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return build(tree, folder / "out", "wheel")[0]


def smoke(wheel: Path, folder: Path) -> None:
    """Run README's examples and the command in an empty environment."""
    first, second = examples((ROOT / "README.md").read_text())[:2]
    with environment(folder) as python:
        install(python, str(wheel))
        run(python, first)
        install(python, f"{wheel}[sklearn]")
        run(python, second)
        install(python, f"{wheel}[cli]")
        command = python.with_name("bbalpha")
        wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        if "doctor" not in call(command, "--help") or call(command, "--version").strip() != wanted:
            sys.exit(f"`bbalpha` of {wheel.name} must help and say that it is {wanted}.")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    out, files = ROOT / "dist", tracked()
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel, sdist = build(clean_copy(folder / "tree"), out, "wheel", "sdist")
        faults = [*faults_of_wheel(in_wheel(wheel), files), *faults_of_sdist(in_sdist(sdist), files)]
        (folder / "again").mkdir()
        one, other = content(wheel), content(again(sdist, folder / "again"))
        differing = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
        faults += [f"{name} differs in the wheel that the sdist builds." for name in differing]
        if faults:
            sys.exit("\n".join(faults))
        print(f"{wheel.name}: {len(one)} files, {wheel.stat().st_size / 1e6:.1f} MB; the sdist builds the same.")
        smoke(wheel, folder / "venv")
    print("README's examples and `bbalpha --help` run in an empty environment.")


if __name__ == "__main__":
    main()
