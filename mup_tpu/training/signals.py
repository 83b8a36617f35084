"""Signal handlers for the length of a block."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Handler = Callable[[int, Any], object] | signal.Handlers


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
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
