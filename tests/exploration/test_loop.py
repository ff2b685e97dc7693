import json
import math

import pytest
import torch

import bbalpha
from bbalpha.exploration import storing
from bbalpha.exploration.loop import eased

BOX = [(-1.0, 2.0), (10.0, 12.0)]


def bowl(x):
    return (x[:, 0] - 0.4) ** 2 + (x[:, 1] - 11.3) ** 2


def cheap(x, y, seed):
    """Draws that cost nothing: K random waves, whatever was measured."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    weight = 3 * torch.randn((8, x.shape[1]), generator=generator, dtype=torch.float64)
    height = y.mean()
    return lambda at: (weight @ at.T).sin() + height


def explorer(**options):
    return bbalpha.Explorer(**{"bounds": BOX, "seed": 3, "model": cheap} | options)


def run(loop, steps, measure=bowl):
    for _ in range(steps):
        x = loop.suggest()
        loop.observe(x, measure(x))
    return loop


def test_the_bottom_of_a_bowl_is_found():
    loop = run(bbalpha.Explorer(BOX, seed=0), 11)
    assert loop.best_y < 0.02
    assert loop.best_y == float(loop.y.min()) == float(bowl(loop.best_x[None]))


def test_maximising_is_minimising_the_negative():
    low = run(bbalpha.Explorer(BOX, seed=1), 7)
    high = run(bbalpha.Explorer(BOX, seed=1, maximise=True), 7, lambda x: -bowl(x))
    assert torch.equal(low.x, high.x)
    assert torch.equal(low.y, -high.y)
    assert torch.equal(low.best_x, high.best_x)
    assert low.best_y == -high.best_y


def test_a_run_that_was_saved_goes_on_as_if_undisturbed(tmp_path):
    whole = run(bbalpha.Explorer(BOX, seed=5), 8)
    for stop in (0, 2, 7):
        begun = bbalpha.Explorer(BOX, seed=5)
        begun.observe(whole.x[:stop], whole.y[:stop])
        begun.save(tmp_path / "run")
        resumed = bbalpha.Explorer.load(tmp_path / "run")
        assert torch.equal(resumed.suggest()[0], whole.x[stop])
    run(resumed, 1)
    assert torch.equal(whole.x, resumed.x)
    assert torch.equal(whole.y, resumed.y)


def test_what_is_suggested_hangs_on_what_was_observed_alone():
    loop = run(explorer(), 8)
    torch.manual_seed(77)
    first = loop.suggest()
    torch.rand(5)
    before = torch.random.get_rng_state()
    assert torch.equal(loop.suggest(), first)
    assert torch.equal(loop.suggest(3)[:1], first)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(run(explorer(seed=4), 8).x, loop.x)


def test_a_finite_set_is_gone_through_without_repeats():
    rows = torch.rand(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.cat((rows, rows[:5]))  # equal rows are one
    loop = explorer(bounds=None, candidates=rows, first=4)
    for n in (1, 3, 5, 1, 20):
        x = loop.suggest(n)
        assert len({tuple(r) for r in x.tolist()}) == n
        loop.observe(x, x.sum(1))
    assert {tuple(r) for r in loop.x.tolist()} == {tuple(r) for r in rows.tolist()}
    assert loop.best_y == float(rows.sum(1).min())
    with pytest.raises(ValueError, match="at most the 0 candidates"):
        loop.suggest()


def test_equal_candidates_are_one():
    loop = explorer(bounds=None, candidates=torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]]))
    assert {tuple(row) for row in loop.suggest(2).tolist()} == {(1.0, 0.0), (0.0, 2.0)}
    with pytest.raises(ValueError, match="at most the 2 candidates"):
        loop.suggest(3)


def test_rows_of_a_batch_lie_in_the_box_and_apart():
    loop = run(explorer(), 6)
    x = loop.suggest(4)
    low, high = torch.tensor(BOX, dtype=torch.float64).unbind(1)
    assert bool(((x >= low) & (x <= high)).all())
    assert torch.pdist(x).min() > 1e-6


def test_rows_of_a_batch_are_apart_also_where_measurements_are_noisy():
    generator = torch.Generator().manual_seed(0)
    for noise in (0.0, 1.0):
        loop = bbalpha.Explorer(BOX, seed=0)
        x = loop.suggest(6)
        loop.observe(x, bowl(x) + noise * torch.randn(6, generator=generator, dtype=torch.float64))
        assert torch.pdist(loop.suggest(4)).min() > 1e-6


def test_the_last_digits_of_the_best_row_are_looked_for():
    loop = run(bbalpha.Explorer(BOX, seed=0), 20)
    assert loop.best_y < 1e-7
    assert ((loop.best_x - torch.tensor([0.4, 11.3])) / (loop.high - loop.low)).abs().max() < 2e-4


def test_a_row_that_is_measured_again_and_again():
    loop = bbalpha.Explorer(BOX, seed=0)
    x = loop.suggest(6)
    loop.observe(torch.cat((x, x, x[:1])), torch.cat((bowl(x), bowl(x) + 0.1, bowl(x[:1]))))
    assert bool(loop.suggest(2).isfinite().all())


def test_the_first_design_is_spread_and_each_seed_has_its_own():
    loop = explorer(first=8)
    rows = loop.suggest(8)
    unit = (rows - loop.low) / (loop.high - loop.low)
    for f in range(2):  # a Sobol design of 8: one row in every eighth of each coordinate
        assert (unit[:, f] * 8).long().sort().values.tolist() == list(range(8))
    assert not torch.equal(explorer(first=8, seed=9).suggest(8), rows)


def test_design_and_choice_in_one_batch():
    loop = run(explorer(first=5), 4)
    x = loop.suggest(3)
    assert torch.equal(x[:1], loop.suggest(1))  # the last row of the design, then rows that are chosen
    assert len(x) == 3


def test_large_values_are_drawn_together_in_their_order():
    y = torch.tensor([3.0, -1.0, 50.0, 0.0, 1e6], dtype=torch.float64)
    assert torch.equal(eased(y).argsort(), y.argsort())
    assert eased(y).max() < 20
    assert torch.equal(eased(torch.full((3,), 2.0)), torch.full((3,), 2.0))  # nothing to tell apart


def test_values_that_are_all_equal():
    loop = run(bbalpha.Explorer(BOX, seed=0), 7, lambda x: torch.full((len(x),), 2.5))
    assert loop.best_y == 2.5


def test_a_folder_is_whole_and_nothing_else_is_overwritten(tmp_path):
    loop = run(explorer(model=None), 3)
    loop.save(tmp_path / "a")
    run(loop, 1).save(tmp_path / "a")
    assert len(bbalpha.Explorer.load(tmp_path / "a").y) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    path = tmp_path / "a" / "explorer.json"
    content = json.loads(path.read_text())
    content["explorer"]["y"][0] += 1.0
    path.write_text(json.dumps(content, indent=1))
    with pytest.raises(ValueError, match="damaged"):
        bbalpha.Explorer.load(tmp_path / "a")
    (tmp_path / "other").mkdir()
    with pytest.raises(FileExistsError, match="holds other things"):
        loop.save(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="holds no loop"):
        bbalpha.Explorer.load(tmp_path / "none")


def test_candidates_and_a_model_of_the_caller_come_back(tmp_path):
    rows = torch.rand(20, 2, dtype=torch.float64)
    loop = run(explorer(bounds=None, candidates=rows, maximise=True), 3, lambda x: x.sum(1))
    loop.save(tmp_path / "run")
    again = bbalpha.Explorer.load(tmp_path / "run", model=cheap)
    assert torch.equal(run(again, 4, lambda x: x.sum(1)).x, run(loop, 4, lambda x: x.sum(1)).x)
    with pytest.raises(ValueError, match="`model` must be given"):
        bbalpha.Explorer.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bounds": None}, "`bounds` or `candidates` must say"),
        ({"candidates": torch.zeros(2, 2)}, "`bounds` or `candidates` must say"),
        ({"bounds": [(1.0, 1.0)]}, "each low below its high"),
        ({"bounds": [(0.0, math.inf)]}, "must be finite"),
        ({"bounds": [(0.0, 1.0, 2.0)]}, r"\(low, high\) for every coordinate"),
        ({"bounds": None, "candidates": torch.zeros(0, 2)}, "`candidates` must be finite rows"),
        ({"bounds": None, "candidates": torch.tensor([[math.nan]])}, "`candidates` must be finite rows"),
        ({"first": 0}, "`first` must be"),
    ],
)
def test_nonsense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        explorer(**options)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[0.0, 11.0]], [math.nan], "must be finite"),
        ([[0.0, 11.0]], [1.0, 2.0], "a value for each"),
        ([[0.0, 11.0, 1.0]], [1.0], "a value for each"),
        ([[0.0, 9.0]], [1.0], "must lie within the bounds; got 9.0 in coordinate 1"),
    ],
)
def test_observations_that_make_no_sense(x, y, message):
    loop = explorer()
    with pytest.raises(ValueError, match=message):
        loop.observe(torch.tensor(x), torch.tensor(y))
    assert not len(loop.y)


def test_what_cannot_be_known_yet():
    with pytest.raises(RuntimeError, match="Nothing was observed"):
        explorer().best_y  # noqa: B018
    with pytest.raises(ValueError, match="first design"):
        explorer(first=3).suggest(4)
    loop = explorer(bounds=None, candidates=torch.eye(3))
    with pytest.raises(ValueError, match="none of them"):
        loop.observe([[0.5, 0.5, 0.0]], [1.0])


FORGED = (
    {"format": None}, {"bounds": None}, {"bounds": [[0.0]]}, {"bounds": "x"}, {"x": [[1.0]]}, {"x": "x"}, {"y": ["x"]},
    {"y": 3}, {"seed": 1.5}, {"first": 0.5}, {"maximise": "x"}, {"candidates": [[1.0], [2.0, 3.0]]},
    {"x": [[2**70] * 2]},
)  # fmt: skip


@pytest.mark.parametrize("change", [*FORGED, *({name: ...} for name in ("format", "x", "y", "candidates", "seed"))])
def test_a_forged_loop_is_refused_in_a_sentence(tmp_path, change):
    """Its checksum is right, and what it says is not."""
    run(explorer(model=None), 3).save(tmp_path / "a")
    path = tmp_path / "a" / "explorer.json"
    state = json.loads(path.read_text())["explorer"] | change
    path.write_bytes(storing._bytes({name: value for name, value in state.items() if value is not ...}))
    with pytest.raises(ValueError, match=r"not of the form that bbalpha writes|this bbalpha reads"):
        bbalpha.Explorer.load(tmp_path / "a")


def test_a_loop_that_nests_without_end_is_damaged(tmp_path):
    run(explorer(model=None), 3).save(tmp_path / "a")
    (tmp_path / "a" / "explorer.json").write_text('{"explorer":' + "[" * 100_000)
    with pytest.raises(ValueError, match="is damaged"):
        bbalpha.Explorer.load(tmp_path / "a")
