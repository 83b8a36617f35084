"""A real HTTP server for a folder, as slow and as faulty as it is told to be."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

_PIECE = 2**16

_TRICKLE_S = 0.1
"""Seconds between two bytes of a trickle."""

Fault = Literal["503", "drop", "trickle", ""]


class SlowServer(ThreadingHTTPServer):
    """Serves a folder on a free port of this machine.

    Args:
        folder: what to serve.
        latency: seconds before each answer.
        bandwidth: bytes a second that all answers share; 0 does not limit.
        fault: what goes wrong for a file's name and the number of times it was asked for before: "503" is
            that answer, "drop" closes the connection in the middle of the file, "trickle" sends a byte now
            and then.
    """

    daemon_threads = True

    def __init__(
        self,
        folder: Path,
        latency: float = 0.0,
        bandwidth: float = 0.0,
        fault: Callable[[str, int], Fault] = lambda name, before: "",
    ) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.latency, self.bandwidth, self.fault = latency, bandwidth, fault
        self.asked: Counter[str] = Counter()
        """Times each file was asked for."""
        self._line = threading.Lock()
        self._free_at = 0.0

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait_for_line(self, count: int) -> None:
        """Sleep for as long as these bytes take on a line that all answers share."""
        if not self.bandwidth:
            return
        with self._line:
            self._free_at = max(self._free_at, time.monotonic()) + count / self.bandwidth
            ends = self._free_at
        time.sleep(max(0.0, ends - time.monotonic()))

    @contextmanager
    def running(self) -> Iterator[SlowServer]:
        """Answer until the context is left."""
        thread = threading.Thread(target=self.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Handler(SimpleHTTPRequestHandler):
    server: SlowServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        before = self.server.asked[name]
        self.server.asked[name] += 1
        time.sleep(self.server.latency)
        fault = self.server.fault(name, before)
        if fault == "503":
            self.send_error(503)
            return
        file = Path(self.translate_path(self.path))
        if not file.is_file():
            self.send_error(404)
            return
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault == "drop":
            content = content[: len(content) // 2]
            self.close_connection = True
        size = 1 if fault == "trickle" else _PIECE
        for start in range(0, len(content), size):
            piece = content[start : start + size]
            self.server.wait_for_line(len(piece))
            try:
                self.wfile.write(piece)
            except ConnectionError:  # whoever asked gave up
                self.close_connection = True
                return
            if fault == "trickle":
                time.sleep(_TRICKLE_S)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""
