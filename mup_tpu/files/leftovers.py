"""Temporary files and folders. The next process removes a killed one's.

They are locked (`flock`) while in use, and the system unlocks them however a process ends. Partial files
carry the machine's name, since not every shared disk passes locks on to other machines. Temporary folders
hold a mark with their place: a folder of the user may have such a name too.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

_MACHINE = re.sub(r"[^\w.]+", "_", socket.gethostname())
_PARTIAL = f".partial-{_MACHINE}-"
_PARTIAL_NAME = re.compile(re.escape(_PARTIAL) + "[0-9a-f]{32}")
_SCRATCH = "mup_tpu_"
_LONGEST_PLACE, _SHORT_PLACE = 20, "/tmp"  # noqa: S108 (folders are made there as tempfile does)
"""Most characters of the place of temporary folders that hold sockets, and the place where it has more.
Ray's sockets lie up to 70 characters deeper, and a socket's path has at most 107."""
_MARK = "of-mup_tpu"
"""File with path and inode in temporary folders of this package."""


def partial(target: Path, folder: bool = False) -> AbstractContextManager[Path]:
    """A path beside a target, to be renamed to it when all is written; else it is removed at the end."""

    def make() -> Path:
        path = target.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
        path.mkdir() if folder else path.touch(exist_ok=False)
        return path

    return _while_held(make)


def scratch_folder() -> AbstractContextManager[Path]:
    """A folder for temporary files for the length of a block."""
    _remove_scratch()
    return _while_held(_make_scratch)


@contextlib.contextmanager
def _while_held(make: Callable[[], Path]) -> Iterator[Path]:
    """A new file or folder for the length of a block, locked."""
    path, lock = _made_and_held(make)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def folder_of_this_process() -> Path:
    """A new folder for sockets and files; it outlives this process until the next one starts."""
    _remove_scratch()
    with for_sockets():
        return _made_and_held(_make_scratch)[0]


@contextlib.contextmanager
def for_sockets() -> Iterator[None]:
    """Have temporary folders lie in `/tmp` where the usual place has a long path, as sockets may not have."""
    before = tempfile.gettempdir()
    if len(before) > _LONGEST_PLACE and os.access(_SHORT_PLACE, os.W_OK):
        tempfile.tempdir = _SHORT_PLACE
    try:
        yield
    finally:
        tempfile.tempdir = before


def mark(folder: Path) -> None:
    """Have the next process remove a temporary folder of the standard library, if this one is killed."""
    _remove_scratch()
    if not (folder / _MARK).exists():
        _hold(folder)
        (folder / _MARK).write_text(_signature(folder))


def remove_partial(folder: Path) -> None:
    """Remove half-written files of this machine's killed processes from a folder and all folders in it."""
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            if _PARTIAL_NAME.fullmatch(name):
                _remove_if_left(Path(root, name))
        folders[:] = [name for name in folders if not _PARTIAL_NAME.fullmatch(name)]


def _make_scratch() -> Path:
    path = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    (path / _MARK).write_text(_signature(path))
    return path


def _signature(folder: Path) -> str:
    return f"{folder.resolve()}\n{folder.lstat().st_ino}\n"


def _is_ours(folder: Path) -> bool:
    """Whether a temporary folder bears the mark of this package, user and place."""
    found, mark = folder.lstat(), folder / _MARK
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    return stat.S_ISREG(mark.lstat().st_mode) and mark.read_text() == _signature(folder)


def _made_and_held(make: Callable[[], Path]) -> tuple[Path, int]:
    """A new file or folder, and its lock."""
    while True:
        path = make()
        with contextlib.suppress(FileNotFoundError):
            lock = _hold(path)
            if path.exists():
                return path, lock
            os.close(lock)
        # Another process has removed it before it was locked.


def _hold(path: Path) -> int:
    """Lock a file or folder until the returned descriptor is closed, or this process ends."""
    descriptor = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # on a disk without locks nothing is removed later
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


@functools.cache
def _remove_scratch() -> None:
    """Remove temporary folders of this user's killed processes, once a process."""
    places = {Path(tempfile.gettempdir()), Path(_SHORT_PLACE)}
    for path in [
        path for place in places for name in (f"{_SCRATCH}*", "pymp-*") for path in place.glob(name)
    ]:
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile, without a mark, or of another user
            if _is_ours(path):
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    """Remove a file or folder unless a process holds it."""
    with contextlib.suppress(OSError):  # gone meanwhile, held, or on a disk without locks
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
