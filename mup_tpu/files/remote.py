"""File systems of fsspec, and their errors as OSErrors."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
from fsspec.exceptions import FSTimeoutError

from mup_tpu.errors import reason

BUCKETS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Schemes of buckets, each with the extra of this package that reaches them."""

PATIENCE_S = 300.0
"""Time limit for tries of an unreachable service: shorter than the heartbeat of a worker."""

_UNREACHABLE = {"ClientConnectionError", "HTTPClientError", "ConnectionError", "TimeoutError"}
"""Errors of aiohttp and botocore that mean no answer, by name: neither package need be installed."""

_NOT_ALLOWED = {
    *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "SSOError", "TokenRetrievalError"),
    *("DefaultCredentialsError", "RefreshError"),
}
"""Errors of botocore, then of google.auth, that mean missing or expired credentials, by name."""

_log = logging.getLogger(__name__)

# gcsfs logs a traceback besides raising, and Python prints it unless logging is set up.
logging.getLogger("gcsfs").addHandler(logging.NullHandler())


def scheme(url: str) -> str:
    """Scheme of a URL; the whole text of a path without one."""
    return url.partition("://")[0]


def file_system(url: str, **options: Any) -> tuple[Any, str]:
    """The fsspec file system of a local folder or fsspec URL, and the path in it.

    Raises:
        OSError: the URL is of an unknown kind, or its package is not installed.
    """
    with errors_as_oserror():
        try:
            if BUCKETS.get(scheme(url)) == "gcs":
                from aiohttp import ClientTimeout  # comes with gcsfs

                options = {"requests_timeout": ClientTimeout(sock_connect=10, sock_read=30)} | options
            filesystem, path = fsspec.url_to_fs(url, **options)
            return filesystem, path
        except ImportError as error:
            if (extra := BUCKETS.get(scheme(url))) is None:
                raise
            raise OSError(f"{reason(error)}: pip install '.[{extra}]'") from error


def as_oserror(error: Exception) -> OSError:
    """An error of an fsspec file system as a disk would raise it: missing rights and credentials are a
    PermissionError.
    """
    first, _, rest = str(error).strip().partition("\n")
    if isinstance(error, FSTimeoutError):
        return ConnectionError("no answer in time")
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & _UNREACHABLE:
        return ConnectionError(reason(error))
    if isinstance(error, OSError):
        # Text of gcsfs for a 403: the address on the first line, the service's reason below.
        return PermissionError(reason(OSError(rest or first))) if first.startswith("Forbidden: ") else error
    is_refused = kinds & _NOT_ALLOWED or getattr(error, "code", None) == 401
    return (PermissionError if is_refused else OSError)(reason(error))


@contextlib.contextmanager
def errors_as_oserror() -> Iterator[None]:
    """Raise errors of a file system as `as_oserror` gives them."""
    try:
        yield
    except Exception as error:
        found = as_oserror(error)
        if found is error:
            raise
        raise found from error


def patiently(act: Callable[[], None]) -> None:
    """Call a function that writes; try again while a bucket's service cannot be reached.

    Args:
        act: may run twice, even if the first call succeeded and only its answer was lost.

    Raises:
        OSError: another error, or the service stays away.
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
