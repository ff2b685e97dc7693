"""The comparison with peers measures what it tells: each word is given to a way and a model that deserve it."""

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import peers
import peers_verdict
import peers_ways
import peers_zoo
import tables_peers

import zoo

MLP = peers_zoo.Case("mlp", "zoo", zoo.mlp)
HALF = peers_zoo.Case("half", "more", peers_zoo.module_and_function)
NORM = peers_zoo.Case("norm", "zoo", zoo.batch_norm)


def asleep(model, x, n_passes, batch_dim):
    """What people get who forget that dropout is off."""
    return peers_ways.stacked([model(x) for _ in range(n_passes)])


def shifted(model, x, n_passes, batch_dim):
    return [leaf + 1 for leaf in peers_ways.training_mode(model, x, n_passes, batch_dim)]


def widened(model, x, n_passes, batch_dim):
    (leaf,) = peers_ways.training_mode(model, x, n_passes, batch_dim)
    return [leaf.mean(0) + 1.5 * (leaf - leaf.mean(0))]


def refusing(model, x, n_passes, batch_dim):
    raise TypeError("no such thing\nand more")


def word(monkeypatch, case, way, name="made up"):
    monkeypatch.setitem(peers_ways.WAYS, name, way)
    facts = peers_verdict.measure(case, name)
    return peers_verdict.verdict(facts), facts


@pytest.mark.parametrize(
    ("case", "way", "wanted"),
    [
        (MLP, asleep, "silently not sampled"),
        (MLP, peers_ways.training_mode, "sampled"),
        (MLP, shifted, "other outputs"),
        (MLP, widened, "other outputs"),
        (HALF, peers_ways.dropout_modules, "partly"),
        (HALF, peers_ways.training_mode, "sampled"),
        (NORM, peers_ways.training_mode, "changed the model"),
        (NORM, peers_ways.dropout_modules, "sampled"),
        (NORM, peers_ways.ours, "sampled"),
    ],
    ids=lambda v: getattr(v, "name", getattr(v, "__name__", v)),
)
def test_the_word_is_what_happened(monkeypatch, case, way, wanted):
    name = peers_ways.OURS if way is peers_ways.ours else "made up"
    assert word(monkeypatch, case, way, name)[0] == wanted


def test_a_warning_is_not_silence(monkeypatch):
    def warning(model, x, n_passes, batch_dim):
        warnings.warn("nothing was patched", UserWarning, stacklevel=2)
        return asleep(model, x, n_passes, batch_dim)

    found, facts = word(monkeypatch, MLP, warning)
    assert (found, facts.warned) == ("not sampled, warned", "nothing was patched")


def test_passes_that_differ_for_another_reason_than_chance_are_not_sampled(monkeypatch):
    def slipping(model, x, n_passes, batch_dim):
        return [asleep(model, x, n_passes, batch_dim)[0] + torch.arange(n_passes)[:, None, None]]

    assert word(monkeypatch, MLP, slipping)[0] == "silently not sampled"


def test_a_model_that_works_in_place_gets_its_input_as_it_was(monkeypatch):
    case = peers_zoo.Case("in place", "zoo", zoo.in_place_on_the_input)
    assert word(monkeypatch, case, peers_ways.training_mode)[0] == "other outputs"  # its passes share one input
    assert word(monkeypatch, case, peers_ways.ours, peers_ways.OURS)[0] == "sampled"


def test_an_error_is_told_in_one_line(monkeypatch):
    found, facts = word(monkeypatch, MLP, refusing)
    assert (found, facts.error) == ("error", "TypeError: no such thing")


def test_one_draw_for_all_passes_is_not_a_draw_of_each(monkeypatch):
    class Shared(nn.Module):
        """Dropout of a weight: a repeated batch has one draw of it, whatever the rows have."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(4, 8), nn.Linear(8, 3), nn.Dropout(0.3)

        def forward(self, x):
            weight = F.dropout(self.b.weight, 0.5, self.training)
            return F.linear(self.drop(torch.tanh(self.a(x))), weight)

    def repeated(model, x, n_passes, batch_dim):
        return [model.train()(x.repeat(n_passes, 1)).view(n_passes, len(x), -1)]

    case = peers_zoo.Case("shared", "more", lambda: (Shared(), torch.randn(5, 4)))
    assert word(monkeypatch, case, repeated)[0] == "partly"
    assert word(monkeypatch, MLP, repeated) == ("sampled", peers_verdict.measure(MLP, "made up"))


def test_flags_left_on_are_seen(monkeypatch):
    def left_on(model, x, n_passes, batch_dim):
        model.train()
        return asleep(model, x, n_passes, batch_dim)

    assert word(monkeypatch, MLP, left_on)[1].flags
    assert not word(monkeypatch, MLP, peers_ways.training_mode)[1].flags


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX, where another test has loaded it; the child runs no JAX
def test_a_process_that_dies_is_an_error_of_the_model_it_died_at(monkeypatch):
    def measure(case, name):
        return os._exit(7) if case is NORM else peers_verdict.Facts(differ=True)

    monkeypatch.setattr(peers, "measure", measure)
    rows = [row for row, _ in peers.rows_of("bbalpha", [MLP, NORM, HALF])]
    assert [(r["model"], r["verdict"]) for r in rows] == [("mlp", "sampled"), ("norm", "error"), ("half", "sampled")]
    assert rows[1]["error"] == "the process ended with 7"


def test_a_peer_that_is_not_here_is_told_and_the_run_goes_on_where_it_was(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "installed", dict)
    monkeypatch.setattr(peers, "yardstick", lambda case: None)
    asked = []

    def rows_of(way, cases):
        asked.append([case.name for case in cases])
        facts = peers_verdict.Facts(differ=True)
        yield from ((peers.row_of(case, way, "sampled", facts), 0.1) for case in cases)

    monkeypatch.setattr(peers, "rows_of", rows_of)
    out = tmp_path / "peers.json"
    peers.run(out, [MLP], ["baal, patch_module", "bbalpha"])
    peers.run(out, [MLP, NORM], ["baal, patch_module", "bbalpha"])
    rows = tables_peers.results.read(out)["rows"]
    words = [(r["model"], r["way"].split(",")[0], r["verdict"]) for r in rows]
    assert words == [
        ("mlp", "baal", "not installed"), ("mlp", "bbalpha", "sampled"), ("norm", "baal", "not installed"),
        ("norm", "bbalpha", "sampled"),
    ]  # fmt: skip
    assert asked == [["mlp"], ["norm"]]


def test_the_yardstick_moves_nothing():
    for case in (c for c in peers_zoo.CASES if "norm" in c.name):
        model, x = peers_verdict.made(case)
        before = {name: t.clone() for name, t in model.state_dict().items()}
        case.prepare(model)
        first, second = peers_ways.call(model, x), peers_ways.call(model, x)
        assert not torch.equal(first, second)
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_every_model_has_one_word_for_every_way():
    rows = tables_peers.results.read(tables_peers.ROOT / "results/peers.json")["rows"]
    pairs = [(r["model"], r["way"]) for r in rows]
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) == {(case.name, way) for case in peers_zoo.CASES for way in peers_ways.WAYS}
    assert {r["verdict"] for r in rows} <= set(tables_peers.WORDS)


def test_an_error_fits_into_a_table():
    assert "|" not in tables_peers.short("a | b `c` " + "long " * 40)
    assert len(tables_peers.short("long " * 40)) <= 114
    row = {"verdict": "partly", "flags": True}
    assert tables_peers.cell(row) == "partly\\*"
    assert tables_peers.cell(row | {"flags": None}) == "partly"
