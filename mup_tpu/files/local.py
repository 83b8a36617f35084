"""Local files: read, locked and written so that neither pipes, devices nor links get in the way."""

from __future__ import annotations

import hashlib
import os
import stat
from io import TextIOWrapper
from pathlib import Path


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Content of a local file; a named pipe would make a reader wait, and a device would never end.

    Args:
        path: the file, or a link to one.
        most: bytes above which the file is refused.

    Raises:
        OSError: the file cannot be read, is not regular, or has more bytes.
    """
    with open(_regular(path, os.O_RDONLY), "rb") as file:
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise OSError(f"it has more than {most:,} bytes")
    return content


def open_own(path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> TextIOWrapper:
    """Open a local file to lock or append to; it is created if it is missing, and never emptied.

    Version control keeps links, so a results folder from elsewhere may hold one under a name that we will
    write to.

    Args:
        path: the file.
        root: a folder above it; folders between the two may not be links. By default the file's folder.

    Raises:
        OSError: the file cannot be opened, is a link or not regular, or has another name elsewhere.
    """
    for folder in Path(path).parents:
        if root is None or folder == Path(root):
            break
        if folder.is_symlink():
            raise OSError(f"its folder {folder.name} is a link")
    descriptor = _regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError("it has another name elsewhere")
    return open(descriptor, "a", encoding="utf-8")


def _regular(path: str | os.PathLike[str], flags: int) -> int:
    """Descriptor of a regular file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return descriptor


def flush(path: Path) -> None:
    """Wait until a file that was written is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def short_hash(content: bytes | str) -> str:
    """First 16 hex digits of the SHA-256 of bytes, or of a text in UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def checksum(path: Path) -> str:
    """SHA-256 of a local file, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
