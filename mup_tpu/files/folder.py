"""Folders on a local disk or at an fsspec URL (gs://, s3://, memory://), each file whole or not there.

On a local disk a file appears by a rename, on an object store by one upload. What a bucket's library raises
(HTTP answers, missing credentials) comes out as OSError, as for a disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import fsspec
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem

from mup_tpu.errors import ConfigError, reason
from mup_tpu.files.leftovers import partial, remove_partial, scratch_folder

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Schemes of buckets, each with the extra of this package that reaches them."""

_log = logging.getLogger(__name__)

# It logs a traceback besides raising, which Python prints where nobody has set up logging.
logging.getLogger("gcsfs").addHandler(logging.NullHandler())


def cache_root() -> Path:
    """Folder of the caches (tokens, compiled programs, stores): $MUP_TPU_CACHE, or ~/.cache/mup_tpu.

    Raises:
        ConfigError: the user has no home folder, and the variable is not set.
    """
    if folder := os.environ.get("MUP_TPU_CACHE"):
        return Path(folder)
    try:
        return Path.home() / ".cache" / "mup_tpu"
    except RuntimeError:
        raise ConfigError(
            "MUP_TPU_CACHE is not set, and this user has no home folder; set it to a folder"
        ) from None


class Folder:
    """A folder, there already or not; files in it go by names relative to it, with `/` between parts.

    Args:
        path: local folder, or fsspec URL.

    Raises:
        OSError: the URL is of a kind that is not known, or whose package is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fs, self._root = file_system(os.fspath(path))
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self._is_bucket = _scheme(os.fspath(path)) in _EXTRAS
        self.path: str = self._root if self.is_local else os.fspath(path).rstrip("/")
        """Absolute local path, or the URL: the same folder for every process that is given it."""

    def __str__(self) -> str:
        return self.path

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.path}/{name}")

    def names(self) -> list[str]:
        """Files and folders in this one, sorted; none where it is not there."""
        with self._asking():
            self._fs.invalidate_cache()  # others may have written since
            try:
                paths = self._fs.ls(self._root, detail=False, **self._limit())
            except FileNotFoundError:
                return []
        # Cloud consoles make a folder of a bucket by an empty object `folder/`, which is in its own listing.
        inside = [path.rstrip("/") for path in paths if path.rstrip("/") != self._root]
        return sorted(path.rsplit("/", 1)[-1] for path in inside)

    def require_bucket(self) -> None:
        """Refuse a URL whose bucket is not there, which an empty list of names does not tell.

        Raises:
            OSError: it is not, or does not answer.
        """
        if not self._is_bucket:
            return
        with self._bucket_errors():
            self._fs.invalidate_cache()
            self._fs.ls(self._root.partition("/")[0], detail=False, **self._limit())

    def states(self) -> dict[str, str]:
        """Files in this folder by name, sorted, each with its size and time; none where it is not there."""
        if self.is_local:
            return {name: _state(f"{self._root}/{name}") for name in self.names()}
        with self._asking():
            self._fs.invalidate_cache()  # others may have written since
            try:
                details = self._fs.ls(self._root, detail=True, **self._limit())
            except FileNotFoundError:
                return {}
        files = {d["name"].rsplit("/", 1)[-1]: d for d in details if d["type"] == "file"}
        keys = ("size", "ETag", "etag", "generation", "LastModified", "updated", "created")
        return {n: " ".join(str(d[k]) for k in keys if k in d) for n, d in sorted(files.items()) if n}

    def read(self, name: str, most: int | None = None) -> bytes:
        """The content of a file.

        Args:
            name: of the file.
            most: bytes above which a local file is refused.

        Raises:
            OSError: it is not there, cannot be read, is too large or no regular file, such as a named pipe.
        """
        if self.is_local:
            return read_regular(self._at(name), most)
        with self._asking():
            return bytes(self._fs.cat_file(self._at(name)))

    def size(self, name: str) -> int:
        """Bytes of a file."""
        with self._asking():
            return int(self._fs.size(self._at(name), **self._limit()))

    def write(self, name: str, content: bytes) -> None:
        """Put a file in place, over one that is there; on return it is on disk."""
        if self.is_local:
            with self.writing(name) as path:
                path.write_bytes(content)
            return
        with self._bucket_errors():
            self._make_room(name)
            self._fs.pipe_file(self._at(name), content, **self._limit(len(content)))

    def create(self, name: str, content: bytes) -> None:
        """Write a file that is not there yet; only one of several writers succeeds.

        Raises:
            OSError: it cannot be written, or is there; a service that tries again by itself may say that of a
                file that it wrote.
        """
        if self.is_local:
            self._make_room(name)
            target = Path(self._at(name))
            with partial(target) as made:
                _write_through(made, content)
                try:
                    os.link(made, target)
                except FileExistsError:
                    raise
                except OSError:  # a disk without hard links
                    with target.open("xb") as file:
                        file.write(content)
            return
        with self._bucket_errors():
            self._make_room(name)
            self._fs.pipe_file(self._at(name), content, mode="create", **self._limit(len(content)))

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """A local path to read a file at: its own, or that of a copy, gone when the block ends."""
        if self.is_local:
            yield Path(self._at(name))
            return
        with scratch_folder() as scratch:
            copy = scratch / "file"
            with self._asking():
                self._fs.get_file(self._at(name), str(copy))
            yield copy

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A local path to write a file to, put in place when the block ends; if it raises, nothing is."""
        target = self._at(name)
        if not self.is_local:
            with scratch_folder() as scratch:
                made = scratch / "file"
                yield made
                with self._bucket_errors():
                    self._make_room(name)
                    self._fs.put_file(str(made), target, **self._limit(made.stat().st_size))
            return
        self._make_room(name)
        with partial(Path(target)) as made:
            yield made
            with made.open("rb") as file:
                os.fsync(file.fileno())
            made.replace(target)

    def remove(self, *names: str) -> None:
        """Remove files, or folders with all that is in them; those that are not there are no error."""
        for name in names:
            self._remove(self._at(name))

    def remove_leftovers(self) -> None:
        """Remove what killed processes of this machine left half-written, here and in folders below."""
        if self.is_local:
            remove_partial(Path(self._root))

    def remove_all(self) -> None:
        """Remove this folder with all that is in it."""
        self._remove(self._root)

    def _remove(self, path: str) -> None:
        with self._asking(), contextlib.suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True, **self._limit())

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_room(self, name: str) -> None:
        if self._is_bucket:
            return  # it has no folders, and s3fs would make a bucket of a mistyped name
        self._fs.makedirs(self._at(name).rsplit("/", 1)[0], exist_ok=True)

    def _limit(self, size: int = 0) -> dict[str, float]:
        """Time limit of a transfer from a bucket, as an option of fsspec's methods.

        By itself s3fs waits without end for a service that hangs while it is written to.
        """
        return {"timeout": UNANSWERED_S + size / MIN_RATE} if self._is_bucket else {}

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Errors are OSErrors; that a bucket has been waited for long is said."""
        waits = threading.Timer(
            NOTICE_S, _log.warning, ["%s has not answered for %g s: still waiting", self, NOTICE_S]
        )
        waits.daemon = True
        if self._is_bucket:
            waits.start()
        try:
            with _errors_as_oserror():
                yield
        finally:
            waits.cancel()

    @contextlib.contextmanager
    def _bucket_errors(self) -> Iterator[None]:
        with self._asking():
            try:
                yield
            except FileNotFoundError:
                if not self._is_bucket:
                    raise
                # gcsfs says no more than the address that it asked.
                raise OSError(f"there is no bucket {self._root.partition('/')[0]}") from None


def _state(path: str) -> str:
    """Size, time and inode of a local file: after a change one of them is another."""
    try:
        found = os.stat(path)
    except FileNotFoundError:  # since it was listed
        return ""
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The content of a local file; a named pipe would be waited for, and a device read without end.

    Args:
        path: the file, or a link to one.
        most: bytes above which it is refused.

    Raises:
        OSError: it cannot be read, is no regular file, or has more bytes.
    """
    with open(_regular(path, os.O_RDONLY), "rb") as file:
        content = file.read() if most is None else file.read(most + 1)
    if most is not None and len(content) > most:
        raise OSError(f"it has more than {most:,} bytes")
    return content


def open_own(path: str | os.PathLike[str]) -> TextIO:
    """A local file to lock or append to, made where it is not there; it is neither emptied nor a link.

    Raises:
        OSError: it cannot be opened, or is a link or no regular file.
    """
    return open(_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW), "a", encoding="utf-8")


def _regular(path: str | os.PathLike[str], flags: int) -> int:
    """Descriptor of a regular file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return descriptor


def _write_through(path: Path, content: bytes) -> None:
    """Write a file; on return it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def file_system(url: str, **options: Any) -> tuple[Any, str]:
    """The fsspec file system of a folder or URL, and the path in it.

    Args:
        url: local folder, or fsspec URL.
        options: for the file system.

    Raises:
        OSError: the URL is of a kind that is not known, or whose package is not installed.
    """
    with _errors_as_oserror():
        try:
            if _EXTRAS.get(_scheme(url)) == "gcs":
                from aiohttp import ClientTimeout  # which gcsfs brings

                options = {"requests_timeout": ClientTimeout(sock_connect=10, sock_read=30)} | options
            filesystem, path = fsspec.url_to_fs(url, **options)
            return filesystem, path
        except ImportError as error:
            if (extra := _EXTRAS.get(_scheme(url))) is None:
                raise
            raise OSError(f"{reason(error)}: pip install 'mup_tpu[{extra}]'") from error


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def checksum(path: Path) -> str:
    """SHA-256 of a local file, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def as_oserror(error: Exception) -> OSError:
    """An error of an fsspec file system as a disk would raise it: missing rights are a PermissionError."""
    first, _, rest = str(error).strip().partition("\n")
    if isinstance(error, FSTimeoutError):
        return ConnectionError("no answer in time")
    if _UNREACHABLE.intersection(kind.__name__ for kind in type(error).__mro__):
        return ConnectionError(reason(error))
    if isinstance(error, OSError):
        # gcsfs, of a 403: the address that it asked, and below it what the service says.
        return PermissionError(reason(OSError(rest or first))) if first.startswith("Forbidden: ") else error
    return (PermissionError if getattr(error, "code", None) == 401 else OSError)(reason(error))


_UNREACHABLE = {"ClientConnectionError", "HTTPClientError", "ConnectionError", "TimeoutError"}
"""Names of errors of aiohttp and botocore where nobody answers; neither need be installed."""

NOTICE_S = 15.0
"""Time that a bucket is waited for in silence."""

UNANSWERED_S = 60.0
"""Time limit of a request to a bucket, besides the time of its bytes at MIN_RATE."""

MIN_RATE = 2**16
"""Bytes a second below which a transfer counts as failed."""

PATIENCE_S = 300.0
"""Time that an unreachable service is tried: shorter than the heartbeat of a worker."""


def patiently(act: Callable[[], None]) -> None:
    """Write something, again where the service of a bucket cannot be reached, as while a host has no network.

    Args:
        act: what may be done again, even if it was done and only the answer was lost.

    Raises:
        OSError: it fails in another way, or the service stays away.
    """
    deadline, pause = time.monotonic() + PATIENCE_S, 1.0
    while True:
        try:
            return act()
        except ConnectionError as error:
            if time.monotonic() + pause > deadline:
                raise
            _log.warning("tried again: %s", reason(error))
        time.sleep(pause)
        pause = min(2 * pause, 15.0)


@contextlib.contextmanager
def _errors_as_oserror() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        found = as_oserror(error)
        if found is error:
            raise
        raise found from error
