import math
import subprocess
import sys

import torch

from bbalpha.experiments import demo, results


def test_the_demo_runs_small(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bbalpha.experiments.demo", "--quick", "--out", str(tmp_path)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert "alpha = 0.5" in done.stdout
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    rows = results.read(tmp_path / "demo.json")["rows"]
    assert {(r["dataset"], r["alpha"]) for r in rows} == {
        (d, a) for d in ("digits", "diabetes") for a in (None, 0, 0.5, 1)
    }
    for r in rows:
        assert 0 <= r["auroc_tampered"] <= 1
        assert math.isfinite(r["nll"])


def test_tampering_keeps_columns_and_breaks_rows():
    x = torch.arange(60.0).view(20, 3)
    strange = demo._tampered(x, 0)
    assert torch.equal(strange.sort(0).values, x)
    assert (strange[:, 1] - strange[:, 0] != 1).any()
