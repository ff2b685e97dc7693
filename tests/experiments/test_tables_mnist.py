import sys
from pathlib import Path

import pytest

from bbalpha.experiments import results

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import tables_mnist


def ends(accuracies, lls):
    return [{"accuracy": a, "total_log_likelihood": ll} for a, ll in zip(accuracies, lls, strict=True)]


def test_a_difference_within_its_error_is_none():
    found = {"a": ends([0.970, 0.972], [-1300, -1310]), "b": ends([0.960, 0.962], [-1304, -1308])}
    told = tables_mnist.against(found, "a", "b")
    assert "accuracy +1.00 ± 0.14 (better)" in told
    assert "log-likelihood +1 ± 5 (no clear difference)" in told
    assert "accuracy -1.00 ± 0.14 (worse)" in tables_mnist.against(found, "b", "a")
    assert tables_mnist.goal(found["a"], "accuracy", 100, 97.2, "%").endswith("not reached, 97.1%.")
    assert tables_mnist.goal(found["a"], "accuracy", 100, 97.1, "%").endswith(": reached, 97.1%.")


def curve(way, n_passes, pace, **more):
    """A way that loses half of what is above -400 in `pace` seconds."""
    facts = {"way": way, "n_passes": n_passes, "batch": 128, "accuracy": 0.98, "alpha": 1.0, "model": "mlp"}
    facts |= {"threads": 1} | more
    return [
        facts | {"seconds": t, "n_steps": t, "epoch": t / 100, "total_log_likelihood": -400 - 2000 * 0.5 ** (t / pace)}
        for t in range(5, 605, 5)
    ]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.setattr(tables_mnist, "ROOT", tmp_path)

    def write(rows):
        for K in {row["n_passes"] for row in rows}:
            own = [row for row in rows if row["n_passes"] == K]
            results.write(tmp_path / f"results/runtime/{K}.json", command="x", seed=0, seconds=1, rows=own)

    return write


def test_gains_over_the_loop_are_told_as_they_are(measured):
    measured([*curve("loop", 10, 80), *curve("ours", 10, 40), *curve("shared", 10, 20)])
    told = tables_mnist.runtime()
    assert "ours against loop, K = 10: -600 2.0 times sooner" in told
    assert "for ours, K = 10: at least 1.4 times sooner than loop at every level that loop reached: reached" in told
    assert "the better of both masks, K = 10: at least 2 times sooner" in told
    assert "not reached" not in told
    measured([*curve("loop", 10, 80), *curve("ours", 10, 80), *curve("shared", 10, 500)])
    told = tables_mnist.runtime()
    assert told.count("not reached, 1.0.") == 2
    assert "-600 never, loop after" in told
    measured([*curve("loop", 10, 400), *curve("ours", 10, 40), *curve("shared", 10, 20)])
    told = tables_mnist.runtime()
    assert "-600 after 2:1" in told
    assert "loop never" in told


def test_the_winner_at_equal_time_is_named(measured):
    measured([*curve("ours", 10, 40), *curve("ours", 100, 300), *curve("shared", 10, 20)])
    told = tables_mnist.masks_by_time()
    assert "| ours | 10 | -1107 | -650 | -411 | -400 |" in told
    assert "Highest at the end: shared with K = 10, -400." in told


def test_a_table_without_results_says_which_are_missing(measured):
    with pytest.raises(FileNotFoundError, match=r"10\.json"):
        tables_mnist.runtime()
