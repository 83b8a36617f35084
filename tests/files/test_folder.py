"""Folders: one contract on a local disk, in memory and in buckets of two clouds; errors of one kind."""

import hashlib
import os
import socket
import sys
from pathlib import Path

import pytest

from mup_tpu.errors import reason
from mup_tpu.files import Folder, checksum, open_own


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
    assert (folder.read("a"), folder.read("b/two"), Folder(f"{folder}/b").read("three")) == (
        b"1",
        b"2",
        large,
    )
    assert folder.size("b/three") == len(large)
    with folder.reading("b/three") as path:
        assert path.read_bytes() == large and checksum(path) == hashlib.sha256(large).hexdigest()
    assert path.exists() == folder.is_local, "a copy ends with the block"
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


def test_sizes_of_files_are_listed_by_name(folder):
    assert folder.sizes() == {}
    folder.write("b", b"22")
    folder.write("a", b"1")
    folder.write("c/d", b"1")
    sizes = folder.sizes()
    assert list(sizes.items())[:2] == [("a", 1), ("b", 2)]
    # On a disk a folder is listed too: one in the place of a part is refused, not passed over.
    assert list(sizes) == ["a", "b", "c"][: 3 if folder.is_local else 2]
    assert (folder / "nowhere").sizes() == {}


@pytest.mark.parametrize("there", ["a link", "a link to nothing", "a folder", "a named pipe"])
def test_a_lock_is_opened_through_no_link_and_empties_nothing(there, tmp_path):
    victim, lock = tmp_path / "victim", tmp_path / "search.lock"
    if there == "a link":
        victim.write_text("mine")
    if "link" in there:
        lock.symlink_to(victim)
    else:
        lock.mkdir() if there == "a folder" else os.mkfifo(lock)
    with pytest.raises(OSError):
        open_own(lock)
    assert victim.exists() == (there == "a link") and (not victim.exists() or victim.read_text() == "mine")
    (tmp_path / "log").write_text("kept")
    with open_own(tmp_path / "log") as file:
        file.write(" and more")
    assert (tmp_path / "log").read_text() == "kept and more"


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are Linux's")
@pytest.mark.parametrize("call", ["write", "create"])
def test_a_file_is_on_disk_before_it_has_its_name(call, tmp_path, monkeypatch):
    """A power cut would leave a name without its content."""
    sync, synced = os.fsync, []

    def watched(descriptor):
        content = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        synced.append((content, (tmp_path / "a").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    getattr(Folder(tmp_path), call)("a", b"content")
    assert (b"content", False) in synced and (tmp_path / "a").read_bytes() == b"content"


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
