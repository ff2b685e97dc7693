"""A real Dask cluster on this machine: a scheduler and workers in processes of their own; one can be killed."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from distributed import Client

ROOT = Path(__file__).resolve().parents[1]
_QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


class Cluster:
    def __init__(self, address, workers):
        self.address, self.workers = address, workers

    def kill_one_at_work(self, patience=60.0):
        """Kill a worker in the middle of a piece; whether there was one."""
        with Client(self.address, set_as_default=False) as client:
            pids = client.run(os.getpid)
            end = time.monotonic() + patience
            while time.monotonic() < end:
                for worker, tasks in client.processing().items():
                    if tasks:
                        next(p for p in self.workers if p.pid == pids[worker]).kill()
                        return True
                time.sleep(0.005)
        return False


@contextmanager
def cluster(folder, n_workers=2):
    """The cluster; its processes end with the context."""
    file = Path(folder) / "scheduler.json"
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def started(*words):
        command = [sys.executable, "-m", "dask", *words, "--scheduler-file", str(file), "--no-dashboard"]
        process = stack.enter_context(subprocess.Popen(command, env=environment, cwd=folder, **_QUIET))
        stack.callback(process.kill)
        return process

    with ExitStack() as stack:
        started("scheduler", "--host", "127.0.0.1", "--port", "0")
        worker = ("worker", "--host", "127.0.0.1", "--nthreads", "1", "--no-nanny")
        workers = [started(*worker) for _ in range(n_workers)]
        with Client(scheduler_file=str(file), set_as_default=False, timeout=60) as client:
            client.wait_for_workers(n_workers, timeout=60)
            address = client.scheduler.address
        yield Cluster(address, workers)
