"""What `import bbalpha` gives: every public name and module, and nothing loaded before it is asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bbalpha

MODULES = sorted(
    path.stem
    for path in Path(bbalpha.__file__).parent.iterdir()
    if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").is_file())
)


def fresh(code):
    """What `code` prints as JSON in an interpreter of its own, after `import bbalpha`."""
    found = subprocess.run([sys.executable, "-c", f"import json, sys, bbalpha\n{code}"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_every_public_module_is_an_attribute():
    assert {"metrics", "calibration", "experiments"} <= set(MODULES)
    found = fresh(f"print(json.dumps([getattr(bbalpha, name).__name__ for name in {MODULES}]))")
    assert found == [f"bbalpha.{name}" for name in MODULES]


def test_importing_loads_nothing_heavy_and_none_of_the_modules():
    loaded = fresh("dir(bbalpha); hasattr(bbalpha, 'nonsense'); print(json.dumps(sorted(sys.modules)))")
    assert not {"torch", "numpy", "sklearn", "matplotlib"} & set(loaded)
    assert not [name for name in loaded if name.startswith("bbalpha.")]


def test_dir_lists_names_and_modules():
    assert set(dir(bbalpha)) == {*bbalpha.__all__, *MODULES, "__version__"}
    assert not set(bbalpha.__all__) & set(MODULES)  # no name hides a module
    for name in bbalpha.__all__:
        assert getattr(bbalpha, name).__name__ == name


def test_what_is_not_there_is_an_attribute_error():
    for name in ("nonsense", "_private"):
        with pytest.raises(AttributeError, match=f"'bbalpha' has no attribute '{name}'"):
            getattr(bbalpha, name)
