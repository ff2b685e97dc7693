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
    ],
)
def test_mistakes_are_one_line_and_exit_2(run, args, said):
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("bbalpha: ")
    assert said in err


def test_help_and_version_import_no_torch():
    script = "import sys, bbalpha.cli; sys.argv = ['bbalpha', sys.argv[1]]\ntry: bbalpha.cli.main()\n"
    script += "finally: assert 'torch' not in sys.modules"
    for option, said in (("--help", "doctor"), ("--version", "0.")):
        done = subprocess.run([sys.executable, "-c", script, option], capture_output=True, text=True, check=True)
        assert said in done.stdout


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "bbalpha", "--version"], capture_output=True, text=True, check=True)
    import bbalpha

    assert done.stdout.strip() == bbalpha.__version__
