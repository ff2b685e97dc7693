"""Processes killed at any moment, disks that are full, files cut off, two writers at once, clocks that jump.

After each: what is on disk is the old or the new, whole; a run goes on, or refuses in one sentence; and in the end it
has the result of an undisturbed run, to the bit. Run as a process of its own that forks: a fault costs milliseconds.

A further kind of work is a line in `WORKS` (its files are written over and over, and every one of them must be one of
two) or in `RUNS` (it is begun until it ends, and must end as if nothing had happened).
"""

import atexit
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from threading import Thread
from unittest import mock

from .rows import row

ROOT = Path(__file__).resolve().parents[2]
TRIES = 400  # begins of one run, before it is said to make no way


# ------------------------------------------------------------------------------ work that is written over and over


def networks():
    """Two small networks and what tells them apart on disk."""
    import torch
    from torch import nn

    import bbalpha

    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Dropout(0.5), nn.Linear(200, 3)) for _ in range(2)]

    def write(k, path):
        bbalpha.save(nets[k], path, alpha=float(k))

    def read(path):
        weight = bbalpha.load(path)[0].weight
        return [torch.equal(weight, net[0].weight) for net in nets].index(True)

    return write, read


def tables():
    """Two models of a table with cards of their own."""
    import numpy as np

    from bbalpha.estimators import BBAlphaRegressor
    from bbalpha.tabular.fields import Field
    from bbalpha.tabular.model import Card, TableModel

    X = np.random.default_rng(0).normal(size=(20, 2))
    settings = {"hidden_layer_sizes": (4,), "epochs": 1, "n_ensemble": 1, "noise": "constant"}
    models = [BBAlphaRegressor(**settings, random_state=k).fit(X, X[:, 0]) for k in range(2)]
    fields = tuple(Field(f"x{i}", "number") for i in range(2))
    cards = [Card("regression", "y", fields, n_rows=k + 1) for k in range(2)]

    def write(k, path):
        TableModel(models[k], cards[k]).save(path)

    def read(path):
        found = TableModel.load(path)
        own = found.estimator.predict(X).tolist() == models[found.card.n_rows - 1].predict(X).tolist()
        return found.card.n_rows - 1 if own else -1

    return write, read


def files(ending):
    """Two tables in a file."""

    def works():
        import pandas

        from bbalpha.tabular.files import read_table, write_table

        frames = [pandas.DataFrame({"mean": [float(k)] * 4000, "std": [0.5] * 4000}) for k in range(2)]

        def write(k, path):
            write_table(frames[k], path)

        def read(path):
            return [read_table(path, dates=False).equals(frame) for frame in frames].index(True)

        return write, read

    works.ending = ending
    return works


def results():
    """Two files of results."""
    from bbalpha.experiments import results as module

    def write(k, path):
        module.write(path, command="x", seed=k, seconds=1.0, rows=[{"row": i, "value": k} for i in range(2000)])

    def read(path):
        content = module.read(path)
        return content["seed"] if {r["value"] for r in content["rows"]} == {content["seed"]} else -1

    return write, read


WORKS = {"save": networks, "save of a table": tables, "predictions in CSV": files(".csv"), "results": results,
         "predictions in Parquet": files(".parquet")}  # fmt: skip


# ------------------------------------------------------------------------------ runs that go on


def training(folder):
    """`fit` with a checkpoint at every step; what it ends with."""
    import torch
    from torch import nn

    import bbalpha

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    history = bbalpha.fit(
        net, (x, y), objective=bbalpha.CrossEntropy(), epochs=4, n_passes=2, batch_size=20, validation=0.2, seed=0,
        checkpoint=folder / "run", checkpoint_every=1, progress=False,
    )  # fmt: skip
    return [p.tolist() for p in net.parameters()], history.loss, history.nll


def experiment(folder):
    """An experiment of `bbalpha reproduce` in small: units of work, a ledger, states of what is unfinished."""
    from bbalpha.experiments import skeleton
    from bbalpha.experiments.results import read as results_read

    path = folder / "toy" / "toy.json"
    kept = skeleton.open_ledger(path, command="toy", quick=False, seed=0, settings={"epochs": 4})
    state = skeleton.state_folder(path, settings={"epochs": 4})
    skeleton.run_units(kept, [_split(k) for k in range(3)], _work, state=state)
    return results_read(path)["rows"]


def _work(unit, folder):
    weights, loss, _ = training(folder)
    return [{"split": unit.split, "loss": loss[-1], "weight": weights[0][0][0]}]


def _split(k):
    from dataclasses import dataclass

    from bbalpha.experiments.skeleton import Unit

    @dataclass(frozen=True)
    class Split(Unit):
        split: int

    return Split(k)


def predicting(folder, jobs=1):
    """`bbalpha predict` of a Parquet file into parts; their names and what they hold."""
    import pandas

    from bbalpha.tabular import large

    model, rows = asked()
    with mock.patch.object(large, "PART_ROWS", 100):
        large.predict_parquet(model, rows, folder / "answers", jobs=jobs)
    names = sorted(p.name for p in (folder / "answers").glob("[!.]*"))
    return names, pandas.read_parquet(folder / "answers").to_numpy().tolist()


@cache
def asked():
    """A model of a table, and a file of rows."""
    import numpy as np
    import pandas

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write, _ = tables()
    write(0, folder / "model")
    X = np.random.default_rng(1).normal(size=(1000, 2))
    pandas.DataFrame(X, columns=["x0", "x1"]).to_parquet(folder / "rows.parquet", row_group_size=50)
    return folder / "model", folder / "rows.parquet"


RUNS = {"fit": training, "reproduce": experiment, "predict to Parquet": predicting}


# ------------------------------------------------------------------------------ faults


def forked(work, *, delay=None, limit=None):
    """How a child ended that ran `work`, and what it said: killed after `delay` seconds, with `limit` bytes a file."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 1
        try:
            if limit is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            work()
            code = 0
        except (OSError, ValueError) as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:2000])
            code = 2
        finally:
            os._exit(code)
    os.close(write)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    return ("killed" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)), said


def killed_writers(name, works, n, rng, folder):
    """Kill who writes two things in turns; what is there must be one of them."""
    write, read = works()
    path, failures = folder / f"thing{getattr(works, 'ending', '')}", []
    write(0, path)
    start = time.perf_counter()
    write(1, path)
    span = time.perf_counter() - start

    def turns():
        while True:
            for k in (0, 1):
                write(k, path)

    for _ in range(n):
        forked(turns, delay=rng.uniform(0.2, 3) * span)
        failures += judged(read, path, name)
    for _ in range(max(1, n // 4)):
        limit = rng.choice([0, 1, 100, 1000, 5000, 20_000])
        code, said = forked(lambda: write(rng.randrange(2), path), limit=limit)
        failures += [f"{name}: a full disk was no OSError: {code}, {said}"] * (code not in (0, 2))
        failures += judged(read, path, name)
    write(0, path)
    left = [p.name for p in folder.iterdir() if p.name != path.name and "lock" not in p.name]
    failures += [f"{name}: {file!r} is left" for file in left]
    return row(f"kill -9 and full disks: {name}", "faults", n + max(1, n // 4), failures)


def judged(read, path, name):
    """A failure if neither of two things is at `path`."""
    try:
        found = read(path)
    except (OSError, ValueError) as error:
        return [f"{name}: {type(error).__name__}: {error}"]
    return [] if found in (0, 1) else [f"{name}: a mixture of two"]


def interrupted_runs(name, run, n, rng, folder):
    """Kill a run until it ends; the end must be that of an undisturbed one. Some begins have a full disk."""
    want = ended(run, folder / "undisturbed")
    start = time.perf_counter()
    ended(run, folder / "timed")
    span, faults, failures = time.perf_counter() - start, 0, []
    while faults < n:
        place = folder / f"run{faults}"
        place.mkdir()
        for _ in range(TRIES):
            limit = rng.choice([100, 1000, 4000]) if rng.random() < 0.2 else None
            delay = None if limit else rng.uniform(0, 1.5) * span
            code, said = forked(partial(ended, run, place), delay=delay, limit=limit)
            if code == 0:
                break
            faults += 1
            if code == 1:
                failures.append(f"{name}: an error of no kind we know")
            if code == 2 and limit is None:
                failures.append(f"{name}: refused to go on: {said}")
                break
        else:
            failures.append(f"{name}: no end after {TRIES} begins")
            continue
        if ended(run, place) != want:
            failures.append(f"{name}: another result than that of an undisturbed run")
        failures += left_behind(place, name)
        shutil.rmtree(place)
    return row(f"kill -9 and full disks: {name}", "faults", faults, failures)


def ended(run, folder):
    """What a run ends with, as JSON; kept in the folder."""
    folder.mkdir(exist_ok=True)
    return json.dumps(run(folder))


def left_behind(place, name):
    """A failure for each half of a file that a writer left."""
    return [f"{name}: {path.name!r} is left" for path in place.rglob(".*.tmp")]


def cut_states(n, rng, folder):
    """Files of the states of a run cut off, as by a power cut: it goes on from the state before, or refuses."""
    want, failures = ended(training, folder / "undisturbed"), []
    for i in range(n):
        place = folder / f"cut{i}"
        place.mkdir()
        while not list((place / "run").glob("step-*")):
            forked(partial(ended, training, place), delay=rng.uniform(0.02, 0.3))
        file = rng.choice([p for p in (place / "run").rglob("*") if p.is_file() and not p.name.endswith(".lock")])
        with file.open("r+b") as opened:
            opened.truncate(rng.randrange(file.stat().st_size + 1))
        code, said = forked(partial(_told, training, place))
        if code == 0 and (place / "end.json").read_text() != want:
            failures.append(f"{file.name} cut off: another result")
        elif code not in (0, 2):
            failures.append(f"{file.name} cut off: an error of no kind we know")
        elif code == 2 and not said.startswith("CorruptModelError"):
            failures.append(f"{file.name} cut off: {said}")
    return row("files of a run cut off", "faults", n, failures)


def _told(run, place):
    (place / "end.json").write_text(ended(run, place))


def two_at_once(n, folder):
    """Two processes in one folder: one of them is refused in a sentence, or comes after; the result is the same."""
    failures, (write, read) = [], networks()
    both = {"fit": training, "predict to Parquet": predicting}
    want = {name: ended(run, folder / f"undisturbed {name}") for name, run in both.items()}
    for i in range(n):
        place = folder / f"two{i}"
        place.mkdir()
        for name, run in both.items():
            children = []
            for _ in range(2):
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        code = 0 if ended(run, place / name) == want[name] else 3
                    except OSError:  # in use
                        code = 2
                    finally:
                        os._exit(code)
                children.append(child)
            codes = sorted(os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children)
            if codes not in ([0, 0], [0, 2]):
                failures.append(f"two of {name} ended with {codes}")
            if ended(run, place / name) != want[name]:
                failures.append(f"two of {name}: another result afterwards")
            failures += left_behind(place, name)
        writers = []
        for k in range(2):
            child = os.fork()
            if child == 0:
                for _ in range(20):
                    write(k, place / "net")
                os._exit(0)
            writers.append(child)
        codes = [os.waitpid(child, 0)[1] for child in writers]
        failures += [f"two of `save` ended with {codes}"] * any(codes) + judged(read, place / "net", "two of `save`")
    return row("two processes in one folder", "faults", 3 * n, failures)


def jumping_clocks(n, rng, folder):
    """The clock of the wall goes back and forth between and during begins, and files are from the future."""
    want, failures = ended(training, folder / "undisturbed"), []
    for i in range(n):
        place, jump = folder / f"clock{i}", rng.choice([-1e9, -3600.0, 3600.0, 1e9])
        place.mkdir()
        now = time.time()
        with mock.patch("time.time", lambda now=now, jump=jump: now + jump * random.random()):
            while not list((place / "run").glob("step-*")):
                forked(partial(ended, training, place), delay=rng.uniform(0.02, 0.3))
            for path in place.rglob("*"):
                os.utime(path, (now + jump, now - jump))
            if ended(training, place) != want:
                failures.append(f"a jump of {jump:g} s: another result")
    return row("clocks that jump", "faults", n, failures)


def lost_workers(n, rng, folder):
    """A process that makes parts for another one is killed: a sentence, and the same call again ends as undisturbed."""
    want, failures = ended(predicting, folder / "undisturbed"), []
    for i in range(n):
        place = folder / f"lost{i}"
        place.mkdir()
        code, said = forked(partial(_with_a_lost_worker, place, rng.randrange(5)))
        if (code, said.startswith("ChildProcessError")) != (2, True) and code != 0:
            failures.append(f"a worker that died: {code}, {said}")
        if ended(predicting, place) != want:
            failures.append("a worker that died: another result")
        failures += left_behind(place, "a worker that died")
    return row("workers that die", "faults", n, failures)


def _with_a_lost_worker(place, parts):
    """Predict with two workers, of which one dies when there are so many parts."""
    from joblib.externals.loky import get_reusable_executor

    def strike():
        workers = []
        while not workers or len(list(place.glob("answers/part-*"))) < parts:
            time.sleep(0.005)
            found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            workers = [int(pid) for pid in found if "popen_loky" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(workers[0], signal.SIGKILL)

    Thread(target=strike, daemon=True).start()
    try:
        predicting(place, jobs=2)
    finally:
        get_reusable_executor().shutdown(wait=False, kill_workers=True)


def attack(size, seed):
    """All rows, in this process."""
    import torch

    torch.set_num_threads(1)
    rng, rows = random.Random(seed), []
    kills = max(2, round(50 * size))
    with tempfile.TemporaryDirectory() as name:
        for i, (work, works) in enumerate(WORKS.items()):
            folder = Path(name) / f"work{i}"
            folder.mkdir()
            rows.append(killed_writers(work, works, kills, rng, folder))
        for i, (work, run) in enumerate(RUNS.items()):
            folder = Path(name) / f"runs{i}"
            folder.mkdir()
            rows.append(interrupted_runs(work, run, 2 * kills, rng, folder))
        few = max(1, round(20 * size))
        others = (partial(cut_states, few, rng), partial(two_at_once, few), partial(jumping_clocks, few, rng),
                  partial(lost_workers, max(1, few // 4), rng))  # fmt: skip
        for i, part in enumerate(others):
            folder = Path(name) / f"part{i}"
            folder.mkdir()
            rows.append(part(folder))
    return rows


def run(size, seed):
    """The rows, from a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.torture.faults", str(size), str(seed)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=1500)
    if done.returncode:
        raise RuntimeError(f"The process of the faults died: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(attack(float(sys.argv[1]), int(sys.argv[2]))))
