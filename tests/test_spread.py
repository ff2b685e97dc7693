"""Pieces of work on a real Dask cluster give what they give here, bit for bit, also where a worker dies."""

import os
import signal
import time
from threading import Thread

import joblib
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from bbalpha._spread import spread, spreading
from bbalpha.cli import app
from bbalpha.estimators import BBAlphaRegressor, BBAlphaRegressorCV
from bbalpha.estimators.memory import remembering
from bbalpha.experiments.results import read
from dask_cluster import cluster

QUICK = ["--datasets", "boston", "--quick", "--methods", "bbalpha,mc-dropout,ensemble,bbalpha-cv"]


@pytest.fixture(scope="module")
def dask(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def drawn(seed):
    """Numbers of the generator that a process has but once."""
    torch.manual_seed(seed)
    time.sleep(0.05)
    return torch.rand(3)


def about(_):
    with spreading("loky", jobs=4):
        pass
    return os.getpid(), torch.get_num_threads(), list(spread(os.path.basename, ["a/b"]))


def failing(number):
    if number == 1:
        raise KeyError(number)
    return number


def assert_same(a, b):
    assert type(a) is type(b)
    for name, value in vars(a).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, getattr(b, name)), name


def test_results_come_in_order_and_from_elsewhere(dask):
    with spreading("dask", scheduler=dask.address):
        found = list(spread(drawn, range(6)))
        places = list(spread(about, range(6)))
    for one, here in zip(found, map(drawn, range(6)), strict=True):
        assert torch.equal(one, here)
    assert os.getpid() not in {pid for pid, _, _ in places}
    assert all(rest == (torch.get_num_threads(), ["b"]) for _, *rest in places for rest in [tuple(rest)])


@pytest.mark.parametrize("jobs", [1, None])
def test_an_error_is_that_of_the_piece(dask, jobs):
    with spreading("dask", scheduler=dask.address):
        found = spread(failing, [0, 1, 2], jobs=jobs)
        if jobs == 1:  # on a cluster the error may be here before the first result is asked for
            assert next(found) == 0
        with pytest.raises(KeyError, match="1"):
            list(found)


def table(out, *options):
    done = CliRunner().invoke(app, ["reproduce", "regression", *QUICK, "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    return read(out / "regression-quick/boston.json")["rows"]


def test_the_boston_table_is_the_same_on_a_cluster_that_loses_a_worker(data_dir, tmp_path):
    here = table(tmp_path / "here")
    assert {row["method"] for row in here} == {"bbalpha", "mc-dropout", "ensemble", "bbalpha-cv"}
    with cluster(tmp_path) as dask:
        killed = []
        killer = Thread(target=lambda: killed.append(dask.kill_one_at_work()))
        killer.start()
        there = table(tmp_path / "there", "--backend", "dask", "--scheduler", dask.address)
        killer.join()
        assert killed == [True]
        assert sum(worker.poll() is None for worker in dask.workers) == 1
    assert there == here


def rows():
    x = np.random.default_rng(0).normal(size=(60, 2))
    return x, x[:, 0] + 0.1 * x[:, 1]


def test_the_automatic_choice_is_the_same_on_a_cluster_and_remembered(dask, tmp_path):
    x, y = rows()
    here = BBAlphaRegressor(budget="quick", epochs=2, random_state=0).fit(x, y)
    with spreading("dask", scheduler=dask.address), remembering(tmp_path / "parts"):
        there = BBAlphaRegressor(budget="quick", epochs=2, random_state=0).fit(x, y)
    n_parts = len(list((tmp_path / "parts").iterdir()))
    assert n_parts
    with remembering(tmp_path / "parts"):
        again = BBAlphaRegressor(budget="quick", epochs=2, random_state=0).fit(x, y)
    assert len(list((tmp_path / "parts").iterdir())) == n_parts
    for other in (there, again):
        assert [t["weight"] for t in other.trials_] == [t["weight"] for t in here.trials_]
        assert np.array_equal(other.predict(x), here.predict(x))


@pytest.mark.parametrize("large", [False, True])
def test_a_search_is_the_same_on_a_cluster(dask, monkeypatch, large):
    x, y = rows()
    settings = {"cv": 3, "epochs": 2, "random_state": 0}
    if large:
        monkeypatch.setattr("bbalpha.estimators.cv._LARGE", 50)
        settings |= {"alphas": (0.0, 0.5), "dropouts": (0.05, 0.1)}
    else:
        net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 1))
        settings |= {"alphas": (0.0, 0.5), "module": net}
    here = BBAlphaRegressorCV(**settings).fit(x, y)
    with spreading("dask", scheduler=dask.address):
        there = BBAlphaRegressorCV(**settings).fit(x, y)
    assert np.array_equal(here.cv_results_["mean_test_score"], there.cv_results_["mean_test_score"])
    assert np.array_equal(here.predict(x), there.predict(x))


def test_what_cannot_be_is_said():
    for options, said in (
        (("slurm",), "`backend` must be loky, dask or ray; got 'slurm'"),
        (("dask",), "`scheduler` must be the address of a Dask scheduler"),
    ):
        with pytest.raises(ValueError, match=said), spreading(*options):
            pass
    with pytest.raises(ValueError, match="give `backend` as dask or ray"), spreading("loky", scheduler="tcp://a:1"):
        pass
    with pytest.raises(ValueError, match="`jobs` must be left out with dask"), spreading("dask", jobs=2):
        pass


def test_a_backend_that_gives_all_at_the_end_will_do():
    with joblib.parallel_config("multiprocessing", n_jobs=1):
        assert list(spread(abs, [-1, 2, -3])) == [1, 2, 3]


def dies(number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_a_worker_of_this_machine_that_dies_is_a_sentence():
    with pytest.raises(ChildProcessError, match="A process that worked on a piece has died, killed or out of memory"):
        list(spread(dies, range(6), jobs=2))
    assert list(spread(abs, [-1, 2], jobs=2)) == [1, 2]  # others are found for the next work
