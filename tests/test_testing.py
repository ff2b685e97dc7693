"""assert_samples: passes where every random site draws, and names those that do not; the pytest plugin around it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bbalpha
import zoo
from bbalpha.convert import audit
from bbalpha.testing import assert_samples

pytest_plugins = "pytester"


@pytest.fixture
def run(pytester, monkeypatch):
    """Run tests in a folder of their own, with the plugin and no other."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source):
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess("-p", "bbalpha._pytest", "-q")

    return run


class Net(nn.Module):
    """Two dropouts in the way that the subclass has them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        self.one, self.two = nn.Dropout(0.5), nn.Dropout(0.25)

    def forward(self, x):
        return self.b(self.two(self.a(self.one(x))))


class NotCalled(Net):
    def forward(self, x):
        return self.b(self.a(self.one(x)))


class BehindAFlag(Net):
    """The flag that switches it on is nobody's."""

    regularise = False

    def forward(self, x):
        return self.b(F.dropout(self.a(self.one(x)), 0.25, training=self.regularise))


class Discarded(Net):
    def forward(self, x):
        self.one(x)
        return self.b(self.a(x))


class ReadByItsParent(Net):
    """As attention does it: the rate of a Dropout that is never called."""

    def forward(self, x):
        return self.b(F.dropout(self.a(self.one(x)), self.two.p, self.training))


def head_of(layer):
    net = NotCalled()
    net.two = layer
    return net


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (NotCalled(), r"NotCalled does not sample everywhere: two \(Dropout, rate 0\.25\) was not called\. .*`silent`"),
        (BehindAFlag(), r"everywhere: the model \(dropout, rate 0\.25\) was called with training off.*; two \(Dropout"),
        (Discarded(), r"Discarded does not sample: .*without effect on the output: one \(dropout, rate 0\.5\)"),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)), r"Sequential does not sample: .*off: 1 \(dropout"),
        (nn.Linear(4, 3), "Linear does not sample: .*no dropout of any kind was met.*add_dropout"),
        (nn.Sequential(nn.Dropout(1e-6), nn.Linear(4, 3)), "gave the same: .*or too seldom on so few rows"),
        (head_of(bbalpha.GaussianDropout(0.25)), r"two \(GaussianDropout, rate 0\.25\) was not called"),
        (head_of(bbalpha.ConcreteDropout(0.25)), r"two \(ConcreteDropout, rate 0\.25\) was not called"),
        (head_of(bbalpha.DropConnectLinear(4, 4, p=0.25)), r"two \(DropConnectLinear, rate 0\.25\) was not called"),
        (head_of(nn.LSTM(4, 4, num_layers=2, dropout=0.25)), r"two \(LSTM, rate 0\.25\) was not called"),
        (head_of(nn.MultiheadAttention(4, 2, dropout=0.25)), r"two \(MultiheadAttention, rate 0\.25\) was not called"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_model_that_does_not_sample_fails_by_name(model, sentence, mode):
    with pytest.raises(AssertionError, match=sentence):
        assert_samples(model.train(mode), zoo.rows(5, 4))
    assert model.training is mode


@pytest.mark.parametrize(
    "model",
    [
        ReadByItsParent(),
        head_of(nn.Dropout(0.0)),
        head_of(nn.Identity()),
        nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0), nn.Dropout(0.5)),
    ],
)
def test_a_rate_that_another_reads_and_a_rate_of_zero_are_no_faults(model):
    assert_samples(model, zoo.rows(5, 4))


def test_sites_that_may_be_silent_are_named_and_the_names_stay_true():
    x = zoo.rows(5, 4)
    assert_samples(NotCalled(), x, silent="two")
    assert_samples(NotCalled(), x, silent=["two"])
    for name in ("one", "tow"):
        with pytest.raises(AssertionError, match=f"`silent` must name sites that draw nothing .* got {name}"):
            assert_samples(NotCalled(), x, silent=["two", name])
    with pytest.raises(AssertionError, match="does not sample: "):
        assert_samples(nn.Linear(4, 3), x, silent=["two"])


def test_no_rows_are_told():
    with pytest.raises(AssertionError, match="`x` has no rows"):
        assert_samples(Net(), zoo.rows(0, 4))


def test_audit_has_the_silent_sites():
    found = audit(NotCalled(), zoo.rows(5, 4))
    assert found.silent == {"two": "two (Dropout, rate 0.25) was not called"}
    assert f"warning         {found.silent['two']}." in str(found)


def test_nothing_is_drawn_from_the_callers_generator():
    net, x = Net(), zoo.rows(5, 4)
    state = torch.get_rng_state()
    assert_samples(net, x)
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------ the plugin


def test_the_fixture_passes_and_fails_with_the_sentence_alone(run):
    found = run(
        """
        import torch
        from torch import nn

        class Skips(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.drop, self.spare = nn.Linear(4, 3), nn.Dropout(0.5), nn.Dropout(0.1)

            def forward(self, x):
                return self.body(self.drop(x))

        def test_good(assert_samples):
            assert_samples(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), torch.randn(8, 4))

        def test_bad(assert_samples):
            assert_samples(Skips(), torch.randn(8, 4))
        """
    )
    found.assert_outcomes(passed=1, failed=1)
    found.stdout.fnmatch_lines(["E *AssertionError: Skips does not sample everywhere: spare (Dropout, rate 0.1) was*"])
    found.stdout.no_fnmatch_line("*bbalpha/testing.py*")  # the caller's line is shown, none of ours


def test_the_fixture_is_told_among_the_others(run, pytester):
    found = pytester.runpytest_inprocess("-p", "bbalpha._pytest", "--fixtures", "-q")
    found.stdout.fnmatch_lines(["assert_samples*", "*bbalpha.testing.assert_samples*"])


def test_the_plugin_is_the_one_that_pytest_finds():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"bbalpha": "bbalpha._pytest"}


def test_the_plugin_brings_nothing_heavy():
    code = "import sys, bbalpha._pytest, bbalpha.testing; print({'torch', 'numpy', 'bbalpha.convert'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
