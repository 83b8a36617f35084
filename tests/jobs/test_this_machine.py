"""Server that processes are forked from: deaths of it while it starts."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from mup_tpu.errors import ConfigError
from mup_tpu.jobs import this_machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes as Linux shows them")


def servers() -> Iterator[psutil.Process]:
    """Servers that this process has started."""
    for child in psutil.Process().children():
        if child.status() != psutil.STATUS_ZOMBIE and "forkserver" in " ".join(child.cmdline()):
            yield child


def test_a_server_that_is_killed_while_it_starts_is_started_again():
    this_machine.ensure_server(this_machine.PACK_MODULES)
    (server,) = servers()
    server.send_signal(signal.SIGSTOP)  # it forks nothing before it is killed
    threading.Timer(0.5, server.kill).start()
    process = this_machine.start_process(os._exit, (7,))
    process.join(60)
    assert process.exitcode == 7
    assert server not in list(servers())


def test_a_server_that_dies_at_each_start_is_one_sentence():
    ended = threading.Event()

    def kill_all():
        while not ended.wait(0.05):
            with contextlib.suppress(psutil.Error):  # it is dead already
                for server in servers():
                    server.kill()

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        time.sleep(0.5)  # an earlier server is dead by now
        with pytest.raises(ConfigError, match=r"forked from died at each of 3 starts \(.*is memory short"):
            this_machine.start_process(os._exit, (7,))
    finally:
        ended.set()
        killer.join()


LONG_PLACE = """
import os
from mup_tpu.jobs.this_machine import start_process
process = start_process(os._exit, (7,), ())
process.join(60)
print(process.exitcode)
"""


def test_a_long_path_of_temporary_files_does_not_keep_processes_from_starting(tmp_path):
    """A socket's path has at most 107 characters."""
    long = tmp_path / ("temporary-" + "x" * 60)
    long.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LONG_PLACE],
        env={**os.environ, "TMPDIR": str(long)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "7", done.stderr
