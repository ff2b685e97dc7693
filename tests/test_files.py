"""Locks that die with their holder, leftovers that go, and what is put back however one leaves."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bbalpha import _files as folders
from bbalpha._files import FolderInUseError, Lock, Restoring, clear_leftovers, temporary, writing

HOLDER = """
import os, sys, time
from pathlib import Path
from bbalpha._files import Lock
lock = Lock(Path(sys.argv[1]))
assert lock.acquire()
if sys.argv[2] == "fork":
    heard, told = os.pipe()
    if os.fork() == 0:
        os.write(told, b".")  # the child is there, and has forgotten the lock
        time.sleep(60)
    os.read(heard, 1)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and kill -9")
@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_a_killed_process_loses_its_lock_also_where_its_children_live_on(kind, tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "m"), kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert int(process.stdout.readline()) == process.pid
        lock = Lock(tmp_path / "m")
        assert not lock.acquire()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert lock.acquire()
        lock.release()
    finally:
        os.killpg(process.pid, signal.SIGKILL) if kind == "fork" else process.kill()
        process.stdout.close()
        process.wait()
    assert list(tmp_path.iterdir()) == []


def test_one_holder_at_a_time(tmp_path):
    inside, most, guard = 0, 0, threading.Lock()

    def work(_):
        nonlocal inside, most
        for _ in range(30):
            with writing(tmp_path / "m"):
                with guard:
                    inside += 1
                    most = max(most, inside)
                with guard:
                    inside -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert most == 1
    assert list(tmp_path.iterdir()) == []


def test_who_does_not_hold_a_lock_cannot_release_it(tmp_path):
    mine, other = Lock(tmp_path / "m"), Lock(tmp_path / "m")
    assert mine.acquire()
    assert not other.acquire()
    other.release()
    assert not other.acquire()
    mine.release()
    mine.release()
    assert other.acquire()
    other.release()


def test_a_file_that_its_holder_has_removed_is_no_lock(tmp_path, monkeypatch):
    first, second, third = (Lock(tmp_path / "m") for _ in range(3))
    plain = folders._lock
    assert first.acquire()

    def slow(descriptor):  # the holder goes between the opening of the file and its locking
        first.release()
        plain(descriptor)

    monkeypatch.setattr(folders, "_lock", slow)
    assert second.acquire()
    monkeypatch.undo()
    assert not third.acquire()
    second.release()


def test_waiting_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "PATIENCE", 0.05)
    with (
        writing(tmp_path / "m"),
        pytest.raises(FolderInUseError, match="written to by somebody else"),
        writing(tmp_path / "m"),
    ):
        pass
    with writing(tmp_path / "m"):
        pass


def test_what_is_being_written_is_no_leftover(tmp_path):
    live, dead, others = temporary(tmp_path / "a"), temporary(tmp_path / "b"), temporary(tmp_path / "other")
    for path in (live, dead, others):
        path.mkdir()
    for name in (".a.txt", ".b.old.txt", "b", ".bashrc.old"):
        (tmp_path / name).touch()
    with writing(tmp_path / "c"):
        lock = Lock(tmp_path / "a")
        assert lock.acquire()
        clear_leftovers(tmp_path, "[abc]")
        assert live.exists()
        lock.release()
    assert not dead.exists()
    assert others.exists()
    clear_leftovers(tmp_path, "[abc]")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [".a.txt", ".b.old.txt", "b", ".bashrc.old", others.name]
    )


def test_of_two_contexts_one_always_ends():
    for strikes in range(1, 3):
        calls = []

        def restore(calls=calls, strikes=strikes):
            calls.append("begun")
            if calls.count("begun") == strikes:
                raise KeyboardInterrupt
            calls.append("done")

        with pytest.raises(KeyboardInterrupt), Restoring(restore), Restoring(restore):
            pass
        assert "done" in calls
