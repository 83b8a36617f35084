"""Local files: opened so that no pipe, device or link harms, written beside their name, removed after a kill.

Temporary files and folders are locked (`flock`) while in use, and the system unlocks them however a process
ends: the next process removes what nobody locks. Half-written files carry the machine's name, since not every
shared disk passes locks on to other machines. Temporary folders hold a mark with their place, because a
folder of the user may have such a name too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path

PathLike = str | os.PathLike[str]

_MACHINE = re.sub(r"[^\w.]+", "_", socket.gethostname())
_PARTIAL = f".partial-{_MACHINE}-"
_PARTIAL_NAME = re.compile(re.escape(_PARTIAL) + "[0-9a-f]{32}")
_SCRATCH, _MARK = "mup_tpu_", "of-mup_tpu"
# Ray's sockets lie up to 70 characters below the temporary folder, and a socket's path has at most 107.
_LONGEST_PLACE, _SHORT_PLACE = 20, "/tmp"  # noqa: S108 (folders are made there as tempfile does)
_LONGEST_NAME = 255  # bytes of a file's or folder's name, on all of Linux's and macOS's usual file systems


def short_hash(content: bytes | str) -> str:
    """Return the first 16 hex digits of the SHA-256 of bytes, or of a text in UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_names(path: PathLike) -> None:
    """Raise OSError if a part of a path is too long, of which Path.exists is silent since Python 3.14."""
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in Path(path).parts):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), os.fspath(path))


def read_regular(path: PathLike, most: int | None = None) -> bytes:
    """Read a local file of at most some bytes; a named pipe would make a reader wait, a device never end."""
    with open(_open_regular(path, os.O_RDONLY), "rb") as file:
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise OSError(f"it has more than {most:,} bytes")
    return content


def open_own(path: PathLike, root: PathLike | None = None) -> TextIOWrapper:
    """Open a local file to lock or append to; it is created if it is missing, and never emptied.

    Version control keeps links, so a results folder from elsewhere may hold one under a name that we will
    write to: neither the file may be a link, nor a folder between it and `root`, by default its own.
    """
    for folder in Path(path).parents:
        if root is None or folder == Path(root):
            break
        if folder.is_symlink():
            raise OSError(f"its folder {folder.name} is a link")
    descriptor = _open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError("it has another name elsewhere")
    return open(descriptor, "a", encoding="utf-8")


def _open_regular(path: PathLike, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return descriptor


def flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# Temporary files and folders


@contextlib.contextmanager
def partial(target: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a path beside a target, to be renamed to it when all is written; else it is removed."""

    def make() -> Path:
        path = target.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
        path.mkdir() if folder else path.touch(exist_ok=False)
        return path

    with _while_locked(make) as path:
        yield path


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    _remove_scratch()
    with _while_locked(_make_scratch) as path:
        yield path


@contextlib.contextmanager
def _while_locked(make: Callable[[], Path]) -> Iterator[Path]:
    path, lock = _make_and_lock(make)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def folder_of_this_process() -> Path:
    """Make a folder for sockets and files; it outlives this process until the next one starts."""
    _remove_scratch()
    with for_sockets():
        return _make_and_lock(_make_scratch)[0]


@contextlib.contextmanager
def for_sockets() -> Iterator[None]:
    """Put temporary folders into `/tmp` where the default place has too long a path for sockets."""
    before = tempfile.gettempdir()
    if len(before) > _LONGEST_PLACE and os.access(_SHORT_PLACE, os.W_OK):
        tempfile.tempdir = _SHORT_PLACE
    try:
        yield
    finally:
        tempfile.tempdir = before


def mark(folder: Path) -> None:
    """Let the next process remove a temporary folder of the standard library, if this one is killed."""
    _remove_scratch()
    if not (folder / _MARK).exists():
        _lock(folder)
        (folder / _MARK).write_text(_signature(folder))


def remove_partial(folder: Path) -> None:
    """Remove half-written files of this machine's killed processes from a folder and all folders in it."""
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            if _PARTIAL_NAME.fullmatch(name):
                _remove_unless_locked(Path(root, name))
        folders[:] = [name for name in folders if not _PARTIAL_NAME.fullmatch(name)]


def _make_scratch() -> Path:
    path = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    (path / _MARK).write_text(_signature(path))
    return path


def _signature(folder: Path) -> str:
    return f"{folder.resolve()}\n{folder.lstat().st_ino}\n"


def _make_and_lock(make: Callable[[], Path]) -> tuple[Path, int]:
    while True:
        path = make()
        with contextlib.suppress(FileNotFoundError):
            lock = _lock(path)
            if path.exists():
                return path, lock
            os.close(lock)
        # Another process has removed it before it was locked.


def _lock(path: Path) -> int:
    """Lock a file or folder until the returned descriptor is closed, or this process ends."""
    descriptor = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # on a disk without locks nothing is removed later
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


@functools.cache
def _remove_scratch() -> None:
    """Remove temporary folders of this user's killed processes, once a process."""
    for place in {Path(tempfile.gettempdir()), Path(_SHORT_PLACE)}:
        for path in [*place.glob(f"{_SCRATCH}*"), *place.glob("pymp-*")]:
            with contextlib.suppress(OSError, ValueError):  # gone, without a mark, or of another user
                status, mark = path.lstat(), path / _MARK
                is_mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
                if is_mine and stat.S_ISREG(mark.lstat().st_mode) and mark.read_text() == _signature(path):
                    _remove_unless_locked(path)


def _remove_unless_locked(path: Path) -> None:
    with contextlib.suppress(OSError):  # gone meanwhile, locked, or on a disk without locks
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


# Python's path of modules: anybody may have put files into the working folder.


def is_needed(folder: str) -> bool:
    # This package itself may be found there, as in a checkout.
    return os.path.realpath(folder) == str(Path(__file__).resolve().parents[2])


def leave_working_folder() -> None:
    """Take the working folder off this process's path, where `python -m` has put it first."""
    if not sys.flags.safe_path and sys.path and not is_needed(sys.path[0]):
        del sys.path[0]
