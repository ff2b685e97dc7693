"""The skeleton: units are run once, cut-off ones find their folder again, and what is done leaves nothing behind."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from bbalpha.experiments import results, skeleton
from bbalpha.experiments.results import Ledger
from bbalpha.experiments.skeleton import Unit, forget, open_ledger, run_units, state_folder, threads

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Square(Unit):
    number: int

    @property
    def part(self):
        return "even" if self.number % 2 == 0 else "odd"


def slow_square(failing, unit, folder, seconds=0.0):
    """The row of a number; a note stays in its folder where it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    notes = sorted(path.name for path in folder.iterdir())
    (folder / f"{len(notes)}").touch()
    time.sleep(seconds)
    if unit.number in failing:
        raise KeyError(unit.number)
    return [{"number": unit.number, "square": unit.number**2, "tries": len(notes) + 1}]


@pytest.fixture
def kept(tmp_path):
    return Ledger(tmp_path / "squares/x.json", command="make x", seed=0)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_units_are_run_once_and_taken_up_where_they_were(kept, tmp_path, jobs):
    state = tmp_path / ".state/squares/x"
    with pytest.raises(KeyError):
        run_units(kept, [Square(i) for i in range(3)], partial(slow_square, (1,)), state=state, jobs=jobs)
    assert [row["number"] for row in kept.rows] == [0]
    assert (state / "1").is_dir()
    assert not (state / "0").exists()
    again = Ledger(kept.path, command="make x", seed=0)
    run_units(again, [Square(i) for i in range(3)], partial(slow_square, ()), state=state, jobs=jobs)
    assert [(row["number"], row["square"]) for row in again.rows] == [(0, 0), (1, 1), (2, 4)]
    assert [row["tries"] for row in again.rows][:2] == [1, 2]
    assert not (tmp_path / ".state").exists()
    assert again.parts["even"] + again.parts["odd"] == pytest.approx(again.seconds, abs=0.2)
    run_units(again, [Square(2)], None, state=state)  # done


def test_nothing_new_is_begun_once_a_unit_has_failed(kept, tmp_path):
    work = partial(slow_square, (0,), seconds=0.3)
    with pytest.raises(KeyError):
        run_units(kept, [Square(i) for i in range(50)], work, state=tmp_path / "s", jobs=2)
    assert len(list((tmp_path / "s").iterdir())) < 50  # what was on its way
    assert kept.rows == []


@dataclass(frozen=True)
class Stage(Square):
    """Needless once its number is 3 or more in the results."""

    def done(self, kept):
        return any(row["number"] >= 3 or row["number"] == self.number for row in kept.rows)


def test_what_is_needless_by_the_time_it_would_begin_is_left_out(kept, tmp_path):
    run_units(kept, [Stage(i) for i in (1, 3, 5, 7)], partial(slow_square, ()), state=tmp_path / ".state/squares/x")
    assert [row["number"] for row in kept.rows] == [1, 3]


def test_names_and_labels_follow_the_fields():
    assert (Square(3).name, Square(3).label) == ("3", "number 3")


def test_quick_and_whole_results_are_kept_apart(tmp_path):
    path = tmp_path / "x.json"
    open_ledger(path, command="make x", quick=True, seed=0).add([{"a": 1}], seconds=1)
    assert results.read(path)["command"] == "make x --quick"
    assert open_ledger(path, command="make x", quick=True, seed=0).rows == [{"a": 1}]
    with pytest.raises(ValueError, match="a quick run where a whole run is to go"):
        open_ledger(path, command="make x", quick=False, seed=0)


def test_every_settings_has_a_state_of_its_own(tmp_path):
    path = tmp_path / "out/squares/x.json"
    a, b = (state_folder(path, settings={"rate": rate, "widths": (2, 3)}) for rate in (1, 2))
    assert a == state_folder(path, settings={"widths": (2, 3), "rate": 1})
    assert a != b
    assert a.parent.parent == b.parent.parent == tmp_path / "out/.state"
    assert a.name == "x"


def test_forgetting_leaves_what_others_have(tmp_path):
    mine, other = (tmp_path / ".state/squares" / name / "training" for name in "ab")
    for folder in (mine, other):
        folder.mkdir(parents=True)
    forget(mine.parent)
    assert other.is_dir()
    assert not mine.parent.exists()
    forget(other)
    assert list(tmp_path.iterdir()) == []
    forget(tmp_path / "nothing")
    assert tmp_path.is_dir()


def test_threads_are_as_before():
    before = torch.get_num_threads()

    def fails():
        with threads(before + 1):
            raise KeyError(torch.get_num_threads())

    with pytest.raises(KeyError, match=str(before + 1)):
        fails()
    assert torch.get_num_threads() == before


def settings_of(path):
    from bbalpha.experiments import adversarial, classification, runtime, search

    kind, name = path.parent.name, path.stem
    if kind == "regression":
        return search.config_for(455, name).settings
    if kind == "classification":
        return vars(classification.CONFIGS[name])
    return runtime.Config().settings if kind == "runtime" else vars(adversarial.Config())


@pytest.mark.parametrize("kind", ["regression", "classification", "runtime", "adversarial"])
def test_committed_results_are_gone_on_with_and_new_ones_have_settings(kind, tmp_path, monkeypatch):
    paths = sorted((ROOT / "results" / kind).glob("*.json"))
    assert paths
    for path in paths:
        content = results.read(path)
        monkeypatch.setattr(results, "versions", lambda content=content: content["versions"])
        options = {"command": content["command"], "quick": False, "seed": content["seed"]}
        assert open_ledger(path, **options, settings=settings_of(path)).rows == content["rows"]
        open_ledger(tmp_path / "new.json", **options, settings=settings_of(path)).add([], seconds=0)
        assert results.read(tmp_path / "new.json")["settings"].keys() == settings_of(path).keys()
        again = open_ledger(tmp_path / "new.json", **options, settings=settings_of(path))
        with pytest.raises(ValueError, match="more 1"):
            open_ledger(tmp_path / "new.json", **options, settings=again.settings | {"more": 1})
        (tmp_path / "new.json").unlink()


def test_a_missing_package_names_the_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(skeleton, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"need gpytorch; .*pip install 'bbalpha\[baselines\]'"):
        skeleton.extra("gpytorch.kernels")
