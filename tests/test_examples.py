"""Every example runs as it is, from any folder, and is short enough to read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
ELSEWHERE = {"distributed.py"}  # run by other tests


MARKED = {"slow": ("finetune_text", "segmentation"), "frameworks": ("lightning_digits",)}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=[getattr(pytest.mark, m) for m, names in MARKED.items() if p.stem in names], id=p.stem)
        for p in EXAMPLES
        if p.name not in ELSEWHERE
    ],
)
def test_example_runs(path, tmp_path):
    settings = {"BBALPHA_QUICK": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", str(path)],
        cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_is_short(path):
    assert len(path.read_text().splitlines()) <= 60
