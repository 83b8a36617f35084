"""Folders: the same on a local disk and at a URL, files whole or not there, errors of one kind."""

import hashlib

import pytest

from mup_tpu.errors import reason
from mup_tpu.files import Folder, checksum


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    return Folder(tmp_path / "a folder" if request.param == "local" else f"memory://bucket/{tmp_path.name}")


def test_files_come_back_and_are_listed_by_name(folder):
    assert folder.names() == []
    folder.write("b/two", b"2")
    with folder.writing("b/three") as path:
        path.write_bytes(b"3")
    folder.write("a", b"0")
    folder.write("a", b"1")
    assert folder.names() == ["a", "b"] and (folder / "b").names() == ["three", "two"]
    assert (folder.read("a"), folder.read("b/two"), Folder(f"{folder}/b").read("three")) == (b"1", b"2", b"3")
    with folder.reading("b/three") as path:
        assert path.read_bytes() == b"3" and checksum(path) == hashlib.sha256(b"3").hexdigest()
    folder.remove("b", "a", "never there")
    assert folder.names() == []
    folder.write("a", b"1")
    folder.remove()
    assert folder.names() == ["a"]
    folder.remove_all()
    folder.remove_all()
    assert folder.names() == []


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
        Folder("data:").write("x", b"")
