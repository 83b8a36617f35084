"""The process that trains: its log file, and its signal handlers.

Packs log to the logger "mup_tpu". A driver sees no output of workers on other hosts, so each worker keeps a
log, warnings included, in the folder logs of its results.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mup_tpu.config.values import VisibleFormatter
from mup_tpu.errors import reason
from mup_tpu.files import Folder

UPLOAD_EVERY_S = 30.0
_PART_LINES = 1000
_parts = itertools.count()


@contextlib.contextmanager
def host_log(results: str | None, capture_warnings: bool = False) -> Iterator[None]:
    """Keep the log of packs in `logs/HOST-PID.log` of a results folder; None keeps nothing.

    Objects of a bucket cannot grow, so there the log is in parts, `HOST-PID.0.log` and so on. If it cannot be
    kept (a driver's folder that this host may not make), training goes on with a warning. `capture_warnings`
    puts Python's warnings into the log alone. Others go to stderr too if no handler shows them.
    """
    if results is None:
        yield
        return
    name = f"{socket.gethostname()}-{os.getpid()}"
    try:
        folder = Folder(results)
        handler: logging.Handler
        if folder.is_local:
            os.makedirs(f"{folder}/logs", exist_ok=True)
            handler = logging.FileHandler(f"{folder}/logs/{name}.log", encoding="utf-8")
        else:
            handler = _UploadHandler(folder / "logs", name)
    except OSError as error:
        warnings.warn(f"no log is kept: {results}/logs cannot be written: {reason(error)}", stacklevel=3)
        yield
        return
    handler.setFormatter(VisibleFormatter("%(asctime)s %(message)s"))
    logger, shows = logging.getLogger("mup_tpu"), logging.lastResort
    with contextlib.ExitStack() as stack:
        if shows is not None and not logger.handlers:
            logger.addHandler(shows)  # before the handler of the log, which may wait for a bucket
            stack.callback(logger.removeHandler, shows)
        stack.enter_context(attached(handler, "mup_tpu", *(["py.warnings"] if capture_warnings else [])))
        if capture_warnings:
            logging.captureWarnings(True)
            stack.callback(logging.captureWarnings, False)
        yield


@contextlib.contextmanager
def attached(
    handler: logging.Handler, *loggers: str, lost: Callable[[OSError], None] | None = None
) -> Iterator[None]:
    """Send lines of loggers from level INFO on to a handler, which is closed at the end.

    Lines that it cannot write are lost: one message says so, where logging prints a traceback a line, and
    `lost` gets the first error.
    """
    reported = False

    def report(record: logging.LogRecord) -> None:
        nonlocal reported
        error = sys.exc_info()[1]
        if reported or error is None:
            return
        reported = True
        with contextlib.suppress(OSError):
            print(f"warning: lines of the log are lost: {reason(error)}", file=sys.stderr)
        if lost is not None and isinstance(error, OSError):
            lost(error)

    handler.handleError = report  # type: ignore[method-assign]
    attached_to = [logging.getLogger(name) for name in loggers]
    before = [(logger.level, logger.propagate) for logger in attached_to]
    for logger in attached_to:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a handler at the root logger would repeat all lines
    try:
        yield
    finally:
        for logger, (level, propagates) in zip(attached_to, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagates
        with contextlib.suppress(OSError):  # lines that could not be written still cannot
            handler.close()


class _UploadHandler(logging.Handler):
    """Handler that uploads the newest lines every half minute, and the rest when it is closed.

    Training does not wait for an upload: a bucket may take minutes to refuse one.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        super().__init__()
        self._folder, self._name, self._lines = folder, name, list[str]()
        self._part, self._uploaded_at = next(_parts), time.monotonic()
        self._upload = threading.Thread()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{self.format(record)}\n")
        is_full = len(self._lines) >= _PART_LINES
        is_due = is_full or time.monotonic() - self._uploaded_at > UPLOAD_EVERY_S
        if is_due and not self._upload.is_alive():
            self._begin_upload()
            if is_full:
                self._part, self._lines = next(_parts), []

    def close(self) -> None:
        if self._upload.is_alive():
            self._upload.join()
        if self._lines:
            self._begin_upload()
            self._upload.join()
        super().close()

    def _begin_upload(self) -> None:
        self._uploaded_at = time.monotonic()
        name, content = f"{self._name}.{self._part}.log", "".join(self._lines).encode()

        def upload() -> None:
            try:
                self._folder.write(name, content)
            except OSError:
                self.handleError(logging.makeLogRecord({}))  # training goes on without its log

        self._upload = threading.Thread(target=upload, daemon=True)
        self._upload.start()


@contextlib.contextmanager
def handling(
    handlers: Mapping[signal.Signals, Callable[[int, Any], object] | signal.Handlers],
) -> Iterator[None]:
    """Handle signals in the block, and restore the earlier handlers after it.

    Python hands signals to its main thread only: in another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
