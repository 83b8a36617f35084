"""Reader of prepared shards: retries, a deadline, and every file checked against the index.

Files may come from anywhere: the result is the tokens of the index, or an error of one sentence. Unpacking
allocates no more than was read: tar files are read plain, and array headers are compared.

Shapes: T tokens.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import random
import tarfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from mup_tpu.data.cache import TOKENIZER_FILE, token_type
from mup_tpu.data.shard_index import INDEX, Shard, ShardIndex
from mup_tpu.data.tokenizer import Tokenizer, load_tokenizer
from mup_tpu.errors import DataError, raised_as, reason
from mup_tpu.files import MIN_RATE, as_oserror, file_system

ATTEMPTS = 10
"""Tries of a read; with their pauses they take about a minute and a half."""

FIRST_PAUSE = 0.25
"""Seconds before the second try; doubled for each further one."""

PATIENCE_S = 30.0
"""Seconds that a server may take beyond the time of a file at MIN_RATE."""

DEADLINE_S = 300.0
"""Seconds after which a read is not tried again."""

_UNSIZED = 2**23
"""Assumed bytes of a file without a size in the index, for its deadline."""

log = logging.getLogger(__name__)


class ShardFolder:
    """A folder or URL of prepared shards, read with retries, every file checked against the index."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = _filesystem(self.url)
        self._unpacking = threading.Lock()
        try:
            self.index = ShardIndex.from_json(self._read(INDEX), f"{self.url}/{INDEX}")
        except FileNotFoundError:
            raise DataError(
                f"{self.url} holds no {INDEX}: it is not (or not yet wholly) prepared; "
                f"write it with: mup-tpu data prepare --out {self.url}"
            ) from None
        content = None
        if self.index.tokenizer_sha256 is not None:
            content = self._checked(TOKENIZER_FILE, self.index.tokenizer_sha256)
        self.tokenizer = self._tokenizer(content)

    def _tokenizer(self, content: bytes | None) -> Tokenizer:
        try:
            tokenizer = load_tokenizer(None if content is None else content.decode(), self.index.separator)
        except Exception as error:  # the library has no class for its errors
            why = str(error).partition("\n")[0]
            raise DataError(f"{self.url}/{TOKENIZER_FILE} is not a tokenizer: {why}") from None
        if tokenizer.vocab_size != self.index.vocab_size:
            raise DataError(
                f"{self.url}/{INDEX} does not fit its shards: vocab_size {self.index.vocab_size}, but the "
                f"tokenizer has {tokenizer.vocab_size} tokens"
            )
        return tokenizer

    def samples(self, shard: Shard) -> np.ndarray:
        """Sequences of a shard (samples_per_shard, T + 1)."""
        index = self.index
        split = index.train if shard in index.train.shards else index.validation
        content = self._checked(shard.name, shard.sha256, shard.size)
        # Unpacking holds the interpreter's lock: several threads are no faster, and would delay training.
        with self._unpacking:
            try:
                return unpack(content, split.samples_per_shard, index.sequence_length + 1, index.vocab_size)
            except ValueError as error:
                raise DataError(
                    f"shard {self.url}/{shard.name} does not match its index: {error}; prepare again"
                ) from None

    def _checked(self, name: str, sha256: str, size: int | None = None) -> bytes:
        """A file with the index's checksum; after a wrong checksum it is read once more."""
        try:
            for _ in range(2):
                content = self._read(name, size)
                found = hashlib.sha256(content).hexdigest()
                if found == sha256 and size in (None, len(content)):
                    return content
        except FileNotFoundError:
            raise DataError(
                f"shard {self.url}/{name} is missing, but the index names it; prepare again"
            ) from None
        told = f"{size} bytes with sha256 {sha256[:12]}" if size else sha256[:12]
        raise DataError(
            f"shard {self.url}/{name} is corrupted: its {len(content)} bytes have sha256 {found[:12]}, the "
            f"index says {told}; copy it again, or prepare again"
        )

    def _read(self, name: str, size: int | None = None) -> bytes:
        """Content of a file; tried again after dropped connections, timeouts and answers such as 503."""
        path = f"{self._root}/{name}"
        if isinstance(self._fs, LocalFileSystem):
            self._check_local(name, size)
        limit = {}
        if getattr(self._fs, "async_impl", False):  # others have limits of their own client
            limit = {"timeout": PATIENCE_S + (size or _UNSIZED) / MIN_RATE}
        began = time.monotonic()
        for attempt in range(ATTEMPTS):
            if attempt:
                # Random pauses: many hosts may have lost the server at once.
                time.sleep(FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1))
            try:
                return self._fs.cat_file(path, **limit)
            except FileNotFoundError:
                raise
            except Exception as error:  # each file system of fsspec raises errors of its client library
                found = as_oserror(error)
                why = reason(found)
                if isinstance(error, fsspec.exceptions.FSTimeoutError):
                    why = f"slower than {MIN_RATE // 2**10} KiB/s"
                if _is_final(found, getattr(error, "status", None)):
                    raise DataError(f"{self.url}/{name} cannot be read: {why}") from None
                log.warning(
                    "reading %s/%s failed, try %d of %d: %s", self.url, name, attempt + 1, ATTEMPTS, why
                )
            if time.monotonic() - began > DEADLINE_S:
                break
        raise DataError(f"{self.url}/{name} cannot be read after {attempt + 1} tries: {why}")

    def _check_local(self, name: str, size: int | None) -> None:
        """Refuse a named pipe, which never ends, and a file of another size, before it is read."""
        path = f"{self._root}/{name}"
        if not os.path.lexists(path):
            raise FileNotFoundError(path)
        if not os.path.isfile(path):
            raise DataError(f"{path} is not a file")
        found = os.path.getsize(path)
        if size not in (None, found):
            raise DataError(
                f"shard {path} is corrupted: its {found} bytes have another size than the index says, "
                f"{size}; copy it again, or prepare again"
            )


def _is_final(error: OSError, status: int | None) -> bool:
    """Whether a further try would meet the same error: a refusal, or an HTTP status that says so."""
    is_refused = status in range(400, 500) and status not in (408, 429)
    return isinstance(error, PermissionError) or is_refused


def unpack(content: bytes, samples: int, length: int, vocab_size: int) -> np.ndarray:
    """Sequences in a tar file (samples, length); no more memory is allocated than `content` has.

    Raises:
        ValueError: the content is no plain tar file of such arrays, or a token is outside the vocabulary.
    """
    kind = token_type(vocab_size)
    head = io.BytesIO()
    told = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(head, told)
    tokens, size = [], length * kind.itemsize
    try:
        for name, start, stop in _members(content):
            # All headers have the same bytes; NumPy would take long to parse each.
            if content[start : stop - size] != head.getvalue():
                _check_header(name, content[start:stop], kind, length)
            tokens.append(content[stop - size : stop])
            if len(tokens) > samples:
                raise ValueError(f"it holds more than {samples} samples")
    except (tarfile.TarError, OSError, OverflowError, UnicodeError) as error:
        raise ValueError(f"it is no plain tar file ({error})") from None
    if len(tokens) < samples:
        raise ValueError(f"it holds {len(tokens)} samples, not {samples}")
    sequences = np.frombuffer(b"".join(tokens), kind).reshape(samples, length)
    if sequences.max() >= vocab_size:
        raise ValueError(f"it holds token {sequences.max()}, outside a vocabulary of {vocab_size}")
    return sequences


def _members(content: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and end of every file in a tar file; ValueError for one that is no plain KEY.npy."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
        for member in tar:
            start, stop = member.offset_data, member.offset_data + member.size
            if not member.isreg() or member.issparse() or not member.name.endswith(".npy"):
                raise ValueError(f"{member.name[:50]!r} in it is no plain file KEY.npy")
            if not start <= stop <= len(content):
                raise ValueError(f"{member.name[:50]!r} in it is cut off")
            yield member.name, start, stop


def _check_header(name: str, content: bytes, kind: np.dtype, length: int) -> None:
    """Check header and token count of an array's bytes; ValueError where they contradict the index."""
    file = io.BytesIO(content)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("another version of the format")
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception as error:  # NumPy parses a header as Python: many kinds of error
        why = str(error).partition("\n")[0][:100]
        raise ValueError(f"{name[:50]!r} in it is no array ({why})") from None
    if (shape, dtype, fortran_order) != ((length,), kind, False):
        raise ValueError(f"{name[:50]!r} in it is {dtype} {shape}, not {kind} {(length,)}"[:300])
    if len(content) - file.tell() != length * kind.itemsize:
        raise ValueError(f"{name[:50]!r} in it has another size than its header says")


def _filesystem(url: str) -> tuple[Any, str]:
    """File system of a folder or URL, and the path in it."""
    options: dict[str, Any] = {}
    with raised_as(DataError, f"{url} cannot be reached", (ImportError, OSError)):
        if url.startswith(("http://", "https://")):
            from aiohttp import ClientTimeout

            # By default a silent connection is kept for five minutes.
            options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=10, sock_read=30)}
        fs, root = file_system(url, **options)
    return fs, root.rstrip("/")
