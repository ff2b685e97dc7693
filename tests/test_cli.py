"""The command line: one line and exit code 2 for the user's mistakes, and nothing heavy before it is needed."""

import subprocess
import sys

import pytest

NETS = """
import torch
from torch import nn
def make(): return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), torch.randn(3, 4)
def plain(): return nn.Linear(4, 8)
def number(): return 3
def broken(): raise RuntimeError("the disk is gone")
value = 7
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The command in a folder with nets.py, as (exit code, stdout, stderr)."""
    from bbalpha import cli

    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "nets", raising=False)

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["bbalpha", *args])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code, *capsys.readouterr()

    return call


def test_doctor_prints_the_sites(run):
    code, out, _ = run("doctor", "nets:make")
    assert code == 0
    assert "dropout" in out
    assert "0.5" in out
    assert "passes differ   yes" in out


def test_doctor_exits_1_where_passes_do_not_differ(run):
    code, out, _ = run("doctor", "nets:plain", "--shape", "3,4")
    assert code == 1
    assert "add_dropout" in out


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """A data folder with one file in it, and an empty cache."""
    (tmp_path / "data" / "uci").mkdir(parents=True)
    (tmp_path / "data" / "uci" / "boston.npz").write_bytes(b"not read by these commands")
    monkeypatch.setenv("BBALPHA_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "data"


def test_data_list_says_what_is_here(run, data_folder):
    code, out, _ = run("data", "list")
    assert code == 0
    places = {line.split()[0]: line for line in out.splitlines()}
    assert len(places) == 12
    assert places["boston"].endswith(str(data_folder / "uci" / "boston.npz"))
    assert places["year"].endswith("not here")
    assert "515345 x 90" in places["year"]


def test_data_fetch_prints_the_files(run, data_folder):
    code, out, _ = run("data", "fetch", "boston")
    assert code == 0
    assert out.split() == ["boston", str(data_folder / "uci" / "boston.npz")]


def test_data_fetch_that_fails_is_one_line(run, data_folder, monkeypatch):
    from dataclasses import replace

    from bbalpha.data.sources import TABLES

    gone = (data_folder / "gone.txt").as_uri()
    monkeypatch.setitem(TABLES, "yacht", replace(TABLES["yacht"], urls=(gone,)))
    code, out, err = run("data", "fetch", "boston", "yacht")
    assert code == 2
    assert out.split()[0] == "boston"
    assert err.count("\n") == 1
    assert err.startswith("bbalpha: yacht is not on this machine, and could not be downloaded")
    assert gone in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["doctor", "nets"], "MODULE:FACTORY"),
        (["doctor", "nowhere:make"], "nowhere"),
        (["doctor", "nets:nothing"], "'nothing'"),
        (["doctor", "nets:value"], "'value'"),
        (["doctor", "nets:number"], "got int"),
        (["doctor", "nets:broken"], "the disk is gone"),
        (["doctor", "nets:plain"], "--shape"),
        (["doctor", "nets:plain", "--shape", "3,x"], "'3,x'"),
        (["doctor", "nets:plain", "--shape", "3,5"], "the model fails on x"),
        (["doctor", "nets:make", "--n-passes", "1"], "--n-passes"),
        (["doctor", "nets:make", "--batch-dim", "5"], "batch_dim"),
        (["doctor"], "MODULE:FACTORY"),
        (["nonsense"], "nonsense"),
        (["data"], "Missing command"),
        (["data", "nonsense"], "nonsense"),
        (["data", "fetch", "cifar"], "'cifar'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(run, args, said):
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("bbalpha: ")
    assert said in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["doctor", "nets:plain", "--shape", "-1,4"], "'-1,4'"),
        (["doctor", "nets:plain", "--shape", "3,,4"], "'3,,4'"),
        (["doctor", "nets:plain", "--shape", "9999999999,99"], "2^31"),
        (["reproduce", "runtime", "--quick", "--passes", "inf"], "'inf'"),
        (["reproduce", "runtime", "--quick", "--passes", "1.5"], "'1.5'"),
        (["reproduce", "runtime", "--quick", "--minutes", "inf"], "--minutes"),
        (["reproduce", "regression", "--quick", "--alphas", "nan"], "'nan'"),
        (["reproduce", "adversarial", "--quick", "--alphas", ","], "--alphas"),
        (["reproduce", "classification", "--quick", "--jobs", "99999999"], "--jobs"),
    ],
)
def test_nonsense_starts_nothing(run, args, said):
    code, _, err = run(*args)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


@pytest.mark.parametrize("text", ["1 / 0", "def", "raise SystemExit(3)"])
def test_a_module_of_the_user_that_fails_is_one_line(run, tmp_path, text):
    (tmp_path / "fails.py").write_text(text)
    code, _, err = run("doctor", "fails:make")
    sys.modules.pop("fails", None)
    assert (code, err.count("\n")) == (2, 1)
    assert "the module fails fails: " in err


def test_help_version_and_data_import_no_torch():
    script = "import sys, bbalpha.cli; sys.argv[0] = 'bbalpha'\ntry: bbalpha.cli.main()\n"
    script += "finally: assert 'torch' not in sys.modules"
    for options, said in (("--help", "doctor"), ("--version", "0."), ("data list", "boston")):
        command = [sys.executable, "-c", script, *options.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert said in done.stdout


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "bbalpha", "--version"], capture_output=True, text=True, check=True)
    import bbalpha

    assert done.stdout.strip() == bbalpha.__version__
