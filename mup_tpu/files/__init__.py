"""Folders on a local disk or at an fsspec URL (gs://, s3://, memory://), each file whole or missing.

On a local disk a file appears by a rename, on an object store by one upload. Errors of a bucket's library
(HTTP answers, missing credentials) become OSErrors, as for a disk.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from mup_tpu.errors import ConfigError, StoreError, raised_as, reason

__all__ = [
    "MOST_BYTES", "MOST_BYTES_OF_CONFIG", "Folder", "bounded", "cache_root",
    "checksum", "near", "patiently", "read_local", "require_seal", "require_size", "sealed",
    "short_hash",
]  # fmt: skip

NOTICE_S = 15.0  # seconds without an answer of a bucket before a warning
UNANSWERED_S = 60.0  # seconds that a request may take beyond the time of its bytes at MIN_RATE
MIN_RATE = 2**16  # bytes per second below which a transfer counts as failed
PATIENCE_S = 300.0  # seconds of tries of an unreachable service, shorter than the heartbeat of a worker

_BUCKETS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Schemes of buckets, each with the extra of this package that reaches them."""

# Errors by name, since none of their packages need be installed: no answer (aiohttp, botocore); missing or
# expired credentials (botocore, google.auth).
_UNREACHABLE = {"ClientConnectionError", "HTTPClientError", "ConnectionError", "TimeoutError"}
_NOT_ALLOWED = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "SSOError", "TokenRetrievalError",
    "DefaultCredentialsError", "RefreshError",
}  # fmt: skip

_log = logging.getLogger(__name__)
# gcsfs logs a traceback besides raising, and Python prints it unless logging is set up.
logging.getLogger("gcsfs").addHandler(logging.NullHandler())


def cache_root() -> Path:
    """Return the folder of the caches (tokens, compiled programs): $MUP_TPU_CACHE, or ~/.cache/mup_tpu."""
    if folder := os.environ.get("MUP_TPU_CACHE"):
        return Path(folder)
    try:
        return Path.home() / ".cache" / "mup_tpu"
    except RuntimeError:
        raise ConfigError(
            "MUP_TPU_CACHE is not set, and this user has no home folder; set it to a folder"
        ) from None


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a local folder or fsspec URL, and the path in it."""
    import fsspec  # takes a tenth of a second, and local folders do not need it

    extra, options = _BUCKETS.get(url.partition("://")[0]), dict[str, Any]()
    with _errors_as_oserror():
        try:
            if extra == "gcs" or url.startswith(("http://", "https://")):
                from aiohttp import ClientTimeout  # comes with gcsfs, and with fsspec's client of HTTP

                # By default a silent connection is kept for five minutes.
                limit = ClientTimeout(total=None, sock_connect=10, sock_read=30)
                options = {"requests_timeout": limit} if extra else {"client_kwargs": {"timeout": limit}}
            filesystem, path = fsspec.url_to_fs(url, **options)
            return filesystem, path
        except ImportError as error:
            if extra is None:
                raise
            raise OSError(f"{reason(error)}: pip install '.[{extra}]'") from error


def as_oserror(error: Exception) -> OSError:
    """Return an error of an fsspec file system as a disk would raise it.

    Missing rights and credentials are a PermissionError, and no answer is a ConnectionError.
    """
    first, _, rest = str(error).strip().partition("\n")
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "FSTimeoutError" in kinds:
        return ConnectionError("no answer in time")
    if kinds & _UNREACHABLE:
        return ConnectionError(reason(error))
    if isinstance(error, OSError):
        # Text of gcsfs for a 403: the address on the first line, the service's reason below.
        return PermissionError(reason(OSError(rest or first))) if first.startswith("Forbidden: ") else error
    # Most HTTP answers from 400 to 499 stay the same when the request is tried again.
    status = getattr(error, "status", None)
    is_refused = status in range(400, 500) and status not in (408, 429)
    is_refused |= bool(kinds & _NOT_ALLOWED) or getattr(error, "code", None) == 401
    return (PermissionError if is_refused else OSError)(reason(error))


@contextlib.contextmanager
def _errors_as_oserror() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        translated = as_oserror(error)
        if translated is error:
            raise
        raise translated from error


def patiently(act: Callable[[], None]) -> None:
    """Call a function that writes; try again while a bucket's service cannot be reached.

    It may run twice, even if the first call succeeded and only its answer was lost.
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


class Folder:
    """A local folder or fsspec URL, which need not exist. Names of files are relative, with `/` in them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fspath(path)
        scheme, is_url, rest = text.partition("://")
        self.is_local = not is_url or scheme in ("file", "local")
        self._is_bucket = scheme in _BUCKETS
        self._fs: Any = None
        if self.is_local:
            self._root = str(Path(os.path.expanduser(rest or text)).absolute())
        else:
            self._fs, self._root = file_system(text)
        self.path: str = self._root if self.is_local else text.rstrip("/")
        """Absolute local path, or the URL: it names the same folder in every process."""

    def __str__(self) -> str:
        return self.path

    def __truediv__(self, name: str) -> Folder:
        inner = copy.copy(self)  # parsing the path again would take a hundredth of an empty trial
        inner._root, inner.path = f"{self._root}/{name}", f"{self.path}/{name}"
        return inner

    def names(self) -> list[str]:
        """Return the sorted names of files and folders in this one; none if it is missing."""
        if self.is_local:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return sorted(os.listdir(self._root))
            return []
        # Cloud consoles make a folder of a bucket by an empty object `folder/`, which is in its own listing.
        inside = [path.rstrip("/") for path in self._list(False) if path.rstrip("/") != self._root]
        return sorted(path.rsplit("/", 1)[-1] for path in inside)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file in this folder, by sorted name; none if it is missing."""
        if not self.is_local:
            files = [entry for entry in self._list(True) if entry["type"] == "file"]
            sizes = {entry["name"].rsplit("/", 1)[-1]: int(entry["size"]) for entry in files}
            return {name: sizes[name] for name in sorted(sizes) if name}
        sizes = {}
        for name in self.names():
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                sizes[name] = os.stat(self._at(name)).st_size
        return sizes

    def _list(self, detail: bool) -> list[Any]:
        with self._request():
            self._fs.invalidate_cache()  # others may have written since
            try:
                return list(self._fs.ls(self._root, detail=detail, **self._limit()))
            except FileNotFoundError:
                return []

    def require_bucket(self) -> None:
        if self._is_bucket:
            with self._request(missing_bucket=True):
                self._fs.invalidate_cache()
                self._fs.ls(self._root.partition("/")[0], detail=False, **self._limit())

    def read(self, name: str, most: int | None = None, size: int | None = None) -> bytes:
        """Read a file of at most some bytes; with `size`, about its bytes, a server's time is limited."""
        if self.is_local:
            return read_local(self._no_pipe(name), most)
        with self._request():
            limit = {} if size is None else self._limit(size)
            content = bytes(self._fs.cat_file(self._at(name), **limit))
        require_size(len(content), most)
        return content

    def size(self, name: str) -> int:
        if self.is_local:
            return os.stat(self._at(name)).st_size
        with self._request():
            return int(self._fs.size(self._at(name), **self._limit()))

    def write(self, name: str, content: bytes, flushed: bool = True) -> None:
        """Put a file in place of an earlier one. If `flushed`, the file is on disk when the call returns."""
        if not self.is_local:
            return self._upload(name, content)
        with self.writing(name, flushed) as path:
            path.write_bytes(content)

    def create(self, name: str, content: bytes) -> None:
        """Write a new file; only one of several writers succeeds.

        Raises:
            OSError: the file cannot be written, or exists. A service that tries again by itself may say so
                of a file that it wrote.
        """
        if not self.is_local:
            return self._upload(name, content, mode="create")
        self._make_room(name)
        target = Path(self._at(name))
        with partial(target) as path:
            path.write_bytes(content)
            flush(path)
            try:
                os.link(path, target)
            except FileExistsError:
                raise
            except OSError:  # a disk without hard links
                with target.open("xb") as file:
                    file.write(content)
                flush(target)
        _flush_names(target.parent)

    def _upload(self, name: str, content: bytes, **options: Any) -> None:
        with self._request(missing_bucket=True):
            self._make_room(name)
            self._fs.pipe_file(self._at(name), content, **options, **self._limit(len(content)))

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """Yield a local path to read a file at: its own, or a copy's for the length of the block."""
        if self.is_local:
            yield Path(self._no_pipe(name))
            return
        with scratch_folder() as scratch:
            with self._request():
                self._fs.get_file(self._at(name), str(scratch / "file"))
            yield scratch / "file"

    @contextlib.contextmanager
    def writing(self, name: str, flushed: bool = True) -> Iterator[Path]:
        """Yield a local path to write to; the file gets its name when the block ends without an error.

        A device or a pipe, such as /dev/null and /dev/stdout, is written, never replaced.
        """
        target = self._at(name)
        if self.is_local:
            self._make_room(name)
            is_open_file = os.path.islink(target) and os.readlink(target).startswith("/proc/")
            if is_open_file or (os.path.exists(target) and not os.path.isfile(target)):
                yield Path(target)
                return
            with partial(Path(target)) as path:
                yield path
                if flushed:
                    flush(path)
                path.replace(target)
            if flushed:
                _flush_names(Path(target).parent)
            return
        with scratch_folder() as scratch:
            path = scratch / "file"
            yield path
            with self._request(missing_bucket=True):
                self._make_room(name)
                self._fs.put_file(str(path), target, **self._limit(path.stat().st_size))

    def remove(self, *names: str) -> None:
        for name in names:
            path = self._at(name)
            with contextlib.suppress(FileNotFoundError):
                if not self.is_local:
                    with self._request():
                        self._fs.rm(path, recursive=True, **self._limit())
                elif os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                else:
                    os.unlink(path)

    def copy(self, name: str, new: str) -> None:
        """Copy a folder within this one; a local copy gets its name once it is whole.

        Links stay links, whether their targets exist or not; pipes, sockets and devices are left out.
        """
        if not self.is_local:
            with self._request():
                self._fs.copy(self._at(name), self._at(new), recursive=True, **self._limit())
            return
        with partial(Path(self._at(new)), folder=True) as path:
            shutil.copytree(self._at(name), path, symlinks=True, ignore=_special, dirs_exist_ok=True)
            shutil.rmtree(self._at(new), ignore_errors=True)
            path.rename(self._at(new))

    def append_to(self, name: str) -> TextIOWrapper:
        self._make_room(name)
        return open(self._at(name), "a+", encoding="utf-8")

    @contextlib.contextmanager
    def locked(self, name: str, busy: str = "") -> Iterator[None]:
        """Hold a lock that one process has at a time, however that ends; a bucket has none.

        `busy` is the error if another process holds it; without one, wait for it. Where a network disk has no
        `flock`, the file itself is the lock, and that of a killed process is broken.
        """
        if not self.is_local:
            yield
            return
        from filelock import FileLock, Timeout  # takes a tenth of a second, and an analysis does not need it

        with raised_as(StoreError, f"{self}/{name} cannot be locked", (OSError, NotImplementedError)):
            self._make_room(name)
            lock = FileLock(self._at(name))
            try:
                lock.acquire(timeout=0 if busy else -1)
            except Timeout:
                raise StoreError(busy) from None
        try:
            yield
        finally:
            lock.release()

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _no_pipe(self, name: str) -> str:
        if stat.S_ISFIFO(os.stat(self._at(name)).st_mode):
            raise OSError("it is a pipe, from which nothing may ever come")
        return self._at(name)

    def _make_room(self, name: str) -> None:
        folder = self._at(name).rpartition("/")[0]
        if self.is_local:
            os.makedirs(folder, exist_ok=True)
        elif not self._is_bucket:  # a bucket has no folders; s3fs would create a bucket of a mistyped name
            self._fs.makedirs(folder, exist_ok=True)

    def _limit(self, size: int = 0) -> dict[str, float]:
        # s3fs would wait without end. Clients of other file systems limit their requests.
        is_async = getattr(self._fs, "async_impl", False)
        return {"timeout": UNANSWERED_S + size / MIN_RATE} if is_async else {}

    @contextlib.contextmanager
    def _request(self, missing_bucket: bool = False) -> Iterator[None]:
        """Raise errors as OSErrors, and warn if a bucket does not answer for long.

        With `missing_bucket` nothing but the bucket can be missing: gcsfs names the address alone.
        """
        message = "%s has not answered for %g s: still waiting"
        timer = threading.Timer(NOTICE_S, _log.warning, [message, self, NOTICE_S])
        timer.daemon = True
        if self._is_bucket:
            timer.start()
        try:
            with _errors_as_oserror():
                yield
        except FileNotFoundError:
            if missing_bucket and self._is_bucket:
                raise OSError(f"there is no bucket {self._root.partition('/')[0]}") from None
            raise
        finally:
            timer.cancel()


def _special(folder: str, names: list[str]) -> list[str]:
    modes = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    return [
        n for n, mode in modes.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
    ]


def _flush_names(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some network disks refuse it
        flush(folder)


def short_hash(content: bytes | str) -> str:
    """Return the first 16 hex digits of the SHA-256 of bytes, or of a text in UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def sealed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with the checksum of its content, which `require_seal` compares."""
    content = {k: v for k, v in entry.items() if k != "checksum"}
    return {**content, "checksum": short_hash(json.dumps(content, sort_keys=True))}


def require_seal(entry: Any, what: str) -> None:
    """Raise ValueError if an entry was changed after it was sealed."""
    if not isinstance(entry, dict) or "checksum" not in entry:
        raise ValueError(f"{what} has no checksum")
    if entry["checksum"] != sealed(entry)["checksum"]:
        raise ValueError(f"{what} was changed later")


def near(path: str) -> str:
    return os.path.relpath(path) if os.path.isabs(path) and Path(path).is_relative_to(os.getcwd()) else path


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Most bytes of a user's file, unpacked: every reader then ends within about a minute, in a few GB of memory.
MOST_BYTES = 2**27
MOST_BYTES_OF_CONFIG = 2**20  # YAML and TOML are parsed at 100 kB a second


def read_local(path: str | os.PathLike[str], most: int | None = MOST_BYTES) -> bytes:
    with open(path, "rb") as file:
        return bounded(file, most)


def bounded(file: IO[bytes], most: int | None = MOST_BYTES) -> bytes:
    """Read a file to its end, unless it is endless or a bomb; raise OSError if it has too many bytes."""
    content = file.read() if most is None else file.read(most + 1)
    require_size(len(content), most)
    return content


def require_size(size: float, most: int | None = MOST_BYTES) -> None:
    if most is not None and size > most:
        raise OSError(f"it has more than {most:,} bytes unpacked, the most that is read")


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def partial(target: Path, folder: bool = False) -> Iterator[Path]:
    """Yield a path beside a target; it is renamed to the target, or removed if the block fails."""
    path = target.with_name(f".partial-{uuid.uuid4().hex}")
    path.mkdir() if folder else path.touch(exist_ok=False)
    try:
        yield path
    finally:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mup_tpu_", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
