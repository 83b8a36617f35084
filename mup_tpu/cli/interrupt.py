"""Ctrl-C in the middle of an import ends the process at once; imported before all that takes long to import.

As an exception it comes out of an import as that pleases: before the command has begun as a traceback, and
out of numpy's or torch's as another error, or not at all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            with contextlib.suppress(Exception):  # whatever it has come in the middle of
                sys.stdout.flush()
                os.write(2, b"stopped\n")
            os._exit(130)
        frame = frame.f_back
    signal.default_int_handler(number, frame)


if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _interrupt)
