"""What a process makes for a while, so that the next one can remove it where the first was killed.

It is locked (`flock`) while it is in use, and the system unlocks it however a process ends. Files that are to
be renamed into place have the machine's name in theirs, since not every shared disk passes locks on to other
machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

_MACHINE = re.sub(r"[^\w.]+", "_", socket.gethostname())
_PARTIAL = f".partial-{_MACHINE}-"
_SCRATCH = "mup_tpu_"
"""Not as earlier versions named theirs, which held no locks."""
_MARK = "of-mup_tpu"
"""A file in folders of the standard library's that are ours."""


def partial(target: Path, folder: bool = False) -> AbstractContextManager[Path]:
    """A path beside a target, to be renamed to it when all is written; what is still there at the end goes.

    Args:
        target: a file or folder, there or not.
        folder: whether it is a folder.
    """

    def make() -> Path:
        path = target.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
        path.mkdir() if folder else path.touch(exist_ok=False)
        return path

    return _while_held(make)


def scratch_folder() -> AbstractContextManager[Path]:
    """A folder for temporary files, gone when the block ends."""
    _remove_scratch()
    return _while_held(_make_scratch)


@contextlib.contextmanager
def _while_held(make: Callable[[], Path]) -> Iterator[Path]:
    """A new file or folder, locked for the length of a block and gone with it."""
    path, lock = _made_and_held(make)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def folder_of_this_process() -> Path:
    """A new folder for temporary files that are of use after this process, until the next one starts."""
    _remove_scratch()
    return _made_and_held(_make_scratch)[0]


def mark(folder: Path) -> None:
    """Have a temporary folder of the standard library's removed as ours are, if this process is killed."""
    _remove_scratch()
    if not (folder / _MARK).exists():
        _hold(folder)
        (folder / _MARK).touch()


def remove_partial(folder: Path) -> None:
    """Remove what killed processes of this machine left half-written in a folder and those in it."""
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            if name.startswith(_PARTIAL):
                _remove_if_left(Path(root, name))
        folders[:] = [name for name in folders if not name.startswith(_PARTIAL)]


def _make_scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix=_SCRATCH))


def _made_and_held(make: Callable[[], Path]) -> tuple[Path, int]:
    """A new file or folder, and its lock."""
    while True:
        path = make()
        with contextlib.suppress(FileNotFoundError):
            lock = _hold(path)
            if path.exists():
                return path, lock
            os.close(lock)
        # Another process met it between its making and its lock.


def _hold(path: Path) -> int:
    """Lock a file or folder until the descriptor that is returned is closed, or this process ends."""
    descriptor = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a disk without locks: then nothing there is ever taken for left over
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


@functools.cache
def _remove_scratch() -> None:
    """Remove the temporary folders of this user's killed processes, once in this one."""
    place = Path(tempfile.gettempdir())
    ours = [*place.glob(f"{_SCRATCH}*"), *(mark.parent for mark in place.glob(f"pymp-*/{_MARK}"))]
    for path in ours:
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink():
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    """Remove a file or folder that nobody holds."""
    with contextlib.suppress(OSError):  # gone meanwhile, held, or on a disk without locks
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
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
