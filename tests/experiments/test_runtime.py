import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bbalpha.cli import app
from bbalpha.experiments import mnist, results, runtime
from bbalpha.experiments.results import Ledger
from bbalpha.networks import mlp

PAIRS = [("loop", 2), ("ours", 2), ("shared", 2)]
TIMES = runtime.moments(20.0)


@pytest.fixture
def digits():
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(10, 784, generator=generator)
    y = torch.randint(10, (120,), generator=generator)
    x = (patterns[y] + 0.3 * torch.randn(120, 784, generator=generator)).clamp(0, 1)
    return mnist.Digits(x[:80], y[:80], x[80:], y[80:], x[:0])


class Clock:
    """A second a look."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def config(clock):
    return runtime.Config(widths=(16, 16), batch_size=20, n_predict_passes=5, learning_rate=3e-3, clock=clock)


def test_the_ways_draw_as_they_say():
    net = mlp([6, 40, 3], dropout=0.5).train()
    x = torch.ones(2, 6)  # two rows that are the same
    for name, way in runtime.WAYS.items():
        outputs = way(net, x, 4, 7)
        assert outputs.shape == (4, 2, 3)
        assert torch.equal(outputs, way(net, x, 4, 7))
        assert not torch.equal(outputs, way(net, x, 4, 8))
        assert not torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[:, 0], outputs[:, 1]) == name.endswith("shared")
    torch.manual_seed(7)
    expected = torch.stack([net(x), net(x)])
    assert torch.equal(runtime.loop(net, x, 2, 7), expected)


def test_all_ways_have_the_same_mean():
    net = mlp([6, 10, 3], dropout=0.5).train()
    with torch.no_grad():
        means = [way(net, torch.ones(1, 6), 20_000, 3).mean(0) for way in runtime.WAYS.values()]
    for mean in means[1:]:
        torch.testing.assert_close(mean, means[0], atol=0.03, rtol=0)


def test_ways_take_turns_and_tests_cost_no_time(digits, tmp_path, monkeypatch):
    clock = Clock()
    predict = runtime.predict_classification

    def slow(*args, **options):
        clock.now += 1000.0
        return predict(*args, **options)

    monkeypatch.setattr(runtime, "predict_classification", slow)
    kept = Ledger(tmp_path / "x.json", command="", seed=0)
    runtime.run(PAIRS, TIMES, config(clock), digits, kept, tmp_path / "state")
    assert [(row["way"], row["seconds"]) for row in kept.rows] == [
        (way, seconds) for seconds in (5.0, 10.0, 20.0) for way, _ in PAIRS
    ]
    assert all(row["n_steps"] == row["seconds"] for row in kept.rows)  # a step is a second of this clock
    assert [row["epoch"] for row in kept.rows[-3:]] == [5.0, 5.0, 5.0]
    assert [row["masks"] for row in kept.rows[-3:]] == ["per_example", "per_example", "shared"]
    for way, _, own in runtime.pairs_of(kept.rows):
        assert own[-1]["total_log_likelihood"] > own[0]["total_log_likelihood"], way


@pytest.mark.parametrize("written", [False, True], ids=["before its row", "after its row"])
def test_a_run_that_was_cut_off_gives_the_same_rows(digits, tmp_path, monkeypatch, written):
    whole = Ledger(tmp_path / "whole.json", command="", seed=0)
    runtime.run(PAIRS, TIMES, config(Clock()), digits, whole, tmp_path / "whole")
    row, add, calls = runtime._row, Ledger.add, []

    def cut(*args):
        calls.append(args)
        if len(calls) == 5 and not written:
            raise KeyboardInterrupt
        return row(*args)

    def cut_after(ledger, rows, **options):
        add(ledger, rows, **options)
        if len(calls) == 5 and written:
            raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "_row", cut)
    monkeypatch.setattr(Ledger, "add", cut_after)
    path = tmp_path / "cut.json"
    with pytest.raises(KeyboardInterrupt):
        runtime.run(PAIRS, TIMES, config(Clock()), digits, Ledger(path, command="", seed=0), tmp_path / "cut")
    kept = Ledger(path, command="", seed=0)
    assert len(kept.rows) == (5 if written else 4)
    runtime.run(PAIRS, TIMES, config(Clock()), digits, kept, tmp_path / "cut")
    assert results.read(path)["rows"] == results.read(tmp_path / "whole.json")["rows"]


def test_a_run_without_its_state_is_not_prolonged(digits, tmp_path):
    kept = Ledger(tmp_path / "x.json", command="", seed=0)
    runtime.run(PAIRS[:1], runtime.moments(4.0), config(Clock()), digits, kept, tmp_path / "state")
    runtime.run(PAIRS[:1], runtime.moments(8.0), config(Clock()), digits, kept, tmp_path / "state")
    assert [row["seconds"] for row in kept.rows] == [1.0, 2.0, 4.0, 8.0]
    with pytest.raises(FileNotFoundError, match="Delete the file to begin anew"):
        runtime.run(PAIRS[:1], runtime.moments(16.0), config(Clock()), digits, kept, tmp_path / "elsewhere")


@given(st.lists(st.floats(-3000, -100), min_size=1, max_size=8), st.floats(-2500, -200), st.floats(0, 500))
def test_a_higher_level_takes_longer(lls, level, more):
    rows = [{"seconds": 10.0 * (i + 1), "total_log_likelihood": ll} for i, ll in enumerate(lls)]
    sooner, later = runtime.time_to(rows, level), runtime.time_to(rows, level + more)
    assert (sooner is None) == (max(lls) < level)
    if later is not None:
        assert 10.0 <= sooner <= later <= 10.0 * len(lls)
    for at, ll in enumerate(lls):
        if all(before < ll for before in lls[:at]):  # reached for the first time at this test
            assert runtime.time_to(rows, ll) == pytest.approx(10.0 * (at + 1))


def test_moments_end_with_the_budget():
    for budget in (0.6, 29.0, 31.0, 60.0, 700.0, 1200.0, 1234.5):
        times = runtime.moments(budget)
        assert times[-1] == budget
        assert times == sorted(set(times))
        assert times[0] <= max(15.0, budget / 4)
        assert max(b - a for a, b in zip([0.0, *times], times, strict=False)) <= max(120.0, budget / 2)


def test_mistakes_are_told(tmp_path):
    options = {"ways": [], "passes": [1], "minutes": 1.0, "quick": True, "out": tmp_path}
    with pytest.raises(ValueError, match="some of loop, ours, shared, balanced, balanced-shared; got vmap"):
        runtime.reproduce(**options | {"ways": ["vmap"]})
    with pytest.raises(ValueError, match="at least 2 for shared: one pass has nothing"):
        runtime.reproduce(**options | {"ways": ["shared"]})
    with pytest.raises(ValueError, match=r"at least 1; got \[0\]"):
        runtime.reproduce(**options | {"passes": [0]})


def test_the_command_on_real_digits(data_dir, tmp_path):
    command = ["reproduce", "runtime", "--passes", "1,4", "--minutes", "0.01", "--quick", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = runtime.load(tmp_path / "runtime")["rows"]
    found = [(way, K) for way, K, _ in runtime.pairs_of(rows)]
    assert found == [("loop", 1), ("ours", 1), *((way, 4) for way in runtime.WAYS)]
    assert (tmp_path / "runtime.png").stat().st_size > 10_000
    assert "never" in done.output
    assert not (tmp_path / ".state").exists()
    before = {path.name: path.read_text() for path in (tmp_path / "runtime").iterdir()}
    assert before.keys() == {"1.json", "4.json"}
    assert CliRunner().invoke(app, command).exit_code == 0  # nothing is left to do
    assert {path.name: path.read_text() for path in (tmp_path / "runtime").iterdir()} == before
