"""Folders: one contract on a local disk, in memory and in buckets of two clouds; errors of one kind."""

import errno
import fcntl
import hashlib
import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from mup_tpu.cli.console import write_file
from mup_tpu.errors import StoreError, reason
from mup_tpu.files import Folder, checksum


@pytest.fixture(params=["local", "memory", "moto", "gcs_emulator"])
def folder(request, tmp_path):
    if request.param == "local":
        yield Folder(tmp_path / "a folder")
    elif request.param == "memory":
        yield Folder(f"memory://bucket/{tmp_path.name}")
    else:
        cloud = request.getfixturevalue(request.param)
        with cloud.reached():
            yield Folder(cloud.url())


def test_files_come_back_and_are_listed_by_name(folder):
    assert folder.names() == []
    with pytest.raises(FileNotFoundError):
        folder.read("a")
    large = b"3" * 6_000_000  # gcsfs uploads it in several requests
    folder.write("b/two", b"2")
    with folder.writing("b/three") as path:
        path.write_bytes(large)
    folder.write("a", b"0")
    folder.write("a", b"1")
    assert folder.names() == ["a", "b"] and (folder / "b").names() == ["three", "two"]
    contents = folder.read("a"), folder.read("b/two"), Folder(f"{folder}/b").read("three")
    assert contents == (b"1", b"2", large)
    assert folder.size("b/three") == len(large)
    with folder.reading("b/three") as path:
        assert path.read_bytes() == large and checksum(path) == hashlib.sha256(large).hexdigest()
    assert path.exists() == folder.is_local, "a copy ends with the block"
    # On a disk a folder is listed too: one in the place of a part is refused, not passed over.
    names = ["a", "b"] if folder.is_local else ["a"]
    sizes, inner = folder.sizes(), (folder / "b").sizes()
    assert list(sizes) == names and sizes["a"] == 1
    assert list(inner.items()) == [("three", len(large)), ("two", 1)]
    assert (folder / "nowhere").sizes() == {}
    folder.remove("b", "a", "never there")
    assert folder.names() == []
    folder.write("a", b"1")
    folder.remove()
    assert folder.names() == ["a"]


def test_a_file_whose_writing_fails_is_not_there(folder):
    folder.write("kept", b"1")
    for name in ("new", "kept"):
        with pytest.raises(RuntimeError), folder.writing(name) as path:
            path.write_bytes(b"half")
            raise RuntimeError
    assert folder.names() == ["kept"] and folder.read("kept") == b"1"


def test_a_relative_path_means_the_same_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Folder("x/y/").path == Folder(f"file://{tmp_path}/x/y").path == str(tmp_path / "x" / "y")
    assert Folder("memory://bucket/x/").path == "memory://bucket/x"


def test_what_cannot_be_opened_or_written_says_why():
    with pytest.raises(OSError) as raised:
        Folder("nothing://bucket/x")
    assert reason(raised.value) == "Protocol not known: nothing"
    with pytest.raises(OSError, match="Read only"):  # fsspec itself raises NotImplementedError here
        Folder("data://").write("x", b"")


def test_of_two_writers_of_a_new_file_one_creates_it(folder):
    folder.create("a", b"1")
    if str(folder).startswith("gs:"):
        pytest.skip("the emulator takes an object that exists already, which the service refuses")
    with pytest.raises(OSError):
        folder.create("a", b"2")
    assert folder.read("a") == b"1" and folder.names() == ["a"]


@pytest.fixture(params=["a named pipe", "a device", "an open file"])
def there(request, tmp_path):
    """A path as /dev/null or /dev/stdout, and a call for the bytes that were written to it."""
    path = tmp_path / "there"
    if request.param == "a named pipe":
        os.mkfifo(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        yield path, lambda: os.read(descriptor, 100)
        os.close(descriptor)
    elif request.param == "a device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            path.write_bytes(b"")
        except OSError:
            pytest.skip("devices are made by a superuser")
        yield path, lambda: b"content"  # as /dev/null, which keeps nothing
    else:
        with (tmp_path / "redirected").open("wb") as file:
            path.symlink_to(f"/proc/self/fd/{file.fileno()}")
            yield path, (tmp_path / "redirected").read_bytes


def test_a_link_is_replaced_and_its_file_stays(tmp_path):
    """A results folder from elsewhere may hold one."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "there").symlink_to(tmp_path / "mine")
    Folder(tmp_path).write("there", b"content")
    assert (tmp_path / "mine").read_text() == "mine" and (tmp_path / "there").read_text() == "content"


def test_a_device_a_pipe_and_an_open_file_are_written_and_never_replaced(there, tmp_path):
    """Nor is a pipe read, which would be waited for."""
    path, content = there
    if path.is_fifo():
        with pytest.raises(OSError, match="it is a pipe"):
            Folder(tmp_path).read("there")
        with pytest.raises(OSError, match="it is a pipe"), Folder(tmp_path).reading("there"):
            pass
    before = path.lstat()
    write_file("table", path, "content")
    assert content() == b"content"
    after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are Linux's")
@pytest.mark.parametrize("call", ["write", "create"])
def test_a_file_is_on_disk_before_it_has_its_name_and_then_its_name_is(call, tmp_path, monkeypatch):
    """A power cut would leave a name without its content, or none."""
    sync, synced = os.fsync, []

    def watched(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}")
        synced.append((path.read_bytes() if path.is_file() else b"names", (tmp_path / "a").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    getattr(Folder(tmp_path), call)("a", b"content")
    assert synced == [(b"content", False), (b"names", True)] and (tmp_path / "a").read_bytes() == b"content"


def test_a_copy_has_links_as_links_and_neither_pipes_nor_sockets(tmp_path, monkeypatch):
    """A checkpoint's folder with a linked data set, and with what a program has left in it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "large").write_bytes(bytes(10**6))
    work = tmp_path / "work" / "a"
    (work / "inner").mkdir(parents=True)
    (work / "inner" / "state").write_text("1")
    (work / "data").symlink_to(tmp_path / "data")
    (work / "last").symlink_to("inner/state")
    (work / "gone").symlink_to("nowhere")
    os.mkfifo(work / "inner" / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(work)  # a socket's path is short
        listening.bind("socket")
    (Folder(tmp_path) / "work").copy("a", "b")
    copied = tmp_path / "work" / "b"
    assert sorted(path.name for path in copied.rglob("*")) == ["data", "gone", "inner", "last", "state"]
    assert (copied / "last").read_text() == "1"
    assert all((copied / name).is_symlink() for name in ("data", "gone", "last"))


@pytest.mark.parametrize("missing", [errno.ENOSYS, errno.ENOLCK])
def test_a_disk_without_locks_is_locked_by_files_or_one_sentence(missing, tmp_path, monkeypatch):
    """Lustre without its option `flock` answers as the first, NFS without its daemon as the second."""

    def refuse(*arguments):
        raise OSError(missing, os.strerror(missing))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = Folder(tmp_path).locked("a.lock", "it is held")
    if missing == errno.ENOLCK:
        with pytest.raises(StoreError, match="a.lock cannot be locked: No locks available"), lock:
            pass
        return
    for _ in range(2):
        with Folder(tmp_path).locked("a.lock"), pytest.raises(StoreError, match="it is held"):  # noqa: SIM117
            with Folder(tmp_path).locked("a.lock", "it is held"):
                pass
