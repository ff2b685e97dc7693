"""Downloads against a server of this machine: whole and checked, or not there at all."""

import hashlib
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from bbalpha._files import Lock
from bbalpha.data import connections
from bbalpha.data import download as module
from bbalpha.data.download import DownloadError, download
from file_server import running_server

CONTENT = bytes(range(256)) * 2000  # 512,000 bytes
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.0)
    with running_server() as server:
        server.files["/file"] = CONTENT
        yield server


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "folder" / "file.bin"


def left(path):
    return sorted(file.name for file in path.parent.iterdir())


def test_the_file_arrives(server, path):
    assert download([server.url()], path, sha256=SHA256) == path
    assert path.read_bytes() == CONTENT
    assert left(path) == ["file.bin"]
    assert server.ranges == [None]


def test_a_server_that_says_no_length(server, path):
    server.says_length = False
    download([server.url()], path, sha256=SHA256)
    assert path.read_bytes() == CONTENT


def test_a_wrong_checksum_names_both_and_leaves_nothing(server, path):
    with pytest.raises(DownloadError) as caught:
        download([server.url()], path, sha256="0" * 64)
    assert "0" * 64 in str(caught.value)
    assert SHA256 in str(caught.value)
    assert left(path) == []


def test_a_wrong_content_leaves_nothing(server, path):
    def check(part):
        raise ValueError(f"{len(part.read_bytes())} bytes are too many.")

    with pytest.raises(DownloadError, match="512000 bytes are too many"):
        download([server.url()], path, check=check)
    assert left(path) == []


def test_the_name_appears_only_after_the_checks(server, path):
    seen = []
    download([server.url()], path, check=lambda part: seen.append((path.exists(), part.suffix, part.read_bytes())))
    assert seen == [(False, ".bin", CONTENT)]


def test_an_older_file_stays_when_the_new_one_is_wrong(server, path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"old")
    with pytest.raises(DownloadError):
        download([server.url()], path, sha256="0" * 64)
    assert path.read_bytes() == b"old"


def test_a_cut_connection_is_taken_up_where_it_stopped(server, path):
    server.cuts = 2
    download([server.url()], path, sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=256000-", "bytes=384000-"]


def test_a_connection_that_keeps_being_cut_is_taken_up_by_the_next_call(server, path):
    server.cuts = module.CONNECTIONS
    with pytest.raises(DownloadError, match="cut off 5 times; 496000 bytes are kept"):
        download([server.url()], path, sha256=SHA256)
    assert left(path) == ["partial-file.bin"]
    server.ranges.clear()
    download([server.url()], path, sha256=SHA256)
    assert server.ranges == ["bytes=496000-"]
    assert path.read_bytes() == CONTENT
    assert left(path) == ["file.bin"]


def test_a_server_without_ranges_begins_anew(server, path):
    server.cuts, server.knows_ranges = 1, False
    download([server.url()], path, sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=256000-"]


@pytest.mark.parametrize("left_over", [b"something else", CONTENT + b"more", b"x" * len(CONTENT)])
def test_what_an_earlier_call_left_of_another_file_does_no_harm(server, path, left_over):
    path.parent.mkdir(parents=True)
    (path.parent / "partial-file.bin").write_bytes(left_over)
    download([server.url()], path, sha256=SHA256)
    assert path.read_bytes() == CONTENT


def test_more_than_the_file_has_is_seen_without_a_checksum(server, path):
    path.parent.mkdir(parents=True)
    (path.parent / "partial-file.bin").write_bytes(CONTENT + b"more")
    download([server.url()], path)
    assert path.read_bytes() == CONTENT


def test_a_file_left_whole_is_not_fetched_again(server, path):
    path.parent.mkdir(parents=True)
    (path.parent / "partial-file.bin").write_bytes(CONTENT)
    download([server.url()], path, sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert server.ranges == [f"bytes={len(CONTENT)}-"]


def test_the_next_mirror_serves_where_one_fails(server, path):
    server.files["/bad"] = b"an error page"
    download([server.url("gone"), server.url("bad"), server.url()], path, sha256=SHA256)
    assert path.read_bytes() == CONTENT


def test_all_mirrors_failing_names_each(server, path):
    server.files["/bad"] = b"an error page"
    with pytest.raises(DownloadError) as caught:
        download([server.url("gone"), server.url("bad")], path, sha256=SHA256)
    assert f"{server.url('gone')} answers 404 Not Found." in str(caught.value)
    assert f"{server.url('bad')} must have the sha256 {SHA256}" in str(caught.value)


def test_a_server_that_is_not_there(server, path):
    with running_server() as other:
        url = other.url()
    with pytest.raises(DownloadError, match=r"cannot be reached: .*refused"):
        download([url], path)


def test_a_second_call_while_the_first_is_at_work_writes_elsewhere(server, path):
    seen = []

    def second(part):
        download([server.url()], path, check=lambda other: seen.append(other.name), progress=False)
        seen.append(part.read_bytes() == CONTENT)

    download([server.url()], path, sha256=SHA256, check=second)
    assert path.read_bytes() == CONTENT
    assert seen[0] != "partial-file.bin"
    assert seen[1]
    assert left(path) == ["file.bin"]


def test_many_at_once_leave_the_right_bytes(server, path):
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: download([server.url()], path, progress=False), range(12)))
    assert path.read_bytes() == CONTENT
    assert left(path) == ["file.bin"]


def test_what_killed_calls_left_under_other_names_goes(server, path):
    path.parent.mkdir(parents=True)
    stray = path.with_name(f"partial-{'a' * 32}-file.bin")
    stray.write_bytes(b"half")
    (path.parent / f".{stray.name}.lock").touch()
    busy = path.with_name(f"partial-{'b' * 32}-file.bin")
    busy.write_bytes(b"half")
    lock = Lock(busy)
    assert lock.acquire()
    try:
        download([server.url()], path)
        assert left(path) == [f".{busy.name}.lock", "file.bin", busy.name]
    finally:
        lock.release()


def test_no_bar_is_made_where_none_is_shown(server, path, monkeypatch):
    import tqdm

    def refuse(*_, **__):
        raise AssertionError("tqdm takes a lock of all processes")

    monkeypatch.setattr(tqdm.tqdm, "__new__", refuse)
    download([server.url()], path, progress=False)
    download([server.url()], path)


OK = b"HTTP/1.0 200 OK\r\n"


@pytest.mark.parametrize("head", [OK + b"\r\n", OK + b"Content-Length: 999999999999\r\n\r\n"])
def test_a_server_that_sends_more_than_the_file_can_have(server, path, head):
    server.raw, server.endless = head, True
    with pytest.raises(DownloadError, match=r"must have at most 600000 bytes; it (says|sends more).*was removed"):
        download([server.url()], path, most=600_000)
    assert left(path) == []


def test_the_most_that_a_file_may_have_is_no_less(server, path):
    download([server.url()], path, most=len(CONTENT))
    assert path.read_bytes() == CONTENT


def test_what_was_left_of_a_larger_file_does_no_harm(server, path):
    path.parent.mkdir(parents=True)
    (path.parent / "partial-file.bin").write_bytes(bytes(2 * len(CONTENT)))
    download([server.url()], path, sha256=SHA256, most=len(CONTENT))
    assert path.read_bytes() == CONTENT


def test_a_server_that_brings_next_to_nothing_is_left(server, path, monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.05)
    server.raw, server.endless, server.pause = OK + b"\r\n", True, 0.02
    monkeypatch.setattr(connections, "HEAD", 5.0)
    with pytest.raises(DownloadError, match="was cut off 5 times"):
        download([server.url()], path)


def test_all_connections_together_have_an_end(server, path, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.2)
    server.raw, server.endless = OK + b"\r\n", True
    with pytest.raises(DownloadError, match="sends too slowly"):
        download([server.url()], path, most=1 << 40)


def test_a_head_that_does_not_end_is_left(server, path, monkeypatch):
    monkeypatch.setattr(connections, "HEAD", 0.2)
    server.raw, server.pause = OK + b"X-Long: " + b"x" * 2000, 0.01
    with pytest.raises(DownloadError, match=r"cannot be reached: no whole answer within 0\.2 seconds"):
        download([server.url()], path)
    assert left(path) == []


@pytest.mark.parametrize(
    "raw",
    [
        OK + b"Content-Length: many\r\n\r\nabc",
        OK + b"Content-Length: -5\r\n\r\nabc",
        OK + b"Content-Length: 1e3\r\n\r\nabc",
        OK + b"Content-Length: \xff\r\n\r\nabc",
        OK + b"Content-Length: 512000\x1d\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        b"HTTP/1.0 302 Found\r\nLocation: http://[::1\r\n\r\n",
        b"HTTP/1.0 302 Found\r\nLocation: http://a b/\r\n\r\n",
        b"HTTP/1.0 302 Found\r\nLocation: ftp://\r\n\r\n",
        b"HTTP/1.0 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
        b"HTTP/1.0 302 Found\r\nLocation: http://\xff\xfe.example:99999/\r\n\r\n",
        b"HTTP/1.0 2000 OK\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"\0" * 100,
        b"",
        OK + b"x" * 70000,
        OK + b"A: b\r\n" * 200 + b"\r\n",
    ],
)
def test_odd_answers_are_one_sentence(server, path, raw):
    server.raw = raw
    with pytest.raises(DownloadError):
        download([server.url()], path, sha256=SHA256)
    assert not path.exists()


@pytest.mark.parametrize("url", ["nonsense", "http://", "http://[", "http://a b", "gopher://a", "http://a:port/"])
def test_addresses_that_are_none_are_one_sentence(path, url):
    with pytest.raises(DownloadError, match="cannot be reached"):
        download([url], path)


@contextmanager
def unprivileged():
    """A context in which permissions bind, for root as for everybody."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders are not read-only in this way here")
@pytest.mark.parametrize("name", ["file.bin", "deep/file.bin"])
def test_a_read_only_folder_is_named(server, name):
    folder = Path(tempfile.mkdtemp())  # pytest's own belong to root alone
    try:
        folder.chmod(0o555)
        with unprivileged(), pytest.raises(DownloadError, match=r"written to; got Permission denied.*XDG_CACHE_HOME"):
            download([server.url()], folder / name)
        assert list(folder.iterdir()) == []
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_folder_that_is_a_file_is_named(server, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(DownloadError, match="cache must be a folder that can be written to"):
        download([server.url()], tmp_path / "cache" / "file.bin")


@pytest.mark.parametrize(
    ("progress", "terminal", "shown"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_bar_on_a_terminal(server, path, capsys, monkeypatch, progress, terminal, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    download([server.url()], path, progress=progress)
    assert ("file.bin: 100%" in capsys.readouterr().err) == shown


def test_the_bar_of_a_resumed_download_begins_where_it_stopped(server, path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    server.cuts = 1
    download([server.url()], path)
    first, second = capsys.readouterr().err.split("\n")[:2]
    assert "50%" in first
    assert "100%" not in first
    assert "50%" in second
    assert "100%" in second
