"""Handler of Ctrl-C during imports: it ends the process at once. This module is imported before all slow
ones.

An import may turn KeyboardInterrupt into a traceback, into another error (numpy, torch), or swallow it.
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
            with contextlib.suppress(Exception):  # the interrupted code may hold the stream
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
